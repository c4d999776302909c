"""A node's accounts: host pages by id, and the GPU memory of its workers by count. Pure.

Who holds what:

    host page    is free, or has holders: placements, quarantines of lost epochs, and the cache. Its refcount is the
                 number of holders (I1); it is free again when the last one lets go. A quarantine is a holder like any
                 other, so a page can be shared by a successor and still be out of reach of all other placements until
                 the lost process is proved gone (I2).
    cached page  is full of durable rows, which never change (I3), and is in the prefix index. When only the cache holds
                 it, it is *idle*: it counts as free, and is evicted before it is given out.
    GPU budget   of one epoch of one worker: seats, hot chunks, index pages. Which chunk is the worker's
                 business. Counts return only on the worker's word (Resized, Released) or with the epoch's end.
    placement    one holding: a page list in order of position, one seat and GPU counts of one budget; or, *kept*, a
                 page list alone, after the worker has let go, until a later placement takes it over.

Every change is atomic: it happens in full, or raises and changes nothing (I7). Arrays that come out are copies: a view
of the free list handed to a caller changes under its feet (SGLang #21624, #31296).

Rejected: an interval allocator (pages are position-independent, so contiguity buys nothing); Python sets of page ids
(200 ns a page against 5 ns in numpy: a 1M-token context has 16,384); refcounts only for shared pages (two kinds of
ownership, twice the cases).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import astuple, replace

from protocol.arrays import Int32Array
from protocol.errors import CapacityError, InternalError, WrongState
from protocol.messages import WorkerCapacity
from protocol.sizing import NO_MEMORY, Memory, memory_of

#: (worker, epoch)
EpochKey = tuple[str, int]

NO_PAGES: Final[Int32Array] = np.zeros(0, dtype=np.int32)
NO_PAGES.flags.writeable = False


def is_same_process(before: int, epoch: int, first_epoch: int) -> bool:
    """Return whether the process of `epoch` was there in `before`.

    Its epochs count on from `first_epoch`, the moment of its start in milliseconds (worker/process.py); 0: unknown, and
    epochs that follow each other are of one process.
    """
    return (first_epoch or epoch - 1) <= before <= epoch


@dataclass(slots=True)
class GpuBudget:
    """The GPU memory of one epoch, and what of it is free, without host pages. `lost`: no new holders; `exited`:
    proved gone."""

    worker: str
    epoch: int
    capacity: WorkerCapacity
    free: Memory
    holders: int = 0
    lost: bool = False
    exited: bool = False

    @property
    def key(self) -> EpochKey:
        return self.worker, self.epoch


@dataclass(slots=True)
class Holding:
    """Memory that a placement holds: `gpu` of `budget`, None once only kept pages are left, and `pages`."""

    placement: int
    budget: GpuBudget | None
    gpu: Memory
    page_count: int
    pages: list[Int32Array] = field(default_factory=list)

    def all_pages(self) -> Int32Array:
        """A copy of the page list, in order of position."""
        return np.concatenate(self.pages) if self.pages else NO_PAGES.copy()


class PageCounts(NamedTuple):
    """Every page of the pool in one of four states (I1): `cached` ones are held by the cache alone. `shared` of the
    owned ones have several owners."""

    free: int
    owned: int
    quarantined: int
    cached: int
    shared: int


class Ledger:
    """Accounts of one node. Page ids are 0..pages_total-1."""

    def __init__(self, pages_total: int) -> None:
        self.pages_total = pages_total
        self._free = np.arange(pages_total - 1, -1, -1, dtype=np.int32)  # a stack: the first `pages_free` entries
        self.pages_free = pages_total
        self._refcounts = np.zeros(pages_total, dtype=np.int32)
        self._is_cached = np.zeros(pages_total, dtype=np.bool_)
        self.pages_cached = 0
        self.pages_idle = 0
        self.pages_shared = 0  # with several holders beside the cache
        self._holdings: dict[int, Holding] = {}
        self._budgets: dict[EpochKey, GpuBudget] = {}
        self._live: dict[str, GpuBudget] = {}
        self._quarantines: dict[EpochKey, list[Int32Array]] = {}

    # ---------------------------------------------------------------- queries (I7: they change nothing)

    def budget(self, worker: str) -> GpuBudget:
        """The live budget of a worker: to read, not to write. Raises WrongState when it has none."""
        budget = self._live.get(worker)
        if budget is None:
            raise WrongState("has no live epoch", field="worker", value=worker, remedy="wait until it has registered")
        return budget

    def free(self, worker: str) -> Memory:
        """Return the memory that a request could be given on `worker` now, idle pages among it. Raises WrongState as
        `budget`."""
        return replace(self.budget(worker).free, host_pages=self.pages_available)

    @property
    def pages_available(self) -> int:
        """Free pages, and idle ones, which are free once they are evicted."""
        return self.pages_free + self.pages_idle

    def has_live(self, worker: str) -> bool:
        return worker in self._live

    def has_exited(self, worker: str, epoch: int) -> bool:
        """Return whether the process of an epoch that has holders is proved gone."""
        budget = self._budgets.get((worker, epoch))
        return budget is not None and budget.exited

    def holds(self, placement: int) -> bool:
        return placement in self._holdings

    def held(self, placement: int) -> Memory:
        """Return the memory that a placement holds, GPU counts and pages. Raises InternalError for one that is not
        here."""
        holding = self._holding(placement)
        return replace(holding.gpu, host_pages=holding.page_count)

    def pages_of(self, placement: int) -> Int32Array:
        """A copy of the page list."""
        return self._holding(placement).all_pages()

    def placements_of(self, key: EpochKey) -> set[int]:
        """Placements that hold memory of an epoch."""
        return {it.placement for it in self._holdings.values() if it.budget is not None and it.budget.key == key}

    def holder_of(self, placement: int) -> EpochKey | None:
        """The epoch whose memory a placement holds; None: it only keeps pages."""
        budget = self._holding(placement).budget
        return budget.key if budget is not None else None

    def placements(self) -> set[int]:
        """Every placement that holds something."""
        return set(self._holdings)

    def kept_placements(self) -> set[int]:
        """Ended placements whose pages are kept."""
        return {it.placement for it in self._holdings.values() if it.budget is None}

    def freeing(self) -> Freeing:
        """Begin to compute what the end of a set of placements would free."""
        return Freeing(self)

    def cached_pages(self) -> Int32Array:
        """Ids of all cached pages, ascending. O(pool)."""
        return np.flatnonzero(self._is_cached).astype(np.int32)

    def is_idle(self, pages: Int32Array) -> npt.NDArray[np.bool_]:
        """Return for each page whether only the cache holds it."""
        idle: npt.NDArray[np.bool_] = self._is_cached[pages] & (self._refcounts[pages] == 1)
        return idle

    def count_idle(self, cached: Int32Array) -> int:
        """Count those of `cached`, pages that are cached, that only the cache holds."""
        return _count(self._refcounts.take(cached), 1)

    def moved(self, free_before: int) -> tuple[Int32Array, Int32Array]:
        """Pages taken and pages freed since `pages_free` was `free_before`, by one change: it does one of both."""
        return self._free[self.pages_free : free_before].copy(), self._free[free_before : self.pages_free].copy()

    @property
    def holdings_count(self) -> int:
        return len(self._holdings)

    @property
    def quarantines(self) -> tuple[EpochKey, ...]:
        return tuple(self._quarantines)

    def count_pages(self) -> PageCounts:
        """O(pool): for operators, not for decisions."""
        owners = self._refcounts.copy()
        for arrays in self._quarantines.values():
            for pages in arrays:
                owners[pages] -= 1
        owners -= self._is_cached
        owned = int(np.count_nonzero(owners))
        quarantined = self.pages_total - self.pages_available - owned
        return PageCounts(self.pages_free, owned, quarantined, self.pages_idle, int(np.count_nonzero(owners > 1)))

    def shortfall(self, worker: str, want: Memory) -> tuple[str, ...]:
        """Return what is missing now for `want`, one phrase for each kind of memory; empty: it fits."""
        kinds, places = ("host pages", "hot chunks", "index pages", "seats"), ("the pool", *[worker] * 3)
        rows = zip(kinds, astuple(want), places, astuple(self.free(worker)), strict=True)
        return tuple(
            f"needs {needed} {kind}, {place} has {there} free" for kind, needed, place, there in rows if needed > there
        )

    # ---------------------------------------------------------------- workers

    def add_worker(self, worker: str, epoch: int, capacity: WorkerCapacity) -> None:
        """Open the budget of a new epoch. Raises WrongState while an older one is live or for an epoch seen before."""
        if worker in self._live:
            raise WrongState(
                f"epoch {self._live[worker].epoch} is still live", field="worker", value=worker, remedy="end it first"
            )
        if (worker, epoch) in self._budgets or (worker, epoch) in self._quarantines:
            raise WrongState("was lost before", field="epoch", value=epoch, remedy="start a new epoch")
        budget = GpuBudget(worker, epoch, capacity, _of_gpu(memory_of(capacity)))
        self._budgets[budget.key] = self._live[worker] = budget

    def lose_worker(self, worker: str, epoch: int, *, proved_exit: bool) -> None:
        """Close a live budget to new reservations. Its holdings stay until each is kept, released or quarantined."""
        budget = self._live.get(worker)
        if budget is None or budget.epoch != epoch:
            raise InternalError(f"worker {worker} has no live epoch {epoch}")
        del self._live[worker]
        budget.lost, budget.exited = True, proved_exit
        self._forget_if_empty(budget)

    def unproved(self, worker: str) -> tuple[int, ...]:
        """Lost epochs of `worker` whose processes are not proved gone, and that have something here."""
        lost = {epoch for (name, epoch), it in self._budgets.items() if name == worker and it.lost and not it.exited}
        return tuple(sorted(lost | {epoch for name, epoch in self._quarantines if name == worker}))

    def prove_exit(self, worker: str, epoch: int) -> int:
        """The process of a lost epoch is gone: free what only its quarantine held. Returns pages freed. Idempotent."""
        budget = self._budgets.get((worker, epoch))
        if budget is not None:
            if not budget.lost:
                raise InternalError(f"epoch {epoch} of {worker} is live")
            budget.exited = True
        return sum(self._let_go(pages) for pages in self._quarantines.pop((worker, epoch), ()))

    # ---------------------------------------------------------------- placements

    def reserve(
        self,
        placement: int,
        worker: str,
        want: Memory,
        *,
        take_over: int | None = None,
        share: Int32Array = NO_PAGES,
    ) -> Int32Array:
        """Give `placement` one seat and `want` on `worker`; returns its whole page list, int32 [pages].

        The list starts with the pages kept under the ended placement `take_over`, or with `share`, pages that
        others hold, the cache among them, and whose rows never change; `want.host_pages` fresh ones follow. Raises
        CapacityError when anything is short: then nothing changed. Idle pages have to be evicted before.
        """
        want = replace(want, seats=1)
        self._check_fits(placement, worker, want)
        counts = self._refcounts.take(share)
        self._check_new(placement, take_over, share, counts)
        budget = self._live[worker]
        kept = [] if take_over is None else self._holdings.pop(take_over).pages
        self._hold(share, counts)
        pages = [array for array in (*kept, share.copy(), self._take(want.host_pages)) if array.size]
        count = sum(array.size for array in pages)
        self._holdings[placement] = holding = Holding(placement, budget, _of_gpu(want), count, pages)
        budget.holders += 1
        budget.free = budget.free.minus(holding.gpu)
        return holding.all_pages()

    def extend(self, placement: int, more: Memory) -> Int32Array:
        """Append `more.host_pages` fresh pages, add the GPU counts; returns the fresh pages. Raises CapacityError."""
        holding, budget = self._active(placement)
        self._check_fits(placement, budget.worker, more)
        pages = self._take(more.host_pages)
        if pages.size:
            holding.pages.append(pages)
            holding.page_count += pages.size
        more = _of_gpu(more)
        holding.gpu, budget.free = holding.gpu.plus(more), budget.free.minus(more)
        return pages.copy()

    def shrink(self, placement: int, less: Memory) -> None:
        """Take back GPU counts that the worker no longer uses (Resized). Host pages: see `keep`."""
        holding, budget = self._active(placement)
        if less.host_pages or less.seats or not (less.covers(NO_MEMORY) and holding.gpu.covers(less)):
            raise InternalError(f"placement {placement} cannot give back {less} of {self.held(placement)}")
        holding.gpu, budget.free = holding.gpu.minus(less), budget.free.plus(less)

    def keep(self, placement: int, pages: int) -> int:
        """Give back the seat, the GPU counts and all but the first `pages` pages; returns pages freed.

        After a loss without proof of exit all of its pages are quarantined (I2), the kept ones too: they are shared
        with the lost process, so they must be full of durable rows, which never change (I3).
        """
        holding, budget = self._active(placement)
        if not 0 <= pages <= holding.page_count:
            raise InternalError(f"placement {placement} cannot keep {pages} of {holding.page_count} pages")
        all_pages, is_suspect = holding.all_pages(), budget.lost and not budget.exited
        self._close(holding)
        holding.pages, holding.page_count = [all_pages[:pages].copy()], pages
        if not is_suspect:
            return self._let_go(all_pages[pages:])
        self._hold(holding.pages[0], self._refcounts.take(holding.pages[0]))
        self._quarantine(budget, all_pages)
        return 0

    def cache(self, pages: Int32Array) -> None:
        """Make the cache a holder of `pages`, distinct ones that others hold, full of durable rows."""
        if not _are_distinct(pages) or self._is_cached[pages].any() or not self._refcounts[pages].all():
            raise InternalError("pages to be cached must be distinct, held, and not cached before")
        self._refcounts[pages] += 1
        self._is_cached[pages] = True
        self.pages_cached += pages.size

    def evict(self, pages: Int32Array) -> int:
        """The cache lets go of `pages`, distinct ones; returns pages freed: those that were idle."""
        if not _are_distinct(pages) or not self._is_cached[pages].all():
            raise InternalError("pages to be evicted must be distinct, and cached")
        self.pages_idle -= int(np.count_nonzero(self.is_idle(pages)))
        self._is_cached[pages] = False
        self.pages_cached -= pages.size
        self._refcounts[pages] -= 1
        return self._free_unheld(pages)

    def release(self, placement: int) -> int:
        """Give back everything; returns pages freed. Those of an epoch lost without proof are quarantined (I2)."""
        holding = self._holding(placement)
        budget = holding.budget
        self._close(holding)
        del self._holdings[placement]
        pages = holding.all_pages()
        if budget is None or not budget.lost or budget.exited:
            return self._let_go(pages)
        self._quarantine(budget, pages)
        return 0

    # ---------------------------------------------------------------- invariants

    def find_mismatch(self) -> str:
        """Return what of I1 and the budgets does not add up, in words; empty: it all does. As `check_invariants`, but
        for pages that one holding has twice, in one pass: about 60 ms for 10,000 holdings and a million pages."""
        arrays = [pages for it in self._holdings.values() for pages in it.pages]
        arrays += [pages for many in self._quarantines.values() for pages in many]
        holders = np.bincount(np.concatenate([NO_PAGES, *arrays]), minlength=self.pages_total) + self._is_cached
        if wrong := np.flatnonzero(holders != self._refcounts).tolist():
            return f"refcounts of {len(wrong)} pages are not their holders' number, the first is page {wrong[0]}"
        if self._refcounts[self._free[: self.pages_free]].any():
            return "a free page has a holder"
        if self.pages_free + np.count_nonzero(holders) != self.pages_total:
            return f"{self.pages_free} free pages and those held are not {self.pages_total}"
        if self.pages_shared != np.count_nonzero(holders - self._is_cached > 1):
            return f"{self.pages_shared} pages are counted as having several holders, and have not"
        if self.pages_idle != np.count_nonzero(self._is_cached & (holders == 1)):
            return f"{self.pages_idle} pages are counted as held by the cache alone, and are not"
        return self._find_budget_mismatch()

    def _find_budget_mismatch(self) -> str:
        sums = {key: budget.free for key, budget in self._budgets.items()}
        for holding in self._holdings.values():
            if holding.budget is not None:
                sums[holding.budget.key] = sums[holding.budget.key].plus(holding.gpu)
        for key, found in sums.items():
            whole = _of_gpu(memory_of(self._budgets[key].capacity))
            for kind, count, total in zip(Memory.__struct_fields__, astuple(found), astuple(whole), strict=True):
                if count != total:
                    return f"{kind.replace('_', ' ')} of {key[0]}, held and free, are {count} of {total}"
        return ""

    def check_invariants(self) -> None:
        """Check what `find_mismatch` does, and what only a defect of this module could break; O(pool). Raises
        InternalError naming what does not add up."""
        mismatch = self.find_mismatch()
        _demand(not mismatch, mismatch)
        free, holders = self._free[: self.pages_free], Counter[EpochKey]()
        _demand(np.unique(free).size == free.size, "I1: a free page is free once")
        _demand(self.pages_cached == np.count_nonzero(self._is_cached), "cached pages are counted")
        for holding in self._holdings.values():
            pages = holding.all_pages()
            _demand(pages.size == holding.page_count, f"placement {holding.placement} counts its pages")
            _demand(_are_distinct(pages), f"placement {holding.placement} holds a page once")
            if holding.budget is not None:
                holders[holding.budget.key] += holding.gpu.seats
            else:
                _demand(holding.gpu == NO_MEMORY, f"placement {holding.placement} has left its worker")
        for key, budget in self._budgets.items():
            _demand(budget.holders == holders[key], f"{key} counts its holders, with a seat each")
            _demand(budget.free.covers(NO_MEMORY), f"{key} gives no more than it has")
            _demand(budget.lost == (self._live.get(budget.worker) is not budget), f"{key} is live or lost")
            _demand(not (budget.exited and key in self._quarantines), f"{key} is proved gone")

    # ---------------------------------------------------------------- parts

    def _holding(self, placement: int) -> Holding:
        holding = self._holdings.get(placement)
        if holding is None:
            raise InternalError(f"placement {placement} holds nothing here")
        return holding

    def _active(self, placement: int) -> tuple[Holding, GpuBudget]:
        holding = self._holding(placement)
        if holding.budget is None:
            raise InternalError(f"placement {placement} is kept: it has left its worker")
        return holding, holding.budget

    def _check_fits(self, placement: int, worker: str, want: Memory) -> None:
        if not self.free(worker).covers(want) or want.host_pages > self.pages_free:
            missing = "; ".join(self.shortfall(worker, want))
            raise CapacityError(missing, field="placement", value=placement, remedy="retry later")

    def _check_new(self, placement: int, take_over: int | None, share: Int32Array, counts: Int32Array) -> None:
        if placement in self._holdings:
            raise InternalError(f"placement {placement} holds memory already")
        if take_over is not None and self._holding(take_over).budget is not None:
            raise InternalError(f"placement {take_over} is still on its worker")
        if share.size and (take_over is not None or not _are_distinct(share)):
            raise InternalError(f"placement {placement}: shared pages must be distinct, and the first in the list")
        if share.size and _count(counts, 0):
            raise InternalError(f"placement {placement} cannot share a free page")

    def _take(self, count: int) -> Int32Array:
        """Pop `count` free pages; the caller has checked that they are there."""
        top = self.pages_free
        pages = self._free[top - count : top].copy()
        self.pages_free = top - count
        self._refcounts[pages] = 1
        return pages

    def _holders(self, pages: Int32Array) -> Int32Array:
        """Count the holders of each of `pages`, distinct ones, beside the cache."""
        holders: Int32Array = self._refcounts[pages] - self._is_cached[pages]
        return holders

    def _hold(self, pages: Int32Array, counts: Int32Array) -> None:
        """Add one holder, not the cache, to each of `pages`, distinct ones that are not free; they have `counts`."""
        holders = counts - self._is_cached.take(pages)
        self.pages_idle -= _count(holders, 0)
        self.pages_shared += _count(holders, 1)
        self._refcounts.put(pages, counts + 1)

    def _let_go(self, pages: Int32Array) -> int:
        """Remove one holder, not the cache, of each page; returns how many became free."""
        self._refcounts[pages] -= 1
        holders = self._holders(pages)
        self.pages_shared -= int(np.count_nonzero(holders == 1))
        self.pages_idle += int(np.count_nonzero(self._is_cached[pages] & (holders == 0)))
        return self._free_unheld(pages)

    def _free_unheld(self, pages: Int32Array) -> int:
        """Give back those of `pages` that have no holder any more; returns how many."""
        freed = pages[self._refcounts[pages] == 0]
        self._free[self.pages_free : self.pages_free + freed.size] = freed
        self.pages_free += freed.size
        return int(freed.size)

    def _quarantine(self, budget: GpuBudget, pages: Int32Array) -> None:
        """Make the lost epoch the holder of what a placement of it held."""
        if pages.size:
            self._quarantines.setdefault(budget.key, []).append(pages)

    def _close(self, holding: Holding) -> None:
        """End the holding's part in its budget."""
        budget = holding.budget
        if budget is None:
            return
        budget.holders -= 1
        budget.free = budget.free.plus(holding.gpu)
        holding.budget, holding.gpu = None, NO_MEMORY
        self._forget_if_empty(budget)

    def _forget_if_empty(self, budget: GpuBudget) -> None:
        if budget.lost and not budget.holders:
            del self._budgets[budget.key]


