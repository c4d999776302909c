"""MiniMax-M3 alone: a config.json in parts, stored names, joined weights, pages that heads select."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MiniMaxM3VLTextConfig

from kernels.layout import DENSE
from kernels.row_bytes import KvKinds
from protocol.errors import ConfigError
from protocol.settings import WorkerSettings
from protocol.tokenizer_files import read_tokenizer
from tests.support.checkpoints import tiny_checkpoint
from tests.support.oracle_rig import run_oracle
from tests.support.runner_rig import Rig
from worker.families.minimax_m3 import MINIMAX_M3
from worker.runners.block_sparse import BlockSparseRunner
from worker.runners.checkpoint import (
    describe_model,
    geometry_of,
    kinds_of,
    read_by_library,
    read_config,
    read_dimensions,
)
from worker.runners.load import load_runner
from worker.runners.tiny import write_tiny_checkpoint
from worker.weights.config_fields import FIXED, READ, WITHOUT_EFFECT
from worker.weights.layout import ExpertShare, prompt_scratch_bytes, tensors_of, weights_bytes
from worker.weights.matching import match
from worker.weights.model import held_bytes, load_model
from worker.weights.shards import Shards
from worker.weights.synth import published_config, write_synthetic

PROMPT = list(Path(__file__).read_bytes())
PUBLISHED = MINIMAX_M3.published(published_config("minimax-m3")) | {"dtype": "bfloat16"}
SPARSE = "sparse_attention_config"


@pytest.fixture(scope="session")
def checkpoint(run_dir: Path) -> Path:
    return tiny_checkpoint(run_dir, "minimax-m3", index_topk=384)


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def changed(path: Path, sparse: Mapping[str, object] | None = None, **fields: object) -> Path:
    """Change fields of `text_config`, and of what is selected; None removes one."""
    config = json.loads((path / "config.json").read_text())
    text = config["text_config"] | fields
    text[SPARSE] = {name: it for name, it in (text[SPARSE] | dict(sparse or {})).items() if it is not None}
    config["text_config"] = {name: it for name, it in text.items() if it is not None}
    (path / "config.json").write_text(json.dumps(config))
    return path


# ---------------------------------------------------------------- config and sizes


def test_the_published_model_keeps_122_880_bytes_of_rows_a_token(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    for config in (published_config("minimax-m3"), read_dimensions(tmp_path), read_by_library(tmp_path)):
        geometry = geometry_of(config, "bfloat16")
        assert (geometry.layers, geometry.dense, geometry.groups, geometry.heads) == (60, 3, 57, 4)
        assert (geometry.topk, geometry.slot_tokens, geometry.planes) == (32, 64, (256,) * 8)
        assert geometry.layers * geometry.row_bytes == 122_880
        assert geometry.groups * geometry.index_row_bytes == 14_592
    assert round(sum(weights_bytes(config, "bfloat16", None, on_gpu=True).values()) / 2e9) == 426  # of 427 billion


def test_parts_of_a_config_are_read_by_the_names_of_all_families(checkpoint: Path) -> None:
    config = read_config(checkpoint)
    assert (config["model_type"], config["n_routed_experts"], config["moe_intermediate_size"]) == (
        "minimax_m3_vl",
        *(32, 64),
    )
    assert (config["index_topk"], config["layer_types"][:2]) == (384, ["full_attention", "minimax_m3_sparse"])
    library = read_by_library(checkpoint)
    assert type(library) is MiniMaxM3VLTextConfig
    for name in ("index_topk", "n_routed_experts", "layer_types", "mlp_layer_types", "max_position_embeddings"):
        assert getattr(library, name) == config[name]
    assert geometry_of(SimpleNamespace(**config), "float32").group_of_layer == (DENSE, 0, 1, 2)


def test_the_lists_name_each_field_of_the_librarys_class() -> None:
    known = READ | MINIMAX_M3.read | FIXED.keys() | MINIMAX_M3.fixed.keys() | WITHOUT_EFFECT.keys()
    known |= MINIMAX_M3.without_effect | set(MINIMAX_M3.sizes) | {"layer_types"}
    fields = {it.name for it in dataclasses.fields(MiniMaxM3VLTextConfig)}
    assert fields <= known


@pytest.mark.parametrize(
    ("sparse", "fields", "message"),
    [
        ({"sparse_block_size": 96}, {}, "index_block_size 96 is not served, a multiple of 64 is"),
        ({"sparse_block_size": "128"}, {}, "index_block_size '128' is not a whole number"),
        ({"sparse_topk_blocks": 0}, {}, "index_topk_blocks 0 is not a whole number"),
        ({"sparse_num_index_heads": 4}, {}, "index_n_heads 4 is not served, 2, as num_key_value_heads is, is"),
        ({"sparse_local_block": 4}, {}, "index_local_blocks 4 is not served, a number up to index_topk_blocks, 3, is"),
        ({"sparse_score_type": "mean"}, {}, f"{SPARSE}.sparse_score_type mean is not served, max is"),
        ({"sparse_init_block": 1}, {}, f"{SPARSE}.sparse_init_block 1 is not served, 0 is"),
        ({"use_sparse_attention": False}, {}, f"{SPARSE}.use_sparse_attention False is not served"),
        ({"sparse_disable_index_value": [0] * 4}, {}, f"{SPARSE}.sparse_disable_index_value"),
        ({"sparse_window": 7}, {}, f"{SPARSE}.sparse_window: no such field is known"),
        ({"sparse_attention_freq": [1, 0, 1, 1]}, {}, "full_attention in the first layers, and minimax_m3_sparse in"),
        ({"sparse_attention_freq": [0] * 4}, {}, "full_attention in the first layers, and minimax_m3_sparse in"),
        ({"sparse_attention_freq": [0, 1, 1]}, {}, "a list with an entry for each layer is"),
        ({"sparse_attention_freq": None}, {}, "layer_types None is not served, a list with an entry for each layer"),
        ({}, {"moe_layer_freq": [0, 1]}, "mlp_layer_types .* a list with an entry for each layer is"),
        ({}, {"moe_layer_freq": 2}, "moe_layer_freq 2 is not served"),
        ({}, {"rotary_dim": 32}, "rotary_dim 32 is not served, 16, as head_dim times partial_rotary_factor is, is"),
        ({}, {"partial_rotary_factor": None}, "partial_rotary_factor None is not served"),
        ({}, {"num_key_value_heads": 3}, "num_key_value_heads 3 is not served, a divisor of 8"),
        ({}, {"swiglu_limit": 0}, "swiglu_limit 0 is no finite number above 0"),
        ({}, {"use_qk_norm": "no"}, "use_qk_norm no is not served, True is"),
        ({}, {"attention_output_gate": True}, "attention_output_gate: no such field is known"),
        ({}, {SPARSE: {}}, "layer_types None is not served"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    copied: Path, sparse: dict[str, object], fields: dict[str, object], message: str
) -> None:
    read_config(copied)
    with pytest.raises(ConfigError, match=message) as refusal:
        read_config(changed(copied, sparse, **fields) if SPARSE not in fields else without_selection(copied))
    assert refusal.value.remedy
    with pytest.raises(ConfigError, match=message):
        read_dimensions(copied)


def without_selection(path: Path) -> Path:
    config = json.loads((path / "config.json").read_text())
    del config["text_config"][SPARSE]
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_embeddings_that_the_whole_ties_are_refused(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text()) | {"tie_word_embeddings": True}
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="tie_word_embeddings True is not served, False is"):
        read_config(copied)


@pytest.mark.parametrize("method", ["mxfp8", "mxfp4", "fp8"])
def test_quantized_repositories_are_refused_by_name(copied: Path, method: str) -> None:
    config = json.loads((copied / "config.json").read_text()) | {"quantization_config": {"quant_method": method}}
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="quantized weights of minimax-m3 are not served") as refusal:
        read_config(copied)
    assert (refusal.value.value, "bfloat16" in refusal.value.remedy) == (method, True)


def test_quantized_repositories_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantized weights of minimax-m3"):
        write_tiny_checkpoint(tmp_path, "minimax-m3", fp8=True)
    with pytest.raises(ConfigError, match="quantized weights of minimax-m3"):
        write_synthetic(tmp_path, "minimax-m3", layers=2, experts=8)


@pytest.mark.parametrize("dtype", ["bfloat16", "auto"])
def test_kv_of_a_worker_is_in_the_dtype_that_it_computes_in(checkpoint: Path, dtype: str) -> None:
    settings = WorkerSettings(model=str(checkpoint), dtype="float32", deterministic=False, kv_dtype=dtype)
    if dtype == "auto":
        assert load_runner(settings).geometry.head_bytes == 2 * 32 * 4
        return
    for load in (load_runner, lambda asked: kinds_of(read_dimensions(checkpoint), asked)):
        with pytest.raises(ConfigError, match="minimax-m3 keeps its KV in the model's dtype alone, float32"):
            load(settings)


@pytest.mark.parametrize("kinds", [KvKinds("fp8", "fp8"), KvKinds("fp4", "fp4"), KvKinds("bfloat16", "fp8")])
def test_rows_are_kept_in_the_models_dtype_alone(kinds: KvKinds) -> None:
    with pytest.raises(ConfigError, match="minimax-m3 keeps its KV in the model's dtype alone") as refusal:
        geometry_of(published_config("minimax-m3"), kinds)
    assert (refusal.value.field, refusal.value.remedy) == ("worker.kv_dtype", "use auto")


def test_prompts_take_what_their_layers_make() -> None:
    """Queries of 64 heads of 128 values and what they attend to, for each row of a block."""
    config = published_config("minimax-m3")
    fewer, more = (prompt_scratch_bytes(config, rows, 0) for rows in (4_096, 8_192))
    token = MINIMAX_M3.token_bytes(config, 2)
    assert token.attending == 2 * 2 * 64 * 128
    assert token.selecting == 2 * (64 * 128 + 2 * 4 * 128 + 5 * 128)
    assert more - fewer >= 4_096 * token.attending


# ---------------------------------------------------------------- weights


def test_checkpoints_have_the_published_names(checkpoint: Path) -> None:
    """The names are those that transformers' conversion_mapping reads; each expert has tensors of its own."""
    stored = load_file(checkpoint / "model.safetensors")
    assert stored["language_model.model.layers.3.block_sparse_moe.experts.31.w2.weight"].shape == (128, 64)
    layer = "language_model.model.layers.3."
    names = {name.removeprefix(layer) for name in stored if name.startswith(layer) and ".experts." not in name}
    assert names == {
        *(f"{name}_layernorm.weight" for name in ("input", "post_attention")),
        *(f"self_attn.{name}_proj.weight" for name in ("q", "k", "v", "o", "index_q", "index_k")),
        *(f"self_attn.{name}_norm.weight" for name in ("q", "k", "index_q", "index_k")),
        *(f"block_sparse_moe.{name}" for name in ("gate.weight", "e_score_correction_bias")),
        *(f"block_sparse_moe.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")),
    }
    dense = {name for name in stored if name.startswith("language_model.model.layers.0.")}
    assert not any("index_" in name for name in dense)
    assert "language_model.model.layers.0.mlp.up_proj.weight" in dense
    assert {name for name in stored if ".layers." not in name} == {
        *("language_model.model.embed_tokens.weight", "language_model.model.norm.weight"),
        "language_model.lm_head.weight",
    }


