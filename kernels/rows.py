"""A model's reads and writes of KV rows and index keys: by step, by prompt position, by device row.

Rows and keys cross this boundary as bytes, one plane of a row at a time, uint8[..., planes[plane]] (most rows have but
one: layout.py); `tensor.view(torch.uint8)` of a contiguous tensor of the model's dtype is free, and so is the way back.

Nothing here waits for the device. What the host can know (shapes, seat, layer, the width of a table) raises BadInput
before any change. What only the device knows, whether a page is granted, counts Tripwire.UNGRANTED there, once per
position: such a row is not stored, and reads as zeros. Functions that take a `batch` may be captured into a graph.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernels.backend import backend
from kernels.check import Sizes, check_number
from kernels.row_target import RowTarget
from kernels.state import DeviceState, StepBatch
from protocol.errors import BadInput
from protocol.units import PAGE_TOKENS

#: Pages that copy_slab_pages moves by way of scratch memory at a time: 16,384 rows.
COPIED_PAGES: Final = 256


def write_new_rows(state: DeviceState, layer: int, batch: StepBatch, rows: Tensor, plane: int = 0) -> None:
    """Store this step's KV row uint8[B, planes[plane]] of each real request where begin_step placed it."""
    _check_plane(state, layer, plane)
    Sizes(batch=batch.seats.shape[0]).check("rows", rows, ("batch", state.geometry.planes[plane]), torch.uint8)
    backend(state, __name__).write_new_rows(state, layer, batch, rows, plane)


def write_index_keys(state: DeviceState, group: int, batch: StepBatch, keys: Tensor) -> None:
    """Store this step's index key uint8[B, index_row_bytes] of each real request."""
    check_number("group", group, state.geometry.groups)
    Sizes(batch=batch.seats.shape[0]).check("keys", keys, ("batch", state.geometry.index_row_bytes), torch.uint8)
    backend(state, __name__).write_index_keys(state, group, batch, keys)


def new_rows(state: DeviceState, layer: int, batch: StepBatch) -> RowTarget:
    """Return the places that write_new_rows stores to, for a kernel that forms the rows."""
    _check_plane(state, layer, 0)
    return RowTarget(state.plane(layer, 0), state.new_rows_of(batch, layer, 0))


def new_keys(state: DeviceState, group: int, batch: StepBatch) -> RowTarget:
    """Return the places that write_index_keys stores to, likewise."""
    check_number("group", group, state.geometry.groups)
    return RowTarget(state.index_keys[group], batch.new_index_rows)


def gather_rows(state: DeviceState, layer: int, out_rows: Tensor, plane: int = 0) -> Tensor:
    """Rows at the device rows of swap_in, int32[B, k]: uint8[B, k, slot_tokens * planes[plane]], zeros where -1."""
    _check_plane(state, layer, plane)
    check_number("layer", layer - state.geometry.dense, state.geometry.layers - state.geometry.dense)
    Sizes().check("out_rows", out_rows, ("batch", "k"), torch.int32)
    rows: Tensor = backend(state, __name__).gather_rows(state, layer, out_rows, plane)
    return rows


def write_slab_rows(state: DeviceState, layer: int, seat: int, start: int, rows: Tensor, plane: int = 0) -> None:
    """Store prompt rows uint8[S, planes[plane]] of positions start..start+S-1 in the seat's pages of the slab, over
    those of layer - 2."""
    _check_plane(state, layer, plane)
    Sizes().check("rows", rows, ("tokens", state.geometry.planes[plane]), torch.uint8)
    _check_span(state, "slab_table", seat, start, start + len(rows))
    backend(state, __name__).write_slab_rows(state, layer, seat, start, rows, plane)


