"""A coordinator and two workers as real processes, for jobs that are disturbed while they decode.

Deterministic and with simulated streams whose backup lags: whatever is done to it, the output of a request is that of
an undisturbed run. Audits run all the time. What dies or hangs is seen to by the keeper of `hisparse up`, if asked.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
import trio

from hisparse.client.client import Client, open_client
from hisparse.cluster.keeper import Keeper
from hisparse.cluster.up import Cluster, running_cluster
from protocol.config import HostFacts, build
from protocol.messages import AuditRows, RequestRow
from protocol.settings import Config
from worker.runners.tiny import write_tiny_checkpoint

TOPK: Final = 16
SIZE_CLASSES: Final = (64, 128, 256)
#: Short, so that tests of hung workers need not wait long.
HEARTBEAT_LIMIT_S: Final = 2.0
#: For how long the client waits for a coordinator to come back: longer than the keeper's longest pause and a start.
RECONNECT_LIMIT_S: Final = 120.0
#: How long freed memory may take to be seen free.
FREE_LIMIT_S: Final = 10.0


def write_model(path: Path) -> Path:
    write_tiny_checkpoint(path, "glm-5", index_topk=TOPK, context_max_tokens=2_048)
    return path


def cluster_config(model: Path, runtime_dir: Path, *, streams: str = "simulated", hot_chunks: int = 60) -> Config:
    flags: dict[str, object] = {
        "cluster.runtime_dir": str(runtime_dir),
        "coordinator.audit_interval_s": 0.3,
        "worker.model": str(model),
        "worker.dtype": "float32",
        "worker.deterministic": True,
        "worker.stream_backend": streams,
        "worker.stream_seed": 7,
        "worker.seats": 16,
        "worker.device_mem": "64MiB",
        "worker.host_mem": "24MiB",
        "worker.context_max_tokens": 1_024,
        "worker.hot_size_classes": SIZE_CLASSES,
        "worker.hot_chunks_max": hot_chunks,
        "worker.tail_slots": 2,
        "worker.prefill_chunk_tokens": 256,
        "worker.layer_group": "8KiB",
        "worker.threads": 1,
    }
    return build({}, {}, flags, HostFacts.read())


def crash_config(model: Path, runtime_dir: Path, host_mem: str = "24MiB") -> Config:
    """Whose workers are missed soon."""
    config = cluster_config(model, runtime_dir)
    return msgspec.structs.replace(
        config,
        coordinator=msgspec.structs.replace(
            config.coordinator, heartbeat_interval_s=0.2, heartbeat_limit_s=HEARTBEAT_LIMIT_S
        ),
        worker=msgspec.structs.replace(config.worker, host_mem=host_mem),
    )


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
            nursery.start_soon(Keeper(cluster, said.append, lambda: None).run)
        yield cluster, client, said
        assert_audits_agreed(log_dir, await client.audit())
        nursery.cancel_scope.cancel()


def assert_audits_agreed(log_dir: Path, last: AuditRows) -> None:
    """No audit, of those that ran all the time and the last one, has found a difference."""
    assert last.differences == ()
    assert all(row.answered for row in last.audited)
    assert "audit:" not in (log_dir / "coordinator.log").read_text()


def prompts_of(seed: int, count: int) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(256) for _ in range(dice.randrange(40, 640))] for _ in range(count)]


def lengths(rows: Iterable[RequestRow]) -> str:
    """Generated tokens whose rows are durable / that the coordinator knows, of each request."""
    return " ".join(f"{row.request_id}={row.durable_tokens - row.prompt_tokens}/{row.generated_tokens}" for row in rows)


async def all_free(client: Client) -> bool:
    pools, workers = await client.pools(), await client.workers()
    return all(row.free + row.cached == row.host_pages for row in pools) and all(
        (row.seats_free, row.hot_chunks_free, row.index_pages_free, row.slab_pages_free)
        == (row.capacity.seats, row.capacity.hot_chunks, row.capacity.index_pages, row.capacity.slab_pages)
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