def test_a_vision_tower_and_a_draft_layer_are_left_unread_and_others_are_not(copied: Path) -> None:
    file = copied / "model.safetensors"
    own = load_file(file)
    left = ("vision_tower.vision_model.pre_layrnorm.weight", "multi_modal_projector.linear_1.bias")
    left = (*left, "patch_merge_mlp.linear_2.weight", "language_model.model.mtp.0.fc.weight")
    save_file(own | {name: torch.ones(3) for name in left}, file)
    with Shards.open(copied) as shards:
        names = {it.spec.name for it in match(read_by_library(copied), shards, None)}
    assert names == own.keys()
    save_file(own | {"language_model.model.layers.0.self_attn.index_k_proj.weight": torch.ones(3)}, file)
    with Shards.open(copied) as shards, pytest.raises(ConfigError, match=r"holds .*layers\.0\.self_attn\.index_k_proj"):
        match(read_by_library(copied), shards, None)


def test_a_rank_holds_its_experts_alone(checkpoint: Path) -> None:
    whole, part = (load_model(checkpoint, None, dtype=torch.float32, experts=it) for it in (None, ExpertShare(8, 8)))
    for layer in (2, 3):
        experts, own = (it.model.layers[layer].mlp.experts for it in (whole, part))
        for (name, stack), (_, other) in zip(own.named_parameters(), experts.named_parameters(), strict=True):
            assert torch.equal(stack, other[8:16]), name
    assert sum(held_bytes(part).values()) == sum(
        weights_bytes(part.config, "float32", None, on_gpu=False, experts=ExpertShare(8, 8)).values()
    )


