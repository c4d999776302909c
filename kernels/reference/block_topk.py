"""block_topk in torch, row by row. Contract: kernels/block_topk.py."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from kernels.reference.index_topk import row_keys
from kernels.state import DeviceState, StepBatch, Tripwire, active_rows
from protocol.units import PAGE_TOKENS, pages_for


def block_topk(
    state: DeviceState,
    group: int,
    queries: Tensor,
    batch: StepBatch,
    topk_out: Tensor,
    block_tokens: int,
    local: int,
) -> None:
    """See kernels.block_topk."""
    topk_out.fill_(-1)
    seats, lengths = batch.seats.tolist(), batch.lengths.tolist()
    blocks = topk_out.shape[2] * PAGE_TOKENS // block_tokens
    for row in active_rows(state, batch).nonzero().flatten().tolist():
        held = row_keys(state, group, seats[row], lengths[row])
        if held is None:
            state.tripwires[Tripwire.UNGRANTED] += 1
            continue
        keys, last = held.view(queries.dtype), torch.tensor([lengths[row] - 1], device=queries.device)
        scores = block_scores(queries[row].unsqueeze(1), keys, last, block_tokens)
        chosen = top_blocks(scores, last // block_tokens, blocks, local)
        write_pages(chosen[:, 0], lengths[row], block_tokens, topk_out[:, row])


def block_scores(queries: Tensor, keys: Tensor, positions: Tensor, block_tokens: int) -> Tensor:
    """float32[heads, S, blocks] of `queries` [heads, S, D] at `positions` int64[S] over `keys` [T, D]: those behind a
    query, and blocks that begin behind it, are -inf."""
    scores = torch.matmul(queries.float(), keys.float().t())
    behind = torch.arange(len(keys), device=keys.device) > positions.unsqueeze(1)
    scores.masked_fill_(behind, -inf)
    scores = torch.nn.functional.pad(scores, (0, -len(keys) % block_tokens), value=-inf)
    highest: Tensor = scores.unflatten(-1, (-1, block_tokens)).amax(-1)
    return highest


def top_blocks(scores: Tensor, newest: Tensor, blocks: int, local: int) -> Tensor:
    """bool[heads, S, n]: the blocks that each head takes by their `scores` float32[heads, S, n]. `newest` int64[S]:
    number of the block that each query lies in; those behind it are not taken."""
    number, newest = torch.arange(scores.shape[-1], device=scores.device), newest.unsqueeze(-1)
    reached = number <= newest
    scores = torch.where(reached & (number > newest - local), inf, scores)
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :blocks]
    taken = torch.zeros_like(scores, dtype=torch.bool)
    return taken.scatter_(-1, order, torch.ones_like(order, dtype=torch.bool)) & reached


def write_pages(taken: Tensor, length: int, block_tokens: int, out: Tensor) -> None:
    """Write the pages below `length` of the blocks `taken` bool[heads, n] to `out` int32[heads, k], ascending, -1
    padded."""
    pages = taken.repeat_interleave(block_tokens // PAGE_TOKENS, dim=-1)[:, : pages_for(length)]
    out.fill_(-1)
    for head, row in zip(pages, out, strict=True):
        (numbers,) = head.nonzero(as_tuple=True)
        row[: len(numbers)] = numbers
