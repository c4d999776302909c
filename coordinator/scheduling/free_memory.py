"""What is free while a plan is made: the ledgers' counts, less what the plan has given away or claimed so far. Pure."""

from __future__ import annotations

from coordinator.memory.ledger import Ledger
from coordinator.scheduling.preemption import Needs


class HostSpace:
    """Free host pages of one node."""

    __slots__ = ("pages",)

    def __init__(self, pages: int) -> None:
        self.pages = pages


class Space:
    """Free memory of one worker and its node; workers of a node share `host`."""

    __slots__ = ("chunks", "host", "index_pages", "seats", "slab_pages")

    def __init__(self, ledger: Ledger, worker: str, host: HostSpace) -> None:
        budget = ledger.budget(worker)
        self.seats = budget.seats_free
        self.chunks = budget.hot_chunks_free
        self.index_pages = budget.index_pages_free
        self.slab_pages = budget.slab_pages_free
        self.host = host

    def covers(self, need: Needs) -> bool:
        return (
            self.seats >= need.seats
            and self.chunks >= need.chunks
            and self.index_pages >= need.index_pages
            and self.slab_pages >= need.slab_pages
            and self.host.pages >= need.host_pages
        )

    def free(self) -> Needs:
        return Needs(self.seats, self.chunks, self.index_pages, self.slab_pages, self.host.pages)

    def take(self, need: Needs) -> None:
        self.seats -= need.seats
        self.chunks -= need.chunks
        self.index_pages -= need.index_pages
        self.slab_pages -= need.slab_pages
        self.host.pages -= need.host_pages

    def promise(self, need: Needs) -> None:
        """As much of `need` as is free may be used by nobody else."""
        free = self.free()
        self._set(free.minus(need.at_most(free)))

    def claim(self, left: Needs) -> None:
        """No more of what is free may be used than will be `left`."""
        self._set(self.free().at_most(left))

    def _set(self, free: Needs) -> None:
        self.seats, self.chunks, self.index_pages, self.slab_pages, self.host.pages = free
