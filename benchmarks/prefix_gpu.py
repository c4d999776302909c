"""A conversation's next turn on a GPU: restoring its prefix from host memory against prefilling it again.

One worker's executor, without a coordinator: DeepSeek-V3.2's attention and indexer, few layers, random dense MLPs as in
benchmarks/resume.py, the prefix in pinned host memory. All in one run:

    layers       the rows of one layer of the prefix, copied into slab pages in pieces as the worker launches them,
                 beside one plain copy of as many bytes from pinned memory to the device
    keys         the same for the index keys of all layers
    in_situ      GB/s of all loads of a warm request, by the worker's own counters
    ttft_*       first token of prefix and new tokens: everything prefilled, and behind the restored prefix
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any, Final

import torch

from benchmarks.decode import LOOKAHEAD, TAIL_SLOTS, make_pool, sizing_of
from benchmarks.resume import Stays, median_s, turn_until
from benchmarks.swap_in import machine
from kernels.copy_rows import copy_keys_to_device, copy_rows_to_device
from kernels.state import DeviceState
from protocol.arrays import pack_int32
from protocol.messages import Admit, Sampling, Withdraw
from protocol.settings import WorkerSettings
from protocol.text import make_tokenizer
from protocol.units import PAGE_TOKENS, managed_chunks, pages_for
from worker.loop.executor import Executor
from worker.loop.swap import PIECE_TOKENS
from worker.runners.synthetic import synthetic_config, synthetic_runner
from worker.streams import make_streams

HOT_SLOTS: Final = 4_096
OUTPUT_TOKENS: Final = 16
POOL_GIB: Final = 1


class Outputs(Stays):
    """And the ids of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[int] = []

    def add_tokens(
        self, request_index: int, placement: int, start: int, ids: list[int], durable: int, rows: Sequence[bytes] = ()
    ) -> None:
        super().add_tokens(request_index, placement, start, ids, durable)
        self.ids += ids


def restores(state: DeviceState, tokens: int) -> dict[str, Any]:
    """GB/s of one layer's rows and of all index keys, from scattered host pages, beside plain copies."""
    geometry = state.geometry
    token = torch.arange(tokens, device="cuda")
    host_page = torch.randperm(len(state.host), device="cuda")[: pages_for(tokens)][token // PAGE_TOKENS].int()
    pieces = [
        (
            piece.int().expand(geometry.groups, -1).contiguous(),
            piece.int(),
            host_page[piece],
            (piece % PAGE_TOKENS).int(),
        )
        for piece in token.split(PIECE_TOKENS)
    ]

    def rows_of(layer: int) -> None:
        for rows, _, pages, offsets in pieces:
            copy_rows_to_device(state, rows, None, pages, offsets, range(layer, layer + 1))

    def keys() -> None:
        for _, keys, pages, offsets in pieces:
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


def measure(options: argparse.Namespace) -> dict[str, Any]:
    prefix, total = options.prefix // PAGE_TOKENS * PAGE_TOKENS, options.prefix + options.new
    config = synthetic_config("deepseek-v3.2", options.layers)
    runner = synthetic_runner(config, kv_dtype=options.kv_dtype)
    pool = make_pool(runner.geometry, config, POOL_GIB)
    pages = pages_for(total + OUTPUT_TOKENS + LOOKAHEAD)
    sizing = sizing_of(
        runner.geometry,
        seats=1,
        context_pages=pages,
        chunks=managed_chunks(HOT_SLOTS),
        slab_pages=pages_for(total),
        hot_slots=HOT_SLOTS,
        host_pages=len(pool),
    )
    settings = WorkerSettings(
        device="cuda", seats=1, tail_slots=TAIL_SLOTS, prefill_chunk_tokens=options.chunk_tokens, layer_group="1"
    )
    reports, streams = Outputs(), make_streams("cuda")
    executor = Executor(runner, settings, sizing, streams, pool, make_tokenizer("bytes"), reports)
    vocab = runner.info.vocab_size
    placements = iter(range(1, 1_000))

    def first_token(seed: int, prefix_tokens: int, host_pages: list[int]) -> tuple[float, list[int]]:
        """Seconds to the first token, and the first ids."""
        prompt = [(seed + 37 * token + token * token // 11) % vocab for token in range(total)]
        number = next(placements)
        admit = Admit(
            placement=number,
            request_index=0,
            request_id=f"turn-{number}",
            prompt=pack_int32(prompt),
            generated=b"",
            durable_tokens=0,
            sampling=Sampling(max_tokens=OUTPUT_TOKENS, ignore_eos=True),
            host_pages=pack_int32(host_pages),
            index_pages=pages,
            slab_pages=pages_for(total),
            hot_slots=HOT_SLOTS,
            hot_chunks=managed_chunks(HOT_SLOTS),
            prefix_tokens=prefix_tokens,
        )
        reports.steps.clear()
        reports.ids.clear()
        executor.submit(admit)
        took = turn_until(executor, lambda: reports.steps)
        turn_until(executor, lambda: len(reports.ids) >= OUTPUT_TOKENS // 2)
        ids = reports.ids[: OUTPUT_TOKENS // 2]
        executor.submit(Withdraw(number))
        turn_until(executor, lambda: executor.idle)
        return took, ids

    result: dict[str, Any] = {"prompt_tokens": total, "cached_tokens": prefix, "layers": options.layers}
    result |= {"machine": machine(), "kv_dtype": options.kv_dtype}
    result |= restores(executor.state, prefix)
    own, others = list(range(pages)), list(range(pages, 2 * pages))
    first_token(5, 0, own)  # compiles, and captures graphs
    first_token(5, prefix, own[: prefix // PAGE_TOKENS] + others[: pages - prefix // PAGE_TOKENS])
    cold, warm, mismatched = [], [], 0
    for number in range(options.rounds):
        cold_s, expected = first_token(number, 0, own)
        cold.append(cold_s)
        before = executor.counters.preloaded_bytes, executor.counters.preloading.seconds
        warm_s, ids = first_token(
            number, prefix, own[: prefix // PAGE_TOKENS] + others[: pages - prefix // PAGE_TOKENS]
        )
        warm.append(warm_s)
        loaded = executor.counters.preloaded_bytes - before[0]
        busy_s = executor.counters.preloading.seconds - before[1]
        mismatched += sum(a != b for a, b in zip(expected, ids, strict=True))
    streams.close()
    result["in_situ_gb_per_s"] = round(loaded / busy_s / 1e9, 2) if busy_s else None
    result["ttft_cold_ms"], result["ttft_warm_ms"] = (round(1e3 * median(times), 2) for times in (cold, warm))
    result["ttft_ratio"] = round(median(cold) / median(warm), 2)
    result["mismatched_tokens"] = mismatched
    return result
