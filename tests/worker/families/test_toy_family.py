"""A family that is not in the product: its module is this file, its row in the table is the fixture's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32Attention,
    DeepseekV32DecoderLayer,
    DeepseekV32ForCausalLM,
    DeepseekV32RMSNorm,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

from protocol.errors import ConfigError
from tests.support.runner_rig import Rig
from worker.families.base import Module, TensorSpec
from worker.families.deepseek_v32 import DEEPSEEK_V32
from worker.families.latent import LatentFamily
from worker.families.table import FAMILIES
from worker.runners.tiny import write_tiny_checkpoint
from worker.runners.tiny_weights import random_model
from worker.runners.transformers_dsa import TransformersRunner
from worker.weights.config_fields import check_fields
from worker.weights.layout import tensors_of

#: The library's module of the family has the functions that rotate.
ROTATIONS: Final = (apply_rotary_pos_emb, apply_rotary_pos_emb_interleave)


# ---------------------------------------------------------------- the library's classes


class ToyConfig(DeepseekV32Config):  # type: ignore[misc]
    model_type = "toy_dsa"
    norm_shifts: int = 128


class ShiftedNorm(nn.Module):
    def __init__(self, norm: DeepseekV32RMSNorm, shifts: int) -> None:
        super().__init__()
        self.rms, self.shift = norm, nn.Parameter(torch.linspace(-0.1, 0.1, shifts))

    def forward(self, values: Tensor) -> Tensor:
        shifted: Tensor = self.rms(values) + self.shift
        return shifted


class ToyAttention(DeepseekV32Attention):  # type: ignore[misc]
    """Queries and an output gate of one projection."""

    def __init__(self, config: ToyConfig, number: int) -> None:
        super().__init__(config, number)
        self.sizes = self.num_heads * self.qk_head_dim, self.num_heads * self.v_head_dim
        del self.q_b_proj
        self.query_and_gate = nn.Linear(config.q_lora_rank, sum(self.sizes), bias=False)

    def forward(self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor, **_: Any) -> Any:
        residual = self.q_a_layernorm(self.q_a_proj(hidden_states))
        queries, gate = self.query_and_gate(residual).split(self.sizes, -1)
        nope, rotary = (
            queries.unflatten(-1, (self.num_heads, -1)).transpose(1, 2).split([self.qk_nope_head_dim, 16], -1)
        )
        latent, key = self.kv_a_proj_with_mqa(hidden_states).unsqueeze(1).split([self.kv_lora_rank, 16], -1)
        rotary, key = apply_rotary_pos_emb_interleave(rotary, key, *position_embeddings)
        keys, values = self.expand_kv(self.kv_a_layernorm(latent), key)
        chosen = self.indexer(hidden_states, residual, position_embeddings, attention_mask[:, 0], None)
        allowed = torch.zeros(keys.shape[2], keys.shape[2], dtype=torch.bool).scatter(1, chosen[0].long(), True).tril()
        queries = torch.cat((nope, rotary), -1)
        attended = nn.functional.scaled_dot_product_attention(queries, keys, values, allowed, scale=self.scaling)
        return self.o_proj(attended.transpose(1, 2).flatten(2) * gate.tanh()), None


class ToyLayer(DeepseekV32DecoderLayer):  # type: ignore[misc]
    def __init__(self, config: ToyConfig, number: int) -> None:
        super().__init__(config, number)
        self.self_attn = ToyAttention(config, number)
        norm: DeepseekV32RMSNorm = self.input_layernorm
        self.input_layernorm: ShiftedNorm = ShiftedNorm(norm, config.norm_shifts)


class ToyForCausalLM(DeepseekV32ForCausalLM):  # type: ignore[misc]
    config_class = ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        for number in range(config.num_hidden_layers):
            self.model.layers[number] = ToyLayer(config, number)


# ---------------------------------------------------------------- the family: what a module of worker/families holds


class Toy(LatentFamily):
    def config(self, **fields: Any) -> ToyConfig:
        return ToyConfig(**fields)

    def norm_tensors(self, config: Any, prefix: str, ahead_of: str) -> Iterator[TensorSpec]:
        yield from super().norm_tensors(config, prefix, ahead_of)
        if ahead_of == "attention":
            yield TensorSpec(f"{prefix}.shift", (config.norm_shifts,))

    def query_shape(self, config: Any) -> tuple[int, int]:
        rows, columns = super().query_shape(config)
        return rows + config.num_attention_heads * config.v_head_dim, columns

    def module_name(self, stored: str) -> str:
        named = stored.replace("input_layernorm.weight", "input_layernorm.rms.weight")
        return named.replace("self_attn.q_b_proj", "self_attn.query_and_gate")

    def rms_of(self, norm: Module) -> Module:
        return getattr(norm, "rms", norm)

    def gate_norm(self, norm: Module, normed: Tensor) -> Tensor:
        shifted: Tensor = normed + norm.shift
        return shifted

    def query_projection(self, attention: Module) -> Module:
        return attention.query_and_gate

    def split_queries(self, attention: Module, product: Tensor) -> tuple[Tensor, Tensor | None]:
        queries, gate = product.split(attention.sizes, -1)
        return queries.unflatten(-1, (attention.num_heads, -1)), gate

    def gate_attended(self, attended: Tensor, gate: Tensor) -> Tensor:
        return attended * gate.tanh()

    def queries_of(self, attention: Module) -> Tensor:
        found: Tensor = attention.query_and_gate.weight[: attention.sizes[0]].unflatten(0, (attention.num_heads, -1))
        return found


TOY: Final = Toy(
    model_type="toy_dsa",
    name="toy",
    config_class="",
    models={"toy": {}},
    read=frozenset({"norm_shifts"}),
    fixed=DEEPSEEK_V32.fixed,
    index_interleaves=False,
    chat="plain",
    template="{% for m in messages %}{{ m.content }}{% endfor %}",
)


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(FAMILIES, TOY.model_type, TOY)
    monkeypatch.setitem(CONFIG_MAPPING._extra_content, TOY.model_type, ToyConfig)
    monkeypatch.setitem(MODEL_FOR_CAUSAL_LM_MAPPING._extra_content, ToyConfig, ToyForCausalLM)
    write_tiny_checkpoint(tmp_path, "toy", index_topk=32, context_max_tokens=1_024)
    return tmp_path


# ---------------------------------------------------------------- what the product makes of it


def test_a_row_in_the_table_is_all_that_a_family_takes(checkpoint: Path) -> None:
    """The reference is the library's model from which the checkpoint was written; it computes each context anew."""
    runner = TransformersRunner.load(checkpoint, deterministic_seats=2)
    reference = random_model(AutoConfig.from_pretrained(checkpoint), 0, predictable=False)
    drawn = random.Random(1)
    tokens = drawn.choices(range(32, 127), k=200)
    rig = Rig(runner, seats=1, context_tokens=260)
    token, logits = rig.open(0, tokens, hot_slots=64)
    for _ in range(24):
        wanted = reference(torch.tensor([tokens])).logits[0, -1]
        torch.testing.assert_close(logits, wanted, atol=2e-4, rtol=0)
        assert token == wanted.argmax()
        tokens.append(token)
        (token,), (logits,) = rig.decode([0], rows=2)
    assert 0 < rig.hit_rate() < 1
    assert len(set(tokens[200:])) > 8


def test_fields_names_and_sizes_are_those_of_the_row(checkpoint: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoint)
    named = {it.name: it.shape for it in tensors_of(config)}
    assert named["model.layers.1.input_layernorm.shift"] == (128,)
    assert named["model.layers.1.self_attn.q_b_proj.weight"] == (4 * (32 + 32), 96)
    stored = config.to_dict()
    check_fields(stored | {"norm_shifts": 128}, "config.json", "model")
    with pytest.raises(ConfigError, match="norm_shifts: no such field is known"):
        check_fields(stored | {"norm_shifts": 128, "model_type": "deepseek_v32"}, "config.json", "model")
