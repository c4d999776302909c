"""The choice of how much to draft, against drawn costs of steps and drawn acceptance: a simulation without a clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Final

import pytest

from worker.loop import draft_length
from worker.loop.draft_length import DWELL_STEPS, DraftLengths, StepSeen

LONGEST: Final = 4
STEPS: Final = 8_000


@dataclass
class Scene:
    """Steps of one batch size. `held`: of each draft, the share that holds where those before it do. `seconds` of a
    step by number of drafts, times a noise of `sigma`; one step in a thousand takes five times as long."""

    seats: int
    held: Sequence[float]
    seconds: Sequence[float]
    sigma: float = 0.0
    lag: int = 1
    rows: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    unread: list[StepSeen] = field(default_factory=list)

    @classmethod
    def drawn(cls, chance: random.Random) -> Scene:
        first = chance.uniform(0, 0.98)
        held = [first * chance.uniform(0.85, 1) ** place for place in range(LONGEST)]
        slope, jump = chance.uniform(0.02, 0.5), chance.uniform(0, 0.2)
        plain = 10 ** chance.uniform(-3, -1)
        seconds = [plain * (1 + slope * n * chance.uniform(0.8, 1.2) + jump * bool(n)) for n in range(LONGEST + 1)]
        return cls(chance.choice((1, 2, 8, 64)), held, seconds, chance.choice((0.0, 0.02, 0.05)))

    def run(self, lengths: DraftLengths, chance: random.Random, steps: int = STEPS) -> None:
        for _ in range(steps):
            before = self.lengths[-1] if self.lengths else 0
            drafts = lengths.choose(self.seats)
            holding, rows = [0] * drafts, self.seats
            for _ in range(self.seats):
                for place in range(min(drafts, before)):
                    if chance.random() >= self.held[place]:
                        break
                    holding[place] += 1
                    rows += 1
            noise = chance.lognormvariate(0, self.sigma) * (5 if chance.random() < 0.001 else 1)
            self.rows.append(rows / self.seats)
            self.times.append(self.seconds[drafts] * noise)
            self.lengths.append(drafts)
            self.unread.append(StepSeen(self.seats, drafts, self.seats, rows, holding, self.times[-1]))
            if len(self.unread) > self.lag:
                lengths.observe(self.unread.pop(0))

    def speed_of(self, drafts: int) -> float:
        """Tokens of a request in a second, where each step has so many drafts."""
        tokens, share = 1.0, 1.0
        for held in self.held[:drafts]:
            share *= held
            tokens += share
        return tokens / (self.seconds[drafts] * exp(self.sigma**2 / 2) * 1.004)

    @property
    def best(self) -> int:
        return max(range(LONGEST + 1), key=self.speed_of)

    def speed(self, first: int, last: int) -> float:
        """Of the steps that were run, from `first` to before `last`."""
        return sum(self.rows[first:last]) / sum(self.times[first:last])


@pytest.mark.parametrize("seed", range(24))
def test_speed_is_that_of_the_best_number(seed: int) -> None:
    """The second half; and from the first step on, no stretch of steps falls far below plain decoding. Drawn tokens and
    noise have a share in each stretch."""
    chance = random.Random(seed)
    scene, lengths = Scene.drawn(chance), DraftLengths(LONGEST)
    scene.run(lengths, chance)
    plain, stretch = scene.speed_of(0), 2_000
    assert scene.speed(STEPS // 2, STEPS) >= 0.98 * max(plain, scene.speed_of(scene.best)) * TOLERANCE
    assert scene.speed(0, STEPS) >= 0.98 * plain
    assert min(scene.speed(at, at + stretch) for at in range(0, STEPS, stretch)) >= 0.98 * plain * TOLERANCE
    assert lengths.switches <= STEPS / 8 / DWELL_STEPS


#: Of one seat, tokens of 2,000 drawn steps deviate by about as much.
TOLERANCE: Final = 0.99


def test_drafts_that_never_hold_cost_what_the_credit_allows() -> None:
    scene, lengths, chance = Scene(4, [0.0] * 4, [1.0, 1.9, 2.4, 2.9, 3.4]), DraftLengths(LONGEST), random.Random(1)
    scene.run(lengths, chance)
    plain = scene.speed_of(0)
    assert all(scene.speed(at, at + 1_000) >= 0.98 * plain / 1.004 for at in range(0, STEPS, 1_000))
    assert lengths.switches == 0
    assert set(scene.lengths) > {0}, "it tried"


@pytest.mark.parametrize("seats", [1, 16])
def test_drafts_that_stop_holding_are_left_soon(seats: int) -> None:
    """As when other prompts come. Drafts that hold again are found again."""
    good, chance = [0.9, 0.9, 0.85, 0.8], random.Random(seats)
    scene, lengths = Scene(seats, good, [1.0, 1.15, 1.3, 1.45, 1.6], 0.02), DraftLengths(LONGEST)
    scene.run(lengths, chance)
    assert lengths.choose(seats) >= 3
    scene.held = [0.02] * 4
    scene.run(lengths, chance, 1_000)
    left = next(at for at in range(STEPS, STEPS + 1_000) if scene.lengths[at] == 0)
    assert left - STEPS <= (200 if seats == 1 else 60)
    scene.run(lengths, chance, STEPS)
    assert scene.speed(STEPS + 2_000, 2 * STEPS) >= 0.98 * scene.speed_of(0) * TOLERANCE
    scene.held = good
    scene.run(lengths, chance, STEPS)
    assert scene.speed(len(scene.rows) - 2_000, len(scene.rows)) >= 0.97 * scene.speed_of(scene.best)


def test_contexts_that_grow_make_no_step_of_the_chosen_number_look_slow() -> None:
    """All steps take three times as long in the end: the choice stays."""
    scene, lengths, chance = Scene(8, [0.8] * 4, [1.0, 1.1, 1.2, 1.6, 2.0]), DraftLengths(LONGEST), random.Random(5)
    scene.run(lengths, chance)
    assert (best := scene.best) == 2
    before = lengths.switches
    for part in range(40):
        scene.seconds = [it * 3 ** (1 / 40) for it in scene.seconds]
        scene.run(lengths, chance, 100)
        assert scene.best == best, part
    assert scene.lengths[-4_000:].count(best) > 3_700
    assert lengths.switches == before


def test_a_new_batch_size_begins_with_what_the_nearest_chose() -> None:
    lengths, chance = DraftLengths(LONGEST), random.Random(7)
    scene = Scene(4, [0.9] * 4, [1.0, 1.05, 1.1, 1.15, 1.2])
    scene.run(lengths, chance)
    assert scene.lengths[-1] == lengths.choose(8) == LONGEST


def test_steps_beside_prompts_are_no_measure_of_seconds() -> None:
    """A step with a prompt's chunk takes ten times as long, and says as much of drafts as others."""
    lengths = DraftLengths(LONGEST)
    for number in range(400):
        drafts = lengths.choose(4)
        beside = number % 3 == 0
        lengths.observe(StepSeen(4, drafts, 4, 4, [0] * drafts, None if beside else 1.0 + drafts))
    assert set(lengths._sizes) == {4}
    assert exp(lengths._sizes[4].seconds[0].log_s) == pytest.approx(1.0)


