"""swap_in against the link: `python -m benchmarks.swap_in [--out FILE]` on a machine with a CUDA device.

One cell is (row bytes, hot slots, batch, misses per request and step). A CUDA graph holds 16 launches, one per index
group, each group with slot tables and rows of its own, as in one decode step. Top-k is 2048 tokens in random order out
of a context of 65,536, another per request; a window over a random permutation moves by `misses` tokens per step, so
that each step misses exactly that many. Times are medians of 13 replays, per launch:

    us            swap_in
    copy_only_us  the same copies by replay_misses: no lookup, no victims
    null_us       an empty kernel
    floor_us      bytes at LINK_GB_PER_S, and a null launch
    cold_us       swap_in with a flushed L2 (the flush, timed by itself, subtracted)

Counters are compared after each cell, and the bytes behind a sample of outputs. Cells already in --out are kept.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kernels.cuda.jit import load
from kernels.cuda.launch import prepare, stream_of
from kernels.cuda.parameters import Plan
from kernels.cuda.swap_in import blocks_per_request, replay_misses, swap_in
from kernels.layout import PAGE_TOKENS, Geometry, managed_chunks
from kernels.seat import init_managed
from kernels.state import DeviceState, MissPlan, StepBatch

GROUPS = 16
TOPK = 2048
CONTEXT = 65_536
TAIL_SLOTS = 4
REPLAYS = 13
WARM_UP = 3
LINK_GB_PER_S = 55.6  # PCIe 5 x16 as copies reach it; KERNEL figures use the same
FLUSH_BYTES = 192 << 20
HOST_BYTES = 8 << 30

# us on one H200: SGLang 0.5.23, and a throw-away prototype without slot indirection, size classes or duplicates.
PEERS = {
    (656, 4096, 1): ((9.8, 2.7), (16.6, 4.7), (27.6, 5.3), (58.1, 9.6)),
    (656, 4096, 4): ((10, 2.8), (17.6, 5.7), (29.9, 10.9), (66, 26.2)),
    (656, 4096, 16): ((10.1, 3.1), (19.9, 8.4), (40.4, 26.2), (112, 93.2)),
    (656, 4096, 64): ((10.3, 2.9), (33.2, 28.8), (111, 107.6), (390, 374)),
    (656, 4096, 128): ((11.6, 3.8), (52.2, 39.6), (202, 186), (759, 732)),
    (656, 8192, 1): ((15.2, 3.0), (23.3, 5.8), (34.6, 6.3), (65.6, 9.6)),
    (656, 8192, 16): ((15.6, 3.5), (26.1, 8.8), (47.5, 26.6), (120, 93.6)),
    (656, 8192, 128): ((16.8, 4.7), (58.5, 39.7), (209, 186), (772, 732)),
    (1152, 4096, 1): ((10, 2.7), (16.9, 4.7), (27.9, 6.2), (59.6, 14.5)),
    (1152, 4096, 16): ((10.2, 3.0), (22.1, 11.3), (54.3, 41), (169, 153)),
    (1152, 4096, 128): ((11.4, 3.8), (73.1, 62.7), (322, 304), (1214, 1190)),
}
MISSES = (0, 20, 102, 410)
EXTRA = ((640, 4096, 16), (584, 4096, 16), (656, 16384, 16), (656, 32768, 16), (656, 4096, 256))


@dataclass
class Setup:
    """One state and its graphs' inputs."""

    state: DeviceState
    batch: StepBatch
    window: torch.Tensor  # int32[B, CONTEXT]: the permutation that the top-k moves over
    topk: torch.Tensor
    out: torch.Tensor
    plans: list[MissPlan] = field(default_factory=list)
    place: int = 0

    def advance(self, misses: int, shuffle: torch.Tensor) -> None:
        """The next step's top-k: `misses` fresh tokens, random order."""
        self.place += misses
        self.state.now.add_(1)
        self.topk.copy_(self.window[:, (self.place + shuffle) % CONTEXT])


