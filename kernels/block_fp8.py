"""Products with block-FP8 weights, which stay FP8 in device memory.

A weight is e4m3 with one float32 scale for each block of 128 x 128 values; the last block of rows or columns may be
smaller. Its *decoded* value is e4m3 times scale in float32, rounded once to the dtype of the product. Weight-only
products decode inside the kernel, multiply in that dtype and sum in float32: a model equals its dequantized form up to
the order of sums. *w8a8* products quantize the activations too, 1 x 128 values with a scale, and multiply FP8 by FP8:
an approximation, the one that the checkpoints' authors serve. Scales of activations are powers of two where a
checkpoint says so (`powers`).

    decode_blocks         weights to float32 or bfloat16
    block_linear          hidden @ weight.T
    block_experts         the experts of one rank: gate, up, silu, down, weighted sum
    quantize_rows         activations to e4m3 and scales
    block_linear_w8a8     block_linear, block_experts with quantized activations
    block_gated_w8a8      likewise, of silu(gate) * up
    block_coded_w8a8      likewise, of rows that another kernel quantized
    block_experts_w8a8
    prepare_block_fp8     compiles what a model's products launch, before any capture
    prepare_w8a8

On a GPU with bfloat16 activations these launch kernels/cuda/block_fp8.py, and w8a8 DeepGEMM's kernels, for weights that
it takes (kernels/cuda/deep_gemm.py): no value is read on the host, shapes do not depend on values, sums run in an order
that shapes alone decide. Elsewhere, and for float32 activations, torch forms the products of decoded weights; on a CPU
a worker decodes at load and never comes here.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.block_weight import BLOCK, E4M3, BlockFp8, check_tensor
from kernels.cuda import block_fp8, deep_gemm, deep_gemm_cache, quantize
from kernels.cuda.deep_gemm_cache import ProductForm
from kernels.row_format import E4M3_MAX
from protocol.errors import BadInput

DTYPES: Final = (torch.bfloat16, torch.float32)


def decode_blocks(weight: BlockFp8, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Decoded values [..., N, K] in `dtype`, float32 or bfloat16; in `out`, contiguous of that shape, when given.

    On a CPU temporaries hold 128 rows of one matrix, 12 bytes a value at most.
    """
    if dtype not in DTYPES:
        raise BadInput("is no dtype of a model", field="dtype", value=str(dtype), remedy="float32 or bfloat16")
    values = weight.values
    if out is None:
        out = torch.empty(values.shape, dtype=dtype, device=values.device)
    check_tensor("out", out, dtype, tuple(values.shape))
    if values.is_cuda:
        block_fp8.decode_blocks(weight, out)
        return out
    if out.numel():
        _decode_on_cpu(values, weight.scales, out)
    return out


def _decode_on_cpu(values: Tensor, scales: Tensor, out: Tensor) -> None:
    """By a table of all codes, a block of rows at a time: torch's conversion of e4m3 takes several times as long."""
    *_, rows, columns = values.shape
    table = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    numbers = torch.empty(min(BLOCK, rows), columns, dtype=torch.int32)
    floats = torch.empty(numbers.numel())
    matrices = (one.reshape(-1, *one.shape[-2:]) for one in (values.view(torch.uint8), scales, out))
    for codes, lines, target in zip(*matrices, strict=True):
        for number, line in enumerate(lines):
            part = slice(number * BLOCK, min((number + 1) * BLOCK, rows))
            at = numbers[: part.stop - part.start]
            at.copy_(codes[part])
            decoded = floats[: at.numel()]
            torch.index_select(table, 0, at.view(-1), out=decoded)
            target[part] = decoded.view(at.shape).mul_(line.repeat_interleave(BLOCK)[:columns])


def block_linear(hidden: Tensor, weight: BlockFp8, scratch: Tensor | None = None) -> Tensor:
    """hidden [M, K] @ decoded weight [N, K].T: [M, N] in the dtype of `hidden`, bfloat16 or float32.

    `scratch` bfloat16[N * K or more], on a GPU: where it is given and M is beyond the measured crossover, the weight is
    decoded into it and torch multiplies. On Hopper the kernel launched just ahead must not write the weight. Raises
    BadInput for shapes that do not fit.
    """
    _check_hidden(hidden, weight, 2)
    if _launches(hidden):
        return block_fp8.linear(hidden, weight, scratch)
    return hidden @ decode_blocks(weight, hidden.dtype).T


