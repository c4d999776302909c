"""Rows on their way to experts, on a CPU; tests/gpu/test_routing.py holds a GPU to it and to the library's router."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.block_fp8 import quantize_rows
from kernels.block_weight import E4M3
from kernels.cuda.quantize import Codes
from kernels.expert_choice import ExpertChoice
from kernels.routing import add_parts, pack_rows, unpack_rows

CHOICE = ExpertChoice(experts=256, groups=8, groups_chosen=4, choices=8, normalizes=True, scaling=2.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("count", [0, 1, 5])
def test_packed_rows_come_back_and_the_others_choose_nothing(dtype: torch.dtype, count: int) -> None:
    width, choices = 24, 6
    packed = torch.full((5, 160), 7, dtype=torch.uint8)
    hidden, weights = torch.randn(count, width).to(dtype), torch.rand(count, choices)
    chosen = torch.randint(0, 256, (count, choices))
    pack_rows(hidden, chosen, weights, packed)
    found, ids, shares, scales = unpack_rows(packed, width, dtype, choices)
    assert scales is None
    assert torch.equal(found[:count], hidden)
    assert torch.equal(ids[:count], chosen)
    assert torch.equal(shares[:count], weights)
    assert (ids[count:] == -1).all()


@pytest.mark.parametrize("count", [0, 1, 5])
def test_quantized_rows_travel_with_their_scales(count: int) -> None:
    width, choices = 256, 6
    packed = torch.full((5, 320), 7, dtype=torch.uint8)
    codes = Codes(*quantize_rows(torch.randn(count, width), powers=True), True)
    chosen, weights = torch.randint(0, 256, (count, choices)), torch.rand(count, choices)
    pack_rows(codes, chosen, weights, packed)
    found = unpack_rows(packed, width, E4M3, choices)
    assert found.scales is not None
    assert torch.equal(found.hidden[:count].float(), codes.values.float())
    assert torch.equal(found.scales[:count], codes.scales)
    assert torch.equal(found.chosen[:count], chosen)
    assert torch.equal(found.weights[:count], weights)
    assert (found.chosen[count:] == -1).all()


def test_parts_are_added_in_float32_and_in_their_order() -> None:
    large, small = torch.full((1, 4), 256.0, dtype=torch.bfloat16), torch.full((1, 4), 0.75, dtype=torch.bfloat16)
    parts = torch.stack([large, small, small])
    assert add_parts(parts, torch.bfloat16).tolist() == [[258.0] * 4], "257.5, rounded once"
    assert torch.equal(add_parts(parts, torch.float32), (large.float() + small.float()) + small.float())


@pytest.mark.parametrize(
    ("changes", "has_kernel"),
    [
        ({}, True),
        ({"groups": 1, "groups_chosen": 1}, True),
        ({"experts": 160, "groups": 1, "groups_chosen": 1}, False),
        ({"experts": 16, "groups": 16, "groups_chosen": 8}, False),
        ({"experts": 16, "groups": 4, "groups_chosen": 1}, False),
    ],
)
def test_a_kernel_chooses_where_powers_of_two_hold_all_choices(changes: dict[str, int], has_kernel: bool) -> None:
    assert replace(CHOICE, **changes).has_kernel == has_kernel
