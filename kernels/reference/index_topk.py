"""index_topk in torch. Contract: kernels/index_topk.py.

Each row of the batch is computed by itself with shapes that depend on its own length alone. That costs a loop over
rows, and saves scoring padding.

`torch.topk` breaks ties arbitrarily; it only supplies the k-th score here, and among those equal to it a running count
takes the first. Rejected: a stable sort of all scores (four times as slow at 8k positions).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.layout import PAGE_TOKENS, pages_for
from kernels.state import DeviceState, StepBatch, Tripwire, active_rows


def index_topk(
    state: DeviceState,
    group: int,
    queries: Tensor,
    weights: Tensor,
    batch: StepBatch,
    scale: float,
    topk_out: Tensor,
) -> None:
    """See kernels.index_topk."""
    dim = state.geometry.index_row_bytes // queries.element_size()
    topk_out.fill_(-1)
    pages = state.index_keys[group].view(queries.dtype).view(-1, PAGE_TOKENS, dim)
    for row in active_rows(state, batch).nonzero().flatten().tolist():
        length = int(batch.lengths[row])
        held = state.index_table[int(batch.seats[row]), : pages_for(length)]
        if len(held) < pages_for(length) or bool((held < 0).any()):
            state.tripwires[Tripwire.UNGRANTED] += 1
            continue
        keys = pages.index_select(0, held).flatten(0, 1)[:length]
        chosen = top_positions(index_scores(queries[row], weights[row], keys, scale), topk_out.shape[1])
        topk_out[row, : len(chosen)] = chosen


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor, scale: float) -> Tensor:
    """float32[n] scores of keys [n, D] for queries [H, D] with weights float32[H]."""
    per_head = torch.mm(queries.float(), keys.float().t()).mul_(scale).relu_()
    return torch.mv(per_head.t(), weights)


def top_positions(scores: Tensor, k: int) -> Tensor:
    """Positions of the k highest of scores float32[n], ascending, ties to the lowest: int64[min(k, n)]."""
    if len(scores) <= k:
        return torch.arange(len(scores), device=scores.device)
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    last = scores.topk(k).values[-1]
    chosen = (scores >= last).nonzero().flatten()
    if len(chosen) == k:
        return chosen
    level = scores[chosen] == last
    return chosen[~level | (level.cumsum(0) <= k - (~level).sum())]
