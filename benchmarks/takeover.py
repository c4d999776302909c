"""From the end of the only worker to the next token of each of its streams: by a standby, and by a plain start.

    python -m benchmarks.takeover --device cuda --budget-seconds 240 --out takeover.json

A coordinator, a worker, a keeper of its weights and, in cells `standby-*`, a standby run as `hisparse up` runs them. Of
each cell `--kills` times: as many streams as `--requests` decode, the worker gets SIGKILL (`kill`) or SIGSTOP (`stop`,
which is noticed by its silence), and all streams go on. A cell ends early when its share of the budget has no time for
one more.

    first, last   ms from the signal to the first token that is new to its client, of the first and the last stream
    down          ms from the signal until the coordinator has declared the worker down
    exit          ms from the signal until the supervisor has the proof of the exit, and orders a standby
    ends          ends of the worker's process: more than one, where what came after it ended, too
    others        ms from the signal to lines of the logs (PARTS): the worker's, and the coordinator's first step
    differ        tokens that differ from those of the same prompts in a run before any kill, greedy and deterministic

The model is `--model`; where that is no checkpoint, one is written there, by default in a directory that is removed: on
a CPU a tiny one, on a GPU DeepSeek-V3.2 with `--layers` and `--experts` and random weights in block-FP8. By default
these take 10.6 GB of the GPU (3.7 of embeddings and head, 0.6 a layer, 44 MB an expert of each layer but three) and,
with a draft layer that is not loaded, 12.4 GB of the disk. The budget begins once they are written. Exits with 1 when a
token differs, unless --not-deterministic is given, or a cell has no kill.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import trio

from benchmarks.serve.__main__ import machine
from hisparse.client.client import Client
from hisparse.cluster.supervision import COORDINATOR, ProcessSupervisor
from hisparse.cluster.up import Cluster, running_cluster
from protocol.config import HostFacts, build
from protocol.errors import NotFound, WrongState
from protocol.messages import Sampling
from protocol.settings import Config
from protocol.units import PAGE_TOKENS, pages_for

if TYPE_CHECKING:
    from torch import Tensor

    from worker.families.base import TensorSpec

WORKER: Final = "w0"
CELLS: Final = ("standby-kill", "standby-stop", "start-kill", "start-stop")
SIGNALS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
#: Tokens of each stream before a kill, and those that each is to gain behind it.
BEFORE: Final = 48
AFTER: Final = 48
POLL_S: Final = 0.005
#: Between the places of two pieces of weights, an odd number.
PLACES_APART: Final = 1_000_003
#: Left of a cell's share for the end of its processes.
END_S: Final = 6.0
#: Lines that tell how far a worker has come, by their beginnings, in order.
PARTS: Final = {
    "ordered": "worker.standby takes over",
    "registered": "worker.pool.host_pool host pool registered",
    "mapped": "worker.keeper weights mapped",
    "attached": "worker.keeper weights attached",
    "sized": "worker.process sized scratch_bytes",
    "welcomed": "worker.link welcomed",
    "step": "coordinator.state.request started",
    "captured": "worker.loop.executor graphs captured",
}
#: What the supervisor says of an end of the worker.
END: Final = re.compile(rf"{WORKER} .*; (its standby takes over|restarted) in ")
LINE: Final = re.compile(r"(\S+Z) \w+ +(.*)")


# ---------------------------------------------------------------- the model


class RepeatedSource:
    """See worker/weights/writing.py: `TensorSource`. All values come from one piece: drawing 12 GB takes minutes."""

    def __init__(self) -> None:
        import torch

        from worker.weights.synth import QUANTILE_GAIN
        from worker.weights.writing import PIECE_VALUES

        self._normal = torch.randn(PIECE_VALUES * 5 // 4, generator=torch.Generator().manual_seed(0))
        self._codes = (self._normal * QUANTILE_GAIN).to(torch.float8_e4m3fn)
        self._place = 0

    def plain(self, spec: TensorSpec, first: int, count: int) -> Tensor:
        """Return ones of a norm, zeros of a bias, and weights with variance 1 / fan-in."""
        import torch

        if len(spec.shape) == 1:
            return torch.ones(spec.shape) if spec.name.endswith("norm.weight") else torch.zeros(spec.shape)
        return self._taken(self._normal, (count, *spec.shape[1:])) * (1 / math.sqrt(spec.shape[-1]))

    def values(self, spec: TensorSpec, first: int, count: int) -> Tensor:
        """Return normal values, to be scaled."""
        return self._taken(self._codes, (count, spec.shape[1]))

    def scales(self, spec: TensorSpec, first: int, count: int) -> Tensor:
        """Return the same scale for all blocks."""
        import torch

        from kernels.block_weight import BLOCK
        from worker.weights.layout import scale_shape
        from worker.weights.synth import QUANTILE_GAIN

        shape = scale_shape((count, spec.shape[1]), (BLOCK, BLOCK))
        return torch.full(shape, 1 / (QUANTILE_GAIN * math.sqrt(spec.shape[1])))

    def _taken(self, pool: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return values from another place of `pool` each time."""
        count = math.prod(shape)
        self._place = (self._place + PLACES_APART) % (len(pool) - count + 1)
        return pool[self._place : self._place + count].view(shape)


