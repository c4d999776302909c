"""rows in numpy, over the tensors of a CPU. Contract: kernels/rows.py."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.reference.lru import Ints
from kernels.state import DeviceState, StepBatch, Tripwire
from protocol.units import PAGE_TOKENS


def write_new_rows(state: DeviceState, layer: int, batch: StepBatch, rows: Tensor, plane: int = 0) -> None:
    """See kernels.rows."""
    places = state.new_rows_of(batch, layer, state.geometry.head_of(plane))
    _scatter(state.words(layer, plane), places.numpy(), rows)


def write_index_keys(state: DeviceState, group: int, batch: StepBatch, keys: Tensor) -> None:
    """See kernels.rows."""
    _scatter(state.key_words[group], batch.new_index_rows.numpy(), keys)


def gather_rows(state: DeviceState, layer: int, out_rows: Tensor, plane: int = 0) -> Tensor:
    """See kernels.rows."""
    words = state.words(layer, plane)
    slots = words.view(len(words) // state.geometry.slot_tokens, -1)
    return _gather(slots, out_rows.flatten().numpy()).view(*out_rows.shape, -1)


def read_dense_rows(state: DeviceState, layer: int, seat: int, stop: int, plane: int = 0, *, start: int = 0) -> Tensor:
    """See kernels.rows."""
    return _gather(state.words(layer, plane), _places(state, state.index_table[seat], start, stop))


def write_slab_rows(state: DeviceState, layer: int, seat: int, start: int, rows: Tensor, plane: int = 0) -> None:
    """See kernels.rows."""
    places = _places(state, state.slab_table[seat], start, start + len(rows))
    _scatter(state.slab(layer).words(layer, plane), places, rows)


def read_slab_rows(state: DeviceState, layer: int, seat: int, stop: int, plane: int = 0, *, start: int = 0) -> Tensor:
    """See kernels.rows."""
    return _gather(state.slab(layer).words(layer, plane), _places(state, state.slab_table[seat], start, stop))


def write_prompt_index_keys(state: DeviceState, group: int, seat: int, start: int, keys: Tensor) -> None:
    """See kernels.rows."""
    _scatter(state.key_words[group], _places(state, state.index_table[seat], start, start + len(keys)), keys)


def read_index_keys(state: DeviceState, group: int, seat: int, stop: int, *, start: int = 0) -> Tensor:
    """See kernels.rows."""
    return _gather(state.key_words[group], _places(state, state.index_table[seat], start, stop))


def _scatter(words: Tensor, places: Ints, data: Tensor) -> None:
    target, (held,) = words.numpy(), (places >= 0).nonzero()
    target[places[held]] = data.numpy()[held].view(target.dtype)


def _gather(words: Tensor, places: Ints) -> Tensor:
    data = words.numpy().take(np.maximum(places, 0), axis=0)
    data[places < 0] = 0
    return torch.from_numpy(data.view(np.uint8))


def _places(state: DeviceState, table: Tensor, start: int, stop: int) -> Ints:
    """Rows of positions start..stop-1 through a seat's table of pages: int64[stop-start], -1 where not granted."""
    positions = np.arange(start, stop)
    pages = table.numpy()[positions // PAGE_TOKENS].astype(np.int64)
    state.tripwires.numpy()[Tripwire.UNGRANTED] += np.count_nonzero(pages < 0)
    rows: Ints = np.where(pages < 0, -1, pages * PAGE_TOKENS + positions % PAGE_TOKENS)
    return rows
