"""attend_rows in torch: gather, decode, one softmax over all entries. Contract: kernels/attention.py."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention import row_format
from kernels.row_format import RowFormat
from kernels.rows import gather_rows
from kernels.state import DeviceState


def prepare_attention(state: DeviceState, heads: int, form: RowFormat, dtype: torch.dtype, sinks: bool) -> None:
    """See kernels.attention. Nothing to get ready."""


def attend_rows(
    state: DeviceState,
    layer: int,
    queries: Tensor,
    out_rows: Tensor,
    scaling: float,
    out: Tensor,
    sinks: Tensor | None = None,
) -> None:
    """See kernels.attention."""
    rows = row_format(state, queries, out).decode(gather_rows(state, layer, out_rows))
    out.copy_(attend(queries, rows, out_rows >= 0, scaling, out.shape[2], sinks))


def attend(
    queries: Tensor, rows: Tensor, held: Tensor, scaling: float, latent: int, sinks: Tensor | None = None
) -> Tensor:
    """float32[B, H, latent] of `queries` [B, H, r + d] over float32 `rows` [B, k, r + d] where `held` bool[B, k].

    Rows that are not held must be zeros, and so is then the result of a batch row that holds none.
    """
    scores = torch.bmm(queries.float(), rows.transpose(1, 2)).mul_(scaling)
    scores.masked_fill_(~held.unsqueeze(1), torch.finfo(torch.float32).min)
    if sinks is None:
        return torch.bmm(scores.softmax(-1), rows[..., :latent])
    sink = sinks.view(1, -1, 1).expand(len(scores), -1, 1)
    return torch.bmm(torch.cat((scores, sink), -1).softmax(-1)[..., :-1], rows[..., :latent])
