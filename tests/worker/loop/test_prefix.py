"""A request whose prompt's first pages lie in host memory: shared with others, read, and never written."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch

from protocol.arrays import pack_int32
from protocol.messages import NO_HOT_BUFFER, Admit, Faulted, Released
from tests.support.fakes.coordinator import Life
from tests.support.fakes.hash_runner import SEPARATE, SHARED, FakeRunner
from tests.support.pairwise import pairwise
from tests.support.worker_rig import SETTINGS, Rig
from worker.loop.swap import StagedRows, Swap
from worker.streams import Fence, Streams, make_streams

PROMPT = 250
PAGES = 3
SEEDS = range(40)


class Pair:
    """One worker, a donor that left its prompt in host memory, and a sharer of its first pages."""

    def __init__(self, streams: Streams, pages: int, groups: Sequence[int] = SHARED) -> None:
        self.rig = Rig(streams, runner=FakeRunner(groups))
        coordinator = self.rig.coordinator
        self.donor = coordinator.create(1, PROMPT, 8, seed=1)
        assert coordinator.admit(self.donor, NO_HOT_BUFFER)
        self.rig.run()
        self.pages = torch.tensor(self.donor.host_pages[:pages], dtype=torch.long)
        self.before = self.rig.host[self.pages].clone()
        self.sharer = coordinator.create(1, PROMPT, 8, seed=1)
        self.sharer.shared = tuple(self.donor.host_pages[:pages])

    def end(self) -> None:
        """The shared pages are as they were; what both held is free again."""
        assert torch.equal(self.rig.host[self.pages], self.before)
        coordinator = self.rig.coordinator
        coordinator.host_pages.extend(self.donor.host_pages)
        self.donor.host_pages = []
        self.rig.check_end()


def run(
    seed: int,
    pages: int,
    hot_slots: int,
    order: str = "seeded",
    omit: tuple[str, ...] = (),
    groups: Sequence[int] | None = None,
) -> Pair:
    groups = groups or (SHARED, SEPARATE)[seed % 2]
    pair = Pair(make_streams("simulated", seed, order, omit), pages, groups)  # type: ignore[arg-type]
    assert pair.rig.coordinator.admit(pair.sharer, hot_slots)
    pair.rig.run()
    return pair


@pytest.mark.parametrize(
    ("seed", "pages", "hot_slots", "groups"), pairwise(range(10), range(PAGES + 1), (0, 64), (SHARED, SEPARATE))
)
def test_tokens_with_a_shared_prefix_are_the_oracles(
    seed: int, pages: int, hot_slots: int, groups: Sequence[int]
) -> None:
    pair = run(seed, pages, hot_slots, groups=groups)
    assert not pair.rig.wrong()
    assert pair.sharer.outcome == "length"
    pair.end()


def test_rows_of_the_prefix_are_not_staged_again() -> None:
    staged = []
    for pages in (0, PAGES):
        pair = run(0, pages, 64)
        staged.append(pair.rig.executor.counters.staged_bytes)
    geometry = pair.rig.runner.geometry
    assert staged[0] - staged[1] == PAGES * geometry.page_bytes


@pytest.mark.mutation
@pytest.mark.parametrize("fence", ["index_loaded", "refilled", "slab_read"])
def test_prefill_without_its_fence_is_caught(fence: str) -> None:
    assert not run(0, PAGES, 64, "plain", (fence,)).rig.wrong()
    assert any(run(seed, PAGES, 64, "seeded", (fence,)).rig.wrong() for seed in range(80))


@pytest.mark.mutation
def test_written_shared_pages_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging that begins at 0 writes what the slab holds of the prefix, here before it was loaded."""
    stage = Swap.stage

    def from_the_start(swap: Swap, rows: Sequence[StagedRows], layer: int) -> Fence:
        return stage(swap, [it._replace(start=0) for it in rows], layer)

    def is_caught(seed: int) -> bool:
        pair = Pair(make_streams("simulated", seed), PAGES)
        with monkeypatch.context() as patch:
            patch.setattr(Swap, "stage", from_the_start)
            assert pair.rig.coordinator.admit(pair.sharer, 64)
            pair.rig.run()
        return not torch.equal(pair.rig.host[pair.pages], pair.before)

    assert any(is_caught(seed) for seed in SEEDS)


@pytest.mark.parametrize("leaving", ["keep", "drop", "abort"])
@pytest.mark.parametrize("seed", range(8))
def test_request_leaves_while_its_prefix_is_loaded(seed: int, leaving: str) -> None:
    pair = Pair(make_streams("simulated", seed), PAGES)
    coordinator = pair.rig.coordinator
    assert coordinator.admit(pair.sharer, 64)
    pair.rig.turn()
    coordinator.withdraw(pair.sharer, leaving)
    pair.rig.run()
    if leaving != "abort":
        assert coordinator.admit(pair.sharer, 64)
        pair.rig.run()
        assert pair.sharer.outcome == "length"
    assert not pair.rig.wrong()
    pair.end()


@pytest.mark.parametrize("seed", range(8))
def test_a_batch_goes_on_while_a_prefix_is_loaded(seed: int) -> None:
    pair = Pair(make_streams("simulated", seed), PAGES)
    coordinator = pair.rig.coordinator
    other = coordinator.create(2, 70, 30)
    assert coordinator.admit(other, 64)
    pair.rig.run_until(lambda: len(other.tokens) >= 2)
    assert coordinator.admit(pair.sharer, 64)
    pair.rig.run()
    assert not pair.rig.wrong()
    pair.end()


