"""prompt_topk in torch, one token at a time. Contract: kernels/prompt_topk.py."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.index_topk import index_scores, row_keys, top_positions
from kernels.row_format import RowFormat
from kernels.state import DeviceState, Tripwire


def prepare_prompt(state: DeviceState, heads: int, keys: RowFormat, queries: torch.dtype) -> None:
    """See kernels.prompt_topk. Nothing to get ready."""


def prompt_topk(
    state: DeviceState,
    group: int,
    seat: int,
    start: int,
    queries: Tensor,
    weights: Tensor,
    keys: RowFormat,
    scale: float,
    topk_out: Tensor,
) -> None:
    """See kernels.prompt_topk."""
    topk_out.fill_(-1)
    held = row_keys(state, group, seat, start + len(queries))
    if held is None:
        state.tripwires[Tripwire.UNGRANTED] += 1
        return
    context = keys.decode(held)
    for token, (own, heads) in enumerate(zip(queries, weights, strict=True)):
        chosen = top_positions(index_scores(own, heads, context[: start + token + 1], scale), topk_out.shape[1])
        topk_out[token, : len(chosen)] = chosen
