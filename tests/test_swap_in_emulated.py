"""The source of swap_in on a CPU against its reference: threads are fibers, in an order drawn for each launch."""

from __future__ import annotations

import pytest
import torch

from tests.emulated.twin import COMPILER, EmulatedTwin
from tests.gpu.lists import TOPK, goes_round, small_sizes, uses_a_list_for_long

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_steps_of_managed_and_resident_requests(ranks: int) -> None:
    """Hits, misses, duplicates, padding, positions out of range; two groups, one of two layers."""
    twin = EmulatedTwin(ranks, groups=(0, 0, 1), topk=100, tail_slots=3, hot_max=128, ranks=ranks)
    twin.open(0, 300, 128, 64)
    twin.open(1, 300, 0)
    twin.open(2, 250, 100)
    for _ in range(3):
        batches = twin.begin([2, 0, 1])
        twin.write_new_rows(batches[0])
        for group in range(2):
            topk = torch.randint(-2, 300, (4, 100), generator=twin.torch, dtype=torch.int32)
            topk[:, 50:] = topk[:, :50]
            twin.swap_in(group, batches, topk)
        twin.check()


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (("    await_gate(&s.chosen);\n    if", "    if"), "differ"),
        (("    open_gate(&s.chosen);", "    "), "stuck: threads wait for what never comes"),
    ],
    ids=["no wait for victims", "no word of victims"],
)
def test_what_is_left_out_shows(edit: tuple[str, str], said: str) -> None:
    class Edited(EmulatedTwin):
        edits = (edit,)

    twin = Edited(4, groups=(0,), topk=100, hot_max=128, ranks=2)
    twin.open(0, 300, 128, 64)
    twin.open(1, 250, 100)

    def steps() -> None:
        for _ in range(5):
            batches = twin.begin([1, 0])
            twin.write_new_rows(batches[0])
            twin.swap_in(0, batches, torch.randint(0, 250, (4, 100), generator=twin.torch, dtype=torch.int32))

    with pytest.raises(AssertionError, match=said):
        steps()


@pytest.mark.parametrize(("ranks", "keepers"), [(1, False), (2, True)])
def test_victims_come_in_order_from_a_list_that_lasts(ranks: int, keepers: bool) -> None:
    """Exact LRU from a list, and when it ends; with a block of its own that keeps it while others use it."""
    twin = EmulatedTwin(20 + ranks, groups=(0,), seats=2, batch=2, ranks=ranks, keepers=keepers, **small_sizes(1088))
    uses_a_list_for_long(twin, steps=50)


@pytest.mark.parametrize(
    ("ranks", "hot_slots", "tokens", "misses", "keepers"),
    [
        (2, 4096, 4096, (20,), True),  # slots of more steps than are added at once
        (1, 9400, 9000, (150, 0, 0, 3), False),  # more slots than are held at once, steps apart
        (4, 600, 600, (1,) * 15 + (60,), True),  # a stamp of each slot
    ],
)
def test_a_list_goes_on_where_a_step_leaves_it(
    ranks: int, hot_slots: int, tokens: int, misses: tuple[int, ...], keepers: bool
) -> None:
    """Lists of many steps, and of none."""
    sizes = {"hot_max": 9472, "max_tokens": 16384, "seats": 1, "batch": 1}
    twin = EmulatedTwin(ranks, groups=(0,), row_bytes=16, topk=TOPK, ranks=ranks, keepers=keepers, **sizes)
    twin.open(0, 14_000, hot_slots, tokens)
    goes_round(twin, 14_000, misses, steps=30)
