"""prompt_topk against its goals: `python -m benchmarks.prompt_index [--cells N] [--out FILE]` on a Hopper card.

One cell is (format of keys, context, tokens) at DeepSeek-V3.2's indexer: 64 heads of 128, top-k 2048, keys in scattered
pages, random values; the tokens are the last of the context. Launches follow one another on one stream, eagerly, each
with keys of another group, together beyond L2. Medians of REPLAYS, per call:

    us         prompt_topk, as the runner calls it: one launch, which quantizes queries where keys are quantised, and a
               second one for few tokens; with what the host takes to launch where the device waits for it
    least_us   2 * 64 * 128 operations per token and key at the rate of PEAK

After each cell a few tokens' selections are compared with an exact one of scores in float32 (fp8_queries.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.fp8_queries import DIM, HEADS, SCALE, TOPK, agreement
from benchmarks.swap_in import machine
from kernels.layout import Geometry
from kernels.prompt_pieces import PromptPiece, PromptPieces
from kernels.prompt_topk import prompt_topk
from kernels.reference.index_topk import index_scores
from kernels.row_format import RowFormat, index_key_format
from kernels.state import DeviceState
from protocol.units import PAGE_TOKENS

CELLS: Final = (
    *(("fp8", 32_768, 4_096), ("fp8", 32_768, 1_024), ("fp8", 131_072, 2_048), ("fp8", 8_192, 4_096)),
    *(("fp8", 32_768, 2_048), ("fp8", 32_768, 8_192), ("bfloat16", 32_768, 4_096)),
    *(("fp8", 32_768, 1), ("fp8", 32_768, 128), ("fp8", 131_072, 512)),  # fewer jobs than multiprocessors
    *(("fp4", 32_768, 4_096), ("fp4", 131_072, 2_048), ("fp4", 8_192, 4_096), ("fp4", 32_768, 128)),
)
#: Operations a second of dense products on an H200, as published.
PEAK: Final = {"fp8": 1.979e15, "fp4": 1.979e15, "bfloat16": 0.989e15}
GROUPS, REPLAYS = 4, 13


def measure(kind: str, context: int, tokens: int) -> dict[str, Any]:
    torch.manual_seed(context + tokens)
    form = index_key_format(kind, DIM)
    state = _state(form, context)
    queries = torch.randn(tokens, HEADS, DIM, device="cuda").bfloat16()
    weights = torch.rand(tokens, HEADS, device="cuda") * HEADS**-0.5
    pieces = PromptPieces.of([PromptPiece(0, tokens, 0, context - tokens)], queries.device)
    out, rows = torch.empty(2, tokens, TOPK, dtype=torch.int32, device="cuda")
    pairs = tokens * context - tokens * (tokens - 1) / 2

    def launch(group: int) -> None:
        prompt_topk(state, group, pieces, queries, weights, SCALE, out, rows)

    cell = {
        "keys": kind,
        "context": context,
        "tokens": tokens,
        "us": _time(launch),
        "least_us": round(2 * HEADS * DIM * pairs / PEAK[kind] * 1e6, 1),
    }
    launch(0)
    return cell | _checked(state, form, context, queries, weights, out)


def _state(form: RowFormat, context: int) -> DeviceState:
    pages = context // PAGE_TOKENS
    geometry = Geometry(GROUPS, 8, tuple(range(GROUPS)), form.row_bytes, TOPK)
    sizes = {"seats": 1, "chunks": 1, "index_pages": pages, "max_pages": pages, "max_chunks": 1}
    host = torch.zeros(1, geometry.page_bytes, dtype=torch.uint8).pin_memory()
    state = DeviceState.allocate(geometry, slab_pages=pages, tail_slots=1, host=host, device="cuda", **sizes)
    for group in range(GROUPS):
        state.index_keys[group] = form.encode(torch.randn(context, DIM, device="cuda"))
    for table in (state.index_table, state.slab_table):
        table.copy_(torch.randperm(pages, device="cuda").view(1, pages))
    return state


def _time(launch: Callable[[int], object]) -> float:
    """The median of a launch, in microseconds."""
    for group in range(GROUPS):
        launch(group)
    took: list[float] = []
    for replay in range(REPLAYS):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begun.record()
        launch(replay % GROUPS)
        ended.record()
        ended.synchronize()
        took.append(float(begun.elapsed_time(ended)) * 1e3)
    return round(statistics.median(took), 1)


def _checked(
    state: DeviceState,
    form: RowFormat,
    context: int,
    queries: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
) -> dict[str, float]:
    """Overlap with the best set by unquantized queries, and the share of its sum of scores, least over a few tokens."""
    pages = state.index_table[0].long()
    keys = form.decode(state.index_keys[0].view(-1, PAGE_TOKENS, form.row_bytes)[pages].flatten(0, 1))
    each, tokens = [], len(queries)
    for token in range(0, tokens, max(1, tokens // 16 - 1)):  # each place in a job
        scores = index_scores(queries[token], weights[token], keys[: context - tokens + token + 1], SCALE)
        each.append(agreement(scores, out[token]))
    overlaps, shares = zip(*each, strict=True)
    return {"overlap": round(min(overlaps), 4), "sum_share": round(min(shares), 6)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=len(CELLS), help="the first N")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cells = []
    for cell in CELLS[: options.cells]:
        cells.append(measure(*cell))
        print(json.dumps(cells[-1]), flush=True)
        if options.out:
            options.out.write_text(json.dumps({"machine": machine(), "cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    main()
