"""Prompts that begin with host pages of another request: loaded, not computed, and never written."""

from __future__ import annotations

import msgspec
import pytest
import torch

from protocol.messages import Faulted, Released
from tests.support.fakes.coordinator import Life
from tests.support.fakes.hash_runner import SEPARATE, SHARED, FakeRunner
from tests.support.worker_rig import SETTINGS, Rig
from worker.streams import make_streams

PROMPT_TOKENS = 200
NUMBER = 1


def after_a_donor(rig: Rig) -> list[int]:
    """Host pages of a request that ended: they still hold its rows, and no request has them."""
    donor = rig.coordinator.create(NUMBER, PROMPT_TOKENS, 4)
    assert rig.coordinator.admit(donor, 64)
    pages = list(donor.host_pages)
    rig.run()
    return pages


def sharing(rig: Rig, pages: list[int], prefix_tokens: int, max_tokens: int = 12) -> Life:
    """A request with the donor's prompt, and the first pages of `pages`."""
    shared = pages[: prefix_tokens // 64]
    for page in shared:
        rig.coordinator.host_pages.remove(page)
    life = rig.coordinator.create(NUMBER, PROMPT_TOKENS, max_tokens)
    life.host_pages, life.prefix_tokens = list(shared), prefix_tokens
    return life


@pytest.mark.parametrize("hot_slots", [0, 64, 192])
@pytest.mark.parametrize("prefix_tokens", [64, 128, 192])
def test_tokens_are_those_of_a_whole_prefill(prefix_tokens: int, hot_slots: int) -> None:
    rig = Rig()
    pages = after_a_donor(rig)
    staged, loaded = rig.executor.counters.staged_bytes, rig.executor.counters.preloaded_bytes
    life = sharing(rig, pages, prefix_tokens)
    before = rig.host[pages[: prefix_tokens // 64]].clone()
    assert rig.coordinator.admit(life, hot_slots)
    rig.run()
    assert not rig.wrong()
    assert torch.equal(rig.host[pages[: prefix_tokens // 64]], before)
    geometry = rig.runner.geometry
    row_bytes = geometry.layers * geometry.row_bytes + geometry.groups * geometry.index_row_bytes
    assert rig.executor.counters.preloaded_bytes - loaded >= prefix_tokens * row_bytes
    assert rig.executor.counters.staged_bytes - staged == (PROMPT_TOKENS - prefix_tokens) * row_bytes
    rig.check_end()


@pytest.mark.parametrize("seed", range(60))
def test_tokens_do_not_depend_on_the_order_of_streams(seed: int) -> None:
    """Another request decodes meanwhile, and one prefills behind it."""
    rig = Rig(make_streams("simulated", seed), runner=FakeRunner((SHARED, SEPARATE)[seed % 2]))
    pages = after_a_donor(rig)
    other = rig.coordinator.create(2, 90, 30, seed=2)
    assert rig.coordinator.admit(other, 64)
    rig.run_until(lambda: len(other.tokens) >= 2)
    assert rig.coordinator.admit(sharing(rig, pages, 128), (0, 64)[seed // 2 % 2])
    assert rig.coordinator.admit(rig.coordinator.create(3, 70, 6, seed=3), 0)
    rig.run()
    assert not rig.wrong()
    rig.check_end()


def test_a_missing_fence_behind_the_loads_gives_wrong_tokens() -> None:
    def is_wrong(seed: int) -> bool:
        rig = Rig(make_streams("simulated", seed, "seeded", ("preloaded",)), runner=FakeRunner(SEPARATE))
        pages = after_a_donor(rig)
        assert rig.coordinator.admit(sharing(rig, pages, 128), 64)
        rig.run()
        return bool(rig.wrong())

    assert any(is_wrong(seed) for seed in range(60))


@pytest.mark.parametrize("leaving", ["keep", "drop", "abort"])
@pytest.mark.parametrize("turns", [0, 1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_withdrawn_while_the_prefix_is_loaded(leaving: str, turns: int, seed: int) -> None:
    rig = Rig(make_streams("simulated", seed))
    pages = after_a_donor(rig)
    life = sharing(rig, pages, 192)
    before = rig.host[pages[:3]].clone()
    assert rig.coordinator.admit(life, 64)
    rig.turn(turns)
    rig.coordinator.withdraw(life, leaving)
    rig.run_until(lambda: not life.placement)
    assert torch.equal(rig.host[pages[:3]], before)
    if leaving != "abort":
        life.prefix_tokens = 0
        assert rig.coordinator.admit(life, 64)
    rig.run()
    assert not rig.wrong()
    rig.check_end()


@pytest.mark.parametrize("prefix_tokens", [-64, 63, 256, 1 << 40])
def test_unfit_prefix_is_refused_and_nothing_is_held(prefix_tokens: int) -> None:
    rig = Rig()
    life = rig.coordinator.create(NUMBER, PROMPT_TOKENS, 4)
    life.prefix_tokens = prefix_tokens
    assert rig.coordinator.admit(life, 64)
    rig.run()
    said = [event for event in rig.coordinator.events if isinstance(event, Faulted | Released)]
    assert isinstance(said[0], Faulted)
    assert f"prefix_tokens={prefix_tokens}" in said[0].message
    rig.check_end()


def test_whole_chunks_alone_are_shared_where_chunks_are_fixed() -> None:
    rig = Rig(settings=msgspec.structs.replace(SETTINGS, prefill_chunk_tokens=128))
    rig.runner.info = msgspec.structs.replace(rig.runner.info, prefix_unit_tokens=128)
    life = rig.coordinator.create(NUMBER, PROMPT_TOKENS, 4)
    life.prefix_tokens = 64
    assert rig.coordinator.admit(life, 64)
    rig.run()
    assert "in multiples of 128" in life.outcome
