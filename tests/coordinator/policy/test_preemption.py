"""How room is made: each source of it, in its order, counted once and never in vain."""

from __future__ import annotations

import pytest

from basics.request_states import State
from coordinator.policy.preemption import Preemption, find_preemption
from coordinator.state.placement_table import PlacementTable
from coordinator.state.request_state import RequestState
from coordinator.state.worker_entry import WorkerEntry
from protocol.sizing import RESIDENT, HotSize, Memory
from tests.support.facts import add_request
from tests.support.fakes.fake_cluster import MODEL, FakePort, capacity

NONE_FREE = Memory(0, 0, 0, 0)


class Stage:
    """A placement table with requests put where the test wants them."""

    def __init__(self) -> None:
        self.placement_table = PlacementTable()
        self.worker = self.add_worker("w0")
        self.request_indices = 0

    def add_worker(self, name: str) -> WorkerEntry:
        worker = WorkerEntry(name, "n0", 1, capacity(seats=99, hot_chunks=99), MODEL, FakePort())
        self.placement_table.add_worker(worker)
        return worker

    def waiting(self, priority: int = 0, *, kept: int = 0, held: bool = False) -> RequestState:
        self.request_indices += 1
        entry = add_request(self.placement_table, self.request_indices, priority, 64, 640)
        if kept:
            self.place(entry, HotSize(RESIDENT, kept), kept)
            self.placement_table.leave(entry, frees_pages=False)
            self.placement_table.end_placement(entry, kept * 64, kept)
        self.placement_table.hold(entry, held)
        return entry

    def place(self, entry: RequestState, hot_size: HotSize, pages: int, worker: WorkerEntry | None = None) -> None:
        memory = Memory(pages, hot_size.hot_chunks, pages)
        self.placement_table.admit(entry, worker or self.worker, memory, hot_size)

    def running(
        self, priority: int = 0, *, chunks: int = 10, pages: int = 10, worker: WorkerEntry | None = None
    ) -> RequestState:
        entry = self.waiting(priority)
        hot_size = HotSize({3: 128, 5: 256}.get(chunks, RESIDENT), chunks)
        self.place(entry, hot_size, pages, worker=worker)
        entry.state = State.RUNNING
        return entry

    def remedy(self, need: Memory, asker: RequestState, free: Memory = NONE_FREE) -> Preemption | None:
        return find_preemption(self.placement_table, self.worker, free, need, asker)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_preemption_waits_for_memory_of_leaving_requests(stage: Stage) -> None:
    leaving = stage.running(chunks=5)
    stage.placement_table.leave(leaving, frees_pages=True)
    remedy = stage.remedy(Memory(10, 5, 10, 1), stage.waiting())
    assert remedy is not None
    assert remedy.cost == (0, 0, 0, 0)
    assert remedy.will_be_free == Memory(10, 5, 10, 1)


def test_pages_kept_by_a_leaving_request_are_not_awaited(stage: Stage) -> None:
    """Unless they can be demoted then: if it is lower-ranked, or held."""
    asker, keeper = stage.waiting(), stage.running(priority=1)
    stage.placement_table.leave(keeper, frees_pages=False)
    assert stage.remedy(Memory(1, 0, 0, 1), asker) is None
    stage.placement_table.hold(keeper, True)
    remedy = stage.remedy(Memory(1, 0, 0, 1), asker)
    assert remedy is not None
    assert remedy.cost == (0, 0, 0, 0)


def test_starting_request_will_shrink(stage: Stage) -> None:
    """Its hot buffer can be resized soon, so no request is retracted."""
    lowest = stage.running(priority=-1, chunks=3)
    starting = stage.waiting()
    stage.place(starting, HotSize(RESIDENT, 10), 10)
    remedy = stage.remedy(Memory(0, 7, 0, 0), stage.waiting())
    assert remedy is not None
    assert remedy.cost == (0, 0, 0, 0)
    assert stage.remedy(Memory(0, 8, 0, 0), stage.waiting()).retract == [lowest]  # type: ignore[union-attr]


