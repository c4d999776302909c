"""What crosses PCIe between a GPU that prefills and one that decodes. `python -m benchmarks.two_gpus`

Two processes over one host pool, as workers of a node have it: a mapped file that both register with their GPUs. A
context of --pages pages of DeepSeek-V3.2 (bf16 rows, all layers) lies in the memory of the first GPU.

    stage    copy_rows of the context, in pieces as a worker launches them, from the first GPU to scattered host pages
    load     the same pages, rows and index keys, to the second GPU; what arrives is compared with what left
    plain    one contiguous copy of as many bytes between a GPU and its own pinned memory: the limit of the link

Each alone, then stage and load (and the plain copies) at the same time. GB/s by the clock, medians of --rounds; between
the first launch and the end of the last copy nothing else happens. Writes benchmarks/results/two_gpus-NAME.json, which
benchmarks.report shows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.transfer import GEOMETRY, Process, say
from benchmarks.transfer_report import PAIRS, links
from kernels.copy_rows import copy_rows_to_device, copy_rows_to_host
from kernels.state import DeviceState
from protocol.units import PAGE_TOKENS
from worker.loop.swap import piece_tokens
from worker.pool.host_pool import MappedPool
from worker.pool.registration import CudaRegistrar

RESULTS: Final = Path(__file__).with_name("results")


class End:
    """One GPU with a context in its memory, and the pool."""

    def __init__(self, device: str, path: Path, pages: int, seed: int) -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._pool = MappedPool.open(path, GEOMETRY, pages, "two_gpus")
        if self.device.type == "cuda":
            self._pool.register(CudaRegistrar(device), threading.Event())
        self._state = DeviceState.allocate(
            GEOMETRY,
            seats=1,
            chunks=pages,
            index_pages=pages,
            max_pages=pages,
            max_chunks=pages,
            max_slab_pages=1,
            tail_slots=1,
            host=self._pool.pages,
            device=device,
        )
        if seed:
            generator = torch.Generator(self.device).manual_seed(seed)
            for memory in (self._state.rows, self._state.index_keys):
                memory.random_(0, 256, generator=generator)
        self._size = pages * GEOMETRY.page_bytes
        self._there = torch.ones(self._size, dtype=torch.uint8, device=device)
        self._here = torch.ones(self._size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        self._places = self._make_places(pages)

    def _make_places(self, pages: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        token = torch.arange(pages * PAGE_TOKENS, device=self.device)
        scattered = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).to(self.device)
        page = scattered[token // PAGE_TOKENS]
        return [
            (piece.expand(GEOMETRY.groups, -1).contiguous(), piece, page[piece], piece % PAGE_TOKENS)
            for piece in token.split(piece_tokens(GEOMETRY.page_bytes // PAGE_TOKENS))
        ]

    def obey(self, what: str) -> dict[str, Any]:
        if what == "digest":
            sums = [
                int(it.view(torch.int32).sum(dtype=torch.int64)) for it in (self._state.rows, self._state.index_keys)
            ]
            return {"digest": sums}
        self._wait()
        began = time.time()
        getattr(self, what)()
        self._wait()
        return {"began": began, "ended": time.time(), "bytes": self._size}

    def stage(self) -> None:
        for places in self._places:
            copy_rows_to_host(self._state, *places)

    def load(self) -> None:
        for places in self._places:
            copy_rows_to_device(self._state, *places)

    def plain_to_host(self) -> None:
        self._here.copy_(self._there, non_blocking=True)

    def plain_to_device(self) -> None:
        self._there.copy_(self._here, non_blocking=True)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def serve(options: argparse.Namespace) -> None:
    """Orders from stdin, answers to stdout, until stdin ends."""
    end = End(options.device, options.pool, options.pages, options.seed)
    say(ready=True)
    for line in sys.stdin:
        say(**end.obey(json.loads(line)["what"]))
    sys.stdout.flush()
    os._exit(0)


# ---------------------------------------------------------------- both processes


def rate(ends: list[Process], whats: list[str]) -> float:
    """GB/s of all that was copied between the first beginning and the last end."""
    for end, what in zip(ends, whats, strict=True):
        end.order(what=what)
    told = [end.answer() for end in ends]
    seconds = max(it["ended"] for it in told) - min(it["began"] for it in told)
    return float(sum(it["bytes"] for it in told) / seconds / 1e9)


def measure(first: Process, second: Process, rounds: int) -> dict[str, float]:
    """GB/s by what was done; "a + b" at the same time. Raises SystemExit when other bytes arrived."""
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for left, right in PAIRS:
            row = {left: rate([first], [left]), right: rate([second], [right])}
            row[f"{left} + {right}"] = rate([first, second], [left, right])
            for name, value in row.items() if number else ():
                found.setdefault(name, []).append(value)
    for end in (first, second):
        end.order(what="digest")
    if first.answer() != second.answer():
        raise SystemExit("other bytes arrived")
    return {name: median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"])
    parser.add_argument("--pages", type=int, default=512, help="32k tokens: 2.6 GB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--name", default="H200", help="of the file of results")
    parser.add_argument("--device", help=argparse.SUPPRESS)
    parser.add_argument("--pool", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device:
        serve(options)
        return
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="hisparse-two-gpus-") as directory:
        own = [
            sys.executable,
            "-m",
            "benchmarks.two_gpus",
            "--pool",
            f"{directory}/n.pool",
            "--pages",
            str(options.pages),
        ]
        ends = []
        for seed, device in ((1, options.devices[0]), (0, options.devices[1])):
            ends.append(Process([*own, "--device", device, "--seed", str(seed)]))
            ends[-1].answer()
        rates = measure(ends[0], ends[1], options.rounds)
        for end in ends:
            end.end()
    result = {"devices": options.devices, "pages": options.pages, "page_bytes": GEOMETRY.page_bytes, "gb_per_s": rates}
    print(links(result))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"two_gpus-{options.name}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
