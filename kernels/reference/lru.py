"""Exact LRU at step granularity, by stamps: no list is ever reordered.

Each slot carries the step of its last use. Slots used by the current step are never victims; among the others the
oldest stamp goes first, the lowest slot first among equals. Empty slots carry stamp -1 and so go before all others.

Ordinary slots are 0..H+T-1 without the T tail slots. A tail place not set yet reserves slot H+r, so that there are
always exactly H ordinary slots, whatever slots the tail has wandered to.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernels.state import ABSENT, SLOT_MASK, DeviceState
from protocol.units import PAGE_TOKENS

NEVER: Final = torch.iinfo(torch.int64).max  # eviction key of a slot that must not be evicted
SLOT_BITS: Final = 16


def slot_rows(state: DeviceState, seats: Tensor, slots: int) -> Tensor:
    """Device rows of slots 0..slots-1 of each seat: int64[len(seats), slots]; negative where there is no chunk."""
    chunks = state.chunk_table[seats, : -(-slots // PAGE_TOKENS)].long()
    rows = chunks.unsqueeze(-1) * PAGE_TOKENS + torch.arange(PAGE_TOKENS, device=chunks.device)
    return rows.flatten(1)[:, :slots]


def eviction_keys(stamps: Tensor, tail: Tensor, hot_slots: Tensor, now: Tensor) -> Tensor:
    """int64[G, m, slots], smaller is evicted earlier, NEVER for slots that must stay; see `key_slot`.

    `stamps` int32[G, m, slots], `tail` int32[G, m, T], `hot_slots` and `now` int32[m]; slots >= max(hot_slots) + T.
    """
    tail_slots = tail.shape[-1]
    slots = torch.arange(stamps.shape[-1], device=stamps.device)
    keys = (stamps.long() + 1).bitwise_left_shift_(SLOT_BITS).bitwise_or_(slots)
    keep = (stamps >= now.unsqueeze(-1)) | (slots >= (hot_slots + tail_slots).unsqueeze(-1))
    keys.masked_fill_(keep, NEVER)
    reserved = hot_slots.unsqueeze(-1) + torch.arange(tail_slots, device=stamps.device)
    return keys.scatter_(-1, torch.where(tail < 0, reserved, tail).long(), NEVER)


def key_slot(keys: Tensor) -> Tensor:
    """The slot in an eviction key that is not NEVER."""
    return keys & SLOT_MASK


def forget(state: DeviceState, groups: Tensor, seats: Tensor, rows: Tensor) -> None:
    """The tokens in the slots at device rows `rows` of `groups` and `seats` (int64, one shape) become absent."""
    tokens = state.slot_token[groups, rows].long()
    held = tokens >= 0
    tokens = tokens[held]
    pages = state.index_table[seats[held], tokens // PAGE_TOKENS].long()
    state.slot_of[groups[held], pages * PAGE_TOKENS + tokens % PAGE_TOKENS] = ABSENT
