"""Tokens per second within one KV budget: everything resident against hot buffers. `python -m benchmarks.decode`.

The attention, indexer and projections of DeepSeek-V3.2 at their real dimensions with random weights, dense MLPs, as
many layers as --layers says; the real executor with its streams, fences and graphs. Contexts are not prefilled: their
host pages hold encoded random rows, and every request is admitted as a resumed one, which loads index keys (and rows,
when resident) from there. Random weights select without locality, so the indexer runs for real and a generator then
replaces its output: a window over a permutation of the context that moves by (1 - overlap) * k tokens per step, another
per request and layer. With --trace, requests select instead what a worker recorded (worker.record_selections): each
follows a recorded request, forth and back, from a step of its own; the context is the longest one recorded.

The budget is what RESIDENT_AT_32K resident requests of 32k tokens need. Whatever a request holds on the device counts:
rows, index keys, slot tables. Concurrencies are powers of two and the most that fit, for either mode.

    resident   every row on the device; misses cannot happen, backup to host memory goes on
    hisparse   hot buffers of --hot-slots
    uncopied   the same, with misses resolved and evicted but not copied: what the copies cost is the difference
    plain      resident, without opening rows, swap-in or backup: the same model with a page table (concurrency 1)

Times are between the tokens of one step and the next, as the executor reads them, STEPS after WARM_UP: enough that
four are longer than the 99th percentile. PROFILED more go through torch's profiler, which says how long kernels of each
kind ran in a step (they overlap across streams) and how long any did. The profiler makes the host slower, not kernels:
no time of the host comes from these steps. Cells already in --out are kept; what is missing when --budget-seconds are
over is left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.swap_in import machine
from benchmarks.traces import Recorded, TracedSelections, read_trace
from kernels.cuda.swap_in import without_copies
from kernels.layout import Geometry
from kernels.row_format import index_key_format_of, kv_row_format_of
from kernels.state import BackupPlan, DeviceState, MissPlan, StepBatch, real_rows
from protocol.arrays import pack_int32
from protocol.messages import NO_DRAFTS, Admit, Event, Faulted, Sampling, WorkerCapacity
from protocol.settings import WorkerSettings
from protocol.text import make_tokenizer
from protocol.units import PAGE_TOKENS, managed_chunks, pages_for
from worker.device.sizing import Sizing
from worker.loop.executor import Executor
from worker.loop.swap import Swap
from worker.runners.base import Runner
from worker.runners.synthetic import synthetic_config, synthetic_runner
from worker.runners.transformers_dsa import TransformersRunner
from worker.streams import Fence, Streams, make_streams

RESIDENT_AT_32K: Final = 16
CONTEXTS: Final = (32_768, 131_072, 8_192)
OVERLAPS: Final = (0.99, 0.95, 0.93, 0.90, 0.87, 0.80)
WARM_UP: Final = 6
STEPS: Final = 400
LOOKAHEAD: Final = 1
TAIL_SLOTS: Final = 8
SAMPLE_PAGES: Final = 64  # encoded once, repeated over the pool
PROFILED: Final = 4
TOKENS_AHEAD: Final = WARM_UP + STEPS + PROFILED + 3 * LOOKAHEAD + 4
TURNS_MAX: Final = 1_000_000
NAME_MOST: Final = 80  # letters of a kernel's name

#: Kinds of kernels, by parts of their names.
KINDS: Final = {
    "swap": ("swap_in", "replay_misses"),
    "index": ("index_scores", "index_select"),
    "attention": ("attend", "combine"),
    "backup": ("copy_rows",),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "gemv", "linear", "gated", "add_splits", "add_choices"),
}


@dataclass(frozen=True)
class Cell:
    context: int
    mode: str
    concurrency: int
    overlap: float  # of the selections of successive steps; meaningless while everything is resident


class Selections:
    """Stands in for the indexer's output, inside the graph: k places of a permutation, another for each request and
    group, that begin `fresh` places further with each position. A step's selections of all groups are looked up in one
    launch, ahead of the first; each costs a step one copy."""

    def __init__(
        self, groups: int, requests: int, context: int, k: int, overlap: float, device: torch.device | str = "cuda"
    ) -> None:
        draw = torch.rand(groups, requests, context, device=device)
        self.order = draw.argsort(-1).int().view(groups, -1)
        self.context, self.fresh = context, round((1 - overlap) * k)
        self.places = torch.arange(k, device=device)
        self.first = torch.arange(requests, device=device) * context  # of each request's permutation
        self.chosen = self.order[:, :0]  # of this step: [groups, requests * k]

    def __call__(self, group: int, batch: StepBatch, topk: Tensor) -> None:
        if group == 0:
            places = (batch.lengths.long().unsqueeze(1) * self.fresh + self.places) % self.context
            entries = (places + self.first[: len(batch.seats)].unsqueeze(1)).flatten()
            self.chosen = self.order.index_select(1, entries)
        topk.view(-1).copy_(self.chosen[group])


class Clock:
    """The executor's reports: when each step's tokens were read, and which requests ended in a fault."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.events: list[Event] = []
        self.faults: list[Faulted] = []

    def add_tokens(
        self, request_index: int, placement: int, start: int, ids: list[int], durable: int, rows: Sequence[bytes] = ()
    ) -> None:
        if request_index == 0:
            self.steps.append(time.perf_counter())

    def set_durable(self, request_index: int, placement: int, durable: int) -> None:
        """Durable lengths have no reader here."""

    def add_event(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Faulted):
            self.faults.append(event)

    def count_swaps(
        self,
        requests: Mapping[int, tuple[int, int]],
        totals: tuple[int, int, int],
        drafts: Mapping[int, tuple[int, int]] = NO_DRAFTS,
    ) -> None:
        """Hits and misses are read from the device's state."""


