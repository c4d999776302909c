"""coordinator.gateway.subscriptions: each connection gets each position once and in order (I5), however it reads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coordinator.gateway import subscriptions
from coordinator.gateway.subscriptions import ROWS_INITIAL, Complete, Parcel, Subscriptions
from coordinator.tokens.token_log import TokenLog
from protocol.arrays import unpack_int32
from protocol.errors import WrongState
from tests.support.progress import LINK, RequestEntry, progress

OPEN = np.zeros(2_000, np.bool_)


def contents(parcel: Parcel) -> list[tuple[int, int, list[int]]]:
    """(handle, start, tokens) of each entry."""
    it = parcel.delivery
    tokens = list(unpack_int32(it.tokens, "tokens"))
    entries = []
    for handle, start, count in zip(
        unpack_int32(it.handles, "handles"),
        unpack_int32(it.starts, "starts"),
        unpack_int32(it.counts, "counts"),
        strict=True,
    ):
        entries.append((int(handle), int(start), tokens[:count]))
        del tokens[:count]
    assert not tokens
    return entries


def say(log: TokenLog, request_index: int, tokens: list[int]) -> None:
    log.append(progress(RequestEntry(request_index, request_index + 1, log.length(request_index), tokens)), LINK)


@pytest.fixture
def log() -> TokenLog:
    log = TokenLog(request_indices=4, arena_tokens=1 << 19)
    for request_index in range(4):
        assert log.open(100_000) == request_index
        log.begin_placement(request_index, request_index + 1, 10, 64)
        log.bind(request_index, LINK)
    return log


def test_connection_with_news_gets_one_parcel(log: TokenLog) -> None:
    subs = Subscriptions(log)
    a, b, c = subs.add(7, 0, 0), subs.add(3, 1, 0), subs.add(7, 2, 0)
    idle = subs.add(5, 3, 0)
    for request_index, tokens in ((0, [1, 2]), (1, [3]), (2, [4])):
        say(log, request_index, tokens)
    parcels = {parcel.connection: parcel for parcel in subs.parcels(OPEN)}
    assert sorted(contents(parcels[7])) == sorted([(a, 0, [1, 2]), (c, 0, [4])])
    assert contents(parcels[3]) == [(b, 0, [3])]
    assert parcels.keys() == {3, 7}
    assert idle not in (a, b, c)


def test_a_cursor_stays_until_its_parcel_was_sent(log: TokenLog) -> None:
    subs = Subscriptions(log)
    handle = subs.add(0, 0, 0)
    say(log, 0, [1, 2])
    (unsent,) = subs.parcels(OPEN)
    say(log, 0, [3])
    (sent,) = subs.parcels(OPEN)
    assert contents(unsent) == [(handle, 0, [1, 2])]
    assert contents(sent) == [(handle, 0, [1, 2, 3])]
    subs.advance(sent)
    assert list(subs.parcels(OPEN)) == []
    blocked = OPEN.copy()
    blocked[0] = True
    say(log, 0, [4])
    assert list(subs.parcels(blocked)) == []


def test_two_readers_of_a_request_keep_their_own_cursors(log: TokenLog) -> None:
    subs = Subscriptions(log)
    say(log, 0, [1, 2, 3])
    late, early = subs.add(0, 0, 2), subs.add(1, 0, 0)
    assert [contents(parcel) for parcel in subs.parcels(OPEN)] == [[(late, 2, [3])], [(early, 0, [1, 2, 3])]]


def test_a_long_output_comes_in_bounded_pieces(log: TokenLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions, "DELIVERY_TOKENS_MAX", 5)
    subs = Subscriptions(log)
    handles = [subs.add(0, request_index, 0) for request_index in range(3)]
    for request_index in range(3):
        say(log, request_index, [10 * request_index + i for i in range(4)])
    got: dict[int, list[int]] = {handle: [] for handle in handles}
    sizes = []
    while parcels := list(subs.parcels(OPEN)):
        for handle, start, tokens in contents(parcels[0]):
            assert start == len(got[handle])
            got[handle] += tokens
        sizes.append(int(parcels[0].counts.sum()))
        subs.advance(parcels[0])
    assert sizes == [5, 5, 2]
    assert list(got.values()) == [[10 * request_index + i for i in range(4)] for request_index in range(3)]


def test_the_end_comes_behind_the_last_token(log: TokenLog) -> None:
    subs = Subscriptions(log)
    handle = subs.add(4, 0, 0)
    say(log, 0, [1])
    subs.finish(0)
    assert subs.complete(OPEN) == []
    (parcel,) = subs.parcels(OPEN)
    subs.advance(parcel)
    assert subs.complete(OPEN) == [Complete(4, handle, 0)]
    subs.remove(4, 0)
    assert subs.complete(OPEN) == []
    assert len(subs) == 0
    late = subs.add(4, 0, 1)
    assert subs.complete(OPEN) == [Complete(4, late, 0)], "attached after the end"


def test_a_connection_subscribes_once_per_request(log: TokenLog) -> None:
    subs = Subscriptions(log)
    subs.add(0, 0, 0)
    with pytest.raises(WrongState, match="attached already"):
        subs.add(0, 0, 0)
    subs.remove(0, 0)
    subs.remove(0, 0)
    subs.add(0, 0, 0)


def test_forgetting_a_request_names_late_readers(log: TokenLog) -> None:
    subs = Subscriptions(log)
    subs.add(0, 0, 0)
    subs.add(9, 0, 0)
    other = subs.add(9, 1, 0)
    subs.finish(0)
    assert sorted(subs.forget(0)) == [0, 9]
    assert subs.forget(0) == []
    say(log, 1, [5])
    assert [contents(parcel) for parcel in subs.parcels(OPEN)] == [[(other, 0, [5])]]
    again = subs.add(0, 0, 0)
    assert subs.complete(OPEN) == [], f"the slot of handle {again} starts a new life"


def test_rows_grow_past_the_first_allocation(log: TokenLog) -> None:
    subs = Subscriptions(log)
    say(log, 2, [8])
    for connection in range(ROWS_INITIAL + 5):
        subs.add(connection, 2, 0)
    assert sum(1 for _ in subs.parcels(OPEN)) == ROWS_INITIAL + 5
    subs.check_invariants()


class Readers(RuleBasedStateMachine):
    """Connections that come, read, stall and go, against plain lists of what each subscription got."""

    def __init__(self) -> None:
        super().__init__()
        self.log = TokenLog(request_indices=3, arena_tokens=4096)
        self.subs = Subscriptions(self.log)
        self.said: list[list[int]] = []
        self.got: dict[tuple[int, int], list[int]] = {}
        self.handles: dict[int, tuple[int, int]] = {}
        self.final: set[int] = set()
        for request_index in range(3):
            self.log.open(1_000)
            self.log.begin_placement(request_index, request_index + 1, 10, 64)
            self.log.bind(request_index, LINK)
            self.said.append([])

    @rule(request_index=st.integers(0, 2), tokens=st.lists(st.integers(0, 99), max_size=6))
    def speak(self, request_index: int, tokens: list[int]) -> None:
        if request_index not in self.final and len(self.said[request_index]) < 900:
            say(self.log, request_index, tokens)
            self.said[request_index] += tokens

    @rule(connection=st.integers(0, 2), request_index=st.integers(0, 2), share=st.floats(0, 1))
    def attach(self, connection: int, request_index: int, share: float) -> None:
        if (connection, request_index) not in self.got:
            offset = int(share * len(self.said[request_index]))
            self.handles[self.subs.add(connection, request_index, offset)] = (connection, request_index)
            self.got[connection, request_index] = self.said[request_index][:offset]

    @rule(connection=st.integers(0, 2))
    def leave(self, connection: int) -> None:
        self.subs.remove_connection(connection)
        self._forget(lambda key: key[0] == connection)

    @rule(request_index=st.integers(0, 2))
    def finish(self, request_index: int) -> None:
        self.subs.finish(request_index)
        self.final.add(request_index)

    @rule(blocked=st.sets(st.integers(0, 2)), full=st.sets(st.integers(0, 2)))
    def flush(self, blocked: set[int], full: set[int]) -> None:
        is_blocked = np.array([connection in blocked for connection in range(3)])
        for parcel in self.subs.parcels(is_blocked):
            assert parcel.connection not in blocked
            if parcel.connection in full:
                continue
            for handle, start, tokens in contents(parcel):
                key = self.handles[handle]
                assert key[0] == parcel.connection
                assert start == len(self.got[key]), "I5: once and in order"
                self.got[key] += tokens
            self.subs.advance(parcel)
        for connection, handle, request_index in self.subs.complete(is_blocked):
            assert request_index in self.final
            assert self.got[connection, request_index] == self.said[request_index], "the end comes last"
            assert self.handles[handle] == (connection, request_index)
            self.subs.remove(connection, request_index)
            self._forget(lambda key, gone=(connection, request_index): key == gone)

    @precondition(lambda self: self.got)
    @rule(pick=st.integers(0, 8))
    def detach(self, pick: int) -> None:
        connection, request_index = sorted(self.got)[pick % len(self.got)]
        self.subs.remove(connection, request_index)
        self._forget(lambda key: key == (connection, request_index))

    def _forget(self, gone: object) -> None:
        assert callable(gone)
        self.handles = {handle: key for handle, key in self.handles.items() if not gone(key)}
        self.got = {key: tokens for key, tokens in self.got.items() if not gone(key)}

    @invariant()
    def arrays_agree(self) -> None:
        self.subs.check_invariants()
        assert len(self.subs) == len(self.got)
        for key, tokens in self.got.items():
            assert tokens == self.said[key[1]][: len(tokens)]


Readers.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestReaders = Readers.TestCase
