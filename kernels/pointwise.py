"""RMS norm, rotary embedding and gated activation: on a GPU in one launch each, instead of eight, fourteen and two.

On a CPU callers keep to the model library's modules, whose bits they promise. On a GPU a launch costs more than its
work in a decode step, and a step has four norms, two rotations and a gate in every layer.

All tensors lie on a GPU, in one dtype; nothing waits for it. A row's result depends on that row alone.
"""

from __future__ import annotations

from torch import Tensor


def rms_norm(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * (values * rsqrt(mean of squares + eps)), over the last dimension of `values` [..., n], contiguous.

    Mean and root are float32; what they give is rounded to the dtype before `weight` is applied.
    """
    from kernels.cuda import pointwise

    return pointwise.rms_norm(values, weight, eps)


def add_rms_norm(values: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """values + added, rounded, and rms_norm of that."""
    from kernels.cuda import pointwise

    return pointwise.add_rms_norm(values, added, weight, eps)


def gate(values: Tensor, factors: Tensor) -> Tensor:
    """silu(values), rounded, times `factors`, which have the same shape [..., n]; rows may lie apart, and have another
    distance in each."""
    from kernels.cuda import pointwise

    return pointwise.gate(values, factors)


def can_rotate(size: int) -> bool:
    """Whether `rotate` takes angles of `size` values."""
    return size >= 2 and size & (size - 1) == 0


def rotate(
    queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, *, heads_dim: int, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """`queries` and `keys`, their first d values rotated by the angles `cos`, `sin` [N, S, d], whose halves are equal.

    `queries` and `keys` are [N, H, S, n] and [N, 1, S, n] with `heads_dim` 1, or [N, S, H, n] and [N, S, 1, n] with 2,
    n >= d, values of a vector adjacent. Pairs of values are neighbours when `interleaved`, else i and i + d / 2, as
    they are in the result. Every product and sum is rounded to the dtype, as torch does it: the same bits.
    """
    from kernels.cuda import pointwise

    return pointwise.rotate(queries, keys, cos, sin, heads_dim=heads_dim, interleaved=interleaved)
