"""Rows on their way to experts: the model library's router, and bytes and sums as on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from transformers import DeepseekV32Config, GlmMoeDsaConfig  # noqa: E402
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32TopkRouter  # noqa: E402
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaTopkRouter  # noqa: E402

from kernels.expert_choice import ExpertChoice  # noqa: E402
from kernels.routing import (  # noqa: E402
    add_parts,
    choose_experts,
    exchanged_rows,
    pack_rows,
    router_logits,
    unpack_rows,
)

ROUTERS = {
    "deepseek-v3.2": lambda: DeepseekV32TopkRouter(DeepseekV32Config()),
    "glm-5": lambda: GlmMoeDsaTopkRouter(GlmMoeDsaConfig()),
    "small": lambda: DeepseekV32TopkRouter(
        DeepseekV32Config(hidden_size=64, n_routed_experts=16, n_group=4, topk_group=2, num_experts_per_tok=3)
    ),
}


def router(name: str, dtype: torch.dtype) -> torch.nn.Module:
    module = ROUTERS[name]()
    module.weight.data.normal_(std=module.hidden_dim**-0.5)
    module = module.to("cuda", dtype)
    module.e_score_correction_bias = torch.rand(module.num_experts, device="cuda") / 4
    return module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_weight_in_float32_is_not_rounded(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module, hidden = router("deepseek-v3.2", torch.float32), torch.randn(5, 7168, device="cuda", dtype=dtype)
    wanted = hidden.double() @ module.weight.double().T
    torch.testing.assert_close(router_logits(hidden, module.weight).double(), wanted, rtol=1e-5, atol=1e-5)


def by_expert(weights: Tensor, chosen: Tensor, experts: int) -> Tensor:
    return torch.zeros(len(chosen), experts, device="cuda").scatter_(1, chosen.long(), weights.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("rows", [1, 5, 64, 700])
def test_a_row_chooses_as_by_the_librarys_router(name: str, dtype: torch.dtype, rows: int) -> None:
    """But where two scores are closer than the order of a sum moves them."""
    torch.manual_seed(rows)
    module = router(name, dtype)
    hidden = torch.randn(rows, module.hidden_dim, device="cuda", dtype=dtype)
    choice = ExpertChoice.of(module)
    logits, wanted, ids = module(hidden)
    torch.testing.assert_close(router_logits(hidden, module.weight), logits, rtol=1e-4, atol=1e-4)
    weights, chosen = choose_experts(logits, module.e_score_correction_bias, choice, None)
    assert chosen.dtype == torch.int32
    ours, theirs = (by_expert(*pair, choice.experts) for pair in ((weights, chosen), (wanted, ids)))
    near = ((ours > 0) != (theirs > 0)).any(1)
    assert float(near.float().mean()) <= 0.01
    torch.testing.assert_close(ours[~near], theirs[~near], rtol=1e-5, atol=1e-7)
    assert torch.equal(chosen[0], choose_experts(logits[:1], module.e_score_correction_bias, choice, None)[1][0])


def test_padding_chooses_nothing() -> None:
    module = router("deepseek-v3.2", torch.bfloat16)
    logits, real = torch.randn(4, 256, device="cuda"), torch.tensor([True, False, True, False], device="cuda")
    _, chosen = choose_experts(logits, module.e_score_correction_bias, ExpertChoice.of(module), real)
    assert ((chosen == -1).all(1) == ~real).all()
    assert (chosen[real] >= 0).all()


def test_a_choice_is_written_where_rows_travel() -> None:
    torch.manual_seed(0)
    choice = ExpertChoice(experts=256, groups=8, groups_chosen=4, choices=8, normalizes=True, scaling=2.5)
    logits, bias = torch.randn(5, 256, device="cuda"), torch.rand(256, device="cuda")
    packed = torch.full((9, 24 * 2 + 80), 7, dtype=torch.uint8, device="cuda")
    into = exchanged_rows(packed, 24, torch.bfloat16, choice.choices)
    weights, chosen = choose_experts(logits, bias, choice, None)
    choose_experts(logits, bias, choice, None, into)
    assert torch.equal(into.chosen[:5], chosen)
    assert torch.equal(into.weights[:5], weights)
    assert into.chosen[5:].eq(-1).all()
    assert packed[:, :48].eq(7).all()
    assert packed[:, 48 + 64 :].eq(7).all()


def test_equal_scores_go_to_the_lowest_expert() -> None:
    choice = ExpertChoice(experts=16, groups=4, groups_chosen=2, choices=5, normalizes=True, scaling=2.0)
    weights, chosen = choose_experts(torch.zeros(1, 16, device="cuda"), torch.zeros(16, device="cuda"), choice, None)
    assert chosen.tolist() == [[0, 1, 2, 3, 4]]
    torch.testing.assert_close(weights, torch.full((1, 5), 0.4, device="cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("width", "choices"), [(7168, 8), (24, 6), (6144, 3)])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_bytes_of_rows_are_those_of_a_cpu(dtype: torch.dtype, width: int, choices: int, count: int) -> None:
    rows, row_bytes = 5, -(-(width * dtype.itemsize + 8 * choices) // 16) * 16
    hidden, weights = torch.randn(count, width).to(dtype), torch.rand(count, choices)
    chosen = torch.randint(0, 256, (count, choices))
    packed = torch.full((rows, row_bytes), 7, dtype=torch.uint8)
    there = packed.cuda()
    pack_rows(hidden, chosen, weights, packed)
    pack_rows(hidden.cuda(), chosen.cuda(), weights.cuda(), there)
    assert torch.equal(there.cpu(), packed)
    assert unpack_rows(there, width, dtype, choices).hidden.data_ptr() == there.data_ptr(), "by view"
    for one, other in zip(
        unpack_rows(there, width, dtype, choices)[:3], unpack_rows(packed, width, dtype, choices)[:3], strict=True
    ):
        assert torch.equal(one.cpu().to(other.dtype), other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_parts_are_added_in_their_order(dtype: torch.dtype, ranks: int) -> None:
    parts = torch.randn(ranks, 6, 1000).to(dtype)
    assert torch.equal(add_parts(parts.cuda()[:, :5], dtype).cpu(), add_parts(parts[:, :5], dtype))
    assert torch.equal(add_parts(parts.float().cuda(), dtype).cpu(), add_parts(parts.float(), dtype))
