"""The wire: tags that no rename changes, and what a peer of another protocol version is told."""

from __future__ import annotations

import re
import tracemalloc
from typing import get_args

import msgspec
import pytest

from protocol import messages
from protocol.errors import ProtocolError
from protocol.skew import PROTOCOL_VERSION_MIN, check_version, read_frame

UNIONS = (
    messages.AdminMessage,
    messages.GatewayMessage,
    messages.WorkerMessage,
    messages.CoordinatorMessage,
    messages.Command,
    messages.Event,
)


def tag_of(kind: type[msgspec.Struct]) -> str:
    return str(kind.__struct_config__.tag)


def test_tags_are_written_out() -> None:
    """So that no rename of a class changes one: without a tag of its own a struct has its name. Tags of the protocol
    version before are held by test_skew.py."""
    for kind in (kind for union in UNIONS for kind in get_args(union)):
        assert re.fullmatch(r"[a-z_]+", tag_of(kind)), kind


def test_tags_of_a_union_are_unique() -> None:
    for union in UNIONS:
        kinds = get_args(union)
        assert len({tag_of(kind) for kind in kinds}) == len(kinds)


@pytest.mark.parametrize("tag", ["Hello", "hello", "WorkerHello", "worker_hello"])
def test_hello_of_another_version_is_refused_by_version(tag: str) -> None:
    frame = msgspec.msgpack.encode([tag, 1, "client", "name", "a field that this version does not know"])
    decode = messages.decode_worker if "orker" in tag else messages.decode_client
    with pytest.raises(ProtocolError, match=f"speaks protocol 1, this end {messages.PROTOCOL_VERSION}") as caught:
        read_frame(decode, frame, 1000, "peer")
    assert (caught.value.field, caught.value.value) == ("protocol", "1")


@pytest.mark.parametrize("tag", ["Hello", "WorkerHello"])
@pytest.mark.parametrize(
    ("version", "said"),
    [
        (PROTOCOL_VERSION_MIN - 1, "install the hisparse of the coordinator"),
        (messages.PROTOCOL_VERSION, "not a message of a peer"),
        (messages.PROTOCOL_VERSION + 1, "upgrade the coordinator first"),
    ],
)
def test_coordinator_says_of_a_malformed_hello_what_it_says_of_its_version(tag: str, version: int, said: str) -> None:
    frame = msgspec.msgpack.encode([tag, version])
    decode = messages.decode_worker if "orker" in tag else messages.decode_client
    with pytest.raises(ProtocolError, match=said):
        read_frame(decode, frame, 1000, "peer", check_version)


@pytest.mark.parametrize("nest", [b"\x91", b"\x81\x01", b"\xdd\x00\x00\x00\x01"])
def test_deep_nesting_is_refused(nest: bytes) -> None:
    """In place of a message, and in an element behind those that a message has. It ended the coordinator once."""
    deep = nest * 20_000 + b"\xc0"
    longer = msgspec.msgpack.encode(["list_pools", 1])
    for frame in (deep, b"\x93" + longer[1:] + deep):
        with pytest.raises(ProtocolError, match="not a message of a peer"):
            read_frame(messages.decode_client, frame, 1 << 20, "peer")


@pytest.mark.parametrize("version", [0, 127, 128, 255, 256, 65_536, 1 << 40, (1 << 64) - 1, -1, -32, -33, -(1 << 40)])
def test_version_of_a_hello_is_read_in_any_width(version: int) -> None:
    frame = msgspec.msgpack.encode(["hello", version, *[[]] * 70_000])
    with pytest.raises(ProtocolError, match=f"speaks protocol {version}, "):
        read_frame(messages.decode_client, frame, 1 << 20, "peer")


@pytest.mark.parametrize("cut", range(9))
def test_cut_off_hello_is_refused(cut: int) -> None:
    frame = msgspec.msgpack.encode(["hello", 1 << 20])[:cut]
    with pytest.raises(ProtocolError, match="not a message of a peer"):
        read_frame(messages.decode_client, frame, 1000, "peer")


def test_unreadable_message_is_not_decoded_to_objects() -> None:
    """4 MB of arrays became two million lists once, which took 1.6 s, before they were refused."""
    frame = msgspec.msgpack.encode(["nothing", 1, *[[1]] * 500_000])
    tracemalloc.start()
    with pytest.raises(ProtocolError, match="not a message of a peer"):
        read_frame(messages.decode_client, frame, 1 << 23, "peer")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100_000


@pytest.mark.parametrize("kind", [messages.AbortRequests, messages.AcknowledgeOutputs, messages.DrainWorkers])
def test_commands_name_a_bounded_number(kind: type[messages.Message]) -> None:
    most = ("",) * messages.NAMES_MAX
    assert read_frame(messages.decode_admin, messages.encode(kind(1, most)), 1 << 23, "peer") == kind(1, most)
    with pytest.raises(ProtocolError, match=f"length <= {messages.NAMES_MAX}"):
        read_frame(messages.decode_admin, messages.encode(kind(1, (*most, ""))), 1 << 23, "peer")


@pytest.mark.parametrize(
    "content", [["Hello", messages.PROTOCOL_VERSION], ["Hello", "1"], ["submit", 1], [7], [], {}, None]
)
def test_unknown_bytes_are_refused(content: object) -> None:
    with pytest.raises(ProtocolError, match="not a message of a peer"):
        read_frame(messages.decode_client, msgspec.msgpack.encode(content), 1000, "peer")
