"""Formats of a KV row and an index key: float32, bfloat16, or quantised to 8 or 4 bits with scales.

    kind       KV row of r latent and d rope values                   index key of D values
    float32    4 (r + d) bytes                                        4 D
    bfloat16   2 (r + d)                                              2 D
    fp8        r of e4m3 | a float32 scale per 128 | d of bfloat16    D of e4m3 | one float32 scale
    fp4        r of e2m1 | an e4m3 scale per 16 | d of e4m3           D of e2m1 | a power of two (e8m0) per 32

    fp8 at r 512, d 64, 656 bytes:   0 latent    512 scales[4]     528 rope     132 at D 128:   0 key    128 scale
    fp4 at r 512, d 64, 352 bytes:   0 latent    256 scales[32]    288 rope      68 at D 128:   0 key     64 scales[4]
    fp8 at r 128, d 32, 196 bytes:   0 latent    128 scale         132 rope     (A.X-K2-Light)

**fp8.** A scaled value is e4m3 * scale, with scale = largest magnitude of its group / 448. The rope part is not
quantised: its few values decide by position, and an error there does not average out over a latent's many dimensions.
Half a unit of 3 mantissa bits: each value is off by at most FP8_ERROR of itself, or by half of e4m3's smallest step
(2**-10 scales) where that is more.

**fp4.** Rows are NVFP4, keys MXFP4, as others publish them for these models. e2m1 has the magnitudes 0, 0.5, 1, 1.5, 2,
3, 4, 6; value 2 i lies in the low half of byte i. Quotients are rounded to the nearest, ties to the even code, and
beyond 6 to 6. A row's scale is the largest magnitude of its group / 6 as e4m3 holds it, by which the group is then
divided; no scale is above 448, and none that a value needs is below 2**-9. NVFP4's second scale, one a layer, is no
part of the row: `latent_exponent` gives a power of two by which latents are divided before they are kept, and by
which products with them are multiplied, so that it costs no rounding. A key's scale is 2**(floor(log2 of the largest
magnitude) - 2), the OCP standard's rule. Rope values are e4m3 as they are: |value| <= 448, more saturates. A value is
off by at most a quarter of itself, or by a quarter of its scale where that is more; a key's largest value too, of
which 7.99 scales become 6.

Decoding adds no rounding: the product of a code and its scale is exact to float32's own 2**-24.

Pure functions of tensors: no host synchronisation, fit for graph capture, a row's bits do not depend on other rows.

Rejected for fp8: a scale per row (one outlier of 512 values would cost the others their bits), scales in powers of two
(a bit of every group's range; nothing here is faster with them). For keys in fp4: the least power of two that lets
nothing saturate (overlap of selections the same within 0.6 % either way, benchmarks/NOTES.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import partial
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from kernels.row_bytes import FP4_KEY_GROUP, KINDS, RowShape, index_key_shape, kv_row_shape
from protocol.errors import BadInput, ConfigError

E4M3_MAX: Final = 448.0
#: Largest relative error of a quantised value that is no smaller than 2**-6 scales.
FP8_ERROR: Final = 2.0**-4
E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX: Final = E2M1[-1]
#: Exponent of e2m1's largest value.
E2M1_EXPONENT: Final = 2


@dataclass(frozen=True)
class RowFormat(RowShape):
    """A row's shape, and how it is written and read."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values that are not scaled."""
        return {"float32": torch.float32, "fp4": torch.float8_e4m3fn}.get(self.kind, torch.bfloat16)

    def encode(self, values: Tensor) -> Tensor:
        """Bytes uint8[..., row_bytes] of floating values [..., scaled + plain]; NaN stays NaN. In fp4 one scaled value
        that is NaN or infinite makes its whole group NaN."""
        if not self.is_quantised:
            return values.to(self.dtype).contiguous().view(torch.uint8)
        groups = values[..., : self.scaled].float().unflatten(-1, (-1, self.group))
        codes, scales = _to_e4m3(groups) if self.kind == "fp8" else _to_e2m1(groups)
        plain = values[..., self.scaled :]
        plain = _saturated(plain.float()) if self.kind == "fp4" else plain.to(self.dtype)
        return torch.cat([part.contiguous().view(torch.uint8) for part in (codes, scales, plain)], dim=-1)

    def decode(self, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values [..., scaled + plain] of bytes uint8[..., row_bytes], contiguous."""
        if not self.is_quantised:
            return rows.view(self.dtype).to(dtype)
        codes, scales, plain = rows.split([self.code_bytes, self.scale_bytes, self.plain * self.dtype.itemsize], -1)
        if self.kind == "fp8":
            values = codes.view(torch.float8_e4m3fn).float()
            factors = scales.view(torch.float32)
        else:
            values = rows.new_tensor(E2M1 + tuple(-size for size in E2M1), dtype=torch.float32)[_halves(codes).int()]
            factors = _e8m0(scales) if self._in_powers else scales.view(torch.float8_e4m3fn).float()
        scaled = values.unflatten(-1, (-1, self.group)) * factors.unsqueeze(-1)
        return torch.cat((scaled.flatten(-2).to(dtype), plain.view(self.dtype).to(dtype)), dim=-1)

    @property
    def _in_powers(self) -> bool:
        """Return whether scales of fp4 are powers of two: those of keys."""
        return self.group == FP4_KEY_GROUP


def kv_row_format(kind: str, latent: int, rope: int) -> RowFormat:
    """Rows of one latent and one rope key. Raises ConfigError for a kind that does not exist, or does not fit."""
    return RowFormat(*astuple(kv_row_shape(kind, latent, rope)))


def index_key_format(kind: str, dim: int) -> RowFormat:
    """Keys of the indexer. Raises ConfigError; fp8 and fp4 want a power of two, so that keys can be rotated
    (`hadamard`)."""
    return RowFormat(*astuple(index_key_shape(kind, dim)))


def kv_row_format_of(row_bytes: int, latent: int, rope: int) -> RowFormat:
    """The format that gives rows of `row_bytes`. Raises BadInput when none does."""
    return _of_bytes(row_bytes, latent, rope, partial(kv_row_format, latent=latent, rope=rope))


def index_key_format_of(row_bytes: int, dim: int) -> RowFormat:
    """The format that gives index keys of `row_bytes`. Raises BadInput when none does."""
    return _of_bytes(row_bytes, dim, 0, partial(index_key_format, dim=dim))


def hadamard(dim: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """The orthogonal Hadamard matrix [dim, dim], symmetric; `dim` a power of two.

    Applied to queries and keys alike it leaves their products as they are, and spreads one large value of a key over
    all of them, so that a scale fits the whole key.
    """
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < dim:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (matrix / math.sqrt(dim)).to(device=device, dtype=dtype)


def latent_exponent(norm: Tensor) -> int:
    """Power of two by which latents are divided before fp4 keeps them, of the weights [r] of the norm ahead: the least
    with which no latent that the norm can form, sqrt(r) times the largest weight, has a scale above 448.

    It follows from the checkpoint alone, so that rows of one model are the same on every worker and node.
    """
    most = math.sqrt(len(norm)) * float(norm.detach().abs().max())
    return math.ceil(math.log2(most / (E2M1_MAX * E4M3_MAX))) if most > 0 else 0


def _to_e4m3(groups: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes [..., groups * group] and float32 scales [..., groups] of float32 `groups` [..., groups, group]."""
    scales = groups.abs().amax(-1, keepdim=True) / E4M3_MAX
    scales = scales.masked_fill(scales == 0, 1.0)
    # Rounding of the quotient may pass the largest value by a bit.
    return _saturated(groups / scales).flatten(-2), scales.squeeze(-1)


def _saturated(values: Tensor) -> Tensor:
    """Round float32 to e4m3, which has no infinity to saturate to."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _to_e2m1(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8[..., groups * group / 2], two in each, and scales of one byte [..., groups], of float32 `groups`
    [..., groups, group]: powers of two for FP4_KEY_GROUP values, e4m3 for fewer."""
    most = groups.abs().amax(-1, keepdim=True)
    if groups.shape[-1] == FP4_KEY_GROUP:
        exponents = most.view(torch.int32) >> 23  # of float32; 255 in infinity and NaN
        scales = (exponents - E2M1_EXPONENT).clamp(min=1).masked_fill(exponents == 255, 255).to(torch.uint8)
        factors = _e8m0(scales)
    else:
        scales = (most / E2M1_MAX).clamp(2.0**-9, E4M3_MAX).masked_fill(most.isinf(), torch.nan)
        scales = scales.to(torch.float8_e4m3fn)
        factors = scales.float()
    quotients = groups / factors
    size = quotients.abs()
    codes = torch.zeros_like(size, dtype=torch.uint8)
    for number, (lower, upper) in enumerate(pairwise(E2M1)):
        middle = (lower + upper) / 2  # ties go to the even code
        codes += (size >= middle if number % 2 else size > middle).to(torch.uint8)
    codes = (codes | quotients.signbit().to(torch.uint8) << 3).flatten(-2)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales.squeeze(-1)


def _halves(codes: Tensor) -> Tensor:
    """Codes uint8[..., 2 n] of bytes uint8[..., n] that hold two."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


def _e8m0(scales: Tensor) -> Tensor:
    """float32 powers of two of bytes uint8, from 1 up; 255 is NaN."""
    return (scales.int() << 23).view(torch.float32).masked_fill(scales == 255, torch.nan)


def _of_bytes(row_bytes: int, scaled: int, plain: int, of_kind: Callable[[str], RowFormat]) -> RowFormat:
    forms = []
    for kind in KINDS:
        with suppress(ConfigError):  # rows of this model do not divide into its groups
            forms.append(of_kind(kind))
            if forms[-1].row_bytes == row_bytes:
                return forms[-1]
    raise BadInput(
        f"no format of {scaled} + {plain} values has rows of {row_bytes} bytes",
        field="row_bytes",
        value=row_bytes,
        remedy=f"use {', '.join(f'{form.row_bytes} ({form.kind})' for form in forms)}",
    )
