"""What a worker holds, as the coordinator's audit wants to hear it. No torch in here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from protocol.arrays import pack_int32, pack_int64
from protocol.inventory import LEAVING, PAGES_MAX, UNCHECKED, digest_of
from protocol.messages import Inventory


class Holding(NamedTuple):
    """One admission's memory. `hot_chunks` are granted, `chunks` in use, in its slab or its hot buffer."""

    placement: int
    host_pages: Sequence[int]
    index_pages: int
    hot_chunks: int
    slab_pages: int
    chunks: int
    is_leaving: bool = False


class Free(NamedTuple):
    seats: int
    chunks: int
    index_pages: int


def take_inventory(number: int, holdings: Iterable[Holding], free: Free) -> Inventory:
    """Page ids of at most PAGES_MAX pages are looked at, beginning elsewhere with each `number`."""
    rows = sorted(holdings)
    return Inventory(
        number=number,
        placements=pack_int64([row.placement for row in rows]),
        digests=pack_int64(_digests(rows, number)),
        host_pages=pack_int32([len(row.host_pages) for row in rows]),
        index_pages=pack_int32([row.index_pages for row in rows]),
        hot_chunks=pack_int32([row.hot_chunks for row in rows]),
        slab_pages=pack_int32([row.slab_pages for row in rows]),
        seats_free=free.seats,
        chunks_held=sum(row.chunks for row in rows),
        chunks_free=free.chunks,
        index_pages_free=free.index_pages,
    )


def _digests(rows: Sequence[Holding], number: int) -> list[int]:
    digests, left = [LEAVING if row.is_leaving else UNCHECKED for row in rows], PAGES_MAX
    for step in range(len(rows)):
        at = (number + step) % len(rows)
        if rows[at].is_leaving:
            continue
        left -= len(rows[at].host_pages)
        if left < 0 and step:
            break
        digests[at] = digest_of(np.asarray(rows[at].host_pages, dtype=np.int32))
    return digests
