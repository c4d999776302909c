"""Drawn cases on the GPU against the CPU reference: `python -m tests.gpu.run_cases --cases 9900 --limits 100 --seed 1`.

Each process draws scripts, runs one after another on the GPU without waiting for it in between, and replays what came
back on the reference. Prints differences as they are found, and one JSON object. Exits with 1 when a case differs; the
same seed with `--only LABEL` runs that one alone. `--device cpu` holds the reference against itself.

Takes two processes at least, by default one fewer than there are cores for it. Compiling the 187 units that move rows
takes 270 s of processor time, unless the cache has them; the reference of 990 cases and 10 at the limits about 30 s.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from kernels.compile import row_variants
from kernels.cuda.jit import cache_dir, cached_unit
from kernels.cuda.launch import prepare
from tests.gpu import lives
from tests.gpu.compare import Difference, check
from tests.gpu.program import Machine, Program, pack, unpack, uploaded

PER_WORLD: Final = 11  # small cases that share a state
PER_PART: Final = 10  # worlds drawn together
NOISE_BYTES: Final = 2**24
PINNED_BYTES: Final = 2**26
FAILURES_SHOWN: Final = 12


class Part(NamedTuple):
    """What one process does at a time: PER_PART worlds of small cases, or one case at the limits of `limits`."""

    kind: str
    number: int
    limits: int = 0


@dataclass
class Outcome:
    """`cases` and `limits` that were run, in ops of each kind, and what differed."""

    cases: int = 0
    limits: int = 0
    ops: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    device: str = "cpu"

    def add(self, other: Outcome) -> None:
        self.cases += other.cases
        self.limits += other.limits
        self.ops.update(other.ops)
        self.differences += other.differences
        self.device = other.device


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


def draw(run: int, part: Part) -> list[Program]:
    """The scripts of a part, the same for the same `run`."""
    if part.kind == "limit":
        drawn = _limits(run, part.limits)[part.number]
        return [lives.limit(f"limit:{part.number}", lives.KINDS[part.number % len(lives.KINDS)], drawn)]
    shapes = draw_examples(lives.WORLDS, PER_PART, run * 1_000_003 + 2 * part.number)
    cases = draw_examples(lives.CASES, PER_PART * PER_WORLD, run * 1_000_003 + 2 * part.number + 1)
    return [
        lives.small(f"small:{part.number}:{n}", shape, cases[n * PER_WORLD : (n + 1) * PER_WORLD])
        for n, shape in enumerate(shapes)
    ]


@lru_cache(maxsize=1)
def _limits(run: int, count: int) -> list[Any]:
    return draw_examples(lives.LIMITS, count, run * 1_000_003 - 1)


@lru_cache(maxsize=1)
def _noise() -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, NOISE_BYTES, dtype=np.uint8))


@lru_cache(maxsize=1)
def _pinned(size: int) -> Tensor:
    """Host memory for the GPU, of this process, used again by every script."""
    return torch.zeros(size, dtype=torch.uint8, pin_memory=True)


def host_of(program: Program, device: str) -> Tensor:
    """The host pages that a script begins with."""
    size = program.host_pages * program.geometry.page_bytes
    flat = torch.zeros(size, dtype=torch.uint8) if device == "cpu" else _pinned(max(size, PINNED_BYTES))[:size]
    pages = flat.view(program.host_pages, -1)
    for part in pages[-program.host_used :].view(-1).split(NOISE_BYTES - 1):  # one short, so that pages differ
        part.copy_(_noise()[: len(part)])
    return pages


def record(program: Program, device: str) -> list[list[Tensor]]:
    """Run a script on `device`; what each of its ops returned, on the CPU."""
    machine = Machine(program, host_of(program, device), device)
    if device != "cpu":
        prepare(machine.state)
    results = [machine.run(op) for op in uploaded(program.ops, device)]
    tensors = [tensor for result in results for tensor in result]
    views = iter(unpack(pack(tensors).cpu(), tensors))
    return [[next(views) for _ in result] for result in results]


def run_part(run: int, device: str, only: str, part: Part) -> Outcome:
    """Draw, record and compare, in a process of its own."""
    outcome = Outcome(device=device if device == "cpu" else torch.cuda.get_device_name())
    for program in draw(run, part):
        if only not in ("", program.label.split()[0]):
            continue
        try:
            check(program, host_of(program, "cpu"), record(program, device))
        except Difference as difference:
            outcome.differences.append(str(difference))
        except Exception as error:
            error.add_note(program.label)
            raise
        outcome.ops.update(f"{op.call} {op.args[0]}" if op.call in ("seat", "copy") else op.call for op in program.ops)
        outcome.cases += PER_WORLD if part.kind == "small" else 0
        outcome.limits += part.kind == "limit"
    return outcome


def parts_of(cases: int, limits: int, only: str) -> Iterator[Part]:
    """The limits come first: some of them take long."""
    kind, _, number = only.partition(":")
    chosen = int(number.partition(":")[0]) if only else -1
    for part in range(limits):
        if not only or (kind, chosen) == ("limit", part):
            yield Part("limit", part, limits)
    for part in range(-(-cases // (PER_PART * PER_WORLD))):
        if not only or (kind, chosen) == ("small", part):
            yield Part("small", part)


def run_all(pool: ProcessPoolExecutor, work: Any, parts: Iterator[Part], ahead: int, seconds: float) -> Outcome:
    """Parts as processes become free, none begun after `seconds`."""
    begin, total = time.monotonic(), Outcome()
    waiting: set[Future[Outcome]] = {pool.submit(work, part) for part in islice(parts, ahead)}
    while waiting:
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for future in done:
            total.add(future.result())
            for difference in future.result().differences:
                print(difference, file=sys.stderr, flush=True)
            if time.monotonic() - begin < seconds:
                waiting |= {pool.submit(work, part) for part in islice(parts, 1)}
    return total


def compile_all(pool: ProcessPoolExecutor) -> int:
    """Compile every unit for every row layout of the scripts, side by side, and return how many: processes that need
    the same one later would compile it at the same time."""
    arch = pool.submit(_arch).result()
    layouts = ((row_bytes, key_bytes, split) for row_bytes, split, key_bytes in lives.LIMIT_ROWS)
    units = sorted({unit for layout in layouts for unit in row_variants(arch, (layout,))})
    for job in [pool.submit(_compile, unit, defines, arch) for unit, defines in units]:
        job.result()
    return len(units)


def _arch() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def _compile(unit: str, defines: Any, arch: str) -> None:
    cached_unit(unit, defines, arch, cache_dir())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.run_cases", description=__doc__)
    parser.add_argument("--cases", type=int, default=990, help="small cases, rounded up to whole parts")
    parser.add_argument("--limits", type=int, default=10, help="cases at the limits")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", metavar="LABEL", help="as a difference names it: small:3:7")
    parser.add_argument("--seconds", type=float, default=3600, help="begin nothing later than this")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--processes", type=int, default=max(2, len(os.sched_getaffinity(0)) - 1))
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    context = multiprocessing.get_context("fork")  # this process never touches CUDA
    with ProcessPoolExecutor(options.processes, context, initializer=partial(torch.set_num_threads, 1)) as pool:
        if options.device != "cpu":
            units = compile_all(pool)
            print(f"{units} units are there after {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        compiled = time.monotonic()
        work = partial(run_part, options.seed, options.device, options.only)
        parts = parts_of(options.cases, options.limits, options.only)
        total = run_all(pool, work, parts, options.processes + 1, options.seconds - (compiled - begin))
    summary = {
        "cases": total.cases,
        "limits": total.limits,
        "seed": options.seed,
        "device": total.device,
        "ops": dict(sorted(total.ops.items())),
        "seconds": {"compile": round(compiled - begin, 1), "cases": round(time.monotonic() - compiled, 1)},
        "differences": len(total.differences),
        "first": total.differences[:FAILURES_SHOWN],
    }
    print(json.dumps(summary))
    return 1 if total.differences else 0


if __name__ == "__main__":
    sys.exit(main())
