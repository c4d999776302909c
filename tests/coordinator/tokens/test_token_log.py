"""coordinator.tokens.token_log: each position once and in order (I5), only the current placement writes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coordinator.tokens.token_log import EXTENT_TOKENS_MIN, Extents, TokenLog
from protocol.arrays import pack_int32, pack_int64, unpack_int32
from protocol.errors import CapacityError, InternalError, ProtocolError
from protocol.messages import Progress
from tests.support.progress import LINK, RequestEntry, progress


def tokens_of(log: TokenLog, request_index: int, start: int = 0) -> list[int]:
    return list(unpack_int32(log.tokens(request_index, start), "tokens"))


@pytest.fixture
def log() -> TokenLog:
    return TokenLog(request_indices=8, arena_tokens=1024)


def started(log: TokenLog, placement: int, max_tokens: int = 50, prompt: int = 10, granted: int = 64) -> int:
    request_index = log.open(max_tokens)
    log.begin_placement(request_index, placement, prompt, granted)
    log.bind(request_index, LINK)
    return request_index


def test_report_appends_to_each_of_its_requests(log: TokenLog) -> None:
    one, two = started(log, 1), started(log, 2)
    log.append(progress(RequestEntry(two, 2, 0, [20, 21]), RequestEntry(one, 1, 0, [10])), LINK)
    result = log.append(progress(RequestEntry(one, 1, 1, [11, 12], durable=11), RequestEntry(two, 2, 2, [])), LINK)
    assert (result.tokens, result.repeated_tokens, result.stale_entries) == (2, 0, 0)
    assert tokens_of(log, one) == [10, 11, 12]
    assert tokens_of(log, two, 1) == [21]
    assert (log.length(one), log.durable(one), log.durable(two)) == (3, 11, 0)
    gathered = log.gather(np.array([two, one], np.int32), np.array([1, 0], np.int32), np.array([1, 3], np.int32))
    assert list(gathered) == [21, 10, 11, 12]


def test_known_positions_are_dropped_and_new_ones_kept(log: TokenLog) -> None:
    request_index = started(log, 1)
    log.append(progress(RequestEntry(request_index, 1, 0, [1, 2, 3])), LINK)
    result = log.append(progress(RequestEntry(request_index, 1, 1, [99, 99, 4])), LINK)
    assert (result.tokens, result.repeated_tokens) == (1, 2)
    assert log.append(progress(RequestEntry(request_index, 1, 0, [99])), LINK).repeated_tokens == 1
    assert tokens_of(log, request_index) == [1, 2, 3, 4], "I5: delivered positions never change"


@pytest.mark.parametrize(("placement", "link"), [(2, LINK), (1, LINK + 1), (-1, LINK)])
def test_only_the_current_placement_may_append(log: TokenLog, placement: int, link: int) -> None:
    request_index, other = started(log, 1), started(log, 5)
    empty = log.open(10)
    report = progress(
        RequestEntry(request_index, placement, 0, [66], 3),
        RequestEntry(other, 5, 0, [50]),
        RequestEntry(empty, -1, 0, [66]),
    )
    result = log.append(report, link)
    assert tokens_of(log, request_index) == []
    assert (log.durable(request_index), log.length(empty)) == (0, 0)
    assert result.stale_entries == (2 if link == LINK else 3)
    assert tokens_of(log, other) == ([50] if link == LINK else [])


def test_new_placement_silences_the_old_and_keeps_its_tokens(log: TokenLog) -> None:
    request_index = started(log, 1)
    log.append(progress(RequestEntry(request_index, 1, 0, [1, 2], durable=11)), LINK)
    log.end_placement(request_index)
    assert log.append(progress(RequestEntry(request_index, 1, 2, [3])), LINK).stale_entries == 1
    log.begin_placement(request_index, 9, 10, 64, durable_tokens=11)
    log.bind(request_index, LINK + 1)
    assert log.append(progress(RequestEntry(request_index, 1, 2, [3])), LINK).stale_entries == 1
    log.append(progress(RequestEntry(request_index, 9, 2, [4])), LINK + 1)
    assert tokens_of(log, request_index) == [1, 2, 4]
    assert log.durable(request_index) == 11


def test_durable_never_falls_or_exceeds_rows(log: TokenLog) -> None:
    request_index = started(log, 1, prompt=10)
    log.append(progress(RequestEntry(request_index, 1, 0, [1, 2], durable=1000)), LINK)
    assert log.durable(request_index) == 12
    log.append(progress(RequestEntry(request_index, 1, 2, [], durable=3)), LINK)
    assert log.durable(request_index) == 12


def entry_with(log: TokenLog, field: str) -> Progress:
    good = progress(RequestEntry(0, 1, 1, [5]), RequestEntry(1, 2, 1, [6]))
    changed = {
        "gap": {"starts": pack_int32([2, 1])},
        "far gap": {"starts": pack_int32([2**31 - 1, 1])},
        "negative start": {"starts": pack_int32([-1, 1])},
        "negative count": {"counts": pack_int32([-1, 3])},
        "counts": {"counts": pack_int32([1, 2])},
        "shorter": {"durables": pack_int32([1])},
        "ragged": {"request_indices": b"abc"},
        "unknown slot": {"request_indices": pack_int32([0, 8])},
        "negative slot": {"request_indices": pack_int32([0, -8])},
        "twice": {"request_indices": pack_int32([0, 0]), "placements": pack_int64([1, 1])},
        "too many": {"counts": pack_int32([50, 0]), "tokens": pack_int32([7] * 50)},
    }[field]
    fields = {name: getattr(good, name) for name in good.__struct_fields__} | changed
    return Progress(**fields)


@pytest.mark.parametrize(
    "field",
    [
        "gap",
        "far gap",
        "negative start",
        "negative count",
        "counts",
        "shorter",
        "ragged",
        "unknown slot",
        "negative slot",
        "twice",
        "too many",
    ],
)
def test_a_wrong_report_is_refused_whole(log: TokenLog, field: str) -> None:
    for placement in (1, 2):
        request_index = started(log, placement)
        log.append(progress(RequestEntry(request_index, placement, 0, [placement])), LINK)
    with pytest.raises(ProtocolError):
        log.append(entry_with(log, field), LINK)
    assert [tokens_of(log, request_index) for request_index in (0, 1)] == [[1], [2]]
    log.append(progress(RequestEntry(0, 1, 1, [5]), RequestEntry(1, 2, 1, [6])), LINK)


def test_each_shortage_is_reported_once_until_granted(log: TokenLog) -> None:
    request_index = started(log, 1, prompt=10, granted=64)
    fine = started(log, 2, prompt=10, granted=128)

    def short(ahead_tokens: int) -> list[int]:
        start = log.length(request_index)
        appended = log.append(
            progress(RequestEntry(request_index, 1, start, [7]), RequestEntry(fine, 2, start, [7])), LINK
        )
        return list(log.report_short(appended, ahead_tokens))

    assert short(53) == []
    assert short(53) == [request_index]
    assert short(53) == []
    log.grant(request_index, 64 + 3)
    assert short(53) == []
    assert short(53) == [request_index]


def test_simultaneous_shortages_are_spread_over_reports() -> None:
    """128 tokens ahead: one request is told per 96 tokens reported, and the rest when a quarter is left."""
    log = TokenLog(request_indices=100, arena_tokens=1 << 15)
    for placement in range(100):
        started(log, placement, max_tokens=200, prompt=0, granted=128)
    told: list[list[int]] = []
    for position in range(128):
        step = [
            RequestEntry(request_index, request_index, position, [7])
            for request_index in range(100)
            if position == log.length(request_index)
        ]
        told.append(list(log.report_short(log.append(progress(*step), LINK), 128)))
    assert sorted(request_index for batch in told for request_index in batch) == list(range(100)), "each once"
    assert {len(batch) for batch in told} <= {0, 1, 2}
    assert not any(told[96:]), "all are told before it is urgent"


def test_urgent_shortages_are_reported_at_once() -> None:
    log = TokenLog(request_indices=100, arena_tokens=1 << 15)
    for placement in range(100):
        started(log, placement, max_tokens=200, prompt=0, granted=32)
    appended = log.append(
        progress(*[RequestEntry(request_index, request_index, 0, [7]) for request_index in range(100)]), LINK
    )
    assert sorted(log.report_short(appended, 128)) == list(range(100))


def test_oversized_log_is_refused_with_arithmetic(log: TokenLog) -> None:
    with pytest.raises(CapacityError, match="no room for 2000 tokens of output, 1024 of 1024 free"):
        log.open(2000)
    for _ in range(8):
        log.open(1)
    with pytest.raises(CapacityError, match="all 8 request indices are in use"):
        log.open(1)
    log.check_invariants()


def test_closed_request_index_cannot_be_used(log: TokenLog) -> None:
    request_index = started(log, 1)
    log.close(request_index)
    with pytest.raises(InternalError):
        log.close(request_index)
    with pytest.raises(InternalError):
        log.begin_placement(request_index, 2, 10, 64)
    assert log.append(progress(RequestEntry(request_index, 1, 0, [1])), LINK).stale_entries == 1


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 700)), max_size=60))
def test_extents_are_disjoint_and_merge_back(steps: list[tuple[bool, int]]) -> None:
    extents = Extents(4096, EXTENT_TOKENS_MIN)
    held: list[tuple[int, int]] = []
    for give_back, units in steps:
        if give_back and held:
            extents.free(*held.pop(units % len(held)))
        elif (base := extents.allocate(units)) is not None:
            held.append((base, units))
        taken = sorted((base, base + extents.rounded(units)) for base, units in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(taken))
        assert extents.free_units() == 4096 - sum(end - start for start, end in taken)
    for base, units in held:
        extents.free(base, units)
    assert extents.allocate(4096) == 0, "everything merged into one block again"


class LogAndModel(RuleBasedStateMachine):
    """The log against plain lists, with workers that report in order, repeat themselves and outlive admissions."""

    def __init__(self) -> None:
        super().__init__()
        self.log = TokenLog(request_indices=4, arena_tokens=512)
        self.outputs: dict[int, list[int]] = {}
        self.max_tokens: dict[int, int] = {}
        self.placement: dict[int, int] = {}
        self.placements = 0

    @rule(max_tokens=st.integers(1, 200))
    def open(self, max_tokens: int) -> None:
        try:
            request_index = self.log.open(max_tokens)
        except CapacityError:
            return
        assert request_index not in self.outputs
        self.outputs[request_index] = []
        self.max_tokens[request_index] = max_tokens
        self.begin(0, request_index)

    @precondition(lambda self: self.outputs)
    @rule(pick=st.integers(0, 3), request_index=st.none())
    def begin(self, pick: int, request_index: int | None) -> None:
        request_index = sorted(self.outputs)[pick % len(self.outputs)] if request_index is None else request_index
        self.placements += 1
        self.placement[request_index] = self.placements
        self.log.begin_placement(request_index, self.placements, 10, 64)
        self.log.bind(request_index, LINK)

    @precondition(lambda self: self.outputs)
    @rule(pick=st.integers(0, 3))
    def close(self, pick: int) -> None:
        request_index = sorted(self.outputs)[pick % len(self.outputs)]
        self.log.close(request_index)
        del self.outputs[request_index], self.max_tokens[request_index], self.placement[request_index]

    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        entries = []
        for request_index, output in self.outputs.items():
            if not data.draw(st.booleans()):
                continue
            start = data.draw(st.integers(0, len(output)))
            room = self.max_tokens[request_index] - start
            tokens = data.draw(st.lists(st.integers(0, 1000), max_size=min(room, 20)))
            stale = data.draw(st.booleans())
            entries.append(RequestEntry(request_index, self.placement[request_index] - stale, start, tokens))
            if not stale:
                output.extend(tokens[len(output) - start :])
        self.log.append(progress(*entries), LINK)

    @invariant()
    def outputs_agree(self) -> None:
        self.log.check_invariants()
        for request_index, output in self.outputs.items():
            assert tokens_of(self.log, request_index) == output


LogAndModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestLogAndModel = LogAndModel.TestCase
