"""Prompts of one rank that all ranks of its group split: tokens are those of the model library and of ranks that split
nothing, in each order that fences allow, and where requests leave or a rank is killed. Host pages are written by
the owner alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import Tensor

from protocol.errors import EXIT_PEER_LOST
from protocol.messages import NO_HOT_BUFFER
from tests.support.checkpoints import tiny_checkpoint
from tests.support.group_rig import LIMIT_S, Ask, GroupRig
from tests.support.history import first_parent_commits, seeds_of
from tests.support.prompts import TEXT
from tests.support.thread_ranks import Ran, run_ranks
from tests.support.worker_rig import Rig
from tests.worker.group.test_ranks import SETTINGS
from tests.worker.loop.test_fences import lagging, simulated
from worker.device.passes import NOT_SPLIT, PARTS_MAX
from worker.group.agreement import Round
from worker.loop.batch import Status
from worker.loop.guests import Guests
from worker.loop.rounds import Rounds
from worker.runners.base import PromptPart
from worker.streams import Streams, make_streams

pytestmark = [pytest.mark.group, pytest.mark.timeout(1_200)]

#: Others with each commit.
ORDERS = seeds_of(first_parent_commits(), 2)
MUTANT_SEEDS = range(12)
UNSPLIT = msgspec.structs.replace(SETTINGS, split_tokens=0)


@pytest.fixture(scope="module")
def checkpoint(run_dir: Path) -> Path:
    return tiny_checkpoint(run_dir, "glm-5", index_topk=32, context_max_tokens=1_024, experts=24)


def asks() -> list[Ask]:
    """Of several passes, of one with others, and shorter than any that is split."""
    return [Ask(number, list(TEXT[9 * number :][:length]), 6) for number, length in enumerate((300, 90, 12, 30, 20))]


def noting(passes: list[Round]) -> Callable[[int, Rig], None]:
    """Add the first rounds of passes to `passes`."""

    def on_rig(rank: int, rig: Rig) -> None:
        agreement = cast(Rounds, rig.executor._rounds)._agreement
        launched = agreement.launched

        def note(this: Round) -> None:
            if this.opens and not rank:
                passes.append(this)
            launched(this)

        agreement.launched = note  # type: ignore[method-assign]

    return on_rig


@pytest.mark.parametrize("size", [2, 3])
def test_split_prompts_give_the_tokens_of_unsplit_ones(size: int, checkpoint: Path) -> None:
    """In every order of a rank's streams. The owner's rows are its own, and no other rank stages any; all learn how
    long units take."""
    spread: list[list[Ask]] = [[] for _ in range(size)]
    spread[1] = asks()
    passes = list[Round]()
    plain = run_ranks(checkpoint, spread, UNSPLIT, on_rig=noting(passes))
    assert {this.owner for this in passes} == {NOT_SPLIT}
    for order in (None, *ORDERS):
        passes.clear()
        streams = partial(streams_of, order)
        ran = run_ranks(checkpoint, spread, SETTINGS, on_rig=noting(passes), streams_of=streams)
        assert ran.tokens == plain.tokens, f"order {order}"
        assert any(this.owner == 1 for this in passes)
        assert {this.pass_rows for this in passes if this.owner == 1} >= {-(-64 // size)}
        assert [bool(rig.executor.counters.staged_bytes) for rig in ran.rigs] == [rank == 1 for rank in range(size)]
        assert all(rig.executor.counters.prompt_s for rig in ran.rigs), "each rank has timed its stripes"
        assert not any(rig.host.any() for rank, rig in enumerate(ran.rigs) if rank != 1)


def streams_of(order: int | None, rank: int) -> Streams:
    return make_streams("inline") if order is None else make_streams("simulated", seed=3 * order + rank)


def test_deterministic_ranks_split_nothing(checkpoint: Path) -> None:
    settings, passes = msgspec.structs.replace(SETTINGS, deterministic=True), list[Round]()
    run_ranks(checkpoint, [asks()[:2], []], settings, on_rig=noting(passes))
    assert {this.owner for this in passes} == {NOT_SPLIT}


def owned(
    checkpoint: Path,
    script: Callable[[Rig], None],
    settings: Any = SETTINGS,
    *,
    owner: int = 1,
    run: Callable[..., Ran] = run_ranks,
) -> Ran:
    """The `owner` does `script`, and the other one of two ranks has no prompt. `run` them as run_ranks does."""

    def scripted(rank: int, rig: Rig) -> None:
        if rank == owner:
            script(rig)

    return run(checkpoint, [[], []], settings, script=scripted)


def test_prompt_behind_a_shared_prefix_is_split(checkpoint: Path) -> None:
    """Earlier rows and keys, of a prefix and of passes, reach a rank that has neither; and what the last token of a
    prompt selected reaches the owner."""
    split_behind_a_prefix(checkpoint)


def split_behind_a_prefix(checkpoint: Path, run: Callable[..., Ran] = run_ranks) -> None:
    """Assert that a prompt behind a prefix gets the same tokens and warm start, split and not."""
    prompt, found, selected = tuple(TEXT[:290]), list[list[int]](), list[bytes]()

    def share(rig: Rig) -> None:
        coordinator = rig.coordinator
        donor, sharer = (coordinator.create(number, 1, 8) for number in (1, 2))
        donor.prompt, sharer.prompt = prompt[:250], prompt  # whose last token is in the other rank's stripe
        assert coordinator.admit(donor, NO_HOT_BUFFER)
        rig.run()
        before, pages = rig.executor.counters.split_units, donor.host_pages[:3]
        sharer.shared = tuple(pages)
        assert coordinator.admit(sharer, 64)
        rig.run()
        if rig.settings.split_tokens:
            assert rig.executor.counters.split_units > before > 0
        found.append(sharer.tokens)
        selected.append(donor.warm_start)
        coordinator.host_pages.extend(donor.host_pages)
        donor.host_pages = []

    owned(checkpoint, share, owner=0, run=run)
    owned(checkpoint, share, UNSPLIT, owner=0, run=run)
    assert found[0] == found[1]
    assert len(found[0]) == 8
    assert selected[0] == selected[1] != b""


@pytest.mark.parametrize("leave_all", [False, True], ids=["one of them", "all"])
def test_request_leaves_amid_a_split_pass(leave_all: bool, checkpoint: Path) -> None:
    """One that ends its prompt in it, or all: units go on as padding, and what comes next is split again. A retracted
    request goes on where its last whole pass ended."""
    leave_amid_a_split_pass(checkpoint, leave_all)


def leave_amid_a_split_pass(checkpoint: Path, leave_all: bool, run: Callable[..., Ran] = run_ranks) -> None:
    """Assert that one request of a split pass, or all, can leave it, and that all get their tokens."""
    plain = run(checkpoint, [[], asks()], UNSPLIT).tokens
    found = dict[int, list[int]]()

    def leave(rig: Rig) -> None:
        coordinator, prompts = rig.coordinator, rig.executor._prompts
        lives = {ask.number: coordinator.create(ask.number, 1, ask.tokens) for ask in asks()}
        for ask in asks():
            lives[ask.number].prompt = tuple(ask.prompt)
        first, *others = (lives[number] for number in (3, 2, 4))
        for life in (first, *others):
            assert coordinator.admit(life, 64)
        rig.run_until(lambda: prompts.depth > 0 and prompts._open[0].place.layer == 1)
        assert prompts._open[0].split is not None
        assert len(prompts._open[0].requests()) > 1
        for life in (first, *others) if leave_all else (first,):
            coordinator.withdraw(life, "drop")
        rig.run_until(lambda: not first.placement)
        long = lives[0]
        assert coordinator.admit(long, 64)
        rig.run_until(lambda: prompts.depth > 0 and prompts._open[0].launched.part(0).start >= 128)  # type: ignore[union-attr]
        coordinator.withdraw(long, "keep")
        rig.run_until(lambda: not long.placement)
        for life in (long, first, *others):
            if not life.outcome and not life.placement:
                assert coordinator.admit(life, 64)
        rig.run()
        found.update((life.number, life.tokens) for life in coordinator.lives if life.tokens)

    ran = owned(checkpoint, leave, run=run)
    assert found == {number: plain[number] for number in (0, 2, 3, 4)}
    assert not ran.rigs[0].host.any()


# ---------------------------------------------------------------- fences


def staged_beside_guests(checkpoint: Path, seed: int, *, awaits: bool = True) -> Tensor:
    """What rank 0 has in host memory of its prompt, float32: staged from the one slab page that it lends behind that.
    Its streams copy to the host as late as they may. `awaits`: guests wait for that."""
    is_staging, rows = threading.Event(), list[Tensor]()

    def on_rig(rank: int, rig: Rig) -> None:
        if not rank and not awaits:
            passed = rig.streams.stage.record("slab_staged")
            cast(Any, rig.executor._prompts._guests)._swap = SimpleNamespace(slab_staged=lambda: passed)

    def script(rank: int, rig: Rig) -> None:
        coordinator, slab = rig.coordinator, rig.executor._seats.slab
        held = [] if rank else slab.take(slab.free - 1)
        while rank and not is_staging.wait(0.001):
            rig.turn()
        lives = [coordinator.create(10 * rank + number, 1, 4) for number in range(1 + 2 * rank)]
        for life in lives:
            life.prompt = tuple(TEXT[50 * life.number :][:60])
            assert coordinator.admit(life, NO_HOT_BUFFER)
        if not rank:
            rig.run_until(lambda: any(it.status is Status.STAGING for it in rig.executor.held()))
            is_staging.set()
            rows.append(rig.host[lives[0].host_pages[0]])
        rig.run()
        while not rank and not rig.executor.counters.split_units:
            rig.turn()
        rig.run()
        slab.give(held)
        for life in lives:
            coordinator.host_pages.extend(life.host_pages)
            life.host_pages = []

    def streams_of(rank: int) -> Streams:
        return make_streams("inline") if rank or seed < 0 else lagging("stage", simulated(seed))()

    run_ranks(checkpoint, [[], []], SETTINGS, on_rig=on_rig, script=script, streams_of=streams_of)
    return rows[0].view(torch.float32)


def test_guests_wait_for_rows_that_are_staged_from_their_pages(checkpoint: Path) -> None:
    """And without that wait they would write over them."""
    right = staged_beside_guests(checkpoint, -1)
    for seed in MUTANT_SEEDS[:2]:
        assert torch.allclose(staged_beside_guests(checkpoint, seed), right, atol=1e-4)


@pytest.mark.mutation
def test_guests_that_do_not_wait_write_over_what_is_staged(checkpoint: Path) -> None:
    right = staged_beside_guests(checkpoint, -1)
    assert any(
        not torch.allclose(staged_beside_guests(checkpoint, seed, awaits=False), right, atol=1e-4)
        for seed in MUTANT_SEEDS
    )


class TellingRank:
    """Collectives of rank 1, to which rank 0 tells of a pass of one part, which is longer each time."""

    rank, size = 1, 2

    def __init__(self) -> None:
        self.told = 0

    def broadcast(self, data: Tensor, source: int) -> None:
        assert source == 0
        self.told += 1
        data[:4] = torch.tensor([1, 64, 64 + self.told, 1])


def heard(streams: Streams) -> list[PromptPart]:
    """The parts that a rank hears of in turn."""
    state: Any = SimpleNamespace(rows=torch.empty(0), guest=lambda seats: state)
    state.slab_table = torch.zeros(PARTS_MAX, 4, dtype=torch.int32)
    seats: Any = SimpleNamespace(lend_slab=lambda counts: [[0] * count for count in counts])
    swap: Any = SimpleNamespace(slab_staged=lambda: streams.stage.record("slab_staged"))
    runner: Any = SimpleNamespace(begin_pass=lambda streams, state, parts, tokens: parts)
    told: Any = TellingRank()
    guests, parts = Guests(runner, streams, state, seats, swap, told, 64), list[PromptPart]()
    for _ in range(10):
        parts += cast(Any, guests.begin(0) or ())
    streams.close()
    return parts


def test_rank_reads_the_parts_of_a_pass_once_it_was_told() -> None:
    expected = [PromptPart(0, 64, 65 + number, 0, True) for number in range(10)]
    for seed in range(20):
        assert heard(make_streams("simulated", seed)) == heard(make_streams("inline")) == expected


@pytest.mark.mutation
def test_rank_that_does_not_wait_reads_parts_of_another_pass() -> None:
    mutants = [make_streams("simulated", seed, "seeded", ("dealt",)) for seed in range(20)]
    assert any(heard(streams) != heard(make_streams("inline")) for streams in mutants)


# ---------------------------------------------------------------- processes


@pytest.mark.process
def test_rank_that_is_killed_amid_a_split_pass_ends_its_group(checkpoint: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    rig = GroupRig(checkpoint, directory, [[], [Ask(0, list(TEXT[:300]), 6)]], SETTINGS, dies_in_split=0)
    try:
        assert rig.ranks[1].wait(LIMIT_S) == EXIT_PEER_LOST
    finally:
        rig.close()
