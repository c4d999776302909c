"""The model without HiSparse that benchmarks.decode compares with: the same addresses by a page table alone."""

from __future__ import annotations

import pytest
import torch

from benchmarks.decode import HALVED, MANAGED, PROFILED, bytes_of, halves_cells, look_up, open_rows, share_out
from benchmarks.halves_report import PAIRS
from kernels.layout import Geometry
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


def test_whole_steps_and_halves_take_turns() -> None:
    geometry = Geometry(2, 656, (0, 1), 132, 2048)
    budget = 4 * bytes_of(geometry, 32_768, 0)
    found = list(halves_cells(geometry, 4096, budget, [32_768], [0.99, 0.9], 3))
    pairs = [cell for cell in found if cell.mode != "uncopied"]
    for whole, halves in zip(pairs[::2], pairs[1::2], strict=True):
        assert (whole.mode, halves.mode) in PAIRS.values()
        assert whole.name | {"mode": ""} == halves.name | {"mode": ""}
        assert (whole.mode in HALVED, halves.mode in HALVED) == (False, True)
        assert (whole.mode in MANAGED) == (halves.mode in MANAGED)
    assert [cell.round for cell in pairs] == sorted(cell.round for cell in pairs)
    assert len({tuple(cell.name.items()) for cell in found}) == len(found)
    assert "round" not in found[0].name, "as results of other runs have it"
