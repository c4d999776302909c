"""Operations on rows and seats on the GPU: equal to the reference over all memory, without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kernels.integrity import check_state  # noqa: E402
from kernels.rows import (  # noqa: E402
    gather_rows,
    read_index_keys,
    read_slab_rows,
    write_index_keys,
    write_new_rows,
    write_prompt_index_keys,
    write_slab_rows,
)
from kernels.seat import clear_seat, grow_managed, init_managed, init_resident, shrink_managed  # noqa: E402
from kernels.state import DeviceState, StepBatch  # noqa: E402
from tests.gpu.syncs import no_syncs  # noqa: E402
from tests.gpu.twin import GIVEN, TABLES, Twin, same  # noqa: E402

SIZES = pytest.mark.parametrize(
    ("row_bytes", "split", "index_row_bytes"),
    [
        *((656, 0, 132), (1152, 0, 256), (196, 0, 132), (320, 0, 132), (13, 0, 7), (24, 0, 8), (1, 0, 1)),
        *((584, 512, 132), (26, 13, 8)),
    ],
)


def on_both(twin: Twin, call: Callable[[DeviceState], torch.Tensor | None]) -> None:
    """`call` on both states, waiting for nothing on the GPU; then everything is compared."""
    wanted = call(twin.cpu)
    with no_syncs():
        got = call(twin.gpu)
    if wanted is not None and got is not None:
        same("what it returned", wanted, got)
    for name in (*TABLES, *GIVEN, "slab_table", "rows", "slab_rows", "index_keys", "host"):
        same(name, getattr(twin.cpu, name), getattr(twin.gpu, name))


def noise(twin: Twin, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same random bytes on either device."""
    data = torch.randint(0, 256, shape, generator=twin.torch, dtype=torch.uint8)
    return data, data.cuda()


def opened(**changes: object) -> Twin:
    twin = Twin(4, tail_slots=3, **changes)  # type: ignore[arg-type]
    for seat, length in enumerate((300, 200, 130)):
        twin.open(seat, length, (128, 0, 100)[seat], (64, 0, 100)[seat])
    twin.cpu.slab_table[0, 0] = 0
    twin.gpu.slab_table.copy_(twin.cpu.slab_table)
    return twin


@SIZES
def test_rows_of_a_step(row_bytes: int, split: int, index_row_bytes: int) -> None:
    twin = opened(row_bytes=row_bytes, split=split, index_row_bytes=index_row_bytes)
    batches: dict[bool, StepBatch] = dict(zip((False, True), twin.begin([2, 0, 1]), strict=True))
    for layer, (plane, size) in product((0, 2), enumerate(twin.geometry.planes)):
        rows = noise(twin, twin.size, size)
        shifted = torch.cat((rows[1].new_zeros(1), rows[1].flatten()))[1:].view_as(rows[1])  # off every word
        data = (rows[0], shifted if layer else rows[1])
        on_both(twin, partial(_write_new, batches, data, layer, plane))
    keys = noise(twin, twin.size, index_row_bytes)
    on_both(twin, lambda s: write_index_keys(s, 0, batches[s.rows.is_cuda], keys[s.rows.is_cuda]))
    on_both(twin, lambda s: write_index_keys(s, 1, batches[s.rows.is_cuda], keys[s.rows.is_cuda]))
    places = torch.randint(-1, twin.cpu.rows.shape[1], (4, 33), generator=twin.torch, dtype=torch.int32)
    both = {False: places, True: places.cuda()}
    for plane in range(len(twin.geometry.planes)):
        on_both(twin, partial(_gather, both, 2, plane))


def _write_new(
    batches: dict[bool, StepBatch], rows: tuple[torch.Tensor, ...], layer: int, plane: int, state: DeviceState
) -> None:
    write_new_rows(state, layer, batches[state.rows.is_cuda], rows[state.rows.is_cuda], plane)


def _gather(places: dict[bool, torch.Tensor], layer: int, plane: int, state: DeviceState) -> torch.Tensor:
    return gather_rows(state, layer, places[state.rows.is_cuda], plane)


