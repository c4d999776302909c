"""Every kernel on the GPU against its CPU reference, from equal states: sets, counters, tables, bytes."""

from __future__ import annotations

import os

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kernels.begin_step import begin_step  # noqa: E402
from kernels.state import BackupPlan, MissPlan, StepBatch  # noqa: E402
from kernels.swap_in import swap_in  # noqa: E402
from tests.gpu.scenarios import (  # noqa: E402
    DRAFT_SIZES,
    FILLED_SIZES,
    FULL_SIZES,
    SHRUNK_SIZES,
    TOPK,
    draft_finds_every_slot_in_use,
    goes_draft_steps,
    goes_round,
    misses_on_corrupt_host_pages,
    shrinks_between_rejections,
    small_sizes,
    uses_a_queue_for_long,
)
from tests.gpu.twin import Twin, same  # noqa: E402


def draw_topk(twin: Twin, seats: list[int], misses: float = 0.3) -> torch.Tensor:
    """Any order: recent and old tokens, duplicates, padding, positions out of range."""
    k, draw = twin.geometry.topk, twin.random
    rows = []
    for place in range(twin.size):
        length = twin.lengths[seats[place]] if place < len(seats) else 50
        near = range(max(0, length - k), length)
        row = [draw.randrange(length) if draw.random() < misses else draw.choice(near) for _ in range(k)]
        odd = (-1, -1, -2, -(2**31), length, length + 70, 2**31 - 1)
        rows.append([draw.choice(odd) if draw.random() < 0.05 else token for token in row])
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("ranks", [None, 1, 2, 4, 5, 8, 16])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_steps_with_drafts(ranks: int | None, ids: torch.dtype) -> None:
    goes_draft_steps(Twin(17, ranks=ranks, ids=ids, **DRAFT_SIZES), steps=40)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_rejected_draft_rows_in_a_smaller_buffer(ranks: int) -> None:
    shrinks_between_rejections(Twin(18, ranks=ranks, **SHRUNK_SIZES))


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_draft_that_finds_every_slot_in_use_is_rejected(ranks: int) -> None:
    draft_finds_every_slot_in_use(Twin(19, ranks=ranks, **FILLED_SIZES))


def test_ages_beyond_the_bins_still_order_victims() -> None:
    """Stamps further apart than the histogram has bins: both refining passes run."""
    twin = Twin(3, groups=(0,), topk=40, hot_max=192, ranks=2)
    twin.open(0, 500, 192, 192)
    for now, spread in ((1_000_000, 999_000), (5000, 4999), (3000, 950)):
        twin.cpu.now[0] = now
        stamps = torch.randint(now - spread, now - 1, twin.cpu.stamp.shape, generator=twin.torch)
        twin.cpu.stamp.copy_(torch.where(twin.cpu.stamp >= 0, stamps, -1))
        twin.upload()
        batches = twin.begin([0])
        twin.swap_in(0, batches, draw_topk(twin, [0], misses=0.9))
        twin.check()


def test_misses_beyond_victims_trip_and_keep_tables_sound() -> None:
    twin = Twin(5, groups=(0,), topk=100, hot_max=64)
    twin.open(0, 400, 64, 64)
    batches = twin.begin([0])
    topk = torch.arange(200, 300).repeat(4, 1).int()
    out, plan = torch.empty_like(topk).cuda(), MissPlan.allocate(4, 100, "cuda")
    swap_in(twin.gpu, 0, topk.cuda(), batches[1], out, plan)
    assert int((out[0] >= 0).sum()) == 64
    assert int(twin.gpu.tripwires[2]) == 36
    assert int(plan.count[0]) == 64
    twin.adopt()
    twin.check()


@pytest.mark.parametrize("entry", [-2, -(2**31)])
@pytest.mark.parametrize("ranks", [1, 2, 4, 5, 8, 16])
def test_corrupt_host_pages_trip_and_end(ranks: int, entry: int) -> None:
    misses_on_corrupt_host_pages(Twin(ranks, groups=(0,), ranks=ranks, **FULL_SIZES), entry)


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_of_no_seat_give_minus_one_and_trip_no_position(ranks: int) -> None:
    """Rows below num_real whose seat is empty or out of range, or whose length is none: begin_step has counted them."""
    twin = Twin(6, groups=(0,), topk=40, hot_max=64, seats=3, batch=5, ranks=ranks)
    twin.open(0, 401, 64, 64)
    batches = twin.begin_rows([0, 2, -1, 3, 0], [401, 100, 100, 100, 0], 5)
    refused = int(twin.gpu.tripwires[3])
    topk = draw_topk(twin, [0])
    topk[:, :6] = torch.tensor([-2, 401, 2**31 - 1, 5, -1, 6])
    foreign = int(((topk[0] < -1) | (topk[0] >= 401)).sum())
    twin.swap_in(0, batches, topk)
    assert int(twin.gpu.tripwires[0]) == foreign > 0
    assert int(twin.gpu.tripwires.sum()) == foreign + refused
    assert refused == 4


