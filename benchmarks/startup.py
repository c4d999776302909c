"""How long the command line and the coordinator take to be there, and what an idle coordinator holds.

    help_ms                   wall time of `hisparse --help`, a whole process
    coordinator_ready_ms      from starting the process until it answers a client's hello
    coordinator_resident_mib  resident memory at that moment, no requests, no workers

    python benchmarks/startup.py [--json] [--runs N]

Prints the minimum, median and maximum of each; the minimum is what the code costs, the rest is the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import trio

from hisparse.client.client import open_client
from protocol.errors import Unavailable

READY_LIMIT_S: Final = 20.0
POLL_S: Final = 0.005
MIB: Final = 1024 * 1024
CLI: Final = (sys.executable, "-m", "hisparse.cli")


def help_ms() -> float:
    began = time.perf_counter()
    subprocess.run([*CLI, "--help"], stdout=subprocess.DEVNULL, check=True)
    return (time.perf_counter() - began) * 1e3


def coordinator_start() -> tuple[float, float]:
    """Milliseconds until it answers, and resident MiB then."""
    with tempfile.TemporaryDirectory(prefix="hisparse-bench-") as directory:
        began = time.perf_counter()
        process = subprocess.Popen(
            [*CLI, "coordinator", "--runtime-dir", directory], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            trio.run(_answers, f"ipc://{directory}/client.sock")
            took_ms = (time.perf_counter() - began) * 1e3
            return took_ms, _resident_bytes(process.pid) / MIB
        finally:
            process.terminate()
            process.wait()


async def _answers(endpoint: str) -> None:
    with trio.fail_after(READY_LIMIT_S):
        while True:
            try:
                async with open_client(endpoint, reconnect_limit_s=0):
                    return
            except Unavailable:
                await trio.sleep(POLL_S)


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    starts = [coordinator_start() for _ in range(options.runs)]
    figures = {
        "help_ms": [help_ms() for _ in range(options.runs)],
        "coordinator_ready_ms": [ready for ready, _ in starts],
        "coordinator_resident_mib": [resident for _, resident in starts],
    }
    spread = {
        name: {"min": min(values), "median": median(values), "max": max(values)} for name, values in figures.items()
    }
    if options.json:
        print(json.dumps({"machine": platform.platform(), "cpus": os.cpu_count(), "runs": options.runs, **spread}))
    else:
        for name, row in spread.items():
            print(f"{name:26}" + "  ".join(f"{kind} {value:8.1f}" for kind, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
