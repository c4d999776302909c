"""RMS norm, rotary embedding and gated activation on CUDA: the contracts of kernels/pointwise.py, one launch each."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernels.cuda.triton_units import power_of_two, triton_unit

#: Heads that one program rotates.
BLOCK_HEADS: Final = 16
#: Values of a row that one warp norms.
VALUES_PER_WARP: Final = 1024
WARPS_MAX: Final = 8
GATE_BLOCK: Final = 1024


def rms_norm(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As kernels.pointwise.rms_norm."""
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    _norm(values, None, weight, None, out, eps)
    return out


def add_rms_norm(values: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As kernels.pointwise.add_rms_norm."""
    total, out = torch.empty_like(added), torch.empty_like(added)
    _norm(values, added.contiguous(), weight, total, out, eps)
    return total, out


def _norm(values: Tensor, added: Tensor | None, weight: Tensor, total: Tensor | None, out: Tensor, eps: float) -> None:
    rows, size = values.flatten(0, -2), values.shape[-1]
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if len(rows) == 0:
        return
    padded = power_of_two(size)
    triton_unit("pointwise_triton").rms_norm[(len(rows),)](
        rows,
        rows if added is None else added,
        weight,
        out if total is None else total,
        out,
        rows.stride(0),
        eps,
        SIZE=size,
        SIZE_PADDED=padded,
        ADDS=added is not None,
        num_warps=max(1, min(WARPS_MAX, padded // VALUES_PER_WARP)),
    )


def gate(values: Tensor, factors: Tensor) -> Tensor:
    """As kernels.pointwise.gate."""
    size, out = values.shape[-1], torch.empty(values.shape, dtype=values.dtype, device=values.device)
    rows = [one if one.stride(1) == 1 else one.contiguous() for one in (values.flatten(0, -2), factors.flatten(0, -2))]
    if out.numel():
        grid = len(rows[0]), -(-size // GATE_BLOCK)
        strides = (one.stride(0) for one in rows)
        triton_unit("pointwise_triton").gate[grid](*rows, out, size, *strides, BLOCK=GATE_BLOCK)
    return out


def rotate(
    queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, *, heads_dim: int, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """As kernels.pointwise.rotate."""
    tokens_dim = 3 - heads_dim
    batch, tokens, size = cos.shape
    heads, width = queries.shape[heads_dim], queries.shape[3]
    turned = torch.empty(batch, tokens, heads, width, dtype=queries.dtype, device=queries.device)
    turned_keys = torch.empty(batch, tokens, 1, width, dtype=keys.dtype, device=keys.device)
    if batch * tokens:
        triton_unit("pointwise_triton").rotate[-(-heads // BLOCK_HEADS) + 1, batch * tokens](
            queries,
            keys,
            cos.contiguous(),
            sin.contiguous(),
            turned,
            turned_keys,
            tokens,
            heads,
            queries.stride(0),
            queries.stride(tokens_dim),
            queries.stride(heads_dim),
            keys.stride(0),
            keys.stride(tokens_dim),
            HALF=size // 2,
            PLAIN=width - size,
            PLAIN_PADDED=power_of_two(max(1, width - size)),
            INTERLEAVED=interleaved,
            BLOCK_HEADS=BLOCK_HEADS,
            num_warps=1,
            enable_fp_fusion=False,
        )
    if heads_dim == 1:
        return turned.transpose(1, 2), turned_keys.transpose(1, 2)
    return turned, turned_keys
