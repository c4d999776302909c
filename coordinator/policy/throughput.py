"""The smallest hot size that a worker gives, so that hot buffers never cost throughput. Pure.

The *hot floor* of a worker is one of the hot sizes of its requests: the smallest managed class (full admission), a
larger one, or resident (nothing is swapped in, and fewer requests run). With the worker's memory it says how many run:

    requests(floor) = min(demand, chunks / chunks(floor))
    step(n, m)      = base + by_request * n + by_miss * m        microseconds; m rows missed in a step
    misses(n)       = n * selected * share(chunks / n)           share: of a request's rows, by the chunks that it has
    tokens a second = n / step

`by_request` holds what grows with the batch at the lengths that run; `by_miss` the time of a missed row that compute
does not hide, so that overlap needs no term of its own. The three are estimated by recursive least squares with
directional forgetting: from the mean step time of each look, and from the time that steps waited for swap-in, once that
is LOAD_SHARE_MIN of a step. A model that SURPRISES looks in a row contradict, all to one side, begins anew: what is
learnt at one size of the batch stays until that size comes again, so that looks which mislead would stay. What one
point of operation cannot tell apart begins as a prior: compute half in `base`, half in `by_request`; a missed row at
LINK_BYTES_PER_US. The prior is optimistic about the link: a size that may pay is tried, and one that cannot is not.
Shares are measured by hot size; unknown ones lie on the line between their neighbours. With that line tokens a second
are n / (a + b n), so that the best floor is the smallest or the largest; others are chosen only once their misses were
seen.

    look      at least LOOK_STEPS steps; the only time that this module knows. Its step time is that of steps without
              a prompt beside them: prompts take what they take with any floor. `running` are the requests of those
              steps, as the worker counts them: with others, a model learns that fewer requests cost the same
    change    at most one in `dwell` looks, once CONFIRM looks in a row predict GAIN more for the same floor; `dwell`
              doubles each time a change takes the last one back, up to DWELL_MAX, and is DWELL_MIN again after as many
              looks without a change. SETTLE looks after a change, and the first ones, are not learnt from
    probe     where nothing is missed, nothing is learnt of misses. So while the floor keeps requests waiting, one
              request gets the smallest hot size every PROBE_EVERY looks, until PROBE_LOOKS have seen it. Its misses are
              learnt, its step is not: few rows take longer each than many

A change of what requests select is answered within REACTION_LOOKS_MAX. Rejected: a limit on the number that run (it
says nothing of who is resident, and must follow each change of lengths); trying sizes at random without a model (each
try costs retractions); a model of the link (streams overlap as the kernels do; a measured slope says what is left).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from protocol.sizing import RESIDENT, HotSize

#: Steps between two looks at least.
LOOK_STEPS: Final = 32
#: More tokens a second that a change must promise, ...
GAIN: Final = 0.02
#: ... in this many looks in a row.
CONFIRM: Final = 3
#: Looks after a change that are not learnt from.
SETTLE: Final = 4
DWELL_MIN: Final = 10
DWELL_MAX: Final = 160
PROBE_EVERY: Final = 40
PROBE_LOOKS: Final = 2
#: A probe that no look has seen for so long is given up.
PROBE_WAIT: Final = 12
REACTION_LOOKS_MAX: Final = PROBE_EVERY + PROBE_WAIT + SETTLE + CONFIRM + DWELL_MAX
#: Prior: what a missed row takes, and how much of compute grows with the batch.
LINK_BYTES_PER_US: Final = 60_000.0
BATCH_SHARE: Final = 0.5
#: Measured load is learnt from where it is that much of a step.
LOAD_SHARE_MIN: Final = 0.05
#: Of a step's time: the standard deviation of what a look measures, and of what the prior says.
NOISE: Final = 0.02
DOUBT: Final = 0.5
FORGETTING: Final = 0.97
#: So many looks in a row that are all longer, or all shorter, than the model says by so many standard deviations: it is
#: wrong, and begins anew.
SURPRISES: Final = 3
SURPRISE: Final = 4.0
#: Weight of the latest look in shares and counts.
WEIGHT: Final = 0.5

assert CONFIRM + SETTLE <= DWELL_MIN


class Look(NamedTuple):
    """Work of a worker since the last look, in means over its `steps`. `shares`: of looked-up rows, those missed by
    requests that had a hot size (its slots) all the time. `load_us` 0: swap-in was not timed."""

    steps: int
    step_us: float
    load_us: float
    running: float
    selected: float  # rows that a request looks up in a step
    shares: Mapping[int, float]
    misses: float  # rows missed in a step by all
    miss_bytes: float  # that a missed row loads


class FloorRoom(NamedTuple):
    """Room that hot buffers may use. `sizes` ascend by chunks, the last is resident; `demand`: requests that could run
    here if hot chunks were plenty."""

    chunks: int
    sizes: tuple[HotSize, ...]
    demand: int


class Forecast(NamedTuple):
    """Forecast at one floor: how many run, how long their step is, how many tokens a second they make."""

    hot_slots: int
    requests: int
    step_us: float
    tokens_per_s: float


class StepModel:
    """The three coefficients of a step and their covariance; see the top of this file."""

    def __init__(self, look: Look) -> None:
        load = look.load_us if _has_load(look) else look.misses * look.miss_bytes / LINK_BYTES_PER_US
        compute = max(look.step_us - load, 0.1 * look.step_us)
        by_miss = load / look.misses if look.misses else look.miss_bytes / LINK_BYTES_PER_US
        self.values = [(1 - BATCH_SHARE) * compute, BATCH_SHARE * compute / look.running, by_miss]
        prior = [(DOUBT * max(value, 1e-9)) ** 2 for value in self.values]
        self._covariance = [[prior[i] if i == j else 0.0 for j in range(3)] for i in range(3)]

    def learn(self, look: Look) -> None:
        noise = (NOISE * look.step_us) ** 2
        self._update((1.0, look.running, look.misses), look.step_us, noise)
        if _has_load(look):
            self._update((0.0, 0.0, look.misses), look.load_us, noise)

    def surprise(self, look: Look) -> int:
        """1: the step takes longer than the model and its doubts allow; -1: it is shorter; 0: neither."""
        row = 1.0, look.running, look.misses
        doubt = sum(row[i] * self._covariance[i][j] * row[j] for i in range(3) for j in range(3))
        error = look.step_us - sum(row[i] * self.values[i] for i in range(3))
        if error * error <= SURPRISE**2 * (max(doubt, 0.0) + (NOISE * look.step_us) ** 2):
            return 0
        return 1 if error > 0 else -1

    def step_us(self, running: float, misses: float) -> float:
        base, by_request, by_miss = self.values
        return max(base + by_request * running + by_miss * misses, 1.0)

    def _update(self, row: tuple[float, float, float], measured: float, noise: float) -> None:
        """One measurement of row * values. Only what it concerns is forgotten a little before."""
        spread = [sum(line[j] * row[j] for j in range(3)) for line in self._covariance]
        known = sum(row[i] * spread[i] for i in range(3))
        if known <= 0:
            return  # rounded away: it is as sure as it can be
        doubt = known / FORGETTING
        error = measured - sum(row[i] * self.values[i] for i in range(3))
        gain = [it / known * doubt / (doubt + noise) for it in spread]
        self.values = [self.values[i] + gain[i] * error for i in range(3)]
        shrink = (doubt - doubt * doubt / (doubt + noise) - known) / known**2
        self._covariance = [
            [self._covariance[i][j] + spread[i] * spread[j] * shrink for j in range(3)] for i in range(3)
        ]
        self._lift()

    def _lift(self) -> None:
        """No coefficient is negative. One that would be is 0, and the others are what they are likeliest to be then: so
        sums that were measured stay, which a limit on each coefficient by itself would raise each time."""
        for _ in self.values:
            least = min(range(3), key=lambda i: self.values[i])
            below, column = self.values[least], [line[least] for line in self._covariance]
            if below >= 0 or column[least] <= 0:
                break
            self.values = [
                value - below * doubt / column[least] for value, doubt in zip(self.values, column, strict=True)
            ]
            self.values[least] = 0.0
        self.values = [max(0.0, value) for value in self.values]


def _has_load(look: Look) -> bool:
    return look.misses > 0 and look.load_us >= LOAD_SHARE_MIN * look.step_us


class MissShares:
    """Share of a request's looked-up rows that it misses, by hot size: measured, else on a line between neighbours."""

    def __init__(self) -> None:
        self.measured: dict[int, float] = {}
        self._stale: set[int] = set()

    def expect(self, slots: int) -> None:
        """Let the next measure of this size count alone: the size was not measured for long."""
        self._stale.add(slots)

    def learn(self, shares: Mapping[int, float]) -> None:
        """Sizes that were not seen this time move as those that were: what changed is what requests select."""
        moved = [new / old for slots, new in shares.items() if (old := self.measured.get(slots, 0.0)) > 0]
        ratio = sum(moved) / len(moved) if moved else 1.0
        for slots in self.measured.keys() - shares.keys():
            self.measured[slots] = min(1.0, self.measured[slots] * (1 + WEIGHT * (ratio - 1)))
        for slots, share in shares.items():
            before = share if slots in self._stale else self.measured.get(slots, share)
            self.measured[slots] = WEIGHT * share + (1 - WEIGHT) * before
        self._stale -= shares.keys()

    def at(self, chunks: float, sizes: Sequence[HotSize]) -> float:
        """Return the share of misses of requests with `chunks` chunks each in the mean: some have the next smaller
        size, some the next larger."""
        points = [(it.hot_chunks, self.measured[it.hot_slots]) for it in sizes if it.hot_slots in self.measured]
        points = [it for it in points if it[0] < sizes[-1].hot_chunks] + [(sizes[-1].hot_chunks, 0.0)]
        if chunks <= points[0][0]:
            return points[0][1]
        for (below, worse), (above, better) in pairwise(points):
            if chunks < above:
                return worse + (better - worse) * (chunks - below) / (above - below)
        return 0.0


