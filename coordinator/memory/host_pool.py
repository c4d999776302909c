"""The HostPool actor: owner of every ledger of one node, its host pages and the GPU budgets of its workers.

A transaction is applied in one step of one actor, so a reservation over host pages, seats, hot chunks, index pages and
slab is all or nothing (I7). It goes to the journal in that very step, with what must become true together with it; the
reply has the Commit, before which no command may be sent that gives memory (I4). A change that does not fit is a
defect, since only the Scheduler asks and it plans over these very accounts: it ends the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from coordinator.actor import Actor, Reply
from coordinator.arrays import Int32Array
from coordinator.journal.journal import Commit, Journal
from coordinator.journal.records import Changed, Record
from coordinator.memory.changes import Change, apply
from coordinator.memory.ledger import Ledger
from coordinator.memory.page_ages import PageAges
from metrics.state import Buckets

#: The Scheduler waits for each reply, so one is the most there ever is; room for an audit beside it.
MAILBOX_MAX: Final = 4


class Applied(NamedTuple):
    """The page ids that each change gave out, and when it all counts."""

    given: list[Int32Array]
    commit: Commit


class Transact(msgspec.Struct, frozen=True):
    """Apply in order, and write down with `notes`."""

    changes: Sequence[Change]
    notes: Sequence[Record]
    reply: Reply[Applied]


class HostPool(Actor[Transact]):
    """`ledger` may be read by anyone between turns; only this actor changes it. `lifetimes` hears how long pages were
    held, by `clock`."""

    def __init__(
        self, node: str, ledger: Ledger, journal: Journal, *, lifetimes: Buckets, clock: Callable[[], float]
    ) -> None:
        super().__init__(f"host pool of {node}", mailbox_max=MAILBOX_MAX, batch_max=MAILBOX_MAX)
        self.node = node
        self.ledger = ledger
        self._journal = journal
        self._lifetimes = lifetimes
        self._clock = clock
        self._ages = PageAges(ledger, clock())

    async def transact(self, changes: Sequence[Change], notes: Sequence[Record] = ()) -> Applied:
        """Apply `changes` in order, all in one commit. Cancelled: they may still be applied."""
        return await self.ask(lambda reply: Transact(changes, notes, reply))

    async def handle(self, batch: list[Transact]) -> None:
        for transact in batch:
            given = [self._apply(change) for change in transact.changes]
            commit = self._journal.append([Changed(self.node, tuple(transact.changes)), *transact.notes])
            transact.reply.set(Applied(given, commit))

    def _apply(self, change: Change) -> Int32Array:
        free_before = self.ledger.pages_free
        given = apply(self.ledger, change)
        self._lifetimes.observe_all(self._ages.note(free_before, self._clock()))
        return given
