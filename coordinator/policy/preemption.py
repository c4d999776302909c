"""Find requests to shrink, retract or drop so that one worker can admit a request. Pure.

`find_preemption` changes nothing and answers None when all of it together would not suffice, so that no request is
retracted in vain. The order in which room is made, and why, is told in coordinator.policy.policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from typing import TypeAlias

from msgspec.structs import replace

from coordinator.state.placement_table import PlacementTable
from coordinator.state.request_state import RANK_OF, RequestState
from coordinator.state.worker_entry import WorkerEntry
from protocol.sizing import HotSize, Memory, hot_sizes_for


@dataclass(slots=True)
class Preemption:
    """Steps to take on `worker`, and what will be free once it is done and what is on its way has arrived."""

    worker: WorkerEntry
    will_be_free: Memory
    demote: list[RequestState] = field(default_factory=list)
    drop: list[RequestState] = field(default_factory=list)
    retract: list[RequestState] = field(default_factory=list)
    shrink: list[tuple[RequestState, HotSize]] = field(default_factory=list)

    @property
    def cost(self) -> tuple[int, int, int, int]:
        """Cost to compare remedies by: prefills repeated, index reloads, requests demoted, hot rows lost."""
        return len(self.drop), len(self.retract), len(self.demote), len(self.shrink)


#: Adds the end of a request's placement to a set; returns how many host pages more the set would free with it: fewer
#: than it holds when a quarantine, or a request outside the set, holds them too.
Frees: TypeAlias = Callable[[RequestState], int]


def all_pages() -> Frees:
    """Return what an empty set frees, where no page has two holders."""
    return lambda entry: entry.pages


def find_preemption(
    placement_table: PlacementTable,
    worker: WorkerEntry,
    free: Memory,
    need: Memory,
    asker: RequestState,
    freeing: Callable[[], Frees] = all_pages,
) -> Preemption | None:
    """Find how `worker`, with `free` now, can come to cover `need` of `asker`; None: not by any right that it has.

    The remedy may be empty: then what is on its way suffices, and waiting is all there is to do. `freeing` begins a
    set of requests that end.
    """
    if need.seats > free.seats + len(worker.leaving) and not (worker.ranks and worker.ranks[-1] > asker.rank):
        return None  # the common case of a full worker, told without looking at the requests on it
    lower = [entry for entry in _lower(placement_table, worker, asker) if not entry.prefills_only]
    lower.sort(key=RANK_OF, reverse=True)
    going = _going(placement_table, worker)
    floored = _keeps_to_floor(asker, worker)
    being_freed = _being_freed(placement_table, worker, _freed(going, freeing), floored=floored)
    remedy = Preemption(worker, free.plus(being_freed))
    victims = _relieve_gpu(placement_table, remedy, need, lower, asker)
    if victims is None or not _relieve_host(placement_table, remedy, need, victims, going, asker, freeing):
        return None
    remedy.retract = [victim for victim in victims if victim not in remedy.drop]
    return remedy


def _going(placement_table: PlacementTable, worker: WorkerEntry) -> list[RequestState]:
    """Requests that leave workers of the node and keep no pages."""
    node = placement_table.of_node(worker.node)
    return [entry for other in node for entry in other.leaving.values() if entry.frees_pages]


def _freed(entries: Sequence[RequestState], freeing: Callable[[], Frees]) -> int:
    """Host pages that the end of them all frees."""
    return sum(map(freeing(), entries))


def _being_freed(placement_table: PlacementTable, worker: WorkerEntry, host_pages: int, *, floored: bool) -> Memory:
    """Sum what leaving requests hold, shrinking ones give back, and starting ones will: all of it when they are there
    for their prompt alone."""
    leaving = list(worker.leaving.values())
    shrinking = sum(entry.chunks - entry.resizing.hot_chunks for entry in worker.resizing.values() if entry.resizing)
    starting = [entry for entry in placement_table.staying_on(worker) if not entry.runs]
    passing = [entry for entry in starting if entry.prefills_only]
    later = sum(entry.chunks - _floor(entry, worker, floored=floored).hot_chunks for entry in starting)
    return Memory(
        seats=len(leaving) + len(passing),
        hot_chunks=sum(entry.chunks for entry in leaving) + shrinking + later,
        index_pages=sum(entry.pages for entry in (*leaving, *passing)),
        host_pages=host_pages,
    )


def _relieve_gpu(
    placement_table: PlacementTable, remedy: Preemption, need: Memory, lower: list[RequestState], asker: RequestState
) -> list[RequestState] | None:
    """Choose whom to shrink and, if that is not enough, the fewest of `lower`, worst first; None: not enough."""
    worker, gone, floored = remedy.worker, 0, _keeps_to_floor(asker, remedy.worker)
    shrinkable = {
        entry.request_index: entry.chunks - _floor(entry, worker, floored=floored).hot_chunks
        for entry in placement_table.staying_on(worker)
        if entry is not asker and entry.runs and entry.resizing is None
    }
    spare = sum(shrinkable.values())
    while True:
        free = remedy.will_be_free
        if replace(free, hot_chunks=free.hot_chunks + spare, host_pages=need.host_pages).covers(need):
            break
        if gone == len(lower):
            return None
        victim = lower[gone]
        gone += 1
        spare -= shrinkable.pop(victim.request_index, 0)
        remedy.will_be_free = free.plus(_gpu_of(victim, worker, starting=not victim.runs, floored=floored))
    _shrink_largest(placement_table, remedy, need.hot_chunks, shrinkable, floored=floored)
    return lower[:gone]


def _gpu_of(victim: RequestState, worker: WorkerEntry, *, starting: bool, floored: bool) -> Memory:
    """Return what a victim gives beyond what is already counted as on its way from it."""
    resizing = victim.chunks - victim.resizing.hot_chunks if victim.resizing else 0
    counted = victim.chunks - _floor(victim, worker, floored=floored).hot_chunks if starting else resizing
    return Memory(0, victim.chunks - counted, victim.pages, 1)


def _shrink_largest(
    placement_table: PlacementTable, remedy: Preemption, chunks: int, shrinkable: dict[int, int], *, floored: bool
) -> None:
    """One hot size at a time from the largest hot buffer, until `chunks` will be free."""
    worker = remedy.worker
    missing = chunks - remedy.will_be_free.hot_chunks
    if missing <= 0:
        return
    targets: dict[int, HotSize] = {}
    sizes = [
        (-placement_table.entries[request_index].chunks, request_index)
        for request_index, spare in shrinkable.items()
        if spare
    ]
    heapify(sizes)
    while missing > 0:
        size, request_index = sizes[0]
        hot_size = next_lower(placement_table.entries[request_index], -size, worker, floored=floored)
        if hot_size is None:  # as small as it gets: the next largest
            heapreplace(sizes, (0, request_index))
            continue
        targets[request_index] = hot_size
        missing -= -size - hot_size.hot_chunks
        heapreplace(sizes, (-hot_size.hot_chunks, request_index))
    remedy.shrink = [(placement_table.entries[request_index], hot_size) for request_index, hot_size in targets.items()]
    remedy.will_be_free = replace(remedy.will_be_free, hot_chunks=chunks - missing)


def _relieve_host(
    placement_table: PlacementTable,
    remedy: Preemption,
    need: Memory,
    victims: list[RequestState],
    going: list[RequestState],
    asker: RequestState,
    freeing: Callable[[], Frees],
) -> bool:
    """Choose kept requests to demote, then victims to drop, worst first; False: not enough. What they free is computed
    for the set of them all, with those `going`."""
    missing = need.host_pages - remedy.will_be_free.host_pages
    if missing <= 0:
        return True
    frees, total = freeing(), missing
    for entry in going:
        frees(entry)
    node = remedy.worker.node
    will_be_kept = [e for w in placement_table.of_node(node) for e in w.leaving.values() if not e.frees_pages]
    soon = [entry for entry in will_be_kept if _may_demote(entry, asker)]
    missing -= sum(map(frees, soon))
    kept = [e for e in placement_table.kept.values() if e.node == node and not e.transfer_id and _may_demote(e, asker)]
    kept.sort(key=lambda entry: (entry.rank > asker.rank, entry.rank), reverse=True)
    others = [e for w in placement_table.of_node(node) for e in _lower(placement_table, w, asker) if e not in victims]
    others.sort(key=RANK_OF, reverse=True)
    doubtful: list[tuple[list[RequestState], RequestState]] = []
    for entries, chosen in ((kept, remedy.demote), (victims, remedy.drop), (others, remedy.drop)):
        for entry in entries:
            if missing <= 0:
                break
            chosen.append(entry)
            gained = frees(entry)
            missing -= gained
            if not gained:
                doubtful.append((chosen, entry))
    if missing > 0:
        return False
    enough = total + _freed(going, freeing)
    for chosen, entry in doubtful:  # what it shares may still be held by a request outside the set
        others = [it for it in (*going, *soon, *remedy.demote, *remedy.drop) if it is not entry]
        if _freed(others, freeing) >= enough:
            chosen.remove(entry)
    remedy.will_be_free = replace(remedy.will_be_free, host_pages=need.host_pages - missing)
    return True


def _may_demote(entry: RequestState, asker: RequestState) -> bool:
    return entry is not asker and (entry.rank > asker.rank or entry.ordered.held)


def _lower(placement_table: PlacementTable, worker: WorkerEntry, asker: RequestState) -> Iterator[RequestState]:
    return (placement_table.by_rank[rank] for rank in worker.ranks if rank > asker.rank)


def size_at_floor(entry: RequestState, worker: WorkerEntry) -> HotSize | None:
    """The hot size at the floor of `worker` for a request there that is below it; None: it is not, or is pinned."""
    size = worker.given_sizes(entry.pages)[0]
    return size if entry.chunks < size.hot_chunks and not worker.pins(entry) else None


def _keeps_to_floor(asker: RequestState, worker: WorkerEntry) -> bool:
    """A request that is to come does, be it from a worker that drains; one that runs there need not."""
    return not asker.runs or asker.worker != worker.name


def _sizes(pages: int, worker: WorkerEntry, *, floored: bool) -> list[HotSize]:
    """A running request that is nearly out of pages may push others below the floor, rather than off the worker."""
    return worker.given_sizes(pages) if floored else hot_sizes_for(pages, worker.capacity)


def _floor(entry: RequestState, worker: WorkerEntry, *, floored: bool) -> HotSize:
    """The smallest that policy may make it."""
    if worker.pins(entry):
        return entry.hot
    smallest = _sizes(entry.pages, worker, floored=floored)[0]
    return smallest if smallest.hot_chunks < entry.hot.hot_chunks else entry.hot


def next_lower(entry: RequestState, chunks: int, worker: WorkerEntry, *, floored: bool = False) -> HotSize | None:
    """The next hot size below `chunks` chunks."""
    if worker.pins(entry):
        return None
    lower = [it for it in _sizes(entry.pages, worker, floored=floored) if it.hot_chunks < chunks]
    return lower[-1] if lower else None
