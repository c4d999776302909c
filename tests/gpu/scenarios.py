"""What happens to a Twin: steps of all kinds, and those which lists of next slots live through."""

from __future__ import annotations

from itertools import pairwise

import torch

from kernels.state import Tripwire
from tests.gpu.twin import Twin

TOPK = 512
MIXED_SIZES = {"groups": (0, 0, 1), "row_bytes": 656, "topk": 100, "tail_slots": 3, "hot_max": 128}


def goes_mixed_steps(twin: Twin, steps: int) -> None:
    """Hits, misses, duplicates, padding, positions out of range; managed and resident requests, clocks that jump.

    `twin` has MIXED_SIZES: two groups, one of two layers.
    """
    twin.open(0, 300, 128, 64)
    twin.open(1, 300, 0)
    twin.open(2, 250, 100)
    for step in range(steps):
        batches = twin.begin([2, 0, 1])
        twin.write_new_rows(batches[0])
        for group in range(2):
            topk = torch.randint(-2, 300, (4, 100), generator=twin.torch, dtype=torch.int32)
            topk[:, 50:] = topk[:, :50]
            twin.swap_in(group, batches, topk)
        if step == 1:
            twin.cpu.now[0] += 5000
            twin.upload()
        twin.check()


DRAFT_SIZES = {"groups": (0, 0, 1), "row_bytes": 16, "topk": 100, "seat_rows": 5, "tail_slots": 11, "hot_max": 320}


