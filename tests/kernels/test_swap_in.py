"""swap_in and begin_step over whole lives of requests, against naive lists and a hash for every row (I3, I6)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.begin_step import begin_step
from kernels.state import MissPlan, Tripwire
from kernels.swap_in import replay_misses, swap_in
from protocol.errors import BadInput
from tests.support.kernel_rig import POISON, Request, Rig

LIVES = settings(max_examples=120)

SHAPES = st.fixed_dictionaries(
    {
        "groups": st.sampled_from([(0,), (0, 1), (0, 0, 1), (0, 1, 1, 1)]),
        "row_bytes": st.sampled_from([2, 3, 5, 7, 8, 13, 16, 20, 36, 64]),
        "split": st.sampled_from([0, 0, 1]),
        "index_row_bytes": st.sampled_from([1, 4, 6, 8]),
        "tail_slots": st.integers(1, 5),
        "topk": st.integers(1, 9),
        "seed": st.integers(0, 2**32),
    }
)
ACTIONS = st.lists(st.sampled_from(["step"] * 8 + ["resize"] * 2 + ["remode", "reopen"]), min_size=4, max_size=14)


def draw_hot_slots(rig: Rig) -> int:
    k = rig.geometry.topk
    return rig.random.choice([k, k + 1, k + 3, 2 * k + 5, 64, 70, 128])


def draw_topk(rig: Rig, request: Request) -> list[int]:
    """Any order, duplicates, padding, out of range; often near the newest tokens, or the same few."""
    k, length = rig.geometry.topk, request.length
    pool = [rig.random.randrange(length) for _ in range(k)] + list(range(max(0, length - k), length)) + [0, 1 % length]
    odd = [-1, -1, -2, -(2**31), length, length + 70, 2**31 - 1]
    return [rig.random.choice(odd) if rig.random.random() < 0.15 else rig.random.choice(pool) for _ in range(k)]


def step(rig: Rig) -> None:
    requests = [r for r in rig.requests.values() if rig.random.random() < 0.8]
    rig.random.shuffle(requests)
    rig.begin(requests)
    for group in range(rig.geometry.groups):
        rig.swap_in(group, requests, [draw_topk(rig, request) for request in requests])


def act(rig: Rig, action: str) -> None:
    request = rig.random.choice(list(rig.requests.values()))
    if action == "step":
        step(rig)
    elif action == "resize" and request.naive[0].hot_slots:
        rig.resize_about(request, draw_hot_slots(rig))
    elif action == "reopen":
        rig.close(request)
        rig.open(request.seat, rig.random.randrange(150), draw_hot_slots(rig))
    else:
        resident = rig.random.random() < 0.5
        rig.set_mode(request, 0 if resident else draw_hot_slots(rig), preload=rig.random.random() < 0.7)


@LIVES
@given(shape=SHAPES, actions=ACTIONS)
def test_mixed_requests_match_naive_lru_and_every_byte(shape: dict[str, object], actions: list[str]) -> None:
    """SGLang #31901, #36331: numbers of host pages, index pages, chunks, layers and groups are never mistaken."""
    rig = Rig(**shape)  # type: ignore[arg-type]
    for seat in range(3):
        rig.open(seat, rig.random.randrange(150), 0 if seat == 2 else draw_hot_slots(rig), preload=seat == 1)
    for action in actions:
        act(rig, action)
        rig.check()
    rig.check_host()


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), hot=st.sampled_from([4, 5, 8, 64]), tail_slots=st.integers(1, 4))
def test_exactly_as_many_slots_as_topk_always_find_victims(seed: int, hot: int, tail_slots: int) -> None:
    rig = Rig(groups=(0,), topk=4, tail_slots=tail_slots, seed=seed)
    request = rig.open(0, 100, hot)
    for _ in range(12):
        rig.begin([request])
        rig.swap_in(0, [request], [rig.random.sample(range(request.length), 4)])
    rig.check()


