"""Rows of parameters for a test whose full product costs too much: most defects need two values, few need three.

    @pytest.mark.parametrize(("family", "size", "seed"), pairwise(FAMILIES, SIZES, SEEDS))

Every pair of values of any two axes occurs in a row. 6 families by 4 sizes by 5 seeds: a product of 120, and 30 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any, Final, TypeAlias

#: A value by its place: the axis, and the index in it. Values themselves need no hash, and may be equal.
_Place: TypeAlias = tuple[int, int]
_UNSET: Final = -1


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows with one value of each axis, in which each value of an axis meets each value of every other axis.

    The same axes give the same rows, in the same order. One axis gives its values alone, an empty axis no rows.
    """
    if len(axes) == 1:
        return [(value,) for value in axes[0]]
    if not all(axes):
        return []
    missing = _pairs(axes)
    rows: list[tuple[Any, ...]] = []
    while missing:
        indices = _row([len(axis) for axis in axes], missing)
        for pair in combinations(enumerate(indices), 2):
            missing.pop(pair, None)
        rows.append(tuple(axis[index] for axis, index in zip(axes, indices, strict=True)))
    return rows


def _pairs(axes: Sequence[Sequence[Any]]) -> dict[tuple[_Place, _Place], None]:
    """All pairs that must occur; a dict keeps their order."""
    return {
        ((one, value), (other, others_value)): None
        for one, other in combinations(range(len(axes)), 2)
        for value, others_value in product(range(len(axes[one])), range(len(axes[other])))
    }


def _row(sizes: list[int], missing: dict[tuple[_Place, _Place], None]) -> list[int]:
    """The first missing pair, and on each other axis the value that brings the most missing pairs.

    Among equal values the one with the most missing pairs of any kind comes first, then the lowest.
    """
    row = [_UNSET] * len(sizes)
    for axis, value in next(iter(missing)):
        row[axis] = value
    wanted: dict[_Place, int] = {}
    for pair in missing:
        for place in pair:
            wanted[place] = wanted.get(place, 0) + 1
    for axis, size in enumerate(sizes):
        if row[axis] != _UNSET:
            continue
        chosen = [(other, value) for other, value in enumerate(row) if value != _UNSET]

        def worth(value: int, place: int = axis, others: list[_Place] = chosen) -> tuple[int, int, int]:
            new = sum(tuple(sorted(((place, value), other))) in missing for other in others)
            return new, wanted.get((place, value), 0), -value

        row[axis] = max(range(size), key=worth)
    return row
