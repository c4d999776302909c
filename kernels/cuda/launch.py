"""What every CUDA launcher needs of a DeviceState: its device, its compiled kernels, its parameter block.

`prepare` compiles and loads all kernels of a state at worker start. Launchers take the calling thread's current torch
stream, never synchronise, and may be captured into graphs: the addresses in a DeviceState never change.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from kernels.cuda.jit import Defines, Kernel, load, row_defines
from kernels.state import DeviceState
from protocol.errors import BadInput
from protocol.units import PAGE_TOKENS, SLOTS_MAX

KERNELS = (
    ("begin_step", "open_rows"),
    ("begin_step", "rotate_tail"),
    ("copy_rows", "copy_rows"),
    ("copy_rows", "replay_misses"),
    ("rows", "store_rows"),
    ("rows", "fetch_rows"),
    ("rows", "store_keys"),
    ("rows", "fetch_keys"),
    ("seat", "change_slots"),
    ("seat", "close_change"),
)
CLUSTERS_SINCE = (9, 0)  # compute capability
RANKS = (1, 2, 4, 5, 8, 16)  # blocks of a cluster, with the non-portable size allowed


def prepare(state: DeviceState) -> None:
    """Compile or fetch every kernel for `state`, and load it. Raises BadInput, ConfigError or InternalError."""
    if not state.rows.is_cuda:
        raise BadInput(
            "is not a CUDA device", field="state", value=state.rows.device, remedy="allocate it with device='cuda'"
        )
    if not state.host.is_pinned():
        raise BadInput(
            "is not registered with CUDA", field="state.host", value="pageable", remedy="pin or register the host pool"
        )
    check_pool(state.host.shape[0], state.geometry.page_bytes)
    for unit, name in KERNELS:
        begin_step_of(state, name) if unit == "begin_step" else kernel_of(state, unit, name)
    for ranks in RANKS if has_clusters(state) else RANKS[:1]:
        for draft in range(min(state.seat_rows, 2)):
            swap_in_of(state, ranks, draft=bool(draft)).allow_all(has_clusters(state))


def check_pool(pages: int, page_bytes: int) -> None:
    """Raises BadInput unless 32 bits name every row of a host pool, and the bytes of a page."""
    for field, value, limit in (("host_pages", pages, 2**32 // PAGE_TOKENS), ("page_bytes", page_bytes, 2**32 - 1)):
        if value > limit:
            raise BadInput("more than the CUDA kernels address", field=field, value=value, remedy=f"at most {limit}")


def kernel_of(state: DeviceState, unit: str, name: str) -> Kernel:
    """A loaded kernel for the row layout and device of `state`."""
    return load(unit, name, defines_of(state), state.rows.device.index or 0)


def begin_step_of(state: DeviceState, name: str) -> Kernel:
    """A kernel of begin_step, as the seats of `state` bring one row or several."""
    defines = (*defines_of(state), ("DRAFTS", int(state.seat_rows > 1)))
    return load("begin_step", name, defines, state.rows.device.index or 0)


def swap_in_of(state: DeviceState, ranks: int, *, draft: bool = False) -> Kernel:
    """swap_in for `ranks` blocks per request, one of RANKS. A kernel of its own for each: instructions bound it.

    `draft`: for rows behind depth 0.
    """
    defines = (*defines_of(state), ("RANKS", ranks), ("DRAFT", int(draft)))
    return load("swap_in", "swap_in", defines, state.rows.device.index or 0)


def defines_of(state: DeviceState) -> Defines:
    return row_defines(state.geometry, state.host.data_ptr())


def has_clusters(state: DeviceState) -> bool:
    return torch.cuda.get_device_capability(state.rows.device) >= CLUSTERS_SINCE


def stream_of(state: DeviceState) -> int:
    """Address of the current stream on the state's device."""
    return torch.cuda.current_stream(state.rows.device).cuda_stream


@lru_cache(maxsize=8)
def processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def slots_limit(state: DeviceState) -> int:
    """Slots that a managed seat of `state` can have, its tail chunk included."""
    return min(state.chunk_table.shape[1] * PAGE_TOKENS, SLOTS_MAX)
