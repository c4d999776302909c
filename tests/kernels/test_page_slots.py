"""Slots that hold a page, heads that select for themselves and dense layers, over whole lives of requests: against
naive lists and a hash for every row (I3, I6)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.begin_step import begin_step
from kernels.layout import DENSE, Geometry
from kernels.rows import copy_slab_pages, gather_rows, read_dense_rows, write_slab_rows
from kernels.seat import shrink_managed
from kernels.state import DeviceState, Tripwire
from kernels.swap_in import replay_misses
from protocol.errors import BadInput
from tests.support.kernel_rig import Request, Rig

LIVES = settings(max_examples=60)
SHAPES = st.fixed_dictionaries(
    {
        "groups": st.sampled_from([(0,), (DENSE, 0), (DENSE, DENSE, 0, 0, 1)]),
        "heads": st.integers(1, 3),
        "split": st.sampled_from([0, 2]),
        "slot_tokens": st.sampled_from([64, 64, 64, 1]),
        "seat_rows": st.sampled_from([1, 1, 5]),
        "topk": st.integers(2, 4),
        "seed": st.integers(0, 2**32),
    }
)
ACTIONS = st.lists(st.sampled_from(["step"] * 10 + ["resize", "remode", "reopen"]), min_size=4, max_size=14)


def paged_rig(*, heads: int = 2, seat_rows: int = 1, slot_tokens: int = 64, **sizes: Any) -> Rig:
    sizes = {"groups": (0,), "tail_slots": 2 if slot_tokens > 1 else 2 * seat_rows, **sizes}
    shape = {"row_bytes": 6 * heads, "index_row_bytes": 4, "pages": 64}
    return Rig(heads=heads, seat_rows=seat_rows, slot_tokens=slot_tokens, **shape, **sizes)


def draw_length(rig: Rig) -> int:
    """Lengths about the ends of pages."""
    return 64 * rig.random.randrange(6) + rig.random.choice([0, 1, 30, 62, 63])


def draw_hot_slots(rig: Rig) -> int:
    k = rig.geometry.topk
    return rig.random.choice([k, k + 1, 2 * k, 7] if rig.geometry.slot_tokens > 1 else [k, 2 * k + 5, 64, 70])


def draw_topk(rig: Rig, position: int) -> list[int]:
    """Units in any order: the newest, others, duplicates, padding; now and then out of range."""
    k, count = rig.geometry.topk, position // rig.geometry.slot_tokens + 1
    pool = [count - 1, max(0, count - 2), *(rig.random.randrange(count) for _ in range(k)), -1]
    odd = [-1, -2, count, count + 3]
    return [rig.random.choice(odd) if rig.random.random() < 0.1 else rig.random.choice(pool) for _ in range(k)]


def step(rig: Rig) -> None:
    requests = [r for r in rig.requests.values() if rig.random.random() < 0.8]
    rig.begin(requests)
    for selection in range(rig.geometry.selections):
        rig.swap_in(selection, requests, [draw_topk(rig, position) for _, _, position in rig.placed])
    for request in requests:
        rig.accept(request, rig.random.randint(min(1, rig.acceptable(request)), rig.acceptable(request)))


def act(rig: Rig, action: str) -> None:
    request = rig.random.choice(list(rig.requests.values()))
    if action == "step":
        step(rig)
    elif action == "resize" and request.naive[0].hot_slots:
        rig.resize_about(request, draw_hot_slots(rig))
    elif action == "reopen":
        rig.close(request)
        rig.open(request.seat, draw_length(rig), draw_hot_slots(rig))
    else:
        resident = rig.random.random() < 0.3
        rig.set_mode(request, 0 if resident else draw_hot_slots(rig), preload=rig.random.random() < 0.5)


@LIVES
@given(shape=SHAPES, actions=ACTIONS)
def test_each_head_finds_its_units_and_every_byte(shape: dict[str, Any], actions: list[str]) -> None:
    rig = paged_rig(**shape)
    for seat in range(3):
        rig.open(seat, draw_length(rig), 0 if seat == 2 else draw_hot_slots(rig), preload=seat == 1)
    for action in actions:
        act(rig, action)
        rig.check()
    rig.check_host()


def begun(length: int = 200, hot_slots: int = 3, **sizes: Any) -> tuple[Rig, Request]:
    rig = paged_rig(topk=3, **sizes)
    request = rig.open(0, length, hot_slots)
    rig.begin([request])
    return rig, request


def test_heads_of_a_group_load_and_evict_apart() -> None:
    rig, request = begun()
    rig.swap_in(0, [request], [[0, 1, 3]])
    rig.swap_in(1, [request], [[2, 1, 3]])
    assert [naive.held for naive in request.naive] == [{0, 1, 3}, {1, 2, 3}]
    assert rig.state.misses[:, 0].tolist() == [2, 2]
    assert rig.state.hits[:, 0].tolist() == [1, 1]


def test_the_planes_of_other_heads_stay_as_they_are() -> None:
    rig, request = begun()
    before = [plane.clone() for plane in rig.state.planes]
    rig.swap_in(1, [request], [[0, 1, 2]])
    assert [torch.equal(old, new) for old, new in zip(before, rig.state.planes, strict=True)] == [True, False]


def test_a_page_stays_in_the_tail_until_its_last_row_is_long_backed_up() -> None:
    """Two newest pages are no victims; of the others the least recently used goes."""
    rig, request = begun(length=126, hot_slots=3)
    for _ in range(3):  # page 2 begins
        rig.swap_in(0, [request], [[0, 1, -1]])
        rig.swap_in(1, [request], [[0, -1, -1]])
        rig.begin([request])
    assert {1, 2} <= request.naive[1].held  # in the tail, though head 1 did not select it
    rig.check()


def test_backups_as_late_as_they_may_be_are_done_before_their_page_goes() -> None:
    """Page 5 ends at position 383 and leaves the tail with 448; from then on it may be evicted, and loaded again."""
    rig = paged_rig(topk=2, heads=1)
    request = rig.open(0, 380, 2)
    while request.length < 449:
        rig.begin([request])
    for chosen in ([0, 1], [2, 3], [5, 4]):
        rig.swap_in(0, [request], [chosen])
        rig.begin([request])
    assert rig.state.misses[0, 0] == 6
    rig.check_host()


def test_a_page_that_is_not_loaded_is_not_written() -> None:
    """Its slot would lack the rows before: the row is refused, and nothing changes."""
    rig = paged_rig(topk=3)
    request = rig.open(0, 100, 3)
    rig.state.slot_token[1, rig.state.slot_token[1] == 1] = -1  # of the second head
    now = int(rig.state.now[0])
    rig.batch.seats[0], rig.batch.lengths[0], rig.batch.num_real[0] = 0, request.length + 1, 1
    begin_step(rig.state, rig.batch, rig.plans[0])
    assert rig.state.tripwires[Tripwire.UNGRANTED] == 1
    assert (rig.batch.new_rows[:, 0] == -1).all()
    assert rig.state.now[0] == now


def test_buffers_of_pages_do_not_shrink() -> None:
    rig, _ = begun(hot_slots=7)
    with pytest.raises(BadInput, match="slots of a page cannot go"):
        shrink_managed(rig.state, 0, 7, 4)


def test_replayed_copies_are_those_of_one_head() -> None:
    rig, _ = begun()
    with pytest.raises(BadInput, match="head=2"):
        replay_misses(rig.state, 0, rig.miss_plan, 2)


def test_rows_of_a_dense_layer_go_from_the_slab_to_index_pages() -> None:
    rig = paged_rig(groups=(DENSE, 0), topk=3)
    request = rig.open(0, 100, 0)
    rig.state.slab_table[0, :2] = torch.tensor([5, 3], dtype=torch.int32)
    rows = torch.randint(0, 256, (100, 6), dtype=torch.uint8)
    for plane in range(2):
        write_slab_rows(rig.state, 0, 0, 0, rows + plane, plane)
    pages = torch.tensor([request.pages[page][0] for page in range(2)])
    copy_slab_pages(rig.state, 0, torch.tensor([5, 3]), pages)
    for plane in range(2):
        assert torch.equal(read_dense_rows(rig.state, 0, 0, 100, plane), rows + plane)


def test_layers_that_select_are_not_read_as_dense_ones_nor_the_reverse() -> None:
    rig = paged_rig(groups=(DENSE, 0))
    with pytest.raises(BadInput, match="layer=1"):
        read_dense_rows(rig.state, 1, 0, 0)
    with pytest.raises(BadInput, match="layer=-1"):
        gather_rows(rig.state, 0, torch.zeros(1, 1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"heads": 5}, "has not as many equal parts"),
        ({"slot_tokens": 128}, "a slot holds 1 token or 64"),
        ({"group_of_layer": (0, DENSE, 1)}, "numbered in layer order"),
        ({"group_of_layer": (DENSE,) * 3}, "numbered in layer order"),
        ({"split": 8}, "a row of 8 bytes parts after 1 to 7"),
    ],
)
def test_shapes_that_no_row_has_are_refused(change: dict[str, Any], why: str) -> None:
    shape = {"layers": 3, "row_bytes": 16, "group_of_layer": (DENSE, 0, 1), "index_row_bytes": 4, "topk": 2, "heads": 2}
    Geometry(**shape)
    with pytest.raises(ValueError, match=why):
        Geometry(**shape | change)


def test_bytes_of_minimax_m3() -> None:
    """Published sizes of MiniMax-M3 in bfloat16: 60 layers of 4 heads of K and V, 128 values each, 3 of them dense."""
    m3 = Geometry(60, 2048, (DENSE,) * 3 + tuple(range(57)), 256, 32, 256, 4, 64)
    assert m3.page_bytes == 64 * (122_880 + 57 * 256)
    assert m3.chunk_bytes == 57 * 131_072 + 8 * 57 * 4
    assert m3.index_page_bytes == 64 * (57 * 256 + 3 * 2048) + 2 * 57 * 4
    assert m3.row_format == "60 layers of 4 times 256|256 bytes, 57 index groups of 256"
    assert m3.planes == (256,) * 8


def test_a_gpu_has_no_kernels_for_them_yet() -> None:
    with pytest.raises(BadInput, match="allocate the state on a CPU"):
        DeviceState.allocate(
            Geometry(1, 8, (0,), 4, 2, heads=2),
            **{"seats": 1, "chunks": 1, "index_pages": 1, "max_pages": 1, "max_chunks": 1, "slab_pages": 1},
            tail_slots=2,
            host=torch.empty(0),
            device="cuda",
        )
