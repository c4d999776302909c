"""block_topk: what each head of a block-sparse model selects, by the rule of MiniMax-M3.

    score[h][b] = max of queries[h] . key[t], in float32, over the positions t of block b below the length

A block is `block_tokens` neighbouring positions. The `local` newest blocks count as highest. Of the others, heads take
those with the highest scores, `blocks` in all, ties to the lowest block. The selection is given as pages of 64 tokens:
each block's pages that begin below the length, ascending, -1 padded. A row's result depends neither on its neighbours
nor on its place in the batch.

All heads compare with one index key of a token, which is in the dtype of the queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import backend
from kernels.check import Sizes, check_number
from kernels.index_topk import QUERY_DTYPES
from kernels.state import DeviceState, StepBatch
from protocol.errors import BadInput
from protocol.units import PAGE_TOKENS


def block_topk(
    state: DeviceState,
    group: int,
    queries: Tensor,
    batch: StepBatch,
    topk_out: Tensor,
    *,
    block_tokens: int,
    local: int = 1,
) -> None:
    """Pages that each head of each real row selects into `topk_out` int32[heads, B, k]; every entry is written.

    `queries` float32|bfloat16[B, heads, D]; k a multiple of the pages of a block, which has `block_tokens` tokens. A
    row whose context is not wholly granted gives -1 and counts Tripwire.UNGRANTED. Raises BadInput before any change.
    """
    check_number("group", group, state.geometry.groups)
    sizes = Sizes(heads=state.geometry.heads)
    sizes.check("queries", queries, ("batch", "heads", "dim"), *QUERY_DTYPES)
    sizes.check("topk_out", topk_out, ("heads", "batch", "k"), torch.int32)
    sizes.check("batch.seats", batch.seats, ("batch",), torch.int32, torch.int64)
    sizes.check("batch.lengths", batch.lengths, ("batch",), torch.int32, torch.int64)
    key_bytes = sizes["dim"] * queries.element_size()
    sizes.check("state.index_keys", state.index_keys[group], ("keys", key_bytes), torch.uint8)
    pages = block_tokens // PAGE_TOKENS
    if block_tokens % PAGE_TOKENS or not pages or sizes["k"] % pages or not 0 <= local <= sizes["k"] // pages:
        raise BadInput(
            f"blocks of {block_tokens} tokens, {local} local ones, do not fill {sizes['k']} pages",
            field="block_tokens",
            value=block_tokens,
            remedy=f"pass a multiple of {PAGE_TOKENS}, and room for whole blocks",
        )
    backend(state, __name__).block_topk(state, group, queries, batch, topk_out, block_tokens, local)
