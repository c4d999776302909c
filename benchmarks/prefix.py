"""What reuse of prefixes saves and costs: `python -m benchmarks.prefix [--json]`; `--gpu` for a card.

On a CPU, with the tiny checkpoint and real processes (a coordinator and one worker):

    ttft_cold_ms, ttft_warm_ms   first token of a prompt of --prefix and --new tokens: nothing of it cached, and after a
                                 request of the first --prefix tokens. Medians of --rounds prompts
    prompt_tokens, cached_tokens of one such prompt: all, and those reused in the warm request
    mismatched_tokens            outputs of the warm requests that differ from those of the cold ones
    admission_cpu_us_off, _on    CPU of the coordinator for one admission, by prompt length, without and with reuse
                                 (benchmarks/prefix_admission.py; `on` is the dearer of a hit and a miss)
    loop                         the coordinator's loop while prompts of 1,048,576 tokens arrive, half of them cached

`--gpu` is benchmarks/prefix_gpu.py: one worker's executor, DeepSeek-V3.2's dimensions, the prefix in host memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

import trio

from benchmarks.prefix_admission import admissions, loop_delay
from hisparse.client.client import Client
from hisparse.cluster.up import running_cluster
from protocol.config import HostFacts, build
from protocol.messages import Sampling
from protocol.settings import Config, WorkerSettings
from worker.runners.tiny import VOCAB, write_tiny_checkpoint

RESULTS: Final = Path(__file__).with_name("results")
OUTPUT_TOKENS: Final = 16
#: One below a page, one of ten, one of the measured prompts, one that is digested in several parts.
ADMISSION_TOKENS: Final = (32, 640, 8_392, 65_536)
LIMIT_S: Final = 600.0


def _config(model: Path, directory: Path, context_tokens: int, threads: int) -> Config:
    flags: dict[str, object] = {
        "cluster.runtime_dir": str(directory),
        "coordinator.prefix_reuse": "own",
        "worker.model": str(model),
        "worker.seats": 4,
        "worker.device_mem": "512MiB",
        "worker.host_mem": "512MiB",
        "worker.context_max_tokens": context_tokens,
        "worker.hot_size_classes": (1_024,),
        "worker.report_interval_ms": 1.0,
        "worker.threads": threads,
    }
    return build({}, {}, flags, HostFacts.read())


async def _ask(client: Client, prompt: list[int], salt: str, tokens: int) -> tuple[float, list[int], int]:
    """Seconds to the first token, the output, and tokens reused."""
    began = time.perf_counter()
    stream = await client.submit(prompt, Sampling(tokens, ignore_eos=True), cache_salt=salt)
    output: list[int] = []
    first_s = 0.0
    async for part in stream:
        first_s = first_s or time.perf_counter() - began
        output += part.tolist()
    assert stream.ended is not None
    return first_s, output, stream.ended.prefix_tokens


async def _first_tokens(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    model = directory / "model"
    context = options.prefix + options.new + 1_024
    write_tiny_checkpoint(model, index_topk=128, context_max_tokens=context)
    rng = random.Random(7)
    cold, warm, reused, mismatched = [], [], [], 0
    config = _config(model, directory, context, options.threads)
    async with running_cluster(config, 1, log_dir=directory) as cluster, cluster.client("benchmark") as client:
        await _ask(client, rng.choices(range(VOCAB - 8), k=options.prefix), "warm up", 2)
        for number in range(options.rounds):
            prefix = rng.choices(range(VOCAB - 8), k=options.prefix)
            prompt = prefix + rng.choices(range(VOCAB - 8), k=options.new)
            with trio.fail_after(LIMIT_S):
                cold_s, expected, none = await _ask(client, prompt, f"cold {number}", OUTPUT_TOKENS)
                await _ask(client, prefix, f"warm {number}", 1)
                warm_s, output, cached = await _ask(client, prompt, f"warm {number}", OUTPUT_TOKENS)
            assert none == 0
            cold.append(1e3 * cold_s)
            warm.append(1e3 * warm_s)
            reused.append(cached)
            mismatched += sum(a != b for a, b in zip(expected, output, strict=True))
    return {
        "prompt_tokens": options.prefix + options.new,
        "cached_tokens": min(reused),
        "ttft_cold_ms": round(median(cold), 1),
        "ttft_warm_ms": round(median(warm), 1),
        "ttft_ratio": round(median(cold) / median(warm), 2),
        "ttft_cold_all_ms": [round(it, 1) for it in cold],
        "ttft_warm_all_ms": [round(it, 1) for it in warm],
        "mismatched_tokens": mismatched,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="hisparse-prefix-") as path:
        result = trio.run(_first_tokens, options, Path(path))
    rows = trio.run(admissions, ADMISSION_TOKENS, options.admissions)
    result["admission_cpu_us_off"] = {str(row["prompt_tokens"]): row["off_us"] for row in rows}
    result["admission_cpu_us_on"] = {str(row["prompt_tokens"]): max(row["miss_us"], row["hit_us"]) for row in rows}
    result["admissions"] = rows
    result["loop"] = {mode: trio.run(loop_delay, mode, options.long_prompts) for mode in ("off", "own")}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--out", type=Path, help="write the result there, with machine and command")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--prefix", type=int, help="tokens; default 8192, with --gpu 74160")
    parser.add_argument("--new", type=int, help="tokens; default 200, with --gpu 753")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--admissions", type=int, default=300, help="pairs of admissions for each length")
    parser.add_argument("--long-prompts", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4, help="with --gpu")
    parser.add_argument("--kv-dtype", default="fp8", help="with --gpu")
    parser.add_argument("--pass-tokens", type=int, default=2_048, help="with --gpu: tokens of a prompt pass")
    parser.add_argument(
        "--layer-group", default=WorkerSettings().layer_group, help="with --gpu: worker.layer_group; 1: a layer each"
    )
    options = parser.parse_args()
    options.prefix = options.prefix or (74_160 if options.gpu else 8_192)
    options.new = options.new or (753 if options.gpu else 200)
    if options.gpu:
        from benchmarks.prefix_gpu import measure as measure_gpu

        result = measure_gpu(options)
    else:
        result = measure(options)
    if options.out is not None:
        about = {"python": platform.python_version(), "kernel": platform.release(), "cores": str(os.cpu_count())}
        about["load_average"] = str(os.getloadavg()[0])
        about["command"] = " ".join(["python", "-m", "benchmarks.prefix", *sys.argv[1:]])
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"machine": about, "result": result}, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{key:24} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