def managed_rig(**changes: object) -> tuple[Rig, Request]:
    rig = Rig(**{"groups": (0,), "topk": 4, **changes})  # type: ignore[arg-type]
    request = rig.open(0, 100, 8)
    rig.begin([request])
    return rig, request


def test_duplicates_share_a_load_and_a_row() -> None:
    rig, request = managed_rig()
    out = rig.swap_in(0, [request], [[7, 7, -1, 7]])
    assert len({int(out[0, column]) for column in (0, 1, 3)}) == 1
    assert int(rig.miss_plan.count.sum()) == 1
    assert rig.state.misses[0, 0] == 1


def test_second_use_hits_and_recent_use_survives() -> None:
    rig, request = managed_rig()
    rig.swap_in(0, [request], [[1, 2, 3, 4]])
    rig.begin([request])
    rig.swap_in(0, [request], [[1, 2, 5, 6]])
    rig.begin([request])
    rig.swap_in(0, [request], [[7, 8, 9, -1]])  # one slot was empty: evicts 3 and 4, the oldest
    assert request.naive[0].held & {1, 2, 3, 4, 5, 6} == {1, 2, 5, 6}
    rig.check()


def test_newest_rows_are_not_read_from_host_before_backup() -> None:
    """I3: with the backup T steps late, rows still only on the device are hits; later misses find them on the host."""
    rig, request = managed_rig(tail_slots=3)
    for _ in range(10):
        newest = request.length - 1
        rig.swap_in(0, [request], [[newest, newest - 1, newest - 2, 0]])
        assert int(rig.read_host("row", 0, request, newest)[0]) == POISON
        rig.begin([request])
    rig.swap_in(0, [request], [[100, 101, 102, 103]])
    assert rig.state.misses.sum() > 0
    rig.check()


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_lengths_and_seats_of_either_width(integer: torch.dtype) -> None:
    rig = Rig(groups=(0,), topk=4)
    rig.batch.seats, rig.batch.lengths = rig.batch.seats.to(integer), rig.batch.lengths.to(integer)
    request = rig.open(1, 70, 8)
    rig.begin([request])
    rig.swap_in(0, [request], [[69, 70, 0, -1]])
    rig.check()


def test_padding_rows_write_every_entry_and_change_nothing() -> None:
    """I6; SGLang #32483: entries of padded rows."""
    rig, _ = managed_rig()
    before = rig.state.slot_token.clone(), rig.state.now.clone()
    rig.begin([])
    rig.swap_in(0, [], [])
    assert torch.equal(before[0], rig.state.slot_token)
    assert torch.equal(before[1], rig.state.now)


def test_out_of_range_positions_trip_and_touch_nothing() -> None:
    """I6: -1 and positions at or beyond the length give -1, every time. SGLang #32771, #32483."""
    rig, request = managed_rig()
    before = rig.state.rows.clone(), rig.state.slot_of.clone(), rig.state.stamp.clone()
    out = rig.swap_in(0, [request], [[request.length, -2, 2**31 - 1, -(2**31)]])
    assert out[0].tolist() == [-1] * 4
    assert rig.state.tripwires.tolist() == [4, 0, 0, 0]
    for old, new in zip(before, (rig.state.rows, rig.state.slot_of, rig.state.stamp), strict=True):
        assert torch.equal(old, new)


def run(rig: Rig, topk: list[int]) -> list[int]:
    """swap_in for the first row without the rig's checks: for inputs that a sound worker never gives."""
    table = torch.full((rig.batch.seats.shape[0], rig.geometry.topk), -1, dtype=torch.int32)
    table[0] = torch.tensor(topk)
    out = torch.full_like(table, 777)
    swap_in(rig.state, 0, table, rig.batch, out, rig.miss_plan)
    return out[0].tolist()


def test_ungranted_pages_trip_instead_of_reading_foreign_memory() -> None:
    rig, _ = managed_rig()
    rig.state.host_table[0, 0] = -1
    rig.state.index_table[0, 1] = -1
    assert run(rig, [5, 70, 71, -1]) == [-1] * 4
    assert rig.state.tripwires[Tripwire.UNGRANTED] == 3
    assert rig.state.misses.sum() == 0