@dataclass(slots=True)
class HotFloor:
    """The floor of one worker: call `look` with each look, then read the rest.

    `floor`: slots of the smallest hot size to give (0 resident); None: the smallest class, full admission.
    `probe_slots`: a smaller size that one request is to have for a while; None: none is. `now` and `best`: forecasts at
    the floor and at the best one, as of the last look that was learnt from. `reason` says what was decided last.
    """

    floor: int | None = None
    probe_slots: int | None = None
    reason: str = "nothing was observed yet"
    changes: int = 0
    now: Forecast | None = None
    best: Forecast | None = None
    model: StepModel | None = None
    shares: MissShares = field(default_factory=MissShares)
    dwell: int = DWELL_MIN
    _selected: float = 0.0
    _since_change: int = 0
    _since_probe: int = PROBE_EVERY
    _probe_seen: int = 0
    _left: int | None = None  # the floor before the last change
    _wanted: int | None = None
    _votes: int = 0
    _surprises: int = 0  # in a row, negative ones of shorter steps

    def look(self, look: Look, room: FloorRoom) -> None:
        """Take in what was observed, and choose."""
        self._since_change += 1
        self._since_probe += 1
        if self._since_change >= DWELL_MAX:
            self.dwell = DWELL_MIN
        self.shares.learn(look.shares)
        self._selected = look.selected if not self._selected else _towards(self._selected, look.selected)
        if self.probe_slots is not None:
            self._see_probe(look)
        elif self._since_change > SETTLE:
            self._learn(look)
            self._choose(room)

    def _learn(self, look: Look) -> None:
        surprise = 0 if self.model is None else self.model.surprise(look)
        self._surprises = self._surprises + surprise if surprise * self._surprises > 0 else surprise
        if self.model is None or abs(self._surprises) >= SURPRISES:
            self.model, self._surprises = StepModel(look), 0
        self.model.learn(look)

    def _see_probe(self, look: Look) -> None:
        self._probe_seen += self.probe_slots in look.shares
        if self._probe_seen >= PROBE_LOOKS or self._since_probe >= PROBE_WAIT:
            self.probe_slots, self._since_probe = None, 0

    def _choose(self, room: FloorRoom) -> None:
        held = [it for it in room.sizes[1:] if it.hot_chunks <= room.chunks]  # by an empty worker
        forecasts = [self._forecast(size, room) for size in (room.sizes[0], *held)]
        at = self._place([it.hot_slots for it in forecasts])
        self.now, self.best = forecasts[at], max(forecasts, key=lambda it: it.tokens_per_s)
        gain = self.best.tokens_per_s / self.now.tokens_per_s - 1
        limited = at > 0 and forecasts[0].requests > self.now.requests
        if limited and (self._since_probe >= PROBE_EVERY or not self.shares.measured):
            self._begin_probe(room.sizes[0].hot_slots)
        elif gain <= GAIN:
            self._votes = 0
            self.reason = f"no other size promises {GAIN:.0%} more"
        else:
            self._vote(self.best, gain)

    def _begin_probe(self, slots: int) -> None:
        self.probe_slots, self._probe_seen, self._since_probe = slots, 0, 0
        self.shares.expect(slots)
        self.reason = f"one request has {slots} slots for a while, to see what it misses"

    def _vote(self, best: Forecast, gain: float) -> None:
        self._votes = self._votes + 1 if best.hot_slots == self._wanted else 1
        self._wanted = best.hot_slots
        if self._votes < CONFIRM or self._since_change < self.dwell:
            self.reason = f"{size_name(best.hot_slots)} promises {gain:.0%} more, and is watched"
            return
        self.dwell = min(2 * self.dwell, DWELL_MAX) if best.hot_slots == self._left else self.dwell
        self._left = self.now.hot_slots if self.now else None
        self.floor, self._votes, self._since_change = best.hot_slots, 0, 0
        self.changes += 1
        self.reason = f"{size_name(best.hot_slots)} promises {gain:.0%} more tokens a second"

    def _place(self, slots: Sequence[int]) -> int:
        """Return the place of the floor among these hot sizes, or of the first above it: lengths change, and sizes with
        them."""
        if self.floor is None:
            return 0
        above = (at for at, it in enumerate(slots) if it == RESIDENT or RESIDENT < self.floor <= it)
        return next(above, 0)

    def _forecast(self, size: HotSize, room: FloorRoom) -> Forecast:
        assert self.model is not None
        requests = max(1, min(room.demand, room.chunks // max(size.hot_chunks, 1)))
        misses = requests * self._selected * self.shares.at(room.chunks / requests, room.sizes)
        step_us = self.model.step_us(requests, misses)
        return Forecast(size.hot_slots, requests, step_us, requests / step_us * 1e6)


def size_name(hot_slots: int) -> str:
    return "resident" if hot_slots == RESIDENT else f"{hot_slots} slots"


def _towards(value: float, latest: float) -> float:
    return value + WEIGHT * (latest - value)
