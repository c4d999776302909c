"""A ledger as records, and back: a summary of the journal has them instead of the ledger's changes. Pure.

Friend of coordinator.memory.ledger.Ledger: the only other code that uses its fields. A restored ledger equals the
original in everything that decides the effect of later changes, the order of free pages included.

The ledger is copied at once, and the parts are made from the copy one at a time. With 10,000 placements the copy takes
5 ms and the parts 50 ms, which is too long for one turn of the event loop. Page arrays are not copied: a ledger appends
arrays to a list and changes none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from msgspec.structs import replace

from coordinator.journal.records import BudgetImage, HoldingImage, NodePart
from coordinator.memory.ledger import EpochKey, GpuBudget, Holding, Ledger
from protocol.arrays import Int32Array, unpack_int32
from protocol.sizing import Memory, memory_of

#: Most placements of one part, and pages after which it ends: 32 KiB.
PART_HOLDINGS: Final = 64
PART_PAGES: Final = 8_192


def parts_of(node: str, ledger: Ledger) -> Iterator[NodePart]:
    """Parts of the ledger as it is now, in order; later changes of the ledger do not affect them."""
    free = ledger._free[: ledger.pages_free].copy()
    budgets = tuple(
        BudgetImage(it.worker, it.epoch, it.capacity, it.lost, it.exited) for it in ledger._budgets.values()
    )
    quarantines = [(key, tuple(pages)) for key, pages in ledger._quarantines.items()]
    holdings = [(it.placement, it.budget, it.gpu, tuple(it.pages)) for it in ledger._holdings.values()]
    return _parts(node, ledger.pages_total, free, ledger.cached_pages(), budgets, quarantines, holdings)


_Frozen = tuple[int, GpuBudget | None, Memory, tuple[Int32Array, ...]]


def _parts(
    node: str,
    pages_total: int,
    free: Int32Array,
    cached: Int32Array,
    budgets: tuple[BudgetImage, ...],
    quarantines: list[tuple[EpochKey, tuple[Int32Array, ...]]],
    holdings: list[_Frozen],
) -> Iterator[NodePart]:
    guarded = tuple((key, np.concatenate(pages).tobytes()) for key, pages in quarantines)
    yield NodePart(node, pages_total, b"", budgets, (), guarded)
    for start in range(0, free.size, PART_PAGES):
        yield NodePart(node, pages_total, free[start : start + PART_PAGES].tobytes(), (), (), ())
    for start in range(0, cached.size, PART_PAGES):
        yield NodePart(node, pages_total, b"", (), (), (), cached[start : start + PART_PAGES].tobytes())
    images: list[HoldingImage] = []
    for holding in holdings:
        images.append(_holding_image(holding))
        if len(images) == PART_HOLDINGS or sum(len(it.pages) for it in images) >= 4 * PART_PAGES:
            yield NodePart(node, pages_total, b"", (), tuple(images), ())
            images.clear()
    if images:
        yield NodePart(node, pages_total, b"", (), tuple(images), ())


def _holding_image(holding: _Frozen) -> HoldingImage:
    placement, budget, gpu, pages = holding
    key, held = budget.key if budget else None, b"".join(it.tobytes() for it in pages)
    return HoldingImage(placement, key, gpu.hot_chunks, gpu.index_pages, held)


def ledger_from(parts: Sequence[NodePart]) -> Ledger:
    """The ledger of `parts`: all of them, in order, at least one."""
    ledger = Ledger(parts[0].pages_total)
    ledger.pages_free = 0
    for part in parts:
        free = unpack_int32(part.free, "free")
        ledger._free[ledger.pages_free : ledger.pages_free + free.size] = free
        ledger.pages_free += free.size
        for image in part.budgets:
            _restore_budget(ledger, image)
        for holding in part.holdings:
            _restore_holding(ledger, holding)
        for key, data in part.quarantines:
            arrays = _without_repeats(unpack_int32(data, "pages"))
            ledger._quarantines[key] = arrays
            for pages in arrays:
                ledger._refcounts[pages] += 1
        cached = unpack_int32(part.cached, "cached")
        ledger._is_cached[cached] = True
        ledger._refcounts[cached] += 1
        ledger.pages_cached += cached.size
    ledger.pages_shared = int(np.count_nonzero(ledger._refcounts - ledger._is_cached > 1))
    ledger.pages_idle = int(np.count_nonzero(ledger._is_cached & (ledger._refcounts == 1)))
    return ledger


def _without_repeats(pages: Int32Array) -> list[Int32Array]:
    """`pages` cut before each page that the array before the cut has already: two lost placements may hold one page,
    and each counts. Released in this order, pages become free as in the original."""
    seen, cuts = set[int](), list[int]()
    for place, page in enumerate(pages.tolist()):
        if page in seen:
            cuts.append(place)
            seen.clear()
        seen.add(page)
    return [part.copy() for part in np.split(pages, cuts)]


def _restore_budget(ledger: Ledger, image: BudgetImage) -> None:
    free = replace(memory_of(image.capacity), host_pages=0)
    budget = GpuBudget(image.worker, image.epoch, image.capacity, free, lost=image.lost, exited=image.exited)
    ledger._budgets[budget.key] = budget
    if not budget.lost:
        ledger._live[budget.worker] = budget


def _restore_holding(ledger: Ledger, image: HoldingImage) -> None:
    pages: Int32Array = unpack_int32(image.pages, "pages").copy()
    budget = ledger._budgets[image.budget] if image.budget else None
    gpu = Memory(0, image.hot_chunks, image.index_pages, int(budget is not None))
    arrays = [pages] if pages.size else []
    ledger._holdings[image.placement] = Holding(image.placement, budget, gpu, pages.size, arrays)
    ledger._refcounts[pages] += 1
    if budget is not None:
        budget.holders += 1
        budget.free = budget.free.minus(gpu)


def epochs_of(ledger: Ledger) -> set[EpochKey]:
    """Epochs with a budget or with pages in quarantine."""
    return {*ledger._budgets, *ledger._quarantines}