@SIZES
def test_rows_of_a_prompt(row_bytes: int, split: int, index_row_bytes: int) -> None:
    """Also of positions whose pages are not granted: not stored, zeros, one tripwire each."""
    twin = opened(row_bytes=row_bytes, split=split, index_row_bytes=index_row_bytes)
    twin.cpu.index_table[0, 1] = -1
    twin.upload()
    last = len(twin.geometry.planes) - 1
    rows, keys = noise(twin, 50, twin.geometry.planes[last]), noise(twin, 170, index_row_bytes)
    on_both(twin, lambda s: write_slab_rows(s, 1, 0, 9, rows[s.rows.is_cuda], last))
    on_both(twin, lambda s: write_slab_rows(s, 1, 1, 9, rows[s.rows.is_cuda], last))
    on_both(twin, lambda s: read_slab_rows(s, 1, 0, 64))
    on_both(twin, lambda s: read_slab_rows(s, 1, 0, 64, last))
    on_both(twin, lambda s: read_slab_rows(s, 1, 2, 64, last))
    on_both(twin, lambda s: write_prompt_index_keys(s, 1, 0, 30, keys[s.rows.is_cuda]))
    on_both(twin, lambda s: read_index_keys(s, 1, 0, 250))
    on_both(twin, lambda s: read_index_keys(s, 1, 0, 0))
    on_both(twin, lambda s: read_index_keys(s, 1, 0, 250, start=77))
    on_both(twin, lambda s: read_slab_rows(s, 1, 0, 63, last, start=1))
    assert int(twin.cpu.tripwires[1]) == 50 + 64 + 64 + 64 + 51


def test_seats_are_set_up_resized_and_cleared() -> None:
    twin = opened()
    for turn in range(5):
        batches = twin.begin([2, 0, 1])
        twin.write_new_rows(batches[0])
        for group in range(2):
            twin.swap_in(group, batches, torch.randint(0, 130 + turn, (4, 8), generator=twin.torch, dtype=torch.int32))
    queues_empty = []
    for seat, call in (
        (0, lambda s: shrink_managed(s, 0, 128, 70)),
        (2, lambda s: shrink_managed(s, 2, 100, 9)),
        (2, lambda s: grow_managed(s, 2, 9, 100)),
    ):
        twin.gpu.eviction_queue.fill_(3)
        on_both(twin, call)
        emptied = (twin.gpu.eviction_queue == -1).all(2).all(0).tolist()
        queues_empty.append(emptied == [seat == other for other in range(3)])
    assert all(queues_empty), "resizing a buffer empties its queue, and no other"
    on_both(twin, lambda s: grow_managed(s, 2, 9, 100))  # not its size: SEAT
    on_both(twin, lambda s: grow_managed(s, 0, 70, 192))  # two chunks short: UNGRANTED
    on_both(twin, lambda s: shrink_managed(s, 1, 70, 64))  # resident: SEAT
    assert twin.cpu.tripwires.tolist() == [0, 1, 0, 2]
    for seat in range(3):
        check_state(twin.gpu, seat, twin.lengths[seat])
    twin.gpu.eviction_queue.fill_(3)
    on_both(twin, lambda s: init_managed(s, 0, 100, 64, 77))
    on_both(twin, lambda s: init_managed(s, 1, 65, 0, 0))
    assert (twin.gpu.eviction_queue == -1).all(2).all(0).tolist() == [True, True, False]
    on_both(twin, lambda s: init_resident(s, 0))
    on_both(twin, lambda s: clear_seat(s, 2))


def test_step_writes_replay_in_a_graph() -> None:
    """The places are read when the graph runs, not when it was captured."""
    twin = opened(row_bytes=13)
    batches = twin.begin([0, 1])
    rows, keys = noise(twin, twin.size, 13), noise(twin, twin.size, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_new_rows(twin.gpu, 1, batches[1], rows[1])
        write_index_keys(twin.gpu, 1, batches[1], keys[1])
    later = twin.begin([0, 1])
    batches[1].new_rows.copy_(later[1].new_rows)
    batches[1].new_index_rows.copy_(later[1].new_index_rows)
    graph.replay()
    write_new_rows(twin.cpu, 1, later[0], rows[0])
    write_index_keys(twin.cpu, 1, later[0], keys[0])
    for name in ("rows", "index_keys"):
        same(name, getattr(twin.cpu, name), getattr(twin.gpu, name))
