"""What the fuzzers share: processes under attack, a client that is no attacker, and the verdict over both.

At the end the same processes run, their memory is at most MEMORY_GROWTH_MAX of what it was before, and the client was
never refused, with a p99 of at most P99_GROWTH_MAX of its undisturbed one (or P99_FLOOR_S, below which a machine's own
noise decides).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests import ROOT

MEMORY_GROWTH_MAX: Final = 1.2
P99_GROWTH_MAX: Final = 3.0
P99_FLOOR_S: Final = 0.05
#: The client that is no attacker.
CLIENT_INTERVAL_S: Final = 0.05
UNDISTURBED_S: Final = 10.0
#: First requests of the client, which are not judged.
CLIENT_WARM_UP: Final = 20
#: Until freed memory is measured at the end.
SETTLE_S: Final = 3.0
START_LIMIT_S: Final = 60.0


@dataclass
class Target:
    """A process under attack."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    before_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        """Resident now; 0 when it is gone."""
        with suppress(OSError):
            found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
            return int(found[1]) * 1024 if found else 0
        return 0

    def verdict(self) -> list[str]:
        """What is wrong with it, after saying what was measured."""
        now, growth = self.memory_bytes, self.memory_bytes / max(self.before_bytes, 1)
        is_alive = self.process.poll() is None
        print(f"{self.name}: alive {is_alive}, memory {self.before_bytes >> 20} -> {now >> 20} MiB ({growth:.2f} x)")
        defects = len(re.findall(r" defect |Traceback", self.log.read_text(errors="replace")))
        wrong = [f"{self.name} logged {defects} defects"] if defects else []
        wrong += [] if is_alive else [f"{self.name} exited with {self.process.returncode}"]
        wrong += [] if growth <= MEMORY_GROWTH_MAX else [f"memory of {self.name} grew {growth:.2f} x"]
        return wrong


@contextmanager
def process(*arguments: str, log: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python module with its arguments; killed at the end."""
    with log.open("wb") as file:
        started = subprocess.Popen(
            [sys.executable, "-m", *arguments], cwd=ROOT, env=os.environ | env, stdout=file, stderr=file
        )
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def until(log: Path, pattern: str) -> str:
    """The first group of `pattern` once it is in `log`. Raises TimeoutError after START_LIMIT_S."""
    limit = time.monotonic() + START_LIMIT_S
    while (found := re.search(pattern, log.read_text())) is None:
        if time.monotonic() > limit:
            raise TimeoutError(log.read_text())
        time.sleep(0.05)
    return found[1]


def p99(latencies: Sequence[float]) -> float:
    return sorted(latencies)[int(len(latencies) * 0.99)] if latencies else 0.0


def client_verdict(log: Path, began: float, ended: float) -> list[str]:
    """What is wrong with the answers of the client, whose log has lines `time latency outcome`; outcome "ok" is right.

    The attack lasted from `began` to `ended`.
    """
    lines = [line.split() for line in log.read_text().splitlines()[CLIENT_WARM_UP:-1]]
    times = [(float(line[0]), float(line[1]), line[2]) for line in lines if len(line) == 3]
    calm = [latency for at_s, latency, _ in times if at_s < began]
    stormy = [latency for at_s, latency, _ in times if began <= at_s < ended]
    refused = [outcome for _, _, outcome in times if outcome != "ok"]
    quiet_p99, storm_p99 = p99(calm), p99(stormy)
    print(
        f"client: {len(stormy)} requests, p99 {1e3 * quiet_p99:.1f} -> {1e3 * storm_p99:.1f} ms "
        f"({storm_p99 / max(quiet_p99, 1e-9):.1f} x), slowest {1e3 * max(stormy, default=0):.1f} ms, "
        f"refused {len(refused)} {refused[:9]}"
    )
    wrong = [f"the client was refused: {refused[:9]}"] if refused else []
    wrong += [] if stormy else ["the client had no answer"]
    wrong += [f"unreadable lines of the client: {len(lines) - len(times)}"] if len(lines) > len(times) else []
    wrong += [] if calm else ["the client had no answer undisturbed"]
    if calm and storm_p99 > max(P99_GROWTH_MAX * quiet_p99, P99_FLOOR_S):
        wrong.append(f"p99 of the client grew {storm_p99 / quiet_p99:.1f} x")
    return wrong


def conclude(wrong: Sequence[str], place: Path) -> int:
    """Exit status of a run over the directory `place`: prints what is wrong, and keeps the logs only then."""
    if wrong:
        print(*wrong, f"logs: {place}", sep="\n")
        return 1
    shutil.rmtree(place)
    return 0
