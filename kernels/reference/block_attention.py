"""Attention over pages and over dense layers in torch, row by row. Contract: kernels/block_attention.py."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.rows import gather_rows, read_dense_rows
from kernels.state import DeviceState, StepBatch, active_rows
from protocol.units import PAGE_TOKENS


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
    """See kernels.block_attention."""
    g, offsets = state.geometry, torch.arange(PAGE_TOKENS)
    each = queries.shape[1] // g.heads
    for head in range(g.heads):
        positions = (pages[head].long().unsqueeze(-1) * PAGE_TOKENS + offsets).flatten(1)
        held = (pages[head] >= 0).repeat_interleave(PAGE_TOKENS, dim=1) & (positions < batch.lengths.unsqueeze(1))
        key, value = (
            gather_rows(state, layer, out_rows[head], plane).view(queries.dtype).unflatten(-1, (PAGE_TOKENS, -1))
            for plane in g.planes_of(head)
        )
        own = slice(head * each, (head + 1) * each)
        out[:, own] = attend(queries[:, own], key.flatten(1, 2), value.flatten(1, 2), held, scaling)


def attend_dense(
    state: DeviceState, layer: int, queries: Tensor, batch: StepBatch, scaling: float, out: Tensor
) -> None:
    """See kernels.block_attention."""
    g, seats, lengths = state.geometry, batch.seats.tolist(), batch.lengths.tolist()
    each = queries.shape[1] // g.heads
    out.zero_()
    for row in active_rows(state, batch).nonzero().flatten().tolist():
        held = torch.ones(1, lengths[row], dtype=torch.bool)
        for head in range(g.heads):
            key, value = (
                read_dense_rows(state, layer, seats[row], lengths[row], plane).view(queries.dtype).unsqueeze(0)
                for plane in g.planes_of(head)
            )
            own = slice(head * each, (head + 1) * each)
            out[row : row + 1, own] = attend(queries[row : row + 1, own], key, value, held, scaling)


def attend(queries: Tensor, key: Tensor, value: Tensor, held: Tensor, scaling: float) -> Tensor:
    """float32[B, h, D] of `queries` [B, h, D] of one KV head over `key` and `value` [B, T, D] where `held` bool[B, T];
    zeros for a batch row that holds none."""
    held = held.unsqueeze(1)
    scores = torch.bmm(queries.float(), key.float().transpose(1, 2)).mul_(scaling)
    shares = scores.masked_fill_(~held, torch.finfo(torch.float32).min).softmax(-1).masked_fill(~held, 0)
    return torch.bmm(shares, value.float().masked_fill(~held.transpose(1, 2), 0))
