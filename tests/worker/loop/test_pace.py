"""Gaps hold their target when times are as they were measured, and blocks are as large as they may be."""

from __future__ import annotations

import random
from math import inf

import pytest

from protocol.settings import GapTarget
from worker.loop.pace import AUTO_FACTOR, MARGIN, MARGIN_MAX, STALE_UNITS, UNITS_MAX, Pace, block_sizes

STEP_S = 0.040
BLOCK_MAX = 4_096


def unit_seconds(rows: int) -> float:
    """A unit that reads weights for 6 ms, and computes 5 us a row."""
    return 0.006 + 5e-6 * rows


def measured(target: GapTarget, *, step_s: float = STEP_S, jitter: float = 0.0, seed: int = 0) -> Pace:
    pace, draw = Pace(target, BLOCK_MAX), random.Random(seed)
    for _ in range(200):
        pace.stepped(step_s * draw.uniform(1 - jitter, 1 + jitter))
        rows = pace.block(beside_steps=True)
        pace.ran(rows, unit_seconds(rows) * draw.uniform(1 - jitter, 1 + jitter))
    return pace


def gap_of(pace: Pace) -> tuple[list[int], float]:
    """Rows of the units between two steps, and the gap that follows."""
    gap, units = pace.gap(beside_steps=True), list[int]()
    while len(units) < UNITS_MAX:
        rows = pace.block(beside_steps=True, left_s=gap.left_s)
        if not gap.take(pace.unit_s(rows)):
            break
        units.append(rows)
    return units, STEP_S + sum(map(unit_seconds, units))


def test_automatic_target_is_held_and_used() -> None:
    pace = measured("auto")
    units, gap_s = gap_of(pace)
    assert pace.target_s == pytest.approx(AUTO_FACTOR * STEP_S)
    assert pace.block(beside_steps=True) == units[0] == BLOCK_MAX
    assert units[1:] == sorted(units[1:], reverse=True)  # smaller ones fill the gap
    assert pace.units(BLOCK_MAX, beside_steps=True) == 1
    assert 0.85 * pace.target_s < gap_s <= pace.target_s


def test_target_is_held_by_99_gaps_of_100_when_times_vary() -> None:
    pace, draw = measured("auto", jitter=0.2), random.Random(1)
    gaps = []
    for _ in range(2_000):
        gap, seconds = pace.gap(beside_steps=True), STEP_S * draw.uniform(0.9, 1.1)
        while gap.take(pace.unit_s(rows := pace.block(beside_steps=True, left_s=gap.left_s))):
            seconds += (took := unit_seconds(rows) * draw.uniform(0.8, 1.2))
            pace.ran(rows, took)
        gaps.append(seconds)
    assert sorted(gaps)[int(0.99 * len(gaps))] <= pace.target_s


def gaps_of(pace: Pace, slowdown: float, count: int) -> list[float]:
    """Gaps whose units take `slowdown` times, more or less, what is measured of them."""
    draw, gaps = random.Random(2), list[float]()
    for _ in range(count):
        gap, seconds = pace.gap(beside_steps=True), STEP_S
        while gap.take(pace.unit_s(rows := pace.block(beside_steps=True, left_s=gap.left_s))):
            seconds += unit_seconds(rows) * slowdown * draw.uniform(0.8, 1.2)
            pace.ran(rows, unit_seconds(rows))
        gaps.append(seconds)
        pace.waited(seconds)
    return gaps


def test_copies_take_what_the_slowest_in_a_hundred_took_by_row() -> None:
    pace = Pace("auto", BLOCK_MAX)
    assert pace.copy_s(1_000) == inf
    for _ in range(100):
        pace.copied(1_000, 0.001)
    assert pace.copy_s(50_000) == pytest.approx(0.050)
    for number in range(100):
        pace.copied(1_000, 0.001 if number % 2 else 0.003)
    assert 0.150 < pace.copy_s(50_000) < 0.250


