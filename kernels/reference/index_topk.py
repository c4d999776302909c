"""index_topk in torch. Contract: kernels/index_topk.py.

Each row of the batch is computed by itself with shapes that depend on its own length alone. That costs a loop over
rows, and saves scoring padding. Calls of torch are most of its time where contexts are short, so that the loop has as
few as it can.

`torch.topk` breaks ties arbitrarily; it only supplies the k-th score here, and among those equal to it a running count
takes the first. It ranks NaN above all: where the first of its values is one, it runs again on order keys, integers
that compare as scores do and have NaN below -inf. Rejected: order keys always (six calls of torch for each row),
a stable sort of all scores (four times as slow at 8k positions).
"""

from __future__ import annotations

from math import isnan
from typing import Final

import torch
from torch import Tensor

from kernels.row_format import RowFormat
from kernels.state import DeviceState, StepBatch, Tripwire, active_rows
from protocol.units import pages_for

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
    seats, lengths, k = batch.seats.tolist(), batch.lengths.tolist(), topk_out.shape[1]
    each_queries, each_weights, each_out = queries.unbind(), weights.unbind(), topk_out.unbind()
    for row in active_rows(state, batch).nonzero().flatten().tolist():
        held = row_keys(state, group, seats[row], lengths[row])
        if held is None:
            state.tripwires[Tripwire.UNGRANTED] += 1
            continue
        scores = index_scores(each_queries[row], each_weights[row], keys.decode(held), scale)
        chosen = top_positions(scores, k)
        each_out[row][: chosen.shape[0]] = chosen


def row_keys(state: DeviceState, group: int, seat: int, length: int) -> Tensor | None:
    """Index keys uint8[length, index_row_bytes] of a seat's context, None when it is not wholly granted."""
    pages = pages_for(length)
    held = state.index_table[seat, :pages]
    if held.shape[0] < pages or held.min().item() < 0:
        return None
    return state.key_pages[group].index_select(0, held).flatten(0, 1)[:length]


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor, scale: float) -> Tensor:
    """float32[n] scores of keys [n, D] for queries [H, D] with weights float32[H]."""
    per_head = torch.mm(queries.float(), keys.float().t()).mul_(scale).relu_()
    return torch.mv(per_head.t(), weights)


def top_positions(scores: Tensor, k: int) -> Tensor:
    """Positions of the k highest of scores float32[n], ascending, ties to the lowest: int64[min(k, n)]."""
    count = scores.shape[0]
    if count <= k:
        return torch.arange(count, device=scores.device)
    highest = scores.topk(k).values
    if isnan(highest[0]):
        scores = order_keys(scores)
        highest = scores.topk(k).values
    last = highest[-1]
    chosen = (scores >= last).nonzero().flatten()
    if chosen.shape[0] == k:
        return chosen
    level = scores[chosen] == last
    return chosen[~level | (level.cumsum(0) <= k - (~level).sum())]


def order_keys(scores: Tensor) -> Tensor:
    """int32[n] that compare as float32[n] do: NaN below everything, both zeros equal."""
    bits = (scores + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).masked_fill(scores.isnan(), LOWEST)
