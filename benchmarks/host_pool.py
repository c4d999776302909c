"""Host pools in small and in huge pages: `python -m benchmarks.host_pool --dirs /dev/shm /mnt/huge --gib 12 48 96`.

For each directory and size a process makes a pool as a worker does, a second one attaches to it, and both are killed
amid copies to the device. Directories and sizes are taken in turn, `--rounds` times; medians, and all.

    touch_s      the file made, mapped and every page of it allocated
    register_s   its registration with CUDA, by the process that made it
    attach_s     mapping and registration by the second process
    copy_gb_s    one copy of 1 GiB from the pool to the device, the best of ten
    death_s      from SIGKILL to the proof of death (pidfd) of one process while the other holds the pool too
    last_death_s the same of the last process
    huge         share of the pool that lies in huge pages

Without a GPU (`--device cpu`) nothing is registered and copies stay on the host. A tmpfs with huge pages is made by
`mount -t tmpfs -o huge=always,size=100G none /mnt/huge`.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from kernels.layout import Geometry
from worker.pool.host_pool import MappedPool
from worker.pool.registration import CudaRegistrar, huge_shared_bytes

#: DeepSeek-V3.2 with rows in fp8: a page takes 3.1 MB.
GEOMETRY: Final = Geometry(layers=61, row_bytes=656, group_of_layer=tuple(range(61)), index_row_bytes=132, topk=2048)
#: Within one registration: a copy that spans two is refused by the driver.
COPY_BYTES: Final = 128 << 20
COPIES: Final = 10
DEATH_LIMIT_S: Final = 120.0


def user(path: Path, gib: float, device: str) -> None:
    """Map the pool, making it where there is none; say what that took; copy from it until killed."""
    began, huge = time.monotonic(), huge_shared_bytes()
    pool = MappedPool.open(path, GEOMETRY, int(gib * 2**30) // GEOMETRY.page_bytes)
    mapped = time.monotonic()
    said: dict[str, float] = {"touch_s": mapped - began, "huge": (huge_shared_bytes() - huge) / pool.pages.numel()}
    if device != "cpu":
        registrar = CudaRegistrar(device)
        registering = time.monotonic()
        pool.register(registrar, threading.Event())
        said["register_s"] = time.monotonic() - registering
    source = pool.pages.view(-1)[:COPY_BYTES]
    target = torch.empty_like(source, device=device)
    times = []
    for _ in range(COPIES):
        start = time.monotonic()
        target.copy_(source)
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.monotonic() - start)
    said["copy_gb_s"] = source.numel() / min(times) / 1e9
    print(json.dumps(said), flush=True)
    while True:
        target.copy_(source)


def spawn(path: Path, gib: float, device: str) -> tuple[subprocess.Popen[str], dict[str, float]]:
    command = [sys.executable, "-m", "benchmarks.host_pool", "--user", str(path), "--gib", str(gib), "--device", device]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = process.stdout.readline()
    if not said:
        raise SystemExit(f"a process ended before it had the pool: exit code {process.wait()}")
    return process, json.loads(said)


def death_s(process: subprocess.Popen[str]) -> float:
    """Kill `process` and return the seconds until its exit is proved."""
    pidfd = os.pidfd_open(process.pid)
    try:
        began = time.monotonic()
        process.send_signal(signal.SIGKILL)
        select.select([pidfd], [], [], DEATH_LIMIT_S)
        return time.monotonic() - began
    finally:
        os.close(pidfd)
        process.wait()


def cell(directory: Path, gib: float, device: str) -> dict[str, float]:
    path = directory / f"hisparse-bench-{os.getpid()}.pool"
    try:
        first, made = spawn(path, gib, device)
        second, attached = spawn(path, gib, device)
        made["attach_s"] = attached["touch_s"] + attached.get("register_s", 0.0)
        return made | {"death_s": death_s(first), "last_death_s": death_s(second)}
    finally:
        path.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_pool", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dirs", type=Path, nargs="+", default=[Path("/dev/shm")])
    parser.add_argument("--gib", type=float, nargs="+", default=[12.0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--user", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.user:
        user(options.user, options.gib[0], options.device)
        return
    found: dict[tuple[Path, float], list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for gib in options.gib:
            for directory in options.dirs:
                found.setdefault((directory, gib), []).append(cell(directory, gib, options.device))
    for (directory, gib), cells in found.items():
        row: dict[str, Any] = {"dir": str(directory), "gib": gib}
        for name in cells[0]:
            values = sorted(round(one[name], 3) for one in cells)
            row[name] = values[0] if len(values) == 1 else [median(values), values]
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
