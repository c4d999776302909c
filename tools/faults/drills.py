"""`python -m tools.faults.drills [ALERT...]`: cause what each alert waits for, and see its metric cross.

A coordinator, a worker and a real Prometheus with the rules of the repository; a *scene* causes one trouble after the
other and looks at the rule's own expression after each. What a rule waits for on top (`for: 5m`) is promtool's business
(metrics/rules/tests). Where an expression compares with hours before, its windows are shrunk, minutes to seconds.

| trouble                       | caused by                                                                      |
|-------------------------------|--------------------------------------------------------------------------------|
| death, drain, load            | what an operator or the machine does: SIGKILL, `hisparse drain`, many requests |
| a hang, a disk, a wrong count | a defect planted in the process (planted.py), there while a file exists        |
| growing waits                 | SIGSTOP and SIGCONT in turn, under simulated streams, whose host waits for them|

Printed is one line for each: the metric before and at the crossing, and how long that took. Exits with 1 when one does
not cross within CAUSE_LIMIT_S.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import urlsplit

import trio
import yaml

from hisparse.client.client import Client, open_client
from hisparse.cluster.children import stop_children
from hisparse.cluster.weights import start_weight_keeper
from protocol.errors import HiSparseError, WrongState
from protocol.messages import Sampling
from protocol.settings import ClusterSettings, Config, WorkerSettings
from protocol.units import PAGE_TOKENS
from tests import ROOT
from tests.support import zygote
from tests.support.planted import PLANTED_WHILE, SLOW_S, SLOW_UNIT_S
from tests.support.ports import free_ports
from tests.support.process_rig import Place, Process
from tests.support.prometheus_rig import Server, prometheus, until
from worker.runners.tiny import write_tiny_checkpoint

Play: TypeAlias = Callable[[Path], Awaitable["list[Sighting]"]]

RULES: Final = ROOT / "metrics" / "rules"
#: Of 73 host pages, three of these take 66 at once and 72 at their end.
PROMPT_TOKENS: Final = 1_220
MAX_TOKENS: Final = 300
#: One that makes two of those three go.
LARGE_TOKENS: Final = 2_900
#: A stopped worker may run for the first of these in each round, and stands still for the second.
RUNS_S, STANDS_S = 0.02, 0.2
#: A storm takes 50 s where little else runs.
CAUSE_LIMIT_S: Final = 300.0
SCENE_LIMIT_S: Final = 850.0
#: When a late answer begins: beyond the bound of its alert.
LATE_S: Final = 14.0
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
class Trouble:
    """What an alert waits for. `metric` is the one behind its expression."""

    alert: str
    cause: str
    metric: str
    is_shrunk: bool = False

    @property
    def expr(self) -> str:
        expr = rules()[self.alert]
        return shrunk(expr) if self.is_shrunk else expr


@dataclass(frozen=True)
class Sighting:
    """A trouble whose expression came to hold, `seconds` after it was caused, and its metric before and after."""

    trouble: Trouble
    before: str
    after: str
    seconds: float


@dataclass
class Drilled(Place):
    """Processes with a defect planted in one command's, and settings beside the usual ones."""

    defects: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)

    def _start(self, subcommand: str, flags: Sequence[str]) -> Process:
        defect = self.defects.get(subcommand)
        program = ["-m", "hisparse.cli"] if defect is None else ["-m", "tests.support.planted", defect]
        environ = {
            "OMP_NUM_THREADS": "1",
            "HISPARSE_CLUSTER_RUNTIME_DIR": str(self.runtime_dir),
            PLANTED_WHILE: str(self.trigger),
            **self.settings,
        }
        log = self.path / f"{subcommand}.log"
        with log.open("wb") as file:
            command = [sys.executable, *program, subcommand, *flags]
            return Process(zygote.start(command, cwd=ROOT, env=os.environ | environ, stderr=file), log)

    @property
    def trigger(self) -> Path:
        return self.path / "defect-shows"


