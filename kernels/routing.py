"""Rows on their way to experts: which experts a row chooses, rows and choices as bytes, and sums of what comes back.

On a GPU each is one launch. The model library's router takes some fifteen for the choice alone, in every layer with
experts; on a CPU it stays in use, so that bits are the library's, and only bytes and sums are formed here, by torch.

Bytes of a row are its hidden state, its k choices int32, and their weights float32: [T, row_bytes], the rest unused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.expert_choice import CHOICE_BYTES, NUMBER_BYTES, ExpertChoice


def router_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """float32[T, E] of `hidden` [T, K] and `weight` [E, K] on a GPU, the weight in float32 or the dtype of `hidden`.
    Products of bfloat16 are exact in float32, so that only the order of the sum differs from a product in float32."""
    if weight.dtype == torch.float32:
        return torch.nn.functional.linear(hidden.float(), weight)
    return torch.mm(hidden, weight.t(), out_dtype=torch.float32)


def choose_experts(logits: Tensor, bias: Tensor, choice: ExpertChoice, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights float32[T, k] and choices int32[T, k] for logits float32[T, E] and bias float32[E], on a GPU.

    As the model library's router chooses, highest score first; of equal scores, the lowest expert. Where `real` bool[T]
    is false, choices are -1.
    """
    from kernels.cuda import routing

    return routing.choose_experts(logits, bias, choice, real)


def pack_rows(hidden: Tensor, chosen: Tensor, weights: Tensor, packed: Tensor) -> None:
    """Write rows `hidden` [n, K], `chosen` int[n, k] and `weights` [n, k] to `packed` uint8[T, row_bytes], n <= T; rows
    behind them choose -1."""
    if packed.is_cuda:
        from kernels.cuda import routing

        routing.pack_rows(hidden, chosen, weights, packed)
        return
    count = len(hidden)
    own_hidden, own_chosen, own_weights = _parts(packed, hidden.shape[1], hidden.dtype, chosen.shape[1])
    own_hidden[:count], own_chosen[:count], own_weights[:count] = hidden, chosen, weights
    own_chosen[count:] = -1


def unpack_rows(packed: Tensor, width: int, dtype: torch.dtype, choices: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [T, width], choices (int32 on a GPU, else int64) and weights float32 of packed rows."""
    if packed.is_cuda:
        from kernels.cuda import routing

        return routing.unpack_rows(packed, width, dtype, choices)
    hidden, chosen, weights = _parts(packed, width, dtype, choices)
    return hidden.contiguous(), chosen.long(), weights.contiguous()


def add_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, K]: sum over `parts` [R, n, K] in their order, in float32, rounded once."""
    if parts.is_cuda:
        from kernels.cuda import routing

        return routing.add_parts(parts, dtype)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(dtype)


def _parts(rows: Tensor, width: int, dtype: torch.dtype, choices: int) -> tuple[Tensor, Tensor, Tensor]:
    """By view."""
    values = width * dtype.itemsize
    ids, end = values + NUMBER_BYTES * choices, values + CHOICE_BYTES * choices
    return rows[:, :values].view(dtype), rows[:, values:ids].view(torch.int32), rows[:, ids:end].view(torch.float32)