def build(pool: torch.Tensor, row_bytes: int, hot: int, batch: int) -> Setup:
    geometry = Geometry(GROUPS, row_bytes, tuple(range(GROUPS)), 4, TOPK)
    pages = pool.numel() // geometry.page_bytes
    chunks = managed_chunks(hot)
    state = DeviceState.allocate(
        geometry,
        seats=batch,
        chunks=batch * chunks,
        index_pages=batch * CONTEXT // PAGE_TOKENS,
        max_pages=CONTEXT // PAGE_TOKENS,
        max_chunks=chunks,
        max_slab_pages=1,
        tail_slots=TAIL_SLOTS,
        host=pool[: pages * geometry.page_bytes].view(pages, geometry.page_bytes),
        device="cuda",
    )
    prepare(state)
    state.index_table.copy_(torch.randperm(state.index_table.numel()).view(state.index_table.shape))
    state.host_table.copy_(torch.randint(0, pages, state.host_table.shape))
    state.chunk_table.copy_(torch.randperm(state.chunk_table.numel()).view(state.chunk_table.shape))
    for seat in range(batch):
        init_managed(state, seat, hot, 0, hot)
    inputs = StepBatch.allocate(batch, GROUPS, "cuda")
    inputs.seats.copy_(torch.randperm(batch))
    inputs.lengths.fill_(CONTEXT)
    inputs.num_real.fill_(batch)
    held = torch.rand(batch, hot, device="cuda").argsort(1)
    fresh = torch.rand(batch, CONTEXT - hot, device="cuda").argsort(1) + hot
    topk = torch.zeros(batch, TOPK, dtype=torch.int32, device="cuda")
    window = torch.cat([held, fresh], 1).int()
    plans = [MissPlan.allocate(batch, TOPK, "cuda") for _ in range(GROUPS)]
    return Setup(state, inputs, window, topk, torch.empty_like(topk), plans, place=hot - TOPK)


