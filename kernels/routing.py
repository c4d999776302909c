"""Rows on their way to experts: which experts a row chooses, rows and choices as bytes, and sums of what comes back.

On a GPU the choice is one launch, where the model library's router takes some fifteen; on a CPU that stays in use, so
that bits are the library's. On a GPU rows are written and read where they travel: their norm goes there
(kernels/cuda/pointwise.py), the choice writes there, experts read there, and parts are added by the norm that follows.

Bytes of a row are its hidden state, its k choices int32, and their weights float32: [T, row_bytes], the rest unused.
States for experts that quantize their rows are quantized before they travel: e4m3, and the scales behind it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.block_weight import E4M3
from kernels.cuda.quantize import Codes
from kernels.expert_choice import CHOICE_BYTES, NUMBER_BYTES, ExpertChoice, state_bytes


class ExchangedRows(NamedTuple):
    """Packed rows by view: rows lie apart."""

    hidden: Tensor  # [T, K]
    chosen: Tensor  # int32[T, k]
    weights: Tensor  # float32[T, k]
    scales: Tensor | None = None  # float32[T, K / 128] of e4m3


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


def pack_rows(hidden: Tensor | Codes, chosen: Tensor, weights: Tensor, packed: Tensor) -> None:
    """Write rows `hidden` [n, K], `chosen` int[n, k] and `weights` [n, k] to `packed` uint8[T, row_bytes], n <= T; rows
    behind them choose -1."""
    states, count = hidden.values if isinstance(hidden, Codes) else hidden, len(chosen)
    own = exchanged_rows(packed, states.shape[1], states.dtype, chosen.shape[1])
    own.hidden[:count], own.chosen[:count], own.weights[:count] = states, chosen, weights
    if isinstance(hidden, Codes) and own.scales is not None:
        own.scales[:count] = hidden.scales
    own.chosen[count:].fill_(-1)


def unpack_rows(packed: Tensor, width: int, dtype: torch.dtype, choices: int) -> ExchangedRows:
    """Packed rows, on a GPU by view; else copies, choices in int64."""
    found = exchanged_rows(packed, width, dtype, choices)
    if packed.is_cuda:
        return found
    return ExchangedRows(found.hidden.contiguous(), found.chosen.long(), found.weights.contiguous(), found.scales)


def exchanged_rows(packed: Tensor, width: int, dtype: torch.dtype, choices: int) -> ExchangedRows:
    """Rows of `packed` uint8[T, row_bytes], by view."""
    values, state = width * dtype.itemsize, state_bytes(width, dtype.itemsize)
    ids, end = state + NUMBER_BYTES * choices, state + CHOICE_BYTES * choices
    hidden, chosen = packed[:, :values].view(dtype), packed[:, state:ids].view(torch.int32)
    scales = packed[:, values:state].view(torch.float32) if dtype == E4M3 else None
    return ExchangedRows(hidden, chosen, packed[:, ids:end].view(torch.float32), scales)


def add_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, K]: sum over `parts` [R, n, K] in their order, in float32, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(dtype)
