"""Memory that is free while a plan is made: the ledgers' counts, less what the plan has given away or claimed so far;
and what requests ask of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from msgspec.structs import replace

from coordinator.memory.ledger import NO_PAGES, Freeing, Ledger
from coordinator.policy.following import Following
from coordinator.state.request_state import RequestState
from coordinator.state.worker_entry import WorkerEntry
from protocol.arrays import Int32Array
from protocol.sizing import HotSize, Memory


class PlacementAsk(NamedTuple):
    """Memory that a request asks of a worker. `hot_sizes` are the hot sizes it may have; `spare_chunks` of the need are
    not its own but left for those ahead of it. `decoder`: what it asks of another worker, which is to decode what this
    one prefills; the host pages are in that. `share`: cached pages of the node, with which its prompt begins; of a pair
    on one node, those are in the decoder's ask. `by_steps`: the rest of the prompt goes through decode steps."""

    worker: WorkerEntry
    pages: int
    hot_sizes: list[HotSize]
    need: Memory
    spare_chunks: int = 0
    decoder: PlacementAsk | None = None
    share: Int32Array = NO_PAGES
    by_steps: bool = False

    @property
    def is_far(self) -> bool:
        """Return whether rows go to another node."""
        return self.decoder is not None and self.decoder.worker.node != self.worker.node

    @property
    def prefix(self) -> Int32Array:
        """Cached pages with which the prompt begins where it is computed."""
        return self.share if self.decoder is None or self.is_far else self.decoder.share

    @property
    def parts(self) -> tuple[PlacementAsk, ...]:
        return (self,) if self.decoder is None else (self, self.decoder)


class Refusal(NamedTuple):
    """A plan considered a waiting request and did not admit it. `asks`: how workers that it may join could take it on
    if they had room. `is_barred`: poison detection leaves none of them. `is_coming`: room is being made for it.
    `following`: it asks for none, and waits for pages of another request. `lacks_output_room`: it asks for none, since
    the token log has no room for more of its output."""

    asks: list[PlacementAsk]
    is_barred: bool = False
    is_coming: bool = False
    following: Following | None = None
    lacks_output_room: bool = False


class PlanOutcome(NamedTuple):
    """State that a plan leaves beside its decisions: what is free after it, the refused by request index, and by node
    the request that blocks it for those of lower rank."""

    free: FreeMemory
    refused: Mapping[int, Refusal]
    blocked: Mapping[str, RequestState]


class FreeMemory:
    """Free memory by worker. Workers of a node share its host pages: what one takes, all of them have less."""

    __slots__ = ("_by_worker", "_held_after", "_ledgers", "_names")

    def __init__(self, ledgers: Mapping[str, Ledger], workers: Iterable[WorkerEntry]) -> None:
        self._ledgers = ledgers
        self._held_after: dict[str, Freeing] = {}  # by node
        self._by_worker: dict[str, Memory] = {}
        self._names: dict[str, list[str]] = {}  # of the workers of each node
        for worker in workers:
            self._by_worker[worker.name] = ledgers[worker.node].free(worker.name)
            self._names.setdefault(worker.node, []).append(worker.name)

    def knows(self, worker: WorkerEntry) -> bool:
        return worker.name in self._by_worker

    def on(self, worker: WorkerEntry) -> Memory:
        return self._by_worker[worker.name]

    def held_after(self, node: str) -> Freeing:
        """Return the holders of the pages of `node` once the decisions so far are carried out."""
        if node not in self._held_after:
            self._held_after[node] = self._ledgers[node].freeing()
        return self._held_after[node]

    def take(self, worker: WorkerEntry, memory: Memory) -> None:
        self._set(worker, self._by_worker[worker.name].minus(memory))

    def promise(self, worker: WorkerEntry, memory: Memory) -> None:
        """Reserve as much of `memory` as is free: no other request may use it."""
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


NO_PLAN_OUTCOME: Final = PlanOutcome(FreeMemory({}, ()), {}, {})
