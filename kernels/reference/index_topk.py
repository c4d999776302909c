"""index_topk in torch. Contract: kernels/index_topk.py.

Each row of the batch is computed by itself with shapes that depend on its own length alone. That costs a loop over
rows, and saves scoring padding.

`torch.topk` breaks ties arbitrarily; it only supplies the k-th score here, and among those equal to it a running count
takes the first. It runs on order keys, integers that compare as scores do, so that NaN has its place below -inf.
Rejected: a stable sort of all scores (four times as slow at 8k positions).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernels.row_format import RowFormat
from kernels.state import DeviceState, StepBatch, Tripwire, active_rows
from protocol.units import PAGE_TOKENS, pages_for

LOWEST: Final = -(2**31)


def prepare_index(state: DeviceState, heads: int, keys: RowFormat, queries: torch.dtype) -> None:
    """See kernels.index_topk. Nothing to get ready."""


def index_topk(
    state: DeviceState,
    group: int,
    queries: Tensor,
    weights: Tensor,
    batch: StepBatch,
    keys: RowFormat,
    scale: float,
    topk_out: Tensor,
) -> None:
    """See kernels.index_topk."""
    topk_out.fill_(-1)
    for row in active_rows(state, batch).nonzero().flatten().tolist():
        held = row_keys(state, group, int(batch.seats[row]), int(batch.lengths[row]))
        if held is None:
            state.tripwires[Tripwire.UNGRANTED] += 1
            continue
        scores = index_scores(queries[row], weights[row], keys.decode(held), scale)
        chosen = top_positions(scores, topk_out.shape[1])
        topk_out[row, : len(chosen)] = chosen


def row_keys(state: DeviceState, group: int, seat: int, length: int) -> Tensor | None:
    """Index keys uint8[length, index_row_bytes] of a seat's context, None when it is not wholly granted."""
    pages = pages_for(length)
    held = state.index_table[seat, :pages]
    if len(held) < pages or bool((held < 0).any()):
        return None
    every = state.index_keys[group].view(-1, PAGE_TOKENS, state.geometry.index_row_bytes)
    return every.index_select(0, held).flatten(0, 1)[:length]


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor, scale: float) -> Tensor:
    """float32[n] scores of keys [n, D] for queries [H, D] with weights float32[H]."""
    per_head = torch.mm(queries.float(), keys.float().t()).mul_(scale).relu_()
    return torch.mv(per_head.t(), weights)


def top_positions(scores: Tensor, k: int) -> Tensor:
    """Positions of the k highest of scores float32[n], ascending, ties to the lowest: int64[min(k, n)]."""
    if len(scores) <= k:
        return torch.arange(len(scores), device=scores.device)
    keys = order_keys(scores)
    last = keys.topk(k).values[-1]
    chosen = (keys >= last).nonzero().flatten()
    if len(chosen) == k:
        return chosen
    level = keys[chosen] == last
    return chosen[~level | (level.cumsum(0) <= k - (~level).sum())]


def order_keys(scores: Tensor) -> Tensor:
    """int32[n] that compare as float32[n] do: NaN below everything, both zeros equal."""
    bits = (scores + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).masked_fill(scores.isnan(), LOWEST)
