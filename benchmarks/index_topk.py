"""index_topk against memory and tensor cores: `python -m benchmarks.index_topk [--out FILE]` on a CUDA device.

One cell is (key format, context, batch) at DeepSeek-V3.2's indexer: 64 heads of 128, top-k 2048, bfloat16 queries,
random values. A CUDA graph holds one launch per index group, each group with keys of its own, together well beyond
L2, as in one decode step; index pages are scattered. Medians of REPLAYS replays, per launch:

    us            index_topk
    scores_us     its first kernel alone
    select_us     the difference
    memory_us     bytes of the keys at this card's copy rate, measured in the same run
    mma_us        2 * 64 * 128 operations per key at the rate of an 8192-cubed bfloat16 product, likewise
    torch_us      torch on keys that are already gathered, in one piece: bmm, relu, weights, sum over heads, topk, sort
    torch_topk_us topk and sort alone

The floor is the larger of memory_us and mma_us. After each cell one row's selection is compared with an exact one of
the kernel's own scores. Cells already in --out are kept; a plot of all cells is written beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.plots import Row, Series, marks
from benchmarks.swap_in import machine
from kernels.cuda.index_topk import index_topk as launch
from kernels.cuda.index_topk import scratch_bytes, scratch_of
from kernels.index_topk import index_key_format, index_topk, prepare_index
from kernels.layout import Geometry
from kernels.reference.index_topk import top_positions
from kernels.row_bytes import FP4_KEY_GROUP
from kernels.row_format import RowFormat
from kernels.state import DeviceState, StepBatch
from protocol.units import PAGE_TOKENS

HEADS, DIM, TOPK, SCALE = 64, 128, 2048, 128**-0.5
KINDS = ("bfloat16", "fp8", "fp4")
CONTEXTS = (8192, 32_768, 131_072)
BATCHES = (1, 4, 16, 64)
KEY_BYTES_LEAST, KEY_BYTES_MOST = 256 << 20, 8 << 30  # of all groups
GROUPS_MOST = 16
REPLAYS = 13
WARM_UP = 3
TORCH_BYTES_MOST = 32 << 30  # of per-head scores


class Cell:
    """A state, and the inputs of one step of every group."""

    def __init__(self, kind: str, context: int, batch: int) -> None:
        self.form = RowFormat(kind, DIM, 0, FP4_KEY_GROUP if kind == "fp4" else DIM)
        self.context, self.rows = context, batch
        size = batch * context * self.form.row_bytes
        self.groups = max(2, min(GROUPS_MOST, -(-KEY_BYTES_LEAST // size), KEY_BYTES_MOST // size))
        geometry = Geometry(self.groups, 8, tuple(range(self.groups)), self.form.row_bytes, TOPK)
        pages = context // PAGE_TOKENS
        self.state = DeviceState.allocate(
            geometry,
            seats=batch,
            chunks=1,
            index_pages=batch * pages,
            max_pages=pages,
            max_chunks=1,
            slab_pages=1,
            tail_slots=1,
            host=torch.zeros(1, geometry.page_bytes, dtype=torch.uint8),
            device="cuda",
        )
        self.state.hot_slots.zero_()
        self.state.index_table.copy_(torch.randperm(batch * pages, device="cuda").view(batch, pages))
        for group in range(self.groups):
            for start in range(0, batch * context, 1 << 20):
                part = self.state.index_keys[group, start : start + (1 << 20)]
                part.copy_(self.form.encode(torch.randn(len(part), DIM, device="cuda")))
        self.batch = StepBatch.allocate(batch, self.groups, "cuda")
        self.batch.seats.copy_(torch.arange(batch))
        self.batch.lengths.fill_(context)
        self.batch.num_real.fill_(batch)
        self.queries = torch.randn(batch, HEADS, DIM, device="cuda").bfloat16()
        self.weights = torch.rand(batch, HEADS, device="cuda")
        self.out = torch.empty(batch, TOPK, dtype=torch.int32, device="cuda")
        prepare_index(self.state, HEADS, DIM, torch.bfloat16)

    def whole(self, group: int) -> None:
        index_topk(self.state, group, self.queries, self.weights, self.batch, SCALE, self.out)

    def scores(self, group: int) -> None:
        keys = index_key_format(self.state, DIM, torch.bfloat16)
        launch(self.state, group, self.queries, self.weights, self.batch, keys, SCALE, self.out, only_scores=True)

    def gathered(self) -> torch.Tensor:
        """bfloat16[B, n, D]: the last group's keys, row after row."""
        keys = self.state.index_keys[-1].view(-1, PAGE_TOKENS, self.form.row_bytes)
        parts = [keys.index_select(0, table).flatten(0, 1) for table in self.state.index_table]
        return torch.stack([self.form.decode(part, torch.bfloat16) for part in parts])

    def check(self) -> None:
        self.whole(self.groups - 1)
        row = self.rows - 1
        scores = scratch_of(self.state).scores[row * self.context :][: self.context]
        if not torch.equal(top_positions(scores, TOPK).int(), self.out[row]):
            raise SystemExit(f"row {row}: not the top-k of its scores")


