"""swap_in against the link: `python -m benchmarks.swap_in [--out FILE]` on a machine with a CUDA device.

One cell is (row bytes, hot slots, batch, misses per request and step). A CUDA graph holds 16 launches: 16 steps of one
layer, so that its tables lie in L2. Top-k is 2048 tokens in random order out of a context of 65,536, another per
request; each step misses exactly `misses` of them (swap_in_setup.py). Times are medians of --replays replays in each
of --passes passes through all cells, since others may load a shared machine's link for seconds; per launch:

    us             swap_in, each launch after the one before has ended
    overlapped_us  swap_in, launches that may begin while the one before is at work (programmatic dependent launch):
                   15 of a graph's 16
    copy_only_us   as many copies, of fresh steps, by replay_misses: no lookup, no victims
    resolve_us     swap_in without_copies: lookup and victims alone
    null_us        an empty kernel
    floor_us       bytes at LINK_GB_PER_S, and a null launch
    cold_us        swap_in with a flushed L2 (the flush, timed by itself, subtracted)

Other launches than those of overlapped_us do not overlap. Now and then one lists a seat's next victims anew, which a
median of replays may hide: mean_us and overlapped_mean_us are means of the same replays. Steps run from a warm state:
the hot buffer is full and WARM_UP replays have gone ahead, so that no list is empty for being new. A replay's clock
starts behind a kernel that holds the GPU until the host has queued all of it.

How much host memory the rows of a step are scattered over decides the link's rate (NOTES.md), so that --pool-gib
belongs to a result; --large adds large_us and large_copy_only_us, of one pass over a larger pool, to the cells that
--out has already. Counters, plans, outputs and bytes are checked after us, overlapped_us and copy_only_us. A run
goes on where the one before it that wrote --out was out of budget: a cell that lacks passes keeps its replays there.
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
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.swap_in_cells import EXTRA, MISSES, OVERLAPPED, PEERS, peers, verdicts
from benchmarks.swap_in_setup import STEPS, Setup, build, check
from benchmarks.tables import micros
from kernels.cuda.jit import load
from kernels.cuda.launch import defines_of, stream_of
from kernels.cuda.structures import Plan
from kernels.cuda.swap_in import ranks_of, replay_misses, swap_in, without_copies
from kernels.state import DeviceState

KEY = ("row_bytes", "hot_slots", "batch", "misses")  # of a cell
REPLAYS = 13
PASSES = 3
WARM_UP = 3
HELD_CYCLES = 1_000_000  # half a millisecond, for the host to queue a replay in
LINK_GB_PER_S = 55.6  # PCIe 5 x16 as copies reach it; KERNEL figures use the same
FLUSH_BYTES = 192 << 20


def capture(work: Callable[[int], object]) -> torch.cuda.CUDAGraph:
    """One graph of STEPS launches."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in range(STEPS):
            work(step)
    return graph


def timed(graph: torch.cuda.CUDAGraph, replays: int, before: Callable[[], None] | None = None) -> list[float]:
    """us per launch of each replay."""
    times = []
    for turn in range(WARM_UP + replays):
        if before:
            before()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HELD_CYCLES)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        if turn >= WARM_UP:
            times.append(start.elapsed_time(stop) * 1000 / STEPS)
    return times


def measure(setup: Setup, misses: int, ranks: int | None, replays: int, flush_us: float) -> dict[str, list[float]]:
    """us per launch of each replay of one cell, by name. Raises SystemExit when swap_in did what it must not."""

    def swap(step: int, early: bool = False) -> None:
        state, batch = setup.steps[step]
        swap_in(state, 0, setup.topk[step], batch, setup.out[step], setup.plans[step], ranks=ranks, early=early)

    def stepped(work: Callable[[int], object]) -> list[float]:
        return timed(capture(work), replays, partial(setup.advance, misses))

    def checked(early: bool) -> list[float]:
        before = setup.counts()
        times = stepped(partial(swap, early=early))
        check(setup, before, misses, (WARM_UP + replays) * STEPS)
        return times

    times, overlapped = checked(early=False), checked(early=True)
    copies = copy_times(setup, misses, ranks, replays)
    junk = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def flush_and_swap(step: int) -> None:
        junk.fill_(step)
        swap(step)

    cold = [us - flush_us for us in stepped(flush_and_swap)]
    with without_copies():
        resolve = stepped(swap)
    null = null_times(setup.state, replays)
    return {"": times, OVERLAPPED: overlapped, "copy_only": copies, "cold": cold, "resolve": resolve, "null": null}


