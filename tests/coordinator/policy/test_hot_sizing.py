"""From what links hear to hot floors and back: the real policy on fake workers whose steps cost what a model says."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import inf, nan

import pytest

from coordinator.policy import hot_sizing
from coordinator.policy.decisions import Cause
from coordinator.policy.hot_sizing import HotSizing
from coordinator.policy.throughput import REACTION_LOOKS_MAX, FloorRoom, HotFloor, Look, StepModel
from coordinator.state.events import LinkStats
from coordinator.state.request_state import RequestState
from coordinator.state.worker_entry import WorkerDrain
from protocol.messages import GroupMember
from protocol.sizing import RESIDENT
from tests.coordinator.policy.test_policy import LONG, full_cluster, is_running, pause, run_until, running
from tests.support.fakes.fake_cluster import FakeCluster
from tests.support.history import in_turn

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
    has_prompts: bool = False  # beside each step
    alone: int = 0  # requests of these; 0: those that run
    fake: FakeCluster = field(default_factory=full_cluster)
    stats: LinkStats = field(default_factory=lambda: LinkStats(0, 0.0, 0, 0, 0.0, 1.0))

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
        entries = [it for it in map(self.fake.entry, running(self.fake)) if it.runs]
        managed = [it for it in entries if it.hot.hot_slots != RESIDENT]
        for it in entries:
            self._swap(it, self.share if it in managed else 0.0)
        step_us = self.step_us(len(entries), len(managed))
        loads_us = self.by_miss * len(managed) * self.share * SELECTED
        self.hits += STEPS * sum(SELECTED - round(SELECTED * self.share) for _ in managed)
        misses = sum(it[1] for it in self.swaps.values())
        self.stats = self.stats._replace(
            steps=self.stats.steps + STEPS,
            alone_steps=self.stats.alone_steps + (0 if self.has_prompts else STEPS),
            alone_s=self.stats.alone_s + (0 if self.has_prompts else STEPS * step_us / 1e6),
            alone_requests=self.stats.alone_requests + STEPS * (self.alone or len(entries)),
            step_requests=self.stats.step_requests + STEPS * len(entries),
            load_s=self.stats.load_s + STEPS * loads_us / 1e6,
            hits=self.hits,
            misses=misses,
            swapped_bytes=656 * misses,
        )
        self.sizing.look(self.fake.now)
        pause(self.fake, 2)
        return len(entries) / step_us * 1e6

    def _swap(self, entry: RequestState, share: float) -> None:
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
    bench.has_prompts = True
    for _ in range(SETTLED):
        bench.look()
    assert (bench.worker.hot_floor, bench.worker.hot_sizing) == (None, None)
    bench.has_prompts = False
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
            alone_steps=bench.stats.alone_steps + STEPS,
            alone_s=number * count,
            alone_requests=bench.stats.alone_requests + 20 * STEPS,
            step_requests=bench.stats.step_requests + 20 * STEPS,
            load_s=number,
        )
        bench.fake.now += 2.0
        bench.sizing.look(bench.fake.now)
    assert (bench.worker.hot_floor, bench.worker.hot_sizing) == (None, None)


def test_a_draining_worker_has_no_floor() -> None:
    bench = Bench(share=0.3)
    bench.worker.drain = WorkerDrain(inf, handover=False)
    for _ in range(SETTLED):
        bench.look()
    assert (bench.worker.hot_floor, bench.worker.hot_sizing) == (None, None)


# ---------------------------------------------------------------- groups

RANKS = 2


def full_group(missing: int = -1) -> FakeCluster:
    """As full_cluster, twenty requests on each rank; rank `missing` does not come."""
    fake = FakeCluster(1, host_pages=4000 * RANKS)
    counts = {"seats": 60, "hot_chunks": 60, "index_pages": 4000, "prompt_max_tokens": 25_600}
    for rank in range(RANKS):
        if rank != missing:
            fake.add_worker(f"w{rank}", "n0", member=GroupMember("g", rank, RANKS, 1), **counts)
    if missing < 0:
        for request_index in range(20 * RANKS):
            fake.submit(request_index, 550, LONG)
        run_until(fake, lambda: is_running(fake, *range(20 * RANKS)))
    return fake


class GroupBench:
    """Ranks that step together, as long as the slowest one takes; rank 1 misses `worse` times as many rows."""

    def __init__(self, share: float, *, by_miss: float = 2.0, worse: float = 1.0) -> None:
        self.shares, self.by_miss = [share, min(1.0, worse * share)], by_miss
        self.fake = full_group()
        table = self.fake.dispatch.placement_table
        self.ranks = [table.workers[f"w{rank}"] for rank in range(RANKS)]
        self.stats = [LinkStats(0, 0.0, 0, 0, 0.0, 1.0)] * RANKS
        for rank in range(RANKS):
            self.fake.ports[f"w{rank}"].stats = partial(self.stats.__getitem__, rank)  # type: ignore[method-assign]
        self.swaps: dict[int, tuple[int, int]] = {}
        self.sizing = HotSizing(table, lambda index: self.swaps.get(index, (0, 0)))

    def step_us(self, requests: int, managed: int) -> float:
        return 3_000 + 20 * requests + self.by_miss * managed * max(self.shares) * SELECTED

    def look(self) -> float:
        """STEPS steps; then the coordinator looks and acts. Tokens a second of the group while they ran."""
        table = self.fake.dispatch.placement_table
        held = [[it for it in table.on(rank.name) if it.runs] for rank in self.ranks]
        managed = [sum(it.hot.hot_slots != RESIDENT for it in entries) for entries in held]
        step_us = self.step_us(max(map(len, held)), max(managed))
        for rank, entries in enumerate(held):
            for it in entries:
                hits, misses = self.swaps.get(it.request_index, (0, 0))
                missed = round(STEPS * SELECTED * self.shares[rank]) if it.hot.hot_slots != RESIDENT else 0
                self.swaps[it.request_index] = hits + STEPS * SELECTED - missed, misses + missed
            was, missed = self.stats[rank], STEPS * round(managed[rank] * self.shares[rank] * SELECTED)
            self.stats[rank] = was._replace(
                steps=was.steps + STEPS,
                alone_steps=was.alone_steps + STEPS,
                alone_s=was.alone_s + STEPS * step_us / 1e6,
                alone_requests=was.alone_requests + STEPS * len(entries),
                step_requests=was.step_requests + STEPS * len(entries),
                load_s=was.load_s + self.by_miss * missed / 1e6,
                misses=was.misses + missed,
                swapped_bytes=was.swapped_bytes + 656 * missed,
            )
        self.sizing.look(self.fake.now)
        pause(self.fake, 2)
        return sum(map(len, held)) / step_us * 1e6

    def best(self) -> float:
        fits = 60 // self.fake.entry(0).pages
        resident, full = fits / self.step_us(fits, 0), 20 / self.step_us(20, 20)
        return 1e6 * RANKS * max(resident, full)


@pytest.mark.parametrize("worse", [in_turn((1.0, 2.0))])
def test_ranks_of_a_group_have_one_floor(worse: float) -> None:
    """Also where one rank misses more: each of its rows costs the group what the others hide."""
    bench = GroupBench(share=0.5, worse=worse)
    for _ in range(SETTLED):
        bench.look()
    assert {rank.hot_floor for rank in bench.ranks} == {RESIDENT}
    assert {rank.hot_sizing.changes for rank in bench.ranks if rank.hot_sizing} == {1}
    assert bench.look() >= 0.98 * bench.best()
    retracted = len(bench.fake.retracted)
    assert retracted == 20 * RANKS - len(running(bench.fake))

    bench.shares = [0.002, 0.002 * worse]
    for _ in range(REACTION_LOOKS_MAX):
        bench.look()
    assert ({rank.hot_floor for rank in bench.ranks}, len(running(bench.fake))) == ({None}, 20 * RANKS)
    assert bench.look() >= 0.98 * bench.best()
    assert len(bench.fake.retracted) == retracted, "none leaves on the way back"


def test_cheap_misses_of_a_group_change_nothing() -> None:
    bench = GroupBench(share=0.01)
    for _ in range(SETTLED):
        bench.look()
    assert {rank.hot_floor for rank in bench.ranks} == {None}
    assert {rank.hot_sizing.changes for rank in bench.ranks if rank.hot_sizing} == {0}
    assert bench.fake.retracted == []


def test_a_floor_stays_while_one_rank_of_its_group_drains() -> None:
    bench = GroupBench(share=0.5)
    for _ in range(SETTLED):
        bench.look()
    bench.ranks[1].drain = WorkerDrain(inf, handover=False)
    for _ in range(SETTLED):
        bench.look()
    assert {rank.hot_sizing.changes for rank in bench.ranks if rank.hot_sizing} == {1}
    assert bench.ranks[0].hot_floor == RESIDENT


def test_an_incomplete_group_has_no_floor() -> None:
    fake = full_group(missing=1)
    fake.ports["w0"].stats = lambda: LinkStats(10**6, 0.0, 0, 0, 0.0, 1.0)  # type: ignore[method-assign]
    sizing = HotSizing(fake.dispatch.placement_table, lambda _: (0, 0))
    sizing.look(1.0)
    assert sizing._seen == {}
