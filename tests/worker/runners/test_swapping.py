"""The stream that selects follows from the rows of the padded batch."""

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
    ("groups", "behind", "awaited"),
    [(SEPARATE, [], ["swapped_in"]), (SHARED, [("swap", "replay 1")], ["swapped_in", "prefetched"])],
)
@pytest.mark.parametrize(("rows", "selects"), [(SMALL, "swap"), (LARGE, "compute")])
def test_small_batches_alone_select_beside_compute(
    rows: int,
    selects: str,
    groups: tuple[int, ...],
    behind: list[tuple[str, str]],
    awaited: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams, ran = make_streams("inline"), list[tuple[str, str]]()
    for stream in (streams.compute, streams.swap):
        monkeypatch.setattr(stream, "launch", lambda label, _, name=stream.name: ran.append((name, label)))
    state: Any = SimpleNamespace(geometry=geometry_of(groups))
    table, batch = torch.zeros(rows, TOPK, dtype=torch.int32), StepBatch.allocate(rows, max(groups) + 1)
    selection = table, batch, table, MissPlan.allocate(rows, TOPK, "cpu")
    loaded = swapping.launch_selection(streams, state, 0, lambda: None, *selection)
    assert ran == [(selects, "select 0"), ("swap", "swap in 0"), *behind]
    assert [fence.name for fence in loaded.values()] == awaited


@pytest.mark.parametrize(("rows", "beside"), [(SMALL, False), (LARGE, True)])
def test_projections_beside_a_swap_in_have_room(rows: int, beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small batch's projections run beside its selection, not its swap-in."""
    asked = list[bool]()
    monkeypatch.setattr(swapping, "swap_in", lambda *_, beside: asked.append(beside))
    state: Any = SimpleNamespace(geometry=geometry_of(SEPARATE))
    table, batch = torch.zeros(rows, TOPK, dtype=torch.int32), StepBatch.allocate(rows, max(SEPARATE) + 1)
    selection = table, batch, table, MissPlan.allocate(rows, TOPK, "cpu")
    swapping.launch_selection(make_streams("inline"), state, 0, lambda: None, *selection)
    assert asked == [beside]
