"""The executor against an oracle: what memory a request has, and who its neighbours are, never shows in its output."""

from __future__ import annotations

import random
from collections import deque
from functools import cache

import msgspec
import pytest
import torch

from protocol.settings import WorkerSettings
from tests.support.fakes.coordinator import Life
from tests.support.fakes.hash_runner import SEPARATE, SHARED, FakeRunner
from tests.support.history import in_turn
from tests.support.worker_rig import SETTINGS, Logits, Rig
from worker.streams import Streams, make_streams

replace = msgspec.structs.replace

SIZES = (0, *SETTINGS.hot_size_classes)
DETERMINISTIC = replace(SETTINGS, deterministic=True)
EAGER = replace(SETTINGS, lookahead_steps=0)


def run_mixed(
    sizes: tuple[int, ...], settings: WorkerSettings = SETTINGS, streams: Streams | None = None
) -> tuple[Rig, Logits]:
    """Five requests of mixed lengths on four seats, each with its hot size; the fifth takes a seat that became free."""
    rig = Rig(streams, settings, keep_logits=True)
    lives = [
        rig.coordinator.create(number, prompt, count, seed=number)
        for number, (prompt, count) in enumerate(((33, 30), (64, 12), (250, 20), (7, 9), (100, 16)))
    ]
    waiting = deque(zip(lives, sizes, strict=True))
    while waiting:
        rig.run_until(lambda: rig.coordinator.seats > 0 or rig.executor.idle)
        assert rig.coordinator.admit(*waiting.popleft())
    rig.run()
    assert not rig.wrong()
    rig.check_end()
    return rig, rig.logits


@cache
def resident() -> Logits:
    return run_mixed((0,) * 5)[1]


@pytest.mark.parametrize("settings", [SETTINGS, DETERMINISTIC, EAGER], ids=["default", "deterministic", "lookahead-0"])
@pytest.mark.parametrize("sizes", [(64,) * 5, (128,) * 5, (192,) * 5, (0, 64, 128, 192, 64)], ids=str)
def test_tokens_and_logits_do_not_depend_on_the_hot_size(sizes: tuple[int, ...], settings: WorkerSettings) -> None:
    """SGLang #27258: a hot buffer that one way of admission does not set up."""
    rig, logits = run_mixed(sizes, settings)
    assert sum(life.misses for life in rig.coordinator.lives) > 0
    assert logits.keys() == resident().keys()
    assert all(torch.equal(logits[step], resident()[step]) for step in logits)


@pytest.mark.parametrize("seed", range(6))
def test_tokens_and_logits_do_not_depend_on_stream_order(seed: int) -> None:
    """SGLang #31901: host pages and device pages are numbered separately."""
    _, logits = run_mixed((0, 64, 128, 192, 64), streams=make_streams("simulated", seed))
    assert logits.keys() == resident().keys()
    assert all(torch.equal(logits[step], resident()[step]) for step in logits)


def test_outputs_vary_and_logits_differ() -> None:
    """The comparisons above could fail: no two steps have the same logits, and tokens repeat by chance alone."""
    rig, _ = run_mixed((0,) * 5)
    assert len({tuple(values.tolist()) for values in resident().values()}) == len(resident())
    assert all(len(set(life.tokens)) > len(life.tokens) // 2 for life in rig.coordinator.lives)


def test_single_request_has_no_misses() -> None:
    rig = Rig()
    life = rig.coordinator.create(1, 200, 60)
    assert rig.coordinator.admit(life, 0)
    rig.run()
    assert not rig.wrong()
    assert life.misses == 0
    assert life.hits > 0


def test_a_corrupted_host_row_changes_the_output() -> None:
    """One bit of one row: comparisons of tokens can fail, and rows that decoding selects do come from the host."""

    def is_changed_by(row: int) -> bool:
        rig = Rig()
        life = rig.coordinator.create(1, 200, 20)
        assert rig.coordinator.admit(life, 64)
        rig.run_until(lambda: len(life.tokens) >= 3)
        rig.host[life.host_pages[0], row * 16] ^= 1
        rig.run()
        return rig.wrong() == [1]

    assert any(is_changed_by(row) for row in range(10))


def churn(rig: Rig, lives: list[Life], seed: int, aborts: int) -> None:
    """Random resizes, retractions, resumes and `aborts` aborts until every request has ended."""
    chance, coordinator = random.Random(seed), rig.coordinator
    doomed = set(chance.sample(range(len(lives)), aborts))
    while any(not life.outcome for life in lives):
        for life in chance.sample(lives, len(lives)):
            if not life.placement and not life.outcome:
                coordinator.admit(life, chance.choice(SIZES)) or coordinator.admit(life, 64)
        here = [life for life in lives if life.here]
        for life in chance.sample(here, min(2, len(here))):
            match chance.choice(("resize", "resize", "keep", "drop", "abort", "nothing")):
                case "resize":
                    coordinator.resize(life, chance.choice(SIZES))
                case "keep" | "drop" as leaving if chance.random() < 0.5:
                    coordinator.withdraw(life, leaving)
                case "abort" if life.number in doomed and len(life.tokens) > chance.randrange(8):
                    coordinator.withdraw(life, "abort")
        rig.turn(chance.randrange(1, 4))
        if chance.random() < 0.15:
            rig.check()
    rig.run()


@pytest.mark.parametrize(("backend", "seed"), [*zip(("inline", "simulated"), in_turn([(0, 1), (1, 0)]), strict=True)])
def test_churn_over_50_requests_keeps_outputs_and_leaks_no_page(backend: str, seed: int) -> None:
    """SGLang #40729, #36591: to the host and back, again and again."""
    settings = replace(SETTINGS, seats=50, host_mem="900KiB", device_mem="2MiB", hot_chunks_max=120, pass_tokens=256)
    runner, ahead_tokens = FakeRunner((SHARED, SEPARATE)[seed % 2]), (0, 8)[seed % 2]
    rig = Rig(make_streams(backend, seed), settings, runner=runner, ahead_tokens=ahead_tokens)
    chance = random.Random(seed)
    lives = [
        rig.coordinator.create(number, chance.randrange(1, 150), chance.randrange(1, 50), seed=number)
        for number in range(50)
    ]
    churn(rig, lives, seed, aborts=5)
    assert not rig.wrong()
    rig.check_end()
    outcomes = {life.outcome for life in lives}
    assert outcomes <= {"length", "aborted"}
    counters = rig.executor.counters
    assert counters.resized > 30
    assert counters.admitted > 60
    assert counters.parked > 10 or ahead_tokens
    assert counters.swap.totals[1] > 1_000


def test_durable_length_counts_exactly_the_written_rows() -> None:
    """I3: with copies done at once it catches up with the rows written, and it never runs ahead of them."""
    rig = Rig(make_streams("inline"), SETTINGS)
    assert rig.coordinator.admit(rig.coordinator.create(1, 100, 24), 64)
    lags = set()
    while not rig.executor.idle:
        rig.turn()
        lags |= {r.position - r.durable_rows for r in rig.executor.held() if r.durable_rows}
    assert min(lags) == 0
