"""prompt_index on CUDA: index scores and top-k of all tokens of a block of prompts in one launch, on Hopper.

For fp8 keys of DIM values and HEADS heads; queries are quantized as keys are, by token and head. Scratch is a list of
LISTED entries for each of GROUP tokens that a multiprocessor works on, whatever the context (`scratch_bytes`). Launches
for one state share it: they must be ordered, as on one stream.

kernels.prompt_topk does not call this kernel yet: it has not run on a card (tests/gpu/test_prompt_index.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kernels.cuda import parameters, structures
from kernels.cuda.jit import Kernel, load
from kernels.cuda.launch import processors, stream_of
from kernels.state import DeviceState
from protocol.errors import BadInput

# prompt_index.cuh and prompt_list.cuh
GROUP: Final = 8
HEADS: Final = (32, 64)
DIM: Final = 128
STAGES: Final = 8
LISTED: Final = 4096
TOPK_MAX: Final = 3072
SHARED_BYTES: Final = 150 << 10


class PromptPiece(NamedTuple):
    """Rows `row`.. of a block: `tokens` tokens of the prompt in `seat`, from position `start` on."""

    row: int
    tokens: int
    seat: int
    start: int


@dataclass(frozen=True, eq=False)
class PromptJobs:
    """The pieces of a block on the device, for all layers that it goes through."""

    parts: Tensor  # int32[parts, 5]: structures.IndexPart
    jobs: int

    @classmethod
    def of(cls, pieces: Sequence[PromptPiece], device: torch.device) -> PromptJobs:
        """Copy `pieces`, none empty, to `device`. Never waits for it."""
        rows, jobs = [], 0
        for piece in pieces:
            rows.append((jobs, *piece))
            jobs += -(-piece.tokens // GROUP)
        table = torch.tensor(rows, dtype=torch.int32)
        if device.type == "cuda":
            table = table.pin_memory()
        return cls(table.to(device, non_blocking=True), jobs)


@dataclass(frozen=True, eq=False)
class Lists:
    keys: Tensor  # int32[processors, GROUP, LISTED]
    positions: Tensor  # likewise


_lists: WeakKeyDictionary[DeviceState, Lists] = WeakKeyDictionary()


def scratch_bytes(processors: int) -> int:
    """Device memory of the lists of a state."""
    return 8 * processors * GROUP * LISTED


def prompt_index(
    state: DeviceState,
    group: int,
    jobs: PromptJobs,
    queries: Tensor,
    weights: Tensor,
    scale: float,
    topk_out: Tensor,
) -> None:
    """Select for rows of a block: `queries` uint8[rows, heads, DIM + 4] in the format of fp8 index keys, `weights`
    float32[rows, heads], `topk_out` int32[rows, k], ascending, -1 padded. Rows of no piece stay as they are.

    Raises BadInput for heads or a k that no kernel is written for. Never waits for the device.
    """
    heads, k, device = queries.shape[1], topk_out.shape[1], queries.device
    _require(heads in HEADS, "queries", f"{heads} heads", f"use {' or '.join(map(str, HEADS))} heads")
    _require(k <= TOPK_MAX, "topk_out", k, f"select {TOPK_MAX} or less")
    lists = _lists_of(state)
    block = structures.PromptIndex(
        state=parameters.state_parameters(state),
        queries=queries.data_ptr(),
        weights=weights.data_ptr(),
        part=jobs.parts.data_ptr(),
        topk_out=topk_out.data_ptr(),
        keys=lists.keys.data_ptr(),
        positions=lists.positions.data_ptr(),
        scale=scale,
        k=k,
        group=group,
        parts=len(jobs.parts),
        jobs=jobs.jobs,
    )
    blocks = min(jobs.jobs, len(lists.keys))
    kernel_of(heads, device).launch((blocks, 1), block, stream_of(state), shared_bytes=SHARED_BYTES)


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


def _require(fine: bool, field: str, value: object, remedy: str) -> None:
    if not fine:
        raise BadInput("no kernel is written for it", field=field, value=value, remedy=remedy)


assert ctypes.sizeof(structures.IndexPart) == 20
