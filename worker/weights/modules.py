"""Modules that keep their weights in block-FP8, in place of the model library's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.block_fp8 import BLOCK, BlockFp8, block_linear
from worker.weights.layout import scale_shape


def empty_blocks(shape: tuple[int, ...], device: torch.device) -> BlockFp8:
    """Memory for a weight [..., N, K] and its scales."""
    return BlockFp8(
        torch.empty(shape, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(scale_shape(shape, (BLOCK, BLOCK)), dtype=torch.float32, device=device),
    )


class BlockLinear(nn.Module):
    """`nn.Linear` without bias over a weight in block-FP8: its output is that of the decoded weight."""

    def __init__(self, weight: BlockFp8) -> None:
        super().__init__()
        self.block_weight = weight
        self.out_features, self.in_features = weight.values.shape

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        flat = block_linear(hidden.reshape(-1, self.in_features), self.block_weight)
        return flat.view(*hidden.shape[:-1], self.out_features)


class BlockExperts(nn.Module):
    """The routed experts `first` to `first + E - 1` of one layer: gate and up [E, I, K], down [E, K, I]."""

    def __init__(self, gate: BlockFp8, up: BlockFp8, down: BlockFp8, first: int) -> None:
        super().__init__()
        self.gate, self.up, self.down, self.first = gate, up, down, first