def copy_times(setup: Setup, misses: int, ranks: int | None, replays: int) -> list[float]:
    """us per launch of replay_misses, each replay with the plans of fresh steps: rows read again lie in some cache."""

    def fresh_plans() -> None:
        setup.advance(misses)
        with without_copies():
            for step, (state, batch) in enumerate(setup.steps):
                swap_in(state, 0, setup.topk[step], batch, setup.out[step], setup.plans[step], ranks=ranks)

    before = setup.counts()
    copying = capture(lambda step: replay_misses(setup.state, 0, setup.plans[step]))
    times = timed(copying, replays, fresh_plans)
    check(setup, before, misses, (WARM_UP + replays) * STEPS)
    return times


def figures(times: dict[str, list[float]], copied_bytes: int) -> dict[str, float]:
    """What is kept of a cell's replays."""
    kept = {}
    for way in ("", OVERLAPPED):
        here = times[way]
        kept[f"{way}us"], kept[f"{way}mean_us"] = statistics.median(here), statistics.mean(here)
        kept[f"{way}us_min"], kept[f"{way}us_max"] = min(here), max(here)
    kept |= {f"{name}_us": statistics.median(times[name]) for name in ("copy_only", "resolve", "cold", "null")}
    kept["floor_us"] = copied_bytes / LINK_GB_PER_S / 1000 + kept["null_us"]
    kept["gb_per_s"] = copied_bytes / kept["us"] / 1000
    return kept


def large_figures(times: dict[str, list[float]]) -> dict[str, float]:
    """What is kept of a cell's replays over a large pool."""
    return {f"large_{name}us": statistics.median(times[key]) for name, key in (("", ""), ("copy_only_", "copy_only"))}


def flush_time(replays: int) -> float:
    junk = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    return statistics.median(timed(capture(junk.fill_), replays))


def null_times(state: DeviceState, replays: int) -> list[float]:
    kernel = load("copy_rows", "null_kernel", defines_of(state), state.rows.device.index or 0)
    graph = capture(lambda _: kernel.launch((1, 1), Plan(), stream_of(state), threads=32))
    return timed(graph, replays)


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
        "driver_pcie": subprocess.run(query, capture_output=True, text=True, check=False).stdout.partition("\n")[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
    }


