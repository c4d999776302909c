"""Bytes of weights where routers are held in float32: see worker/weights/model.py, `keeps_exact`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def with_exact_routers(computed: Mapping[str, int], model: Any) -> dict[str, int]:
    """`computed` bytes by dtype of a bfloat16 `model`, the weights counted as float32 of routers that hold such."""
    counts = [
        weight.numel()
        for name, weight in model.named_parameters()
        if name.endswith("mlp.gate.weight") and weight.dtype == torch.float32
    ]
    moved = {"bfloat16": -2 * sum(counts), "float32": 4 * sum(counts)} if counts else {}
    return {name: size + moved.get(name, 0) for name, size in computed.items()}
