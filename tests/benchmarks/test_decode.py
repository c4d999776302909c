"""The model without HiSparse that benchmarks.decode compares with: the same addresses by a page table alone."""

from __future__ import annotations

import pytest
import torch

from benchmarks.decode import PROFILED, by_kernel, look_up, open_rows, share_out
from kernels.state import MissPlan
from tests.support.kernel_rig import Rig


def test_plain_model_finds_rows_of_resident_requests() -> None:
    rig = Rig(seats=4, batch=5)
    requests = [rig.open(seat, length, hot_slots=0) for seat, length in ((2, 70), (0, 64), (3, 130))]
    rig.begin(requests)
    expected = rig.batch.new_rows.clone(), rig.batch.new_index_rows.clone()
    assert (expected[1][:3] >= 0).all()
    open_rows(rig.state, rig.batch, rig.plans[0])
    assert torch.equal(rig.batch.new_rows, expected[0])
    assert torch.equal(rig.batch.new_index_rows, expected[1])

    chosen = [[0, 69, 70, 13], [63, 64, 1, 2], [130, 128, 127, 5]]
    through_swap_in = rig.swap_in(0, requests, chosen)
    topk = torch.full((5, 4), -1, dtype=torch.int32)
    topk[:3] = torch.tensor(chosen)
    found = torch.empty_like(topk)
    look_up(rig.state, 0, topk, rig.batch, found, MissPlan.allocate(5, 4))
    assert torch.equal(found[:3], through_swap_in[:3])


def test_the_plain_model_reads_no_place_for_padding() -> None:
    rig = Rig()
    rig.batch.seats.fill_(-1)
    rig.batch.num_real.fill_(0)
    open_rows(rig.state, rig.batch, rig.plans[0])
    assert (rig.batch.new_rows == -1).all()
    assert (rig.batch.new_index_rows == -1).all()
    found = torch.empty(4, 4, dtype=torch.int32)
    look_up(rig.state, 0, torch.full((4, 4), -1, dtype=torch.int32), rig.batch, found, rig.miss_plan)


def test_step_time_is_split_by_kernel_and_overlap_counts_once() -> None:
    ran = [
        ("hisparse::swap_in", 0.0, 1000.0),
        ("attend", 500.0, 2500.0),
        ("Memcpy DtoH", 3000.0, 3400.0),
        ("copy_rows", 3100.0, 3300.0),
    ]
    found = share_out(ran)
    expected = {"swap": 1.0, "attention": 2.0, "backup": 0.2, "other": 0.4, "products": 0.0, "index": 0.0}
    assert {name: ms * PROFILED for name, ms in found.items()} == pytest.approx(expected | {"busy": 2.9})


def test_kernels_of_a_step_are_listed_by_their_time() -> None:
    ran = [("short", 0.0, 2.0), ("long", 2.0, 10.0), ("short", 10.0, 14.0)] * PROFILED
    assert [line.split() for line in by_kernel(ran)] == [
        ["8.0", "us", "1.0", "launches", "long"],
        ["6.0", "us", "2.0", "launches", "short"],
    ]