def test_batch_without_begin_step_gives_minus_one() -> None:
    """Its seats and lengths are not looked at: nothing is known of their tables."""
    twin = Twin(6, groups=(0,), topk=40, hot_max=64)
    twin.open(0, 400, 64, 64)
    batch = StepBatch.allocate(4, 1, "cuda")
    batch.seats[0], batch.lengths[0], batch.num_real[0] = 0, 400, 1
    out, plan = torch.zeros(4, 40, dtype=torch.int32, device="cuda"), MissPlan.allocate(4, 40, "cuda")
    swap_in(twin.gpu, 0, torch.zeros_like(out), batch, out, plan)
    assert bool((out == -1).all())
    assert plan.count.tolist() == [0] * 4
    twin.check()


@pytest.mark.parametrize("ranks", [1, 2, 4, 5, 16])
@pytest.mark.parametrize("hot", [0, 128])
def test_duplicates_of_misses_meet_wherever_they_stand(ranks: int, hot: int) -> None:
    """One token at many places, in one block and in several, loaded and counted once."""
    twin = Twin(ranks, groups=(0,), topk=1024, hot_max=1088, max_tokens=2048, ranks=ranks)
    for seat, size in enumerate((1024, 1030, hot and 1088)):
        twin.open(seat, 2000, size, 700)
    for distinct in (1, 7, 300):
        batches = twin.begin([1, 0, 2])
        twin.write_new_rows(batches[0])
        topk = torch.randint(0, 2000, (4, distinct), generator=twin.torch)
        topk = topk.gather(1, torch.randint(0, distinct, (4, 1024), generator=twin.torch)).int()
        twin.swap_in(0, batches, topk)
        twin.check()


@pytest.mark.parametrize(("ranks", "refill_blocks"), [(1, False), (4, False), (4, True), (5, True), (16, True)])
def test_queue_gives_victims_in_order(ranks: int, refill_blocks: bool) -> None:
    """Exact LRU from the queue, also when it runs out."""
    twin = Twin(20 + ranks, groups=(0,), ranks=ranks, refill_blocks=refill_blocks, **small_sizes(1088))
    uses_a_queue_for_long(twin, steps=70)


@pytest.mark.parametrize("refill_blocks", [False, True])
@pytest.mark.parametrize(
    ("ranks", "hot_slots", "tokens", "misses"),
    [
        (16, 4096, 4096, (410,)),  # nearly all of a queue in a step
        (2, 4096, 4096, (20,)),  # slots of more steps than are added at once
        (8, 9400, 9000, (150, 0, 0, 3)),  # steps apart
        (5, 20_000, 12_000, (150, 20)),  # more slots than a block has room for, but a refill block
        (2, 700, 700, (512, 100, 30)),  # more than a queue has left, and all that may go
        (4, 600, 600, (1,) * 40 + (60,)),  # a stamp of each slot
    ],
)
def test_queue_is_refilled_across_steps(
    ranks: int, hot_slots: int, tokens: int, misses: tuple[int, ...], refill_blocks: bool
) -> None:
    """Queues that hold slots of many steps, and of none."""
    length = max(14_000, hot_slots + 5_000)
    sizes = {"hot_max": hot_slots + 72, "max_tokens": length + 200}
    twin = Twin(ranks, groups=(0,), row_bytes=16, topk=TOPK, ranks=ranks, refill_blocks=refill_blocks, **sizes)
    twin.open(0, length, hot_slots, tokens)
    goes_round(twin, length, misses, steps=90)


@pytest.mark.parametrize("direction", ["to_host", "to_device", "keys"])
@pytest.mark.parametrize(
    ("row_bytes", "split", "index_row_bytes"),
    [
        (656, 0, 132),
        (1152, 0, 256),
        (196, 0, 132),
        (320, 0, 132),
        (13, 0, 7),
        (584, 512, 8),
        (26, 13, 1),
        (512, 256, 4),
    ],
)
@pytest.mark.parametrize("n", [1, 5, 150])
def test_copies_of_all_layers(direction: str, row_bytes: int, split: int, index_row_bytes: int, n: int) -> None:
    """SGLang #22131: rows of any byte count."""
    twin = Twin(n, row_bytes=row_bytes, split=split, index_row_bytes=index_row_bytes)
    groups, arena = twin.geometry.groups, twin.cpu.rows.shape[1]
    places = torch.randperm(twin.cpu.host.shape[0] * 64, generator=twin.torch)[:n]
    page = places // 64
    page[::4] = -1
    arguments = {
        "index_row": torch.randperm(twin.cpu.index_keys.shape[1], generator=twin.torch)[:n],
        "host_page": page.int(),
        "host_offset": places % 64,
    }
    if direction != "keys":
        rows = [torch.randperm(arena, generator=twin.torch)[:n].int() for _ in range(groups)]
        arguments["device_row"] = torch.stack(rows)
        twin.copy({**arguments, "index_row": None}, direction)
    twin.copy(arguments, direction)


