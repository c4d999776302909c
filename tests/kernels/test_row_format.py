"""Rows and index keys of 4 bits: codes and scales by their definitions, errors within the stated bounds."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from kernels.row_format import (
    E2M1,
    RowFormat,
    index_key_format,
    kv_row_format,
    kv_row_format_of,
    latent_exponent,
)
from protocol.errors import BadInput, ConfigError

ROWS, KEYS = kv_row_format("fp4", 512, 64), index_key_format("fp4", 128)


def e4m3(code: int) -> float:
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if sign else size


def nearest(quotient: float) -> int:
    """The code of e2m1 nearest to a quotient, in exact arithmetic, ties to the even code."""
    size = min(abs(Fraction(quotient)), Fraction(6))
    code = min(range(8), key=lambda it: (abs(Fraction(E2M1[it]) - size), it % 2))
    return code | (8 if math.copysign(1.0, quotient) < 0 else 0)


def codes_of(row: Tensor, values: int) -> list[int]:
    return [int(row[it // 2]) >> 4 * (it % 2) & 15 for it in range(values)]


def values_of(seed: int, shape: tuple[int, ...]) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn * torch.tensor([2.0**-12, 0.01, 1.0, 300.0, 5e4])[seed % 5]


@pytest.mark.parametrize("seed", range(10))
def test_row_is_codes_scales_and_rope_in_this_order(seed: int) -> None:
    values = values_of(seed, (576,))
    row = ROWS.encode(values)
    assert row.shape == (352,)
    for group in range(32):
        held, scale = values[16 * group : 16 * group + 16], e4m3(int(row[256 + group]))
        wanted = min(max(float((held.abs().amax() / 6).float()), 2.0**-9), 448.0)
        assert abs(scale - wanted) <= max(wanted / 16, 2.0**-10), "not the nearest of e4m3"
        assert codes_of(row, 512)[16 * group : 16 * group + 16] == [nearest(float(it / scale)) for it in held]
    rope = [max(-448.0, min(448.0, float(it))) for it in values[512:]]
    kept = [e4m3(int(it)) for it in row[288:]]
    assert all(abs(a - b) <= max(abs(a) / 16, 2.0**-10) for a, b in zip(rope, kept, strict=True))


@pytest.mark.parametrize("seed", range(10))
def test_key_has_scales_by_the_rule_of_the_standard(seed: int) -> None:
    values = values_of(seed, (128,))
    key = KEYS.encode(values)
    assert key.shape == (68,)
    for group in range(4):
        held = values[32 * group : 32 * group + 32]
        exponent = math.frexp(float(held.abs().amax()))[1] - 1
        assert int(key[64 + group]) == exponent - 2 + 127
        wanted = [nearest(math.ldexp(float(it), 2 - exponent)) for it in held]
        assert codes_of(key, 128)[32 * group : 32 * group + 32] == wanted


@pytest.mark.parametrize("form", [ROWS, KEYS])
def test_decoding_is_code_times_scale(form: RowFormat) -> None:
    values = values_of(2, (3, 5, form.values))
    rows = form.encode(values)
    decoded = form.decode(rows)
    assert decoded.shape == values.shape
    for at in ((0, 0), (2, 4)):
        row = rows[at]
        scales = [int(it) for it in row[form.code_bytes : form.code_bytes + form.scale_bytes]]
        factors = [e4m3(it) if form is ROWS else 2.0 ** (it - 127) for it in scales]
        for number, code in enumerate(codes_of(row, form.scaled)):
            expected = (-1 if code & 8 else 1) * E2M1[code & 7] * factors[number // form.group]
            assert float(decoded[*at, number]) == expected


@pytest.mark.parametrize("form", [ROWS, KEYS])
def test_errors_stay_within_the_stated_bounds(form: RowFormat) -> None:
    values = values_of(2, (200, form.values))
    rows = form.encode(values)
    scales = rows[:, form.code_bytes : form.code_bytes + form.scale_bytes]
    factors = scales.view(torch.float8_e4m3fn).float() if form is ROWS else torch.exp2(scales.float() - 127)
    half_steps = factors.repeat_interleave(form.group, 1) / 4
    off, size = (form.decode(rows) - values).abs()[:, : form.scaled], values.abs()[:, : form.scaled]
    assert bool((off <= torch.maximum(size / 4, half_steps)).all())


@pytest.mark.parametrize("tie", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
def test_ties_go_to_the_even_code(tie: float) -> None:
    values = torch.zeros(576)
    values[0], values[1], values[2] = 6.0, tie, -tie
    codes = codes_of(ROWS.encode(values), 3)
    assert codes[1] % 2 == 0
    assert codes[2] == codes[1] | 8
    assert codes[1] == nearest(tie)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_no_number_makes_its_group_none(value: float) -> None:
    for form in (ROWS, KEYS):
        values = values_of(2, (form.values,))
        values[40] = value
        decoded = form.decode(form.encode(values))
        group = torch.arange(form.values) // form.group == 40 // form.group
        assert bool(decoded[group].isnan().all())
        assert not bool(decoded[~group].isnan().any())


def test_zeros_stay_zeros_and_small_groups_are_kept() -> None:
    for form in (ROWS, KEYS):
        assert not bool(form.decode(form.encode(torch.zeros(2, form.values))).any())
    least = torch.zeros(576)
    least[3] = 2.0**-9
    assert float(ROWS.decode(ROWS.encode(least))[3]) == 2.0**-9


def test_largest_latents_fit_behind_the_exponent() -> None:
    """One latent has all of a row's magnitude: sqrt(r) times its weight."""
    for weight in (0.003, 1.0, 37.0):
        norm = torch.full((512,), weight)
        exponent = latent_exponent(norm)
        most = math.sqrt(512) * weight
        assert math.ldexp(most, -exponent) <= 6 * 448
        assert math.ldexp(most, 1 - exponent) > 6 * 448
    assert latent_exponent(torch.zeros(4)) == 0


def test_dimensions_that_do_not_divide_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"fp4.*kv_lora_rank 72.*use fp8 or bfloat16"):
        kv_row_format("fp4", 72, 16)
    with pytest.raises(ConfigError, match=r"fp4.*index_head_dim 16.*use fp8 or bfloat16"):
        index_key_format("fp4", 16)
    with pytest.raises(BadInput, match=r"99 bytes.*144 \(bfloat16\)"):
        kv_row_format_of(99, 56, 16)