def read_slab_rows(state: DeviceState, layer: int, seat: int, stop: int, plane: int = 0, *, start: int = 0) -> Tensor:
    """Prompt rows of positions start..stop-1 from the slab: uint8[stop - start, planes[plane]]. Its rows are those of
    `layer` until layer + 2 is written."""
    _check_plane(state, layer, plane)
    _check_span(state, "slab_table", seat, start, stop)
    rows: Tensor = backend(state, __name__).read_slab_rows(state, layer, seat, stop, plane, start=start)
    return rows


def write_prompt_index_keys(state: DeviceState, group: int, seat: int, start: int, keys: Tensor) -> None:
    """Store index keys uint8[S, index_row_bytes] of prompt positions start..start+S-1."""
    check_number("group", group, state.geometry.groups)
    Sizes().check("keys", keys, ("tokens", state.geometry.index_row_bytes), torch.uint8)
    _check_span(state, "index_table", seat, start, start + len(keys))
    backend(state, __name__).write_prompt_index_keys(state, group, seat, start, keys)


def read_index_keys(state: DeviceState, group: int, seat: int, stop: int, *, start: int = 0) -> Tensor:
    """Index keys of positions start..stop-1: uint8[stop - start, index_row_bytes]."""
    check_number("group", group, state.geometry.groups)
    _check_span(state, "index_table", seat, start, stop)
    rows: Tensor = backend(state, __name__).read_index_keys(state, group, seat, stop, start=start)
    return rows


def read_dense_rows(state: DeviceState, layer: int, seat: int, stop: int, plane: int = 0, *, start: int = 0) -> Tensor:
    """Rows of positions start..stop-1 of a dense layer: uint8[stop - start, planes[plane]]."""
    _check_plane(state, layer, plane)
    check_number("layer", layer, state.geometry.dense)
    _check_span(state, "index_table", seat, start, stop)
    rows: Tensor = backend(state, __name__).read_dense_rows(state, layer, seat, stop, plane, start=start)
    return rows


def _check_plane(state: DeviceState, layer: int, plane: int) -> None:
    check_number("layer", layer, state.geometry.layers)
    check_number("plane", plane, len(state.geometry.planes))


def _check_span(state: DeviceState, table: str, seat: int, start: int, stop: int) -> None:
    """Raises BadInput unless `table` is wide enough for positions start..stop-1 of `seat`."""
    check_number("seat", seat, state.seats)
    room = getattr(state, table).shape[1] * PAGE_TOKENS
    if not 0 <= start <= stop <= room:
        raise BadInput(
            f"positions {start} to {stop - 1} lie outside the table's {room}",
            field=table,
            value=f"seat {seat}",
            remedy="allocate the state with more pages per seat",
        )


def slab_rows(state: DeviceState, seat: int, positions: Tensor) -> Tensor:
    """Rows int32 of the slab that hold prompt `positions` int32 of any shape in `seat`, -1 where they are."""
    pages = state.slab_table[seat][positions.clamp(min=0).long() // PAGE_TOKENS]
    return torch.where(positions < 0, -1, pages * PAGE_TOKENS + positions % PAGE_TOKENS)


def copy_slab_pages(state: DeviceState, layer: int, slab_pages: Tensor, chunks: Tensor) -> None:
    """Copy rows of `layer` in `slab_pages` int64[n] to `chunks` int64[n] of the arena, of a dense layer to index pages,
    which must differ: whole pages.

    Takes COPIED_PAGES pages at a time as scratch memory. Raises BadInput before any change.
    """
    check_number("layer", layer, state.geometry.layers)
    sizes = Sizes()
    sizes.check("slab_pages", slab_pages, ("pages",), torch.int64)
    sizes.check("chunks", chunks, ("pages",), torch.int64)
    slab = state.slab(layer)
    for plane in range(len(state.geometry.planes)):
        there, here = (of.words(layer, plane).unflatten(0, (-1, PAGE_TOKENS)) for of in (slab, state))
        for first in range(0, len(chunks), COPIED_PAGES):
            part = slice(first, first + COPIED_PAGES)
            here.index_copy_(0, chunks[part], there.index_select(0, slab_pages[part]))
