"""A worker made of measured steps: benchmarks/results/decode-H200.json, interpolated.

    step(n, m) = compute(n) + load(m)

`compute` lies on lines between the step times measured without copies: resident ones, and those of full admission with
misses resolved and not copied. `load` lies on lines between what copies added at each number of missed rows. `Bench`
obeys a hot floor as scheduler and worker do: it fills with the smallest size that the floor allows, evenly, and takes
a look to change.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

from coordinator.policy.throughput import FloorRoom, HotFloor, Look
from protocol.sizing import RESIDENT, HotSize
from protocol.units import managed_chunks, pages_for
from tests import ROOT

GROUPS = 8  # of the benchmark: as many as layers
TOPK = 2048
HOT_SLOTS = 4096
Points = list[tuple[float, float]]


@cache
def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "benchmarks/results/decode-H200.json").read_text())["rows"]
    return found


def contexts() -> list[int]:
    return sorted({row["context"] for row in rows()})


def measured(context: int, mode: str, overlap: float | None = None) -> list[dict[str, Any]]:
    return [it for it in rows() if (it["context"], it["mode"]) == (context, mode) and overlap in (None, it["overlap"])]


def overlaps() -> list[float]:
    return sorted({row["overlap"] for row in measured(8192, "uncopied")})


def interpolate(points: Points, x: float) -> float:
    """On lines between points that ascend; beyond the last, on the last line."""
    at = min(max(bisect_left([it[0] for it in points], x), 1), len(points) - 1)
    (left, low), (right, high) = points[at - 1], points[at]
    return low + (high - low) * (x - left) / (right - left)


@dataclass
class Cell:
    """One context length. Tokens a second of resident-only and of full admission are those that were measured."""

    context: int

    def __post_init__(self) -> None:
        resident = {it["concurrency"]: it["step_ms"] for it in measured(self.context, "resident")}
        self.full: int = measured(self.context, "uncopied")[0]["concurrency"]
        self.resident: int = max(resident)
        uncopied = {it["overlap"]: it["step_ms"] for it in measured(self.context, "uncopied")}
        self.compute: Points = sorted([*resident.items(), (self.full, min(uncopied.values()))])
        small = [
            (it["concurrency"], it["step_ms"] - resident[it["concurrency"]])
            for it in measured(self.context, "hisparse", 0.99)
            if it["concurrency"] in resident
        ]
        most = [it for it in measured(self.context, "hisparse") if it["concurrency"] == self.full]
        large = [(self.full * (1 - it["overlap"]) / 0.01, it["step_ms"] - self.compute[-1][1]) for it in most]
        ascending: Points = [(0.0, 0.0)]
        for x, y in sorted(small + large):
            ascending.append((x * 0.01 * TOPK, max(y, ascending[-1][1])))
        self.load = ascending

    def step_ms(self, requests: float, misses: float) -> float:
        """`misses`: rows of one group, of all requests."""
        return interpolate(self.compute, requests) + interpolate(self.load, misses)

    def best(self, overlap: float) -> float:
        """Tokens a second of the better of resident-only and full admission."""
        found = measured(self.context, "hisparse", overlap) + measured(self.context, "resident")
        return max(float(it["tokens_per_s"]) for it in found)


@dataclass
class Bench:
    """`noise`: standard deviation of a look's step time, as a share of it."""

    cell: Cell
    overlap: float
    seed: int = 0
    noise: float = 0.01
    timed: bool = True  # the worker times its swap-ins
    control: HotFloor = field(default_factory=HotFloor)

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)
        pages = pages_for(self.cell.context + 64)
        self.chunks = self.cell.resident * pages
        small = HotSize(HOT_SLOTS, self.chunks // self.cell.full)  # as many as were measured, index keys included
        assert small.hot_chunks >= managed_chunks(HOT_SLOTS) or self.cell.context > 8192
        self.sizes = (small, HotSize(RESIDENT, pages))
        self.running = self.rows_of(self.control.floor)
        self.changes: list[int] = []
        self.retracted = 0
        self.looks = 0

    def rows_of(self, floor: int | None) -> int:
        return self.cell.resident if floor == RESIDENT else self.cell.full

    @property
    def is_full(self) -> bool:
        return self.running == self.cell.full

    def look(self) -> tuple[float, float]:
        """One look: requests that ran, and milliseconds of a step."""
        probes = self.control.probe_slots is not None and not self.is_full
        managed = self.cell.full if self.is_full else int(probes)
        share = 1 - self.overlap
        misses = managed * TOPK * share
        step_ms = self.cell.step_ms(self.running, misses)
        load_ms = interpolate(self.cell.load, misses) if self.timed else 0.0
        seen = self.rng.gauss(1, self.noise)
        before, floor = self.control.changes, self.control.floor
        self.control.look(
            Look(
                steps=128,
                step_us=1e3 * step_ms * seen,
                load_us=1e3 * load_ms * self.rng.gauss(1, 5 * self.noise),
                running=self.running,
                selected=TOPK * GROUPS,
                shares={HOT_SLOTS: share * self.rng.gauss(1, self.noise)} if managed else {},
                misses=GROUPS * misses,
                miss_bytes=656.0,
            ),
            FloorRoom(self.chunks, self.sizes, 10 * self.cell.full),
        )
        if self.control.changes > before:
            self.changes.append(self.looks)
        done = self.running, step_ms
        wanted = self.rows_of(floor)
        self.retracted += max(0, self.running - wanted)
        self.running = wanted  # what was chosen a look ago
        self.looks += 1
        return done

    def rate(self, looks: int) -> float:
        """Tokens a second over so many looks, all of the same number of steps."""
        done = [self.look() for _ in range(looks)]
        return 1e3 * sum(it[0] for it in done) / sum(it[1] for it in done)
