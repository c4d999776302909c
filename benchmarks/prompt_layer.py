"""One layer of a prompt pass by the worker's own code: `python -m benchmarks.prompt_layer [--matmul w8a8]` on an H200;
and with `--gpus 2` a whole prompt on one rank of a group of two, whose passes both ranks split, or not.

DeepSeek-V3.2's dimensions, one rank of `--of` with random weights; the other ranks' rows are synthesised as in
benchmarks/rank.py. A layer with experts and one without, over a pass of so many tokens behind `--context` earlier ones,
whose rows and index keys are random. Medians of REPEATS launches of the layer, a unit after the other, eagerly:

    ms         on the device, from the first launch to the end of the last
    host_ms    until the host has launched all
    tflops     counted operations a second: products, scores over the whole context, attention to what is selected, and
               the experts that this rank's tokens chose, or as many of other ranks' rows

With `--gpus` each rank is a process with the worker's executor, and nothing of other ranks is synthesised. A prompt of
`--prompt` tokens is computed with passes not split, split and not split again, in turn, in one run (`--device cpu`: a
tiny model, to see that it runs):

    ttft_ms       from its admission to its first token: medians, and all
    ratio         of these medians
    same_tokens   prompts whose OUTPUT_TOKENS are equal: split, whose rows have the bits of other shapes of products;
                  and not split again
    first_change  of a log-probability of the first token, the largest: likewise
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch

from benchmarks.decode import PROFILED, by_kernel
from benchmarks.prefix_gpu import Answer, PromptWorker, changed
from benchmarks.rank import FAMILY, SynthesisedRanks
from benchmarks.rank_floor import parts_of
from benchmarks.serve.model import config_of
from benchmarks.serve.worker import fill
from benchmarks.swap_in import machine
from kernels.layout import Geometry
from kernels.state import DeviceState
from protocol.config_checks import MATMULS, WEIGHT_ONLY
from protocol.messages import LOGPROBS_MAX
from protocol.settings import ClusterSettings, Config, WorkerSettings
from protocol.units import BLOCK_TOKENS_MAX, pages_for
from worker.device.pinned import host_tensor
from worker.group.group import Group
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
#: Tokens from which a pass is split, of worker.split_tokens.
SPLIT: Final = WorkerSettings().split_tokens
DONE: Final = "done"
#: Longest run of a group.
GROUP_LIMIT_S: Final = 600.0


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


class Ranks:
    """Words that the ranks of a run say to each other, as files of one directory. Rank 0 leads."""

    def __init__(self, directory: Path, rank: int, size: int) -> None:
        self._directory, self._rank, self._size = directory, rank, size
        self._heard = 0

    def say(self, text: str) -> None:
        """Rank 0 says `text`; returns once the others have heard it."""
        path = self._directory / f"said-{self._heard}"
        path.with_suffix(".partial").write_text(text)
        path.with_suffix(".partial").rename(path)
        heard = [self._directory / f"heard-{self._heard}-{rank}" for rank in range(1, self._size)]
        while not all(path.exists() for path in heard):
            time.sleep(0.001)
        self._heard += 1

    def hear(self) -> str | None:
        """Return what rank 0 has said since this rank heard it last, if anything."""
        path = self._directory / f"said-{self._heard}"
        if not path.exists():
            return None
        text = path.read_text()
        (self._directory / f"heard-{self._heard}-{self._rank}").touch()
        self._heard += 1
        return text


def split_from(worker: PromptWorker, tokens: int) -> None:
    """Split passes from so many tokens on: on all ranks, while their group sleeps."""
    rounds = worker.executor._rounds
    assert rounds is not None
    rounds._agreement._split_tokens = tokens


def lead(worker: PromptWorker, ranks: Ranks, repeats: int) -> dict[str, Any]:
    """Times of the prompts of rank 0, and what became of them."""
    plain, split, again = runs = list[Answer](), list[Answer](), list[Answer]()
    for seed in range(1 + repeats):
        for tokens, answers in zip((0, SPLIT, 0), runs, strict=True):
            ranks.say(str(tokens))
            split_from(worker, tokens)
            answers.append(worker.answer(seed, logprobs=LOGPROBS_MAX))
    ranks.say(DONE)
    plain_ms, split_ms = ([round(1e3 * one.first_s, 2) for one in answers[1:]] for answers in (plain, split))
    return {
        "prompt": worker.tokens,
        "split_units": worker.executor.counters.split_units,
        "ttft_ms": statistics.median(plain_ms),
        "ttft_split_ms": statistics.median(split_ms),
        "ratio": round(statistics.median(split_ms) / statistics.median(plain_ms), 3),
        "all_ms": plain_ms,
        "all_split_ms": split_ms,
        "same_tokens": [sum(map(has_same_tokens, plain, other)) for other in (split, again)],
        "first_change": [round(max(map(first_change, plain, other)), 4) for other in (split, again)],
        "of": 1 + repeats,
    }


def has_same_tokens(one: Answer, other: Answer) -> bool:
    return one.tokens == other.tokens


def first_change(one: Answer, other: Answer) -> float:
    """The largest change of a log-probability of the first token."""
    return changed(one.logprobs[0], other.logprobs[0])


def follow(worker: PromptWorker, ranks: Ranks) -> None:
    """Turn until rank 0 is done."""
    while (said := ranks.hear()) != DONE:
        if said is not None:
            split_from(worker, int(said))
        if not worker.executor.turn():
            time.sleep(0.0001)


def run_rank(options: argparse.Namespace, rank: int) -> dict[str, Any] | None:
    """Run one rank; rank 0 returns what was found."""
    directory: Path = options.directory
    is_tiny = options.device == "cpu"
    about = {
        "name": f"w{rank}",
        "group": "g0",
        "group_rank": rank,
        "group_size": options.gpus,
        "device": options.device,
    }
    endpoint = f"ipc://{directory}/group.sock"
    settings = WorkerSettings(group_endpoint=endpoint, pass_tokens=options.pass_tokens, **about)
    group = Group.join(Config(cluster=ClusterSettings(runtime_dir=str(directory)), worker=settings), "random")
    config = config_of(options.layers, tiny=is_tiny)
    kinds = {"device": options.device, "kv_dtype": "fp8", "fp8": not is_tiny, "matmul": options.matmul}
    with patch.object(transformers_dsa, "prepare_quantized_products", lambda *_: 0):
        runner = synthetic_runner(config, collectives=group.collectives, rows_max=BLOCK_TOKENS_MAX, **kinds)
    pages = 3 * pages_for(options.prompt)
    pool = host_tensor(pages, runner.geometry.page_bytes, dtype=torch.uint8, device=options.device)
    kinds = {"pass_tokens": options.pass_tokens, "device": options.device}
    worker = PromptWorker(runner, pool, options.prompt, group=group, **kinds)
    group.control.progress.turns = True
    ranks = Ranks(directory, rank, options.gpus)
    if rank:
        follow(worker, ranks)
        return None
    return lead(worker, ranks, options.repeats)


def run_group(options: argparse.Namespace) -> None:
    """Start the ranks, each with a GPU of its own, and print what rank 0 says."""
    with tempfile.TemporaryDirectory(prefix="hisparse-split-") as directory:
        command = [sys.executable, "-m", "benchmarks.prompt_layer", *sys.argv[1:], "--directory", directory, "--rank"]
        ranks = [
            subprocess.Popen([*command, str(rank)], env=os.environ | {"CUDA_VISIBLE_DEVICES": str(rank)})
            for rank in range(options.gpus)
        ]
        try:
            codes = [rank.wait(GROUP_LIMIT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    raise SystemExit(max(map(abs, codes)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", type=int, default=8, help="ranks of the group")
    parser.add_argument("--matmul", choices=MATMULS, default=WEIGHT_ONLY, help="worker.matmul")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4_096, 8_192])
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--kernels", type=int, default=25, help="print as many of each layer with experts")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of the ranks of a group")
    parser.add_argument("--gpus", type=int, default=1, help="above 1: a prompt on a group of so many")
    parser.add_argument("--prompt", type=int, default=32_768)
    parser.add_argument("--pass-tokens", type=int, default=WorkerSettings().pass_tokens)
    parser.add_argument("--layers", type=int, default=LAYERS + 2, help="of the group's model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.rank is not None:
        found = run_rank(options, options.rank)
        if found is not None:
            print(json.dumps({"gpus": options.gpus, "layers": options.layers, "matmul": options.matmul} | found))
        sys.stdout.flush()
        os._exit(0)  # communicators that graphs refer to do not end
    if options.gpus > 1:
        run_group(options)
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
