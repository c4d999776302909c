"""index_topk on CUDA: the contract of kernels/index_topk.py, launched on the current stream as two kernels.

index_scores is compiled for one indexer (heads, dimensions, formats), so `prepare_index` names it at worker start; a
first index_topk without that compiles then, which must not happen inside a graph capture. It is one block per
multiprocessor, whatever the batch, and cuts the work by the lengths on the device (index_rows.cuh); fp8 keys of DIM_MAX
values have a form of their own on Hopper (index_hopper.cuh), and fp4 keys no other. index_select is a cluster of blocks
a row, as many as the device has room for.

Scratch is allocated once for a state, whatever its batches and longest context: for each of the R rows that a seat may
bring to a step, a float per index-key row, since seats hold pages of their own, and a histogram per seat
(`scratch_bytes`). Launches for one state share it: they must be ordered, as on one stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kernels.cuda import parameters, structures
from kernels.cuda.jit import Defines, Kernel, load
from kernels.cuda.launch import CLUSTERS_SINCE, processors, stream_of
from kernels.cuda.structures import BATCH_MAX, BINS, COARSE_BINS, COUNTERS, UNIT
from kernels.row_bytes import index_key_shape
from kernels.row_format import RowFormat
from kernels.state import DeviceState, StepBatch
from protocol.errors import BadInput
from protocol.units import PAGE_TOKENS

# index_keys.cuh
HEADS_MAX: Final = 64
DIM_STEP: Final = 32
DIM_MAX: Final = 128
# index_wgmma.cuh
HOPPER: Final = 90
WGMMA_HEADS: Final = (32, 64)

FP4_SHAPE: Final = f"with {WGMMA_HEADS[0]} or {WGMMA_HEADS[1]} bfloat16 queries of {DIM_MAX} dimensions"

# index_hopper.cuh
HOPPER_WARPS: Final = 16  # that multiply
HOPPER_STAGES: Final = 16  # pages of keys on their way, a multiple of the teams of four warps
HOPPER_PARTS: Final = 1  # e4m3 values that a query's value becomes
HOT_MAX: Final = 1024
AHEAD_ROWS: Final = 64  # planned before the kernel ahead has ended
# index_select.cuh
SELECT_WARPS: Final = 16
SOLO_POSITIONS: Final = 8192  # of a row that one block takes alone
RANKS_MAX: Final = 8  # blocks of a row
SELECT_SHARED_BYTES: Final = 91 << 10
STATIC_SHARED_BYTES: Final = 8 << 10  # of index_scores, with room to spare
STAGES_MAX: Final = 8
SHARED_KIB: Final = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}  # most that a block gets, by architecture
SHARED_KIB_LEAST: Final = 99  # every other one from sm_80 on


@dataclass(frozen=True)
class Indexer:
    """A form of index_scores. `query_bytes`: 4 for float32, 2 for bfloat16; `key_bytes` of a value in products: 1 for
    e4m3, which keys in fp8 are and keys in fp4 (`codes`) become."""

    heads: int
    dim: int
    query_bytes: int
    key_bytes: int
    codes: bool = False

    @property
    def key_row_bytes(self) -> int:
        if self.codes:
            return index_key_shape("fp4", self.dim).row_bytes
        return self.dim + 4 if self.key_bytes == 1 else self.dim * self.key_bytes

    @property
    def queries_bytes(self) -> int:
        """Shared memory for the queries of a row: struct Queries of index_mma.cuh; float32 ones stay where they are."""
        tiles = -(-self.heads // 8)
        return -(-tiles * (16 * self.dim + 32) // 128) * 128 if self.query_bytes == 2 else 128

    def on_hopper(self, arch: int) -> bool:
        """Return whether index_hopper.cuh is written for it."""
        return arch == HOPPER and (self.query_bytes, self.key_bytes, self.dim) == (2, 1, DIM_MAX) and self.wide

    @property
    def wide(self) -> bool:
        return self.heads in WGMMA_HEADS

    def unit(self, arch: int) -> str:
        return "index_hopper" if self.on_hopper(arch) else "index_scores"

    def defines(self, arch: int) -> Defines:
        """Warps and ring stages beside the indexer itself: as deep as shared memory allows, two units at least."""
        if self.on_hopper(arch):
            return (
                *self._own,
                ("WARPS", HOPPER_WARPS),
                ("STAGES", HOPPER_STAGES),
                ("PARTS", HOPPER_PARTS),
                ("WGMMA", 1),
            )
        shared = SHARED_KIB.get(arch, SHARED_KIB_LEAST) << 10
        ring = shared - STATIC_SHARED_BYTES - 4 * BINS - self.queries_bytes
        wgmma = arch == HOPPER and (self.query_bytes, self.key_bytes) == (2, 2) and self.wide
        warps = 12 if wgmma else 8 if self.query_bytes == 2 else 4
        while ring < 2 * warps * UNIT * self.key_row_bytes:
            warps //= 2
        stages = min(STAGES_MAX, ring // (warps * UNIT * self.key_row_bytes))
        return (*self._own, ("WARPS", warps), ("STAGES", stages), ("WGMMA", int(wgmma)))

    @property
    def _own(self) -> Defines:
        return (
            ("HEADS", self.heads),
            ("DIM", self.dim),
            ("QUERY_BYTES", self.query_bytes),
            ("KEY_BYTES", self.key_bytes),
            ("FP4", int(self.codes)),
        )

    def shared_bytes(self, arch: int) -> int:
        """Dynamic shared memory of a block of index_scores: histogram, queries, rings."""
        sizes = dict(self.defines(arch))
        if self.on_hopper(arch):
            page = PAGE_TOKENS * self.key_row_bytes
            queries = sizes["PARTS"] * self.heads * self.dim + 4 * self.heads
            return (
                sizes["STAGES"] * (page + 16)
                + queries
                + 4 * BINS
                + 16 * (BATCH_MAX + 1)
                + 4 * HOT_MAX
                + 20 * AHEAD_ROWS
                + 288
            )
        return 4 * BINS + self.queries_bytes + sizes["WARPS"] * sizes["STAGES"] * UNIT * self.key_row_bytes


@dataclass(frozen=True, eq=False)
class Scratch:
    """N index pages, S seats, R rows a seat. Histogram and counters are zero between launches."""

    scores: Tensor  # float32[R*N*64]: of the last step, row after row, each padded to a multiple of UNIT
    histogram: Tensor  # int32[R*S, BINS + COARSE_BINS]
    counters: Tensor  # int32[R*S, COUNTERS]


_scratch: WeakKeyDictionary[DeviceState, Scratch] = WeakKeyDictionary()


def scratch_bytes(index_rows: int, seats: int, seat_rows: int = 1) -> int:
    """Device memory that index_topk takes for a state of `index_rows` index-key rows (64 a page) and `seats`, of which
    each brings `seat_rows` rows to a step."""
    return seat_rows * (4 * index_rows + seats * 4 * (BINS + COARSE_BINS + COUNTERS))


def scratch_of(state: DeviceState, scores: int = 0) -> Scratch:
    """The state's scratch, allocated on first use; with room for `scores`, by default one per index-key row and row
    of a seat."""
    held = _scratch.get(state)
    if held is None:
        device, rows = state.rows.device, state.seats * state.seat_rows
        scores = scores or state.index_keys.shape[1] * state.seat_rows
        held = _scratch[state] = Scratch(
            scores=torch.zeros(scores, dtype=torch.float32, device=device),
            histogram=torch.zeros(rows, BINS + COARSE_BINS, dtype=torch.int32, device=device),
            counters=torch.zeros(rows, COUNTERS, dtype=torch.int32, device=device),
        )
    return held


def prepare_index(state: DeviceState, heads: int, keys: RowFormat, queries: torch.dtype) -> None:
    """Compile, load and allocate all that index_topk needs for such queries. Raises BadInput where none is written."""
    _kernels(indexer_of(heads, keys, queries), state.rows.device)
    scratch_of(state)


def index_topk(
    state: DeviceState,
    group: int,
    queries: Tensor,
    weights: Tensor,
    batch: StepBatch,
    keys: RowFormat,
    scale: float,
    topk_out: Tensor,
    *,
    only_scores: bool = False,
) -> None:
    """As kernels.index_topk.index_topk, unchecked but for what the kernels are limited to.

    `only_scores` is for benchmarks: without the second kernel, the histogram is the caller's to zero.
    """
    heads, device = queries.shape[1], state.rows.device
    indexer = indexer_of(heads, keys, queries.dtype)
    _require(batch.seats.shape[0] <= BATCH_MAX, "batch", batch.seats.shape[0], f"at most {BATCH_MAX} rows in a step")
    _require(queries.data_ptr() % 16 == 0, "queries", "not at a multiple of 16 bytes", "pass a clone")
    scratch = scratch_of(state)
    block = structures.IndexTopk(
        state=parameters.state_parameters(state),
        batch=parameters.rows_parameters(batch),
        queries=queries.data_ptr(),
        weights=weights.data_ptr(),
        topk_out=topk_out.data_ptr(),
        scores=scratch.scores.data_ptr(),
        histogram=scratch.histogram.data_ptr(),
        counters=scratch.counters.data_ptr(),
        capacity=scratch.scores.shape[0],
        scale=scale,
        k=topk_out.shape[1],
        group=group,
        rows=len(scratch.counters),
    )
    score, select = _kernels(indexer, device)
    arch, stream = _arch(device), stream_of(state)
    early = indexer.on_hopper(arch)
    score.launch((processors(device), 1), block, stream, shared_bytes=indexer.shared_bytes(arch), early=early)
    if only_scores:
        return
    rows = batch.seats.shape[0]
    ranks = ranks_of(rows, processors(device)) if arch >= 10 * CLUSTERS_SINCE[0] else 1
    select.launch((ranks, rows), block, stream, cluster=ranks, shared_bytes=SELECT_SHARED_BYTES, early=arch >= HOPPER)


def ranks_of(rows: int, processors: int) -> int:
    """Blocks of a row of index_select: a power of two. Clusters of more than two do not fill a device."""
    ranks = 1
    while 2 * ranks <= RANKS_MAX and 2 * ranks * rows <= (processors if ranks == 1 else processors // 2):
        ranks *= 2
    return ranks


@lru_cache(maxsize=64)
def _kernels(indexer: Indexer, device: torch.device) -> tuple[Kernel, Kernel]:
    number, arch = device.index or 0, _arch(device)
    written = indexer.on_hopper(arch) or not indexer.codes
    _require(written, "index keys", "fp4", f"keep them in fp8; in fp4 Hopper alone reads them, {FP4_SHAPE}")
    score = load(indexer.unit(arch), "index_scores", indexer.defines(arch), number)
    select = load("index_select", "index_select", select_defines(), number)
    score.allow_all(clusters=False)
    select.allow_all(clusters=arch >= 10 * CLUSTERS_SINCE[0])
    return score, select


def select_defines() -> Defines:
    return (("SELECT_WARPS", SELECT_WARPS), ("SOLO", SOLO_POSITIONS))


def indexer_of(heads: int, keys: RowFormat, queries: torch.dtype) -> Indexer:
    """Raises BadInput for one that no kernel is written for."""
    dim = keys.scaled
    _require(1 <= heads <= HEADS_MAX, "queries", f"{heads} heads", f"use 1 to {HEADS_MAX} heads")
    fits = dim % DIM_STEP == 0 and DIM_STEP <= dim <= DIM_MAX
    _require(fits, "queries", f"{dim} dimensions", f"use a multiple of {DIM_STEP} up to {DIM_MAX}")
    return Indexer(heads, dim, queries.itemsize, 1 if keys.is_quantised else queries.itemsize, keys.kind == "fp4")


@lru_cache(maxsize=8)
def _arch(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _require(holds: bool, field: str, value: object, remedy: str) -> None:
    if not holds:
        raise BadInput("is beyond what the CUDA kernels are written for", field=field, value=value, remedy=remedy)
