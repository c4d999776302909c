"""Modules over block-FP8 weights: what they add to a product, and weights that are joined."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from kernels.block_fp8 import decode_blocks
from kernels.block_weight import BLOCK, BlockFp8
from tests.kernels.test_block_fp8 import draw
from tests.support.checkpoints import DRAFTING, LATENT
from tests.support.history import dealt
from tests.support.runner_rig import Rig
from tests.worker.runners.test_synthetic import MIXED, SMALL
from worker.families.base import TensorSpec
from worker.runners import synthetic
from worker.runners.synthetic import synthetic_runner
from worker.weights import modules
from worker.weights.layout import scale_shape, tensors_of
from worker.weights.matmul import DECODED, Matmul
from worker.weights.memory import OwnMemory
from worker.weights.model import held_bytes, load_model
from worker.weights.modules import (
    Activations,
    BlockExperts,
    BlockLinear,
    can_be_joined,
    joined_of,
    make_codes_for,
    make_linears,
    products,
)
from worker.weights.quantization import read_quantization
from worker.weights.synth import published_config
from worker.weights.writing import write_repository

#: Whole blocks in all weights that may be joined but kv_a_proj_with_mqa: 64 + 16 rows.
WHOLE = SMALL | MIXED | {"q_lora_rank": 128, "index_head_dim": 128, "moe_intermediate_size": 128}


def named(shapes: Sequence[tuple[int, int]]) -> dict[str, tuple[int, int]]:
    return {str(number): shape for number, shape in enumerate(shapes)}


def filled(*shapes: tuple[int, int]) -> tuple[list[BlockLinear], list[Tensor]]:
    """Products with weights of `shapes`, and those weights in float64."""
    made, decoded = make_linears(named(shapes), OwnMemory("cpu"), DECODED), []
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
    backwards = products(Activations(hidden), *members[::-1])[::-1]
    for found in (products(Activations(hidden), *members), backwards, [one(hidden) for one in members]):
        for got, weight in zip(found, weights, strict=True):
            near(got, hidden, weight)
    two = products(Activations(hidden), members[2], members[0])
    near(two[0], hidden, weights[2])
    near(two[1], hidden, weights[0])
    (alone,) = products(Activations(hidden), members[2])
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
    made = make_linears(named(shapes), OwnMemory("meta"), DECODED)
    assert [tuple(one.block_weight.values.shape) for one in made] == shapes
    assert joined_of(made) is None


def test_products_beside_a_plain_one_are_formed_apart() -> None:
    (linear,), (weight,) = filled((128, 256))
    plain, hidden = nn.Linear(256, 64, bias=False), torch.randn(4, 256)
    found = products(Activations(hidden), plain, linear)
    assert torch.equal(found[0], plain(hidden))
    near(found[1], hidden, weight)


@pytest.mark.parametrize("family", LATENT)
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
        logits = [rig.open(0, list(range(90)), hot_slots=32)[1]]
        logits += [rig.decode([0], inputs=[token])[1][0] for token in range(4)]
        found.append(torch.stack(logits))
    assert held[0] == held[1]
    apart, joined_logits = found
    assert float((apart - joined_logits).norm() / apart.norm()) < 1e-4


W8A8 = Matmul("fake 0.0", powers=True)


@pytest.mark.parametrize(("rows", "columns"), [(256, 256), (130, 256), (256, 200)])
def test_w8a8_products_are_near_and_not_those_of_decoded_weights(rows: int, columns: int) -> None:
    weight, hidden = draw(rows, columns), torch.randn(3, 2, columns)
    exact, quantized = BlockLinear(weight)(hidden), BlockLinear(weight, W8A8)
    assert quantized.quantizes_rows == (rows % 8 == 0 and columns % 128 == 0)
    assert torch.equal(quantized(hidden), exact) != quantized.quantizes_rows
    assert float((quantized(hidden) - exact).norm() / exact.norm()) < 0.1


def test_rows_are_quantized_ahead_for_products_that_want_it_alone() -> None:
    plain, exact, quantized = torch.nn.Linear(256, 8), BlockLinear(draw(64, 256)), BlockLinear(draw(64, 256), W8A8)
    assert make_codes_for(plain, 5) is None
    assert make_codes_for(exact, 5) is None
    assert make_codes_for(quantized, 0) is None
    codes = make_codes_for(quantized, 5)
    assert codes is not None
    assert codes.values.shape == (16, 256)
    assert codes.powers


def test_w8a8_product_of_a_gated_middle_adds_its_bias() -> None:
    linear = BlockLinear(draw(64, 256), W8A8)
    linear.bias = torch.randn(64)
    gate, up = torch.randn(2, 5, 256)
    assert torch.equal(linear.gated(gate, up), linear(torch.nn.functional.silu(gate) * up))


@pytest.mark.parametrize("middle", [256, 192])
def test_experts_hold_the_same_weights_in_both_forms(middle: int) -> None:
    """In whole blocks gate and up lie in one weight; others are decoded."""
    memory, hidden = OwnMemory("cpu"), torch.randn(7, 256)
    exact, quantized = (BlockExperts("", (3, middle, 256), memory, it).place(2, 9) for it in (DECODED, W8A8))
    assert quantized.quantizes_rows == (middle % 128 == 0)
    shapes = {"gate": (middle, 256), "up": (middle, 256), "down": (256, middle)}
    for seed, (projection, shape) in enumerate(shapes.items()):
        for expert in range(3):
            for experts in (exact, quantized):
                part, weight = experts.weight(projection, expert), draw(*shape, seed=10 * seed + expert)
                part.values.copy_(weight.values)
                part.scales.copy_(weight.scales)
    chosen = torch.rand(7, 9).argsort(1)[:, :4].contiguous()
    shares = torch.rand(7, 4)
    one, other = exact(hidden, chosen, shares), quantized(hidden, chosen, shares)
    assert torch.equal(one, other) != quantized.quantizes_rows
    assert float((one - other).norm() / one.norm()) < 0.15
    assert sum(it.nbytes for it in exact.weights) == sum(it.nbytes for it in quantized.weights)


@pytest.mark.parametrize("family", LATENT)
def test_model_of_either_products_holds_the_same_bytes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = type(published_config(family))(**WHOLE)
    held = []
    for made in (DECODED, W8A8):
        monkeypatch.setattr(synthetic, "resolve_matmul", lambda *_, made=made, **__: made)
        model = synthetic_runner(config, device="cpu", dtype="float32", fp8=True)._layers.model
        assert any(getattr(one, "quantizes_rows", False) for one in model.modules()) == made.quantizes_rows
        held.append(held_bytes(model))
    assert held[0] == held[1]


@pytest.mark.parametrize(
    ("family", "draft_tokens"), [*dealt(DRAFTING, (0, 1)), *((it, 0) for it in LATENT if it not in DRAFTING)]
)
def test_products_are_prepared_in_the_forms_that_a_model_takes_alone(
    family: str, draft_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a joined weight is compiled for the draft layer alone, whose rows come without queries."""
    config = type(published_config(family))(**WHOLE | {"hidden_size": 256, "num_nextn_predict_layers": 1})
    formed, prepared = set[int](), set[int]()

    def form(hidden: Tensor, weight: BlockFp8, *_: object, **__: object) -> Tensor:
        formed.add(len(weight.values))
        return hidden.new_zeros(len(hidden), len(weight.values))

    def prepare(linears: Iterable[BlockFp8], *_: object, **__: object) -> int:
        prepared.update(len(weight.values) for weight in linears)
        return 0

    monkeypatch.setattr(modules, "block_linear_w8a8", form)
    monkeypatch.setattr(modules, "block_gated_w8a8", lambda gate, _, weight, **__: form(gate, weight))
    monkeypatch.setattr(modules, "prepare_w8a8", prepare)
    monkeypatch.setattr(synthetic, "resolve_matmul", lambda *_, **__: W8A8)
    runner = synthetic_runner(config, device="cpu", dtype="float32", fp8=True, draft_tokens=draft_tokens)
    modules.prepare_quantized_products(runner._layers.model, 512, 2, runner._apart())
    layers, angles = runner._layers, runner._layers.embed(torch.zeros(1, 3).long(), torch.arange(3)[None])[1]
    hidden = torch.randn(1, 3, layers.streams * config.hidden_size)
    for layer in layers:
        entered = layers.enter(layer, hidden)
        inputs = layers.compress(layer, entered)
        ending = layers.project(layer, inputs, angles).ending
        if layer.anchor:
            layers.project_index(layer, inputs, angles)
        attended = hidden.new_zeros(1, 3, layer.attention.o_proj.in_features)
        layers.finish(layer, hidden, attended, layers.prompt_experts, ending=ending)
    if layers.draft is not None:
        layers.kept(layers.draft, layers.enter(layers.draft, hidden), angles)
    assert formed == prepared
    assert 128 + 128 + 80 in formed
    assert (80 in formed) == bool(draft_tokens)