def test_shrinking_takes_from_the_largest_step_by_step(stage: Stage) -> None:
    stage.running(priority=9, chunks=5, pages=30)
    larger, largest = stage.running(priority=9, chunks=12, pages=12), stage.running(chunks=20, pages=20)
    asker = stage.waiting()
    assert stage.remedy(Memory(0, 15, 0, 0), asker).shrink == [(largest, HotSize(256, 5))]  # type: ignore[union-attr]
    both = stage.remedy(Memory(0, 16, 0, 0), asker)
    assert both is not None
    assert both.shrink == [(largest, HotSize(256, 5)), (larger, HotSize(256, 5))]
    assert both.will_be_free.hot_chunks == 22


def test_a_victim_gives_its_chunks_once(stage: Stage) -> None:
    """What it was shrinking by, or could have shrunk by, is not counted again."""
    asker = stage.waiting(priority=1)
    victim = stage.running(chunks=10)
    remedy = stage.remedy(Memory(0, 10, 0, 1), asker)
    assert remedy is not None
    assert (remedy.retract, remedy.shrink) == ([victim], [])
    assert stage.remedy(Memory(0, 11, 0, 1), asker) is None
    stage.placement_table.resize(victim, HotSize(128, 3), 0.0)
    assert stage.remedy(Memory(0, 7, 0, 0), asker).cost == (0, 0, 0, 0)  # type: ignore[union-attr]
    assert stage.remedy(Memory(0, 10, 0, 1), asker) is not None
    assert stage.remedy(Memory(0, 11, 0, 1), asker) is None


def test_a_starting_victim_gives_its_memory_once(stage: Stage) -> None:
    asker, victim = stage.waiting(priority=1), stage.waiting()
    stage.place(victim, HotSize(RESIDENT, 10), 10)
    assert stage.remedy(Memory(0, 10, 10, 1), asker) is not None
    assert stage.remedy(Memory(0, 11, 10, 1), asker) is None
    assert stage.remedy(Memory(0, 10, 11, 1), asker) is None


def test_fewest_lowest_requests_are_retracted(stage: Stage) -> None:
    stage.running(priority=2)
    high, low, lowest = stage.running(priority=1), stage.running(), stage.running()
    assert stage.remedy(Memory(0, 0, 0, 2), stage.waiting(priority=1)).retract == [lowest, low]  # type: ignore[union-attr]
    assert stage.remedy(Memory(0, 0, 0, 3), stage.waiting(priority=1)) is None
    assert stage.remedy(Memory(0, 0, 0, 3), stage.waiting(priority=2)).retract[-1] is high  # type: ignore[union-attr]


def test_host_pages_of_kept_requests_are_taken_first(stage: Stage) -> None:
    asker = stage.waiting(priority=1)
    superior = stage.waiting(priority=2, kept=4)
    held = stage.waiting(priority=2, kept=4, held=True)
    lower, lowest = stage.waiting(kept=4), stage.waiting(kept=4)
    elsewhere = stage.running(pages=6, worker=stage.add_worker("w1"))
    here = stage.running(pages=6)
    order = [lowest, lower, held]
    for count in (1, 2, 3):
        remedy = stage.remedy(Memory(4 * count), asker)
        assert remedy is not None
        assert (remedy.demote, remedy.drop) == (order[:count], [])
    remedy = stage.remedy(Memory(24, 0, 0, 0), asker)
    assert remedy is not None
    assert (remedy.demote, remedy.drop) == (order, [here, elsewhere])
    assert stage.remedy(Memory(25, 0, 0, 0), asker) is None, f"{superior} keeps its rows"


def test_victims_for_the_gpu_are_dropped_first_for_the_host(stage: Stage) -> None:
    asker = stage.waiting(priority=1)
    low = stage.running(pages=6)
    stage.running(pages=6, worker=stage.add_worker("w1"))
    remedy = stage.remedy(Memory(5, 0, 0, 1), asker)
    assert remedy is not None
    assert (remedy.drop, remedy.retract) == ([low], [])


def test_full_worker_refuses_without_a_search(stage: Stage) -> None:
    stage.running(priority=1)
    assert stage.remedy(Memory(0, 0, 0, 1), stage.waiting()) is None
