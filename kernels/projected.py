"""KV rows, index keys and queries from the products that form them: norms, rotations and encoding joined, on a GPU.

Each is one launch, where the model library's modules and kernels/row_format.py take some ten. On a CPU callers keep to
those, whose bits they promise. Rounding is theirs, step by step; sums of squares, and products with the rotating
matrix, add in another order.

All tensors of a call lie on one GPU, those of the model in one dtype; nothing waits for it. A row's result depends on
that row alone. M tokens, H heads, d angles of a token.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernels.row_format import RowFormat
from kernels.row_target import Angles, RowTarget

#: Compute capability that converts to e4m3.
FP8_SINCE: Final = (8, 9)


def can_join(form: RowFormat, cos: Tensor) -> bool:
    """Whether these kernels form rows of `form` with the angles `cos` [..., d]: on a GPU, one that converts to e4m3
    where rows are in fp8, d a power of two."""
    size = cos.shape[-1]
    if not cos.is_cuda or size < 2 or size & (size - 1):
        return False
    return form.kind != "fp8" or torch.cuda.get_device_capability(cos.device) >= FP8_SINCE


def kv_rows(
    form: RowFormat,
    products: Tensor,
    weight: Tensor,
    eps: float,
    angles: Angles,
    target: RowTarget,
    queries: Tensor | None = None,
    turned: Tensor | None = None,
) -> None:
    """Write KV rows of `products` [M, r + d], values of a row adjacent: r normed (RMS, `weight` [r]), d rotated.

    With `queries` [M, H, d], values of a head adjacent: they are rotated likewise into `turned` of that shape.
    """
    from kernels.cuda import projected

    projected.kv_rows(form, products, weight, eps, angles, target, queries, turned)


def index_rows(
    form: RowFormat,
    products: Tensor,
    norm: tuple[Tensor, Tensor, float],
    angles: Angles,
    rotation: Tensor | None,
    target: RowTarget,
    queries: Tensor | None = None,
    head_weights: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Write index keys of `products` [M, D]: normed (LayerNorm: weight, bias, eps), d values rotated, and all by
    `rotation` [D, D], symmetric.

    Returns `queries` [M, H, D] rotated likewise, in the dtype that keys are compared in, and `head_weights` [M, H] *
    `scale` in float32; both empty without queries.
    """
    from kernels.cuda import projected

    return projected.index_rows(form, products, norm, angles, rotation, target, queries, head_weights, scale)
