"""Modules over block-FP8 weights: what they add to a product, and weights that are joined."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kernels.block_fp8 import decode_blocks
from tests.kernels.test_block_fp8 import draw
from tests.support.runner_rig import Rig
from tests.worker.runners.test_synthetic import MIXED, SMALL
from worker.runners.synthetic import synthetic_runner
from worker.runners.tiny import FAMILIES
from worker.weights import modules
from worker.weights.model import held_bytes
from worker.weights.modules import BlockLinear, can_be_joined, joined_of, make_linears, products
from worker.weights.random_model import random_model
from worker.weights.synth import published_config

#: Whole blocks in all weights that may be joined but kv_a_proj_with_mqa: 64 + 16 rows.
WHOLE = SMALL | MIXED | {"q_lora_rank": 128, "index_head_dim": 128, "moe_intermediate_size": 128}


def filled(*shapes: tuple[int, int]) -> tuple[list[BlockLinear], list[Tensor]]:
    """Products with weights of `shapes`, and those weights in float64."""
    made, decoded = make_linears(shapes, torch.device("cpu"), quantizes_rows=False), []
    for seed, (linear, shape) in enumerate(zip(made, shapes, strict=True)):
        weight = draw(*shape, seed=seed)
        linear.block_weight.values.copy_(weight.values)
        linear.block_weight.scales.copy_(weight.scales)
        decoded.append(decode_blocks(weight, torch.float32).double())
    return made, decoded


def near(got: Tensor, hidden: Tensor, weight: Tensor) -> None:
    torch.testing.assert_close(got.double(), hidden.double() @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [128, 256])
@pytest.mark.parametrize("ragged", [256, 72, 1])
def test_joined_products_are_those_of_each_weight(rows: int, ragged: int) -> None:
    members, weights = filled((rows, 300), (128, 300), (ragged, 300))
    joined = joined_of(members)
    assert joined is not None
    assert joined.out_features == rows + 128 + ragged
    hidden = torch.randn(2, 3, 300)
    backwards = products(hidden, *members[::-1])[::-1]
    for found in (products(hidden, *members), backwards, [one(hidden) for one in members]):
        for got, weight in zip(found, weights, strict=True):
            near(got, hidden, weight)
    two = products(hidden, members[2], members[0])
    near(two[0], hidden, weights[2])
    near(two[1], hidden, weights[0])
    (alone,) = products(hidden, members[2])
    near(alone, hidden, weights[2])
    assert alone.shape[-1] == ragged
    assert alone.is_contiguous(), "of its own launch"


@pytest.mark.parametrize(
    "shapes",
    [[(128, 256)], [(130, 256), (128, 256)], [(128, 256), (128, 128)], [(128, 256), (250_000, 256)]],
    ids=["one", "a block of two weights", "other activations", "large"],
)
def test_weights_that_do_not_fit_together_stay_apart(shapes: list[tuple[int, int]]) -> None:
    assert not can_be_joined(shapes)
    made = make_linears(shapes, torch.device("meta"), quantizes_rows=False)
    assert [tuple(one.block_weight.values.shape) for one in made] == shapes
    assert joined_of(made) is None


def test_products_beside_a_plain_one_are_formed_apart() -> None:
    (linear,), (weight,) = filled((128, 256))
    plain, hidden = nn.Linear(256, 64, bias=False), torch.randn(4, 256)
    found = products(hidden, plain, linear)
    assert torch.equal(found[0], plain(hidden))
    near(found[1], hidden, weight)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_joined_weights_is_the_same_model(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = type(published_config(family))(**WHOLE)
    found, held = [], []
    for most in (0, modules.JOINED_VALUES_MAX):
        monkeypatch.setattr(modules, "JOINED_VALUES_MAX", most)
        runner = synthetic_runner(config, device="cpu", fp8=True)
        model = runner._layers.model
        joined = {one.joined for one in model.modules() if isinstance(one, BlockLinear)} - {None}
        mixtures, indexers = (
            sum(getattr(one, name, None) is not None for one in model.modules()) for name in ("shared_experts", "wk")
        )
        assert len(joined) == (config.num_hidden_layers + mixtures if most else 0)
        assert sum(one.out_features == 128 + 128 + 80 for one in joined) == (indexers if most else 0)
        held.append(held_bytes(model))
        rig = Rig(runner, seats=1, context_tokens=200)
        tokens = [rig.open(0, list(range(90)), hot_slots=32)[0]]
        steps = []
        for _ in range(4):
            (token,), logits = rig.decode([0])
            tokens.append(token)
            steps.append(logits[0])
        found.append((tokens, torch.stack(steps)))
    assert held[0] == held[1]
    (tokens, logits), (joined_tokens, joined_logits) = found
    assert tokens == joined_tokens
    torch.testing.assert_close(logits, joined_logits, rtol=0, atol=0.1 * float(logits.abs().max()))


def test_biases_of_a_checkpoint_reach_products_that_keep_fp8() -> None:
    config = type(published_config("deepseek-v3.2"))(**WHOLE, attention_bias=True)
    model = random_model(config, dtype=torch.float32, device="cpu", fp8=True)
    attention = model.model.layers[0].self_attn
    for linear in (attention.q_a_proj, attention.kv_a_proj_with_mqa, attention.o_proj):
        assert isinstance(linear, BlockLinear)
        assert linear.bias is not None
        assert linear.joined is None
        hidden = torch.randn(3, linear.in_features)
        plain = linear(hidden)
        linear.bias.fill_(2.0)
        torch.testing.assert_close(linear(hidden), plain + 2.0)
