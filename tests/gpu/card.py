"""Tests, benchmarks and sanitizers on a card within a time: `python -m tests.gpu.card --seconds 540 --out DIR`.

Benchmarks go one after the other with the card and its host to themselves, then everything else side by side, each step
with a directory for temporary files and cores of its own. A step whose time is up is killed with all it started. DIR
gets a line a step in `summary.txt` and, of each, what it printed in `logs.tar.gz`. `--only NAME ...` takes these steps,
in this order, `--list` prints all. Exits with 1 when a step failed or found no time.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests import ROOT

#: Of a step that is told to end, until it is killed: compute-sanitizer prints its report meanwhile.
GRACE_S: Final = 5


@dataclass(frozen=True)
class Step:
    """A command of the plan. `{out}` in it stands for the directory of results."""

    name: str
    command: str
    #: It ends after so many seconds at the latest.
    limit_s: float = 300
    #: Runs with nothing beside it: its times are published, or it asks what all of the card's memory is used for.
    quiet: bool = False
    cores: int = 1


@dataclass(frozen=True)
class Ended:
    step: Step
    #: None: the time was up before or amid the step.
    status: int | None
    seconds: float

    def line(self) -> str:
        what = "no time" if self.status is None else f"status {self.status}"
        return f"{self.step.name:42} {what:12} {self.seconds:7.1f} s   {self.step.command}"


#: Files of tests that run with nothing beside them.
QUIET: Final = ("test_kept_memory",)
#: Cores of the files that start several processes.
CORES: Final = {
    "test_cases": 4,
    "test_demo": 3,
    "test_group": 4,
    "test_kept_weights": 2,
    "test_takeover": 4,
    "test_two_gpus": 4,
}


def tests_of(files: Iterable[Path]) -> list[Step]:
    """A step for each file of tests."""
    command = "python -m pytest -q -p no:xdist --tb=short --durations=5"
    return [
        Step(
            file.stem,
            f"{command} {file.relative_to(ROOT).as_posix()}",
            limit_s=450,
            quiet=file.stem in QUIET,
            cores=CORES.get(file.stem, 1),
        )
        for file in sorted(files)
    ]


def racechecks() -> list[Step]:
    """Each part of both subsets by itself: all in one would take longer than a card is there."""
    from tests.gpu import memcheck, memcheck_attention  # torch

    command = "compute-sanitizer --tool racecheck --error-exitcode 9 python -m"
    return [
        Step(f"racecheck-{part}", f"{command} {program.__name__} {part}", limit_s=250)
        for program in (memcheck, memcheck_attention)
        for part in program.PARTS
    ]


def measured(name: str, arguments: str, limit_s: float, out: str = "") -> Step:
    """A benchmark, whose results go to the file `out` if that is named."""
    written = f" --out {{out}}/{out}" if out else ""
    return Step(name, f"python -m benchmarks.{arguments}{written}", limit_s, quiet=True)


def plan() -> list[Step]:
    """All steps: first what is measured, then what is only to pass. The 10,000 seeds of a release need no card."""
    rank = "rank --of 8 --contexts 32768 --matmul auto --budget-seconds 170"
    rows = "swap_in --extra --row-bytes 196 208 320 352 --budget-seconds 60"
    return [
        measured("rank", rank, 200, "rank.json"),
        measured("attention", "attention --budget-seconds 60", 90, "attention.json"),
        measured("attention-sinks", "attention --sinks --budget-seconds 60", 90, "sinks.json"),
        measured("index_topk", "index_topk --budget-seconds 60", 90, "index_topk.json"),
        measured("prompt_index", "prompt_index", 90, "prompt_index.json"),
        measured("swap_in-rows", rows, 90, "swap_in.json"),
        measured("host_pool", "host_pool --gib 12 48", 120),
        measured("takeover", "takeover --device cuda --not-deterministic --budget-seconds 240", 400, "takeover.json"),
        *racechecks(),
        Step("cases", "python -m tests.gpu.run_cases --cases 9900 --limits 100 --seed 1", 400, cores=6),
        *(Step(f"seeds-{part}", f"python -m tests.sim --seeds 500 --start {500 * part}", 580) for part in range(20)),
        *tests_of((ROOT / "tests/gpu").glob("test_*.py")),
    ]


@dataclass
class Running:
    step: Step
    process: subprocess.Popen[bytes]
    cores: list[int]
    start: float


def next_step(waiting: Sequence[Step], running: Sequence[Step], free_cores: int) -> Step | None:
    """Return the step that may start now: a quiet one, all of which are first, beside nothing; another where its cores
    are free."""
    if any(step.quiet for step in running):
        return None
    if any(step.quiet for step in waiting):
        return None if running else next(step for step in waiting if step.quiet)
    return next((step for step in waiting if step.cores <= free_cores), None)


def run_plan(steps: Sequence[Step], cores: Sequence[int], end: float, out: Path) -> list[Ended]:
    """Run `steps` on `cores` until `end`, a time of the monotonic clock in seconds, and write their output below `out`.

    An interrupt ends all that runs.
    """
    ended: list[Ended] = []
    running: list[Running] = []
    waiting, free = list(steps), list(cores)
    (out / "logs").mkdir(parents=True, exist_ok=True)
    try:
        while waiting or running:
            for each in list(running):
                status, now = each.process.poll(), time.monotonic()
                if status is not None or now >= min(end, each.start + each.step.limit_s):
                    _end(each.process)
                    running.remove(each)
                    free += each.cores
                    ended.append(Ended(each.step, status, now - each.start))
                    print(ended[-1].line(), flush=True)
            if time.monotonic() >= end:
                ended += [Ended(step, None, 0.0) for step in waiting]
                waiting.clear()
            while step := next_step(waiting, [each.step for each in running], len(free)):
                count = len(free) if step.quiet else step.cores
                held, free = free[:count], free[count:]
                waiting.remove(step)
                running.append(Running(step, _start(step, held, out), held, time.monotonic()))
            time.sleep(0.1)
    finally:
        for each in running:
            _end(each.process)
    return ended


def _start(step: Step, cores: Sequence[int], out: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable if word == "python" else word for word in shlex.split(step.command.format(out=out))]
    place = tempfile.mkdtemp(prefix=f"{step.name}-")
    with (out / "logs" / f"{step.name}.txt").open("wb") as log:
        return subprocess.Popen(
            ["taskset", "--cpu-list", ",".join(map(str, cores)), *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | {"TMPDIR": place, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(len(cores))},
            start_new_session=True,
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the step's session: what the step started may outlive it."""
    for ends in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, ends)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.gpu.card", description=__doc__)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--out", type=Path, default=Path("card"))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these steps, in this order")
    parser.add_argument("--list", action="store_true", help="print the steps and end")
    given = parser.parse_args(argv)
    steps = {step.name: step for step in plan()}
    unknown = set(given.only or ()) - steps.keys()
    if unknown:
        parser.error(f"--only {min(unknown)}: no such step; take some of {', '.join(steps)}")
    chosen = [steps[name] for name in given.only or steps]
    if given.list:
        for step in chosen:
            print(f"{step.name:42} {'quiet' if step.quiet else '':6} {step.limit_s:4.0f} s   {step.command}")
        return 0
    out = given.out.resolve()
    ended = run_plan(chosen, sorted(os.sched_getaffinity(0)), time.monotonic() + given.seconds, out)
    (out / "summary.txt").write_text("".join(f"{each.line()}\n" for each in ended))
    with tarfile.open(out / "logs.tar.gz", "w:gz") as archive:
        archive.add(out / "logs", "logs")
    shutil.rmtree(out / "logs")
    return int(any(each.status != 0 for each in ended))


if __name__ == "__main__":
    sys.exit(main())
