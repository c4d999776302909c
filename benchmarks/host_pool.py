"""How long a host pool takes to be there: first touch by threads, registration with CUDA, and letting all of it go.

    python -m benchmarks.host_pool --dir /dev/shm [--gib 8 32 64] [--threads 1 4 16] [--budget-seconds 50]

Each case is a fresh file of a pool directory: touched (with and without a wish for huge pages), registered when there
is a CUDA device, unregistered, unmapped and removed; seconds and GB/s of each part. The machine's own limit beside it:
`memset`, the same threads writing memory that is mapped already. Cases that the memory limit or the budget leave no
room for are named as such. Writes benchmarks/results/host_pool-GPU.json.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from worker.pool.file import HEADER_BYTES, remove_pool
from worker.pool.host_memory import file_system_room, memory_room
from worker.pool.registration import (
    TOUCH_BYTES,
    CudaRegistrar,
    FirstTouch,
    Piece,
    Registration,
    cut,
    drop_mapping,
    in_threads,
    registration_bytes,
)

RESULTS = Path(__file__).with_name("results")
#: 64 tokens of DeepSeek-V3.2: 61 layers of 656 B rows and 132 B index keys.
PAGE_BYTES = 64 * 61 * (656 + 132)
GIB = 1 << 30


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure(path: Path, size_bytes: int, threads: int, *, huge_pages: bool, cuda: bool) -> dict[str, Any]:
    """One pool from its creation to its removal."""
    pages = size_bytes // PAGE_BYTES
    total, halted = pages * PAGE_BYTES, threading.Event()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, HEADER_BYTES + total)
        mapping = mmap.mmap(descriptor, HEADER_BYTES + total)
        body = torch.frombuffer(mapping, dtype=torch.uint8, offset=HEADER_BYTES, count=total)
        address, pieces = body.data_ptr(), cut(pages, PAGE_BYTES, TOUCH_BYTES)
        touch = FirstTouch(descriptor, address, HEADER_BYTES, huge_pages=huge_pages)

        def memset(piece: Piece) -> None:
            ctypes.memset(address + piece.offset, 1, piece.length)

        row: dict[str, Any] = {"bytes": total, "threads": threads, "huge_pages": huge_pages}
        row["touch_s"] = seconds(lambda: in_threads(pieces, touch, halted, threads=threads))
        row["memset_s"] = seconds(lambda: in_threads(pieces, memset, halted, threads=threads))
        if cuda:
            row |= register(address, cut(pages, PAGE_BYTES, registration_bytes(total, threads)), threads, body)
        row["drop_s"] = seconds(lambda: in_threads(pieces, drop_mapping(address), halted, threads=threads))
        del body
        row["unmap_s"] = seconds(mapping.close)
    finally:
        os.close(descriptor)
        removing_s = seconds(lambda: remove_pool(path))
    return row | {"remove_s": removing_s}


def register(address: int, pieces: list[Piece], threads: int, body: torch.Tensor) -> dict[str, Any]:
    registration = Registration(CudaRegistrar("cuda"), address, threads)
    took_s = seconds(lambda: registration.make(pieces, threading.Event()))
    assert body.is_pinned()
    return {"registrations": len(pieces), "register_s": took_s, "unregister_s": seconds(registration.undo)}


def text(row: dict[str, Any]) -> str:
    parts = [f"{row['bytes'] / GIB:5.1f} GiB {row['threads']:2} threads {'huge' if row['huge_pages'] else 'base'}"]
    for name in ("touch", "memset", "register", "unregister", "drop", "unmap", "remove"):
        if (took_s := row.get(f"{name}_s")) is not None:
            parts.append(f"{name} {took_s:6.3f} s ({row['bytes'] / 1e9 / max(took_s, 1e-9):6.1f} GB/s)")
    return "  ".join(parts)


def machine(cuda: bool) -> dict[str, Any]:
    huge = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return {
        "gpu": torch.cuda.get_device_name() if cuda else "none",
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "torch": torch.__version__,
        "shmem_huge_pages": huge.read_text().strip() if huge.exists() else "unknown",
        "memory": memory_room().arithmetic,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--gib", type=float, nargs="+", default=[8, 32, 64])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--budget-seconds", type=float, default=50.0)
    options = parser.parse_args()
    began, cuda = time.perf_counter(), torch.cuda.is_available()
    facts, rows, left_out = machine(cuda), [], []
    print(json.dumps(facts), flush=True)
    cases = [(gib, threads, huge) for gib in options.gib for threads in options.threads for huge in (False, True)]
    for gib, threads, huge_pages in sorted(cases, key=lambda case: (-case[1], case[0])):
        room = min(
            memory_room().free_bytes if memory_room().firm else 1 << 62, file_system_room(options.dir).free_bytes
        )
        spent_s = time.perf_counter() - began
        if gib * GIB > room or spent_s > options.budget_seconds:
            left_out.append(f"{gib} GiB, {threads} threads: {'budget' if gib * GIB <= room else f'{room} bytes free'}")
            continue
        path = options.dir / f"bench-{os.getpid()}.pool"
        rows.append(measure(path, int(gib * GIB), threads, huge_pages=huge_pages, cuda=cuda))
        print(text(rows[-1]), flush=True)
    for line in left_out:
        print(f"left out: {line}", flush=True)
    name = facts["gpu"].removeprefix("NVIDIA ").replace(" ", "-")
    RESULTS.mkdir(exist_ok=True)
    result = {"machine": facts, "command": " ".join(sys.argv), "rows": rows, "left_out": left_out}
    (RESULTS / f"host_pool-{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
