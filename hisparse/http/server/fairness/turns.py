"""Turns of owners of API keys, where few may work at once.

An owner with a hundred tasks and one with a single task are served alternately, and `per_owner` keeps the first from
having all turns when the second comes. `LoopTurns` divides the event loop in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

from basics.round_robin import RoundRobin
from hisparse.http.server.fairness.arrears import Arrears

#: Pieces of work in one turn of the event loop: reading a header, or a part of a body, and what follows at once.
STRANGER_PIECES: Final = 1
OWNER_PIECES: Final = 2
#: Of a turn of the event loop, in which one more piece of work has its place: more than a piece takes, so that a turn
#: does not grow by its own pieces.
PIECE_S: Final = 0.002
#: In one turn, at most: where a piece takes longer than PIECE_S, on a busy machine, turns would grow by their own.
PIECES_MAX: Final = 16


class Turns:
    """At most `at_once` turns, `per_owner` of them of one owner; owners who wait come one after the other."""

    def __init__(self, at_once: int, per_owner: int) -> None:
        self._at_once = at_once
        self._per_owner: Final = per_owner
        self._taken: Counter[str] = Counter()
        self._waiting: RoundRobin[trio.Event] = RoundRobin()  # none of them may have a turn yet

    @property
    def waiting(self) -> int:
        """Return how many wait for a turn."""
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        await self.take(owner)
        try:
            yield
        finally:
            self._give(owner)

    async def take(self, owner: str) -> None:
        """Wait for a turn; no checkpoint where there is one at once. Cancelled: it has none."""
        if self._taken.total() < self._at_once and self._may(owner):
            self._taken[owner] += 1
            return
        mine = trio.Event()
        self._waiting.add(owner, mine)
        try:
            await mine.wait()
        except trio.Cancelled:
            if mine.is_set():
                self._give(owner)
            else:
                self._waiting.remove(owner, mine)
            raise

    def renew(self, at_once: int) -> bool:
        """Take all turns back and deal `at_once`. Returns whether any is taken."""
        self._taken.clear()
        self._at_once = at_once
        self._deal()
        return bool(self._taken)

    def _may(self, owner: str) -> bool:
        return self._taken[owner] < self._per_owner

    def _give(self, owner: str) -> None:
        self._taken -= Counter((owner,))
        self._deal()

    def _deal(self) -> None:
        while self._taken.total() < self._at_once and (found := self._waiting.take(self._may)) is not None:
            owner, turn = found
            self._taken[owner] += 1
            turn.set()


class LoopTurns:
    """Pieces of work in one turn of the event loop: `pieces` at most, and parties that wait come one after the other.

    A piece is what a task does until it waits again: it reads what a client has sent, and begins an answer. Without
    this, one turn of the loop takes as long as the pieces of all clients that have sent something. Where turns take
    long because of other work, such as hundreds of streams, there is one more piece for each PIECE_S, up to PIECES_MAX.
    """

    def __init__(self, pieces: int) -> None:
        self._pieces: Final = pieces
        self._turns = Turns(pieces, per_owner=PIECES_MAX)
        self._used = trio.Event()

    async def turn(self, party: str) -> None:
        """Wait until `party` may do a piece of work; no checkpoint where it may at once. Cancelled: it has none."""
        self._used.set()
        await self._turns.take(party)

    async def run(self) -> None:
        """Deal, until cancelled. Rests while no party works."""
        while True:
            await self._used.wait()
            self._used = trio.Event()
            began = trio.current_time()
            await trio.lowlevel.checkpoint()
            took = int((trio.current_time() - began) / PIECE_S)
            if self._turns.renew(max(self._pieces, min(took, PIECES_MAX))):
                self._used.set()


class ClientTurns:
    """The event loop's turns among clients: `strangers`, who have shown no key, by address, and `owners` of keys. A
    request of an owner waits for no stranger. A party that is refused too often is slowed down by its `arrears`.
    """

    def __init__(self) -> None:
        self.strangers = LoopTurns(STRANGER_PIECES)
        self.owners = LoopTurns(OWNER_PIECES)
        self.arrears = Arrears()

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.strangers.run)
            nursery.start_soon(self.owners.run)
