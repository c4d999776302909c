"""seat on CUDA: those contracts of kernels/seat.py that torch alone would run too slowly."""

from __future__ import annotations

from kernels.cuda import parameters, structures
from kernels.cuda.launch import kernel_of, processors, stream_of
from kernels.state import DeviceState
from protocol.units import PAGE_TOKENS, managed_chunks

BLOCKS_PER_PROCESSOR = 4


def init_managed(state: DeviceState, seat: int, hot_slots: int, first_token: int, tokens: int) -> None:
    """As kernels.seat.init_managed, unchecked; `state` has been through `prepare`."""
    _launch(
        state,
        seat=seat,
        kind=structures.SeatChangeKind.INIT,
        hot_slots=hot_slots,
        chunks=managed_chunks(hot_slots),
        first_token=first_token,
        tokens=tokens,
    )


def shrink_managed(state: DeviceState, seat: int, old_slots: int, hot_slots: int) -> None:
    """As kernels.seat.shrink_managed."""
    _launch(
        state,
        seat=seat,
        kind=structures.SeatChangeKind.SHRINK,
        old_slots=old_slots,
        hot_slots=hot_slots,
        first_slot=hot_slots,
        chunks=managed_chunks(old_slots),
    )


def grow_managed(state: DeviceState, seat: int, old_slots: int, hot_slots: int) -> None:
    """As kernels.seat.grow_managed."""
    _launch(
        state,
        seat=seat,
        kind=structures.SeatChangeKind.GROW,
        old_slots=old_slots,
        hot_slots=hot_slots,
        first_slot=old_slots + state.tail_slots,
        chunks=managed_chunks(hot_slots),
    )


def _launch(state: DeviceState, **change: int) -> None:
    block = structures.SeatChange(state=parameters.state_parameters(state), **change)
    groups, stream = state.geometry.groups, stream_of(state)
    work = max(change["chunks"] * PAGE_TOKENS, state.index_table.shape[1])
    tiles = min(-(-work // structures.SEAT_THREADS), -(-BLOCKS_PER_PROCESSOR * processors(state.rows.device) // groups))
    kernel_of(state, "seat", "change_slots").launch((tiles, groups), block, stream, threads=structures.SEAT_THREADS)
    kernel_of(state, "seat", "close_change").launch((1, 1), block, stream, threads=structures.SEAT_THREADS)
