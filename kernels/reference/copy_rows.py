"""copy_rows in numpy, over the tensors of a CPU. Contract: kernels/copy_rows.py."""

from __future__ import annotations

from torch import Tensor

from kernels.reference.lru import Ints
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
    ids, rows = state.layer_ids.numpy()[chosen], rows[chosen]
    for host, device in zip(state.host_row_words, state.row_words, strict=True):
        host.numpy()[pages, ids, offsets] = device.numpy()[ids, rows]
    if keys is not None:
        groups = state.group_ids.numpy()
        state.host_key_words.numpy()[pages, groups, offsets] = state.key_words.numpy()[groups, keys]


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
            device[layer].numpy()[rows[layer]] = host.numpy()[pages, layer, offsets]
    if keys is not None:
        _keys_to_device(state, keys, pages, offsets)


def copy_keys_to_device(state: DeviceState, index_row: Tensor, host_page: Tensor, host_offset: Tensor) -> None:
    """See kernels.copy_rows."""
    (wanted,) = (host_page.numpy() >= 0).nonzero()
    _keys_to_device(state, *(tensor.numpy()[wanted] for tensor in (index_row, host_page, host_offset)))


def _keys_to_device(state: DeviceState, keys: Ints, pages: Ints, offsets: Ints) -> None:
    groups = state.group_ids.numpy()
    state.key_words.numpy()[groups, keys] = state.host_key_words.numpy()[pages, groups, offsets]


def _places(
    state: DeviceState, device_row: Tensor, index_row: Tensor | None, host_page: Tensor, host_offset: Tensor
) -> tuple[Ints, Ints | None, Ints, Ints] | None:
    """Rows by layer int32[L, n], key rows, pages and offsets int32[n]; None when there is nothing to copy."""
    (wanted,) = (host_page.numpy() >= 0).nonzero()
    if not len(wanted):
        return None
    rows = device_row.numpy()[:, wanted][state.group_of_layer.numpy()]
    keys = None if index_row is None else index_row.numpy()[wanted]
    return rows, keys, host_page.numpy()[wanted], host_offset.numpy()[wanted]
