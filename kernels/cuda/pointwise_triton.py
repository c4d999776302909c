"""RMS norms, sums and gated activation in one launch each, in Triton. Launched by kernels/cuda/pointwise.py.

All round where the model library's modules round, so that values in bfloat16 differ from the library's only where a
norm's mean of squares does (another order of the sum), or a sigmoid by its last bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from kernels.cuda.early_triton import begin

BLOCK = tl.constexpr(128)
E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def join_norm(
    values,
    parts,
    part_stride,
    added,
    weight,
    total,
    out,
    also,
    codes,
    scales,
    also_scales,
    row_stride,
    also_stride,
    span,
    also_scale_stride,
    eps,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    ADDS: tl.constexpr,
    NORMS: tl.constexpr,
    ALSO: tl.constexpr,
    QUANTIZES: tl.constexpr,
    ALSO_CODES: tl.constexpr,
    POWERS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per row of SIZE values, `row_stride` values apart; rows of `also` are `also_stride` apart, those of
    `also_scales` `also_scale_stride`, blocks of `scales` `span`."""
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SIZE_PADDED)
    real = place < SIZE
    own = row * SIZE + place
    kind = values.dtype.element_ty
    x = tl.load(values + row * row_stride + place, mask=real, other=0.0).to(tl.float32)
    if PARTS:
        whole = tl.load(parts + own, mask=real, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            whole += tl.load(parts + part * part_stride + own, mask=real, other=0.0).to(tl.float32)
        whole = whole.to(kind).to(tl.float32)
        if ADDS:
            whole = (whole + tl.load(added + own, mask=real, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
        x = (x + whole).to(kind)
        tl.store(total + own, x, mask=real)
        x = x.to(tl.float32)
    if NORMS:
        normed = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
        scaled = tl.load(weight + place, mask=real, other=0.0).to(tl.float32) * normed.to(kind).to(tl.float32)
        tl.store(out + own, scaled.to(kind), mask=real)
        if ALSO:
            tl.store(also + row * also_stride + place, scaled.to(kind), mask=real)
        if QUANTIZES or ALSO_CODES:
            block = tl.arange(0, SIZE_PADDED // BLOCK)
            tile = tl.reshape(scaled.to(kind).to(tl.float32), (SIZE_PADDED // BLOCK, BLOCK))
            scale = tl.div_rn(tl.max(tl.abs(tile), 1), tl.full((SIZE_PADDED // BLOCK,), E4M3_MAX, tl.float32))
            if POWERS:
                bits = scale.to(tl.int32, bitcast=True)
                exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
                power = (tl.minimum(tl.maximum(exponent, 1), 254) << 23).to(tl.float32, bitcast=True)
                scale = tl.where(scale == 0, 1.0, power)
            else:
                scale = tl.where(scale == 0, 1.0, scale)
            code = tl.div_rn(tile, tl.broadcast_to(scale[:, None], (SIZE_PADDED // BLOCK, BLOCK))).to(tl.float8e4nv)
            within = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            if QUANTIZES:
                tl.store(codes + row * SIZE + within, code, mask=within < SIZE)
                tl.store(scales + block * span + row, scale, mask=block < SIZE // BLOCK)
            if ALSO_CODES:
                tl.store(also + row * also_stride + within, code, mask=within < SIZE)
                tl.store(also_scales + row * also_scale_stride + block, scale, mask=block < SIZE // BLOCK)


@triton.jit
def gate(values, factors, out, size, values_stride, factors_stride, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """silu(values) * factors, of part of a row."""
    begin(EARLY)
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = place < size
    values, factors, out = values + row * values_stride, factors + row * factors_stride, out + row * size
    kind = out.dtype.element_ty
    x = tl.load(values + place, mask=real, other=0.0).to(tl.float32)
    opened = (x / (1.0 + tl.exp(-x))).to(kind).to(tl.float32)
    factor = tl.load(factors + place, mask=real, other=0.0).to(tl.float32)
    tl.store(out + place, (opened * factor).to(kind), mask=real)
