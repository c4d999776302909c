"""Rows of the largest block and step: what scratch memory and the exchange of a group have room for."""

from __future__ import annotations

import pytest

from protocol.settings import WorkerSettings
from protocol.units import BLOCK_TOKENS_MAX
from worker.device.step_rows import DETERMINISTIC_BLOCK_TOKENS, block_tokens_max, rows_max


@pytest.mark.parametrize(
    ("device", "deterministic", "pass_tokens", "expected"),
    [
        ("cuda:1", False, 8_192, BLOCK_TOKENS_MAX),
        ("cuda", False, 1_024, 1_024),
        ("cuda", True, 8_192, DETERMINISTIC_BLOCK_TOKENS),
        ("cuda", True, 128, 128),
        ("cpu", False, 8_192, DETERMINISTIC_BLOCK_TOKENS),
        ("cpu", False, 64, 64),
    ],
)
def test_a_block_is_large_on_a_gpu_and_part_of_a_pass(
    device: str, deterministic: bool, pass_tokens: int, expected: int
) -> None:
    settings = WorkerSettings(device=device, deterministic=deterministic, pass_tokens=pass_tokens)
    assert block_tokens_max(settings) == expected


def test_rows_are_those_of_the_larger_one_of_step_and_block() -> None:
    small = WorkerSettings(pass_tokens=64)
    assert (rows_max(small), rows_max(WorkerSettings(pass_tokens=64, seats=100))) == (64, 100)
    assert rows_max(WorkerSettings(pass_tokens=64, seats=100, draft_tokens=2, tail_slots=8)) == 300
