"""Exact LRU at step granularity, by stamps: no list is ever reordered.

Each slot carries the step of its last use. Slots used by the current step are never victims; among the others the
oldest stamp goes first, the lowest slot first among equals. Empty slots carry stamp -1 and so go before all others.

Ordinary slots are 0..H+T-1 without the T tail slots. A tail place not set yet reserves slot H+r, so that there are
always exactly H ordinary slots, whatever slots the tail has wandered to.

Arrays of numpy see the tensors of the state in place: a call of torch takes several times as long for so few values.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.state import ABSENT, SLOT_MASK, DeviceState
from protocol.units import PAGE_TOKENS

Ints: TypeAlias = NDArray[np.integer[Any]]
Bools: TypeAlias = NDArray[np.bool_]

NEVER: Final = np.iinfo(np.int64).max  # eviction key of a slot that must not be evicted
SLOT_BITS: Final = 16
ROWS_OF_CHUNK: Final = np.arange(PAGE_TOKENS)


def table_entries(table: Tensor, seats: Ints, places: Ints) -> NDArray[np.int64]:
    """`table[seats, places]`, -1 where a place lies beyond the table. Arguments broadcast."""
    entries, last = table.numpy(), table.shape[1] - 1
    found = entries[seats, np.minimum(places, last)].astype(np.int64)
    found[places > last] = -1
    return found


def slot_rows(state: DeviceState, seats: Ints, slots: int) -> NDArray[np.int64]:
    """Device rows, in units, of slots 0..slots-1 of each seat: [len(seats), slots]; those of chunk 0 where there is no
    chunk."""
    each = state.geometry.page_slots
    chunks = state.chunk_table.numpy()[seats, : -(-slots // each)].astype(np.int64)
    rows = np.maximum(chunks, 0)[..., None] * each + ROWS_OF_CHUNK[:each]
    return rows.reshape(len(seats), -1)[:, :slots]


def eviction_keys(stamps: Ints, tail: Ints, hot_slots: Ints, now: Ints) -> NDArray[np.int64]:
    """int64[A, m, slots], smaller is evicted earlier, NEVER for slots that must stay; see `key_slot`.

    `stamps` int32[A, m, slots], `tail` int32[A, m, T], `hot_slots` and `now` int32[m]; slots >= max(hot_slots) + T.
    """
    tail_slots = tail.shape[-1]
    slots = np.arange(stamps.shape[-1])
    keys = (stamps.astype(np.int64) + 1 << SLOT_BITS) | slots
    keys[(stamps >= now[:, None]) | (slots >= (hot_slots + tail_slots)[:, None])] = NEVER
    reserved = hot_slots[:, None] + np.arange(tail_slots)
    np.put_along_axis(keys, np.where(tail < 0, reserved, tail), NEVER, axis=-1)
    return keys


def key_slot(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """The slot in an eviction key that is not NEVER."""
    return keys & SLOT_MASK


def forget(state: DeviceState, groups: Ints, seats: Ints, rows: Ints) -> None:
    """The units in the slots at device rows `rows` of selections `groups` and `seats` (int64, one shape) become
    absent."""
    each = state.geometry.page_slots
    tokens = state.slot_token.numpy()[groups, rows].astype(np.int64)
    held = tokens >= 0
    tokens = tokens[held]
    pages = state.index_table.numpy()[seats[held], tokens // each].astype(np.int64)
    state.slot_of.numpy()[groups[held], pages * each + tokens % each] = ABSENT
