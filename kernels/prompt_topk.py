"""prompt_topk: index_topk for the tokens of a prompt, each with the positions up to its own as context."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import backend
from kernels.check import Sizes, check_number
from kernels.index_topk import QUERY_DTYPES, index_key_format
from kernels.state import DeviceState
from protocol.units import TOPK_MAX


def prompt_topk(
    state: DeviceState,
    group: int,
    seat: int,
    start: int,
    queries: Tensor,
    weights: Tensor,
    scale: float,
    topk_out: Tensor,
) -> None:
    """Top-k positions of the tokens at start..start+S-1 of `seat` into `topk_out` int32[S, k].

    As index_topk, with token i's context of start + i + 1 positions, whose keys are written; `queries`
    float32|bfloat16[S, H, D], `weights` float32[S, H]. The seat need not be set up. Never waits for the device. Raises
    BadInput before any change.
    """
    check_number("group", group, state.geometry.groups)
    check_number("seat", seat, state.seats)
    sizes = Sizes()
    sizes.check("queries", queries, ("tokens", "heads", "dim"), *QUERY_DTYPES)
    sizes.check("weights", weights, ("tokens", "heads"), torch.float32)
    sizes.check("topk_out", topk_out, ("tokens", "k"), torch.int32)
    check_number("k", sizes["k"] - 1, TOPK_MAX)
    keys = index_key_format(state, sizes["dim"], queries.dtype)
    backend(state, __name__).prompt_topk(state, group, seat, start, queries, weights, keys, scale, topk_out)


def prepare_prompt(state: DeviceState, heads: int, dim: int, dtype: torch.dtype) -> None:
    """Get ready for `queries` [S, heads, dim] of `dtype`: compile, load, allocate. At worker start.

    Raises as kernels.index_topk.prepare_index does.
    """
    backend(state, __name__).prepare_prompt(state, heads, index_key_format(state, dim, dtype), dtype)
