"""Policy: histories told by hand, and a cluster that hypothesis drives into every state that it can reach.

Whatever has happened, once links deliver and workers make progress, every request that is not held ends: there is no
livelock. On the way: strict rank order, no victim of the top rank, no page in two hands (I1, I2), no leak.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from basics.request_states import TERMINAL, State
from coordinator.policy import decisions
from coordinator.policy.decisions import Cause
from coordinator.policy.policy import GROW_QUIET_S, STRANDED_LIMIT_S
from coordinator.state.worker_entry import WorkerDrain
from protocol.messages import NO_HOT_BUFFER
from protocol.sizing import RESIDENT, HotSize, Length, misfit
from tests.support.fakes.fake_cluster import FakeCluster

ROUNDS_MAX = 2_000


def run_to_end(cluster: FakeCluster) -> int:
    """Rounds until every request that is not held has ended."""
    for count in range(ROUNDS_MAX):
        if not cluster.unfinished():
            return count
        cluster.round()
    states = [(request_index, cluster.live[request_index].state.state) for request_index in cluster.unfinished()]
    raise AssertionError(f"livelock: {states}")


def cluster(workers: int = 1, *, host_pages: int = 200, **counts: int) -> FakeCluster:
    """One node with plenty of everything except what the test says."""
    plenty = {"seats": 60, "hot_chunks": 200, "index_pages": 200, "prompt_max_tokens": 12_800} | counts
    fake = FakeCluster(1, host_pages=host_pages)
    for number in range(workers):
        fake.add_worker(f"w{number}", "n0", **plenty)
    return fake


def run_until(fake: FakeCluster, condition: Callable[[], bool]) -> None:
    for _ in range(300):
        if condition():
            return
        fake.round()
    raise AssertionError("did not come about")


def is_running(fake: FakeCluster, *request_indices: int) -> bool:
    return all(fake.live[request_index].state.state is State.RUNNING for request_index in request_indices)


def state(fake: FakeCluster, request_index: int) -> State:
    return fake.live[request_index].state.state


def hot(fake: FakeCluster, request_index: int) -> int:
    return fake.entry(request_index).hot.hot_slots


def run_until_resized(fake: FakeCluster, request_index: int) -> int:
    """Slot of the first request that policy resizes while only `request_index` advances."""
    for _ in range(300):
        fake.workers["w0"].advance(fake.entry(request_index).placement)
        while fake.uplinks["w0"]:
            fake.hear_next("w0")
        resizes = [decision for decision in fake.settle() if isinstance(decision, decisions.ResizeDecision)]
        if resizes:
            return resizes[0].entry.request_index
        while fake.ports["w0"].downlink:
            fake.obey_next("w0")
    raise AssertionError("no request was resized")


LONG = 50_000  # tokens: will not end while a test watches


# ---------------------------------------------------------------- hot floors


def full_cluster(requests: int = 20) -> FakeCluster:
    """Twenty requests of 10 pages in 60 chunks: all at the smallest size (3 chunks), or 6 of them resident."""
    fake = cluster(hot_chunks=60, index_pages=4000, host_pages=4000, prompt_max_tokens=25_600)
    for request_index in range(requests):
        fake.submit(request_index, 550, LONG)
    run_until(fake, lambda: is_running(fake, *range(requests)))
    assert {hot(fake, request_index) for request_index in range(requests)} == {128}
    return fake


def set_floor(fake: FakeCluster, floor: int | None, probe: int | None = None) -> None:
    worker = fake.dispatch.placement_table.workers["w0"]
    worker.hot_floor, worker.probe_slots = floor, probe


def running(fake: FakeCluster) -> list[int]:
    return [it for it in fake.live if state(fake, it) is State.RUNNING]


def pause(fake: FakeCluster, rounds: int) -> None:
    """Commands and answers are exchanged, and no request decodes."""
    for _ in range(rounds):
        fake.now += 1.0
        for name, worker in fake.workers.items():
            while fake.ports[name].downlink:
                fake.obey_next(name)
            for placement, run in list(worker.runs.items()):
                if run.phase != "running" or run.resize is not None:
                    worker.advance(placement)
            while fake.uplinks[name]:
                fake.hear_next(name)
        fake.settle(tick=True)
        fake.check_invariants()


def test_a_floor_retracts_the_last_in_rank_until_the_others_rise_to_it() -> None:
    fake = full_cluster()
    set_floor(fake, RESIDENT)
    pause(fake, 20)
    there = running(fake)
    assert there == list(range(len(there)))
    assert len(there) == 60 // fake.entry(0).pages
    assert all(hot(fake, it) == RESIDENT for it in there)
    assert {cause for _, cause in fake.retracted} == {Cause.THROUGHPUT}
    assert len(fake.retracted) == 20 - len(there), "each once"
    assert all(fake.entry(it).pages for it in range(20)), "all keep their rows"
    first = len(there)
    needed = re.findall(r"needs (\d+) hot chunks", fake.pending.explain(fake.entry(first), fake.now).text)
    assert int(needed[0]) >= fake.entry(first).pages + 2 * len(there), "it comes back where the others can grow"


def test_without_a_floor_all_run_again() -> None:
    fake = full_cluster()
    set_floor(fake, RESIDENT)
    for _ in range(12):
        fake.round()
    set_floor(fake, None)
    run_until(fake, lambda: is_running(fake, *range(20)))


def test_a_floor_keeps_waiting_requests_off_until_they_fit_at_it() -> None:
    fake = cluster(hot_chunks=60, index_pages=4000, host_pages=4000, prompt_max_tokens=25_600)
    set_floor(fake, RESIDENT)
    for request_index in range(20):
        fake.submit(request_index, 550, 30)
    for _ in range(6):
        fake.round()
        assert all(hot(fake, it) == RESIDENT for it in running(fake))
    assert fake.retracted == []
    reason = fake.pending.explain(fake.entry(15), fake.now).text
    assert "smaller hot buffers would cost throughput" in reason
    run_to_end(fake)


def test_a_size_between_is_a_floor_too() -> None:
    fake = full_cluster()
    set_floor(fake, 256)
    for _ in range(20):
        fake.round()
    assert {hot(fake, it) for it in running(fake)} == {256}
    assert len(running(fake)) == 12


def test_what_no_worker_could_hold_at_the_floor_is_exempt() -> None:
    fake = cluster(hot_chunks=5)
    set_floor(fake, RESIDENT)
    fake.submit(0, 2_000, 100)
    run_until(fake, lambda: is_running(fake, 0))
    assert hot(fake, 0) == 256
    run_to_end(fake)


@pytest.mark.parametrize(("chunks", "prompt"), [(6, 168), (8, 304), (10, 406)])
def test_resident_that_fills_its_worker_shrinks_and_grows_on(chunks: int, prompt: int) -> None:
    """Its next page comes ahead of the floor: it would be resident again, without a chunk for that page, forever."""
    fake = cluster(hot_chunks=chunks)
    set_floor(fake, RESIDENT)
    fake.submit(0, prompt, 299)
    run_to_end(fake)
    sizes = [line.reason for line in fake.live[0].state.lines if line.event == "resize"]
    assert sizes.count("resident") <= 1
    assert fake.retracted == []


def test_residents_that_outgrow_a_floor_send_the_last_in_rank_away_for_a_while() -> None:
    """It comes back where the others can grow a while; so retractions are few for the rows that come."""
    fake = cluster(hot_chunks=60, index_pages=4000, host_pages=4000, prompt_max_tokens=25_600)
    set_floor(fake, RESIDENT)
    for request_index in range(6):
        fake.submit(request_index, 550, LONG)
    run_until(fake, lambda: len(running(fake)) >= 4)
    pages = {it: fake.entry(it).pages for it in running(fake)}
    for _ in range(60):
        fake.round()
        assert sum(hot(fake, it) not in (RESIDENT, NO_HOT_BUFFER) for it in running(fake)) <= 2
    assert fake.entry(0).pages > 2 * pages[0], "the first in rank never stops"
    grown = sum(fake.entry(it).pages - pages.get(it, 0) for it in range(6))
    assert {cause for _, cause in fake.retracted} <= {Cause.THROUGHPUT}
    assert 1 <= len(fake.retracted) <= grown / 4


def test_a_probe_is_one_request_and_ends() -> None:
    fake = cluster(hot_chunks=60, index_pages=4000, host_pages=4000, prompt_max_tokens=25_600)
    set_floor(fake, RESIDENT)
    for request_index in range(8):
        fake.submit(request_index, 550, LONG)
    run_until(fake, lambda: len(running(fake)) >= 5)
    at_first = running(fake)
    set_floor(fake, RESIDENT, probe=128)
    pause(fake, 6)
    assert [hot(fake, it) for it in running(fake)].count(128) == 1
    assert running(fake) == at_first, "its chunks are kept for it"
    set_floor(fake, RESIDENT)
    pause(fake, 6)
    assert {hot(fake, it) for it in running(fake)} == {RESIDENT}
    assert fake.retracted == []


def test_pinned_sizes_stay_below_the_floor() -> None:
    fake = full_cluster()
    fake.dispatch.placement_table.force(fake.entry(0), 128)
    set_floor(fake, RESIDENT)
    for _ in range(12):
        fake.round()
    assert hot(fake, 0) == 128


def test_requests_that_come_and_go_under_a_floor_all_end() -> None:
    """Floors move all the time; rank keeps its order, and retractions are few for each move."""
    fake = cluster(hot_chunks=60, index_pages=4000, host_pages=4000, prompt_max_tokens=25_600)
    for request_index in range(60):
        fake.submit(request_index, 200 + 7 * request_index, 60)
    moves = 0
    for count in range(ROUNDS_MAX):
        if not fake.unfinished():
            break
        if count % 30 == 0:
            set_floor(fake, (RESIDENT, None, 256)[moves % 3])
            moves += 1
        fake.round()
    assert not fake.unfinished()
    assert len(fake.retracted) <= 20 * moves


# ---------------------------------------------------------------- hot sizes


def test_single_request_is_resident() -> None:
    fake = cluster(hot_chunks=20)
    fake.submit(0, 600, 300)
    run_until(fake, lambda: is_running(fake, 0))
    assert fake.entry(0).hot == HotSize(RESIDENT, fake.entry(0).pages)


def test_context_is_not_limited_by_device_capacity() -> None:
    """SGLang #33876: 3 chunks are 192 rows of a context that reaches 2,100; host and index pages are what it needs."""
    fake = cluster(hot_chunks=3)
    fake.submit(0, 2_000, 100)
    run_until(fake, lambda: is_running(fake, 0))
    assert hot(fake, 0) == 128
    run_to_end(fake)