def show(cell: dict[str, Any]) -> str:
    alone, overlapped = (
        " mean ".join(filter(None, (it.cell(cell) for it in micros("", way)))) for way in ("", OVERLAPPED)
    )
    return (
        f"{cell['row_bytes']:5} B  H {cell['hot_slots']:5}  batch {cell['batch']:3} x{cell['blocks']:<2}"
        f"  m {cell['misses']:3}  {alone} us  overlapped {overlapped}"
        f"  copy {cell['copy_only_us']:7.2f}  resolve {cell['resolve_us']:5.2f}  cold {cell['cold_us']:7.2f}"
        f"  null {cell['null_us']:.2f}  floor {cell['floor_us']:6.1f}  {cell['gb_per_s']:5.1f} GB/s"
        f"  SGLang {cell.get('sglang_us', 0):6.1f}  target {cell.get('target_us', 0):6.1f} {verdicts(cell)}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.swap_in")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/swap_in.json"))
    parser.add_argument("--budget-seconds", type=float, default=600)
    parser.add_argument("--pool-gib", type=float, default=1, help="host memory that rows are scattered over")
    parser.add_argument("--large", action="store_true", help="add columns of this pool to the cells of --out")
    parser.add_argument("--ranks", type=int, default=None, help="blocks per request, instead of the launcher's choice")
    parser.add_argument(
        "--replays", type=int, default=REPLAYS, help=f"of each graph, after {WARM_UP} that do not count"
    )
    parser.add_argument("--passes", type=int, default=PASSES, help="through all cells")
    parser.add_argument("--batch", type=int, nargs="*", help="only these batch sizes")
    parser.add_argument("--row-bytes", type=int, nargs="*", help="only these row sizes")
    parser.add_argument("--hot", type=int, nargs="*", help="only these numbers of hot slots")
    parser.add_argument("--misses", type=int, nargs="*", help="only these numbers of misses")
    parser.add_argument("--extra", action="store_true", help="the cells that have no peer figures instead")
    options = parser.parse_args()
    for name in ("replays", "passes"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: at least 1")
    options.cells = select(options)
    if not options.cells:
        parser.error("no cell has these rows, slots, batches and misses")
    if options.large and not options.out.exists():
        parser.error("--large: --out has no result to add to")
    return options


def select(options: argparse.Namespace) -> dict[tuple[int, int, int], tuple[int, ...]]:
    """Misses to measure by (row bytes, hot slots, batch)."""
    only = options.row_bytes, options.hot, options.batch
    misses = tuple(m for m in MISSES if not options.misses or m in options.misses)
    groups = EXTRA if options.extra else PEERS
    fit = [key for key in groups if all(not some or of in some for of, some in zip(key, only, strict=True))]
    return dict.fromkeys(fit, misses) if misses else {}


def passes_of(cell: dict[str, Any], passes: int) -> int:
    """How many of `passes` a cell of an earlier run has, or passes can be added to: none of one without its replays."""
    held = int(cell.get("passes", 0))
    return held if held >= passes or "replays_us" in cell else 0


def with_pass(cell: dict[str, Any], times: dict[str, list[float]], passes: int) -> dict[str, Any]:
    """`cell` after one more pass, whose replays are `times`. They are kept in it until it has `passes` of them."""
    replays = {name: [*cell.get("replays_us", {}).get(name, ()), *more] for name, more in times.items()}
    key = tuple(cell[name] for name in KEY)
    row_bytes, _, batch, misses = key
    after = {
        **{name: of for name, of in cell.items() if name != "replays_us"},
        "passes": passes_of(cell, passes) + 1,
        **figures(replays, batch * misses * row_bytes),
        **peers(*key),
    }
    return after if after["passes"] >= passes else {**after, "replays_us": replays}


def measure_large(options: argparse.Namespace) -> None:
    """Add columns of a large pool to cells of --out that lack them. Other cells, and its own machine, stay."""
    began, result = time.monotonic(), json.loads(options.out.read_text())
    cells = {tuple(cell[name] for name in KEY): cell for cell in result["rows"]}
    pool = make_pool(int(options.pool_gib * (1 << 30)))
    result["large"] = {"machine": machine(), "pool_gib": options.pool_gib}
    for (row_bytes, hot, batch), wanted in options.cells.items():
        found = (cells.get((row_bytes, hot, batch, misses)) for misses in wanted)
        missing = [cell for cell in found if cell is not None and "large_us" not in cell]
        if not missing:
            continue
        if time.monotonic() - began > options.budget_seconds:
            print("out of budget; run again with the same --out for the other cells")
            return
        setup = build(pool, row_bytes, hot, batch)
        for cell in missing:
            times = measure(setup, cell["misses"], options.ranks, options.replays, flush_us=0)
            cell.update(large_figures(times))
            print(f"{show(cell)}  large pool {cell['large_us']:.2f}, copy {cell['large_copy_only_us']:.2f}", flush=True)
            options.out.write_text(json.dumps(result, indent=1) + "\n")
        del setup
        torch.cuda.empty_cache()


def main() -> None:
    options = arguments()
    if options.large:
        measure_large(options)
        return
    began = time.monotonic()
    before = json.loads(options.out.read_text()) if options.out.exists() else {"rows": []}
    cells = {tuple(cell[name] for name in KEY): cell for cell in before["rows"]}
    large = {"large": before["large"]} if "large" in before else {}
    pool = make_pool(int(options.pool_gib * (1 << 30)))
    flush_us = flush_time(options.replays)
    for turn, ((row_bytes, hot, batch), wanted) in product(range(options.passes), options.cells.items()):
        keys = [(row_bytes, hot, batch, misses) for misses in wanted]
        missing = [key for key in keys if passes_of(cells.get(key, {}), options.passes) <= turn]
        if not missing:
            continue
        if time.monotonic() - began > options.budget_seconds:
            print("out of budget; run again with the same --out for the other cells")
            break
        setup = build(pool, row_bytes, hot, batch)
        for key in missing:
            blocks = options.ranks or ranks_of(setup.state, batch, setup.topk.shape[2])
            cell = {**cells.get(key, {}), **dict(zip(KEY, key, strict=True)), "blocks": blocks}
            times = measure(setup, key[-1], options.ranks, options.replays, flush_us)
            cells[key] = with_pass(cell, times, options.passes)
            print(show(cells[key]), flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            about = {"machine": machine(), "pool_gib": options.pool_gib, **large}
            result = about | {"rows": list(cells.values())}
            options.out.write_text(json.dumps(result, indent=1) + "\n")
        del setup
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
