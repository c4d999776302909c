"""begin_step in torch. Contract and tail rule: kernels/begin_step.py."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.lru import eviction_keys, forget, key_slot, slot_rows
from kernels.state import (
    SLOT_MASK,
    BackupPlan,
    DeviceState,
    StepBatch,
    Tripwire,
    active_rows,
    real_rows,
    table_entries,
)
from protocol.units import PAGE_TOKENS


def begin_step(state: DeviceState, batch: StepBatch, plan: BackupPlan) -> None:
    """See kernels.begin_step."""
    outputs = (plan.device_row, plan.index_row, plan.host_page, plan.host_offset)
    for output in (batch.new_rows, batch.new_index_rows, *outputs):
        output.fill_(-1)
    first = batch.at_depth(batch.depths()[0])
    active = active_rows(state, first)
    state.tripwires[Tripwire.SEAT] += (real_rows(first) & ~active).sum()
    if state.seat_rows > 1:
        _add_drafts(state, batch, first, active)
        batch.rejected.fill_(1)
        active = active_rows(state, batch)
    placed = _granted(state, batch, active.nonzero().flatten())
    state.now[batch.seats[placed].long()] += 1  # once for a seat, however many rows it has
    for rows in batch.depths():
        _place_depth(state, batch, plan, placed[(placed >= rows.start) & (placed < rows.stop)])


def _add_drafts(state: DeviceState, batch: StepBatch, first: StepBatch, active: Tensor) -> None:
    """Seats and lengths at all depths from those at depth 0, of which `active` decode; length 0 where there is no
    row."""
    seats, lengths = first.seats.clone(), first.lengths.long().clone()
    granted = state.granted_rows[seats.long().clamp(0, state.seats - 1)]
    for depth, rows in enumerate(batch.depths()):
        batch.seats[rows] = seats
        batch.lengths[rows] = torch.where(active & (lengths + depth <= granted), lengths + depth, 0).to(
            batch.lengths.dtype
        )


def _place_depth(state: DeviceState, batch: StepBatch, plan: BackupPlan, places: Tensor) -> None:
    """The new tokens of rows `places`, of different seats."""
    if not len(places):
        return
    seats = batch.seats[places].long()
    positions = batch.lengths[places].long() - 1
    pages, offsets = positions // PAGE_TOKENS, positions % PAGE_TOKENS
    index_rows = state.index_table[seats, pages].long() * PAGE_TOKENS + offsets
    rows = _place_tokens(state, seats, positions, index_rows).int()
    batch.new_rows[:, places] = rows
    batch.new_index_rows[places] = index_rows.int()
    plan.device_row[:, places] = rows
    plan.index_row[places] = index_rows.int()
    plan.host_page[places] = state.host_table[seats, pages]
    plan.host_offset[places] = offsets.int()
    if state.seat_rows > 1:
        batch.rejected[places] = 0


def _granted(state: DeviceState, batch: StepBatch, places: Tensor) -> Tensor:
    """Those of `places` whose new token has an index page, a host page and, when resident, a chunk."""
    seats = batch.seats[places].long()
    pages = (batch.lengths[places].long() - 1) // PAGE_TOKENS
    held = (table_entries(state.index_table, seats, pages) >= 0) & (table_entries(state.host_table, seats, pages) >= 0)
    held &= (state.hot_slots[seats] > 0) | (table_entries(state.chunk_table, seats, pages) >= 0)
    state.tripwires[Tripwire.UNGRANTED] += (~held).sum()
    return places[held]


def _place_tokens(state: DeviceState, seats: Tensor, positions: Tensor, index_rows: Tensor) -> Tensor:
    """Device row of each new token: int64[G, n]."""
    managed = (state.hot_slots[seats] > 0).nonzero().flatten()
    rows = table_entries(state.chunk_table, seats, positions // PAGE_TOKENS) * PAGE_TOKENS + positions % PAGE_TOKENS
    rows = rows.repeat(state.geometry.groups, 1)
    if len(managed):
        rows[:, managed] = _rotate_tail(state, seats[managed], positions[managed], index_rows[managed])
    return rows


def _rotate_tail(state: DeviceState, seats: Tensor, positions: Tensor, index_rows: Tensor) -> Tensor:
    """The tail rule for m managed seats in every group; returns the new tokens' device rows, int64[G, m]."""
    hot, now, ring = state.hot_slots[seats], state.now[seats], positions % state.tail_slots
    groups, columns = state.group_ids, torch.arange(len(seats), device=seats.device)
    rows = slot_rows(state, seats, int(hot.max()) + state.tail_slots).clamp_(min=0)
    retiring = state.tail[:, seats, ring].long()
    slots = (hot + ring).expand_as(retiring)
    if bool((retiring >= 0).any()):
        keys = eviction_keys(state.stamp[:, rows], state.tail[:, seats], hot, now)
        slots = torch.where(retiring >= 0, key_slot(keys.amin(-1)), slots)
    if state.seat_rows > 1:
        held = _slots_holding(state, rows, hot, positions, index_rows)
        slots = torch.where(held >= 0, held, slots)
    group, column = ((retiring >= 0) & (retiring != slots)).nonzero(as_tuple=True)
    state.stamp[group, rows[column, retiring[group, column]]] = now[column] - 1
    new_rows = rows[columns, slots]
    forget(state, groups.expand_as(new_rows), seats.expand_as(new_rows), new_rows)
    state.tail[:, seats, ring] = slots.int()
    state.slot_token[groups, new_rows] = positions.int()
    state.stamp[groups, new_rows] = now
    state.slot_of[groups, index_rows] = slots.short()
    return new_rows


def _slots_holding(state: DeviceState, rows: Tensor, hot: Tensor, positions: Tensor, index_rows: Tensor) -> Tensor:
    """Slots that hold `positions` already, -1 where none does: int64[G, m].

    slot_of may hold anything for a position that was never written; a slot of the seat that holds the token may not.
    """
    slots = state.slot_of[state.group_ids, index_rows].long() & SLOT_MASK
    inside = slots < hot + state.tail_slots
    columns = torch.arange(len(positions), device=positions.device)
    tokens = state.slot_token[state.group_ids, rows[columns, torch.where(inside, slots, 0)]]
    return torch.where(inside & (tokens == positions), slots, -1)
