"""Modules that keep their weights in block-FP8, in place of the model library's.

Products are those of the decoded weights; where the `Matmul` quantizes rows (worker.matmul), activations are quantized
too, 128 values to a scale, as the authors serve the models. Weights that w8a8 products do not take are decoded.

On a GPU all `BlockLinear` of a model share one scratch memory, into which a long prompt block decodes a
weight. They run one after another on one stream.

Small weights that multiply the same activations are *joined*: they lie one above the other in memory, and `products`
forms all their products in one launch. In a decode step such a launch takes longer than its weights take to be read
(benchmarks/NOTES.md).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from kernels.block_fp8 import (
    block_coded_w8a8,
    block_experts,
    block_experts_w8a8,
    block_gated_w8a8,
    block_linear,
    block_linear_w8a8,
    make_codes,
    prepare_block_fp8,
    prepare_w8a8,
    takes_w8a8,
)
from kernels.block_weight import BLOCK, BlockFp8
from kernels.cuda.quantize import Codes
from worker.weights.layout import scale_shape
from worker.weights.matmul import DECODED, Matmul
from worker.weights.memory import WeightMemory

#: Names of the weights that are joined, within one module. Rows of the last one alone may end inside of a block.
JOINED: Final = (("q_a_proj", "indexer.wk", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj"))
#: Values of a joined weight at most: beyond, a launch does not count, and scratch memory would have to grow.
JOINED_VALUES_MAX: Final = 64_000_000


def empty_blocks(name: str, shape: tuple[int, ...], memory: WeightMemory) -> BlockFp8:
    """Memory for a weight [..., N, K] of this name and its scales."""
    return BlockFp8(
        memory.empty(f"{name}.values", shape, torch.float8_e4m3fn),
        memory.empty(f"{name}.scales", scale_shape(shape, (BLOCK, BLOCK)), torch.float32),
    )


class BlockLinear(nn.Module):
    """`nn.Linear` over a weight in block-FP8. `joined`: the product that holds this weight among others, from its row
    `first_row` on."""

    def __init__(self, weight: BlockFp8, matmul: Matmul = DECODED) -> None:
        super().__init__()
        self.block_weight = weight
        self.quantizes_rows, self.powers = matmul.quantizes_rows and takes_w8a8(weight), matmul.powers
        self.scratch: Tensor | None = None  # bfloat16[N * K or more]
        self.bias: Tensor | None = None  # [N]
        self.joined: BlockLinear | None = None
        self.first_row = 0
        self.out_features, self.in_features = weight.values.shape

    def make_codes(self, rows: int) -> Codes | None:
        """Memory for `rows` rows that are quantized before they come here; None where they are not to be."""
        if not self.quantizes_rows or not rows:
            return None
        return make_codes(rows, self.block_weight, powers=self.powers)

    def forward(self, hidden: Tensor, codes: Codes | None = None) -> Tensor:
        """[..., K] -> [..., N]. `codes`: `hidden` quantized, in memory of make_codes."""
        rows = hidden.reshape(-1, self.in_features)
        if self.quantizes_rows and codes is not None:
            product = block_coded_w8a8(codes, len(rows), self.block_weight)
        elif self.quantizes_rows:
            product = block_linear_w8a8(rows, self.block_weight, powers=self.powers)
        else:
            product = block_linear(rows, self.block_weight, self.scratch)
        return self._finished(product, hidden)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """The product with silu(gate) * up, both [..., K], of a weight that quantizes rows: [..., N]."""
        product = block_gated_w8a8(gate.flatten(0, -2), up.flatten(0, -2), self.block_weight, powers=self.powers)
        return self._finished(product, gate)

    def _finished(self, product: Tensor, hidden: Tensor) -> Tensor:
        if self.bias is not None:
            product = product + self.bias
        return product.view(*hidden.shape[:-1], self.out_features)


def make_linears(shapes: Mapping[str, tuple[int, int]], memory: WeightMemory, matmul: Matmul) -> list[BlockLinear]:
    """Products with weights of `shapes` [N, K], by name, that are to be filled: joined, where they can be."""
    if not can_be_joined([*shapes.values()]):
        return [BlockLinear(empty_blocks(name, shape, memory), matmul) for name, shape in shapes.items()]
    named = f"{next(iter(shapes))}.joined"
    whole = empty_blocks(named, (sum(rows for rows, _ in shapes.values()), next(iter(shapes.values()))[1]), memory)
    joined, found, first = BlockLinear(whole, matmul), [], 0
    for rows, _ in shapes.values():
        part = BlockFp8(whole.values[first : first + rows], whole.scales[first // BLOCK : -(-(first + rows) // BLOCK)])
        found.append(BlockLinear(part, matmul))
        found[-1].joined, found[-1].first_row = joined, first
        first += rows
    return found


def can_be_joined(shapes: Sequence[tuple[int, int]]) -> bool:
    """Whether two or more weights of `shapes` [N, K] can lie one above the other, and small enough."""
    rows, columns = sum(rows for rows, _ in shapes), {columns for _, columns in shapes}
    if len(shapes) < 2 or len(columns) > 1 or any(rows % BLOCK for rows, _ in shapes[:-1]):
        return False
    return rows * columns.pop() <= JOINED_VALUES_MAX


class Activations(NamedTuple):
    """Activations [..., K] that several products multiply, and the same quantized, where those want that."""

    values: Tensor
    codes: Codes | None = None
    #: float32[..., C]: by which what becomes of them is added to each residual stream, where there are several.
    shares: Tensor | None = None


def make_codes_for(member: nn.Module | None, rows: int) -> Codes | None:
    """Memory for `rows` rows that `member` multiplies, and others of the same matmul; None where they stay as they
    are."""
    return member.make_codes(rows) if isinstance(member, BlockLinear) else None


def product(rows: Activations, member: nn.Module) -> Tensor:
    """[..., N] of `member`."""
    found: Tensor = member(rows.values, rows.codes) if isinstance(member, BlockLinear) else member(rows.values)
    return found


def products(rows: Activations, *members: nn.Module) -> list[Tensor]:
    """Products of the same `rows` with each of `members`: [..., N], of joined weights views of one result."""
    joined = joined_of(members)
    if joined is None:
        return [product(rows, one) for one in members]
    whole, parts = product(rows, joined), [one for one in members if isinstance(one, BlockLinear)]
    return [whole[..., one.first_row : one.first_row + one.out_features] for one in parts]


def joined_of(members: Sequence[nn.Module]) -> BlockLinear | None:
    """The product that holds all of `members`, two or more, in which `products` finds theirs."""
    found = {one.joined if isinstance(one, BlockLinear) else None for one in members}
    return found.pop() if len(found) == 1 < len(members) else None


class BlockExperts(nn.Module):
    """The routed experts `first` to `first + E - 1` of `total` of a layer: gate and up [E, I, K], down [E, K, I].

    Where rows are quantized gate lies above up in one weight [E, 2 I, K], since one launch forms both products.
    """

    def __init__(self, name: str, sizes: tuple[int, int, int], memory: WeightMemory, matmul: Matmul = DECODED) -> None:
        """Memory for E experts, that is to be filled, of `sizes` [E, I, K]; `place` the module among all."""
        super().__init__()
        count, middle, width = sizes
        self.first, self.total, self.limit = 0, count, inf
        self.quantizes_rows = matmul.quantizes_rows and middle % BLOCK == 0 and width % BLOCK == 0
        self.matmul = matmul if self.quantizes_rows else DECODED
        shapes = [(count, 2 * middle, width)] if self.quantizes_rows else [(count, middle, width)] * 2
        shapes.append((count, width, middle))
        self.weights = [empty_blocks(f"{name}.{number}", shape, memory) for number, shape in enumerate(shapes)]
        self._middle = middle

    def place(self, first: int, total: int, limit: float = inf) -> BlockExperts:
        """This module, as the experts from `first` on of `total`, whose products of gate and up are cut to `limit`."""
        self.first, self.total, self.limit = first, total, limit
        return self

    def weight(self, projection: str, index: int) -> BlockFp8:
        """One expert's weight of "gate", "up" or "down": a view."""
        if projection == "down" or not self.quantizes_rows:
            stack = self.weights[-1 if projection == "down" else ("gate", "up").index(projection)]
            return BlockFp8(stack.values[index], stack.scales[index])
        begin = 0 if projection == "gate" else self._middle
        values = self.weights[0].values[index, begin : begin + self._middle]
        return BlockFp8(values, self.weights[0].scales[index, begin // BLOCK : (begin + self._middle) // BLOCK])

    def forward(self, hidden: Tensor | Codes, chosen: Tensor, shares: Tensor, out: Tensor | None = None) -> Tensor:
        """Weighted sum [T, K] over the choices int[T, k] that are among these experts; in `out`, if it has the dtype of
        activations. On a GPU experts that quantize rows take rows that are quantized."""
        if out is not None and out.dtype != (torch.bfloat16 if isinstance(hidden, Codes) else hidden.dtype):
            out = None
        if self.quantizes_rows or isinstance(hidden, Codes):
            gate_up, down = self.weights
            options: Any = {"powers": self.matmul.powers, "limit": self.limit, "out": out}
            return block_experts_w8a8(hidden, chosen, shares, gate_up, down, self.first, self.total, **options)
        gate, up, down = self.weights
        about = self.first, self.total
        return block_experts(hidden, chosen, shares, gate, up, down, *about, limit=self.limit, out=out)


def expert_matmul(model: nn.Module) -> Matmul | None:
    """Return how products of the routed experts of `model` are formed; None without experts in block-FP8."""
    return next((module.matmul for module in model.modules() if isinstance(module, BlockExperts)), None)


def share_scratch(model: nn.Module) -> None:
    """Give every `BlockLinear` of `model` on a GPU that decodes its weight the scratch that the largest one needs."""
    linears = [it for it in model.modules() if isinstance(it, BlockLinear) and it.block_weight.values.is_cuda]
    linears = [it for it in linears if not it.quantizes_rows]
    if linears:
        largest = max(it.block_weight.values.numel() for it in linears)
        scratch = torch.empty(largest, dtype=torch.bfloat16, device=linears[0].block_weight.values.device)
        for it in linears:
            it.scratch = scratch


def prepare_products(model: nn.Module, tokens: Sequence[int], choices: int, apart: Collection[nn.Module] = ()) -> None:
    """Compile what products with decoded weights of `model` launch for these counts of rows. Before any capture.

    `apart`: joined weights whose products are formed by themselves too.
    """
    linears, experts = _members(model, apart, quantizes_rows=False)
    prepare_block_fp8(
        [it.block_weight for it in linears],
        [(it.weights[0], it.weights[1], it.weights[2]) for it in experts],
        tokens=tokens,
        choices=choices,
        experts_total=experts[0].total if experts else None,
    )


def prepare_quantized_products(model: nn.Module, rows_max: int, choices: int, apart: Collection[nn.Module] = ()) -> int:
    """Likewise of w8a8 products for up to `rows_max` rows. Returns how many were formed.

    It takes minutes where the cache has none of their kernels, and gigabytes of device memory for as long.
    """
    linears, experts = _members(model, apart, quantizes_rows=True)
    return prepare_w8a8(
        [it.block_weight for it in linears],
        [(it.weights[0], it.weights[1]) for it in experts],
        rows_max=rows_max,
        choices=choices,
        experts_total=experts[0].total if experts else None,
    )


def _members(
    model: nn.Module, apart: Collection[nn.Module], *, quantizes_rows: bool
) -> tuple[list[BlockLinear], list[BlockExperts]]:
    """Modules that form products of their own: of joined weights, the whole of them, and those of `apart`."""
    kinds = (BlockLinear, BlockExperts)
    found = [it for it in model.modules() if isinstance(it, kinds) and it.quantizes_rows == quantizes_rows]
    linears = [it for it in found if isinstance(it, BlockLinear) and (it.joined is None or it in apart)]
    return linears, [it for it in found if isinstance(it, BlockExperts)]