def write_model(path: Path, options: argparse.Namespace) -> None:
    """Write a checkpoint at `path`, if none is there."""
    if (path / "config.json").exists():
        return
    began = time.monotonic()
    if not options.layers:
        from worker.runners.tiny import write_tiny_checkpoint

        write_tiny_checkpoint(path, index_topk=64, context_max_tokens=8_192, fp8=True, whole_blocks=True)
    else:
        from worker.weights.layout import stored_tensors
        from worker.weights.synth import published_config
        from worker.weights.writing import write_repository

        config = published_config("deepseek-v3.2", layers=options.layers, experts=options.experts)
        about = json.loads(config.to_json_string(use_diff=False))
        write_repository(path, about, stored_tensors(config, fp8=True), RepeatedSource(), fp8=True)
    size = sum(file.stat().st_size for file in path.iterdir())
    print(f"{size / 1e9:.2f} GB written to {path} in {time.monotonic() - began:.1f} s", flush=True)


# ---------------------------------------------------------------- streams and logs


class Stream:
    """A request and its client: its tokens, and when how many of them were there."""

    def __init__(self, name: str, prompt: Sequence[int]) -> None:
        self.name, self.prompt = name, prompt
        self.tokens: list[int] = []
        self.is_over = False
        self._arrivals: list[tuple[float, int]] = []

    async def run(self, client: Client, max_tokens: int) -> None:
        """Submit the prompt and read to the end."""
        sampling = Sampling(max_tokens, temperature=0.0, ignore_eos=True)
        async for tokens in await client.submit(self.prompt, sampling, request_id=self.name):
            self.tokens += tokens.tolist()
            self._arrivals.append((time.time(), len(self.tokens)))
        self.is_over = True

    def past(self, count: int) -> float | None:
        """Return the time, in seconds since the epoch, at which more than `count` tokens were there; None: not yet."""
        return next((at for at, there in self._arrivals if there > count), None)


class Logs:
    """Lines that the worker and the coordinator have logged since a moment."""

    def __init__(self, directory: Path) -> None:
        self._files = {
            path: path.stat().st_size for path in (directory / f"{name}.log" for name in (WORKER, COORDINATOR))
        }

    def parts(self, since: float) -> dict[str, float]:
        """Return ms from `since`, in seconds since the epoch, to the first line of each of PARTS that has come."""
        found: dict[str, float] = {}
        for at, line in self._lines():
            for part, text in PARTS.items():
                if at >= since and line.startswith(text):
                    found.setdefault(part, round(1e3 * (at - since), 1))
        return {part: found[part] for part in PARTS if part in found}

    def _lines(self) -> Iterator[tuple[float, str]]:
        for path, start in self._files.items():
            for line in path.read_bytes()[start:].decode(errors="replace").splitlines():
                if match := LINE.match(line):
                    yield datetime.fromisoformat(match[1]).timestamp(), match[2]


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110
        await trio.sleep(POLL_S)


