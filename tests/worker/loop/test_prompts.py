"""Prompts of a worker as passes: preempted, packed, drawn late, and left at every point, on streams that run in any
order. Tokens are the oracle's, and no unit touches the memory of a request that has left."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import pytest
import torch
from torch import Tensor

from kernels.state import DeviceState
from protocol.messages import NO_HOT_BUFFER, Admit, Command, Faulted
from protocol.settings import WorkerSettings
from protocol.units import PAGE_TOKENS
from tests.support.drafting_rig import DraftRig, drafting_settings
from tests.support.fakes.coordinator import Life
from tests.support.fakes.drafting_runner import DraftingFakeRunner
from tests.support.fakes.hash_runner import ALTERNATING, SEPARATE, SHARED, FakePass, FakeRunner
from tests.support.fakes.pace import DrawnGap, EvenPace
from tests.support.limits import HANG_LIMIT_S
from tests.support.worker_rig import SETTINGS, Rig
from worker.loop import grammars
from worker.loop.batch import RunningRequest, Status
from worker.loop.prompts import UNITS_AHEAD, Prompts
from worker.runners.base import PromptPart, PromptPass, UnitWritten, no_listener
from worker.streams import Streams, make_streams
from worker.transfer.handover import Outgoing

#: Lengths of prompts in the order in which they come: the first is several passes long.
PROMPTS: Final = (300, 20, 90, 130, 45, 64, 170, 5)
LEAVINGS: Final = ("keep", "drop", "abort")
BACKENDS: Final = ("inline", "simulated")
WIDE: Final = msgspec.structs.replace(
    SETTINGS,
    seats=6,
    pass_tokens=128,
    host_mem="1MiB",
    device_mem="512KiB",
    context_max_tokens=1_024,
)


class GuardedRunner(FakeRunner):
    """Refuses to launch, and to run, a unit over memory of a request that has left. `passes`: parts of each that was
    begun; `units`: number of the pass, layer, first and last row of each that was launched."""

    rig: Rig

    def __init__(self, groups: Sequence[int] = SHARED) -> None:
        super().__init__(groups)
        self.passes: list[tuple[PromptPart, ...]] = []
        self.units: list[tuple[int, int, int, int]] = []
        self._numbers: dict[int, int] = {}

    def begin_pass(self, streams: Streams, state: DeviceState, parts: Sequence[PromptPart], tokens: Tensor) -> FakePass:
        prompts = super().begin_pass(streams, state, parts, tokens)
        assert isinstance(prompts, FakePass)
        self._numbers[id(prompts)] = len(self.passes)
        self.passes.append(tuple(parts))
        prompts.requests = {part.seat: self._holder(part.seat) for part in parts}  # type: ignore[attr-defined]
        return prompts

    def launch_unit(
        self,
        streams: Streams,
        state: DeviceState,
        prompts: PromptPass,
        layer: int,
        first: int,
        stop: int,
        written: UnitWritten = no_listener,
        rows: int = 0,
    ) -> None:
        for _, piece in prompts.pieces(first, stop):
            holder = self._holder(piece.seat)
            assert holder is prompts.requests[piece.seat]  # type: ignore[attr-defined]
            assert not holder.is_leaving
        self.units.append((self._numbers[id(prompts)], layer, first, stop))
        super().launch_unit(streams, state, prompts, layer, first, stop, written, rows)

    def _project_prompts(self, prompts: FakePass, state: DeviceState, layer: int, pieces: Any) -> None:
        self._check(prompts, pieces)
        super()._project_prompts(prompts, state, layer, pieces)

    def _attend_prompts(self, prompts: FakePass, state: DeviceState, layer: int, pieces: Any) -> None:
        self._check(prompts, pieces)
        super()._attend_prompts(prompts, state, layer, pieces)

    def _check(self, prompts: FakePass, pieces: Any) -> None:
        """Memory of a request goes back once all that was launched for it has run."""
        for _, piece in pieces:
            assert self._holder(piece.seat) is prompts.requests[piece.seat]  # type: ignore[attr-defined]

    def _holder(self, seat: int) -> RunningRequest:
        (holder,) = (it for it in self.rig.executor.held() if it.seat == seat)
        return holder


def guarded(
    backend: str = "inline", seed: int = 0, settings: WorkerSettings = WIDE, groups: Sequence[int] = SHARED, **more: Any
) -> tuple[Rig, GuardedRunner]:
    runner = GuardedRunner(groups)
    rig = Rig(make_streams(backend, seed), settings, runner=runner, **more)
    runner.rig = rig
    return rig, runner


def one_unit_a_turn(settings: WorkerSettings = WIDE) -> EvenPace:
    return EvenPace(min(64, settings.pass_tokens))


def prompts_of(rig: Rig) -> Prompts:
    return rig.executor._prompts


def owned(rig: Rig, owner_of: Callable[[int], str]) -> None:
    """Requests belong to the owner of their number."""
    submit = rig.coordinator.submit

    def own(command: Command) -> None:
        if isinstance(command, Admit):
            command = msgspec.structs.replace(command, owner=owner_of(command.request_index))
        submit(command)

    rig.coordinator.submit = own


@dataclass
class Masks:
    """Masks of grammars that are late until `let_go`."""

    monkeypatch: pytest.MonkeyPatch
    known: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        has_mask = grammars.Grammar.has_mask.fget  # type: ignore[attr-defined]
        late = property(lambda it: bool(self.known) and has_mask(it))
        self.monkeypatch.setattr(grammars.Grammar, "has_mask", late)

    def let_go(self, rig: Rig) -> None:
        for request in rig.executor.held():
            assert request.is_leaving or request.grammar is None or request.grammar._done.wait(HANG_LIMIT_S)
        self.known.append(True)


# ---------------------------------------------------------------- order


def test_shorter_prompt_preempts_between_two_layers_and_the_pass_goes_on_where_it_was_left() -> None:
    rig, runner = guarded(pace=one_unit_a_turn())
    long, short = rig.coordinator.create(0, 128, 4), rig.coordinator.create(1, 30, 4)
    assert rig.coordinator.admit(long, 64)
    rig.run_until(lambda: len(runner.units) == 3)
    assert rig.coordinator.admit(short, 64)
    rig.run_until(lambda: bool(short.tokens))
    assert not long.tokens
    rig.run()
    assert [unit[0] for unit in runner.units] == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert [unit[1:] for unit in runner.units if not unit[0]] == [
        (layer, first, first + 64) for layer in range(3) for first in (0, 64)
    ]
    assert not rig.wrong()
    rig.check_end()


def test_at_most_two_passes_are_open_and_the_second_is_shorter() -> None:
    rig, runner = guarded(pace=one_unit_a_turn())
    lives = [rig.coordinator.create(number, tokens, 4) for number, tokens in enumerate((128, 100, 60, 10))]
    for life, units in zip(lives, (1, 2, 3, 0), strict=True):
        assert rig.coordinator.admit(life, 64)
        rig.run_until(lambda units=units: len(runner.units) >= units)  # type: ignore[misc]
        assert prompts_of(rig).depth <= 2
    rig.run()
    assert not rig.wrong()
    rig.check_end()


def test_leaver_does_not_keep_others_from_preempting() -> None:
    """The shortest prompt of the open pass has left: only the long one is left to wait for."""
    rig, runner = guarded(pace=one_unit_a_turn(), settings=msgspec.structs.replace(WIDE, pass_tokens=256))
    gone, long = rig.coordinator.create(0, 10, 4), rig.coordinator.create(1, 230, 4)
    for life in (gone, long):
        assert rig.coordinator.admit(life, 64)
    rig.run_until(lambda: len(runner.units) == 2)
    rig.coordinator.withdraw(gone, "abort")
    other = rig.coordinator.create(2, 40, 4)
    assert rig.coordinator.admit(other, 64)
    rig.run_until(lambda: bool(other.tokens))
    assert not long.tokens
    rig.run()
    assert not rig.wrong()
    rig.check_end()


def test_pass_is_preempted_by_as_many_tokens_as_it_has() -> None:
    rig, runner = guarded(pace=one_unit_a_turn())
    long = rig.coordinator.create(0, 128, 2)
    assert rig.coordinator.admit(long, 64)
    rig.run_until(lambda: len(runner.units) == 1)
    shorts = [rig.coordinator.create(number, 30, 2) for number in range(1, 12)]
    while not long.tokens:
        for life in shorts:
            if not life.placement and not life.outcome:
                rig.coordinator.admit(life, 64)
        rig.turn()
    ahead = [parts for parts in runner.passes[1:] if sum(part.tokens for part in parts)]
    began = runner.units.index(next(it for it in runner.units if it[0] == 0 and it[1] == 2))
    preempting = {it[0] for it in runner.units[:began]} - {0}
    assert preempting
    assert sum(part.tokens for number in preempting for part in runner.passes[number]) <= 128
    assert ahead
    rig.run()
    assert not rig.wrong()
    rig.check_end()


def test_prompts_with_prefixes_of_different_lengths_go_in_one_pass() -> None:
    rig, runner = guarded(
        settings=msgspec.structs.replace(WIDE, pass_tokens=512, device_mem="1MiB"), pace=one_unit_a_turn()
    )
    coordinator = rig.coordinator
    donor = coordinator.create(1, 130, 4, seed=1)
    assert coordinator.admit(donor, NO_HOT_BUFFER)
    rig.run()
    runner.passes.clear()
    lives = [coordinator.create(1, 130, 4, seed=1) for _ in range(3)]
    for pages, life in enumerate(lives):
        life.shared = tuple(donor.host_pages[:pages])
        assert coordinator.admit(life, 64)
    rig.run()
    assert [[part.start for part in parts] for parts in runner.passes] == [[128, 64, 0]]
    coordinator.host_pages.extend(donor.host_pages)
    donor.host_pages = []
    assert not rig.wrong()
    rig.check_end()


def test_owner_with_many_prompts_does_not_put_off_another() -> None:
    """One of each owner in turn, where a pass takes one prompt."""
    settings = msgspec.structs.replace(WIDE, deterministic=True, pass_tokens=64)
    rig, runner = guarded(settings=settings, pace=EvenPace(64))
    owned(rig, lambda number: "few" if number >= 4 else "many")
    lives = [rig.coordinator.create(number, 50 + number, 1) for number in range(6)]
    for life in lives:
        assert rig.coordinator.admit(life, 64)
    rig.run()
    taken = [parts[0].stop - 50 for parts in runner.passes]
    assert sorted(taken) == list(range(6))
    assert {"few" if number >= 4 else "many" for number in taken[:2]} == {"few", "many"}
    assert {"few" if number >= 4 else "many" for number in taken[2:4]} == {"few", "many"}
    assert not rig.wrong()
    rig.check_end()


@pytest.mark.parametrize("pass_tokens", [64, 100, 200, 256])
def test_deterministic_blocks_do_not_depend_on_other_prompts(pass_tokens: int) -> None:
    """Also where a pass is no multiple of pages: blocks begin at its multiples in each prompt."""
    settings = msgspec.structs.replace(WIDE, deterministic=True, pass_tokens=pass_tokens)
    rig = Rig(make_streams("inline"), settings, runner=(runner := GuardedRunner()))
    runner.block_tokens_max = pass_tokens
    runner.rig = rig
    for number, tokens in enumerate((300, 170, 30)):
        assert rig.coordinator.admit(rig.coordinator.create(number, tokens, 3), 64)
    rig.run()
    assert all(len(parts) == 1 and parts[0].start % pass_tokens == 0 for parts in runner.passes)
    assert all(parts[0].ends or parts[0].tokens == pass_tokens for parts in runner.passes)
    assert all(first % pass_tokens == 0 for _, _, first, _ in runner.units)
    assert not rig.wrong()
    rig.check_end()


def test_units_ahead_are_bounded_and_not_kept() -> None:
    """Beside decode steps, too."""
    rig, _ = guarded("simulated", 3, pace=one_unit_a_turn())
    decoding = rig.coordinator.create(0, 20, 150)
    assert rig.coordinator.admit(decoding, 64)
    rig.run_until(lambda: len(decoding.tokens) > 2)
    for number in range(1, 9):
        assert rig.coordinator.admit(rig.coordinator.create(number, 60, 1), 64)
        rig.run_until(lambda number=number: bool(rig.coordinator.lives[number].outcome))  # type: ignore[misc]
        assert len(prompts_of(rig)._flying) <= UNITS_AHEAD
    rig.run()
    rig.check_end()


class Unbounded(EvenPace):
    """Any number of units goes before a step."""

    def gap(self, *, beside_steps: bool) -> DrawnGap:
        del beside_steps
        return DrawnGap(1_000)


def test_drawn_prompt_joins_the_batch_before_other_prompts_go_on() -> None:
    """Its first token is there when its last unit was launched, if launches return once they have run."""
    rig, runner = guarded(pace=Unbounded(64))
    long, short = rig.coordinator.create(0, 128, 4), rig.coordinator.create(1, 30, 4)
    assert rig.coordinator.admit(long, 64)
    rig.turn()
    assert rig.coordinator.admit(short, 64)
    rig.run_until(lambda: bool(runner.units) and runner.units[-1][:2] == (1, 2))
    launched = len(runner.units)
    assert not short.tokens
    rig.executor._launch_prompts = lambda *, beside_steps: False  # type: ignore[method-assign]
    rig.turn(2)
    assert short.tokens
    assert [it.status for it in rig.executor.held() if it.request_index == 1] == [Status.RUNNING]
    del rig.executor._launch_prompts
    rig.run()
    assert [unit[0] for unit in runner.units][:launched] == [0, 1, 1, 1]
    assert not rig.wrong()
    rig.check_end()


class SmallBesideSteps(EvenPace):
    """Units of 8 rows beside steps."""

    def block(self, *, beside_steps: bool, left_s: float = 0.0) -> int:
        return 8 if beside_steps else super().block(beside_steps=beside_steps, left_s=left_s)


def test_tokens_of_a_last_step_wait_for_no_more_units_than_a_step_does() -> None:
    rig, runner = guarded(pace=SmallBesideSteps(64))
    decoding, long = rig.coordinator.create(0, 20, 3), rig.coordinator.create(1, 128, 2)
    assert rig.coordinator.admit(decoding, 64)
    rig.run_until(lambda: bool(decoding.tokens))
    assert rig.coordinator.admit(long, 64)
    rig.run_until(lambda: bool(decoding.outcome))
    assert {stop - first for number, _, first, stop in runner.units if number == 1} == {8}
    rig.run()
    assert not rig.wrong()
    rig.check_end()


def test_few_units_are_launched_ahead_where_no_request_decodes() -> None:
    """A prompt that comes, and a request that leaves, need not wait for them."""
    rig, runner = guarded("simulated", 3, pace=Unbounded(64))
    runnable = rig.streams.compute.runnable  # type: ignore[attr-defined]
    rig.streams.compute.runnable = lambda: False  # type: ignore[attr-defined]
    assert rig.coordinator.admit(rig.coordinator.create(0, 128, 4), 64)
    rig.turn(5)
    assert len(runner.units) == UNITS_AHEAD
    rig.streams.compute.runnable = runnable  # type: ignore[attr-defined]
    rig.run()
    assert not rig.wrong()
    rig.check_end()


# ---------------------------------------------------------------- late masks


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("leaving", [*LEAVINGS, ""])
def test_prompt_behind_its_pass_waits_for_its_mask_and_may_leave(
    backend: str, leaving: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = Masks(monkeypatch)
    rig, runner = guarded(backend, 1)
    held = rig.coordinator.create(1, 90, 6, grammar=ALTERNATING)
    other, second = rig.coordinator.create(2, 30, 6), rig.coordinator.create(3, 50, 6, grammar=ALTERNATING)
    for life in (held, other):
        assert rig.coordinator.admit(life, 64)
    rig.run_until(lambda: bool(other.tokens))
    assert len(runner.passes) == 1
    assert rig.coordinator.admit(second, 64)
    rig.turn(50)
    assert len(runner.passes) == 1, "its states would be kept as well"
    assert not held.tokens
    if leaving:
        rig.coordinator.withdraw(held, leaving)
        rig.run_until(lambda: not held.placement)
        assert not held.tokens
        assert not any(it.request_index == held.number for it in _behind_their_pass(rig))
    masks.let_go(rig)
    rig.run_until(lambda: not second.placement and not other.placement)
    if leaving not in ("", "abort"):
        assert rig.coordinator.admit(held, 64)
    rig.run()
    assert held.outcome == ("aborted" if leaving == "abort" else "length")
    assert not rig.wrong()
    rig.check_end()


def test_states_are_kept_for_the_masks_of_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt whose mask is late preempts no pass that may wait for a mask itself."""
    masks = Masks(monkeypatch)
    rig, runner = guarded(pace=one_unit_a_turn())
    lives = [rig.coordinator.create(number, tokens, 4, grammar=ALTERNATING) for number, tokens in ((1, 128), (2, 30))]
    assert rig.coordinator.admit(lives[0], 64)
    rig.run_until(lambda: len(runner.units) == 1)
    assert rig.coordinator.admit(lives[1], 64)
    rig.turn(40)
    assert len(runner.passes) == len(_behind_their_pass(rig)) == 1
    masks.let_go(rig)
    rig.run()
    assert not rig.wrong()
    rig.check_end()


