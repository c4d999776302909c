"""A coordinator and two workers as real processes, for jobs that are disturbed while they decode.

Deterministic and with simulated streams whose backup lags: whatever is done to it, the output of a request is that of
an undisturbed run. Audits run all the time. What dies or hangs is seen to by the keeper of `hisparse up`, if asked.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import pytest
import trio

from hisparse.client.client import Client, open_client
from hisparse.cluster import up
from hisparse.cluster.children import Child, Code, child_environ
from hisparse.cluster.supervision import ProcessSupervisor
from hisparse.cluster.up import Cluster, running_cluster
from protocol.byte_sizes import parse_size
from protocol.config import HostFacts, build, to_environ
from protocol.messages import AuditRows, RequestRow
from protocol.settings import Config
from tests.support.checkpoints import LATENT, tiny_checkpoint
from tests.support.history import first_parent_commits
from tests.support.planted import PLANTED_WHILE
from worker.runners.checkpoint import geometry_of, kinds_of, read_dimensions
from worker.runners.tiny import write_tiny_checkpoint

T = TypeVar("T")

#: One that is dense and selects, one that has experts and shares its selection: half of a token's time.
LAYERS: Final = 2
TOPK: Final = 16
SIZE_CLASSES: Final = (64, 128, 256)
#: Format of rows and keys in which this commit's workers are compared with workers of the same: each model meets both.
KV_DTYPE: Final = ("auto", "fp4")[(first_parent_commits() or 0) // len(LATENT) % 2]
#: Of tests of processes that stand still: short, and longer than a busy machine lets one of the others stand still.
HEARTBEAT_LIMIT_S: Final = 6.0
#: Of all other tests: a process that has ended is seen at once, and one that is slow is no loss.
PATIENCE_S: Final = 120.0
#: For how long the client waits for a coordinator to come back: longer than the keeper's longest pause and a start.
RECONNECT_LIMIT_S: Final = 120.0
#: How long freed memory may take to be seen free.
FREE_LIMIT_S: Final = 240.0


ABOUT: Final[dict[str, Any]] = {"index_topk": TOPK, "context_max_tokens": 2_048, "layers": LAYERS}


def write_model(path: Path) -> Path:
    """Write a checkpoint that one test alone has."""
    write_tiny_checkpoint(path, "glm-5", **ABOUT)
    return path


def standing_model(run_dir: Path, family: str = "glm-5") -> Path:
    """Return that of all tests of the run that change no file of it."""
    return tiny_checkpoint(run_dir, family, **ABOUT)


def cluster_config(model: Path, runtime_dir: Path, *, streams: str = "simulated", hot_chunks: int = 60) -> Config:
    flags: dict[str, object] = {
        "cluster.runtime_dir": str(runtime_dir),
        "coordinator.audit_interval_s": 0.3,
        "coordinator.heartbeat_limit_s": PATIENCE_S,
        "worker.model": str(model),
        "worker.dtype": "float32",
        "worker.deterministic": True,
        "worker.stream_backend": streams,
        "worker.stream_seed": 7,
        "worker.seats": 16,
        "worker.device_mem": "64MiB",
        "worker.host_mem": "12MiB",
        "worker.context_max_tokens": 1_024,
        "worker.hot_size_classes": SIZE_CLASSES,
        "worker.hot_chunks_max": hot_chunks,
        "worker.tail_slots": 2,
        "worker.pass_tokens": 256,
        "worker.layer_group": "8KiB",
        "worker.threads": 1,
    }
    return build({}, {}, flags, HostFacts.read())


def crash_config(model: Path, runtime_dir: Path, host_mem: str = "12MiB") -> Config:
    """For tests whose processes are killed, and with `missed_soon` stopped."""
    config = cluster_config(model, runtime_dir)
    return msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, host_mem=host_mem))


def kept_as(config: Config, kv_dtype: str) -> Config:
    """Return `config` with rows and keys in `kv_dtype`, and host memory for as many pages as before."""
    before = config.worker
    after = msgspec.structs.replace(before, kv_dtype=kv_dtype)
    dimensions = read_dimensions(before.model)
    pages = [geometry_of(dimensions, kinds_of(dimensions, it)).page_bytes for it in (before, after)]
    host_mem = parse_size(before.host_mem, "worker.host_mem") * pages[1] // pages[0]
    return msgspec.structs.replace(config, worker=msgspec.structs.replace(after, host_mem=str(host_mem)))


def missed_soon(config: Config) -> Config:
    """Workers of `config` that stand still are missed soon."""
    limits = msgspec.structs.replace(config.coordinator, heartbeat_interval_s=0.2, heartbeat_limit_s=HEARTBEAT_LIMIT_S)
    return msgspec.structs.replace(config, coordinator=limits)


def plant(patched: pytest.MonkeyPatch, defect: str, trigger: Path) -> None:
    """Workers that start from now on have `defect` (tests/support/planted.py), which shows while `trigger` is there."""
    start = up.start_child

    def start_planted(
        subcommand: str,
        config: Config,
        log_dir: Path | None,
        *others: int | None,
        as_standby: bool = False,
        code: Code | None = None,
    ) -> Child:
        if subcommand != "worker" or log_dir is None:
            return start(subcommand, config, log_dir, *others)
        command = [sys.executable, "-m", "tests.support.planted", defect, "worker", "--die-with", str(os.getpid())]
        command += ["--as-standby"] if as_standby else []
        environ, log_path = child_environ() | to_environ(config), log_dir / f"{config.worker.name}.log"
        name = config.worker.name
        return Child.start(name, command, environ, log_path, takes_orders=as_standby, gives_reason=True)

    patched.setattr(up, "start_child", start_planted)
    patched.setenv(PLANTED_WHILE, str(trigger))


@asynccontextmanager
async def cluster_of_two(
    config: Config,
    log_dir: Path,
    *,
    kept: bool = False,
    roles: Sequence[str] = ("both", "both"),
    group_size: int = 1,
) -> AsyncIterator[tuple[Cluster, Client, list[str]]]:
    """One worker for each of `roles`, in groups of `group_size`. `kept`: what dies is restarted, what hangs is killed.
    Gives what was said of it.

    Raises AssertionError when an audit found a difference.
    """
    said: list[str] = []
    async with (
        running_cluster(
            config, len(roles), roles=roles[::group_size], group_size=group_size, log_dir=log_dir
        ) as cluster,
        open_client(
            config.cluster.admin_endpoint, role="admin", name="test", reconnect_limit_s=RECONNECT_LIMIT_S
        ) as client,
        trio.open_nursery() as nursery,
    ):
        if kept:
            nursery.start_soon(ProcessSupervisor(cluster, said.append, lambda: None, standbys=cluster.standbys).run)
        yield cluster, client, said
        assert_audits_agreed(log_dir, await client.audit())
        nursery.cancel_scope.cancel()


def assert_audits_agreed(log_dir: Path, last: AuditRows) -> None:
    """No audit, of those that ran all the time and the last one, has found a difference."""
    assert last.differences == ()
    assert all(row.answered for row in last.audited)
    assert "audit:" not in (log_dir / "coordinator.log").read_text()


async def again_until(done: trio.Event, decode: Callable[[str], Awaitable[T]], expected: T, prefix: str) -> int:
    """Call `decode` with PREFIX1-, PREFIX2- and so on, at least once and until `done`. Each must give `expected`.

    A round that is to be disturbed ends before it is, where this process has no core. Returns the number of rounds.
    """
    for turn in count(1):
        assert await decode(f"{prefix}{turn}-") == expected
        if done.is_set():
            return turn
    raise AssertionError


def prompts_of(seed: int, count: int) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(256) for _ in range(dice.randrange(40, 640))] for _ in range(count)]


def lengths(rows: Iterable[RequestRow]) -> str:
    """Generated tokens whose rows are durable / that the coordinator knows, of each request."""
    return " ".join(f"{row.request_id}={row.durable_tokens - row.prompt_tokens}/{row.generated_tokens}" for row in rows)


async def all_free(client: Client) -> bool:
    pools, workers = await client.pools(), await client.workers()
    return all(row.free + row.cached == row.host_pages for row in pools) and all(
        (row.seats_free, row.hot_chunks_free, row.index_pages_free)
        == (row.capacity.seats, row.capacity.hot_chunks, row.capacity.index_pages)
        for row in workers
        if row.state != "disconnected"  # its rows tell how it was last
    )


async def until_all_connected(client: Client, limit_s: float) -> None:
    with trio.fail_after(limit_s):
        while {row.state for row in await client.workers()} != {"connected"}:  # noqa: ASYNC110
            await trio.sleep(0.1)


async def assert_nothing_leaked(client: Client) -> None:
    give_up_at = trio.current_time() + FREE_LIMIT_S
    while not await all_free(client):
        assert trio.current_time() < give_up_at, f"still held: {await client.pools()}, {await client.workers()}"
        await trio.sleep(0.05)