def test_fifty_requests_shrink_and_none_waits() -> None:
    """Room for fifty of the smallest class (3 chunks each) is room for fifty requests."""
    fake = cluster(seats=50, hot_chunks=150, index_pages=2000, host_pages=2000, prompt_max_tokens=32_000)
    for request_index in range(50):
        fake.submit(request_index, 300 + request_index, LONG)
    run_until(fake, lambda: is_running(fake, *range(50)))
    assert fake.retracted == []
    assert {hot(fake, request_index) for request_index in range(50)} == {128}


def test_largest_buffer_shrinks_first_and_no_more_than_needed() -> None:
    fake = cluster(hot_chunks=20)
    fake.submit(0, 700, 64)  # 12 pages: resident takes 12 chunks, its classes 5 and 3
    fake.submit(1, 320, 64)  # 7 pages
    run_until(fake, lambda: is_running(fake, 0, 1))
    assert (hot(fake, 0), hot(fake, 1)) == (RESIDENT, RESIDENT)
    fake.submit(2, 320, 64)
    fake.settle()
    assert (fake.entry(0).resizing, fake.entry(1).resizing) == (HotSize(256, 5), None)


def test_buffers_grow_after_a_while_without_shrinking() -> None:
    fake = cluster(hot_chunks=20)
    fake.submit(0, 600, 3_000, full=True)
    fake.dispatch.placement_table.force(fake.entry(0), 128)
    run_until(fake, lambda: is_running(fake, 0))
    fake.dispatch.placement_table.force(fake.entry(0), NO_HOT_BUFFER)
    fake.dispatch.placement_table.workers["w0"].shrunk_at = fake.now
    assert fake.settle(tick=True) == []
    fake.now += GROW_QUIET_S
    (decision,) = fake.settle(tick=True)
    assert isinstance(decision, decisions.ResizeDecision)
    assert decision.hot_size == HotSize(256, 5)


