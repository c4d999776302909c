"""The decode loop's side of a group: wishes are read when they were gathered, and not before; what a request may cause
is found before its round, and an error inside of a round is the group's."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import Tensor

from kernels.state import DeviceState
from protocol.messages import Faulted, Released
from tests.support.fakes.hash_runner import ALTERNATING, FakeRunner
from tests.support.late_masks import late_once
from tests.support.limits import HANG_LIMIT_S
from tests.support.thread_ranks import FakeControl as GroupControl
from tests.support.thread_ranks import ThreadCollectives
from tests.support.worker_rig import Rig
from worker.group.agreement import Agreement, Round, RoundKind, Wish
from worker.group.control import LoopProgress
from worker.loop import grammars
from worker.loop.rounds import Rounds
from worker.runners.base import PromptPass
from worker.streams import Streams, make_streams

SEEDS = range(20)


@dataclass
class EchoingPeer:
    """A second rank, as collectives: it wishes what this rank wishes, with one row more."""

    rank: int = 0
    size: int = 2

    def all_gather(self, output: Tensor, own: Tensor) -> None:
        both = output.view(2, -1)
        both[0], both[1] = own, own
        both[1, 0] += 1

    def all_to_all(self, output: Tensor, parts: Tensor) -> None:
        raise NotImplementedError

    def broadcast(self, data: Tensor, source: int) -> None:
        raise NotImplementedError


@dataclass
class FakeControl:
    progress: LoopProgress = field(default_factory=LoopProgress)
    woken_at: int = -1
    wakes: list[int] = field(default_factory=list)

    def wake(self, number: int) -> None:
        self.wakes.append(number)


def rounds_on(streams: Streams, lag: int = 2) -> tuple[Rounds, FakeControl]:
    agreement = Agreement(lag=lag, batch_sizes=[1, 2, 64], layers=2)
    control = FakeControl()
    group: Any = SimpleNamespace(size=2, control=control, collectives=EchoingPeer())
    return Rounds(group, agreement, streams.compute, "cpu"), control


def sizes(streams: Streams) -> list[int]:
    """Sizes of the decode rounds while this rank wishes 1, 2, ... rows: what it wished two rounds before, and one more,
    padded."""
    rounds, _ = rounds_on(streams)
    found = []
    for number in range(30):
        this = rounds.next(has_work=True)
        assert this is not None
        rounds.begin(this)
        rounds.end(this, Wish(rows=number + 1))
        found.append(this.size)
    streams.close()
    return found


def test_a_round_follows_the_wishes_of_two_rounds_before() -> None:
    assert sizes(make_streams("inline")) == [0, 2, 2, 64, *[64] * 26]
    for seed in SEEDS:
        assert sizes(make_streams("simulated", seed)) == sizes(make_streams("inline"))


@pytest.mark.mutation
def test_an_omitted_fence_lets_wishes_be_read_too_early() -> None:
    mutants = [make_streams("simulated", seed, "seeded", ("wishes_gathered",)) for seed in SEEDS]
    assert any(sizes(streams) != sizes(make_streams("inline")) for streams in mutants)


def test_a_sleeping_group_is_woken_once_by_work_and_follows_the_wakes_of_others() -> None:
    rounds, control = rounds_on(make_streams("inline"))
    assert rounds.next(has_work=False) is None
    assert rounds.settled
    first = Round(0, RoundKind.WISHES, 0)
    assert rounds.next(has_work=True) == rounds.next(has_work=True) == first
    assert control.wakes == [0]
    control.woken_at = 0
    assert rounds.next(has_work=False) == first
    rounds.begin(first)
    rounds.end(first, Wish())
    assert control.progress.launched == 0
    assert not rounds.settled


class FakeGroupRunner(FakeRunner):
    """Counts the units to which its rank brings rows, and those that it pads. `breaks`: the unit of the last layer
    fails."""

    launched = padded = 0
    breaks = False
    splits_passes = True

    def launch_padding(self, streams: Streams, layer: int, rows: int) -> None:
        assert rows
        self.padded += 1

    def launch_unit(self, streams: Streams, state: DeviceState, prompts: PromptPass, layer: int, *place: Any) -> None:
        if self.breaks and layer == self.layers - 1:
            raise RuntimeError("a broken unit")
        self.launched += 1
        super().launch_unit(streams, state, prompts, layer, *place)


@dataclass
class LoneRank:
    rank: int = 0
    size: int = 1

    def all_gather(self, output: Tensor, own: Tensor) -> None:
        output.copy_(own)

    def all_to_all(self, output: Tensor, parts: Tensor) -> None:
        raise NotImplementedError

    def broadcast(self, data: Tensor, source: int) -> None:
        raise NotImplementedError


def rig_of_a_rank(poison: int | None = None) -> Rig:
    group: Any = SimpleNamespace(rank=0, size=1, control=FakeControl(), collectives=LoneRank())
    return Rig(runner=FakeGroupRunner(poison=poison), group=group)


def test_a_bad_request_is_faulted_before_its_round_and_the_group_goes_on() -> None:
    rig = rig_of_a_rank()
    bad, good = (rig.coordinator.create(number, 40, 6, seed=number) for number in range(2))
    bad.prompt = (5, 100_000, 7)
    for life in (bad, good):
        assert rig.coordinator.admit(life, 64)
    rig.run()
    assert [type(event) for event in rig.coordinator.events[:2]] == [Faulted, Released]
    assert "ids must lie in" in bad.outcome
    assert good.outcome == "length"
    rig.check_end()


def test_prompt_whose_mask_is_late_draws_behind_its_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass goes without it, and so do the first tokens of others in that pass."""
    has_mask, known = grammars.Grammar.has_mask.fget, list[bool]()  # type: ignore[attr-defined]
    monkeypatch.setattr(grammars.Grammar, "has_mask", property(lambda it: bool(known) and has_mask(it)))
    rig = rig_of_a_rank()
    held = rig.coordinator.create(1, 32, 6, grammar=ALTERNATING)
    others = [rig.coordinator.create(number, 4, 6) for number in (2, 3, 4)]
    for life in (held, *others):
        assert rig.coordinator.admit(life, 64)
    rig.run_until(lambda: all(life.tokens for life in others))
    assert not held.tokens
    for request in rig.executor.held():
        assert request.grammar is None or request.grammar._done.wait(HANG_LIMIT_S)
    known.append(True)
    rig.run()
    assert cast(FakeGroupRunner, rig.runner).padded == 0
    assert not rig.wrong()
    rig.check_end()


