"""Whether the hot floor keeps tokens a second on a GPU: `python -m benchmarks.hot_floor [--out FILE]`.

Real processes: a coordinator, and a worker that decodes on one device. Three clusters, one after the other, have the
same memory and the same load. They differ in what policy may do:

    auto      coordinator.hot_floor = "auto"
    smallest  coordinator.hot_floor = "smallest": full admission
    resident  the one size class is longer than any context, so that all rows are resident

The worker is the normal one. Only its runner is another: the synthetic one of benchmarks.decode, whose indexer runs and
is then overruled by SeatSelections. How much successive selections overlap is read from a file while the worker
decodes. A phase of a cluster has one overlap: it settles, then it is measured. `auto` goes through all phases; one that
changed its floor has settled after SETTLED_S. The others measure each overlap once.

Load: --requests are in flight all the time, a new one as soon as one ends. Their outputs end at different times from
the start. A prompt is --context tokens and one more: all its full pages are reused, and the rest is one decode step.
There are --prompts of them, so that requests of one prompt share its host pages. Measuring begins once each prompt has
been computed.

Memory: hot chunks for --resident requests with all of their rows at the mean length, and index pages for --seats, of
which there are no more than host pages. A worker divides its memory once. benchmarks.decode divides it anew for each
mode, so that its budget is smaller. Where seats bind before hot chunks do, full admission gives some requests all of
their rows.

`tokens_per_s`: tokens that clients received in the measured time. `step_ms`, `hit_rate`: of the worker's steps, by its
heartbeats. `timeline`: each second of `auto`. Rows are written as they come. After --budget-seconds the benchmark ends
with what is there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import msgspec
import numpy as np
import torch
import trio
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor

from benchmarks import hot_floor_report, swap_in
from hisparse.client.client import Client
from hisparse.cluster.children import Child, child_environ, exit_text, stop_children
from hisparse.cluster.keeper import COORDINATOR, open_admin
from hisparse.cluster.up import CONNECTED, answers, start_child, started
from kernels.state import StepBatch
from protocol.config import HostFacts, build, pool_path, to_environ
from protocol.errors import Unavailable
from protocol.messages import Sampling, WorkerRow
from protocol.settings import AUTO_FLOOR, Config, CoordinatorSettings, WorkerSettings
from protocol.units import PAGE_TOKENS, pages_for
from worker.loop.executor import Executor
from worker.pool.file import remove_pool
from worker.runners.base import arithmetic, prefix_unit_tokens
from worker.runners.checkpoint import geometry_of
from worker.runners.synthetic import synthetic_config, synthetic_runner
from worker.runners.transformers_dsa import TransformersRunner

FAMILY: Final = "deepseek-v3.2"
MODES: Final = ("auto", "smallest", "resident")
#: Of `auto`: overlaps, and the most seconds before each is measured. A floor that is to fall waits for a probe first.
PHASES: Final = ("0.99:15", "0.80:30", "0.99:120", "0.90:25")
#: Once the floor has changed in a phase, it is measured after so long.
SETTLED_S: Final = 10.0
#: First argument of the worker's process; the file that describes its model follows.
WORKER: Final = "--worker"
WORKER_NAME: Final = "w0"
MODEL_FILE: Final = "model.json"
START_LIMIT_S: Final = 240.0
STOP_GRACE_S: Final = 5.0
#: Of each process, shown where a cluster fails.
LOG_LINES: Final = 60
#: How often the worker looks at the file of the overlap.
OVERLAP_POLL_S: Final = 0.1
SAMPLE_S: Final = 1.0
#: Behind the full pages of a prompt.
REST_TOKENS: Final = 1


# ---------------------------------------------------------------- what requests select


class SeatSelections:
    """Stands in for the indexer's output inside captured graphs, with an overlap that may change between two steps.

    k places of a permutation of the first `context` positions, another for each seat and group, that begin `fresh`
    places further with each position of the request. So a request selects the same wherever its row is in the batch.
    Rows of padding select as seat 0 would. Requests must be longer than `context`.
    """

    def __init__(self, groups: int, seats: int, context: int, k: int, device: torch.device | str) -> None:
        self._order = torch.rand(groups, seats, context, device=device).argsort(-1).int().view(groups, -1)
        self._context, self._k = context, k
        self._places = torch.arange(k, device=device)
        self._fresh = torch.zeros(1, dtype=torch.int64, device=device)
        self._entries = torch.zeros(0, device=device)

    def set_overlap(self, overlap: float) -> None:
        """Of steps from now on: share of a selection, 0 to 1, that is in the next one of that request too."""
        self._fresh.fill_(round((1 - overlap) * self._k))

    def __call__(self, group: int, batch: StepBatch, topk: Tensor) -> None:
        if group == 0:
            places = (batch.lengths.long().unsqueeze(1) * self._fresh + self._places) % self._context
            first = batch.seats.long().clamp(min=0) * self._context
            self._entries = (places + first.unsqueeze(1)).flatten()
        torch.index_select(self._order[group], 0, self._entries, out=topk.view(-1))


class OverlapFile:
    """The overlap that the benchmark asks for, as the text of a file. Read by the thread that launches steps."""

    def __init__(self, path: Path, take: Callable[[float], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._take, self._clock = path, take, clock
        self._read, self._due = "", -1.0

    def poll(self) -> None:
        """Hand on an overlap that is not the one read last. Reads the file once in OVERLAP_POLL_S at most."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + OVERLAP_POLL_S
        text = self._path.read_text()
        if text != self._read:
            self._read = text
            self._take(float(text))

    @staticmethod
    def write(path: Path, overlap: float) -> None:
        """The file is always whole."""
        partial_path = path.with_suffix(".partial")
        partial_path.write_text(str(overlap))
        partial_path.replace(path)


