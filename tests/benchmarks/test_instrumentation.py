"""What benchmarks.instrumentation switches off is off, and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest

from benchmarks import decode, instrumentation
from benchmarks.instrumentation import BLOCK, compare, still_executor, switched_off
from worker.loop.executor import Executor


@pytest.fixture
def clock() -> decode.Clock:
    return decode.Clock()


@pytest.fixture
def executor(clock: decode.Clock) -> Iterator[Executor]:
    nothing = instrumentation._nothing
    with (
        patch.object(instrumentation, "SEATS", 2),
        patch.object(decode, "TOKENS_AHEAD", 8 * BLOCK),
        patch("worker.loop.decode.begin_step", nothing),
        patch("worker.loop.swap.copy_rows_to_host", nothing),
    ):
        yield still_executor(clock)


def kept(executor: Executor) -> list[float]:
    counters = executor.counters
    return [
        counters.beats,
        counters.steps,
        sum(counters.step_s.counts),
        counters.backing_up.seconds,
        counters.computing_s,
        *counters.swap.seconds,
    ]


def test_instrumentation_off_counts_and_times_nothing(executor: Executor, clock: decode.Clock) -> None:
    decode.turn_until(executor, clock, 2)
    with switched_off(executor):
        before = kept(executor)
        decode.turn_until(executor, clock, 2 * BLOCK)
        assert kept(executor) == before
    decode.turn_until(executor, clock, 4 * BLOCK)
    assert all(now > then for now, then in zip(kept(executor), before, strict=True))


def test_as_many_blocks_are_measured_on_as_off(executor: Executor, clock: decode.Clock) -> None:
    on, off = compare(executor, clock, 4, iter(range(1_000)).__next__)
    assert len(on) == len(off) == 2
    assert all(0 < seconds < 1 for seconds in on + off)
