"""Time to first token, staged against direct: one worker computes a prompt and decodes it, or one of two each.

    python -m benchmarks.ttft [--ways staged node shared nixl] [--devices cpu cpu] [--netns]
    python -m benchmarks.ttft --model deepseek-v3.2 --layers 4 --devices cuda:0 cuda:1 --ways staged node shared

Real processes on two devices, two workers in each way:

    staged                   both of role `both`
    node                     one prefills, one decodes, over one host pool: nothing is transferred
    shared, nixl, mooncake   likewise, each with a pool of its own: pages travel by that engine. --netns (root) puts the
                             coordinator and both workers into network namespaces with addresses of their own

Milliseconds from submitting to the client's first and second token, medians of --rounds, for prompts not
seen before. The prefill worker draws the first token, so the second one is the first that needs the handover: pages
sent, index keys loaded, one decode step. `prefill` and `handover` are parts of it by the coordinator's history of the
request: admitted until staged, staged until it decodes. With --busy N, once more while N short requests decode; `gap`
is then the longest that any of those waited for a token, of the median round.

Copies are rated by the workers' own counters (bytes over seconds of the copying stream), each beside a plain copy of
64 MiB between the device and pinned memory, alone and both ways at once, of the same run. On a CPU both are memcpy.

`--model tiny` is the checkpoint of the demo; deepseek-v3.2 has the real dimensions of attention, indexer and (dense)
MLPs, random weights, a vocabulary of bytes. Writes benchmarks/results/ttft-NAME.json,
which benchmarks.report shows.
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
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import trio

from hisparse.client.client import Client
from protocol.config import HostFacts, build
from protocol.messages import DIRECT, STAGED, Sampling
from protocol.settings import Config, WorkerSettings
from protocol.units import PAGE_TOKENS, pages_for
from tests.support.netns_rig import Namespace, namespaces
from tests.support.nodes_rig import Nodes, Spot, running_nodes
from worker.runners.tiny import BOS, EOS, PAD, VOCAB, write_tiny_checkpoint

RESULTS: Final = Path(__file__).with_name("results")
NEW_TOKENS: Final = 8
BUSY_PROMPT_TOKENS: Final = 256
BUSY_TOKENS_MAX: Final = 16_384
SEATS: Final = 16
ROUND_LIMIT_S: Final = 600.0
COPY_BYTES: Final = 64 << 20
COPIES: Final = 9


# ---------------------------------------------------------------- the model and its workers


def write_model(path: Path, model: str, layers: int, context_tokens: int, device: str) -> None:
    """A checkpoint directory."""
    if model == "tiny":
        write_tiny_checkpoint(path, index_topk=128, context_max_tokens=context_tokens)
        return
    from transformers import AutoModelForCausalLM

    from worker.runners.synthetic import synthetic_config

    ends = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    config = synthetic_config(model, layers, vocab_size=VOCAB, max_position_embeddings=context_tokens, **ends)
    with torch.device(device):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    if device != "cpu":
        torch.cuda.empty_cache()


def configured(model: Path, directory: Path, options: argparse.Namespace, context_tokens: int) -> Config:
    is_cuda = options.devices[0] != "cpu"
    flags: dict[str, object] = {
        "cluster.runtime_dir": str(directory),
        "worker.model": str(model),
        "worker.device": options.devices[0],
        "worker.kv_dtype": options.kv_dtype,
        "worker.seats": SEATS,
        "worker.device_mem": "12GiB" if is_cuda else "768MiB",
        "worker.host_mem": "4GiB" if is_cuda else "512MiB",
        "worker.context_max_tokens": context_tokens,
        "worker.pass_tokens": options.pass_tokens,
        "worker.layer_group": options.layer_group,
        "worker.report_interval_ms": 1.0,
    }
    if not is_cuda:
        flags |= {"worker.threads": 1}
    return build({}, {}, flags, HostFacts.read())


def spots_of(way: str, devices: list[str], nodes: list[Namespace | None]) -> list[Spot]:
    first, second = devices
    if way == "staged":
        return [
            Spot("both", "a", device=first, namespace=nodes[1]),
            Spot("both", "a", device=second, namespace=nodes[2]),
        ]
    engine, node = ("", "a") if way == "node" else (way, "b")
    return [
        Spot("prefill", "a", engine, device=first, namespace=nodes[1]),
        Spot("decode", node, engine, device=second, namespace=nodes[2]),
    ]


# ---------------------------------------------------------------- one request


async def one_prompt(client: Client, tokens: int, name: str, prefill_mode: str) -> dict[str, Any]:
    """Milliseconds, and the coordinator's history of the request."""
    prompt = random.Random(name).choices(range(256), k=tokens)
    times: list[float] = []
    began = time.perf_counter()
    stream = await client.submit(
        prompt, Sampling(NEW_TOKENS, ignore_eos=True), request_id=name, prefill_mode=prefill_mode, priority=1
    )
    async for some in stream:
        times += [time.perf_counter()] * len(some)
    history = (await client.request(name)).history
    at = {line.event: line.at_s for line in reversed(history)}
    return {
        "history": [(round(1e3 * (line.at_s - history[0].at_s), 2), line.event, line.state) for line in history],
        "first": 1e3 * (times[0] - began),
        "second": 1e3 * (times[1] - began),
        "prefill": 1e3 * (at["staged"] - at["admitted"]),
        "handover": 1e3 * (at["started"] - at["staged"]),
    }


