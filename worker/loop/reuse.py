"""Misses by hot size, from what steps selected: reuse distances at step granularity, all sizes in one pass. Pure.

A hot buffer of H slots holds the H tokens that were used last (kernels/reference/lru.py), beside the newest tokens,
which its tail slots hold. A token that was used in step s, and is selected again, has a *reuse distance*: how many
distinct tokens were used after s. It is found in buffers that have more slots, and missed in others. Tokens of one step
are equals, so that the distance is a range: where it includes H, which of the equals a buffer of H slots has kept
depends on slot numbers. `most` counts all of these as misses, `least` none, `misses` the share that a buffer without
preference would miss. A token's first use is a miss for every size, also where a longer trace would show it hot.

    counts[s]   tokens that were used last in step s, without those in the tail
    distance    sum of counts behind s .. that sum + counts[s]

Source: stack distances of R. L. Mattson et al., Evaluation techniques for storage hierarchies (1970), where each use
has a time of its own. Rejected: a simulated buffer for each size (exact in the choice among equals, at the cost of all
slots of all sizes in each step).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np

from protocol.arrays import Int32Array
from protocol.errors import BadInput
from worker.loop.selections import Selection, TraceSizes

#: Steps of a request that fill its buffers and are not counted; requests with fewer are left out.
WARM_UP_STEPS: Final = 16
_NEVER: Final = -1


class ReuseDistances:
    """One request in one index group, with empty buffers of each of `hot_sizes` slots and `tail_slots` more."""

    def __init__(self, hot_sizes: Sequence[int], tail_slots: int) -> None:
        self._sizes = np.asarray(hot_sizes, np.float64)[:, np.newaxis]
        self._tail_slots = tail_slots
        self._used = np.full(0, _NEVER, np.int64)  # by token: step of its last use
        self._counts = np.zeros(0, np.int64)
        self._now = 0
        self._newest: list[int] = []
        self.steps = 0
        self.selected = 0
        self.misses, self.least, self.most = (np.zeros(len(hot_sizes)) for _ in range(3))

    def step(self, positions: Int32Array, length: int, *, counts: bool = True) -> None:
        """The next decode step, which writes row `length - 1` and selects `positions`, distinct and below `length`.
        Unless it `counts`, it only fills the buffers."""
        self._grow(length)
        self._write(length - 1)
        outside = positions[~np.isin(positions, self._newest)]
        used = self._used[outside]
        known = used[used != _NEVER]
        if counts:
            self.steps += 1
            self.selected += len(positions)
            self._count(known, len(outside) - len(known))
        np.subtract.at(self._counts, known, 1)
        self._used[outside] = self._now
        self._counts[self._now] = len(outside)
        self._now += 1

    def _grow(self, length: int) -> None:
        if len(self._used) < length:
            more = max(length, 2 * len(self._used)) - len(self._used)
            self._used = np.concatenate([self._used, np.full(more, _NEVER, np.int64)])
        if len(self._counts) <= self._now:
            self._counts = np.concatenate([self._counts, np.zeros(max(64, len(self._counts)), np.int64)])

    def _write(self, position: int) -> None:
        """The new token takes a tail slot; the one that leaves the tail counts as used in the step before."""
        self._newest.append(position)
        if len(self._newest) > self._tail_slots:
            retired = self._newest.pop(0)
            self._used[retired] = self._now - 1
            self._counts[self._now - 1] += 1

    def _count(self, known: np.ndarray[tuple[int], np.dtype[np.int64]], first: int) -> None:
        behind = self._counts[::-1].cumsum()[::-1] - self._counts
        nearest, equals = behind[known], self._counts[known]
        found = ((self._sizes - nearest) / equals).clip(0, 1)
        self.misses += first + (1 - found).sum(1)
        self.least += first + (found <= 0).sum(1)
        self.most += first + (found < 1).sum(1)


def pays_from_s(load_s: float, batch: int, resident: int) -> float:
    """Seconds that a step must take without loads for `batch` requests with `load_s` of them to give more tokens than
    `resident` requests without: batch / (step + load) > resident / step. Infinite: they never do."""
    if batch <= resident:
        return inf if load_s or batch < resident else 0.0
    return load_s * resident / (batch - resident)


@dataclass(frozen=True)
class TraceMisses:
    """Of one step of one request, in the mean over `steps`: `selected` rows, and those missed by each of `hot_sizes`
    slots; each summed over layers."""

    hot_sizes: tuple[int, ...]
    requests: int
    steps: int
    selected: float
    misses: tuple[float, ...]


def misses_of(
    records: Iterable[Selection],
    sizes: TraceSizes,
    hot_sizes: Sequence[int],
    tail_slots: int,
    layers_of_group: Sequence[int],
) -> TraceMisses:
    """What hot buffers would miss of a trace; `layers_of_group` counts the layers that share each group's selection.

    A request whose steps have a gap begins anew behind it. Raises BadInput when no request has more than WARM_UP_STEPS
    steps without a gap, or when group counts differ.
    """
    if len(layers_of_group) != sizes.groups:
        raise BadInput(
            f"the model has {len(layers_of_group)} index groups, the trace another number of them",
            field="trace",
            value=sizes.groups,
            remedy="give the config.json of the model that was recorded",
        )
    runs: dict[int, tuple[int, int, list[ReuseDistances]]] = {}
    over: list[list[ReuseDistances]] = []
    requests: set[int] = set()
    for it in records:
        last, done, groups = runs.get(it.request, (it.step - 1, 0, []))
        if last != it.step - 1 or not groups:
            done, groups = 0, [ReuseDistances(hot_sizes, tail_slots) for _ in range(sizes.groups)]
            over.append(groups)
        for group, positions in zip(groups, it.positions, strict=True):
            group.step(positions, it.length, counts=done >= WARM_UP_STEPS)
        if done >= WARM_UP_STEPS:
            requests.add(it.request)
        runs[it.request] = it.step, done + 1, groups
    steps = sum(groups[0].steps for groups in over)
    if not steps:
        raise BadInput(
            f"has no request with more than {WARM_UP_STEPS} steps without a gap",
            field="trace",
            value=len(over),
            remedy="record requests that decode longer",
        )
    weighted = [(weight, it) for groups in over for weight, it in zip(layers_of_group, groups, strict=True)]
    misses = sum((weight * it.misses for weight, it in weighted), start=np.zeros(len(hot_sizes)))
    selected = sum(weight * it.selected for weight, it in weighted)
    return TraceMisses(tuple(hot_sizes), len(requests), steps, selected / steps, tuple((misses / steps).tolist()))
