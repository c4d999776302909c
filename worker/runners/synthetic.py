"""Runners of the real dimensions with random weights, made on the device: for benchmarks, which need their cost and
not their answers.

`synthetic_config` makes all MLPs dense: an expert layer of DeepSeek-V3.2 takes 22 GB in bfloat16, of which a step of a
few requests reads a part that depends on them. The published configurations are those of worker/weights/synth.py. No
disk is touched and nothing passes through host memory.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from protocol.config_checks import WEIGHT_ONLY
from worker.families.table import family_named
from worker.group.exchange import Collectives, Exchange
from worker.runners.checkpoint import anonymous_info, geometry_of, kv_kinds
from worker.runners.held_weights import DTYPES
from worker.runners.transformers_dsa import AfterIndexTopk, TransformersRunner
from worker.weights.layout import ExpertShare
from worker.weights.matmul import Matmul, resolve_matmul
from worker.weights.modules import expert_matmul
from worker.weights.quantization import Quantization
from worker.weights.random_model import random_model

#: Where layers may share selections, those that select are this many apart.
SHARED_EVERY: Final = 4


def synthetic_config(family: str, layers: int, **changes: Any) -> Any:
    """The library's configuration of `family` with `layers` layers, all MLPs dense, and `changes` over it.

    SHARED_EVERY layers share a selection, where the family's layers may. Raises ConfigError for an unknown family.
    """
    known = family_named(family)
    shape = {"num_hidden_layers": layers, "mlp_layer_types": ["dense"] * layers}
    return known.config(**(shape | known.shared_selections(layers, SHARED_EVERY) | changes))


def synthetic_matmul(matmul: str, *, device: str, dtype: str = "bfloat16", fp8: bool) -> Matmul:
    """Return the products that `synthetic_runner` forms of FP8 weights. Raises ConfigError."""
    return resolve_matmul(
        matmul,
        device=torch.device(device),
        dtype=DTYPES[dtype],
        quantization=Quantization(powers_of_two=True) if fp8 else None,
        deterministic=False,
    )


def synthetic_runner(
    config: Any,
    *,
    device: str = "cuda",
    dtype: str = "bfloat16",
    kv_dtype: str = "auto",
    fp8: bool = False,
    matmul: str = WEIGHT_ONLY,
    seed: int = 0,
    after_index_topk: AfterIndexTopk | None = None,
    collectives: Collectives | None = None,
    rows_max: int = 0,
    draft_tokens: int = 0,
) -> TransformersRunner:
    """A runner over random weights on `device`, those that FP8 repositories convert in block-FP8 if `fp8`.

    `matmul` is worker.matmul, for a checkpoint whose scales are powers of two.
    `collectives` make it one rank of a group, with that rank's share of the experts and rounds of at most `rows_max`
    rows. `draft_tokens` above 0: with the draft layer, a DraftRunner. Raises ConfigError for dtypes that do not fit the
    model.
    """
    draft_layer = draft_tokens > 0
    geometry = geometry_of(config, kv_kinds(dtype, kv_dtype), draft_layer=draft_layer)
    share, exchange = None, None
    if collectives is not None:
        share = ExpertShare.of(collectives.rank, collectives.size, config.n_routed_experts)
    products = synthetic_matmul(matmul, device=device, dtype=dtype, fp8=fp8)
    model = random_model(
        config,
        dtype=DTYPES[dtype],
        device=device,
        fp8=fp8,
        matmul=products,
        experts=share,
        draft_layer=draft_layer,
        seed=seed,
    )
    if collectives is not None:
        exchange = Exchange(
            collectives,
            hidden=config.hidden_size,
            choices=config.num_experts_per_tok,
            rows_max=rows_max,
            dtype=DTYPES[dtype],
            device=device,
            deterministic=False,
            matmul=expert_matmul(model),
        )
    runner = TransformersRunner(
        model,
        anonymous_info(config, f"synthetic-{config.model_type}-{config.num_hidden_layers}"),
        geometry,
        after_index_topk=after_index_topk,
        share=share,
        exchange=exchange,
        matmul=products,
    )
    runner.release_unused()
    return runner
