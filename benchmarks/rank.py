"""One rank of a group at the size of the model: `python -m benchmarks.rank --of 8 [--out FILE]` on an H200.

DeepSeek-V3.2 as published, 61 layers, in block-FP8 with random weights made on the device: everything that ranks
replicate, and the routed experts of one rank of `--of`. The real executor with its streams, fences and graphs; requests
are admitted as resumed ones over encoded random rows (benchmarks/decode.py).

The other ranks are synthesised (`SynthesisedRanks`): each round their rows and choices, random and balanced, are copied
into the gathered buffer, so that each expert sees the load of all ranks, and partial sums are copied as they would
arrive. What the links between GPUs add is computed by `Links` and added to each step (`link_ms`); the copies within the
device are measured.

    resident   every row on the device, the most requests that fit, and half of them
    hisparse   hot buffers of --hot-slots, within the same memory: what the weights leave

A cell's `floor_ms` is the sum over the parts of a step of the larger of bytes / copy rate and operations / bfloat16
rate, both measured in the same run, plus the bytes of missed rows / the rate of one large copy from host memory.
Requests share host pages where the pool has fewer than they need (`distinct_gib` are touched, `wanted_gib` would be).
Cells already in --out are kept; what is missing when --budget-seconds are over is left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks import decode
from benchmarks.decode import Cell, bytes_of, make_pool, run
from benchmarks.index_topk import copy_bytes_per_us, operations_per_us
from benchmarks.rank_floor import BF16_BYTES, Links, floor_ms, parts_of
from benchmarks.swap_in import machine
from kernels.block_fp8 import quantize_rows
from kernels.expert_choice import state_bytes
from protocol.config_checks import KV_DTYPES, MATMULS, WEIGHT_ONLY
from worker.runners import transformers_dsa
from worker.runners.synthetic import synthetic_matmul, synthetic_runner
from worker.runners.transformers_dsa import TransformersRunner
from worker.weights.layout import exchanged_row_bytes
from worker.weights.synth import published_config

FAMILY: Final = "deepseek-v3.2"
CONTEXTS: Final = (32_768, 131_072)
BATCHES: Final = (1, 16, 64)
MODES: Final = ("hisparse", "resident")
#: 1 less the hit rates that are reported: fresh entries of each step's top-k.
OVERLAPS: Final = (0.99, 0.93, 0.87)
#: Device memory that graphs, selections and scratch memory of a step take.
RESERVED_BYTES: Final = 9 << 30
ROWS_MOST: Final = 256
#: Timed of each cell.
STEPS: Final = 60
DMA_BYTES: Final = 1 << 30


@dataclass
class SynthesisedRanks:
    """Collectives of rank 0 of `size`, with random rows in the place of what other ranks send. `others` uint8[n, row].

    A piece of `others` is read from another place in each call, so that layers differ; a captured graph keeps it.
    """

    size: int
    others: Tensor
    rank: int = 0
    at: int = 0

    @classmethod
    def draw(cls, config: Any, size: int, rows_max: int, device: str, *, quantized: bool = False) -> SynthesisedRanks:
        """Rows of hidden states of variance 1, each with distinct experts chosen at random. `quantized`: as e4m3."""
        count, choices, hidden = 2 * size * rows_max, config.num_experts_per_tok, config.hidden_size
        row_bytes = exchanged_row_bytes(state_bytes(hidden, 1 if quantized else 2), choices)
        rows = torch.zeros(count, row_bytes, dtype=torch.uint8, device=device)
        values = [torch.randn(count, hidden, device=device, dtype=torch.bfloat16)]
        if quantized:
            values = list(quantize_rows(values[0], powers=True))
        scores = torch.rand(count, config.n_routed_experts, device=device)
        chosen = scores.topk(choices, dim=1).indices.int()
        weights = torch.full((count, choices), config.routed_scaling_factor / choices, device=device)
        at = 0
        for part in (*values, chosen, weights):
            as_bytes = part.contiguous().view(torch.uint8)
            rows[:, at : at + as_bytes.shape[1]] = as_bytes
            at += as_bytes.shape[1]
        return cls(size, rows)

    def all_gather(self, output: Tensor, own: Tensor) -> None:
        count = len(output) - len(own)
        self.at = (self.at + count // 3 + 1) % (len(self.others) - count + 1)
        output[: len(own)] = own
        output[len(own) :] = self.others[self.at : self.at + count]

    def all_to_all(self, output: Tensor, parts: Tensor) -> None:
        output.copy_(parts)

    def broadcast(self, data: Tensor, source: int) -> None:
        """This rank has it."""


@dataclass(frozen=True)
class Rates:
    copy_bytes_per_us: float
    operations_per_us: float
    dma_bytes_per_us: float


def dma_bytes_per_us(pool: Tensor) -> float:
    """Of one copy of DMA_BYTES from pinned memory, the best of five."""
    source = pool.view(-1)[:DMA_BYTES]
    target = torch.empty(DMA_BYTES, dtype=torch.uint8, device="cuda")
    best = 0.0
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source, non_blocking=True)
        stop.record()
        stop.synchronize()
        best = max(best, DMA_BYTES / start.elapsed_time(stop) / 1e3)
    return best


def most(runner: TransformersRunner, context: int, hot_slots: int, budget: int) -> int:
    """Requests that the device holds."""
    return min(ROWS_MOST, budget // bytes_of(runner.geometry, context, hot_slots))


def cells(
    runner: TransformersRunner, hot_slots: int, budget: int, contexts: list[int], overlaps: list[float]
) -> Iterator[Cell]:
    """The most telling ones first."""
    for context in contexts:
        hisparse, resident = (most(runner, context, slots, budget) for slots in (hot_slots, 0))
        batches = [batch for batch in BATCHES if batch < hisparse]
        told = max(batches)
        for overlap in overlaps:
            yield Cell(context, "hisparse", told, overlap)
        yield Cell(context, "resident", resident, overlaps[0])
        yield Cell(context, "hisparse", hisparse, overlaps[0])
        for overlap in overlaps[1:]:
            yield Cell(context, "hisparse", hisparse, overlap)
        for batch in batches[:-1]:
            yield Cell(context, "hisparse", batch, overlaps[0])
            if batch < resident:
                yield Cell(context, "resident", batch, overlaps[0])


def measured(
    cell: Cell,
    runner: TransformersRunner,
    pool: Tensor,
    hot_slots: int,
    config: Any,
    of: int,
    rates: Rates,
    links: Links,
    kernels_shown: int = 0,
) -> dict[str, Any]:
    """What benchmarks.decode measures of one cell, and its floor."""
    row = asdict(cell) | run(cell, runner, pool, hot_slots, kernels_shown=kernels_shown)
    misses = 0.0 if row["hit_rate"] is None else (1 - row["hit_rate"]) * config.index_topk
    parts = parts_of(config, runner.geometry, rows=cell.concurrency, of=of, context=cell.context)
    link_ms = links.step_ms(config, cell.concurrency)
    missed = misses * cell.concurrency * runner.geometry.row_bytes * config.num_hidden_layers
    floor = floor_ms(parts, rates.copy_bytes_per_us, rates.operations_per_us)
    wanted = cell.concurrency * -(-cell.context // 64) * runner.geometry.page_bytes
    return row | {
        "link_ms": link_ms,
        "rank_step_ms": row["step_ms"] + link_ms,
        "rank_tokens_per_s": cell.concurrency / (row["step_ms"] + link_ms) * 1e3,
        "missed_ms": missed / rates.dma_bytes_per_us / 1e3,
        "floor_ms": sum(floor.values()) + missed / rates.dma_bytes_per_us / 1e3,
        "floor_parts_ms": floor,
        "wanted_gib": wanted / 2**30,
        "distinct_gib": min(wanted, pool.numel()) / 2**30,
    }


def show(row: dict[str, Any]) -> str:
    hit = "" if row["hit_rate"] is None else f"  hits {row['hit_rate']:.3f}"
    parts = " ".join(f"{name} {ms:.1f}" for name, ms in row["parts_ms"].items())
    return (
        f"{row['context']:7} {row['mode']:8} x{row['concurrency']:<3} step {row['step_ms']:6.2f} + "
        f"{row['link_ms']:.2f} ms, floor {row['floor_ms']:6.2f} ({row['step_ms'] / row['floor_ms']:.2f} x), "
        f"{row['rank_tokens_per_s']:8.1f} tok/s{hit}  [{parts}]"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rank")
    parser.add_argument("--of", type=int, default=8, help="ranks of the group")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rank.json"))
    parser.add_argument("--layers", type=int, default=0, help="0: as published")
    parser.add_argument("--hot-slots", type=int, default=4096)
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="fp8", help="worker.kv_dtype")
    parser.add_argument("--modes", choices=MODES, nargs="*", default=list(MODES))
    parser.add_argument("--matmul", choices=MATMULS, default=WEIGHT_ONLY, help="worker.matmul")
    parser.add_argument("--pool-gib", type=int, default=64, help="host pool; a power of two")
    parser.add_argument("--contexts", type=int, nargs="*", default=list(CONTEXTS))
    parser.add_argument("--overlaps", type=float, nargs="*", default=list(OVERLAPS))
    parser.add_argument("--kernels", type=int, default=0, help="print as many kernels of a step of each cell")
    parser.add_argument("--budget-seconds", type=float, default=600)
    options = parser.parse_args()
    began = time.monotonic()
    rates = {"copy_bytes_per_us": copy_bytes_per_us(), "operations_per_us": operations_per_us()}
    config = published_config(FAMILY, layers=options.layers)
    is_quantized = synthetic_matmul(options.matmul, device="cuda", fp8=True).quantizes_rows
    ranks = SynthesisedRanks.draw(config, options.of, ROWS_MOST, "cuda", quantized=is_quantized)
    runner = synthetic_runner(
        config, kv_dtype=options.kv_dtype, fp8=True, matmul=options.matmul, collectives=ranks, rows_max=ROWS_MOST
    )
    weights = sum(runner.weights_bytes().values())
    print(f"weights {weights / 1e9:.1f} GB after {time.monotonic() - began:.1f} s", flush=True)
    pool = make_pool(runner.geometry, config, options.pool_gib)
    found = Rates(**rates, dma_bytes_per_us=dma_bytes_per_us(pool))
    torch.cuda.empty_cache()
    budget = torch.cuda.mem_get_info()[0] - RESERVED_BYTES
    links = Links(options.of, row_value_bytes=1 if is_quantized else BF16_BYTES)
    setting = {
        "of": options.of,
        "layers": config.num_hidden_layers,
        "weights_bytes": runner.weights_bytes(),
        "kv_budget_bytes": budget,
        "hot_slots": options.hot_slots,
        "kv_dtype": options.kv_dtype,
        "most": {context: most(runner, context, options.hot_slots, budget) for context in CONTEXTS},
        "row_bytes": runner.geometry.row_bytes,
        "index_row_bytes": runner.geometry.index_row_bytes,
        "pool_gib": options.pool_gib,
        "rates": asdict(found),
        "links": asdict(links),
    }
    print(f"set up in {time.monotonic() - began:.1f} s: {setting}", flush=True)
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    command = " ".join(["python", "-m", "benchmarks.rank", *sys.argv[1:]])
    result = {"machine": machine() | {"command": command}, "setting": setting, "rows": rows}
    for cell in cells(runner, options.hot_slots, budget, options.contexts, options.overlaps):
        if cell.mode not in options.modes or any(asdict(cell).items() <= row.items() for row in rows):
            continue
        if time.monotonic() - began > options.budget_seconds:
            print("out of budget; run again with the same --out for the other cells")
            break
        prepared = [cell.concurrency, options.of * cell.concurrency]
        with patch.object(transformers_dsa, "PREPARED_ROWS", prepared), patch.object(decode, "STEPS", STEPS):
            row = measured(cell, runner, pool, options.hot_slots, config, options.of, found, links, options.kernels)
        print(show(row), flush=True)
        rows.append(row)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        gc.collect()  # graphs hold memory in cycles
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
