"""A model's reads and writes of KV rows and index keys: by step, by prompt position, by device row. Reference in torch.

Rows and keys cross this boundary as bytes, uint8[..., row_bytes]; `tensor.view(torch.uint8)` of a contiguous tensor of
the model's dtype is free, and so is the way back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coordinator.errors import BadInput
from kernels.check import Sizes
from kernels.layout import PAGE_TOKENS
from kernels.state import DeviceState, StepBatch


def write_new_rows(state: DeviceState, layer: int, batch: StepBatch, rows: Tensor) -> None:
    """Store this step's KV row uint8[B, row_bytes] of each real request where begin_step placed it."""
    Sizes(batch=batch.seats.shape[0]).check("rows", rows, ("batch", state.geometry.row_bytes), torch.uint8)
    _scatter(state.row_words[layer], batch.new_rows[state.geometry.group_of_layer[layer]], rows)


def write_index_keys(state: DeviceState, group: int, batch: StepBatch, keys: Tensor) -> None:
    """Store this step's index key uint8[B, index_row_bytes] of each real request."""
    Sizes(batch=batch.seats.shape[0]).check("keys", keys, ("batch", state.geometry.index_row_bytes), torch.uint8)
    _scatter(state.key_words[group], batch.new_index_rows, keys)


def gather_rows(state: DeviceState, layer: int, out_rows: Tensor) -> Tensor:
    """Rows at the device rows of swap_in, int32[B, k]: uint8[B, k, row_bytes], zeros where -1."""
    sizes = Sizes()
    sizes.check("out_rows", out_rows, ("batch", "k"), torch.int32)
    words = state.row_words[layer]
    flat = words.index_select(0, out_rows.flatten().clamp(min=0))
    flat.masked_fill_((out_rows.flatten() < 0).unsqueeze(1), 0)
    return flat.view(torch.uint8).view(sizes["batch"], sizes["k"], -1)


def write_slab_rows(state: DeviceState, layer: int, seat: int, start: int, rows: Tensor) -> None:
    """Store prompt rows uint8[S, row_bytes] of positions start..start+S-1 in the seat's prefill slab."""
    sizes = Sizes()
    sizes.check("rows", rows, ("tokens", state.geometry.row_bytes), torch.uint8)
    places = _places(state.slab_table, "slab_table", seat, start, start + sizes["tokens"])
    state.row_words[layer][places] = rows.view(state.row_words.dtype)


def read_slab_rows(state: DeviceState, layer: int, seat: int, stop: int) -> Tensor:
    """Prompt rows of positions 0..stop-1 from the prefill slab: uint8[stop, row_bytes]."""
    places = _places(state.slab_table, "slab_table", seat, 0, stop)
    return state.row_words[layer].index_select(0, places).view(torch.uint8)


def write_prompt_index_keys(state: DeviceState, group: int, seat: int, start: int, keys: Tensor) -> None:
    """Store index keys uint8[S, index_row_bytes] of prompt positions start..start+S-1."""
    sizes = Sizes()
    sizes.check("keys", keys, ("tokens", state.geometry.index_row_bytes), torch.uint8)
    places = _places(state.index_table, "index_table", seat, start, start + sizes["tokens"])
    state.key_words[group][places] = keys.view(state.key_words.dtype)


def read_index_keys(state: DeviceState, group: int, seat: int, stop: int) -> Tensor:
    """Index keys of positions 0..stop-1: uint8[stop, index_row_bytes]."""
    places = _places(state.index_table, "index_table", seat, 0, stop)
    return state.key_words[group].index_select(0, places).view(torch.uint8)


def _scatter(words: Tensor, places: Tensor, data: Tensor) -> None:
    held = (places >= 0).nonzero().flatten()
    words[places[held].long()] = data[held].view(words.dtype)


def _places(table: Tensor, name: str, seat: int, start: int, stop: int) -> Tensor:
    """Rows of positions start..stop-1 through a table of pages: int64[stop-start]. Raises BadInput."""
    positions = torch.arange(start, stop, device=table.device)
    last = (stop - 1) // PAGE_TOKENS
    pages = table[seat, start // PAGE_TOKENS : last + 1]
    if last >= table.shape[1] or bool((pages < 0).any()):
        raise BadInput(
            f"positions {start} to {stop - 1} lie on pages that the seat does not hold",
            field=name,
            value=f"seat {seat}",
            remedy="write the table before the rows",
        )
    return pages.long()[positions // PAGE_TOKENS - start // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