@dataclass
class Scene:
    """A cluster that is watched, and what was seen."""

    place: Drilled
    coordinator: Process
    worker: Process
    http: Process | None
    server: Server
    client: Client
    sightings: list[Sighting] = field(default_factory=list)

    async def cause(self, act: Callable[[], Awaitable[object]], *troubles: Trouble) -> None:
        """`act` makes the expressions of `troubles` hold, which did not before. Raises AssertionError when one does not
        within CAUSE_LIMIT_S."""
        for trouble in troubles:
            await until(partial(self._is_quiet, trouble), lambda: f"{trouble} is there before anything was done")  # noqa: B023
        before, began = [await self.value(trouble.metric) for trouble in troubles], trio.current_time()
        await act()
        for trouble, value in zip(troubles, before, strict=True):
            await until(partial(self.server.query, trouble.expr), partial(self._look, trouble), CAUSE_LIMIT_S)
            took_s = trio.current_time() - began
            self.sightings.append(Sighting(trouble, value, await self.value(trouble.metric), took_s))

    def _is_quiet(self, trouble: Trouble) -> bool:
        return not self.server.query(trouble.expr)

    def _look(self, trouble: Trouble) -> str:
        return f"{trouble}: {self.server.query(trouble.metric)}"

    async def value(self, metric: str) -> str:
        series = await trio.to_thread.run_sync(self.server.query, metric)
        return f"{float(series[0]['value'][1]):.4g}" if series else "none"


@asynccontextmanager
async def scene(
    path: Path,
    *,
    defects: Mapping[str, str] | None = None,
    settings: Mapping[str, str] | None = None,
    with_http: bool = False,
) -> AsyncIterator[Scene]:
    """A cluster with one worker in the directory `path`, all of it scraped, and nothing wrong with it."""
    write_tiny_checkpoint(path / "model")
    port = free_ports(1)
    fixed = {"HISPARSE_COORDINATOR_METRICS_PORT": str(port), "HISPARSE_COORDINATOR_AUDIT_INTERVAL_S": "1"}
    place = Drilled(path, path / "model", defects or {}, fixed | dict(settings or {}), limit_s=SCENE_LIMIT_S)
    async with place.worker() as worker, place.coordinator() as coordinator, AsyncExitStack() as stack:
        http = await stack.enter_async_context(place.http()) if with_http else None
        jobs = {"hisparse-coordinator": [port], "hisparse-worker": [await worker.metrics_port()]}
        if http is not None:
            jobs["hisparse-http"] = [await http.metrics_port()]
        with prometheus(path, free_ports(1), jobs) as server:
            await until(lambda: server.is_up(jobs))
            await until(lambda: server.query("hisparse_link_welcomed == 1"))
            async with open_client(place.endpoint("admin"), role="admin", name="drill") as client:
                yield Scene(place, coordinator, worker, http, server, client)


# ---------------------------------------------------------------- scenes


