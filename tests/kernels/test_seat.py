"""Setting up, resizing and clearing a hot buffer; the tail rule of begin_step; check_state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.begin_step import begin_step
from kernels.integrity import check_state
from kernels.layout import Geometry
from kernels.seat import clear_seat, grow_managed, hold_tokens, init_managed, init_resident, shrink_managed
from kernels.state import BackupPlan, DeviceState, StepBatch, Tripwire
from protocol.errors import BadInput, InternalError, WrongState
from protocol.units import managed_chunks
from tests.support.kernel_rig import Request, Rig


def opened(hot_slots: int = 8, length: int = 100, tail_slots: int = 3, **changes: object) -> tuple[Rig, Request]:
    rig = Rig(**{"groups": (0, 1), "topk": 4, "tail_slots": tail_slots, **changes})  # type: ignore[arg-type]
    return rig, rig.open(0, length, hot_slots)


def tokens_in(rig: Rig, request: Request, slots: list[int], group: int = 0) -> list[int]:
    rows = [request.chunks[slot // 64] * 64 + slot % 64 for slot in slots]
    return rig.state.slot_token[group, rows].tolist()


# -- begin_step --------------------------------------------------------------------------------------------------------


def test_first_tokens_fill_the_tail_slots_in_ring_order() -> None:
    rig, request = opened()
    for _ in range(3):
        rig.begin([request])
    assert tokens_in(rig, request, [8, 9, 10]) == [102, 100, 101]  # ring place p % 3
    assert rig.state.tail[0, 0].tolist() == [8, 9, 10]


def test_retired_tail_slot_keeps_its_token_and_victim_is_tail() -> None:
    rig, request = opened()
    for _ in range(3):
        rig.begin([request])
    rig.swap_in(0, [request], [[1, 2, 3, 4]])
    rig.begin([request])
    assert rig.state.tail[0, 0].tolist() == [8, 4, 10], "slot 4 was empty, hence oldest"
    assert tokens_in(rig, request, [4, 9]) == [103, 100]
    assert rig.state.stamp[0, request.chunks[0] * 64 + 9] == 3, "retired as used in the step before"
    rig.check()


def test_newly_retired_slot_is_not_the_victim() -> None:
    """One ordinary slot, used as recently as the retiring one: the ordinary slot is taken."""
    rig, request = opened(hot_slots=1, topk=1, tail_slots=1)
    rig.begin([request])
    rig.swap_in(0, [request], [[5]])
    rig.begin([request])
    assert tokens_in(rig, request, [0, 1]) == [101, 100]
    rig.check()


def test_groups_rotate_by_their_own_use() -> None:
    rig, request = opened(hot_slots=4)
    for topk in ([0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]):
        rig.begin([request])
        rig.swap_in(0, [request], [topk])
        rig.swap_in(1, [request], [[position + 10 for position in topk]])
    rig.swap_in(1, [request], [[11, 12, 13, -1]])
    rig.begin([request])
    assert rig.state.tail[:, 0, 100 % 3].tolist() == [0, 0]
    assert tokens_in(rig, request, [0], group=1) == [103]
    rig.check()


def test_plan_places_each_row_and_pads_with_minus_one() -> None:
    rig, request = opened(length=127)
    other = rig.open(2, 64, 0)
    rig.begin([request, other])
    plan, batch = rig.plans[0], rig.batch
    index_page, host_page = request.pages[1]
    assert plan.host_page.tolist() == [host_page, other.pages[1][1], -1, -1]
    assert plan.host_offset.tolist() == [63, 0, -1, -1]
    assert plan.index_row.tolist() == [index_page * 64 + 63, other.pages[1][0] * 64, -1, -1]
    assert torch.equal(plan.index_row, batch.new_index_rows)
    assert torch.equal(plan.device_row, batch.new_rows)
    assert batch.new_rows[0].tolist() == [request.chunks[0] * 64 + 8 + 127 % 3, other.chunks[1] * 64, -1, -1]


@pytest.mark.parametrize("table", ["index_table", "host_table", "chunk_table"])
def test_ungranted_token_trips_and_changes_nothing(table: str) -> None:
    rig = Rig(groups=(0,))
    request = rig.open(0, 64, 0)
    for name in ("index_table", "host_table", "chunk_table"):
        getattr(rig.state, name)[0, 1] = 5
    getattr(rig.state, table)[0, 1] = -1
    rig.batch.seats[0], rig.batch.lengths[0] = 0, 65
    rig.batch.num_real.fill_(1)
    begin_step(rig.state, rig.batch, rig.plans[0])
    assert rig.batch.new_rows[0, 0] == rig.batch.new_index_rows[0] == rig.plans[0].host_page[0] == -1
    assert rig.state.now[0] == 0
    assert rig.state.tripwires[Tripwire.UNGRANTED] == 1
    assert request.length == 64


def test_begin_step_names_an_unfit_tensor() -> None:
    rig, _ = opened()
    with pytest.raises(BadInput, match=r"plan.device_row=int32: got int32\[2, 5\].*places=2, batch=4"):
        begin_step(rig.state, rig.batch, BackupPlan.allocate(5, 2))


# -- setting up and resizing -------------------------------------------------------------------------------------------


def test_adopted_tokens_fill_the_first_slots() -> None:
    rig, request = opened(hot_slots=0, length=150)
    rig.set_mode(request, 128, preload=True)
    assert tokens_in(rig, request, [0, 85, 86]) == [64, 149, -1]
    rig.begin([request])
    rig.swap_in(0, [request], [[63, 64, 149, 150]])
    assert (int(rig.state.hits[0, 0]), int(rig.state.misses[0, 0])) == (3, 1)
    rig.check()


def test_seat_setup_clears_state_of_earlier_owners() -> None:
    rig, request = opened()
    for _ in range(5):
        rig.begin([request])
        rig.swap_in(0, [request], [[3, 50, 98, 99]])
    rig.set_mode(request, 8)
    assert (rig.state.slot_of.view(2, -1, 64)[:, [index for index, _ in request.pages.values()]] == -1).all()
    rig.check()


def test_shrinking_drops_the_highest_slots_and_keeps_the_rest() -> None:
    rig, request = opened(hot_slots=70)
    for _ in range(4):
        rig.begin([request])
        rig.swap_in(0, [request], [[1, 2, 3, 4]])
    held = request.naive[0].held
    rig.resize(request, 5)
    assert request.naive[0].held == {1, 2, 3, 4, 103}, "the tail had wandered to slot 4: it stays there as ordinary"
    assert held > request.naive[0].held
    rig.check()
    rig.begin([request])
    rig.swap_in(0, [request], [[100, 101, 102, 103]])  # the tail rows that were dropped, from the host (I3)
    assert rig.state.misses[0, 0] == 4 + 3
    rig.check()


def test_growing_keeps_every_slot_and_uses_empty_ones_first() -> None:
    rig, request = opened(hot_slots=4)
    rig.begin([request])
    rig.swap_in(0, [request], [[1, 2, 3, 4]])
    held = request.naive[0].held
    rig.resize(request, 64)
    rig.check()
    for _ in range(8):
        rig.begin([request])
        rig.swap_in(0, [request], [rig.random.sample(range(100), 4)])
    assert request.naive[0].held > held, "no token left while slots were empty"
    rig.check()


@pytest.mark.parametrize("sizes", [(8, 64, 8, 130, 4), (4, 70, 0, 4, 0, 128, 5)])
def test_changes_of_size_and_mode_keep_every_byte(sizes: tuple[int, ...]) -> None:
    """SGLang #23239: growing changes every table."""
    rig, request = opened(hot_slots=sizes[0], length=120)
    for size in sizes[1:]:
        for _ in range(6):
            rig.begin([request])
            for group in (0, 1):
                rig.swap_in(group, [request], [rig.random.sample(range(request.length), 4)])
        if size and request.naive[0].hot_slots:
            rig.resize(request, size)
        else:
            rig.set_mode(request, size, preload=True)
        rig.check()
    rig.check_host()