def capture(work: Callable[[int], None]) -> torch.cuda.CUDAGraph:
    """One graph of GROUPS launches."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for group in range(GROUPS):
            work(group)
    return graph


def timed(graph: torch.cuda.CUDAGraph, before: Callable[[], None] | None = None) -> list[float]:
    """us per launch of each replay."""
    times = []
    for turn in range(WARM_UP + REPLAYS):
        if before:
            before()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        if turn >= WARM_UP:
            times.append(start.elapsed_time(stop) * 1000 / GROUPS)
    return times


def measure(setup: Setup, misses: int, ranks: int | None, cold: bool) -> dict[str, Any]:
    state, rows = setup.state, setup.topk.shape[0]
    row_bytes = state.geometry.row_bytes
    shuffle = torch.randperm(TOPK, device="cuda")

    def swap(group: int) -> None:
        swap_in(state, group, setup.topk, setup.batch, setup.out, setup.plans[group], ranks=ranks)

    before = int(state.misses.sum()), int(state.hits.sum())
    swap_graph = capture(swap)
    times = timed(swap_graph, lambda: setup.advance(misses, shuffle))
    steps = (WARM_UP + REPLAYS) * GROUPS * rows
    counted = int(state.misses.sum()) - before[0], int(state.hits.sum()) - before[1]
    if counted != (steps * misses, steps * (TOPK - misses)) or int(state.tripwires.sum()):
        raise SystemExit(f"counted misses, hits {counted}, expected {steps * misses}, {steps * (TOPK - misses)}")
    check_bytes(setup)
    copies = timed(capture(lambda group: replay_misses(state, group, setup.plans[group])))
    cell: dict[str, Any] = {
        "us": statistics.median(times),
        "us_min": min(times),
        "us_max": max(times),
        "copy_only_us": statistics.median(copies),
        "gb_per_s": rows * misses * row_bytes / statistics.median(times) / 1000,
    }
    if cold:
        cell["cold_us"] = measure_cold(setup, swap, lambda: setup.advance(misses, shuffle))
    return cell


def measure_cold(setup: Setup, swap: Callable[[int], None], advance: Callable[[], None]) -> float:
    junk = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def flushed(group: int) -> None:
        junk.fill_(group)
        swap(group)

    both = statistics.median(timed(capture(flushed), advance))
    return both - statistics.median(timed(capture(junk.fill_)))


def check_bytes(setup: Setup) -> None:
    """Rows behind a sample of the last group's outputs are the host's."""
    state, layer = setup.state, GROUPS - 1
    rows = torch.randint(0, setup.topk.shape[0], (64,)).tolist()
    for row in rows:
        column = int(torch.randint(0, TOPK, (1,)))
        token, device_row = int(setup.topk[row, column]), int(setup.out[row, column])
        if int(state.slot_token[layer, device_row]) != token:
            raise SystemExit(f"row {row}, entry {column}: slot holds another token than {token}")
    for row in rows:
        count = int(setup.plans[layer].count[row])
        for i in range(min(count, 4)):
            page, offset = int(setup.plans[layer].host_page[row, i]), int(setup.plans[layer].host_offset[row, i])
            want = state.host_row_words[0][page, layer, offset]
            if not torch.equal(state.row_words[0][layer, int(setup.plans[layer].device_row[row, i])].cpu(), want):
                raise SystemExit(f"row {row}, copy {i}: bytes differ")


def null_us(setup: Setup) -> float:
    state = setup.state
    kernel = load("copy_rows", "null_kernel", defines(state), state.rows.device.index or 0)
    return statistics.median(timed(capture(lambda _: kernel.launch((1, 1), Plan(), stream_of(state), threads=32))))


def defines(state: DeviceState) -> Any:
    from kernels.cuda.launch import defines_of

    return defines_of(state)


def make_pool() -> torch.Tensor:
    """Random bytes in pinned memory, made on the GPU."""
    pool = torch.empty(HOST_BYTES, dtype=torch.uint8, pin_memory=True)
    part = 1 << 30
    for start in range(0, HOST_BYTES, part):
        pool[start : start + part].copy_(torch.randint(0, 256, (part,), dtype=torch.uint8, device="cuda"))
    return pool


def machine() -> dict[str, str]:
    properties = torch.cuda.get_device_properties(0)
    query = [
        "nvidia-smi",
        "--query-gpu=driver_version,pcie.link.gen.current,pcie.link.width.current",
        "--format=csv,noheader",
    ]
    return {
        "gpu": properties.name,
        "driver_pcie": subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "command": " ".join(["python", "-m", "benchmarks.swap_in", *sys.argv[1:]]),
    }


def peers(row_bytes: int, hot: int, batch: int, misses: int) -> dict[str, float]:
    known = PEERS.get((row_bytes, hot, batch))
    if known is None or misses not in MISSES:
        return {}
    sglang, prototype = known[MISSES.index(misses)]
    return {"sglang_us": sglang, "prototype_us": prototype, "target_us": prototype + max(0.1 * prototype, 1.0)}


def show(cell: dict[str, Any]) -> str:
    target = cell.get("target_us")
    verdict = "" if target is None else "ok" if cell["us"] <= target else f"over by {cell['us'] - target:.1f}"
    cold = f"  cold {cell['cold_us']:.1f}" if "cold_us" in cell else ""
    return (
        f"{cell['row_bytes']:5} B  H {cell['hot_slots']:5}  batch {cell['batch']:3} x{cell['blocks']:<2}"
        f"  m {cell['misses']:3}"
        f"  {cell['us']:7.2f} us [{cell['us_min']:.2f}-{cell['us_max']:.2f}]  copy {cell['copy_only_us']:7.2f}"
        f"  null {cell['null_us']:.2f}  floor {cell['floor_us']:6.1f}  {cell['gb_per_s']:5.1f} GB/s{cold}"
        f"  target {target or 0:6.1f} {verdict}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.swap_in")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/swap_in.json"))
    parser.add_argument("--budget-seconds", type=float, default=600)
    parser.add_argument("--ranks", type=int, default=None, help="blocks per request, instead of the launcher's choice")
    parser.add_argument("--batch", type=int, nargs="*", help="only these batch sizes")
    parser.add_argument("--extra", action="store_true", help="also the cells that have no peer figures")
    options = parser.parse_args()
    began = time.monotonic()
    done = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    result = {"machine": machine(), "rows": done}
    pool = make_pool()
    for row_bytes, hot, batch in (*PEERS, *(EXTRA if options.extra else ())):
        keys = [(cell["row_bytes"], cell["hot_slots"], cell["batch"], cell["misses"]) for cell in done]
        missing = [m for m in MISSES if (row_bytes, hot, batch, m) not in keys]
        if not missing or (options.batch and batch not in options.batch):
            continue
        if time.monotonic() - began > options.budget_seconds:
            print("out of budget; run again with the same --out for the other cells")
            break
        setup = build(pool, row_bytes, hot, batch)
        null = null_us(setup)
        for misses in missing:
            floor = batch * misses * row_bytes / LINK_GB_PER_S / 1000 + null
            blocks = options.ranks or blocks_per_request(
                batch, torch.cuda.get_device_properties(0).multi_processor_count, True
            )
            cell = {
                "row_bytes": row_bytes,
                "hot_slots": hot,
                "batch": batch,
                "misses": misses,
                "blocks": blocks,
                "null_us": null,
                "floor_us": floor,
                **measure(setup, misses, options.ranks, cold=batch == 1),
                **peers(row_bytes, hot, batch, misses),
            }
            print(show(cell), flush=True)
            done.append(cell)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(result, indent=1) + "\n")
        del setup
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