def test_growing_leaves_a_reserve() -> None:
    fake = cluster(hot_chunks=16, host_pages=2000, index_pages=2000)
    fake.submit(0, 830, LONG)  # 15 pages and more to come: resident would leave 1 of 16 chunks
    fake.dispatch.placement_table.force(fake.entry(0), 256)
    run_until(fake, lambda: is_running(fake, 0) and hot(fake, 0) == 256)
    fake.dispatch.placement_table.force(fake.entry(0), NO_HOT_BUFFER)
    fake.now += 2 * GROW_QUIET_S
    assert fake.settle(tick=True) == []


def test_forced_size_is_kept_or_its_request_dropped() -> None:
    fake = cluster(hot_chunks=12, host_pages=400, index_pages=400)
    fake.submit(0, 200, 300)
    fake.dispatch.placement_table.force(fake.entry(0), 256)
    run_until(fake, lambda: is_running(fake, 0))
    assert hot(fake, 0) == 256
    fake.dispatch.placement_table.force(fake.entry(0), RESIDENT)
    run_until(fake, lambda: hot(fake, 0) == RESIDENT)
    fake.submit(1, 300, 900)  # 19 pages at its longest, 12 chunks in all
    fake.dispatch.placement_table.force(fake.entry(1), RESIDENT)
    run_to_end(fake)
    assert fake.retracted == []


