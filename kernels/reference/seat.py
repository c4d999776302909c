"""seat in torch. Contract: kernels/seat.py."""

from __future__ import annotations

import torch
from torch import Tensor

from coordinator.errors import BadInput, WrongState
from kernels.layout import PAGE_TOKENS, SLOTS_MAX, managed_chunks
from kernels.reference.lru import slot_rows
from kernels.state import ABSENT, DeviceState


def init_resident(state: DeviceState, seat: int) -> None:
    """See kernels.seat."""
    _restart(state, seat, 0)


def init_managed(state: DeviceState, seat: int, hot_slots: int, first_token: int, tokens: int) -> None:
    """See kernels.seat."""
    _check_size(state, hot_slots)
    if first_token % PAGE_TOKENS or not 0 <= tokens <= hot_slots:
        raise BadInput(
            f"{tokens} tokens from {first_token} do not lie in whole chunks of {hot_slots} slots",
            field="first_token, tokens",
            value=f"{first_token}, {tokens}",
            remedy=f"start at a multiple of {PAGE_TOKENS} and pass at most hot_slots tokens",
        )
    pages = state.index_table[seat]
    _by_page(state.slot_of)[:, pages[pages >= 0].long()] = ABSENT
    _empty_slots(state, seat, 0, hot_slots)
    if tokens:
        slots = torch.arange(tokens, device=state.rows.device)
        held = slots + first_token
        rows = _rows(state, seat, hot_slots)[:tokens]
        state.slot_token[:, rows] = held.int()
        state.stamp[:, rows] = 0
        state.slot_of[:, _index_rows(state, seat, held)] = slots.short()
    _restart(state, seat, hot_slots)


def shrink_managed(state: DeviceState, seat: int, hot_slots: int) -> None:
    """See kernels.seat."""
    _check_size(state, hot_slots)
    old = _managed_size(state, seat)
    if hot_slots >= old:
        raise BadInput("not smaller", field="hot_slots", value=hot_slots, remedy=f"less than the present {old}")
    rows = _rows(state, seat, old)
    tail = state.tail[:, seat]
    group, place = ((tail >= 0) & (tail < hot_slots)).nonzero(as_tuple=True)
    state.stamp[group, rows[tail[group, place].long()]] = state.now[seat]
    dropped = rows[hot_slots:]
    tokens = state.slot_token[:, dropped]
    group, column = (tokens >= 0).nonzero(as_tuple=True)
    state.slot_of[group, _index_rows(state, seat, tokens[group, column])] = ABSENT
    state.slot_token[:, dropped] = -1
    state.stamp[:, dropped] = -1
    state.tail[:, seat] = -1
    state.hot_slots[seat] = hot_slots


def grow_managed(state: DeviceState, seat: int, hot_slots: int) -> None:
    """See kernels.seat."""
    _check_size(state, hot_slots)
    old = _managed_size(state, seat)
    if hot_slots < old + state.tail_slots:
        remedy = f"at least {state.tail_slots} more than the present {old}"
        raise BadInput("not larger", field="hot_slots", value=hot_slots, remedy=remedy)
    _empty_slots(state, seat, old + state.tail_slots, hot_slots)
    state.hot_slots[seat] = hot_slots


def clear_seat(state: DeviceState, seat: int) -> None:
    """See kernels.seat."""
    _restart(state, seat, -1)
    for table in (state.index_table, state.host_table, state.chunk_table, state.slab_table):
        table[seat] = -1
    state.hits[:, seat] = 0
    state.misses[:, seat] = 0


def _restart(state: DeviceState, seat: int, hot_slots: int) -> None:
    state.hot_slots[seat] = hot_slots
    state.tail[:, seat] = -1
    state.now[seat] = 0


def _empty_slots(state: DeviceState, seat: int, first: int, hot_slots: int) -> None:
    """Empty the slots from `first` to the end of the last chunk of a buffer of `hot_slots`."""
    rows = _rows(state, seat, hot_slots)[first:]
    state.slot_token[:, rows] = -1
    state.stamp[:, rows] = -1


def _rows(state: DeviceState, seat: int, hot_slots: int) -> Tensor:
    """Device rows of every slot of the chunks of a buffer of `hot_slots`: int64[managed_chunks * 64]."""
    rows = slot_rows(state, torch.tensor([seat], device=state.rows.device), managed_chunks(hot_slots) * PAGE_TOKENS)[0]
    if bool((rows < 0).any()):
        raise BadInput(
            f"a buffer of {hot_slots} slots needs {managed_chunks(hot_slots)} chunks",
            field="chunk_table",
            value=f"seat {seat} names {int((rows >= 0).sum()) // PAGE_TOKENS}",
            remedy="write the chunk table before the buffer is set up or grown",
        )
    return rows


def _index_rows(state: DeviceState, seat: int, tokens: Tensor) -> Tensor:
    pages = state.index_table[seat][(tokens // PAGE_TOKENS).long()].long()
    return pages * PAGE_TOKENS + tokens % PAGE_TOKENS


def _by_page(slot_of: Tensor) -> Tensor:
    return slot_of.view(slot_of.shape[0], -1, PAGE_TOKENS)


def _check_size(state: DeviceState, hot_slots: int) -> None:
    if not 1 <= hot_slots <= SLOTS_MAX - PAGE_TOKENS:
        raise BadInput("out of range", field="hot_slots", value=hot_slots, remedy=f"1 to {SLOTS_MAX - PAGE_TOKENS}")
    if managed_chunks(hot_slots) > state.chunk_table.shape[1]:
        raise BadInput(
            f"needs {managed_chunks(hot_slots)} chunks, the chunk table holds {state.chunk_table.shape[1]}",
            field="hot_slots",
            value=hot_slots,
            remedy="allocate the state with a larger max_chunks",
        )


def _managed_size(state: DeviceState, seat: int) -> int:
    size = int(state.hot_slots[seat])
    if size < 1:
        raise WrongState(
            "the hot buffer is not managed", field="seat", value=seat, remedy="set it up with init_managed first"
        )
    return size
