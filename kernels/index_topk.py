"""index_topk: the lightning indexer's scores over paged keys, and an exact top-k. Reference in torch.

    score[t] = sum_h weights[h] * relu(queries[h] . key[t] * scale)        in fp32, t in 0..length-1

Exact: the k highest scores, ties to the lowest position, NaN below everything, ascending by position, -1 padded. Each
row of the batch is computed by itself with shapes that depend on its own length alone, so its result depends neither on
its neighbours nor on its place in the batch. That costs a loop over rows, and saves scoring padding.

`torch.topk` breaks ties arbitrarily; it only supplies the k-th score here, and among those equal to it a running count
takes the first. Rejected: a stable sort of all scores (four times as slow at 8k positions).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.check import Sizes
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
    """Top-k positions of each real row into `topk_out` int32[B, k]; every entry is written, padding is -1.

    `queries` [B, H, D] in the dtype of the keys (D * itemsize == index_row_bytes), `weights` float32[B, H]. A row
    whose context is not wholly granted gives -1 and counts Tripwire.UNGRANTED. Raises BadInput before any change.
    """
    sizes = Sizes()
    dim = state.geometry.index_row_bytes // queries.element_size()
    sizes.check("queries", queries, ("batch", "heads", dim), torch.float32, torch.bfloat16, torch.float16)
    sizes.check("weights", weights, ("batch", "heads"), torch.float32)
    sizes.check("topk_out", topk_out, ("batch", "k"), torch.int32)
    sizes.check("batch.seats", batch.seats, ("batch",), torch.int32, torch.int64)
    topk_out.fill_(-1)
    pages = state.index_keys[group].view(queries.dtype).view(-1, PAGE_TOKENS, dim)
    for row in active_rows(state, batch).nonzero().flatten().tolist():
        length = int(batch.lengths[row])
        held = state.index_table[int(batch.seats[row]), : pages_for(length)]
        if len(held) < pages_for(length) or bool((held < 0).any()):
            state.tripwires[Tripwire.UNGRANTED] += 1
            continue
        keys = pages.index_select(0, held).flatten(0, 1)[:length]
        chosen = top_positions(index_scores(queries[row], weights[row], keys, scale), sizes["k"])
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
