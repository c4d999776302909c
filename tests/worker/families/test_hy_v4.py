"""Hy4 alone: stored names, stacked experts, streams, sinks, limits, the layers that select."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.errors import ConfigError
from tests.support.checkpoints import tiny_checkpoint
from tests.support.runner_rig import Rig
from worker.families.base import ATTENTION, HEAD, MLP
from worker.families.hy_v4 import HY_V4
from worker.runners.attention import Rope, join_normed
from worker.runners.checkpoint import geometry_of, read_config, read_dimensions
from worker.runners.tiny import tiny_config, write_tiny_checkpoint
from worker.runners.tiny_weights import random_model
from worker.runners.transformers_dsa import TransformersRunner
from worker.weights.layout import EXPERT, ExpertShare, stored_tensors, tensors_of
from worker.weights.matching import match
from worker.weights.shards import Shards
from worker.weights.synth import published_config

PROMPT = list(Path(__file__).read_bytes())
GATE_UP, DOWN = (f"model.layers.2.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj"))


@pytest.fixture(scope="session")
def checkpoint(run_dir: Path) -> Path:
    return tiny_checkpoint(run_dir, "hy4", index_topk=32)


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def changed(path: Path, **fields: Any) -> Path:
    config = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return path


# ---------------------------------------------------------------- config and weights


def test_a_published_model_selects_in_21_of_78_layers_and_keeps_rows_of_576_values() -> None:
    config = published_config("hy4")
    geometry = geometry_of(config, "fp8")
    assert (geometry.layers, geometry.groups, geometry.row_bytes) == (78, 21, 656)
    assert [geometry.layers_of_group(group)[0] for group in range(3)] == [0, 1, 5]
    assert geometry.layers * geometry.row_bytes + geometry.groups * geometry.index_row_bytes == 53_940


def test_a_config_that_does_not_say_which_layers_select_leaves_it_to_the_class(copied: Path) -> None:
    """Without the field every fourth layer selects from the second on, and not every layer."""
    assert geometry_of(read_dimensions(copied), "float32").group_of_layer == (0, 0, 1, 1)
    assert geometry_of(read_dimensions(changed(copied, indexer_types=None)), "float32").group_of_layer == (0, 1, 1, 1)


@pytest.mark.parametrize("name", ["swiglu_limit", "hc_eps", "hc_magnitude"])
@pytest.mark.parametrize("value", [0, -1.0, float("inf"), "10", True])
def test_numbers_that_the_library_and_its_description_treat_apart_are_refused(
    copied: Path, name: str, value: object
) -> None:
    """A limit of 0 is none by the class's description, and cuts everything by its code."""
    with pytest.raises(ConfigError, match=f"{name} .* is no finite number above 0"):
        read_config(changed(copied, **{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [("enable_ihc", False), ("gated_mla", False), ("gating_type", "headwise"), ("learnable_sink", False)],
)
def test_published_switches_have_one_value(copied: Path, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} {value} is not served"):
        read_config(changed(copied, **{name: value}))


def test_checkpoints_have_the_published_names(checkpoint: Path) -> None:
    stored = load_file(checkpoint / "model.safetensors")
    layer = {name.removeprefix("model.layers.2.") for name in stored if name.startswith("model.layers.2.")}
    assert {"self_attn.linear_gate.weight", "self_attn.learnable_sink_param"} <= layer
    assert {
        f"hc_{part}_layer.hc_pre.hc_{leaf}" for part in ("attn", "mlp") for leaf in ("fn", "base", "scale")
    } <= layer
    assert {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"} == {name for name in layer if "experts." in name[:12]}
    assert stored["model.hc_head.hc_head_fn"].shape == (4, 4 * 128)
    assert not any(name.startswith("model.layers.4.") for name in stored)  # no draft layer


def test_experts_stored_together_are_found_one_by_one(checkpoint: Path) -> None:
    stored = load_file(checkpoint / "model.safetensors")
    with Shards.open(checkpoint) as shards:
        assert not {GATE_UP, DOWN} & shards.tensors.keys()
        for expert in (0, 7, 31):
            gate, up = stored[GATE_UP][expert].chunk(2)
            for part, wanted in (("gate", gate), ("up", up), ("down", stored[DOWN][expert])):
                name = f"model.layers.2.mlp.experts.{expert}.{part}_proj.weight"
                assert shards.tensors[name].tensor.shape == tuple(wanted.shape)
                found = bytearray(wanted.nbytes)
                shards.read_into(name, 0, memoryview(found))
                assert found == wanted.contiguous().numpy().tobytes()


def test_a_rank_reads_its_experts_of_a_stack_alone(checkpoint: Path) -> None:
    config, share = published_like(checkpoint), ExpertShare(8, 8)
    with Shards.open(checkpoint) as shards:
        names = [it.spec.name for it in match(config, shards, None, share)]
    numbers = {int(found[2]) for name in names if (found := EXPERT.match(name))}
    assert numbers == set(range(8, 16))


def published_like(path: Path) -> Any:
    return HY_V4.config(**json.loads((path / "config.json").read_text()))


@pytest.mark.parametrize("fp8", [False, True])
def test_what_is_written_is_what_is_read(fp8: bool) -> None:
    """Experts are stacked but in FP8, whose blocks may lie across gate and up."""
    config = published_config("hy4", layers=3, experts=8)
    written = {it.name: it.shape for it in stored_tensors(config, fp8=fp8)}
    read = {it.name: it.shape for it in tensors_of(config)}
    assert (written == read) == fp8
    if not fp8:
        assert written["model.layers.1.mlp.experts.gate_up_proj"] == (8, 2 * 2048, 6144)
        assert {name for name in read if not EXPERT.match(name)} == {
            name for name in written if ".experts." not in name
        }


@pytest.mark.parametrize("shape", [(32, 127, 128), (32 * 128, 128)])
def test_a_stack_of_another_shape_is_refused_by_name(copied: Path, shape: tuple[int, ...]) -> None:
    file = copied / "model.safetensors"
    save_file(load_file(file) | {GATE_UP: torch.zeros(shape)}, file)
    with Shards.open(copied) as shards, pytest.raises(ConfigError, match=r"lacks model\.layers\.2\.mlp\.experts\.0"):
        match(published_like(copied), shards, None)


def test_the_draft_layer_of_a_repository_is_left_unread_and_refused_where_it_is_asked_for(copied: Path) -> None:
    file = copied / "model.safetensors"
    save_file(load_file(file) | {"model.mtp_layers.0.enorm.weight": torch.ones(128)}, file)
    changed(copied, num_nextn_predict_layers=1)
    assert TransformersRunner.load(copied).geometry.layers == 4
    with pytest.raises(ConfigError, match="the draft layer of this family is not served"):
        TransformersRunner.load(copied, draft_tokens=1)


# ---------------------------------------------------------------- arithmetic


@pytest.fixture(scope="module")
def model() -> Any:
    found = random_model(tiny_config("hy4", 32, 1_024), 3, predictable=False)
    for layer in found.model.layers[2:]:
        layer.mlp.experts.gate_up_proj.mul_(8)  # so that limits cut
    return found


@pytest.mark.parametrize("rows", [1, 5])
def test_streams_are_read_and_written_as_by_the_librarys_layer(model: Any, rows: int) -> None:
    residual, added = torch.randn(rows, 1, 4 * 128), torch.randn(1, rows, 128)
    for ahead_of, member in ((ATTENTION, "attn_hc"), (MLP, "ffn_hc")):
        connection = HY_V4.connection(model.model.layers[1], ahead_of)
        assert connection is getattr(model.model.layers[1], member)
        state, shares = HY_V4.read_residual(connection, residual)
        wanted_shares, wanted = connection(residual.unflatten(-1, (4, -1)))
        torch.testing.assert_close((state, shares), (wanted, wanted_shares), rtol=1e-6, atol=1e-6)
    head = HY_V4.connection(model.model, HEAD)
    also = torch.zeros(rows, 200)
    assert shares is not None
    total, found = join_normed(
        model.model.norm, residual, added, also=also[:, :128], family=HY_V4, shares=shares, connection=head
    )
    streams = residual.unflatten(-1, (4, -1))
    wanted = (shares.unsqueeze(-1) * added.view(rows, 1, 1, 128) + streams).flatten(-2)
    torch.testing.assert_close(total, wanted, rtol=1e-6, atol=1e-6)
    assert found is not None
    normed = model.model.norm(head(total.unflatten(-1, (4, -1))))
    torch.testing.assert_close(found.values, normed, rtol=1e-5, atol=1e-5)
    assert torch.equal(also[:, :128], found.values.view(rows, 128))
    assert not also[:, 128:].any()


def test_a_rows_streams_have_the_same_bits_wherever_it_is(model: Any) -> None:
    connection, residual = model.model.layers[1].attn_hc, torch.randn(7, 1, 4 * 128)
    found = HY_V4.read_residual(connection, residual)
    for shift in range(1, 7):
        for one, moved in zip(found, HY_V4.read_residual(connection, residual.roll(shift, 0)), strict=True):
            assert one is not None
            assert moved is not None
            assert torch.equal(moved, one.roll(shift, 0))


@pytest.mark.parametrize("gathered", [False, True])
def test_tokens_and_logits_are_the_librarys_where_limits_cut(model: Any, gathered: bool) -> None:
    info, geometry = runner_facts(model)
    runner = TransformersRunner(model, info, geometry, deterministic_seats=2, gathered_prefill=gathered)
    rig, tokens = Rig(runner, seats=1, context_tokens=400), PROMPT[:300]
    token, logits = rig.open(0, tokens, hot_slots=64)
    for _ in range(8):
        wanted = model(torch.tensor([tokens])).logits[0, -1]
        torch.testing.assert_close(logits, wanted, atol=5e-4, rtol=0)
        tokens.append(token)
        (token,), (logits,) = rig.decode([0], rows=2)


def runner_facts(model: Any) -> tuple[Any, Any]:
    from protocol.messages import ModelInfo

    config = model.config
    return ModelInfo("", "hy4", 1_024, config.vocab_size, 4, 32, (), "bytes", ""), geometry_of(config, "float32")


@pytest.mark.parametrize("what", ["sinks", "limit", "connections", "gate"])
def test_each_part_of_the_family_changes_logits(what: str) -> None:
    """The comparisons above mean something: a model that lacked a part would differ by more than they allow."""
    model = random_model(tiny_config("hy4", 32, 1_024), 3, predictable=False)
    for layer in model.model.layers[2:]:
        layer.mlp.experts.gate_up_proj.mul_(8)
    tokens = torch.tensor([PROMPT[:300]])
    wanted = model(tokens).logits
    for layer in model.model.layers:
        if what == "sinks":
            layer.self_attn.sinks.fill_(-1e4)
        elif what == "gate":
            layer.self_attn.gate_proj.weight.zero_()
        elif what == "connections":
            layer.attn_hc.scale.zero_()
        elif hasattr(layer.mlp, "experts"):
            layer.mlp.experts.swiglu_limit = 1e4
    assert float((model(tokens).logits - wanted).abs().max()) > 0.05


def test_the_indexer_rotates_the_last_values() -> None:
    import transformers.models.hy_v4.modeling_hy_v4 as library

    queries, keys, angles = torch.randn(1, 3, 2, 12), torch.randn(1, 3, 1, 12), torch.randn(2, 1, 3, 4)
    rope = Rope(library.apply_rotary_pos_emb, interleaved=False, last=True)
    found = rope(queries, keys, *angles, unsqueeze_dim=2)
    turned = library.apply_rotary_pos_emb(queries[..., 8:], keys[..., 8:], *angles, unsqueeze_dim=2)
    for one, whole, wanted in zip(found, (queries, keys), turned, strict=True):
        assert torch.equal(one, torch.cat((whole[..., :8], wanted), -1))
    first = replace(rope, last=False)(queries, keys, *angles, unsqueeze_dim=2)
    assert torch.equal(first[0][..., 4:], queries[..., 4:])
    assert not torch.equal(first[0], found[0])


def test_bfloat16_keeps_float32_where_the_library_does(tmp_path: Path) -> None:
    """Logits, index norms and connections are float32 in a model of bfloat16."""
    write_tiny_checkpoint(tmp_path, "hy4", index_topk=32, context_max_tokens=1_024, layers=2)
    runner = TransformersRunner.load(tmp_path, dtype="bfloat16")
    layers = runner._layers
    held = layers.model.state_dict()
    exact = {name for name, tensor in held.items() if tensor.dtype == torch.float32}
    assert {"lm_head.weight", "model.layers.0.self_attn.sinks", "model.layers.1.ffn_hc.fn"} <= exact
    assert held["model.layers.0.self_attn.gate_proj.weight"].dtype == torch.bfloat16
    normed = torch.randn(3, 1, 128).bfloat16()
    assert torch.equal(layers.head(normed), normed.squeeze(1).float() @ held["lm_head.weight"].T)
    rig = Rig(runner, seats=1, context_tokens=200)
    token, _ = rig.open(0, PROMPT[:100], hot_slots=64)
    assert torch.isfinite(rig.decode([0])[1]).all()
    assert 0 <= token < 264
