"""prompt_index on CUDA: index scores and top-k of all tokens of a block of prompts in one launch, on Hopper.

For fp8 keys of DIM values and HEADS heads; queries are quantized as keys are, by token and head. Scratch is a list of
LISTED entries for each of GROUP tokens that a multiprocessor works on, whatever the context (`scratch_bytes`). Launches
for one state share it: they must be ordered, as on one stream.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kernels.cuda import parameters, structures
from kernels.cuda.encode import MANY_ROWS
from kernels.cuda.jit import Kernel, load
from kernels.cuda.launch import processors, stream_of
from kernels.encode import encode
from kernels.prompt_pieces import GROUP, PromptPieces
from kernels.row_format import RowFormat
from kernels.state import DeviceState

CAPABILITY: Final = (9, 0)
# prompt_index.cuh and prompt_list.cuh
HEADS: Final = (32, 64)
DIM: Final = 128
STAGES: Final = 8
LISTED: Final = 4096
TOPK_MAX: Final = 3072
SHARED_BYTES: Final = 150 << 10


@dataclass(frozen=True, eq=False)
class Lists:
    keys: Tensor  # int32[processors, GROUP, LISTED]
    positions: Tensor  # likewise


_lists: WeakKeyDictionary[DeviceState, Lists] = WeakKeyDictionary()


def scratch_bytes(processors: int) -> int:
    """Device memory of the lists of a state."""
    return 8 * processors * GROUP * LISTED


@lru_cache(maxsize=64)
def takes(heads: int, keys: RowFormat, queries: torch.dtype, k: int, device: torch.device) -> bool:
    """Whether the kernel is written for such a selection, and `device` can run it."""
    known = heads in HEADS and keys == RowFormat("fp8", DIM, 0, DIM) and queries == torch.bfloat16 and k <= TOPK_MAX
    return known and torch.cuda.get_device_capability(device) == CAPABILITY


def prompt_index(
    state: DeviceState,
    group: int,
    pieces: PromptPieces,
    queries: Tensor,
    weights: Tensor,
    keys: RowFormat,
    scale: float,
    topk_out: Tensor,
) -> None:
    """As kernels.prompt_topk.prompt_topk, of what `takes` admits, unchecked: two launches."""
    encoded, lists = encode(keys, queries), _lists_of(state)
    block = structures.PromptIndex(
        state=parameters.state_parameters(state),
        queries=encoded.data_ptr(),
        weights=weights.data_ptr(),
        part=pieces.table.data_ptr(),
        topk_out=topk_out.data_ptr(),
        keys=lists.keys.data_ptr(),
        positions=lists.positions.data_ptr(),
        scale=scale,
        k=topk_out.shape[1],
        group=group,
        parts=len(pieces.pieces),
        jobs=pieces.jobs,
    )
    blocks = min(pieces.jobs, len(lists.keys))
    kernel_of(queries.shape[1], queries.device).launch((blocks, 1), block, stream_of(state), shared_bytes=SHARED_BYTES)


def prepare(state: DeviceState, heads: int, keys: RowFormat, queries: torch.dtype) -> None:
    """Compile, load and allocate all that prompt_index needs. Raises InternalError where it does not compile."""
    device = state.rows.device
    for rows in (1, MANY_ROWS):
        encode(keys, torch.zeros(rows, heads, DIM, dtype=queries, device=device))
    kernel_of(heads, device)
    _lists_of(state)


@lru_cache(maxsize=64)
def kernel_of(heads: int, device: torch.device) -> Kernel:
    """The loaded kernel. Raises InternalError where it does not compile."""
    kernel = load("prompt_index", "prompt_index", defines_of(heads), device.index or 0)
    kernel.allow_all(clusters=False)
    return kernel


def defines_of(heads: int) -> tuple[tuple[str, int], ...]:
    return (("HEADS", heads), ("STAGES", STAGES), ("WGMMA", 1))


def _lists_of(state: DeviceState) -> Lists:
    if state not in _lists:
        shape, device = (processors(state.rows.device), GROUP, LISTED), state.rows.device
        with torch.inference_mode(False):  # the first caller may be inside, later ones outside
            _lists[state] = Lists(*(torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(2)))
    return _lists[state]


assert ctypes.sizeof(structures.IndexPart) == 20
