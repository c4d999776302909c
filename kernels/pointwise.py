"""RMS norm, with the sums ahead of it, and gated activation: on a GPU in one launch each, instead of up to twelve.

On a CPU callers keep to the model library's modules, whose bits they promise. On a GPU a launch costs more than its
work in a decode step.

All tensors lie on a GPU, in one dtype; nothing waits for it. A row's result depends on that row alone.
"""

from __future__ import annotations

from torch import Tensor

from kernels.cuda.quantize import Codes


def rms_norm(values: Tensor, weight: Tensor, eps: float, codes: Codes | None = None) -> Tensor:
    """weight * (values * rsqrt(mean of squares + eps)), over the last dimension of `values` [..., n], contiguous.

    Mean and root are float32; what they give is rounded to the dtype before `weight` is applied. `codes` receives the
    result as kernels.block_fp8.quantize_rows gives it, n in whole blocks.
    """
    from kernels.cuda import pointwise

    return pointwise.rms_norm(values, weight, eps, codes)


def join_norm(
    values: Tensor,
    parts: Tensor,
    added: Tensor | None,
    weight: Tensor | None,
    eps: float,
    also: Tensor | None = None,
    codes: Codes | None = None,
) -> tuple[Tensor, Tensor | None]:
    """values [..., n] + (sum of `parts` [R, M, n] + `added` [..., n]), and rms_norm of that; None without a `weight`.

    Parts are added in their order in float32; what comes of them, each further sum and the whole are rounded to the
    dtype of `values`. `also` [M, n], rows of any distance, receives the norm too, `codes` as of rms_norm.
    """
    from kernels.cuda import pointwise

    return pointwise.join_norm(values, parts, added, weight, eps, also, codes)


def gate(values: Tensor, factors: Tensor) -> Tensor:
    """silu(values), rounded, times `factors`, which have the same shape [..., n]; rows may lie apart, and have another
    distance in each."""
    from kernels.cuda import pointwise

    return pointwise.gate(values, factors)