def test_a_first_step_that_compiles_something_is_no_measure() -> None:
    lengths, chance = DraftLengths(LONGEST), random.Random(3)
    lengths.observe(StepSeen(4, 0, 4, 4, [], 60.0))
    scene = Scene(4, [0.9] * 4, [1.0, 1.05, 1.1, 1.15, 1.2])
    scene.run(lengths, chance, 400)
    assert scene.lengths[-1] == LONGEST


def test_the_named_bounds_are_what_the_test_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the credit's bound, drafts that never hold cost more than 2 %."""
    monkeypatch.setattr(draft_length, "EARNED", 0.5)
    monkeypatch.setattr(draft_length, "STALE_STEPS", 1)
    scene, lengths = Scene(4, [0.0] * 4, [1.0, 1.9, 2.4, 2.9, 3.4]), DraftLengths(LONGEST)
    scene.run(lengths, random.Random(1))
    assert scene.speed(0, STEPS) < 0.98 * scene.speed_of(0)


def test_no_trial_begins_while_prompts_are_computed() -> None:
    """Steps beside prompts have no seconds: what a trial there costs is not seen."""
    lengths, used = DraftLengths(LONGEST), []
    for number in range(4_000):
        used.append(drafts := lengths.choose(4))
        lengths.observe(StepSeen(4, drafts, 4, 4, [0] * drafts, 1.0 + drafts if number < 4 else None))
    assert sum(used) <= 2 * LONGEST


def test_trials_that_prompts_overtake_are_paid_for() -> None:
    lengths, times = DraftLengths(LONGEST), []
    for number in range(12_000):
        drafts = lengths.choose(4)
        times.append(1.0 + drafts)
        lengths.observe(StepSeen(4, drafts, 4, 4, [0] * drafts, None if number % 4 else times[-1]))
    assert sum(times) > len(times)  # some were tried
    assert all(1_500 / sum(times[at : at + 1_500]) >= 0.98 for at in range(0, len(times), 1_500))
