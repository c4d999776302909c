"""swap_in and replay_misses in torch. Contract: kernels/swap_in.py.

Misses in ascending position take victims in eviction order.

Each row's top-k is sorted to find duplicates, and the result scattered back. Rejected: a mark per token of the
context (memory and clearing grow with the context), a loop over batch rows (call overhead dominates at k=128).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.layout import SLOT_ABSENT
from kernels.reference.lru import NEVER, eviction_keys, forget, key_slot, slot_rows
from kernels.state import SLOT_MASK, DeviceState, MissPlan, StepBatch, Tripwire, active_rows, table_entries
from protocol.units import PAGE_TOKENS

NO_TOKEN = torch.iinfo(torch.int32).max  # sorts behind every position


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
    active = active_rows(state, batch)
    if not bool(active.any()):  # of a depth at which no request drafts
        plan.count.zero_()
        out_rows.fill_(-1)
        return
    found = _look_up(state, group, topk, batch, active)
    state.hits[group].index_add_(0, found.seats, found.hit.sum(1))
    row, column = (found.hit & found.managed.unsqueeze(1)).nonzero(as_tuple=True)
    state.stamp[group][found.rows[row, column]] = state.now[found.seats[row]]
    plan.count.zero_()
    if bool(found.miss.any()):
        rejected = _load(state, group, found, plan, all_or_none=all_or_none)
        if rejected is not None:
            batch.rejected.masked_fill_(rejected, 1)
        replay_misses(state, state.geometry.layers_of_group(group)[0], plan)
    out_rows.scatter_(1, found.order, found.rows.int())


def replay_misses(state: DeviceState, layer: int, plan: MissPlan) -> None:
    """See kernels.swap_in."""
    held = torch.arange(plan.device_row.shape[1], device=plan.count.device) < plan.count.unsqueeze(1)
    row, column = held.nonzero(as_tuple=True)
    if row.shape[0]:
        pages, offsets = plan.host_page[row, column], plan.host_offset[row, column]
        rows = plan.device_row[row, column]
        for host, device in zip(state.host_row_words, state.row_words, strict=True):
            device[layer][rows] = host[:, layer][pages, offsets]


@dataclass(eq=False)
class _Found:
    """Each row's top-k in ascending position; [B, k] unless noted. A valid entry is a hit or a miss, others neither."""

    seats: Tensor  # int64[B], 0 for padding
    managed: Tensor  # bool[B]
    order: Tensor  # int64: place of the entry in the caller's top-k
    tokens: Tensor  # int64
    first: Tensor  # bool: not a duplicate of its left neighbour
    hit: Tensor  # bool
    miss: Tensor  # bool
    index_rows: Tensor  # int64: place of the token in slot_of
    rows: Tensor  # int64: device row, -1 where there is none (yet)


def _look_up(state: DeviceState, group: int, topk: Tensor, batch: StepBatch, active: Tensor) -> _Found:
    seats = torch.where(active, batch.seats, 0).long()
    managed = state.hot_slots[seats] > 0
    inside = (topk >= 0) & (topk < batch.lengths.unsqueeze(1)) & active.unsqueeze(1)
    state.tripwires[Tripwire.POSITION] += ((topk != -1) & ~inside & active.unsqueeze(1)).sum()
    ranked, order = torch.where(inside, topk, NO_TOKEN).sort(dim=1)
    inside = ranked != NO_TOKEN
    first = torch.ones_like(inside)
    first[:, 1:] = ranked[:, 1:] != ranked[:, :-1]
    tokens = torch.where(inside, ranked, 0).long()
    hit, miss, index_rows, rows = _resolve(state, group, seats.unsqueeze(1), managed.unsqueeze(1), tokens, inside)
    state.tripwires[Tripwire.UNGRANTED] += (inside & ~hit & ~miss).sum()
    return _Found(seats, managed, order, tokens, first, hit, miss, index_rows, rows)


