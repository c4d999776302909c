"""The HostPool actor: owner of every ledger of one node, its host pages and the GPU budgets of its workers.

A transaction is applied in one step of one actor, so a reservation over host pages, seats, hot chunks, index pages and
slab is all or nothing (I7). The reply comes when it counts: whoever asked may send commands then, not before (I4). A
change that does not fit is a defect, since only the Scheduler asks and it plans over these very accounts: it ends the
process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from coordinator.actor import Actor, Reply
from coordinator.arrays import Int32Array
from coordinator.changes import Change, apply
from coordinator.ledger import Ledger

#: The Scheduler waits for each reply, so one is the most there ever is; room for an audit beside it.
MAILBOX_MAX: Final = 4


class Transact(msgspec.Struct, frozen=True):
    """Apply in order; the reply has the page ids that each change gave out."""

    changes: Sequence[Change]
    reply: Reply[list[Int32Array]]


class HostPool(Actor[Transact]):
    """`ledger` may be read by anyone between turns; only this actor changes it."""

    def __init__(self, node: str, host_pages: int) -> None:
        super().__init__(f"host pool of {node}", mailbox_max=MAILBOX_MAX, batch_max=MAILBOX_MAX)
        self.node = node
        self.ledger = Ledger(host_pages)

    async def transact(self, changes: Sequence[Change]) -> list[Int32Array]:
        """Apply `changes` in order. Cancelled: they may still be applied."""
        return await self.ask(lambda reply: Transact(changes, reply))

    async def handle(self, batch: list[Transact]) -> None:
        for transact in batch:
            transact.reply.set([apply(self.ledger, change) for change in transact.changes])
