"""All ranks decide the same rounds, whatever they wish and whenever they read; no wish waits for ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import InternalError
from worker.device.passes import NOT_SPLIT, PASSES_MAX, PassPlace
from worker.group.agreement import Agreement, Round, RoundKind, Wish

PASS = 64
BLOCK = 16
SEATS = 8
LAYERS = 3
SIZES = [1, 2, 4, SEATS]


def agreement(lag: int = 2, *, layers: int = LAYERS, fixed_block: int = 0, split_tokens: int = 0) -> Agreement:
    return Agreement(lag=lag, batch_sizes=SIZES, layers=layers, fixed_block=fixed_block, split_tokens=split_tokens)


@dataclass
class Rank:
    """A rank with prompts to compute and rows to decode, `steps` for each. Of a pass it brings its first prompts, and
    of one that preempts another its first prompt, if that is short. `passes`: what it brings to each open one.

    A token takes a page, of `pages`. Of a pass that ranks split, its owner brings as much as all have rows and lend."""

    agreement: Agreement
    prompts: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    block: int = BLOCK
    units: int = 1
    unread: list[list[Wish]] = field(default_factory=list)
    passes: list[tuple[PassPlace, list[int]]] = field(default_factory=list)
    pages: int = 1_000
    number: int = 0
    ranks: int = 1

    @property
    def has_work(self) -> bool:
        return bool(self.prompts or self.rows or self.passes)

    def decide(self) -> Round | None:
        while (found := self.agreement.next()) is None and self.unread:
            self.agreement.learned(self.unread.pop(0))
        return found

    def launch(self, this: Round) -> Wish:
        self.agreement.launched(this)
        if this.kind is RoundKind.PROMPT:
            self._take_unit(this)
        elif this.kind is RoundKind.DECODE:
            rows = min(this.size, len(self.rows))
            self.rows = [left - 1 for left in self.rows[:rows] if left > 1] + self.rows[rows:]
        tokens = min(PASS, sum(self.prompts))
        urgent = sum(self._urgent(PASS)) if len(self.passes) == 1 else 0
        pages = tokens or self.pages - sum(sum(brought) for _, brought in self.passes)
        return Wish(min(SEATS, len(self.rows)), tokens, urgent, self.block, self.units, pages)

    def _urgent(self, limit: int) -> list[int]:
        (place, brought) = self.passes[0]
        first = self.prompts[:1]
        return first if sum(first) <= min(limit, place.rows_left) and sum(first) < min(brought, default=PASS) else []

    def _take_unit(self, this: Round) -> None:
        if this.opens:
            brought = self._brought(this)
            self.prompts = self.prompts[len(brought) :]
            block = this.size if this.owner != NOT_SPLIT else 0
            place = PassPlace(this.pass_number, this.pass_rows, LAYERS, owner=this.owner, block=block)
            self.passes.append((place, brought))
        place, brought = self.passes[-1]
        assert (place.number, place.rows, place.owner) == (this.pass_number, this.pass_rows, this.owner)
        assert sum(brought) <= place.rows * (self.ranks if this.owner == self.number else 1)
        assert this.unit == place.unit(this.size)
        place.launched(this.unit)
        if place.is_over:
            self.passes.pop()
            self.rows += [3] * len(brought)

    def _brought(self, this: Round) -> list[int]:
        if this.owner == NOT_SPLIT:
            return self._urgent(this.pass_rows) if self.passes else self._first(this.pass_rows)
        assert not self.passes, "a split pass preempts none"
        if this.owner != self.number:
            assert this.pages <= self.pages
            return []
        return self._first(min(self.ranks * this.pass_rows, PASS, this.pages))

    def _first(self, limit: int) -> list[int]:
        """Prompts in order that fit; a longer one is cut."""
        taken: list[int] = []
        for tokens in self.prompts:
            if sum(taken) + tokens > limit:
                break
            taken.append(tokens)
        if not taken and self.prompts:
            self.prompts[:1] = [limit, self.prompts[0] - limit]
            taken = [limit]
        return taken


@dataclass
class Group:
    ranks: Sequence[Rank]
    rounds: list[Round] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number, rank in enumerate(self.ranks):
            rank.number, rank.ranks = number, len(self.ranks)

    def run_round(self) -> Round | None:
        """One round of all ranks; None: they all sleep, and none has work."""
        decided = [rank.decide() for rank in self.ranks]
        assert len(set(decided)) == 1, f"ranks disagree: {decided}"
        this = decided[0]
        if this is None:
            assert all(rank.agreement.asleep for rank in self.ranks)
            if not any(rank.has_work for rank in self.ranks):
                return None
            this = self.ranks[0].agreement.wake()
            assert all(rank.agreement.wake() == this for rank in self.ranks)
        wishes = [rank.launch(this) for rank in self.ranks]
        for rank in self.ranks:
            rank.unread.append(wishes)
            assert rank.agreement.unread <= rank.agreement.lag
        self.rounds.append(this)
        return this

    def run(self) -> None:
        while self.run_round() is not None:
            assert len(self.rounds) < 5_000

    @property
    def units(self) -> list[Round]:
        return [this for this in self.rounds if this.kind is RoundKind.PROMPT]


WORK = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 200)), max_size=16)


@settings(max_examples=200)
@given(
    WORK,
    st.integers(1, 4),
    st.integers(1, 2),
    st.lists(st.integers(8, 40), min_size=4, max_size=4),
    st.sampled_from((0, 1, 30)),
    st.lists(st.integers(40, 90), min_size=4, max_size=4),
)
def test_ranks_agree_and_all_work_is_done(
    arrivals: list[tuple[int, int, int]], size: int, lag: int, blocks: list[int], least: int, pages: list[int]
) -> None:
    """`arrivals`: rounds to run before, rank, tokens of the prompt. `least` tokens are split, by ranks with `pages`."""
    group = Group(
        [
            Rank(agreement(lag, split_tokens=least), block=block, units=block % 3 + 1, pages=count)
            for block, count in zip(blocks[:size], pages, strict=False)
        ]
    )
    for rounds, rank, tokens in arrivals:
        for _ in range(rounds):
            group.run_round()
        group.ranks[rank % size].prompts.append(tokens)
    group.run()
    assert not any(rank.has_work for rank in group.ranks)
    assert all(this.size <= min(blocks[:size]) for this in group.units)


def test_units_between_decode_rounds_are_the_fewest_that_a_rank_wishes() -> None:
    for bound in (1, 2, 4):
        decoding, prompting = Rank(agreement(), rows=[40], units=bound), Rank(agreement(), prompts=[64] * 20, units=9)
        group = Group([decoding, prompting])
        while decoding.rows:
            group.run_round()
        kinds = [this.kind for this in group.rounds]
        first, last = kinds.index(RoundKind.DECODE), len(kinds) - kinds[::-1].index(RoundKind.DECODE)
        between = "".join("p" if kind is RoundKind.PROMPT else "d" for kind in kinds[first:last]).split("d")
        assert max(map(len, between)) == bound


def test_a_prompt_is_wished_once() -> None:
    group = Group([Rank(agreement(), prompts=[PASS])])
    group.run()
    assert {this.pass_number for this in group.units} == {1}
    assert len(group.units) == LAYERS * PASS // BLOCK


def test_pass_of_few_units_is_not_opened_again_by_wishes_from_before_it() -> None:
    for lag in (1, 2):
        group = Group([Rank(agreement(lag), prompts=[3])])
        group.run()
        assert len(group.units) == LAYERS


def test_pass_of_one_unit_is_not_opened_again_by_wishes_from_before_it() -> None:
    one = agreement(layers=1)
    one.launched(one.wake())
    one.learned([Wish(tokens=5, block=BLOCK, units=1)])
    this = Round(1, RoundKind.PROMPT, 5, 1, 5, 0, 0)
    assert one.next() == this
    one.launched(this)
    assert one.next() is None
    one.learned([Wish(tokens=5, block=BLOCK, units=1)])
    assert one.next() == Round(2, RoundKind.PROMPT, 5, 2, 5, 0, 0), "they are of a prompt that came meanwhile"


def test_pass_has_the_rows_of_the_rank_that_brings_most() -> None:
    group = Group([Rank(agreement(), prompts=[5]), Rank(agreement(), prompts=[20]), Rank(agreement())])
    group.run_round()
    assert group.run_round() == Round(1, RoundKind.PROMPT, BLOCK, 1, 20, 0, 0)
    assert group.run_round() == Round(2, RoundKind.PROMPT, 4, 1, 20, 0, BLOCK)
    assert group.run_round() == Round(3, RoundKind.PROMPT, BLOCK, 1, 20, 1, 0)
    assert [sum(rank.passes[0][1]) for rank in group.ranks] == [5, 20, 0]


def splitting(*ranks: Rank) -> Group:
    for rank in ranks:
        rank.agreement = agreement(split_tokens=20)
    return Group(ranks)


def test_prompts_of_one_rank_alone_are_split() -> None:
    """Each rank has a third of the rows, in units of one size, and the pages that the others lend."""
    group = splitting(Rank(agreement(), pages=90), Rank(agreement(), prompts=[50]), Rank(agreement(), pages=70))
    group.run_round()
    assert group.run_round() == Round(1, RoundKind.PROMPT, BLOCK, 1, 17, 0, 0, 1, 70)
    assert group.run_round() == Round(2, RoundKind.PROMPT, 1, 1, 17, 0, BLOCK, 1)
    for rank in group.ranks:
        rank.block = 5
    group.run()
    assert [this.size for this in group.units] == [BLOCK, 1] * LAYERS
    assert [sum(rank.rows) for rank in group.ranks] == [0, 0, 0], "its owner decodes alone"


@pytest.mark.parametrize(
    ("prompts", "pages"), [(([50], [1]), (90, 90)), (([19], []), (90, 90)), (([50], []), (90, 49))]
)
def test_others_are_not_split(prompts: tuple[list[int], list[int]], pages: tuple[int, int]) -> None:
    """Where another rank has a prompt, where it is short, where another rank lends too few pages."""
    group = splitting(
        *(Rank(agreement(), prompts=[*own], pages=count) for own, count in zip(prompts, pages, strict=True))
    )
    group.run()
    assert {(this.owner, this.pages) for this in group.units} == {(NOT_SPLIT, 0)}


def test_rank_that_gets_a_prompt_ends_the_split_at_the_next_pass() -> None:
    group = splitting(Rank(agreement(), prompts=[3 * PASS]), Rank(agreement()))
    while not group.units or group.units[-1].pass_number < 2:
        group.run_round()
    group.ranks[1].prompts.append(PASS)
    group.run()
    owners = {this.pass_number: this.owner for this in group.units}
    assert owners == {1: 0, 2: 0, 3: NOT_SPLIT}


def test_pass_that_preempts_a_split_one_is_not_split() -> None:
    group = splitting(Rank(agreement(), prompts=[PASS]), Rank(agreement()))
    for _ in range(2):
        group.run_round()
    group.ranks[1].prompts.append(5)
    group.run()
    assert {this.pass_number: this.owner for this in group.units} == {1: 0, 2: NOT_SPLIT}
    assert [this.pass_number for this in group.units][-1] == 1


def test_shorter_prompt_of_any_rank_preempts_and_the_pass_goes_on_behind_it() -> None:
    group = Group([Rank(agreement(), prompts=[PASS]), Rank(agreement())])
    for _ in range(4):
        group.run_round()
    group.ranks[1].prompts.append(7)
    group.run()
    numbers = [this.pass_number for this in group.units]
    assert numbers == sorted(numbers[: numbers.index(2)]) + [2] * LAYERS + [1] * (
        len(numbers) - numbers.index(2) - LAYERS
    )
    ones = [(this.layer, this.first) for this in group.units if this.pass_number == 1]
    assert ones == [(layer, first) for layer in range(LAYERS) for first in range(0, PASS, BLOCK)]


def test_at_most_two_passes_are_open() -> None:
    ranks = [Rank(agreement(), prompts=[PASS]) for _ in range(3)]
    group, most = Group(ranks), 0
    for tokens in (30, 20, 10, 5, 2):
        for _ in range(3):
            group.run_round()
        ranks[1].prompts.append(tokens)
        most = max(most, len(ranks[0].passes))
    group.run()
    assert most == PASSES_MAX == 2


def test_fixed_blocks_pad_passes() -> None:
    group = Group([Rank(agreement(fixed_block=16), prompts=[5], block=3), Rank(agreement(fixed_block=16))])
    group.run()
    assert {(this.size, this.pass_rows) for this in group.units} == {(16, 16)}


def test_a_group_without_work_sleeps_at_once_and_wakes_at_the_round_it_sleeps_before() -> None:
    group = Group([Rank(agreement()) for _ in range(3)])
    assert group.run_round() is None
    group.ranks[1].rows.append(1)
    assert group.run_round() == Round(0, RoundKind.WISHES, 0)


def test_a_round_out_of_turn_is_refused() -> None:
    one = agreement()
    with pytest.raises(InternalError, match="round 0 is next"):
        one.launched(Round(3, RoundKind.DECODE, 1))
    one.launched(Round(0, RoundKind.WISHES, 0))
    with pytest.raises(InternalError, match="does not sleep"):
        one.wake()


def test_a_unit_of_another_pass_is_refused() -> None:
    one = agreement()
    one.launched(Round(0, RoundKind.PROMPT, 4, 1, 8, 0, 0))
    with pytest.raises(InternalError, match="pass 1 goes on"):
        one.launched(Round(1, RoundKind.PROMPT, 4, 2, 8, 0, 4))


def test_a_wish_beyond_every_size_is_refused() -> None:
    one = agreement(lag=1)
    one.launched(one.wake())
    one.learned([Wish(rows=SEATS + 1)])
    with pytest.raises(InternalError, match="sizes end at 8"):
        one.next()