POOL_FULL: Final = Trouble(
    "HiSparseHostPoolNearlyFull",
    "three requests that take nearly all host pages",
    'sum(hisparse_host_pages{state=~"free|cached"}) / sum(hisparse_host_pages{state!="shared"})',
)
MISSES: Final = Trouble(
    "HiSparseHitRateCollapse",
    "hot buffers of 128 slots for contexts ten times as long",
    "sum(rate(hisparse_worker_misses_total[10s])) / (sum(rate(hisparse_worker_hits_total[10s]))"
    " + sum(rate(hisparse_worker_misses_total[10s])))",
)
DRAIN: Final = Trouble(
    "HiSparseDrainStuck", "a drain of a worker with a long request", 'hisparse_workers{state="draining"}'
)
WORKER_DOWN: Final = Trouble("HiSparseWorkerDown", "SIGKILL", 'up{job="hisparse-worker"}')
HTTP_DOWN: Final = Trouble("HiSparseHttpDown", "SIGKILL", 'up{job="hisparse-http"}')
HTTP_SLOW: Final = Trouble(
    "HiSparseHttpSlow",
    "a worker that stands still while its first answer is waited for",
    "histogram_quantile(0.9, sum by (le) (rate(hisparse_http_first_token_seconds_bucket[30s])))",
)
COORDINATOR_DOWN: Final = Trouble("HiSparseCoordinatorDown", "SIGKILL", 'up{job="hisparse-coordinator"}')
RESTARTS: Final = Trouble(
    "HiSparseCoordinatorRestarts",
    "a second start within a minute",
    'changes(process_start_time_seconds{job="hisparse-coordinator"}[15m])',
)
STORM: Final = Trouble(
    "HiSparseRetractionStorm",
    "large requests of high priority, again and again, among small ones of low priority",
    "sum(rate(hisparse_retractions_total[30s])) / sum(rate(hisparse_admissions_total[30s]))",
)
WRONG_COUNT: Final = Trouble(
    "HiSparseAuditDifference",
    "a worker that misses a seat which the ledger calls free",
    "sum(hisparse_audit_differences_total)",
)
HANG: Final = Trouble(
    "HiSparseWorkerHangs", "a decode loop that stands still", "max(hisparse_worker_executor_silent_seconds)"
)
STANDBY_GONE: Final = Trouble(
    "HiSparseStandbyMissing",
    "a supervisor that says that the standby of its worker is gone",
    "min(hisparse_worker_standbys_ready)",
)
KEEPER_DEAD: Final = Trouble(
    "HiSparseWeightsNotKept", "SIGKILL to the keeper of a worker's weights", "min(hisparse_worker_weights_kept)"
)
LONE_RANK: Final = Trouble(
    "HiSparseGroupIncomplete",
    "a worker that says that it is one of two ranks",
    'sum(hisparse_group_ranks{state="missing"})',
)
SLOW_DISK: Final = Trouble(
    "HiSparseJournalSlow",
    f"a disk that takes {SLOW_S} s for a write",
    "histogram_quantile(0.99, sum by (le) (rate(hisparse_journal_commit_seconds_bucket[10s])))",
)
ROOM_FULL: Final = Trouble(
    "HiSparseRoomNearlyFull",
    "nine requests, where ten may live",
    'max(hisparse_room_used{when_full="refuses"} / hisparse_room_limit)',
)
HTTP_ROOM_FULL: Final = Trouble(
    "HiSparseRoomNearlyFull",
    "nine requests whose bodies do not come, where ten may",
    'max(hisparse_room_used{job="hisparse-http", when_full="refuses"} / hisparse_room_limit)',
)
FULL_DISK: Final = Trouble("HiSparseJournalFailing", "a disk that is full", "max(hisparse_journal_failing)")
WAITS: Final = Trouble(
    "HiSparseFenceWaitGrowth",
    f"a worker that may run for {RUNS_S} s and stands still for {STANDS_S} s, in turn",
    "max(rate(hisparse_worker_fence_wait_seconds_total[10s]) / rate(hisparse_worker_fence_waits_total[10s]))",
    is_shrunk=True,
)

GAPS: Final = Trouble(
    "HiSparseGapTargetMissed",
    f"units of prompts that take {SLOW_UNIT_S} s longer, while a request decodes",
    "histogram_quantile(0.99, sum by (le) (rate(hisparse_worker_gap_seconds_bucket[30s])))",
)
PROMPTS: Final = Trouble(
    "HiSparsePromptsWait",
    "the same, until a long prompt has waited for a minute",
    "max(hisparse_worker_prompt_wait_seconds)",
)


async def pressure(path: Path) -> list[Sighting]:
    """Memory runs short, a drain does not end, processes die."""
    async with scene(path) as it:

        async def drain() -> None:
            last = await it.client.submit_detached([1] * 64, Sampling(4_000, ignore_eos=True))
            await running(it.client, last)
            await it.client.drain(["w0"])

        await it.cause(partial(fill, it.client), POOL_FULL, MISSES)
        await it.cause(drain, DRAIN)
        await it.cause(killed(it.worker), WORKER_DOWN)
        await it.cause(killed(it.coordinator), COORDINATOR_DOWN)
        async with it.place.coordinator():
            await until(lambda: it.server.query("max(up) == 1"))
        async with AsyncExitStack() as stack:
            await it.cause(partial(stack.enter_async_context, it.place.coordinator()), RESTARTS)
        return it.sightings


