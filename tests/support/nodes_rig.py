"""A coordinator and workers on several nodes as real processes, each in the role, on the device and in the network
namespace that it is given, with a fault planted in it if one is asked for.

Clients and the test stay outside of the namespaces: Unix sockets cross them. Workers in namespaces reach the
coordinator over tcp, with keys.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio
from prometheus_client.parser import text_string_to_metric_families

from hisparse import Client, TokenStream, open_client
from hisparse.cluster.children import Child, child_environ, stop_children
from hisparse.cluster.up import STOP_GRACE_S, answers
from protocol.config import pool_path, to_environ
from protocol.messages import AUTO, Sampling
from protocol.settings import Config
from protocol.transport.keys import make_keys
from tests.support.cluster_rig import (
    KV_DTYPE,
    RECONNECT_LIMIT_S,
    assert_audits_agreed,
    cluster_of_two,
    crash_config,
    kept_as,
    prompts_of,
)
from tests.support.netns_rig import Namespace
from tests.support.once import made_once
from worker.pool.file import remove_pool

START_LIMIT_S: Final = 240.0
COORDINATOR: Final = "coordinator"
REQUESTS: Final = 16
#: Of the coordinator in its namespace, where no other process listens.
WORKER_PORT: Final = 7_000
GET: Final = "import sys, urllib.request as r; sys.stdout.buffer.write(r.urlopen(sys.argv[1], timeout=100).read())"


@dataclass(frozen=True)
class Spot:
    """Where a worker lives and what it does. `engine`: by which pages come to it or leave it; `fault`: one of
    tests/support/faulty_worker.py."""

    role: str
    node: str
    engine: str = ""
    device: str = ""
    kv_dtype: str = ""
    namespace: Namespace | None = None
    fault: str = ""

    @property
    def address(self) -> str:
        if self.namespace is not None:
            return f"tcp://{self.namespace.address}:0"
        return "" if self.engine in ("", "shared") else "tcp://127.0.0.1:0"


def two_and_two(engine: str) -> list[Spot]:
    """Two workers that prefill on node a, two that decode on node b."""
    return [Spot(role, node, engine) for role, node in (("prefill", "a"), ("decode", "b")) for _ in range(2)]


@dataclass
class Nodes:
    """Children by name: `coordinator`, and w0, w1, ... in the order of `spots`."""

    config: Config
    log_dir: Path
    spots: Sequence[Spot]
    home: Namespace | None
    children: dict[str, Child] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Also once more, after its exit."""
        if (before := self.children.get(name)) is not None:
            before.close()
        subcommand, config, namespace, module = COORDINATOR, self.config, self.home, ["hisparse.cli"]
        if name != COORDINATOR:
            spot = self.spots[int(name[1:])]
            subcommand, config, namespace = "worker", self._config(name, spot), spot.namespace
            module = ["tests.support.faulty_worker", spot.fault] if spot.fault else module
        prefix = namespace.prefix if namespace is not None else []
        command = [*prefix, sys.executable, "-m", *module, subcommand, "--die-with", str(os.getpid())]
        log = self.log_dir / f"{name}.log"
        self.children[name] = Child.start(name, command, child_environ() | to_environ(config), log)

    def _config(self, name: str, spot: Spot) -> Config:
        before = self.config.worker
        own = msgspec.structs.replace(
            before,
            name=name,
            role=spot.role,
            node=spot.node,
            transfer=spot.engine,
            transfer_address=spot.address if spot.engine else "",
            device=spot.device or before.device,
            kv_dtype=spot.kv_dtype or before.kv_dtype,
        )
        return msgspec.structs.replace(self.config, worker=own)

    async def until_connected(self, client: Client) -> None:
        with trio.fail_after(START_LIMIT_S):
            while sum(row.state == "connected" for row in await client.workers()) < len(self.spots):
                self._require_alive()
                await trio.sleep(0.1)

    async def until_answering(self) -> None:
        with trio.fail_after(START_LIMIT_S):
            while not await answers(self.config):
                self._require_alive()
                await trio.sleep(0.05)

    def _require_alive(self) -> None:
        for child in self.children.values():
            assert child.running, f"{child.name} has ended:\n{child.tail()}"

    async def samples(self, worker: str, metric: str, label: str) -> dict[str, float]:
        """What `worker` exports as `metric`, by `label`."""
        namespace = self.spots[int(worker[1:])].namespace
        return await samples(self.log_dir, worker, metric, label, namespace)

    def said(self, name: str) -> str:
        """The log of a child."""
        return (self.log_dir / f"{name}.log").read_text()


