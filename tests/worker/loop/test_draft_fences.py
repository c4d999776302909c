"""What drafts add to the fences, each with its mutation: dropped where drafts need it and nowhere else, it changes
nothing in plain order, and under seeds the tokens are wrong, or what the draft layer left in host memory or drew.

Drafts cannot make a token wrong. So rows and drafts of the layer are compared with its oracle, too: a draft layer that
reads or leaves other bytes would only be right less often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import pytest

from protocol.errors import InternalError
from tests.support.drafting_rig import DraftRig, drafting_settings
from tests.support.fakes.drafting_runner import DraftingFakeRunner
from tests.support.fakes.hash_runner import ALTERNATING, SEPARATE, SHARED
from tests.support.history import first_parent_commits
from tests.worker.loop.test_fences import MakeStreams, come_back, lagging, simulated
from worker.device.step_rows import StepRows
from worker.loop.acceptance import StepProgress
from worker.loop.decode import Decoder
from worker.loop.drafting import DraftStep
from worker.loop.prefill import Prefill
from worker.loop.swap import Swap
from worker.runners import swapping
from worker.streams import make_streams

#: A mutant must be found within so many seeds.
SEEDS: Final = range(12)
#: Of undisturbed scenarios, by turns with commits: one with a stream that lags, one without.
OWN_SEEDS: Final = range(2) if (first_parent_commits() or 0) % 2 else range(2, 4)
PERCENT: Final = 60


def rig_of(
    make: MakeStreams, *, groups: tuple[int, ...] = SHARED, draft_tokens: int = 2, percent: int = PERCENT
) -> DraftRig:
    settings, runner = drafting_settings(draft_tokens, device_mem="1MiB"), DraftingFakeRunner(groups)
    return DraftRig(make(), settings, percent, runner=runner, watches=True)


def a_day(make: MakeStreams) -> DraftRig:
    """Resident and managed buffers, keep and drop, resizes."""
    rig = rig_of(make)
    coordinator = rig.coordinator
    first, second = coordinator.create(0, 100, 24), coordinator.create(1, 70, 20, seed=1)
    assert coordinator.admit(first, 64)
    assert coordinator.admit(second, 0)
    rig.run_until(lambda: len(second.tokens) >= 4)
    coordinator.withdraw(second, "keep")
    come_back(rig, second, 128)
    rig.run_until(lambda: len(first.tokens) >= 8)
    coordinator.resize(first, 0)
    coordinator.withdraw(second, "drop")
    come_back(rig, second, 64)
    rig.run()
    return rig


def a_batch(make: MakeStreams) -> DraftRig:
    """Three requests decode."""
    rig = rig_of(make)
    for number, hot_slots in enumerate((64, 0, 192)):
        assert rig.coordinator.admit(rig.coordinator.create(number, 90, 30, seed=number), hot_slots)
    rig.run()
    return rig


def right_drafts(make: MakeStreams) -> DraftRig:
    """Two steps in a row whose drafts all hold, on a buffer that the rows of a step fill: the launches behind the
    second one's own draft evict rows that the first one has written."""
    rig = rig_of(make, draft_tokens=4, percent=100)
    assert rig.coordinator.admit(rig.coordinator.create(0, 230, 60, seed=6), 128)
    rig.run()
    return rig


def a_grammar(make: MakeStreams) -> DraftRig:
    """Beside one with a grammar: draws, and the draft layer behind them, are launched after the forward pass."""
    rig = rig_of(make)
    for number, grammar in enumerate(("", ALTERNATING)):
        life = rig.coordinator.create(number, 40, 24, seed=number, grammar=grammar)
        assert rig.coordinator.admit(life, 192)
    rig.run()
    return rig


def a_second_turn(make: MakeStreams) -> DraftRig:
    """A prompt begins with the pages of another request."""
    rig = rig_of(make, groups=SEPARATE)
    coordinator = rig.coordinator
    donor = coordinator.create(1, 250, 4, seed=1)
    assert coordinator.admit(donor, 0)
    pages = list(donor.host_pages[:3])
    rig.run()
    heir = coordinator.create(1, 250, 12, seed=1)
    heir.shared = tuple(pages)
    for page in pages:
        coordinator.host_pages.remove(page)
    assert coordinator.admit(heir, 0)
    rig.run()
    coordinator.host_pages.extend(pages)
    return rig


def a_crash(make: MakeStreams) -> DraftRig:
    """The process dies with work queued; another one goes on from the durable lengths that were reported."""
    streams = make()
    rig = rig_of(lambda: streams)
    life = rig.coordinator.create(1, 100, 30)
    assert rig.coordinator.admit(life, 64)
    rig.run_until(lambda: len(life.tokens) >= 14)
    streams.crash()
    rig.look(life, life.durable)
    settings = drafting_settings(2)
    heir = DraftRig(make_streams("simulated", 0, "plain"), settings, PERCENT, host=rig.host, watches=True)
    heir.coordinator.adopt(rig.coordinator)
    assert heir.coordinator.admit(life, 64)
    heir.run()
    heir.wrong_rows += rig.wrong_rows
    return heir


def is_wrong(rig: DraftRig) -> bool:
    return bool(rig.wrong() or rig.wrong_rows or rig.wrong_drafts() or rig.executor.state.tripwires.any())


def is_found(scenario: Callable[[MakeStreams], DraftRig], make: MakeStreams) -> bool:
    """By what came out, or by the decode loop itself."""
    try:
        return is_wrong(scenario(make))
    except InternalError as error:
        if "a step has no row that holds" in str(error):
            return True
        raise


