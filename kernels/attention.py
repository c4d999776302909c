"""attend_rows: absorbed attention of each batch row over the device rows that swap-in named.

    score[j] = scaling * queries[h] . (latent, rope)[out_rows[j]]        out[h] = sum_j softmax(score)[j] * latent[j]

With `sinks` the softmax of head h has one more score, sinks[h], which no row has: shares of rows then add up to less
than 1.

Heads attend to latents directly, so that one row of r + d values is key and value of all of them. Scores, softmax and
the sum are float32 whatever the rows hold. The sum runs over the entries of `out_rows` in the order given, which is
ascending position, and how it is split depends on shapes alone: the same bits wherever swap-in put a row, whatever the
neighbours in the batch, inside a graph and outside.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import backend
from kernels.check import Sizes, check_number
from kernels.row_format import RowFormat, kv_row_format_of
from kernels.state import DeviceState


def attend_rows(
    state: DeviceState,
    layer: int,
    queries: Tensor,
    out_rows: Tensor,
    scaling: float,
    out: Tensor,
    sinks: Tensor | None = None,
) -> None:
    """Attention of `queries` [B, H, r + d] over rows `out_rows` int32[B, k] of `layer` into `out` [B, H, r].

    `queries` and `out` are both float32 or both bfloat16, contiguous. Rows are in the format of kernels/row_format.py
    that has geometry.row_bytes for r and d. Entries of -1 take no part; a batch row of -1 alone (padding) gives zeros.
    `sinks` float32[H], contiguous, are logits as scores are, after scaling; one of -inf is as none. Raises BadInput
    before any change; never waits for the device.
    """
    check_number("layer", layer, state.geometry.layers)
    sizes = Sizes()
    sizes.check("queries", queries, ("batch", "heads", "dim"), torch.float32, torch.bfloat16)
    sizes.check("out_rows", out_rows, ("batch", "k"), torch.int32)
    sizes.check("out", out, ("batch", "heads", "latent"), queries.dtype)
    if sinks is not None:
        sizes.check("sinks", sinks, ("heads",), torch.float32)
    row_format(state, queries, out)
    backend(state, __name__).attend_rows(state, layer, queries, out_rows, scaling, out, sinks)


def prepare_attention(
    state: DeviceState, heads: int, latent: int, rope: int, dtype: torch.dtype, *, sinks: bool = False
) -> None:
    """Compile and load all that attend_rows launches for queries [B, heads, latent + rope] of `dtype` and up to
    geometry.topk entries, whatever B, with `sinks` or without. At worker start, before any capture. Raises BadInput
    when no row format fits."""
    form = kv_row_format_of(state.geometry.row_bytes, latent, rope)
    backend(state, __name__).prepare_attention(state, heads, form, dtype, sinks)


def row_format(state: DeviceState, queries: Tensor, out: Tensor) -> RowFormat:
    """The format of the rows that `queries` [B, H, r + d] and `out` [B, H, r] speak of. Raises BadInput."""
    latent = out.shape[2]
    return kv_row_format_of(state.geometry.row_bytes, latent, queries.shape[2] - latent)
