"""Steps that bring up to five rows of a seat, against naive lists and a hash for every row: drafts, some rejected."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.begin_step import begin_step
from kernels.index_topk import index_topk
from kernels.state import DeviceState, StepBatch, Tripwire
from protocol.errors import BadInput, InternalError
from tests.support.kernel_rig import Request, Rig

begin_reference = importlib.import_module("kernels.reference.begin_step")
index_reference = importlib.import_module("kernels.reference.index_topk")
swap_reference = importlib.import_module("kernels.reference.swap_in")

LIVES = settings(max_examples=60)
SHAPES = st.fixed_dictionaries(
    {
        "groups": st.sampled_from([(0,), (0, 0, 1)]),
        "seat_rows": st.integers(1, 5),
        "more_tail": st.integers(0, 6),
        "topk": st.integers(1, 7),
        "seed": st.integers(0, 2**32),
    }
)
KINDS = ["step"] * 9 + ["resize"] * 2 + ["remode", "reopen", "other rows"]
ACTIONS = st.lists(st.sampled_from(KINDS), min_size=4, max_size=12)


def draft_rig(*, seat_rows: int, more_tail: int = 0, **sizes: Any) -> Rig:
    return Rig(tail_slots=2 * seat_rows + more_tail, row_bytes=8, index_row_bytes=4, seat_rows=seat_rows, **sizes)


def draw_hot_slots(rig: Rig) -> int:
    k = rig.geometry.topk
    return rig.random.choice([k, k, k + 1, 2 * k + 5, 5 * k, 64, 70])


def draw_topk(rig: Rig, position: int) -> list[int]:
    """Any order, duplicates, padding; near the newest tokens, over the whole context, or out of range."""
    k, length = rig.geometry.topk, position + 1
    pool = [rig.random.randrange(length) for _ in range(2 * k)] + list(range(max(0, length - k), length))
    odd = [-1, length, length + 1, length + 3]
    return [rig.random.choice(odd) if rig.random.random() < 0.1 else rig.random.choice(pool) for _ in range(k)]


def step(rig: Rig) -> None:
    """Some requests, with as many rows as drawn; of what fits, a drawn number of rows is accepted."""
    requests = [r for r in rig.requests.values() if rig.random.random() < 0.8]
    rig.random.shuffle(requests)
    seat_rows = rig.batch.seat_rows
    rows = [seat_rows if rig.random.random() < 0.7 else rig.random.randrange(seat_rows + 1) for _ in requests]
    rig.begin(requests, rows if seat_rows > 1 else None)
    for group in range(rig.geometry.groups):
        rig.swap_in(group, requests, [draw_topk(rig, position) for _, _, position in rig.placed])
    for request in requests:
        most = rig.acceptable(request)
        rig.accept(request, rig.random.choice([min(1, most), most, rig.random.randint(min(1, most), most)]))


def act(rig: Rig, action: str) -> None:
    request = rig.random.choice(list(rig.requests.values()))
    if action == "step":
        step(rig)
    elif action == "resize" and request.naive[0].hot_slots:
        rig.resize_about(request, draw_hot_slots(rig))
    elif action == "other rows":
        rig.take_rows(rig.random.randint(1, rig.state.seat_rows))
    elif action == "reopen":
        rig.close(request)
        rig.open(request.seat, rig.random.randrange(150), draw_hot_slots(rig))
    else:  # retracted and resumed
        resident = rig.random.random() < 0.3
        rig.set_mode(request, 0 if resident else draw_hot_slots(rig), preload=rig.random.random() < 0.7)


def live(shape: dict[str, Any], actions: list[str]) -> Rig:
    rig = draft_rig(**shape)
    for seat in range(3):
        rig.open(seat, rig.random.randrange(150), 0 if seat == 2 else draw_hot_slots(rig), preload=seat == 1)
    for action in actions:
        act(rig, action)
        rig.check()
    rig.check_host()
    return rig


@LIVES
@given(shape=SHAPES, actions=ACTIONS)
def test_drafts_match_naive_lru_and_every_byte(shape: dict[str, Any], actions: list[str]) -> None:
    """Any pattern of acceptance, any hot size from k on; whatever is selected has the bytes written last (I3, I6)."""
    live(shape, actions)


def begun(seat_rows: int, hot_slots: int, topk: int = 4, length: int = 100) -> tuple[Rig, Request]:
    rig = draft_rig(seat_rows=seat_rows, groups=(0,), topk=topk)
    request = rig.open(0, length, hot_slots)
    rig.begin([request])
    return rig, request


def test_union_is_loaded_once_and_admitted_in_order_of_position() -> None:
    """H = k: the first row takes all slots, the second needs none, the third does not fit, the fourth loads nothing."""
    rig, request = begun(4, 4)
    rig.swap_in(0, [request], [[1, 2, 3, 4], [4, 3, 2, 101], [5, 1, 2, 3], [100, 1, 2, 103]])
    assert rig.miss_plan.count[:: rig.step_seats].tolist() == [4, 0, 0, 0]
    assert rig.batch.rejected[:: rig.step_seats].tolist() == [0, 0, 1, 0]
    assert rig.acceptable(request) == 2
    rig.check()


def test_rejection_is_kept_over_groups() -> None:
    rig = draft_rig(seat_rows=2, groups=(0, 1), topk=2)
    request = rig.open(0, 100, 2)
    rig.begin([request])
    rig.swap_in(0, [request], [[1, 2], [3, 1]])
    rig.swap_in(1, [request], [[1, 2], [2, 1]])
    assert rig.acceptable(request) == 1
    rig.begin([request])
    rig.swap_in(0, [request], [[1, 2], [2, 1]])
    assert rig.acceptable(request) == 2


def test_slot_of_a_rejected_row_is_taken_again() -> None:
    """Nothing is evicted for a position that was written before."""
    rig, request = begun(3, 4)
    rig.swap_in(0, [request], [[1, 2, 3, 4]] * 3)
    rig.accept(request, 1)
    before, places = rig.held(0, request), rig.batch.new_rows[0, rig.step_seats :: rig.step_seats].tolist()
    rig.begin([request], [2])
    assert rig.batch.new_rows[0, : 2 * rig.step_seats : rig.step_seats].tolist() == places
    assert rig.held(0, request) == before
    rig.check()


def test_rejected_row_in_an_ordinary_slot_becomes_the_tail_slot() -> None:
    """A buffer that shrinks begins a new tail: what the old one held lies in ordinary slots, if it lies low enough."""
    rig, request = begun(2, 128)
    for _ in range(6):  # so that the tail lies in ordinary slots
        rig.swap_in(0, [request], [[1, 2, 3, 4]] * 2)
        rig.accept(request, 2)
        rig.begin([request])
    rejected = request.length  # the second row of this step
    rig.resize(request, 64)
    slot = int(rig.state.slot_of[0, request.pages[rejected // 64][0] * 64 + rejected % 64])
    assert 0 <= slot < 64
    rig.begin([request], [1])
    assert rig.state.tail[0, 0, rejected % rig.state.tail_slots] == slot
    rig.check()


def test_one_row_takes_the_slot_that_a_draft_left() -> None:
    """How many rows a seat brings changes between steps."""
    rig, request = begun(3, 4)
    rig.accept(request, 1)
    place = int(rig.batch.new_rows[0, rig.step_seats])
    rig.take_rows(1)
    rig.begin([request])
    assert int(rig.batch.new_rows[0, 0]) == place
    rig.check()


def test_granted_rows_end_the_rows_of_a_seat() -> None:
    """In the middle, before the first row, and by corrupt numbers; nothing trips."""
    rig, request = begun(3, 0)
    for granted, rows in ((2, 2), (0, 0), (-(10**9), 0)):
        rig.state.granted_rows[0] = request.length + granted
        rig.batch.lengths[0] = request.length + 1
        now = int(rig.state.now[0])
        begin_step(rig.state, rig.batch, rig.plans[0])
        assert (rig.batch.new_rows[0, :: rig.step_seats] >= 0).tolist() == [depth < rows for depth in range(3)]
        assert (rig.batch.lengths[:: rig.step_seats] > 0).tolist() == [depth < rows for depth in range(3)]
        assert int(rig.state.now[0]) == now + (rows > 0)
    assert not rig.state.tripwires.any()


def test_refused_seat_trips_once_and_has_no_rows() -> None:
    rig, _ = begun(3, 4)
    rig.batch.seats[0], rig.batch.lengths[0] = 2, 50
    begin_step(rig.state, rig.batch, rig.plans[0])
    assert rig.state.tripwires.tolist() == [0, 0, 0, 1]
    assert not rig.batch.lengths.any()
    assert rig.batch.rejected.all()


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_request_without_granted_rows_has_none_at_any_depth(integer: torch.dtype) -> None:
    rig = draft_rig(seat_rows=3, groups=(0,))
    rig.batch.seats, rig.batch.lengths = rig.batch.seats.to(integer), rig.batch.lengths.to(integer)
    rig.begin([rig.open(0, 70, 8), rig.open(1, 70, 8)], [0, 2])
    assert rig.batch.lengths.view(3, -1)[:, :2].tolist() == [[0, 71], [0, 72], [0, 0]]


def test_draft_without_a_page_trips_and_is_rejected() -> None:
    rig = draft_rig(seat_rows=3, groups=(0,))
    request = rig.open(0, 62, 4)
    rig.batch.seats[0], rig.batch.lengths[0] = 0, 63
    rig.batch.num_real.fill_(1)
    begin_step(rig.state, rig.batch, rig.plans[0])
    assert rig.batch.rejected[:: rig.step_seats].tolist() == [0, 0, 1]
    assert rig.state.tripwires[Tripwire.UNGRANTED] == 1
    assert request.length == 62


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("seat_rows", partial(draft_rig, seat_rows=6)),
        ("seat_rows", partial(StepBatch.allocate, 7, 1, seat_rows=2)),
        ("tail_slots", partial(Rig, seat_rows=3, tail_slots=5)),
    ],
)
def test_unfit_sizes_are_named(field: str, make: Callable[[], object]) -> None:
    with pytest.raises(BadInput) as caught:
        make()
    assert caught.value.field == field


def test_batch_with_more_rows_than_the_state_is_refused() -> None:
    rig = draft_rig(seat_rows=2, groups=(0,))
    with pytest.raises(BadInput, match=r"batch\.seat_rows=4"):
        begin_step(rig.state, StepBatch.allocate(16, 1, seat_rows=4), rig.plans[0])


# -- selections, and planted bugs


def selects_causally() -> None:
    """Scores grow with the position, so that whatever may be selected at the end of the context is."""
    rig = draft_rig(seat_rows=3, groups=(0,), topk=2)
    request = rig.open(0, 100, 4)
    queries = torch.ones(len(rig.batch.seats), 1, 1)
    out = torch.empty(len(queries), 2, dtype=torch.int32)
    for rows in (3, 1, 2):
        rig.begin([request], [rows])
        for position in range(request.length - 1 + rows):
            place = request.pages[position // 64][0] * 64 + position % 64
            rig.state.index_keys.view(torch.float32)[0, place] = position
        index_topk(rig.state, 0, queries, torch.ones(len(queries), 1), rig.batch, 1.0, out)
        for row, _, position in rig.placed:
            assert out[row].tolist() == [position - 1, position], f"{rows} rows, position {position}"
        placed = [row for row, _, _ in rig.placed]
        assert all((out[row] == -1).all() for row in range(len(out)) if row not in placed)


def test_rows_select_themselves_and_earlier_positions_alone() -> None:
    selects_causally()


def ahead_of_itself(monkeypatch: pytest.MonkeyPatch) -> str:
    held = index_reference.row_keys
    monkeypatch.setattr(index_reference, "row_keys", lambda state, group, seat, n: held(state, group, seat, n + 1))
    return "3 rows, position 100"


def rejected_row_selected(monkeypatch: pytest.MonkeyPatch) -> str:
    """The longest context that the seat ever had, when its next step begins."""
    held, longest = index_reference.row_keys, [0]

    def to_the_longest(state: DeviceState, group: int, seat: int, length: int) -> Any:
        earlier, longest[0] = longest[0], max(longest[0], length)
        return held(state, group, seat, max(length, earlier))

    monkeypatch.setattr(index_reference, "row_keys", to_the_longest)
    return "1 rows, position 101"


@pytest.mark.mutation
@pytest.mark.parametrize("plant", [ahead_of_itself, rejected_row_selected])
def test_wrong_selection_is_seen(plant: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch) -> None:
    message = plant(monkeypatch)
    with pytest.raises(AssertionError, match=message):
        selects_causally()


def rows_evict_each_other(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    keys = swap_reference.eviction_keys
    monkeypatch.setattr(
        swap_reference, "eviction_keys", lambda stamps, tail, hot, now: keys(stamps, tail, hot, now + 1)
    )
    return test_union_is_loaded_once_and_admitted_in_order_of_position


def clock_of_each_row(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """As if each depth were a step: what the depth before loaded is older."""
    resolve = swap_reference._resolve_depth

    def later(state: DeviceState, *args: Any, all_or_none: bool) -> None:
        state.now += 1
        resolve(state, *args, all_or_none=all_or_none)

    monkeypatch.setattr(swap_reference, "_resolve_depth", later)
    return test_union_is_loaded_once_and_admitted_in_order_of_position


def rejected_slot_forgotten(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    monkeypatch.setattr(begin_reference, "_slots_holding", lambda *args: np.full_like(args[-1], -1))
    return test_slot_of_a_rejected_row_is_taken_again


def drafts_beyond_the_grant(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    add = begin_reference._add_drafts

    def without_limit(state: DeviceState, *args: Any) -> None:
        state.granted_rows.fill_(2**31 - 1)
        add(state, *args)

    monkeypatch.setattr(begin_reference, "_add_drafts", without_limit)
    return test_granted_rows_end_the_rows_of_a_seat


@pytest.mark.mutation
@pytest.mark.parametrize(
    "plant", [rows_evict_each_other, clock_of_each_row, rejected_slot_forgotten, drafts_beyond_the_grant]
)
def test_planted_bug_is_seen(
    plant: Callable[[pytest.MonkeyPatch], Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one step that evict each other are a bug that vLLM had."""
    sees_it = plant(monkeypatch)
    with pytest.raises((AssertionError, InternalError)):
        sees_it()
