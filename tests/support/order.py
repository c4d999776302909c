"""The order of tests among several processes: those that wait lie evenly among those that compute, long ones first.

Tests of processes mostly wait for them. Side by side they leave the cores idle, and a run that ends with a long test
alone does too. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

T = TypeVar("T")

#: CPU time of a short test, in parts of that of a long one: 0.12 and 0.63 s on average.
SHORT: Final = 0.2
#: The part of a run in which tests that wait begin.
WAITING_UNTIL: Final = 0.85


def in_order(tests: Sequence[T], waits: Callable[[T], bool], is_long: Callable[[T], bool]) -> list[T]:
    """Return `tests` with long ones before short ones, and those of which `waits` is true spread among both."""
    waiting = [test for test in tests if waits(test)]
    computing = sorted((test for test in tests if not waits(test)), key=lambda test: not is_long(test))
    weights = [1.0 if is_long(test) else SHORT for test in computing]
    placed: list[tuple[float, int, T]] = []
    at = 0.0
    for test, weight in zip(computing, weights, strict=True):
        placed.append((at / sum(weights), len(placed), test))
        at += weight
    for number, test in enumerate(waiting):
        placed.append((WAITING_UNTIL * number / len(waiting), len(placed), test))
    return [test for _, _, test in sorted(placed, key=lambda it: it[:2])]
