"""Open a decode step: give each request's new token its device row, and plan its backup. Reference in torch.

Tail rule. The T newest tokens written by decoding lie in tail slots and are never evicted: their backup may still be in
flight (I3). The token at position p takes ring place r = p % T:

    place unset    it takes slot H+r, which is empty
    place set      the slot there turns ordinary: it keeps its token, as one used in the step before; the LRU victim
                   among the slots that were ordinary becomes the tail slot of place r, and its token becomes absent

Nothing is copied, and the newest rows stay hot. The caller has waited for `backed_up` of step n-T, so the row that
retires is in host memory before it can be evicted. The slot that has just retired is not a candidate: it holds a
token that the model most probably reads again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.check import Sizes
from kernels.layout import PAGE_TOKENS
from kernels.lru import eviction_keys, forget, key_slot, slot_rows
from kernels.state import BackupPlan, DeviceState, StepBatch, Tripwire, active_rows, real_rows, table_entries


def begin_step(state: DeviceState, batch: StepBatch, plan: BackupPlan) -> None:
    """Advance `now`, place the new token (position lengths-1) of each real row in every group, fill the outputs.

    Reads `batch.seats`, `lengths`, `num_real`. Writes every entry of `batch.new_rows`, `batch.new_index_rows` and of
    `plan`: -1 for padding, and for rows that trip Tripwire.SEAT or Tripwire.UNGRANTED, whose seats stay as they were.
    """
    check_begin_step(state, batch, plan)
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


def check_begin_step(state: DeviceState, batch: StepBatch, plan: BackupPlan) -> None:
    """Raises BadInput unless every tensor of a begin_step fits the others; for every backend."""
    sizes = Sizes(groups=state.geometry.groups)
    sizes.check("batch.seats", batch.seats, ("batch",), torch.int32, torch.int64)
    sizes.check("batch.lengths", batch.lengths, ("batch",), torch.int32, torch.int64)
    sizes.check("batch.num_real", batch.num_real, (1,), torch.int32)
    sizes.check("batch.new_rows", batch.new_rows, ("groups", "batch"), torch.int32)
    sizes.check("batch.new_index_rows", batch.new_index_rows, ("batch",), torch.int32)
    sizes.check("plan.device_row", plan.device_row, ("groups", "batch"), torch.int32)
    for name in ("index_row", "host_page", "host_offset"):
        sizes.check(f"plan.{name}", getattr(plan, name), ("batch",), torch.int32)