# ---------------------------------------------------------------- memory


def bytes_of(geometry: Geometry, context: int, hot_slots: int) -> int:
    """Device bytes of one request: rows, slot tables and index keys of `context` tokens and those it will generate."""
    pages = pages_for(context + TOKENS_AHEAD)
    return chunks_of(context, hot_slots) * geometry.chunk_bytes + pages * geometry.index_page_bytes


def chunks_of(context: int, hot_slots: int) -> int:
    return managed_chunks(hot_slots) if hot_slots else pages_for(context + TOKENS_AHEAD)


def sizing_of(
    geometry: Geometry, *, seats: int, context_pages: int, chunks: int, slab_pages: int, hot_slots: int, host_pages: int
) -> Sizing:
    """Room for `seats` requests of `context_pages` pages and `chunks` device chunks each, and for one slab."""
    capacity = WorkerCapacity(
        seats=seats,
        hot_chunks=seats * chunks,
        index_pages=seats * context_pages,
        prompt_max_tokens=slab_pages * PAGE_TOKENS,
        host_pages=host_pages,
        page_bytes=geometry.page_bytes,
        hot_size_classes=(hot_slots,),
        tail_slots=TAIL_SLOTS,
        overshoot_tokens=LOOKAHEAD,
        pool_path="",
    )
    return Sizing(
        capacity=capacity,
        slab_pages=slab_pages,
        slab_page_bytes=geometry.slab_page_bytes,
        context_max_tokens=context_pages * PAGE_TOKENS,
        max_pages=context_pages,
        max_chunks=max(chunks, managed_chunks(hot_slots)),
        bookkeeping_bytes=0,
        device_bytes=seats * (chunks * geometry.chunk_bytes + context_pages * geometry.index_page_bytes),
        longest_context_tokens=context_pages * PAGE_TOKENS,
    )


def make_pool(geometry: Geometry, config: Any, gibibytes: int) -> Tensor:
    """Pinned host pages uint8[pages, page_bytes] of encoded normal values. A power of two of GiB: torch rounds up."""
    latent, rope, dim = config.kv_lora_rank, config.qk_rope_head_dim, config.index_head_dim
    rows = kv_row_format_of(geometry.row_bytes, latent, rope)
    keys = index_key_format_of(geometry.index_row_bytes, dim)
    values = torch.randn(SAMPLE_PAGES, geometry.layers * PAGE_TOKENS, latent + rope, device="cuda")
    index = torch.randn(SAMPLE_PAGES, geometry.groups * PAGE_TOKENS, dim, device="cuda")
    sample = torch.cat([rows.encode(values).flatten(1), keys.encode(index).flatten(1)], 1)
    assert sample.shape[1] == geometry.page_bytes
    memory = torch.empty(gibibytes << 30, dtype=torch.uint8, pin_memory=True)
    pages = len(memory) // geometry.page_bytes
    pool = memory[: pages * geometry.page_bytes].view(pages, geometry.page_bytes)
    for start in range(0, pages, SAMPLE_PAGES):
        part = pool[start : start + SAMPLE_PAGES]
        part.copy_(sample[: len(part)], non_blocking=True)
    torch.cuda.synchronize()
    return pool