def block_experts(
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate: BlockFp8,
    up: BlockFp8,
    down: BlockFp8,
    first_expert: int = 0,
    experts_total: int | None = None,
    *,
    limit: float = inf,
    out: Tensor | None = None,
) -> Tensor:
    """Output [T, K] of the experts first_expert .. first_expert + E - 1 for `hidden` [T, K].

    Rows of `hidden`, `chosen` and `weights` may lie apart. A GPU writes to `out`, contiguous of the dtype of `hidden`,
    where it is given; else a new tensor is returned.

    For each token the sum of weight * down(silu(gate x) * up x) over its choices `chosen` int[T, k] among these
    experts; other choices, -1 among them, add nothing. `weights` is [T, k], float32 or the dtype of `hidden`. `gate`
    and `up` are [E, I, K], `down` is [E, K, I]. Rounded as the model library does with grouped_mm: to the dtype of
    `hidden` after each product, silu and gating; weighted in the wider dtype of the two; summed in float32, in the
    order of `chosen`. Products are cut to `limit` ahead of silu and gating: gate x from above, up x to either side.
    `experts_total` of the layer over all ranks (None: E) serves the choice of tiles alone.
    """
    _check_experts(hidden, chosen, weights, gate, up, down)
    if _launches(hidden):
        about = first_expert, experts_total
        return block_fp8.experts(hidden, chosen, weights, gate, up, down, *about, limit=limit, out=out)
    return _experts(hidden, chosen, weights, gate, up, down, first_expert, limit)


def takes_w8a8(weight: BlockFp8) -> bool:
    """Return whether the w8a8 products take weights [..., N, K]: K in whole blocks, N in whole parts of 8."""
    return deep_gemm.takes(weight)


