"""RMS norm, rotary embedding and gated activation in one launch each, in Triton. Launched by kernels/cuda/pointwise.py.

All round where the model library's modules round, so that values in bfloat16 differ from the library's only where a
norm's mean of squares does (another order of the sum), or a sigmoid by its last bits; rotations do not differ at all.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["row_stride"])
def rms_norm(
    values,
    added,
    weight,
    total,
    out,
    row_stride,
    eps,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    ADDS: tl.constexpr,
):
    """One program per row of SIZE values, `row_stride` values apart. ADDS: of values + added, which go to `total`."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SIZE_PADDED)
    real = place < SIZE
    kind = out.dtype.element_ty
    x = tl.load(values + row * row_stride + place, mask=real, other=0.0).to(tl.float32)
    if ADDS:
        x = (x + tl.load(added + row * SIZE + place, mask=real, other=0.0).to(tl.float32)).to(kind)
        tl.store(total + row * SIZE + place, x, mask=real)
        x = x.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    scaled = tl.load(weight + place, mask=real, other=0.0).to(tl.float32) * normed.to(kind).to(tl.float32)
    tl.store(out + row * SIZE + place, scaled.to(kind), mask=real)


@triton.jit
def gate(values, factors, out, size, values_stride, factors_stride, BLOCK: tl.constexpr):
    """silu(values) * factors, of part of a row."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = place < size
    values, factors, out = values + row * values_stride, factors + row * factors_stride, out + row * size
    kind = out.dtype.element_ty
    x = tl.load(values + place, mask=real, other=0.0).to(tl.float32)
    opened = (x / (1.0 + tl.exp(-x))).to(kind).to(tl.float32)
    factor = tl.load(factors + place, mask=real, other=0.0).to(tl.float32)
    tl.store(out + place, (opened * factor).to(kind), mask=real)


@triton.jit
def turn(
    x,
    head_stride,
    cos,
    sin,
    out,
    heads,
    head,
    HALF: tl.constexpr,
    PLAIN: tl.constexpr,
    PLAIN_PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Heads `head`, of `heads`, of one token: 2 * HALF values are rotated, PLAIN behind them are copied. Pairs are
    neighbours, or i and i + HALF as in the result."""
    pair = tl.arange(0, HALF)[None, :]
    real = (head < heads)[:, None] & (pair >= 0)
    at = x + head[:, None] * head_stride
    to = out + head[:, None] * (2 * HALF + PLAIN)
    step: tl.constexpr = 2 if INTERLEAVED else 1
    other: tl.constexpr = 1 if INTERLEAVED else HALF
    first = tl.load(at + step * pair, mask=real, other=0.0).to(tl.float32)
    second = tl.load(at + step * pair + other, mask=real, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    c = tl.load(cos + pair).to(tl.float32)
    s = tl.load(sin + pair).to(tl.float32)
    low = (first * c).to(kind).to(tl.float32) - (second * s).to(kind).to(tl.float32)
    high = (second * c).to(kind).to(tl.float32) + (first * s).to(kind).to(tl.float32)
    tl.store(to + pair, low.to(kind), mask=real)
    tl.store(to + HALF + pair, high.to(kind), mask=real)
    if PLAIN:
        place = tl.arange(0, PLAIN_PADDED)[None, :]
        held = (head < heads)[:, None] & (place < PLAIN)
        tl.store(to + 2 * HALF + place, tl.load(at + 2 * HALF + place, mask=held, other=0.0), mask=held)


@triton.jit(do_not_specialize=["tokens", "heads", "query_batch", "query_token", "query_head", "key_batch", "key_token"])
def rotate(
    queries,
    keys,
    cos,
    sin,
    query_out,
    key_out,
    tokens,
    heads,
    query_batch,
    query_token,
    query_head,
    key_batch,
    key_token,
    HALF: tl.constexpr,
    PLAIN: tl.constexpr,
    PLAIN_PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Grid (blocks of heads and one more for the key, tokens x sequences); `cos` and `sin` hold both halves."""
    block = tl.program_id(0)
    number = tl.program_id(1).to(tl.int64)
    sequence = number // tokens
    token = number % tokens
    angles = number * 2 * HALF
    head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    if block * BLOCK_HEADS < heads:
        turn(
            queries + sequence * query_batch + token * query_token,
            query_head,
            cos + angles,
            sin + angles,
            query_out + number * heads * (2 * HALF + PLAIN),
            heads,
            head,
            HALF,
            PLAIN,
            PLAIN_PADDED,
            INTERLEAVED,
        )
    else:
        turn(
            keys + sequence * key_batch + token * key_token,
            0,
            cos + angles,
            sin + angles,
            key_out + number * (2 * HALF + PLAIN),
            1,
            tl.arange(0, BLOCK_HEADS),
            HALF,
            PLAIN,
            PLAIN_PADDED,
            INTERLEAVED,
        )
