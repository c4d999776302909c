"""Products with weights in FP8 and a scale for each block of 128 x 128 values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

BLOCK: Final = 128


@dataclass(frozen=True, eq=False)
class BlockFp8:
    """`values` float8_e4m3fn[..., N, K]; `scales` float32[..., ceil(N / 128), ceil(K / 128)]."""

    values: Tensor
    scales: Tensor


def decode_blocks(weight: BlockFp8, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """values x scales [..., N, K], computed in float32 and rounded once to `dtype`."""
    rows, columns = weight.values.shape[-2:]
    scales = weight.scales.repeat_interleave(BLOCK, -2)[..., :rows, :].repeat_interleave(BLOCK, -1)[..., :columns]
    decoded = (weight.values.float() * scales).to(dtype)
    return decoded if out is None else out.copy_(decoded)


def block_linear(hidden: Tensor, weight: BlockFp8, scratch: Tensor | None = None) -> Tensor:
    """hidden [M, K] x decoded weight^T: [M, N]."""
    return hidden @ decode_blocks(weight, hidden.dtype).T


def block_experts(
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate: BlockFp8,
    up: BlockFp8,
    down: BlockFp8,
    first_expert: int = 0,
) -> Tensor:
    """Interim."""
    out = torch.zeros_like(hidden)
    for token in range(len(hidden)):
        for place in range(chosen.shape[1]):
            e = int(chosen[token, place]) - first_expert
            if not 0 <= e < len(gate.values):
                continue
            g, u, d = (decode_blocks(BlockFp8(w.values[e], w.scales[e]), hidden.dtype) for w in (gate, up, down))
            x = hidden[token]
            out[token] += (d @ (torch.nn.functional.silu(g @ x) * (u @ x))) * weights[token, place].to(hidden.dtype)
    return out