class HeldTensors:
    """See worker/weights/memory.py: `WeightMemory`. Filled by one model, and then given to another."""

    def __init__(self) -> None:
        self.is_filled, self.tensors, self.given = False, dict[str, Tensor](), set[str]()

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert name not in self.given
        self.given.add(name)
        if not self.is_filled:
            self.tensors[name] = torch.empty(shape, dtype=dtype)
        assert (self.tensors[name].shape, self.tensors[name].dtype) == (shape, dtype)
        return self.tensors[name]

    def dtype_of(self, name: str) -> torch.dtype | None:
        return self.tensors[name].dtype if name in self.tensors and name not in self.given else None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_kept_are_mapped_as_they_were_loaded(checkpoint: Path, dtype: torch.dtype) -> None:
    memory = HeldTensors()
    loaded = load_model(checkpoint, None, dtype=dtype, memory=memory).state_dict()
    memory.is_filled, memory.given = True, set()
    mapped = load_model(checkpoint, None, dtype=dtype, memory=memory).state_dict()
    assert memory.given == memory.tensors.keys()
    assert loaded.keys() == mapped.keys()
    assert all(it.data_ptr() == mapped[name].data_ptr() for name, it in loaded.items())
    rounds = MINIMAX_M3.stored_name("model.layers.2.mlp.gate.e_score_correction_bias")
    assert memory.tensors[rounds].dtype == torch.float32


