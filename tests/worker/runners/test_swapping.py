"""Which stream a swap-in runs on: it follows from the rows of the padded batch."""

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
    loaded = swapping.launch_swap_in(streams, state, 0, table, batch, table, MissPlan.allocate(rows, TOPK, "cpu"))
    assert ran == launched
    assert [fence.name for fence in loaded.values()] == awaited
