"""rows in torch. Contract: kernels/rows.py."""

from __future__ import annotations

import torch
from torch import Tensor

from coordinator.errors import BadInput
from kernels.layout import PAGE_TOKENS
from kernels.state import DeviceState, StepBatch


def write_new_rows(state: DeviceState, layer: int, batch: StepBatch, rows: Tensor) -> None:
    """See kernels.rows."""
    _scatter(state.row_words[layer], batch.new_rows[state.geometry.group_of_layer[layer]], rows)


def write_index_keys(state: DeviceState, group: int, batch: StepBatch, keys: Tensor) -> None:
    """See kernels.rows."""
    _scatter(state.key_words[group], batch.new_index_rows, keys)


def gather_rows(state: DeviceState, layer: int, out_rows: Tensor) -> Tensor:
    """See kernels.rows."""
    words = state.row_words[layer]
    flat = words.index_select(0, out_rows.flatten().clamp(min=0))
    flat.masked_fill_((out_rows.flatten() < 0).unsqueeze(1), 0)
    return flat.view(torch.uint8).view(*out_rows.shape, -1)


def write_slab_rows(state: DeviceState, layer: int, seat: int, start: int, rows: Tensor) -> None:
    """See kernels.rows."""
    places = _places(state.slab_table, "slab_table", seat, start, start + len(rows))
    state.row_words[layer][places] = rows.view(state.row_words.dtype)


def read_slab_rows(state: DeviceState, layer: int, seat: int, stop: int) -> Tensor:
    """See kernels.rows."""
    places = _places(state.slab_table, "slab_table", seat, 0, stop)
    return state.row_words[layer].index_select(0, places).view(torch.uint8)


def write_prompt_index_keys(state: DeviceState, group: int, seat: int, start: int, keys: Tensor) -> None:
    """See kernels.rows."""
    places = _places(state.index_table, "index_table", seat, start, start + len(keys))
    state.key_words[group][places] = keys.view(state.key_words.dtype)


def read_index_keys(state: DeviceState, group: int, seat: int, stop: int) -> Tensor:
    """See kernels.rows."""
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
