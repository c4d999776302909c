"""attend_rows on CUDA: the contract of kernels/attention.py, in Triton (attention_triton.py), on the current stream.

Triton comes with torch's CUDA wheels and compiles at first use of a kind of shape, which `prepare_attention` makes
happen at worker start. Products of bfloat16 queries with bfloat16 or fp8 rows run on tensor cores in bfloat16 with
float32 sums: probabilities and dequantised fp8 values are rounded to bfloat16, each within 2**-9 of itself. Any other
pairing multiplies in plain float32.

How entries are split over programs: by the count of programs that heads and batch rows make anyway and by the count of
multiprocessors, never by what is in the entries. A split costs its pass over a partial result (4 (r + 2) bytes per
head), so ties go to fewer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels.attention import row_format
from kernels.cuda.launch import processors
from kernels.cuda.triton_units import triton_unit
from kernels.row_bytes import KINDS
from kernels.row_format import RowFormat
from kernels.state import DeviceState

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


@dataclass(frozen=True)
class Blocks:
    """How a program is cut: heads and rows of a block, warps, blocks of rows in flight."""

    heads: int
    rows: int
    warps: int
    stages: int


def attend_rows(
    state: DeviceState,
    layer: int,
    queries: Tensor,
    out_rows: Tensor,
    scaling: float,
    out: Tensor,
    *,
    blocks: Blocks | None = None,
    splits: int | None = None,
) -> None:
    """As kernels.attention.attend_rows, unchecked. `blocks` and `splits` override the choice made here."""
    form = row_format(state, queries, out)
    batch, heads, latent = out.shape
    k = out_rows.shape[1]
    wide = queries.dtype == torch.float32 or form.kind == "float32"
    capability = torch.cuda.get_device_capability(out.device)
    blocks = blocks or blocks_of(form, heads, wide, capability)
    head_blocks, row_blocks = -(-heads // blocks.heads), max(1, -(-k // blocks.rows))
    wanted = splits or splits_of(head_blocks * batch, row_blocks, processors(out.device))
    span = -(-row_blocks // wanted)
    used = -(-row_blocks // span)
    lines = batch * used * heads if used > 1 else 0
    partial = torch.empty(lines, latent, dtype=torch.float32, device=out.device)
    peak, total = (torch.empty(lines, dtype=torch.float32, device=out.device) for _ in range(2))
    unit = triton_unit("attention_triton")
    unit.attend[head_blocks, used, batch](
        state.rows[layer],
        queries,
        out_rows,
        out,
        partial,
        peak,
        total,
        scaling * LOG2_E,
        heads,
        k,
        used,
        span * blocks.rows,
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
        ONE_SPLIT=used == 1,
        STAGES=blocks.stages,
        num_warps=blocks.warps,
    )
    if used > 1:
        block = min(COMBINE_VALUES, _padded(latent))
        unit.combine[-(-latent // block), heads, batch](
            out,
            partial,
            peak,
            total,
            heads,
            used,
            LATENT=latent,
            BLOCK_LATENT=block,
            SPLITS_PADDED=1 << (used - 1).bit_length(),
        )


def prepare_attention(state: DeviceState, heads: int, form: RowFormat, dtype: torch.dtype) -> None:
    """One run for each way of splitting, over entries of -1, which touch no row."""
    device, latent = state.rows.device, form.scaled
    queries = torch.zeros(1, heads, form.values, dtype=dtype, device=device)
    out = torch.empty(1, heads, latent, dtype=dtype, device=device)
    for k in {state.geometry.topk, max(1, state.geometry.topk // ENTRIES_STEP * ENTRIES_STEP)}:
        nothing = torch.full((1, k), -1, dtype=torch.int32, device=device)
        for power in range(SPLITS_MAX.bit_length()):
            attend_rows(state, 0, queries, nothing, 1.0, out, splits=1 << power)


def blocks_of(form: RowFormat, heads: int, wide: bool, capability: tuple[int, int]) -> Blocks:
    """Hopper's tensor cores take 64 heads at a time; float32 lives in registers and wants little. Elsewhere shared
    memory is smaller, or laid out otherwise: a cut that fits them all, not measured there."""
    if wide:
        return Blocks(heads=16, rows=16, warps=4, stages=1)
    if capability[0] == 9 and heads >= 64 and form.scaled >= 256:
        return Blocks(heads=64, rows=64, warps=8, stages=1 if form.kind == "fp8" else 2)
    return Blocks(heads=16, rows=32, warps=4, stages=3)


def splits_of(programs: int, row_blocks: int, multiprocessors: int) -> int:
    """Splits of `row_blocks` that finish first when `programs` of each split run one per multiprocessor."""

    def cost(splits: int) -> int:
        rounds = -(-programs * splits // multiprocessors)
        return rounds * (-(-row_blocks // splits) + OVERHEAD_BLOCKS)

    return min(range(1, min(row_blocks, SPLITS_MAX) + 1), key=cost)


def _padded(size: int) -> int:
    """A power of two that a matrix product can have as a side."""
    return max(MMA_MIN, 1 << (size - 1).bit_length())
