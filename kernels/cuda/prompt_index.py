"""prompt_index on CUDA: index scores and top-k of all tokens of a block of prompts, on Hopper.

One launch; where jobs are fewer than multiprocessors, several blocks share the keys of each, and prompt_merge selects
from their lists.

For keys of DIM values in fp8, fp4 or bfloat16, and bfloat16 queries of HEADS heads; from half as many on (A.X-K2-Light
has 16), heads of zeros with weights of zero fill them up, which change no score. Scratch is a list of LISTED entries
for each of GROUP tokens that a multiprocessor works on, whatever the context (`scratch_bytes`). Launches for one state
share it: they must be ordered, as on one stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.cuda import parameters, structures
from kernels.cuda.jit import Defines, Kernel, load
from kernels.cuda.launch import processors, stream_of
from kernels.prompt_pieces import GROUP, PromptPieces
from kernels.row_format import RowFormat
from kernels.state import DeviceState
from protocol.units import PAGE_TOKENS

CAPABILITY: Final = (9, 0)
# prompt_index.cuh and prompt_list.cuh
HEADS: Final = (32, 64)
DIM: Final = 128
LISTED: Final = 4096
TOPK_MAX: Final = 3072
HEAD_WORDS: Final = 4
KINDS: Final = ("fp8", "fp4", "bfloat16")
#: By bytes of a key's value in products: pages in the ring of keys, pairs of pages in the ring of scores, registers of
#: a thread that multiplies and of one that lists, and how many entries such a thread reads together.
SHAPES: Final = {
    1: {"STAGES": 8, "SCORED": 16, "TEAM_REGISTERS": 152, "LISTER_REGISTERS": 72, "LIST_READS": 8},
    2: {"STAGES": 3, "SCORED": 6, "TEAM_REGISTERS": 168, "LISTER_REGISTERS": 56, "LIST_READS": 4},
}
SHARED_BYTES: Final = 227 << 10  # dynamic
#: Pages that a block scores at least where several share the keys of a job: the merge of their lists is worth it then.
SHARE_PAGES_MIN: Final = 16
#: Blocks that share the keys of a job at most: one of them merges all lists.
SPLITS_MAX: Final = 32


@dataclass(frozen=True, eq=False)
class Lists:
    state: structures.State  # parameters, which never change
    lists: Tensor  # int32[processors, GROUP, 2, LISTED]: keys and positions
    heads: Tensor  # int32[processors, GROUP, HEAD_WORDS]


_lists: WeakKeyDictionary[DeviceState, Lists] = WeakKeyDictionary()


def scratch_bytes(processors: int) -> int:
    """Device memory of the lists of a state."""
    return 4 * processors * GROUP * (2 * LISTED + HEAD_WORDS)


def heads_filled(heads: int) -> int:
    """Return the heads that a kernel is compiled for and `heads` fit in; 0 if there are none."""
    return next((most for most in HEADS if heads <= most), 0)


def filled(queries: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [M, H, DIM] and weights [M, H] with heads of zeros up to heads_filled(H)."""
    more = heads_filled(queries.shape[1]) - queries.shape[1]
    return (pad(queries, (0, 0, 0, more)), pad(weights, (0, more))) if more else (queries, weights)


@lru_cache(maxsize=64)
def takes(heads: int, keys: RowFormat, queries: torch.dtype, k: int, device: torch.device) -> bool:
    """Return whether this kernel is written for such a selection on `device`."""
    return (
        2 * heads >= heads_filled(heads) > 0
        and keys.scaled == DIM
        and keys.kind in KINDS
        and queries == torch.bfloat16
        and k <= TOPK_MAX
        and torch.cuda.get_device_capability(device) == CAPABILITY
    )


def prompt_index(
    state: DeviceState,
    group: int,
    pieces: PromptPieces,
    queries: Tensor,
    weights: Tensor,
    keys: RowFormat,
    scale: float,
    topk_out: Tensor,
    rows_out: Tensor | None,
) -> None:
    """As kernels.prompt_topk.prompt_topk, for what `takes` admits, unchecked. Never waits for the device."""
    held, (queries, weights) = _lists_of(state), filled(queries, weights)
    splits = splits_of(pieces.jobs, pieces.positions, len(held.lists))
    block = structures.PromptIndex(
        state=held.state,
        queries=queries.data_ptr(),
        weights=weights.data_ptr(),
        part=pieces.table.data_ptr(),
        slab_table=state.slab_table.data_ptr(),
        topk_out=topk_out.data_ptr(),
        rows_out=0 if rows_out is None else rows_out.data_ptr(),
        lists=held.lists.data_ptr(),
        heads=held.heads.data_ptr(),
        scale=scale,
        k=topk_out.shape[1],
        group=group,
        parts=len(pieces.pieces),
        jobs=pieces.jobs,
        splits=splits,
        slab_pages=state.slab_table.shape[1],
    )
    blocks = min(pieces.jobs * splits, len(held.lists))
    kernel, merge = kernels_of(queries.shape[1], keys.kind, queries.device)
    kernel.launch((blocks, 1), block, stream_of(state), shared_bytes=SHARED_BYTES)
    if splits > 1:
        merge.launch((pieces.jobs * GROUP, 1), block, stream_of(state))


def splits_of(jobs: int, positions: int, processors: int) -> int:
    """Blocks that share the keys of each of `jobs` jobs, of at most so many `positions`; all run at once if above 1."""
    return max(1, min(processors // jobs, positions // PAGE_TOKENS // SHARE_PAGES_MIN, SPLITS_MAX))


def prepare(state: DeviceState, heads: int, keys: RowFormat) -> None:
    """Compile, load and allocate all that prompt_index needs. Raises InternalError where it does not compile."""
    kernels_of(heads_filled(heads), keys.kind, state.rows.device)
    _lists_of(state)


@lru_cache(maxsize=64)
def kernels_of(heads: int, kind: str, device: torch.device) -> tuple[Kernel, Kernel]:
    """prompt_index and prompt_merge, loaded."""
    kernel = load("prompt_index", "prompt_index", defines_of(heads, kind), device.index or 0)
    kernel.allow_all(clusters=False)
    return kernel, load("prompt_merge", "prompt_merge", (), device.index or 0)


def variants() -> Iterator[Defines]:
    """Defines of all that are written."""
    return (defines_of(heads, kind) for heads, kind in product(HEADS, KINDS))


def defines_of(heads: int, kind: str) -> Defines:
    """Return macros for `heads`, of HEADS, and keys of `kind`, of KINDS."""
    key_bytes, fp4 = 2 if kind == "bfloat16" else 1, ("FP4", int(kind == "fp4"))
    shape = SHAPES[key_bytes].items()
    return (("HEADS", heads), ("KEY_BYTES", key_bytes), fp4, *shape, ("SHARED_BYTES", SHARED_BYTES), ("WGMMA", 1))


def _lists_of(state: DeviceState) -> Lists:
    if state not in _lists:
        device = state.rows.device
        count = processors(device)
        shapes = ((GROUP, 2, LISTED), (GROUP, HEAD_WORDS))
        with torch.inference_mode(False):  # the first caller may be inside, later ones outside
            tensors = (torch.zeros(count, *shape, dtype=torch.int32, device=device) for shape in shapes)
            _lists[state] = Lists(parameters.state_parameters(state), *tensors)
    return _lists[state]


assert ctypes.sizeof(structures.IndexPart) == 20