@pytest.mark.parametrize("hot_slots", [0, 8])
def test_length_beyond_the_tables_trips(hot_slots: int) -> None:
    rig = Rig(groups=(0,), topk=4)
    rig.open(0, 16 * 64, hot_slots)
    rig.batch.seats[0], rig.batch.lengths[0] = 0, 2_000_000
    rig.batch.num_real.fill_(1)
    assert [row >= 0 for row in run(rig, [16 * 64, 1_999_999, 16 * 64 - 1, -1])] == [False, False, True, False]
    assert rig.state.tripwires[Tripwire.UNGRANTED] == 2


def test_resident_request_reads_only_the_chunk_table() -> None:
    rig = Rig(groups=(0,), topk=4)
    request = rig.open(0, 130, 0)
    rig.begin([request])
    rig.state.index_table[0] = -1
    rig.state.host_table[0] = -1
    assert run(rig, [130, 64, 0, 64]) == [request.chunks[t // 64] * 64 + t % 64 for t in (130, 64, 0, 64)]
    assert (int(rig.state.hits.sum()), int(rig.state.misses.sum())) == (4, 0)
    rig.state.chunk_table[0, 1] = -1
    assert run(rig, [130, 64, 0, -1])[1] == -1
    assert rig.state.tripwires.tolist() == [0, 1, 0, 0]


def test_more_misses_than_victims_trip_and_keep_tables_sound() -> None:
    """vLLM: rows of one step that evict each other."""
    rig = Rig(groups=(0,), topk=8, tail_slots=2)
    request = rig.open(0, 100, 5)
    rig.begin([request])
    got = run(rig, [1, 2, 3, 4, 5, 6, 7, 100])
    assert [row >= 0 for row in got] == [True] * 5 + [False] * 2 + [True]
    assert rig.state.tripwires[Tripwire.VICTIMS] == 2
    assert rig.state.misses[0, 0] == 5
    rig.begin([request])
    got = run(rig, [20, 21, 22, 23, 24, 1, 2, 3])
    assert [row >= 0 for row in got] == [True] * 2 + [False] * 3 + [True] * 3, "slots used by this step are kept"
    for token, row in zip([1, 2, 3], got[5:], strict=True):
        assert torch.equal(rig.state.rows[0, row], rig.truth("row", 0, request, token))


def test_empty_seat_and_bad_length_trip_and_give_minus_one() -> None:
    rig, request = managed_rig()
    for seat, length in ((2, 50), (-1, 50), (9, 50), (0, 0)):
        rig.batch.seats[0], rig.batch.lengths[0] = seat, length
        before = rig.state.now.clone()
        begin_step(rig.state, rig.batch, rig.plans[0])
        assert rig.batch.new_rows[:, 0].tolist() == [-1]
        assert run(rig, [1, 2, 3, 4]) == [-1] * 4
        assert torch.equal(before, rig.state.now)
    assert rig.state.tripwires.tolist() == [0, 0, 0, 4]
    assert request.length == 101


@pytest.mark.parametrize(
    ("row_bytes", "split"),
    [
        *((size, 0) for size in (*range(1, 18), 196, 320, 576, 584, 656, 1152)),
        (2, 1),
        (3, 2),
        (20, 13),
        (584, 512),
        (512, 256),
    ],
)
def test_rows_of_any_byte_count_and_plane_count(row_bytes: int, split: int) -> None:
    """No tail of 1 to 7 bytes stays behind, in every layer of the group and every plane. SGLang #22131."""
    rig = Rig(groups=(0, 0), row_bytes=row_bytes, split=split, topk=5)
    request = rig.open(0, 40, 6)
    for _ in range(3):
        rig.begin([request])
        rig.swap_in(0, [request], [rig.random.sample(range(request.length), 5)])
    rig.check()
    rig.check_host()


@pytest.mark.parametrize("split", [-1, 24, 30])
def test_a_row_parts_inside_itself(split: int) -> None:
    with pytest.raises(ValueError, match="1 to 23"):
        Rig(split=split)


def test_million_tokens_with_bookkeeping_of_pages_held() -> None:
    """1,048,576 positions: three pages granted, slot maps and index keys for six."""
    length = 1_048_576 - 3
    rig = Rig(groups=(0, 1), topk=6, pages=6, chunks=4, max_pages=16_384, max_chunks=4, tail_slots=2)
    request = rig.open(0, length, 6, first_page=16_382)
    for _ in range(3):
        rig.begin([request])
        for group in (0, 1):
            rig.swap_in(
                group, [request], [[request.length - 1, 0, 63, 16_382 * 64, request.length - 40, request.length]]
            )
    assert request.length == 1_048_576
    assert rig.state.slot_of.numel() == 2 * 6 * 64
    assert rig.state.misses[0, 0] > 0


def test_slot_numbers_beyond_an_int16() -> None:
    """The largest size class: slots 32768 and above are held as the bit pattern of a uint16."""
    rig = Rig(groups=(0,), topk=2, row_bytes=1, index_row_bytes=1, chunks=514, pages=2, max_chunks=513, max_pages=4)
    request = rig.open(0, 40, 32_768)
    for ring in range(2):
        rig.begin([request])
        out = rig.swap_in(0, [request], [[40, request.length - 1]])
        assert out[0].tolist() == [request.chunks[512] * 64, request.chunks[512] * 64 + ring]
    rig.check()


def test_largest_topk() -> None:
    rig = Rig(groups=(0,), topk=4096, row_bytes=8, chunks=70, pages=70, max_chunks=66, max_pages=70, batch=2)
    request = rig.open(0, 4_400, 4_096)
    for _ in range(2):
        rig.begin([request])
        rig.swap_in(0, [request], [rig.random.sample(range(request.length), 4_096)])
    rig.check()


def test_replay_repeats_copies_in_another_layer_only() -> None:
    rig = Rig(groups=(0, 0), topk=4)
    request = rig.open(0, 100, 8)
    rig.begin([request])
    untouched = rig.state.rows[1].clone()
    assert -1 not in run(rig, [1, 2, 3, 4])
    assert torch.equal(untouched, rig.state.rows[1])
    replay_misses(rig.state, 1, rig.miss_plan)
    changed = (untouched != rig.state.rows[1]).any(1).nonzero().flatten().tolist()
    assert changed == sorted(rig.miss_plan.device_row[rig.miss_plan.count > 0].flatten().tolist())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("topk", {"topk": torch.zeros(4, 4, dtype=torch.int64)}),
        ("topk", {"topk": torch.zeros(4, 4097, dtype=torch.int32)}),
        ("out_rows", {"out_rows": torch.zeros(4, 5, dtype=torch.int32)}),
        ("out_rows", {"out_rows": torch.zeros(4, 8, dtype=torch.int32)[:, ::2]}),
        ("plan.device_row", {"plan": MissPlan.allocate(3, 4)}),
        ("selection", {"selection": 1}),
    ],
)
def test_unfit_arguments_are_named_before_any_change(name: str, change: dict[str, object]) -> None:
    rig, _ = managed_rig()
    call = {
        "selection": 0,
        "topk": torch.zeros(4, 4, dtype=torch.int32),
        "batch": rig.batch,
        "out_rows": torch.zeros(4, 4, dtype=torch.int32),
        "plan": rig.miss_plan,
        **change,
    }
    if name == "topk" and call["topk"].shape[1] > 4:  # type: ignore[attr-defined]
        call["out_rows"] = torch.zeros(4, 4097, dtype=torch.int32)
    before = rig.state.slot_token.clone()
    with pytest.raises(BadInput) as caught:
        swap_in(rig.state, **call)  # type: ignore[arg-type]
    assert caught.value.field == name
    assert torch.equal(before, rig.state.slot_token)
