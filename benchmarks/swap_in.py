"""swap_in against the link: `python -m benchmarks.swap_in [--out FILE]` on a machine with a CUDA device.

One cell is (row bytes, hot slots, batch, misses per request and step). A CUDA graph holds 16 launches: 16 steps of one
layer, so that its tables lie in L2. Top-k is 2048 tokens in random order out of a context of 65,536, another per
request; a window over a random permutation moves by `misses` tokens per step, so that each step misses exactly that
many. Times are medians of REPLAYS replays, per launch:

    us            swap_in
    copy_only_us  the same copies by replay_misses: no lookup, no victims
    resolve_us    swap_in without_copies: lookup and victims alone
    null_us       an empty kernel
    floor_us      bytes at LINK_GB_PER_S, and a null launch
    cold_us       swap_in with a flushed L2 (the flush, timed by itself, subtracted)

Requests share host pages once the pool is full. How much host memory the rows of a step are scattered over decides the
link's rate (RESULTS.md), so that --pool-gib belongs to a result. Counters are compared after each cell, and the bytes
behind a sample of outputs. Cells already in --out are kept.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kernels.cuda.jit import load
from kernels.cuda.launch import defines_of, prepare, stream_of
from kernels.cuda.parameters import Plan
from kernels.cuda.swap_in import ranks_of, replay_misses, swap_in, without_copies
from kernels.layout import PAGE_TOKENS, Geometry, managed_chunks
from kernels.seat import init_managed
from kernels.state import DeviceState, MissPlan, StepBatch

STEPS = 16
TOPK = 2048
CONTEXT = 65_536
TAIL_SLOTS = 4
REPLAYS = 13
WARM_UP = 3
LINK_GB_PER_S = 55.6  # PCIe 5 x16 as copies reach it; KERNEL figures use the same
FLUSH_BYTES = 192 << 20

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
EXTRA = ((640, 4096, 16), (584, 4096, 16), (656, 16384, 16), (656, 32768, 16), (656, 32768, 1), (656, 4096, 256))


@dataclass
class Setup:
    """One layer's state as each of the steps of a graph sees it, and their inputs."""

    state: DeviceState
    steps: list[DeviceState]  # views of `state`, each with a clock of its own
    batch: StepBatch
    window: torch.Tensor  # int32[B, CONTEXT]: the permutation that the top-k moves over
    topk: torch.Tensor  # int32[STEPS, B, TOPK]
    out: torch.Tensor  # likewise
    plans: list[MissPlan]
    place: int
    step: int = 0

    def advance(self, misses: int) -> None:
        """The next steps' top-k: `misses` fresh tokens each, random order."""
        for step, state in enumerate(self.steps):
            self.place += misses
            self.step += 1
            state.now.fill_(self.step)
            shuffle = torch.randperm(TOPK, device="cuda")
            self.topk[step].copy_(self.window[:, (self.place + shuffle) % CONTEXT])


