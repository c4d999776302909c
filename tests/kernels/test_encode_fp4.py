"""Rows of four bits as a GPU writes them: the kernel's own source, emulated, has the bytes of kernels/row_format.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.cuda import encode as room
from kernels.cuda.encode import is_coded
from kernels.row_format import RowFormat, index_key_format, kv_row_format
from kernels.row_target import RowTarget
from tests.emulated.device import COMPILER, Device

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

FORMS = [kv_row_format("fp4", 512, 64), kv_row_format("fp4", 128, 32), index_key_format("fp4", 128)]
DTYPES = [torch.bfloat16, torch.float32]
of_forms = pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.scaled}-{form.plain}")
of_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def device() -> Iterator[Device]:
    with Device(seed=4).installed() as here:
        yield here


def encode_fp4(form: RowFormat, values: Tensor) -> Tensor:
    """Rows uint8[..., row_bytes] by the kernel."""
    out = torch.empty(*values.shape[:-1], form.row_bytes, dtype=torch.uint8)
    room.encode_fp4(form, values.contiguous(), RowTarget(out))
    return out


def drawn(form: RowFormat, rows: int) -> Tensor:
    """Values of all magnitudes, from those that no scale is small enough for to those that saturate."""
    draw = torch.Generator().manual_seed(rows)
    values = torch.randn(rows, form.values, generator=draw)
    return values * 10 ** (24 * torch.rand(rows, 1, generator=draw) - 16)


@of_forms
@of_dtypes
def test_bytes_are_those_of_the_cpu(form: RowFormat, dtype: torch.dtype) -> None:
    for rows in (1, 65):
        values = drawn(form, rows).to(dtype)
        assert torch.equal(encode_fp4(form, values), form.encode(values))
    assert torch.equal(encode_fp4(form, values[1:]), form.encode(values[1:]))
    wide = drawn(form, 6).to(dtype).unflatten(0, (2, 3)).transpose(0, 1)
    assert torch.equal(encode_fp4(form, wide), form.encode(wide))
    assert encode_fp4(form, values[:0]).shape == (0, form.row_bytes)


@of_forms
@of_dtypes
def test_halfway_values_go_to_the_even_code(form: RowFormat, dtype: torch.dtype) -> None:
    """The largest of a group makes its scale 1; middles between magnitudes, and their neighbours to both sides."""
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = torch.stack([middles, middles.nextafter(torch.tensor(9.0)), middles.nextafter(torch.tensor(0.0))])
    if dtype == torch.bfloat16:
        near = torch.stack([middles, middles * (1 + 2.0**-7), middles * (1 - 2.0**-7)])
    values = torch.zeros(6, form.values)
    for row, line in enumerate(torch.cat([near, -near])):
        for start in range(0, form.scaled, form.group):
            values[row, start : start + 8] = torch.cat([torch.tensor([6.0]), line])
    values = values.to(dtype)
    assert torch.equal(encode_fp4(form, values), form.encode(values))
    assert encode_fp4(form, values)[0, :4].tolist() == [0x07, 0x22, 0x44, 0x66]


@of_forms
@of_dtypes
def test_infinity_and_what_is_no_number_make_their_group_so(form: RowFormat, dtype: torch.dtype) -> None:
    values = drawn(form, 40)
    values[0] = 0.0
    values[1, ::3] = -0.0
    values[2, 5], values[3, 5], values[4, 5], values[5, 5] = torch.inf, -torch.inf, torch.nan, -torch.nan
    values[6, form.group + 1 :: 7] = torch.nan
    values[7] = torch.finfo(torch.float32).tiny * values[7] / 1e3
    values[8, -3:] = torch.tensor([torch.nan, -torch.inf, -torch.nan])
    values[9] = torch.finfo(torch.bfloat16).max
    values = values.to(dtype)
    assert torch.equal(encode_fp4(form, values), form.encode(values))
    decoded = form.decode(encode_fp4(form, values[2:6]))[:, : form.group]
    assert decoded.isnan().all()


@of_forms
def test_rows_go_to_their_places_and_nowhere_else(form: RowFormat) -> None:
    values = drawn(form, 9).bfloat16()
    places = torch.randperm(20)[:9].int()
    places[4] = -1
    rows = torch.full((20, form.row_bytes), 0xA5, dtype=torch.uint8)
    wanted = rows.clone()
    held = places >= 0
    values[:, : form.scaled] = values[:, : form.scaled].clamp(-1e30, 1e30)
    scaled = torch.cat((values[:, : form.scaled] * 2.0**-5, values[:, form.scaled :]), -1)
    wanted[places[held].long()] = form.encode(scaled[held])
    room.encode_fp4(form, values, RowTarget(rows, places), scale=2.0**-5)
    assert torch.equal(rows, wanted)


def test_rows_that_no_thread_can_take_are_told() -> None:
    assert all(map(is_coded, FORMS))
    assert not is_coded(kv_row_format("fp4", 16, 16))
    assert not is_coded(kv_row_format("fp4", 512, 8))
    assert not is_coded(kv_row_format("fp8", 512, 64))