def gpu_used_mib() -> int | None:
    """Return MiB in use on the first GPU, by nvidia-smi; None: there is none."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        return None


# ---------------------------------------------------------------- cells


def config_of(options: argparse.Namespace, model: Path, runtime_dir: Path, *, standby: bool) -> Config:
    """Return settings of the cluster; the rest are defaults. Raises ConfigError."""
    is_gpu, topk = options.device != "cpu", json.loads((model / "config.json").read_text())["index_topk"]
    flags: dict[str, object] = {
        "cluster.runtime_dir": str(runtime_dir),
        "coordinator.prefix_reuse": "off",
        "coordinator.stop_deadline_s": 0.0,
        "worker.name": WORKER,
        "worker.model": str(model),
        "worker.device": options.device,
        "worker.deterministic": not options.not_deterministic,
        "worker.seats": options.requests,
        "worker.context_max_tokens": PAGE_TOKENS * pages_for(options.prompt_tokens[1] + options.tokens + PAGE_TOKENS),
        "worker.standby": int(standby),
        "worker.device_mem": options.device_mem or ("6GiB" if is_gpu else "256MiB"),
        "worker.host_mem": options.host_mem or ("8GiB" if is_gpu else "256MiB"),
        "worker.hot_size_classes": (2 * topk,),
        "worker.threads": 0 if is_gpu else 1,
    }
    return build({}, {}, flags, HostFacts.read())


class Run:
    """Cells one after the other, and what was found: rows of kills, and tokens of the undisturbed run."""

    def __init__(self, options: argparse.Namespace, model: Path) -> None:
        self.options, self.model = options, model
        dice = random.Random(0)
        self.prompts = [
            dice.choices(range(256), k=dice.randint(*options.prompt_tokens)) for _ in range(options.requests)
        ]
        self.quiet: list[list[int]] = []
        self.rows: list[dict[str, Any]] = []
        self.said: list[tuple[float, str]] = []
        self.used_mib = {"before": gpu_used_mib()}
        self.load = os.getloadavg()[0]

    async def run(self) -> None:
        """Run all cells: those with a standby, and those without, share a cluster."""
        end, left = trio.current_time() + self.options.budget_seconds, len(self.options.cells)
        for has_standby, group in groupby(self.options.cells, lambda cell: cell.startswith("standby")):
            cells = [*group]
            with tempfile.TemporaryDirectory(prefix="hisparse-takeover-") as directory:
                try:
                    await self.run_cells(Path(directory), cells, end, left, standby=has_standby)
                finally:
                    self._keep_logs(Path(directory), "standby" if has_standby else "start")
            left -= len(cells)
        self.used_mib["after"] = gpu_used_mib()

    async def run_cells(self, directory: Path, cells: Sequence[str], end: float, left: int, *, standby: bool) -> None:
        """Run `cells` on one cluster. Each has an equal share of the time to `end` with the `left` - 1 behind it."""
        config = config_of(self.options, self.model, directory, standby=standby)
        began = time.monotonic()
        with trio.move_on_at(end - END_S) as budget:
            async with (
                running_cluster(config, 1, log_dir=directory) as cluster,
                cluster.client("benchmark") as client,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(ProcessSupervisor(cluster, self.say, lambda: None, standbys=cluster.standbys).run)
                self.say(f"up after {time.monotonic() - began:.1f} s, standby = {int(standby)}")
                if not self.quiet:
                    await self.run_quietly(client)
                self.used_mib.setdefault("serving", gpu_used_mib())
                for place, cell in enumerate(cells):
                    now = trio.current_time()
                    with trio.move_on_after((end - now) / (left - place) - END_S) as share:
                        await self.run_cell(cluster, client, cell, share)
                    if share.cancelled_caught:
                        self.say(f"{cell}: its share of the time was over amid a kill")
                        await self.abort_all(client)
                self.used_mib[f"behind the kills, standby = {int(standby)}"] = gpu_used_mib()
                nursery.cancel_scope.cancel()
        if budget.cancelled_caught:
            self.say("the budget is over")

    async def run_cell(self, cluster: Cluster, client: Client, cell: str, share: trio.CancelScope) -> None:
        """Kill the worker `--kills` times, or until `share` has no time for one as long as the longest."""
        longest_s = 0.0
        for number in range(self.options.kills):
            began = trio.current_time()
            if began + longest_s > share.deadline:
                self.say(f"{cell}: no time for more than {number}")
                return
            await self.disturb(cluster, client, cell, number)
            longest_s = max(longest_s, trio.current_time() - began)

    async def run_quietly(self, client: Client) -> None:
        """Decode all prompts to their end, before any kill."""
        streams, began = self.streams("quiet"), time.monotonic()
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(stream.run, client, self.options.tokens)
        self.quiet = [stream.tokens for stream in streams]
        self.say(f"undisturbed: {sum(map(len, self.quiet))} tokens in {time.monotonic() - began:.1f} s")

    async def disturb(self, cluster: Cluster, client: Client, cell: str, number: int) -> None:
        """Kill or stop the worker amid streams, and wait until all have gone on, and graphs are captured again."""
        await self.until_ready(cluster, client, standby=cell.startswith("standby"))
        streams, logs = self.streams(f"{cell}-{number}"), Logs(Path(cluster.config.cluster.runtime_dir))
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(stream.run, client, self.options.tokens)
            await until(lambda: all(len(stream.tokens) >= BEFORE for stream in streams))
            began = time.time()
            cluster.workers[WORKER].signal(SIGNALS[cell.partition("-")[2]])
            lost_at = await self._lost(client, min(streams, key=lambda stream: len(stream.tokens)).name)
            known = {row.request_id: row.generated_tokens for row in (await client.requests()).rows}
            await until(
                lambda: all(stream.is_over or len(stream.tokens) > known[stream.name] + AFTER for stream in streams)
            )
            if self.options.device != "cpu" and cell.startswith("standby"):  # a plain start captures before its hello
                await until(lambda: "captured" in logs.parts(began) or all(stream.is_over for stream in streams))
            await self.abort_all(client)
        nexts = [1e3 * (at - began) for stream in streams if (at := stream.past(known[stream.name])) is not None]
        ends = [at for at, line in self.said if at >= began and END.match(line)]
        row = {
            "cell": cell,
            "streams": len(nexts),
            "first_ms": round(min(nexts), 1),
            "last_ms": round(max(nexts), 1),
            "down_ms": round(1e3 * (lost_at - began), 1),
            "exit_ms": round(1e3 * (ends[0] - began), 1),
            "ends": len(ends),
            "parts_ms": logs.parts(began),
            **self.compared(streams),
        }
        self.rows.append(row)
        print(text_of(row), flush=True)

    async def until_ready(self, cluster: Cluster, client: Client, *, standby: bool) -> None:
        """Wait until the worker is connected and, if it is to have one, its standby ready."""
        while [row.state for row in await client.workers()] != ["connected"]:  # noqa: ASYNC110
            await trio.sleep(POLL_S)
        if standby:
            await until(lambda: cluster.standbys.is_ready(WORKER))

    async def abort_all(self, client: Client) -> None:
        """Abort all requests that have not ended."""
        for row in (await client.requests()).rows:
            with suppress(NotFound, WrongState):  # ended meanwhile
                await client.abort([row.request_id])

    async def _lost(self, client: Client, name: str) -> float:
        while True:
            if at := [line.at_s for line in (await client.request(name)).history if line.event == "lost"]:
                return at[-1]
            await trio.sleep(POLL_S)

    def streams(self, name: str) -> list[Stream]:
        """Return a stream for each prompt."""
        return [Stream(f"{name}-{i}", prompt) for i, prompt in enumerate(self.prompts)]

    def compared(self, streams: Sequence[Stream]) -> dict[str, int]:
        """Count the tokens that can be compared with the undisturbed run, and those that differ."""
        both = [(stream.tokens, quiet) for stream, quiet in zip(streams, self.quiet, strict=True)]
        pairs = [pair for tokens, quiet in both for pair in zip(tokens, quiet, strict=False)]
        return {"compared": len(pairs), "differ": sum(one != other for one, other in pairs)}

    def say(self, line: str) -> None:
        """Print a line of the benchmark or its supervisor."""
        self.said.append((time.time(), line))
        print(f"  {datetime.now():%H:%M:%S.%f} {line}", file=sys.stderr, flush=True)

    def found(self) -> dict[str, Any]:
        """Return everything, for a file."""
        setting = {name: value for name, value in vars(self.options).items() if name not in ("out", "logs", "model")}
        return {
            "machine": machine(self.options.device) | {"cores": os.cpu_count(), "load": round(self.load, 1)},
            "setting": setting,
            "rows": self.rows,
            "compared": sum(row["compared"] for row in self.rows),
            "differ": sum(row["differ"] for row in self.rows),
            "gpu_used_mib": self.used_mib,
            "said": [line for _, line in self.said],
        }

    def _keep_logs(self, directory: Path, name: str) -> None:
        if self.options.logs is not None:
            for log in directory.glob("*.log"):
                kept = self.options.logs / name / log.name
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(log, kept)


def text_of(row: dict[str, Any]) -> str:
    parts = "  ".join(f"{part} {at:,.0f}" for part, at in row["parts_ms"].items())
    return (
        f"{row['cell']:13} {row['streams']:3} streams: first {row['first_ms']:8,.0f} ms  last {row['last_ms']:8,.0f}  "
        f"down {row['down_ms']:7,.0f}  exit {row['exit_ms']:7,.0f}  {parts}  ends {row['ends']}  "
        f"differ {row['differ']} of {row['compared']}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.takeover", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=CELLS[:3], help="in this order")
    parser.add_argument("--kills", type=int, default=5, help="of each cell at most")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(200, 400), metavar=("LEAST", "MOST"))
    parser.add_argument("--tokens", type=int, default=1024, help="of each stream at most")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--model", type=Path, help="a checkpoint, or where to write one")
    parser.add_argument("--layers", type=int, help="0: a tiny checkpoint; default: 6, on a CPU 0")
    parser.add_argument("--experts", type=int, default=32, help="of each layer")
    parser.add_argument("--device-mem", metavar="SIZE", help="default: 6GiB, on a CPU 256MiB")
    parser.add_argument("--host-mem", metavar="SIZE", help="default: 8GiB, on a CPU 256MiB")
    parser.add_argument("--budget-seconds", type=float, default=600, help="once the model is written")
    parser.add_argument("--out", type=Path, help="file of the results, as JSON")
    parser.add_argument(
        "--not-deterministic",
        action="store_true",
        help="as a GPU with FP8 weights needs, which deterministic mode refuses: tokens may differ by their batch",
    )
    parser.add_argument("--logs", type=Path, help="directory for logs of all processes")
    options = parser.parse_args()
    if options.layers is None:
        options.layers = 0 if options.device == "cpu" else 6
    with tempfile.TemporaryDirectory(prefix="hisparse-model-") as directory:
        model = options.model or Path(directory)
        write_model(model, options)
        run = Run(options, model)
        try:
            trio.run(run.run)
        finally:
            if options.out is not None:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(run.found(), indent=1) + "\n")
    for cell in options.cells:
        if rows := [row for row in run.rows if row["cell"] == cell]:
            middle = {name: median(row[name] for row in rows) for name in ("first_ms", "last_ms", "exit_ms")}
            print(f"{cell:13} median of {len(rows)}: " + "  ".join(f"{name} {ms:,.0f}" for name, ms in middle.items()))
    found = run.found()
    print(f"{found['differ']} of {found['compared']} tokens differ; GPU MiB in use: {found['gpu_used_mib']}")
    differs = found["differ"] > 0 and not options.not_deterministic
    return int(differs or {row["cell"] for row in run.rows} != {*options.cells})


if __name__ == "__main__":
    sys.exit(main())