def test_counters_survive_a_resize_and_end_with_the_seat() -> None:
    rig, request = opened()
    rig.begin([request])
    rig.swap_in(0, [request], [[1, 2, 3, 100]])
    rig.resize(request, 64)
    rig.set_mode(request, 8)
    assert (int(rig.state.hits[0, 0]), int(rig.state.misses[0, 0])) == (1, 3)
    clear_seat(rig.state, 0)
    assert not rig.state.hits.any()
    assert not rig.state.misses.any()
    assert rig.state.hot_slots[0] == -1
    assert all((table[0] == -1).all() for table in (rig.state.index_table, rig.state.host_table, rig.state.chunk_table))


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("hot_slots", lambda state: init_managed(state, 0, 0, 0, 0)),
        ("hot_slots", lambda state: init_managed(state, 0, 32_769, 0, 0)),
        ("hot_slots", lambda state: init_managed(state, 0, 16 * 64, 0, 0)),
        ("first_token, tokens", lambda state: init_managed(state, 0, 8, 0, 9)),
        ("first_token, tokens", lambda state: init_managed(state, 0, 8, 32, 4)),
        ("first_token, tokens", lambda state: init_managed(state, 0, 8, -64, 4)),
        ("first_token, tokens", lambda state: init_managed(state, 0, 8, 16 * 64, 1)),
        ("hot_slots", lambda state: shrink_managed(state, 0, 8, 8)),
        ("hot_slots", lambda state: grow_managed(state, 0, 8, 10)),
        ("hot_slots", lambda state: grow_managed(state, 0, 8, 16 * 64)),
        ("seat", lambda state: init_managed(state, 3, 8, 0, 0)),
        ("seat", lambda state: grow_managed(state, -1, 8, 64)),
        ("seat", lambda state: clear_seat(state, 3)),
    ],
)
def test_impossible_sizes_are_refused_by_name(field: str, call: Callable[[DeviceState], None]) -> None:
    rig, request = opened()
    with pytest.raises(BadInput) as caught:
        call(rig.state)
    assert caught.value.field == field
    assert len(request.chunks) == managed_chunks(8)
    rig.check()


