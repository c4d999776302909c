"""Who works next, where few may work at once: owners of API keys take turns.

An owner with a hundred tasks and one with a single task are served alternately, and `per_owner` keeps the first from
having all turns when the second comes. `LoopTurns` divides the event loop in the same way. `SubmissionPace` keeps all
of them together within a rate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

from common.round_robin import Rota
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
        self._at_once: Final = at_once
        self._per_owner: Final = per_owner
        self._taken: Counter[str] = Counter()
        self._rota: Rota[trio.Event] = Rota()

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        await self._wait(owner)
        try:
            yield
        finally:
            self._give(owner)

    async def _wait(self, owner: str) -> None:
        mine = trio.Event()
        self._rota.add(owner, mine)
        self._deal()
        try:
            await mine.wait()
        except trio.Cancelled:
            if mine.is_set():
                self._give(owner)
            else:
                self._rota.remove(owner, mine)
            raise

    def _give(self, owner: str) -> None:
        self._taken[owner] -= 1
        if not self._taken[owner]:
            del self._taken[owner]
        self._deal()

    def _deal(self) -> None:
        while self._taken.total() < self._at_once:
            found = self._rota.take(lambda owner: self._taken[owner] < self._per_owner)
            if found is None:
                return
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
        self._left = pieces
        self._rota: Rota[trio.Event] = Rota()
        self._used = trio.Event()

    async def turn(self, party: str) -> None:
        """Wait until `party` may do a piece of work; no checkpoint where it may at once. Cancelled: it has none."""
        if self._left > 0 and not self._rota:
            self._left -= 1
            self._used.set()
            return
        mine = trio.Event()
        self._rota.add(party, mine)
        self._used.set()
        try:
            await mine.wait()
        except trio.Cancelled:
            if not mine.is_set():
                self._rota.remove(party, mine)
            raise

    async def run(self) -> None:
        """Deal, until cancelled. Rests while no party works."""
        while True:
            await self._used.wait()
            self._used = trio.Event()
            began = trio.current_time()
            await trio.lowlevel.checkpoint()
            took = int((trio.current_time() - began) / PIECE_S)
            self._left = max(self._pieces, min(took, PIECES_MAX))
            self._deal()
            if self._rota:
                self._used.set()

    def _deal(self) -> None:
        while self._left > 0 and (found := self._rota.take()) is not None:
            found[1].set()
            self._left -= 1
            self._used.set()


class ClientTurns:
    """The event loop's turns among clients: `strangers`, who have shown no key, by address, and `owners` of keys. A
    request of an owner waits for no stranger. A party that is refused too often is slowed down: arrears.py.
    """

    def __init__(self) -> None:
        self.strangers = LoopTurns(STRANGER_PIECES)
        self.owners = LoopTurns(OWNER_PIECES)
        self._arrears = Arrears()

    def refused(self, owner: str) -> None:
        """The owner's next request may wait for it."""
        self._arrears.refused(owner, trio.current_time())

    def refusal_at(self, address: str) -> float:
        """When a client there, who has shown no key, may be refused: at once, unless this is later than now."""
        return self._arrears.refused(address, trio.current_time())

    def next_request_at(self, owner: str) -> float:
        """When one of `owner` may be read: at once, unless this is later than now."""
        return self._arrears.next_at(owner, trio.current_time())

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.strangers.run)
            nursery.start_soon(self.owners.run)


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
