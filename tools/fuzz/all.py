"""`python -m tools.fuzz.all --seconds 540`: all programs that attack a service, within a time, on this machine.

    http       tools.fuzz.http      a million requests, at an even rate that ends in time
    zmq        tools.fuzz.zmq       100,000 messages, likewise
    two_keys   tools.fuzz.two_keys       as many rounds as fit

`plan` divides the cores that this process may use. With 16 or more, or with --beside and 12 or more, http runs beside
zmq and two_keys, each with cores for the service, for the client that measures and for the attackers. With 8 to 15 one
program runs after the other. With fewer nothing has cores of its own. --only runs a single program, with all cores and
all the time. Prints one line of JSON for each program, which is in PROGRAM.json of the directory --out, too. Exits with
1 when one of them found something wrong.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from hisparse.cluster.children import die_with_parent
from tests import ROOT
from tools.fuzz.rig import ATTACKERS_START_S, ROUNDS, SETTLE_S, UNDISTURBED_S, Cores, text_of

#: Cores of a service of three or four processes, of one program that has cores of its own, of two beside each other.
SERVICE_CORES: Final = 4
#: The same, with --beside on fewer cores.
SERVICE_CORES_BESIDE: Final = 3
OWN_CORES_MIN: Final = 8
BESIDE_CORES_MIN: Final = 16
ASKED_BESIDE_CORES_MIN: Final = 12
#: Shares of the time where one program runs after the other: http, zmq; two_keys has the rest.
HTTP_SHARE: Final = 0.8
ZMQ_SHARE: Final = 0.11
#: Of an attack of zmq beside http, at most; two_keys has the rest of that lane.
ZMQ_BESIDE_S: Final = 120.0
#: Of a program's time, not part of its attack: start, warm-up, phases with the sink, settling phase.
AROUND_S: Final = ROUNDS * (UNDISTURBED_S + 2 * ATTACKERS_START_S) + 2 * SETTLE_S + 25.0
#: Of the time that is left for an attack of http or zmq: the rate is such that it ends a little earlier.
RATE_MARGIN: Final = 0.95
ROUNDS_MAX: Final = 6
PROGRAMS: Final = ("http", "zmq", "two_keys")


@dataclass(frozen=True)
class Run:
    """One program, its cores and its time."""

    program: str
    cores: Cores
    seconds: float

    @property
    def attack_s(self) -> float:
        return max(self.seconds - AROUND_S, 10.0)


def plan(cpus: Sequence[int], seconds: float, *, beside: bool = False, only: str = "") -> list[list[Run]]:
    """Lanes that run beside each other; in each, one program runs after the other.

    `only`: the one program that runs.
    `beside`: two lanes from ASKED_BESIDE_CORES_MIN cores on; raises ValueError where there are fewer.
    """
    cores = _divided(cpus) if len(cpus) >= OWN_CORES_MIN else Cores()
    if only:
        return [[Run(only, cores, seconds)]]
    http, zmq, two_keys = (Run(name, Cores(), 0.0) for name in PROGRAMS)
    if beside and len(cpus) < ASKED_BESIDE_CORES_MIN:
        raise ValueError(f"--beside needs {ASKED_BESIDE_CORES_MIN} cores, not {len(cpus)}")
    if beside or len(cpus) >= BESIDE_CORES_MIN:
        has_many = len(cpus) >= BESIDE_CORES_MIN
        middle = len(cpus) // 2 + has_many
        service = SERVICE_CORES if has_many else SERVICE_CORES_BESIDE
        first, second = _divided(cpus[:middle], service), _divided(cpus[middle:], service)
        zmq_s = min(seconds / 2, AROUND_S + ZMQ_BESIDE_S)
        return [
            [replace(http, cores=first, seconds=seconds)],
            [replace(zmq, cores=second, seconds=zmq_s), replace(two_keys, cores=second, seconds=seconds - zmq_s)],
        ]
    times = (HTTP_SHARE * seconds, ZMQ_SHARE * seconds, (1 - HTTP_SHARE - ZMQ_SHARE) * seconds)
    return [[replace(it, cores=cores, seconds=own) for it, own in zip((http, zmq, two_keys), times, strict=True)]]


def _divided(cpus: Sequence[int], service: int = SERVICE_CORES) -> Cores:
    client = service + 1
    return Cores(frozenset(cpus[:service]), frozenset(cpus[service:client]), frozenset(cpus[client:]))


def command(run: Run, given: argparse.Namespace) -> list[str]:
    """The program's arguments."""
    common = [
        "--seed",
        str(given.seed),
        "--floor-ms",
        str(given.floor_ms),
    ]
    for side, cores in (
        ("service", run.cores.service),
        ("client", run.cores.client),
        ("attacker", run.cores.attackers),
    ):
        common += [f"--{side}-cores", text_of(cores)] if cores else []
    common += ["--json", str(given.out / f"{run.program}.json")] if given.out else []
    match run.program:
        case "http":
            attackers = max(1, len(run.cores.attackers))
            rate = str(math.ceil(given.requests / (RATE_MARGIN * run.attack_s)))
            own = ["--requests", str(given.requests), "--attackers", str(attackers), "--rate", rate]
            return ["tools.fuzz.http", *own, "--seconds", str(run.attack_s), *common]
        case "zmq":
            rate = str(math.ceil(given.messages / (RATE_MARGIN * run.attack_s)))
            own = ["--messages", str(given.messages), "--rate", rate]
            return ["tools.fuzz.zmq", *own, "--seconds", str(run.attack_s), *common]
    return ["tools.fuzz.two_keys", "--rounds", str(given.rounds), "--seconds", str(run.seconds), *common]


def run_lane(lane: Sequence[Run], given: argparse.Namespace, place: Path, failed: list[str]) -> None:
    """In a thread. What a program printed is in `place`; its last lines are printed here."""
    for run in lane:
        log = place / f"{run.program}.log"
        with log.open("wb") as file:
            arguments = [sys.executable, "-m", *command(run, given)]
            status = subprocess.run(
                arguments,
                cwd=ROOT,
                stdout=file,
                stderr=file,
                check=False,
                preexec_fn=partial(die_with_parent, os.getpid()),
            ).returncode
        lines = log.read_text(errors="replace").splitlines()
        shown = [line for line in lines if line.startswith('{"program"')] or lines[-20:]
        print(*shown, f"{run.program}: exit status {status}, log {log}", sep="\n", flush=True)
        failed += [run.program] if status else []


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=ROUNDS_MAX)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--floor-ms", type=float, default=0.0, help="a p99 below it is not judged")
    parser.add_argument("--cores", type=int, default=0, help="use at most so many; 0: all")
    parser.add_argument("--beside", action="store_true", help="http beside the others, from 12 cores on")
    parser.add_argument("--only", choices=PROGRAMS, default="", help="run this program alone")
    parser.add_argument("--out", type=Path, help="a directory for the results")
    given = parser.parse_args()
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
    cpus = sorted(os.sched_getaffinity(0))[: given.cores or None]
    lanes, place, began = (
        plan(cpus, given.seconds, beside=given.beside, only=given.only),
        Path(tempfile.mkdtemp(prefix="hisparse-attacks-")),
        time.monotonic(),
    )
    print(f"{platform.platform()}, Python {platform.python_version()}, {len(cpus)} cores, seed {given.seed}")
    for lane in lanes:
        print(*(" ".join(command(run, given)) for run in lane), sep="\n", flush=True)
    failed: list[str] = []
    threads = [threading.Thread(target=run_lane, args=(lane, given, place, failed)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{time.monotonic() - began:.0f} s; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