# ---------------------------------------------------------------- the worker's process


@dataclass(frozen=True)
class Model:
    """What the worker makes its runner of. `changes`: of the published configuration. `overlap_file`: a path."""

    layers: int
    context: int
    overlap_file: str
    changes: dict[str, Any]

    @property
    def config(self) -> Any:
        return synthetic_config(FAMILY, self.layers, **self.changes)


def synthetic_worker_runner(model: Model, settings: WorkerSettings) -> TransformersRunner:
    """What worker.process.load_runner gives, with random weights. Its selections follow the overlap of the file."""
    runner = synthetic_runner(model.config, device=settings.device, kv_dtype=settings.kv_dtype)
    runner.info = msgspec.structs.replace(
        runner.info,
        prefix_unit_tokens=prefix_unit_tokens(settings),
        reuses_generated=not settings.deterministic,
        arithmetic=arithmetic(settings),
    )
    geometry = runner.geometry
    selections = SeatSelections(geometry.groups, settings.seats, model.context, geometry.topk, settings.device)
    overlap = OverlapFile(Path(model.overlap_file), selections.set_overlap)
    overlap.poll()
    runner.after_index_topk = selections
    turn = Executor.turn

    def polled(executor: Executor) -> bool:
        overlap.poll()
        return turn(executor)

    # the one thread that launches, and never while it captures
    patch.object(Executor, "turn", polled).start()
    return runner


def worker_process(model: Model) -> None:
    """`hisparse worker` with the arguments of this process, serving `model`."""
    from hisparse.cli import main as hisparse_main

    def load(settings: WorkerSettings, _: object = None) -> TransformersRunner:
        return synthetic_worker_runner(model, settings)

    with patch("worker.process.load_runner", load):
        hisparse_main(prog_name="hisparse")


# ---------------------------------------------------------------- a cluster


def configured(options: argparse.Namespace, mode: str, directory: Path) -> Config:
    """Settings of both processes. Raises ConfigError."""
    longest = options.context + REST_TOKENS + options.output_tokens
    mean = options.context + REST_TOKENS + options.output_tokens // 2 + CoordinatorSettings().grant_ahead_tokens
    all_rows = PAGE_TOKENS * (pages_for(longest) + 1)  # slots of a hot buffer that no context needs
    flags: dict[str, object] = {
        "cluster.runtime_dir": str(directory),
        "coordinator.hot_floor": AUTO_FLOOR if mode == "auto" else "smallest",
        "coordinator.stop_deadline_s": 0.0,
        "worker.name": WORKER_NAME,
        "worker.model": str(directory),
        "worker.device": options.device,
        "worker.kv_dtype": options.kv_dtype,
        "worker.seats": options.seats,
        "worker.device_mem": options.device_mem,
        "worker.host_mem": options.host_mem,
        "worker.slab_tokens": options.context + REST_TOKENS,
        "worker.context_max_tokens": longest,
        "worker.prefill_chunk_tokens": options.chunk_tokens,
        "worker.hot_size_classes": (all_rows if mode == "resident" else options.hot_slots,),
        "worker.hot_chunks_max": options.resident * pages_for(min(mean, longest)),
        "worker.threads": 1 if options.device == "cpu" else 0,
    }
    return build({}, {}, flags, HostFacts.read())


