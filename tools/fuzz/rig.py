"""What the fuzzers share: processes under attack, a client that is no attacker, and the verdict over both.

At the end the same processes run, their memory is at most MEMORY_GROWTH_MAX of what it was before, and the client was
never refused, with a p99 of at most P99_GROWTH_MAX of its undisturbed one (below --floor-ms it is not judged).

Attackers take as much of a machine as the service. So they are nice, each side may have cores of its own
(--service-cores, --client-cores, --attacker-cores), and "undisturbed" has the same neighbours: in turn with the attack,
the same attackers send to a sink (tools.fuzz.sink) at the same rate, in ROUNDS rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import trio

from hisparse.cluster.children import die_with_parent
from tests import ROOT

MEMORY_GROWTH_MAX: Final = 1.2
P99_GROWTH_MAX: Final = 3.0
#: The client that is no attacker.
CLIENT_INTERVAL_S: Final = 0.05
#: How often attackers send to the sink and then to the service; how long to the sink, each time. What the start of
#: their processes takes is not judged, on either side.
ROUNDS: Final = 4
UNDISTURBED_S: Final = 15.0
ATTACKERS_START_S: Final = 3.0
#: Of attackers and sink, behind service and client.
HOSTILE_NICENESS: Final = 10
#: First requests of the client, which are not judged.
CLIENT_WARM_UP: Final = 20
#: Until memory is measured: connections have ended by then, and what they left is returned (server/threads.py).
SETTLE_S: Final = 6.0
START_LIMIT_S: Final = 120.0
#: How often attackers say what they have sent, and the run says so.
TELL_INTERVAL_S: Final = 1.0
PROGRESS_INTERVAL_S: Final = 30.0


@dataclass(frozen=True)
class Cores:
    """The cores of each side; empty: all."""

    service: frozenset[int] = frozenset()
    client: frozenset[int] = frozenset()
    attackers: frozenset[int] = frozenset()


def cores_of(text: str) -> frozenset[int]:
    """ "0-3,8" as a set. Raises ValueError."""
    ranges = (part.partition("-") for part in text.split(",") if part)
    return frozenset(core for low, _, high in ranges for core in range(int(low), int(high or low) + 1))


def text_of(cores: frozenset[int]) -> str:
    return ",".join(map(str, sorted(cores)))


def add_options(parser: argparse.ArgumentParser) -> None:
    """What all programs take."""
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end the attack after so long")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--floor-ms", type=float, default=0.0, help="a p99 below it is not judged")
    parser.add_argument("--json", type=Path, help="write what was measured there")
    for side in ("service", "client", "attacker"):
        parser.add_argument(f"--{side}-cores", type=cores_of, default=frozenset(), help='such as "0-3,8"')


def cores_given(given: argparse.Namespace) -> Cores:
    return Cores(given.service_cores, given.client_cores, given.attacker_cores)


@dataclass
class Target:
    """A process under attack."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    before_bytes: int = 0
    before_cpu_s: float = 0.0

    def start(self) -> None:
        """The attack begins."""
        self.before_bytes, self.before_cpu_s = self.memory_bytes, self.cpu_s

    @property
    def memory_bytes(self) -> int:
        """Resident now; 0 when it is gone."""
        return self._status("VmRSS")

    @property
    def peak_bytes(self) -> int:
        """Most that was resident since its start, or since `forget_peak`; 0 when it is gone."""
        return self._status("VmHWM")

    def forget_peak(self) -> None:
        with suppress(OSError):
            Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def _status(self, name: str) -> int:
        with suppress(OSError):
            found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
            return int(found[1]) * 1024 if found else 0
        return 0

    @property
    def cpu_s(self) -> float:
        """Spent so far; 0 when it is gone."""
        with suppress(OSError):
            words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def verdict(self, report: Report) -> None:
        now, growth = self.memory_bytes, self.memory_bytes / max(self.before_bytes, 1)
        is_alive = self.process.poll() is None
        defects = len(re.findall(r" defect |Traceback", self.log.read_text(errors="replace")))
        report.measured[self.name] = {
            "alive": is_alive,
            "memory_mib": [round(it / (1 << 20), 1) for it in (self.before_bytes, now)],
            "memory_growth": round(growth, 3),
            "cpu_s": round(self.cpu_s - self.before_cpu_s, 1),
        }
        report.wrong += [f"{self.name} logged {defects} defects"] if defects else []
        report.wrong += [] if is_alive else [f"{self.name} exited with {self.process.returncode}"]
        report.wrong += [] if growth <= MEMORY_GROWTH_MAX else [f"memory of {self.name} grew {growth:.2f} x"]


