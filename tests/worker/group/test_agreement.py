"""All ranks decide the same rounds, whatever they wish and whenever they read; no wish waits for ever."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import InternalError
from worker.group.agreement import Agreement, Round, RoundKind, Wish, chunk_sizes

CHUNK = 64
SEATS = 8
SIZES = [1, 2, 4, SEATS]


def agreement(lag: int = 2, prompt_rounds_max: int = 1) -> Agreement:
    return Agreement(
        lag=lag,
        batch_sizes=SIZES,
        chunk_sizes=chunk_sizes(CHUNK, deterministic=False),
        prompt_rounds_max=prompt_rounds_max,
    )


@dataclass
class Rank:
    """A rank with prompts to compute and rows to decode, `steps` for each."""

    agreement: Agreement
    prompts: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    unread: list[list[Wish]] = field(default_factory=list)
    brought: list[tuple[Round, int]] = field(default_factory=list)

    @property
    def has_work(self) -> bool:
        return bool(self.prompts or self.rows)

    def decide(self) -> Round | None:
        while (found := self.agreement.next()) is None and self.unread:
            self.agreement.learned(self.unread.pop(0))
        return found

    def launch(self, this: Round) -> Wish:
        self.agreement.launched(this)
        if this.kind is RoundKind.PROMPT:
            self._take_chunk(this)
        elif this.kind is RoundKind.DECODE:
            rows = min(this.size, len(self.rows))
            self.brought.append((this, rows))
            self.rows = [left - 1 for left in self.rows[:rows] if left > 1] + self.rows[rows:]
        chunks = [min(CHUNK, tokens - start) for tokens in self.prompts for start in range(0, tokens, CHUNK)]
        return Wish(min(SEATS, len(self.rows)), tuple(chunks[: self.agreement.lag]))

    def _take_chunk(self, this: Round) -> None:
        chunk = min(CHUNK, self.prompts[0]) if self.prompts else 0
        if not 0 < chunk <= this.size:
            self.brought.append((this, 0))
            return
        self.brought.append((this, chunk))
        self.prompts[0] -= chunk
        if not self.prompts[0]:
            del self.prompts[0]
            self.rows.append(3)


@dataclass
class Group:
    ranks: list[Rank]
    rounds: list[Round] = field(default_factory=list)

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


WORK = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 200)), max_size=30)


@settings(max_examples=300)
@given(WORK, st.integers(1, 4), st.integers(1, 2), st.integers(1, 3))
def test_ranks_agree_and_all_work_is_done(
    arrivals: list[tuple[int, int, int]], size: int, lag: int, prompt_rounds_max: int
) -> None:
    """`arrivals`: rounds to run before, rank, tokens of the prompt."""
    group = Group([Rank(agreement(lag, prompt_rounds_max)) for _ in range(size)])
    for rounds, rank, tokens in arrivals:
        for _ in range(rounds):
            group.run_round()
        group.ranks[rank % size].prompts.append(tokens)
    while group.run_round() is not None:
        assert len(group.rounds) < 1_000
    assert not any(rank.has_work for rank in group.ranks)
    assert all(brought <= this.size for rank in group.ranks for this, brought in rank.brought)


def test_prompt_rounds_between_decode_rounds_are_bounded() -> None:
    for bound in (1, 2, 4):
        decoding, prompting = Rank(agreement(2, bound), rows=[40]), Rank(agreement(2, bound), prompts=[64] * 20)
        group = Group([decoding, prompting])
        while decoding.rows:
            group.run_round()
        kinds = [this.kind for this in group.rounds]
        first, last = kinds.index(RoundKind.DECODE), len(kinds) - kinds[::-1].index(RoundKind.DECODE)
        between = "".join("p" if kind is RoundKind.PROMPT else "d" for kind in kinds[first:last]).split("d")
        assert max(map(len, between)) == bound


def test_a_chunk_is_not_wished_twice() -> None:
    group = Group([Rank(agreement(), prompts=[CHUNK])])
    while group.run_round() is not None:
        pass
    assert [this.kind for this in group.rounds].count(RoundKind.PROMPT) == 1


def test_a_prompt_round_has_the_size_of_its_largest_chunk() -> None:
    group = Group([Rank(agreement(), prompts=[5]), Rank(agreement(), prompts=[20]), Rank(agreement())])
    group.run_round()
    assert group.run_round() == Round(1, RoundKind.PROMPT, 32)
    assert [rank.brought[0][1] for rank in group.ranks] == [5, 20, 0]


def test_deterministic_prompt_rounds_have_one_size() -> None:
    assert chunk_sizes(512, deterministic=True) == [512]
    assert chunk_sizes(512, deterministic=False) == [64, 128, 256, 512]


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


def test_a_wish_beyond_every_size_is_refused() -> None:
    one = agreement(lag=1)
    one.launched(one.wake())
    one.learned([Wish(rows=SEATS + 1)])
    with pytest.raises(InternalError, match="sizes end at 8"):
        one.next()