def test_masks_that_are_late_change_no_token_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars.Grammar, "wait", late_once())
    rig = rig_of_a_rank()
    for number, grammar in enumerate((ALTERNATING, "", ALTERNATING)):
        assert rig.coordinator.admit(rig.coordinator.create(number, 40, 8, seed=number, grammar=grammar), 64 * number)
    rig.run()
    assert not rig.wrong()
    assert rig.executor.counters.late_masks >= 14
    rig.check_end()


def test_slow_masks_change_no_token_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row waits for its mask outside of the rounds."""
    monkeypatch.setattr(grammars, "QUICK_S", -1.0)
    rig = rig_of_a_rank()
    for number, grammar in enumerate((ALTERNATING, "", ALTERNATING)):
        assert rig.coordinator.admit(rig.coordinator.create(number, 40, 8, seed=number, grammar=grammar), 64 * number)
    rig.run()
    assert not rig.wrong()
    assert rig.executor.counters.late_masks == 0
    rig.check_end()


def test_blocks_are_the_largest_where_no_rank_decodes() -> None:
    """There is no gap to hold: the rounds take what the runner takes."""
    rig = rig_of_a_rank()
    asked, block = list[bool](), rig.executor._pace.block

    def noted(*, beside_steps: bool) -> int:
        asked.append(beside_steps)
        return block(beside_steps=beside_steps)

    rig.executor._pace.block = noted  # type: ignore[method-assign]
    life = rig.coordinator.create(1, 60, 8)
    assert rig.coordinator.admit(life, 64)
    rig.run_until(lambda: bool(life.tokens))
    assert not any(asked)
    rig.run()
    assert any(asked)


def test_pass_is_preempted_by_as_many_rows_as_it_has_on_all_ranks_together() -> None:
    """Rows of the group's passes count on every rank, also on one that pads them."""
    rig = rig_of_a_rank()
    prompts = rig.executor._prompts
    assert rig.coordinator.admit(rig.coordinator.create(1, 150, 8), 64)
    while not prompts.depth:
        rig.turn()
    (below,) = prompts._open
    assert prompts.wished() == (64, 0, 2), "the next pass goes on behind this one"
    prompts.open(40)
    assert (prompts.depth, below.preempting) == (2, 40)
    assert prompts._open[1].launched is None


