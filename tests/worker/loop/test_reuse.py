"""Misses by hot size from reuse distances: what the reference swap_in counts on the same trace, within its ties."""

from __future__ import annotations

import random

import numpy as np
import pytest

from protocol.errors import BadInput
from tests.support.kernel_rig import Rig
from worker.loop.reuse import WARM_UP_STEPS, ReuseDistances, TraceMisses, misses_of
from worker.loop.selections import Selection, TraceSizes

TAIL = 2
TOPK = 8
SIZES = (8, 11, 16, 24)


def drawn_steps(seed: int, count: int, length: int, topk: int = TOPK) -> list[tuple[int, list[int]]]:
    """Length and selection of each step: most of the one before, some newest tokens, some of long ago."""
    rng, chosen = random.Random(seed), set[int]()
    steps: list[tuple[int, list[int]]] = []
    for at in range(length, length + count):
        kept = set(rng.sample(sorted(chosen), min(len(chosen), rng.randint(2, topk - 1))))
        kept |= {at - 1 - it for it in range(TAIL + 1) if rng.random() < 0.3}
        while len(kept) < topk:
            kept.add(rng.randrange(min(at, 40)))
        chosen = set(sorted(kept)[:topk])
        steps.append((at, sorted(chosen)))
    return steps


def counted(steps: list[tuple[int, list[int]]], hot_slots: int) -> int:
    """Misses that the reference kernel counts for one request that starts cold."""
    rig = Rig(groups=(0,), topk=TOPK, tail_slots=TAIL)
    request = rig.open(0, steps[0][0] - 1, hot_slots)
    for length, selected in steps:
        rig.begin([request])
        assert request.length == length
        rig.swap_in(0, [request], [selected])
    return int(rig.state.misses[0, request.seat])


def distances(steps: list[tuple[int, list[int]]], sizes: tuple[int, ...] = SIZES) -> ReuseDistances:
    found = ReuseDistances(sizes, TAIL)
    for length, selected in steps:
        found.step(np.array(selected, np.int32), length)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_misses_are_those_of_the_reference_within_ties(seed: int) -> None:
    steps = drawn_steps(seed, 60, 50)
    found = distances(steps)
    for at, hot_slots in enumerate(SIZES):
        misses = counted(steps, hot_slots)
        assert found.least[at] <= misses <= found.most[at], hot_slots
        assert found.misses[at] == pytest.approx(misses, rel=0.06), hot_slots
    assert (np.diff(found.misses) < 0).all(), "a larger buffer misses less"


def test_without_ties_the_count_is_exact() -> None:
    """One token a step: each has a use time of its own."""
    rng, steps = random.Random(3), [(50 + at, [0]) for at in range(120)]
    steps = [(length, [rng.randrange(30)]) for length, _ in steps]
    found = distances(steps, (8, 16))
    for at, hot_slots in enumerate((8, 16)):
        rig = Rig(groups=(0,), topk=1, tail_slots=TAIL)
        request = rig.open(0, 49, hot_slots)
        for _, selected in steps:
            rig.begin([request])
            rig.swap_in(0, [request], [selected])
        # A token that retires from the tail is equal to what the step before used: the only tie.
        assert found.least[at] <= int(rig.state.misses[0, 0]) <= found.most[at] <= found.least[at] + 6
        assert int(rig.state.misses[0, 0]) > 0


def records(steps: list[tuple[int, list[int]]], request: int, first: int) -> list[Selection]:
    return [
        Selection(first + at, request, length, [np.array(selected, np.int32)] * 2)
        for at, (length, selected) in enumerate(steps)
    ]


def of(trace: list[Selection]) -> TraceMisses:
    return misses_of(trace, TraceSizes(2, TOPK), SIZES, TAIL, [1, 3])


def test_a_trace_is_counted_behind_its_warm_up_by_layers() -> None:
    steps = drawn_steps(1, 60, 50)
    found = of(records(steps, 5, 100))
    warm, whole = distances(steps[:WARM_UP_STEPS]), distances(steps)
    counted_steps = len(steps) - WARM_UP_STEPS
    assert (found.requests, found.steps) == (1, counted_steps)
    assert found.selected == 4 * TOPK, "of four layers"
    assert found.misses == pytest.approx(4 * (whole.misses - warm.misses) / counted_steps)


def test_a_gap_begins_anew_and_requests_are_apart() -> None:
    one, other = drawn_steps(1, 40, 50), drawn_steps(2, 40, 50)
    gap = records(one[:20], 5, 0) + records(one[20:], 5, 21)
    both = sorted(gap + records(other, 6, 0), key=lambda it: it.step)
    assert of(both).steps == 2 * (20 - WARM_UP_STEPS) + 40 - WARM_UP_STEPS
    apart = of(records(other, 6, 0)), of(gap)
    means = [sum(it.misses[0] * it.steps for it in apart) / sum(it.steps for it in apart)]
    assert of(both).misses[0] == pytest.approx(means[0])


def test_a_trace_that_is_too_short_or_of_another_model_is_refused() -> None:
    with pytest.raises(BadInput, match="more than 16 steps"):
        of(records(drawn_steps(1, WARM_UP_STEPS, 50), 5, 0))
    with pytest.raises(BadInput, match="index groups"):
        misses_of([], TraceSizes(2, TOPK), SIZES, TAIL, [1])
