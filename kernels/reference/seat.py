"""seat in torch. Contract: kernels/seat.py."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.state import ABSENT, UNLIMITED, DeviceState, Tripwire, slot_rows
from protocol.units import PAGE_TOKENS, pages_for


def init_resident(state: DeviceState, seat: int) -> None:
    """See kernels.seat."""
    _restart(state, seat, 0)


def init_managed(state: DeviceState, seat: int, hot_slots: int, first_token: int, tokens: int) -> None:
    """See kernels.seat."""
    first_page = first_token // PAGE_TOKENS
    if not _granted(state, seat, hot_slots, state.index_table[seat, first_page : first_page + pages_for(tokens)]):
        return
    pages = state.index_table[seat]
    state.slot_of.unflatten(1, (-1, state.geometry.page_slots))[:, pages[pages >= 0].long()] = ABSENT
    rows = _rows(state, seat, hot_slots)
    _empty(state, rows)
    each = state.geometry.slot_tokens
    slots = torch.arange(-(-tokens // each))
    held = slots + first_token // each
    state.slot_token[:, rows[: len(slots)]] = held.int()
    state.stamp[:, rows[: len(slots)]] = 0
    state.slot_of[:, _index_rows(state, seat, held)] = slots.short()
    _restart(state, seat, hot_slots)


def shrink_managed(state: DeviceState, seat: int, old_slots: int, hot_slots: int) -> None:
    """See kernels.seat."""
    if not _is_sized(state, seat, old_slots) or not _granted(state, seat, old_slots):
        return
    rows = _rows(state, seat, old_slots)
    tail = state.tail[:, seat]
    group, place = ((tail >= 0) & (tail < hot_slots)).nonzero(as_tuple=True)
    state.stamp[group, rows[tail[group, place].long()]] = state.now[seat]
    dropped = rows[hot_slots:]
    tokens = state.slot_token[:, dropped]
    group, column = (tokens >= 0).nonzero(as_tuple=True)
    state.slot_of[group, _index_rows(state, seat, tokens[group, column])] = ABSENT
    _empty(state, dropped)
    state.tail[:, seat] = -1
    state.eviction_queue[:, seat] = -1
    state.hot_slots[seat] = hot_slots


def grow_managed(state: DeviceState, seat: int, old_slots: int, hot_slots: int) -> None:
    """See kernels.seat."""
    if not _is_sized(state, seat, old_slots) or not _granted(state, seat, hot_slots):
        return
    _empty(state, _rows(state, seat, hot_slots)[old_slots + state.tail_slots :])
    state.eviction_queue[:, seat] = -1
    state.hot_slots[seat] = hot_slots


def hold_tokens(state: DeviceState, seat: int, hot_slots: int, groups: Tensor, slots: Tensor, tokens: Tensor) -> None:
    """See kernels.seat. Waits for no device either: what is not granted is seen there, and then all stays as it was."""
    each = state.geometry.page_slots
    chunks = state.chunk_table[seat].long()[slots // each]
    pages = state.index_table[seat].long()[tokens // each]
    sized = state.hot_slots[seat] == hot_slots
    granted = (chunks >= 0).all() & (pages >= 0).all()
    state.tripwires[Tripwire.SEAT] += ~sized
    state.tripwires[Tripwire.UNGRANTED] += sized & ~granted
    state.eviction_queue[:, seat].fill_(-1)
    rows = chunks.clamp(min=0) * each + slots % each
    index_rows = pages.clamp(min=0) * each + tokens % each
    for table, places, values in (
        (state.slot_token, rows, tokens),
        (state.stamp, rows, torch.zeros_like(tokens)),
        (state.slot_of, index_rows, slots),
    ):
        table[groups, places] = torch.where(sized & granted, values.to(table.dtype), table[groups, places])


def latest_tokens(state: DeviceState, seat: int, hot_slots: int, out: Tensor) -> None:
    """See kernels.seat. Waits for no device either."""
    sized = state.hot_slots[seat] == hot_slots
    state.tripwires[Tripwire.SEAT] += ~sized
    rows = slot_rows(state, seat, hot_slots + state.tail_slots).clamp(min=0)
    newest, slots = state.stamp[:, rows].topk(min(out.shape[1], len(rows)), dim=1)
    used = sized & (newest >= 0) & (newest == state.now[seat])
    out.fill_(-1)
    out[:, : slots.shape[1]] = torch.where(used, state.slot_token[:, rows].gather(1, slots), -1)


def clear_seat(state: DeviceState, seat: int) -> None:
    """See kernels.seat. Waits for no device either."""
    _restart(state, seat, -1)
    for table in (state.index_table, state.host_table, state.chunk_table, state.slab_table):
        table[seat].fill_(-1)
    state.granted_rows[seat].fill_(UNLIMITED)
    state.hits[:, seat].zero_()
    state.misses[:, seat].zero_()


def _restart(state: DeviceState, seat: int, hot_slots: int) -> None:
    state.hot_slots[seat].fill_(hot_slots)  # assigning a number would wait for the device
    state.tail[:, seat].fill_(-1)
    state.eviction_queue[:, seat].fill_(-1)
    state.now[seat].zero_()


def _is_sized(state: DeviceState, seat: int, hot_slots: int) -> bool:
    """Whether the buffer has `hot_slots`; counts Tripwire.SEAT when not."""
    sized = int(state.hot_slots[seat]) == hot_slots
    state.tripwires[Tripwire.SEAT] += not sized
    return sized


def _granted(state: DeviceState, seat: int, hot_slots: int, pages: Tensor | None = None) -> bool:
    """Whether the chunks of a buffer of `hot_slots`, and `pages`, are granted; counts Tripwire.UNGRANTED when not."""
    chunks = state.chunk_table[seat, : state.buffer_chunks(hot_slots)]
    granted = bool((chunks >= 0).all()) and (pages is None or bool((pages >= 0).all()))
    state.tripwires[Tripwire.UNGRANTED] += not granted
    return granted


def _empty(state: DeviceState, rows: Tensor) -> None:
    state.slot_token[:, rows] = -1
    state.stamp[:, rows] = -1


def _rows(state: DeviceState, seat: int, hot_slots: int) -> Tensor:
    """Device rows, in units, of every slot of the chunks of a buffer of `hot_slots`: int64[slots of its chunks]."""
    return slot_rows(state, seat, state.buffer_chunks(hot_slots) * state.geometry.page_slots)


def _index_rows(state: DeviceState, seat: int, units: Tensor) -> Tensor:
    each = state.geometry.page_slots
    pages = state.index_table[seat][(units // each).long()].long()
    return pages * each + units % each
