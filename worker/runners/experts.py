"""Mixture of experts: the library's modules, with the experts' products formed as suits device and step.

| where          | decode       | prefill    | why                                                                     |
|----------------|--------------|------------|-------------------------------------------------------------------------|
| CPU            | batched_mm   | grouped_mm | a fixed shape per token keeps rows apart; grouped_mm is the library's   |
| GPU, bfloat16  | grouped_mm   | grouped_mm | reads each chosen expert once, its offsets stay on the device           |
| FP8 is kept    | BlockExperts of worker/weights/modules.py | reads each chosen expert once, in FP8          |
| GPU, otherwise | batched_mm   | batched_mm | torch's grouped_mm would read its offsets on the host                   |

batched_mm copies the weights of every token's experts: nothing at the size of tests, 30 GB for 64 tokens of
DeepSeek-V3.2. torch has a grouped kernel for bfloat16 on compute capability 9 and 10.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from worker.weights.modules import BlockExperts

BATCHED: Final = "batched_mm"
GROUPED: Final = "grouped_mm"
GROUPED_SINCE: Final = (9, 10)  # major compute capability with a grouped kernel


def experts_for(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """Names of the implementations for decode and for prefill."""
    if device.type != "cuda":
        return BATCHED, GROUPED
    has_kernel = dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in GROUPED_SINCE
    return (GROUPED, GROUPED) if has_kernel else (BATCHED, BATCHED)


def mixture(moe: Any, hidden: Tensor, experts: str) -> Tensor:
    """Output [N, S, hidden] of a mixture of experts: the library's module, or one with `BlockExperts` in it."""
    _, weights, chosen = moe.gate(hidden)
    shared: Tensor = moe.shared_experts(hidden)
    if isinstance(moe.experts, BlockExperts):
        own: Tensor = moe.experts(hidden.view(-1, hidden.shape[-1]), chosen, weights)
        return own.view(hidden.shape) + shared
    forward: Callable[..., Tensor] = ALL_EXPERTS_FUNCTIONS[experts]
    return forward(moe.experts, hidden.view(-1, hidden.shape[-1]), chosen, weights).view(hidden.shape) + shared
