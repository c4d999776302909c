"""The executor with a model whose heads select blocks: no hot size, resize or retraction shows in tokens, which are
those of the library."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
from torch import Tensor

from kernels.seat import hold_tokens
from kernels.state import DeviceState
from protocol.errors import ConfigError
from protocol.messages import NO_HOT_BUFFER
from protocol.settings import WorkerSettings
from tests.support.block_model import DIM, library, prompt, runner
from tests.support.fakes.coordinator import Life
from tests.support.worker_rig import Rig
from worker.process import _recorder

SETTINGS = WorkerSettings(
    seats=4,
    hot_size_classes=(384, 512, 768),
    pass_tokens=128,
    context_max_tokens=1_024,
    host_mem="32MiB",
    device_mem="32MiB",
)
LENGTHS = (700, 639, 130)
NEW_TOKENS = 30


def start(settings: WorkerSettings = SETTINGS, pace: int = 0) -> tuple[Rig, list[Life]]:
    rig, lives = Rig(settings=settings, runner=runner(), pace=pace), []
    for number, length in enumerate(LENGTHS):
        lives.append(rig.coordinator.create(number, 1, NEW_TOKENS))
        lives[-1].prompt = tuple(prompt(length, number))
    return rig, lives


def check_tokens(rig: Rig, lives: Sequence[Life]) -> None:
    rig.check_end()
    for number, life in enumerate(lives):
        assert life.tokens == library(LENGTHS[number], NEW_TOKENS, number)[0], number


@pytest.mark.parametrize("sizes", [(384, 384, 384), (512, 0, 384), (768, 512, 768)])
def test_tokens_are_the_librarys_for_any_hot_size(sizes: tuple[int, ...]) -> None:
    rig, lives = start()
    for life, hot_slots in zip(lives, sizes, strict=True):
        assert rig.coordinator.admit(life, hot_slots)
    rig.run()
    check_tokens(rig, lives)
    held = [size or 2 * length for size, length in zip(sizes, LENGTHS, strict=True)]
    assert (lives[0].misses > 0) == (held[0] < LENGTHS[0])


@pytest.mark.parametrize("seed", range(3))
def test_no_retraction_or_resize_shows_in_tokens(seed: int) -> None:
    """Requests are resized in every way, retracted with and without their rows, and come back with other sizes."""
    rig, lives = start(pace=seed)
    draw, sizes = random.Random(seed), (0, *SETTINGS.hot_size_classes)
    for life in lives:
        assert rig.coordinator.admit(life, draw.choice(sizes))
    while not all(life.outcome for life in lives):
        rig.turn(draw.randrange(1, 12))
        life = draw.choice(lives)
        if life.outcome:
            continue
        match draw.choice(("resize", "resize", "keep", "drop")) if life.placement else "admit":
            case "resize":
                rig.coordinator.resize(life, draw.choice(sizes))
            case "admit":
                rig.coordinator.admit(life, draw.choice(sizes))
            case leaving:
                rig.coordinator.withdraw(life, leaving)
    rig.run()
    check_tokens(rig, lives)


def test_a_warm_start_takes_no_slot_of_the_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a block a head has selected one page more than the smallest buffer has ordinary slots."""
    held: list[tuple[int, int]] = []

    def hold(state: DeviceState, seat: int, hot_slots: int, groups: Tensor, slots: Tensor, tokens: Tensor) -> None:
        held.append((hot_slots, int(slots.max())))
        hold_tokens(state, seat, hot_slots, groups, slots, tokens)

    monkeypatch.setattr("worker.loop.swap.hold_tokens", hold)
    rig = Rig(settings=SETTINGS, runner=runner())
    life = rig.coordinator.create(0, 1, NEW_TOKENS)
    life.prompt = tuple(prompt(640, 0))
    assert rig.coordinator.admit(life, NO_HOT_BUFFER)
    rig.run()
    assert rig.coordinator.admit(life, 384)
    rig.run()
    assert life.tokens == library(640, NEW_TOKENS)[0]
    assert held == [(5, 4)]


def test_swap_in_is_counted_by_layers_that_select() -> None:
    """A layer's counts are those of its heads together; a head loads the K and V of a page."""
    rig, lives = start()
    for life in lives:
        assert rig.coordinator.admit(life, 384)
    rig.run()
    swap, misses = rig.executor.counters.swap, sum(life.misses for life in lives)
    assert swap.selecting == [1, 2, 3]
    assert sum(swap.by_layer(swap.misses)) == misses > 0
    assert swap.loaded_bytes == misses * 64 * 2 * DIM * 4


def test_hot_sizes_hold_two_pages_more_each() -> None:
    """A larger buffer has room for the tail's two slots beside those of a smaller one."""
    with pytest.raises(ConfigError, match=r"hot_size_classes=384,448: .*384 rows, .* \(name sizes .* multiples of 128"):
        Rig(settings=msgspec.structs.replace(SETTINGS, hot_size_classes=(384, 448)), runner=runner())


def test_selections_of_pages_are_not_recorded() -> None:
    with pytest.raises(ConfigError, match=r"worker\.record_selections=trace: selections of pages"):
        _recorder(msgspec.structs.replace(SETTINGS, record_selections="trace"), runner())