class Busy:
    """Requests that decode meanwhile: the longest wait for a token since it was asked last."""

    def __init__(self) -> None:
        self._longest_s = 0.0

    async def run(self, client: Client, name: str, prefill_mode: str, task_status: trio.TaskStatus[None]) -> None:
        prompt = random.Random(name).choices(range(256), k=BUSY_PROMPT_TOKENS)
        stream = await client.submit(
            prompt, Sampling(BUSY_TOKENS_MAX, ignore_eos=True), request_id=name, prefill_mode=prefill_mode
        )
        await anext(stream)
        await anext(stream)
        task_status.started()
        before = time.perf_counter()
        async for _ in stream:
            now = time.perf_counter()
            self._longest_s, before = max(self._longest_s, now - before), now

    def longest_ms(self) -> float:
        longest, self._longest_s = self._longest_s, 0.0
        return 1e3 * longest


@asynccontextmanager
async def decoding(client: Client, count: int, prefix: str, prefill_mode: str) -> AsyncIterator[Busy]:
    busy = Busy()
    async with trio.open_nursery() as nursery:
        names = [f"{prefix}-{i}" for i in range(count)]
        for name in names:
            await nursery.start(busy.run, client, name, prefill_mode)
        yield busy
        if names:
            await client.abort(names)


# ---------------------------------------------------------------- one way


