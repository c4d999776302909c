"""Selections of prompts by fp8 queries beside those by exact queries: `python -m benchmarks.fp8_queries`.

Index keys are in fp8, and prompt_topk quantizes queries likewise. One cell is (context, values) at DeepSeek-V3.2's
indexer, 64 heads of 128, top-k 2048, for TOKENS tokens at the end of the context:

    normal     independent values: scores lie close to each other, and the most positions are near the edge
    outliers   a few large dimensions in queries and keys, which are rotated as the runner does (row_format.hadamard)
    topics     stretches of the context that a query likes more or less

It prints the overlap with the best set by queries as they are, and the share of the best sum of exact scores that the
selected ones reach, each the least and the mean over tokens. Exits with 1 where the least are below OVERLAP_MIN or
SHARE_MIN. `--device cpu --context 4096` needs no GPU; there torch selects.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from kernels.layout import Geometry
from kernels.prompt_pieces import PromptPiece, PromptPieces
from kernels.prompt_topk import prompt_topk
from kernels.reference.index_topk import index_scores
from kernels.row_format import hadamard, index_key_format
from kernels.state import DeviceState
from protocol.units import PAGE_TOKENS

HEADS, DIM, TOPK, TOKENS, SCALE = 64, 128, 2048, 32, 128**-0.5
CONTEXTS: Final = (32_768, 131_072)
OVERLAP_MIN, SHARE_MIN = 0.96, 0.999
FORM: Final = index_key_format("fp8", DIM)
Values = Callable[
    [int, str], tuple[Tensor, Tensor]
]  # context and device to keys [n, DIM], queries [TOKENS, HEADS, DIM]


class Agreement(NamedTuple):
    """Overlap of one selection with the best one by exact scores."""

    overlap: float
    sum_share: float


def agreement(scores: Tensor, selected: Tensor) -> Agreement:
    """Figures of the positions int[k] `selected`, by exact `scores` float32[n], n at least k."""
    chosen, best = selected.long(), scores.topk(len(selected)).indices
    overlap = torch.isin(chosen, best).double().mean().item()
    return Agreement(overlap, (scores[chosen].double().sum() / scores[best].double().sum()).item())


def normal(context: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(context, DIM, device=device), torch.randn(TOKENS, HEADS, DIM, device=device)


def outliers(context: int, device: str) -> tuple[Tensor, Tensor]:
    size = torch.ones(DIM, device=device)
    size[:4] = 20.0
    rotation = hadamard(DIM, torch.float32, device)
    keys, queries = normal(context, device)
    return keys * size @ rotation, queries * size @ rotation


def topics(context: int, device: str) -> tuple[Tensor, Tensor]:
    topic = torch.randn(-(-context // 512), DIM, device=device).repeat_interleave(512, 0)[:context]
    keys, queries = normal(context, device)
    liked = topic[torch.randint(context, (TOKENS,), device=device)]
    return keys + topic, queries + liked[:, None]


VALUES: Final[dict[str, Values]] = {"normal": normal, "outliers": outliers, "topics": topics}


def measure(context: int, values: str, device: str) -> dict[str, Any]:
    """One cell."""
    torch.manual_seed(context)
    keys, queries = VALUES[values](context, device)
    queries, weights = queries.bfloat16(), torch.rand(TOKENS, HEADS, device=device) * HEADS**-0.5
    state = _state(keys)
    found = torch.empty(TOKENS, TOPK, dtype=torch.int32, device=device)
    pieces = PromptPieces.of([PromptPiece(0, TOKENS, 0, context - TOKENS)], device)
    prompt_topk(state, 0, pieces, queries, weights, SCALE, found)
    held = FORM.decode(state.index_keys[0])
    each = []
    for token, own in enumerate(queries):
        scores = index_scores(own, weights[token], held[: context - TOKENS + token + 1], SCALE)
        each.append(agreement(scores, found[token]))
    overlaps, shares = zip(*each, strict=True)
    return {
        "context": context,
        "values": values,
        "overlap": round(min(overlaps), 4),
        "overlap_mean": round(sum(overlaps) / TOKENS, 4),
        "sum_share": round(min(shares), 6),
        "sum_share_mean": round(sum(shares) / TOKENS, 6),
    }


def _state(keys: Tensor) -> DeviceState:
    """One seat whose pages hold `keys` [n, DIM] in order."""
    pages, device = len(keys) // PAGE_TOKENS, keys.device
    geometry = Geometry(1, 8, (0,), FORM.row_bytes, TOPK)
    sizes = {"seats": 1, "chunks": 1, "index_pages": pages, "max_pages": pages, "max_chunks": 1, "slab_pages": 1}
    host = torch.zeros(1, geometry.page_bytes, dtype=torch.uint8)
    host = host.pin_memory() if device.type == "cuda" else host
    state = DeviceState.allocate(geometry, tail_slots=1, host=host, device=device, **sizes)
    state.index_keys[0] = FORM.encode(keys)
    state.index_table.copy_(torch.arange(pages, device=device).view(1, pages))
    return state


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, nargs="+", default=list(CONTEXTS), help="multiples of 64, 4096 or more")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    cells = []
    for context in options.context:
        for values in VALUES:
            cells.append(measure(context, values, options.device))
            print(json.dumps(cells[-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps({"device": options.device, "cells": cells}, indent=1) + "\n")
    return int(any(cell["overlap"] < OVERLAP_MIN or cell["sum_share"] < SHARE_MIN for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
