"""`python -m tests.drills [ALERT...]`: cause what each alert waits for, on real processes, and see its metric cross.

A coordinator, a worker and a real Prometheus with the rules of the repository; a *scene* causes one trouble after the
other and looks at the rule's own expression after each. What a rule waits for on top (`for: 5m`) is promtool's business
(metrics/rules/tests). Where an expression compares with hours before, its windows are shrunk, minutes to seconds.

| trouble                       | caused by                                                                      |
|-------------------------------|--------------------------------------------------------------------------------|
| death, drain, load            | what an operator or the machine does: SIGKILL, `hisparse drain`, many requests |
| a hang, a disk, a wrong count | a defect planted in the process (tests/planted.py), there while a file exists  |
| growing waits                 | SIGSTOP and SIGCONT in turn, under simulated streams, whose host waits for them|

Printed is one line for each: the metric before and at the crossing, and how long that took. Exits with 1 when one does
not cross within DATA_LIMIT_S.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio
import yaml

from coordinator.client.client import Client, open_client
from coordinator.errors import HiSparseError, WrongState
from coordinator.messages import Sampling
from tests.planted import PLANTED_WHILE
from tests.process_rig import ROOT, Place, Process
from tests.prometheus_rig import Server, free_port, prometheus, until
from worker.runners.tiny import write_tiny_checkpoint

RULES: Final = ROOT / "metrics" / "rules"
#: Of 73 host pages, three of these take 66 at once and 72 at their end.
PROMPT_TOKENS: Final = 1_220
MAX_TOKENS: Final = 300
#: One that makes two of those three go.
LARGE_TOKENS: Final = 2_900
#: A stopped worker may run for the first of these in each round, and stands still for the second.
RUNS_S, STANDS_S = 0.02, 0.2
#: So long the waits of a quiet worker are watched, to compare with.
QUIET_S: Final = 25.0


def rules() -> dict[str, str]:
    """Expressions by alert."""
    groups = [group for file in RULES.glob("*.yml") for group in yaml.safe_load(file.read_text())["groups"]]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def shrunk(expr: str) -> str:
    """`expr` with windows of seconds for minutes, and of ten seconds for an hour."""
    return re.sub(r"\b(\d+)h\b", lambda hours: f"{10 * int(hours[1])}s", re.sub(r"\b(\d+)m\b", r"\1s", expr))


@dataclass(frozen=True)
class Sighting:
    """An alert whose expression came to hold. `before` and `after` are of the metric behind it."""

    alert: str
    cause: str
    metric: str
    before: str
    after: str
    seconds: float


@dataclass
class Drilled(Place):
    """Processes with a defect planted in one verb's, and settings beside the usual ones."""

    defects: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)

    def _start(self, verb: str, flags: Sequence[str]) -> Process:
        defect = self.defects.get(verb)
        program = ["-m", "coordinator.cli"] if defect is None else ["-m", "tests.planted", defect]
        environ = {
            "OMP_NUM_THREADS": "1",
            "HISPARSE_CLUSTER_RUNTIME_DIR": str(self.runtime_dir),
            PLANTED_WHILE: str(self.trigger),
            **self.settings,
        }
        log = self.path / f"{verb}.log"
        with log.open("wb") as file:
            command = [sys.executable, *program, verb, *flags]
            return Process(subprocess.Popen(command, cwd=ROOT, env=os.environ | environ, stderr=file), log)

    @property
    def trigger(self) -> Path:
        return self.path / "defect-shows"


@dataclass
class Scene:
    """A cluster that is watched, and what was seen."""

    place: Drilled
    coordinator: Process
    worker: Process
    server: Server
    client: Client
    sightings: list[Sighting] = field(default_factory=list)

    async def crosses(self, alert: str, cause: str, metric: str, act: Callable[[], Awaitable[object]]) -> None:
        """`act` makes the expression of `alert` hold, which did not before. Raises AssertionError when it does not."""
        expr = rules()[alert] if alert != "HiSparseFenceWaitGrowth" else shrunk(rules()[alert])
        assert not await self._query(expr), f"{alert} holds before anything was done"
        before, began = await self.value(metric), trio.current_time()
        await act()
        await until(lambda: self.server.query(expr), lambda: f"{alert}: {self.server.query(metric)}")
        took_s = trio.current_time() - began
        self.sightings.append(Sighting(alert, cause, metric, before, await self.value(metric), took_s))

    async def value(self, metric: str) -> str:
        series = await self._query(metric)
        return f"{float(series[0]['value'][1]):.4g}" if series else "none"

    async def _query(self, expr: str) -> list[Mapping[str, Any]]:
        return await trio.to_thread.run_sync(self.server.query, expr)


