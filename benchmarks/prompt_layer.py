"""One layer of a prompt pass by the worker's own code: `python -m benchmarks.prompt_layer [--matmul w8a8]` on an H200.

DeepSeek-V3.2's dimensions, one rank of `--of` with random weights; the other ranks' rows are synthesised as in
benchmarks/rank.py. A layer with experts and one without, over a pass of so many tokens behind `--context` earlier ones,
whose rows and index keys are random. Medians of REPEATS launches of the layer, a unit after the other, eagerly:

    ms         on the device, from the first launch to the end of the last
    host_ms    until the host has launched all
    tflops     counted operations a second: products, scores over the whole context, attention to what is selected, and
               the experts that this rank's tokens chose, or as many of other ranks' rows
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch

from benchmarks.decode import PROFILED, by_kernel
from benchmarks.rank import FAMILY, SynthesisedRanks
from benchmarks.rank_floor import parts_of
from benchmarks.serve.worker import fill
from benchmarks.swap_in import machine
from kernels.layout import Geometry
from kernels.state import DeviceState
from protocol.config_checks import MATMULS, WEIGHT_ONLY
from protocol.units import BLOCK_TOKENS_MAX, pages_for
from worker.runners import transformers_dsa
from worker.runners.base import PromptPart
from worker.runners.synthetic import synthetic_matmul, synthetic_runner
from worker.runners.transformers_dsa import TransformersRunner
from worker.streams import make_streams
from worker.weights.layout import has_experts
from worker.weights.synth import published_config

#: As many as bring one layer with experts.
LAYERS: Final = 4
REPEATS: Final = 9


class LayerPass:
    """A pass of `tokens` behind `context` others of one prompt, all of whose layers lie in the slab."""

    def __init__(self, runner: TransformersRunner, context: int, tokens: int, device: str = "cuda") -> None:
        self.runner, self.tokens = runner, tokens
        pages, geometry = pages_for(context + tokens), runner.geometry
        sizes = {"seats": 1, "chunks": 1, "index_pages": pages, "max_pages": pages, "max_chunks": 1}
        host = torch.zeros(1, geometry.page_bytes, dtype=torch.uint8)
        host = host.pin_memory() if device == "cuda" else host
        self.state = DeviceState.allocate(geometry, slab_pages=pages, tail_slots=1, host=host, device=device, **sizes)
        fill(self.state, runner)
        for table in (self.state.index_table, self.state.slab_table):
            table.copy_(torch.randperm(pages, device=device).view(1, pages))
        self._streams = make_streams("inline")
        ids = torch.arange(tokens, device=device) % runner.info.vocab_size
        parts = [PromptPart(0, context, context + tokens, 0, False)]
        self.prompts = runner.begin_pass(self._streams, self.state, parts, ids)

    def launch(self, layer: int) -> None:
        """Launch all units of `layer`."""
        size = self.runner.block_tokens_max
        for first in range(0, self.tokens, size):
            stop = min(first + size, self.tokens)
            self.runner.launch_unit(self._streams, self.state, self.prompts, layer, first, stop, rows=stop - first)


def operations(config: Any, geometry: Geometry, layer: int, *, tokens: int, context: int, of: int) -> float:
    """Operations of `layer` over `tokens` behind `context` others, on one rank `of` a group."""
    seen = round(context + (tokens + 1) / 2)  # by a token, on average
    parts = parts_of(config, geometry, rows=tokens, of=of, context=seen)
    layers = range(config.num_hidden_layers)
    mixtures = sum(has_experts(config, one) for one in layers)
    mlp = {"shared": mixtures, "experts": mixtures} if has_experts(config, layer) else {"dense": len(layers) - mixtures}
    held = {"projections": len(layers), "indexer": len(layers), "index": len(layers), "attention": len(layers)} | mlp
    return sum(parts[name].operations / count for name, count in held.items())


def measured(passed: LayerPass, layer: int) -> dict[str, float]:
    """Milliseconds of `layer`, on the device and on the host."""
    passed.launch(layer)
    torch.cuda.synchronize()
    took, launched = list[float](), list[float]()
    for _ in range(REPEATS):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        since = time.perf_counter()
        begun.record()
        passed.launch(layer)
        ended.record()
        launched.append((time.perf_counter() - since) * 1e3)
        ended.synchronize()
        took.append(float(begun.elapsed_time(ended)))
    return {"ms": round(statistics.median(took), 3), "host_ms": round(statistics.median(launched), 3)}


def kernels_of(passed: LayerPass, layer: int) -> list[str]:
    """Lines of the kernels of `layer`, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            passed.launch(layer)
        torch.cuda.synchronize()
    ran = [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
    return by_kernel([(event.name, event.time_range.start, event.time_range.end) for event in ran])


def layers_of(config: Any) -> Sequence[int]:
    """A layer without experts and one with them."""
    return next(n for n in range(LAYERS) if not has_experts(config, n)), LAYERS - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", type=int, default=8, help="ranks of the group")
    parser.add_argument("--matmul", choices=MATMULS, default=WEIGHT_ONLY, help="worker.matmul")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4_096, 8_192])
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--kernels", type=int, default=25, help="print as many of each layer with experts")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = published_config(FAMILY, layers=LAYERS)
    is_quantized = synthetic_matmul(options.matmul, device="cuda", fp8=True).quantizes_rows
    ranks = SynthesisedRanks.draw(config, options.of, BLOCK_TOKENS_MAX, "cuda", quantized=is_quantized)
    with patch.object(transformers_dsa, "prepare_quantized_products", lambda *_: 0):  # those of other sizes too
        runner = synthetic_runner(
            config,
            kv_dtype="fp8",
            fp8=True,
            matmul=options.matmul,
            collectives=ranks,
            rows_max=BLOCK_TOKENS_MAX,
        )
    cells = []
    for tokens in options.tokens:
        passed = LayerPass(runner, options.context, tokens)
        for layer in layers_of(config):
            count = operations(config, runner.geometry, layer, tokens=tokens, context=options.context, of=options.of)
            cell = {"tokens": tokens, "experts": has_experts(config, layer), "tflop": round(count / 1e12, 2)}
            cell |= measured(passed, layer)
            cell["tflops"] = round(count / cell["ms"] / 1e9)
            cells.append({"matmul": options.matmul, "context": options.context} | cell)
            print(json.dumps(cells[-1]), flush=True)
            if has_experts(config, layer):
                print("\n".join(kernels_of(passed, layer)[: options.kernels]), flush=True)
        del passed
        torch.cuda.empty_cache()
    if options.out:
        options.out.write_text(json.dumps({"machine": machine(), "cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    main()
