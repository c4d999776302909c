"""From the SIGKILL of a worker to the first new token of its request, against prefilling that request again.

    python -m benchmarks.worker_crash [--tokens 2048 8192 32768] [--rounds 3] [--device cuda] [--json]

Two real workers of one node (and one device) under a real coordinator, the tiny checkpoint, default
settings. A request decodes on one worker; the other is warm (it has served one of that length) and takes over. Both
ways start with the rows of the same request and end with the first token that its client had not seen:

    detect_ms    SIGKILL ─► the coordinator has declared the worker down; common to both ways, and told apart
    resume_ms    ─► first new token: index keys reloaded from host memory, a cold hot buffer, tokens past the durable
                 length forced through decode steps
    prefill_ms   dropped instead (its host pages given up) ─► first new token: the prompt prefilled again, delivered
                 tokens forced. What engines do whose KV dies with the process

`ratio` is prefill_ms / resume_ms. Prints the median of the rounds and, with --json, every round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import trio

from hisparse.client.client import Client
from hisparse.cluster.supervision import ProcessSupervisor
from hisparse.cluster.up import Cluster, running_cluster
from protocol.config import HostFacts, build
from protocol.messages import Sampling
from protocol.settings import Config
from protocol.units import PAGE_TOKENS, pages_for

#: Decoded before the worker is killed.
DECODED = 24
#: Longest output: a round never reaches it.
MAX_TOKENS = 4_096
ROUND_LIMIT_S = 900.0


def cluster_config(model: Path, runtime_dir: Path, tokens: int, device: str) -> Config:
    context = PAGE_TOKENS * pages_for(tokens + MAX_TOKENS)
    flags: dict[str, object] = {
        "cluster.runtime_dir": str(runtime_dir),
        "worker.model": str(model),
        "worker.device": device,
        "worker.seats": 2,
        "worker.device_mem": "512MiB",
        "worker.host_mem": "256MiB",
        "worker.context_max_tokens": context,
        "worker.hot_size_classes": (256,),
        "worker.hot_chunks_max": 2 * (256 // PAGE_TOKENS + 1),
        "worker.threads": 1,
    }
    return build({}, {}, flags, HostFacts.read())


class Follower:
    """The request's client: when each token came."""

    def __init__(self) -> None:
        self.seen = 0
        self.worker = ""
        self._news = trio.Event()

    async def run(self, client: Client, prompt: list[int], name: str) -> None:
        stream = await client.submit(prompt, Sampling(MAX_TOKENS, ignore_eos=True), request_id=name)
        async for tokens in stream:
            self.seen += len(tokens)
            self._news.set()
            self._news = trio.Event()

    async def past(self, tokens: int) -> float:
        """The time, in seconds since the epoch, at which more than `tokens` were seen."""
        while self.seen <= tokens:
            await self._news.wait()
        return time.time()


async def one_round(cluster: Cluster, client: Client, tokens: int, name: str) -> dict[str, float]:
    prompt = random.Random(name).choices(range(256), k=tokens)
    follower = Follower()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(follower.run, client, prompt, name)
        await follower.past(DECODED)
        row = (await client.request(name)).row
        killed_at = time.time()
        os.kill(cluster.workers[row.worker].pid, signal.SIGKILL)
        lost_at = await _when(client, name, "lost")
        first_at = await follower.past(max(follower.seen, (await client.request(name)).row.generated_tokens))
        await follower.past(follower.seen + DECODED)
        seen, dropped_at = follower.seen, time.time()
        await client.retract([name], keep=False, hold=False)
        again_at = await follower.past(max(seen, await _generated_when_dropped(client, name)))
        await client.abort([name])
    return {
        "tokens": tokens,
        "detect_ms": 1e3 * (lost_at - killed_at),
        "resume_ms": 1e3 * (first_at - lost_at),
        "prefill_ms": 1e3 * (again_at - dropped_at),
        "ratio": (again_at - dropped_at) / (first_at - lost_at),
    }


async def _when(client: Client, name: str, event: str) -> float:
    while True:
        at = [line.at_s for line in (await client.request(name)).history if line.event == event]
        if at:
            return at[-1]
        await trio.sleep(0.002)


async def _generated_when_dropped(client: Client, name: str) -> int:
    """Tokens known once it has left its worker: the next one is new."""
    while True:
        detail = await client.request(name)
        if detail.row.retractions and detail.row.state in ("QUEUED", "PREFILLING"):
            return detail.row.generated_tokens
        await trio.sleep(0.002)


async def measure(model: Path, tokens: int, rounds: int, device: str) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="hisparse-crash-") as directory:
        config = cluster_config(model, Path(directory), tokens, device)
        async with (
            running_cluster(config, 2, log_dir=Path(directory)) as cluster,
            cluster.client("bench") as client,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(ProcessSupervisor(cluster, lambda line: None, lambda: None).run)
            for i in range(rounds):
                with trio.fail_after(ROUND_LIMIT_S):
                    await _warm(cluster, client, tokens)
                    rows.append(await one_round(cluster, client, tokens, f"crash-{i}"))
                print(text(rows[-1]), flush=True, file=sys.stderr)
            nursery.cancel_scope.cancel()
    return rows


async def _warm(cluster: Cluster, client: Client, tokens: int) -> None:
    """Both workers are there and have served a request of that length."""
    while {row.worker for row in await client.workers() if row.state == "connected"} != set(cluster.workers):  # noqa: ASYNC110
        await trio.sleep(0.1)
    prompt = random.Random(tokens).choices(range(256), k=tokens)
    for name in cluster.workers:
        others = [other for other in cluster.workers if other != name]
        await client.drain(others, deadline_s=600)
        await (await client.submit(prompt, Sampling(4, ignore_eos=True))).collect()
        await client.undrain(others)


def text(row: dict[str, float]) -> str:
    return (
        f"{row['tokens']:6} tokens  detect {row['detect_ms']:7.1f} ms  resume {row['resume_ms']:8.1f} ms  "
        f"prefill again {row['prefill_ms']:9.1f} ms  ratio {row['ratio']:6.1f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2_048, 8_192, 32_768])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="of both workers: cpu, cuda or cuda:N")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    from worker.runners.tiny import write_tiny_checkpoint

    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="hisparse-model-") as directory:
        write_tiny_checkpoint(Path(directory), index_topk=128, context_max_tokens=65_536)
        for tokens in options.tokens:
            rows = trio.run(measure, Path(directory), tokens, options.rounds, options.device)
            middle = {name: median(row[name] for row in rows) for name in rows[0]}
            results.append({"median": middle, "rounds": rows})
            if not options.json:
                print(text(middle), flush=True)
    if options.json:
        print(
            json.dumps(
                {"machine": platform.platform(), "cpus": os.cpu_count(), "device": options.device, "results": results}
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
