"""Weights as a runner holds them: their dtype, the memory of a keeper that has them, a rank's share of the experts."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from protocol.errors import ConfigError
from protocol.logs import fields, logger
from worker.device.gpu_memory import cuda_device
from worker.families.table import library_config
from worker.group.exchange import Collectives, Exchange
from worker.keeper.memory import KeptMemory, find_memory
from worker.keeper.messages import TABLE_VERSION, WeightsIdentity
from worker.runners.checkpoint import weights_digest
from worker.runners.layers import row_multiple
from worker.weights.layout import ExpertShare
from worker.weights.matmul import Matmul
from worker.weights.modules import expert_matmul

log = logger("worker.runners")

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def share_of(path: str | Path, collectives: Collectives | None) -> ExpertShare | None:
    """Return the experts of a checkpoint that this rank holds; None where a process holds all."""
    if collectives is None:
        return None
    return ExpertShare.of(collectives.rank, collectives.size, library_config(path).n_routed_experts)


def exchange_of(
    model: Any, collectives: Collectives, rows_max: int, dtype: torch.dtype, *, deterministic: bool
) -> Exchange:
    """Return the exchange of the mixtures of `model` in rounds of at most `rows_max` rows of each rank."""
    multiple = row_multiple(model.config) if deterministic else 1
    exchange = Exchange(
        collectives,
        hidden=model.config.hidden_size,
        choices=model.config.num_experts_per_tok,
        rows_max=-(-rows_max // multiple) * multiple,
        dtype=dtype,
        device=model.device,
        deterministic=deterministic,
        matmul=expert_matmul(model),
    )
    log.info("exchange", extra=fields(ranks=collectives.size, bytes=exchange.bytes))
    return exchange


def kept_memory(
    keeper: Path | None,
    path: str | Path,
    device: str,
    dtype: torch.dtype,
    products: Matmul,
    *,
    keeps_fp8: bool,
    share: ExpertShare | None,
    draft_layer: bool,
    only_attach: bool,
) -> KeptMemory | None:
    """Memory of the keeper at socket `keeper` for weights of these settings; None without one."""
    if keeper is None:
        return None
    fp8 = f"FP8 {'kept' if keeps_fp8 else 'decoded'}"
    identity = WeightsIdentity(
        checkpoint=weights_digest(path),
        table=TABLE_VERSION,
        device="",
        dtype=dtype_name(dtype),
        form=f"{fp8}, rows {'quantized' if products.quantizes_rows else 'as they are'}",
        experts="all" if share is None else f"{share.count} from {share.first}",
        layers="with the draft layer" if draft_layer else "without a draft layer",
    )
    place = cuda_device(device) if device != "cpu" else torch.device(device)
    return find_memory(keeper, identity, place, only_attach=only_attach)


def dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


def torch_dtype_of(name: str, config: dict[str, Any]) -> torch.dtype:
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    chosen = stored if name == "auto" else name
    if chosen not in DTYPES:
        raise ConfigError(
            "cannot be served", field="worker.dtype", value=chosen, remedy=f"use one of {', '.join(DTYPES)}"
        )
    return DTYPES[chosen]


class HoldsWeights(Protocol):
    """A runner, as far as it tells where its weights are from."""

    weights_seconds: dict[str, float]
    weights_are_kept: bool

    def weights_bytes(self) -> dict[str, int]:
        """Return bytes of the weights as they are held, by dtype."""
        ...


def finish_loading(runner: HoldsWeights, memory: KeptMemory | None, path: str | Path, began: float) -> None:
    """Keep weights that were loaded for the next worker, where `memory` is a keeper's, and note for how long they were
    loaded, since `began` on the monotonic clock."""
    if memory is not None:
        memory.finish(partial(weights_digest, path))
        runner.weights_are_kept = memory.is_kept
    found = "checkpoint" if memory is None else memory.source
    runner.weights_seconds[found] = time.monotonic() - began
    held = {f"{name}_bytes": size for name, size in runner.weights_bytes().items()}
    log.info("weights held", extra=fields(**held))
