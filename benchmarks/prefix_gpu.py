"""A conversation's next turn on a GPU: restoring its prefix from host memory against prefilling it again.

One worker's executor, without a coordinator: DeepSeek-V3.2's attention and indexer, few layers, random dense MLPs as in
benchmarks/resume.py, the prefix in pinned host memory. All in one run:

    layers       the rows of one layer of the prefix, copied into slab pages in pieces as the worker launches them,
                 beside one plain copy of as many bytes from pinned memory to the device
    keys         the same for the index keys of all layers
    in_situ      GB/s of all loads of a warm request, by the worker's own counters
    ttft_*       first token of prefix and new tokens: everything prefilled, and behind the restored prefix
    tokens       OUTPUT_TOKENS of each prompt behind the restored prefix, beside those of the whole prefill, by
                 themselves, since they ask for log-probabilities

A prefix that ends with a whole pass leaves the same passes to compute, hence the same sums: `same_passes` compares
bits. Any other prefix moves the ends of passes. In bfloat16 that changes what sums round to, and with it selections and
logits, so tokens are compared under the tie rule (hisparse/demo/compare.py) with TIE_BOUND.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.decode import LOOKAHEAD, TAIL_SLOTS, make_pool, sizing_of
from benchmarks.resume import Stays, median_s, turn_until
from benchmarks.swap_in import machine
from hisparse.demo.compare import OracleRun, compare
from kernels.copy_rows import copy_keys_to_device, copy_rows_to_device
from kernels.state import DeviceState
from metrics.state import WorkerCounters
from protocol.arrays import pack_int32, unpack_int32
from protocol.logprobs import LOGPROB_MIN, TokenLogprobs, read_rows, row_words
from protocol.messages import LOGPROBS_MAX, NO_LOGPROBS, Admit, Sampling, Withdraw
from protocol.settings import WorkerSettings
from protocol.text import make_tokenizer
from protocol.units import PAGE_TOKENS, managed_chunks, pages_for
from worker.group.group import Group
from worker.loop.executor import Executor
from worker.loop.swap import piece_tokens
from worker.runners.synthetic import synthetic_config, synthetic_runner
from worker.runners.transformers_dsa import TransformersRunner
from worker.streams import make_streams

HOT_SLOTS: Final = 4_096
OUTPUT_TOKENS: Final = 16
POOL_GIB: Final = 1
#: Largest gap of two log-probabilities that other ends of passes may close in bfloat16. Where products summed in
#: another order, one changed by up to 0.23, and tokens differed at gaps of up to 0.08 (benchmarks/NOTES.md, Reuse of
#: prefixes).
TIE_BOUND: Final = 0.2


@dataclass(frozen=True)
class Answer:
    """One request: seconds to its first token, its tokens, and their log-probabilities where they were asked for."""

    first_s: float
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


@dataclass
class Comparison:
    """Tokens behind a restored prefix beside those of the whole prefill, summed over prompts.

    `tied` tokens follow a tie and may be any. `change_max`: of a log-probability, where both contexts are the same.
    """

    verified: int = 0
    tied: int = 0
    mismatched: int = 0
    change_max: float = 0.0
    gaps: tuple[float, ...] = ()

    def add(self, whole: Answer, restored: Answer, tie_bound: float) -> None:
        """`tie_bound` 0: no difference is a tie, and a changed log-probability is a mismatch too."""
        gaps = tuple(map(gap_of, whole.logprobs, restored.tokens))
        verdict = compare("", restored.tokens, OracleRun(whole.tokens, restored.tokens, gaps), tie_bound)
        upto = len(whole.tokens) if verdict.divergence is None else verdict.divergence + 1
        changes = [changed(*pair) for pair in zip(whole.logprobs[:upto], restored.logprobs[:upto], strict=True)]
        self.change_max = max(self.change_max, *changes)
        if verdict.gap is not None:
            self.gaps += (verdict.gap,)
        mismatched = verdict.mismatched
        if not tie_bound and not mismatched:
            mismatched = sum(change > 0 for change in changes)
        self.verified += verdict.verified
        self.tied += verdict.unverified
        self.mismatched += mismatched


def gap_of(logprobs: TokenLogprobs, other: int) -> float:
    """How much likelier the token of `logprobs` is than `other`. Where that is none of the likeliest it has
    LOGPROB_MIN."""
    return logprobs.logprob - dict(logprobs.top).get(other, LOGPROB_MIN)


def changed(one: TokenLogprobs, other: TokenLogprobs) -> float:
    """The largest change of a log-probability, of tokens that are among the likeliest of both; -LOGPROB_MIN without
    any."""
    known = dict(other.top)
    return max((abs(logprob - known[token]) for token, logprob in one.top if token in known), default=-LOGPROB_MIN)


class Outputs(Stays):
    """And tokens with their log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[int] = []
        self.rows: list[bytes] = []

    def add_tokens(
        self, request_index: int, placement: int, start: int, ids: list[int], durable: int, rows: Sequence[bytes] = ()
    ) -> None:
        super().add_tokens(request_index, placement, start, ids, durable)
        self.ids += ids
        self.rows += rows


