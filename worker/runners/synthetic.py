"""A model of the real dimensions with random weights, made on the device: for benchmarks, which need its cost and not
its answers.

Everything is the model library's own code and default configuration, but for the number of layers and the MLPs, which
are dense in every layer: an expert layer of DeepSeek-V3.2 takes 22 GB in bfloat16, of which a step of a few requests
reads a part that depends on them. No disk is touched and nothing passes through host memory.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from protocol.errors import ConfigError
from worker.runners.checkpoint import anonymous_info, geometry_of
from worker.runners.tiny import FAMILIES
from worker.runners.transformers_dsa import DTYPES, AfterIndexTopk, TransformersRunner

#: Of glm-5: layers that select for themselves are this many apart; those between share.
SHARED_EVERY: Final = 4


def synthetic_config(family: str, layers: int, **changes: Any) -> Any:
    """The library's configuration of `family` with `layers` layers, all MLPs dense, and `changes` over it.

    glm-5 shares each selection over SHARED_EVERY layers. Raises ConfigError for an unknown family.
    """
    if family not in FAMILIES:
        raise ConfigError("unknown family", field="family", value=family, remedy=f"use one of {', '.join(FAMILIES)}")
    from transformers import DeepseekV32Config, GlmMoeDsaConfig

    shape = {"num_hidden_layers": layers, "mlp_layer_types": ["dense"] * layers}
    if family == "glm-5":
        kinds = ["shared" if number % SHARED_EVERY else "full" for number in range(layers)]
        return GlmMoeDsaConfig(**(shape | {"indexer_types": kinds} | changes))
    return DeepseekV32Config(**(shape | changes))


def synthetic_runner(
    config: Any,
    *,
    device: str = "cuda",
    dtype: str = "bfloat16",
    kv_dtype: str = "auto",
    seed: int = 0,
    after_index_topk: AfterIndexTopk | None = None,
) -> TransformersRunner:
    """A runner over random weights on `device`. Raises ConfigError for dtypes that do not fit the model."""
    from transformers import AutoModelForCausalLM

    geometry = geometry_of(config, dtype if kv_dtype == "auto" else kv_dtype)
    with torch.device(device), torch.random.fork_rng(devices=[device] if device != "cpu" else []):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], attn_implementation="sdpa")
    model = model.eval().requires_grad_(False)
    runner = TransformersRunner(
        model,
        anonymous_info(config, f"synthetic-{config.model_type}-{config.num_hidden_layers}"),
        geometry,
        after_index_topk=after_index_topk,
    )
    runner.release_unused()
    return runner
