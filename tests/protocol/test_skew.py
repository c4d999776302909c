"""Peers of the protocol version before this one, by what its own code wrote (tests/support/record_protocol.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import pytest
from msgspec import inspect

from protocol import messages
from protocol.errors import ProtocolError
from protocol.messages import PROTOCOL_VERSION
from protocol.skew import CHANGED, NEWER_FIELDS, PROTOCOL_VERSION_MIN, check_version, encode_for
from tests.support.record_protocol import UNIONS, name_of, sample_of, structs_in

RECORDED: Final = json.loads((Path(__file__).parent / "recorded" / f"protocol-{PROTOCOL_VERSION_MIN}.json").read_text())
DECODERS: Final = {"admin": messages.decode_admin, "worker": messages.decode_worker}
SENT: Final = ("gateway", "coordinator")


def older_fields(role: str, kind: type) -> list[str] | None:
    """The fields of a struct in the older version; None: it has no such struct."""
    names = RECORDED["structs"][role].get(name_of(kind))
    return None if names is None else names.split()


def extends(newer: Any, older: Any) -> bool:
    """Whether `newer` is `older` with further elements at the end of some arrays."""
    if not isinstance(newer, list) or not isinstance(older, list):
        return bool(newer == older)
    return len(newer) >= len(older) and all(map(extends, newer, older))


def test_recorded_version_is_the_one_before() -> None:
    assert RECORDED["protocol"] == PROTOCOL_VERSION_MIN == PROTOCOL_VERSION - 1


@pytest.mark.parametrize("role", DECODERS)
def test_messages_of_older_peers_are_read_whole(role: str) -> None:
    for frame in map(bytes.fromhex, RECORDED["frames"][role].values()):
        message = DECODERS[role](frame)
        assert extends(msgspec.msgpack.decode(messages.encode(message)), msgspec.msgpack.decode(frame))


def test_older_clients_are_sent_what_their_coordinator_would_send() -> None:
    """Byte for byte, of messages with a value in each field, in those of this version too."""
    kinds = {name_of(kind): kind for kind in get_args(messages.GatewayMessage)}
    for name, frame in RECORDED["frames"]["gateway"].items():
        message = sample_of(inspect.type_info(kinds[name]))
        assert encode_for(message, PROTOCOL_VERSION_MIN).hex() == frame, name
        assert encode_for(message, PROTOCOL_VERSION) == messages.encode(message)


def test_older_workers_are_sent_what_their_coordinator_would_send() -> None:
    kinds = {name_of(kind): kind for kind in get_args(messages.CoordinatorMessage)}
    assert kinds.keys() == RECORDED["frames"]["coordinator"].keys()
    for name, frame in RECORDED["frames"]["coordinator"].items():
        message = sample_of(inspect.type_info(kinds[name]))
        assert encode_for(message, PROTOCOL_VERSION_MIN).hex() == frame, name
        assert encode_for(message, PROTOCOL_VERSION) == messages.encode(message)


@pytest.mark.parametrize("role", sorted(UNIONS))
def test_fields_are_added_at_the_end_with_defaults(role: str) -> None:
    """An older peer does not send them. What a coordinator sends of them is in NEWER_FIELDS."""
    for kind, info in structs_in(UNIONS[role]).items():
        older, names = older_fields(role, kind), [field.name for field in info.fields]
        if older is None:
            continue
        assert names[: len(older)] == older, f"{name_of(kind)}: raise PROTOCOL_VERSION, and serve only equal versions"
        assert not any(field.required for field in info.fields[len(older) :]), f"{name_of(kind)}: give it a default"
        if role in SENT:
            added = len(names) - len(older)
            assert NEWER_FIELDS.get(kind, 0) == added, f"{name_of(kind)}: list its {added} new fields in NEWER_FIELDS"


def test_all_messages_with_newer_fields_are_changed_for_older_peers() -> None:
    kinds = [kind for role in SENT for kind in get_args(UNIONS[role])]
    assert {kind for kind in kinds if structs_in(kind).keys() & NEWER_FIELDS.keys()} == CHANGED


@pytest.mark.parametrize("kind", NEWER_FIELDS)
def test_no_struct_with_newer_fields_contains_another(kind: type[msgspec.Struct]) -> None:
    """They are cut at their end alone."""
    assert structs_in(kind).keys() & NEWER_FIELDS.keys() == {kind}


@pytest.mark.parametrize("version", [PROTOCOL_VERSION_MIN, PROTOCOL_VERSION])
def test_this_version_and_the_one_before_are_served(version: int) -> None:
    check_version(version)


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        (PROTOCOL_VERSION_MIN - 1, "one minor version before"),
        (0, "one minor version before"),
        (PROTOCOL_VERSION + 1, "upgrade the coordinator first"),
    ],
)
def test_other_versions_are_refused_by_name(version: int, remedy: str) -> None:
    with pytest.raises(ProtocolError, match=f"speaks protocol {PROTOCOL_VERSION}, and 6 to older peers") as caught:
        check_version(version)
    assert (caught.value.field, caught.value.value) == ("protocol", str(version))
    assert remedy in caught.value.remedy
