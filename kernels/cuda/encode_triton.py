"""RowFormat.encode of fp8 in one pass, in Triton. Launched by kernels/cuda/encode.py.

A program encodes ROWS rows. The same bytes as torch's on a GPU: largest magnitudes are multiplied by 1 / 448 (torch
divides by a constant that way), values divided by their scale as IEEE has it, and e4m3 is rounded to nearest even.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from kernels.cuda.early_triton import begin


@triton.jit(do_not_specialize=["values", "out", "rows"], do_not_specialize_on_alignment=["values", "out", "rows"])
def encode(
    values,
    out,
    rows,
    SCALED: tl.constexpr,
    PLAIN: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    BY_MAX: tl.constexpr,  # 1 / 448 in float32
    ROWS: tl.constexpr,
    VALUES_ALIGN: tl.constexpr,  # bytes: every row of values lies at a multiple of it
    OUT_ALIGN: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    PLAIN_PADDED: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    groups: tl.constexpr = SCALED // GROUP
    group = tl.arange(0, GROUPS_PADDED)
    inner = tl.arange(0, GROUP_PADDED)
    place = (group[:, None] * GROUP + inner[None, :])[None, :, :]
    is_value = is_row[:, None, None] & ((group < groups)[:, None] & (inner < GROUP)[None, :])[None, :, :]
    line = tl.multiple_of(values + row * (SCALED + PLAIN), VALUES_ALIGN)
    coded = tl.multiple_of(out + row * ROW_BYTES, OUT_ALIGN)
    x = tl.load(line[:, None, None] + place, mask=is_value, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(x), 2) * BY_MAX
    scale = tl.where(scale == 0, 1.0, scale)
    is_nan = tl.max((x != x).to(tl.int32), 2) > 0  # noqa: PLR0124
    nan = tl.full((ROWS, GROUPS_PADDED), 0x7FFFFFFF, tl.int32).to(tl.float32, bitcast=True)
    scale = tl.where(is_nan, nan, scale)
    codes = tl.div_rn(x, tl.broadcast_to(scale[:, :, None], (ROWS, GROUPS_PADDED, GROUP_PADDED))).to(tl.float8e4nv)
    tl.store(coded[:, None, None] + place, codes.to(tl.uint8, bitcast=True), mask=is_value)
    is_scale = is_row[:, None] & (group < groups)[None, :]
    tl.store((coded + SCALED).to(tl.pointer_type(tl.float32))[:, None] + group[None, :], scale, mask=is_scale)
    if PLAIN:
        rope = tl.arange(0, PLAIN_PADDED)[None, :]
        is_plain = is_row[:, None] & (rope < PLAIN)
        plain = tl.load((line + SCALED)[:, None] + rope, mask=is_plain, other=0.0)
        to = (coded + SCALED + 4 * groups).to(tl.pointer_type(tl.bfloat16))
        tl.store(to[:, None] + rope, plain.to(tl.bfloat16), mask=is_plain)
