"""What 1 + n rows of a seat cost against one: `python -m benchmarks.draft_rows [--out FILE]` on a CUDA device.

One cell is (batch, rows of a seat R). Kernels at DeepSeek-V3.2's sizes, fp8 rows and keys, contexts of CONTEXT tokens,
hot buffers of HOT_SLOTS. The rows of a seat select the same tokens but for FRESH of each, which miss: a draft's
selection overlaps the one before. A CUDA graph holds one launch of a kernel for each layer. Medians of REPLAYS replays,
us per layer (begin_step: per step):

    begin_us    begin_step, one launch to a graph
    index_us    index_topk
    hits_us     swap_in, every row's selection hot
    swap_us     swap_in, FRESH misses a row
    attend_us   attend_rows

Beside each, `x1` is the factor to R = 1 of the same batch. A cell is written when it is there. Kernels behind the
indexer read device tables that the host has set: nothing is checked here but that rows fit and nothing trips (tests/gpu
compares every byte).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.index_topk import capture
from benchmarks.swap_in import machine
from kernels.attention import attend_rows, prepare_attention
from kernels.begin_step import begin_step
from kernels.cuda.launch import prepare
from kernels.index_topk import index_topk, prepare_index
from kernels.layout import Geometry
from kernels.row_format import index_key_format, kv_row_format
from kernels.seat import init_managed
from kernels.state import BackupPlan, DeviceState, MissPlan, StepBatch
from kernels.swap_in import swap_in
from protocol.units import PAGE_TOKENS, managed_chunks

HEADS, LATENT, ROPE, INDEX_HEADS, DIM, TOPK = 128, 512, 64, 64, 128, 2048
CONTEXT, HOT_SLOTS, TAIL_SLOTS, FRESH = 32_768, 8192, 16, 20
LAYERS = 8
BATCHES = (1, 4, 16, 64)
SEAT_ROWS = (1, 2, 3, 5)
WARM_UP, REPLAYS = 3, 13
KERNELS = ("begin", "index", "hits", "swap", "attend")
SCALE, SCALING = DIM**-0.5, 192**-0.5


class Cell:
    """A state whose requests hold tokens 0..HOT_SLOTS-1 of CONTEXT, and the inputs of a step of every layer."""

    def __init__(self, batch: int, seat_rows: int) -> None:
        kv, keys = kv_row_format("fp8", LATENT, ROPE), index_key_format("fp8", DIM)
        geometry = Geometry(LAYERS, kv.row_bytes, tuple(range(LAYERS)), keys.row_bytes, TOPK)
        pages, chunks, self.rows = CONTEXT // PAGE_TOKENS + 1, managed_chunks(HOT_SLOTS), batch * seat_rows
        host = torch.zeros(4096, geometry.page_bytes, dtype=torch.uint8, pin_memory=True)
        self.state = state = DeviceState.allocate(
            geometry,
            seats=batch,
            chunks=batch * chunks,
            index_pages=batch * pages,
            max_pages=pages,
            max_chunks=chunks,
            max_slab_pages=1,
            tail_slots=TAIL_SLOTS,
            host=host,
            device="cuda",
            seat_rows=seat_rows,
        )
        prepare(state)
        prepare_index(state, INDEX_HEADS, DIM, torch.bfloat16)
        prepare_attention(state, HEADS, LATENT, ROPE, torch.bfloat16)
        for table in (state.index_table, state.chunk_table):
            table.copy_(torch.randperm(table.numel()).view(table.shape))
        state.host_table.copy_(torch.randint(0, len(host), state.host_table.shape))
        for group in range(LAYERS):
            for start in range(0, state.index_keys.shape[1], 1 << 20):
                part = state.index_keys[group, start : start + (1 << 20)]
                part.copy_(keys.encode(torch.randn(len(part), DIM, device="cuda")))
        for seat in range(batch):
            init_managed(state, seat, HOT_SLOTS, 0, HOT_SLOTS)
        self.batch = StepBatch.allocate(self.rows, LAYERS, "cuda", seat_rows=seat_rows)
        self.plan = BackupPlan.allocate(self.rows, LAYERS, "cuda")
        self.batch.num_real.fill_(batch)
        self.inputs = torch.arange(batch, dtype=torch.int32, device="cuda")
        self.queries = torch.randn(self.rows, INDEX_HEADS, DIM, device="cuda").bfloat16()
        self.weights = torch.rand(self.rows, INDEX_HEADS, device="cuda")
        self.topk = torch.zeros(LAYERS, self.rows, TOPK, dtype=torch.int32, device="cuda")
        self.out = torch.zeros_like(self.topk)
        self.misses = MissPlan.allocate(self.rows, TOPK, "cuda")
        self.heads = torch.randn(self.rows, HEADS, LATENT + ROPE, device="cuda").bfloat16()
        self.attended = torch.empty(self.rows, HEADS, LATENT, dtype=torch.bfloat16, device="cuda")
        self.place, self.length = 0, CONTEXT - 1024

    def advance(self, fresh: int) -> None:
        """A new step, whose rows select the last tokens of the hot part, and `fresh` tokens each that are not hot."""
        self.next_rows()
        begin_step(self.state, self.batch, self.plan)
        hot = torch.arange(HOT_SLOTS - TOPK, HOT_SLOTS, dtype=torch.int32, device="cuda")
        self.topk.copy_(hot.expand_as(self.topk))
        room = CONTEXT - HOT_SLOTS - 2048
        for rows in self.batch.depths() if fresh else ():
            tokens = HOT_SLOTS + (self.place + torch.arange(fresh, device="cuda")) % room
            self.topk[:, rows, :fresh] = tokens.int()
            self.place += fresh

    def next_rows(self) -> None:
        """The inputs of a begin_step whose rows follow those of the last one, all of them accepted."""
        self.length += self.batch.seat_rows
        self.batch.seats[: len(self.inputs)] = self.inputs
        self.batch.lengths[: len(self.inputs)] = self.length

    def begin(self, _: int) -> None:
        begin_step(self.state, self.batch, self.plan)

    def index(self, layer: int) -> None:
        index_topk(self.state, layer, self.queries, self.weights, self.batch, SCALE, self.out[layer])

    def swap(self, layer: int) -> None:
        swap_in(self.state, layer, self.topk[layer], self.batch, self.out[layer], self.misses)

    def attend(self, layer: int) -> None:
        attend_rows(self.state, layer, self.heads, self.out[layer], SCALING, self.attended)


def timed(launch: Callable[[int], None], launches: int, before: Callable[[], None]) -> float:
    """Median us of each of `launches` in a graph, which is replayed behind `before`."""
    before()
    launch(0)
    graph, times = capture(launch, launches), list[float]()
    for replay in range(WARM_UP + REPLAYS):
        before()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times += [start.elapsed_time(stop) * 1000 / launches] * (replay >= WARM_UP)
    return statistics.median(times)


def measure(cell: Cell) -> dict[str, float]:
    """Medians of each kernel. Raises SystemExit when a row does not fit, or anything trips."""
    times = {
        "begin_us": timed(cell.begin, 1, cell.next_rows),
        "hits_us": timed(cell.swap, LAYERS, partial(cell.advance, 0)),
        "swap_us": timed(cell.swap, LAYERS, partial(cell.advance, FRESH)),
        "attend_us": timed(cell.attend, LAYERS, partial(cell.advance, 0)),
        "index_us": timed(cell.index, LAYERS, partial(cell.advance, 0)),
    }
    if cell.batch.rejected[: cell.rows].any() or cell.state.tripwires.any():
        raise SystemExit(f"rejected {cell.batch.rejected.tolist()}, tripwires {cell.state.tripwires.tolist()}")
    return times


def show(row: dict[str, Any]) -> str:
    figures = "  ".join(f"{name} {row[f'{name}_us']:7.1f} us x{row[f'{name}_x1']:.2f}" for name in KERNELS)
    return f"batch {row['batch']:3}  rows {row['seat_rows']}  {figures}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draft_rows")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/draft-rows.json"))
    parser.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    parser.add_argument("--seat-rows", type=int, nargs="*", default=list(SEAT_ROWS), help="the first is compared with")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for batch in options.batches:
        one: dict[str, float] = {}
        for seat_rows in options.seat_rows:
            times = measure(Cell(batch, seat_rows))
            one = one or times
            factors = {f"{name}_x1": times[f"{name}_us"] / one[f"{name}_us"] for name in KERNELS}
            rows.append({"batch": batch, "seat_rows": seat_rows, **times, **factors})
            print(show(rows[-1]), flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
