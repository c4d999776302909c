"""Rows to and from a library's products: the kernels' own source, emulated, against plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import pytest
import torch
from torch import Tensor

from kernels.block_weight import BLOCK
from kernels.cuda import quantize
from kernels.cuda.structures import EXPERTS_MAX
from protocol.errors import BadInput
from tests.emulated.device import COMPILER, Device

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.fixture(autouse=True)
def device() -> Iterator[Device]:
    with Device().installed() as here:
        yield here


def plain_quantized(rows: Tensor, *, powers: bool) -> tuple[Tensor, Tensor]:
    """e4m3[M, K] and scales float32[M, K / 128] of `rows` [M, K]."""
    parts = rows.float().view(len(rows), rows.shape[1] // BLOCK, BLOCK)
    most = parts.abs().amax(-1)
    scales = most / 448
    if powers:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    scales = torch.where(most == 0, 1.0, scales)
    return (parts / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).view(rows.shape), scales


def alike(got: Tensor, wanted: Tensor) -> None:
    assert torch.equal(got.float(), wanted.float())


def drawn(rows: int, k: int, seed: int = 0) -> Tensor:
    """Magnitudes of many orders, so that e4m3 has small and rounded values; a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, k, generator=generator) * torch.exp2(4 * torch.randn(rows, k, generator=generator))
    values[rows // 2, :BLOCK] = 0
    return values.bfloat16()


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize(("rows", "k"), [(1, 128), (3, 384), (7, 256), (33, 128)])
def test_rows_are_quantized_as_torch_does(rows: int, k: int, powers: bool) -> None:
    hidden = drawn(rows, k)
    got = quantize.quantize(hidden, powers=powers)
    values, scales = plain_quantized(hidden, powers=powers)
    alike(got.values, values)
    assert torch.equal(got.scales, scales)
    assert got.scales.stride() == (1, -(-rows // quantize.SCALE_ROWS) * quantize.SCALE_ROWS)


def test_power_of_two_is_its_own_scale_and_the_next_value_is_not() -> None:
    hidden = torch.zeros(2, BLOCK)
    hidden[0, 3], hidden[1, 3] = 448 * 2.0**-5, 450 * 2.0**-5
    got = quantize.quantize(hidden.bfloat16(), powers=True)
    assert got.scales.flatten().tolist() == [2.0**-5, 2.0**-4]


def test_row_with_no_number_stays_one() -> None:
    hidden = torch.ones(2, BLOCK).bfloat16()
    hidden[0, 5] = torch.nan
    got = quantize.quantize(hidden, powers=True)
    assert torch.isnan(got.values[0].float() * got.scales[0]).any()
    alike(got.values[1].float() * got.scales[1], torch.ones(BLOCK))


@pytest.mark.parametrize(
    "rows",
    [
        torch.zeros(2, 130).bfloat16(),
        torch.zeros(2, 128),
        torch.zeros(256, 2).bfloat16().T,
        torch.zeros(264).bfloat16()[4:260].view(2, 128),
    ],
    ids=["ragged", "float32", "columns apart", "no multiple of 16 bytes"],
)
def test_rows_that_cannot_be_read_are_refused(rows: Tensor) -> None:
    with pytest.raises(BadInput, match=r"hidden=.*: expected bfloat16 in whole blocks of 128"):
        quantize.quantize(rows, powers=True)


def test_no_rows_launch_nothing(device: Device) -> None:
    got = quantize.quantize(torch.empty(0, 256).bfloat16(), powers=True)
    assert got.values.shape == (0, 256)
    assert got.scales.shape == (0, 2)
    assert device.launches == 0


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("experts", "first"), [(1, 0), (5, 2), (40, 0)])
@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("run", [0, 64, 70])
def test_each_assignment_of_this_rank_has_a_row_of_its_expert(
    run: int, experts: int, first: int, multiple: int, apart: bool, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one block, and by blocks that take a run of assignments each, the last of them fewer."""
    if run:
        monkeypatch.setattr(quantize, "PLACED_BY_ONE_MOST", 100)
        monkeypatch.setattr(quantize, "PLACED_RUN", run)
    order = torch.rand(50, 48, generator=torch.Generator().manual_seed(experts)).argsort(1) - 1  # -1 is no expert
    chosen = (order if wide else order.int())[:, :4]
    chosen = chosen if apart else chosen.contiguous()
    placed = quantize.place(chosen, first, experts, multiple=multiple)
    own = chosen.flatten().long() - first
    begin = 0
    for expert in range(experts):
        rows = placed.rows[own == expert].sort().values
        assert rows.tolist() == list(range(begin, begin + len(rows)))
        assert int(placed.ends[expert]) == begin + len(rows)
        begin = -(-(begin + len(rows)) // multiple) * multiple
    assert placed.rows[(own < 0) | (own >= experts)].eq(-1).all()
    assert int(placed.rows.max()) < placed.total


@pytest.mark.parametrize(("assignments", "experts", "multiple"), [(1, 4, 64), (9, 3, 4), (100, 7, 8), (5, 5, 2)])
def test_buffer_has_room_for_the_worst_routing(assignments: int, experts: int, multiple: int) -> None:
    busy = min(assignments, experts)
    most = 0
    for spare in range(assignments - busy + 1):  # `spare` more to the first expert, the others as even as can be
        counts = [1] * busy
        counts[0] += spare
        counts[-1] += assignments - busy - spare
        most = max(most, sum(-(-count // multiple) * multiple for count in counts))
    assert most <= quantize.rows_most(assignments, experts, multiple) <= most + multiple


def test_too_many_experts_are_refused() -> None:
    with pytest.raises(BadInput, match="experts=1025: too many"):
        quantize.place(torch.zeros(1, 1, dtype=torch.int32), 0, EXPERTS_MAX + 1, multiple=1)


@pytest.mark.parametrize("choices", [3, 20])
def test_rows_of_choices_go_to_every_place_of_their_token(choices: int) -> None:
    hidden = drawn(9, 256)
    chosen = torch.rand(9, 24, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :choices].int().contiguous()
    placed = quantize.place(chosen, 1, 4, multiple=8)
    got = quantize.quantize(hidden, powers=True, placed=placed)
    values, scales = plain_quantized(hidden, powers=True)
    assert len(got.values) == len(got.scales) == placed.total
    for assignment, row in enumerate(placed.rows.tolist()):
        if row >= 0:
            alike(got.values[row], values[assignment // choices])
            assert torch.equal(got.scales[row], scales[assignment // choices])


@pytest.mark.parametrize("choices", [3, 20])
@pytest.mark.parametrize("rows", [9, 75])
def test_quantized_rows_are_spread_as_they_would_be_quantized(
    rows: int, choices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of an exchange lie apart, with their scales behind them."""
    monkeypatch.setattr(quantize, "BLOCKS_APART_MOST", 2)
    hidden = drawn(rows, 256)
    values, scales = plain_quantized(hidden, powers=True)
    packed = torch.zeros(rows, 288, dtype=torch.uint8)
    apart = packed[:, :256].view(torch.float8_e4m3fn), packed[:, 256:264].view(torch.float32)
    apart[0].copy_(values)
    apart[1].copy_(scales)
    chosen = torch.rand(rows, 24, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :choices].int().contiguous()
    placed = quantize.place(chosen, 1, 4, multiple=8)
    wanted, real = quantize.quantize(hidden, powers=True, placed=placed), placed.rows[placed.rows >= 0].long()
    for given in (apart, quantize.quantize(hidden, powers=True)):
        got = quantize.spread(quantize.Codes(*given, True), placed)
        assert got.scales.stride() == wanted.scales.stride()
        alike(got.values[real], wanted.values[real])
        assert torch.equal(got.scales[real], wanted.scales[real])


@pytest.mark.parametrize("by_experts", [False, True])
def test_threads_that_take_several_units_leave_none_out(by_experts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "BLOCKS_APART_MOST", 0)
    hidden = drawn(75, 256, seed=6)
    chosen = torch.arange(75).remainder(5).int()[:, None]
    placed = quantize.place(chosen, 0, 4, multiple=8) if by_experts else None
    values, scales = plain_quantized(hidden, powers=True)
    got = quantize.quantize(hidden, powers=True, placed=placed)
    for token in range(75):
        row = token if placed is None else int(placed.rows[token])
        if row >= 0:
            alike(got.values[row], values[token])
            assert torch.equal(got.scales[row], scales[token])
    both = drawn(80 if placed is None else placed.total, 512, seed=7)
    middle = torch.nn.functional.silu(both[:, :256].float()).bfloat16() * both[:, 256:]
    values, scales = plain_quantized(middle, powers=True)
    got = quantize.quantize_gated(both[:, :256], both[:, 256:], powers=True, placed=placed)
    for row in range(80) if placed is None else placed.rows[placed.rows >= 0].tolist():
        alike(got.values[row], values[row])
        assert torch.equal(got.scales[row], scales[row])


def test_rows_between_experts_are_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of a step's rows are anyone's: most only fill the tile of an expert."""

    def poisoned(*about: object) -> quantize.Quantized:
        found = target(*about)  # type: ignore[arg-type]
        found.values.view(torch.uint8).fill_(0x2A)
        found.scales.fill_(-1)
        return found

    target = quantize._target
    monkeypatch.setattr(quantize, "_target", poisoned)
    chosen = torch.tensor([[0, 2], [1, -1], [2, 0]], dtype=torch.int32)
    placed = quantize.place(chosen, 0, 3, multiple=64)
    both = drawn(placed.total, 512, seed=5)
    got = quantize.quantize_gated(both[:, :256], both[:, 256:], powers=True, placed=placed)
    spare = torch.ones(placed.total, dtype=torch.bool).index_fill(0, placed.rows[placed.rows >= 0].long(), False)
    assert got.values.view(torch.uint8)[spare].eq(0x2A).all()
    assert got.scales[spare].eq(-1).all()
    assert got.scales[~spare].gt(0).all()


@pytest.mark.parametrize("exponent", [-110, -20, 0, 118])
def test_powers_of_two_of_any_size_divide_exactly(exponent: int) -> None:
    hidden = (torch.arange(BLOCK).float() - 64).mul(2.0**exponent).bfloat16()[None]
    got = quantize.quantize(hidden, powers=True)
    values, scales = plain_quantized(hidden, powers=True)
    assert torch.equal(got.scales, scales)
    alike(got.values, values)


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize(("by_experts", "limit"), [(False, inf), (True, inf), (True, 0.5)])
def test_gated_rows_are_quantized_where_they_are(by_experts: bool, limit: float, powers: bool) -> None:
    placed, rows = None, 6
    if by_experts:
        chosen = torch.tensor([[0, 2], [1, -1], [2, 0]], dtype=torch.int32)
        placed = quantize.place(chosen, 0, 3, multiple=4)
        rows = placed.total
    both = drawn(rows, 512, seed=3)
    got = quantize.quantize_gated(both[:, :256], both[:, 256:], powers=powers, placed=placed, limit=limit)
    gate, up = both[:, :256].clamp(max=limit), both[:, 256:].clamp(-limit, limit)
    middle = torch.nn.functional.silu(gate.float()).bfloat16() * up
    values, scales = plain_quantized(middle, powers=powers)
    real = range(rows) if placed is None else [row for row in placed.rows.tolist() if row >= 0]
    for row in real:
        alike(got.values[row], values[row])
        assert torch.equal(got.scales[row], scales[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_token_gets_the_weighted_sum_of_its_choices(dtype: torch.dtype) -> None:
    chosen = torch.tensor([[0, 2, 7], [1, -1, 0], [7, 8, -1]], dtype=torch.int32)
    placed = quantize.place(chosen, 0, 3, multiple=4)
    products = drawn(placed.total, 1032, seed=4)
    shares = torch.rand(3, 5, generator=torch.Generator().manual_seed(2)).to(dtype)[:, :3]  # tokens lie apart
    out = torch.full((3, 1032), torch.nan, dtype=torch.bfloat16)
    quantize.add_rows(products, placed, shares, out)
    wanted = torch.zeros(3, 1032)
    for assignment, row in enumerate(placed.rows.tolist()):
        if row >= 0:
            wanted[assignment // 3] += (products[row] * shares.flatten()[assignment, None]).float()
    assert torch.equal(out, wanted.bfloat16())
