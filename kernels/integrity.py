"""Checks that a seat's tables agree with each other. For tests, and for production when a worker is idle. Read-only.

Of a managed seat, in every group:
    slot_token and slot_of are inverse: each token below the length is in one slot at most, and found there
    empty slots carry stamp -1, others a stamp between 0 and `now`
    a set tail place holds one of the T newest tokens, of its own residue; a place not set reserves an empty slot
    of R rows of a seat, R - 1 may have been rejected: their slots hold tokens from the length on
Of a resident seat: every page of the context has a chunk of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.layout import SLOT_ABSENT
from kernels.state import SLOT_MASK, DeviceState, slot_rows
from protocol.errors import InternalError
from protocol.units import pages_for


def check_state(state: DeviceState, seat: int, length: int) -> None:
    """Raises InternalError, naming seat, group and token, unless the tables of `seat` fit a context of `length`."""
    hot_slots = int(state.hot_slots[seat])
    if hot_slots < 0:
        return
    chunks = state.chunk_table[seat, : state.buffer_chunks(hot_slots) if hot_slots else pages_for(length)]
    _require(
        bool((chunks >= 0).all()) and len(set(chunks.tolist())) == len(chunks), seat, "chunks missing or held twice"
    )
    if not hot_slots:
        return
    device = state.rows.device
    rows = slot_rows(state, seat, hot_slots + state.tail_slots)
    unit, each = state.geometry.slot_tokens, state.geometry.page_slots
    reach = length + state.seat_rows - 1  # tokens of rejected rows lie below it
    pages = state.index_table[seat, : pages_for(reach)].long()
    length, reach = -(-length // unit), -(-reach // unit)
    held = (pages >= 0).repeat_interleave(each)[:reach]
    index_rows = (pages.clamp(min=0).unsqueeze(1) * each + torch.arange(each, device=device)).flatten()[:reach]
    for group in range(state.geometry.selections):
        where = f"group {group}: " if state.geometry.heads == 1 else f"selection {group}: "
        tokens, stamps = state.slot_token[group, rows].long(), state.stamp[group, rows]
        slots = torch.where(held, state.slot_of[group, index_rows].long() & SLOT_MASK, SLOT_ABSENT)
        _check_maps(tokens, slots, length, seat, where)
        _require(bool((stamps[tokens < 0] == -1).all()), seat, f"{where}an empty slot has a stamp")
        used = stamps[tokens >= 0]
        _require(bool(((used >= 0) & (used <= state.now[seat])).all()), seat, f"{where}a stamp outside 0..now")
        _check_tail(tokens, state.tail[group, seat].tolist(), hot_slots, length, seat, where)


def _check_maps(tokens: Tensor, slots: Tensor, length: int, seat: int, where: str) -> None:
    filled = (tokens >= 0).nonzero().flatten()
    reach = len(slots)
    _require(bool((tokens[filled] < reach).all()), seat, f"{where}a slot holds a token at or beyond {reach}")
    wrong = filled[slots[tokens[filled]] != filled]
    _require(not len(wrong), seat, f"{where}tokens {tokens[wrong].tolist()} are not found in their slots")
    found, valid = int((slots[:length] != SLOT_ABSENT).sum()), int((tokens[filled] < length).sum())
    _require(found == valid, seat, f"{where}{found} tokens are mapped, {valid} slots are filled")


def _check_tail(tokens: Tensor, tail: list[int], hot_slots: int, length: int, seat: int, where: str) -> None:
    places = [hot_slots + ring if slot < 0 else slot for ring, slot in enumerate(tail)]
    _require(len(set(places)) == len(places), seat, f"{where}a slot serves two tail places: {places}")
    for ring, slot in enumerate(tail):
        token = int(tokens[places[ring]])
        if slot < 0:
            _require(token < 0, seat, f"{where}the slot reserved for tail place {ring} holds token {token}")
        else:
            fits = token % len(tail) == ring and token >= length - len(tail)
            _require(fits, seat, f"{where}tail place {ring} holds token {token} at length {length}")


def _require(holds: bool, seat: int, what: str) -> None:
    if not holds:
        raise InternalError(what, field="seat", value=seat, remedy="a bug in kernels or in the tables given to them")
