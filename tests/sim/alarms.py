"""Waking at a moment of the simulated clock, beside trio's own deadlines.

A trio timeout is a cancel scope, an exception and its way up through the task: some 20 us, two thousand times a seed.
An alarm is an entry in a heap and a task that is rescheduled: a fifth of that. Links, executors and disks of the
simulation use it; the real code has trio's timeouts, as ever.
"""

from __future__ import annotations

import heapq
import math
from typing import Final

import outcome
import trio
import trio._core._run
from trio.testing import MockClock

#: Simulated time advances by multiples of this.
GRAIN_S: Final = 0.005


class Alarms:
    """All alarms of one run, and its clock, which jumps to multiples of GRAIN_S: what is due within one grain happens
    in one round, in any order.

    A third of the rounds are left of a clock that stops at each deadline, and more things meet in each.
    """

    def __init__(self) -> None:
        self.clock = MockClock(autojump_threshold=0.0)
        self.clock._autojump = self._jump  # type: ignore[method-assign]
        self.clock.current_time = lambda: self.clock._virtual_base  # type: ignore[method-assign]  # its rate is 0
        self._due: list[tuple[float, int, Alarm]] = []
        self._sequence = 0

    def add(self, at: float, alarm: Alarm) -> None:
        self._sequence += 1
        heapq.heappush(self._due, (at, self._sequence, alarm))

    def _jump(self) -> None:
        """Every task rests: go to the next moment at which one is to wake."""
        while self._due and not self._due[0][2].waits_until(self._due[0][0]):
            heapq.heappop(self._due)
        now, deadlines = self.clock.current_time(), trio._core._run.GLOBAL_RUN_CONTEXT.runner.deadlines
        due = min(deadlines.next_deadline(), self._due[0][0] if self._due else math.inf)
        if now < due < math.inf:
            grains = math.ceil(due / GRAIN_S - 1e-6)
            self.clock.jump(max(grains * GRAIN_S, due) - now)
        now = self.clock.current_time()
        while self._due and self._due[0][0] <= now:
            at, _, alarm = heapq.heappop(self._due)
            if alarm.waits_until(at):
                alarm.ring()


#: Those of the run that is under way.
ALARMS: Final[trio.lowlevel.RunVar[Alarms]] = trio.lowlevel.RunVar("alarms")


class Alarm:
    """One task sleeps on it; others set it to ring earlier."""

    def __init__(self) -> None:
        self._sleeper: trio.lowlevel.Task | None = None
        self._at = math.inf

    def waits_until(self, at: float) -> bool:
        return self._sleeper is not None and self._at == at

    async def sleep_until(self, at: float) -> None:
        """A checkpoint, however early `at` is. Cancelled: no task sleeps on it."""
        if at <= trio.current_time():
            await trio.lowlevel.checkpoint()
            return
        self._sleeper = trio.lowlevel.current_task()
        self._wake_at(at)
        await trio.lowlevel.wait_task_rescheduled(self._abort)

    def set(self, at: float) -> None:
        """Ring at `at`, if that is earlier."""
        if self._sleeper is None or at >= self._at:
            return
        if at <= trio.current_time():
            self.ring()
        else:
            self._wake_at(at)

    def ring(self) -> None:
        """Wake who sleeps on it."""
        assert self._sleeper is not None
        sleeper, self._sleeper = self._sleeper, None
        trio.lowlevel.reschedule(sleeper, outcome.Value(None))

    def _wake_at(self, at: float) -> None:
        self._at = at
        if at < math.inf:
            ALARMS.get().add(at, self)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._sleeper = None
        return trio.lowlevel.Abort.SUCCEEDED


async def sleep_until(at: float) -> None:
    """As trio.sleep_until."""
    await Alarm().sleep_until(at)


async def sleep(seconds: float) -> None:
    """As trio.sleep."""
    await Alarm().sleep_until(trio.current_time() + seconds)