@pytest.mark.parametrize(
    ("wire", "call"),
    [
        (Tripwire.UNGRANTED, lambda state: init_managed(state, 0, 129, 0, 0)),
        (Tripwire.UNGRANTED, lambda state: init_managed(state, 0, 8, 128, 4)),
        (Tripwire.UNGRANTED, lambda state: grow_managed(state, 0, 8, 300)),
        (Tripwire.SEAT, lambda state: grow_managed(state, 0, 9, 64)),
        (Tripwire.SEAT, lambda state: shrink_managed(state, 0, 9, 4)),
        (Tripwire.SEAT, lambda state: shrink_managed(state, 1, 8, 4)),
    ],
)
def test_state_that_differs_from_the_device_trips(wire: Tripwire, call: Callable[[DeviceState], None]) -> None:
    """What only the device knows: chunks and pages granted, and the size that the buffer really has."""
    rig, request = opened()
    rig.begin([request])
    rig.swap_in(0, [request], [[1, 2, 3, 4]])
    tables = (rig.state.slot_of, rig.state.slot_token, rig.state.stamp, rig.state.tail, rig.state.hot_slots)
    before = [table.clone() for table in tables]
    call(rig.state)
    assert rig.state.tripwires.tolist() == [int(wire == place) for place in range(len(Tripwire))]
    for old, new in zip(before, tables, strict=True):
        assert torch.equal(old, new)
    rig.check()


@pytest.mark.parametrize(
    "call",
    [
        lambda state: init_managed(state, 0, 8, 0, 4),
        lambda state: init_resident(state, 0),
        lambda state: shrink_managed(state, 0, 8, 4),
        lambda state: grow_managed(state, 0, 8, 64),
        lambda state: hold_tokens(state, 0, 8, *(torch.tensor([place]) for place in (0, 1, 2))),
        lambda state: clear_seat(state, 0),
    ],
)
def test_resize_clears_the_eviction_queue(call: Callable[[DeviceState], None]) -> None:
    """A list names the oldest slots by their stamps; what sets stamps anew, or adds slots, leaves none of it true."""
    rig, _ = opened()
    rig.state.eviction_queue.fill_(3)
    call(rig.state)
    assert bool((rig.state.eviction_queue[:, 0] == -1).all())
    assert bool((rig.state.eviction_queue[:, 1:] == 3).all())


