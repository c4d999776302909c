"""Where host rows lie against what the link gives: `python -m benchmarks.place [--out FILE]` with a CUDA device.

A graph of a launch for each layer of replay_misses, the copy kernel without lookup or victims. Launch l copies rows of
layer l: each reads its share of the pool, layers in turn, as a decode step does. Rows are drawn anew for each
replay, distinct within a launch, from all pages of the pool: contexts share the pages of a pool that is too small for
them. Layouts, all of one number of pages:

    page     as it is today: a page of 64 tokens holds all layers, then its index keys
    run      TOGETHER neighbouring pages hold layer 0 of all of them, then layer 1, ...; index keys elsewhere
    layer    all pages' rows of layer 0, then those of layer 1, ...; index keys elsewhere

The pool is shared memory of 4 KiB pages, touched and registered in pieces as a worker's is; smaller pools are its
beginning. us: medians of --replays replays in each of --passes passes, per launch, the launch itself included. Bytes
of sampled rows are compared with the host's after each cell. dma_gb_per_s: one copy of DMA_BYTES by the copy engine.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import sys
import threading
import time
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from benchmarks.swap_in import machine
from kernels.cuda import parameters, structures
from kernels.cuda.jit import Kernel, load, row_defines
from kernels.cuda.launch import processors
from kernels.cuda.swap_in import REPLAY_ROWS
from kernels.layout import Geometry
from kernels.state import MissPlan
from protocol.units import PAGE_TOKENS
from worker.pool.registration import (
    TOUCH_BYTES,
    CudaRegistrar,
    FirstTouch,
    Piece,
    Registration,
    in_threads,
    registration_bytes,
    thread_count,
)

LAYERS: Final = 61  # of DeepSeek-V3.2
TOGETHER: Final = 64
LAYOUTS: Final = ("page", "run", "layer")
INDEX_ROW_BYTES: Final = {656: 132, 1152: 256}  # by bytes of a KV row
LOADS: Final = {"32k x 58": (58, 102), "128k x 20": (20, 20)}  # requests, and rows that each misses in a layer
HOT_SLOTS: Final = 4096  # device rows of a request that copies go to
WARM_UP: Final = 2
HELD_CYCLES: Final = 2_000_000  # a millisecond, for the host to queue a replay in
CHECKED_ROWS: Final = 512  # of a layer
DMA_BYTES: Final = 512 << 20
GIB: Final = 1 << 30


class Cell(NamedTuple):
    pool_gib: int
    row_bytes: int
    load: str
    layout: str


def geometry_of(layers: int, row_bytes: int) -> Geometry:
    return Geometry(layers, row_bytes, tuple(range(layers)), INDEX_ROW_BYTES[row_bytes], 2048)


def pages_of(geometry: Geometry, pool_bytes: int) -> int:
    """Pages that each layout has room for: whole runs."""
    return pool_bytes // geometry.page_bytes // TOGETHER * TOGETHER


def sections(geometry: Geometry, layout: str, layer: int) -> tuple[int, int]:
    """Byte of section 0 of `layer`, and the bytes from one section to the next: 64 rows of a layer each."""
    section = PAGE_TOKENS * geometry.row_bytes
    return (layer * section, geometry.page_bytes) if layout == "page" else (0, section)


def section_of(geometry: Geometry, layout: str, pages: int, layer: int, page: Tensor) -> Tensor:
    """Number of the section that has the rows of `layer` in `page` int[...], of `pages` pages."""
    if layout == "page":
        return page
    together = pages if layout == "layer" else TOGETHER
    return (page // together * geometry.layers + layer) * together + page % together


# ---------------------------------------------------------------- memory


def pieces_of(size_bytes: int, each: int) -> list[Piece]:
    return [Piece(at, min(each, size_bytes - at)) for at in range(0, size_bytes, each)]


def make_pool(size_bytes: int) -> tuple[Tensor, dict[str, float]]:
    """Random bytes uint8[size_bytes] in shared memory, touched and registered; and the seconds that each took."""
    halted, threads = threading.Event(), thread_count()
    mapping = mmap.mmap(-1, size_bytes)
    pool = torch.frombuffer(mapping, dtype=torch.uint8)
    times, began = {}, time.perf_counter()
    in_threads(pieces_of(size_bytes, TOUCH_BYTES), FirstTouch(-1, pool.data_ptr(), 0), halted, threads=threads)
    times["touch_s"], began = time.perf_counter() - began, time.perf_counter()
    pieces = pieces_of(size_bytes, registration_bytes(size_bytes, threads))
    Registration(CudaRegistrar("cuda"), pool.data_ptr(), threads).make(pieces, halted)
    times["register_s"], began = time.perf_counter() - began, time.perf_counter()
    for piece in pieces:  # a copy must not cross two registrations
        here = pool[piece.offset : piece.offset + piece.length]
        here.copy_(torch.randint(0, 256, here.shape, dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    return pool, times | {"fill_s": time.perf_counter() - began}


def dma_gb_per_s(pool: Tensor) -> float:
    """Of a copy to the device, the best of five."""
    part = pool[: min(DMA_BYTES, registration_bytes(len(pool), thread_count()))]
    target, best = torch.empty_like(part, device="cuda"), 0.0
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(part, non_blocking=True)
        stop.record()
        torch.cuda.synchronize()
        best = max(best, len(part) / start.elapsed_time(stop) / 1e6)
    return best


# ---------------------------------------------------------------- one cell


class Copies:
    """A step's copies: a plan and a launch for each layer, in one graph."""

    def __init__(self, pool: Tensor, geometry: Geometry, layout: str, requests: int, misses: int) -> None:
        self.pool, self.geometry, self.layout = pool, geometry, layout
        self.pages = pages_of(geometry, len(pool))
        layers, slots = geometry.layers, requests * HOT_SLOTS
        self.plans = [MissPlan.allocate(requests, misses, "cuda") for _ in range(layers)]
        self.arena = torch.empty(layers, slots, geometry.row_bytes, dtype=torch.uint8, device="cuda")
        for plan in self.plans:
            plan.count.fill_(misses)
            rows = torch.randperm(slots, device="cuda")[: requests * misses]
            plan.device_row.copy_(rows.view(requests, misses))
        self.draw()
        self._kernel = load("copy_rows", "replay_misses", row_defines(geometry, pool.data_ptr()), 0)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for layer in range(layers):
                self._launch(self._kernel, layer)

    def draw(self) -> None:
        """Other host rows for every layer."""
        for layer, plan in enumerate(self.plans):
            rows = torch.randperm(self.pages * PAGE_TOKENS, device="cuda")[: plan.host_page.numel()]
            rows = rows.view(plan.host_page.shape)
            page = rows // PAGE_TOKENS
            plan.host_page.copy_(section_of(self.geometry, self.layout, self.pages, layer, page))
            plan.host_offset.copy_(rows % PAGE_TOKENS)

    def _launch(self, kernel: Kernel, layer: int) -> None:
        """As kernels.cuda.swap_in.replay_misses, of a state that has this layer alone."""
        plan = self.plans[layer]
        rows, misses = plan.host_page.shape
        first, stride = sections(self.geometry, self.layout, layer)
        state = structures.State(
            rows=self.arena[layer].data_ptr(),
            arena_rows=self.arena.shape[1],
            host=self.pool.data_ptr() + first,
            page_bytes=stride,
        )
        block = structures.ReplayMisses(
            state=state, plan=parameters.plan_parameters(plan), k=misses, layer=0, rows=rows
        )
        blocks = min(-(-rows * misses // REPLAY_ROWS), processors(self.arena.device) // 2)
        stream = torch.cuda.current_stream().cuda_stream
        kernel.launch((blocks, 1), block, stream, threads=256, shared_bytes=4 * rows)

    def timed(self, replays: int) -> list[float]:
        """us per launch of each replay, each of other rows."""
        times = []
        for turn in range(WARM_UP + replays):
            self.draw()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(HELD_CYCLES)
            start.record()
            self.graph.replay()
            stop.record()
            torch.cuda.synchronize()
            if turn >= WARM_UP:
                times.append(start.elapsed_time(stop) * 1000 / len(self.plans))
        return times

    def check(self) -> None:
        """Raises SystemExit unless sampled device rows of some layers have the bytes that the layout has there."""
        size, layers = self.geometry.row_bytes, self.geometry.layers
        for layer in {0, layers // 2, layers - 1}:
            plan = self.plans[layer]
            chosen = torch.randperm(plan.host_page.numel(), device="cuda")[:CHECKED_ROWS]
            number, offset, row = (
                table.flatten()[chosen].long() for table in (plan.host_page, plan.host_offset, plan.device_row)
            )
            first, stride = sections(self.geometry, self.layout, layer)
            begin = (first + number * stride + offset * size).cpu()
            want = self.pool[begin.unsqueeze(1) + torch.arange(size)]
            if not torch.equal(self.arena[layer][row].cpu(), want):
                raise SystemExit(f"layout {self.layout}, layer {layer}: rows differ from the host's")


def figures(cell: Cell, times: list[float]) -> dict[str, Any]:
    requests, misses = LOADS[cell.load]
    copied_bytes, median_us = requests * misses * cell.row_bytes, statistics.median(times)
    spread = {"us": median_us, "us_min": min(times), "us_max": max(times)}
    return {**cell._asdict(), **spread, "gb_per_s": copied_bytes / median_us / 1000, "replays": len(times)}


def show(row: dict[str, Any]) -> str:
    return (
        f"{row['pool_gib']:3} GiB  {row['row_bytes']:5} B  {row['load']:9}  {row['layout']:5}  {row['us']:7.1f} us "
        f"({row['us_min']:.1f}-{row['us_max']:.1f})  {row['gb_per_s']:5.1f} GB/s  {row['of_page']:.2f} of page"
    )


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with its rate over that of layout "page" in the same pool, rows and load."""
    today = {(row["pool_gib"], row["row_bytes"], row["load"]): row for row in rows if row["layout"] == "page"}
    return [
        row | {"of_page": row["gb_per_s"] / today[row["pool_gib"], row["row_bytes"], row["load"]]["gb_per_s"]}
        for row in rows
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.place")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/place.json"))
    parser.add_argument("--gib", type=int, nargs="*", default=[1, 12, 64], help="sizes of pools")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--row-bytes", type=int, nargs="*", default=list(INDEX_ROW_BYTES), choices=INDEX_ROW_BYTES)
    parser.add_argument("--replays", type=int, default=7, help=f"of each graph, after {WARM_UP} that do not count")
    parser.add_argument("--passes", type=int, default=2, help="through all cells")
    options = parser.parse_args()
    if min(options.replays, options.passes, options.layers, *options.gib) < 1:
        parser.error("--replays, --passes, --layers and --gib: at least 1")
    return options


def main() -> None:
    options = arguments()
    pool, times = make_pool(max(options.gib) * GIB)
    head = machine() | {"command": " ".join(["python", "-m", "benchmarks.place", *sys.argv[1:]])}
    setting = {"layers": options.layers, "together": TOGETHER, "dma_gb_per_s": dma_gb_per_s(pool), **times}
    print(head["gpu"], setting, flush=True)
    cells = [Cell(*of) for of in product(options.gib, options.row_bytes, LOADS, LAYOUTS)]
    replays: dict[Cell, list[float]] = {cell: [] for cell in cells}
    for _, cell in product(range(options.passes), cells):
        geometry = geometry_of(options.layers, cell.row_bytes)
        copies = Copies(pool[: cell.pool_gib * GIB], geometry, cell.layout, *LOADS[cell.load])
        replays[cell] += copies.timed(options.replays)
        copies.check()
        del copies
        torch.cuda.empty_cache()
    rows = with_ratios([figures(cell, replays[cell]) for cell in cells])
    print("\n".join(map(show, rows)))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": head, "setting": setting, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