@dataclass
class Report:
    """What was measured, by subject, and what is wrong with it."""

    measured: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def conclude(self, place: Path, path: Path | None) -> int:
        """Exit status of a run over the directory `place`. Prints the report as one line of JSON, which also goes to
        `path`, and keeps the logs only when something is wrong."""
        line = json.dumps({**self.measured, "wrong": self.wrong})
        print(line, flush=True)
        if path is not None:
            path.write_text(line + "\n")
        if self.wrong:
            print(*self.wrong, f"logs: {place}", sep="\n")
            return 1
        shutil.rmtree(place)
        return 0


@contextmanager
def process(
    *arguments: str,
    log: Path,
    cores: frozenset[int] = frozenset(),
    niceness: int = 0,
    env: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[subprocess.Popen[bytes]]:
    """A Python module with its arguments, on these cores, and with `env` besides; killed at the end, and told to end
    (SIGTERM) when this process is killed."""
    parent = os.getpid()

    def begin() -> None:
        die_with_parent(parent)
        os.nice(niceness)
        if cores:
            os.sched_setaffinity(0, cores)

    with log.open("wb") as file:
        started = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            env={**os.environ, **env},
            stdout=file,
            stderr=file,
            preexec_fn=begin,  # noqa: PLW1509 - this process has one thread
        )
    try:
        yield started
    finally:
        started.kill()
        started.wait()


# ---------------------------------------------------------------- attackers


@dataclass
class Tally:
    """What attackers have sent, and how their connections ended or were answered."""

    sent: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    def add(self, log: Path) -> None:
        """What the process with this log said last."""
        lines = [line for line in log.read_text().splitlines() if line.startswith('{"sent"')]
        if lines:
            told = json.loads(lines[-1])
            self.sent += told["sent"]
            self.outcomes.update(told["outcomes"])


async def tell(tally: Tally, attack: Callable[[], Awaitable[None]], seconds: float) -> None:
    """Await `attack` for `seconds` at most, printing the tally meanwhile."""

    def say() -> None:
        print(json.dumps({"sent": tally.sent, "outcomes": dict(tally.outcomes)}), flush=True)

    async def keep_on() -> None:
        while True:
            await trio.sleep(TELL_INTERVAL_S)
            say()

    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_on)
            await attack()
            nursery.cancel_scope.cancel()
    say()


def storm(
    module: str, place: Path, jobs: Sequence[Mapping[str, Any]], cores: frozenset[int], targets: Sequence[Target]
) -> Tally:
    """Run `module --assail JOB` for each job, in a process each, to their ends; raises RuntimeError when one fails."""
    began, logs = time.monotonic(), [place / f"attackers-{number}.log" for number in range(len(jobs))]
    own = sorted(cores)
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                process(
                    *(module, "--assail", json.dumps(dict(job))),
                    log=log,
                    cores=frozenset(own[number % len(own) : number % len(own) + 1]) if own else cores,
                    niceness=HOSTILE_NICENESS,
                )
            )
            for number, (job, log) in enumerate(zip(jobs, logs, strict=True))
        ]
        told_at = began
        while any(it.poll() is None for it in running):
            time.sleep(0.1)
            if time.monotonic() >= told_at + PROGRESS_INTERVAL_S:
                told_at = time.monotonic()
                memory = "/".join(str(it.memory_bytes >> 20) for it in targets)
                print(f"{_sum(logs).sent} in {told_at - began:.0f} s, memory {memory} MiB", flush=True)
        failed = [log for it, log in zip(running, logs, strict=True) if it.returncode]
        if failed:
            raise RuntimeError(failed[0].read_text())
    return _sum(logs)


def _sum(logs: Sequence[Path]) -> Tally:
    tally = Tally()
    for log in logs:
        tally.add(log)
    return tally


# ---------------------------------------------------------------- the client