@asynccontextmanager
async def running(config: Config, directory: Path) -> AsyncIterator[Client]:
    """Both processes, connected; `directory` has the worker's MODEL_FILE, and their logs. They are killed at the end.

    Raises Unavailable when one ends before the block does. Where the block raises, the ends of their logs go to stderr.
    """
    children = [start_child(COORDINATOR, config, directory)]
    try:
        await started(children, lambda: answers(config), START_LIMIT_S)
        program = [sys.executable, "-m", "benchmarks.hot_floor", WORKER, str(directory / MODEL_FILE)]
        command = [*program, "worker", "--die-with", str(os.getpid())]
        log = directory / f"{WORKER_NAME}.log"
        children.append(Child.start(WORKER_NAME, command, child_environ() | to_environ(config), log))
        async with open_admin(config, "benchmark") as client:
            await started(children, partial(_is_connected, client), START_LIMIT_S)
            async with trio.open_nursery() as nursery:
                for child in children:
                    nursery.start_soon(_require, child)
                yield client
                nursery.cancel_scope.cancel()
    except Exception:
        for child in children:
            lines = (directory / f"{child.name}.log").read_text(errors="replace").splitlines()[-LOG_LINES:]
            print(f"---- end of the log of {child.name}:", *lines, sep="\n", file=sys.stderr, flush=True)
        raise
    finally:
        try:
            await stop_children(children, STOP_GRACE_S)
        finally:
            for child in children:
                child.close()
            remove_pool(pool_path(config.worker.pool_dir, config.worker.node), config.cluster.worker_endpoint)


async def _is_connected(client: Client) -> bool:
    return any(row.state == CONNECTED for row in await client.workers())


async def _require(child: Child) -> None:
    status = await child.wait()
    raise Unavailable(f"{exit_text(status)} while it was needed", field="process", value=child.name)


async def retractions(directory: Path) -> dict[str, int]:
    """Requests that the coordinator took off the worker so far, by reason."""
    log = (directory / f"{COORDINATOR}.log").read_text()
    (url,) = re.findall(r"url=(http://\S+/metrics)", log)

    def fetch() -> str:
        with urllib.request.urlopen(url, timeout=10) as page:
            return str(page.read().decode())

    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(await trio.to_thread.run_sync(fetch)):
        for it in family.samples:
            if it.name == "hisparse_retractions_total":
                found[it.labels["reason"]] += int(it.value)
    return dict(found)


# ---------------------------------------------------------------- load


