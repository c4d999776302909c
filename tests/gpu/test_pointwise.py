"""Norms and rotations in one launch: what the model library computes in many."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from transformers.models.deepseek_v32 import modeling_deepseek_v32 as library  # noqa: E402

from kernels.pointwise import add_rms_norm, gate, rms_norm, rotate  # noqa: E402

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
@pytest.mark.parametrize(("heads", "tokens"), [(128, 1), (20, 7), (1, 3)])
def test_rotations_are_the_librarys_bit_for_bit(heads: int, tokens: int, dtype: torch.dtype) -> None:
    half = draw(2, 3, tokens, 32, dtype=dtype)
    cos, sin = (torch.cat((part, part), -1) for part in half)
    queries = draw(3, tokens, heads, 192, dtype=dtype).transpose(1, 2)[..., 128:]
    keys = draw(3, tokens, 576, dtype=dtype)[..., 512:].view(3, 1, tokens, 64)
    ours = rotate(queries, keys, cos, sin, heads_dim=1, interleaved=True)
    for one, other in zip(ours, library.apply_rotary_pos_emb_interleave(queries, keys, cos, sin), strict=True):
        assert torch.equal(one, other)
    queries, keys = draw(3, tokens, heads, 128, dtype=dtype), draw(3, tokens, 1, 128, dtype=dtype)
    ours = rotate(queries, keys, cos, sin, heads_dim=2, interleaved=False)
    theirs = library.apply_rotary_pos_emb(queries[..., :64], keys[..., :64], cos, sin, unsqueeze_dim=2)
    for one, other, given in zip(ours, theirs, (queries, keys), strict=True):
        assert torch.equal(one[..., :64], other)
        assert torch.equal(one[..., 64:], given[..., 64:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_and_gates_round_as_the_library_does(dtype: torch.dtype) -> None:
    hidden, added = draw(7, 1, 7168, dtype=dtype), draw(7, 1, 7168, dtype=dtype)
    weight, step = draw(7168, dtype=dtype), torch.finfo(dtype).eps
    total, normed = add_rms_norm(hidden, added, weight, 1e-6)
    assert torch.equal(total, hidden + added)
    assert torch.equal(normed, rms_norm(hidden + added, weight, 1e-6))
    torch.testing.assert_close(gate(hidden, added), F.silu(hidden) * added, rtol=16 * step, atol=step**2)
    odd = draw(3, 1001, dtype=dtype)
    torch.testing.assert_close(gate(odd, odd), F.silu(odd) * odd, rtol=16 * step, atol=step**2)
    for size in (2048, 1001):  # halves of one result
        values, factors = draw(3, 5, 2 * size, dtype=dtype).split(size, dim=-1)
        assert torch.equal(gate(values, factors), gate(values.contiguous(), factors.contiguous()))
