"""Warm starts: a context that its hot buffer cannot hold begins with the rows that its last top-k names.

A hint: right, it saves the misses of the first step; wrong, stale or unreadable, it changes nothing but those.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.integrity import check_state
from kernels.layout import Geometry
from kernels.seat import hold_tokens, latest_tokens
from kernels.state import Tripwire
from protocol import messages
from protocol.arrays import Int32Array
from protocol.errors import BadInput
from protocol.messages import NO_HOT_BUFFER, Released, Report
from tests.support.fakes.coordinator import Life
from tests.support.fakes.hash_runner import SEPARATE, SHARED, TOPK, FakeRunner
from tests.support.kernel_rig import Rig as KernelRig
from tests.support.prompts import TEXT
from tests.support.runner_rig import Rig as RunnerRig
from tests.support.worker_rig import Rig
from worker.device.hot_buffer import HotBuffer
from worker.link import outbox
from worker.link.outbox import Outbox
from worker.loop.swap import Swap
from worker.loop.topk_bytes import pack, unpack
from worker.loop.warm_start import BUFFERS, TopkBuffers
from worker.runners.tiny import write_tiny_checkpoint
from worker.runners.transformers_dsa import TransformersRunner
from worker.streams import make_streams

PROMPT = 300
#: A mutant must be convicted within so many seeds.
MUTANT_SEEDS = range(40)


def geometry(groups: int, topk: int) -> Geometry:
    return Geometry(groups, row_bytes=8, group_of_layer=tuple(range(groups)), index_row_bytes=8, topk=topk)


def positions_of(packed: bytes, rig: Rig, length: int = PROMPT) -> list[set[int]]:
    g = rig.runner.geometry
    return [set(positions.tolist()) for positions in unpack(packed, g.groups, g.topk, length)]


def packed_of(sets: Sequence[Sequence[int]], topk: int = TOPK) -> bytes:
    return pack(np.array([[*positions, *[-1] * (topk - len(positions))] for positions in sets], dtype=np.int32))


class Workers:
    """One that computes prompts, and others that decode what it left in the pool, with any hint."""

    def __init__(self, groups: Sequence[int] = SHARED, make: Callable[[int], object] | None = None) -> None:
        self.groups = groups
        self.make = make or (lambda number: make_streams("inline"))
        self.first = self.worker(0)

    def worker(self, number: int, host: torch.Tensor | None = None) -> Rig:
        return Rig(self.make(number), runner=FakeRunner(self.groups), host=host)  # type: ignore[arg-type]

    def prefill(self, prompt: int = PROMPT, tokens: int = 8, number: int = 1) -> Life:
        life = self.first.coordinator.create(number, prompt, tokens, seed=number)
        assert self.first.coordinator.admit(life, NO_HOT_BUFFER)
        self.first.run()
        return life

    def decoder(self, life: Life, hint: bytes, hot_slots: int = 64) -> Rig:
        """Another worker, that has been told to go on."""
        rig = self.worker(1, self.first.host)
        rig.coordinator.adopt(self.first.coordinator)
        life.warm_start, life.tokens, life.outcome = hint, life.tokens[:1], ""
        assert rig.coordinator.admit(life, hot_slots)
        return rig

    def decode(self, life: Life, hint: bytes, hot_slots: int = 64) -> Rig:
        pages = life.host_pages[:]
        rig = self.decoder(life, hint, hot_slots)
        rig.run()
        assert not rig.wrong()
        rig.check_end()
        life.host_pages, life.durable = pages, PROMPT
        return rig

    def first_step(self, life: Life, hint: bytes) -> Rig:
        """As it is once one step was launched, and no other."""
        rig = self.decoder(life, hint)
        rig.run_until(lambda: rig.executor._decoder.in_flight == 1)
        return rig


def settle(rig: Rig) -> None:
    """What was launched has run: on a GPU, a test must wait."""
    if rig.executor.state.rows.is_cuda:
        torch.cuda.synchronize()


def misses(rig: Rig) -> list[int]:
    """By index group, of all seats."""
    settle(rig)
    counted: list[int] = rig.executor.state.misses.sum(1).tolist()
    return counted


def selected(rig: Rig) -> list[list[int]]:
    """What the last step of the only request selected, by group; without the row that it wrote."""
    (request,), device = rig.executor.held(), rig.executor.state.rows.device
    latest = torch.empty(rig.runner.geometry.groups, TOPK + 1, dtype=torch.int32, device=device)
    settle(rig)
    latest_tokens(rig.executor.state, request.seat, request.memory.hot.hot_slots, latest)
    return [[token for token in row if 0 <= token < PROMPT] for row in latest.tolist()]


# ---------------------------------------------------------------- the first step


@pytest.mark.parametrize("groups", [SHARED, SEPARATE])
def test_first_step_misses_only_changed_rows(groups: tuple[int, ...]) -> None:
    """Cold, every row that it selects; with those very rows, none; with some others instead, as many."""
    workers = Workers(groups)
    life = workers.prefill()
    cold = workers.first_step(life, b"")
    chosen = selected(cold)
    assert misses(cold) == [len(positions) for positions in chosen]
    assert min(misses(cold)) >= TOPK - 1
    for changed in (0, 1, 17, TOPK - 1):
        others = [sorted(set(range(PROMPT)) - set(positions))[:changed] for positions in chosen]
        hint = packed_of([old[changed:] + new for old, new in zip(chosen, others, strict=True)])
        warm = workers.first_step(life, hint)
        assert misses(warm) == [changed] * len(chosen)
        assert warm.executor.counters.warm_starts == {"warm": 1}


def test_prefill_worker_reports_the_last_selection() -> None:
    """And its successor needs that much less; what was loaded ahead counts as preload, not as misses."""
    workers = Workers()
    life = workers.prefill()
    hint = life.warm_start
    chosen, named = selected(workers.first_step(life, b"")), positions_of(hint, workers.first)
    assert [len(positions) for positions in named] == [TOPK, TOPK]
    warm = workers.first_step(life, hint)
    assert misses(warm) == [len(set(old) - new) for old, new in zip(chosen, named, strict=True)]
    g = warm.runner.geometry
    loaded = TOPK * g.layers * g.row_bytes + PROMPT * g.groups * g.index_row_bytes
    assert warm.executor.counters.preloaded_bytes == loaded


@pytest.mark.parametrize("prompt", [TOPK, TOPK + 1])
def test_prompt_that_fits_any_hot_buffer_needs_no_hint(prompt: int) -> None:
    assert bool(Workers().prefill(prompt).warm_start) == (prompt > TOPK)


def test_last_selection_of_a_retracted_request_returns_hot() -> None:
    rig = Rig()
    life = rig.coordinator.create(1, PROMPT, 20, seed=1)
    assert rig.coordinator.admit(life, 64)
    rig.run_until(lambda: len(life.tokens) >= 6)
    chosen = selected(rig)
    rig.coordinator.withdraw(life, "keep")
    rig.run()
    named = positions_of(life.warm_start, rig)
    for old, new in zip(chosen, named, strict=True):
        assert len(set(old) - new) <= 1  # the row that the step wrote may be in its place
    assert rig.coordinator.admit(life, 64)
    rig.run_until(lambda: rig.executor._decoder.in_flight == 1)
    hit = rig.executor.state.hits.sum(1).tolist()
    again = selected(rig)
    assert all(count >= len(set(now) & new) for count, now, new in zip(hit, again, named, strict=True))
    rig.run()
    assert not rig.wrong()
    rig.check_end()


@pytest.mark.parametrize("leaving", ["abort", "drop"])
def test_request_without_kept_rows_keeps_no_hint(leaving: str) -> None:
    rig = Rig()
    life = rig.coordinator.create(1, PROMPT, 20)
    assert rig.coordinator.admit(life, 64)
    rig.run_until(lambda: len(life.tokens) >= 6)
    rig.coordinator.withdraw(life, leaving)
    rig.run()
    if leaving == "drop":
        assert rig.coordinator.admit(life, 64)
        rig.run()
    assert not rig.executor.counters.warm_starts
    rig.check_end()


def test_prompts_beyond_the_buffers_start_cold() -> None:
    workers = Workers()
    taken = [workers.first.executor._seats._warm_starts.take() for _ in range(BUFFERS)]
    assert workers.first.executor._seats._warm_starts.take() is None
    life = workers.prefill()
    assert life.warm_start == b""
    assert workers.decode(life, b"").executor.counters.warm_starts == {"cold": 1}
    for place in taken:
        assert place is not None
        workers.first.executor._seats._warm_starts.read(place)
    for number in range(2 * BUFFERS):
        assert workers.prefill(100, 2, number + 2).warm_start


# ---------------------------------------------------------------- nothing depends on it


def hints(rng: random.Random) -> dict[str, bytes]:
    """By outcome, and by what they are."""
    some = packed_of([rng.sample(range(PROMPT), TOPK) for _ in range(2)])
    return {
        "cold nothing": b"",
        "warm random positions": some,
        "warm some beyond the context": packed_of([rng.sample(range(4 * PROMPT), TOPK) for _ in range(2)]),
        "warm all beyond the context": packed_of([range(PROMPT, PROMPT + TOPK)] * 2),
        "warm none in one group": packed_of([[], [0, PROMPT - 1]]),
        "refused cut off": some[:-1],
        "refused another k": packed_of([rng.sample(range(PROMPT), TOPK + 1) for _ in range(2)], TOPK + 1),
        "refused another number of groups": packed_of([rng.sample(range(PROMPT), TOPK) for _ in range(3)]),
        "refused a position twice": bytes([2, 0, 7, 0]),
        "refused noise": rng.randbytes(100) + b"\xff",
    }


def test_tokens_do_not_depend_on_the_hint() -> None:
    workers = Workers()
    life = workers.prefill()
    for name, hint in hints(random.Random(1)).items():
        rig = workers.decode(life, hint)
        assert rig.executor.counters.warm_starts == {name.split()[0]: 1}, name


@pytest.mark.parametrize("seed", range(12))
def test_tokens_do_not_depend_on_fence_order(seed: int) -> None:
    workers = Workers((SHARED, SEPARATE)[seed % 2], lambda number: make_streams("simulated", 2 * seed + number))
    life = workers.prefill()
    for hint in (life.warm_start, hints(random.Random(seed))["warm random positions"]):
        assert workers.decode(life, hint).executor.counters.warm_starts["warm"] == 1


def test_abort_during_a_load_leaves_nothing() -> None:
    for seed in range(8):
        workers = Workers(make=lambda number, seed=seed: make_streams("simulated", seed + number))  # type: ignore[misc]
        life = workers.prefill()
        rig = workers.decoder(life, life.warm_start)
        rig.turn()
        rig.coordinator.withdraw(life, "abort")
        rig.run()
        rig.check_end()


# ---------------------------------------------------------------- what would be wrong


def beside_another(make: Callable[[int], object]) -> Rig:
    """Two prompts; the second one joins a batch that the first is in."""
    workers = Workers(SEPARATE, make)
    lives = [workers.prefill(number=number, tokens=tokens) for number, tokens in ((1, 40), (2, 8))]
    rig = workers.decoder(lives[0], lives[0].warm_start)
    rig.run_until(lambda: len(lives[0].tokens) >= 4)
    assert rig.coordinator.admit(lives[1], 64)
    rig.run()
    return rig


def test_concurrent_warm_starts() -> None:
    for seed in range(4):
        rig = beside_another(lambda number, seed=seed: make_streams("simulated", seed + number))  # type: ignore[misc]
        assert not rig.wrong()
        rig.check_end()


@pytest.mark.mutation
def test_join_before_rows_arrive_is_caught() -> None:
    """Without waiting for `preloaded`; in plain order the mutant passes."""

    def run(seed: int, order: str) -> list[int]:
        omit = ("preloaded",)
        return beside_another(lambda number: make_streams("simulated", seed + number, order, omit)).wrong()  # type: ignore[arg-type]

    assert not run(0, "plain")
    assert any(run(seed, "seeded") for seed in MUTANT_SEEDS)


@pytest.mark.mutation
def test_rows_of_another_seat_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of the wrong request are said to hold the tokens, or those of the right one get another's rows."""
    load_topk = Swap.load_topk

    def wrong_seat(swap: Swap, seat: int, *rest: object) -> object:
        return load_topk(swap, seat ^ 1, *rest)  # type: ignore[arg-type]

    def wrong_pages(swap: Swap, seat: int, buffer: HotBuffer, pages: list[int], tokens: list[Int32Array]) -> object:
        return load_topk(swap, seat, buffer, pages[::-1], tokens)

    for mutant in (wrong_seat, wrong_pages):
        monkeypatch.setattr(Swap, "load_topk", mutant)
        rig = beside_another(lambda number: make_streams("inline"))
        assert rig.wrong() or rig.executor.state.tripwires.any(), mutant.__name__


