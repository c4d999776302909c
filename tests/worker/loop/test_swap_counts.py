"""Hits, misses and evictions by layer: what the host reckons is what the reference really did."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
from msgspec.structs import replace

from kernels.reference.lru import Ints, forget
from kernels.state import DeviceState
from metrics.state import SwapTotals
from tests.support.worker_rig import SETTINGS, Rig
from worker.device.hot_buffer import HotBuffer, HotBufferChange, SetUp
from worker.loop.decode import TIMED_EVERY
from worker.loop.swap_counts import SwapCounts


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that swap_in and begin_step really made way with, by group."""
    counts = [0, 0]

    def forget_and_count(state: DeviceState, groups: Ints, seats: Ints, rows: Ints) -> None:
        held = groups[state.slot_token.numpy()[groups, rows] >= 0]
        for group, count in enumerate(np.bincount(held, minlength=2).tolist()):
            counts[group] += count
        forget(state, groups, seats, rows)

    for module in ("swap_in", "begin_step"):
        monkeypatch.setattr(import_module(f"kernels.reference.{module}"), "forget", forget_and_count)
    return counts


@pytest.mark.parametrize("hot_slots", [0, 64, 128])
def test_evictions_are_those_of_the_reference(
    forgotten: list[int], hot_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several requests, of which one is retracted and comes back, over more tokens than their tails hold; whether the
    host looks at every step or at the end alone. A resident buffer evicts nothing."""
    for interval_s in (0.0, 1e9):
        monkeypatch.setattr("worker.loop.executor.COUNTERS_INTERVAL_S", interval_s)
        forgotten[:] = [0, 0]
        rig = Rig(settings=replace(SETTINGS, seats=2))
        for number in range(3):
            assert rig.coordinator.admit(rig.coordinator.create(number, 150, 60), hot_slots)
            rig.run()
        swap = rig.executor.counters.swap
        assert swap.evictions.tolist() == forgotten
        assert (sum(forgotten) > 0) == (hot_slots > 0)


def test_a_grown_buffer_evicts_later(forgotten: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.loop.executor.COUNTERS_INTERVAL_S", 0.0)
    rig = Rig()
    life = rig.coordinator.create(1, 300, 80)
    assert rig.coordinator.admit(life, 64)
    rig.run_until(lambda: len(life.tokens) > 30)
    before = list(forgotten)
    assert rig.coordinator.resize(life, 128)
    rig.run()
    assert rig.executor.counters.resized == 1
    assert rig.executor.counters.swap.evictions.tolist() == forgotten
    assert min(forgotten) > max(before)


def test_warm_start_rows_take_room(forgotten: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no miss, and what makes way for it later is an eviction."""
    monkeypatch.setattr("worker.loop.executor.COUNTERS_INTERVAL_S", 0.0)
    rig = Rig()
    life = rig.coordinator.create(1, 300, 60)
    assert rig.coordinator.admit(life, 128)
    rig.run_until(lambda: len(life.tokens) > 10)
    rig.coordinator.withdraw(life, "keep")
    rig.run()
    before = list(forgotten)
    assert rig.coordinator.admit(life, 128)
    rig.run()
    assert rig.executor.counters.warm_starts == {"warm": 1}
    assert rig.executor.counters.swap.evictions.tolist() == forgotten
    assert min(forgotten) > max(before)


def test_sampled_steps_are_timed_layer_by_layer() -> None:
    """And stands for the others; what is copied for a layer that shares a selection is timed separately."""
    rig = Rig()
    counters = rig.executor.counters
    assert rig.coordinator.admit(rig.coordinator.create(1, 100, TIMED_EVERY), 64)
    rig.run()
    assert (counters.steps, counters.computing_s, sum(counters.swap.seconds)) == (TIMED_EVERY - 1, 0, 0)
    assert rig.coordinator.admit(rig.coordinator.create(2, 100, 20), 64)
    rig.run()
    assert all(seconds > 0 for seconds in counters.swap.seconds)
    assert sum(counters.swap.seconds) < counters.computing_s < TIMED_EVERY * counters.step_s.total


def test_copies_are_timed_by_purpose() -> None:
    rig = Rig()
    counters = rig.executor.counters
    life = rig.coordinator.create(1, 100, 40)
    assert rig.coordinator.admit(life, 64)
    rig.run_until(lambda: len(life.tokens) > 10)
    assert counters.staging.seconds > 0 < counters.backing_up.seconds
    assert (counters.preloading.seconds, sum(counters.load_s.counts)) == (0, 0)
    rig.coordinator.withdraw(life, "keep")
    rig.run()
    assert rig.coordinator.admit(life, 64)
    rig.run()
    assert counters.preloading.seconds > 0
    assert (sum(counters.load_s.counts), counters.load_s.total > 0) == (1, True)


def test_next_request_of_a_seat_starts_at_zero() -> None:
    totals = SwapTotals((0, 1), row_bytes=10)
    counts = SwapCounts(totals, seats=2, tail_slots=4)
    managed = HotBufferChange(HotBuffer(64, (1, 2)), (), SetUp.MANAGED)
    for _ in range(2):
        counts.open(1)
        counts.set_up(1, managed, 100)
        assert counts.take([1], np.array([[[5, 7]], [[60, 70]]]), [110]) == ([12], [130])
        assert counts.take([1], np.array([[[6, 7]], [[80, 70]]]), [110]) == ([13], [150])
    assert totals.hits.tolist() == [12, 14]
    assert totals.misses.tolist() == [160, 140]
    assert totals.evictions.tolist() == [2 * (80 + 10 - 68), 2 * (70 + 10 - 68)]
    assert totals.loaded_bytes == 3_000


def test_hits_of_resident_requests_are_none_of_the_worker() -> None:
    """They are the request's own: a worker without managed requests has no hit rate."""
    totals = SwapTotals((0,), row_bytes=10)
    counts = SwapCounts(totals, seats=2, tail_slots=4)
    counts.open(0)
    counts.open(1)
    counts.set_up(1, HotBufferChange(HotBuffer(64, (1, 2)), (), SetUp.MANAGED), 100)
    assert counts.take([0], np.array([[[64]], [[0]]]), [110]) == ([64], [0])
    assert totals.totals == (0, 0, 0)
    assert counts.take([0, 1], np.array([[[128], [50]], [[0], [14]]]), [111, 110]) == ([128, 50], [0, 14])
    assert totals.totals == (50, 14, 140)
    counts.set_up(1, HotBufferChange(HotBuffer(0, (1, 2)), (), SetUp.RESIDENT, old_slots=64), 111)
    counts.take([1], np.array([[[114]], [[14]]]), [112])
    assert totals.totals == (50, 14, 140)


def test_evictions_never_shrink() -> None:
    totals = SwapTotals((0,), row_bytes=10)
    counts = SwapCounts(totals, seats=1, tail_slots=0)
    counts.open(0)
    counts.set_up(0, HotBufferChange(HotBuffer(64, (1,)), (), SetUp.MANAGED, tokens=60), 60)
    counts.take([0], np.array([[[0]], [[10]]]), [64])
    assert totals.evictions.tolist() == [10]
    counts.set_up(0, HotBufferChange(HotBuffer(128, (1, 2)), (), SetUp.GROW, old_slots=64), 64)
    counts.take([0], np.array([[[0]], [[30]]]), [80])
    assert totals.evictions.tolist() == [10], "the larger buffer has room"
    counts.take([0], np.array([[[0]], [[70]]]), [80])
    assert totals.evictions.tolist() == [70 + 80 - 60 - 4 - 64]
    counts.set_up(0, HotBufferChange(HotBuffer(0, (1, 2)), (), SetUp.RESIDENT), 80)
    counts.take([0], np.array([[[90]], [[70]]]), [90])
    assert totals.evictions.tolist() == [22]