def test_resident_request_shrinks_itself_unless_a_larger_can() -> None:
    for larger, shrunk in ((400, 1), (700, 0)):
        fake = cluster(hot_chunks=16 if larger == 400 else 20)
        fake.submit(0, larger, 60)  # 8 or 12 pages
        fake.submit(1, 300, 2_000, full=True)  # 7 pages and growing
        fake.dispatch.placement_table.force(fake.entry(1), RESIDENT)
        run_until(fake, lambda f=fake: is_running(f, 0, 1))  # type: ignore[misc]
        fake.dispatch.placement_table.force(fake.entry(1), NO_HOT_BUFFER)
        assert run_until_resized(fake, 1) == shrunk


def test_forced_resident_request_preempts_lower_ranks() -> None:
    fake = cluster(hot_chunks=15)
    fake.submit(0, 300, 500, full=True)  # 13 chunks at its longest
    fake.dispatch.placement_table.force(fake.entry(0), RESIDENT)
    fake.submit(1, 300, 500, full=True)
    run_until(fake, lambda: bool(fake.retracted))
    assert [(entry.request_index, cause) for entry, cause in fake.retracted] == [(1, Cause.GPU_MEMORY)]
    assert hot(fake, 0) == RESIDENT


def test_request_goes_where_it_can_be_resident() -> None:
    fake = FakeCluster(1, host_pages=100)
    for name, chunks in (("w0", 8), ("w1", 40), ("w2", 20)):
        fake.add_worker(name, "n0", hot_chunks=chunks, index_pages=60, prompt_max_tokens=1_920)
    for request_index, worker in ((0, "w1"), (1, "w1"), (2, "w2")):
        fake.submit(request_index, 700, 100)
        fake.settle()
        assert fake.entry(request_index).worker == worker
        assert hot(fake, request_index) == RESIDENT


def test_fully_granted_request_is_not_starving() -> None:
    fake = cluster()
    fake.submit(0, 100, 20)
    run_until(fake, lambda: is_running(fake, 0))
    fake.dispatch.starve(fake.entry(0))
    assert fake.settle() == []
    assert not fake.dispatch.placement_table.starving


# ---------------------------------------------------------------- pressure


