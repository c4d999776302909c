"""KV rows and index keys from the products that form them, in one launch each. Launched by kernels/cuda/projected.py.

All round where the model library's modules and kernels/row_format.py round: norms and rotations to the dtype of the
model, codes to nearest even. One program takes a token's row, or BLOCK_HEADS heads of its queries.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from kernels.cuda.early_triton import begin


@triton.jit
def rotated(first, second, cos, sin, kind: tl.constexpr):
    """Both halves of pairs turned by their angles, all float32; every product and sum is rounded to `kind`."""
    low = (first * cos).to(kind).to(tl.float32) - (second * sin).to(kind).to(tl.float32)
    high = (second * cos).to(kind).to(tl.float32) + (first * sin).to(kind).to(tl.float32)
    return low.to(kind), high.to(kind)


@triton.jit
def pairs(at, real, ROWS: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """First and second values float32[ROWS, HALF] of the pairs at pointers `at` [ROWS, 1], of rows that are `real`."""
    if INTERLEAVED:
        x = tl.load(at + tl.arange(0, 2 * HALF)[None, :], mask=real, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, (ROWS, HALF, 2)))
    else:
        pair = tl.arange(0, HALF)[None, :]
        first = tl.load(at + pair, mask=real, other=0.0).to(tl.float32)
        second = tl.load(at + HALF + pair, mask=real, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def scale_of(x, BY_MAX: tl.constexpr):
    """Scales float32[groups] of x float32[groups, values]: largest magnitude * BY_MAX, 1 of zeros, NaN of NaN."""
    scale = tl.max(tl.abs(x), 1) * BY_MAX
    scale = tl.where(scale == 0, 1.0, scale)
    is_nan = tl.max((x != x).to(tl.int32), 1) > 0  # noqa: PLR0124
    return tl.where(is_nan, float("nan"), scale)


@triton.jit
def codes_of(x, scale, GROUPS: tl.constexpr, VALUES: tl.constexpr):
    """Bytes of e4m3 x / scale, as IEEE divides."""
    quotient = tl.div_rn(x, tl.broadcast_to(scale[:, None], (GROUPS, VALUES)))
    return quotient.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def store_encoded(
    to, x, place, real, KIND_BYTES: tl.constexpr, BY_MAX: tl.constexpr, GROUPS: tl.constexpr, VALUES: tl.constexpr
):
    """Store x [GROUPS, VALUES] at `place` of the row at `to`, those that are `real`; KIND_BYTES 1: as codes of e4m3.
    Returns the groups' scales, of codes alone."""
    exact = x.to(tl.float32)
    scale = tl.zeros((GROUPS,), tl.float32)
    if KIND_BYTES == 1:
        scale = scale_of(exact, BY_MAX)
        tl.store(to + place, codes_of(exact, scale, GROUPS, VALUES), mask=real)
    elif KIND_BYTES == 2:
        tl.store(to.to(tl.pointer_type(tl.bfloat16)) + place, x.to(tl.bfloat16), mask=real)
    else:
        tl.store(to.to(tl.pointer_type(tl.float32)) + place, exact, mask=real)
    return scale


@triton.jit
def kv_row(
    line,
    weight,
    eps,
    cos,
    sin,
    to,
    stored,
    LATENT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND_BYTES: tl.constexpr,
    BY_MAX: tl.constexpr,
):
    """The row at `to`, where it is `stored`, of the products at `line`."""
    kind = line.dtype.element_ty
    group = tl.arange(0, GROUPS_PADDED)
    inner = tl.arange(0, GROUP_PADDED)
    place = group[:, None] * GROUP + inner[None, :]
    real = (inner < GROUP)[None, :] & (place < LATENT)
    x = tl.load(line + place, mask=real, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / LATENT + eps)
    scaled = tl.load(weight + place, mask=real, other=0.0).to(tl.float32) * normed.to(kind).to(tl.float32)
    one = tl.arange(0, 1)[:, None]
    first, second = pairs(line + LATENT + one, one >= 0, 1, HALF, INTERLEAVED)
    low, high = rotated(first, second, cos, sin, kind)
    if stored:
        scale = store_encoded(to, scaled.to(kind), place, real, KIND_BYTES, BY_MAX, GROUPS_PADDED, GROUP_PADDED)
        pair = tl.arange(0, HALF)[None, :]
        if KIND_BYTES == 1:
            groups: tl.constexpr = LATENT // GROUP
            tl.store((to + LATENT).to(tl.pointer_type(tl.float32)) + group, scale, mask=group < groups)
            rope = (to + LATENT + 4 * groups).to(tl.pointer_type(tl.bfloat16))
        elif KIND_BYTES == 2:
            rope = to.to(tl.pointer_type(tl.bfloat16)) + LATENT
        else:
            rope = to.to(tl.pointer_type(tl.float32)) + LATENT
        tl.store(rope + pair, low.to(rope.dtype.element_ty))
        tl.store(rope + HALF + pair, high.to(rope.dtype.element_ty))


