"""rows on CUDA: the contracts of kernels/rows.py, each one launch on the current stream."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.cuda import structures
from kernels.cuda.launch import kernel_of, processors, stream_of
from kernels.state import DeviceState, StepBatch
from protocol.units import PAGE_TOKENS

WORD_MAX = 16
BLOCKS_PER_PROCESSOR = 8


def write_new_rows(state: DeviceState, layer: int, batch: StepBatch, rows: Tensor, plane: int = 0) -> None:
    """As kernels.rows.write_new_rows, unchecked; `state` has been through `prepare`."""
    places = state.new_rows_of(batch, layer, state.geometry.head_of(plane))
    _launch(state, "store_rows", state.plane(layer, plane), rows, places=places, plane=plane)


def write_index_keys(state: DeviceState, group: int, batch: StepBatch, keys: Tensor) -> None:
    """As kernels.rows.write_index_keys."""
    _launch(state, "store_keys", state.index_keys[group], keys, places=batch.new_index_rows)


def gather_rows(state: DeviceState, layer: int, out_rows: Tensor, plane: int = 0) -> Tensor:
    """As kernels.rows.gather_rows."""
    rows = _new(state, *out_rows.shape, state.geometry.planes[plane])
    _launch(state, "fetch_rows", state.plane(layer, plane), rows, places=out_rows, plane=plane)
    return rows


def write_slab_rows(state: DeviceState, layer: int, seat: int, start: int, rows: Tensor, plane: int = 0) -> None:
    """As kernels.rows.write_slab_rows."""
    section = state.slab(layer).plane(layer, plane)
    _launch(state, "store_rows", section, rows, table=state.slab_table[seat], start=start, plane=plane)


def read_slab_rows(state: DeviceState, layer: int, seat: int, stop: int, plane: int = 0, *, start: int = 0) -> Tensor:
    """As kernels.rows.read_slab_rows."""
    rows = _new(state, stop - start, state.geometry.planes[plane])
    section = state.slab(layer).plane(layer, plane)
    _launch(state, "fetch_rows", section, rows, table=state.slab_table[seat], start=start, plane=plane)
    return rows


def write_prompt_index_keys(state: DeviceState, group: int, seat: int, start: int, keys: Tensor) -> None:
    """As kernels.rows.write_prompt_index_keys."""
    _launch(state, "store_keys", state.index_keys[group], keys, table=state.index_table[seat], start=start)


def read_index_keys(state: DeviceState, group: int, seat: int, stop: int, *, start: int = 0) -> Tensor:
    """As kernels.rows.read_index_keys."""
    keys = _new(state, stop - start, state.geometry.index_row_bytes)
    _launch(state, "fetch_keys", state.index_keys[group], keys, table=state.index_table[seat], start=start)
    return keys


def read_dense_rows(state: DeviceState, layer: int, seat: int, stop: int, plane: int = 0, *, start: int = 0) -> Tensor:
    """As kernels.rows.read_dense_rows."""
    rows = _new(state, stop - start, state.geometry.planes[plane])
    section, table = state.plane(layer, plane), state.index_table[seat]
    _launch(state, "fetch_rows", section, rows, table=table, start=start, plane=plane)
    return rows


def _launch(
    state: DeviceState,
    kernel: str,
    section: Tensor,
    data: Tensor,
    *,
    places: Tensor | None = None,
    table: Tensor | None = None,
    start: int = 0,
    plane: int = 0,
) -> None:
    """Between `data` [..., bytes] and the rows of `section` named by `places`, or by positions start.. through `table`.

    A caller's tensor that begins off a word's boundary is copied to one that does not.
    """
    n = data.numel() // data.shape[-1]
    if not n:
        return
    if data.data_ptr() % WORD_MAX:
        data = data.clone()
    block = structures.MoveRows(
        section=section.data_ptr(),
        data=data.data_ptr(),
        places=None if places is None else places.data_ptr(),
        table=None if table is None else table.data_ptr(),
        tripwires=state.tripwires.data_ptr(),
        start=start,
        n=n,
        plane=plane,
    )
    words = data.numel() // math.gcd(data.shape[-1], WORD_MAX)
    tiles = min(-(-words // structures.ROWS_THREADS), BLOCKS_PER_PROCESSOR * processors(data.device))
    kernel_of(state, "rows", kernel).launch((tiles, 1), block, stream_of(state), threads=structures.ROWS_THREADS)


def _new(state: DeviceState, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device=state.rows.device)


assert PAGE_TOKENS % WORD_MAX == 0  # so that a section of any row size begins on a word's boundary
