"""Block-FP8 products on a GPU: decoded values bit for bit, products up to the order of their sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kernels.block_fp8 import (  # noqa: E402
    block_experts,
    block_linear,
    decode_blocks,
    prepare_block_fp8,
)
from kernels.block_weight import BlockFp8  # noqa: E402
from kernels.cuda.block_fp8 import PIECE_TOKENS  # noqa: E402
from kernels.cuda.block_plans import CROSSOVER_TOKENS  # noqa: E402
from tests.kernels.test_block_fp8 import draw  # noqa: E402

SHAPES = [(576, 7168), (256, 1152), (1536, 512), (128, 7168), (64, 128), (200, 300), (24, 48), (1, 5)]
TOKENS = [1, 3, 16, 17, 40, 65, 130, 600]


def on_gpu(weight: BlockFp8) -> BlockFp8:
    return BlockFp8(weight.values.cuda(), weight.scales.cuda())


def activations(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def off(got: Tensor, wanted: Tensor) -> float:
    """Norm of the difference as a share of the norm of `wanted`; not a number is not near."""
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (3, 300, 200), (2, 5, 128, 256)], ids=str)
def test_decoded_values_are_the_cpus_bit_for_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = draw(*shape)
    out = torch.full(shape, torch.nan, dtype=dtype, device="cuda")
    assert torch.equal(decode_blocks(on_gpu(weight), dtype, out).cpu(), decode_blocks(weight, dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_that_of_the_decoded_weight(shape: tuple[int, int]) -> None:
    weight = on_gpu(draw(*shape))
    for tokens in TOKENS:
        hidden = activations(tokens, shape[1])
        wanted = hidden.double() @ decode_blocks(weight, torch.bfloat16).double().T
        got = block_linear(hidden, weight)
        assert off(got, wanted) < 4e-3
        assert torch.equal(got, block_linear(hidden, weight))  # the same bits again


def test_products_of_sparse_rows_are_exact() -> None:
    """One value in each row picks one decoded value: a wrong rounding of it cannot hide in a sum."""
    weight = on_gpu(draw(576, 1024))
    decoded = decode_blocks(weight, torch.bfloat16)
    for tokens in TOKENS:
        picked = torch.randint(0, 1024, (tokens,), device="cuda")
        hidden = torch.nn.functional.one_hot(picked, 1024).bfloat16()
        assert torch.equal(block_linear(hidden, weight), decoded.T[picked])


def test_long_chunks_go_through_scratch() -> None:
    weight = on_gpu(draw(576, 512))
    scratch = torch.full((600 * 512,), torch.nan, dtype=torch.bfloat16, device="cuda")
    hidden = activations(CROSSOVER_TOKENS, 512)
    got = block_linear(hidden, weight, scratch)
    assert torch.equal(scratch[: 576 * 512].view(576, 512), decode_blocks(weight, torch.bfloat16))
    assert off(got, block_linear(hidden, weight)) < 4e-3
    block_linear(hidden[:16], weight, scratch.fill_(7))
    assert bool((scratch == 7).all())


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize(("experts", "middle", "width"), [(5, 200, 300), (8, 256, 512), (1, 64, 128)])
def test_experts_are_those_of_torch(experts: int, middle: int, width: int, wide: bool) -> None:
    weights = [on_gpu(draw(experts, *shape)) for shape in ((middle, width), (middle, width), (width, middle))]
    decoded = [decode_blocks(one, torch.float32) for one in weights]
    on_cpu = [BlockFp8(one.values.cpu(), one.scales.cpu()) for one in weights]
    for tokens in (1, 2, 17, 130, PIECE_TOKENS + 3):
        for choices in (1, 3):
            hidden = activations(tokens, width)
            chosen = torch.rand(tokens, 12, device="cuda").argsort(1)[:, :choices].contiguous() - 1
            shares = torch.rand(tokens, choices, device="cuda").to(torch.float32 if wide else torch.bfloat16)
            got = block_experts(hidden, chosen, shares, *weights, 2)
            wanted = torch.zeros(tokens, width, device="cuda")
            for expert in range(experts):
                gate, up, down = (one[expert] for one in decoded)
                share = (shares.float() * (chosen == expert + 2)).sum(1, keepdim=True)
                rows = hidden.float()
                wanted += share * ((torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)) @ down.T)
            held = ((chosen >= 2) & (chosen < experts + 2)).any(1)
            assert not got[~held].any()
            assert bool(got.isfinite().all())
            if held.any():
                assert off(got, wanted) < 1.5e-2
            assert torch.equal(got, block_experts(hidden, chosen, shares, *weights, 2))
            limit = float(hidden.float().abs().mean())
            cut = block_experts(hidden, chosen, shares, *weights, 2, limit=limit)
            plain = block_experts(hidden.cpu(), chosen.cpu(), shares.cpu(), *on_cpu, 2, limit=limit)
            if held.any():
                assert off(cut, plain.cuda()) < 1.5e-2
            apart = (torch.cat((one, one[:, :16]), 1)[:, : one.shape[1]] for one in (hidden, chosen, shares))
            out = torch.full_like(got, torch.nan)
            assert block_experts(*apart, *weights, 2, out=out).data_ptr() == out.data_ptr()
            assert torch.equal(out, got), "rows that lie apart, and a place for the result"


def test_all_experts_of_a_model_take_a_whole_block_of_prompts() -> None:
    """256 experts of a size that Hopper's kernel forms, on one card: their tiles go in two pieces."""
    one = [on_gpu(draw(1, *shape, seed=seed)) for seed, shape in enumerate(((2048, 2048), (2048, 2048), (2048, 2048)))]
    weights = [BlockFp8(each.values.repeat(256, 1, 1), each.scales.repeat(256, 1, 1)) for each in one]
    hidden, shares = activations(PIECE_TOKENS, 2048), torch.rand(PIECE_TOKENS, 8, device="cuda")
    chosen = torch.rand(PIECE_TOKENS, 256, device="cuda").argsort(1)[:, :8].int().contiguous()
    got = block_experts(hidden, chosen, shares, *weights)
    gate, up, down = (decode_blocks(each, torch.bfloat16).float()[0] for each in one)
    rows = hidden.float()
    share = shares.sum(1, keepdim=True)
    assert off(got, share * ((torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)) @ down.T)) < 1.5e-2


