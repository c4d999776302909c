"""Gather-attention in Triton. Launched by kernels/cuda/attention.py.

One program attends BLOCK_HEADS heads of one batch row to one span of its entries, BLOCK_ROWS at a time: the rows are
gathered through `out_rows` straight into shared memory, serve as keys and, their latent part, as values, and are read
from memory once per block of heads (the blocks of one batch row run side by side, so all but one of them hit L2).

    grid      (head blocks, splits, batch)
    partial   float32 [B, splits, H, LATENT]   sum of exp2(score - peak) * latent over the span, not normalised
    peak      float32 [B, splits, H]           highest score of the span in units of log2, -inf when none is held
    total     float32 [B, splits, H]           sum of exp2(score - peak)

With one split the first kernel writes the output itself; otherwise `combine` adds the splits, always in the same tree.

Two things in the loop are for Triton's sake, on Hopper. Places are loaded a turn ahead, so that the gather of the next
block does not begin with a wait for them. And the softmax stands in a branch that is always taken: Triton gives the
first of two chained products to one warp group per 64 heads, which with 64 heads means that both groups compute all of
it; it does not follow the chain through a branch, and lets each compute half. Together they take off a tenth. Adding
the two products after scaling keeps Triton from chaining these two in turn.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(
    rows,
    place,
    product: tl.constexpr,
    KIND: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    E4M3: tl.constexpr,  # the card converts fp8
    LATENT_PADDED: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
):
    """Latents [rows, LATENT_PADDED] and rope keys [rows, ROPE_PADDED] at device rows `place`; zeros where it is -1."""
    latent = tl.arange(0, LATENT_PADDED)
    rope = tl.arange(0, ROPE_PADDED)
    held = place >= 0
    start = tl.where(held, place, 0).to(tl.int64)[:, None]
    in_latent = held[:, None] & (latent < LATENT)[None, :]
    in_rope = held[:, None] & (rope < ROPE)[None, :]
    if KIND == 2:
        codes = rows + start * ROW_BYTES + latent[None, :]
        if E4M3:
            codes = codes.to(tl.pointer_type(tl.float8e4nv))
            values = tl.load(codes, mask=in_latent, other=0.0).to(tl.float32)
        else:  # sign, exponent and mantissa to their places in float32, whose exponent counts from 120 further down
            code = tl.load(codes, mask=in_latent, other=0).to(tl.uint32)
            values = (((code & 0x80) << 24) | ((code & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
        groups: tl.constexpr = LATENT_PADDED // GROUP
        group = tl.arange(0, groups)
        scales = tl.load(
            rows.to(tl.pointer_type(tl.float32)) + start * (ROW_BYTES // 4) + LATENT // 4 + group[None, :],
            mask=held[:, None] & (group < LATENT // GROUP)[None, :],
            other=0.0,
        )
        values = values.reshape(place.shape[0], groups, GROUP) * scales[:, :, None]
        keys_latent = values.reshape(place.shape[0], LATENT_PADDED).to(product)
        plain = rows.to(tl.pointer_type(tl.bfloat16)) + start * (ROW_BYTES // 2) + ROW_BYTES // 2 - ROPE
    else:
        plain_type: tl.constexpr = tl.bfloat16 if KIND == 1 else tl.float32
        plain = rows.to(tl.pointer_type(plain_type)) + start * (LATENT + ROPE)
        keys_latent = tl.load(plain + latent[None, :], mask=in_latent, other=0.0).to(product)
        plain += LATENT
    return keys_latent, tl.load(plain + rope[None, :], mask=in_rope, other=0.0).to(product)


@triton.jit
def sink_shares(sink, is_head, level):
    """Shares of the sinks at `sink` where shares count from `level`. Added once a result, where it is divided."""
    logit = tl.load(sink, mask=is_head, other=float("-inf")) * 1.4426950408889634
    return tl.exp2(logit - tl.where(level == float("-inf"), 0.0, level))


@triton.jit(do_not_specialize=["heads", "splits", "span"])
def attend(
    rows,
    queries,
    out_rows,
    out,
    partial,
    peak,
    total,
    sinks,  # float32 [H]; None without SINKS
    scale,  # scaling * log2(e)
    heads,
    k,
    splits,
    span,  # entries of one split, a multiple of BLOCK_ROWS
    KIND: tl.constexpr,  # 0 float32, 1 bfloat16, 2 fp8
    WIDE: tl.constexpr,  # products in float32
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    E4M3: tl.constexpr,  # the card converts fp8
    LATENT_PADDED: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    SINKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(0) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    latent = tl.arange(0, LATENT_PADDED)
    rope = tl.arange(0, ROPE_PADDED)
    is_head = head < heads
    query = queries + (row * heads + head)[:, None] * (LATENT + ROPE)
    query_latent = tl.load(query + latent[None, :], mask=is_head[:, None] & (latent < LATENT)[None, :], other=0.0)
    query_rope = tl.load(query + LATENT + rope[None, :], mask=is_head[:, None] & (rope < ROPE)[None, :], other=0.0)
    product: tl.constexpr = tl.float32 if WIDE else tl.bfloat16
    query_latent = query_latent.to(product)
    query_rope = query_rope.to(product)

    best = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_HEADS,), tl.float32)
    sums = tl.zeros((BLOCK_HEADS, LATENT_PADDED), tl.float32)
    first = split * span
    end = min(first + span, k)
    entry = first + tl.arange(0, BLOCK_ROWS)
    place = tl.load(out_rows + row * k + entry, mask=entry < end, other=-1)
    for begin in tl.range(first, end, BLOCK_ROWS, num_stages=STAGES):
        keys_latent, keys_rope = load_rows(
            rows, place, product, KIND, LATENT, ROPE, GROUP, ROW_BYTES, E4M3, LATENT_PADDED, ROPE_PADDED
        )
        held = place >= 0
        entry = begin + BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        place = tl.load(out_rows + row * k + entry, mask=entry < end, other=-1)  # used in the next turn
        scores = tl.dot(query_latent, keys_latent.T, input_precision="ieee") * scale
        scores += tl.dot(query_rope, keys_rope.T, input_precision="ieee") * scale
        scores = tl.where(held[None, :], scores, float("-inf"))
        shares = scores
        fade = best
        if splits > 0:  # always; see the top of this file
            higher = tl.maximum(best, tl.max(scores, 1))
            level = tl.where(higher == float("-inf"), 0.0, higher)
            shares = tl.exp2(scores - level[:, None])
            fade = tl.exp2(best - level)
            weight = weight * fade + tl.sum(shares, 1)
            best = higher
        sums = tl.dot(shares.to(product), keys_latent, sums * fade[:, None], input_precision="ieee")

    is_out = is_head[:, None] & (latent < LATENT)[None, :]
    if ONE_SPLIT:
        if SINKS:
            weight += sink_shares(sinks + head, is_head, best)
        place = out + (row * heads + head)[:, None] * LATENT + latent[None, :]
        result = sums / tl.where(weight > 0, weight, 1.0)[:, None]
        tl.store(place, result.to(out.dtype.element_ty), mask=is_out)
    else:
        line = (row * splits + split) * heads + head
        tl.store(partial + line[:, None] * LATENT + latent[None, :], sums, mask=is_out)
        tl.store(peak + line, best, mask=is_head)
        tl.store(total + line, weight, mask=is_head)


@triton.jit(do_not_specialize=["heads", "splits"])
def combine(
    out,
    partial,
    peak,
    total,
    sinks,
    heads,
    splits,
    LATENT: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """A block of the latent of one head of one batch row: grid (latent blocks, heads, batch)."""
    latent = tl.program_id(0) * BLOCK_LATENT + tl.arange(0, BLOCK_LATENT)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    split = tl.arange(0, SPLITS_PADDED)
    line = (row * splits + split) * heads + head
    best = tl.load(peak + line, mask=split < splits, other=float("-inf"))
    level = tl.max(best, 0)
    fade = tl.exp2(best - tl.where(level == float("-inf"), 0.0, level))
    weight = tl.sum(tl.load(total + line, mask=split < splits, other=0.0) * fade, 0)
    if SINKS:
        weight += sink_shares(sinks + head, head < heads, level)
    mask = (split < splits)[:, None] & (latent < LATENT)[None, :]
    parts = tl.load(partial + line[:, None] * LATENT + latent[None, :], mask=mask, other=0.0)
    result = tl.sum(parts * fade[:, None], 0) / tl.where(weight > 0, weight, 1.0)
    tl.store(out + (row * heads + head) * LATENT + latent, result.to(out.dtype.element_ty), mask=latent < LATENT)