def test_tensors_have_names_of_their_own() -> None:
    names = [it.name for it in tensors_of(published_config("minimax-m3", layers=5, experts=8))]
    assert len(set(names)) == len(names)
    assert all(name.startswith("language_model.") for name in names)


# ---------------------------------------------------------------- tokens


def test_tokens_are_the_oracles_and_hang_on_the_selection(checkpoint: Path) -> None:
    """Weights by the library's loader there, by ours here; a head that reads near tokens alone says others."""
    prompt, steps = PROMPT[:1_500], 40
    (answer,) = run_oracle({"model": str(checkpoint), "prompts": [{"tokens": prompt, "max_new_tokens": steps}]})
    assert len(set(answer["tokens"])) > 12
    for blocks in (3, 1):
        model = load_model(checkpoint, None, dtype=torch.float32)
        model.config.index_topk_blocks = blocks
        info = describe_model(checkpoint, model.config, read_tokenizer(checkpoint))
        rig = Rig(BlockSparseRunner(model, info, geometry_of(model.config, "float32")), seats=1, context_tokens=2_048)
        token, _ = rig.open(0, prompt, hot_slots=576)
        found = [token]
        for _ in range(steps - 1):
            (token,), _ = rig.decode([0])
            found.append(token)
        assert (found == answer["tokens"]) == (blocks == 3)
        assert rig.state.misses.sum() > 0 or blocks == 1