def test_shrinking_without_a_chunk_trips_and_leaves_the_seat() -> None:
    rig, _ = opened()
    rig.state.chunk_table[0, 1] = -1
    shrink_managed(rig.state, 0, 8, 4)
    assert rig.state.tripwires[Tripwire.UNGRANTED] == 1
    assert rig.state.hot_slots[0] == 8


def test_resize_of_a_resident_seat_is_refused() -> None:
    rig, _ = opened(hot_slots=0)
    for call in (shrink_managed, grow_managed):
        with pytest.raises(WrongState, match="not managed"):
            call(rig.state, 0, 0, 64)
    init_resident(rig.state, 0)
    check_state(rig.state, 0, 100)


def test_allocation_refuses_foreign_pools_and_missing_chunks() -> None:
    geometry = Geometry(2, 24, (0, 1), 8, 4)
    sizes: dict[str, Any] = dict.fromkeys(("seats", "chunks", "index_pages"), 2)
    sizes |= dict.fromkeys(("max_pages", "max_chunks", "slab_pages"), 2)
    with pytest.raises(BadInput, match=r"host=uint8: got uint8\[3, 77\].*host_pages=3, 4096\]"):
        DeviceState.allocate(geometry, **sizes, tail_slots=1, host=torch.zeros(3, 77, dtype=torch.uint8))
    host = torch.zeros(3, geometry.page_bytes, dtype=torch.uint8)
    with pytest.raises(BadInput, match="tail_slots=17: out of range"):
        DeviceState.allocate(geometry, **sizes, tail_slots=17, host=host)
    assert DeviceState.allocate(geometry, **sizes, tail_slots=16, host=host).seats == 2
    assert StepBatch.allocate(3, 2).new_rows.shape == (2, 3)


# -- check_state -------------------------------------------------------------------------------------------------------


def corrupt_slot_of(rig: Rig, request: Request) -> None:
    rig.state.slot_of[1, request.pages[0][0] * 64 + 1] = 6


def corrupt_slot_token(rig: Rig, request: Request) -> None:
    rig.state.slot_token[0, request.chunks[0] * 64] = 77


def corrupt_future_token(rig: Rig, request: Request) -> None:
    rig.state.slot_token[0, request.chunks[0] * 64] = 103


def corrupt_stamp(rig: Rig, request: Request) -> None:
    rig.state.stamp[0, request.chunks[0] * 64] = 99


def corrupt_empty_stamp(rig: Rig, request: Request) -> None:
    rig.state.stamp[0, request.chunks[0] * 64 + 7] = 1


def corrupt_tail(rig: Rig, _: Request) -> None:
    rig.state.tail[0, 0, 1] = rig.state.tail[0, 0, 2]


def corrupt_tail_age(rig: Rig, _: Request) -> None:
    rig.state.tail[0, 0] = rig.state.tail[0, 0].roll(1)


def corrupt_chunk(rig: Rig, _: Request) -> None:
    rig.state.chunk_table[0, 1] = rig.state.chunk_table[0, 0]


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (corrupt_slot_of, "group 1: .*tokens are mapped"),
        (corrupt_slot_token, "group 0: tokens .* are not found"),
        (corrupt_future_token, "at or beyond 103"),
        (corrupt_stamp, "stamp outside"),
        (corrupt_empty_stamp, "an empty slot has a stamp"),
        (corrupt_tail, "serves two tail places"),
        (corrupt_tail_age, "tail place 0 holds token"),
        (corrupt_chunk, "held twice"),
    ],
)
@pytest.mark.mutation
def test_check_state_sees_each_kind_of_damage(corrupt: Callable[[Rig, Request], None], message: str) -> None:
    rig, request = opened(topk=2)
    for _ in range(3):
        rig.begin([request])
        rig.swap_in(0, [request], [[2, 3]])
    rig.check()
    corrupt(rig, request)
    with pytest.raises(InternalError, match=f"seat=0: .*{message}"):
        check_state(rig.state, 0, request.length)