async def front(path: Path) -> list[Sighting]:
    """Over HTTP a room is nearly full; answers come late, then not at all. A worker that stands still is not taken for
    a lost one."""
    settings = {"HISPARSE_COORDINATOR_HEARTBEAT_LIMIT_S": f"{3 * LATE_S}", "HISPARSE_HTTP_REQUESTS_MAX": "10"}
    async with scene(path, settings=settings, with_http=True) as it:
        assert it.http is not None
        url = await it.http.url()
        await until(lambda: it.server.query("hisparse_http_connected == 1"))

        async with AsyncExitStack() as announced:

            async def announce() -> None:
                host, port = str(urlsplit(url).hostname), urlsplit(url).port or 80
                for _ in range(9):
                    peer = await announced.enter_async_context(await trio.open_tcp_stream(host, port))
                    await peer.send_all(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")

            await it.cause(announce, HTTP_ROOM_FULL)

        async def come_late() -> None:
            async with trio.open_nursery() as answered:  # to its end, before the front is killed
                it.worker.signal(signal.SIGSTOP)
                try:
                    answered.start_soon(trio.to_thread.run_sync, complete, url)
                    await trio.sleep(LATE_S)
                finally:
                    it.worker.signal(signal.SIGCONT)

        await it.cause(come_late, HTTP_SLOW)
        await it.cause(killed(it.http), HTTP_DOWN)
    return it.sightings


async def storm(path: Path) -> list[Sighting]:
    """Requests push each other out of memory."""
    async with scene(path) as it, trio.open_nursery() as nursery:

        async def begin() -> None:
            for seed in (1, 2, 3):
                nursery.start_soon(keep_asking, it.client, prompt(seed, PROMPT_TOKENS), MAX_TOKENS, 0)
            nursery.start_soon(keep_asking, it.client, prompt(4, LARGE_TOKENS), 4, 5)

        await it.cause(begin, STORM)
        nursery.cancel_scope.cancel()
    return it.sightings


async def wrong_count(path: Path) -> list[Sighting]:
    async with scene(path, defects={"worker": "lost-seat"}) as it:
        await it.cause(shown(it.place), WRONG_COUNT)
    return it.sightings


async def takeover(path: Path) -> list[Sighting]:
    """A death of the worker would cost a whole start: its standby is gone, then the keeper of its weights."""
    runtime_dir = path / "run"
    runtime_dir.mkdir(mode=0o700)
    settings = Config(ClusterSettings(runtime_dir=str(runtime_dir)), worker=WorkerSettings(name="w0"))
    keeper = start_weight_keeper(settings, None)
    try:
        async with scene(path) as watched:
            await watched.client.tell_standbys(["w0"], ["w0"])
            await until(lambda: watched.server.query(f"{STANDBY_GONE.metric} == 1"))
            await until(lambda: watched.server.query(f"{KEEPER_DEAD.metric} == 1"))
            await watched.cause(partial(watched.client.tell_standbys, ["w0"], []), STANDBY_GONE)

            async def end() -> None:
                keeper.signal(signal.SIGKILL)

            await watched.cause(end, KEEPER_DEAD)
        return watched.sightings
    finally:
        await stop_children([keeper], 0)
        keeper.close()


async def lone_rank(path: Path) -> list[Sighting]:
    async with scene(path, defects={"worker": "lone-rank"}) as it, AsyncExitStack() as stack:

        async def join() -> None:
            it.place.trigger.touch()
            await stack.enter_async_context(it.place.worker("--name", "w1"))

        await it.cause(join, LONE_RANK)
    return it.sightings


async def hang(path: Path) -> list[Sighting]:
    async with scene(path, defects={"worker": "hang"}) as it:
        await it.cause(shown(it.place), HANG)
    return it.sightings


async def slow_prompts(path: Path) -> list[Sighting]:
    """Units of a long prompt take long. The worker turns between them, and decodes another request."""
    settings = {"HISPARSE_WORKER_PASS_TOKENS": str(PAGE_TOKENS)}  # many units
    async with scene(path, defects={"worker": "slow-units"}, settings=settings) as it, trio.open_nursery() as nursery:
        nursery.start_soon(keep_asking, it.client, prompt(1, 100), 600, 0)
        await until(lambda: it.server.query("hisparse_worker_gap_target_seconds > 0"))

        async def ask() -> None:
            it.place.trigger.touch()
            await it.client.submit_detached(prompt(2, LARGE_TOKENS), Sampling(4, ignore_eos=True))

        await it.cause(ask, GAPS, PROMPTS)
        it.place.trigger.unlink()
        nursery.cancel_scope.cancel()
    return it.sightings


async def slow_disk(path: Path) -> list[Sighting]:
    async with scene(path, defects={"coordinator": "slow-disk"}) as it, trio.open_nursery() as nursery:
        nursery.start_soon(keep_asking, it.client, prompt(1, 100), 60, 0)
        await until(lambda: it.server.query("hisparse_journal_commits_total > 20"))
        await it.cause(shown(it.place), SLOW_DISK)
        nursery.cancel_scope.cancel()
    return it.sightings


async def full_room(path: Path) -> list[Sighting]:
    settings = {"HISPARSE_COORDINATOR_LIVE_REQUESTS_MAX": "10", "HISPARSE_COORDINATOR_QUEUE_MAX": "10"}
    async with scene(path, settings=settings) as it:

        async def submit() -> None:
            for seed in range(9):
                await it.client.submit_detached(prompt(seed, 64), Sampling(4_000, ignore_eos=True))

        await it.cause(submit, ROOM_FULL)
    return it.sightings


async def full_disk(path: Path) -> list[Sighting]:
    async with scene(path, defects={"coordinator": "full-disk"}) as it, trio.open_nursery() as nursery:
        nursery.start_soon(keep_asking, it.client, prompt(1, 100), 60, 0)
        await it.cause(shown(it.place), FULL_DISK)
        nursery.cancel_scope.cancel()
    return it.sightings


async def waits(path: Path) -> list[Sighting]:
    """Under simulated streams, whose host waits for them."""
    settings = {"HISPARSE_WORKER_STREAM_BACKEND": "simulated", "HISPARSE_WORKER_STREAM_SEED": "7"}
    async with scene(path, settings=settings) as it, trio.open_nursery() as nursery:

        async def slow_down() -> None:
            nursery.start_soon(halt_again_and_again, it.worker)

        nursery.start_soon(keep_asking, it.client, prompt(1, 100), 200, 0)
        await until(lambda: it.server.query("hisparse_worker_fence_waits_total > 50"))
        await trio.sleep(QUIET_S)
        await it.cause(slow_down, WAITS)
        nursery.cancel_scope.cancel()
    return it.sightings


#: Each with what it causes, in order.
SCENES: Final[tuple[tuple[Play, tuple[Trouble, ...]], ...]] = (
    (pressure, (POOL_FULL, MISSES, DRAIN, WORKER_DOWN, COORDINATOR_DOWN, RESTARTS)),
    (front, (HTTP_ROOM_FULL, HTTP_SLOW, HTTP_DOWN)),
    (storm, (STORM,)),
    (wrong_count, (WRONG_COUNT,)),
    (takeover, (STANDBY_GONE, KEEPER_DEAD)),
    (lone_rank, (LONE_RANK,)),
    (hang, (HANG,)),
    (slow_disk, (SLOW_DISK,)),
    (full_room, (ROOM_FULL,)),
    (full_disk, (FULL_DISK,)),
    (waits, (WAITS,)),
    (slow_prompts, (GAPS, PROMPTS)),
)


# ---------------------------------------------------------------- causes


def killed(process: Process) -> Callable[[], Awaitable[None]]:
    async def kill() -> None:
        process.popen.kill()

    return kill


def complete(url: str) -> None:
    """One answer over HTTP, to its end."""
    body = json.dumps({"prompt": "hello", "max_tokens": 4}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=CAUSE_LIMIT_S) as answer:
        answer.read()


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
    trouble = it.trouble
    return f"| {trouble.alert} | {trouble.cause} | `{trouble.metric}` | {it.before} | {it.after} | {it.seconds:.0f} s |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.faults.drills")
    parser.add_argument("alerts", nargs="*", metavar="ALERT", help="all unless named")
    wanted = set(parser.parse_args().alerts)
    missed = 0
    print(*HEADER, sep="\n", flush=True)
    for play, troubles in SCENES:
        alerts = [trouble.alert for trouble in troubles]
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
