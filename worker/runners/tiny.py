"""Small random checkpoints of each family, made by the model library's own config class, for tests and the demo.

worker/runners/tiny_weights.py describes their weights. Importing this module imports neither torch nor the library.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from worker.families.base import Family
from worker.families.table import family_named, names

#: Names of the families.
FAMILIES: Final = tuple(names())

BOS, EOS, PAD = 256, 257, 258
#: Layers, an even number: the second half has experts.
LAYERS: Final = 4
#: Routed experts of a layer.
EXPERTS: Final = 32
VOCAB: Final = 264

#: Widths of several blocks of 128 with a smaller last one: 160 = 128 + 32, 320 = 2 x 128 + 64.
RAGGED: Final = {
    **{"hidden_size": 160, "intermediate_size": 320, "moe_intermediate_size": 160},
    **{"q_lora_rank": 160, "kv_lora_rank": 160},
}
#: Widths in whole blocks, of which products may quantize their activations.
WHOLE: Final = {
    **{"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128},
    **{"q_lora_rank": 128, "kv_lora_rank": 128},
}


def write_tiny_checkpoint(
    path: str | Path,
    family: str = "deepseek-v3.2",
    *,
    seed: int = 0,
    index_topk: int = 128,
    context_max_tokens: int = 16_384,
    fp8: bool = False,
    powers_of_two: bool = False,
    whole_blocks: bool = False,
    layers: int = LAYERS,
    experts: int = EXPERTS,
    predictable: bool = False,
) -> None:
    """Write config.json, generation_config.json, tokenizer_config.json with a chat template, and model.safetensors, 13
    MB in float32, the draft layer among it. Raises ConfigError.

    `fp8`: in the layout of published FP8 repositories, and with widths that make several blocks, ragged ones too unless
    `whole_blocks`; `powers_of_two`: with scales as `scale_fmt` ue8m0 has them. `predictable`: of a model whose drafts
    are mostly right.
    """
    known = family_named(family)
    from worker.runners.tiny_weights import random_model, write_weights

    widths = (WHOLE if whole_blocks else RAGGED) if fp8 else {}
    config = tiny_config(family, index_topk, context_max_tokens, layers, n_routed_experts=experts, **widths)
    model = random_model(config, seed, predictable=predictable)
    _write_template(Path(path), known)
    write_weights(Path(path), model, fp8=fp8, powers_of_two=powers_of_two)


def _write_template(path: Path, family: Family) -> None:
    """Without a tokenizer.json: ids are bytes."""
    path.mkdir(parents=True, exist_ok=True)
    settings = {"chat_template": family.template}
    (path / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False))


def tiny_config(family: str, index_topk: int, context_max_tokens: int, layers: int = LAYERS, **widths: int) -> Any:
    """The library's config of `layers`, half of them with experts; every other one selects, if layers may share."""
    known = family_named(family)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": layers,
        "mlp_layer_types": ["dense"] * (layers // 2) + ["sparse"] * (layers - layers // 2),
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "index_topk": index_topk,
        "index_n_heads": 4,  # one for each attention head, of the same width
        "index_head_dim": 32,
        "max_position_embeddings": context_max_tokens,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    return known.config(**(shape | dict(known.tiny) | known.shared_selections(layers, 2) | widths))
