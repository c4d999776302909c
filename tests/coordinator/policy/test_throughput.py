"""The hot floor against measured steps: never 2 % below the better of resident-only and full admission.

`defects` runs the same checks on the code as it is and with bugs planted, which it must find.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest

from coordinator.policy import throughput
from coordinator.policy.throughput import (
    DWELL_MAX,
    DWELL_MIN,
    REACTION_LOOKS_MAX,
    FloorRoom,
    HotFloor,
    Look,
    MissShares,
    StepModel,
)
from protocol.sizing import RESIDENT, HotSize
from tests.support.decode_cells import HOT_SLOTS, Bench, Cell, contexts, overlaps

CELLS = [(context, overlap) for context in contexts() for overlap in overlaps()]
STARTS = (None, HOT_SLOTS, RESIDENT)
#: Of throughput, against the better of the two.
SHARE = 0.98
#: Looks until a bench that has learnt nothing must be where it stays; looks that are then judged.
SETTLED, JUDGED = 60, 300
#: Where full admission and resident-only give the same.
BREAK_EVEN = 0.935


def settled_share(bench: Bench) -> float:
    """Share of the better of the two that it reaches once it had time to react, its probes included."""
    bench.rate(SETTLED)
    return bench.rate(JUDGED) / bench.cell.best(bench.overlap)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(("context", "overlap"), CELLS)
def test_no_cell_loses_from_any_start(context: int, overlap: float, start: int | None) -> None:
    for seed, noise in ((0, 0.0), (1, 0.01), (2, 0.03)):
        bench = Bench(Cell(context), overlap, seed, noise, control=HotFloor(floor=start))
        assert settled_share(bench) >= SHARE, bench.control
        assert len(bench.changes) <= 1, "it goes on changing"
        assert bench.retracted <= bench.cell.full - bench.cell.resident


@pytest.mark.parametrize("context", contexts())
@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_a_change_of_overlap_is_answered_within_the_bound(context: int, noise: float) -> None:
    for before in overlaps():
        for after in overlaps():
            bench = Bench(Cell(context), before, 7, noise)
            bench.rate(SETTLED)
            changes, at, bench.overlap = len(bench.changes), bench.looks, after
            bench.rate(REACTION_LOOKS_MAX)
            assert bench.rate(JUDGED) >= SHARE * bench.cell.best(after), (before, after, bench.control)
            assert all(it - at <= REACTION_LOOKS_MAX for it in bench.changes[changes:])
            assert len(bench.changes) <= changes + 1


def test_at_break_even_noise_moves_nothing_back_and_forth() -> None:
    for seed in range(3):
        bench = Bench(Cell(8192), BREAK_EVEN, seed, noise=0.03)
        bench.rate(1_000)
        assert len(bench.changes) <= 4
        assert bench.retracted <= 2 * (bench.cell.full - bench.cell.resident)


def test_overlap_that_never_rests_is_followed_at_the_pace_of_the_dwell() -> None:
    """Each change takes the one before back: fewer and fewer are made."""
    bench = Bench(Cell(8192), 0.99)
    for turn in range(100):
        bench.overlap = (0.80, 0.99)[turn % 2]
        bench.rate(20)
    gaps = [b - a for a, b in zip(bench.changes, bench.changes[1:], strict=False)]
    assert gaps, "it never changed"
    assert min(gaps) >= DWELL_MIN
    assert max(gaps) >= DWELL_MAX
    assert len(bench.changes) <= 2 * bench.looks / DWELL_MAX + 6


def test_without_times_of_swap_in_the_prior_finds_the_worst_cell() -> None:
    """At 0.90 it does not: what full admission takes for loads, the prior takes for compute."""
    bench = Bench(Cell(8192), 0.80, timed=False)
    assert settled_share(bench) >= SHARE


def test_short_demand_moves_nothing() -> None:
    """When all that want to run can be resident, every floor gives the same."""
    control, sizes = HotFloor(), (HotSize(HOT_SLOTS, 65), HotSize(RESIDENT, 129))
    for _ in range(100):
        control.look(Look(64, 5_000.0, 0.0, 20, 16_384.0, {}, 0.0, 656.0), FloorRoom(8_000, sizes, 20))
    assert (control.floor, control.changes, control.probe_slots) == (None, 0, None)


def test_a_seen_size_between_is_chosen_where_it_pays() -> None:
    """Buffers of 8,192 slots that miss almost nothing beat both ends."""
    sizes = (HotSize(4096, 65), HotSize(8192, 129), HotSize(RESIDENT, 2049))
    room, control = FloorRoom(8_000, sizes, 200), HotFloor()
    for turn in range(60):
        share = 0.4 if control.floor is None else 0.001
        running = 123 if control.floor is None else 62
        seen = {4096: 0.4, 8192: 0.001} if turn < 20 else {4096 if control.floor is None else 8192: share}
        misses = 16_384.0 * running * share
        load_us = 0.02 * misses
        step_us = 4_000 + 10.0 * running + load_us
        control.look(Look(128, step_us, load_us, running, 16_384.0, seen, misses, 656.0), room)
    assert control.floor == 8192
    assert control.best is not None
    assert control.best.requests == 62


def test_a_floor_that_contexts_no_longer_have_counts_as_the_next_above() -> None:
    """Contexts become shorter than 8,192 rows: with that floor they are resident, and probes go on."""
    control, sizes = HotFloor(floor=8192), (HotSize(4096, 65), HotSize(RESIDENT, 100))
    control.shares.learn({4096: 0.001})
    for _ in range(30):
        control.look(Look(128, 5_000.0, 0.0, 60, 16_384.0, {}, 0.0, 656.0), FloorRoom(6_000, sizes, 200))
    assert control.floor == 4096


def test_unknown_sizes_lie_between_their_neighbours() -> None:
    shares, sizes = MissShares(), (HotSize(64, 10), HotSize(128, 20), HotSize(RESIDENT, 30))
    shares.learn({64: 0.4})
    assert [shares.at(it, sizes) for it in (5, 10, 20, 25, 30, 40)] == pytest.approx([0.4, 0.4, 0.2, 0.1, 0, 0])
    shares.learn({64: 0.4, 128: 0.1})
    assert shares.at(20, sizes) == pytest.approx(0.1)
    shares.learn({64: 0.8})
    assert shares.measured[128] > 0.1, "what was not seen moves with what was"


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize(("step_us", "running"), [(26_000, 34), (17_000, 33), (40_000, 5)])
def test_first_looks_that_mislead_are_given_up(step_us: float, running: int, timed: bool) -> None:
    """Few requests whose steps are long, as a worker has them that has just begun to serve."""
    bench = Bench(Cell(8192), 0.99, seed=1, timed=timed)
    room = FloorRoom(bench.chunks, bench.sizes, bench.cell.full)
    for _ in range(SETTLED):
        misses = 8 * running * 20.0
        look = Look(128, step_us * bench.rng.gauss(1, 0.2), 0.0, running, 16_384, {HOT_SLOTS: 0.01}, misses, 656.0)
        bench.control.look(look, room)
    bench.rate(25)
    bench.overlap = 0.80
    bench.rate(SETTLED)
    assert bench.rate(JUDGED) >= SHARE * bench.cell.best(0.80)


def test_a_probe_counts_alone_where_nothing_was_measured_for_long() -> None:
    shares = MissShares()
    shares.learn({64: 0.7})
    shares.expect(64)
    shares.learn({64: 0.02})
    assert shares.measured[64] == pytest.approx(0.02)
    shares.learn({64: 0.06})
    assert shares.measured[64] == pytest.approx(0.04)


def test_two_points_of_operation_tell_compute_and_load_apart() -> None:
    def look(running: float, misses: float) -> Look:
        return Look(128, 3_000 + 20 * running + 0.01 * misses, 0.0, running, 16_384.0, {}, misses, 656.0)

    model = StepModel(look(100, 300_000))
    for _ in range(30):
        for running, misses in ((100, 300_000), (60, 0), (100, 100_000)):
            model.learn(look(running, misses))
    assert model.step_us(80, 50_000) == pytest.approx(3_000 + 1_600 + 500, rel=0.01)


def test_a_link_far_slower_than_the_prior_says_leaves_the_model_bounded() -> None:
    """Batches of one size tell `base` and `by_request` from each other by noise alone, so that one of them gets below
    0 again and again."""
    drawn, by_miss, worst = random.Random(0), 60.0, 0.0
    model: StepModel | None = None
    for misses, looks in ((24, 25), (880, 20), (24, 100)):
        for _ in range(looks):
            running, missed = drawn.choice((10, 10, 10, 9.5)), misses * drawn.gauss(1, 0.02)
            step_us = (18_000 + 50 * running + by_miss * missed) * drawn.gauss(1, 0.03)
            look = Look(40, step_us, 0.0, running, 128, {}, missed, 128)
            model = model or StepModel(look)
            model.learn(look)
            assert min(model.values) >= 0
        worst = max(worst, model.step_us(10, misses) / step_us if model else 0.0)
    assert worst < 5


def test_a_point_that_is_held_for_long_leaves_the_others_known() -> None:
    """Directional forgetting: thousands of noisy looks at one point do not blur what was learnt at another."""
    bench = Bench(Cell(8192), 0.80, noise=0.03)
    bench.rate(3_000)
    assert bench.control.floor == RESIDENT
    assert bench.control.model is not None
    full = bench.control.model.step_us(108, 8 * 108 * 2048 * 0.2)
    assert full == pytest.approx(1e3 * bench.cell.step_ms(108, 108 * 2048 * 0.2), rel=0.1)


# ---------------------------------------------------------------- bugs


def defects() -> Iterator[str]:
    """What is wrong, in words; nothing with the code as it is."""
    for overlap, start in ((0.80, None), (0.90, None), (0.99, RESIDENT), (0.95, RESIDENT)):
        bench = Bench(Cell(8192), overlap, 1, control=HotFloor(floor=start))
        if settled_share(bench) < SHARE:
            yield "loses"
    for seed in range(2):
        bench = Bench(Cell(8192), 0.80, seed, noise=0.03)
        bench.rate(SETTLED)
        bench.overlap = 0.99
        bench.rate(REACTION_LOOKS_MAX)
        if bench.rate(JUDGED) < SHARE * bench.cell.best(0.99):
            yield "does not react"
        bench = Bench(Cell(8192), BREAK_EVEN, seed, noise=0.03)
        bench.rate(1_000)
        if len(bench.changes) > 4:
            yield "oscillates"


def _without_sign(model: StepModel, running: float, misses: float) -> float:
    base, by_request, by_miss = model.values
    return max(base + by_request * running - by_miss * misses, 1.0)


@contextmanager
def constants(**values: float) -> Iterator[None]:
    with ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(patch.object(throughput, name, value))
        yield


BUGS = {
    "no bound of the reaction": (lambda: constants(CONFIRM=10**9), "loses"),
    "no probe": (lambda: patch.object(HotFloor, "_begin_probe", lambda self, slots: None), "does not react"),
    "sign of misses": (lambda: patch.object(StepModel, "step_us", _without_sign), "loses"),
    "no hysteresis": (
        lambda: constants(GAIN=0.0, CONFIRM=1, SETTLE=0, DWELL_MIN=0, DWELL_MAX=1, PROBE_EVERY=4),
        "oscillates",
    ),
    "misses are not learnt": (lambda: patch.object(MissShares, "learn", lambda self, shares: None), "loses"),
}


def test_the_code_as_it_is_has_no_defect() -> None:
    assert list(defects()) == []


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug: str) -> None:
    plant, expected = BUGS[bug]
    with plant():
        assert expected in set(defects())