@asynccontextmanager
async def scene(
    path: Path, *, defects: Mapping[str, str] | None = None, settings: Mapping[str, str] | None = None
) -> AsyncIterator[Scene]:
    """A cluster with one worker in the directory `path`, both scraped, and nothing wrong with it."""
    write_tiny_checkpoint(path / "model")
    port = free_port()
    fixed = {"HISPARSE_COORDINATOR_METRICS_PORT": str(port), "HISPARSE_COORDINATOR_AUDIT_INTERVAL_S": "1"}
    place = Drilled(path, path / "model", defects or {}, fixed | dict(settings or {}))
    async with place.worker() as worker, place.coordinator() as coordinator:
        jobs = {"hisparse-coordinator": [port], "hisparse-worker": [await worker.metrics_port()]}
        with prometheus(path, free_port(), jobs) as server:
            await until(lambda: server.is_up(jobs))
            await until(lambda: server.query("hisparse_link_welcomed == 1"))
            async with open_client(place.endpoint("admin"), role="admin", name="drill") as client:
                yield Scene(place, coordinator, worker, server, client)


# ---------------------------------------------------------------- scenes


async def pressure(path: Path) -> list[Sighting]:
    """Memory runs short, a drain does not end, processes die."""
    async with scene(path) as it:
        await it.crosses(
            "HiSparseHostPoolNearlyFull",
            "three requests that take nearly all host pages",
            'sum(hisparse_host_pages{state="free"}) / sum(hisparse_host_pages)',
            lambda: fill(it.client),
        )
        await it.crosses(
            "HiSparseHitRateCollapse",
            "hot buffers of 128 slots for contexts ten times as long",
            "sum(rate(hisparse_worker_misses_total[10s])) / (sum(rate(hisparse_worker_hits_total[10s]))"
            " + sum(rate(hisparse_worker_misses_total[10s])))",
            trio.lowlevel.checkpoint,
        )

        async def drain() -> None:
            last = await it.client.submit_detached([1] * 64, Sampling(4_000, ignore_eos=True))
            await running(it.client, last)
            await it.client.drain(["w0"])

        draining = 'hisparse_workers{state="draining"}'
        await it.crosses("HiSparseDrainStuck", "a drain of a worker with a long request", draining, drain)
        await it.crosses("HiSparseWorkerDown", "SIGKILL", 'up{job="hisparse-worker"}', killed(it.worker))
        up = 'up{job="hisparse-coordinator"}'
        await it.crosses("HiSparseCoordinatorDown", "SIGKILL", up, killed(it.coordinator))
        async with it.place.coordinator():
            await until(lambda: not it.server.query(rules()["HiSparseCoordinatorDown"]))

        async with AsyncExitStack() as stack:
            starts = 'changes(process_start_time_seconds{job="hisparse-coordinator"}[15m])'
            once_more = partial(stack.enter_async_context, it.place.coordinator())
            await it.crosses("HiSparseCoordinatorRestarts", "a second start within a minute", starts, once_more)
        return it.sightings


async def storm(path: Path) -> list[Sighting]:
    """Requests push each other out of memory."""
    async with scene(path) as it, trio.open_nursery() as nursery:

        async def begin() -> None:
            for seed in (1, 2, 3):
                nursery.start_soon(keep_asking, it.client, prompt(seed, PROMPT_TOKENS), MAX_TOKENS, 0)
            nursery.start_soon(keep_asking, it.client, prompt(4, LARGE_TOKENS), 4, 5)

        await it.crosses(
            "HiSparseRetractionStorm",
            "large requests of high priority, again and again, among small ones of low priority",
            "sum(rate(hisparse_retractions_total[30s])) / sum(rate(hisparse_admissions_total[30s]))",
            begin,
        )
        nursery.cancel_scope.cancel()
    return it.sightings


async def wrong_count(path: Path) -> list[Sighting]:
    async with scene(path, defects={"worker": "lost-seat"}) as it:
        await it.crosses(
            "HiSparseAuditDifference",
            "a worker that misses a seat which the ledger calls free",
            "sum(hisparse_audit_differences_total)",
            shown(it.place),
        )
    return it.sightings


async def hang(path: Path) -> list[Sighting]:
    async with scene(path, defects={"worker": "hang"}) as it:
        silent = "max(hisparse_worker_executor_silent_seconds)"
        await it.crosses("HiSparseWorkerHangs", "a decode loop that stands still", silent, shown(it.place))
    return it.sightings


async def slow_disk(path: Path) -> list[Sighting]:
    async with scene(path, defects={"coordinator": "slow-disk"}) as it, trio.open_nursery() as nursery:
        nursery.start_soon(keep_asking, it.client, prompt(1, 100), 60, 0)
        await until(lambda: it.server.query("hisparse_journal_commits_total > 20"))
        quantile = "histogram_quantile(0.99, sum by (le) (rate(hisparse_journal_commit_seconds_bucket[10s])))"
        await it.crosses("HiSparseJournalSlow", "a disk that takes 0.3 s for a write", quantile, shown(it.place))
        nursery.cancel_scope.cancel()
    return it.sightings


async def full_disk(path: Path) -> list[Sighting]:
    async with scene(path, defects={"coordinator": "full-disk"}) as it, trio.open_nursery() as nursery:
        nursery.start_soon(keep_asking, it.client, prompt(1, 100), 60, 0)
        failing = "max(hisparse_journal_failing)"
        await it.crosses("HiSparseJournalFailing", "a disk that is full", failing, shown(it.place))
        nursery.cancel_scope.cancel()
    return it.sightings


