"""The token test on simulated streams: whatever order the fences allow, tokens are those of the oracle.

And the other way round: with any one fence omitted, the same scenario passes in plain order, and under some seed it
gives wrong tokens. Wrong, not crashed: what a missing fence does to a service is silent.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec
import pytest

from tests.support.fakes.coordinator import Life
from tests.support.fakes.hash_runner import ALTERNATING, SEPARATE, SHARED, FakeRunner
from tests.support.history import first_parent_commits, seeds_of
from tests.support.worker_rig import SETTINGS, Rig
from worker.loop.batch import Status
from worker.loop.swap import Swap
from worker.runners import swapping
from worker.streams import FENCES, SimulatedStreams, make_streams

#: Seeds that once gave wrong tokens. One that fails joins them: the next commit has other seeds.
FAILED_ONCE: tuple[int, ...] = ()
#: 12 orders for each pair of groups and a way to swap in, others with each commit. A missing fence that only one pair
#: shows, under 15 % of the orders, is seen in 86 of 100 runs, and after two commits in 98 of 100;
#: `test_omitted_fence_gives_wrong_tokens` omits each of those that are there.
SEEDS = (*FAILED_ONCE, *seeds_of(first_parent_commits(), 48))
#: A mutant must be convicted within so many seeds. Measured over 60, each scenario convicts its mutant in 15 to 100 %.
MUTANT_SEEDS = range(80)
#: How likely a stream that lags may run while others can.
LAGGING = 0.01

MakeStreams = Callable[[], SimulatedStreams]


def a_day(make: MakeStreams, groups: tuple[int, ...]) -> Rig:
    """Prompts of several chunks, resident and managed buffers, resizes every way, keep and drop, parking."""
    rig = Rig(make(), runner=FakeRunner(groups))
    coordinator = rig.coordinator
    first, second, third, fourth = (
        coordinator.create(number, prompt, count, seed=number)
        for number, (prompt, count) in enumerate(((100, 20), (70, 16), (90, 14), (65, 4)))
    )
    assert coordinator.admit(first, 64)
    assert coordinator.admit(second, 0)
    assert coordinator.admit(third, 128)
    rig.run_until(lambda: len(second.tokens) >= 3 and len(third.tokens) >= 2)
    assert coordinator.resize(third, 64)
    coordinator.withdraw(second, "keep")
    come_back(rig, second, 64)
    assert coordinator.admit(fourth, 64)
    rig.run_until(lambda: len(first.tokens) >= 7)
    coordinator.resize(first, 0)
    rig.run_until(lambda: len(second.tokens) >= 8)
    coordinator.withdraw(second, "keep")
    come_back(rig, second, 0)
    coordinator.resize(first, 128)
    coordinator.withdraw(third, "drop")
    come_back(rig, third, 64)
    rig.run()
    return rig


def come_back(rig: Rig, life: Life, hot_slots: int) -> None:
    """Once a withdrawn request has left, admit it again unless it ended meanwhile."""
    rig.run_until(lambda: not life.placement)
    assert life.outcome or rig.coordinator.admit(life, hot_slots)


def a_long_prompt(make: MakeStreams) -> Rig:
    """Passes of a prompt follow one another with no step between them: each reads what those before have staged."""
    rig = Rig(make())
    assert rig.coordinator.admit(rig.coordinator.create(1, 250, 4), 64)
    rig.run()
    return rig


def a_prompt_beyond_its_buffer(make: MakeStreams) -> Rig:
    """The first step reads host rows of the last layers that the prompt's only pass has staged."""
    rig = Rig(make(), msgspec.structs.replace(SETTINGS, pass_tokens=128))
    assert rig.coordinator.admit(rig.coordinator.create(1, 120, 8), 64)
    rig.run()
    return rig


def a_batch(make: MakeStreams) -> Rig:
    """Two requests decode, and nothing else."""
    rig = Rig(make())
    for number in range(2):
        assert rig.coordinator.admit(rig.coordinator.create(number, 40, 12, seed=number), 64)
    rig.run()
    return rig


def a_resume(make: MakeStreams, hot_slots: int) -> Rig:
    """Retracted and resumed, alone, so that it joins the batch while its memory is still being loaded."""
    rig = Rig(make(), runner=FakeRunner(SEPARATE))
    life = rig.coordinator.create(1, 100, 12)
    assert rig.coordinator.admit(life, 64)
    rig.run_until(lambda: len(life.tokens) >= 4)
    rig.coordinator.withdraw(life, "keep")
    rig.run_until(lambda: not life.placement)
    life.warm_start = b""  # cold: rows that come behind the index keys would be waited for
    come_back(rig, life, hot_slots)
    rig.run()
    return rig