@contextmanager
def without(streams: Any, *fences: str) -> Iterator[None]:
    """No wait for them is launched meanwhile, and the host does not wait for them."""
    before = streams.omit
    streams.omit = before | set(fences)
    try:
        yield
    finally:
        streams.omit = before


def stage_the_layer_early(patch: pytest.MonkeyPatch) -> None:
    """Its rows of a prompt are written behind the draw of the first token."""
    stage = Swap.stage

    def early(swap: Swap, rows: Any, layer: int) -> Any:
        with without(swap._streams, *["prefill_written"] * (layer == swap._state.geometry.layers - 1)):
            return stage(swap, rows, layer)

    patch.setattr(Swap, "stage", early)


def back_up_before_drafts(patch: pytest.MonkeyPatch) -> None:
    """`row_written` is recorded behind the draws, where it was without drafts."""
    verify, backup, marks = DraftStep.launch_verify, Swap.backup, list[Any]()

    def mark_and_verify(step: DraftStep, outputs: Any) -> None:
        marks[:] = [step._owner.streams.compute.record("row_written")]
        verify(step, outputs)

    def back_up(swap: Swap, *of: Any) -> Any:
        if not marks:
            return backup(swap, *of)
        swap._streams.backup.wait(marks[0])
        with without(swap._streams, "row_written"):
            return backup(swap, *of)

    patch.setattr(DraftStep, "launch_verify", mark_and_verify)
    patch.setattr(Swap, "backup", back_up)


def wait_one_backup_less(patch: pytest.MonkeyPatch) -> None:
    """Steps that draft more than one token begin rows of the next step, which retire tail slots."""
    patch.setattr(StepRows, "backup_steps", lambda rows, tail_slots: tail_slots // rows.rows)


def read_steps_early(patch: pytest.MonkeyPatch) -> None:
    """Only the device knows how many rows of a step hold."""
    read = Decoder.read

    def early(decoder: Decoder) -> Any:
        with without(decoder._streams, "sampled"):
            return read(decoder)

    patch.setattr(Decoder, "read", early)


def count_rejected_rows(patch: pytest.MonkeyPatch) -> None:
    """The next step writes them again."""
    note = StepProgress.note_durable

    def note_all(step: StepProgress) -> None:
        note(step)
        for progress in step._progress:
            progress.durable = max(progress.durable, progress.position)

    patch.setattr(StepProgress, "note_durable", note_all)


def prefill_behind_a_prefix_of_the_model_alone(patch: pytest.MonkeyPatch) -> None:
    """No layer of a prompt attends to rows of the draft layer: its first step does."""
    await_refill = Prefill._await_refill

    def forget(prefill: Prefill, this: Any, layer: int) -> None:
        with without(prefill._streams, *["refilled"] * (layer == prefill._state.geometry.layers - 1)):
            await_refill(prefill, this, layer)

    patch.setattr(Prefill, "_await_refill", forget)


def draft_without(fence: str) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        launch = DraftingFakeRunner.launch_draft

        def early(runner: DraftingFakeRunner, streams: Any, *of: Any) -> None:
            with without(streams, fence):
                launch(runner, streams, *of)

        patch.setattr(DraftingFakeRunner, "launch_draft", early)

    return plant


@dataclass(frozen=True)
class Mutant:
    """What is dropped, what shows it, and the stream that lags there."""

    plant: Callable[[pytest.MonkeyPatch], None]
    scenario: Callable[[MakeStreams], DraftRig]
    late: str


MUTANTS: Final = {
    "prefill_written": Mutant(stage_the_layer_early, a_day, "compute"),
    "row_written": Mutant(back_up_before_drafts, a_batch, "compute"),
    "row_written, draws launched later": Mutant(back_up_before_drafts, a_grammar, "compute"),
    "backed_up": Mutant(wait_one_backup_less, right_drafts, "backup"),
    "durable": Mutant(count_rejected_rows, a_crash, "backup"),
    "refilled": Mutant(prefill_behind_a_prefix_of_the_model_alone, a_second_turn, "refill"),
    "selected": Mutant(draft_without("selected"), a_batch, "compute"),
    "swapped_in": Mutant(draft_without("swapped_in"), a_batch, "swap"),
    "sampled": Mutant(read_steps_early, a_batch, "compute"),
}


def make_of(mutant: Mutant, seed: int, patch: pytest.MonkeyPatch) -> MakeStreams:
    """Every second seed with streams that keep abreast."""
    patch.setattr(swapping, "BESIDE_ROWS", 1)
    return lagging(mutant.late, simulated(seed)) if seed % 2 == 0 else simulated(seed)


@pytest.mark.parametrize(
    "mutant", {it.scenario: it for it in MUTANTS.values()}.values(), ids=lambda it: it.scenario.__name__
)
def test_scenario_holds_with_all_fences(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in OWN_SEEDS:
        rig = mutant.scenario(make_of(mutant, seed, monkeypatch))
        assert not is_wrong(rig), f"seed {seed}"
        rig.check_end()


@pytest.mark.mutation
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_fence_that_drafts_need_is_found_missing(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapping, "BESIDE_ROWS", 1)
    mutant.plant(monkeypatch)
    assert not is_found(mutant.scenario, simulated(0, "plain"))
    seeds = (seed for seed in SEEDS if is_found(mutant.scenario, make_of(mutant, seed, monkeypatch)))
    found = next(seeds, None)
    print("found by seed", found)
    assert found is not None