class Load:
    """Requests that are kept in flight, and what their clients received."""

    def __init__(self, options: argparse.Namespace, vocab: int) -> None:
        drawn = random.Random(1)
        size = options.context + REST_TOKENS
        self._prompts = [np.array(drawn.choices(range(vocab), k=size), dtype=np.int32) for _ in range(options.prompts)]
        self._requests: int = options.requests
        self._output_tokens: int = options.output_tokens
        self.tokens = 0
        self.answered: set[int] = set()  # prompts

    @property
    def is_warm(self) -> bool:
        return len(self.answered) == min(len(self._prompts), self._requests)

    async def run(self, client: Client) -> None:
        """Until cancelled. Raises Unavailable when a request does not finish."""
        async with trio.open_nursery() as nursery:
            for number in range(self._requests):
                nursery.start_soon(self._keep_one, client, number)

    async def _keep_one(self, client: Client, number: int) -> None:
        """The first output is shorter than others, by its number."""
        tokens = max(1, self._output_tokens * (number + 1) // self._requests)
        while True:
            prompt = number % len(self._prompts)
            stream = await client.submit(self._prompts[prompt], Sampling(tokens, ignore_eos=True))
            async for some in stream:
                self.tokens += len(some)
                self.answered.add(prompt)
            if stream.ended is None or stream.ended.outcome != "FINISHED":
                raise Unavailable(f"a request did not finish: {stream.ended}", field="request", value=stream.request_id)
            number, tokens = number + self._requests, self._output_tokens


# ---------------------------------------------------------------- one cluster


@dataclass(frozen=True)
class Phase:
    """`settle_s`: the most seconds with this overlap before it is measured."""

    number: int
    overlap: float
    settle_s: float


def phases_of(options: argparse.Namespace, mode: str) -> list[Phase]:
    """All for `auto`; each overlap once for the others, whose requests do not change their sizes."""
    asked = [(float(overlap), float(settle)) for overlap, _, settle in (it.partition(":") for it in options.phases)]
    if mode != "auto":
        asked = [(overlap, options.settle_seconds) for overlap in dict.fromkeys(overlap for overlap, _ in asked)]
    return [Phase(number, *it) for number, it in enumerate(asked)]


class Observer:
    """One cluster: its phases, measured one after the other, and each second of it if asked for."""

    def __init__(self, client: Client, load: Load, mode: str, overlap_file: Path) -> None:
        self._client, self._load, self._mode, self._overlap_file = client, load, mode, overlap_file
        self._phase: Phase | None = None
        self._began = trio.current_time()
        self.timeline: list[dict[str, Any]] = []

    async def worker(self) -> WorkerRow:
        (row,) = await self._client.workers()
        return row

    async def until_warm(self) -> None:
        while not self._load.is_warm:  # noqa: ASYNC110
            await trio.sleep(0.1)

    async def watch(self) -> None:
        """Append to the timeline until cancelled."""
        while True:
            if (phase := self._phase) is not None:
                row = await self.worker()
                seen = {"s": round(trio.current_time() - self._began, 1), "phase": phase.number, "running": row.running}
                self.timeline.append(seen | {"overlap": phase.overlap} | floor_of(row, self._mode))
            await trio.sleep(SAMPLE_S)

    async def measure(self, phase: Phase, seconds: float) -> dict[str, Any]:
        """A row of the result. It lasts `seconds` at least, and until a token has come."""
        if self._phase is None:
            self._began = trio.current_time()
        OverlapFile.write(self._overlap_file, phase.overlap)
        self._phase = phase
        await self._settle(phase)
        before, tokens, began = await self.worker(), self._load.tokens, trio.current_time()
        running, after = [before.running], before
        while trio.current_time() - began < seconds or self._load.tokens == tokens or after.steps == before.steps:
            await trio.sleep(min(SAMPLE_S, seconds / 4))
            after = await self.worker()
            running.append(after.running)
        took, received = trio.current_time() - began, self._load.tokens - tokens
        hits, misses = after.hits - before.hits, after.misses - before.misses
        return {
            "mode": self._mode,
            "phase": phase.number,
            "overlap": phase.overlap,
            "tokens_per_s": received / took,
            "seconds": took,
            "running": sum(running) / len(running),
            "step_ms": 1e3 * (after.step_s - before.step_s) / (after.steps - before.steps),
            "steps": after.steps - before.steps,
            "hit_rate": hits / (hits + misses) if hits + misses else None,
            **floor_of(after, self._mode),
        }

    async def _settle(self, phase: Phase) -> None:
        until, floor = trio.current_time() + phase.settle_s, floor_of(await self.worker(), self._mode)["floor"]
        while (left := until - trio.current_time()) > 0:
            await trio.sleep(min(SAMPLE_S, left))
            now = floor_of(await self.worker(), self._mode)["floor"]
            if now != floor:
                floor, until = now, min(until, trio.current_time() + SETTLED_S)


def floor_of(row: WorkerRow, mode: str) -> dict[str, Any]:
    """What the coordinator says of the hot floor. `floor`, `best`: slots, 0 for resident."""
    floor = row.hot_sizing
    if floor is None:
        return {"floor": 0 if mode == "resident" else row.capacity.hot_size_classes[0]}
    return {
        "floor": floor.hot_slots,
        "observed_step_ms": round(floor.observed_step_us / 1e3, 3),
        "predicted_step_ms": round(floor.predicted_step_us / 1e3, 3),
        "predicted_tokens_per_s": round(floor.predicted_tokens_per_s, 1),
        "best": floor.best_slots,
        "best_tokens_per_s": round(floor.best_tokens_per_s, 1),
        "changes": floor.changes,
        "reason": floor.reason,
    }


class Result:
    """The file that is written, after each row."""

    def __init__(self, options: argparse.Namespace) -> None:
        config = synthetic_config(FAMILY, options.layers, **options.changes)
        self._geometry, self._out = geometry_of(config, options.kv_dtype), options.out
        names = ("layers", "kv_dtype", "context", "output_tokens", "requests", "prompts", "hot_slots", "resident")
        setting = {name: getattr(options, name) for name in names}
        self.found: dict[str, Any] = {"machine": machine(options), "setting": setting, "clusters": {}, "rows": []}
        self.found["timeline"] = []

    @property
    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.found["rows"]
        return found

    def note_capacity(self, mode: str, row: WorkerRow) -> None:
        """What the worker has, which is equal for all modes."""
        has, geometry = row.capacity, self._geometry
        counts = {name: getattr(has, name) for name in ("seats", "hot_chunks", "index_pages", "slab_pages")}
        size = (has.hot_chunks + has.slab_pages) * geometry.chunk_bytes + has.index_pages * geometry.index_page_bytes
        self.found["setting"] |= counts | {"host_pages": has.host_pages, "kv_bytes": size}
        self.found["clusters"][mode] = {}

    def add(self, row: dict[str, Any], timeline: Sequence[dict[str, Any]]) -> None:
        self.rows.append(row)
        if timeline:
            self.found["timeline"] = list(timeline)
        print(hot_floor_report.line(row), flush=True)
        self.write()

    def write(self) -> None:
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._out.write_text(json.dumps(self.found, indent=1) + "\n")


async def run_cluster(options: argparse.Namespace, mode: str, result: Result) -> None:
    """All phases of one cluster. Raises as `running` does, and Unavailable for a request that did not finish."""
    began = trio.current_time()
    with tempfile.TemporaryDirectory(prefix="hisparse-floor-") as name:
        directory = Path(name)
        overlap_file, phases = directory / "overlap", phases_of(options, mode)
        model = Model(options.layers, options.context, str(overlap_file), options.changes)
        (directory / MODEL_FILE).write_bytes(msgspec.json.encode(model))
        OverlapFile.write(overlap_file, phases[0].overlap)
        async with running(configured(options, mode, directory), directory) as client:
            load = Load(options, (await client.model()).vocab_size)
            observer = Observer(client, load, mode, overlap_file)
            result.note_capacity(mode, await observer.worker())
            about = result.found["clusters"][mode]
            about["start_s"] = round(trio.current_time() - began, 1)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(load.run, client)
                await observer.until_warm()
                about["warm_s"] = round(trio.current_time() - began, 1)
                print(f"{mode}: up after {about['start_s']} s, warm after {about['warm_s']} s", flush=True)
                if mode == "auto":
                    nursery.start_soon(observer.watch)
                for phase in phases:
                    row = await observer.measure(phase, options.measure_seconds)
                    about["retractions"] = await retractions(directory)
                    result.add(row, observer.timeline)
                nursery.cancel_scope.cancel()


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """All clusters, as far as --budget-seconds go."""
    result = Result(options)
    with trio.move_on_after(options.budget_seconds) as budget:
        for mode in options.modes:
            await run_cluster(options, mode, result)
    if budget.cancelled_caught:
        print("out of budget: the rest is missing", flush=True)
    for it in hot_floor_report.ratios(result.rows):
        print(hot_floor_report.ratio_line(it), flush=True)
    result.write()
    return result.found


def machine(options: argparse.Namespace) -> dict[str, str]:
    if options.device != "cpu":
        return swap_in.machine()
    command = " ".join(["python", *sys.orig_argv[1:]])
    about = {"gpu": "none", "driver_pcie": "none", "torch": torch.__version__, "python": platform.python_version()}
    return about | {"command": command}


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hot_floor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/hot-floor.json"))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--phases", nargs="+", default=list(PHASES), metavar="OVERLAP:SECONDS", help="of auto")
    parser.add_argument("--settle-seconds", type=float, default=5.0, help="of the other clusters, for each overlap")
    parser.add_argument("--measure-seconds", type=float, default=10.0)
    parser.add_argument("--budget-seconds", type=float, default=540.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kv-dtype", default="fp8")
    parser.add_argument("--changes", type=json.loads, default={}, help="of the model's configuration, a JSON object")
    parser.add_argument("--context", type=int, default=8_192, help="tokens of a prompt, less one")
    parser.add_argument("--output-tokens", type=int, default=1_500)
    parser.add_argument("--requests", type=int, default=128, help="in flight")
    parser.add_argument("--prompts", type=int, default=32, help="that differ")
    parser.add_argument("--seats", type=int, default=108, help="requests of full admission at most")
    parser.add_argument("--resident", type=int, default=63, help="requests whose rows the hot chunks hold")
    parser.add_argument("--hot-slots", type=int, default=4_096)
    parser.add_argument("--device-mem", default="8GiB", help="enough for the above")
    parser.add_argument("--host-mem", default="8GiB")
    parser.add_argument("--chunk-tokens", type=int, default=2_048, help="of prompts")
    return parser.parse_args(arguments)


def main() -> None:
    if sys.argv[1:2] == [WORKER]:
        model = msgspec.json.decode(Path(sys.argv[2]).read_bytes(), type=Model)
        del sys.argv[1:3]
        worker_process(model)
    else:
        trio.run(run, parsed())


if __name__ == "__main__":
    main()
