"""A small random checkpoint of either family, made by the model library's own config class, for tests and the demo.

Random weights of the usual scale make a model that tests nothing: its output soon repeats one token, and every token
is answered alike whatever came before. The weights here are random too, but shaped so that greedy decoding exercises
what serving must get right:

| property                               | how                                                                       |
|----------------------------------------|---------------------------------------------------------------------------|
| output hangs on the context            | sharp attention: queries and above all their rope part are scaled up      |
| output varies                          | lm_head does not see what all final states share; its rows have one norm  |
| output can be read, and seldom ends    | lm_head rows other than printable ASCII are zero, end-of-sequence too     |
| selections overlap from step to step   | embeddings share a component, which index queries follow more than others |
| the k-th index score has no exact tie  | head weights are positive through it: scores sum relus that are not all 0 |

Measured at 4,000 prompt tokens and a hot buffer of 512: 30 to 40 distinct tokens in 96, hit rates of 0.4 to 0.6 by
index group, gaps between the two best logits 0.5 in the median and 3e-3 at least. Index queries without a shared
component would select anew at each step, and hit at the rate of chance (1/8).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from coordinator.errors import ConfigError

FAMILIES: Final = ("deepseek-v3.2", "glm-5")

BYTES: Final = 256
BOS, EOS, PAD = 256, 257, 258
VOCAB: Final = 264
PRINTABLE: Final = (10, *range(32, 127))

#: Gains over a projection that keeps the size of its input.
GAINS: Final = {"o_proj": 2.0, "q_b_proj": 2.0}
QUERY_ROPE_GAIN: Final = 4.0
INDEX_ROPE_GAIN: Final = 0.5
#: Share of the common component in embeddings, and of its direction in index queries; the rest is a token's own.
EMBEDDING_COMMON: Final = 0.7
INDEX_COMMON: Final = 0.8
LOGIT_NORM: Final = 2.0
#: Random tokens whose final states say what all of them share.
CALIBRATION_TOKENS: Final = 1_024

Normal = Callable[..., Tensor]  # torch.randn with the checkpoint's generator


def write_tiny_checkpoint(
    path: str | Path,
    family: str = "deepseek-v3.2",
    *,
    seed: int = 0,
    index_topk: int = 128,
    context_max_tokens: int = 16_384,
) -> None:
    """Write config.json, generation_config.json and model.safetensors, 9 MB in float32. Raises ConfigError."""
    if family not in FAMILIES:
        raise ConfigError("unknown family", field="family", value=family, remedy=f"use one of {', '.join(FAMILIES)}")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    config = tiny_config(family, index_topk, context_max_tokens)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    _shape(model, torch.Generator().manual_seed(seed))
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    model.save_pretrained(path)
    if shown:
        logging.enable_progress_bar()


def tiny_config(family: str, index_topk: int, context_max_tokens: int) -> Any:
    """The library's config of four layers, two of them with experts; glm-5 shares every other layer's selection."""
    from transformers import DeepseekV32Config, GlmMoeDsaConfig

    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 32,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "index_topk": index_topk,
        "index_n_heads": 8,
        "index_head_dim": 32,
        "max_position_embeddings": context_max_tokens,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    if family == "glm-5":
        return GlmMoeDsaConfig(**shape, indexer_types=["full", "shared", "full", "shared"])
    return DeepseekV32Config(**shape)


def _shape(model: Any, generator: torch.Generator) -> None:
    """All weights of `model`, in place."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    for name, weight in sorted(model.named_parameters()):
        if weight.dim() > 1:
            gain = next((gain for part, gain in GAINS.items() if part in name), 1.0)
            weight.copy_(normal(*weight.shape) * (gain / math.sqrt(weight.shape[-1])))
    common = normal(model.config.hidden_size)
    embedding = model.model.embed_tokens.weight
    embedding.copy_(_mix(EMBEDDING_COMMON, common, normal(*embedding.shape)))
    for layer in model.model.layers:
        _shape_attention(layer.self_attn, common, normal)
    _shape_head(model, common, generator)


def _shape_attention(attention: Any, common: Tensor, normal: Normal) -> None:
    _forget(attention.kv_a_proj_with_mqa.weight, common)
    queries = attention.q_b_proj.weight.view(attention.num_heads, attention.qk_head_dim, -1)
    queries[:, attention.qk_nope_head_dim :] *= QUERY_ROPE_GAIN
    indexer = attention.indexer
    if indexer is None:
        return
    direction = attention.q_a_proj.weight @ common
    weight = indexer.wq_b.weight
    weight.copy_(_mix(INDEX_COMMON, torch.outer(normal(len(weight)), direction / direction.norm()), weight))
    weight.view(indexer.n_heads, indexer.head_dim, -1)[:, : indexer.qk_rope_head_dim] *= INDEX_ROPE_GAIN
    indexer.weights_proj.weight += common / common.square().sum()


def _shape_head(model: Any, common: Tensor, generator: torch.Generator) -> None:
    weight = model.lm_head.weight
    prompt = torch.randint(0, BYTES, (1, CALIBRATION_TOKENS), generator=generator)
    shared = model.model(prompt).last_hidden_state[0, CALIBRATION_TOKENS // 4 :].mean(0)
    _forget(weight, common)
    _forget(weight, shared)
    weight *= LOGIT_NORM / weight.norm(dim=1, keepdim=True)
    silent = torch.ones(len(weight), dtype=torch.bool)
    silent[list(PRINTABLE)] = False
    weight[silent] = 0


def _mix(share: float, common: Tensor, own: Tensor) -> Tensor:
    """Of the size of its parts, when they are unrelated."""
    return share * common + math.sqrt(1 - share**2) * own


def _forget(weight: Tensor, direction: Tensor) -> None:
    """Make a projection blind to `direction`, in place."""
    unit = direction / direction.norm()
    weight -= torch.outer(weight @ unit, unit)
