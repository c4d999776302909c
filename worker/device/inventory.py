"""The answer to an audit: what each placement holds on this worker, and what is free. No torch in here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from protocol.inventory import PAGES_MAX, InventoryRow, digest_of, pack_rows
from protocol.messages import Inventory


class FreeDeviceMemory(NamedTuple):
    seats: int
    chunks: int
    index_pages: int


def take_inventory(
    number: int, held: Iterable[tuple[InventoryRow, Sequence[int]]], free: FreeDeviceMemory
) -> Inventory:
    """`held` is the row of each placement and the ids of its host pages. Ids of at most PAGES_MAX pages go into
    digests, beginning with another row for each `number`."""
    by_placement = sorted(held, key=lambda it: it[0].placement)
    _add_digests(by_placement, number)
    rows = pack_rows(row for row, _ in by_placement)
    return Inventory(number, rows, free.seats, free.chunks, free.index_pages)


def _add_digests(held: Sequence[tuple[InventoryRow, Sequence[int]]], number: int) -> None:
    left = PAGES_MAX
    for step in range(len(held)):
        row, pages = held[(number + step) % len(held)]
        if row.is_leaving:
            continue
        left -= len(pages)
        if left < 0 and step:
            break
        row.digest = digest_of(np.asarray(pages, dtype=np.int32))