def _resolve(
    state: DeviceState, group: int, seats: Tensor, managed: Tensor, tokens: Tensor, inside: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hit, miss, index_rows and rows of `_Found`; `seats` and `managed` are [B, 1]."""
    pages, offsets = tokens // PAGE_TOKENS, tokens % PAGE_TOKENS
    index_pages = table_entries(state.index_table, seats, pages)
    index_rows = index_pages.clamp(min=0) * PAGE_TOKENS + offsets
    slots = torch.where(managed, state.slot_of[group][index_rows].long() & SLOT_MASK, tokens)
    absent = managed & (slots == SLOT_ABSENT)
    chunks = table_entries(state.chunk_table, seats, slots // PAGE_TOKENS)
    granted = inside & ((index_pages >= 0) | ~managed)
    hit = granted & ~absent & (chunks >= 0)
    rows = torch.where(hit, chunks * PAGE_TOKENS + slots % PAGE_TOKENS, -1)
    return hit, granted & absent, index_rows, rows


def _load(state: DeviceState, group: int, found: _Found, plan: MissPlan, *, all_or_none: bool) -> Tensor | None:
    """Give every miss a victim's slot, in the tables, in `found.rows` and in `plan`. Copies nothing.

    bool[B], if `all_or_none`: rows that load nothing since they do not fit.
    """
    host_pages = table_entries(state.host_table, found.seats.unsqueeze(1), found.tokens // PAGE_TOKENS)
    miss = found.miss & (host_pages >= 0)
    state.tripwires[Tripwire.UNGRANTED] += (found.miss & ~miss).sum()
    rank = (miss & found.first).cumsum(1) - 1
    slots = _victims(state, group, found, rank[:, -1] + 1).gather(1, rank.clamp(min=0))
    rejected = None
    if all_or_none:
        rejected = (miss & (slots < 0)).any(1)
        miss &= ~rejected.unsqueeze(1)
    state.tripwires[Tripwire.VICTIMS] += (miss & (slots < 0)).sum()
    miss &= slots >= 0
    chunks = table_entries(state.chunk_table, found.seats.unsqueeze(1), slots.clamp(min=0) // PAGE_TOKENS)
    found.rows = torch.where(miss, chunks * PAGE_TOKENS + slots % PAGE_TOKENS, found.rows)
    loaded = miss & found.first
    state.hits[group].index_add_(0, found.seats, (miss & ~found.first).sum(1))
    state.misses[group].index_add_(0, found.seats, loaded.sum(1))
    row, column = loaded.nonzero(as_tuple=True)
    seats, rows, tokens = found.seats[row], found.rows[row, column], found.tokens[row, column]
    forget(state, torch.full_like(rows, group), seats, rows)
    state.slot_token[group][rows] = tokens.int()
    state.stamp[group][rows] = state.now[seats]
    state.slot_of[group][found.index_rows[row, column]] = slots[row, column].short()
    plan.count.copy_(loaded.sum(1))
    place = rank[row, column]
    plan.device_row[row, place] = rows.int()
    plan.host_page[row, place] = host_pages[row, column].int()
    plan.host_offset[row, place] = (tokens % PAGE_TOKENS).int()
    return rejected


def _victims(state: DeviceState, group: int, found: _Found, counts: Tensor) -> Tensor:
    """The `counts` int64[B] slots of each row that go first, in eviction order: int64[B, max(counts)], -1 beyond."""
    needy, most = counts.nonzero().flatten(), int(counts.max())
    victims = counts.new_full((len(counts), max(most, 1)), -1)
    if not most:
        return victims
    seats = found.seats[needy]
    hot = state.hot_slots[seats]
    width = int(hot.max()) + state.tail_slots
    rows = slot_rows(state, seats, width).clamp_(min=0)
    keys = eviction_keys(state.stamp[group, rows], state.tail[group, seats], hot, state.now[seats])
    chosen = keys.topk(min(most, width), dim=1, largest=False).values
    victims[needy, : chosen.shape[1]] = torch.where(chosen == NEVER, -1, key_slot(chosen))
    return victims
