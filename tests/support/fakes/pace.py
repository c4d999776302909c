"""A pace that measures nothing: sizes of units, and how many go before a step, are drawn from a seed. So that passes
are left between any two of their layers, at any row, and the same seed gives the same run."""

from __future__ import annotations

import random
from math import inf

from worker.loop.pace import Gap


class DrawnGap(Gap):
    """Takes `units`."""

    def __init__(self, units: int) -> None:
        super().__init__(0.0)
        self._units = units

    def take(self, seconds: float) -> bool:
        del seconds
        self._units -= 1
        return self._units >= 0


class DrawnPace:
    """See worker.loop.pace.Pacing. Units of 1 to `block_max` rows, up to `units_max` of them before a step."""

    plain_step_s = target_s = 0.0
    is_target_too_small = False

    def __init__(self, seed: int, block_max: int, *, units_max: int = 4, fixed_block: int = 0) -> None:
        self._random, self._block_max = random.Random(seed), block_max
        self._units_max, self._fixed = units_max, fixed_block

    def block(self, *, beside_steps: bool, left_s: float = 0.0) -> int:
        del beside_steps, left_s
        most = self._block_max
        return self._fixed or self._random.choice((most, most, most, -(-most // 2), self._random.randint(1, most)))

    def gap(self, *, beside_steps: bool) -> Gap:
        del beside_steps
        return DrawnGap(self._random.randint(0, self._units_max))

    def unit_s(self, rows: int) -> float:
        del rows
        return 0.0

    def units(self, rows: int, *, beside_steps: bool) -> int:
        del rows, beside_steps
        return self._random.randint(1, self._units_max)

    def stepped(self, seconds: float) -> None:
        del seconds

    def waited(self, seconds: float) -> None:
        del seconds

    def ran(self, rows: int, seconds: float) -> None:
        del rows, seconds

    def copied(self, rows: int, seconds: float) -> None:
        del rows, seconds

    def copy_s(self, rows: int) -> float:
        del rows
        return inf


class EvenPace(DrawnPace):
    """One unit of `block_max` rows before each step."""

    def __init__(self, block_max: int) -> None:
        super().__init__(0, block_max, fixed_block=block_max)

    def gap(self, *, beside_steps: bool) -> Gap:
        del beside_steps
        return DrawnGap(1)

    def units(self, rows: int, *, beside_steps: bool) -> int:
        del rows, beside_steps
        return 1