def test_one_choice_of_one_sparse_row_is_exact() -> None:
    gate, up, down = on_gpu(draw(3, 128, 256)), on_gpu(draw(3, 128, 256, seed=1)), on_gpu(draw(3, 256, 128, seed=2))
    hidden = torch.nn.functional.one_hot(torch.arange(40, device="cuda"), 256).bfloat16()
    chosen = torch.arange(40, device="cuda")[:, None] % 3
    ones = torch.ones(40, 1, device="cuda")
    plain = [decode_blocks(one, torch.bfloat16) for one in (gate, up, down)]
    rows = [
        torch.nn.functional.silu(plain[0][e, :, t]) * plain[1][e, :, t] for t, e in enumerate(chosen[:, 0].tolist())
    ]
    wanted = torch.stack([row @ plain[2][e].T for row, e in zip(rows, chosen[:, 0].tolist(), strict=True)])
    assert off(block_experts(hidden, chosen, ones, gate, up, down), wanted) < 5e-3


def test_products_can_be_captured_once_prepared() -> None:
    """Routing may change between replays: nothing of it is baked into the graph."""
    dense = on_gpu(draw(576, 1024))
    weights = tuple(on_gpu(draw(6, *shape)) for shape in ((256, 512), (256, 512), (512, 256)))
    prepare_block_fp8([dense], [weights], tokens=[1, 24], choices=2)
    wide, hidden = activations(24, 1024), activations(24, 512)
    chosen = torch.zeros(24, 2, dtype=torch.int64, device="cuda")
    shares = torch.rand(24, 2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = block_linear(wide, dense), block_experts(hidden, chosen, shares, *weights)
    for _ in range(3):
        wide.normal_()
        chosen.copy_(torch.rand(24, 8, device="cuda").argsort(1)[:, :2] - 1)
        graph.replay()
        assert torch.equal(outs[0], block_linear(wide, dense))
        assert torch.equal(outs[1], block_experts(hidden, chosen, shares, *weights))


def test_float32_activations_take_float32_weights() -> None:
    weight = on_gpu(draw(200, 300))
    hidden = torch.randn(5, 300, device="cuda")
    wanted = hidden.double() @ decode_blocks(weight, torch.float32).double().T
    assert off(block_linear(hidden, weight), wanted) < 1e-5