def quantize_rows(hidden: Tensor, *, powers: bool = False) -> tuple[Tensor, Tensor]:
    """`hidden` [M, K] as e4m3[M, K] and scales float32[M, ceil(K / 128)]: largest magnitude of 128 values / 448.

    With `powers` the next power of two from there on; of zeros 1. On a GPU K has whole blocks, and scales lie column by
    column."""
    if _launches(hidden):
        return quantize.quantize(hidden, powers=powers)
    rows, columns = hidden.shape
    blocks = -(-columns // BLOCK)
    padded = F.pad(hidden.float(), (0, blocks * BLOCK - columns)).view(rows, blocks, BLOCK)
    scales = padded.abs().amax(-1) / E4M3_MAX
    if powers:
        mantissa, exponent = torch.frexp(scales)  # scales = mantissa * 2**exponent, mantissa from 1/2 on
        scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    scales = torch.where(padded.abs().amax(-1) == 0, 1.0, scales)
    values = (padded / scales.unsqueeze(-1)).to(E4M3).view(rows, blocks * BLOCK)[:, :columns]
    return values.contiguous(), scales


def block_linear_w8a8(hidden: Tensor, weight: BlockFp8, *, powers: bool = False) -> Tensor:
    """As block_linear, of the activations that quantize_rows gives."""
    _check_hidden(hidden, weight, 2)
    if _launches(hidden):
        return deep_gemm.linear(hidden, weight, powers=powers)
    return _linear_w8a8(hidden, decode_blocks(weight, torch.float32), powers=powers)


def make_codes(rows: int, weight: BlockFp8, *, powers: bool = False) -> quantize.Codes:
    """Memory for `rows` quantized rows of bfloat16 activations that weights [N, K] on a GPU are to multiply."""
    return quantize.Codes.allocate(deep_gemm.padded(rows), weight.values.shape[-1], weight.values.device, powers=powers)


def block_coded_w8a8(codes: quantize.Codes, rows: int, weight: BlockFp8) -> Tensor:
    """Form block_linear_w8a8 of `rows` rows that lie quantized in `codes`, of make_codes."""
    return deep_gemm.coded(codes, rows, weight)


def block_gated_w8a8(gate: Tensor, up: Tensor, weight: BlockFp8, *, powers: bool = False) -> Tensor:
    """block_linear_w8a8 of silu(gate) * up, rounded after each of both. On a GPU one launch before the product.

    `gate` and `up` [M, K]: values of a row adjacent, rows equally far apart in both.
    """
    if _launches(gate):
        return deep_gemm.gated(gate, up, weight, powers=powers)
    return block_linear_w8a8(F.silu(gate) * up, weight, powers=powers)


def block_experts_w8a8(
    hidden: Tensor | quantize.Codes,
    chosen: Tensor,
    weights: Tensor,
    gate_up: BlockFp8,
    down: BlockFp8,
    first_expert: int = 0,
    experts_total: int | None = None,
    *,
    powers: bool = False,
    limit: float = inf,
    out: Tensor | None = None,
) -> Tensor:
    """Do block_experts with the rows of both products quantized; `gate_up` [E, 2 I, K] has gate above up, I in whole
    blocks. A token chooses an expert once. On a GPU `hidden` may be quantized already, by the same `powers`."""
    if isinstance(hidden, quantize.Codes) or _launches(hidden):
        total = experts_total or len(down.values)
        about = first_expert, total
        return deep_gemm.experts(hidden, chosen, weights, gate_up, down, *about, powers=powers, limit=limit, out=out)
    gate, up = halves(gate_up)
    _check_experts(hidden, chosen, weights, gate, up, down)
    return _experts(hidden, chosen, weights, gate, up, down, first_expert, limit, w8a8=True, powers=powers)


def halves(gate_up: BlockFp8) -> tuple[BlockFp8, BlockFp8]:
    """Copies of gate and up [E, I, K] from one weight [E, 2 I, K], I in whole blocks."""
    middle = gate_up.values.shape[-2] // 2
    parts = [
        (gate_up.values[:, rows], gate_up.scales[:, blocks])
        for rows, blocks in (
            (slice(middle), slice(middle // BLOCK)),
            (slice(middle, None), slice(middle // BLOCK, None)),
        )
    ]
    gate, up = (BlockFp8(values.contiguous(), scales.contiguous()) for values, scales in parts)
    return gate, up


def prepare_block_fp8(
    linears: Iterable[BlockFp8],
    experts: Iterable[tuple[BlockFp8, BlockFp8, BlockFp8]] = (),
    *,
    tokens: Iterable[int],
    choices: int = 1,
    weights: torch.dtype = torch.float32,
    experts_total: int | None = None,
) -> None:
    """Compile and load what products of bfloat16 activations launch, for each count of `tokens`: before any capture.

    `linears` and `experts` (gate, up, down) are those of a model; of each shape one is run, once for each count, over
    zeros. `choices` and `weights` are k and the dtype of the routing weights. On a CPU nothing happens.
    """
    counts = sorted(set(tokens))
    for weight in {tuple(one.values.shape): one for one in linears if one.values.is_cuda}.values():
        for count in counts:
            block_linear(_zeros(count, weight), weight)
    for gate, up, down in {tuple(one[0].values.shape): one for one in experts if one[0].values.is_cuda}.values():
        for count in counts:
            hidden = _zeros(count, gate)
            chosen = torch.full((count, choices), -1, dtype=torch.int32, device=hidden.device)
            block_experts(hidden, chosen, chosen.to(weights), gate, up, down, 0, experts_total)


def prepare_w8a8(
    linears: Iterable[BlockFp8],
    experts: Iterable[tuple[BlockFp8, BlockFp8]] = (),
    *,
    rows_max: int,
    choices: int = 1,
    weights: torch.dtype = torch.float32,
    experts_total: int | None = None,
) -> int:
    """Do as prepare_block_fp8, for w8a8 products of up to `rows_max` rows. `experts`: gate above up, and down.

    Kernels that are not in the cache are compiled by several processes first, in seconds to minutes. Returns how many
    products were formed: one of each shape and padded count. On a CPU nothing happens.
    """
    dense = {tuple(one.values.shape): one for one in linears if one.values.is_cuda}
    grouped = {tuple(one[0].values.shape): one for one in experts if one[0].values.is_cuda}
    forms = [ProductForm(n, k, rows) for n, k in dense for rows in deep_gemm.padded_counts(rows_max)]
    for held, n, k in grouped:
        total = experts_total or held
        forms += [ProductForm(n, k, rows, held, choices, total) for rows in deep_gemm.expert_counts(choices, total)]
    if forms:
        deep_gemm_cache.fill(forms, next(iter((*dense.values(), *(one[0] for one in grouped.values())))).values.device)
    for form in forms:
        if form.experts:
            gate_up, down = grouped[form.experts, form.n, form.k]
            hidden = _zeros(form.rows, gate_up)
            chosen = torch.full((form.rows, choices), -1, dtype=torch.int32, device=hidden.device)
            block_experts_w8a8(hidden, chosen, chosen.to(weights), gate_up, down, 0, form.total)
        else:
            block_linear_w8a8(_zeros(form.rows, dense[form.n, form.k]), dense[form.n, form.k])
    return len(forms)


def _zeros(rows: int, weight: BlockFp8) -> Tensor:
    return torch.zeros(rows, weight.values.shape[-1], dtype=torch.bfloat16, device=weight.values.device)


def _launches(hidden: Tensor) -> bool:
    return hidden.is_cuda and hidden.dtype == torch.bfloat16


def _linear_w8a8(hidden: Tensor, decoded: Tensor, *, powers: bool) -> Tensor:
    values, scales = quantize_rows(hidden, powers=powers)
    rows = values.float() * scales.repeat_interleave(BLOCK, 1)[:, : hidden.shape[1]]
    return (rows @ decoded.T).to(hidden.dtype)


def _experts(
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate: BlockFp8,
    up: BlockFp8,
    down: BlockFp8,
    first_expert: int,
    limit: float,
    *,
    w8a8: bool = False,
    powers: bool = False,
) -> Tensor:
    """Every expert for every token, and of those what was chosen: no shape depends on `chosen`."""

    def product(rows: Tensor, weight: BlockFp8, expert: int) -> Tensor:
        one = BlockFp8(weight.values[expert], weight.scales[expert])
        if w8a8:
            return _linear_w8a8(rows, decode_blocks(one, torch.float32), powers=powers)
        return rows @ decode_blocks(one, rows.dtype).T

    products = hidden.new_zeros(*chosen.shape, hidden.shape[1])
    for expert in range(len(gate.values)):
        opened, factor = product(hidden, gate, expert).clamp(max=limit), product(hidden, up, expert)
        middle = F.silu(opened) * factor.clamp(-limit, limit)
        held = (chosen == first_expert + expert).unsqueeze(-1)
        products = torch.where(held, product(middle, down, expert).unsqueeze(1), products)
    return (products * weights.unsqueeze(-1)).sum(1, dtype=torch.float32).to(hidden.dtype)


def _check_hidden(hidden: Tensor, weight: BlockFp8, dims: int) -> None:
    if hidden.dtype not in DTYPES:
        raise BadInput("is no dtype of a model", field="hidden", value=str(hidden.dtype), remedy="float32 or bfloat16")
    if weight.values.dim() != dims:
        raise BadInput(
            f"has {weight.values.dim()} dimensions, expected {dims}",
            field="weight",
            value=str(list(weight.values.shape)),
            remedy="pass one matrix to a linear product, a batch of them to experts",
        )
    shape = (len(hidden), weight.values.shape[-1])
    check_tensor("hidden", hidden, hidden.dtype, shape, rows_apart=dims > 2)
    if hidden.device != weight.values.device:
        raise BadInput("is on another device", field="weight", value=str(weight.values.device), remedy="move it")


def _check_experts(
    hidden: Tensor, chosen: Tensor, weights: Tensor, gate: BlockFp8, up: BlockFp8, down: BlockFp8
) -> None:
    _check_hidden(hidden, gate, 3)
    experts, middle, width = gate.values.shape
    check_tensor("up", up.values, E4M3, (experts, middle, width))
    check_tensor("down", down.values, E4M3, (experts, width, middle))
    kind = torch.int32 if chosen.dtype == torch.int32 else torch.int64
    check_tensor("chosen", chosen, kind, (len(hidden), chosen.shape[-1]), rows_apart=True)
    share = torch.float32 if weights.dtype == torch.float32 else hidden.dtype
    check_tensor("weights", weights, share, tuple(chosen.shape), rows_apart=True)
