"""copy_rows in torch. Contract: kernels/copy_rows.py."""

from __future__ import annotations

from torch import Tensor

from kernels.state import DeviceState


def copy_rows_to_host(
    state: DeviceState,
    device_row: Tensor,
    index_row: Tensor | None,
    host_page: Tensor,
    host_offset: Tensor,
    layers: range,
) -> None:
    """See kernels.copy_rows."""
    places = _places(state, device_row, index_row, host_page, host_offset)
    if places is None:
        return
    rows, keys, pages, offsets = places
    chosen = slice(layers.start, layers.stop)
    ids, rows = state.layer_ids[chosen], rows[chosen]
    for host, device in zip(state.host_row_words, state.row_words, strict=True):
        host[pages, ids, offsets] = device[ids, rows]
    if keys is not None:
        state.host_key_words[pages, state.group_ids, offsets] = state.key_words[state.group_ids, keys]


def copy_rows_to_device(
    state: DeviceState,
    device_row: Tensor,
    index_row: Tensor | None,
    host_page: Tensor,
    host_offset: Tensor,
    layers: range,
) -> None:
    """See kernels.copy_rows."""
    places = _places(state, device_row, index_row, host_page, host_offset)
    if places is None:
        return
    rows, keys, pages, offsets = places
    for host, device in zip(state.host_row_words, state.row_words, strict=True):
        for layer in layers:
            device[layer][rows[layer]] = host[pages, layer, offsets]
    if keys is not None:
        state.key_words[state.group_ids, keys] = state.host_key_words[pages, state.group_ids, offsets]


def copy_keys_to_device(state: DeviceState, index_row: Tensor, host_page: Tensor, host_offset: Tensor) -> None:
    """See kernels.copy_rows."""
    wanted = (host_page >= 0).nonzero().flatten()
    keys, pages, offsets = (tensor[wanted].long() for tensor in (index_row, host_page, host_offset))
    state.key_words[state.group_ids, keys] = state.host_key_words[pages, state.group_ids, offsets]


def _places(
    state: DeviceState, device_row: Tensor, index_row: Tensor | None, host_page: Tensor, host_offset: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor] | None:
    """Rows by layer int64[L, n], key rows, pages and offsets int64[n]; None when there is nothing to copy."""
    wanted = (host_page >= 0).nonzero().flatten()
    if not len(wanted):
        return None
    rows = device_row[:, wanted].long()[state.group_of_layer]
    keys = None if index_row is None else index_row[wanted].long()
    return rows, keys, host_page[wanted].long(), host_offset[wanted].long()
