"""RowFormat.encode of fp8 in one pass, in Triton. Launched by kernels/cuda/encode.py.

One program per row. The same bytes as torch's on a GPU: largest magnitudes are multiplied by 1 / 448 (torch divides by
a constant that way), values divided by their scale as IEEE has it, and e4m3 is rounded to nearest even.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["values", "out"], do_not_specialize_on_alignment=["values", "out"])
def encode(
    values,
    out,
    SCALED: tl.constexpr,
    PLAIN: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    BY_MAX: tl.constexpr,  # 1 / 448 in float32
    GROUPS_PADDED: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    PLAIN_PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    groups: tl.constexpr = SCALED // GROUP
    group = tl.arange(0, GROUPS_PADDED)
    inner = tl.arange(0, GROUP_PADDED)
    real = (group < groups)[:, None] & (inner < GROUP)[None, :]
    place = group[:, None] * GROUP + inner[None, :]
    x = tl.load(values + row * (SCALED + PLAIN) + place, mask=real, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(x), 1) * BY_MAX
    scale = tl.where(scale == 0, 1.0, scale)
    is_nan = tl.max((x != x).to(tl.int32), 1) > 0  # noqa: PLR0124
    scale = tl.where(is_nan, tl.full((GROUPS_PADDED,), 0x7FFFFFFF, tl.int32).to(tl.float32, bitcast=True), scale)
    codes = tl.div_rn(x, tl.broadcast_to(scale[:, None], (GROUPS_PADDED, GROUP_PADDED))).to(tl.float8e4nv)
    line = out + row * ROW_BYTES
    tl.store(line + place, codes.to(tl.uint8, bitcast=True), mask=real)
    tl.store((line + SCALED).to(tl.pointer_type(tl.float32)) + group, scale, mask=group < groups)
    if PLAIN:
        rope = tl.arange(0, PLAIN_PADDED)
        plain = tl.load(values + row * (SCALED + PLAIN) + SCALED + rope, mask=rope < PLAIN, other=0.0)
        to = (line + SCALED + 4 * groups).to(tl.pointer_type(tl.bfloat16))
        tl.store(to + rope, plain.to(tl.bfloat16), mask=rope < PLAIN)