@triton.jit
def kv_rows(
    down,
    down_stride,
    weight,
    eps,
    cos,
    sin,
    queries,
    query_token,
    query_head,
    turned,
    turned_token,
    turned_head,
    heads,
    out,
    places,
    LATENT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND_BYTES: tl.constexpr,  # of a value that is kept; 1: in e4m3, scaled
    BY_MAX: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    PLACED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid (1 + blocks of heads, tokens). The row's latent is normed, its key rotated; queries are rotated."""
    begin(EARLY)
    number = tl.program_id(1).to(tl.int64)
    pair = tl.arange(0, HALF)[None, :]
    c = tl.load(cos + number * 2 * HALF + pair).to(tl.float32)
    s = tl.load(sin + number * 2 * HALF + pair).to(tl.float32)
    if tl.program_id(0) == 0:
        to = number
        if PLACED:
            to = tl.load(places + number).to(tl.int64)
        kv_row(
            down + number * down_stride,
            weight,
            eps,
            c,
            s,
            tl.multiple_of(out + to * ROW_BYTES, OUT_ALIGN),
            to >= 0,
            LATENT,
            GROUP,
            GROUPS_PADDED,
            GROUP_PADDED,
            HALF,
            INTERLEAVED,
            KIND_BYTES,
            BY_MAX,
        )
    else:
        head = ((tl.program_id(0) - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        held = head < heads
        at = queries + number * query_token + head * query_head
        first, second = pairs(at, held, BLOCK_HEADS, HALF, INTERLEAVED)
        low, high = rotated(first, second, c, s, down.dtype.element_ty)
        target = turned + number * turned_token + head * turned_head
        tl.store(target + pair, low, mask=held)
        tl.store(target + HALF + pair, high, mask=held)


@triton.jit
def normed_pair(line, own, mate, weight, bias, eps, DIM: tl.constexpr, DIM_PADDED: tl.constexpr):
    """Values `own` and `mate` of the LayerNorm of the DIM values at `line`, float32, rounded to their dtype."""
    kind = line.dtype.element_ty
    lane = tl.arange(0, DIM_PADDED)
    real = lane < DIM
    x = tl.load(line + lane, mask=real, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / DIM
    centred = tl.where(real, x - mean, 0.0)
    spread = tl.rsqrt(tl.sum(centred * centred, 0) / DIM + eps)
    a = (tl.load(line + own, mask=real, other=0.0).to(tl.float32) - mean) * spread
    b = (tl.load(line + mate, mask=real, other=0.0).to(tl.float32) - mean) * spread
    a = a * tl.load(weight + own, mask=real, other=0.0).to(tl.float32)
    b = b * tl.load(weight + mate, mask=real, other=0.0).to(tl.float32)
    a = a + tl.load(bias + own, mask=real, other=0.0).to(tl.float32)
    b = b + tl.load(bias + mate, mask=real, other=0.0).to(tl.float32)
    return a.to(kind).to(tl.float32), b.to(kind).to(tl.float32)


@triton.jit
def places_of(lane, FIRST: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return of values `lane` of a result whether angles rotate them, the pair, whether they are its first, and the
    places of both values that they come from."""
    is_turned = (lane >= FIRST) & (lane < FIRST + 2 * HALF)
    half = tl.where(is_turned, lane - FIRST, 0) % HALF
    is_low = lane < FIRST + HALF
    step: tl.constexpr = 2 if INTERLEAVED else 1
    other: tl.constexpr = 1 if INTERLEAVED else HALF
    own = tl.where(is_turned, FIRST + step * half + tl.where(is_low, 0, other), lane)
    mate = tl.where(is_turned, FIRST + step * half + tl.where(is_low, other, 0), lane)
    return is_turned, half, is_low, own, mate


@triton.jit
def index_rows(
    keys,
    key_stride,
    weight,
    bias,
    eps,
    cos,
    sin,
    rotation,
    queries,
    query_token,
    query_out,
    head_weights,
    weight_stride,
    weight_out,
    weight_scale,
    heads,
    out,
    places,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,  # 16 or more: what tl.dot takes
    HALF: tl.constexpr,
    FIRST: tl.constexpr,  # of the 2 * HALF values that angles rotate
    INTERLEAVED: tl.constexpr,
    ROTATES: tl.constexpr,
    KIND_BYTES: tl.constexpr,  # of a value of a key that is kept; 1: in e4m3, scaled
    BY_MAX: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    PLACED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,  # 16 or more
    HEADS_PADDED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid (1 + blocks of heads, tokens). Key and queries are rotated by their angles, then by the matrix `rotation`:
    value i of the result is a * cos +- b * sin of its pair, a alone beyond the pairs."""
    begin(EARLY)
    number = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    kind = keys.dtype.element_ty
    lane = tl.arange(0, DIM_PADDED)
    row = tl.arange(0, BLOCK_HEADS)
    is_turned, half, is_low, own, mate = places_of(lane, FIRST, HALF, INTERLEAVED)
    if block == 0:
        a, b = normed_pair(keys + number * key_stride, own, mate, weight, bias, eps, DIM, DIM_PADDED)
        held = (row == 0)[:, None] & (lane < DIM)[None, :]
        first = tl.where(held, a[None, :], 0.0)
        second = tl.where(held, b[None, :], 0.0)
    else:
        held = ((block - 1) * BLOCK_HEADS + row < heads)[:, None] & (lane < DIM)[None, :]
        at = queries + number * query_token + ((block - 1) * BLOCK_HEADS + row)[:, None] * DIM
        first = tl.load(at + own[None, :], mask=held, other=0.0).to(tl.float32)
        second = tl.load(at + mate[None, :], mask=held, other=0.0).to(tl.float32)
    c = tl.load(cos + number * 2 * HALF + half).to(tl.float32)
    s = tl.load(sin + number * 2 * HALF + half).to(tl.float32)
    along = (first * c[None, :]).to(kind).to(tl.float32)
    across = (second * s[None, :]).to(kind).to(tl.float32)
    turned = tl.where(is_low[None, :], along - across, along + across)
    tile = tl.where(is_turned[None, :], turned, first).to(kind)
    if ROTATES:
        inside = (lane < DIM)[:, None] & (lane < DIM)[None, :]
        matrix = tl.load(rotation + lane[:, None] * DIM + lane[None, :], mask=inside, other=0.0)
        tile = tl.dot(tile, matrix, input_precision="ieee").to(kind)
    if block == 0:
        to = number
        if PLACED:
            to = tl.load(places + number).to(tl.int64)
        key = tl.sum(tl.where(held, tile.to(tl.float32), 0.0), 0)[None, :]
        if to >= 0:
            coded = tl.multiple_of(out + to * ROW_BYTES, OUT_ALIGN)
            scale = store_encoded(coded, key, lane[None, :], (lane < DIM)[None, :], KIND_BYTES, BY_MAX, 1, DIM_PADDED)
            if KIND_BYTES == 1:
                tl.store((coded + DIM).to(tl.pointer_type(tl.float32)) + tl.arange(0, 1), scale)
        if heads > 0:
            each = tl.arange(0, HEADS_PADDED)
            raw = tl.load(head_weights + number * weight_stride + each, mask=each < heads, other=0.0)
            tl.store(weight_out + number * heads + each, raw.to(tl.float32) * weight_scale, mask=each < heads)
    else:
        target = query_out + (number * heads + ((block - 1) * BLOCK_HEADS + row)[:, None]) * DIM + lane[None, :]
        tl.store(target, tile.to(query_out.dtype.element_ty), mask=held)
