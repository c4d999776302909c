"""swap_in and replay_misses in numpy, over the tensors of a CPU. Contract: kernels/swap_in.py.

Misses in ascending position take victims in eviction order.

Each row's top-k is sorted to find duplicates, and the result scattered back. Rejected: a mark per token of the
context (memory and clearing grow with the context), a loop over batch rows (call overhead dominates at k=128).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.layout import SLOT_ABSENT
from kernels.reference.lru import NEVER, Bools, Ints, eviction_keys, forget, key_slot, slot_rows, table_entries
from kernels.state import DeviceState, MissPlan, StepBatch, Tripwire, active_rows

NO_TOKEN: Final = np.iinfo(np.int32).max  # sorts behind every position


def swap_in(
    state: DeviceState,
    group: int,
    topk: Tensor,
    batch: StepBatch,
    out_rows: Tensor,
    plan: MissPlan,
    *,
    beside: bool = False,
) -> None:
    """See kernels.swap_in."""
    del beside
    for depth, rows in enumerate(batch.depths()):
        part = topk[rows], batch.at_depth(rows), out_rows[rows], plan.at_depth(rows)
        _resolve_depth(state, group, *part, all_or_none=depth > 0)


def _resolve_depth(
    state: DeviceState,
    group: int,
    topk: Tensor,
    batch: StepBatch,
    out_rows: Tensor,
    plan: MissPlan,
    *,
    all_or_none: bool,
) -> None:
    active = active_rows(state, batch).numpy()
    if not active.any():  # of a depth at which no request drafts
        plan.count.zero_()
        out_rows.fill_(-1)
        return
    found = _look_up(state, group, topk.numpy(), batch, active)
    _count(state.hits, group, found, found.hit)
    row, column = (found.hit & found.managed[:, None]).nonzero()
    state.stamp.numpy()[group, found.rows[row, column]] = state.now.numpy()[found.seats[row]]
    plan.count.zero_()
    if found.miss.any():
        rejected = _load(state, group, found, plan, all_or_none=all_or_none)
        if rejected is not None:
            batch.rejected.numpy()[rejected] = 1
        g = state.geometry
        replay_misses(state, g.layers_of_group(group // g.heads)[0], plan, group % g.heads)
    out_rows.numpy()[np.arange(len(found.rows))[:, None], found.order] = found.rows


def replay_misses(state: DeviceState, layer: int, plan: MissPlan, head: int = 0) -> None:
    """See kernels.swap_in."""
    row, column = (np.arange(plan.device_row.shape[1]) < plan.count.numpy()[:, None]).nonzero()
    if len(row):
        pages, offsets = plan.host_page.numpy()[row, column], plan.host_offset.numpy()[row, column]
        rows = plan.device_row.numpy()[row, column]
        g = state.geometry
        for plane in g.planes_of(head):
            host, device = state.host_row_words[plane][:, layer].numpy(), state.words(layer, plane).numpy()
            if g.slot_tokens == 1:
                device[rows] = host[pages, offsets]
            else:  # a slot holds a page
                device.reshape(-1, *host.shape[1:])[rows] = host[pages]


@dataclass(eq=False)
class _Found:
    """Each row's top-k in ascending position; [B, k] unless noted. A valid entry is a hit or a miss, others neither."""

    seats: NDArray[np.int64]  # [B], 0 for padding
    managed: Bools  # [B]
    order: NDArray[np.int64]  # place of the entry in the caller's top-k
    tokens: NDArray[np.int64]  # units
    first: Bools  # not a duplicate of its left neighbour
    hit: Bools
    miss: Bools
    index_rows: NDArray[np.int64]  # place of the token in slot_of
    rows: NDArray[np.int64]  # device row, -1 where there is none (yet)


