"""prompt_topk: index_topk for the tokens of a block of prompts, each with the positions up to its own as context.

Where keys are in fp8 or fp4, queries are quantized by token and head, to e4m3 with a float32 scale: so the
authors of DeepSeek-V3.2 publish it (kernels/encode.py: quantized_queries). Decode steps compare keys with queries as
they are, and so does prefill on a CPU (worker/runners/prompt.py: Expanded). benchmarks/fp8_queries.py measures the
difference: of the 2,048 best positions by exact queries, at 32k and 128k, at least 96 % are selected; exact scores of
what is selected sum up to at least 99.9 % of the best sum.

On Hopper fp8, fp4 and bfloat16 keys of 128 values are searched in one launch or two for a whole block
(kernels/cuda/prompt_index.py); elsewhere, and float32 keys, whose products stay float32, prompt by prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import backend
from kernels.check import Sizes, check_number
from kernels.index_topk import QUERY_DTYPES, index_key_format
from kernels.prompt_pieces import PromptPieces
from kernels.state import DeviceState
from protocol.errors import BadInput
from protocol.units import TOPK_MAX


def prompt_topk(
    state: DeviceState,
    group: int,
    pieces: PromptPieces,
    queries: Tensor,
    weights: Tensor,
    scale: float,
    topk_out: Tensor,
    rows_out: Tensor | None = None,
) -> None:
    """Top-k positions of the tokens of `pieces` into `topk_out` int32[rows, k], and where they lie in the slab into
    `rows_out`, alike; -1 padded. Rows of no piece stay as they are.

    As index_topk, with a context of start + i + 1 positions for token i of a piece, whose keys are written; `queries`
    float32|bfloat16[rows, H, D], `weights` float32[rows, H], contiguous, `pieces` on their device. Seats need not be
    set up. A token whose context is not wholly granted gives -1 and counts Tripwire.UNGRANTED. Never waits for the
    device. Raises BadInput before any change.
    """
    check_number("group", group, state.geometry.groups)
    sizes = Sizes()
    sizes.check("queries", queries, ("tokens", "heads", "dim"), *QUERY_DTYPES)
    sizes.check("weights", weights, ("tokens", "heads"), torch.float32)
    sizes.check("topk_out", topk_out, ("tokens", "k"), torch.int32)
    if rows_out is not None:
        sizes.check("rows_out", rows_out, ("tokens", "k"), torch.int32)
    check_number("k", sizes["k"] - 1, TOPK_MAX)
    for piece in pieces.pieces:
        check_number("seat", piece.seat, state.seats)
        if not 0 <= piece.row <= sizes["tokens"] - piece.tokens or piece.start < 0:
            problem = f"does not lie in a block of {sizes['tokens']} rows"
            raise BadInput(problem, field="pieces", value=piece, remedy="count rows from the first one of the block")
    keys = index_key_format(state, sizes["dim"], queries.dtype)
    if pieces.pieces:
        backend(state, __name__).prompt_topk(state, group, pieces, queries, weights, keys, scale, topk_out, rows_out)


def prepare_prompt(state: DeviceState, heads: int, dim: int, dtype: torch.dtype) -> None:
    """Get ready for `queries` [S, heads, dim] of `dtype`: compile, load, allocate. At worker start.

    Raises as kernels.index_topk.prepare_index does.
    """
    backend(state, __name__).prepare_prompt(state, heads, index_key_format(state, dim, dtype), dtype)
