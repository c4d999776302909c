"""Which stream a swap-in runs on, and in which parts: it follows from the padded batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

from kernels.state import MissPlan, StepBatch
from tests.support.fakes.hash_runner import SEPARATE, SHARED, geometry_of
from worker.runners import swapping
from worker.streams import make_streams

SMALL: Final = swapping.BESIDE_ROWS - 1
LARGE: Final = swapping.BESIDE_ROWS
TOPK: Final = 4


@pytest.mark.parametrize(
    ("rows", "groups", "launched", "awaited"),
    [
        (SMALL, SEPARATE, [("compute", "swap in 0")], []),
        (LARGE, SEPARATE, [("swap", "swap in 0")], ["swapped_in"]),
        (SMALL, SHARED, [("compute", "swap in 0"), ("swap", "replay 1")], ["prefetched"]),
        (LARGE, SHARED, [("swap", "swap in 0"), ("swap", "replay 1")], ["swapped_in", "prefetched"]),
    ],
)
def test_large_batches_alone_swap_in_beside_compute(
    rows: int,
    groups: tuple[int, ...],
    launched: list[tuple[str, str]],
    awaited: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams, ran = make_streams("inline"), list[tuple[str, str]]()
    for stream in (streams.compute, streams.swap):
        monkeypatch.setattr(stream, "launch", lambda label, _, name=stream.name: ran.append((name, label)))
    state: Any = SimpleNamespace(geometry=geometry_of(groups))
    table, batch = torch.zeros(rows, TOPK, dtype=torch.int32), StepBatch.allocate(rows, max(groups) + 1)
    plan = MissPlan.allocate(rows, TOPK, "cpu")
    swapped_in = swapping.launch_swap_in(streams, state, 0, table, batch, table, plan)
    assert ran == launched
    assert [fence.name for fences in swapped_in.fences.values() for fence in fences] == awaited
    assert swapped_in.parts == ((slice(0, rows),),)


@pytest.mark.parametrize(
    ("seats", "depths", "halves_from", "parts"),
    [
        (4, 1, 0, [[(0, 4)]]),
        (4, 1, 5, [[(0, 4)]]),
        (4, 1, 4, [[(0, 2)], [(2, 4)]]),
        (5, 1, 2, [[(0, 3)], [(3, 5)]]),
        (2, 1, 2, [[(0, 1)], [(1, 2)]]),
        (1, 1, 1, [[(0, 1)]]),
        (1, 3, 1, [[(0, 3)]]),
        (3, 3, 2, [[(0, 2), (3, 5), (6, 8)], [(2, 3), (5, 6), (8, 9)]]),
    ],
)
def test_rows_of_a_seat_are_in_one_half(
    seats: int, depths: int, halves_from: int, parts: list[list[tuple[int, int]]]
) -> None:
    found = swapping.parts_of(seats * depths, seats, halves_from)
    assert [[(rows.start, rows.stop) for rows in part] for part in found] == parts


@pytest.mark.parametrize("groups", [SEPARATE, SHARED])
def test_attention_of_a_half_waits_for_its_loads_alone(
    groups: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, told = make_streams("inline"), list[str]()
    for stream in (streams.compute, streams.swap):
        name, record = stream.name, stream.record
        monkeypatch.setattr(stream, "launch", lambda label, _, name=name: told.append(f"{name}: {label}"))
        monkeypatch.setattr(
            stream,
            "record",
            lambda fence, name=name, record=record: told.append(f"{name}: record {fence}") or record(fence),
        )
        monkeypatch.setattr(stream, "wait", lambda fence, name=name: told.append(f"{name}: wait {fence.name}"))
    state: Any = SimpleNamespace(geometry=geometry_of(groups))
    table, batch = torch.zeros(4, TOPK, dtype=torch.int32), StepBatch.allocate(4, max(groups) + 1)
    plan = MissPlan.allocate(4, TOPK, "cpu")
    swapped_in = swapping.launch_swap_in(streams, state, 0, table, batch, table, plan, halves_from=4)
    swapped_in.launch_attention(streams, 0, lambda rows: None)
    loads = ["swap: swap in 0", *["swap: replay 1"] * (groups == SHARED)]
    assert told == [
        *("compute: record selected", "swap: wait selected"),
        *[line for load in loads for half in swapping.HALVES for line in (load, f"swap: record {half}")],
        *("compute: wait first_half", "compute: attend 0", "compute: wait second_half", "compute: attend 0"),
    ]