def test_gpu_pressure_shrinks_then_retracts_keeping_rows() -> None:
    fake = cluster(hot_chunks=10)
    fake.submit(0, 300, LONG // 50, priority=1)
    fake.submit(1, 300, LONG // 50)
    fake.submit(2, 300, LONG // 50)
    run_until(fake, lambda: is_running(fake, 0, 1, 2))
    assert fake.retracted == []
    fake.submit(3, 300, LONG // 50, priority=1)
    fake.settle()
    assert [(entry.request_index, cause) for entry, cause in fake.retracted] == [(2, Cause.GPU_MEMORY)]
    run_until(fake, lambda: is_running(fake, 3))
    assert state(fake, 2) is State.RETRACTED
    assert fake.entry(2).kept_tokens >= 300


def test_no_request_is_retracted_in_vain() -> None:
    """Retracting all inferiors would not make room beside the superior, so they are left to run."""
    fake = cluster(seats=3, index_pages=20)
    fake.submit(0, 700, 250, priority=2)  # 13 pages
    fake.submit(1, 100, 100)
    run_until(fake, lambda: is_running(fake, 0, 1))
    fake.submit(2, 600, 100, priority=1)  # 11 pages: more than 20 - 13
    fake.settle()
    assert fake.retracted == []


def test_equal_ranks_wait_for_each_other() -> None:
    fake = cluster(seats=1)
    fake.submit(0, 100, 500)
    fake.submit(1, 100, 500)
    run_until(fake, lambda: is_running(fake, 0))
    fake.settle()
    assert fake.retracted == []
    assert state(fake, 1) is State.QUEUED


def test_host_pressure_demotes_kept_before_dropping_running() -> None:
    """Lower-ranked kept requests first, then held ones of any rank, then lower-ranked running ones.

    vLLM: a full host is no deadlock."""
    fake = cluster(host_pages=22)
    for request_index, priority in ((0, 2), (1, 0), (2, 1), (3, 0)):
        fake.submit(request_index, 200, 400, priority=priority)  # 5 pages each
    run_until(fake, lambda: is_running(fake, 0, 1, 2, 3))
    for request_index in (0, 1):
        fake.take(fake.dispatch.retract(fake.entry(request_index), keep=True, hold=True, reason="operator"))
    run_until(fake, lambda: state(fake, 0) is state(fake, 1) is State.RETRACTED)
    assert fake.entry(0).pages
    assert fake.entry(1).pages
    gone: list[str] = []
    fake.submit(4, 500, 60, priority=1)
    for _ in range(3):
        for decision in fake.settle():
            if isinstance(decision, decisions.DemoteDecision | decisions.RetractDecision):
                gone.append(f"{type(decision).__name__} {decision.entry.request_index}")
    assert gone[:2] == ["DemoteDecision 1", "DemoteDecision 0"]
    assert fake.entry(0).ordered.held
    assert fake.entry(1).ordered.held
    fake.submit(5, 900, 60, priority=2)
    fake.settle()
    assert [entry.request_index for entry, cause in fake.retracted if cause is Cause.HOST_PAGES][:1] == [3]


def test_growing_makes_room_only_when_urgent() -> None:
    """SGLang #23704: and it does look at the host pool, where there is less than on the device."""
    fake = cluster(host_pages=10)
    fake.submit(0, 100, 400, priority=1, full=True)
    fake.submit(1, 100, 400, full=True)
    run_until(fake, lambda: is_running(fake, 0, 1))
    run_until(fake, lambda: bool(fake.retracted))
    ((victim, cause),) = fake.retracted
    assert (victim.request_index, cause) == (1, Cause.HOST_PAGES)
    entry = fake.entry(0)
    assert entry.pages * 64 - 100 - entry.generated <= 64 + 2


def test_displaced_request_returns_only_with_lasting_room() -> None:
    """Its own 4 pages are there, but not the 4 that the request ahead of it may still need.

    vLLM: chunked prefill that is begun again and again."""
    fake = cluster(host_pages=10)
    fake.submit(0, 100, 400, full=True)
    run_until(fake, lambda: is_running(fake, 0))
    fake.submit(1, 100, 100)
    fake.entry(1).displaced = True
    fake.settle()
    assert (fake.ledgers["n0"].pages_free >= 4, state(fake, 1)) == (True, State.QUEUED)
    fake.entry(1).displaced, fake.dispatch.dirty = False, True
    fake.settle()
    assert state(fake, 1) is State.PREFILLING


def test_held_request_stays_held_whatever_room_there_is() -> None:
    fake = cluster()
    fake.submit(0, 100, 100)
    fake.take(fake.dispatch.retract(fake.entry(0), keep=True, hold=True, reason="operator"))
    for _ in range(20):
        fake.round()
    assert state(fake, 0) is State.RETRACTED
    fake.take(fake.dispatch.resume(fake.entry(0), "operator"))
    run_to_end(fake)
    assert state(fake, 0) is State.FINISHED


def test_no_request_overtakes_a_waiting_one() -> None:
    fake = cluster(index_pages=20)
    fake.submit(0, 600, 300)
    run_until(fake, lambda: is_running(fake, 0))
    fake.submit(1, 600, 300)
    fake.submit(2, 10, 10)
    fake.settle()
    assert (state(fake, 1), state(fake, 2)) == (State.QUEUED, State.QUEUED)


def test_memory_due_to_a_waiting_request_is_not_given_to_growth() -> None:
    fake = cluster(host_pages=14)
    fake.submit(0, 100, 700, full=True)
    fake.submit(1, 100, 700, full=True)
    run_until(fake, lambda: is_running(fake, 0, 1))
    free = fake.ledgers["n0"].pages_free
    assert free > 0
    fake.submit(2, (free + fake.entry(1).pages) * 64 - 62, 60, priority=1)
    fake.settle()
    assert [entry.request_index for entry, _ in fake.retracted] == [1]
    pages = fake.entry(0).pages
    fake.entry(0).generated = pages * 64 - 100  # and so the lower one is out of pages
    fake.dispatch.starve(fake.entry(0))
    fake.dispatch.policy.plan(fake.now)
    assert fake.entry(0).pages == pages


# ---------------------------------------------------------------- draining, losing


def test_handover_moves_requests_that_fit_elsewhere() -> None:
    fake = cluster(2, seats=2)
    for request_index in range(3):
        fake.submit(request_index, 100, 2_000)
    run_until(fake, lambda: is_running(fake, 0, 1, 2))
    crowded = max(("w0", "w1"), key=lambda name: fake.dispatch.placement_table.workers[name].requests)
    fake.drain_worker(crowded, WorkerDrain(1e9, handover=True))
    rows = {request_index: len(fake.live[request_index].tokens) for request_index in range(3)}
    for _ in range(5):
        fake.round()
    assert [cause for _, cause in fake.retracted] == [Cause.HANDOVER]
    assert fake.dispatch.placement_table.workers[crowded].requests == 1
    assert is_running(fake, 0, 1, 2)
    assert all(len(fake.live[request_index].tokens) >= rows[request_index] for request_index in range(3))


@pytest.mark.parametrize(("floored", "other"), [("w0", "w1"), ("w1", "w0")])
def test_equal_workers_with_unequal_floors_keep_each_to_its_own(floored: str, other: str) -> None:
    fake = cluster(2, hot_chunks=60, index_pages=4000, host_pages=4000, prompt_max_tokens=25_600)
    for request_index in range(40):
        fake.submit(request_index, 550, LONG)
    run_until(fake, lambda: is_running(fake, *range(40)))
    fake.dispatch.placement_table.workers[floored].hot_floor = RESIDENT
    pause(fake, 20)
    settled = len(fake.retracted)
    pause(fake, 20)
    assert len(fake.retracted) == settled, "none comes back below the floor, to leave again"
    sizes = {name: [hot(fake, it) for it in running(fake) if fake.entry(it).worker == name] for name in ("w0", "w1")}
    assert set(sizes[floored]) == {RESIDENT}
    assert sizes[other] == 20 * [128], "as many as before"


def test_handover_pushes_no_request_below_the_floor_of_the_worker_that_takes_it() -> None:
    """Room that only its own admission, which keeps to the floor, could not make: it stays where it runs."""
    fake = cluster(2, hot_chunks=24, index_pages=400, host_pages=800, prompt_max_tokens=6_400)
    for request_index in range(4):
        fake.submit(request_index, 400, 300)
    run_until(fake, lambda: is_running(fake, 0, 1, 2, 3))
    there = {it: fake.entry(it).worker for it in range(4)}
    assert sorted(there.values()) == ["w0", "w0", "w1", "w1"]
    assert {hot(fake, it) for it in there} == {RESIDENT}
    fake.dispatch.placement_table.workers["w0"].hot_floor = RESIDENT
    fake.drain_worker("w1", WorkerDrain(1e9, handover=True))
    for _ in range(3):
        fake.round()
    assert fake.retracted == []


def test_drain_deadline_retracts_all_and_skips_held_requests() -> None:
    fake = cluster()
    fake.submit(0, 100, 2_000)
    run_until(fake, lambda: is_running(fake, 0))
    fake.drain_worker("w0", WorkerDrain(fake.now + 5, handover=True))
    for _ in range(3):
        fake.round()
    assert is_running(fake, 0), "nowhere to go: it goes on in place"
    for _ in range(5):
        fake.round()
    assert state(fake, 0) is State.RETRACTED
    assert fake.dispatch.placement_table.workers["w0"].requests == 0
    fake.drain_worker("w0", None)
    run_to_end(fake)


def test_unreachable_kept_pages_are_released_in_time() -> None:
    fake = FakeCluster(1, ("n0", "n1"), 100)
    fake.add_worker("w0", "n0")
    fake.submit(0, 100, 500)
    run_until(fake, lambda: is_running(fake, 0))
    fake.add_worker("w1", "n1")
    fake.lose_worker("w0", proved=True)
    assert fake.entry(0).kept_tokens >= 100
    fake.submit(1, 100, 500)
    fake.round()
    fake.round()
    assert (state(fake, 0), state(fake, 1)) == (State.RETRACTED, State.READY), (
        "it blocks only the node that it waits for"
    )
    fake.now += STRANDED_LIMIT_S
    run_until(fake, lambda: is_running(fake, 0))
    assert fake.entry(0).worker == "w1"


def test_lost_worker_costs_no_durable_row_once_exit_is_proved() -> None:
    fake = cluster(2)
    fake.submit(0, 100, 2_000)
    run_until(fake, lambda: is_running(fake, 0) and len(fake.live[0].tokens) > 100)
    tokens = len(fake.live[0].tokens)
    fake.lose_worker(fake.entry(0).worker, proved=True)
    assert fake.entry(0).kept_tokens >= 100 + tokens - 4
    run_to_end(fake)


class PolicyMachine(RuleBasedStateMachine):
    """SGLang #23704, vLLM: every request ends, with any events before and any size of the host pool: no livelock."""

    @initialize(
        seed=st.integers(0, 2**16),
        host_pages=st.integers(12, 28),
        two_nodes=st.booleans(),
        burst=st.lists(
            st.tuples(st.integers(1, 400), st.integers(1, 300), st.integers(0, 2), st.sampled_from("ab")), max_size=6
        ),
        rounds=st.integers(0, 8),
    )
    def start(
        self, seed: int, host_pages: int, two_nodes: bool, burst: list[tuple[int, int, int, str]], rounds: int
    ) -> None:
        self.cluster = FakeCluster(seed, ("n0", "n1") if two_nodes else ("n0",), host_pages)
        self.node_of = {"w0": "n0", "w1": "n1" if two_nodes else "n0"}
        self.cluster.add_worker("w0", "n0")
        self.cluster.add_worker("w1", self.node_of["w1"], seats=2, hot_chunks=10)
        self.next_slot = 0
        for request in burst:
            self.submit(*request)
        self.time_passes(rounds)

    @rule(
        prompt=st.integers(1, 400),
        max_tokens=st.integers(1, 300),
        priority=st.integers(0, 2),
        tenant=st.sampled_from("ab"),
    )
    def submit(self, prompt: int, max_tokens: int, priority: int, tenant: str) -> None:
        length = Length(prompt, 0, max_tokens)
        fits = any(not misfit(length, worker.capacity, "") for worker in self.cluster.workers.values())
        if self.next_slot < 12 and fits:
            self.cluster.submit(self.next_slot, prompt, max_tokens, priority, tenant=tenant)
            self.next_slot += 1

    @rule(data=st.data())
    def worker_advances(self, data: st.DataObject) -> None:
        runs = [(worker, a) for worker in self.cluster.workers.values() for a in worker.runs]
        if runs:
            worker, placement = data.draw(st.sampled_from(runs))
            worker.advance(placement)

    @rule(name=st.sampled_from(["w0", "w1"]), count=st.integers(1, 4))
    def commands_arrive(self, name: str, count: int) -> None:
        for _ in range(count):
            if name in self.cluster.workers:
                self.cluster.obey_next(name)

    @rule(name=st.sampled_from(["w0", "w1"]), count=st.integers(1, 4))
    def events_arrive(self, name: str, count: int) -> None:
        for _ in range(count):
            if name in self.cluster.workers:
                self.cluster.hear_next(name)

    @rule(rounds=st.integers(1, 4))
    def time_passes(self, rounds: int) -> None:
        for _ in range(rounds):
            self.cluster.round()

    @rule(tick=st.booleans())
    def scheduler_decides(self, tick: bool) -> None:
        self.cluster.settle(tick=tick)

    def some_request(self, data: st.DataObject) -> int | None:
        request_indices = [
            request_index for request_index, live in self.cluster.live.items() if live.state.state not in TERMINAL
        ]
        return data.draw(st.sampled_from(request_indices)) if request_indices else None

    @rule(data=st.data(), keep=st.booleans(), hold=st.booleans())
    def operator_retracts(self, data: st.DataObject, keep: bool, hold: bool) -> None:
        request_index = self.some_request(data)
        if request_index is not None:
            heard = self.cluster.dispatch.retract(
                self.cluster.entry(request_index), keep=keep, hold=hold, reason="operator"
            )
            self.cluster.take(heard)

    @rule(data=st.data())
    def operator_resumes(self, data: st.DataObject) -> None:
        request_index = self.some_request(data)
        if request_index is not None:
            self.cluster.take(self.cluster.dispatch.resume(self.cluster.entry(request_index), "operator"))

    @rule(data=st.data(), hot_slots=st.sampled_from([-1, 0, 128, 256]))
    def operator_forces_a_size(self, data: st.DataObject, hot_slots: int) -> None:
        request_index = self.some_request(data)
        if request_index is not None:
            self.cluster.dispatch.placement_table.force(self.cluster.entry(request_index), hot_slots)

    @rule(data=st.data())
    def client_aborts(self, data: st.DataObject) -> None:
        request_index = self.some_request(data)
        if request_index is not None:
            self.cluster.take(self.cluster.dispatch.end(self.cluster.entry(request_index), "ABORTED", "client"))

    @rule(name=st.sampled_from(["w0", "w1"]), proved=st.booleans())
    def worker_is_lost(self, name: str, proved: bool) -> None:
        if name in self.cluster.workers:
            self.cluster.lose_worker(name, proved=proved)

    @rule(name=st.sampled_from(["w0", "w1"]))
    def worker_returns(self, name: str) -> None:
        if name not in self.cluster.workers:
            self.cluster.add_worker(name, self.node_of[name])

    @precondition(lambda self: self.cluster.zombies)
    @rule(data=st.data())
    def exit_is_proved(self, data: st.DataObject) -> None:
        self.cluster.prove_exit(data.draw(st.sampled_from(self.cluster.zombies)))

    @precondition(lambda self: self.cluster.zombies)
    @rule(data=st.data())
    def zombie_works_on(self, data: st.DataObject) -> None:
        zombie = data.draw(st.sampled_from(self.cluster.zombies))
        if zombie.runs:
            zombie.advance(data.draw(st.sampled_from(sorted(zombie.runs))))

    @rule(name=st.sampled_from(["w0", "w1"]), handover=st.booleans(), seconds=st.integers(1, 9))
    def drain(self, name: str, handover: bool, seconds: int) -> None:
        if name in self.cluster.workers:
            self.cluster.drain_worker(name, WorkerDrain(self.cluster.now + seconds, handover))

    @rule(
        name=st.sampled_from(["w0", "w1"]),
        floor=st.sampled_from([None, 256, RESIDENT]),
        probe=st.sampled_from([None, None, 128]),
    )
    def hot_floor_moves(self, name: str, floor: int | None, probe: int | None) -> None:
        if name in self.cluster.workers:
            worker = self.cluster.dispatch.placement_table.workers[name]
            worker.hot_floor, worker.probe_slots = floor, probe

    @rule(name=st.sampled_from(["w0", "w1"]))
    def undrain(self, name: str) -> None:
        if name in self.cluster.workers:
            self.cluster.drain_worker(name, None)

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.check_invariants()

    def teardown(self) -> None:
        """From wherever we are: workers are there and make progress, so all but the held end; then nothing is left."""
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        for zombie in list(cluster.zombies):
            for placement in list(zombie.runs):
                zombie.advance(placement)
            cluster.prove_exit(zombie)
        for name in ("w0", "w1"):
            if name not in cluster.workers:
                cluster.add_worker(name, self.node_of[name])
            cluster.drain_worker(name, None)
        held = {request_index for request_index, live in cluster.live.items() if live.state.held}
        before = len(cluster.retracted)
        run_to_end(cluster)
        assert len(cluster.retracted) - before <= 2 * len(cluster.live), "thrashing"
        still = {request_index for request_index, live in cluster.live.items() if live.state.state not in TERMINAL}
        assert still <= held, "only held requests are left"
        for request_index in still:
            assert cluster.live[request_index].state.held, "what an operator retracted stays held"
            cluster.take(cluster.dispatch.end(cluster.entry(request_index), "ABORTED", "teardown"))
        run_to_end(cluster)
        cluster.check_invariants()
        cluster.check_nothing_leaked()


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = settings(max_examples=150, stateful_step_count=60)
