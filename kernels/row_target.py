"""Angles by which kernels that form rows rotate, and places that rows go to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Angles:
    """`cos` and `sin` [M, d], whose halves are equal. Pairs of values are neighbours when `interleaved`, else i and
    i + d / 2, as they are in what was rotated: the first d values of a vector, or the last ones."""

    cos: Tensor
    sin: Tensor
    interleaved: bool
    last: bool = False


@dataclass(frozen=True)
class RowTarget:
    """Places of encoded rows: row i of `rows` uint8[..., row_bytes], contiguous, or with `places` int32[M] row
    `places[i]` of it, nowhere where that is -1."""

    rows: Tensor
    places: Tensor | None = None
