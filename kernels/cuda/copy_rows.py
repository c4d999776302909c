"""copy_rows on CUDA: the contracts of kernels/copy_rows.py, all layers and index keys in one launch."""

from __future__ import annotations

from torch import Tensor

from kernels.cuda import parameters, structures
from kernels.cuda.launch import kernel_of, processors, stream_of
from kernels.state import DeviceState
from protocol.units import PAGE_TOKENS

TILES_PER_PROCESSOR = 4


def copy_rows_to_host(
    state: DeviceState,
    device_row: Tensor,
    index_row: Tensor | None,
    host_page: Tensor,
    host_offset: Tensor,
    layers: range,
) -> None:
    """As kernels.copy_rows.copy_rows_to_host, unchecked; `state` has been through `prepare`."""
    _launch(state, device_row, index_row, host_page, host_offset, layers, to_host=True)


def copy_rows_to_device(
    state: DeviceState,
    device_row: Tensor,
    index_row: Tensor | None,
    host_page: Tensor,
    host_offset: Tensor,
    layers: range,
) -> None:
    """As kernels.copy_rows.copy_rows_to_device."""
    _launch(state, device_row, index_row, host_page, host_offset, layers, to_host=False)


def copy_keys_to_device(state: DeviceState, index_row: Tensor, host_page: Tensor, host_offset: Tensor) -> None:
    """As kernels.copy_rows.copy_keys_to_device."""
    layers = range(state.geometry.layers)
    _launch(state, None, index_row, host_page, host_offset, layers, to_host=False)


def _launch(
    state: DeviceState,
    device_row: Tensor | None,
    index_row: Tensor | None,
    host_page: Tensor,
    host_offset: Tensor,
    layers: range,
    *,
    to_host: bool,
) -> None:
    n = len(host_page)
    if n == 0:
        return
    geometry = state.geometry
    block = structures.CopyRows(
        state=parameters.layers_parameters(state, layers),
        group_of_layer=state.group_of_layer.data_ptr() + layers.start * state.group_of_layer.element_size(),
        device_row=_address(device_row),
        index_row=_address(index_row),
        host_page=host_page.data_ptr(),
        host_offset=host_offset.data_ptr(),
        n=n,
        wide_device_row=0 if device_row is None else parameters.is_wide(device_row),
        wide_index_row=0 if index_row is None else parameters.is_wide(index_row),
        wide_host_page=parameters.is_wide(host_page),
        wide_host_offset=parameters.is_wide(host_offset),
        to_host=int(to_host),
    )
    rows = 0 if device_row is None else len(layers) * len(geometry.planes)
    sections = rows + (0 if index_row is None else geometry.groups)
    tiles = min(-(-n // PAGE_TOKENS), -(-TILES_PER_PROCESSOR * processors(host_page.device) // sections))
    kernel_of(state, "copy_rows", "copy_rows").launch(
        (tiles, sections), block, stream_of(state), threads=structures.COPY_ROWS_THREADS
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