def goes_draft_steps(twin: Twin, steps: int) -> None:
    """Up to five rows a seat, of which a drawn number is accepted; the narrow seat has no room for all of their unions.

    `twin` has DRAFT_SIZES. A narrow buffer of k slots, one of 3 k, a resident one.
    """
    narrow, wide, resident = 0, 1, 2
    twin.open(narrow, 120, 100)
    twin.open(wide, 300, 300, 64)
    twin.open(resident, 300, 0)
    rejected = 0
    for step in range(steps):
        seats = twin.random.sample(range(3), 3)
        rows = [5 if step % 2 else twin.random.randint(0, 5) for _ in seats]
        before = list(twin.lengths)
        batches = twin.begin_drafts(seats, rows)
        twin.write_new_rows(batches[0])
        size, depths = len(batches[0].seats), batches[0].seat_rows
        for group in range(2):
            base = torch.randint(-2, 300, (size // depths, 100), generator=twin.torch, dtype=torch.int32)
            topk = base.repeat(depths, 1)
            topk[:, :20] = torch.randint(-2, 300, (size, 20), generator=twin.torch, dtype=torch.int32)
            topk[:, 80:90] = topk[:, :10]
            twin.swap_in(group, batches, topk)
        flags = batches[0].rejected.view(depths, -1)[:, :3].tolist()
        lengths = batches[0].lengths.view(depths, -1)
        rejected += int((batches[0].rejected.bool() & (batches[0].lengths > 0)).sum())
        for place, (seat, brought) in enumerate(zip(seats, rows, strict=True)):
            assert int((lengths[:, place] > 0).sum()) == brought
            fitting = next((depth for depth in range(brought) if flags[depth][place]), brought)
            twin.lengths[seat] = before[seat] + (twin.random.randint(1, fitting) if brought else 0)
        if step == 1:
            twin.resize(wide, 128)
        twin.check()
    assert rejected > 0, "some unions did not fit"
    assert not int(twin.cpu.tripwires[Tripwire.VICTIMS])


SHRUNK_SIZES = {
    "groups": (0,),
    "row_bytes": 16,
    "topk": 40,
    "seat_rows": 3,
    "tail_slots": 6,
    "hot_max": 128,
    "seats": 1,
}


def shrinks_between_rejections(twin: Twin) -> None:
    """Rejected rows that a resize left in ordinary slots become tail slots again, one of them when a queue is in use.

    The slots that were reserved for their places are empty and ordinary from then on: they go first. `twin` has
    SHRUNK_SIZES.
    """
    twin.open(0, 300, 128, 128)
    for step in range(8):
        if step == 4:
            twin.resize(0, 64)
        batches = twin.begin_drafts([0], [1 if step == 4 else 3])
        twin.write_new_rows(batches[0])
        topk = (torch.arange(40) + 7 * step).repeat(len(batches[0].seats), 1)
        twin.swap_in(0, batches, topk.int())
        twin.check()
        twin.lengths[0] += 2 if step < 3 else 0  # of the steps before the last one, all rows; of that, the first


FILLED_SIZES = {
    "groups": (0,),
    "row_bytes": 16,
    "topk": 4,
    "seat_rows": 2,
    "tail_slots": 4,
    "hot_max": 64,
    "seats": 1,
}


def draft_finds_every_slot_in_use(twin: Twin) -> None:
    """The first row loads as many tokens as the buffer has slots, so that no slot is left to the second.

    `twin` has FILLED_SIZES.
    """
    twin.open(0, 120, 4)
    for step in range(3):
        batches = twin.begin_drafts([0], [2])
        twin.write_new_rows(batches[0])
        depths = len(batches[0].seats) // 2
        topk = torch.arange(4).repeat(2 * depths, 1) + 10 * step
        topk[depths:] += 5
        twin.swap_in(0, batches, topk.int())
        twin.check()
        assert int(batches[0].rejected[depths]) == 1


def small_sizes(hot_slots: int) -> dict[str, int]:
    """Of a Twin for `uses_a_queue_for_long`."""
    return {"row_bytes": 16, "topk": TOPK, "hot_max": hot_slots, "max_tokens": 4096}


def uses_a_queue_for_long(twin: Twin, steps: int) -> None:
    """Exact LRU all the while, by the sets of tokens held after each step.

    Few misses a step, so that a queue serves many steps; its slots are hit again, become tail slots, or are evicted.
    Then steps that use most of a queue up, or more than it has.
    """
    twin.open(0, 3000, 1088, 1088)
    twin.open(1, 3000, 1000, 700)
    stamps, lengths = [], []
    window = [torch.randperm(2900, generator=twin.torch) for _ in range(2)]
    places = [0, 0]
    few = steps - 10
    for step in range(steps):
        batches = twin.begin([1, 0])
        twin.write_new_rows(batches[0])
        rows = []
        for seat in (1, 0):
            fresh = (0, 7, 13, 40, 150, 400)[step % 4 if step < few else 4 + step % 2]
            places[seat] += fresh
            near = window[seat][(places[seat] + torch.arange(TOPK)) % 2900]
            behind = window[seat][(places[seat] - torch.randint(1, 500, (8,), generator=twin.torch)) % 2900]
            near[torch.randint(0, TOPK, (8,), generator=twin.torch)] = behind
            rows.append(near[torch.randperm(TOPK, generator=twin.torch)])
        step_with(twin, batches, torch.stack(rows))
        if step < few:
            stamps.append(twin.gpu.queue_stamp[0, :2, :TOPK].cpu().clone())
            lengths.append(twin.gpu.eviction_queue[0, :2, 1].tolist())
    changes = sum(not torch.equal(old, new) for old, new in pairwise(stamps))
    assert 2 < changes < few // 2, "how many steps added to a queue"
    assert min(min(pair) for pair in lengths[4:]) > 40, "and no queue ran out"


def goes_round(twin: Twin, length: int, misses: tuple[int, ...], steps: int) -> None:
    """A window over a permutation of the context: what falls out of it goes in that order, and comes round again."""
    window, place = torch.randperm(length - 100, generator=twin.torch), 0
    for step in range(steps):
        batches = twin.begin([0])
        twin.write_new_rows(batches[0])
        place += misses[step % len(misses)]
        near = window[(place + torch.randperm(TOPK, generator=twin.torch)) % len(window)]
        step_with(twin, batches, near[None])


FULL_SIZES = {"row_bytes": 16, "topk": 2048, "hot_max": 2200, "max_tokens": 4096, "seats": 1, "batch": 2}


def misses_on_corrupt_host_pages(twin: Twin, entry: int) -> None:
    """Entries of the host table below -1 count as not granted; other misses are loaded, and hot tokens are hits.

    `twin` has FULL_SIZES: all warps of a block have top-k entries where a request has four or five blocks.
    """
    twin.open(0, 4000, 2048, 1000)
    twin.cpu.host_table[0, 5:7] = entry  # of hot tokens
    twin.cpu.host_table[0, 30:60:2] = entry  # tokens from 1,920 on, of which none are hot
    twin.upload()
    for _ in range(2):
        batches = twin.begin([0])
        twin.write_new_rows(batches[0])
        step_with(twin, batches, torch.randperm(3900, generator=twin.torch)[None, :2048])
    assert int(twin.gpu.tripwires[Tripwire.UNGRANTED]) > 400
    assert int(twin.gpu.tripwires.sum()) == int(twin.gpu.tripwires[Tripwire.UNGRANTED])


def step_with(twin: Twin, batches: tuple, topk: torch.Tensor) -> None:
    """One step of group 0, padding behind `topk`."""
    padding = torch.full((twin.size - len(topk), topk.shape[1]), -1)
    twin.swap_in(0, batches, torch.cat([topk, padding]).int())
    twin.check()
