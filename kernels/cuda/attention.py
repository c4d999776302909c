"""attend_rows on CUDA: the contract of kernels/attention.py on the current stream.

On Hopper, for 512 latents and 64 rope values, one kernel: attend_rows.cuh, by pairs of thread blocks. A result's splits
are in one cluster, and are added up in its shared memory. For everything else, and for few requests,
attention_triton.py, two kernels or, unsplit, one: `attend` and `combine`, which adds up the splits. Rows in fp4 are
read by attend_rows.cuh alone.

Triton comes with torch's CUDA wheels and compiles at first use of a kind of shape, which `prepare_attention` makes
happen at worker start. Products of bfloat16 queries with bfloat16 or fp8 rows run on tensor cores in bfloat16 with
float32 sums: probabilities and dequantised fp8 values are rounded to bfloat16, each within 2**-9 of itself. Rows in fp4
are multiplied as they are: a code of 2 bits times a scale of 4 is a bfloat16, a rope value is one, and a layer's scale
is the model's to apply (kernels/row_format.py). Any other pairing multiplies in plain float32.

How entries are split over programs: by the count of programs that heads and batch rows make anyway and by the count of
multiprocessors, never by what is in the entries: all batch rows alike, or a row's bits would depend on its place. A
split costs its pass over a partial result (4 (r + 2) bytes per head), so ties go to fewer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from kernels.attention import row_format
from kernels.cuda import structures
from kernels.cuda.jit import Defines, Kernel, load
from kernels.cuda.launch import processors, stream_of
from kernels.cuda.triton_units import triton_unit
from kernels.row_bytes import KINDS
from kernels.row_format import RowFormat
from kernels.state import DeviceState
from protocol.errors import BadInput

MMA_MIN: Final = 16  # smallest side of a matrix product in Triton
SPLITS_MAX: Final = 64
#: Counts of entries that share a compiled kernel: multiples of this, and others.
ENTRIES_STEP: Final = 16
#: Compute capability that converts e4m3; below it, bits are moved.
FP8_SINCE: Final = (8, 9)
#: What starting and ending a program costs, in blocks of rows.
OVERHEAD_BLOCKS: Final = 1
#: Latent values that one program adds up over the splits.
COMBINE_VALUES: Final = 128
LOG2_E: Final = 1 / math.log(2)
# attend_rows.cuh
HOPPER: Final = (9, 0)
HOPPER_LATENT, HOPPER_ROPE = 512, 64
HOPPER_KINDS: Final = ("bfloat16", "fp8", "fp4")
HOPPER_SHARED_BYTES: Final = 221_288
#: Thread blocks of a cluster, and of each split of a result.
CLUSTER_MAX, CLUSTER_PAIR = 16, 2
HEADS_TOGETHER: Final = (64, 128)  # of a pair
#: What a pair costs there, in blocks of rows; and what a block of rows costs, by heads of a pair.
HOPPER_OVERHEAD_BLOCKS: Final = {64: 10, 128: 7}
HOPPER_BLOCK_COST: Final = {64: 1, 128: 2}
#: Blocks of heads, over all batch rows, from which on attend_rows.cuh was measured to be the faster one.
HOPPER_PROGRAMS_LEAST: Final = 8


@dataclass(frozen=True)
class Blocks:
    """How a program is cut: heads and rows of a block, warps, blocks of rows in flight."""

    heads: int
    rows: int
    warps: int
    stages: int


#: Of attend_rows.cuh, whose pairs of thread blocks take 64 heads or 128.
HOPPER_BLOCKS: Final = Blocks(heads=64, rows=64, warps=12, stages=3)


@dataclass(frozen=True)
class Cut:
    """A division of work on Hopper: heads of a pair of thread blocks, 64 or 128, and splits of a result."""

    heads: int
    splits: int


@dataclass(frozen=True)
class Parts:
    """A result in `splits` parts of `span` entries each; empty where there is one. Shapes: attention_triton.py."""

    splits: int
    span: int
    partial: Tensor
    peak: Tensor
    total: Tensor


def attend_rows(
    state: DeviceState,
    layer: int,
    queries: Tensor,
    out_rows: Tensor,
    scaling: float,
    out: Tensor,
    sinks: Tensor | None = None,
    *,
    blocks: Blocks | None = None,
    splits: int | None = None,
) -> None:
    """As kernels.attention.attend_rows, unchecked. `blocks` and `splits` override the choices made here."""
    form = row_format(state, queries, out)
    batch, heads, _ = out.shape
    wide = is_wide(form, queries.dtype)
    capability = torch.cuda.get_device_capability(out.device)
    _require_kernel(form, wide, capability)
    blocks = blocks or blocks_of(form, batch, heads, wide, capability)
    head_blocks, row_blocks = -(-heads // blocks.heads), max(1, -(-out_rows.shape[1] // blocks.rows))
    if blocks == HOPPER_BLOCKS:
        cut = Cut(heads_together(heads), splits) if splits else None
        if cut is None:
            kernel = _hopper_kernel(form.kind, HOPPER_BLOCKS.heads, sinks is not None, out.device)
            cut = hopper_cut_of(kernel, heads, batch, row_blocks)
        _attend_on_hopper(state, layer, form, queries, out_rows, scaling, out, sinks, cut)
    else:
        wanted = splits or splits_of(head_blocks * batch, row_blocks, processors(out.device))
        parts = _parts(out, -(-row_blocks // wanted), row_blocks, blocks.rows)
        _attend_in_triton(state, layer, form, queries, out_rows, scaling, out, sinks, parts, blocks, wide, capability)
        if parts.splits > 1:
            _combine(out, parts, sinks)


def _parts(out: Tensor, blocks_each: int, row_blocks: int, block_rows: int) -> Parts:
    batch, heads, latent = out.shape
    splits = -(-row_blocks // blocks_each)
    lines = batch * splits * heads if splits > 1 else 0
    return Parts(
        splits,
        blocks_each * block_rows,
        torch.empty(lines, latent, dtype=torch.float32, device=out.device),
        torch.empty(lines, dtype=torch.float32, device=out.device),
        torch.empty(lines, dtype=torch.float32, device=out.device),
    )


def _attend_on_hopper(
    state: DeviceState,
    layer: int,
    form: RowFormat,
    queries: Tensor,
    out_rows: Tensor,
    scaling: float,
    out: Tensor,
    sinks: Tensor | None,
    cut: Cut,
) -> None:
    batch, heads, _ = out.shape
    row_blocks = max(1, -(-out_rows.shape[1] // HOPPER_BLOCKS.rows))
    blocks_each = -(-row_blocks // min(cut.splits, CLUSTER_MAX // CLUSTER_PAIR))
    splits = -(-row_blocks // blocks_each)
    block = structures.AttendRows(
        rows=state.rows[layer].data_ptr(),
        queries=queries.data_ptr(),
        entries=out_rows.data_ptr(),
        out=out.data_ptr(),
        scale=scaling * LOG2_E,
        heads=heads,
        k=out_rows.shape[1],
        splits=splits,
        span=blocks_each * HOPPER_BLOCKS.rows,
        sinks=None if sinks is None else sinks.data_ptr(),
    )
    kernel, cluster = _hopper_kernel(form.kind, cut.heads, sinks is not None, out.device), CLUSTER_PAIR * splits
    grid = (cluster * -(-heads // cut.heads), batch)
    kernel.launch(grid, block, stream_of(state), cluster=cluster, shared_bytes=HOPPER_SHARED_BYTES, early=True)


def _attend_in_triton(
    state: DeviceState,
    layer: int,
    form: RowFormat,
    queries: Tensor,
    out_rows: Tensor,
    scaling: float,
    out: Tensor,
    sinks: Tensor | None,
    parts: Parts,
    blocks: Blocks,
    wide: bool,
    capability: tuple[int, int],
) -> None:
    batch, heads, latent = out.shape
    triton_unit("attention_triton").attend[-(-heads // blocks.heads), parts.splits, batch](
        state.rows[layer],
        queries,
        out_rows,
        out,
        parts.partial,
        parts.peak,
        parts.total,
        sinks,
        scaling * LOG2_E,
        heads,
        out_rows.shape[1],
        parts.splits,
        parts.span,
        KIND=KINDS.index(form.kind),
        WIDE=wide,
        LATENT=latent,
        ROPE=form.plain,
        GROUP=form.group,
        ROW_BYTES=form.row_bytes,
        E4M3=capability >= FP8_SINCE,
        LATENT_PADDED=_padded(latent),
        ROPE_PADDED=_padded(form.plain),
        BLOCK_HEADS=blocks.heads,
        BLOCK_ROWS=blocks.rows,
        ONE_SPLIT=parts.splits == 1,
        SINKS=sinks is not None,
        STAGES=blocks.stages,
        num_warps=blocks.warps,
    )


def _combine(out: Tensor, parts: Parts, sinks: Tensor | None) -> None:
    batch, heads, latent = out.shape
    block = min(COMBINE_VALUES, _padded(latent))
    triton_unit("attention_triton").combine[-(-latent // block), heads, batch](
        out,
        parts.partial,
        parts.peak,
        parts.total,
        sinks,
        heads,
        parts.splits,
        LATENT=latent,
        BLOCK_LATENT=block,
        SPLITS_PADDED=1 << (parts.splits - 1).bit_length(),
        SINKS=sinks is not None,
    )


def prepare_attention(state: DeviceState, heads: int, form: RowFormat, dtype: torch.dtype, sinks: bool) -> None:
    """One run for each way of cutting and of splitting, over entries of -1, which touch no row."""
    device, latent = state.rows.device, form.scaled
    queries = torch.zeros(1, heads, form.values, dtype=dtype, device=device)
    out = torch.empty(1, heads, latent, dtype=dtype, device=device)
    logits = torch.zeros(heads, device=device) if sinks else None
    wide, capability = is_wide(form, dtype), torch.cuda.get_device_capability(device)
    for k in {state.geometry.topk, max(1, state.geometry.topk // ENTRIES_STEP * ENTRIES_STEP)}:
        nothing = torch.full((1, k), -1, dtype=torch.int32, device=device)
        for blocks in {blocks_of(form, batch, heads, wide, capability) for batch in (1, HOPPER_PROGRAMS_LEAST)}:
            most = CLUSTER_MAX if blocks == HOPPER_BLOCKS else SPLITS_MAX
            for power in range(most.bit_length()):
                attend_rows(state, 0, queries, nothing, 1.0, out, logits, blocks=blocks, splits=1 << power)


def is_written(form: RowFormat) -> bool:
    """Return whether attend_rows.cuh has rows of `form`."""
    return (form.scaled, form.plain) == (HOPPER_LATENT, HOPPER_ROPE)


def _require_kernel(form: RowFormat, wide: bool, capability: tuple[int, int]) -> None:
    if form.kind == "fp4" and (wide or capability != HOPPER or not is_written(form)):
        held = f"{HOPPER_LATENT} latents and {HOPPER_ROPE} rope values, by bfloat16 queries"
        remedy = f"keep them in fp8; in fp4 Hopper alone reads them, {held}"
        raise BadInput("no kernel reads such rows", field="rows", value=form.kind, remedy=remedy)


def is_wide(form: RowFormat, queries: torch.dtype) -> bool:
    """Whether products are of float32."""
    return queries == torch.float32 or form.kind == "float32"


def hopper_defines(kind: str, heads: int, sinks: bool = False) -> Defines:
    """Return macros for rows of `kind`, one of HOPPER_KINDS, and heads of a pair of thread blocks, 64 or 128."""
    key_bytes, fp4 = 2 if kind == "bfloat16" else 1, ("FP4", int(kind == "fp4"))
    shared = ("SHARED_BYTES", HOPPER_SHARED_BYTES)
    return (("HEADS", heads), ("KEY_BYTES", key_bytes), fp4, ("SINKS", int(sinks)), shared, ("WGMMA", 1))


@lru_cache(maxsize=16)
def _hopper_kernel(kind: str, heads: int, sinks: bool, device: torch.device) -> Kernel:
    kernel = load("attend_rows", "attend_rows", hopper_defines(kind, heads, sinks), device.index or 0)
    kernel.allow_all(clusters=True)
    return kernel


def heads_together(heads: int) -> int:
    """The heads that a pair of thread blocks takes, unless more pairs are at work at once than there are results."""
    return HEADS_TOGETHER[0] if heads <= HEADS_TOGETHER[0] else HEADS_TOGETHER[1]


def blocks_of(form: RowFormat, batch: int, heads: int, wide: bool, capability: tuple[int, int]) -> Blocks:
    """Hopper's tensor cores take 64 heads at a time; float32 lives in registers and wants little. Elsewhere shared
    memory is smaller, or laid out otherwise: a cut that fits them all, not measured there."""
    if wide:
        return Blocks(heads=16, rows=16, warps=4, stages=1)
    if form.kind == "fp4":
        return HOPPER_BLOCKS
    if capability == HOPPER and heads >= HOPPER_BLOCKS.heads and form.scaled >= HOPPER_LATENT // 2:
        if is_written(form) and -(-heads // HOPPER_BLOCKS.heads) * batch >= HOPPER_PROGRAMS_LEAST:
            return HOPPER_BLOCKS
        return Blocks(heads=64, rows=64, warps=8, stages=1 if form.kind == "fp8" else 2)
    return Blocks(heads=16, rows=32, warps=4, stages=3)


def splits_of(programs: int, row_blocks: int, multiprocessors: int) -> int:
    """Splits of `row_blocks` that finish first when `programs` of each split run one per multiprocessor."""

    def cost(splits: int) -> int:
        rounds = -(-programs * splits // multiprocessors)
        return rounds * (-(-row_blocks // splits) + OVERHEAD_BLOCKS)

    return min(range(1, min(row_blocks, SPLITS_MAX) + 1), key=cost)


@lru_cache(maxsize=1024)
def hopper_cut_of(kernel: Kernel, heads: int, batch: int, row_blocks: int) -> Cut:
    """Likewise where the splits of a result form a cluster, of which fewer may run at once, and pairs take 64 heads or
    128. `kernel` is any of those kernels, since all need the same of a multiprocessor."""

    def cost(cut: Cut) -> int:
        at_once = kernel.clusters_at_once(CLUSTER_PAIR * cut.splits, HOPPER_SHARED_BYTES)
        rounds = -(-batch * -(-heads // cut.heads) // max(1, at_once))
        return (
            rounds * (-(-row_blocks // cut.splits) + HOPPER_OVERHEAD_BLOCKS[cut.heads]) * HOPPER_BLOCK_COST[cut.heads]
        )

    most = min(row_blocks, CLUSTER_MAX // CLUSTER_PAIR)
    pairs = [together for together in HEADS_TOGETHER if together <= heads_together(heads)]
    return min((Cut(together, splits) for together in reversed(pairs) for splits in range(1, most + 1)), key=cost)


def _padded(size: int) -> int:
    """A power of two that a matrix product can have as a side."""
    return max(MMA_MIN, 1 << (size - 1).bit_length())
