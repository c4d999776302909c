"""Effects of a turn of the Scheduler on ledgers and on workers, as data. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from coordinator.journal.records import Record
from coordinator.memory.changes import Change
from protocol.messages import Exited, Withdraw


class LedgerStep(NamedTuple):
    """A ledger change of `node`, and what is true with it."""

    node: str
    change: Change
    note: Record | None = None


def in_transactions(steps: Sequence[LedgerStep]) -> Iterator[tuple[str, list[int]]]:
    """Nodes, and the numbers of their steps, so that each node is asked as seldom as may be.

    Steps of a node keep their order, and so do the notes of a request, which lie in one journal: rows that were kept on
    one node are given up before the request is placed on another.
    """
    by_node: dict[str, list[int]] = {}
    noted: dict[int, str] = {}
    for number, step in enumerate(steps):
        request_index = getattr(step.note, "request_index", None)
        if request_index is not None and noted.setdefault(request_index, step.node) != step.node:
            yield from by_node.items()
            by_node, noted = {}, {request_index: step.node}
        by_node.setdefault(step.node, []).append(number)
    yield from by_node.items()


class WorkerSend(NamedTuple):
    """A command that concerns no placement of a request, to the worker that is called so now."""

    worker: str
    command: Withdraw | Exited
