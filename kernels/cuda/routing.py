"""Rows on their way to experts on CUDA: the contracts of kernels/routing.py, one launch each, in Triton.

On the current stream. Never waits; may be captured.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernels.cuda.triton_units import power_of_two, triton_unit
from kernels.expert_choice import ExpertChoice

#: Words of a row that one program moves; values that one adds.
MOVE_BLOCK: Final = 1024
ADD_BLOCK: Final = 512
WARPS: Final = 4


def choose_experts(logits: Tensor, bias: Tensor, choice: ExpertChoice, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """As kernels.routing.choose_experts."""
    rows, device = len(logits), logits.device
    weights = torch.empty(rows, choice.choices, dtype=torch.float32, device=device)
    chosen = torch.empty(rows, choice.choices, dtype=torch.int32, device=device)
    if rows:
        triton_unit("routing_triton").choose[(rows,)](
            logits,
            bias,
            logits if real is None else real,
            weights,
            chosen,
            choice.scaling,
            EXPERTS=choice.experts,
            GROUPS=choice.groups,
            GROUPS_CHOSEN=choice.groups_chosen,
            CHOICES=choice.choices,
            CHOICES_PADDED=power_of_two(choice.choices),
            NORMALIZES=choice.normalizes,
            HAS_REAL=real is not None,
            num_warps=1,
        )
    return weights, chosen


def pack_rows(hidden: Tensor, chosen: Tensor, weights: Tensor, packed: Tensor) -> None:
    """As kernels.routing.pack_rows."""
    words = _words(hidden.contiguous())
    parts = words, chosen.int().contiguous(), weights.float().contiguous()
    _move(packed, parts, len(hidden), packs=True)


def unpack_rows(packed: Tensor, width: int, dtype: torch.dtype, choices: int) -> tuple[Tensor, Tensor, Tensor]:
    """As kernels.routing.unpack_rows."""
    rows, device = len(packed), packed.device
    hidden = torch.empty(rows, width, dtype=dtype, device=device)
    chosen = torch.empty(rows, choices, dtype=torch.int32, device=device)
    weights = torch.empty(rows, choices, dtype=torch.float32, device=device)
    _move(packed, (_words(hidden), chosen, weights), rows, packs=False)
    return hidden, chosen, weights


def _move(packed: Tensor, parts: tuple[Tensor, Tensor, Tensor], count: int, *, packs: bool) -> None:
    words, chosen, weights = parts
    rows, width, choices = len(packed), words.shape[1], chosen.shape[1]
    if not rows:
        return
    triton_unit("routing_triton").move[rows, -(-width // MOVE_BLOCK)](
        packed.view(torch.int32),
        words,
        chosen,
        weights.view(torch.int32),
        packed.shape[1] // 4,
        width,
        choices,
        count,
        CHOICES_PADDED=power_of_two(choices),
        BLOCK=MOVE_BLOCK,
        PACKS=packs,
        num_warps=WARPS,
    )


def add_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """As kernels.routing.add_parts."""
    number, rows, width = parts.shape
    out = torch.empty(rows, width, dtype=dtype, device=parts.device)
    if out.numel():
        triton_unit("routing_triton").add_parts[rows, -(-width // ADD_BLOCK)](
            parts, out, parts.stride(0), width, PARTS=number, BLOCK=ADD_BLOCK, num_warps=WARPS
        )
    return out


def _words(rows: Tensor) -> Tensor:
    """int32 of rows whose bytes are whole words."""
    return rows.view(torch.int32)