@pytest.mark.mutation
def test_rows_that_come_after_the_placement_are_caught() -> None:
    """I3: a request is admitted when every page has arrived, since nothing is loaded twice."""
    workers = Workers()
    life = workers.prefill()
    pages = torch.tensor(life.host_pages)
    rows = workers.first.host[pages].clone()
    keys = workers.first.runner.geometry.index_offset(0)
    hint = packed_of(selected(workers.first_step(life, b"")))
    workers.first.host[pages, :keys] = 0  # not the index keys, which are loaded without a hint too
    rig = workers.decoder(life, hint)
    rig.turn()
    workers.first.host[pages] = rows
    rig.run()
    assert rig.wrong()


# ---------------------------------------------------------------- the tables


def held_rig() -> tuple[KernelRig, list[Int32Array]]:
    rig = KernelRig(groups=(0, 0, 1), topk=4, tail_slots=3)
    rig.open(1, 200, 8)
    return rig, [np.array([5, 70, 199], np.int32), np.array([0, 63], np.int32)]


def test_held_tokens_are_found_in_their_slots() -> None:
    """And come back as what was used last."""
    rig, (first, second) = held_rig()
    groups, slots = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 1, 2, 0, 1])
    hold_tokens(rig.state, 1, 8, groups, slots, torch.from_numpy(np.concatenate([first, second])).long())
    latest = torch.zeros(2, 4, dtype=torch.int32)
    latest_tokens(rig.state, 1, 8, latest)
    assert [sorted(row) for row in latest.tolist()] == [[-1, 5, 70, 199], [-1, -1, 0, 63]]
    check_state(rig.state, 1, 200)
    assert not rig.state.tripwires.any()