async def samples(
    log_dir: Path, worker: str, metric: str, label: str, namespace: Namespace | None = None
) -> dict[str, float]:
    found = re.findall(r"url=(http://\S+/metrics)", (log_dir / f"{worker}.log").read_text())
    prefix = namespace.prefix if namespace is not None else []
    get = partial(subprocess.check_output, [*prefix, sys.executable, "-c", GET, found[-1]], text=True)
    rows = [
        it
        for family in text_string_to_metric_families(await trio.to_thread.run_sync(get))
        for it in family.samples
        if it.name == metric
    ]
    return {it.labels[label]: it.value for it in rows}


@asynccontextmanager
async def running_nodes(
    config: Config, log_dir: Path, spots: Sequence[Spot], home: Namespace | None = None
) -> AsyncIterator[tuple[Nodes, Client]]:
    """All of them, connected. `home`: where the coordinator lives, when workers have namespaces.

    Raises AssertionError when a child ends during start, or an audit found a difference.
    """
    if home is not None:
        make_keys(log_dir / "keys")
        cluster = msgspec.structs.replace(
            config.cluster, worker_endpoint=f"tcp://{home.address}:{WORKER_PORT}", keys_dir=str(log_dir / "keys")
        )
        config = msgspec.structs.replace(config, cluster=cluster)
    nodes = Nodes(config, log_dir, spots, home)
    try:
        for name in (COORDINATOR, *(f"w{i}" for i in range(len(spots)))):
            nodes.start(name)
        await nodes.until_answering()
        async with open_client(
            config.cluster.admin_endpoint, role="admin", name="test", reconnect_limit_s=RECONNECT_LIMIT_S
        ) as client:
            await nodes.until_connected(client)
            yield nodes, client
            assert_audits_agreed(log_dir, await client.audit())
    finally:
        await stop_children(list(nodes.children.values()), STOP_GRACE_S)
        for child in nodes.children.values():
            child.close()
        for node in {spot.node for spot in spots}:
            remove_pool(pool_path(config.worker.pool_dir, node))


# ---------------------------------------------------------------- the job


def mixed_prompts(count: int = REQUESTS) -> list[list[int]]:
    """One token, page borders and their neighbours, and what lies between."""
    edges = [1, 63, 64, 65, 128, 129, 255, 256, 257, 640]
    long = [[(7 * i + j) % 256 for j in range(tokens)] for i, tokens in enumerate(edges)]
    return long + prompts_of(6, count - len(long))


async def decode_all(
    client: Client, prompts: list[list[int]], prefix: str, prefill_mode: str = AUTO
) -> list[list[int]]:
    """Outputs in order: greedy and drawn, some ended by a stop string, some by their first token."""
    outputs: list[list[int]] = [[] for _ in prompts]

    async def collect(i: int) -> None:
        stream = await client.submit(prompts[i], _sampling(i), request_id=f"{prefix}{i}", prefill_mode=prefill_mode)
        outputs[i] = await _finished(stream)

    async with trio.open_nursery() as nursery:
        for i in range(len(prompts)):
            nursery.start_soon(collect, i)
    return outputs


def colocated_outputs(model: Path, run_dir: Path) -> list[list[int]]:
    """Outputs of two workers that do both for the mixed prompts, decoded once in a run of the suite for each model.
    Rows and keys are in KV_DTYPE, as in all tests that compare with them."""

    async def run() -> list[list[int]]:
        directory = run_dir / f"both {model.name}"[:40]
        directory.mkdir(mode=0o700, exist_ok=True)
        async with cluster_of_two(kept_as(crash_config(model, directory, "24MiB"), KV_DTYPE), directory) as (
            _,
            client,
            _,
        ):
            return await decode_all(client, mixed_prompts(), "both-")

    outputs: list[list[int]] = made_once(run_dir, f"colocated {model.name}", lambda: trio.run(run))
    return outputs


async def decode_hot(client: Client, prompts: list[list[int]], i: int, prefix: str, hot_slots: int) -> list[int]:
    """What `decode_all` gives for prompt `i`, of a hot buffer of `hot_slots`, smaller than it: so it starts warm.

    No worker takes it before it has that size.
    """
    workers = [row.worker for row in await client.workers()]
    await client.drain(workers)
    stream = await client.submit(prompts[i], _sampling(i), request_id=f"{prefix}{i}")
    await client.resize([stream.request_id], hot_slots)
    await client.undrain(workers)
    return await _finished(stream)


def _sampling(i: int) -> Sampling:
    return Sampling(
        max_tokens=(1, 9, 24, 40)[i % 4],
        temperature=(0.0, 0.8)[i % 2],
        seed=i,
        stop=("ab", "e", "\x01")[: i % 3],
        ignore_eos=i % 5 > 0,
    )


async def _finished(stream: TokenStream) -> list[int]:
    tokens = [token async for said in stream for token in said.tolist()]
    assert stream.ended is not None
    assert stream.ended.outcome == "FINISHED", stream.ended
    return tokens
