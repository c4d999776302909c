"""Modules that keep their weights in block-FP8, in place of the model library's.

Products are those of the decoded weights; with `quantizes_rows` (worker.matmul = "w8a8") activations are quantized too,
128 values to a scale, as the authors serve the models.

On a GPU all `BlockLinear` of a model share one scratch memory, into which a long prompt block decodes a
weight. They run one after another on one stream.

Small weights that multiply the same activations are *joined*: they lie one above the other in memory, and `products`
forms all their products in one launch. In a decode step such a launch takes longer than its weights take to be read
(benchmarks/NOTES.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from kernels.block_fp8 import (
    block_experts,
    block_experts_w8a8,
    block_linear,
    block_linear_w8a8,
    prepare_block_fp8,
)
from kernels.block_weight import BLOCK, BlockFp8
from worker.weights.layout import scale_shape

#: Names of the weights that are joined, within one module. Rows of the last one alone may end inside of a block.
JOINED: Final = (("q_a_proj", "indexer.wk", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj"))
#: Values of a joined weight at most: beyond, a launch does not count, and scratch memory would have to grow.
JOINED_VALUES_MAX: Final = 64_000_000


def empty_blocks(shape: tuple[int, ...], device: torch.device) -> BlockFp8:
    """Memory for a weight [..., N, K] and its scales."""
    return BlockFp8(
        torch.empty(shape, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(scale_shape(shape, (BLOCK, BLOCK)), dtype=torch.float32, device=device),
    )


class BlockLinear(nn.Module):
    """`nn.Linear` over a weight in block-FP8. `joined`: the product that holds this weight among others, from its row
    `first_row` on."""

    def __init__(self, weight: BlockFp8, *, quantizes_rows: bool = False) -> None:
        super().__init__()
        self.block_weight, self.quantizes_rows = weight, quantizes_rows
        self.scratch: Tensor | None = None  # bfloat16[N * K or more]
        self.bias: Tensor | None = None  # [N]
        self.joined: BlockLinear | None = None
        self.first_row = 0
        self.out_features, self.in_features = weight.values.shape

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        rows = hidden.reshape(-1, self.in_features)
        if self.quantizes_rows:
            product = block_linear_w8a8(rows, self.block_weight)
        else:
            product = block_linear(rows, self.block_weight, self.scratch)
        if self.bias is not None:
            product = product + self.bias
        return product.view(*hidden.shape[:-1], self.out_features)


def make_linears(shapes: Sequence[tuple[int, int]], device: torch.device, *, quantizes_rows: bool) -> list[BlockLinear]:
    """Products with weights of `shapes` [N, K] that are to be filled: joined, where they can be."""
    if not can_be_joined(shapes):
        return [BlockLinear(empty_blocks(shape, device), quantizes_rows=quantizes_rows) for shape in shapes]
    whole = empty_blocks((sum(rows for rows, _ in shapes), shapes[0][1]), device)
    joined, found, first = BlockLinear(whole, quantizes_rows=quantizes_rows), [], 0
    for rows, _ in shapes:
        part = BlockFp8(whole.values[first : first + rows], whole.scales[first // BLOCK : -(-(first + rows) // BLOCK)])
        found.append(BlockLinear(part, quantizes_rows=quantizes_rows))
        found[-1].joined, found[-1].first_row = joined, first
        first += rows
    return found


def can_be_joined(shapes: Sequence[tuple[int, int]]) -> bool:
    """Whether two or more weights of `shapes` [N, K] can lie one above the other, and small enough."""
    rows, columns = sum(rows for rows, _ in shapes), {columns for _, columns in shapes}
    if len(shapes) < 2 or len(columns) > 1 or any(rows % BLOCK for rows, _ in shapes[:-1]):
        return False
    return rows * columns.pop() <= JOINED_VALUES_MAX


def products(hidden: Tensor, *members: nn.Module) -> list[Tensor]:
    """Of each of `members` with the same `hidden` [..., K]: [..., N], of joined weights views of one result."""
    joined = joined_of(members)
    if joined is None:
        return [one(hidden) for one in members]
    whole, parts = joined(hidden), [one for one in members if isinstance(one, BlockLinear)]
    return [whole[..., one.first_row : one.first_row + one.out_features] for one in parts]


def joined_of(members: Sequence[nn.Module]) -> BlockLinear | None:
    """The product that holds all of `members`, two or more, in which `products` finds theirs."""
    found = {one.joined if isinstance(one, BlockLinear) else None for one in members}
    return found.pop() if len(found) == 1 < len(members) else None


class BlockExperts(nn.Module):
    """The routed experts `first` to `first + E - 1` of `total` of a layer: gate and up [E, I, K], down [E, K, I]."""

    def __init__(
        self, gate: BlockFp8, up: BlockFp8, down: BlockFp8, first: int, total: int, *, quantizes_rows: bool = False
    ) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down
        self.first, self.total, self.quantizes_rows = first, total, quantizes_rows

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum [T, K] over the choices int[T, k] that are among these experts."""
        product = block_experts_w8a8 if self.quantizes_rows else block_experts
        return product(hidden, chosen, weights, self.gate, self.up, self.down, self.first, self.total)


def share_scratch(model: nn.Module) -> None:
    """Give every `BlockLinear` of `model` on a GPU the scratch memory that the largest of them needs."""
    linears = [it for it in model.modules() if isinstance(it, BlockLinear) and it.block_weight.values.is_cuda]
    if linears:
        largest = max(it.block_weight.values.numel() for it in linears)
        scratch = torch.empty(largest, dtype=torch.bfloat16, device=linears[0].block_weight.values.device)
        for it in linears:
            it.scratch = scratch


def prepare_products(model: nn.Module, tokens: list[int], choices: int) -> None:
    """Compile what the FP8 products of `model` launch for these counts of rows. Before any capture."""
    linears = [it for it in model.modules() if isinstance(it, BlockLinear)]
    experts = [it for it in model.modules() if isinstance(it, BlockExperts)]
    if linears:
        prepare_block_fp8(
            [it.block_weight for it in linears],
            [(it.gate, it.up, it.down) for it in experts],
            tokens=tokens,
            choices=choices,
            experts_total=experts[0].total if experts else None,
            w8a8=linears[0].quantizes_rows,
        )
