"""The pause of each request while `hisparse up --replace-workers` replaces its worker, beside that of a drain alone.

    python -m benchmarks.replace --out replace.json

Coordinator, workers and keepers run as `hisparse up` runs them, with the tiny checkpoint of benchmarks.takeover on a
CPU. `--requests` streams decode. A pause is the longest wait of a stream for its next token between the retraction and
the start behind it, by the coordinator's history, and until its first token after both:

    drain     a worker is drained with handover, and nothing else runs; then the other one, once the first is back
    replace   both workers are replaced, one after the other: each by a standby, a drain with handover and an exit
    alone     the only worker of a node is replaced: its requests wait for the takeover

Greedy and deterministic: exits with 1 when a token differs from those of other cells.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from benchmarks.serve.__main__ import machine
from benchmarks.takeover import config_of, until, write_model
from hisparse.client.client import Client
from hisparse.cluster.children import Code
from hisparse.cluster.replacing import ReplaceOrder, WorkerReplacement
from hisparse.cluster.supervision import ProcessSupervisor
from hisparse.cluster.up import Cluster, running_cluster
from protocol.messages import Sampling

#: Tokens of each stream before a cell begins, and behind its end.
BEFORE: Final = 32
AFTER: Final = 32
POLL_S: Final = 0.02
DEADLINE_S: Final = 60.0


class MovedStream:
    """A request and when each of its tokens came, in seconds since the epoch."""

    def __init__(self, name: str, prompt: Sequence[int]) -> None:
        self.name, self.prompt = name, prompt
        self.tokens: list[int] = []
        self.arrivals: list[float] = []

    async def run(self, client: Client, max_tokens: int) -> None:
        """Submit the prompt, and read until it is aborted."""
        sampling = Sampling(max_tokens, temperature=0.0, ignore_eos=True)
        async for tokens in await client.submit(self.prompt, sampling, request_id=self.name):
            self.tokens += tokens.tolist()
            self.arrivals.append(time.time())

    async def pauses_ms(self, client: Client) -> list[float]:
        """Return the pause of each move to another worker."""
        events = [(line.event, line.at_s) for line in (await client.request(self.name)).history]
        pairs, found = [*zip(self.arrivals, self.arrivals[1:], strict=False)], []
        for place, (event, since) in enumerate(events):
            if event == "retract":
                until_s = next(at for later, at in events[place:] if later == "started")
                found.append(
                    1e3 * max(after - before for before, after in pairs if after >= since and before <= until_s)
                )
        return found


class Replacing:
    """Cells, each with streams of its own, on one cluster of two workers and one of one worker."""

    def __init__(self, options: argparse.Namespace, model: Path) -> None:
        self.options, self.model = options, model
        self.prompts = [[(7 * i + 3 * k) % 256 for k in range(200 + 10 * i)] for i in range(options.requests)]
        self.expected: list[list[int]] = [[] for _ in self.prompts]
        self.pauses: dict[str, list[float]] = {}
        self.differ = self.compared = 0

    async def run(self) -> None:
        """Run all cells `--rounds` times."""
        for workers in (2, 1):
            with tempfile.TemporaryDirectory(prefix="hisparse-replace-") as directory:
                config = config_of(self.options, self.model, Path(directory), standby=False)
                async with (
                    running_cluster(config, workers, log_dir=Path(directory)) as cluster,
                    cluster.client("benchmark") as client,
                    trio.open_nursery() as nursery,
                ):
                    supervisor = ProcessSupervisor(cluster, print, lambda: None, standbys=cluster.standbys)
                    nursery.start_soon(supervisor.run)
                    await trio.sleep(POLL_S)  # it has begun then
                    await until(partial(_all_serve, supervisor, cluster))
                    for turn in range(self.options.rounds):
                        await self.run_round(cluster, client, supervisor, turn)
                    nursery.cancel_scope.cancel()

    async def run_round(self, cluster: Cluster, client: Client, supervisor: ProcessSupervisor, turn: int) -> None:
        """Run each cell of this cluster once."""

        async def replace() -> None:
            await WorkerReplacement(cluster, supervisor, ReplaceOrder(Code(), DEADLINE_S), print).run()

        async def drain() -> None:
            for name in cluster.workers:
                await client.drain([name], handover=True, deadline_s=DEADLINE_S)
                while {row.worker: row.state for row in await client.workers()}[name] != "drained":  # noqa: ASYNC110
                    await trio.sleep(POLL_S)
                await client.undrain([name])

        if len(cluster.workers) == 1:
            return await self.run_cell("alone", client, replace, turn)
        await self.run_cell("drain", client, drain, turn)
        return await self.run_cell("replace", client, replace, turn)

    async def run_cell(self, cell: str, client: Client, act: Callable[[], Awaitable[None]], turn: int) -> None:
        """Have all streams decode while `act` runs, and keep their pauses."""
        streams = [MovedStream(f"{cell}-{turn}-{i}", prompt) for i, prompt in enumerate(self.prompts)]
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(stream.run, client, self.options.tokens)
            await until(lambda: all(len(stream.tokens) >= BEFORE for stream in streams))
            began = time.time()
            await act()
            took_s, counts = time.time() - began, [len(stream.tokens) for stream in streams]
            await until(
                lambda: all(len(one.tokens) >= count + AFTER for one, count in zip(streams, counts, strict=True))
            )
            pauses = [pause for stream in streams for pause in await stream.pauses_ms(client)]
            await client.abort([stream.name for stream in streams])
        self.pauses.setdefault(cell, []).extend(pauses)
        for stream, expected in zip(streams, self.expected, strict=True):
            pairs = [*zip(stream.tokens, expected, strict=False)]
            self.compared += len(pairs)
            self.differ += sum(one != other for one, other in pairs)
            expected.extend(stream.tokens[len(expected) :])
        print(f"{cell} {turn}: {took_s:.1f} s; {text_of(pauses)}", flush=True)


def _all_serve(supervisor: ProcessSupervisor, cluster: Cluster) -> bool:
    return all(map(supervisor.serves, cluster.workers))


def share(values: Sequence[float], part: float) -> float:
    """Return the smallest of `values` that at least `part` of them do not exceed."""
    return sorted(values)[max(0, -int(-part * len(values) // 1) - 1)]


def text_of(pauses: Sequence[float]) -> str:
    if not pauses:
        return "no stream moved"
    p50, p99 = share(pauses, 0.5), share(pauses, 0.99)
    return (
        f"{len(pauses)} pauses: p50 {p50:,.0f} ms  p99 {p99:,.0f} ms  least {min(pauses):,.0f}  most {max(pauses):,.0f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replace", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=7_000, help="of each stream at most")
    parser.add_argument("--out", type=Path, help="file of the results, as JSON")
    options = parser.parse_args()
    cpu = {"device": "cpu", "layers": 0, "not_deterministic": False, "device_mem": None, "host_mem": "512MiB"}
    for name, value in (cpu | {"prompt_tokens": (200, 200 + 10 * options.requests)}).items():
        setattr(options, name, value)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="hisparse-model-") as directory:
        write_model(Path(directory), options)
        run = Replacing(options, Path(directory))
        trio.run(run.run)
    rows: list[dict[str, Any]] = [
        {"cell": cell, "pauses": len(ms), "p50_ms": share(ms, 0.5), "p99_ms": share(ms, 0.99), "most_ms": max(ms)}
        for cell, ms in run.pauses.items()
        if ms
    ]
    for cell, pauses in run.pauses.items():
        print(f"{cell:8} {text_of(pauses)}")
    print(f"{run.differ} of {run.compared} tokens differ")
    if options.out is not None:
        about = machine("cpu") | {"cores": os.cpu_count(), "load": round(load, 1)}
        found = {"machine": about, "setting": {"requests": options.requests, "rounds": options.rounds}, "rows": rows}
        options.out.write_text(json.dumps(found | {"differ": run.differ, "compared": run.compared}, indent=1) + "\n")
    return int(run.differ > 0)


if __name__ == "__main__":
    sys.exit(main())
