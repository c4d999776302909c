"""encode: values of rows or index keys to their bytes, in as few launches as the device allows."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.row_format import RowFormat


def encode(form: RowFormat, values: Tensor) -> Tensor:
    """`form.encode(values)`, byte for byte: uint8[..., row_bytes] of floating values [..., scaled + plain].

    On a GPU rows in fp8 and fp4 take one launch instead of nine and more. Never waits for the device.
    """
    if not values.is_cuda:
        return form.encode(values)
    from kernels.cuda.encode import encode as encode_on_cuda

    return encode_on_cuda(form, values)


def prepare_encode(form: RowFormat, dtype: torch.dtype, device: torch.device) -> None:
    """Compile what encode launches for values of `dtype`: before any capture."""
    encode(form, torch.zeros(1, form.values, dtype=dtype, device=device))


def quantized_queries(keys: RowFormat, queries: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and weights that give the scores of quantized queries: e4m3 values in the dtype of `queries` [.., H, D],
    and float32 `weights` [.., H] times their scales. Where keys are not quantised: both as they are."""
    if not keys.is_quantised:
        return queries, weights
    encoded = encode(RowFormat("fp8", keys.scaled, 0, keys.scaled), queries)
    values = encoded[..., : keys.scaled].view(torch.float8_e4m3fn).to(queries.dtype)
    return values, weights * encoded[..., keys.scaled :].view(torch.float32).squeeze(-1)