@pytest.mark.parametrize(("row_bytes", "split"), [(656, 0), (196, 0), (13, 0), (584, 512)])
def test_copies_of_some_layers(row_bytes: int, split: int) -> None:
    """Every range that there is: rows of no other layer, index keys behind the last one's."""
    twin = Twin(3, groups=(0, 0, 1, 2), row_bytes=row_bytes, split=split, index_row_bytes=132)
    tokens = torch.arange(150)
    places = {
        "device_row": torch.stack([torch.randperm(twin.cpu.rows.shape[1])[:150].int() for _ in range(3)]),
        "host_page": (3 + tokens // 64).int(),
        "host_offset": tokens % 64,
    }
    for first in range(4):
        for stop in range(first + 1, 5):
            twin.copy(places | {"index_row": tokens if stop == 4 else None}, "to_host", layers=range(first, stop))
            twin.cpu.host.fill_(0)
            twin.gpu.host.fill_(0)


def test_a_captured_step_replays_and_long_runs_do_not_drift() -> None:
    """GPU_TEST_STEPS replays of one graph, begin_step and swap_in over a moving window: every byte, every count."""
    steps = int(os.environ.get("GPU_TEST_STEPS", "2000"))
    twin = Twin(
        1, groups=(0,), row_bytes=16, topk=32, tail_slots=4, hot_max=128, max_tokens=2**17 + 64, seats=1, batch=2
    )
    state = twin.gpu
    twin.open(0, 1000, 128)
    batch = StepBatch.allocate(2, 1, "cuda")
    batch.seats[0], batch.num_real[0], batch.lengths[0] = 0, 1, 1000
    plan, misses = BackupPlan.allocate(2, 1, "cuda"), MissPlan.allocate(2, 32, "cuda")
    window = torch.arange(32, device="cuda")
    topk, out = torch.full((2, 32), -1, dtype=torch.int32, device="cuda"), torch.empty(2, 32, dtype=torch.int32).cuda()
    loads = torch.zeros(1, dtype=torch.int64, device="cuda")
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")

    def one() -> None:
        batch.lengths[0] += 1
        begin_step(state, batch, plan)
        state.row_words[0][0].index_copy_(0, batch.new_rows[0, :1].long(), truth[(batch.lengths[:1] - 1).long()])
        last = batch.lengths[0] - 1
        topk[0] = torch.where(window < 24, last - window * 3, (last * 7919 + window * 104729) % last).int()
        swap_in(state, 0, topk, batch, out, misses)
        loads.add_(misses.count[:1])
        wrong.add_((state.row_words[0][0][out[0].long()] != truth[topk[0].long()]).sum())

    length = twin.cpu.host_table.shape[1]
    truth = state.host_row_words[0][:, 0].cuda()[state.host_table[0, :length].long()].reshape(length * 64, -1)
    one()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one()
    for _ in range(steps):
        graph.replay()
    torch.cuda.synchronize()
    twin.lengths[0] = int(batch.lengths[0])
    assert twin.lengths[0] == 1001 + steps
    assert int(wrong) == 0
    assert int(state.now[0]) == steps + 1
    assert int(state.tripwires.sum()) == 0
    assert int(loads) == int(state.misses.sum())
    assert 30 * steps < int(state.misses.sum() + state.hits.sum()) <= 32 * (steps + 1)
    assert steps < int(state.misses.sum()) < 16 * steps
    twin.adopt()
    twin.check()


def test_graph_does_not_change_steps() -> None:
    twin = Twin(9, topk=31)
    twin.open(0, 300, 64, 64)
    twin.open(1, 300, 0)
    batches = twin.begin([0, 1])
    twin.write_new_rows(batches[0])
    topk = draw_topk(twin, [0, 1])
    device = topk.cuda()
    out, plan = torch.empty_like(device), MissPlan.allocate(4, 31, "cuda")
    saved = {name: getattr(twin.gpu, name).clone() for name in ("slot_of", "slot_token", "stamp", "hits", "misses")}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        swap_in(twin.gpu, 0, device, batches[1], out, plan)
    graph.replay()
    torch.cuda.synchronize()
    inside = (out < 0).cpu(), twin.gpu.stamp.cpu().clone()
    for name, tensor in saved.items():
        getattr(twin.gpu, name).copy_(tensor)
    swap_in(twin.gpu, 0, device, batches[1], out, plan)
    same("absent", inside[0], out < 0)
    same("stamp", inside[1], twin.gpu.stamp)
