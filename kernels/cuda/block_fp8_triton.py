"""Products with block-FP8 weights, in Triton. Launched by kernels/cuda/block_fp8.py.

Weights are the left operand, tokens the right one: out.T[BLOCK_N, BLOCK_T] = weight[BLOCK_N, 128] @ tokens.T, summed
over the blocks of K. So a weight goes from registers, where it is decoded, straight to the tensor cores, and a tile of
tokens may be narrow. One turn of a loop is one block of K. Offsets inside one matrix are 32 bits wide.

    dense     grid (token blocks, N blocks, splits)   token blocks fastest: those that read the same weights meet in L2
    grouped   grid (N blocks, tiles)                  a tile: up to BLOCK_T assignments of one expert, from `route`

An *assignment* is one choice of one token, number token * choices + choice. `tile_expert` int32[tiles] names the expert
of a tile, -1 for a tile without work; `slots` int32[tiles, BLOCK_T] its assignments, -1 behind them.

Scales are loaded as a column, one for each row of weights, for Triton's sake: it moves the layout of an operand back to
the loads where all leaves of the operand's expression are loads, and pipelines those. With a scalar it would decode in
the layout of the copy, and take every weight through shared memory a second time, as bfloat16.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from kernels.cuda import early_triton as early

BLOCK = tl.constexpr(128)


@triton.jit
def decoded(codes, scale, E4M3: tl.constexpr):
    """e4m3 times scale in float32."""
    if E4M3:
        values = codes.to(tl.float32)
    else:  # sign, exponent and mantissa to their places in float32, whose exponent counts from 120 further down
        code = codes.to(tl.uint32)
        values = (((code & 0x80) << 24) | ((code & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return values * scale


@triton.jit
def add_product(sums, codes, scale, rows, E4M3: tl.constexpr):
    """sums[BLOCK_N, BLOCK_T] + one block of K: weights decoded and rounded to bfloat16."""
    return tl.dot(decoded(codes, scale, E4M3).to(tl.bfloat16), rows.T, sums)


@triton.jit
def load_codes(at, left, EVEN: tl.constexpr):
    """A tile of weights [BLOCK_N, 128]; zeros in columns from `left` on."""
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=(tl.arange(0, BLOCK) < left)[None, :], other=0.0)


@triton.jit
def load_rows(at, real, left, EVEN: tl.constexpr):
    """A tile of tokens [BLOCK_T, 128]; zeros in rows that are not `real` and in columns from `left` on."""
    mask = real[:, None] if EVEN else real[:, None] & (tl.arange(0, BLOCK) < left)[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["count", "n", "span", "blocks"])
def linear(
    hidden,
    values,
    scales,
    out,
    tile_expert,
    slots,
    count,  # dense: tokens
    n,
    k,
    blocks,  # of K
    span,  # blocks of K in one split
    GROUPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    EVEN: tl.constexpr,  # k is whole blocks
    E4M3: tl.constexpr,  # the card converts fp8
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out [splits, rows, n] of hidden [rows, k]: a dense product, or the rows of `slots` by their experts' weights."""
    early.begin(EARLY)
    lane = tl.arange(0, BLOCK_T)
    if GROUPED:
        first = tl.program_id(0) * BLOCK_N
        tile = tl.program_id(1)
        split = 0
        expert = tl.load(tile_expert + tile)
        if expert < 0:
            return
        token = tl.load(slots + tile * BLOCK_T + lane)
        real = token >= 0
        values += expert.to(tl.int64) * n * k
        scales += expert * tl.cdiv(n, BLOCK) * blocks
    else:
        first = tl.program_id(1) * BLOCK_N
        split = tl.program_id(2)
        token = tl.program_id(0) * BLOCK_T + lane
        real = token < count
    row = first + tl.arange(0, BLOCK_N)
    begin = split * span
    end = min(begin + span, blocks)
    inner = tl.arange(0, BLOCK)
    codes_at = (tl.minimum(row, n - 1) * k)[:, None] + inner[None, :]
    start = tl.where(real, token, 0)
    rows_at = (start * k)[:, None] + inner[None, :]
    scales_at = scales + (tl.minimum(row, n - 1) // BLOCK * blocks)[:, None]
    sums = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for block in tl.range(begin, end, num_stages=STAGES):
        left = k - block * BLOCK
        codes = load_codes(values + block * BLOCK + codes_at, left, EVEN)
        rows = load_rows(hidden + block * BLOCK + rows_at, real, left, EVEN)
        scale = tl.load(scales_at + block)
        sums = add_product(sums, codes, scale, rows, E4M3)
    to = out + ((split * count + token.to(tl.int64)) * n)[None, :] + row[:, None]
    tl.store(to, sums.to(out.dtype.element_ty), mask=(row < n)[:, None] & real[None, :])


@triton.jit(do_not_specialize=["n", "blocks", "choices"])
def gated(
    hidden,
    stride,  # values between rows
    gate,
    gate_scales,
    up,
    up_scales,
    out,
    tile_expert,
    slots,
    choices,
    n,
    k,
    blocks,
    limit,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    EVEN: tl.constexpr,
    E4M3: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out[assignment] [n] = silu(gate x) * up x of its token x, rounded to bfloat16 after each of the four steps. Both
    products are cut to `limit`, gate's from above."""
    early.begin(EARLY)
    first = tl.program_id(0) * BLOCK_N
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    slot = tl.load(slots + tile * BLOCK_T + tl.arange(0, BLOCK_T))
    real = slot >= 0
    start = tl.where(real, slot, 0) // choices
    row = first + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK)
    gate += expert.to(tl.int64) * n * k
    up += expert.to(tl.int64) * n * k
    codes_at = (tl.minimum(row, n - 1) * k)[:, None] + inner[None, :]
    rows_at = (start * stride)[:, None] + inner[None, :]
    scales_at = ((expert * tl.cdiv(n, BLOCK) + tl.minimum(row, n - 1) // BLOCK) * blocks)[:, None]
    gates = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    ups = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for block in tl.range(0, blocks, num_stages=STAGES):
        left = k - block * BLOCK
        rows = load_rows(hidden + block * BLOCK + rows_at, real, left, EVEN)
        codes = load_codes(gate + block * BLOCK + codes_at, left, EVEN)
        gate_scale = tl.load(gate_scales + scales_at + block)
        gates = add_product(gates, codes, gate_scale, rows, E4M3)
        codes = load_codes(up + block * BLOCK + codes_at, left, EVEN)
        up_scale = tl.load(up_scales + scales_at + block)
        ups = add_product(ups, codes, up_scale, rows, E4M3)
    x = gates.to(tl.bfloat16).to(tl.float32)
    x = tl.where(x > limit, limit, x)
    opened = (x / (1.0 + tl.exp(-x))).to(tl.bfloat16).to(tl.float32)
    factor = ups.to(tl.bfloat16).to(tl.float32)
    factor = tl.where(factor > limit, limit, tl.where(factor < -limit, -limit, factor))
    values = opened * factor
    to = out + (slot.to(tl.int64) * n)[None, :] + row[:, None]
    tl.store(to, values.to(tl.bfloat16), mask=(row < n)[:, None] & real[None, :])


@triton.jit(do_not_specialize=["stride", "assignments", "first", "tiles", "experts"])
def route(
    chosen,
    stride,  # choices of a token lie together, those of tokens `stride` apart
    tile_expert,
    slots,
    assignments,
    first,
    tiles,
    experts,
    CHOICES: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,  # more than `experts`
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program e fills the tiles of expert first + e, in ascending assignments; program `experts` marks those unused."""
    early.begin(EARLY)
    expert = tl.program_id(0)
    number = tl.arange(0, EXPERTS_PADDED)
    counts = tl.zeros((EXPERTS_PADDED,), tl.int32)
    for begin in range(0, assignments, CHUNK):
        place = begin + tl.arange(0, CHUNK)
        source = place // CHOICES * stride + place % CHOICES
        local = tl.load(chosen + source, mask=place < assignments, other=-1) - first
        local = tl.where((place < assignments) & (local >= 0) & (local < experts), local, experts).to(tl.int32)
        counts += tl.histogram(local, EXPERTS_PADDED)
    tiles_of = tl.where(number < experts, (counts + BLOCK_T - 1) // BLOCK_T, 0)
    tile = tl.sum(tl.where(number < expert, tiles_of, 0), 0)
    if expert == experts:
        for at in range(tile, tiles, CHUNK):
            place = at + tl.arange(0, CHUNK)
            tl.store(tile_expert + place, -1, mask=place < tiles)
    else:
        own = tl.sum(tl.where(number == expert, tiles_of, 0), 0)
        for at in range(0, own, CHUNK):
            place = at + tl.arange(0, CHUNK)
            tl.store(tile_expert + tile + place, expert, mask=place < own)
        filled = 0
        for begin in range(0, assignments, CHUNK):
            place = begin + tl.arange(0, CHUNK)
            source = place // CHOICES * stride + place % CHOICES
            local = tl.load(chosen + source, mask=place < assignments, other=-1) - first
            match = (place < assignments) & (local == expert)
            rank = filled + tl.cumsum(match.to(tl.int32), 0) - 1
            tl.store(slots + tile * BLOCK_T + rank, place, mask=match)
            filled += tl.sum(match.to(tl.int32), 0)
        empty = filled + tl.arange(0, BLOCK_T)
        tl.store(slots + tile * BLOCK_T + empty, -1, mask=empty < own * BLOCK_T)


@triton.jit(do_not_specialize=["choices"])
def gather(
    hidden,
    stride,  # values between rows
    tile_expert,
    slots,
    out,
    choices,
    width,
    BLOCK_T: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid (tiles, parts of the width): row tile * BLOCK_T + i of `out` is that of `hidden` which slot i chose."""
    early.begin(EARLY)
    tile = tl.program_id(0)
    if tl.load(tile_expert + tile) < 0:
        return
    lane = tl.arange(0, BLOCK_T)
    slot = tl.load(slots + tile * BLOCK_T + lane)
    column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    mask = (slot >= 0)[:, None] & (column < width)[None, :]
    start = (tl.where(slot >= 0, slot, 0) // choices).to(tl.int64) * stride
    rows = tl.load(hidden + start[:, None] + column[None, :], mask=mask)
    to = (tile * BLOCK_T + lane).to(tl.int64) * width
    tl.store(out + to[:, None] + column[None, :], rows, mask=mask)


@triton.jit(do_not_specialize=["chosen_stride", "weight_stride", "first", "experts"])
def add_choices(
    products,
    chosen,
    chosen_stride,
    weights,
    weight_stride,
    out,
    first,
    experts,
    width,
    CHOICES: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out[token] = sum over its choices on this rank, in their order, of weight * products[assignment]."""
    early.begin(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    sums = tl.zeros((BLOCK_WIDTH,), tl.float32)
    for choice in tl.static_range(CHOICES):
        assignment = token * CHOICES + choice
        local = tl.load(chosen + token * chosen_stride + choice) - first
        held = (local >= 0) & (local < experts)
        weight = tl.load(weights + token * weight_stride + choice)
        value = tl.load(products + assignment * width + column, mask=held & (column < width), other=0.0)
        if weights.dtype.element_ty == tl.float32:
            value = value.to(tl.float32) * weight
        else:
            value = (value.to(tl.float32) * weight.to(tl.float32)).to(tl.bfloat16).to(tl.float32)
        sums += tl.where(held, value, 0.0)
    tl.store(out + token * width + column, sums.to(out.dtype.element_ty), mask=column < width)


@triton.jit(do_not_specialize=["count", "splits"])
def add_splits(
    partial, out, count, splits, SPLITS_PADDED: tl.constexpr, BLOCK_COUNT: tl.constexpr, EARLY: tl.constexpr
):
    """out[count] = sum of partial float32[splits, count], always in the same tree."""
    early.begin(EARLY)
    place = tl.program_id(0).to(tl.int64) * BLOCK_COUNT + tl.arange(0, BLOCK_COUNT)
    split = tl.arange(0, SPLITS_PADDED)
    mask = (split < splits)[:, None] & (place < count)[None, :]
    parts = tl.load(partial + split[:, None] * count + place[None, :], mask=mask, other=0.0)
    tl.store(out + place, tl.sum(parts, 0).to(out.dtype.element_ty), mask=place < count)


@triton.jit(do_not_specialize=["n", "blocks"])
def decode(values, scales, out, n, k, blocks, EVEN: tl.constexpr, E4M3: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Grid (blocks of K, row blocks of one matrix, matrices): values [.., n, k] to out of the same shape."""
    matrix = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * BLOCK_ROWS
    block = tl.program_id(0)
    row = first + tl.arange(0, BLOCK_ROWS)
    inner = block * BLOCK + tl.arange(0, BLOCK)
    mask = (row < n)[:, None]
    if not EVEN:
        mask = mask & (inner < k)[None, :]
    at = ((matrix * n + row) * k)[:, None] + inner[None, :]
    scale = tl.load(scales + (matrix * tl.cdiv(n, BLOCK) + first // BLOCK) * blocks + block)
    codes = tl.load(values + at, mask=mask, other=0.0)
    tl.store(out + at, decoded(codes, scale, E4M3).to(out.dtype.element_ty), mask=mask)
