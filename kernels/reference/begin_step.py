"""begin_step in numpy, over the tensors of a CPU. Contract and tail rule: kernels/begin_step.py."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kernels.reference.lru import Bools, Ints, eviction_keys, forget, key_slot, slot_rows, table_entries
from kernels.state import SLOT_MASK, BackupPlan, DeviceState, StepBatch, Tripwire, active_rows, real_rows
from protocol.units import PAGE_TOKENS


def begin_step(state: DeviceState, batch: StepBatch, plan: BackupPlan) -> None:
    """See kernels.begin_step."""
    outputs = (plan.device_row, plan.index_row, plan.host_page, plan.host_offset)
    for output in (batch.new_rows, batch.new_index_rows, *outputs):
        output.fill_(-1)
    first = batch.at_depth(batch.depths()[0])
    active = active_rows(state, first).numpy()
    state.tripwires.numpy()[Tripwire.SEAT] += np.count_nonzero(real_rows(first).numpy() & ~active)
    if state.seat_rows > 1:
        _add_drafts(state, batch, first, active)
        batch.rejected.fill_(1)
        active = active_rows(state, batch).numpy()
    placed = _granted(state, batch, active.nonzero()[0])
    state.now.numpy()[batch.seats.numpy()[placed]] += 1  # once for a seat, however many rows it has
    for rows in batch.depths():
        _place_depth(state, batch, plan, placed[(placed >= rows.start) & (placed < rows.stop)])


def _add_drafts(state: DeviceState, batch: StepBatch, first: StepBatch, active: Bools) -> None:
    """Seats and lengths at all depths from those at depth 0, of which `active` decode; length 0 where there is no
    row."""
    seats, lengths = first.seats.numpy().copy(), first.lengths.numpy().astype(np.int64)
    granted = state.granted_rows.numpy()[seats.clip(0, state.seats - 1)]
    for depth, rows in enumerate(batch.depths()):
        batch.seats.numpy()[rows] = seats
        batch.lengths.numpy()[rows] = np.where(active & (lengths + depth <= granted), lengths + depth, 0)


def _place_depth(state: DeviceState, batch: StepBatch, plan: BackupPlan, places: Ints) -> None:
    """The new tokens of rows `places`, of different seats."""
    if not len(places):
        return
    seats = batch.seats.numpy()[places].astype(np.int64)
    positions = batch.lengths.numpy()[places].astype(np.int64) - 1
    pages, offsets = positions // PAGE_TOKENS, positions % PAGE_TOKENS
    index_rows = state.index_table.numpy()[seats, pages].astype(np.int64) * PAGE_TOKENS + offsets
    rows = np.empty((state.geometry.places, len(places)), np.int64)
    rows[:] = index_rows  # of dense layers
    rows[: state.geometry.selections] = _place_tokens(state, seats, positions, index_rows)
    batch.new_rows.numpy()[:, places] = rows
    batch.new_index_rows.numpy()[places] = index_rows
    plan.device_row.numpy()[:, places] = rows
    plan.index_row.numpy()[places] = index_rows
    plan.host_page.numpy()[places] = state.host_table.numpy()[seats, pages]
    plan.host_offset.numpy()[places] = offsets
    if state.seat_rows > 1:
        batch.rejected.numpy()[places] = 0


def _granted(state: DeviceState, batch: StepBatch, places: NDArray[np.intp]) -> NDArray[np.intp]:
    """Those of `places` whose new token has an index page, a host page and, when resident, a chunk."""
    seats = batch.seats.numpy()[places].astype(np.int64)
    pages = (batch.lengths.numpy()[places].astype(np.int64) - 1) // PAGE_TOKENS
    held = (table_entries(state.index_table, seats, pages) >= 0) & (table_entries(state.host_table, seats, pages) >= 0)
    managed = state.hot_slots.numpy()[seats] > 0
    held &= managed | (table_entries(state.chunk_table, seats, pages) >= 0)
    if state.geometry.slot_tokens > 1 and (held & managed).any():
        held[held & managed] &= _is_begun(state, batch, places[held & managed])
    state.tripwires.numpy()[Tripwire.UNGRANTED] += np.count_nonzero(~held)
    return places[held]


def _place_tokens(state: DeviceState, seats: Ints, positions: Ints, index_rows: Ints) -> NDArray[np.int64]:
    """Device row of each new token: int64[A, n]."""
    (managed,) = (state.hot_slots.numpy()[seats] > 0).nonzero()
    rows = table_entries(state.chunk_table, seats, positions // PAGE_TOKENS) * PAGE_TOKENS + positions % PAGE_TOKENS
    rows = np.tile(rows, (state.geometry.selections, 1))
    if len(managed):
        each = state.geometry.slot_tokens
        units, inside = positions[managed] // each, positions[managed] % each
        rows[:, managed] = _rotate_tail(state, seats[managed], units, index_rows[managed] // each) * each + inside
    return rows


def _is_begun(state: DeviceState, batch: StepBatch, places: Ints) -> Bools:
    """Return whether the unit of a managed seat's first row of this step begins with it, or lies in a slot: bool[n]."""
    seats = batch.seats.numpy()[places].astype(np.int64)
    base = places % (len(batch.seats) // batch.seat_rows)
    positions = batch.lengths.numpy()[base].astype(np.int64) - 1
    each, hot = state.geometry.slot_tokens, state.hot_slots.numpy()[seats]
    pages = table_entries(state.index_table, seats, positions // PAGE_TOKENS)
    units = np.maximum(pages, 0) * state.geometry.page_slots + positions % PAGE_TOKENS // each
    rows = slot_rows(state, seats, int(hot.max()) + state.tail_slots)
    held = (_slots_holding(state, rows, hot, positions // each, units) >= 0).all(0) & (pages >= 0)
    begun: Bools = held | (positions % each == 0)
    return begun


def _rotate_tail(state: DeviceState, seats: Ints, units: Ints, index_rows: Ints) -> NDArray[np.int64]:
    """The tail rule for m managed seats in every selection; returns the device rows of the slots that the new tokens
    lie in, int64[A, m]. `index_rows` int64[m]: places of the units in slot_of."""
    hot, now, ring = state.hot_slots.numpy()[seats], state.now.numpy()[seats], units % state.tail_slots
    groups, columns = state.selection_ids.numpy(), np.arange(len(seats))
    stamps, tail = state.stamp.numpy(), state.tail.numpy()
    rows = slot_rows(state, seats, int(hot.max()) + state.tail_slots)
    retiring = tail[:, seats, ring].astype(np.int64)
    slots = np.broadcast_to(hot + ring, retiring.shape)
    if (retiring >= 0).any():
        keys = eviction_keys(stamps[:, rows], tail[:, seats], hot, now)
        slots = np.where(retiring >= 0, key_slot(keys.min(-1)), slots)
    if state.seat_rows > 1 or state.geometry.slot_tokens > 1:
        held = _slots_holding(state, rows, hot, units, index_rows)
        slots = np.where(held >= 0, held, slots)
    group, column = ((retiring >= 0) & (retiring != slots)).nonzero()
    stamps[group, rows[column, retiring[group, column]]] = now[column] - 1
    new_rows: NDArray[np.int64] = rows[columns, slots]
    forget(state, np.broadcast_to(groups, new_rows.shape), np.broadcast_to(seats, new_rows.shape), new_rows)
    tail[:, seats, ring] = slots
    state.slot_token.numpy()[groups, new_rows] = units
    stamps[groups, new_rows] = now
    state.slot_of.numpy().view(np.uint16)[groups, index_rows] = slots
    return new_rows


def _slots_holding(state: DeviceState, rows: Ints, hot: Ints, units: Ints, index_rows: Ints) -> NDArray[np.int64]:
    """Slots that hold `units` already, -1 where none does: int64[A, m].

    slot_of may hold anything for a unit that was never written; a slot of the seat that holds the unit may not.
    """
    groups = state.selection_ids.numpy()
    slots = state.slot_of.numpy()[groups, index_rows].astype(np.int64) & SLOT_MASK
    inside = slots < hot + state.tail_slots
    tokens = state.slot_token.numpy()[groups, rows[np.arange(len(units)), np.where(inside, slots, 0)]]
    return np.where(inside & (tokens == units), slots, -1)