class Biased:
    """A TensorSource whose biases are not zero."""

    def plain(self, spec: TensorSpec, first: int, count: int) -> Tensor:
        if spec.name.endswith(".bias"):
            return torch.arange(spec.shape[0]) / spec.shape[0]
        return torch.ones(spec.shape) if len(spec.shape) == 1 else torch.randn(count, *spec.shape[1:])

    def values(self, spec: TensorSpec, first: int, count: int) -> Tensor:
        return torch.randint(0, 0x60, (count, *spec.shape[1:]), dtype=torch.uint8).view(torch.float8_e4m3fn)

    def scales(self, spec: TensorSpec, first: int, count: int) -> Tensor:
        return torch.full(scale_shape((count, *spec.shape[1:]), (BLOCK, BLOCK)), 0.01)


def test_biases_of_a_checkpoint_reach_products_that_keep_fp8(tmp_path: Path) -> None:
    config = type(published_config("deepseek-v3.2"))(**WHOLE, attention_bias=True)
    write_repository(
        tmp_path, json.loads(config.to_json_string(use_diff=False)), tensors_of(config), Biased(), fp8=True
    )
    quantization = read_quantization(json.loads((tmp_path / "config.json").read_text()), tmp_path / "config.json")
    kept, decoded = (
        load_model(tmp_path, quantization, dtype=torch.float32, keeps_fp8=keeps).model.layers[0].self_attn
        for keeps in (True, False)
    )
    for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"):
        linear, wanted = getattr(kept, name), getattr(decoded, name)
        assert isinstance(linear, BlockLinear)
        assert linear.joined is None
        hidden = torch.randn(3, linear.in_features)
        torch.testing.assert_close(linear(hidden), wanted(hidden), rtol=1e-4, atol=1e-4)
        assert wanted.bias.max() > 0.9
