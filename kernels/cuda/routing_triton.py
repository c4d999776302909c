"""Rows on their way to experts, in Triton. Launched by kernels/cuda/routing.py.

Scores are compared as the model library's router compares them: a sigmoid, a bias for the choice alone, groups by the
sum of their best two. Each row is one program's, so that it depends on itself alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def choose(
    logits,
    bias,
    real,
    weights,
    chosen,
    scaling,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_CHOSEN: tl.constexpr,
    CHOICES: tl.constexpr,
    CHOICES_PADDED: tl.constexpr,
    NORMALIZES: tl.constexpr,
    HAS_REAL: tl.constexpr,
):
    """Row of one program: CHOICES of EXPERTS from GROUPS_CHOSEN of GROUPS; -1 where it is not real."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, EXPERTS)
    score = 1.0 / (1.0 + tl.exp(-tl.load(logits + row * EXPERTS + place)))
    left = score + tl.load(bias + place)
    if GROUPS_CHOSEN < GROUPS:
        by_group = tl.reshape(left, (GROUPS, EXPERTS // GROUPS))
        member, group = tl.arange(0, EXPERTS // GROUPS), tl.arange(0, GROUPS)
        best = tl.argmax(by_group, 1)
        others = tl.where(member[None, :] == best[:, None], LOWEST, by_group)
        of_group = tl.max(by_group, 1) + tl.max(others, 1)
        kept = group < 0
        for _ in tl.static_range(GROUPS_CHOSEN):
            kept = kept | (group == tl.argmax(tl.where(kept, LOWEST, of_group), 0))
        left = tl.reshape(tl.where(kept[:, None], by_group, LOWEST), (EXPERTS,))
    lane = tl.arange(0, CHOICES_PADDED)
    ids = tl.full((CHOICES_PADDED,), -1, tl.int32)
    values = tl.zeros((CHOICES_PADDED,), tl.float32)
    for choice in tl.static_range(CHOICES):
        expert = tl.argmax(left, 0)
        ids = tl.where(lane == choice, expert, ids)
        values = tl.where(lane == choice, tl.sum(tl.where(place == expert, score, 0.0), 0), values)
        left = tl.where(place == expert, LOWEST, left)
    if NORMALIZES:
        values = values / (tl.sum(values, 0) + 1e-20)
    if HAS_REAL:
        ids = tl.where(tl.load(real + row), ids, -1)
    tl.store(chosen + row * CHOICES + lane, ids, mask=lane < CHOICES)
    tl.store(weights + row * CHOICES + lane, values * scaling, mask=lane < CHOICES)


@triton.jit(do_not_specialize=["count"])
def move(
    packed,
    words,
    chosen,
    weights,
    packed_words,
    width,
    choices,
    count,
    CHOICES_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKS: tl.constexpr,
):
    """Grid (rows, pieces of the width): a row's words between `packed` and the others; of those, `count` rows are."""
    row = tl.program_id(0).to(tl.int64)
    there = row < count
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (place < width) & there
    at, alone = packed + row * packed_words + place, words + row * width + place
    if PACKS:
        tl.store(at, tl.load(alone, mask=mask), mask=mask)
    else:
        tl.store(alone, tl.load(at, mask=mask), mask=mask)
    if tl.program_id(1) == 0:
        lane = tl.arange(0, CHOICES_PADDED)
        known = (lane < choices) & there
        ids = packed + row * packed_words + width + lane
        own = row * choices + lane
        if PACKS:
            tl.store(ids, tl.load(chosen + own, mask=known, other=-1), mask=lane < choices)
            tl.store(ids + choices, tl.load(weights + own, mask=known), mask=known)
        else:
            tl.store(chosen + own, tl.load(ids, mask=known), mask=known)
            tl.store(weights + own, tl.load(ids + choices, mask=known), mask=known)


@triton.jit
def add_parts(parts, out, part_stride, width, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, pieces of the width): the sum of PARTS parts in their order, in float32."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < width
    at = parts + row * width + place
    total = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(at + part * part_stride, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + place, total.to(out.dtype.element_ty), mask=mask)
