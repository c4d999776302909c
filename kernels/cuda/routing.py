"""The choice of experts on CUDA: the contract of kernels/routing.py, one launch, in Triton.

On the current stream. Never waits; may be captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cuda.triton_units import launch_options, power_of_two, triton_unit
from kernels.expert_choice import ExpertChoice


def choose_experts(
    logits: Tensor, bias: Tensor, choice: ExpertChoice, real: Tensor | None, into: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Choose as kernels.routing.choose_experts does; `into`: weights and choices."""
    count, device = len(logits), logits.device
    if into is None:
        weights = torch.empty(count, choice.choices, dtype=torch.float32, device=device)
        chosen = torch.empty(count, choice.choices, dtype=torch.int32, device=device)
    else:
        weights, chosen = into
    rows = len(chosen)
    if rows:
        triton_unit("routing_triton").choose[(rows,)](
            logits,
            bias,
            logits if real is None else real,
            weights,
            chosen,
            chosen.stride(0),
            count,
            choice.scaling,
            EXPERTS=choice.experts,
            GROUPS=choice.groups,
            GROUPS_CHOSEN=choice.groups_chosen,
            CHOICES=choice.choices,
            CHOICES_PADDED=power_of_two(choice.choices),
            NORMALIZES=choice.normalizes,
            HAS_REAL=real is not None,
            num_warps=1,
            **launch_options(device),
        )
    return weights, chosen
