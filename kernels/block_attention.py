"""Attention of grouped-query heads over K and V: over the pages that a KV head selected, and over all rows of a dense
layer.

    score[t] = scaling * queries[h] . K[t]        out[h] = sum_t softmax(score)[t] * V[t]

The heads h of one KV head are neighbours. t runs over the positions of the selected pages that lie below the length, in
the order given, which is ascending. Scores, softmax and the sum are float32 whatever the rows hold. A row's bits follow
from its own inputs and from the number of pages k alone: wherever swap_in put a page, whatever the neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import backend
from kernels.check import Sizes, check_number
from kernels.state import DeviceState, StepBatch
from protocol.errors import BadInput


def attend_pages(
    state: DeviceState,
    layer: int,
    queries: Tensor,
    pages: Tensor,
    out_rows: Tensor,
    batch: StepBatch,
    scaling: float,
    out: Tensor,
) -> None:
    """Attention of `queries` [B, H, D] over `pages` int32[heads, B, k], which lie at the device rows `out_rows` of
    swap_in, into `out` [B, H, D].

    `queries` and `out` are both float32 or both bfloat16, as K and V are. Entries of -1 take no part; a batch row
    without any (padding) gives zeros. Raises BadInput before any change.
    """
    sizes = _check(state, layer, queries, batch, out)
    check_number("layer", layer - state.geometry.dense, state.geometry.layers - state.geometry.dense)
    sizes.check("pages", pages, ("kv_heads", "batch", "k"), torch.int32)
    sizes.check("out_rows", out_rows, ("kv_heads", "batch", "k"), torch.int32)
    backend(state, __name__).attend_pages(state, layer, queries, pages, out_rows, batch, scaling, out)


def attend_dense(
    state: DeviceState, layer: int, queries: Tensor, batch: StepBatch, scaling: float, out: Tensor
) -> None:
    """Attention of `queries` [B, H, D] over all rows below each length of a dense layer, into `out` [B, H, D].

    Dtypes as attend_pages has them; padding gives zeros. Raises BadInput before any change.
    """
    _check(state, layer, queries, batch, out)
    check_number("layer", layer, state.geometry.dense)
    backend(state, __name__).attend_dense(state, layer, queries, batch, scaling, out)


def _check(state: DeviceState, layer: int, queries: Tensor, batch: StepBatch, out: Tensor) -> Sizes:
    """Raise BadInput unless `queries` and `out` fit each other and rows of K and V."""
    g = state.geometry
    check_number("layer", layer, g.layers)
    sizes = Sizes(kv_heads=g.heads)
    sizes.check("queries", queries, ("batch", "heads", "dim"), torch.float32, torch.bfloat16)
    sizes.check("out", out, ("batch", "heads", "dim"), queries.dtype)
    sizes.check("batch.lengths", batch.lengths, ("batch",), torch.int32, torch.int64)
    plane = sizes["dim"] * queries.element_size()
    if sizes["heads"] % g.heads or set(g.planes) != {plane} or len(g.planes) != 2 * g.heads:
        raise BadInput(
            f"{g.heads} KV heads have planes of {sorted(set(g.planes))} bytes",
            field="queries",
            value=f"{sizes['heads']} heads of {plane} bytes",
            remedy="pass a multiple of the KV heads, and values as K and V have them",
        )
    return sizes