@pytest.mark.parametrize("seed", range(6))
def test_ranks_go_through_the_same_passes_whichever_requests_leave(seed: int) -> None:
    """Two ranks as threads, with prompts of their own, of which some leave amid passes: all of one rank's, too."""
    collectives = ThreadCollectives.of(2)
    controls: list[GroupControl] = []
    controls += [GroupControl(controls) for _ in range(2)]
    done, errors, rounds = [False] * 2, list[BaseException](), list[list[Round]]([[], []])

    def run(rank: int) -> None:
        chance = random.Random(10 * seed + rank)
        group: Any = SimpleNamespace(rank=rank, size=2, control=controls[rank], collectives=collectives[rank])
        streams = make_streams(("inline", "simulated")[seed % 2], seed + rank)
        runner = FakeGroupRunner()
        rig = Rig(streams, runner=runner, group=group, pace=10 * seed + rank)
        agreement = cast(Rounds, rig.executor._rounds)._agreement
        launched = agreement.launched

        def note(this: Round) -> None:
            rounds[rank].append(this)
            launched(this)

        agreement.launched = note  # type: ignore[method-assign]
        lives = [rig.coordinator.create(100 * rank + it, chance.randint(3, 150), 3) for it in range(5)]
        waiting, leavers = list(lives), set(lives if seed == rank else chance.sample(lives, 2))
        while not all(done):
            for life in list(waiting):
                if chance.random() < 0.3 and rig.coordinator.admit(life, 64):
                    waiting.remove(life)
            for life in list(leavers):
                if life.here and chance.random() < 0.1:
                    rig.coordinator.withdraw(life, "abort")
                    leavers.discard(life)
            done[rank] = False
            rig.executor.turn()
            done[rank] = not waiting and rig.executor.idle
            time.sleep(0.0002)
        assert not rig.wrong()
        assert runner.launched + runner.padded == sum(this.kind is RoundKind.PROMPT for this in rounds[rank])
        assert not rig.executor._prompts.depth
        assert all(life.outcome in ("length", "aborted") for life in lives)
        rig.check_end()

    def run_or_abort(rank: int) -> None:
        try:
            run(rank)
        except BaseException as error:
            errors.append(error)
            collectives[rank].barrier.abort()
            done[:] = [True] * 2

    threads = [threading.Thread(target=run_or_abort, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_LIMIT_S)
    if errors:
        raise errors[0]
    assert rounds[0] == rounds[1]
    assert any(this.kind is RoundKind.PROMPT for this in rounds[0])


def test_an_error_inside_a_round_is_fatal_to_the_group() -> None:
    """A worker that holds the whole model would fail the request alone (test_requests.py)."""
    rig = rig_of_a_rank()
    cast(FakeGroupRunner, rig.runner).breaks = True
    for number in range(2):
        assert rig.coordinator.admit(rig.coordinator.create(number, 40, 6, seed=number), 64)
    with pytest.raises(RuntimeError, match="a broken unit"):
        rig.run()
    assert not [event for event in rig.coordinator.events if isinstance(event, Faulted)]


def test_steps_beside_prompt_rounds_are_told_apart() -> None:
    """Those launched behind one wait for it on the device, and the one that is read behind its launch on the host. A
    round is of prompts also where this rank brings none."""
    rig = rig_of_a_rank()
    counters = rig.executor.counters
    assert rig.coordinator.admit(rig.coordinator.create(1, 40, 60), 64)
    while counters.steps < 20:
        rig.turn()
    assert counters.alone_steps >= counters.steps - 1  # a prompt round goes ahead of the first one
    before = counters.steps - counters.alone_steps
    assert rig.coordinator.admit(rig.coordinator.create(2, 40, 20, seed=2), 64)
    rig.run()
    rounds = 3  # a unit for each layer
    assert rounds + 1 <= counters.steps - counters.alone_steps - before <= 2 * rounds
    assert counters.step_requests == 60 - 1 + 20 - 1