def test_gaps_that_units_do_not_explain_widen_the_margin() -> None:
    """Launches, events and contexts that grow add to a gap, and no unit is measured with them."""
    pace = measured("auto")
    gaps_of(pace, 1.15, 100)
    gaps = sorted(gaps_of(pace, 1.15, 4_000))
    assert gaps[int(0.99 * len(gaps))] <= pace.target_s < gaps[-1]
    assert gaps[len(gaps) // 2] > 0.75 * pace.target_s


def test_margin_is_bounded_and_given_back() -> None:
    pace = measured("auto")
    budget_s = pace.budget_s
    for _ in range(100):
        pace.waited(2 * pace.target_s)
    assert pace.budget_s == pytest.approx((1 - MARGIN_MAX) * pace.target_s - pace.plain_step_s)
    for _ in range(10_000):
        pace.waited(pace.target_s)
    assert pace.budget_s > budget_s


@pytest.mark.parametrize("target_ms", [60.0, 100.0, 400.0])
def test_target_that_is_set_is_held(target_ms: float) -> None:
    units, gap_s = gap_of(measured(target_ms))
    assert gap_s <= target_ms / 1e3
    assert units


def test_unit_is_no_longer_than_a_plain_step() -> None:
    pace = measured(1_000.0, step_s=0.012)
    rows = pace.block(beside_steps=True)
    assert unit_seconds(rows) <= 0.012 < unit_seconds(4 * rows)


def test_one_unit_goes_on_where_the_target_leaves_no_room() -> None:
    pace = measured(10.0)
    assert pace.is_target_too_small
    assert pace.block(beside_steps=True) == block_sizes(BLOCK_MAX)[0]
    assert gap_of(pace)[0] == block_sizes(BLOCK_MAX)[:1]


def test_without_target_or_steps_blocks_are_the_largest() -> None:
    assert measured(0.0).block(beside_steps=True) == BLOCK_MAX
    assert gap_of(measured(0.0))[0] == [BLOCK_MAX] * UNITS_MAX
    assert not measured(0.0).is_target_too_small
    fresh = Pace("auto", BLOCK_MAX)
    assert fresh.block(beside_steps=False) == BLOCK_MAX
    assert fresh.block(beside_steps=True) == block_sizes(BLOCK_MAX)[0]


def test_size_that_was_slow_once_is_tried_again() -> None:
    pace = Pace("auto", BLOCK_MAX)
    pace.stepped(STEP_S)
    pace.ran(BLOCK_MAX, 3.0)  # kernels were compiled
    for _ in range(2 * STALE_UNITS):
        rows = pace.block(beside_steps=True)
        pace.ran(rows, unit_seconds(rows))
    assert pace.block(beside_steps=True) == BLOCK_MAX


def test_longer_contexts_shrink_blocks() -> None:
    pace = measured("auto")
    for _ in range(50):
        rows = pace.block(beside_steps=True)
        pace.ran(rows, 4 * unit_seconds(rows))
    rows = pace.block(beside_steps=True)
    assert rows < BLOCK_MAX
    assert 4 * unit_seconds(rows) <= (1 - MARGIN) * pace.target_s - STEP_S


def test_gap_before_anything_was_measured_has_one_unit() -> None:
    """Times come behind launches: a prompt would be launched as a whole before the next step."""
    pace = Pace("auto", BLOCK_MAX)
    pace.stepped(STEP_S)
    gap = pace.gap(beside_steps=True)
    assert [gap.take(pace.unit_s(64)) for _ in range(3)] == [True, False, False]
    assert pace.units(64, beside_steps=True) == 1


def test_no_step_is_put_off_for_more_than_so_many_units() -> None:
    """No target changes that, nor units that were not measured."""
    for pace in (measured(0.0), Pace(0, BLOCK_MAX)):
        gap = pace.gap(beside_steps=True)
        assert sum(gap.take(pace.unit_s(BLOCK_MAX)) for _ in range(2 * UNITS_MAX)) == UNITS_MAX


def test_few_rows_take_the_time_of_the_smallest_block() -> None:
    pace = Pace("auto", BLOCK_MAX)
    for _ in range(20):
        pace.ran(1, 0.006)
    assert pace.unit_s(64) == pytest.approx(0.006)


def test_fixed_blocks_are_fixed() -> None:
    pace = Pace("auto", 512, fixed_block=512)
    pace.stepped(STEP_S)
    pace.ran(512, 9.0)
    assert pace.block(beside_steps=True) == pace.block(beside_steps=False) == 512


def test_block_sizes_halve() -> None:
    assert block_sizes(512) == [64, 128, 256, 512]
    assert block_sizes(32) == [32]
    assert block_sizes(100) == [50, 100]
