"""What a warm start saves: a prompt prefilled elsewhere joins a batch. `python -m benchmarks.warm_start`.

One request decodes all the time. Another one's prompt is prefilled and leaves (`Released`, with its last top-k), comes
back to the same worker with its rows in host memory, as a decode worker has it, makes one step and ends; and again.
Cold, that step loads every row that it selects; warm, they are loaded before it joins. Printed for both, medians:

    misses            of the one step, summed over index groups, of as many rows as it selects
    next token        from the command to the token after the first: what a client waits between the two
    longest step      between two tokens of the request that decodes all the time, while the other one joins: what
                      all other requests of the batch wait

On a GPU the model is that of benchmarks/decode.py, of random weights and dense MLPs, which selects other tokens in
each step; so a share of each selection, `--overlap`, is replaced by what was selected before. On a CPU it is the tiny
checkpoint of the tests (worker/runners/tiny.py), which selects what it does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from benchmarks.decode import TAIL_SLOTS, make_pool, sizing_of
from benchmarks.swap_in import machine
from kernels.layout import Geometry
from kernels.state import StepBatch
from protocol.arrays import Int32Array, pack_int32
from protocol.messages import NO_DRAFTS, NO_HOT_BUFFER, Admit, Event, Released, Sampling, Withdraw
from protocol.settings import WorkerSettings
from protocol.text import make_tokenizer
from protocol.units import managed_chunks, pages_for
from worker.loop.executor import Executor
from worker.loop.topk_bytes import unpack
from worker.runners.base import Runner
from worker.runners.synthetic import synthetic_config, synthetic_runner
from worker.runners.tiny import write_tiny_checkpoint
from worker.runners.transformers_dsa import TransformersRunner
from worker.streams import make_streams

#: Tokens of the request that decodes all the time, at most; steps of it before and after the other one joins.
STEADY_TOKENS: Final = 8_192
SETTLED_STEPS: Final = 8
TURNS_MAX: Final = 100_000_000


class Tokens:
    """The executor's reports: when tokens came and which, by request, and all events."""

    def __init__(self) -> None:
        self.times: dict[int, list[float]] = {0: [], 1: []}
        self.ids: dict[int, list[int]] = {0: [], 1: []}
        self.released: dict[int, Released] = {}
        self.swaps: dict[int, tuple[int, int]] = {}  # hits and misses by placement

    def add_tokens(
        self, request_index: int, placement: int, start: int, ids: list[int], durable: int, rows: Sequence[bytes] = ()
    ) -> None:
        self.times[request_index].append(time.perf_counter())
        self.ids[request_index] += ids

    def set_durable(self, request_index: int, placement: int, durable: int) -> None:
        """Durable lengths have no reader here."""

    def add_event(self, event: Event) -> None:
        if isinstance(event, Released):
            self.released[event.placement] = event

    def count_swaps(
        self,
        requests: Mapping[int, tuple[int, int]],
        totals: tuple[int, int, int],
        drafts: Mapping[int, tuple[int, int]] = NO_DRAFTS,
    ) -> None:
        self.swaps.update(requests)


class Overlap:
    """Replaces `share` of what each of two seats selects in a step by what was `remembered` for it, if anything."""

    def __init__(self, geometry: Geometry, share: float) -> None:
        shape = 2, geometry.groups, geometry.topk
        self._remembered = torch.full(shape, -1, dtype=torch.int32, device="cuda")
        self._shared = torch.rand(geometry.topk, device="cuda") < share

    def remember(self, seat: int, positions: list[Int32Array]) -> None:
        for known, found in zip(self._remembered[seat], positions, strict=True):
            known[: len(found)] = torch.from_numpy(found)

    def __call__(self, group: int, batch: StepBatch, topk: Tensor) -> None:
        known = self._remembered[batch.seats.long().clamp(min=0), group]
        topk.copy_(torch.where(self._shared & (known >= 0), known, topk))


