"""index_topk: the lightning indexer's scores over paged keys, and an exact top-k.

    score[t] = sum_h weights[h] * relu(queries[h] . key[t] * scale)        in fp32, t in 0..length-1

Exact: the k highest scores, ties to the lowest position, NaN below everything, ascending by position, -1 padded. The
result of a row depends neither on its neighbours nor on its place in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import backend
from kernels.check import Sizes
from kernels.state import DeviceState, StepBatch


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
    backend(state).index_topk(state, group, queries, weights, batch, scale, topk_out)
