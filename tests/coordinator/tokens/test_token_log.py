"""coordinator.tokens.token_log: each position once and in order (I5), only the current placement writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from basics.shares import SHARE
from coordinator.tokens.extents import Extents
from coordinator.tokens.logprob_rows import LogprobRows
from coordinator.tokens.token_log import BEYOND_GRANT_TOKENS, EXTENT_TOKENS_MIN, News, OutputPart, TokenLog
from protocol.arrays import pack_int32, pack_int64, unpack_int32
from protocol.errors import CapacityError, InternalError, ProtocolError
from protocol.messages import Progress
from tests.support.progress import LINK, RequestEntry, progress


def tokens_of(log: TokenLog, request_index: int, start: int = 0) -> list[int]:
    return list(unpack_int32(log.tokens(request_index, start), "tokens"))


@pytest.fixture
def log() -> TokenLog:
    return TokenLog(request_indices=8, arena_tokens=1024)


def started(
    log: TokenLog, placement: int, max_tokens: int = 50, prompt: int = 10, granted: int = 64, owner: str = ""
) -> int:
    request_index = log.open(max_tokens, owner=owner)
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
    with pytest.raises(
        CapacityError, match="no room for 2000 tokens of output: there are 1024 places in all"
    ) as caught:
        log.open(2000)
    assert caught.value.field == "max_tokens"
    for number in range(8):
        log.open(1, owner=number)
    with pytest.raises(CapacityError, match="all 8 request indices are in use"):
        log.open(1)
    log.check_invariants()


# ---------------------------------------------------------------- room


def full_length(log: TokenLog, request_index: int, placement: int, count: int) -> None:
    """Generate `count` tokens more, with the room that a Scheduler makes before it grants."""
    start = log.length(request_index)
    assert log.make_room(request_index, start + count)
    log.grant(request_index, 10 + start + count)
    tokens = list(range(start, start + count))
    log.append(progress(RequestEntry(request_index, placement, start, tokens)), LINK)


def test_many_tiny_requests_of_large_max_tokens_leave_room_for_another_owner() -> None:
    """Room is what is generated, so the arena holds many times what max_tokens add up to."""
    log = TokenLog(request_indices=600, arena_tokens=1 << 18)
    hostile = [log.open(1 << 16, tokens=320, owner="hostile") for _ in range(200)]
    other = log.open(1 << 16, tokens=320, owner="other")
    for placement, request_index in enumerate(hostile):
        log.begin_placement(request_index, placement, 10, 64)
        log.end_placement(request_index)
        log.cut(request_index)
    assert log.held_by("hostile") == 200 * EXTENT_TOKENS_MIN, "aborted at 0 tokens, they keep next to nothing"
    log.begin_placement(other, 1_000, 10, 64)
    log.bind(other, LINK)
    full_length(log, other, 1_000, 1 << 16)
    assert tokens_of(log, other) == list(range(1 << 16))
    log.check_invariants()


def test_an_owner_at_its_share_is_refused_with_arithmetic_and_another_is_not() -> None:
    log = TokenLog(request_indices=100, arena_tokens=1 << 13)
    for _ in range(14):
        log.open(400, tokens=400, owner="hostile")
    with pytest.raises(CapacityError, match="7168 output places are this owner's and 512 would be added") as caught:
        log.open(400, tokens=400, owner="hostile")
    assert (caught.value.field, caught.value.value) == ("outputs", "8192"), "no max_tokens is to blame"
    assert "of 8192, 1024 are free, and an owner may have 7 times as many" in caught.value.message
    log.open(400, tokens=400, owner="other")
    log.check_invariants()


def test_outputs_of_an_owner_do_not_grow_beyond_its_share_but_for_the_first_to_end() -> None:
    log = TokenLog(request_indices=100, arena_tokens=1 << 15)
    hostile = [log.open(1_000, tokens=10, owner="hostile") for _ in range(80)]
    for tokens in (150, 400, 900):
        for request_index in hostile:
            log.make_room(request_index, tokens)
    whole = [it for it in hostile if log._places.units[it] == 1_024]
    assert len(whole) == 1, "beyond the share one of them can come to its end"
    assert 25_000 < log.held_by("hostile") - 1_024 <= SHARE * (log.free_places() + 1_024)
    other = [log.open(200, tokens=100, owner="other") for _ in range(3)]
    assert all(log.make_room(it, 200) for it in other), "its share is there at once"
    assert not any(log.make_room(it, 900) for it in hostile if it not in whole)
    log.cut(whole[0])
    assert sum(log.make_room(it, 900) for it in hostile if it not in whole) == 1
    log.check_invariants()


def test_request_that_an_operator_holds_keeps_none_of_its_owner_from_growing() -> None:
    log = TokenLog(request_indices=100, arena_tokens=1 << 15)
    hostile = [log.open(1_000, tokens=10, owner="hostile") for _ in range(80)]
    for tokens in (150, 400, 900):
        for request_index in hostile:
            log.make_room(request_index, tokens)
    (first,) = (it for it in hostile if log._places.units[it] == 1_024)
    others = [it for it in hostile if it != first]
    log.hold(first, True)
    grown = [it for it in others if log.make_room(it, 900)]
    assert len(grown) == 1, "another one comes to its end, and no more than one"
    log.cut(grown[0])
    log.close(grown[0])
    log.hold(first, False)
    assert not any(log.make_room(it, 900) for it in others if it not in grown), "it is the first to end again"
    assert log.make_room(first, 1_000)
    log.check_invariants()


def test_a_refusal_is_repeated_without_looking_at_all_requests_again(monkeypatch: pytest.MonkeyPatch) -> None:
    log = TokenLog(request_indices=5, arena_tokens=1024)
    first, second, third, _ = (log.open(500, tokens=30, owner=owner) for owner in "abcd")
    assert log.make_room(first, 150)
    assert log.make_room(second, 150)
    assert not log.make_room(third, 150)
    with monkeypatch.context() as patched:
        patched.setattr(np, "argsort", None)
        assert not log.make_room(third, 150)
        with pytest.raises(CapacityError, match="others need the rest"):
            log.open(500, tokens=150, owner="e")
    log.close(first)
    assert log.make_room(third, 150), "what it knew of the others is old"


def test_moved_outputs_are_what_the_journal_and_readers_get(log: TokenLog) -> None:
    log = TokenLog(request_indices=8, arena_tokens=1024, journalled=True)
    one = started(log, 1, max_tokens=500)
    full_length(log, one, 1, 60)
    news = log.take_news()
    full_length(log, one, 1, 140)
    assert news is not None
    log.commit(news)
    assert (list(news.tokens), log.committed[one]) == (list(range(60)), 60)
    later = log.take_news()
    log.cut(one)
    assert later is not None
    assert (list(later.starts), list(later.tokens)) == ([60], list(range(60, 200)))
    assert tokens_of(log, one) == list(range(200))


def test_requests_never_wait_for_each_other_in_a_full_arena() -> None:
    """Each of four could fill half of it. Growth is refused before none could come to its end any more."""
    log = TokenLog(request_indices=4, arena_tokens=1024)
    first, second, third, _ = (log.open(500, tokens=30, owner=owner) for owner in "abcd")
    assert log.make_room(first, 150)
    assert log.make_room(second, 150)
    assert log.free_places() >= 128
    assert not log.make_room(third, 150), "what is left is what the first or the second needs"
    assert log.make_room(first, 500)
    log.close(first)
    assert log.make_room(third, 150)
    log.check_invariants()


def test_free_places_between_others_are_used() -> None:
    """Extents are packed where no single gap is large enough, and outputs move with them."""
    log = TokenLog(request_indices=8, arena_tokens=1024)
    small = [started(log, placement, max_tokens=128) for placement in range(4)]
    for placement, request_index in enumerate(small):
        full_length(log, request_index, placement, 128)
    large = started(log, 9, max_tokens=512, owner="large")
    full_length(log, large, 9, 300)
    for request_index in small[::2]:
        log.close(request_index)
    assert log.free_places() == 256
    across = log.open(256, tokens=256, owner="other")
    assert log.make_room(across, 256)
    assert [tokens_of(log, it) for it in small[1::2]] == [list(range(128))] * 2
    assert tokens_of(log, large) == list(range(300))
    log.check_invariants()


def test_tokens_beyond_the_grant_are_refused(log: TokenLog) -> None:
    request_index = log.open(500)
    log.begin_placement(request_index, 1, 10, 10)
    log.bind(request_index, LINK)
    log.append(progress(RequestEntry(request_index, 1, 0, [1] * BEYOND_GRANT_TOKENS)), LINK)
    with pytest.raises(ProtocolError, match="or was granted"):
        log.append(progress(RequestEntry(request_index, 1, BEYOND_GRANT_TOKENS, [1])), LINK)


def test_closed_request_index_cannot_be_used(log: TokenLog) -> None:
    request_index = started(log, 1)
    log.close(request_index)
    with pytest.raises(InternalError):
        log.close(request_index)
    with pytest.raises(InternalError):
        log.begin_placement(request_index, 2, 10, 64)
    assert log.append(progress(RequestEntry(request_index, 1, 0, [1])), LINK).stale_entries == 1


@given(st.lists(st.tuples(st.sampled_from(["allocate", "free", "cut"]), st.integers(1, 700)), max_size=60))
def test_extents_are_disjoint_and_merge_back(steps: list[tuple[str, int]]) -> None:
    extents = Extents(4096, EXTENT_TOKENS_MIN)
    held: list[tuple[int, int]] = []
    for step, units in steps:
        if step == "free" and held:
            extents.free(*held.pop(units % len(held)))
        elif step == "cut" and held:
            base, size = held.pop(units % len(held))
            held.append((base, min(size, extents.rounded(units))))
            extents.cut(base, size, held[-1][1])
        elif (base := extents.allocate(extents.rounded(units))) is not None:
            held.append((base, extents.rounded(units)))
        taken = sorted((base, base + size) for base, size in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(taken))
        assert extents.free_units == 4096 - sum(end - start for start, end in taken)
    for base, size in held:
        extents.free(base, size)
    assert extents.allocate(4096) == 0, "everything merged into one block again"


PROMPT = 10
#: Three owners hold up to 7 times what is free.
OWNERS = "abc"


@dataclass
class ModelOutput:
    """A request of the model: the tokens that it has generated, and those that it may."""

    max_tokens: int
    words: int
    owner: str
    placement: int = 0
    granted: int = 0
    tokens: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    in_journal: int = 0
    has_ended: bool = False
    is_held: bool = False

    @property
    def may_have(self) -> int:
        return min(self.max_tokens, self.granted - PROMPT)


def appended_of(outputs: dict[int, ModelOutput], indices: list[int], counts: list[int]) -> News:
    """The first `counts` tokens of each request."""
    words = np.array([outputs[it].words for it in indices], np.int32)
    parts = [outputs[it].tokens[:count] for it, count in zip(indices, counts, strict=True)]
    rows = [outputs[it].rows[: count * outputs[it].words] for it, count in zip(indices, counts, strict=True)]
    total = np.array(counts, np.int32)
    zeros = np.zeros(len(indices), np.int32)
    logprobs = LogprobRows.of_entries(words, np.array([*chain(*rows)], np.int32), total)
    return News(np.array(indices, np.int32), zeros, total, np.array([*chain(*parts)], np.int32), zeros, logprobs)


def may_have(log: TokenLog, request_index: int, tokens: int) -> bool:
    """Return whether the request may have room for `tokens`, by one look at every request after the other."""
    held, most = log._places.units.tolist(), log._places._units_max.tolist()
    units = max(EXTENT_TOKENS_MIN, 1 << (tokens * (1 + int(log._words[request_index])) - 1).bit_length())
    if units <= held[request_index]:
        return True
    owner, free = log._places._owner[request_index], log.arena_tokens - sum(held)
    more = units - held[request_index]
    owed = {at: most[at] - held[at] for at in range(len(held)) if log._places._owner[at] == owner and most[at]}
    is_first = request_index == min(owed, key=lambda at: (log._places._is_held[at], owed[at], at))
    own = sum(count for at, count in enumerate(held) if log._places._owner[at] == owner)
    if more > free or (not is_first and own + more > SHARE * (free - more)):
        return False
    held[request_index], free = units, free - more
    for at in sorted(range(len(held)), key=lambda at: most[at] - held[at]):
        if most[at] - held[at] > free:
            return False
        free += held[at]
    return True


class LogAndModel(RuleBasedStateMachine):
    """The log against plain lists, with workers that report in order, repeat themselves and outlive admissions, and
    coordinators that are killed."""

    def __init__(self) -> None:
        super().__init__()
        self.log = TokenLog(request_indices=6, arena_tokens=1024, journalled=True)
        self.outputs: dict[int, ModelOutput] = {}
        self.placements = 0

    def live(self) -> list[int]:
        return [it for it, output in sorted(self.outputs.items()) if not output.has_ended]

    @rule(max_tokens=st.integers(1, 700), words=st.sampled_from([0, 0, 2]), owner=st.sampled_from(OWNERS))
    def open(self, max_tokens: int, words: int, owner: str) -> None:
        try:
            request_index = self.log.open(max_tokens, words, tokens=50, owner=owner)
        except CapacityError:
            return
        assert request_index not in self.outputs
        self.outputs[request_index] = ModelOutput(max_tokens, words, owner)
        self.begin(0, request_index)

    @precondition(lambda self: self.live())
    @rule(pick=st.integers(0, 5), request_index=st.none())
    def begin(self, pick: int, request_index: int | None) -> None:
        request_index = self.live()[pick % len(self.live())] if request_index is None else request_index
        output = self.outputs[request_index]
        if not self.log.make_room(request_index, len(output.tokens) + 50):
            return
        self.placements += 1
        output.placement, output.granted = self.placements, PROMPT + len(output.tokens) + 50
        self.log.begin_placement(request_index, self.placements, PROMPT, output.granted)
        self.log.bind(request_index, LINK)

    @precondition(lambda self: self.live())
    @rule(pick=st.integers(0, 5), more=st.integers(1, 400))
    def grow(self, pick: int, more: int) -> None:
        request_index = self.live()[pick % len(self.live())]
        output = self.outputs[request_index]
        if not output.granted:
            return
        tokens = output.granted - PROMPT + more
        wanted = may_have(self.log, request_index, min(tokens + BEYOND_GRANT_TOKENS, output.max_tokens))
        assert self.log.make_room(request_index, tokens) == wanted
        if wanted:
            output.granted += more
            self.log.grant(request_index, output.granted)

    @precondition(lambda self: self.live())
    @rule(pick=st.integers(0, 5), is_held=st.booleans())
    def hold(self, pick: int, is_held: bool) -> None:
        request_index = self.live()[pick % len(self.live())]
        self.log.hold(request_index, is_held)
        self.outputs[request_index].is_held = is_held

    @precondition(lambda self: self.live())
    @rule(pick=st.integers(0, 5))
    def end(self, pick: int) -> None:
        request_index = self.live()[pick % len(self.live())]
        self.log.end_placement(request_index)
        self.log.cut(request_index)
        self.outputs[request_index].has_ended = True

    @precondition(lambda self: self.outputs)
    @rule(pick=st.integers(0, 5))
    def close(self, pick: int) -> None:
        request_index = sorted(self.outputs)[pick % len(self.outputs)]
        self.log.close(request_index)
        del self.outputs[request_index]

    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        entries = []
        for request_index in self.live():
            output = self.outputs[request_index]
            if not data.draw(st.booleans()):
                continue
            known = len(output.tokens)
            start = data.draw(st.integers(max(0, known - 3), known))
            count = data.draw(st.integers(0, max(0, output.may_have - start)))
            tokens = [(self.placements * 31 + start + at) % 997 for at in range(count)]
            rows = [token + word for token in tokens for word in range(output.words)]
            stale = data.draw(st.booleans()) and data.draw(st.booleans())
            entries.append(RequestEntry(request_index, output.placement - stale, start, tokens, 0, output.words, rows))
            if not stale:
                output.tokens.extend(tokens[known - start :])
                output.rows.extend(rows[(known - start) * output.words :])
        self.log.append(progress(*entries), LINK)

    @rule(is_killed=st.booleans())
    def journal(self, is_killed: bool) -> None:
        """Each token is news once. A coordinator that is killed is followed by one with what was news."""
        news = self.log.take_news()
        if news is not None:
            self.log.commit(news)
            at = 0
            for request_index, start, count in zip(news.request_indices, news.starts, news.counts, strict=True):
                output = self.outputs[int(request_index)]
                assert start == output.in_journal
                assert list(news.tokens[at : at + count]) == output.tokens[start : start + count]
                output.in_journal += int(count)
                at += count
        assert all(len(output.tokens) == output.in_journal for output in self.outputs.values())
        if is_killed:
            self.restore()

    def restore(self) -> None:
        """The first half of each output comes as its tokens were appended, the rest in parts of a summary."""
        after = TokenLog(request_indices=6, arena_tokens=1024, journalled=True)
        for request_index, output in self.outputs.items():
            after.reopen(request_index, output.max_tokens, output.words, owner=output.owner)
        indices = list(self.outputs)
        halves = [len(self.outputs[it].tokens) // 2 for it in indices]
        after.recover(appended_of(self.outputs, indices, halves))
        for request_index, half in zip(indices, halves, strict=True):
            output = self.outputs[request_index]
            for start in range(half, len(output.tokens), 40):
                rows = np.array(output.rows[start * output.words : (start + 40) * output.words], np.int32)
                part = np.array(output.tokens[start : start + 40], np.int32)
                after.recover_output(OutputPart(request_index, start, part, 0, rows))
            output.placement = output.granted = 0
            after.hold(request_index, output.is_held)
            if output.has_ended:
                after.cut(request_index)
        after.recovered()
        assert after.free_places() >= self.log.free_places()
        self.log = after

    @invariant()
    def outputs_agree(self) -> None:
        self.log.check_invariants()
        for request_index, output in self.outputs.items():
            assert tokens_of(self.log, request_index) == output.tokens
        indices = np.array(sorted(self.outputs), np.int32)
        found = self.log.gather_logprobs(indices, np.zeros(len(indices), np.int32), self.log.lengths[indices])
        for at, request_index in enumerate(indices.tolist() if found is not None else []):
            assert found is not None
            assert found.of(at).tolist() == self.outputs[request_index].rows
        for owner in OWNERS:
            held = sum(
                max(EXTENT_TOKENS_MIN, len(it.tokens) * (1 + it.words))
                for it in self.outputs.values()
                if it.owner == owner
            )
            assert held <= self.log.held_by(owner)

    def teardown(self) -> None:
        """Whatever was drawn, all come to their end once none is held: no two wait for each other."""
        for request_index in [it for it, output in self.outputs.items() if output.has_ended]:
            self.log.close(request_index)
        waiting = self.live()
        for request_index in waiting:
            self.log.hold(request_index, False)
        while waiting:
            able = next((it for it in waiting if self.log.make_room(it, self.outputs[it].max_tokens)), None)
            assert able is not None, "all wait for each other"
            self.log.close(able)
            waiting.remove(able)


LogAndModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestLogAndModel = LogAndModel.TestCase
