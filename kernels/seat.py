"""A seat's hot buffer: set up, resized and given up at step boundaries.

    init_resident    slot = token through the chunk table; no bookkeeping is read or written while decoding
    init_managed     H slots under LRU, empty or already holding a run of tokens (slab take-over, preload)
    shrink_managed   the highest slots go; what they held is absent from then on (the host has it)
    grow_managed     all slots stay, new ones are empty and hence used first
    clear_seat       nothing is left

Resident and managed turn into each other by setting up anew: resident -> managed keeps a run of chunks (their tokens
are `first_token..`), managed -> resident follows a copy of all rows into fresh chunks. All but clear_seat leave the hit
and miss counters alone: they belong to the request, not to the buffer.

Rows are only ever dropped here, never saved: the caller waits until the newest row's backup completed (I3).
"""

from __future__ import annotations

from kernels.backend import backend
from kernels.state import DeviceState


def init_resident(state: DeviceState, seat: int) -> None:
    """Token t of `seat` is in row t % 64 of chunk `chunk_table[seat, t // 64]`, already or by the time it is read."""
    backend(state).init_resident(state, seat)


def init_managed(state: DeviceState, seat: int, hot_slots: int, first_token: int, tokens: int) -> None:
    """A managed buffer whose slots 0..tokens-1 hold tokens first_token..first_token+tokens-1, and the others nothing.

    `chunk_table[seat]` names its managed_chunks(hot_slots) chunks and `index_table[seat]` the pages of the context. All
    other tokens become absent. The tokens count as used at step 0, before anything that decodes. Raises BadInput.
    """
    backend(state).init_managed(state, seat, hot_slots, first_token, tokens)


def shrink_managed(state: DeviceState, seat: int, hot_slots: int) -> None:
    """Keep slots 0..hot_slots-1 as the ordinary slots; the tail starts anew at slots hot_slots..hot_slots+T-1.

    Tokens in higher slots become absent; tail tokens that lie below keep their slot and count as used in the last step.
    The chunks beyond managed_chunks(hot_slots) are free afterwards: call while `chunk_table` still names them. Raises
    BadInput unless smaller, WrongState unless managed.
    """
    backend(state).shrink_managed(state, seat, hot_slots)


def grow_managed(state: DeviceState, seat: int, hot_slots: int) -> None:
    """Add empty slots up to hot_slots+T-1. Tail slots stay where they are; places not set yet move to hot_slots+r.

    Call when `chunk_table` names managed_chunks(hot_slots) chunks, the old ones first and unchanged. Raises BadInput
    unless larger by T at least, so that a moved place never meets a tail slot that stays; WrongState unless managed.
    """
    backend(state).grow_managed(state, seat, hot_slots)


def clear_seat(state: DeviceState, seat: int) -> None:
    """An empty seat: tables unset, counters zero. Rows and maps in the chunks and pages it held mean nothing now."""
    backend(state).clear_seat(state, seat)