def _look_up(state: DeviceState, group: int, topk: Ints, batch: StepBatch, active: Bools) -> _Found:
    seats = np.where(active, batch.seats.numpy(), 0).astype(np.int64)
    managed = state.hot_slots.numpy()[seats] > 0
    units = -(-batch.lengths.numpy() // state.geometry.slot_tokens)
    inside = (topk >= 0) & (topk < units[:, None]) & active[:, None]
    _trip(state, Tripwire.POSITION, (topk != -1) & ~inside & active[:, None])
    place_bits = topk.shape[1].bit_length()
    ranked = np.where(inside, topk, NO_TOKEN).astype(np.int64) << place_bits | np.arange(topk.shape[1])
    ranked.sort(axis=1)
    order = ranked & (1 << place_bits) - 1
    ranked >>= place_bits
    inside = ranked != NO_TOKEN
    first = np.ones_like(inside)
    first[:, 1:] = ranked[:, 1:] != ranked[:, :-1]
    tokens = np.where(inside, ranked, 0)
    hit, miss, index_rows, rows = _resolve(state, group, seats[:, None], managed[:, None], tokens, inside)
    _trip(state, Tripwire.UNGRANTED, inside & ~hit & ~miss)
    return _Found(seats, managed, order, tokens, first, hit, miss, index_rows, rows)


def _resolve(
    state: DeviceState, group: int, seats: Ints, managed: Bools, tokens: NDArray[np.int64], inside: Bools
) -> tuple[Bools, Bools, NDArray[np.int64], NDArray[np.int64]]:
    """hit, miss, index_rows and rows of `_Found`; `seats` and `managed` are [B, 1]."""
    each = state.geometry.page_slots
    index_pages = table_entries(state.index_table, seats, tokens // each)
    index_rows = np.maximum(index_pages, 0) * each + tokens % each
    slots = np.where(managed, state.slot_of[group].numpy().view(np.uint16)[index_rows], tokens)
    absent = managed & (slots == SLOT_ABSENT)
    chunks = table_entries(state.chunk_table, seats, slots // each)
    granted = inside & ((index_pages >= 0) | ~managed)
    hit = granted & ~absent & (chunks >= 0)
    rows = np.where(hit, chunks * each + slots % each, -1)
    return hit, granted & absent, index_rows, rows


def _load(state: DeviceState, group: int, found: _Found, plan: MissPlan, *, all_or_none: bool) -> Bools | None:
    """Give every miss a victim's slot, in the tables, in `found.rows` and in `plan`. Copies nothing.

    bool[B], if `all_or_none`: rows that load nothing since they do not fit.
    """
    each = state.geometry.page_slots
    host_pages = table_entries(state.host_table, found.seats[:, None], found.tokens // each)
    miss = found.miss & (host_pages >= 0)
    _trip(state, Tripwire.UNGRANTED, found.miss & ~miss)
    rank = (miss & found.first).cumsum(1) - 1
    victims = _victims(state, group, found, rank[:, -1] + 1)
    slots = victims[np.arange(len(victims))[:, None], np.maximum(rank, 0)]
    rejected = None
    if all_or_none:
        rejected = (miss & (slots < 0)).any(1)
        miss &= ~rejected[:, None]
    _trip(state, Tripwire.VICTIMS, miss & (slots < 0))
    miss &= slots >= 0
    chunks = table_entries(state.chunk_table, found.seats[:, None], np.maximum(slots, 0) // each)
    found.rows = np.where(miss, chunks * each + slots % each, found.rows)
    loaded = miss & found.first
    _count(state.hits, group, found, miss & ~found.first)
    _count(state.misses, group, found, loaded)
    row, column = loaded.nonzero()
    seats, rows, tokens = found.seats[row], found.rows[row, column], found.tokens[row, column]
    forget(state, np.full_like(rows, group), seats, rows)
    state.slot_token.numpy()[group, rows] = tokens
    state.stamp.numpy()[group, rows] = state.now.numpy()[seats]
    state.slot_of.numpy().view(np.uint16)[group, found.index_rows[row, column]] = slots[row, column]
    plan.count.numpy()[:] = loaded.sum(1)
    place = rank[row, column]
    plan.device_row.numpy()[row, place] = rows
    plan.host_page.numpy()[row, place] = host_pages[row, column]
    plan.host_offset.numpy()[row, place] = tokens % each
    return rejected


def _victims(state: DeviceState, group: int, found: _Found, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The `counts` int64[B] slots of each row that go first, in eviction order: int64[B, max(counts)], -1 beyond."""
    most = int(counts.max())
    victims = np.full((len(counts), max(most, 1)), -1, dtype=np.int64)
    if not most:
        return victims
    (needy,) = counts.nonzero()
    seats = found.seats[needy]
    hot = state.hot_slots.numpy()[seats]
    rows = slot_rows(state, seats, int(hot.max()) + state.tail_slots)
    keys = eviction_keys(
        state.stamp.numpy()[group, rows], state.tail.numpy()[group, seats], hot, state.now.numpy()[seats]
    )
    keys.sort(axis=1)
    chosen = keys[:, :most]
    victims[needy, : chosen.shape[1]] = np.where(chosen == NEVER, -1, key_slot(chosen))
    return victims


def _count(counter: Tensor, group: int, found: _Found, entries: Bools) -> None:
    """Add the number of `entries` [B, k] to `counter` int64[G, S]."""
    np.add.at(counter[group].numpy(), found.seats, entries.sum(1))


def _trip(state: DeviceState, wire: Tripwire, entries: Bools) -> None:
    state.tripwires.numpy()[wire] += np.count_nonzero(entries)
