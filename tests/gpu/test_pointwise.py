"""Norms and sums in one launch: what the model library computes in many."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from transformers.models.deepseek_v32 import modeling_deepseek_v32 as library  # noqa: E402

from kernels.block_weight import E4M3  # noqa: E402
from kernels.cuda import quantize  # noqa: E402
from kernels.cuda.pointwise import gate, join_norm, rms_norm  # noqa: E402
from kernels.routing import add_parts, exchanged_rows  # noqa: E402

DTYPES = [torch.bfloat16, torch.float32]


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [4, 512, 1536, 7168])
def test_a_norm_is_the_librarys_but_for_the_order_of_its_sum(size: int, dtype: torch.dtype) -> None:
    norm = library.DeepseekV32RMSNorm(size).to("cuda", dtype)
    norm.weight.data.normal_()
    values = draw(3, 5, size + 64, dtype=dtype)[..., :size]
    ours, theirs = rms_norm(values, norm.weight.data, norm.variance_epsilon), norm(values)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(ours, theirs, rtol=(2 if dtype == torch.bfloat16 else 16) * step, atol=0)
    if dtype == torch.bfloat16:
        assert float((ours != theirs).float().mean()) < 1e-2
    alone = rms_norm(values[1, 2:3], norm.weight.data, norm.variance_epsilon)
    assert torch.equal(alone[0], ours[1, 2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_and_gates_round_as_the_library_does(dtype: torch.dtype) -> None:
    hidden, added = draw(7, 1, 7168, dtype=dtype), draw(7, 1, 7168, dtype=dtype)
    weight, step = draw(7168, dtype=dtype), torch.finfo(dtype).eps
    total, normed = join_norm(hidden, added.view(1, 7, 7168), None, weight, 1e-6)
    assert torch.equal(total, hidden + added)
    assert torch.equal(normed, rms_norm(hidden + added, weight, 1e-6))
    torch.testing.assert_close(gate(hidden, added), F.silu(hidden) * added, rtol=16 * step, atol=step**2)
    odd = draw(3, 1001, dtype=dtype)
    torch.testing.assert_close(gate(odd, odd), F.silu(odd) * odd, rtol=16 * step, atol=step**2)
    for size in (2048, 1001):  # halves of one result
        values, factors = draw(3, 5, 2 * size, dtype=dtype).split(size, dim=-1)
        assert torch.equal(gate(values, factors), gate(values.contiguous(), factors.contiguous()))


@pytest.mark.parametrize("parts_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("size", [7168, 1000])
def test_parts_are_added_in_their_order_and_rounded_after_each_sum(
    size: int, ranks: int, parts_dtype: torch.dtype
) -> None:
    hidden, shared = draw(5, 1, size, dtype=torch.bfloat16), draw(5, 1, size, dtype=torch.bfloat16)
    parts, weight = draw(ranks, 6, size, dtype=parts_dtype)[:, :5], draw(size, dtype=torch.bfloat16)
    packed = torch.zeros(5, size + 24, dtype=torch.bfloat16, device="cuda")
    total, normed = join_norm(hidden, parts, shared, weight, 1e-6, packed[:, :size])
    wanted = hidden + (add_parts(parts, torch.bfloat16).view(hidden.shape) + shared)
    assert torch.equal(total, wanted)
    assert torch.equal(normed, rms_norm(wanted, weight, 1e-6))
    assert torch.equal(packed[:, :size], normed.squeeze(1))
    assert not packed[:, size:].any()
    alone, nothing = join_norm(hidden, parts, shared, None, 0.0)
    assert torch.equal(alone, wanted)
    assert nothing is None


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("size", [7168, 1536, 128])
def test_a_norm_is_quantized_as_by_a_launch_of_its_own(size: int, powers: bool) -> None:
    hidden, parts = draw(5, 1, size, dtype=torch.bfloat16), draw(1, 5, size, dtype=torch.bfloat16)
    hidden[3], parts[0, 3] = 0, 0
    hidden[4] *= 1e6
    weight = draw(size, dtype=torch.bfloat16)
    codes = quantize.Codes.allocate(16, size, hidden.device, powers=powers)
    for make in (
        lambda: join_norm(hidden, parts, None, weight, 1e-6, None, codes)[1],
        lambda: rms_norm(hidden, weight, 1e-6, codes),
    ):
        codes.values.view(torch.uint8).fill_(7)
        normed = make()
        assert normed is not None
        wanted = quantize.quantize(normed.view(5, size), powers=powers)
        assert torch.equal(codes.values[:5].view(torch.uint8), wanted.values.view(torch.uint8))
        assert torch.equal(codes.scales[:5], wanted.scales)
        assert codes.values[5:].view(torch.uint8).eq(7).all()


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("with_codes", [False, True])
def test_a_norm_is_quantized_where_rows_travel_too(with_codes: bool, powers: bool) -> None:
    size = 7168
    hidden, parts = draw(5, 1, size, dtype=torch.bfloat16), draw(1, 5, size, dtype=torch.bfloat16)
    weight, packed = draw(size, dtype=torch.bfloat16), torch.full((7, 7456), 7, dtype=torch.uint8, device="cuda")
    own = exchanged_rows(packed, size, E4M3, 8)
    assert own.scales is not None
    also = quantize.Codes(own.hidden[:5], own.scales[:5], powers)
    codes = quantize.Codes.allocate(16, size, hidden.device, powers=powers) if with_codes else None
    _, normed = join_norm(hidden, parts, None, weight, 1e-6, also, codes)
    assert normed is not None
    wanted = quantize.quantize(normed.view(5, size), powers=powers)
    for found in (also, *(() if codes is None else (codes,))):
        assert torch.equal(found.values[:5].view(torch.uint8), wanted.values.view(torch.uint8))
        assert torch.equal(found.scales[:5], wanted.scales)
    assert packed[5:].eq(7).all()
    assert packed[:, size + 224 :].eq(7).all()
