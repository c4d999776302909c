"""A model's reads and writes of KV rows and index keys: by step, by prompt position, by device row.

Rows and keys cross this boundary as bytes, uint8[..., row_bytes]; `tensor.view(torch.uint8)` of a contiguous tensor of
the model's dtype is free, and so is the way back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import backend
from kernels.check import Sizes
from kernels.state import DeviceState, StepBatch


def write_new_rows(state: DeviceState, layer: int, batch: StepBatch, rows: Tensor) -> None:
    """Store this step's KV row uint8[B, row_bytes] of each real request where begin_step placed it."""
    Sizes(batch=batch.seats.shape[0]).check("rows", rows, ("batch", state.geometry.row_bytes), torch.uint8)
    backend(state).write_new_rows(state, layer, batch, rows)


def write_index_keys(state: DeviceState, group: int, batch: StepBatch, keys: Tensor) -> None:
    """Store this step's index key uint8[B, index_row_bytes] of each real request."""
    Sizes(batch=batch.seats.shape[0]).check("keys", keys, ("batch", state.geometry.index_row_bytes), torch.uint8)
    backend(state).write_index_keys(state, group, batch, keys)


def gather_rows(state: DeviceState, layer: int, out_rows: Tensor) -> Tensor:
    """Rows at the device rows of swap_in, int32[B, k]: uint8[B, k, row_bytes], zeros where -1."""
    Sizes().check("out_rows", out_rows, ("batch", "k"), torch.int32)
    rows: Tensor = backend(state).gather_rows(state, layer, out_rows)
    return rows


def write_slab_rows(state: DeviceState, layer: int, seat: int, start: int, rows: Tensor) -> None:
    """Store prompt rows uint8[S, row_bytes] of positions start..start+S-1 in the seat's prefill slab."""
    Sizes().check("rows", rows, ("tokens", state.geometry.row_bytes), torch.uint8)
    backend(state).write_slab_rows(state, layer, seat, start, rows)


def read_slab_rows(state: DeviceState, layer: int, seat: int, stop: int) -> Tensor:
    """Prompt rows of positions 0..stop-1 from the prefill slab: uint8[stop, row_bytes]."""
    rows: Tensor = backend(state).read_slab_rows(state, layer, seat, stop)
    return rows


def write_prompt_index_keys(state: DeviceState, group: int, seat: int, start: int, keys: Tensor) -> None:
    """Store index keys uint8[S, index_row_bytes] of prompt positions start..start+S-1."""
    Sizes().check("keys", keys, ("tokens", state.geometry.index_row_bytes), torch.uint8)
    backend(state).write_prompt_index_keys(state, group, seat, start, keys)


def read_index_keys(state: DeviceState, group: int, seat: int, stop: int) -> Tensor:
    """Index keys of positions 0..stop-1: uint8[stop, index_row_bytes]."""
    rows: Tensor = backend(state).read_index_keys(state, group, seat, stop)
    return rows
