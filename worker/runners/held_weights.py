"""The dtype in which a runner holds weights, and the memory of a keeper that holds them for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

from protocol.errors import ConfigError
from worker.device.gpu_memory import cuda_device
from worker.keeper.memory import KeptMemory, find_memory
from worker.keeper.messages import TABLE_VERSION, WeightsIdentity
from worker.runners.checkpoint import weights_digest
from worker.weights.layout import ExpertShare
from worker.weights.matmul import Matmul

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
