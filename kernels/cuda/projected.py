"""KV rows, index keys and queries from the products that form them: norms, rotations and encoding joined, on a GPU.

Each is one launch, in Triton, where the model library's modules and kernels/row_format.py take some ten. In fp4 a
second one encodes what the first leaves in the model's dtype. On a CPU callers keep to those modules, whose bits they
promise. Rounding is theirs, step by step; sums of squares, and products with the rotating matrix, add in another
order.

All tensors of a call lie on one GPU, those of the model in one dtype; nothing waits for it. A row's result depends on
that row alone. M tokens, H heads, d angles of a token.
"""

from __future__ import annotations

from math import gcd
from typing import Any, Final

import torch
from torch import Tensor

from kernels.cuda.encode import ALIGN_MAX, BY_E4M3_MAX, encode_fp4, is_coded
from kernels.cuda.triton_units import launch_options, power_of_two, triton_unit
from kernels.row_bytes import GROUP
from kernels.row_format import RowFormat
from kernels.row_target import Angles, RowTarget

#: Heads of a token that one program rotates; of an indexer's queries from MANY_TOKENS on, so that few programs read its
#: matrix.
BLOCK_HEADS: Final = 16
MANY_HEADS: Final = 64
MANY_TOKENS: Final = 512
INDEX_WARPS: Final = 4
DOT_LEAST: Final = 16
#: Compute capability that converts to e4m3.
FP8_SINCE: Final = (8, 9)


def can_join(form: RowFormat, cos: Tensor) -> bool:
    """Return whether these kernels form rows of `form` with the angles `cos` [..., d]: on a GPU, one that converts to
    e4m3 where rows are quantised, d a power of two."""
    size = cos.shape[-1]
    if not cos.is_cuda or size < 2 or size & (size - 1) or (form.kind == "fp4" and not is_coded(form)):
        return False
    return not form.is_quantised or torch.cuda.get_device_capability(cos.device) >= FP8_SINCE


def _unquantised(form: RowFormat, products: Tensor) -> tuple[RowFormat, RowTarget]:
    """Rows of as many values in the dtype of `products` [M, ..], and memory for them."""
    kind, group = str(products.dtype).removeprefix("torch."), min(GROUP, form.scaled)
    plain = RowFormat(kind, form.scaled, form.plain, group)
    return plain, RowTarget(products.new_empty(len(products), plain.row_bytes, dtype=torch.uint8))


def kv_rows(
    form: RowFormat,
    products: Tensor,
    weight: Tensor,
    eps: float,
    angles: Angles,
    target: RowTarget,
    queries: Tensor | None = None,
    turned: Tensor | None = None,
    *,
    latent_scale: float = 1.0,
) -> None:
    """Write KV rows of `products` [M, r + d], values of a row adjacent: r normed (RMS, `weight` [r]), d rotated.

    With `queries` [M, H, d], values of a head adjacent: they are rotated likewise into `turned` of that shape. In fp4
    the r are then multiplied by `latent_scale`, a power of two.
    """
    tokens, heads = len(products), 0 if queries is None else queries.shape[1]
    if form.kind == "fp4":
        plain, held = _unquantised(form, products)
        kv_rows(plain, products, weight, eps, angles, held, queries, turned)
        encode_fp4(form, held.rows.view(products.dtype), target, scale=latent_scale)
        return
    given, put = (products if one is None else one for one in (queries, turned))
    if not tokens:
        return
    triton_unit("projected_triton").kv_rows[1 + -(-heads // BLOCK_HEADS), tokens](
        products,
        products.stride(0),
        weight,
        eps,
        angles.cos,
        angles.sin,
        given,
        given.stride(0),
        given.stride(1),
        put,
        put.stride(0),
        put.stride(1),
        heads,
        target.rows,
        target.rows if target.places is None else target.places,
        LATENT=form.scaled,
        GROUP=form.group,
        GROUPS_PADDED=power_of_two(-(-form.scaled // form.group)),
        GROUP_PADDED=power_of_two(form.group),
        HALF=form.plain // 2,
        BLOCK_HEADS=BLOCK_HEADS,
        num_warps=1,
        **_options(form, angles, target),
    )


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
    if form.kind == "fp4":
        plain, held = _unquantised(form, products)
        made = index_rows(plain, products, norm, angles, rotation, held, queries, head_weights, scale)
        encode_fp4(form, held.rows.view(products.dtype), target)
        return made
    tokens, heads = len(products), 0 if queries is None else queries.shape[1]
    kept = products.dtype if form.kind == "fp8" else form.dtype
    found = torch.empty(tokens, heads, form.scaled, dtype=kept, device=products.device)
    shares = torch.empty(tokens, heads, dtype=torch.float32, device=products.device)
    if not tokens:
        return found, shares
    given, raw = (products if one is None else one for one in (queries, head_weights))
    block = MANY_HEADS if tokens >= MANY_TOKENS else BLOCK_HEADS
    triton_unit("projected_triton").index_rows[1 + -(-heads // block), tokens](
        products,
        products.stride(0),
        *norm,
        angles.cos,
        angles.sin,
        products if rotation is None else rotation,
        given,
        given.stride(0),
        found,
        raw,
        raw.stride(0),
        shares,
        scale,
        heads,
        target.rows,
        target.rows if target.places is None else target.places,
        DIM=form.scaled,
        DIM_PADDED=max(DOT_LEAST, power_of_two(form.scaled)),
        HALF=angles.cos.shape[-1] // 2,
        FIRST=form.scaled - angles.cos.shape[-1] if angles.last else 0,
        ROTATES=rotation is not None,
        BLOCK_HEADS=block,
        HEADS_PADDED=power_of_two(max(1, heads)),
        num_warps=INDEX_WARPS,
        **_options(form, angles, target),
    )
    return found, shares


def _options(form: RowFormat, angles: Angles, target: RowTarget) -> dict[str, Any]:
    return {
        "INTERLEAVED": angles.interleaved,
        "KIND_BYTES": 1 if form.kind == "fp8" else form.dtype.itemsize,
        "BY_MAX": BY_E4M3_MAX,
        "ROW_BYTES": form.row_bytes,
        "OUT_ALIGN": gcd(form.row_bytes, ALIGN_MAX),
        "PLACED": target.places is not None,
        "enable_fp_fusion": False,
        **launch_options(target.rows.device),
    }
