"""Who works next, where few may work at once: owners of API keys take turns.

An owner with a hundred tasks and one with a single task are served alternately, and `per_owner` keeps the first from
having all turns when the second comes. `SubmissionPace` keeps all of them together within a rate.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio


class Turns:
    """At most `at_once` turns, `per_owner` of them of one owner; owners who wait come one after the other."""

    def __init__(self, at_once: int, per_owner: int) -> None:
        self._at_once: Final = at_once
        self._per_owner: Final = per_owner
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, deque[trio.Event]] = {}  # who comes next is first

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        await self._wait(owner)
        try:
            yield
        finally:
            self._give(owner)

    async def _wait(self, owner: str) -> None:
        mine = trio.Event()
        self._waiting.setdefault(owner, deque()).append(mine)
        self._deal()
        try:
            await mine.wait()
        except trio.Cancelled:
            if mine.is_set():
                self._give(owner)
            else:
                self._drop(owner, mine)
            raise

    def _give(self, owner: str) -> None:
        self._taken[owner] -= 1
        if not self._taken[owner]:
            del self._taken[owner]
        self._deal()

    def _drop(self, owner: str, turn: trio.Event) -> None:
        self._waiting[owner].remove(turn)
        if not self._waiting[owner]:
            del self._waiting[owner]

    def _deal(self) -> None:
        while self._taken.total() < self._at_once:
            owner = next((it for it in self._waiting if self._taken[it] < self._per_owner), None)
            if owner is None:
                return
            turns = self._waiting.pop(owner)
            turns.popleft().set()
            self._taken[owner] += 1
            if turns:
                self._waiting[owner] = turns  # behind the others


class SubmissionPace:
    """At most `per_s` in a second, and `burst` more at once after as long a silence."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s: Final = per_s
        self._burst_s: Final = burst / per_s
        self._spent_until = 0.0  # when all that was spent so far has been gained again

    async def spend(self, cost: float) -> None:
        """Wait until there is as much. Cancelled: it is spent."""
        now = trio.current_time()
        self._spent_until = max(self._spent_until, now) + cost / self._per_s
        await trio.sleep_until(self._spent_until - self._burst_s)
