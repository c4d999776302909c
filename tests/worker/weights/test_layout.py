"""The published layout against the model library's modules, and sizes against the published models."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from protocol.errors import ConfigError
from worker.families.deepseek_v32 import DEEPSEEK_V32
from worker.families.table import family_named, models
from worker.weights.layout import DIMENSIONS, EXPERT, ExpertShare, is_of_mtp, tensors_of, weights_bytes
from worker.weights.model import append_draft_layer, empty_model
from worker.weights.shares import rank_bytes
from worker.weights.synth import published_config

MODELS = models()
BLOCK = (128, 128)


def library_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("model", MODELS)
def test_layout_is_that_of_the_librarys_modules(model: str) -> None:
    """Real widths, five layers; projections of experts are stacked in the library, and some of an MLP joined."""
    config, family = published_config(model, layers=5, experts=16), family_named(model)
    wanted = library_shapes(config)
    together: dict[str, int] = {}
    for spec in tensors_of(config):
        if found := EXPERT.match(spec.name):
            stack = "down_proj" if found[3] in ("down_proj", "w2") else "gate_up_proj"
            name = family.module_name(f"{found[1]}.{stack}")
        elif joined := family.joined(spec.name):
            name = family.module_name(joined[0])
        else:
            assert wanted.pop(family.module_name(spec.name)) == spec.shape
            continue
        together[name] = together.get(name, 0) + prod(spec.shape)
    assert together == {name: prod(shape) for name, shape in wanted.items()}


def test_layers_that_share_a_selection_have_no_indexer() -> None:
    config = published_config("glm-5", layers=4, experts=16)
    config.indexer_types = ["full", "shared", "full", "shared"]
    layers = {int(it.name.split(".")[2]) for it in tensors_of(config) if ".indexer." in it.name}
    assert layers == {0, 2}


@pytest.mark.parametrize("model", [model for model in MODELS if family_named(model).drafts])
def test_draft_layer_is_that_of_the_librarys_modules(model: str) -> None:
    config = published_config(model, layers=5, experts=16)
    with torch.device("meta"):
        empty = empty_model(config, torch.bfloat16)
    append_draft_layer(empty)
    prefix, wanted = "model.layers.5.", empty.model.layers[5].state_dict()
    specs = {it.name.removeprefix(prefix): it for it in tensors_of(config, draft_layer=True) if prefix in it.name}
    named = family_named(model).module_name
    plain = {named(name): it.shape for name, it in specs.items() if ".experts." not in name}
    assert plain == {name: tuple(it.shape) for name, it in wanted.items() if ".experts." not in name}
    assert len(specs) - len(plain) == 3 * 16
    assert not specs["eh_proj.weight"].converts
    assert specs["self_attn.indexer.wk.weight"].converts


@pytest.mark.parametrize(("family", "billions"), [("deepseek-v3.2", 11.6), ("glm-5", 10.0)])
def test_published_draft_layers_have_the_stated_parameters(family: str, billions: float) -> None:
    config = published_config(family)
    drafting, plain = ({it.name: prod(it.shape) for it in tensors_of(config, draft_layer=it)} for it in (True, False))
    assert (sum(drafting.values()) - sum(plain.values())) / 1e9 == pytest.approx(billions, abs=0.05)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_weights_of_the_draft_layer_are_counted_when_asked(on_gpu: bool) -> None:
    config, rank = published_config("deepseek-v3.2"), ExpertShare(32, 32)
    plain, drafting = (
        weights_bytes(config, "bfloat16", BLOCK, on_gpu=on_gpu, experts=rank, draft_layer=it) for it in (False, True)
    )
    held = {name: size - plain[name] for name, size in drafting.items()}
    experts = 3 * 33 * 2048 * 7168  # with the shared one
    attention = 1536 * 7168 + 24576 * 1536 + 576 * 7168 + 7168 * 16384 + 8192 * 1536 + 128 * 7168
    halves = 32768 * 512
    plain_values = 2 * 7168 * 7168 + 256 * 7168 + 64 * 7168 + 5 * 7168 + 1536 + 512 + 2 * 128
    if on_gpu:
        assert held["float8_e4m3fn"] == experts + attention
        assert held["bfloat16"] == 2 * (halves + plain_values)
    else:
        assert held["bfloat16"] == 2 * (experts + attention + 2 * halves + plain_values)
    ranks = [rank_bytes(config, "bfloat16", BLOCK, 8, 512, draft_layer=it).weights for it in (False, True)]
    if on_gpu:
        assert sum(ranks[1].values()) - sum(ranks[0].values()) == sum(held.values())


@pytest.mark.parametrize(("family", "billions"), [("deepseek-v3.2", 671.9), ("glm-5", 743.9), ("a.x-k2-light", 20.3)])
def test_published_models_have_the_stated_parameters(family: str, billions: float) -> None:
    assert sum(prod(it.shape) for it in tensors_of(published_config(family))) / 1e9 == pytest.approx(billions, abs=0.05)


def test_weights_of_a_rank_of_eight_are_counted_by_dtype() -> None:
    """DeepSeek-V3.2 over eight GPUs: 32 of 256 experts in each of 58 layers, all else whole."""
    config = published_config("deepseek-v3.2")
    held = weights_bytes(config, "bfloat16", BLOCK, on_gpu=True, experts=ExpertShare(0, 32))
    experts = 58 * 32 * 3 * 2048 * 7168
    shared = 58 * 3 * 2048 * 7168 + 3 * 3 * 18432 * 7168
    attention = 61 * (1536 * 7168 + 24576 * 1536 + 576 * 7168 + 7168 * 16384)
    indexers = 61 * (8192 * 1536 + 128 * 7168)
    assert held["float8_e4m3fn"] == experts + shared + attention + indexers
    halves = 61 * 32768 * 512
    plain = 2 * 129280 * 7168 + 58 * 256 * 7168 + 61 * (64 * 7168 + 2 * 7168 + 1536 + 512 + 2 * 128) + 7168
    assert held["bfloat16"] == 2 * (halves + plain)
    assert 58 * 3 * 32 * 16 * 56 * 4 < held["float32"] < held["float8_e4m3fn"] / 4000


def test_decoded_weights_are_counted_with_both_forms_of_kv_b() -> None:
    config = published_config("glm-5", layers=1)
    decoded, kept = (weights_bytes(config, "bfloat16", BLOCK, on_gpu=on_gpu) for on_gpu in (False, True))
    assert "float8_e4m3fn" not in decoded
    assert decoded["bfloat16"] - 2 * kept["float8_e4m3fn"] - kept["bfloat16"] == 2 * 64 * (192 + 256) * 512


def test_tensors_behind_the_last_layer_are_of_mtp() -> None:
    assert is_of_mtp("model.layers.61.eh_proj.weight", 61)
    assert not is_of_mtp("model.layers.60.mlp.gate.weight", 61)
    assert not is_of_mtp("model.norm.weight", 61)


@pytest.mark.parametrize("name", [*DIMENSIONS, *DEEPSEEK_V32.sizes])
@pytest.mark.parametrize("value", [None, -1, 2.5, "7", True, 10**9])
def test_an_unfit_dimension_is_named(name: str, value: Any) -> None:
    config = SimpleNamespace(**dict.fromkeys((*DIMENSIONS, *DEEPSEEK_V32.sizes), 16), model_type="deepseek_v32")
    setattr(config, name, value)
    with pytest.raises(ConfigError, match=rf"config\.json {name}"):
        next(iter(tensors_of(config)))
