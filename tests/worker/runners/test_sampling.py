"""Draws: the right distribution, and a function of logits, parameters, seed and position alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from worker.runners.sampling import GOLDEN, _draw, _mix, sample, uniform

#: 0.999 quantile of chi-square for the degrees of freedom that occur here (standard tables).
CHI_SQUARE_999 = {1: 10.83, 4: 18.47, 7: 24.32, 15: 37.70}


def draw(logits: Tensor, *, temperature: float = 1.0, top_p: float = 1.0, seeds: Tensor, positions: Tensor) -> Tensor:
    rows = len(seeds)
    return sample(
        logits.expand(rows, -1).contiguous(),
        torch.full((rows,), temperature),
        torch.full((rows,), top_p),
        seeds,
        positions,
    )


def chi_square(tokens: Tensor, expected: Tensor) -> float:
    counts = torch.bincount(tokens.long(), minlength=len(expected)).double()
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    wanted = expected[kept] * len(tokens)
    return float(((counts[kept] - wanted) ** 2 / wanted).sum())


def test_splitmix64_reference_values() -> None:
    """The published generator from state 0: its first outputs, through the same mixer."""
    states = torch.tensor([1, 2]) * GOLDEN
    outputs = [int(value) % 2**64 for value in _mix(states)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@pytest.mark.parametrize("by", ["seed", "position"])
def test_uniforms_are_uniform_along_either_counter(by: str) -> None:
    count = torch.arange(40_000)
    fixed = torch.full_like(count, 12345)
    numbers = uniform(count, fixed) if by == "seed" else uniform(fixed, count)
    assert 0 <= float(numbers.min()) <= float(numbers.max()) < 1
    assert chi_square((numbers * 16).int(), torch.full((16,), 1 / 16, dtype=torch.float64)) < CHI_SQUARE_999[15]
    pairs = (numbers[:-1] * 4).int() * 4 + (numbers[1:] * 4).int()
    assert chi_square(pairs, torch.full((16,), 1 / 16, dtype=torch.float64)) < CHI_SQUARE_999[15]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_gives_the_softmax(temperature: float) -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -0.2, 0.9, -2.0])
    positions = torch.arange(20_000)
    tokens = draw(logits, temperature=temperature, seeds=torch.full_like(positions, 7), positions=positions)
    expected = (logits.double() / temperature).softmax(-1)
    assert chi_square(tokens, expected) < CHI_SQUARE_999[7]


def test_top_p_keeps_the_shortest_sufficient_run() -> None:
    probabilities = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15], dtype=torch.float64)
    positions = torch.arange(20_000)
    tokens = draw(probabilities.log().float(), top_p=0.69, seeds=positions * 0 + 3, positions=positions)
    expected = torch.tensor([0, 0.4, 0, 0.3, 0], dtype=torch.float64) / 0.7
    assert chi_square(tokens, expected) < CHI_SQUARE_999[1]
    three = draw(probabilities.log().float(), top_p=0.71, seeds=positions * 0 + 3, positions=positions)
    assert set(three.tolist()) == {1, 3, 4}


def test_rounding_never_draws_past_the_kept_run() -> None:
    """A uniform share of 1, which only rounding can reach, still gives a token of the kept run."""
    logits, ones = torch.tensor([[0.0, 2.0, 1.0, -5.0]]), torch.ones(1)
    assert _draw(logits, ones, ones, ones.double()).item() == 3
    assert _draw(logits, ones, ones * 0.5, ones.double()).item() == 1


def test_a_tiny_top_p_or_temperature_is_greedy() -> None:
    logits, positions = torch.tensor([0.0, 3.0, 2.999]), torch.arange(500)
    assert set(draw(logits, top_p=1e-9, seeds=positions, positions=positions).tolist()) == {1}
    assert set(draw(logits, temperature=1e-6, seeds=positions, positions=positions).tolist()) == {1}


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0], [2.0, 2.0, 2.0, 2.0]])
    zero = torch.zeros(2)
    assert sample(logits, zero, zero + 1, zero.long(), zero.long()).tolist() == [1, 0]


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**20), st.integers(0, 5), st.data())
@settings(max_examples=60)
def test_a_draw_does_not_depend_on_its_neighbours(seed: int, position: int, place: int, data: st.DataObject) -> None:
    """Same row, other company: other logits, parameters, seeds, and some rows greedy."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    own = torch.randn(50, generator=generator)
    alone = sample(own[None], torch.tensor([0.8]), torch.tensor([0.9]), torch.tensor([seed]), torch.tensor([position]))
    rows = torch.randn(6, 50, generator=generator)
    temperature, top_p = torch.rand(6, generator=generator).round(), torch.rand(6, generator=generator) + 1e-3
    seeds, positions = torch.arange(6) * 3, torch.arange(6) + 100
    rows[place], temperature[place], top_p[place], seeds[place], positions[place] = own, 0.8, 0.9, seed, position
    assert sample(rows, temperature, top_p, seeds, positions)[place] == alone[0]


def test_seed_and_position_change_the_draw() -> None:
    grid = torch.cartesian_prod(torch.arange(200), torch.arange(200))
    numbers = uniform(grid[:, 0], grid[:, 1])
    assert len(numbers.unique()) == len(grid)
    assert not math.isclose(float(uniform(torch.tensor([-1]), torch.tensor([0]))), float(numbers[0]))
