"""What is free while a plan is made: the ledgers' counts, less what the plan has given away or claimed so far; and what
requests ask of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from coordinator.memory.ledger import Ledger
from coordinator.scheduling.entries import RequestEntry, WorkerEntry
from coordinator.scheduling.preemption import Needs
from protocol.sizing import HotSize


class PlacementAsk(NamedTuple):
    """What a request asks of a worker. `hot_sizes` are the hot sizes it may have; `spare_chunks` of the need are not
    its own but left for those ahead of it. `decoder`: what it asks of another worker, which is to decode what this one
    prefills; the host pages are in that."""

    worker: WorkerEntry
    pages: int
    hot_sizes: list[HotSize]
    need: Needs
    spare_chunks: int = 0
    decoder: PlacementAsk | None = None

    @property
    def parts(self) -> tuple[PlacementAsk, ...]:
        return (self,) if self.decoder is None else (self, self.decoder)


class Refusal(NamedTuple):
    """A plan considered a waiting request and did not admit it. `asks`: how workers that it may join could take it on
    if they had room. `is_barred`: suspicion leaves none of them. `is_coming`: room is being made for it."""

    asks: list[PlacementAsk]
    is_barred: bool = False
    is_coming: bool = False


class PlanOutcome(NamedTuple):
    """What a plan leaves beside its decisions: what is free after it by worker, the refused by slot, and by node the
    request that blocks it for those of lower rank."""

    spaces: Mapping[str, Space]
    refused: Mapping[int, Refusal]
    blocked: Mapping[str, RequestEntry]


NO_PLAN_OUTCOME: Final = PlanOutcome({}, {}, {})


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