async def measure(nodes: Nodes, client: Client, way: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    placement, rows = STAGED if way == "staged" else DIRECT, []
    warm = min(options.tokens) if options.devices[0] == "cpu" else max(options.tokens)
    for i in range(2):  # of both workers
        await one_prompt(client, warm, f"{way}-warm-{i}", placement)
    for count in dict.fromkeys((0, options.busy)):
        async with decoding(client, count, f"{way}-busy", placement) as busy:
            for tokens in options.tokens:
                before = await copies(nodes)
                found = []
                for i in range(options.rounds):
                    busy.longest_ms()
                    with trio.fail_after(ROUND_LIMIT_S):
                        row = await one_prompt(client, tokens, f"{way}-{count}-{tokens}-{i}", placement)
                    found.append(row | ({"gap": busy.longest_ms()} if count else {}))
                middle: dict[str, Any] = {
                    name: median(row[name] for row in found) for name in found[0] if name != "history"
                }
                rates = rates_of(before, await copies(nodes))
                rows.append(
                    {"way": way, "busy": count, "tokens": tokens} | middle | {"gb_per_s": rates, "rounds": found}
                )
                print(text(rows[-1]), flush=True)
    return rows


async def copies(nodes: Nodes) -> dict[str, tuple[float, float]]:
    """Bytes and seconds so far, by what copied them, of all workers."""
    total: dict[str, tuple[float, float]] = {}
    for i, spot in enumerate(nodes.spots):
        size, seconds = [
            await nodes.samples(f"w{i}", f"hisparse_worker_{name}_total", "purpose")
            for name in ("copied_bytes", "copy_seconds")
        ]
        for name in ("stage", "preload"):
            old = total.get(name, (0.0, 0.0))
            total[name] = (old[0] + size[name], old[1] + seconds[name])
        if spot.engine and spot.role == "decode":
            moved = await nodes.samples(f"w{i}", "hisparse_transfer_bytes_total", "end")
            took = await nodes.samples(f"w{i}", "hisparse_transfer_checksum_seconds_total", "end")
            total["receive"] = (moved["receiver"], took["receiver"])
    return total


def rates_of(before: dict[str, tuple[float, float]], after: dict[str, tuple[float, float]]) -> dict[str, float]:
    rates = {}
    for name, (size, seconds) in after.items():
        old = before.get(name, (0.0, 0.0))
        if seconds > old[1]:
            rates[name] = (size - old[0]) / (seconds - old[1]) / 1e9
    return rates


def text(row: dict[str, Any]) -> str:
    parts = "  ".join(f"{name} {row[name]:8.1f}" for name in ("first", "second", "prefill", "handover"))
    gap = f"  gap {row['gap']:7.1f}" if "gap" in row else ""
    rates = "  ".join(f"{name} {rate:.1f} GB/s" for name, rate in row["gb_per_s"].items())
    return f"{row['way']:8} busy {row['busy']}  {row['tokens']:6} tokens  {parts}{gap}  {rates}"


# ---------------------------------------------------------------- the limit


def plain_copies(device: str) -> dict[str, float]:
    """GB/s of 64 MiB between `device` and pinned host memory: to the host, from it, and both at once (their sum)."""
    host = [torch.ones(COPY_BYTES, dtype=torch.uint8, pin_memory=device != "cpu") for _ in range(2)]
    there = [torch.ones(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)] if device != "cpu" else []

    def rate(to_host: bool, to_device: bool) -> float:
        best = 0.0
        for _ in range(COPIES):
            wait(device)
            began = time.perf_counter()
            for number, wanted in enumerate((to_host, to_device)):
                source, target = (there[0], host[0]) if number == 0 else (host[1], there[1])
                with torch.cuda.stream(streams[number]) if streams else nullcontext():
                    if wanted:
                        target.copy_(source, non_blocking=True)
            wait(device)
            best = max(best, (to_host + to_device) * COPY_BYTES / (time.perf_counter() - began) / 1e9)
        return best

    return {"to_host": rate(True, False), "to_device": rate(False, True), "both": rate(True, True)}


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


# ---------------------------------------------------------------- all of it


@contextmanager
def places(options: argparse.Namespace) -> Iterator[list[Namespace | None]]:
    """Of the coordinator and of the two workers."""
    if not options.netns:
        yield [None] * 3
        return
    with namespaces(3) as found:
        yield list(found)


async def run(options: argparse.Namespace, way: str, model: Path, context_tokens: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="hisparse-ttft-") as directory, places(options) as found:
        config = configured(model, Path(directory), options, context_tokens)
        spots = spots_of(way, options.devices, found)
        began = time.monotonic()
        async with running_nodes(config, Path(directory), spots, found[0]) as (nodes, client):
            print(f"{way}: up in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            return await measure(nodes, client, way, options)


def machine(devices: list[str]) -> dict[str, Any]:
    names = [torch.cuda.get_device_name(device) for device in devices if device != "cpu"]
    return {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "devices": names,
        "torch": torch.__version__,
        "command": " ".join(["python", "-m", "benchmarks.ttft", *sys.argv[1:]]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=["staged", "node", "shared"])
    parser.add_argument("--devices", nargs=2, default=["cpu", "cpu"], help="of the worker that prefills, and the other")
    parser.add_argument("--netns", action="store_true")
    parser.add_argument("--model", choices=["tiny", "deepseek-v3.2"], default="tiny")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--pass-tokens", type=int, default=2_048)
    parser.add_argument("--layer-group", default=WorkerSettings().layer_group, help="0: whole pages")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2_048, 8_192, 32_768])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="where the checkpoint is made")
    parser.add_argument("--name", default="cpu", help="of the file of results")
    options = parser.parse_args()
    context_tokens = PAGE_TOKENS * pages_for(max(options.tokens)) + BUSY_TOKENS_MAX
    limits = {device: plain_copies(device) for device in dict.fromkeys(options.devices)}
    for device, rates in limits.items():
        print(f"{device}: " + ", ".join(f"{name} {rate:.1f} GB/s" for name, rate in rates.items()), flush=True)
    setting = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    rows: list[dict[str, Any]] = []
    result = {"machine": machine(options.devices), "setting": setting, "plain_copies": limits, "rows": rows}
    RESULTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hisparse-model-", dir=options.dir) as model:
        write_model(Path(model), options.model, options.layers, context_tokens, options.devices[0])
        for way in options.ways:
            rows += trio.run(run, options, way, Path(model), context_tokens)
            (RESULTS / f"ttft-{options.name}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