async def waits(path: Path) -> list[Sighting]:
    settings = {"HISPARSE_WORKER_STREAM_BACKEND": "simulated", "HISPARSE_WORKER_STREAM_SEED": "7"}
    async with scene(path, settings=settings) as it, trio.open_nursery() as nursery:
        nursery.start_soon(keep_asking, it.client, prompt(1, 100), 200, 0)
        await until(lambda: it.server.query("hisparse_worker_fence_waits_total > 50"))
        await trio.sleep(QUIET_S)

        async def slow_down() -> None:
            nursery.start_soon(halt_again_and_again, it.worker)

        await it.crosses(
            "HiSparseFenceWaitGrowth",
            f"a worker that may run for {RUNS_S} s and stands still for {STANDS_S} s, in turn",
            "max(rate(hisparse_worker_fence_wait_seconds_total[10s]) / rate(hisparse_worker_fence_waits_total[10s]))",
            slow_down,
        )
        nursery.cancel_scope.cancel()
    return it.sightings


#: By the alerts that each of them causes, in order.
SCENES: Final[dict[tuple[str, ...], Callable[[Path], Awaitable[list[Sighting]]]]] = {
    (
        "HiSparseHostPoolNearlyFull",
        "HiSparseHitRateCollapse",
        "HiSparseDrainStuck",
        "HiSparseWorkerDown",
        "HiSparseCoordinatorDown",
        "HiSparseCoordinatorRestarts",
    ): pressure,
    ("HiSparseRetractionStorm",): storm,
    ("HiSparseAuditDifference",): wrong_count,
    ("HiSparseWorkerHangs",): hang,
    ("HiSparseJournalSlow",): slow_disk,
    ("HiSparseJournalFailing",): full_disk,
    ("HiSparseFenceWaitGrowth",): waits,
}


# ---------------------------------------------------------------- causes


def killed(process: Process) -> Callable[[], Awaitable[None]]:
    async def kill() -> None:
        process.popen.kill()

    return kill


def shown(place: Drilled) -> Callable[[], Awaitable[None]]:
    """The planted defect shows from now on."""

    async def show() -> None:
        place.trigger.touch()

    return show


async def halt_again_and_again(process: Process) -> None:
    try:
        while True:
            process.signal(signal.SIGSTOP)
            await trio.sleep(STANDS_S)
            process.signal(signal.SIGCONT)
            await trio.sleep(RUNS_S)
    finally:
        process.signal(signal.SIGCONT)


def prompt(seed: int, tokens: int) -> list[int]:
    return [(seed * at * 7919 + at * 31) % 250 for at in range(tokens)]


async def keep_asking(client: Client, ids: list[int], max_tokens: int, priority: int) -> None:
    """The same request again and again, until cancelled."""
    while True:
        try:
            stream = await client.submit(ids, Sampling(max_tokens, ignore_eos=True), priority=priority)
            async for _ in stream:
                pass
        except HiSparseError:  # a full disk refuses it
            await trio.sleep(0.1)


async def fill(client: Client) -> None:
    """Three requests with the smallest hot buffers there are, whose prompts differ."""
    ids = [
        await client.submit_detached(prompt(seed, PROMPT_TOKENS), Sampling(MAX_TOKENS, ignore_eos=True))
        for seed in (1, 2, 3)
    ]
    while ids:
        rows = {row.request_id: row for row in (await client.requests()).rows}
        for request_id in [it for it in ids if rows[it].state == "RUNNING"]:
            try:
                await client.resize([request_id], 128)
                ids.remove(request_id)
            except WrongState:
                await trio.sleep(0.1)
        await trio.sleep(0.1)


async def running(client: Client, request_id: str) -> None:
    """Until it is: what the others hold comes back first."""
    while (request_id, "RUNNING") not in {(it.request_id, it.state) for it in (await client.requests()).rows}:  # noqa: ASYNC110
        await trio.sleep(0.1)


# ---------------------------------------------------------------- the program


HEADER: Final = ("| alert | caused by | metric | before | then | after |", "|---|---|---|---|---|---|")


def as_row(it: Sighting) -> str:
    """A row of a table in Markdown."""
    return f"| {it.alert} | {it.cause} | `{it.metric}` | {it.before} | {it.after} | {it.seconds:.0f} s |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.drills")
    parser.add_argument("alerts", nargs="*", metavar="ALERT", help="all unless named")
    wanted = set(parser.parse_args().alerts)
    missed = 0
    print(*HEADER, sep="\n", flush=True)
    for alerts, play in SCENES.items():
        if wanted and not wanted & set(alerts):
            continue
        with tempfile.TemporaryDirectory() as name:
            try:
                for sighting in trio.run(play, Path(name)):
                    print(as_row(sighting), flush=True)
            except* Exception as failures:
                missed += 1
                print(f"{', '.join(alerts)}: {failures.exceptions}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
