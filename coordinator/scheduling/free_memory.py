"""What is free while a plan is made: the ledgers' counts, less what the plan has given away or claimed so far. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from coordinator.memory.ledger import Ledger
from coordinator.scheduling.entries import WorkerEntry
from protocol.sizing import Memory


class FreeMemory:
    """By worker. Workers of a node share its host pages: what one takes, all of them have less."""

    __slots__ = ("_by_worker", "_names")

    def __init__(self, ledgers: Mapping[str, Ledger], workers: Iterable[WorkerEntry]) -> None:
        self._by_worker: dict[str, Memory] = {}
        self._names: dict[str, list[str]] = {}  # of the workers of each node
        for worker in workers:
            self._by_worker[worker.name] = ledgers[worker.node].free(worker.name)
            self._names.setdefault(worker.node, []).append(worker.name)

    def on(self, worker: WorkerEntry) -> Memory:
        return self._by_worker[worker.name]

    def take(self, worker: WorkerEntry, memory: Memory) -> None:
        self._set(worker, self._by_worker[worker.name].minus(memory))

    def promise(self, worker: WorkerEntry, memory: Memory) -> None:
        """As much of `memory` as is free may be used by no other request."""
        free = self._by_worker[worker.name]
        self._set(worker, free.minus(memory.at_most(free)))

    def claim(self, worker: WorkerEntry, left: Memory) -> None:
        """No more of what is free may be used than will be `left`."""
        self._set(worker, self._by_worker[worker.name].at_most(left))

    def add_host_pages(self, node: str, pages: int) -> None:
        for name in self._names.get(node, ()):
            free = self._by_worker[name]
            self._by_worker[name] = replace(free, host_pages=free.host_pages + pages)

    def _set(self, worker: WorkerEntry, free: Memory) -> None:
        more_pages = free.host_pages - self._by_worker[worker.name].host_pages
        if more_pages:
            self.add_host_pages(worker.node, more_pages)
        self._by_worker[worker.name] = free
