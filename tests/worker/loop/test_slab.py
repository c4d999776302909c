"""The slab of two layers: earlier rows of a prompt come back layer by layer, and the hot buffer is filled from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest

from protocol.errors import BadInput
from protocol.units import pages_for
from tests.support.fakes.hash_runner import SEPARATE, SHARED, FakeRunner
from tests.support.fakes.pace import DrawnGap, DrawnPace
from tests.support.history import in_turn
from tests.support.worker_rig import SETTINGS, Rig
from tests.worker.loop.test_fences import MUTANT_SEEDS, MakeStreams, lagging, simulated
from worker.device import sizing
from worker.device.arena import Arena
from worker.loop.batch import RunningRequest, Status
from worker.loop.prefill import LaunchedPass, Prefill
from worker.loop.seats import Seats, check_admit
from worker.loop.swap import Swap
from worker.streams import SimulatedStreams, make_streams
from worker.streams.simulated import SimulatedFence, SimulatedStream

PROMPT = 250
#: Turns within which a request that was withdrawn ends, if every stream runs.
TURNS_OF_AN_END = 300
SEEDS = range(6)


@pytest.fixture(autouse=True)
def _slab_of_one_longest_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that prompts share few pages, and the next one gets those of the last."""
    monkeypatch.setattr(sizing, "PACKED_PAGES_MAX", 0)


def groups_of(seed: int) -> tuple[int, ...]:
    return (SHARED, SEPARATE)[seed % 2]


def seen(rig: Rig, number: int) -> RunningRequest | None:
    return next((it for it in rig.executor.held() if it.request_index == number), None)


def test_each_pass_loads_what_earlier_ones_have_written_once_a_layer() -> None:
    rig = Rig(runner=FakeRunner(SHARED))
    assert rig.coordinator.admit(rig.coordinator.create(1, PROMPT, 2), 64)
    rig.run()
    g, counters = rig.runner.geometry, rig.executor.counters
    assert counters.refilled_bytes == (64 + 128 + 192) * g.layers * g.row_bytes
    assert counters.staged_bytes == PROMPT * (g.layers * g.row_bytes + g.groups * g.index_row_bytes)
    assert counters.preloaded_bytes == 0


@pytest.mark.parametrize("memory", ["chunks", "index_pages"])
def test_admission_names_the_memory_that_is_short_and_takes_none(memory: str) -> None:
    """A coordinator that counts wrongly is told which count; what the request found is free again."""
    rig = Rig(runner=FakeRunner(SHARED))
    seats = rig.executor._seats
    arena: Arena = getattr(seats, memory)
    arena.take(arena.free)
    before, life = seats.free(), rig.coordinator.create(1, PROMPT, 2)
    assert rig.coordinator.admit(life, 64)
    rig.run()
    name = {"chunks": "hot chunk", "index_pages": "index_pages"}[memory]
    assert life.outcome.startswith(f"{name}=")
    assert seats.free() == before