def until(log: Path, pattern: str) -> str:
    """The first group of `pattern` once it is in `log`. Raises TimeoutError after START_LIMIT_S."""
    limit = time.monotonic() + START_LIMIT_S
    while (found := re.search(pattern, log.read_text())) is None:
        if time.monotonic() > limit:
            raise TimeoutError(log.read_text())
        time.sleep(0.05)
    return found[1]


@dataclass
class Spans:
    """When attackers sent to the sink, and when to the service: from and to."""

    calm: list[tuple[float, float]] = field(default_factory=list)
    stormy: list[tuple[float, float]] = field(default_factory=list)
    sent: Tally = field(default_factory=Tally)

    @property
    def stormy_s(self) -> float:
        return sum(ended - began for began, ended in self.stormy)


def rounds(
    attack: Callable[[Sequence[Mapping[str, Any]]], Tally],
    jobs: Sequence[Mapping[str, Any]],
    at_sink: Mapping[str, Any],
) -> Spans:
    """Run `attack` on ROUNDS parts of `jobs`, each part behind UNDISTURBED_S of the same with `at_sink` in its place.

    A job has `count`, `seconds` and `seed`.
    """
    spans = Spans()
    for number in range(ROUNDS):
        parts = [
            {
                **it,
                "count": it["count"] // ROUNDS + 1,
                "seconds": it["seconds"] / ROUNDS,
                "seed": f"{it['seed']}/{number}",
            }
            for it in jobs
        ]
        for kept, told in (
            (spans.calm, [{**it, **at_sink, "seconds": UNDISTURBED_S + ATTACKERS_START_S} for it in parts]),
            (spans.stormy, parts),
        ):
            began = time.monotonic() + ATTACKERS_START_S
            tally = attack(told)
            kept.append((began, time.monotonic()))
        spans.sent.sent += tally.sent
        spans.sent.outcomes.update(tally.outcomes)
    return spans


def warmed_up(log: Path) -> None:
    """Wait for the first answers of the client with this log. Raises TimeoutError."""
    limit = time.monotonic() + START_LIMIT_S
    while log.read_text().count("\n") <= CLIENT_WARM_UP:
        if time.monotonic() > limit:
            raise TimeoutError(log.read_text())
        time.sleep(0.05)


def p99(latencies: Sequence[float]) -> float:
    return sorted(latencies)[int(len(latencies) * 0.99)] if latencies else 0.0


def client_verdict(report: Report, log: Path, spans: Spans, floor_ms: float) -> None:
    """What is wrong with the answers of the client, whose log has lines `time latency outcome`; "ok" is right."""

    def within(at_s: float, parts: Sequence[tuple[float, float]]) -> bool:
        return any(began <= at_s < ended for began, ended in parts)

    lines = [line.split() for line in log.read_text().splitlines()[CLIENT_WARM_UP:-1]]
    times = [(float(line[0]), float(line[1]), line[2]) for line in lines if len(line) == 3]
    calm = [latency for at_s, latency, _ in times if within(at_s, spans.calm)]
    stormy = [latency for at_s, latency, _ in times if within(at_s, spans.stormy)]
    refused = [outcome for _, _, outcome in times if outcome != "ok"]
    ratio = p99(stormy) / max(p99(calm), 1e-9)
    report.measured["client"] = {
        "requests": [len(calm), len(stormy)],
        "p50_ms": [round(1e3 * statistics.median(it), 2) if it else None for it in (calm, stormy)],
        "p99_ms": [round(1e3 * p99(it), 2) for it in (calm, stormy)],
        "p99_growth": round(ratio, 2),
        "slowest_ms": round(1e3 * max(stormy, default=0), 1),
        "refused": len(refused),
    }
    wrong = report.wrong
    wrong += [f"the client was refused: {refused[:9]}"] if refused else []
    wrong += [] if stormy else ["the client had no answer"]
    wrong += [f"unreadable lines of the client: {len(lines) - len(times)}"] if len(lines) > len(times) else []
    wrong += [] if calm else ["the client had no answer undisturbed"]
    if calm and p99(stormy) > max(P99_GROWTH_MAX * p99(calm), floor_ms / 1e3):
        wrong.append(f"p99 of the client grew {ratio:.1f} x")