@pytest.mark.parametrize("seed", range(6))
def test_prompt_rows_are_told_once_all_their_layers_are_in_host_memory(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts: those of the draft layer come behind the first token, and so do the index keys of all layers."""
    masks = Masks(monkeypatch)
    settings = drafting_settings(1, WIDE, host_mem="2MiB", device_mem="1MiB")
    rig = DraftRig(make_streams("simulated", seed), settings, None, runner=DraftingFakeRunner(SHARED))
    coordinator, seen = rig.coordinator, list[tuple[int, Tensor, Tensor]]()

    def note(life: Life) -> None:
        pages = torch.tensor(life.host_pages[: life.prompt_rows // PAGE_TOKENS], dtype=torch.long)
        seen.append((life.prompt_rows, pages, rig.host[pages].clone()))

    coordinator.on_prompt_rows = note
    held, other = coordinator.create(1, 250, 6, grammar=ALTERNATING), coordinator.create(2, 128, 4)
    for life in (held, other):
        assert coordinator.admit(life, 64)
    pages = list(held.host_pages)
    rig.run_until(lambda: any(it.placement == held.placement for it in _behind_their_pass(rig)))
    rig.run_until(lambda: bool(other.outcome))
    coordinator.withdraw(held, "drop")
    rig.run_until(lambda: not held.placement)
    told, written = held.prompt_rows, rig.host[pages].clone()
    masks.let_go(rig)
    again = coordinator.create(1, 250, 6, grammar=ALTERNATING)
    assert coordinator.admit(again, NO_HOT_BUFFER)
    rig.run()
    right = rig.host[torch.tensor(again.host_pages)]
    assert torch.equal(written[: told // PAGE_TOKENS], right[: told // PAGE_TOKENS])


def _behind_their_pass(rig: Rig) -> list[RunningRequest]:
    return [this.requests[number] for this, number in prompts_of(rig)._undrawn]


@pytest.mark.parametrize("seed", range(4))
def test_draft_rows_of_cut_parts_are_fed_the_token_behind_their_part(seed: int) -> None:
    """One part is cut behind a prompt that ends; a cut one is preempted, by a pass with tokens of its own."""
    settings = drafting_settings(1, WIDE, host_mem="2MiB", device_mem="1MiB", pass_tokens=192)
    rig = DraftRig(make_streams(BACKENDS[seed % 2], seed), settings, 0, runner=DraftingFakeRunner(SHARED), watches=True)
    executor, coordinator = rig.executor, rig.coordinator
    executor._pace = executor._prompts._pace = EvenPace(64)
    first, long = coordinator.create(1, 70, 4), coordinator.create(2, 400, 4)
    for life in (first, long):
        assert coordinator.admit(life, 64)
    for number in (3, 4):
        rig.run_until(lambda: bool(prompts_of(rig)._open) and prompts_of(rig)._open[0].place.layer == 1)
        assert coordinator.admit(coordinator.create(number, 20 + number, 4), 64)
        rig.run_until(lambda: prompts_of(rig).depth == 2)
        rig.run_until(lambda: prompts_of(rig).depth < 2)
    rig.run()
    assert not rig.wrong()
    assert not rig.wrong_rows
    rig.check_end()


# ---------------------------------------------------------------- errors


class BrokenRunner(GuardedRunner):
    """Make what `breaks` names raise for the pass whose first part is in a seat that held `request`."""

    breaks = ""
    request = -1

    def begin_pass(self, streams: Streams, state: DeviceState, parts: Sequence[PromptPart], tokens: Tensor) -> FakePass:
        if self.breaks == "begin" and any(self._holder(it.seat).request_index == self.request for it in parts):
            raise ValueError("a broken pass")
        return super().begin_pass(streams, state, parts, tokens)

    def launch_unit(self, streams: Streams, state: DeviceState, prompts: PromptPass, layer: int, *rest: Any) -> None:
        requests = {it.request_index for it in prompts.requests.values()}  # type: ignore[attr-defined]
        if self.breaks == f"unit {layer}" and self.request in requests:
            raise ValueError("a broken unit")
        super().launch_unit(streams, state, prompts, layer, *rest)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("breaks", ["begin", "unit 0", "unit 2"])
@pytest.mark.parametrize("request_index", [0, 1])
def test_error_of_a_pass_ends_its_requests_and_no_other(backend: str, breaks: str, request_index: int) -> None:
    """The failing pass goes on above another one, or lies below it."""
    runner = BrokenRunner()
    rig = Rig(make_streams(backend, 2), WIDE, runner=runner, pace=one_unit_a_turn())
    runner.rig, runner.breaks, runner.request = rig, breaks, request_index
    lives = [rig.coordinator.create(number, tokens, 4) for number, tokens in enumerate((120, 30, 64))]
    assert rig.coordinator.admit(lives[0], 64)
    rig.run_until(lambda: len(runner.units) >= 1 or bool(lives[0].outcome))
    for life in lives[1:]:
        assert rig.coordinator.admit(life, 64)
        rig.turn()
    rig.run()
    faults = [event.message for event in rig.coordinator.events if isinstance(event, Faulted)]
    bad = {life.number for life in lives if life.outcome in faults}
    assert request_index in bad
    assert len(bad) <= 2, "those of the same pass"
    assert [life.outcome for life in lives if life.number not in bad] == ["length"] * (3 - len(bad))
    good = [life for life in lives if life.number not in bad]
    assert all(life.tokens == life.expected(SHARED) for life in good)
    assert not prompts_of(rig).depth
    rig.check_end()


class BrokenDrafts(DraftingFakeRunner):
    """The draft layer fails for parts that do not end."""

    def launch_prompt_drafts(self, *parts: Any) -> None:
        if parts[5] is None:
            raise ValueError("a broken draft layer")
        super().launch_prompt_drafts(*parts)


def test_error_behind_the_last_unit_ends_the_requests_of_that_pass() -> None:
    """No request of the pass below is faulted, nor one of no pass."""
    settings = drafting_settings(1, WIDE, pass_tokens=64)
    rig = DraftRig(None, settings, None, runner=BrokenDrafts(SHARED))
    lives = [rig.coordinator.create(number, tokens, 4) for number, tokens in enumerate((150, 40))]
    for life in lives:
        assert rig.coordinator.admit(life, 64)
    rig.run()
    assert [life.outcome for life in lives] == ["a broken draft layer", "length"]
    rig.check_end()


# ---------------------------------------------------------------- hand-over


class SentPages:
    """A stand-in for Transfers: pages are delivered as they are sent. `refuses`: transfers that raise."""

    is_idle = True

    def __init__(self, host: Callable[[], Tensor], refuses: Sequence[int] = ()) -> None:
        self._host, self._refuses = host, refuses
        self.sent: list[tuple[int, int, int, Tensor]] = []  # transfer, page, group, its bytes
        self.ends: tuple[int, ...] = ()

    def begin(self, transfer_id: int, destination: object, tokens: int, groups: Any, unsent: int) -> Outgoing:
        self.ends = groups.byte_ends
        return Outgoing(transfer_id, tokens, groups.count, unsent)

    def send(self, out: Outgoing, group: int, staged_rows: int, host_pages: list[int]) -> None:
        if out.transfer_id in self._refuses:
            raise ValueError("a refused transfer")
        for index in out.take_ready(staged_rows, group):
            page = host_pages[index + out.unsent_pages]
            self.sent.append((out.transfer_id, page, group, self.part(page, group)))
        if set(out.sent) == {out.pages + out.unsent_pages}:
            out.delivered.update(range(out.pages))

    def part(self, page: int, group: int) -> Tensor:
        return self._host()[page][self.ends[group - 1] if group else 0 : self.ends[group]].clone()

    def cancel(self, out: Outgoing, reason: str) -> None:
        if not out.is_over:
            out.failure = reason

    def poll(self) -> list[tuple[int, int]]:
        return []

    def takes(self, transfer_id: int) -> bool:
        return False

    def exited(self, worker: str, pid: int) -> None:
        return


def handed_over(backend: str, seed: int, refuses: Sequence[int] = ()) -> tuple[Rig, SentPages, list[Life]]:
    """Three prompts, packed, for other nodes; their transfers are 10, 11 and 12."""
    settings = msgspec.structs.replace(WIDE, pass_tokens=256, layer_group="2KiB", device_mem="1MiB")
    rig, _ = guarded(backend, seed, settings, groups=(0, 0, 1, 1, 2), pace=seed)
    rig.executor.transfers = sent = SentPages(lambda: rig.host, refuses)  # type: ignore[assignment]
    submit = rig.coordinator.submit

    def with_transfer(command: Command) -> None:
        if isinstance(command, Admit):
            command = msgspec.structs.replace(command, transfer_id=10 + command.request_index, destination="other")
        submit(command)

    rig.coordinator.submit = with_transfer
    lives = [rig.coordinator.create(number, tokens, 4) for number, tokens in enumerate((150, 70, 200))]
    for life in lives:
        assert rig.coordinator.admit(life, NO_HOT_BUFFER)
    return rig, sent, lives


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(8))
def test_pages_are_sent_once_their_rows_are_in_host_memory(backend: str, seed: int) -> None:
    """Group by group, while later layers and blocks are launched."""
    rig, sent, lives = handed_over(backend, seed)
    rig.run()
    assert len(sent.ends) == 3, "of two layers, of two, and of one with all index keys"
    assert all(torch.equal(was, sent.part(page, group)) for _, page, group, was in sent.sent)
    assert len({(page, group) for _, page, group, _ in sent.sent}) == len(sent.sent)
    assert len(sent.sent) == len(sent.ends) * sum(-(-len(life.prompt) // PAGE_TOKENS) for life in lives)


def test_transfer_that_fails_ends_its_request_alone() -> None:
    rig, _, lives = handed_over("simulated", 1, refuses=[11])
    rig.run()
    assert [life.outcome for life in lives] == ["", "a refused transfer", ""]
    assert [len(life.tokens) for life in lives[::2]] == [1, 1]


# ---------------------------------------------------------------- all of them


@dataclass
class Rush:
    """Prompts that come one by one, of three owners, some behind a shared prefix; some leave and come back."""

    backend: str
    seed: int
    masks: Masks | None = None

    def __post_init__(self) -> None:
        self.chance = chance = random.Random(self.seed)
        groups = (SHARED, SEPARATE)[self.seed % 2]
        settings = msgspec.structs.replace(WIDE, pass_tokens=chance.choice((64, 128, 200)))
        self.rig, self.runner = guarded(self.backend, self.seed, settings, groups, pace=self.seed)
        owned(self.rig, lambda number: f"owner {number % 3}")
        self.points: set[str] = set()

    def run(self) -> None:
        rig, chance = self.rig, self.chance
        donor = self._donor()
        held = ALTERNATING if self.masks is not None else ""
        lives = [
            rig.coordinator.create(number, tokens, 3, grammar=held if number % 3 == 1 else "")
            for number, tokens in enumerate(PROMPTS)
        ]
        for life in lives[3::3]:
            life.number, life.prompt = donor.number, donor.prompt
            life.sampling = donor.sampling
            life.shared = tuple(donor.host_pages[: chance.choice((1, 2))])
        waiting, leavers = list(lives), {lives[0], *chance.sample(lives, 3)}
        for _ in range(20_000):
            for life in list(waiting):
                if chance.random() < 0.2 and rig.coordinator.admit(life, chance.choice((0, 64))):
                    waiting.remove(life)
            rig.turn()
            if self.masks is not None and chance.random() < 0.02:
                self.masks.let_go(rig)
            for life in sorted(leavers, key=lives.index):
                if life.here and chance.random() < (0.1, 0.1, 0.4)[prompts_of(rig).depth]:
                    self.points.add(self._point(life))
                    rig.coordinator.withdraw(life, chance.choice(LEAVINGS))
                    leavers.discard(life)
            waiting += [it for it in lives if not it.placement and not it.outcome and it not in waiting]
            if not waiting and rig.executor.idle:
                break
        else:
            raise AssertionError(f"nothing more happens: {lives}")
        rig.coordinator.host_pages.extend(donor.host_pages)
        donor.host_pages = []

    def _donor(self) -> Life:
        donor = self.rig.coordinator.create(50, 150, 3, seed=50)
        assert self.rig.coordinator.admit(donor, NO_HOT_BUFFER)
        self.rig.run()
        return donor

    def _point(self, life: Life) -> str:
        """Name the place of a request that leaves."""
        prompts = prompts_of(self.rig)
        request = next((it for it in self.rig.executor.held() if it.placement == life.placement), None)
        if request is None:
            return "not applied"
        for depth, opened in enumerate(prompts._open):
            if opened.launched is not None and any(held is request for held in opened.launched.requests):
                return f"in pass {depth} of {len(prompts._open)}"
        return "behind its pass" if request in _behind_their_pass(self.rig) else str(request.status.value)


@pytest.mark.parametrize("seed", range(40))
def test_prompts_left_at_any_point_change_no_token_and_leak_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of every fourth one are late, for a while."""
    rush = Rush(BACKENDS[seed % 2], seed, Masks(monkeypatch) if seed % 4 > 2 else None)
    rush.run()
    assert not rush.rig.wrong()
    rush.rig.check_end()
    assert not prompts_of(rush.rig).depth
    assert not prompts_of(rush.rig)._prompts
    assert not _behind_their_pass(rush.rig)


def test_rushes_leave_at_every_point(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {f"in pass {place}" for place in ("0 of 1", "0 of 2", "1 of 2")} | {"prefilling", "behind its pass"}
    points = set[str]()
    for seed in range(3, 40, 4):
        with monkeypatch.context() as patch:
            rush = Rush("simulated", seed, Masks(patch))
            rush.run()
        points |= rush.points
        if points >= wanted:
            return
    raise AssertionError(points)
