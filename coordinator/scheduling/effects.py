"""What a turn of the Scheduler does to ledgers and to workers, as data. Pure."""

from __future__ import annotations

from typing import NamedTuple

from coordinator.journal.records import Record
from coordinator.memory.changes import Change
from protocol.messages import Exited, Withdraw


class LedgerStep(NamedTuple):
    """A ledger change of `node`, and what is true with it."""

    node: str
    change: Change
    note: Record | None = None


class WorkerSend(NamedTuple):
    """A command that concerns no placement of a request, to the worker that is called so now."""

    worker: str
    command: Withdraw | Exited