def test_ungranted_or_unfit_hint_changes_nothing() -> None:
    rig, _ = held_rig()
    before = [table.clone() for table in (rig.state.slot_token, rig.state.stamp, rig.state.slot_of)]
    one = torch.tensor([0])
    hold_tokens(rig.state, 1, 8, one, one, torch.tensor([400]))
    assert rig.state.tripwires.tolist()[Tripwire.UNGRANTED] == 1
    hold_tokens(rig.state, 1, 16, one, one, one)
    latest = torch.zeros(2, 4, dtype=torch.int32)
    latest_tokens(rig.state, 1, 16, latest)
    assert rig.state.tripwires.tolist()[Tripwire.SEAT] == 2
    assert (latest == -1).all()
    after = [rig.state.slot_token, rig.state.stamp, rig.state.slot_of]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


# ---------------------------------------------------------------- bytes

sets = st.integers(1, 4).flatmap(
    lambda groups: st.lists(
        st.sets(st.integers(0, (1 << 20) - 1), max_size=9), min_size=groups, max_size=groups
    )
)  # fmt: skip


@given(sets, st.randoms(use_true_random=False))
def test_sets_survive_packing_and_the_message_codec(sets: list[set[int]], rng: random.Random) -> None:
    rows = np.empty((len(sets), 9), dtype=np.int32)
    for row, positions in zip(rows, sets, strict=True):
        padded = [*positions, *[-1] * (9 - len(positions))]
        row[:] = rng.sample(padded, 9)
    report = Report(1, 1, 0, None, (Released(1, 300, warm_start=pack(rows)),))
    heard = messages.decode_worker(messages.encode(report))
    assert heard == report
    assert isinstance(heard, Report)
    (event,) = heard.events
    assert isinstance(event, Released)
    for length in (1 << 20, 1000):
        got = unpack(event.warm_start, len(sets), 9, length)
        assert [part.tolist() for part in got] == [sorted(p for p in positions if p < length) for positions in sets]


