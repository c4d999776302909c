"""Rows between device memory and host pages, all layers and all index keys in one call.

One call serves staging, eager backup, preload and resume: it takes a list of places on either side, in any order, so a
partial page is no special case. Cost is proportional to the list; nothing depends on page boundaries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import backend
from kernels.check import Sizes
from kernels.state import DeviceState
from protocol.errors import BadInput


def copy_rows_to_host(
    state: DeviceState,
    device_row: Tensor,
    index_row: Tensor | None,
    host_page: Tensor,
    host_offset: Tensor,
    layers: range | None = None,
) -> None:
    """Copy rows of `layers` (of every one), and index keys of every group unless `index_row` is None, into host pages.

    `device_row` int32|int64[places, n] (Geometry.places), `index_row`, `host_page`, `host_offset` int32|int64[n].
    Entries whose `host_page` is -1 are skipped, as BackupPlan marks its padding. Host places must differ. Index keys go
    with the last layer, behind whose rows they lie in a page. Raises BadInput before any change.
    """
    check_places(state, device_row, index_row, host_page, host_offset)
    layers = range(state.geometry.layers) if layers is None else layers
    _check_layers(state, layers, with_keys=index_row is not None)
    backend(state, __name__).copy_rows_to_host(state, device_row, index_row, host_page, host_offset, layers)


def copy_rows_to_device(
    state: DeviceState,
    device_row: Tensor,
    index_row: Tensor | None,
    host_page: Tensor,
    host_offset: Tensor,
    layers: range | None = None,
) -> None:
    """The reverse of copy_rows_to_host; same arguments. Device places must differ."""
    check_places(state, device_row, index_row, host_page, host_offset)
    layers = range(state.geometry.layers) if layers is None else layers
    _check_layers(state, layers, with_keys=index_row is not None)
    backend(state, __name__).copy_rows_to_device(state, device_row, index_row, host_page, host_offset, layers)


def copy_keys_to_device(state: DeviceState, index_row: Tensor, host_page: Tensor, host_offset: Tensor) -> None:
    """Index keys of every group alone, from host pages: what a resumed request needs before its first step.

    All int32|int64[n]; entries whose `host_page` is -1 are skipped. Raises BadInput before any change.
    """
    check_places(state, None, index_row, host_page, host_offset)
    backend(state, __name__).copy_keys_to_device(state, index_row, host_page, host_offset)


def check_places(
    state: DeviceState, device_row: Tensor | None, index_row: Tensor | None, host_page: Tensor, host_offset: Tensor
) -> None:
    """Raises BadInput unless the tensors fit each other."""
    sizes = Sizes(places=state.geometry.places)
    if device_row is not None:
        sizes.check("device_row", device_row, ("places", "n"), torch.int32, torch.int64)
    if index_row is not None:
        sizes.check("index_row", index_row, ("n",), torch.int32, torch.int64)
    sizes.check("host_page", host_page, ("n",), torch.int32, torch.int64)
    sizes.check("host_offset", host_offset, ("n",), torch.int32, torch.int64)


def _check_layers(state: DeviceState, layers: range, *, with_keys: bool) -> None:
    count = state.geometry.layers
    if not (0 <= layers.start < layers.stop <= count and layers.step == 1) or (with_keys and layers.stop < count):
        raise BadInput(
            f"consecutive layers of {count}, the last among them with index keys", field="layers", value=layers
        )
