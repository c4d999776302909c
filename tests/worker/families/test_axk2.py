"""A.X-K2 alone: routers with groups and without, rows of A.X-K2-Light, the gates' rows apart, its published names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.axk2.modeling_axk2 import AXK2GatedRMSNorm

from kernels.row_bytes import index_key_shape, kv_row_shape
from tests.support.checkpoints import tiny_checkpoint
from tests.support.once import made_once
from tests.support.prompts import TEXT
from tests.support.runner_rig import Rig
from worker.families.axk2 import AXK2
from worker.families.base import in_whole_vectors
from worker.families.latent import LatentFamily
from worker.runners.attention import join_normed
from worker.runners.checkpoint import geometry_of
from worker.runners.tiny import tiny_config
from worker.runners.tiny_weights import random_model, write_weights
from worker.runners.transformers_dsa import TransformersRunner
from worker.weights.layout import prompt_scratch_bytes
from worker.weights.synth import published_config

PROMPT = list(TEXT)


def test_rows_of_the_light_model_have_the_bytes_of_their_values() -> None:
    config = published_config("a.x-k2-light")
    rows = {
        kind: kv_row_shape(kind, config.kv_lora_rank, config.qk_rope_head_dim).row_bytes for kind in ("bfloat16", "fp8")
    }
    assert rows == {"bfloat16": 320, "fp8": 196}
    geometry = geometry_of(config, "bfloat16")
    token_bytes = geometry.layers * geometry.row_bytes + geometry.groups * geometry.index_row_bytes
    assert token_bytes == 48 * (320 + 256)
    assert index_key_shape("fp8", config.index_head_dim).row_bytes == 132


def test_prompts_have_room_for_gates_and_both_forms_of_the_query_latent(monkeypatch: pytest.MonkeyPatch) -> None:
    config = published_config("a.x-k2")
    whole = prompt_scratch_bytes(config, 512, 8_192)
    monkeypatch.setattr(type(AXK2), "kept_values", LatentFamily.kept_values)
    assert whole - prompt_scratch_bytes(config, 512, 8_192) == 2 * 512 * (64 * 128 + 2 * 1_536)


def test_checkpoints_have_the_published_names(run_dir: Path) -> None:
    """The library's modules have others: fc1, fc2, q_gate_proj."""
    stored = load_file(tiny_checkpoint(run_dir, "a.x-k2", index_topk=32) / "model.safetensors")
    layer = {name.removeprefix("model.layers.2.") for name in stored if name.startswith("model.layers.2.")}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        assert {f"{norm}.norm.weight", f"{norm}.W_down.weight", f"{norm}.W_up.weight"} <= layer
    assert "self_attn.q_b_proj.weight" in layer
    assert "model.layers.0.post_attention_layernorm.weight" in stored  # of a layer without experts


@pytest.mark.parametrize("groups", [None, 4])
def test_tokens_are_the_librarys_with_groups_of_experts_and_without(groups: int | None, tmp_path: Path) -> None:
    """Large scores of few groups would make an expert of no chosen group count where the library gives it 0."""
    config = tiny_config("a.x-k2", 32, 1_024, n_routed_experts=16)
    config.n_group, config.topk_group = groups, groups and 2
    model = random_model(config, 3, predictable=False)
    for layer in model.model.layers[2:]:
        layer.mlp.gate.e_score_correction_bias.uniform_(-2, 0.5, generator=torch.Generator().manual_seed(5))
    write_weights(tmp_path, model, fp8=False, powers_of_two=False)
    runner = TransformersRunner.load(tmp_path, deterministic_seats=3)
    choice = AXK2.choice(runner._layers[3].module.mlp.gate)
    assert (choice is None) == (groups is not None)
    rig = Rig(runner, seats=1, context_tokens=400)
    tokens = PROMPT[:300]
    token, logits = rig.open(0, tokens, hot_slots=64)
    for _ in range(12):
        wanted = model(torch.tensor([tokens])).logits[0, -1]
        torch.testing.assert_close(logits, wanted, atol=5e-4, rtol=0)
        tokens.append(token)
        (token,), (logits,) = rig.decode([0], rows=3)


@pytest.mark.parametrize(("kv_dtype", "row_bytes"), [("float32", 640), ("fp8", 196)])
def test_rows_of_160_values_give_the_same_bits_for_any_hot_size(kv_dtype: str, row_bytes: int, run_dir: Path) -> None:
    """With latents of 128 and 32 rotated values, as A.X-K2-Light has them."""
    runner = TransformersRunner.load(light_checkpoint(run_dir), kv_dtype=kv_dtype, deterministic_seats=2)
    assert runner.geometry.row_bytes == row_bytes
    found = []
    for hot_slots in (0, 64, 128):
        rig = Rig(runner, seats=1, context_tokens=300)
        token, logits = rig.open(0, PROMPT[:250], hot_slots=hot_slots)
        drawn, seen = [token], [logits]
        for _ in range(10):
            (token,), logits = rig.decode([0], rows=2)
            drawn.append(token)
            seen.append(logits[0])
        found.append((drawn, torch.stack(seen)))
    assert all(drawn == found[0][0] and torch.equal(logits, found[0][1]) for drawn, logits in found)


def light_checkpoint(run_dir: Path) -> Path:
    def write() -> str:
        path = run_dir / "a.x-k2, rows of 160"
        widths = {"kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "index_head_dim": 64}
        model = random_model(tiny_config("a.x-k2", 32, 1_024, **widths), 0, predictable=False)
        write_weights(path, model, fp8=False, powers_of_two=False)
        return str(path)

    return Path(made_once(run_dir, "a.x-k2, rows of 160", write))


def gated_norm(hidden: int, dtype: torch.dtype, device: str) -> Any:
    config = AXK2.config(hidden_size=hidden, gated_norm_rank=16)
    norm = AXK2GatedRMSNorm(config).to(device, dtype).requires_grad_(False)
    for weight in norm.parameters():
        weight.normal_(0, 1 if weight.dim() == 1 else weight.shape[1] ** -0.5)
    return norm


@pytest.mark.parametrize("rows", [1, 5])
def test_a_gated_norm_of_a_sum_is_the_librarys(rows: int) -> None:
    check_gated_norm(rows, "cpu", torch.float32)


def check_gated_norm(rows: int, device: str, dtype: torch.dtype) -> None:
    """Compare with the library's module; where rows travel to other ranks, the same goes there."""
    norm = gated_norm(256, dtype, device)
    hidden, parts = (torch.randn(*shape, device=device).to(dtype) for shape in ((rows, 1, 256), (2, rows, 256)))
    also = torch.zeros(rows, 300, dtype=dtype, device=device)
    total, found = join_normed(norm, hidden, parts, also=also[:, :256], family=AXK2)
    wanted = hidden + parts.float().sum(0).to(dtype).view(hidden.shape)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(total, wanted, rtol=8 * step, atol=8 * step)
    assert found is not None
    torch.testing.assert_close(found.values, norm(total), rtol=8 * step, atol=8 * step)
    assert torch.equal(also[:, :256], found.values.view(rows, 256))
    assert not also[:, 256:].any()


@pytest.mark.parametrize("width", [8, 16, 72, 96])
def test_gates_of_a_row_have_the_same_bits_wherever_it_is(width: int) -> None:
    rows = torch.randn(7, 1, width)
    whole = in_whole_vectors(torch.sigmoid, rows)
    torch.testing.assert_close(whole, rows.sigmoid())
    for number, row in enumerate(rows):
        assert torch.equal(in_whole_vectors(torch.sigmoid, row[None])[0], whole[number])
