"""Arenas, hot buffers, input rings and sizing: the accounts of device memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.state import DeviceState
from protocol.errors import BadInput, CapacityError, ConfigError, InternalError
from protocol.units import PAGE_TOKENS, managed_chunks, pages_for
from tests.support.fakes.hash_runner import FakeRunner
from tests.support.worker_rig import SETTINGS
from worker.device.arena import Arena
from worker.device.hot_buffer import HotBuffer, HotBufferChange, SetUp, change, check_size
from worker.device.sizing import DEVICE_SHARE, Sizing, size_worker
from worker.loop.inputs import RING_BUFFERS, Ring, SeatTables
from worker.runners.base import SamplerState
from worker.streams import Stream, make_streams

replace = msgspec.structs.replace

# ---------------------------------------------------------------- arena


def test_arena_hands_out_the_longest_free_first() -> None:
    arena = Arena("chunk", 4)
    assert arena.take(3) == [0, 1, 2]
    arena.give([2, 0])
    assert arena.take(2) == [3, 2]
    assert arena.take(1) == [0]


def test_a_failed_take_holds_nothing() -> None:
    """I7."""
    arena = Arena("chunk", 3)
    arena.take(1)
    with pytest.raises(CapacityError, match="needs 3 chunks, 2 are free"):
        arena.take(3)
    assert arena.free == 2
    arena.check_invariants([0])


@pytest.mark.parametrize("number", [1, 7, -1])
def test_return_of_unheld_chunks_is_an_internal_error(number: int) -> None:
    arena = Arena("chunk", 3)
    arena.take(1)
    with pytest.raises(InternalError):
        arena.give([number])


def test_a_lost_or_doubled_chunk_is_found() -> None:
    """I1."""
    arena = Arena("chunk", 3)
    held = arena.take(2)
    arena.check_invariants(held)
    for wrong in (held[:1], [*held, 2], [0, 0]):
        with pytest.raises(InternalError):
            arena.check_invariants(wrong)


# ---------------------------------------------------------------- hot buffer

CLASSES = (64, 128, 192, 256)
SIZES = st.sampled_from((0, *CLASSES))


@st.composite
def changes(draw: st.DrawFn) -> tuple[HotBuffer, int, int, int, Sequence[int]]:
    """A buffer holding `length` rows, a wanted size that `check_size` accepts, and the chunks that are missing."""
    length, old_slots, new_slots = draw(st.integers(1, 500)), draw(SIZES), draw(SIZES)
    surplus = draw(st.integers(0, 3))
    old_count = managed_chunks(old_slots) if old_slots else pages_for(length) + surplus
    new_count = managed_chunks(new_slots) if new_slots else pages_for(length) + draw(st.integers(0, 3))
    chunks = tuple(draw(st.permutations(range(old_count))))
    extra = range(100, 100 + max(0, new_count - old_count))
    return HotBuffer(old_slots, chunks), new_slots, new_count, length, extra


@given(changes())
def test_a_change_neither_loses_nor_doubles_a_chunk(case: tuple[HotBuffer, int, int, int, Sequence[int]]) -> None:
    old, hot_slots, hot_chunks, length, extra = case
    check_size(hot_slots, hot_chunks, length, CLASSES, 20)
    done = change(old, hot_slots, hot_chunks, length, extra)
    assert sorted([*done.buffer.chunks, *done.freed]) == sorted([*old.chunks, *extra])
    assert (done.buffer.hot_slots, len(done.buffer.chunks)) == (hot_slots, hot_chunks)


@given(changes())
def test_kept_rows_lie_where_the_tables_say(
    case: tuple[HotBuffer, int, int, int, Sequence[int]],
) -> None:
    """A resident row of token t is in chunk t // 64 before; after, in the slot that the set-up gives its token."""
    old, hot_slots, hot_chunks, length, extra = case
    if old.hot_slots:
        return
    done = change(old, hot_slots, hot_chunks, length, extra)
    if not hot_slots:
        assert done.buffer.chunks[: pages_for(length)] == old.chunks[: pages_for(length)]
        return
    assert done.set_up is SetUp.MANAGED
    assert done.first_token + done.tokens == length
    assert done.tokens == min(length, hot_slots - -length % PAGE_TOKENS)
    for slot in range(0, done.tokens, PAGE_TOKENS):
        assert done.buffer.chunks[slot // 64] == old.chunks[(done.first_token + slot) // 64]


@pytest.mark.parametrize(
    ("old", "new", "set_up", "reload"),
    [
        (0, 0, SetUp.NOTHING, False),
        (64, 64, SetUp.NOTHING, False),
        (64, 128, SetUp.GROW, False),
        (128, 64, SetUp.SHRINK, False),
        (128, 0, SetUp.RESIDENT, True),
        (0, 128, SetUp.MANAGED, False),
    ],
)
def test_every_change_has_its_set_up(old: int, new: int, set_up: SetUp, reload: bool) -> None:
    count = managed_chunks(old) if old else 3
    wanted = managed_chunks(new) if new else 3
    extra = range(10, 10 + max(0, wanted - count))
    done = change(HotBuffer(old, tuple(range(count))), new, wanted, 150, extra)
    assert (done.set_up, done.reload) == (set_up, reload)
    if set_up in (SetUp.GROW, SetUp.SHRINK):
        kept = min(count, wanted)
        assert done.buffer.chunks[:kept] == tuple(range(kept))


@pytest.mark.parametrize(("hot_slots", "hot_chunks"), [(65, 3), (64, 1), (64, 3), (0, 2), (0, 21), (32_768, 513)])
def test_unoffered_sizes_are_refused(hot_slots: int, hot_chunks: int) -> None:
    with pytest.raises(BadInput):
        check_size(hot_slots, hot_chunks, 150, CLASSES, 20)


def test_only_resident_buffers_are_limited_by_chunks() -> None:
    assert HotBuffer(0, (4, 5)).rows_max == 128
    assert HotBuffer(64, (4, 5)).rows_max is None
    assert HotBufferChange(HotBuffer(), (), SetUp.NOTHING).buffer.rows_max == 0


# ---------------------------------------------------------------- inputs


def test_ring_waits_until_its_buffer_was_read() -> None:
    """The third use of a ring of two finds the first buffer read."""
    streams = make_streams("simulated", seed=2)
    ring, seen = Ring([torch.zeros(1) for _ in range(RING_BUFFERS)]), []
    for number in range(20):
        buffer = ring.next()
        buffer.fill_(number)
        streams.compute.launch("read", partial(lambda buffer: seen.append(int(buffer)), buffer))
        ring.launched(streams.compute.record("inputs_consumed"))
    streams.close()
    assert seen == list(range(20))


def small_state() -> DeviceState:
    geometry = FakeRunner().geometry
    host = torch.zeros(4, geometry.page_bytes, dtype=torch.uint8)
    return DeviceState.allocate(
        geometry,
        seats=3,
        chunks=8,
        index_pages=8,
        max_pages=5,
        max_chunks=6,
        slab_pages=4,
        tail_slots=2,
        host=host,
    )


def tables_on(compute: Stream) -> tuple[DeviceState, SeatTables]:
    state = small_state()
    return state, SeatTables(compute, state)


def test_table_edits_reach_their_places_in_order() -> None:
    streams = make_streams("simulated", seed=1)
    state, tables = tables_on(streams.compute)
    tables.set("host_table", 1, 2, [7, 8])
    tables.set("chunk_table", 2, 0, [3])
    tables.flush()
    tables.set("host_table", 1, 3, [9])
    tables.set("slab_table", 0, 3, [5])
    tables.flush()
    tables.flush()
    streams.close()
    assert state.host_table.tolist() == [[-1] * 5, [-1, -1, 7, 9, -1], [-1] * 5]
    assert state.chunk_table[2].tolist() == [3, -1, -1, -1, -1, -1]
    assert state.slab_table[0].tolist() == [-1, -1, -1, 5]
    assert bool((state.index_table == -1).all())


def test_edit_beyond_its_table_is_an_internal_error() -> None:
    _, tables = tables_on(make_streams("inline").compute)
    with pytest.raises(InternalError, match="chunk_table"):
        tables.set("chunk_table", 0, 5, [1, 2])


def test_a_full_buffer_of_edits_is_flushed() -> None:
    streams = make_streams("simulated", seed=3)
    state, tables = tables_on(streams.compute)
    for round_ in range(10):
        for seat in range(3):
            tables.set("index_table", seat, 0, range(round_, round_ + 5))
    tables.flush()
    streams.close()
    assert state.index_table.tolist() == [list(range(9, 14))] * 3


def test_an_entry_set_twice_travels_once() -> None:
    """Writes of one operation to equal places would run in any order on a GPU."""
    streams = make_streams("simulated", seed=4)
    state, tables = tables_on(streams.compute)
    tables.set("chunk_table", 1, 0, [1, 2, 3])
    tables.set("chunk_table", 1, 1, [7])
    tables.set("chunk_table", 1, 2, [8, 9])
    edits = tables._ring._buffers[0]
    tables.flush()
    assert edits.places[:5].tolist() == [6, 7, 8, 9, 0]
    streams.close()
    assert state.chunk_table[1].tolist() == [1, 7, 8, 9, -1, -1]


@pytest.mark.parametrize("seed", range(5))
def test_edits_of_many_flushes_at_a_step_boundary_arrive(seed: int) -> None:
    streams = make_streams("simulated", seed)
    state, tables = tables_on(streams.compute)
    for place in range(15):
        tables.set("host_table", place // 5, place % 5, [place])
        tables.flush()
    streams.close()
    assert state.host_table.flatten().tolist() == list(range(15))


# ---------------------------------------------------------------- sizing


def sized(**changes: object) -> Sizing:
    runner = FakeRunner()
    return size_worker(replace(SETTINGS, **changes), runner.geometry, runner.info)


def test_sizes_fit_the_budget() -> None:
    """SGLang #24039: every count is in pages of the size that is used."""
    geometry, sizing = FakeRunner().geometry, sized()
    state = DeviceState.allocate(
        geometry,
        seats=sizing.capacity.seats,
        chunks=sizing.capacity.hot_chunks,
        index_pages=sizing.capacity.index_pages,
        max_pages=sizing.max_pages,
        max_chunks=sizing.max_chunks,
        slab_pages=sizing.slab_pages,
        tail_slots=sizing.capacity.tail_slots,
        host=torch.zeros(1, geometry.page_bytes, dtype=torch.uint8),
    )
    held = (
        state.rows, state.slab_rows, state.index_keys, state.slot_of, state.slot_token, state.stamp, state.index_table,
        state.host_table,
        state.chunk_table, state.slab_table, state.hot_slots, state.tail, state.now, state.hits, state.misses,
        state.eviction_queue, state.queue_slot, state.queue_stamp,
    )  # fmt: skip
    sampler = SamplerState.allocate(sizing.capacity.seats, FakeRunner().info.vocab_size)
    draws = [
        it for part in (vars(sampler), vars(sampler.adjust)) for it in part.values() if isinstance(it, torch.Tensor)
    ]
    used = sum(tensor.numel() * tensor.element_size() for tensor in (*held, *draws))
    assert used <= sizing.device_bytes <= 256 * 1024
    assert sizing.device_bytes - used < 0.02 * used, "and little of it is left unaccounted for"


def test_the_report_names_every_count() -> None:
    sizing = sized()
    said = {name: value for line in sizing.report() for name, value in line.items()}
    capacity = sizing.capacity
    assert (said["page_bytes"], said["host_pages"]) == (capacity.page_bytes, capacity.host_pages)
    assert (said["hot_chunks"], said["context_longest_tokens"]) == (capacity.hot_chunks, 512)
    assert sizing.longest_context_tokens == 512
    assert sizing.capacity.overshoot_tokens == SETTINGS.lookahead_steps


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hot_size_classes": (32, 64)}, "worker.hot_size_classes"),
        ({"context_max_tokens": 100_000}, "worker.context_max_tokens"),
        ({"host_mem": "4000"}, "worker.host_mem"),
        ({"device_mem": "4KiB"}, "worker.device_mem"),
        ({"hot_chunks_max": 1}, "worker.device_mem"),
    ],
)
def test_impossible_settings_are_refused_by_name(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sized(**changes)
    assert caught.value.field == field
    assert caught.value.remedy


def test_automatic_budget_is_most_of_the_free_gpu_memory() -> None:
    runner, free = FakeRunner(), 10 << 20
    sizing = size_worker(replace(SETTINGS, device="cuda", device_mem="auto"), runner.geometry, runner.info, "", free)
    assert 0.95 * free * DEVICE_SHARE < sizing.device_bytes <= free * DEVICE_SHARE


def test_budget_beyond_free_gpu_memory_is_refused() -> None:
    runner = FakeRunner()
    with pytest.raises(ConfigError, match="1048576 bytes free") as caught:
        size_worker(replace(SETTINGS, device_mem="2MiB"), runner.geometry, runner.info, "", 1 << 20)
    assert caught.value.field == "worker.device_mem"


def test_defaults_leave_room_for_every_kind() -> None:
    sizing = sized(device_mem="1MiB")
    assert sizing.slab_pages > pages_for(512 + 1), "with room for more prompts than the longest"
    assert sizing.capacity.prompt_max_tokens == 512
    assert min(sizing.capacity.hot_chunks, sizing.capacity.index_pages) > 0
    tight = sized(context_max_tokens=4_096, device_mem="128KiB")
    assert 0 < tight.capacity.prompt_max_tokens == 64 * tight.slab_pages < 4_096
