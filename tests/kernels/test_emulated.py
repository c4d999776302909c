"""Sources of the CUDA kernels on a CPU against the reference: threads are fibers, in an order drawn for each launch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.emulated.device import COMPILER, Device, Edit
from tests.emulated.twin import EmulatedTwin
from tests.gpu import lives, run_cases
from tests.gpu.compare import check
from tests.gpu.program import Machine, uploaded
from tests.gpu.scenarios import (
    DRAFT_SIZES,
    FILLED_SIZES,
    FULL_SIZES,
    MIXED_SIZES,
    SHRUNK_SIZES,
    TOPK,
    draft_finds_every_slot_in_use,
    goes_draft_steps,
    goes_mixed_steps,
    goes_round,
    misses_on_corrupt_host_pages,
    shrinks_between_rejections,
    small_sizes,
    uses_a_queue_for_long,
)

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.fixture
def device() -> Iterator[Device]:
    with Device().installed() as here:
        yield here


@pytest.mark.parametrize(("ranks", "row_bytes"), [(1, 656), (2, 320), (4, 352), (5, 196)])
def test_steps_of_managed_and_resident_requests(device: Device, ranks: int, row_bytes: int) -> None:
    goes_mixed_steps(EmulatedTwin(ranks, device, ranks=ranks, **MIXED_SIZES | {"row_bytes": row_bytes}), steps=3)


@pytest.mark.parametrize("direction", ["to_host", "to_device"])
@pytest.mark.parametrize(("row_bytes", "key_bytes"), [(196, 132), (320, 132), (352, 68)])
def test_copies_of_rows_of_other_formats(device: Device, row_bytes: int, key_bytes: int, direction: str) -> None:
    """Scattered rows by words that divide them, and whole pages, which are runs of 16 bytes whatever a row has."""
    twin = EmulatedTwin(3, device, groups=(0, 0), row_bytes=row_bytes, index_row_bytes=key_bytes, max_tokens=256)
    tokens = torch.arange(150)
    for device_row in (torch.randperm(twin.cpu.rows.shape[1])[:150], tokens + 64):
        places = {"index_row": tokens, "host_page": (3 + tokens // 64).int(), "host_offset": tokens % 64}
        twin.copy(places | {"device_row": device_row[None]}, direction)


@pytest.mark.parametrize("ranks", [1, 4])
def test_steps_with_drafts(device: Device, ranks: int) -> None:
    goes_draft_steps(EmulatedTwin(ranks, device, ranks=ranks, **DRAFT_SIZES), steps=4)


@pytest.mark.parametrize("ranks", [1, 4])
def test_contexts_beyond_the_prefetched_tables(device: Device, ranks: int) -> None:
    """Index pages of tokens from 65,536 on are looked up one by one."""
    sizes = {"seats": 1, "batch": 1, "hot_max": 192, "max_tokens": 66_560}
    twin = EmulatedTwin(7, device, groups=(0,), row_bytes=16, topk=64, ranks=ranks, **sizes)
    twin.open(0, 66_000, 192)
    for _ in range(4):
        batches = twin.begin([0])
        twin.write_new_rows(batches[0])
        far, near = (torch.randint(low, low + 60, (1, 32), generator=twin.torch) for low in (65_900, 0))
        twin.swap_in(0, batches, torch.cat([far, near], 1).int())
        twin.check()


@pytest.mark.parametrize("entry", [-2, -(2**31)])
@pytest.mark.parametrize("ranks", [1, 4, 5])
def test_corrupt_host_pages_trip_and_end(device: Device, ranks: int, entry: int) -> None:
    twin = EmulatedTwin(ranks, device, groups=(0,), ranks=ranks, **FULL_SIZES)
    misses_on_corrupt_host_pages(twin, entry)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_random_request_lifecycles(number: int) -> None:
    """Two of the thousands in tests/gpu: every operation on rows and seats, in rows of one plane and of two."""
    (shape,) = run_cases.draw_examples(lives.WORLDS, 1, number)
    cases = run_cases.draw_examples(lives.CASES, 2, number)
    program = lives.small(f"emulated:{number}", shape, cases)
    device = Device(seed=number, largest=2)
    with device.installed():
        machine = Machine(program, run_cases.host_of(program, "cpu"), "cpu")
        device.adopt(machine.state)
        results = [machine.run(op) for op in uploaded(program.ops, "cpu")]
    assert device.launches > 10
    check(program, run_cases.host_of(program, "cpu"), results)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (("    await_gate(&s.chosen);\n    if", "    if"), "differ"),
        (("    open_gate(&s.chosen);", "    "), "stuck: threads wait for what never comes"),
    ],
    ids=["no wait for victims", "no word of victims"],
)
def test_omitted_kernel_statement_is_caught(edit: Edit, said: str) -> None:
    def steps() -> None:
        for _ in range(5):
            batches = twin.begin([1, 0])
            twin.write_new_rows(batches[0])
            twin.swap_in(0, batches, torch.randint(0, 250, (4, 100), generator=twin.torch, dtype=torch.int32))

    with Device(edits=(edit,)).installed() as device:
        twin = EmulatedTwin(4, device, groups=(0,), topk=100, hot_max=128, ranks=2)
        twin.open(0, 300, 128, 64)
        twin.open(1, 250, 100)
        with pytest.raises(AssertionError, match=said):
            steps()


def test_rejected_rows_in_a_smaller_buffer(device: Device) -> None:
    shrinks_between_rejections(EmulatedTwin(2, device, ranks=1, refill_blocks=False, **SHRUNK_SIZES))


@pytest.mark.parametrize("ranks", [1, 4])
def test_draft_that_finds_every_slot_in_use_is_rejected(device: Device, ranks: int) -> None:
    draft_finds_every_slot_in_use(EmulatedTwin(ranks, device, ranks=ranks, **FILLED_SIZES))


def test_row_that_does_not_fit_and_is_not_rejected_is_caught() -> None:
    edit = ("if (victims < misses.total) p.rejected[row] = 1;", "")
    with Device(edits=(edit,)).installed() as device, pytest.raises(AssertionError, match=r"rejected: .* differ"):
        goes_draft_steps(EmulatedTwin(1, device, ranks=1, **DRAFT_SIZES), steps=4)


@pytest.mark.parametrize(("ranks", "refill_blocks"), [(1, False), (2, True)])
def test_queue_gives_victims_in_order(device: Device, ranks: int, refill_blocks: bool) -> None:
    """Exact LRU from the queue, also when it runs out; with a block that refills it while others use it."""
    sizes = {"seats": 2, "batch": 2, **small_sizes(1088)}
    twin = EmulatedTwin(20 + ranks, device, groups=(0,), ranks=ranks, refill_blocks=refill_blocks, **sizes)
    uses_a_queue_for_long(twin, steps=50)


@pytest.mark.parametrize(
    ("ranks", "hot_slots", "tokens", "misses", "refill_blocks"),
    [
        (2, 4096, 4096, (20,), True),  # slots of more steps than are added at once
        (1, 9400, 9000, (150, 0, 0, 3), False),  # steps apart
        (1, 20_000, 12_000, (150, 20), False),  # more slots than a row's block has room for
        (2, 20_000, 12_000, (150, 20), True),  # a refill block has room for them
        (4, 600, 600, (1,) * 15 + (60,), True),  # a stamp of each slot
    ],
)
def test_queue_is_refilled_across_steps(
    device: Device, ranks: int, hot_slots: int, tokens: int, misses: tuple[int, ...], refill_blocks: bool
) -> None:
    """Queues that hold slots of many steps, and of none."""
    length = max(14_000, hot_slots + 5_000)
    sizes = {"hot_max": hot_slots + 72, "max_tokens": length + 200, "seats": 1, "batch": 1}
    twin = EmulatedTwin(
        ranks, device, groups=(0,), row_bytes=16, topk=TOPK, ranks=ranks, refill_blocks=refill_blocks, **sizes
    )
    twin.open(0, length, hot_slots, tokens)
    goes_round(twin, length, misses, steps=30)