# ---------------------------------------------------------------- a model with a page table and nothing else


def look_up(
    state: DeviceState,
    group: int,
    topk: Tensor,
    batch: StepBatch,
    out_rows: Tensor,
    plan: MissPlan,
    *,
    beside: bool = False,
) -> None:
    """What an engine without HiSparse does instead of swap_in: positions to rows through the page table.

    Contexts here are longer than top-k, so that no entry of a real row is -1.
    """
    del group, plan, beside
    seats, pages = batch.seats.where(real_rows(batch), 0), topk.clamp(min=0) // PAGE_TOKENS
    chunks = state.chunk_table.index_select(0, seats).gather(1, pages.long())
    torch.add(chunks * PAGE_TOKENS, topk % PAGE_TOKENS, out=out_rows)


def open_rows(state: DeviceState, batch: StepBatch, plan: BackupPlan) -> None:
    """Where the new token's row and index key go, through the page tables; -1 for padding."""
    del plan
    real = real_rows(batch)
    seats, positions = batch.seats.where(real, 0), (batch.lengths.long() - 1).where(real, 0)
    pages, offsets = (positions // PAGE_TOKENS).unsqueeze(1), positions % PAGE_TOKENS
    for table, places in ((state.chunk_table, batch.new_rows), (state.index_table, batch.new_index_rows)):
        chunks = table.index_select(0, seats).gather(1, pages).squeeze(1)
        places.copy_((chunks * PAGE_TOKENS + offsets).where(real, -1))


def keep_nothing(swap: Swap, plan: BackupPlan, rows: int) -> tuple[Fence, Fence]:
    """Fences in the place of a backup."""
    del plan, rows
    return swap._streams.backup.record("backed_up"), swap._streams.backup.record("durable")


@contextmanager
def plain_model() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(patch("worker.runners.swapping.swap_in", look_up))
        stack.enter_context(patch("worker.loop.decode.begin_step", open_rows))
        stack.enter_context(patch.object(Swap, "backup", keep_nothing))
        yield


# ---------------------------------------------------------------- one cell


def run(
    cell: Cell,
    runner: TransformersRunner,
    pool: Tensor,
    hot_slots: int,
    recorded: Recorded | None = None,
    *,
    kernels_shown: int = 0,
) -> dict[str, Any]:
    """Decode WARM_UP and STEPS steps of all requests; what they took and found. `kernels_shown`: print as many kernels
    of a step."""
    geometry = runner.geometry
    if recorded is not None:
        runner.after_index_topk = TracedSelections(recorded, geometry.groups, cell.concurrency, "cuda")
    else:
        size = (geometry.groups, cell.concurrency, cell.context, geometry.topk)
        runner.after_index_topk = Selections(*size, cell.overlap)
    mode = {"uncopied": without_copies, "plain": plain_model}.get(cell.mode, nullcontext)
    clock, streams = Clock(), make_streams("cuda")
    with mode():
        executor = open_executor(runner, pool, cell, hot_slots, clock, streams)
        turn_until(executor, clock, WARM_UP)
        found = executor.state.hits.sum(), executor.state.misses.sum()
        before = [int(count) for count in found]
        turn_until(executor, clock, WARM_UP + STEPS)
        hits, misses = (
            int(x.sum()) - y for x, y in zip((executor.state.hits, executor.state.misses), before, strict=True)
        )
        ran = profile(executor, clock)
        tripped = executor.state.tripwires.tolist()
    streams.close()
    gaps = [b - a for a, b in zip(clock.steps[WARM_UP - 1 :], clock.steps[WARM_UP:], strict=False)][:STEPS]
    if any(tripped):
        raise SystemExit(f"{cell}: tripwires {tripped}")
    gaps.sort()
    for line in by_kernel(ran)[:kernels_shown]:
        print(line)
    return {
        "tokens_per_s": cell.concurrency * len(gaps) / sum(gaps),
        "step_ms": statistics.mean(gaps) * 1e3,
        "itl_p50_ms": gaps[len(gaps) // 2] * 1e3,
        "itl_p99_ms": gaps[-(-len(gaps) * 99 // 100) - 1] * 1e3,
        "itl_max_ms": gaps[-1] * 1e3,
        "steps": len(gaps),
        "hit_rate": hits / (hits + misses) if hits + misses else None,
        "kv_bytes": executor._sizing.device_bytes,
        "parts_ms": share_out(ran),
    }


def open_executor(runner: Runner, pool: Tensor, cell: Cell, hot_slots: int, clock: Clock, streams: Streams) -> Executor:
    """An executor of the cell's requests, all of them admitted. `hot_slots` count where the cell's mode has hot
    buffers."""
    managed = hot_slots if cell.mode in ("hisparse", "uncopied") else 0
    sizing = sizing_of(
        runner.geometry,
        seats=cell.concurrency,
        context_pages=pages_for(cell.context + TOKENS_AHEAD),
        chunks=chunks_of(cell.context, managed),
        slab_pages=1,
        hot_slots=hot_slots,
        host_pages=len(pool),
    )
    settings = WorkerSettings(
        device="cuda",
        seats=cell.concurrency,
        tail_slots=TAIL_SLOTS,
        lookahead_steps=LOOKAHEAD,
        hot_size_classes=(hot_slots,),
        deterministic=True,  # one batch size
    )
    executor = Executor(runner, settings, sizing, streams, pool, make_tokenizer("bytes"), clock)
    admit_all(executor, cell, managed, sizing, runner.info.vocab_size)
    return executor


def admit_all(executor: Executor, cell: Cell, hot_slots: int, sizing: Sizing, vocab: int) -> None:
    pages = drawn_pages(sizing.capacity.host_pages, cell.concurrency, sizing.max_pages)
    for number in range(cell.concurrency):
        executor.submit(
            Admit(
                placement=number + 1,
                request_index=number,
                request_id=f"bench-{number}",
                prompt=pack_int32([(number + 37 * token) % vocab for token in range(cell.context)]),
                generated=pack_int32([number % vocab]),
                durable_tokens=cell.context,
                sampling=Sampling(max_tokens=TOKENS_AHEAD, ignore_eos=True),
                host_pages=pages[number].numpy().tobytes(),
                index_pages=sizing.max_pages,
                hot_slots=hot_slots,
                hot_chunks=chunks_of(cell.context, hot_slots),
            )
        )


def drawn_pages(held: int, requests: int, each: int) -> Tensor:
    """int32[requests, each] of `held` host pages in random order, all of them before one comes again: requests share
    pages where they need more, and no request has a page twice. Ends the benchmark where one request needs more."""
    if each > held:
        raise SystemExit(f"a request needs {each} host pages, and the pool has {held}: raise --pool-gib")
    drawn = torch.randperm(held, dtype=torch.int32)
    return drawn[torch.arange(requests * each) % held].view(requests, each)


def turn(executor: Executor, clock: Clock) -> None:
    """One turn of the executor. Ends the benchmark where a request has faulted."""
    executor.turn()
    if clock.faults:
        raise SystemExit(f"a request faulted: {clock.faults[0].message}")


def turn_until(executor: Executor, clock: Clock, steps: int) -> None:
    for _ in range(TURNS_MAX):
        if len(clock.steps) >= steps:
            return
        turn(executor, clock)
    raise SystemExit(f"{len(clock.steps)} of {steps} steps after {TURNS_MAX} turns: {clock.events}")


def profile(executor: Executor, clock: Clock) -> list[tuple[str, float, float]]:
    """(name, start, end) in microseconds of all kernels and copies of PROFILED steps."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        turn_until(executor, clock, len(clock.steps) + PROFILED)
        torch.cuda.synchronize()
    ran = [e for e in profiler.events() or () if e.device_type.name == "CUDA"]
    return [(e.name, e.time_range.start, e.time_range.end) for e in ran]


def by_kernel(ran: list[tuple[str, float, float]]) -> list[str]:
    """Lines of what ran in PROFILED steps, the longest first: microseconds of a step, launches of a step, name."""
    spans: dict[str, list[float]] = {}
    for name, start, end in ran:
        spans.setdefault(name, []).append(end - start)
    longest = sorted(spans.items(), key=lambda found: -sum(found[1]))
    return [
        f"{sum(found) / PROFILED:9.1f} us {len(found) / PROFILED:7.1f} launches  {name[:NAME_MOST]}"
        for name, found in longest
    ]


def share_out(ran: list[tuple[str, float, float]]) -> dict[str, float]:
    """Milliseconds per step by kind, from (name, start, end) in microseconds of all that ran in PROFILED steps.

    "busy" counts what overlaps once.
    """
    total = dict.fromkeys((*KINDS, "other", "busy"), 0.0)
    until = 0.0
    for name, start, end in sorted(ran, key=lambda event: event[1]):
        kind = next((kind for kind, parts in KINDS.items() if any(part in name.lower() for part in parts)), "other")
        total[kind] += (end - start) / 1e3 / PROFILED
        total["busy"] += max(0.0, end - max(start, until)) / 1e3 / PROFILED
        until = max(until, end)
    return total


# ---------------------------------------------------------------- all cells


def cells(
    geometry: Geometry, hot_slots: int, budget: int, contexts: list[int], overlaps: list[float]
) -> Iterator[Cell]:
    """The most telling ones of all contexts first."""
    modes = (("resident", 0), ("hisparse", hot_slots))
    most = {
        context: {mode: budget // bytes_of(geometry, context, slots) for mode, slots in modes} for context in contexts
    }
    for context, fit in most.items():
        yield Cell(context, "resident", fit["resident"], overlaps[0])
        for overlap in overlaps:
            yield Cell(context, "hisparse", fit["hisparse"], overlap)
            yield Cell(context, "uncopied", fit["hisparse"], overlap)
    for context, fit in most.items():
        for mode in ("plain", "resident", "hisparse"):
            yield Cell(context, mode, 1, overlaps[0])
        for mode in ("resident", "hisparse"):
            powers = (1 << power for power in range(1, fit[mode].bit_length()))
            yield from (Cell(context, mode, c, overlaps[0]) for c in powers if c < fit[mode])


def show(row: dict[str, Any]) -> str:
    hit = "" if row["hit_rate"] is None else f"  hits {row['hit_rate']:.3f}"
    return (
        f"{row['context']:7} {row['mode']:9} x{row['concurrency']:<4} overlap {row['overlap']:.2f}  "
        f"{row['tokens_per_s']:9.1f} tok/s  step {row['step_ms']:7.2f} ms  p99 {row['itl_p99_ms']:7.2f}{hit}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/decode.json"))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kv-dtype", default="fp8")
    parser.add_argument("--hot-slots", type=int, default=4096)
    parser.add_argument("--pool-gib", type=int, default=16, help="host pool; a power of two")
    parser.add_argument("--contexts", type=int, nargs="*", default=list(CONTEXTS))
    parser.add_argument("--overlaps", type=float, nargs="*", default=list(OVERLAPS))
    parser.add_argument("--trace", type=Path, help="of selections; instead of --contexts and --overlaps")
    parser.add_argument("--budget-seconds", type=float, default=600)
    options = parser.parse_args()
    began = time.monotonic()
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    config = synthetic_config("deepseek-v3.2", options.layers)
    runner = synthetic_runner(config, kv_dtype=options.kv_dtype)
    geometry = runner.geometry
    recorded = read_trace(options.trace, geometry.topk) if options.trace else None
    if recorded is not None:
        options.contexts, options.overlaps = [recorded.context], [round(recorded.overlap, 3)]
    pool = make_pool(geometry, config, options.pool_gib)
    budget = RESIDENT_AT_32K * bytes_of(geometry, 32_768, 0)
    setting = {
        "layers": options.layers,
        "kv_dtype": options.kv_dtype,
        "row_bytes": geometry.row_bytes,
        "index_row_bytes": geometry.index_row_bytes,
        "hot_slots": options.hot_slots,
        "kv_budget_bytes": budget,
        **({"trace": recorded.about} if recorded is not None else {}),
    }
    command = " ".join(["python", "-m", "benchmarks.decode", *sys.argv[1:]])
    result = {"machine": machine() | {"command": command}, "setting": setting, "rows": rows}
    print(f"set up in {time.monotonic() - began:.1f} s: {setting}", flush=True)
    for cell in cells(geometry, options.hot_slots, budget, options.contexts, options.overlaps):
        name = asdict(cell)
        if any(name.items() <= row.items() for row in rows):
            continue
        if time.monotonic() - began > options.budget_seconds:
            print("out of budget; run again with the same --out for the other cells")
            break
        if cell.concurrency * pages_for(cell.context + TOKENS_AHEAD) > len(pool):
            print(f"{cell}: the host pool of {len(pool)} pages is too small")
            continue
        row = name | run(cell, runner, pool, options.hot_slots, recorded)
        print(show(row), flush=True)
        rows.append(row)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        gc.collect()  # graphs hold memory in cycles
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