@pytest.mark.parametrize("hot_slots", [0, 64])
@pytest.mark.parametrize("seed", SEEDS)
def test_first_step_finds_the_newest_rows_in_its_hot_buffer(seed: int, hot_slots: int) -> None:
    """All rows of a resident one; of a managed one those of its last whole pages, copied from the slab."""
    rig = Rig(make_streams("simulated", seed), runner=FakeRunner(groups_of(seed)))
    life = rig.coordinator.create(1, PROMPT, 4)
    assert rig.coordinator.admit(life, hot_slots)
    rig.run_until(lambda: (it := seen(rig, 1)) is not None and it.status is Status.STAGING)
    request = seen(rig, 1)
    assert request is not None
    chunks, state = request.memory.hot.chunks, rig.executor.state
    rig.streams.compute.record("sampled").wait()
    request.fences[0].wait()
    first = 192 if hot_slots else 0
    for layer in range(rig.runner.geometry.layers):
        for position in range(first, PROMPT):
            slot, (page, offset) = position - first, divmod(position, 64)
            held = state.rows[layer, chunks[slot // 64] * 64 + slot % 64]
            host = rig.host[life.host_pages[page]].view(-1)[(layer * 64 + offset) * 16 :][:16]
            assert held.tolist() == host.tolist(), (layer, position)
    rig.run()
    assert not rig.wrong()


@pytest.mark.mutation
@pytest.mark.parametrize("hot_slots", [0, 64])
def test_hot_buffer_that_lacks_a_layer_is_caught(hot_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = Swap.fill
    monkeypatch.setattr(Swap, "fill", lambda swap, places, layer: layer == 1 or fill(swap, places, layer))
    rig = Rig(runner=FakeRunner(SHARED))
    assert rig.coordinator.admit(rig.coordinator.create(1, PROMPT, 8), hot_slots)
    rig.run()
    assert rig.wrong()


# ---------------------------------------------------------------- resizes


@pytest.mark.parametrize("sizes", [(64, 128), (128, 64), (64, 0), (0, 64)])
@pytest.mark.parametrize("seed", SEEDS)
def test_buffer_is_exchanged_at_once_before_the_last_pass(seed: int, sizes: tuple[int, int]) -> None:
    rig = Rig(make_streams("simulated", seed), runner=FakeRunner(groups_of(seed)))
    life = rig.coordinator.create(1, PROMPT, 12)
    assert rig.coordinator.admit(life, sizes[0])
    rig.turn()
    request = seen(rig, 1)
    assert request is not None
    assert request.status is Status.PREFILLING
    assert not request.is_filling
    assert rig.coordinator.resize(life, sizes[1])
    rig.executor._apply_commands()
    assert request.memory.hot.hot_slots == sizes[1]
    assert len(request.memory.hot.chunks) == life.hot_chunks
    assert life.resizing is None
    rig.run()
    assert not rig.wrong()
    rig.check_end()


@pytest.mark.parametrize("sizes", [(64, 128), (128, 64), (64, 0), (0, 64)])
@pytest.mark.parametrize("seed", SEEDS)
def test_buffer_that_is_being_filled_is_resized_once_its_request_joins(seed: int, sizes: tuple[int, int]) -> None:
    rig = Rig(make_streams("simulated", seed), runner=FakeRunner(groups_of(seed)))
    life = rig.coordinator.create(1, PROMPT, 12)
    assert rig.coordinator.admit(life, sizes[0])
    rig.run_until(lambda: (it := seen(rig, 1)) is not None and it.is_filling)
    request = seen(rig, 1)
    assert request is not None
    assert rig.coordinator.resize(life, sizes[1])
    rig.executor._apply_commands()
    assert (request.memory.hot.hot_slots, life.resizing is None) == (sizes[0], False)
    rig.run_until(lambda: life.resizing is None)
    assert request.memory.hot.hot_slots == sizes[1]
    rig.run()
    assert not rig.wrong()
    rig.check_end()


@pytest.mark.mutation
def test_buffer_exchanged_while_it_is_filled_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are on their way to chunks that it gives up."""

    def is_wrong(seed: int) -> bool:
        rig = Rig(make_streams("simulated", seed), runner=FakeRunner(groups_of(seed)))
        life = rig.coordinator.create(1, PROMPT, 12)
        assert rig.coordinator.admit(life, 0)
        rig.run_until(lambda: (it := seen(rig, 1)) is not None and it.is_filling)
        assert rig.coordinator.resize(life, 64)
        rig.run()
        return bool(rig.wrong())

    assert not any(map(is_wrong, SEEDS))
    monkeypatch.setattr(RunningRequest, "may_resize", property(lambda it: it.status is not Status.LOADING))
    assert any(map(is_wrong, SEEDS))


# ---------------------------------------------------------------- pages of passes

#: A slab of four pages.
SMALL = msgspec.structs.replace(SETTINGS, context_max_tokens=255, device_mem="1MiB")


def one_after_another(make: MakeStreams) -> Rig:
    """The last passes of two prompts do not fit the slab together, and each takes pages of the other's pass before."""
    rig = Rig(make(), SMALL, runner=FakeRunner((0, 1, 2, 3)))
    assert rig.sizing.slab_pages == 4
    for number, tokens in ((1, 200), (2, 190)):
        assert rig.coordinator.admit(rig.coordinator.create(number, tokens, 8), 64)
    rig.run()
    return rig


def a_short_prompt_amid_a_long_one(make: MakeStreams) -> Rig:
    """It preempts the open pass, in pages that this one leaves."""
    rig = Rig(make(), SMALL, runner=FakeRunner((0, 1, 2, 3), block_tokens_max=16))
    coordinator, prompts = rig.coordinator, rig.executor._prompts
    long, short = coordinator.create(1, 190, 8), coordinator.create(2, 20, 8)
    assert coordinator.admit(long, 64)
    rig.run_until(lambda: prompts.depth == 1 and rig.executor.counters.refilled_bytes > 0)
    assert coordinator.admit(short, 64)
    rig.run_until(lambda: prompts.depth == 2)
    rig.run()
    return rig


def test_pages_are_those_of_rows_that_passes_read_and_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission takes none; a pass takes them for its prompt up to where it stops, and gives them back at its end."""
    taken, take = list[int](), Seats.take_slab

    def counted(seats: Seats, request: RunningRequest, rows: int) -> None:
        assert seats.slab.free == seats.slab.count
        take(seats, request, rows)
        taken.append(seats.slab.count - seats.slab.free)

    monkeypatch.setattr(Seats, "take_slab", counted)
    rig = Rig(settings=SMALL)
    assert rig.coordinator.admit(rig.coordinator.create(1, 200, 4), 64)
    rig.run()
    assert taken == [1, 2, 3, 4]
    rig.check_end()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scenario", [one_after_another, a_short_prompt_amid_a_long_one])
def test_prompts_that_share_a_slab_cost_no_token(scenario: Callable[[MakeStreams], Rig], seed: int) -> None:
    rig = scenario(lagging("stage", simulated(seed)) if seed % 2 else simulated(seed))
    assert not rig.wrong()
    rig.check_end()


@pytest.mark.mutation
def test_rows_written_over_those_of_the_pass_before_ahead_of_staging_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = Prefill.begin

    def early(prefill: Prefill, taken: Sequence[tuple[RunningRequest, int, int]], place: int) -> LaunchedPass:
        this = begin(prefill, taken, place)
        this.slab_staged.clear()
        return this

    monkeypatch.setattr(Prefill, "begin", early)
    assert any(one_after_another(lagging("stage", simulated(seed))).wrong() for seed in MUTANT_SEEDS)


@pytest.mark.mutation
def test_pages_of_an_open_pass_given_to_another_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Seats.take_slab

    def loose(seats: Seats, request: RunningRequest, rows: int) -> None:
        take(seats, request, rows)
        seats.slab.give(request.memory.slab)
        seats.slab._free.rotate(len(request.memory.slab))

    monkeypatch.setattr(Seats, "take_slab", loose)
    monkeypatch.setattr(Seats, "free_slab", lambda seats, request: request.memory.slab.clear())
    assert any(a_short_prompt_amid_a_long_one(simulated(seed)).wrong() for seed in MUTANT_SEEDS)


def test_prompt_longer_than_the_slab_is_refused_by_name() -> None:
    rig = Rig(settings=msgspec.structs.replace(SETTINGS, context_max_tokens=4_096, device_mem="128KiB"))
    tokens = rig.sizing.capacity.prompt_max_tokens
    assert tokens < 2_000
    life = rig.coordinator.create(1, tokens + 1, 2)
    life.host_pages, life.index_pages = [*range(pages_for(tokens + 2))], pages_for(tokens + 2)
    life.hot_slots, life.hot_chunks = 64, 2
    with pytest.raises(BadInput, match=f"passes have memory for prompts of {tokens} tokens") as caught:
        check_admit(rig.coordinator._admit_command(life), rig.sizing, rig.runner.info)
    assert caught.value.field == "prompt"


# ---------------------------------------------------------------- steps beside


class Stalls:
    """Counts waits of `compute` for copies of prompts that have not run when they are launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        wait = SimulatedStream.wait

        def counted(stream: SimulatedStream, fence: SimulatedFence) -> None:
            names = ("refilled", "slab_staged")
            self.count += stream.name == "compute" and fence.name in names and not fence.complete
            wait(stream, fence)

        monkeypatch.setattr(SimulatedStream, "wait", counted)


def beside_a_batch(seed: int, monkeypatch: pytest.MonkeyPatch, pace: DrawnPace | int = 0) -> int:
    """Stalls of steps while a prompt of several passes is computed beside a batch."""
    runner = FakeRunner(groups_of(seed))
    rig = Rig(lagging("refill", simulated(seed))(), runner=runner, ahead_tokens=400, pace=pace)
    coordinator = rig.coordinator
    other, life = coordinator.create(1, 40, 400), coordinator.create(2, PROMPT, 4)
    assert coordinator.admit(other, 64)
    rig.run_until(lambda: len(other.tokens) >= 2)
    with monkeypatch.context() as patch:
        stalls = Stalls(patch)
        assert coordinator.admit(life, 64)
        rig.run_until(lambda: bool(life.tokens) or len(other.tokens) > 390)
        assert rig.executor.counters.refilled_bytes > 0
    rig.run()
    assert not rig.wrong()
    rig.check_end()
    return stalls.count


@pytest.mark.parametrize("seed", [in_turn(SEEDS[::2]), in_turn(SEEDS[1::2])])
def test_no_step_waits_for_earlier_rows_of_a_prompt(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert beside_a_batch(seed, monkeypatch) == 0


class TakenGap(DrawnGap):
    """Notes what it is asked for, and takes `units`."""

    def __init__(self, units: int, asked: list[float]) -> None:
        super().__init__(units)
        self._asked = asked

    def take(self, seconds: float) -> bool:
        self._asked.append(seconds)
        return super().take(seconds)


class MeasuredPace(DrawnPace):
    """Units of `UNIT_S` seconds, and copies of `copy_s`. `asked`: what gaps were asked for."""

    UNIT_S = 2.0

    def __init__(self, copy_s: float) -> None:
        super().__init__(0, 16, fixed_block=16)
        self._copy_s, self.asked = copy_s, list[float]()

    def gap(self, *, beside_steps: bool) -> DrawnGap:
        return TakenGap(2, self.asked) if beside_steps else DrawnGap(1)

    def unit_s(self, rows: int) -> float:
        return self.UNIT_S

    def copy_s(self, rows: int) -> float:
        return self._copy_s


def test_unit_goes_before_its_copies_were_seen_when_others_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = MeasuredPace(MeasuredPace.UNIT_S / 2)
    assert sum(beside_a_batch(seed, monkeypatch, pace) for seed in SEEDS[:2]) > 0
    waits = {asked - pace.UNIT_S for asked in pace.asked}
    assert waits == {0.0, pace.UNIT_S / 2}  # that of the first layer nothing covers


def test_what_no_unit_covers_of_a_copy_is_taken_from_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = MeasuredPace(1_000.0)
    beside_a_batch(0, monkeypatch, pace)
    assert {1_000.0, 1_002.0} & set(pace.asked)  # behind one unit, and in the first layer
    assert pace.UNIT_S in pace.asked


@pytest.mark.mutation
def test_units_launched_before_their_rows_are_there_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DrawnPace, "copy_s", lambda pace, rows: 0.0)
    assert any(beside_a_batch(seed, monkeypatch) for seed in SEEDS)


# ---------------------------------------------------------------- ends amid loads


def a_death_amid_refills(make: MakeStreams) -> Rig:
    """The process dies while earlier rows are being loaded; the next one begins behind what was reported."""
    streams = make()
    rig = Rig(streams)
    life = rig.coordinator.create(1, PROMPT, 8)
    assert rig.coordinator.admit(life, 64)
    rig.run_until(lambda: rig.executor.counters.refilled_bytes > 0)
    streams.crash()
    heir = Rig(make_streams("inline"), host=rig.host)
    heir.coordinator.adopt(rig.coordinator)
    assert heir.coordinator.admit(life, 64)
    heir.run()
    return heir


def an_abort_amid_refills(make: MakeStreams) -> Rig:
    """One request is aborted while its earlier rows are being loaded; the next gets the very same slab pages."""
    rig = Rig(
        make(),
        msgspec.structs.replace(SETTINGS, context_max_tokens=127, device_mem="1MiB"),
        runner=FakeRunner((0, 1, 2, 3), block_tokens_max=16),
    )
    coordinator = rig.coordinator
    assert rig.sizing.slab_pages == 2
    leaver, heir = coordinator.create(1, 120, 7), coordinator.create(2, 60, 8)
    assert coordinator.admit(leaver, 64)
    rig.run_until(lambda: rig.executor.counters.refilled_bytes > 0)
    coordinator.withdraw(leaver, "abort")
    rig.run_until(lambda: not leaver.placement)
    assert coordinator.admit(heir, 64)
    rig.run()
    return rig


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scenario", [a_death_amid_refills, an_abort_amid_refills])
def test_ends_amid_refills_cost_no_token(scenario: Callable[[MakeStreams], Rig], seed: int) -> None:
    rig = scenario(lagging("refill", simulated(seed)) if seed % 2 else simulated(seed))
    assert not rig.wrong()
    rig.check_end()


def a_load_held_back_from_its_owner() -> Rig:
    """A prompt is aborted behind a load that none of its units awaits. The load runs, at the latest, between the write
    and the reading of the next owner's rows of that layer, in the same slab pages."""
    streams = make_streams("simulated", 0)
    assert isinstance(streams, SimulatedStreams)
    settings = msgspec.structs.replace(SETTINGS, context_max_tokens=127, device_mem="1MiB")
    rig = Rig(streams, settings, runner=FakeRunner((0, 1, 2, 3), block_tokens_max=16))
    coordinator = rig.coordinator
    leaver, heir = coordinator.create(1, 120, 7), coordinator.create(2, 60, 8)
    assert coordinator.admit(leaver, 64)

    def is_next() -> bool:
        names = [getattr(item, "label", "") or item.fence.name for item in streams.refill.queue]  # type: ignore[union-attr]
        return "refill layer 1" in names and "refilled" not in names[: names.index("refill layer 1")]

    rig.run_until(is_next)
    slab = next(iter(rig.executor.held())).memory.slab
    can_run = streams.refill.runnable
    streams.refill.runnable = lambda: False  # type: ignore[method-assign]

    def end_hold() -> None:
        streams.refill.runnable = can_run  # type: ignore[method-assign]
        while can_run():
            streams.refill.run_head()

    coordinator.withdraw(leaver, "abort")
    rig.turn(TURNS_OF_AN_END)
    if leaver.placement:
        end_hold()
    rig.run_until(lambda: not leaver.placement)
    assert coordinator.admit(heir, 64)
    run_head, shared = streams.compute.run_head, list[bool]()

    def run_head_of_compute() -> None:
        item, request = streams.compute.queue[0], seen(rig, 2)
        run_head()
        is_write = request is not None and getattr(item, "label", "") == "prompt project"
        if request is not None and is_write and item.run.args[2] == 1 and not shared:  # type: ignore[union-attr]
            shared.append(request.memory.slab[0] == slab[0])
            end_hold()

    streams.compute.run_head = run_head_of_compute  # type: ignore[method-assign]
    rig.run()
    assert shared == [True]
    return rig


def test_a_load_held_back_from_its_owner_costs_no_token() -> None:
    rig = a_load_held_back_from_its_owner()
    assert not rig.wrong()
    rig.check_end()


@pytest.mark.mutation
def test_quiesced_must_cover_refills(monkeypatch: pytest.MonkeyPatch) -> None:
    """I2: slab pages go to another prompt while rows of the last owner are still being loaded there."""
    quiesce = Swap.quiesce
    monkeypatch.setattr(Swap, "quiesce", lambda swap: [fence for fence in quiesce(swap) if "refill" not in str(fence)])
    assert a_load_held_back_from_its_owner().wrong()


@pytest.mark.mutation
def test_a_pass_that_does_not_wait_for_staging_of_the_one_before_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads what was never written to host pages: rows of one of the last two layers, so the model has two."""
    monkeypatch.setattr(Swap, "await_staged", lambda swap: None)

    def is_wrong(seed: int) -> bool:
        streams = lagging("stage", simulated(seed))()
        assert isinstance(streams, SimulatedStreams)
        rig = Rig(streams, runner=FakeRunner((0, 1)))
        assert rig.coordinator.admit(rig.coordinator.create(1, PROMPT, 4), 64)
        rig.run()
        return bool(rig.wrong())

    assert any(map(is_wrong, MUTANT_SEEDS))


@pytest.mark.mutation
def test_a_layer_loaded_before_the_one_two_below_was_attended_to_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers are loaded at once."""
    refill = Prefill._refill

    def early(prefill: Prefill, this: LaunchedPass, layer: int) -> None:
        if layer == 1:
            for number in range(1, prefill._state.geometry.layers):
                refill(prefill, this, number)
        elif not layer:
            refill(prefill, this, layer)

    monkeypatch.setattr(Prefill, "_refill", early)
    rig = Rig(runner=FakeRunner(SHARED))
    assert rig.coordinator.admit(rig.coordinator.create(1, PROMPT, 4), 64)
    rig.run()
    assert rig.wrong()
