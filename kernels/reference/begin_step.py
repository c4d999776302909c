"""begin_step in torch. Contract and tail rule: kernels/begin_step.py."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.lru import eviction_keys, forget, key_slot, slot_rows
from kernels.state import BackupPlan, DeviceState, StepBatch, Tripwire, active_rows, real_rows, table_entries
from protocol.units import PAGE_TOKENS


def begin_step(state: DeviceState, batch: StepBatch, plan: BackupPlan) -> None:
    """See kernels.begin_step."""
    for output in (
        batch.new_rows,
        batch.new_index_rows,
        plan.device_row,
        plan.index_row,
        plan.host_page,
        plan.host_offset,
    ):
        output.fill_(-1)
    active = active_rows(state, batch)
    state.tripwires[Tripwire.SEAT] += (real_rows(batch) & ~active).sum()
    places = _granted(state, batch, active.nonzero().flatten())
    if not len(places):
        return
    seats = batch.seats[places].long()
    positions = batch.lengths[places].long() - 1
    pages, offsets = positions // PAGE_TOKENS, positions % PAGE_TOKENS
    index_rows = state.index_table[seats, pages].long() * PAGE_TOKENS + offsets
    state.now[seats] += 1
    rows = _place_tokens(state, seats, positions, index_rows).int()
    batch.new_rows[:, places] = rows
    batch.new_index_rows[places] = index_rows.int()
    plan.device_row[:, places] = rows
    plan.index_row[places] = index_rows.int()
    plan.host_page[places] = state.host_table[seats, pages]
    plan.host_offset[places] = offsets.int()


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
    group, column = (retiring >= 0).nonzero(as_tuple=True)
    if len(group):
        keys = eviction_keys(state.stamp[:, rows], state.tail[:, seats], hot, now)
        slots = torch.where(retiring >= 0, key_slot(keys.amin(-1)), slots)
        state.stamp[group, rows[column, retiring[group, column]]] = now[column] - 1
    new_rows = rows[columns, slots]
    forget(state, groups.expand_as(new_rows), seats.expand_as(new_rows), new_rows)
    state.tail[:, seats, ring] = slots.int()
    state.slot_token[groups, new_rows] = positions.int()
    state.stamp[groups, new_rows] = now
    state.slot_of[groups, index_rows] = slots.short()
    return new_rows
