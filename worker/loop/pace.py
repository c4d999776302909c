"""The prompt work between two decode steps, so that the gaps of decoding requests hold a target. Pure.

A *plain step* is a decode step by itself; a *gap* is what a decoding request sees from token to token, a plain step and
the units between it and the step before. Both times are measured on the device as work goes on. A unit's time is kept
by its size: the mean, and the mean deviation from it, since the target is one of the slowest gaps in a hundred. A size
that was not measured, or not among the last STALE_UNITS, is taken to grow with the power GROWTH from the next one that
was, since all units read the same weights: so it is tried again now and then.

    target    worker.gap_target_ms; auto: AUTO_FACTOR plain steps; 0: none
    budget    what the target leaves of a plain step and a margin: seconds of units between two steps
    margin    measured: a gap above the target widens it, one within narrows it by far less, so that SLOW_GAPS of all
              gaps are above (the stochastic approximation of a quantile, Robbins and Monro 1951)
    block     the largest size whose unit takes no longer than a plain step, nor than the budget
    copies    of rows that a unit waits for: measured by row. What the units launched since do not cover is taken from
              the budget, as time of that unit
    units     as many as fit the budget, and at least one, since prompts must go on; the last ones smaller, to fill it

Where no request decodes, blocks are as large as can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, Protocol

from protocol.settings import GapTarget

#: Of automatic targets: plain steps to a gap.
AUTO_FACTOR: Final = 2.2
#: Shares of a target: the margin before gaps were measured, at most, and what a gap above the target adds.
MARGIN: Final = 0.05
MARGIN_MAX: Final = 0.3
MARGIN_STEP: Final = 0.01
#: The share of gaps that may be above the target: less than the one in a hundred that it allows.
SLOW_GAPS: Final = 0.005
#: Deviations from the mean at which about one unit in a hundred is slower.
DEVIATIONS: Final = 2.0
#: Weight of the latest measurement.
WEIGHT: Final = 1 / 8
#: Exponent by which time grows with rows between a size that was measured and one that was not.
GROWTH: Final = 0.6
#: Units after which a size that was not launched counts as not measured.
STALE_UNITS: Final = 512
#: Units between two steps at most: no step is put off for longer, whatever the target.
UNITS_MAX: Final = 64
#: What a unit leaves of a budget is filled by a smaller one, of so many times fewer rows at most: still fewer are not
#: worth reading weights for.
FILLED_AT_MOST: Final = 8
#: The smallest block that is chosen beside steps: below it a unit takes hardly less time.
BLOCK_TOKENS_MIN: Final = 64


@dataclass
class MovingTime:
    """Mean and mean deviation of seconds, of which the latest weigh most."""

    mean: float
    deviation: float = 0.0
    at: int = 0  # the number of the latest

    def take(self, seconds: float, at: int = 0) -> None:
        off, self.at = seconds - self.mean, at
        self.mean += off * WEIGHT
        self.deviation += (abs(off) - self.deviation) * WEIGHT

    @property
    def slow(self) -> float:
        return self.mean + DEVIATIONS * self.deviation


class Gap:
    """The units between two steps: `take` each before it is launched. `left_s`: seconds that they may still take."""

    def __init__(self, budget_s: float) -> None:
        self.left_s, self._taken = budget_s, 0

    def take(self, seconds: float) -> bool:
        """Take one more unit, of that many seconds, if it may go before the next step; returns whether. The first one
        always may; where units were not measured (0) and the budget is finite, no other one may."""
        if self._taken >= UNITS_MAX or (self._taken and not self._has_room(seconds)):
            return False
        self.left_s -= seconds
        self._taken += 1
        return True

    def _has_room(self, seconds: float) -> bool:
        return self.left_s == inf or 0 < seconds <= self.left_s


class Pacing(Protocol):
    """A pace, as the loop sees it. A port: tests draw sizes at random."""

    def block(self, *, beside_steps: bool, left_s: float = inf) -> int: ...
    def gap(self, *, beside_steps: bool) -> Gap: ...
    def unit_s(self, rows: int) -> float: ...
    def units(self, rows: int, *, beside_steps: bool) -> int: ...
    def stepped(self, seconds: float) -> None: ...
    def waited(self, seconds: float) -> None: ...
    def ran(self, rows: int, seconds: float) -> None: ...
    def copied(self, rows: int, seconds: float) -> None: ...
    def copy_s(self, rows: int) -> float: ...
    @property
    def plain_step_s(self) -> float: ...
    @property
    def target_s(self) -> float: ...
    @property
    def is_target_too_small(self) -> bool: ...


class Pace:
    """The measured pace of one worker."""

    def __init__(self, target_ms: GapTarget, block_max: int, *, fixed_block: int = 0) -> None:
        """`block_max`: rows of the largest unit. `fixed_block`: rows of every unit, whatever it takes (deterministic
        mode); 0: as the target asks for."""
        self._target_ms, self._fixed = target_ms, fixed_block
        self._sizes: Sequence[int] = block_sizes(block_max)
        self._units: dict[int, MovingTime] = {}
        self._step: MovingTime | None = None
        self._copied_row: MovingTime | None = None
        self._margin = MARGIN
        self._ran = 0

    def stepped(self, seconds: float) -> None:
        """A decode step took `seconds` on the device."""
        if self._step is None:
            self._step = MovingTime(seconds)
        self._step.take(seconds)

    def waited(self, seconds: float) -> None:
        """A gap with prompt units in it took `seconds`."""
        if 0 < self.plain_step_s < self.target_s:
            change = 1 - SLOW_GAPS if seconds > self.target_s else -SLOW_GAPS
            self._margin = min(MARGIN_MAX, max(0.0, self._margin + MARGIN_STEP * change))

    def ran(self, rows: int, seconds: float) -> None:
        """A unit of `rows` took `seconds` on the device."""
        size, self._ran = self._size(rows), self._ran + 1
        whole = seconds * (size / max(rows, self._sizes[0])) ** GROWTH
        known = self._units.get(size)
        if known is None or self._is_stale(known):
            self._units[size] = MovingTime(whole, at=self._ran)
        else:
            known.take(whole, self._ran)

    def copied(self, rows: int, seconds: float) -> None:
        """`rows` of one layer came back from host memory in `seconds` on the device."""
        if self._copied_row is None:
            self._copied_row = MovingTime(seconds / rows)
        self._copied_row.take(seconds / rows)

    def copy_s(self, rows: int) -> float:
        """Seconds that a copy of `rows` of a layer takes, but for one in a hundred; infinite: nothing was measured."""
        return inf if self._copied_row is None else rows * self._copied_row.slow

    @property
    def plain_step_s(self) -> float:
        """Seconds of a plain step; 0: not measured."""
        return self._step.mean if self._step is not None else 0.0

    @property
    def target_s(self) -> float:
        """The gap that is held; 0: none."""
        return AUTO_FACTOR * self.plain_step_s if self._target_ms == "auto" else self._target_ms / 1e3

    @property
    def is_target_too_small(self) -> bool:
        """Tell whether a target that was set is below a plain step, as far as that was measured."""
        return self._target_ms != "auto" and 0 < self.target_s < self.plain_step_s

    @property
    def budget_s(self) -> float:
        """Seconds of units between two steps; infinite without a target, 0 where it leaves none."""
        if self._target_ms == 0:
            return inf
        return max(0.0, (1 - self._margin) * self.target_s - self.plain_step_s)

    def unit_s(self, rows: int) -> float:
        """Seconds that a unit of `rows` takes, but for one in a hundred; 0: nothing was measured."""
        size = self._size(rows)
        fresh = [other for other, known in self._units.items() if not self._is_stale(known)]
        if not fresh:
            return 0.0
        nearest = min(fresh, key=lambda other: (abs(other.bit_length() - size.bit_length()), other))
        seconds: float = self._units[nearest].slow * (size / nearest) ** GROWTH
        return seconds

    def _is_stale(self, known: MovingTime) -> bool:
        return self._ran - known.at > STALE_UNITS

    def block(self, *, beside_steps: bool, left_s: float = inf) -> int:
        """Rows of the next unit at most. `beside_steps`: requests decode, and the unit is to take `left_s` at most."""
        if self._fixed:
            return self._fixed
        if not beside_steps or self._target_ms == 0:
            return self._sizes[-1]
        if not self._units:
            return self._sizes[0]
        limit = min(self.budget_s, self.plain_step_s)
        whole = max((size for size in self._sizes if self.unit_s(size) <= limit), default=self._sizes[0])
        fits = (size for size in self._sizes if whole <= FILLED_AT_MOST * size <= FILLED_AT_MOST * whole)
        return max((size for size in fits if self.unit_s(size) <= left_s), default=whole)

    def units(self, rows: int, *, beside_steps: bool) -> int:
        """Units of `rows` between two steps; many where no request decodes."""
        if not beside_steps or self._target_ms == 0:
            return UNITS_MAX
        unit = self.unit_s(rows)
        return max(1, min(UNITS_MAX, int(self.budget_s / unit))) if unit else 1

    def gap(self, *, beside_steps: bool) -> Gap:
        return Gap(self.budget_s if beside_steps else inf)

    def _size(self, rows: int) -> int:
        return next((size for size in self._sizes if size >= rows), self._sizes[-1])


def block_sizes(largest: int) -> list[int]:
    """Rows of units: `largest`, and its halves down to BLOCK_TOKENS_MIN."""
    sizes = [largest]
    while sizes[-1] > BLOCK_TOKENS_MIN:
        sizes.append(-(-sizes[-1] // 2))
    return sizes[::-1]
