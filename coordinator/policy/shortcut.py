"""Choice of the worker that a plain request goes to, without asking each of them. Pure.

A *plain* request tells workers of equal sizes apart by what is free on them and by nothing else: no rows of its prompt
are cached or kept, nothing of it is reserved, no worker has a hot floor. Then the worker that policy prefers is the one
that stands first among those that fit, and a heap knows it: an admission costs a few steps, however many workers there
are. Where no rank of a group has room for all rows, it passes all. `Policy` asks all workers where a request is not
plain, or where none of the first fits.

The heap is lazy. Within a plan what is free only shrinks, so an entry that is not true any more is too good, and is put
in its place when it comes to the top. A rank that a request is told to leave stands better from the next plan on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from operator import neg
from typing import NamedTuple, TypeAlias

from coordinator.state.worker_entry import WorkerEntry

#: Of a worker, better when it is larger; the last number tells equal workers apart.
Standing: TypeAlias = tuple[int, ...]


class _Place(NamedTuple):
    """Ascending: the best standing first."""

    negated: Standing
    worker: WorkerEntry


class WorkerOrder:
    """Workers of equal sizes. `standing_of` gives a worker's standing as it is now; no two are equal."""

    def __init__(self, workers: Iterable[WorkerEntry], standing_of: Callable[[WorkerEntry], Standing]) -> None:
        self._standing_of = standing_of
        self._heap = [self._place(worker) for worker in workers]
        heapify(self._heap)

    @property
    def any(self) -> WorkerEntry:
        """One of them, for what they have in common."""
        return self._heap[0].worker

    def first(
        self, fits: Callable[[WorkerEntry], bool], is_better: Callable[[WorkerEntry], bool]
    ) -> WorkerEntry | None:
        """The first that fits and is better; else the first that fits; None: none does."""
        heap = self._heap
        passed: list[_Place] = []
        found: WorkerEntry | None = None
        while heap:
            place = heap[0]
            now = self._place(place.worker)
            if now.negated != place.negated:
                heapreplace(heap, now)
                continue
            if fits(place.worker):
                if is_better(place.worker):
                    found = place.worker
                    break
                found = found or place.worker
            passed.append(heappop(heap))
        for place in passed:
            heappush(heap, place)
        return found

    def _place(self, worker: WorkerEntry) -> _Place:
        return _Place(tuple(map(neg, self._standing_of(worker))), worker)
