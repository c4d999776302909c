"""The procedures of docs/operations.md, by the commands written there, under load: nothing is lost, nothing differs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
import trio

from hisparse.client.client import Client, open_client
from hisparse.cluster.children import Child
from hisparse.cluster.up import COORDINATOR, Cluster, running_cluster
from protocol.messages import Sampling
from protocol.settings import Config
from tests.support.cluster_rig import RECONNECT_LIMIT_S, cluster_config, prompts_of, until_all_connected, write_model

pytestmark = [pytest.mark.process, pytest.mark.deep, pytest.mark.timeout(900)]

CLIENTS: Final = 2
SAMPLING: Final = Sampling(max_tokens=60, ignore_eos=True)
LIMIT_S: Final = 240.0


class Load:
    """Clients that ask for the same completions over and over and hold each against the first."""

    def __init__(self, client: Client) -> None:
        self.completed = 0
        self._client = client
        self._prompts = prompts_of(3, CLIENTS)
        self._expected: dict[int, list[int]] = {}

    async def once(self, number: int, request_id: str) -> None:
        stream = await self._client.submit(self._prompts[number], SAMPLING, request_id=request_id)
        tokens = (await stream.collect()).tolist()
        assert stream.ended is not None
        assert (stream.ended.outcome, len(tokens)) == ("FINISHED", SAMPLING.max_tokens)
        assert tokens == self._expected.setdefault(number, tokens)
        self.completed += 1

    async def keep_on(self, number: int) -> None:
        at = 0
        while True:
            at += 1
            await self.once(number, f"client-{number}-{at}")

    async def some_more(self) -> None:
        """Until every client has had an answer, on average, since now."""
        goal = self.completed + CLIENTS
        with trio.fail_after(LIMIT_S):
            while self.completed < goal:  # noqa: ASYNC110
                await trio.sleep(0.05)


@asynccontextmanager
async def loaded_cluster(path: Path) -> AsyncIterator[tuple[Cluster, Load]]:
    config = cluster_config(write_model(path / "model"), path / "run", streams="inline")
    async with (
        running_cluster(config, 2, log_dir=path) as cluster,
        open_client(config.cluster.client_endpoint, reconnect_limit_s=RECONNECT_LIMIT_S) as client,
        trio.open_nursery() as nursery,
    ):
        load = Load(client)
        for number in range(CLIENTS):
            await load.once(number, f"undisturbed-{number}")
        for number in range(CLIENTS):
            nursery.start_soon(load.keep_on, number)
        yield cluster, load
        nursery.cancel_scope.cancel()


async def hisparse(config: Config, *args: str) -> str:
    """What the command prints; it must succeed."""
    done = await trio.run_process(
        [sys.executable, "-m", "hisparse.cli", *args],
        env=os.environ | {"HISPARSE_CLUSTER_RUNTIME_DIR": config.cluster.runtime_dir},
        capture_stdout=True,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.decode()


async def ended(child: Child) -> int:
    with trio.fail_after(LIMIT_S):
        return await child.wait()


async def test_rolling_upgrade_and_journal_restore_serve_clients(tmp_path: Path) -> None:
    """Workers one by one with handover, then the coordinator, whose journal is backed up, lost and restored."""
    async with loaded_cluster(tmp_path) as (cluster, load):
        before = {child.pid for child in cluster.by_name.values()}
        for worker in list(cluster.workers):
            await hisparse(cluster.config, "drain", worker, "--handover", "--wait")
            cluster.workers[worker].process.terminate()
            assert await ended(cluster.workers[worker]) == 0
            cluster.restart(worker)
            async with cluster.client("test") as client:
                await until_all_connected(client, LIMIT_S)
            await load.some_more()
        await hisparse(cluster.config, "stop", "--deadline", "0")
        assert await ended(cluster.coordinator) == 0
        await lose_and_restore_the_journal(cluster, tmp_path / "backup")
        cluster.restart(COORDINATOR)
        await load.some_more()
        assert not before & {child.pid for child in cluster.by_name.values()}


async def lose_and_restore_the_journal(cluster: Cluster, backup: Path) -> None:
    """Workers decode on meanwhile; a coordinator that finds a damaged journal refuses to start and names it."""
    journal = Path(cluster.config.coordinator.journal)
    shutil.copytree(journal.parent, backup, ignore=lambda _, names: {it for it in names if not is_of(journal, it)})
    spoil(journal, os.listdir(backup))
    cluster.restart(COORDINATOR)
    assert await ended(cluster.coordinator) == 8
    assert "coordinator.journal" in cluster.coordinator.tail()
    for name in filter(lambda name: is_of(journal, name), os.listdir(journal.parent)):
        os.unlink(journal.parent / name)
    shutil.copytree(backup, journal.parent, dirs_exist_ok=True)


def is_of(journal: Path, name: str) -> bool:
    """Whether a file beside the journal belongs to it."""
    return name.startswith(journal.name)


def spoil(journal: Path, names: Iterable[str]) -> None:
    for name in names:
        (journal.parent / name).write_bytes(b"not a journal" * 1000)
