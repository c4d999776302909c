"""A ledger as one record, and back: what a summary of the journal has instead of all its changes. Pure.

Friend of coordinator.memory.ledger.Ledger: the only other code that knows its fields. An image that was read back
equals the ledger in everything that decides what later changes do, the order of free pages included.
"""

from __future__ import annotations

import numpy as np

from coordinator.arrays import Int32Array, unpack_int32
from coordinator.journal.records import BudgetImage, HoldingImage, NodeImage
from coordinator.memory.ledger import EpochKey, GpuBudget, Holding, Ledger


def image_of(node: str, ledger: Ledger) -> NodeImage:
    return NodeImage(
        node,
        ledger.pages_total,
        ledger._free[: ledger.pages_free].tobytes(),
        tuple(BudgetImage(it.worker, it.epoch, it.capacity, it.lost, it.exited) for it in ledger._budgets.values()),
        tuple(_holding_image(holding) for holding in ledger._holdings.values()),
        tuple((key, np.concatenate(pages).tobytes()) for key, pages in ledger._quarantines.items()),
    )


def _holding_image(holding: Holding) -> HoldingImage:
    return HoldingImage(
        holding.admission,
        holding.budget.key if holding.budget else None,
        holding.hot_chunks,
        holding.index_pages,
        holding.slab_pages,
        holding.all_pages().tobytes(),
    )


def ledger_from(image: NodeImage) -> Ledger:
    ledger = Ledger(image.pages_total)
    free = unpack_int32(image.free, "free")
    ledger._free[: free.size] = free
    ledger.pages_free = free.size
    for it in image.budgets:
        _restore_budget(ledger, it)
    for holding in image.holdings:
        _restore_holding(ledger, holding)
    for key, data in image.quarantines:
        pages = unpack_int32(data, "pages").copy()
        ledger._quarantines[key] = [pages]
        ledger._refcounts[pages] += 1
    return ledger


def _restore_budget(ledger: Ledger, image: BudgetImage) -> None:
    capacity = image.capacity
    counts = (capacity.seats, capacity.hot_chunks, capacity.index_pages, capacity.slab_pages)
    budget = GpuBudget(image.worker, image.epoch, capacity, *counts, lost=image.lost, exited=image.exited)
    ledger._budgets[budget.key] = budget
    if not budget.lost:
        ledger._live[budget.worker] = budget


def _restore_holding(ledger: Ledger, image: HoldingImage) -> None:
    pages: Int32Array = unpack_int32(image.pages, "pages").copy()
    budget = ledger._budgets[image.budget] if image.budget else None
    ledger._holdings[image.admission] = Holding(
        image.admission,
        budget,
        image.hot_chunks,
        image.index_pages,
        image.slab_pages,
        pages.size,
        [pages] if pages.size else [],
    )
    ledger._refcounts[pages] += 1
    if budget is not None:
        budget.holders += 1
        budget.seats_free -= 1
        budget.hot_chunks_free -= image.hot_chunks
        budget.index_pages_free -= image.index_pages
        budget.slab_pages_free -= image.slab_pages


def epochs_of(ledger: Ledger) -> set[EpochKey]:
    """Epochs that still matter: with a budget, or with pages in quarantine."""
    return {*ledger._budgets, *ledger._quarantines}
