"""What a kernel that forms rows is told beside their format: by which angles it rotates, and where rows go."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Angles:
    """`cos` and `sin` [M, d], whose halves are equal. Pairs of values are neighbours when `interleaved`, else i and
    i + d / 2, as they are in what was rotated."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


@dataclass(frozen=True)
class RowTarget:
    """Where encoded rows go: row i of `rows` uint8[..., row_bytes], contiguous, or with `places` int32[M] row
    `places[i]` of it, nowhere where that is -1."""

    rows: Tensor
    places: Tensor | None = None
