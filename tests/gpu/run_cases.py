"""Drawn cases on the GPU against the CPU reference: `python -m tests.gpu.run_cases --cases 9900 --limits 100 --seed 1`.

Processes draw scripts, this one runs them on the GPU and records what they return, and processes replay the records on
the reference, all at once. Prints one JSON object. Exits with 1 when a case differs, and says which; the same seed with
`--only LABEL` runs that one alone. `--device cpu` holds the reference against itself.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from kernels.cuda.jit import UNITS, cache_dir, cached_unit, row_defines
from kernels.cuda.launch import prepare
from kernels.layout import Geometry
from tests.gpu import lives
from tests.gpu.compare import Difference, check
from tests.gpu.program import Machine, Program, pack, unpack, uploaded

PER_WORLD: Final = 11  # small cases that share a state
PER_DRAW: Final = 30  # worlds drawn by one hypothesis run, whose first examples are its simplest
PER_PART: Final = 10  # scripts that one process makes at a time
IN_FLIGHT: Final = 40  # records waiting for the reference
LARGE_IN_FLIGHT: Final = 6  # likewise at the limits, where the reference takes gigabytes
NOISE_BYTES: Final = 2**24
PINNED_BYTES: Final = 2**27
FAILURES_SHOWN: Final = 5

Shapes = list[list[tuple[torch.dtype, torch.Size]]]

_noise = np.random.default_rng(0).integers(0, 256, NOISE_BYTES, dtype=np.uint8)  # every process has the same


def draw_examples(strategy: SearchStrategy[Any], count: int, number: int) -> list[Any]:
    """`count` examples, the same for the same `number`. Shuffled, since hypothesis likes to vary what it drew last."""
    drawn: list[Any] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(example: Any) -> None:
        drawn.append(example)

    collect()
    random.Random(number).shuffle(drawn)
    return drawn


def draw_small(run: int, worlds: int, part: slice) -> list[Program]:
    """The part of `worlds` worlds of PER_WORLD cases each."""
    block = part.start // PER_DRAW
    shapes = draw_examples(lives.WORLDS, PER_DRAW, run * 1_000_003 + 2 * block)
    cases = draw_examples(lives.CASES, PER_DRAW * PER_WORLD, run * 1_000_003 + 2 * block + 1)
    numbers = [number % PER_DRAW for number in range(part.start, min(part.stop, worlds))]
    return [
        lives.small(f"small:{block * PER_DRAW + n}", shapes[n], cases[n * PER_WORLD : (n + 1) * PER_WORLD])
        for n in numbers
    ]


def draw_limits(run: int, cases: int, part: slice) -> list[Program]:
    """The part of `cases` cases."""
    examples = draw_examples(lives.LIMITS, cases, run * 1_000_003 - 1)
    numbers = range(part.start, min(part.stop, cases))
    return [lives.limit(f"limit:{n}", lives.KINDS[n % len(lives.KINDS)], examples[n]) for n in numbers]


def host_of(program: Program, into: Tensor | None = None) -> Tensor:
    """The host pages that a script begins with, in `into` when given."""
    size = program.host_pages * program.geometry.page_bytes
    flat = torch.zeros(size, dtype=torch.uint8) if into is None else into[:size]
    pages = flat.view(program.host_pages, -1)
    for part in pages[-program.host_used :].view(-1).split(NOISE_BYTES - 1):  # one short, so that pages differ
        part.copy_(torch.from_numpy(_noise)[: len(part)])
    return pages


def record(program: Program, device: str, host: Tensor) -> tuple[Tensor, Shapes]:
    """Run a script: all that its ops returned, packed, and the shapes."""
    machine = Machine(program, host, device)
    if device != "cpu":
        prepare(machine.state)
    results = [machine.run(op) for op in uploaded(program.ops, device)]
    packed = pack([tensor for result in results for tensor in result]).cpu()
    return packed, [[(tensor.dtype, tensor.shape) for tensor in result] for result in results]


def compare(program: Program, packed: np.ndarray[Any, Any], shapes: Shapes) -> str:
    """In a process of its own: the difference that the reference finds, or nothing."""
    like = [[torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in result] for result in shapes]
    views = iter(unpack(torch.from_numpy(packed), [tensor for result in like for tensor in result]))
    try:
        check(program, host_of(program), [[next(views) for _ in result] for result in like])
    except Difference as difference:
        return str(difference)
    return ""


@dataclass
class Run:
    """Draws, records and compares; counts ops and keeps differences."""

    pool: ProcessPoolExecutor
    device: str
    seed: int
    only: str = ""
    ops: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    _waiting: deque[Future[str]] = field(default_factory=deque)
    _pinned: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.uint8))

    def small(self, cases: int) -> int:
        """Cases that were run."""
        worlds = -(-cases // PER_WORLD)
        return self._all(draw_small, worlds, IN_FLIGHT) * PER_WORLD

    def limits(self, cases: int) -> int:
        return self._all(draw_limits, cases, LARGE_IN_FLIGHT)

    def finish(self) -> None:
        while self._waiting:
            self._collect()

    def _all(self, draw: Any, count: int, in_flight: int) -> int:
        parts = [slice(first, first + PER_PART) for first in range(0, count, PER_PART)]
        drawn = deque(self.pool.submit(draw, self.seed, count, part) for part in parts)
        done = 0
        while drawn:
            for program in drawn.popleft().result():
                if self.only in ("", program.label.split()[0]):
                    self._take(program, in_flight)
                    done += 1
        return done

    def _take(self, program: Program, in_flight: int) -> None:
        while len(self._waiting) >= in_flight:
            self._collect()
        packed, shapes = record(program, self.device, host_of(program, self._host(program)))
        self.ops.update(f"{op.verb} {op.args[0]}" if op.verb in ("seat", "copy") else op.verb for op in program.ops)
        self._waiting.append(self.pool.submit(compare, program, packed.numpy(), shapes))

    def _host(self, program: Program) -> Tensor | None:
        """Pinned memory, used again by every script."""
        if self.device == "cpu":
            return None
        needed = program.host_pages * program.geometry.page_bytes
        if len(self._pinned) < needed:
            self._pinned = torch.zeros(max(needed, PINNED_BYTES), dtype=torch.uint8, pin_memory=True)
        return self._pinned

    def _collect(self) -> None:
        difference = self._waiting.popleft().result()
        if difference:
            self.differences.append(difference)


def compile_all(pool: ProcessPoolExecutor) -> None:
    """Every unit for every row layout of the scripts, side by side, before the first needs it."""
    major, minor = torch.cuda.get_device_capability()
    geometries = [
        Geometry(layers, row_bytes, tuple(range(groups)) + (groups - 1,) * (layers - groups), key_bytes, 1, split)
        for row_bytes, split, key_bytes in lives.LIMIT_ROWS
        for layers, groups in ((1, 1), (2, 1), (3, 2), (4, 2))
    ]
    jobs = {
        (unit, row_defines(geometry), f"sm_{major}{minor}", cache_dir()) for geometry in geometries for unit in UNITS
    }
    for job in [pool.submit(_compile, *job) for job in jobs]:
        job.result()


def _compile(*arguments: Any) -> None:
    cached_unit(*arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.run_cases", description=__doc__)
    parser.add_argument("--cases", type=int, default=990, help="small cases, rounded up to whole worlds")
    parser.add_argument("--limits", type=int, default=10, help="cases at the limits")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", metavar="LABEL", help="as a difference names it: small:37")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--processes", type=int, default=max(2, (os.cpu_count() or 2) - 1))
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(options.processes, context, initializer=partial(torch.set_num_threads, 1)) as pool:
        pool.submit(int).result()  # all processes are there before CUDA is
        if options.device != "cpu":
            compile_all(pool)
        run, times = Run(pool, options.device, options.seed, options.only), [time.monotonic()]
        small = run.small(options.cases)
        times.append(time.monotonic())
        limits = run.limits(options.limits)
        run.finish()
        times.append(time.monotonic())
    summary = {
        "cases": small,
        "limits": limits,
        "seed": options.seed,
        "device": options.device if options.device == "cpu" else torch.cuda.get_device_name(),
        "ops": dict(sorted(run.ops.items())),
        "seconds": {
            name: round(b - a, 1)
            for name, a, b in zip(("compile", "small", "limits"), [begin, *times], times, strict=False)
        },
        "differences": len(run.differences),
        "first": run.differences[:FAILURES_SHOWN],
    }
    print(json.dumps(summary))
    return 1 if run.differences else 0


if __name__ == "__main__":
    sys.exit(main())
