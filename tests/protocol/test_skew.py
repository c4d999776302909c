"""Peers of the protocol version before this one: the rules, and a pair of versions made for these tests."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, get_args

import msgspec
import pytest
from msgspec import NODEFAULT, inspect

from protocol import messages, skew
from protocol.errors import ProtocolError
from protocol.messages import PROTOCOL_VERSION, Message, Part
from protocol.skew import check_version, encode_for
from tests.support import version_before
from tests.support.version_before import BEFORE, serve_version_before
from tests.support.wire_samples import UNIONS, sample_of, structs_in

DECODERS: Final = MappingProxyType({"admin": messages.decode_admin, "worker": messages.decode_worker})
SENT: Final = ("gateway", "coordinator")
#: What is served now, and a version before with fields that are taken to be newer.
SERVED: Final = (
    pytest.param(skew.NEWER_FIELDS, skew.CHANGED, id="now"),
    pytest.param(version_before.NEWER_FIELDS, version_before.CHANGED, id="with a version before"),
)


class Row(Part, frozen=True):
    name: str
    added: int = 0
    named: str = ""


class Rows(Message, frozen=True, tag="rows"):
    tag: int
    rows: tuple[Row, ...]
    one: Row


class Over(Message, frozen=True, tag="over"):
    tag: int
    added: bytes = b""


class OlderRow(Part, frozen=True):
    name: str


class OlderRows(Message, frozen=True, tag="rows"):
    tag: int
    rows: tuple[OlderRow, ...]
    one: OlderRow


class OlderOver(Message, frozen=True, tag="over"):
    tag: int


@pytest.mark.parametrize(
    ("newer", "older"),
    [
        (Over(1, b"x"), OlderOver(1)),
        (
            Rows(2, (Row("a", 3, "b"), Row("c")), Row("d", 4)),
            OlderRows(2, (OlderRow("a"), OlderRow("c")), OlderRow("d")),
        ),
        (Rows(2, (), Row("d")), OlderRows(2, (), OlderRow("d"))),
    ],
)
def test_older_peers_are_sent_what_their_coordinator_would_send(
    newer: Any, older: Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_version_before(monkeypatch)
    monkeypatch.setattr(skew, "NEWER_FIELDS", {Row: 2, Over: 1})
    monkeypatch.setattr(skew, "CHANGED", frozenset({Rows, Over}))
    assert encode_for(newer, BEFORE) == messages.encode(older)
    assert encode_for(newer, PROTOCOL_VERSION) == messages.encode(newer)


@pytest.mark.parametrize("role", SENT)
def test_older_peers_are_sent_every_message_up_to_its_newer_fields(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a value in each field, in those of this version too."""
    serve_version_before(monkeypatch)
    for kind in get_args(UNIONS[role]):
        message = sample_of(inspect.type_info(kind))
        older, newer = (msgspec.msgpack.decode(encode_for(message, it)) for it in (BEFORE, PROTOCOL_VERSION))
        assert (older != newer) == (kind in version_before.CHANGED)
        assert is_beginning(older, newer)


def is_beginning(older: Any, newer: Any) -> bool:
    """Whether arrays of `newer` have those of `older` at their beginnings."""
    if not isinstance(newer, list) or not isinstance(older, list):
        return bool(newer == older)
    return len(newer) >= len(older) and all(map(is_beginning, older, newer))


@pytest.mark.parametrize("role", DECODERS)
def test_message_of_a_peer_without_the_last_fields_is_read(role: str) -> None:
    """An older peer does not send a field that was added since, which has a default."""
    for kind in get_args(UNIONS[role]):
        info = structs_in(kind)[kind]
        array = msgspec.msgpack.decode(messages.encode(sample_of(inspect.type_info(kind))))
        for field in reversed(info.fields):
            if field.required:
                break
            array.pop()
            default = field.default if field.default is not NODEFAULT else field.default_factory()
            assert getattr(DECODERS[role](msgspec.msgpack.encode(array)), field.name) == default


@pytest.mark.parametrize(("newer_fields", "changed"), SERVED)
def test_newer_fields_have_defaults_in_structs_that_contain_no_other(
    newer_fields: Mapping[type[msgspec.Struct], int], changed: frozenset[type[msgspec.Struct]]
) -> None:
    """They are cut at the end alone, and every message that contains such a struct is changed for older peers."""
    for kind, count in newer_fields.items():
        assert not any(field.required for field in structs_in(kind)[kind].fields[-count:]), kind
        assert structs_in(kind).keys() & newer_fields.keys() == {kind}
    kinds = [kind for role in SENT for kind in get_args(UNIONS[role])]
    assert {kind for kind in kinds if structs_in(kind).keys() & newer_fields.keys()} == changed


def test_this_version_and_the_one_before_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    check_version(PROTOCOL_VERSION)
    serve_version_before(monkeypatch)
    check_version(PROTOCOL_VERSION)
    check_version(BEFORE)


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        (BEFORE - 1, "install the hisparse of the coordinator, or one minor version before it"),
        (0, "install the hisparse of the coordinator, or one minor version before it"),
        (PROTOCOL_VERSION + 1, "upgrade the coordinator first"),
    ],
)
def test_other_versions_are_refused_by_name(version: int, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_version_before(monkeypatch)
    with pytest.raises(ProtocolError, match=f"speaks protocol {PROTOCOL_VERSION}, and {BEFORE} to older") as caught:
        check_version(version)
    assert (caught.value.field, caught.value.value, caught.value.remedy) == ("protocol", str(version), remedy)


def test_version_before_the_oldest_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError) as caught:
        check_version(skew.PROTOCOL_VERSION_MIN - 1)
    serves_older = skew.PROTOCOL_VERSION_MIN < PROTOCOL_VERSION
    assert ("to older peers" in caught.value.message) == serves_older
    assert ("one minor version before" in caught.value.remedy) == serves_older
