"""Which connections with an unfinished message are ended, without sockets; and what the kernel counts."""

from __future__ import annotations

import select
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basics.process_memory import resident_bytes
from coordinator.listener import connection_events
from coordinator.listener.connection_events import ByteCounter
from coordinator.listener.unfinished import (
    GROWTH_BYTES_MAX,
    SLACK_BYTES,
    UNFINISHED_LIMIT_S,
    UnfinishedMessages,
    wire_bytes,
)
from tests.support.limits import HANG_LIMIT_S

BYTES_MAX = 1 << 20


def with_connection(*, is_exact: bool = True) -> UnfinishedMessages:
    it = UnfinishedMessages(BYTES_MAX)
    it.came(7, 0, 0.0, is_exact=is_exact)
    return it


def ended(it: UnfinishedMessages, now: float, *, is_empty: bool = True) -> list[int]:
    return [descriptor for descriptor, _ in it.overdue(now, is_empty=is_empty)]


def test_more_pending_bytes_than_the_largest_message_end_a_connection() -> None:
    it = with_connection()
    it.look({7: BYTES_MAX}, 0, 0.0)
    assert ended(it, 0.0) == []
    it.look({7: SLACK_BYTES + 1}, 0, 0.1)
    assert ended(it, 0.1) == [7]
    assert it.left(7)
    assert ended(it, 0.1) == []


def test_long_unfinished_message_ends_a_connection() -> None:
    it = with_connection()
    it.look({7: SLACK_BYTES}, 0, 0.0)
    assert ended(it, UNFINISHED_LIMIT_S + 1) == [], "a handshake, and silence"
    it.look({7: 0}, 0, 100.0)
    it.look({7: 1}, 0, 100.1)
    it.look({7: 1}, 0, 100.0 + UNFINISHED_LIMIT_S)
    assert ended(it, 100.0 + UNFINISHED_LIMIT_S) == []
    assert ended(it, 101.0 + UNFINISHED_LIMIT_S) == [7]


def test_growth_of_the_process_ends_unfinished_connections() -> None:
    it = UnfinishedMessages(BYTES_MAX)
    for descriptor in (1, 2, 3):
        it.came(descriptor, 1_000, 0.0, is_exact=True)
    it.introduce(2)
    it.introduce(3)
    it.look({1: SLACK_BYTES + 1, 2: SLACK_BYTES + 1, 3: 10}, 1_000, 0.0)
    it.look({}, 1_000 + GROWTH_BYTES_MAX // 2 + 1, 0.1)
    for descriptor in (1, 2, 3):
        it.look({descriptor: 1}, 1_000 + GROWTH_BYTES_MAX // 2 + 1, 0.1)
    assert ended(it, 0.1) == [1], "a connection without a hello first"
    it.look({1: 1, 2: 1, 3: 1}, 1_000 + GROWTH_BYTES_MAX + 1, 0.2)
    assert ended(it, 0.2) == [1, 2], "and none whose messages are whole"


def test_growth_counts_from_the_least_memory_since_the_message_began() -> None:
    it = UnfinishedMessages(BYTES_MAX)
    it.came(1, GROWTH_BYTES_MAX, 0.0, is_exact=True)
    it.introduce(1)
    it.look({1: SLACK_BYTES + 1}, GROWTH_BYTES_MAX, 0.0)
    it.look({1: 1}, 0, 0.1)  # the memory of another connection was freed
    it.look({1: 1}, GROWTH_BYTES_MAX + 1, 0.2)
    assert ended(it, 0.2) == [1]


def test_taken_messages_are_not_pending() -> None:
    it = with_connection()
    for second in range(100):
        it.took(7, 500_000)
        it.look({7: 500_000}, second * GROWTH_BYTES_MAX, float(second))
        assert ended(it, float(second)) == []


def test_bytes_behind_a_taken_message_are_pending() -> None:
    """A whole message does not hide what comes behind it."""
    it = with_connection()
    it.look({7: 100}, 0, 0.0)
    it.took(7, 102)
    it.look({7: 2 + BYTES_MAX + SLACK_BYTES + 1}, 0, 0.1)
    assert ended(it, 0.1) == [7]


def test_whole_messages_that_wait_for_the_router_are_not_judged() -> None:
    it = with_connection()
    it.came(8, 0, 0.0, is_exact=True)
    it.look({7: 3 * BYTES_MAX, 8: 100}, 0, 0.0)
    assert ended(it, 0.0, is_empty=False) == []
    it.took(8, 50)
    it.took(8, 50)
    assert ended(it, 0.0, is_empty=False) == [], "libzmq may not have come to it"
    it.took(8, 50)
    assert ended(it, 0.0, is_empty=False) == [7], "it had its turn, and no whole message"


def test_uncounted_beginning_is_suspected_until_a_message_is_whole() -> None:
    it = with_connection(is_exact=False)
    it.look({7: 0}, GROWTH_BYTES_MAX, 0.0)
    assert ended(it, 0.0) == [7]
    it.took(7, 50)
    it.look({7: 50}, GROWTH_BYTES_MAX, 0.1)
    it.look({7: 0}, 3 * GROWTH_BYTES_MAX, 0.2)
    assert ended(it, 0.2) == []


@given(st.lists(st.tuples(st.sampled_from(["arrive", "take", "look"]), st.integers(1, 3_000)), max_size=60))
def test_pending_bytes_are_those_that_arrived_and_were_not_taken(steps: list[tuple[str, int]]) -> None:
    """Messages are taken whole and in order, each after its last byte arrived."""
    it, arrived, seen, taken, now = with_connection(), 0, 0, 0, 0.0
    for what, count in [*steps, ("look", 1)]:
        now += 1.0
        match what:
            case "arrive":
                arrived += count
            case "take" if taken + count <= arrived:
                it.took(7, count)
                taken += count
            case "look":
                it.look({7: arrived - seen}, 0, now)
                seen = arrived
    assert it.pending_bytes(7) == arrived - taken


@pytest.mark.parametrize(
    ("size", "is_curve", "on_wire"),
    [(0, False, 2), (255, False, 257), (256, False, 265), (0, True, 35), (300, True, 342)],
)
def test_bytes_of_a_frame(size: int, *, is_curve: bool, on_wire: int) -> None:
    assert wire_bytes(size, is_curve=is_curve) == on_wire


# ---------------------------------------------------------------- what the kernel counts


def pair(family: socket.AddressFamily) -> tuple[socket.socket, socket.socket]:
    if family == socket.AF_UNIX:
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        return sender, server.accept()[0]


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
def test_bytes_read_are_counted(family: socket.AddressFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_events, "OFFSET_MIN", connection_events.OFFSET_MAX - 10)
    sender, receiver = pair(family)
    with sender, receiver:
        counter = ByteCounter(receiver.fileno())
        assert counter.is_exact == (family == socket.AF_INET)
        sender.sendall(bytes(1_000))
        select.select([receiver], [], [], HANG_LIMIT_S)  # what waits in the kernel is not counted
        for count in (0, 300, 1, 699, 0):
            assert len(receiver.recv(count)) == count
            assert counter.arrived() == count
    assert counter.arrived() == 0


def test_resident_memory_is_read_in_bytes() -> None:
    before = resident_bytes()
    held = bytearray(64 << 20)
    held[::4096] = bytes(len(held) // 4096).replace(b"\0", b"x")
    assert resident_bytes() - before > 48 << 20
