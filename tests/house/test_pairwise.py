"""Parameters in pairs (tests.support.pairwise): every pair occurs, few rows do it, the same ones in every process."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.pairwise import pairwise


@pytest.mark.parametrize(
    ("sizes", "rows_max"),
    [
        ((1, 1), 1),
        ((2, 3), 6),
        ((6, 4, 5), 33),
        ((2, 2, 2, 2), 7),
        ((3, 1, 7), 21),
        ((5, 5, 5, 5), 40),
        ((2,) * 12, 10),
    ],
)
def test_every_pair_of_values_occurs_and_rows_stay_few(sizes: tuple[int, ...], rows_max: int) -> None:
    axes = [[f"{axis}:{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    rows = pairwise(*axes)
    assert all(len(row) == len(axes) and all(map(list.__contains__, axes, row)) for row in rows)
    met = {pair for row in rows for pair in combinations(row, 2)}
    assert met == {pair for one, other in combinations(axes, 2) for pair in product(one, other)}
    assert len(rows) == len(set(rows)) <= rows_max


def test_rows_are_always_the_same_ones() -> None:
    assert pairwise("abc", "xy", (1, 2)) == pairwise("abc", "xy", (1, 2))
    assert pairwise("ab", "xy", (1, 2)) == [("a", "x", 1), ("a", "y", 2), ("b", "x", 2), ("b", "y", 1)]


def test_values_need_no_hash_and_may_be_equal() -> None:
    rows = pairwise([[], []], [{}, {1: 2}])
    assert rows == [([], {}), ([], {1: 2}), ([], {}), ([], {1: 2})]


def test_one_axis_gives_its_values_and_an_empty_one_no_rows() -> None:
    assert pairwise("abc") == [("a",), ("b",), ("c",)]
    assert pairwise("abc", []) == []