def build(pool: torch.Tensor, row_bytes: int, hot: int, batch: int) -> Setup:
    geometry = Geometry(1, row_bytes, (0,), 4, TOPK)
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
    for table in (state.index_table, state.chunk_table):
        table.copy_(torch.randperm(table.numel()).view(table.shape))
    held_pages = state.host_table.numel()
    shared = torch.cat([torch.randperm(pages) for _ in range(-(-held_pages // pages))])[:held_pages]
    state.host_table.copy_(shared.view(state.host_table.shape))
    for seat in range(batch):
        init_managed(state, seat, hot, 0, hot)
    inputs = StepBatch.allocate(batch, 1, "cuda")
    inputs.seats.copy_(torch.randperm(batch))
    inputs.lengths.fill_(CONTEXT)
    inputs.num_real.fill_(batch)
    held = torch.rand(batch, hot, device="cuda").argsort(1)
    fresh = torch.rand(batch, CONTEXT - hot, device="cuda").argsort(1) + hot
    topk = torch.zeros(STEPS, batch, TOPK, dtype=torch.int32, device="cuda")
    return Setup(
        state,
        [replace(state, now=torch.zeros_like(state.now)) for _ in range(STEPS)],
        inputs,
        torch.cat([held, fresh], 1).int(),
        topk,
        torch.empty_like(topk),
        [MissPlan.allocate(batch, TOPK, "cuda") for _ in range(STEPS)],
        place=hot - TOPK,
    )


def capture(work: Callable[[int], object]) -> torch.cuda.CUDAGraph:
    """One graph of STEPS launches."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in range(STEPS):
            work(step)
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
            times.append(start.elapsed_time(stop) * 1000 / STEPS)
    return times


def measure(setup: Setup, misses: int, ranks: int | None, flush_us: float) -> dict[str, Any]:
    state, rows = setup.state, setup.topk.shape[1]

    def swap(step: int) -> None:
        swap_in(setup.steps[step], 0, setup.topk[step], setup.batch, setup.out[step], setup.plans[step], ranks=ranks)

    before = int(state.misses.sum()), int(state.hits.sum())
    times = timed(capture(swap), lambda: setup.advance(misses))
    launches = (WARM_UP + REPLAYS) * STEPS * rows
    counted = int(state.misses.sum()) - before[0], int(state.hits.sum()) - before[1]
    if counted != (launches * misses, launches * (TOPK - misses)) or int(state.tripwires.sum()):
        raise SystemExit(f"counted misses, hits {counted}, expected {launches * misses}, {launches * (TOPK - misses)}")
    check_bytes(setup)
    copies = timed(capture(lambda step: replay_misses(state, 0, setup.plans[step])))
    junk = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def flush_and_swap(step: int) -> None:
        junk.fill_(step)
        swap(step)

    cold = timed(capture(flush_and_swap), lambda: setup.advance(misses))
    with without_copies():
        resolve = timed(capture(swap), lambda: setup.advance(misses))
    return {
        "us": statistics.median(times),
        "us_min": min(times),
        "us_max": max(times),
        "copy_only_us": statistics.median(copies),
        "resolve_us": statistics.median(resolve),
        "cold_us": statistics.median(cold) - flush_us,
        "gb_per_s": rows * misses * state.geometry.row_bytes / statistics.median(times) / 1000,
    }


def flush_time() -> float:
    junk = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    return statistics.median(timed(capture(junk.fill_)))


def check_bytes(setup: Setup) -> None:
    """Every output of the last step names its token's row, and the rows it loaded are the host's."""
    state, plan = setup.state, setup.plans[-1]
    held = state.slot_token[0][setup.out[-1].long()]
    if not torch.equal(held, setup.topk[-1]):
        raise SystemExit(f"{int((held != setup.topk[-1]).sum())} outputs name a row that holds another token")
    for row in torch.randint(0, setup.topk.shape[1], (64,)).tolist():
        for i in range(min(int(plan.count[row]), 4)):
            page, offset = int(plan.host_page[row, i]), int(plan.host_offset[row, i])
            want = state.host_row_words[0][page, 0, offset]
            if not torch.equal(state.row_words[0][0, int(plan.device_row[row, i])].cpu(), want):
                raise SystemExit(f"row {row}, copy {i}: bytes differ")


def null_us(state: DeviceState) -> float:
    kernel = load("copy_rows", "null_kernel", defines_of(state), state.rows.device.index or 0)
    return statistics.median(timed(capture(lambda _: kernel.launch((1, 1), Plan(), stream_of(state), threads=32))))


def make_pool(size: int) -> torch.Tensor:
    """Random bytes in pinned memory, made on the GPU."""
    pool = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    part = 1 << 30
    for start in range(0, size, part):
        here = pool[start : start + part]
        here.copy_(torch.randint(0, 256, here.shape, dtype=torch.uint8, device="cuda"))
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


def verdict(cell: dict[str, Any]) -> str:
    """met, over (the target), or slower (than SGLang); empty without figures to compare with."""
    if "target_us" not in cell:
        return ""
    if cell["us"] > cell["sglang_us"]:
        return "slower"
    return "met" if cell["us"] <= cell["target_us"] else "over"


def show(cell: dict[str, Any]) -> str:
    return (
        f"{cell['row_bytes']:5} B  H {cell['hot_slots']:5}  batch {cell['batch']:3} x{cell['blocks']:<2}"
        f"  m {cell['misses']:3}"
        f"  {cell['us']:7.2f} us [{cell['us_min']:.2f}-{cell['us_max']:.2f}]  copy {cell['copy_only_us']:7.2f}"
        f"  resolve {cell['resolve_us']:5.2f}  cold {cell['cold_us']:7.2f}  null {cell['null_us']:.2f}"
        f"  floor {cell['floor_us']:6.1f}  {cell['gb_per_s']:5.1f} GB/s"
        f"  SGLang {cell.get('sglang_us', 0):6.1f}  target {cell.get('target_us', 0):6.1f} {verdict(cell)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.swap_in")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/swap_in.json"))
    parser.add_argument("--budget-seconds", type=float, default=600)
    parser.add_argument("--pool-gib", type=float, default=1, help="host memory that rows are scattered over")
    parser.add_argument("--ranks", type=int, default=None, help="blocks per request, instead of the launcher's choice")
    parser.add_argument("--batch", type=int, nargs="*", help="only these batch sizes")
    parser.add_argument("--row-bytes", type=int, nargs="*", help="only these row sizes")
    parser.add_argument("--extra", action="store_true", help="the cells that have no peer figures instead")
    options = parser.parse_args()
    began = time.monotonic()
    done = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    result = {"machine": machine(), "pool_gib": options.pool_gib, "rows": done}
    pool = make_pool(int(options.pool_gib * (1 << 30)))
    flush_us = flush_time()
    for row_bytes, hot, batch in EXTRA if options.extra else PEERS:
        keys = [(cell["row_bytes"], cell["hot_slots"], cell["batch"], cell["misses"]) for cell in done]
        missing = [m for m in MISSES if (row_bytes, hot, batch, m) not in keys]
        left_out = (options.batch and batch not in options.batch) or (
            options.row_bytes and row_bytes not in options.row_bytes
        )
        if not missing or left_out:
            continue
        if time.monotonic() - began > options.budget_seconds:
            print("out of budget; run again with the same --out for the other cells")
            break
        setup = build(pool, row_bytes, hot, batch)
        null = null_us(setup.state)
        for misses in missing:
            cell = {
                "row_bytes": row_bytes,
                "hot_slots": hot,
                "batch": batch,
                "misses": misses,
                "blocks": options.ranks or ranks_of(setup.state, batch, TOPK),
                "null_us": null,
                "floor_us": batch * misses * row_bytes / LINK_GB_PER_S / 1000 + null,
                **measure(setup, misses, options.ranks, flush_us),
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