class Freeing:
    """Pages that the end of a set of placements would make available: two that share a page free nothing alone, and the
    page together. Of a ledger as it is now, which must not change meanwhile."""

    __slots__ = ("_counted", "_ended", "_held", "_ledger", "_remaining", "_to_hold")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._ended: list[int] = []
        self._to_hold: list[Int32Array] = []  # pages of placements that are not in the ledger yet, each distinct
        self._held: set[int] = set()  # those of them that a count has looked at
        self._counted: tuple[Int32Array, int] = NO_PAGES, 0  # the last count, for as long as it holds
        self._remaining: Int32Array | None = None  # holders beside the cache, once that has to be known

    def copy(self) -> Freeing:
        """The same set, to be added to apart."""
        copy = Freeing(self._ledger)
        copy._ended, copy._to_hold, copy._held = self._ended.copy(), self._to_hold.copy(), self._held.copy()
        copy._remaining = None if self._remaining is None else self._remaining.copy()
        return copy

    def add(self, placement: int) -> int:
        """Add one that is not in the set yet; returns how many pages more would be available."""
        holding = self._ledger._holding(placement)
        self._counted = NO_PAGES, 0
        if self._remaining is None and not (self._to_hold or self._held or self._ledger.pages_shared):
            self._ended.append(placement)
            return holding.page_count
        pages, remaining = holding.all_pages(), self._holders()
        remaining[pages] -= 1
        return int(np.count_nonzero(remaining[pages] == 0))

    def count_unheld(self, pages: Int32Array) -> int:
        """Count those of `pages`, which are cached, that nothing but the cache holds once the set has ended. A plan
        asks several times for the same array."""
        if pages is not self._counted[0]:
            self._counted = pages, self._count_unheld(pages)
        return self._counted[1]

    def _count_unheld(self, pages: Int32Array) -> int:
        if self._remaining is not None or self._ended:
            return int(np.count_nonzero(self._holders()[pages] == 0))
        while self._to_hold:
            self._held.update(self._to_hold.pop().tolist())
        if not self._held:
            return self._ledger.count_idle(pages)
        return len(set(pages[self._ledger.is_idle(pages)].tolist()) - self._held)

    def hold(self, pages: Int32Array) -> None:
        """A placement that is not in the ledger yet is to hold these, which are cached."""
        if not pages.size:
            return
        self._counted = NO_PAGES, 0
        if self._remaining is None:
            self._to_hold.append(pages)
        else:
            self._remaining[pages] += 1

    def _holders(self) -> Int32Array:
        """O(pool), the first time."""
        if self._remaining is None:
            self._remaining = self._ledger._refcounts - self._ledger._is_cached
            for placement in self._ended:
                self._remaining[self._ledger._holding(placement).all_pages()] -= 1
            for pages in (*self._to_hold, np.array([*self._held], dtype=np.int32)):
                self._remaining[pages] += 1
            self._to_hold.clear()
            self._held.clear()
        return self._remaining


#: Up to so many pages are looked at sooner in a list than by calls of numpy.
FEW_PAGES: Final = 64


def _count(values: Int32Array, value: int) -> int:
    """Count the `values` that equal `value`."""
    return values.tolist().count(value) if values.size <= FEW_PAGES else int(np.count_nonzero(values == value))


def _are_distinct(pages: Int32Array) -> bool:
    if pages.size <= FEW_PAGES:
        return len(set(pages.tolist())) == pages.size
    ordered = np.sort(pages)
    return not np.count_nonzero(ordered[1:] == ordered[:-1])


def _of_gpu(memory: Memory) -> Memory:
    """Return `memory` without host pages, which the pool counts."""
    return replace(memory, host_pages=0)


def _demand(condition: bool | np.bool_, what: str) -> None:
    if not condition:
        raise InternalError(f"ledger invariant broken: {what}")
