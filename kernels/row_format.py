"""Formats of a KV row and an index key: float32, bfloat16, or fp8 with scales.

    kind       KV row of r latent and d rope values                   index key of D values
    float32    4 (r + d) bytes                                        4 D
    bfloat16   2 (r + d)                                              2 D
    fp8        r of e4m3 | a float32 scale per 128 | d of bfloat16    D of e4m3 | one float32 scale

    656 bytes at r 512, d 64:   0 latent    512 scales[4]    528 rope      132 at D 128:   0 key    128 scale
    196 bytes at r 128, d 32:   0 latent    128 scale        132 rope      (A.X-K2-Light; no padding: architecture.md)

A scaled value is e4m3 * scale, with scale = largest magnitude of its group / 448. The rope part is not quantised: its
few values decide by position, and an error there does not average out over a latent's many dimensions.

Rounding of fp8: half a unit of 3 mantissa bits, so that each value is off by at most FP8_ERROR of itself, or by
half of e4m3's smallest step (2**-10 scales) where that is more. Decoding adds no rounding: the product of e4m3 and a
float32 scale is exact to float32's own 2**-24.

Pure functions of tensors: no host synchronisation, fit for graph capture, a row's bits do not depend on other rows.

Rejected: a scale per row (one outlier of 512 values would cost the others their bits), scales in powers of two (a bit
of every group's range; nothing here is faster with them).
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Final

import torch
from torch import Tensor

from kernels.row_bytes import GROUP, KINDS, RowShape, index_key_shape, kv_row_shape
from protocol.errors import BadInput

E4M3_MAX: Final = 448.0
#: Largest relative error of a quantised value that is no smaller than 2**-6 scales.
FP8_ERROR: Final = 2.0**-4


@dataclass(frozen=True)
class RowFormat(RowShape):
    """A row's shape, and how it is written and read."""

    @property
    def dtype(self) -> torch.dtype:
        """Of values that are not scaled."""
        return torch.float32 if self.kind == "float32" else torch.bfloat16

    def encode(self, values: Tensor) -> Tensor:
        """Bytes uint8[..., row_bytes] of floating values [..., scaled + plain]; NaN stays NaN."""
        if self.kind != "fp8":
            return values.to(self.dtype).contiguous().view(torch.uint8)
        groups = values[..., : self.scaled].float().unflatten(-1, (-1, self.group))
        scales = groups.abs().amax(-1, keepdim=True) / E4M3_MAX
        scales = scales.masked_fill(scales == 0, 1.0)
        # Rounding of the quotient may pass the largest value by a bit, and e4m3 has no infinity to saturate to.
        quantised = (groups / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).flatten(-2)
        plain = values[..., self.scaled :].to(self.dtype)
        parts = (quantised, scales.squeeze(-1), plain)
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)

    def decode(self, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values [..., scaled + plain] of bytes uint8[..., row_bytes], contiguous."""
        if self.kind != "fp8":
            return rows.view(self.dtype).to(dtype)
        rope = self.row_bytes - 2 * self.plain
        quantised = rows[..., : self.scaled].view(torch.float8_e4m3fn).float().unflatten(-1, (-1, self.group))
        scaled = quantised * rows[..., self.scaled : rope].view(torch.float32).unsqueeze(-1)
        return torch.cat((scaled.flatten(-2).to(dtype), rows[..., rope:].view(self.dtype).to(dtype)), dim=-1)


def kv_row_format(kind: str, latent: int, rope: int) -> RowFormat:
    """Rows of one latent and one rope key. Raises ConfigError for a kind that does not exist, or does not fit."""
    return RowFormat(*astuple(kv_row_shape(kind, latent, rope)))


def index_key_format(kind: str, dim: int) -> RowFormat:
    """Keys of the indexer. Raises ConfigError; fp8 wants a power of two, so that keys can be rotated (`hadamard`)."""
    return RowFormat(*astuple(index_key_shape(kind, dim)))


def kv_row_format_of(row_bytes: int, latent: int, rope: int) -> RowFormat:
    """The format that gives rows of `row_bytes`. Raises BadInput when none does."""
    return _of_bytes(row_bytes, [RowFormat(kind, latent, rope, min(GROUP, latent)) for kind in KINDS])


def index_key_format_of(row_bytes: int, dim: int) -> RowFormat:
    """The format that gives index keys of `row_bytes`. Raises BadInput when none does."""
    return _of_bytes(row_bytes, [RowFormat(kind, dim, 0, dim) for kind in KINDS])


def hadamard(dim: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """The orthogonal Hadamard matrix [dim, dim], symmetric; `dim` a power of two.

    Applied to queries and keys alike it leaves their products as they are, and spreads one large value of a key over
    all of them, so that a scale fits the whole key.
    """
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < dim:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (matrix / math.sqrt(dim)).to(device=device, dtype=dtype)


def _of_bytes(row_bytes: int, formats: list[RowFormat]) -> RowFormat:
    for form in formats:
        if form.row_bytes == row_bytes:
            return form
    raise BadInput(
        f"no format of {formats[0].scaled} + {formats[0].plain} values has rows of {row_bytes} bytes",
        field="row_bytes",
        value=row_bytes,
        remedy=f"use {', '.join(f'{form.row_bytes} ({form.kind})' for form in formats)}",
    )
