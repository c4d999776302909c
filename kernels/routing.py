"""Rows on their way to experts: which experts a row chooses, rows and choices as bytes, and sums of what comes back.

On a GPU the choice is one launch, where the model library's router takes some fifteen; on a CPU that stays in use, so
that bits are the library's. On a GPU rows are written and read where they travel: their norm goes there
(kernels/cuda/pointwise.py), the choice writes there, experts read there, and parts are added by the norm that follows.

Bytes of a row are its hidden state, its k choices int32, and their weights float32: [T, row_bytes], the rest unused.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.expert_choice import CHOICE_BYTES, NUMBER_BYTES, ExpertChoice


class ExchangedRows(NamedTuple):
    """Packed rows by view: rows lie apart."""

    hidden: Tensor  # [T, K]
    chosen: Tensor  # int32[T, k]
    weights: Tensor  # float32[T, k]


def router_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """float32[T, E] of `hidden` [T, K] and `weight` [E, K] on a GPU, the weight in float32 or the dtype of `hidden`.
    Products of bfloat16 are exact in float32, so that only the order of the sum differs from a product in float32."""
    if weight.dtype == torch.float32:
        return torch.nn.functional.linear(hidden.float(), weight)
    return torch.mm(hidden, weight.t(), out_dtype=torch.float32)


def choose_experts(
    logits: Tensor, bias: Tensor, choice: ExpertChoice, real: Tensor | None, into: ExchangedRows | None = None
) -> tuple[Tensor, Tensor]:
    """Weights float32[T, k] and choices int32[T, k] for logits float32[T, E] and bias float32[E], on a GPU.

    As the model library's router chooses, highest score first; of equal scores, the lowest expert. Where `real` bool[T]
    is false, choices are -1. With `into`, those of its rows: what lies behind the first T chooses -1.
    """
    from kernels.cuda import routing

    places = None if into is None else (into.weights, into.chosen)
    return routing.choose_experts(logits, bias, choice, real, places)


def pack_rows(hidden: Tensor, chosen: Tensor, weights: Tensor, packed: Tensor) -> None:
    """Write rows `hidden` [n, K], `chosen` int[n, k] and `weights` [n, k] to `packed` uint8[T, row_bytes], n <= T; rows
    behind them choose -1."""
    count = len(hidden)
    own = exchanged_rows(packed, hidden.shape[1], hidden.dtype, chosen.shape[1])
    own.hidden[:count], own.chosen[:count], own.weights[:count] = hidden, chosen, weights
    own.chosen[count:].fill_(-1)


def unpack_rows(packed: Tensor, width: int, dtype: torch.dtype, choices: int) -> ExchangedRows:
    """Packed rows, on a GPU by view; else copies, choices in int64."""
    found = exchanged_rows(packed, width, dtype, choices)
    if packed.is_cuda:
        return found
    return ExchangedRows(found.hidden.contiguous(), found.chosen.long(), found.weights.contiguous())


def exchanged_rows(packed: Tensor, width: int, dtype: torch.dtype, choices: int) -> ExchangedRows:
    """Rows of `packed` uint8[T, row_bytes], by view."""
    values = width * dtype.itemsize
    ids, end = values + NUMBER_BYTES * choices, values + CHOICE_BYTES * choices
    hidden, chosen = packed[:, :values].view(dtype), packed[:, values:ids].view(torch.int32)
    return ExchangedRows(hidden, chosen, packed[:, ids:end].view(torch.float32))


def add_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, K]: sum over `parts` [R, n, K] in their order, in float32, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(dtype)
