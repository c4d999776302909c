"""From what links hear to hot floors and back: the real policy on fake workers whose steps cost what a model says."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, nan

import pytest

from coordinator.scheduling import hot_sizing
from coordinator.scheduling.decisions import Cause
from coordinator.scheduling.entries import EntryPhase, RequestEntry
from coordinator.scheduling.events import LinkStats
from coordinator.scheduling.hot_sizing import HotSizing
from coordinator.scheduling.throughput import REACTION_LOOKS_MAX, FloorRoom, HotFloor, Look, StepModel
from protocol.messages import GroupMember
from protocol.sizing import RESIDENT
from tests.coordinator.scheduling.test_policy import full_cluster, pause, running
from tests.support.fakes.fake_cluster import FakeCluster

SELECTED = 2048
STEPS = 200
#: Looks of one worker until its floor must be settled.
SETTLED = 30


@dataclass
class Bench:
    """Twenty requests of which some can be resident. `share` of its rows is missed by each that is not; a missed row
    takes `by_miss` microseconds."""

    share: float
    by_miss: float = 2.0
    prompts_us: float = 0.0  # that prompts beside each step take
    is_told: bool = True  # which steps no prompt ran beside
    alone: int = 0  # requests of these; 0: those that run
    fake: FakeCluster = field(default_factory=full_cluster)
    stats: LinkStats = field(default_factory=lambda: LinkStats(0, 0.0, 0, 0, 0.0, 1.0, alone_steps=0))

    def __post_init__(self) -> None:
        self.swaps: dict[int, tuple[int, int]] = {}
        self.hits = 0  # in hot buffers
        table = self.fake.dispatch.placement_table
        self.worker = table.workers["w0"]
        self.fake.ports["w0"].stats = lambda: self.stats  # type: ignore[method-assign]
        self.sizing = HotSizing(table, lambda index: self.swaps.get(index, (0, 0)))

    def step_us(self, requests: int, managed: int) -> float:
        return 3_000 + 20 * requests + self.by_miss * managed * self.share * SELECTED

    def look(self) -> float:
        """STEPS steps; then the coordinator looks and acts. Tokens a second while they ran."""
        entries = [it for it in map(self.fake.entry, running(self.fake)) if it.phase is EntryPhase.RUNNING]
        managed = [it for it in entries if it.hot.hot_slots != RESIDENT]
        for it in entries:
            self._swap(it, self.share if it in managed else 0.0)
        step_us = self.step_us(len(entries), len(managed))
        loads_us = self.by_miss * len(managed) * self.share * SELECTED
        self.hits += STEPS * sum(SELECTED - round(SELECTED * self.share) for _ in managed)
        misses = sum(it[1] for it in self.swaps.values())
        self.stats = self.stats._replace(
            steps=self.stats.steps + STEPS,
            step_s=self.stats.step_s + STEPS * (step_us + self.prompts_us) / 1e6,
            alone_steps=self.stats.alone_steps + (0 if self.prompts_us else STEPS) if self.is_told else -1,
            alone_s=self.stats.alone_s + (0 if self.prompts_us else STEPS * step_us / 1e6),
            alone_requests=self.stats.alone_requests + (STEPS * (self.alone or len(entries)) if self.is_told else 0),
            step_requests=self.stats.step_requests + (STEPS * len(entries) if self.is_told else 0),
            load_s=self.stats.load_s + STEPS * loads_us / 1e6,
            hits=self.hits,
            misses=misses,
            swapped_bytes=656 * misses,
        )
        self.sizing.look(self.fake.now)
        pause(self.fake, 2)
        return len(entries) / step_us * 1e6

    def _swap(self, entry: RequestEntry, share: float) -> None:
        hits, misses = self.swaps.get(entry.request_index, (0, 0))
        missed = round(STEPS * SELECTED * share)
        self.swaps[entry.request_index] = hits + STEPS * SELECTED - missed, misses + missed

    def best(self) -> float:
        fits = 60 // self.fake.entry(0).pages
        resident, full = fits / self.step_us(fits, 0), 20 / self.step_us(20, 20)
        return 1e6 * max(resident, full)


def test_dear_misses_lead_to_residents_and_cheap_ones_back() -> None:
    bench = Bench(share=0.3)
    for _ in range(SETTLED):
        bench.look()
    row = bench.worker.hot_sizing
    assert row is not None
    assert (bench.worker.hot_floor, row.hot_slots, row.changes) == (RESIDENT, RESIDENT, 1)
    assert row.predicted_step_us == pytest.approx(row.observed_step_us, rel=0.15)
    assert bench.look() >= 0.98 * bench.best()
    retracted = len(bench.fake.retracted)
    assert retracted == 20 - len(running(bench.fake))
    assert {cause for _, cause in bench.fake.retracted} == {Cause.THROUGHPUT}

    bench.share = 0.002
    for _ in range(REACTION_LOOKS_MAX):
        bench.look()
    assert (bench.worker.hot_floor, len(running(bench.fake))) == (None, 20)
    assert bench.look() >= 0.98 * bench.best()
    assert len(bench.fake.retracted) == retracted, "none leaves on the way back"


def test_what_residents_select_is_known_without_a_worker_s_hits() -> None:
    """A worker counts what it looks for in hot buffers; misses are predicted from what requests select."""
    bench = Bench(share=0.3)
    seen = looks(bench, SETTLED)
    assert bench.worker.hot_floor == RESIDENT
    assert {it.selected for it in seen} == {SELECTED}


def test_a_look_has_the_requests_of_its_steps_not_those_of_its_moment() -> None:
    """The steps of a first look had few requests, or came late in it: at one size of the batch as at the other, such a
    model said that steps cost the same with fewer, and promised nothing of residents."""
    bench = Bench(share=0.01, alone=5)
    for it in looks(bench, 3):
        assert (it.running, it.misses) == (5, pytest.approx(5 * bench.share * SELECTED, rel=0.01))


def looks(bench: Bench, count: int) -> list[Look]:
    """What the floor is told of so many looks, but the first, which only begins."""
    told, look = list[Look](), HotFloor.look

    def heard(floor: HotFloor, it: Look, room: FloorRoom) -> None:
        told.append(it)
        look(floor, it, room)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HotFloor, "look", heard)
        for _ in range(count):
            bench.look()
    assert told
    return told


def test_cheap_misses_change_nothing() -> None:
    bench = Bench(share=0.01)
    for _ in range(SETTLED):
        bench.look()
    assert bench.worker.hot_floor is None
    assert bench.worker.hot_sizing is not None
    assert bench.worker.hot_sizing.changes == 0
    assert bench.fake.retracted == []


def test_dear_first_steps_of_a_process_change_nothing() -> None:
    """Caches are cold and kernels are compiled in its first seconds."""
    bench = Bench(share=0.03, by_miss=10.0)
    for number in range(SETTLED):
        bench.by_miss = 10.0 if number < 6 else 1.0
        bench.look()
    assert bench.worker.hot_floor is None
    assert bench.fake.retracted == []


def test_steps_beside_prompts_teach_nothing_of_hot_sizes() -> None:
    """A worker that computes the prompts of its first requests steps slowly with few of them; a model of such steps
    would promise little of running fewer."""
    bench = Bench(share=0.3)
    bench.prompts_us = 20_000.0
    for _ in range(SETTLED):
        bench.look()
    assert (bench.worker.hot_floor, bench.worker.hot_sizing) == (None, None)
    bench.prompts_us = 0.0
    rates = [bench.look() for _ in range(SETTLED)]
    assert bench.worker.hot_floor == RESIDENT
    assert rates[-1] > 0.98 * bench.best()


def test_times_of_swap_ins_are_gathered_over_short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second has fewer steps than are needed to time swap-ins."""
    found: list[float] = []
    learn = StepModel.learn

    def seen(model: StepModel, look: Look) -> None:
        found.append(look.load_us)
        learn(model, look)

    monkeypatch.setattr(StepModel, "learn", seen)
    monkeypatch.setattr(hot_sizing, "TIMED_STEPS", 3 * STEPS)
    bench = Bench(share=0.03, by_miss=0.5)
    for _ in range(SETTLED):
        bench.look()
    assert bench.worker.hot_floor is None
    timed = [it for it in found if it]
    assert len(found) // 3 <= len(timed) <= len(found) // 3 + 1
    assert timed == pytest.approx([bench.by_miss * 20 * bench.share * SELECTED] * len(timed), rel=0.02)


