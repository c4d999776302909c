"""A seat's hot buffer: set up, resized and given up at step boundaries.

    init_resident    slot = token through the chunk table; no bookkeeping is read or written while decoding
    init_managed     H slots under LRU, empty or already holding a run of tokens (slab take-over, preload)
    shrink_managed   the highest slots go; what they held is absent from then on (the host has it)
    grow_managed     all slots stay, new ones are empty and hence used first
    hold_tokens      slots of an empty managed buffer get tokens, chosen per group: a warm start
    latest_tokens    tokens that the last step used: what a warm start needs
    clear_seat       an empty seat

Resident and managed turn into each other by setting up anew: resident -> managed keeps a run of chunks (their tokens
are `first_token..`), managed -> resident follows a copy of all rows into fresh chunks. All but clear_seat leave the hit
and miss counters alone: they belong to the request, not to the buffer.

A *token* is a unit where slots hold a page: `slots` and `tokens` of hold_tokens, what latest_tokens gives, and slots
everywhere. `first_token` and `tokens` of init_managed are tokens in any case.

All but latest_tokens empty the seat's eviction queue: it belongs to the buffer.

Rows are only ever dropped here, never saved: the caller waits until the newest row's backup completed (I3).

Nothing here waits for the device. The caller names the present size of a buffer. What the host can know raises before
any change. The rest is checked on the device when the work runs: it leaves the seat unchanged and counts Tripwire.SEAT
when the buffer is not of the size that the caller named, Tripwire.UNGRANTED when a chunk that the buffer needs, or a
page of the tokens it begins with, is not granted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import backend
from kernels.check import Sizes, check_number
from kernels.reference import seat as in_torch
from kernels.state import DeviceState
from protocol.errors import BadInput, WrongState
from protocol.units import PAGE_TOKENS, SLOTS_MAX


def init_resident(state: DeviceState, seat: int) -> None:
    """Token t of `seat` is in row t % 64 of chunk `chunk_table[seat, t // 64]`, already or by the time it is read."""
    check_number("seat", seat, state.seats)
    in_torch.init_resident(state, seat)


def init_managed(state: DeviceState, seat: int, hot_slots: int, first_token: int, tokens: int) -> None:
    """A managed buffer whose slots 0..tokens-1 hold tokens first_token..first_token+tokens-1, and the others nothing.

    `chunk_table[seat]` names its Geometry.buffer_chunks and `index_table[seat]` the pages of the context. All
    other tokens become absent. The tokens count as used at step 0, before anything that decodes. Raises BadInput.
    """
    check_number("seat", seat, state.seats)
    _check_size(state, hot_slots)
    room = state.index_table.shape[1] * PAGE_TOKENS
    most = hot_slots * state.geometry.slot_tokens
    if first_token % PAGE_TOKENS or not 0 <= tokens <= most or not 0 <= first_token <= room - tokens:
        raise BadInput(
            f"{tokens} tokens from {first_token} do not lie in whole chunks of {hot_slots} slots, or not below {room}",
            field="first_token, tokens",
            value=f"{first_token}, {tokens}",
            remedy=f"start at a multiple of {PAGE_TOKENS} and pass at most {most} tokens",
        )
    backend(state, __name__).init_managed(state, seat, hot_slots, first_token, tokens)


def shrink_managed(state: DeviceState, seat: int, old_slots: int, hot_slots: int) -> None:
    """Keep slots 0..hot_slots-1 of `old_slots` as the ordinary ones; the tail starts anew at slots hot_slots..+T-1.

    Of a buffer whose slots hold a token: the page that the next token goes to may lie in any slot, so that a buffer of
    pages is set up anew.

    Tokens in higher slots become absent; tail tokens that lie below keep their slot and count as used in the last step.
    The chunks beyond Geometry.buffer_chunks are free afterwards: call while `chunk_table` still names them. Raises
    BadInput unless smaller, or where slots hold a page, WrongState unless managed.
    """
    _check_resize(state, seat, old_slots, hot_slots)
    if state.geometry.slot_tokens > 1:
        remedy = "set the buffer up anew with init_managed, and hold the page that is written next"
        raise BadInput("slots of a page cannot go", field="hot_slots", value=hot_slots, remedy=remedy)
    if hot_slots >= old_slots:
        raise BadInput("not smaller", field="hot_slots", value=hot_slots, remedy=f"less than the present {old_slots}")
    backend(state, __name__).shrink_managed(state, seat, old_slots, hot_slots)


def grow_managed(state: DeviceState, seat: int, old_slots: int, hot_slots: int) -> None:
    """Add empty slots up to hot_slots+T-1. Tail slots stay where they are; places not set yet move to hot_slots+r.

    Call when `chunk_table` names its Geometry.buffer_chunks, the old ones first and unchanged. Raises BadInput
    unless larger by T at least, so that a moved place never meets a tail slot that stays; WrongState unless managed.
    """
    _check_resize(state, seat, old_slots, hot_slots)
    if hot_slots < old_slots + state.tail_slots:
        remedy = f"at least {state.tail_slots} more than the present {old_slots}"
        raise BadInput("not larger", field="hot_slots", value=hot_slots, remedy=remedy)
    backend(state, __name__).grow_managed(state, seat, old_slots, hot_slots)


def hold_tokens(state: DeviceState, seat: int, hot_slots: int, groups: Tensor, slots: Tensor, tokens: Tensor) -> None:
    """Hold token `tokens[i]` in slot `slots[i]` of selection `groups[i]`, used last at step 0.

    All int64[n]. For a buffer that init_managed has set up empty: no slot of a selection comes twice, nor any token;
    slots lie below `hot_slots`, tokens below the length, whose pages are granted. Their rows are there by the time they
    are read. Raises BadInput.
    """
    check_number("seat", seat, state.seats)
    _check_size(state, hot_slots)
    sizes = Sizes()
    for name, places in (("groups", groups), ("slots", slots), ("tokens", tokens)):
        sizes.check(name, places, ("n",), torch.int64)
    in_torch.hold_tokens(state, seat, hot_slots, groups, slots, tokens)


def latest_tokens(state: DeviceState, seat: int, hot_slots: int, out: Tensor) -> None:
    """Units that the last step of `seat` used into `out` int32[selections, n], in no order, -1 padded.

    The buffer is managed, of `hot_slots`. The step's own tokens may be among them, those of rejected rows too; where
    more were used than `out` has room for, some are left out. Changes nothing else; another size counts Tripwire.SEAT
    and gives -1. Raises BadInput.
    """
    check_number("seat", seat, state.seats)
    _check_size(state, hot_slots)
    Sizes(selections=state.geometry.selections).check("out", out, ("selections", "n"), torch.int32)
    in_torch.latest_tokens(state, seat, hot_slots, out)


def clear_seat(state: DeviceState, seat: int) -> None:
    """Empties the seat: tables unset, counters zero, granted_rows without limit. Rows and slot maps in its former
    chunks and pages are void."""
    check_number("seat", seat, state.seats)
    in_torch.clear_seat(state, seat)


def _check_resize(state: DeviceState, seat: int, old_slots: int, hot_slots: int) -> None:
    check_number("seat", seat, state.seats)
    if old_slots < 1:
        raise WrongState(
            "the hot buffer is not managed", field="seat", value=seat, remedy="set it up with init_managed first"
        )
    for slots in (old_slots, hot_slots):
        _check_size(state, slots)


def _check_size(state: DeviceState, hot_slots: int) -> None:
    if not 1 <= hot_slots <= SLOTS_MAX - PAGE_TOKENS:
        raise BadInput("out of range", field="hot_slots", value=hot_slots, remedy=f"1 to {SLOTS_MAX - PAGE_TOKENS}")
    if state.buffer_chunks(hot_slots) > state.chunk_table.shape[1]:
        raise BadInput(
            f"needs {state.buffer_chunks(hot_slots)} chunks, the chunk table holds {state.chunk_table.shape[1]}",
            field="hot_slots",
            value=hot_slots,
            remedy="allocate the state with a larger max_chunks",
        )
