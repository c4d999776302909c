"""Selections that a worker recorded (worker/loop/selections.py), as the decode benchmark replays them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from kernels.state import StepBatch
from protocol.errors import BadInput
from worker.loop.selections import Selection, read_head, read_records

#: Steps of a run that are replayed; a longer one is cut. Each takes 8 KiB of the device per group at top-k 2,048.
STEPS_MAX: Final = 512
#: Shorter runs are left out: a request's turns would be much of what they show.
STEPS_MIN: Final = 16


@dataclass(frozen=True, eq=False)
class Recorded:
    """Runs of consecutive steps; `topk` int32[groups, steps of all runs, k], -1 padded; `counts` of steps by run."""

    topk: Tensor
    counts: list[int]
    context: int
    overlap: float
    about: dict[str, Any]


def runs_of(records: Iterable[Selection]) -> list[list[Selection]]:
    """Steps of one request that follow one another without a gap, STEPS_MIN to STEPS_MAX of them."""
    runs: dict[int, list[list[Selection]]] = defaultdict(list)
    for it in records:
        own = runs[it.request]
        if own and own[-1][-1].step + 1 == it.step and len(own[-1]) < STEPS_MAX:
            own[-1].append(it)
        else:
            own.append([it])
    return [run for own in runs.values() for run in own if len(run) >= STEPS_MIN]


def overlap_of(runs: list[list[Selection]]) -> float:
    """Share of what a step selects that the step before it selected too."""
    kept = selected = 0
    for run in runs:
        for before, after in pairwise(run):
            for one, other in zip(before.positions, after.positions, strict=True):
                kept += len(np.intersect1d(one, other, assume_unique=True))
                selected += len(other)
    return kept / selected if selected else 0.0


def read_trace(path: Path, topk: int) -> Recorded:
    """Raises BadInput unless the file is a trace with runs to replay, of a model with this top-k."""
    with path.open("rb") as file:
        sizes = read_head(file)
        if sizes.topk != topk:
            remedy = f"record a model whose top-k is {topk}"
            raise BadInput("has another top-k", field="trace", value=sizes.topk, remedy=remedy)
        runs = runs_of(read_records(file, sizes))
    if not runs:
        remedy = f"record requests that decode {STEPS_MIN} steps and more"
        raise BadInput("has no run of steps", field="trace", value=path, remedy=remedy)
    table = np.full((sizes.groups, sum(map(len, runs)), topk), -1, dtype=np.int32)
    for place, it in enumerate(step for run in runs for step in run):
        for group, positions in enumerate(it.positions):
            table[group, place, : len(positions)] = positions
    overlap = overlap_of(runs)
    about = {"file": path.name, "groups": sizes.groups, "runs": len(runs), "steps": table.shape[1], "overlap": overlap}
    context = max(it.length for run in runs for it in run)
    return Recorded(torch.from_numpy(table), [len(run) for run in runs], context, overlap, about)


class TracedSelections:
    """Stands in for the indexer's output, inside the graph: `rows` requests follow the runs, forth and back.

    Request r follows run r % runs, from a step of its own; group g of the model selects what group g % groups of the
    trace did. Going back has the overlap of going forth.
    """

    def __init__(self, recorded: Recorded, groups: int, rows: int, device: str) -> None:
        held = len(recorded.topk)
        self.topk = recorded.topk.to(device)
        self.group_of = [group % held for group in range(groups)]
        counts = torch.tensor(recorded.counts, device=device)
        run = torch.arange(rows, device=device) % len(counts)
        self.begin, self.count = (counts.cumsum(0) - counts)[run], counts[run]
        turns = torch.arange(rows, device=device) // len(counts)
        self.step = turns * self.count * len(counts) // max(rows, 1)  # spread over the run

    def __call__(self, group: int, batch: StepBatch, topk: Tensor) -> None:
        if group == 0:
            self.step.add_(1)
        period = (2 * self.count - 2).clamp(min=1)
        turn = self.step % period
        place = self.begin + torch.minimum(turn, period - turn)
        torch.index_select(self.topk[self.group_of[group]], 0, place[: len(topk)], out=topk)