def torch_times(cell: Cell) -> dict[str, float]:
    """The same selection by torch. Every head's scores take 2 bytes each."""
    if cell.rows * HEADS * cell.context * 2 > TORCH_BYTES_MOST or cell.form.kind != "bfloat16":
        return {}
    keys = cell.gathered()
    weights = (cell.weights * SCALE).bfloat16().unsqueeze(1)

    def scores() -> torch.Tensor:
        return torch.bmm(weights, torch.bmm(cell.queries, keys.transpose(1, 2)).relu_()).squeeze(1).float()

    held = scores()

    def select(found: torch.Tensor) -> None:
        found.topk(TOPK).indices.sort()

    return {
        "torch_us": statistics.median(timed(lambda: select(scores()), 1)),
        "torch_topk_us": statistics.median(timed(lambda: select(held), 1)),
    }


def measure(cell: Cell, copy_bytes_per_us: float, operations_per_us: float) -> dict[str, Any]:
    times = timed(capture(cell.whole, cell.groups).replay, cell.groups)
    scores = statistics.median(timed(capture(cell.scores, cell.groups).replay, cell.groups))
    scratch_of(cell.state).histogram.zero_()  # which the second kernel would have emptied
    cell.check()
    keys = cell.rows * cell.context
    memory = keys * cell.form.row_bytes / copy_bytes_per_us
    mma = keys * 2 * HEADS * DIM / operations_per_us
    us = statistics.median(times)
    return {
        "us": us,
        "us_min": min(times),
        "us_max": max(times),
        "scores_us": scores,
        "select_us": us - scores,
        "memory_us": memory,
        "mma_us": mma,
        "scores_share_of_floor": max(memory, mma) / scores,
        "groups": cell.groups,
        "scratch_bytes": scratch_bytes(cell.state.index_keys.shape[1], cell.rows),
        **torch_times(cell),
    }


def capture(work: Callable[[int], None], groups: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for group in range(groups):
            work(group)
    return graph


def timed(work: Callable[[], object], parts: int) -> list[float]:
    """us of each of `parts` launches in `work`, replay by replay."""
    times = []
    for turn in range(WARM_UP + REPLAYS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        if turn >= WARM_UP:
            times.append(start.elapsed_time(stop) * 1000 / parts)
    return times


def copy_bytes_per_us() -> float:
    """Bytes read and written by a device-to-device copy."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * len(source) / statistics.median(timed(lambda: target.copy_(source), 1))


def operations_per_us() -> float:
    left, right = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return 2 * 8192**3 / statistics.median(timed(lambda: torch.mm(left, right), 1))


def show(cell: dict[str, Any]) -> str:
    peers = f"  torch {cell['torch_us']:8.1f} (topk {cell['torch_topk_us']:.1f})" if "torch_us" in cell else ""
    return (
        f"{cell['kind']:8}  context {cell['context']:7}  batch {cell['batch']:3}  {cell['us']:8.2f} us "
        f"[{cell['us_min']:.2f}-{cell['us_max']:.2f}]  scores {cell['scores_us']:8.2f}  "
        f"select {cell['select_us']:6.2f}  memory {cell['memory_us']:7.2f}  mma {cell['mma_us']:7.2f}  "
        f"share {100 * cell['scores_share_of_floor']:.0f}%{peers}"
    )


def plot(rows: list[dict[str, Any]]) -> str:
    """An SVG of the cells."""
    series = {
        "us": Series("index_topk", "#c0392b", "dot"),
        "scores_us": Series("its scores", "#c0392b", "ring"),
        "memory_us": Series("keys at copy rate", "#2c3e50", "tick"),
        "torch_us": Series("torch, keys gathered", "#2980b9", "cross"),
    }
    cells = [
        Row(
            f"{row['kind']} {row['context']} x {row['batch']}",
            {one.name: row[key] for key, one in series.items() if key in row},
        )
        for row in rows
    ]
    return marks("index_topk, 64 heads of 128, top-k 2048: keys, context x batch", "us", list(series.values()), cells)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.index_topk")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/index_topk.json"))
    parser.add_argument("--budget-seconds", type=float, default=600)
    parser.add_argument("--kind", nargs="*", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    began = time.monotonic()
    done = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    rates = copy_bytes_per_us(), operations_per_us()
    command = " ".join(["python", "-m", "benchmarks.index_topk", *sys.argv[1:]])
    machine_line = {
        **machine(),
        "command": command,
        "copy_gb_per_s": rates[0] / 1000,
        "mma_tflop_per_s": rates[1] / 1e6,
    }
    result = {"machine": machine_line, "rows": done}
    print(f"copy {rates[0] / 1000:.0f} GB/s, bfloat16 product {rates[1] / 1e6:.0f} TFLOP/s")
    held = [(row["kind"], row["context"], row["batch"]) for row in done]
    for kind, context, batch in ((k, c, b) for k in options.kind for c in CONTEXTS for b in BATCHES):
        if (kind, context, batch) in held:
            continue
        if time.monotonic() - began > options.budget_seconds:
            print("out of budget; run again with the same --out for the other cells")
            break
        cell = Cell(kind, context, batch)
        row = {"kind": kind, "context": context, "batch": batch, **measure(cell, *rates)}
        print(show(row), flush=True)
        done.append(row)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        options.out.with_suffix(".svg").write_text(plot(done))
        del cell
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