def a_change_of_owner(make: MakeStreams) -> Rig:
    """One request is aborted while its last rows are being backed up; the next gets the very same host pages."""
    settings = msgspec.structs.replace(SETTINGS, pass_tokens=128, tail_slots=8, host_mem="8KiB")
    rig = Rig(make(), settings)
    coordinator = rig.coordinator
    leaver, heir = coordinator.create(1, 100, 20), coordinator.create(2, 120, 8)
    assert coordinator.admit(leaver, 64)
    rig.run_until(lambda: len(leaver.tokens) >= 10)
    coordinator.withdraw(leaver, "abort")
    rig.run_until(lambda: not leaver.placement)
    assert coordinator.admit(heir, 64)
    rig.run()
    return rig


def an_abort_while_loading(make: MakeStreams) -> Rig:
    """One request is aborted while its index keys are being loaded; the next gets the very same index pages."""
    settings = msgspec.structs.replace(SETTINGS, pass_tokens=128)
    rig = Rig(make(), settings, runner=FakeRunner(SEPARATE))
    coordinator, index_pages = rig.coordinator, rig.executor._seats.index_pages
    bystander, leaver, heir = (coordinator.create(i, *sizes) for i, sizes in enumerate(((8, 56), (100, 20), (70, 50))))
    assert coordinator.admit(leaver, 64)
    rig.run_until(lambda: len(leaver.tokens) >= 3)
    coordinator.withdraw(leaver, "keep")
    assert coordinator.admit(bystander, 64)  # with a batch to decode, no request waits for the load
    rig.run_until(lambda: len(bystander.tokens) >= 2)
    come_back(rig, leaver, 64)
    coordinator.withdraw(leaver, "abort")
    rig.turn()
    squeezed = index_pages.take(index_pages.free)
    rig.run_until(lambda: not leaver.placement)
    assert coordinator.admit(heir, 64)
    rig.run()
    index_pages.give(squeezed)
    return rig


def an_owner_elsewhere(make: MakeStreams) -> Rig:
    """One request is aborted while it is being staged; its host pages go to a request on another worker of the node."""
    rig = Rig(make())
    leaver = rig.coordinator.create(1, 120, 8)
    assert rig.coordinator.admit(leaver, 64)
    rig.run_until(lambda: leaver.placement == 0 or any(r.status is Status.STAGING for r in rig.executor.held()))
    rig.coordinator.withdraw(leaver, "abort")
    pages = leaver.host_pages[:]
    rig.run_until(lambda: not leaver.placement)
    elsewhere = Rig(host=rig.host)
    heir = elsewhere.coordinator.create(2, 120, 8)
    elsewhere.coordinator.host_pages = deque(pages)
    assert elsewhere.coordinator.admit(heir, 64)
    elsewhere.run_until(lambda: len(heir.tokens) >= 2)
    rig.streams.close()
    elsewhere.run()
    return elsewhere


def a_chunk_that_changes_hands(make: MakeStreams) -> Rig:
    """One buffer shrinks, and its chunk is loaded with another request's rows while a launched step still reads it."""
    rig = Rig(make(), runner=FakeRunner(SEPARATE))
    coordinator, chunks = rig.coordinator, rig.executor._seats.chunks
    giver, taker = coordinator.create(1, 150, 16), coordinator.create(2, 100, 8)
    assert coordinator.admit(taker, 0)
    rig.run_until(lambda: len(taker.tokens) >= 3)
    coordinator.withdraw(taker, "keep")
    rig.run_until(lambda: not taker.placement)
    assert coordinator.admit(giver, 128)
    rig.run_until(lambda: len(giver.tokens) >= 5)
    assert len(taker.host_pages) == 2
    squeezed = chunks.take(chunks.free - 1)
    assert coordinator.resize(giver, 64)
    assert coordinator.admit(taker, 0)
    rig.run()
    chunks.give(squeezed)
    return rig


def a_crash(make: MakeStreams) -> Rig:
    """The process dies with work queued; another one goes on from the durable lengths that were reported."""
    streams = make()
    rig = Rig(streams)
    life = rig.coordinator.create(1, 100, 24)
    assert rig.coordinator.admit(life, 64)
    rig.run_until(lambda: len(life.tokens) >= 12)
    streams.crash()
    heir = Rig(make_streams("inline"), host=rig.host)
    heir.coordinator.adopt(rig.coordinator)
    assert heir.coordinator.admit(life, 64)
    heir.run()
    return heir


def a_grammar(make: MakeStreams) -> Rig:
    """Two requests are held to a grammar, which allows other tokens in each step; a third is not."""
    rig = Rig(make())
    for number in range(3):
        grammar = ALTERNATING if number else ""
        assert rig.coordinator.admit(rig.coordinator.create(number, 40, 10, seed=number, grammar=grammar), 64)
    rig.run()
    return rig


