"""Models with random weights for benchmarks: the families' own dimensions, dense, served by the real runner."""

from __future__ import annotations

import pytest
import torch

from kernels.state import StepBatch
from protocol.errors import ConfigError
from tests.support.checkpoints import DRAFTING, LATENT
from tests.support.runner_rig import Rig
from worker.group.exchange import Alike
from worker.runners.synthetic import synthetic_config, synthetic_runner
from worker.weights.layout import ExpertShare, weights_bytes
from worker.weights.modules import BlockExperts, BlockLinear
from worker.weights.synth import published_config

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 16,
    "vocab_size": 100,
    "pad_token_id": None,
    "max_position_embeddings": 512,
}

#: Of a small model with mixtures.
MIXED = {
    "num_hidden_layers": 5,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
}


def test_dimensions_are_those_of_the_families() -> None:
    deepseek, glm, light = (synthetic_config(family, 6) for family in ("deepseek-v3.2", "glm-5", "a.x-k2"))
    assert (deepseek.num_attention_heads, deepseek.kv_lora_rank, deepseek.index_topk) == (128, 512, 2048)
    assert (glm.num_attention_heads, glm.hidden_size) == (64, 6144)
    assert (light.num_attention_heads, light.kv_lora_rank, light.qk_rope_head_dim) == (32, 128, 32)
    assert glm.indexer_types == ["full", "shared", "shared", "shared", "full", "shared"]
    assert set(deepseek.mlp_layer_types) == set(glm.mlp_layer_types) == {"dense"}
    with pytest.raises(ConfigError, match="family"):
        synthetic_config("llama", 2)


@pytest.mark.parametrize("family", LATENT)
def test_synthetic_models_decode_with_a_replaced_indexer(family: str) -> None:
    """after_index_topk sees the indexer's selection of each group and replaces it before swap-in."""
    prompt, seen = list(range(90)), []

    def oldest(group: int, batch: StepBatch, topk: torch.Tensor) -> None:
        seen.append((group, topk[0].tolist()))
        topk[0] = torch.arange(topk.shape[1])

    config = synthetic_config(family, 5, **SMALL)
    plain, replaced = (synthetic_runner(config, device="cpu", after_index_topk=hook) for hook in (None, oldest))
    rigs = [Rig(runner, seats=1, context_tokens=200) for runner in (plain, replaced)]
    tokens = [rig.open(0, prompt, hot_slots=32)[0] for rig in rigs]
    assert tokens[0] == tokens[1]
    logits = [rig.decode([0])[1] for rig in rigs]
    assert not torch.equal(*logits)
    assert [group for group, _ in seen] == list(range(plain.geometry.groups))
    assert all(topk == sorted(topk) and len(set(topk)) == 16 for _, topk in seen)
    rigs[1].decode([0])
    assert rigs[1].hit_rate() == 0.5  # the same oldest tokens twice


@pytest.mark.parametrize("family", DRAFTING)
def test_random_rank_holds_its_share_in_fp8_decodes_and_drafts(family: str) -> None:
    config = type(published_config(family))(**SMALL | MIXED)
    config.num_nextn_predict_layers = 1
    runner = synthetic_runner(config, device="cpu", fp8=True, collectives=Alike(1, 2), rows_max=96, draft_tokens=1)
    model = runner._layers.model
    blocks = [it for it in model.modules() if isinstance(it, BlockExperts)]
    assert len(blocks) - 1 == config.mlp_layer_types.count("sparse") > 0
    assert all((it.first, it.total, len(it.weights[1].values)) == (8, 16, 8) for it in blocks)
    assert any(isinstance(it, BlockLinear) for it in model.modules())
    held = runner.weights_bytes()
    share = weights_bytes(
        config, "bfloat16", (128, 128), on_gpu=True, experts=ExpertShare.of(1, 2, 16), draft_layer=True
    )
    assert held["float8_e4m3fn"] == share["float8_e4m3fn"]
    rig = Rig(runner, seats=1, context_tokens=200)
    rig.open(0, list(range(90)), hot_slots=32)
    tokens, logits = rig.decode([0])
    drafts = rig.draft([0], tokens).logits
    for found in (logits, drafts):
        assert found is not None
        assert torch.isfinite(found).all()
        assert found.std() > 0
