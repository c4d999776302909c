"""A small random checkpoint of either family, made by the model library's own config class, for tests and the demo.

Random weights of the usual scale make a model that no test learns from: its output soon repeats, and its indexer picks
at random. The scales here are chosen so that greedy decoding exercises what serving must get right:

| what                                   | how                                                                          |
|----------------------------------------|------------------------------------------------------------------------------|
| outputs vary, and hang on the context  | attention contributes as much to the residual as the token does; sharp heads |
| output is readable                     | lm_head rows other than printable ASCII are zero, EOS too: it seldom ends    |
| selections overlap from step to step   | embeddings share a component, so queries do; a stable core, a moving rest    |
| top-k has no exact ties                | head weights of the indexer are mostly positive through the same component:  |
|                                        | scores near the k-th are sums of several relu terms, never all zero          |

Dimensions are powers of four where a scale is their inverse root, and widths multiples of 32: deterministic mode needs
no padding rows (transformers_dsa.py).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from coordinator.errors import ConfigError

BYTES: Final = 256
BOS, EOS, PAD = 256, 257, 258
VOCAB: Final = 264
PRINTABLE: Final = (10, *range(32, 127))

FAMILIES: Final = ("deepseek-v3.2", "glm-5")

#: Share of the common component in an embedding, and gains of the projections that shape decoding (see the table).
COMMON: Final = 0.7
GAINS: Final = {
    "o_proj": 2.0,
    "down_proj": 1.0,
    "q_b_proj": 2.0,
    "lm_head": 2.0,
}


def write_tiny_checkpoint(
    path: str | Path,
    family: str = "deepseek-v3.2",
    *,
    seed: int = 0,
    index_topk: int = 128,
    context_max_tokens: int = 16_384,
) -> None:
    """Write config.json, generation_config.json and model.safetensors, about 10 MB in float32. Raises ConfigError."""
    if family not in FAMILIES:
        raise ConfigError("unknown family", field="family", value=family, remedy=f"use one of {', '.join(FAMILIES)}")
    from transformers import AutoModelForCausalLM

    config = tiny_config(family, index_topk, context_max_tokens)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() > 1:
                weight.copy_(_weight(name, weight, generator))
        _shape_vocabulary(model, generator)
    model.save_pretrained(path)


def tiny_config(family: str, index_topk: int, context_max_tokens: int) -> Any:
    """The library's config of a four-layer model: two dense layers, two with experts; glm-5 shares every other index."""
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
        "index_n_heads": 16,
        "index_head_dim": 16,
        "max_position_embeddings": context_max_tokens,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    if family == "glm-5":
        return GlmMoeDsaConfig(**shape, indexer_types=["full", "shared", "full", "shared"])
    return DeepseekV32Config(**shape)


def _weight(name: str, weight: Tensor, generator: torch.Generator) -> Tensor:
    """Normal, so that a unit input gives outputs of the size of the gain."""
    gain = next((gain for part, gain in GAINS.items() if part in name), 1.0)
    return torch.randn(weight.shape, generator=generator) * (gain / math.sqrt(weight.shape[-1]))


def _shape_vocabulary(model: Any, generator: torch.Generator) -> None:
    """Embeddings share a component, the indexer's head weights follow it, and only printable tokens are drawn."""
    embedding = model.model.embed_tokens.weight
    common = torch.randn(embedding.shape[1], generator=generator)
    own = torch.randn(embedding.shape, generator=generator)
    embedding.copy_(COMMON * common + math.sqrt(1 - COMMON**2) * own)
    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            heads = layer.self_attn.indexer.weights_proj.weight
            heads += common / common.square().sum()
    silent = torch.ones(VOCAB, dtype=torch.bool)
    silent[list(PRINTABLE)] = False
    model.lm_head.weight[silent] = 0