#: The scenario that each omitted fence spoils.
SCENARIOS: dict[str, Callable[[MakeStreams], Rig]] = {
    "inputs_consumed": a_long_prompt,
    "prefill_written": partial(a_day, groups=SHARED),
    "staged": a_prompt_beyond_its_buffer,
    "slab_staged": a_long_prompt,
    "slab_read": a_long_prompt,
    "refilled": a_long_prompt,
    "row_written": partial(a_day, groups=SHARED),
    "backed_up": partial(a_day, groups=SHARED),
    "durable": a_crash,
    "preloaded": partial(a_resume, hot_slots=0),
    "index_loaded": partial(a_resume, hot_slots=64),
    "selected": partial(a_day, groups=SHARED),
    "compressed": partial(a_day, groups=SHARED),
    "swapped_in": partial(a_day, groups=SEPARATE),
    "prefetched": partial(a_day, groups=SHARED),
    "chunk_reclaimed": a_chunk_that_changes_hands,
    "mask_ready": a_grammar,
    "sampled": a_batch,
    "quiesced": a_change_of_owner,
}


#: Fences that batches below BESIDE_ROWS, as these are, do not have.
BESIDE = ("selected",)


def simulated(seed: int, order: str = "seeded", omit: tuple[str, ...] = ()) -> MakeStreams:
    def make() -> SimulatedStreams:
        streams = make_streams("simulated", seed, order, omit)  # type: ignore[arg-type]
        assert isinstance(streams, SimulatedStreams)
        return streams

    return make


def lagging(name: str, make: MakeStreams) -> MakeStreams:
    """Streams of which `name` rarely runs while another one can: an order that fences permit and few seeds draw."""

    def made() -> SimulatedStreams:
        streams = make()
        assert isinstance(streams, SimulatedStreams)
        last = getattr(streams, name)
        can_run, others = last.runnable, [stream for stream in streams.all if stream is not last]
        draw = random.Random(0)

        def runnable() -> bool:
            return can_run() and (draw.random() < LAGGING or not any(stream.runnable() for stream in others))

        last.runnable = runnable  # type: ignore[method-assign]
        return streams

    return made


@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_do_not_depend_on_fence_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the seeds select beside the projections, half in line."""
    if seed % 4 >= 2:
        monkeypatch.setattr(swapping, "BESIDE_ROWS", 1)
    rig = a_day(simulated(seed), (SHARED, SEPARATE)[seed % 2])
    assert not rig.wrong()
    rig.check_end()


@pytest.mark.parametrize(
    "scenario", dict.fromkeys(scenario for scenario in SCENARIOS.values() if not isinstance(scenario, partial))
)
def test_every_scenario_holds_with_all_fences(scenario: Callable[[MakeStreams], Rig]) -> None:
    for seed in range(5):
        rig = scenario(simulated(seed))
        assert not rig.wrong(), f"seed {seed}"
        rig.check_end()


def test_every_fence_has_a_scenario() -> None:
    """tests/worker/loop/test_rounds.py leaves out wishes_gathered, tests/worker/group/test_splitting.py dealt,
    test_transformers_dsa.py those of experts."""
    assert SCENARIOS.keys() | {"wishes_gathered", "dealt", "normed", "shared"} == FENCES.keys()


@pytest.mark.mutation
@pytest.mark.parametrize("fence", SCENARIOS)
def test_omitted_fence_gives_wrong_tokens(fence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang #34077, #35748 (a row used again under a step in flight), #20343 (staging that waits for no prefill)."""
    if fence in BESIDE:
        monkeypatch.setattr(swapping, "BESIDE_ROWS", 1)
    scenario = SCENARIOS[fence]
    plain = scenario(simulated(0, "plain", (fence,)))
    assert not plain.wrong()
    plain.check_end()
    assert any(scenario(simulated(seed, "seeded", (fence,))).wrong() for seed in MUTANT_SEEDS)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("stream", "scenario"),
    [("load", an_abort_while_loading), ("stage", an_owner_elsewhere), ("backup", a_change_of_owner)],
)
def test_quiesced_must_cover_every_stream(
    stream: str, scenario: Callable[[MakeStreams], Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I2: Released while one stream could still touch the memory gives the next owner wrong tokens.

    SGLang #24578; vLLM: an end before the last copy."""
    assert not any(scenario(lagging(stream, simulated(seed))).wrong() for seed in range(3))
    quiesce = Swap.quiesce
    monkeypatch.setattr(Swap, "quiesce", lambda swap: [fence for fence in quiesce(swap) if stream not in str(fence)])
    assert any(scenario(lagging(stream, simulated(seed))).wrong() for seed in MUTANT_SEEDS)