class PromptWorker:
    """A worker's executor that answers prompts of `tokens` tokens, one after the other, each in `pages` host pages. It
    may be that of a rank of a `group`.

    A whole prefill writes the first `pages` of `pool`. A restored prefix is read from there, and what follows it is
    written to the next ones.
    """

    def __init__(
        self,
        runner: TransformersRunner,
        pool: Tensor,
        tokens: int,
        *,
        pass_tokens: int,
        layer_group: str = "1",
        hot_slots: int = HOT_SLOTS,
        device: str = "cuda",
        group: Group | None = None,
    ) -> None:
        self.runner, self.tokens, self.pages = runner, tokens, pages_for(tokens + OUTPUT_TOKENS + LOOKAHEAD)
        self._hot_slots = hot_slots
        sizing = sizing_of(
            runner.geometry,
            seats=1,
            context_pages=self.pages,
            chunks=managed_chunks(hot_slots),
            slab_pages=pages_for(tokens),
            hot_slots=hot_slots,
            host_pages=len(pool),
        )
        settings = WorkerSettings(
            device=device,
            seats=1,
            tail_slots=TAIL_SLOTS,
            pass_tokens=pass_tokens,
            layer_group=layer_group,
            group_size=1 if group is None else group.size,
        )
        self._reports, self._streams = Outputs(), make_streams("cuda" if device == "cuda" else "inline")
        parts = self._streams, pool, make_tokenizer("bytes"), self._reports
        self.executor = Executor(runner, settings, sizing, *parts, group=group)
        self._placements = count(1)

    def close(self) -> None:
        self._streams.close()

    def prompt(self, seed: int) -> list[int]:
        vocab = self.runner.info.vocab_size
        return [(seed + 37 * token + token * token // 11) % vocab for token in range(self.tokens)]

    def answer(self, seed: int, prefix_tokens: int = 0, *, logprobs: int = NO_LOGPROBS) -> Answer:
        """Of the prompt of `seed`, whose first `prefix_tokens` rows the whole prefill before has left in its pages."""
        number, shared = next(self._placements), prefix_tokens // PAGE_TOKENS
        host_pages = list(range(shared if prefix_tokens else self.pages))
        host_pages += range(self.pages, 2 * self.pages - len(host_pages))
        admit = Admit(
            placement=number,
            request_index=0,
            request_id=f"turn-{number}",
            prompt=pack_int32(self.prompt(seed)),
            generated=b"",
            durable_tokens=0,
            sampling=Sampling(max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=logprobs),
            host_pages=pack_int32(host_pages),
            index_pages=self.pages,
            hot_slots=self._hot_slots,
            hot_chunks=managed_chunks(self._hot_slots),
            prefix_tokens=prefix_tokens,
        )
        executor, reports = self.executor, self._reports
        reports.steps.clear()
        reports.ids.clear()
        reports.rows.clear()
        executor.submit(admit)
        first_s = turn_until(executor, lambda: reports.steps)
        turn_until(executor, lambda: len(reports.ids) >= OUTPUT_TOKENS)
        executor.submit(Withdraw(number))
        turn_until(executor, lambda: executor.idle)
        rows = unpack_int32(b"".join(reports.rows), "rows").reshape(-1, row_words(logprobs)) if reports.rows else None
        return Answer(first_s, tuple(reports.ids), tuple(read_rows(rows)) if rows is not None else ())


def compare_tokens(worker: PromptWorker, prefix: int, prompts: int, pass_tokens: int) -> dict[str, Any]:
    """Time so many prompts, behind `prefix` restored tokens, and behind the part of them that whole passes make up."""
    aligned = prefix // math.lcm(pass_tokens, PAGE_TOKENS) * math.lcm(pass_tokens, PAGE_TOKENS)
    moved, same = Comparison(), Comparison()
    ask = partial(worker.answer, logprobs=LOGPROBS_MAX)
    for seed in range(prompts):
        whole = ask(seed)
        moved.add(whole, ask(seed, prefix), TIE_BOUND)
        if aligned:
            same.add(whole, ask(seed, aligned), 0.0)
    return {
        "compared_tokens": moved.verified + moved.tied + moved.mismatched,
        "mismatched_tokens": moved.mismatched,
        "tied_tokens": moved.tied,
        "tie_bound": TIE_BOUND,
        "gaps": [round(gap, 4) for gap in moved.gaps],
        "logprob_change_max": moved.change_max,
        "same_passes_prefix_tokens": aligned,
        "same_passes_compared_tokens": same.verified + same.mismatched,
        "same_passes_mismatched_tokens": same.mismatched,
    }


def restores(state: DeviceState, tokens: int) -> dict[str, Any]:
    """GB/s of one layer's rows and of all index keys, from scattered host pages, beside plain copies."""
    geometry = state.geometry
    token = torch.arange(tokens, device="cuda")
    host_page = torch.randperm(len(state.host), device="cuda")[: pages_for(tokens)][token // PAGE_TOKENS].int()

    def pieces(token_bytes: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        return [
            (
                piece.int().expand(geometry.groups, -1).contiguous(),
                piece.int(),
                host_page[piece],
                (piece % PAGE_TOKENS).int(),
            )
            for piece in token.split(piece_tokens(token_bytes))
        ]

    row_pieces, key_pieces = pieces(geometry.row_bytes), pieces(geometry.groups * geometry.index_row_bytes)

    def rows_of(layer: int) -> None:
        for rows, _, pages, offsets in row_pieces:
            copy_rows_to_device(state.slab(layer), rows, None, pages, offsets, range(layer, layer + 1))

    def keys() -> None:
        for _, keys, pages, offsets in key_pieces:
            copy_keys_to_device(state, keys, pages, offsets)

    def plain_s(size: int) -> float:
        host = state.host.view(-1)[:size]
        device = torch.empty(size, dtype=torch.uint8, device="cuda")
        return median_s(lambda: device.copy_(host, non_blocking=True))

    row_bytes, key_bytes = tokens * geometry.row_bytes, tokens * geometry.groups * geometry.index_row_bytes
    dma, key_dma = row_bytes / plain_s(row_bytes) / 1e9, key_bytes / plain_s(key_bytes) / 1e9
    layers = [row_bytes / median_s(partial(rows_of, layer)) / 1e9 for layer in range(geometry.layers)]
    key_rate = key_bytes / median_s(keys) / 1e9
    return {
        "layer_bytes": row_bytes,
        "dma_gb_per_s": round(dma, 2),
        "layer_gb_per_s": [round(it, 2) for it in layers],
        "layer_share_of_dma": round(min(layers) / dma, 3),
        "keys_gb_per_s": round(key_rate, 2),
        "keys_share_of_dma": round(key_rate / key_dma, 3),
    }


def loads_of(counters: WorkerCounters) -> tuple[int, float]:
    """Return bytes and seconds of loads so far: index keys of prefixes, and earlier rows of prompts, layer by layer."""
    return (
        counters.preloaded_bytes + counters.refilled_bytes,
        counters.preloading.seconds + counters.refilling.seconds,
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    prefix, total = options.prefix // PAGE_TOKENS * PAGE_TOKENS, options.prefix + options.new
    config = synthetic_config("deepseek-v3.2", options.layers)
    runner = synthetic_runner(config, kv_dtype=options.kv_dtype)
    pool = make_pool(runner.geometry, config, POOL_GIB)
    worker = PromptWorker(runner, pool, total, pass_tokens=options.pass_tokens, layer_group=options.layer_group)
    result: dict[str, Any] = {"prompt_tokens": total, "cached_tokens": prefix, "layers": options.layers}
    result |= {"machine": machine(), "kv_dtype": options.kv_dtype, "layer_group": options.layer_group}
    result |= restores(worker.executor.state, prefix)
    worker.answer(5)  # compiles, and captures graphs
    worker.answer(5, prefix)
    cold, warm, counters = list[float](), list[float](), worker.executor.counters
    for seed in range(options.rounds):
        cold.append(worker.answer(seed).first_s)
        before = loads_of(counters)
        warm.append(worker.answer(seed, prefix).first_s)
        loaded, busy_s = (after - earlier for after, earlier in zip(loads_of(counters), before, strict=True))
    result["in_situ_gb_per_s"] = round(loaded / busy_s / 1e9, 2) if busy_s else None
    result["ttft_cold_ms"], result["ttft_warm_ms"] = (round(1e3 * median(times), 2) for times in (cold, warm))
    result["ttft_ratio"] = round(median(cold) / median(warm), 2)
    result |= compare_tokens(worker, prefix, options.rounds, options.pass_tokens)
    worker.close()
    return result