class Bench:
    overlap: Overlap | None = None

    def __init__(self, runner: Runner, pool: Tensor, device: str, context: int, hot_slots: int, chunk: int) -> None:
        self.context, self.hot_slots, self.geometry = context, hot_slots, runner.geometry
        self.pages = pages_for(context + STEADY_TOKENS)
        self.vocab = runner.info.vocab_size
        sizing = sizing_of(
            runner.geometry,
            seats=2,
            context_pages=self.pages,
            chunks=max(managed_chunks(hot_slots), pages_for(context)),
            slab_pages=pages_for(context),
            hot_slots=hot_slots,
            host_pages=len(pool),
        )
        settings = WorkerSettings(device=device, seats=2, tail_slots=TAIL_SLOTS, prefill_chunk_tokens=chunk)
        self.reports, self.streams = Tokens(), make_streams("cuda" if device == "cuda" else "inline")
        tokenizer = make_tokenizer("bytes")
        self.executor = Executor(runner, settings, sizing, self.streams, pool, tokenizer, self.reports)
        self.placements = 0

    def admit(
        self, request_index: int, prompt: bytes, max_tokens: int, released: Released | None = None, **form: Any
    ) -> int:
        """Request index 0 decodes all the time; 1 comes and goes. Returns the placement."""
        self.placements += 1
        own = range(
            request_index * self.pages,
            request_index * self.pages + (self.pages if request_index == 0 else pages_for(self.context + 64)),
        )
        whole = {"hot_slots": self.hot_slots, "hot_chunks": managed_chunks(self.hot_slots)}
        self.executor.submit(
            Admit(
                placement=self.placements,
                request_index=request_index,
                request_id=f"r{self.placements}",
                prompt=prompt,
                generated=pack_int32(self.reports.ids[request_index]),
                durable_tokens=released.durable_tokens if released else 0,
                sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
                host_pages=pack_int32(list(own)),
                index_pages=len(own),
                slab_pages=0 if released else pages_for(self.context),
                **(whole | form),
            )
        )
        return self.placements

    def turn_until(self, condition: Callable[[], object]) -> None:
        for _ in range(TURNS_MAX):
            if condition():
                return
            self.executor.turn()
        raise SystemExit("nothing more happens")

    def settle(self) -> None:
        """Let some steps of the first request pass."""
        enough = len(self.reports.times[0]) + SETTLED_STEPS
        self.turn_until(lambda: len(self.reports.times[0]) >= enough)

    def prefill(self, prompt: bytes) -> Released:
        self.reports.ids[1].clear()
        number = self.admit(1, prompt, 2, hot_slots=NO_HOT_BUFFER, hot_chunks=0)
        self.turn_until(lambda: number in self.reports.released)
        left = self.reports.released[number]
        if self.overlap is not None:
            self.overlap.remember(1, unpack(left.warm_start, self.geometry.groups, self.geometry.topk, self.context))
        return left

    def join(self, prompt: bytes, left: Released, *, warm: bool) -> dict[str, float]:
        """A prompt that has left comes back for one step."""
        del self.reports.ids[1][1:]
        self.settle()
        began, steps = time.perf_counter(), len(self.reports.times[0])
        number = self.admit(1, prompt, 2, left, warm_start=left.warm_start if warm else b"")
        self.turn_until(lambda: number in self.reports.released)
        self.settle()
        times, (hits, misses) = self.reports.times[0][steps - 1 :], self.reports.swaps[number]
        return {
            "misses": misses,
            "selected": hits + misses,
            "next_token_ms": 1e3 * (self.reports.times[1][-1] - began),
            "longest_step_ms": 1e3 * max(after - before for before, after in pairwise(times)),
            "last_topk_bytes": len(left.warm_start),
        }

    def measure(self, prompts: list[bytes], repeats: int) -> dict[str, dict[str, float]]:
        if self.overlap is not None:
            shares = np.random.default_rng(0).random((self.geometry.groups, self.context)).argsort(1)
            self.overlap.remember(0, list(shares[:, : self.geometry.topk].astype(np.int32)))
        steady = self.admit(0, prompts[0], STEADY_TOKENS - 64)
        self.turn_until(lambda: self.reports.times[0])
        self.settle()
        rows: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
        for prompt in prompts[1:]:
            left = self.prefill(prompt)
            for _ in range(repeats):
                for name, found in rows.items():
                    found.append(self.join(prompt, left, warm=name == "warm"))
        self.settle()
        times = self.reports.times[0][-SETTLED_STEPS:]
        self.executor.submit(Withdraw(steady))
        self.turn_until(lambda: self.executor.idle)
        self.streams.close()
        gaps = [after - before for before, after in pairwise(times)]
        medians = {
            name: {key: statistics.median(row[key] for row in found) for key in found[0]}
            for name, found in rows.items()
        }
        return medians | {"alone": {"longest_step_ms": 1e3 * statistics.median(gaps)}}


def on_gpu(options: argparse.Namespace) -> Bench:
    config = synthetic_config("deepseek-v3.2", options.layers)
    runner = synthetic_runner(config, kv_dtype=options.kv_dtype)
    overlap = runner.after_index_topk = Overlap(runner.geometry, options.overlap)
    pool = make_pool(runner.geometry, config, options.pool_gib)
    bench = Bench(runner, pool, "cuda", options.context, options.hot_slots, 2_048)
    bench.overlap = overlap
    return bench


def on_cpu(options: argparse.Namespace) -> Bench:
    torch.set_num_threads(1)
    with TemporaryDirectory() as path:
        write_tiny_checkpoint(path, index_topk=128)
        runner = TransformersRunner.load(path)
    pages = 2 * pages_for(options.context + STEADY_TOKENS)
    pool = torch.zeros(pages, runner.geometry.page_bytes, dtype=torch.uint8)
    return Bench(runner, pool, "cpu", options.context, options.hot_slots, 512)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.warm_start")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--hot-slots", type=int, default=4_096)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--kv-dtype", default="fp8")
    parser.add_argument("--pool-gib", type=int, default=4, help="a power of two")
    parser.add_argument("--overlap", type=float, default=0.9)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5, help="with each of them")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    bench = (on_gpu if options.device == "cuda" else on_cpu)(options)
    text = Path(__file__).read_bytes() * (1 + 2 * options.context // Path(__file__).stat().st_size)
    starts = range(0, 40 * (options.prompts + 1), 40)
    prompts = [pack_int32(list(text[start : start + options.context])) for start in starts]
    rows = bench.measure(prompts, options.repeats)
    for name, row in rows.items():
        print(name, *(f"{key} {value:.2f}" for key, value in row.items()), flush=True)
    if options.out is not None:
        setting = {name: value for name, value in vars(options).items() if name != "out"}
        command = " ".join(["python", "-m", "benchmarks.warm_start", *sys.argv[1:]])
        result = {"machine": machine() | {"command": command}, "setting": setting, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
