"""The new seeds of the simulated cluster that each commit has, run once in a run of the suite, by parts.

As a program, with the run's folder and numbers of parts: runs them one after the other. A whole run begins with it,
beside the collection of tests, which has one core busy.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Final

from hisparse.cluster import children
from tests import ROOT
from tests.support.history import first_parent_commits, seeds_of
from tests.support.once import made_once

PARTS: Final = 2


def begin(run_dir: Path, *parts: int) -> subprocess.Popen[bytes]:
    """Start a process that runs `parts` in this order, unless another one has; ends with this process at the latest."""
    command = [sys.executable, "-m", __name__, str(run_dir), *map(str, parts)]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": "0"}, stdin=subprocess.DEVNULL)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def outcome(run_dir: Path, part: int) -> tuple[int, str]:
    """The exit status and the output of `python -m tests.sim` with the seeds of `part`; waits for a process that runs
    them."""
    status, output = made_once(run_dir, f"seeds-{part}", lambda: _simulate(part))
    return status, output


def count(part: int) -> int:
    return len(_seeds(part))


def _seeds(part: int) -> range:
    seeds = seeds_of(first_parent_commits())
    return seeds[len(seeds) * part // PARTS : len(seeds) * (part + 1) // PARTS]


def _simulate(part: int) -> tuple[int, str]:
    from tests.sim.__main__ import main

    seeds = _seeds(part)
    with redirect_stdout(io.StringIO()) as output:
        status = main(["--seeds", str(len(seeds)), "--start", str(seeds.start)])
    return status, output.getvalue()


if __name__ == "__main__":
    children.die_with_parent(os.getppid(), signal.SIGKILL)
    for part in map(int, sys.argv[2:]):
        outcome(Path(sys.argv[1]), part)