@pytest.mark.parametrize("hot_slots", [0, 64])
@pytest.mark.parametrize("seed", range(4))
def test_a_short_rest_goes_through_decode_steps_without_a_slab(seed: int, hot_slots: int) -> None:
    pair = Pair(make_streams("simulated", seed), PAGES, (SHARED, SEPARATE)[seed % 2])
    coordinator, counters = pair.rig.coordinator, pair.rig.executor.counters
    pair.sharer.by_steps = True
    seats = pair.rig.executor._seats
    taken, computed = seats.slab.take(seats.slab.free), counters.prompt_tokens
    assert coordinator.admit(pair.sharer, hot_slots)
    pair.rig.run()
    assert not pair.rig.wrong()
    assert (pair.sharer.outcome, counters.prompt_tokens) == ("length", computed)
    seats.slab.give(taken)
    pair.end()


@pytest.mark.parametrize("leaving", ["keep", "drop", "abort"])
@pytest.mark.parametrize("seed", range(4))
def test_request_leaves_while_its_rest_goes_through_steps(seed: int, leaving: str) -> None:
    """Prompt rows alone are nothing to resume from: it begins anew, and the shared pages are as they were."""
    pair = Pair(make_streams("simulated", seed), PAGES)
    coordinator = pair.rig.coordinator
    pair.sharer.by_steps = True
    assert coordinator.admit(pair.sharer, 64)
    pair.rig.run_until(lambda: any(it.position > PAGES * 64 + 5 for it in pair.rig.executor.held()))
    coordinator.withdraw(pair.sharer, leaving)
    pair.rig.run()
    if leaving != "abort":
        assert coordinator.admit(pair.sharer, 64)
        pair.rig.run()
        assert pair.sharer.outcome == "length"
    assert not pair.rig.wrong()
    pair.end()


@pytest.mark.parametrize("seed", range(4))
def test_pages_of_a_prompt_are_reported_as_they_become_durable(seed: int) -> None:
    """What is reported never changes any more."""
    rig = Rig(make_streams("simulated", seed), runner=FakeRunner((SHARED, SEPARATE)[seed % 2]))
    coordinator, seen = rig.coordinator, []

    def note(life: Life) -> None:
        pages = torch.tensor(life.host_pages[: life.prompt_rows // 64], dtype=torch.long)
        seen.append((life.prompt_rows, pages, rig.host[pages].clone()))

    coordinator.on_prompt_rows = note  # type: ignore[method-assign]
    life = coordinator.create(1, PROMPT, 8, seed=1)
    assert coordinator.admit(life, NO_HOT_BUFFER)
    rig.run()
    assert len({rows for rows, _, _ in seen}) >= 2, "more than once"
    assert all(torch.equal(rig.host[pages], rows) for _, pages, rows in seen)
    coordinator.host_pages.extend(life.host_pages)
    rig.check_end()


@pytest.mark.parametrize("seed", range(4))
def test_a_prompt_that_leaves_early_reports_the_pages_that_it_has_written(seed: int) -> None:
    rig = Rig(make_streams("simulated", seed), runner=FakeRunner(SHARED))
    coordinator = rig.coordinator
    life = coordinator.create(1, PROMPT, 8, seed=1)
    assert coordinator.admit(life, 64)
    rig.run_until(lambda: any(it.prefilled >= 160 for it in rig.executor.held()))
    host_pages = list(life.host_pages[:2])
    coordinator.withdraw(life, "drop")
    rig.run()
    assert life.prompt_rows >= 128
    written = rig.host[host_pages].clone()
    again = coordinator.create(2, PROMPT, 8, seed=1)
    again.prompt = life.prompt
    assert coordinator.admit(again, NO_HOT_BUFFER)
    rig.run()
    assert torch.equal(rig.host[again.host_pages[:2]], written)


BAD = {
    "beyond the prompt": {"prefix_tokens": 256},
    "the whole prompt": {"prefix_tokens": 128, "prompt": 128},
    "no whole page": {"prefix_tokens": 32},
    "negative": {"prefix_tokens": -64},
    "with durable rows": {"prefix_tokens": 64, "durable_tokens": PROMPT, "generated": pack_int32([1])},
    "no whole chunk in deterministic mode": {"prefix_tokens": 64, "chunk": 128},
    "by steps in deterministic mode": {"prefix_tokens": 128, "by_steps": True, "chunk": 128},
    "by steps without a prefix": {"by_steps": True},
    "unsent without a transfer": {"unsent_tokens": 64},
    "unsent to its end": {"unsent_tokens": 256, "transfer_id": 5},
}


@pytest.mark.parametrize("changes", BAD.values(), ids=BAD)
def test_bad_prefix_is_refused_by_name(changes: dict[str, object]) -> None:
    changes = dict(changes)
    chunk, prompt = changes.pop("chunk", 0), changes.pop("prompt", PROMPT)
    more = {"deterministic": True, "pass_tokens": chunk} if chunk else {}
    rig = Rig(settings=msgspec.structs.replace(SETTINGS, **more))
    life = Life(1, (1,) * int(str(prompt)), rig.coordinator.create(1, PROMPT, 8).sampling)
    life.host_pages, life.placement = [0, 1, 2, 3], 7
    life.index_pages = 4
    life.hot_slots, life.hot_chunks = 64, 2
    command: Admit = msgspec.structs.replace(rig.coordinator._admit_command(life), **changes)
    events: list[object] = []
    rig.coordinator.add_event = events.append  # type: ignore[method-assign, assignment]
    rig.executor.submit(command)
    rig.run()
    faulted, released = events
    assert isinstance(faulted, Faulted)
    named = next(field for field in ("by_steps", "unsent_tokens", "prefix_tokens") if field in changes)
    assert named in faulted.message
    assert released == Released(7, 0)
    rig.executor.check_invariants()
