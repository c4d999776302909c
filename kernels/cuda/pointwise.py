"""RMS norm, with the sums ahead of it, and gated activation: on a GPU in one launch each, instead of up to twelve.

On a CPU callers keep to the model library's modules, whose bits they promise. On a GPU a launch costs more than its
work in a decode step.

All tensors lie on a GPU, in one dtype; nothing waits for it. A row's result depends on that row alone.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernels.cuda.quantize import Codes
from kernels.cuda.triton_units import launch_options, power_of_two, triton_unit

#: Values of a row that one warp norms.
VALUES_PER_WARP: Final = 1024
WARPS_MAX: Final = 8
GATE_BLOCK: Final = 1024


def rms_norm(values: Tensor, weight: Tensor, eps: float, codes: Codes | None = None) -> Tensor:
    """weight * (values * rsqrt(mean of squares + eps)), over the last dimension of `values` [..., n], contiguous.

    Mean and root are float32; what they give is rounded to the dtype before `weight` is applied. `codes` receives the
    result as kernels.block_fp8.quantize_rows gives it, n in whole blocks.
    """
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    _norm(values, None, None, weight, None, out, None, codes, eps)
    return out


def join_norm(
    values: Tensor,
    parts: Tensor,
    added: Tensor | None,
    weight: Tensor | None,
    eps: float,
    also: Tensor | Codes | None = None,
    codes: Codes | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """values [..., n] + (sum of `parts` [R, M, n] + `added` [..., n]), and rms_norm of that; None without a `weight`.
    The sum goes `into`, contiguous, where it is given.

    Parts are added in their order in float32; what comes of them, each further sum and the whole are rounded to the
    dtype of `values`. `also` [M, n], rows of any distance, receives the norm too, or where it is Codes the same as
    `codes`, of rms_norm.
    """
    total = torch.empty(values.shape, dtype=values.dtype, device=values.device) if into is None else into
    out = None if weight is None else torch.empty_like(total)
    _norm(values, parts, added, weight, total, out, also, codes, eps)
    return total, out


def _norm(
    values: Tensor,
    parts: Tensor | None,
    added: Tensor | None,
    weight: Tensor | None,
    total: Tensor | None,
    out: Tensor | None,
    also: Tensor | Codes | None,
    codes: Codes | None,
    eps: float,
) -> None:
    rows, size = values.flatten(0, -2), values.shape[-1]
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if len(rows) == 0:
        return
    if parts is not None and parts.stride()[1:] != (size, 1):
        parts = parts.contiguous()
    padded, beside = power_of_two(size), also if isinstance(also, Codes) else None
    other = also.values if isinstance(also, Codes) else also
    powers = next((one.powers for one in (codes, beside) if one is not None), False)
    number, part_stride = (0, 0) if parts is None else (len(parts), parts.stride(0))
    triton_unit("pointwise_triton").join_norm[(len(rows),)](
        rows,
        rows if parts is None else parts,
        part_stride,
        rows if added is None else added.contiguous(),
        rows if weight is None else weight,
        rows if total is None else total,
        rows if out is None else out,
        rows if other is None else other,
        rows if codes is None else codes.values,
        rows if codes is None else codes.scales,
        rows if beside is None else beside.scales,
        rows.stride(0),
        0 if other is None else other.stride(0),
        0 if codes is None else codes.scales.stride(1),
        0 if beside is None else beside.scales.stride(0),
        eps,
        SIZE=size,
        SIZE_PADDED=padded,
        PARTS=number,
        ADDS=added is not None,
        NORMS=weight is not None,
        ALSO=other is not None and beside is None,
        QUANTIZES=codes is not None,
        ALSO_CODES=beside is not None,
        POWERS=powers,
        num_warps=max(1, min(WARPS_MAX, padded // VALUES_PER_WARP)),
        **launch_options(values.device),
    )


def gate(values: Tensor, factors: Tensor) -> Tensor:
    """silu(values), rounded, times `factors`, which have the same shape [..., n]; rows may lie apart, and have another
    distance in each."""
    size, out = values.shape[-1], torch.empty(values.shape, dtype=values.dtype, device=values.device)
    rows = [one if one.stride(1) == 1 else one.contiguous() for one in (values.flatten(0, -2), factors.flatten(0, -2))]
    if out.numel():
        grid = len(rows[0]), -(-size // GATE_BLOCK)
        strides = (one.stride(0) for one in rows)
        triton_unit("pointwise_triton").gate[grid](
            *rows, out, size, *strides, BLOCK=GATE_BLOCK, **launch_options(out.device)
        )
    return out
