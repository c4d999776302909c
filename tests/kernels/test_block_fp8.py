"""Block-FP8 products on a CPU, against a dequantizer and a mixture of this file's own."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.block_fp8 import (
    block_experts,
    block_experts_w8a8,
    block_linear,
    block_linear_w8a8,
    decode_blocks,
    halves,
    prepare_block_fp8,
    prepare_w8a8,
    quantize_rows,
)
from kernels.block_weight import BLOCK, BlockFp8
from protocol.errors import BadInput

E4M3 = torch.float8_e4m3fn
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SIZES = st.sampled_from([1, 7, 64, 127, 128, 129, 200, 256, 320])
#: Value of each code, from the definition of e4m3: sign, 4 bits of exponent with bias 7, 3 of mantissa.
CODES = torch.tensor(
    [
        (-1) ** (code >> 7) * ((code & 7) / 8 + (code >> 3 & 15 > 0)) * 2.0 ** (max(code >> 3 & 15, 1) - 7)
        for code in range(256)
    ],
    dtype=torch.float64,
)


def draw(*shape: int, seed: int = 0) -> BlockFp8:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 255, shape, generator=generator, dtype=torch.uint8)
    codes[codes == 0x7F] = 0
    blocks = (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))
    return BlockFp8(codes.view(E4M3), torch.rand(blocks, generator=generator) * 1e-3 + 1e-4)


def dequantized(weight: BlockFp8, dtype: torch.dtype) -> Tensor:
    """One value at a time, by row // 128 and column // 128."""
    *_, rows, columns = weight.values.shape
    scales = weight.scales[..., torch.arange(rows) // 128, :][..., torch.arange(columns) // 128]
    return (CODES[weight.values.view(torch.uint8).long()].float() * scales).to(dtype)


def mixture(hidden: Tensor, chosen: Tensor, weights: Tensor, matrices: list[Tensor], first: int) -> Tensor:
    """Token by token, choice by choice."""
    gate, up, down = matrices
    out = torch.zeros_like(hidden)
    for token, row in enumerate(hidden):
        total = torch.zeros(hidden.shape[1])
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            if not first <= expert < first + len(gate):
                continue
            at = expert - first
            opened = torch.nn.functional.silu(gate[at] @ row)
            total += ((down[at] @ (opened * (up[at] @ row))) * weight.reshape(1)).float()
        out[token] = total.to(hidden.dtype)
    return out


def close(got: Tensor, wanted: Tensor, share: float | None = None) -> bool:
    share = share or (2e-5 if got.dtype == torch.float32 else 2e-2)
    return bool((got.double() - wanted.double()).norm() <= share * wanted.double().norm() + 1e-12)


@settings(max_examples=40)
@given(
    batch=st.sampled_from([(), (1,), (3,), (2, 2)]), rows=SIZES, columns=SIZES, dtype=DTYPES, seed=st.integers(0, 99)
)
def test_decoded_values_are_codes_times_scales_rounded_once(
    batch: tuple[int, ...], rows: int, columns: int, dtype: torch.dtype, seed: int
) -> None:
    weight = draw(*batch, rows, columns, seed=seed)
    wanted = dequantized(weight, dtype)
    assert torch.equal(decode_blocks(weight, dtype), wanted)
    out = torch.full(wanted.shape, torch.nan, dtype=dtype)
    assert decode_blocks(weight, dtype, out) is out
    assert torch.equal(out, wanted)


def test_every_code_but_nan_decodes_to_its_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0
    decoded = decode_blocks(BlockFp8(codes.view(E4M3)[None], torch.ones(1, 2)), torch.float32)[0]
    assert torch.equal(decoded.double(), CODES[codes.long()])


@settings(max_examples=30)
@given(tokens=st.integers(0, 5), rows=SIZES, columns=SIZES, dtype=DTYPES)
def test_a_linear_product_is_that_of_the_decoded_weight(
    tokens: int, rows: int, columns: int, dtype: torch.dtype
) -> None:
    weight = draw(rows, columns, seed=tokens)
    hidden = torch.randn(tokens, columns).to(dtype)
    got = block_linear(hidden, weight)
    assert got.dtype == dtype
    assert got.shape == (tokens, rows)
    assert close(got, hidden.double() @ dequantized(weight, dtype).double().T, 1e-5 if dtype == torch.float32 else 1e-2)


@settings(max_examples=30)
@given(
    tokens=st.integers(0, 6),
    choices=st.integers(1, 3),
    experts=st.integers(1, 4),
    middle=st.sampled_from([1, 64, 130]),
    width=st.sampled_from([1, 128, 200]),
    first=st.integers(0, 3),
    dtype=DTYPES,
    wide=st.booleans(),
    seed=st.integers(0, 99),
)
def test_experts_add_what_their_rank_holds_of_each_tokens_choices(
    tokens: int,
    choices: int,
    experts: int,
    middle: int,
    width: int,
    first: int,
    dtype: torch.dtype,
    wide: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = [draw(experts, *shape, seed=seed) for shape in ((middle, width), (middle, width), (width, middle))]
    hidden = torch.randn(tokens, width, generator=generator).to(dtype)
    order = torch.rand(tokens, 8, generator=generator).argsort(1)
    chosen = (order[:, :choices] - 1).contiguous()  # -1 is no expert
    shares = torch.rand(tokens, choices, generator=generator).to(torch.float32 if wide else dtype)
    got = block_experts(hidden, chosen, shares, *weights, first)
    wanted = mixture(hidden, chosen, shares, [dequantized(one, dtype) for one in weights], first)
    assert got.dtype == dtype
    assert close(got, wanted)
    held = ((chosen >= first) & (chosen < first + experts)).any(1)
    assert not got[~held].any()


@pytest.mark.parametrize("w8a8", [False, True])
def test_products_of_gate_and_up_are_cut_to_a_limit(w8a8: bool) -> None:
    """Gate from above alone, up to either side; a limit beyond all products changes nothing."""
    generator = torch.Generator().manual_seed(1)
    gate_up, down = draw(2, 256, 128, seed=1), draw(2, 128, 128, seed=2)
    hidden, chosen = torch.randn(6, 128, generator=generator), torch.tensor([[0], [1]] * 3)
    shares = torch.ones(6, 1)

    def experts(**limit: float) -> Tensor:
        if w8a8:
            return block_experts_w8a8(hidden, chosen, shares, gate_up, down, **limit)
        return block_experts(hidden, chosen, shares, *halves(gate_up), down, **limit)

    gate, up, last = (dequantized(one, torch.float32) for one in (*halves(gate_up), down))
    products = [torch.einsum("tk,tik->ti", hidden, one[chosen[:, 0]]) for one in (gate, up)]
    limit = float(products[1].abs().median())
    assert all(bool((one > limit).any() & (one < -limit).any()) for one in products)
    middle = torch.nn.functional.silu(products[0].clamp(max=limit)) * products[1].clamp(-limit, limit)
    wanted = torch.einsum("ti,tki->tk", middle, last[chosen[:, 0]])
    assert close(experts(limit=limit), wanted, 8e-2 if w8a8 else None)
    assert not close(experts(), wanted, 0.2)
    assert torch.equal(experts(limit=1e9), experts())


def test_experts_equal_the_model_librarys_with_grouped_mm() -> None:
    from types import SimpleNamespace

    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    gate, up, down = draw(6, 64, 200), draw(6, 64, 200, seed=1), draw(6, 200, 64, seed=2)
    hidden = torch.randn(9, 200).bfloat16()
    chosen = torch.rand(9, 6).argsort(1)[:, :3].contiguous()
    shares = torch.rand(9, 3)
    halves = [dequantized(one, torch.bfloat16) for one in (gate, up)]
    library = SimpleNamespace(
        num_experts=6,
        has_gate=True,
        has_bias=False,
        has_post_expert_norm=False,
        is_transposed=False,
        _is_expert_parallel=False,
        gate_up_proj=torch.cat(halves, 1),
        down_proj=dequantized(down, torch.bfloat16),
        _apply_gate=lambda both: torch.nn.functional.silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1],
    )
    wanted = ALL_EXPERTS_FUNCTIONS["grouped_mm"](library, hidden, chosen, shares)
    got = block_experts(hidden, chosen, shares, gate, up, down)
    step = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(got, wanted, rtol=4 * step, atol=4 * step * float(wanted.abs().max()) / 16)


@settings(max_examples=30)
@given(tokens=st.integers(0, 5), columns=SIZES, dtype=DTYPES)
def test_quantized_rows_come_back_within_half_a_step(tokens: int, columns: int, dtype: torch.dtype) -> None:
    hidden = torch.randn(tokens, columns).to(dtype)
    hidden[:1] = 0
    values, scales = quantize_rows(hidden)
    assert values.dtype == E4M3
    assert values.shape == hidden.shape
    assert scales.shape == (tokens, -(-columns // BLOCK))
    wide = scales.repeat_interleave(BLOCK, 1)[:, :columns]
    error = (values.float() * wide - hidden.float()).abs()
    assert bool((error <= hidden.float().abs() / 16 + wide * 2.0**-10 + 1e-12).all())


@settings(max_examples=20)
@given(tokens=st.integers(0, 5), rows=SIZES, columns=SIZES, dtype=DTYPES)
def test_w8a8_is_the_product_of_quantized_rows(tokens: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    weight = draw(rows, columns)
    hidden = torch.randn(tokens, columns).to(dtype)
    values, scales = quantize_rows(hidden)
    wide = values.double() * scales.repeat_interleave(BLOCK, 1)[:, :columns].double()
    wanted = wide @ dequantized(weight, torch.float32).double().T
    assert close(block_linear_w8a8(hidden, weight), wanted, 1e-5 if dtype == torch.float32 else 1e-2)


def test_w8a8_experts_stay_near_weight_only_ones() -> None:
    gate_up, down = draw(4, 512, 200), draw(4, 200, 256, seed=2)
    hidden = torch.randn(16, 200)
    chosen = torch.rand(16, 4).argsort(1)[:, :2].contiguous()
    shares = torch.rand(16, 2)
    exact = block_experts(hidden, chosen, shares, *halves(gate_up), down)
    quantized = block_experts_w8a8(hidden, chosen, shares, gate_up, down)
    assert not torch.equal(quantized, exact)
    assert close(quantized, exact, 0.1)


def test_a_cpu_has_nothing_to_prepare() -> None:
    weight = draw(2, 64, 64)
    prepare_block_fp8([draw(64, 64)], [(weight, weight, weight)], tokens=[1, 512])
    assert prepare_w8a8([draw(64, 128)], [(weight, weight)], rows_max=512) == 0


@pytest.mark.parametrize(
    ("field", "values", "scales"),
    [
        ("values", torch.zeros(4, 4), torch.zeros(1, 1)),
        ("values", torch.zeros(4, dtype=E4M3), torch.zeros(1)),
        ("values", torch.zeros(4, 8, dtype=E4M3).T, torch.zeros(1, 1)),
        ("scales", torch.zeros(4, 129, dtype=E4M3), torch.zeros(1, 1)),
        ("scales", torch.zeros(2, 576, 128, dtype=E4M3), torch.zeros(2, 4, 1)),
        ("scales", torch.zeros(4, 4, dtype=E4M3), torch.zeros(1, 1, dtype=torch.bfloat16)),
    ],
)
def test_values_and_scales_that_do_not_belong_together_are_refused(field: str, values: Tensor, scales: Tensor) -> None:
    with pytest.raises(BadInput) as refusal:
        BlockFp8(values, scales)
    assert refusal.value.field == field


def test_shapes_that_do_not_fit_are_refused_by_name() -> None:
    weight, three = draw(64, 32), draw(3, 64, 32)
    down = draw(3, 32, 64)
    hidden, chosen, shares = torch.zeros(2, 32), torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1)
    with pytest.raises(BadInput, match="hidden"):
        block_linear(torch.zeros(2, 33), weight)
    with pytest.raises(BadInput, match="hidden"):
        block_linear(torch.zeros(2, 32, dtype=torch.float64), weight)
    with pytest.raises(BadInput, match="weight"):
        block_linear(hidden, three)
    with pytest.raises(BadInput, match="down"):
        block_experts(hidden, chosen, shares, three, three, three)
    with pytest.raises(BadInput, match="chosen"):
        block_experts(hidden, chosen.short(), shares, three, three, down)
    with pytest.raises(BadInput, match="weights"):
        block_experts(hidden, chosen, shares[:, :0], three, three, down)
    with pytest.raises(BadInput, match="out"):
        decode_blocks(weight, torch.float32, torch.zeros(64, 33))
    with pytest.raises(BadInput, match="dtype"):
        decode_blocks(weight, torch.float16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        weight.values = three.values  # type: ignore[misc]


def test_rows_of_experts_may_lie_apart_but_not_their_values() -> None:
    gate, up, down = draw(2, 128, 256), draw(2, 128, 256, seed=1), draw(2, 256, 128, seed=2)
    hidden, shares = torch.randn(5, 256), torch.rand(5, 2)
    chosen = torch.arange(10).view(5, 2) % 3 - 1
    wanted = block_experts(hidden, chosen, shares, gate, up, down)
    apart = [torch.cat((one, one), 1)[:, : one.shape[1]] for one in (hidden, chosen, shares)]
    assert torch.equal(block_experts(*apart, gate, up, down), wanted)
    with pytest.raises(BadInput, match="hidden"):
        block_experts(hidden.t().contiguous().t(), chosen, shares, gate, up, down)
