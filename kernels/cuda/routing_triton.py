"""The choice of experts, in Triton. Launched by kernels/cuda/routing.py.

Scores are compared as the model library's router compares them: a sigmoid, a bias for the choice alone, groups by the
sum of their best two. Each row is one program's, so that it depends on itself alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from kernels.cuda.early_triton import begin

LOWEST = tl.constexpr(float("-inf"))


@triton.jit(do_not_specialize=["stride", "count"])
def choose(
    logits,
    bias,
    real,
    weights,
    chosen,
    stride,  # words between rows of both
    count,
    scaling,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_CHOSEN: tl.constexpr,
    CHOICES: tl.constexpr,
    CHOICES_PADDED: tl.constexpr,
    NORMALIZES: tl.constexpr,
    HAS_REAL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Row of one program: CHOICES of EXPERTS from GROUPS_CHOSEN of GROUPS; -1 where it is not real, or none of the
    first `count`."""
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHOICES_PADDED)
    if row >= count:
        tl.store(chosen + row * stride + lane, -1, mask=lane < CHOICES)
        return
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
    tl.store(chosen + row * stride + lane, ids, mask=lane < CHOICES)
    tl.store(weights + row * stride + lane, values * scaling, mask=lane < CHOICES)
