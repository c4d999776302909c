"""How long requests wait, tokens take and pages live: told by pure parts, each with a clock of the test's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from basics.request_states import State
from coordinator.memory.host_pool import PageAges
from coordinator.memory.ledger import Ledger
from coordinator.state.request import Waited, WaitFor, Waits
from coordinator.tokens.token_times import TokenTimes
from metrics.state import TOKEN_BOUNDS_S, Buckets
from protocol.messages import WorkerCapacity
from protocol.sizing import Memory

QUEUED, PREFILLING, READY, RUNNING = State.QUEUED, State.PREFILLING, State.READY, State.RUNNING
TRANSFERRING, PREFILLED = State.TRANSFERRING, State.PREFILLED
RETRACTING, RETRACTED, RELEASING = State.RETRACTING, State.RETRACTED, State.RELEASING


def told(*path: tuple[float, State] | tuple[float, State, bool]) -> list[Waited]:
    """What is told on a path of (time, state, held) that begins QUEUED at 0."""
    waits = Waits(QUEUED, False, 0.0)
    notes = (waits.note(state, bool(held), now) for now, state, *held in path)
    return [waited for waited in notes if waited is not None]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ([(2, PREFILLING), (3, READY), (4, RUNNING)], [(WaitFor.QUEUE, 2)]),
        ([(1, QUEUED), (2, QUEUED), (5, PREFILLING)], [(WaitFor.QUEUE, 5)]),
        (
            [(1, PREFILLING), (2, READY), (3, RUNNING), (5, RETRACTING), (9, RETRACTED), (12, READY), (20, RUNNING)],
            [(WaitFor.QUEUE, 1), (WaitFor.RETRACT, 4), (WaitFor.QUEUE, 3), (WaitFor.RESUME, 8)],
        ),
        ([(1, PREFILLING), (2, RETRACTING), (4, QUEUED)], [(WaitFor.QUEUE, 1), (WaitFor.RETRACT, 2)]),
        ([(1, State.ABORTED)], []),
        ([(1, RETRACTED, True), (7, RETRACTED), (9, READY)], [(WaitFor.QUEUE, 2)]),
        ([(1, PREFILLING), (2, RETRACTING), (3, RELEASING), (9, State.ABORTED)], [(WaitFor.QUEUE, 1)]),
        ([(1, PREFILLING), (3, TRANSFERRING), (7, PREFILLED), (8, READY), (10, RUNNING)],
         [(WaitFor.QUEUE, 1), (WaitFor.HAND_OVER, 4), (WaitFor.QUEUE, 1), (WaitFor.RESUME, 2)]),
        ([(1, READY), (2, READY), (3, RETRACTED), (4, READY), (6, RUNNING)],
         [(WaitFor.QUEUE, 1), (WaitFor.QUEUE, 1), (WaitFor.RESUME, 2)]),
    ],
    ids=["admitted", "noted again", "retracted and back", "dropped", "aborted", "held", "ended", "handed over", "lost"],
)  # fmt: skip
def test_waits_are_recorded_when_they_end(
    path: list[tuple[float, State]], expected: list[tuple[WaitFor, float]]
) -> None:
    assert told(*path) == expected


def test_recovered_request_waits_from_its_recovery() -> None:
    assert Waits(QUEUED, False, 100.0).note(PREFILLING, False, 103.0) == (WaitFor.QUEUE, 3.0)
    assert Waits(RUNNING, False, 100.0).note(RUNNING, False, 103.0) is None
    assert Waits(RETRACTED, True, 100.0).note(READY, False, 103.0) is None


def arrived(
    times: TokenTimes, now: float, **request_indices: tuple[int, int]
) -> tuple[list[float], list[float], list[int]]:
    """`request_index=(known, fresh)`."""
    places = np.array([int(name[1:]) for name in request_indices], np.intp)
    known, fresh = (np.array(column, np.int32) for column in zip(*request_indices.values(), strict=True))
    first, between, counts = times.arrived(places, known, fresh, now)
    return first.tolist(), between.tolist(), counts.tolist()


def test_first_tokens_and_those_between() -> None:
    times = TokenTimes(4)
    for request_index in range(3):
        times.submitted(request_index, 10.0)
    assert arrived(times, 11.0, s0=(0, 1), s1=(0, 3)) == ([1.0, 1.0], [], [])
    assert arrived(times, 12.0, s0=(1, 4), s1=(3, 0)) == ([], [0.25], [4])
    assert arrived(times, 14.0, s1=(3, 1), s2=(0, 1)) == ([4.0], [3.0], [1])
    assert arrived(times, 15.0, s3=(7, 1)) == ([], [], []), "of an earlier life: nothing is known of its last token"
    assert arrived(times, 16.0, s3=(8, 2)) == ([], [0.5], [2])
    times.submitted(0, 20.0)
    assert arrived(times, 21.5, s0=(0, 1)) == ([1.5], [], []), "the slot is another request's"


def test_page_lifetimes_span_all_holders() -> None:
    ledger = Ledger(10)
    ledger.add_worker("w", 1, WorkerCapacity(8, 64, 64, 4_096, 10, 1024, (4096,), 8, 1, ""))
    ages = PageAges(ledger, 0.0)

    def after(now: float, change: object) -> list[float]:
        free = before[-1]
        before.append(ledger.pages_free)
        del change
        return sorted(ages.note(free, now).tolist())

    before = [ledger.pages_free]
    assert after(1.0, ledger.reserve(1, "w", Memory(host_pages=4))) == []
    assert after(2.0, ledger.extend(1, Memory(host_pages=2))) == []
    assert after(5.0, ledger.keep(1, 3)) == [3.0, 3.0, 4.0]
    assert after(6.0, ledger.reserve(2, "w", Memory(host_pages=1), take_over=1)) == []
    assert after(8.0, ledger.release(2)) == [2.0, 7.0, 7.0, 7.0]
    assert after(9.0, ledger.reserve(3, "w", Memory(host_pages=10))) == []
    assert after(10.0, ledger.release(3)) == [1.0] * 10


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)), max_size=20))
def test_batched_values_count_like_single_ones(values: list[tuple[float, int]]) -> None:
    one_by_one, at_once = Buckets(TOKEN_BOUNDS_S), Buckets(TOKEN_BOUNDS_S)
    for value, times in values:
        for _ in range(times):
            one_by_one.observe(value)
    at_once.observe_all(np.array([value for value, _ in values]), np.array([times for _, times in values], np.int64))
    assert at_once.counts == one_by_one.counts
    assert at_once.total == pytest.approx(one_by_one.total)