@given(st.binary(max_size=40))
def test_any_hint_is_refused_or_distinct_positions(data: bytes) -> None:
    try:
        parts = unpack(data, 2, 5, 100)
    except BadInput:
        return
    for part in parts:
        assert len(set(part.tolist())) == len(part) <= 5
        assert all(0 <= position < 100 for position in part)


def test_hints_per_report_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """I8."""
    monkeypatch.setattr(outbox, "REPORT_TOPK_BYTES_MAX", 100)
    box = Outbox(1)
    for placement in range(4):
        box.add_event(Released(placement, 300, warm_start=bytes(60)))
    sizes = []
    while (report := box.take(0, 0.0)) is not None:
        sizes.append(len(report.events))
    assert sizes == [2, 2]


def test_oversized_hint_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = TopkBuffers(geometry(2, 4), torch.device("cpu"))
    place = buffers.take()
    assert place is not None
    buffers[place].copy_(torch.arange(8).view(2, 4))
    monkeypatch.setattr("worker.loop.warm_start.WARM_START_BYTES_MAX", 9)
    assert buffers.read(place) == b""


# ---------------------------------------------------------------- the runner


@pytest.mark.parametrize("gathered", [False, True], ids=["expanded", "gathered"])
def test_prompt_topk_equals_a_step_of_its_last_token(tmp_path: Path, gathered: bool) -> None:
    write_tiny_checkpoint(tmp_path, index_topk=32)
    seen: dict[int, set[int]] = {}
    runner = TransformersRunner.load(tmp_path)
    model = runner._layers.model
    runner = TransformersRunner(
        model,
        runner.info,
        runner.geometry,
        gathered_prefill=gathered,
        after_index_topk=lambda group, batch, topk: seen.__setitem__(group, set(topk[0].tolist())),
    )
    prompt = list(TEXT[:200])
    rig = RunnerRig(runner, seats=2, context_tokens=256)
    rig.open(0, prompt, hot_slots=64)
    last = [set(row) for row in rig.warm_start.tolist()]
    rig.open(1, prompt[:-1], hot_slots=64)
    rig.decode([1], inputs=prompt[-1:])
    assert seen.keys() == set(range(len(last)))
    for group, positions in seen.items():
        assert len(last[group]) == 32
        assert len(positions - last[group]) <= 1  # a near-tie at the edge
