"""copy_rows in numpy, over the tensors of a CPU. Contract: kernels/copy_rows.py."""

from __future__ import annotations

from collections.abc import Iterator

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
    places = _places(device_row, index_row, host_page, host_offset)
    if places is None:
        return
    rows, keys, pages, offsets = places
    for plane, host in enumerate(state.host_row_words):
        for device, ids, numbers, held in _sections(state, plane, layers, rows):
            host.numpy()[pages, ids, offsets] = device.numpy()[numbers, held]
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
    places = _places(device_row, index_row, host_page, host_offset)
    if places is None:
        return
    rows, keys, pages, offsets = places
    for plane, host in enumerate(state.host_row_words):
        for device, ids, numbers, held in _sections(state, plane, layers, rows):
            for at, layer in enumerate(ids[:, 0]):
                device[numbers[at, 0]].numpy()[held[at]] = host.numpy()[pages, layer, offsets]
    if keys is not None:
        _keys_to_device(state, keys, pages, offsets)


def copy_keys_to_device(state: DeviceState, index_row: Tensor, host_page: Tensor, host_offset: Tensor) -> None:
    """See kernels.copy_rows."""
    (wanted,) = (host_page.numpy() >= 0).nonzero()
    _keys_to_device(state, *(tensor.numpy()[wanted] for tensor in (index_row, host_page, host_offset)))


def _keys_to_device(state: DeviceState, keys: Ints, pages: Ints, offsets: Ints) -> None:
    groups = state.group_ids.numpy()
    state.key_words.numpy()[groups, keys] = state.host_key_words.numpy()[pages, groups, offsets]


def _sections(state: DeviceState, plane: int, layers: range, rows: Ints) -> Iterator[tuple[Tensor, Ints, Ints, Ints]]:
    """Yield, of the dense layers among `layers` and of the others, rows of one plane in words, numbers int64[l, 1] of
    the layers in the model and in these rows, and the device rows int32[l, n] of each."""
    g = state.geometry
    middle = min(max(layers.start, g.dense), layers.stop)
    for words, first, of in (
        (state.dense_words[plane], 0, range(layers.start, middle)),
        (state.row_words[plane], g.dense, range(middle, layers.stop)),
    ):
        if of:
            ids = state.layer_ids.numpy()[of.start : of.stop]
            yield words, ids, ids - first, rows[[g.place_of(layer, g.head_of(plane)) for layer in of]]


def _places(
    device_row: Tensor, index_row: Tensor | None, host_page: Tensor, host_offset: Tensor
) -> tuple[Ints, Ints | None, Ints, Ints] | None:
    """Rows by place int32[A, n], key rows, pages and offsets int32[n]; None when there is nothing to copy."""
    (wanted,) = (host_page.numpy() >= 0).nonzero()
    if not len(wanted):
        return None
    rows = device_row.numpy()[:, wanted]
    keys = None if index_row is None else index_row.numpy()[wanted]
    return rows, keys, host_page.numpy()[wanted], host_offset.numpy()[wanted]
