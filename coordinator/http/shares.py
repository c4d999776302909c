"""What the owners of API keys may hold at once of what is scarce: places, bytes, turns. Fair by owner.

`Shares` refuses, `Turns` lets wait. An owner is an API key, or every client where there are no keys. What nobody else
uses an owner may use, so that a share is not a wall; but what an owner lacks of its share is never refused to it,
whatever the others hold already.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio


class Shares:
    """`limit` of something, divided among the owners who hold any of it.

    An owner with less than limit / owners is let in past the limit, which the others have used up. All together they
    then hold at most limit x (1 + 1/2 + ... + 1/owners): 1.5 x for two hostile keys, 3 x for ten.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._held: Counter[str] = Counter()

    def take(self, owner: str, count: int = 1) -> bool:
        """False: refused, and nothing was taken."""
        owners = len(self._held) + (owner not in self._held)
        share = max(1, self.limit // owners)
        if self.total + count > self.limit and self._held[owner] + count > share:
            self._forget(owner)
            return False
        self._held[owner] += count
        self.total += count
        return True

    def give(self, owner: str, count: int = 1) -> None:
        self._held[owner] -= count
        self.total -= count
        self._forget(owner)

    def _forget(self, owner: str) -> None:
        if not self._held[owner]:
            del self._held[owner]


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