def test_a_worker_of_the_version_before_is_judged_by_all_its_steps() -> None:
    bench = Bench(share=0.3, is_told=False)
    assert {it.running for it in looks(bench, 3)} == {20}
    for _ in range(SETTLED):
        bench.look()
    assert bench.worker.hot_floor == RESIDENT


def test_probes_under_a_floor_retract_no_request() -> None:
    bench = Bench(share=0.3)
    for _ in range(SETTLED):
        bench.look()
    retracted, there, probes = len(bench.fake.retracted), running(bench.fake), 0
    for _ in range(150):
        bench.look()
        probes += bench.worker.probe_slots is not None
    assert probes >= 2
    assert (len(bench.fake.retracted), running(bench.fake)) == (retracted, there)


@pytest.mark.parametrize(("alone", "requests"), [(-STEPS, STEPS), (0, STEPS), (STEPS, 0), (STEPS, -STEPS)])
def test_requests_that_no_step_can_have_are_dropped(alone: int, requests: int) -> None:
    bench = Bench(share=0.3)
    bench.look()
    for _ in range(8):
        bench.stats = bench.stats._replace(
            steps=bench.stats.steps + STEPS,
            alone_steps=bench.stats.alone_steps + STEPS,
            alone_s=bench.stats.alone_s + 1.0,
            alone_requests=bench.stats.alone_requests + alone,
            step_requests=bench.stats.step_requests + requests,
        )
        bench.fake.now += 2.0
        bench.sizing.look(bench.fake.now)
    assert (bench.worker.hot_floor, bench.worker.hot_sizing) == (None, None)


@pytest.mark.parametrize("number", [nan, inf, -1.0, 0.0, 1e300])
def test_step_times_that_cannot_be_are_dropped(number: float) -> None:
    bench = Bench(share=0.3)
    bench.look()
    for count in range(1, 9):
        bench.stats = bench.stats._replace(
            steps=bench.stats.steps + STEPS,
            step_s=number * count,
            alone_steps=bench.stats.alone_steps + STEPS,
            alone_s=number * count,
            alone_requests=bench.stats.alone_requests + 20 * STEPS,
            step_requests=bench.stats.step_requests + 20 * STEPS,
            load_s=number,
        )
        bench.fake.now += 2.0
        bench.sizing.look(bench.fake.now)
    assert (bench.worker.hot_floor, bench.worker.hot_sizing) == (None, None)


def test_ranks_of_groups_and_draining_workers_have_no_floor() -> None:
    bench = Bench(share=0.3)
    bench.worker.member = GroupMember("g", 0, 2, 1)
    for _ in range(SETTLED):
        bench.look()
    assert (bench.worker.hot_floor, bench.worker.hot_sizing) == (None, None)
