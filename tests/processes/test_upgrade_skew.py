"""A cluster of an earlier commit is upgraded under load, coordinator first, which is rolled back once in between.

Its own code runs, from the history of this repository: of the last commit that speaks the protocol before this one, or,
while no older protocol is served, of an earlier commit that speaks this one. Without history the test is skipped.
tests/protocol/test_skew.py has the rules, with a pair of versions made for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import pytest
import trio

from hisparse.client.client import open_client
from hisparse.cluster import children
from hisparse.cluster.children import Child, child_environ, stop_children
from protocol.config import pool_path, to_environ
from protocol.messages import PROTOCOL_VERSION
from protocol.settings import Config
from protocol.skew import PROTOCOL_VERSION_MIN
from tests.support import upgrade_load
from tests.support.cluster_rig import cluster_config, write_model
from worker.pool.file import remove_pool

pytestmark = [pytest.mark.process, pytest.mark.upgrade, pytest.mark.timeout(600)]

ROOT: Final = Path(__file__).parents[2]
MESSAGES: Final = "protocol/messages.py"
#: Begins the line of MESSAGES that says the version.
VERSION_LINE: Final = "PROTOCOL_VERSION: Final = "
OLDER: Final = "older"
NEWER: Final = "newer"
WORKERS: Final = ("worker-0", "worker-1")
LIMIT_S: Final = 120.0
EXIT_CONFIG: Final = 8
EXIT_PROTOCOL: Final = 7


@pytest.fixture(autouse=True)
def _executed_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked worker (tests/processes/conftest.py) would run the code of this tree, whatever its version."""
    monkeypatch.setattr(children, "subprocess", subprocess)


def git(*arguments: str) -> bytes:
    """Return what git prints; skip the test where there is no history."""
    done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, check=False)
    if done.returncode or not done.stdout:
        pytest.skip(f"no history here: git {' '.join(arguments)} has no answer")
    return done.stdout


def older_commit() -> str:
    """Return the last commit that speaks another protocol than this code; where no older one is served, the first that
    speaks this one."""
    if f"\n{VERSION_LINE}{PROTOCOL_VERSION}\n" not in git("show", f"HEAD:{MESSAGES}").decode():
        return "HEAD"  # the change is not committed yet
    changed = git("log", "-1", "--format=%H", "-G", f"^{VERSION_LINE}", "--", MESSAGES).decode().strip()
    return f"{changed}^" if PROTOCOL_VERSION_MIN < PROTOCOL_VERSION else changed


@pytest.fixture
def older_tree(tmp_path: Path) -> Path:
    """The code of `older_commit`."""
    tree = tmp_path / "older"
    tree.mkdir()
    archive = git("archive", older_commit())
    subprocess.run(["tar", "-x", "-C", tree], input=archive, check=True)
    return tree


@dataclass
class Rig:
    """Processes of two versions in one runtime directory. `trees`: the code of each version."""

    config: Config
    trees: dict[str, Path]
    log_dir: Path
    children: dict[str, Child] = field(default_factory=dict)

    def environ(self, version: str, config: Config | None = None) -> dict[str, str]:
        """Settings that have their defaults are left out: the older version may not know them."""
        defaults = to_environ(Config())
        settings = {name: text for name, text in to_environ(config or self.config).items() if defaults[name] != text}
        return child_environ() | settings | {"PYTHONPATH": str(self.trees[version])}

    def start(self, version: str, name: str) -> Child:
        """Start the coordinator or the worker of this name, whose process has ended."""
        role, config = "coordinator", self.config
        if name != role:
            role = "worker"
            config = msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, name=name))
        command = [sys.executable, "-m", "hisparse.cli", role, "--die-with", str(os.getpid())]
        if name in self.children:
            self.children.pop(name).close()
        child = Child.start(name, command, self.environ(version, config), self.log_dir / f"{name}.log")
        self.children[name] = child
        return child

    async def command(self, version: str, *words: str, status: int = 0) -> str:
        """What `hisparse WORDS` of this version prints; it must end with `status`."""
        done = await trio.run_process(
            [sys.executable, "-m", "hisparse.cli", *words],
            env=self.environ(version),
            capture_stdout=True,
            stderr=subprocess.STDOUT,
            check=False,
        )
        assert done.returncode == status, done.stdout.decode()
        return done.stdout.decode()

    async def ended(self, name: str) -> int:
        with trio.fail_after(LIMIT_S):
            return await self.children[name].wait()

    async def until_connected(self, version: str) -> None:
        with trio.fail_after(LIMIT_S):
            while True:
                done = await trio.run_process(
                    [sys.executable, "-m", "hisparse.cli", "workers", "-o", "json"],
                    env=self.environ(version),
                    capture_stdout=True,
                    capture_stderr=True,
                    check=False,
                )
                rows = json.loads(done.stdout) if done.returncode == 0 else []
                if [row["state"] for row in rows] == ["connected"] * len(WORKERS):
                    return
                await trio.sleep(0.2)

    async def replace_coordinator(self, of: str, by: str) -> None:
        await self.command(of, "stop", "--deadline", "0")
        assert await self.ended("coordinator") == 0
        self.start(by, "coordinator")


class Load:
    """Clients of the older version, in a process of their own (tests/support/upgrade_load.py)."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self.completed = 0

    async def count(self) -> None:
        assert self.process.stdout is not None
        async for lines in self.process.stdout:
            self.completed += lines.count(b"\n")

    async def some_more(self) -> None:
        """Until each client has had an answer, on average, since now."""
        goal = self.completed + len(upgrade_load.PROMPTS)
        with trio.fail_after(LIMIT_S):
            while self.completed < goal:
                assert self.process.returncode is None, "the load has ended: see its traceback"
                await trio.sleep(0.05)


@asynccontextmanager
async def older_cluster(tmp_path: Path, tree: Path) -> AsyncIterator[tuple[Rig, Load]]:
    """A coordinator and two workers of the older commit, under load."""
    config = cluster_config(write_model(tmp_path / "model"), tmp_path / "run", streams="inline")
    worker = msgspec.structs.replace(config.worker, pool_dir=str(tmp_path))
    config = msgspec.structs.replace(config, worker=worker)
    rig = Rig(config, {OLDER: tree, NEWER: ROOT}, tmp_path)
    try:
        for name in ("coordinator", *WORKERS):
            rig.start(OLDER, name)
        await rig.until_connected(OLDER)
        async with trio.open_nursery() as nursery:
            load = Load(
                await trio.lowlevel.open_process(
                    [sys.executable, upgrade_load.__file__, config.cluster.client_endpoint],
                    env=rig.environ(OLDER),
                    stdout=subprocess.PIPE,
                )
            )
            nursery.start_soon(load.count)
            try:
                await load.some_more()
                yield rig, load
                assert load.process.returncode is None
            finally:
                load.process.terminate()
                await load.process.wait()
    finally:
        await stop_children([*rig.children.values()], 5.0)
        for child in rig.children.values():
            child.close()
        remove_pool(pool_path(config.worker.pool_dir, config.worker.node))


async def newer_peers_are_refused(rig: Rig) -> None:
    """Workers and commands that come before their coordinator; the older cluster goes on."""
    refusal = await rig.command(NEWER, "workers", status=EXIT_PROTOCOL)
    assert f"this coordinator speaks protocol {PROTOCOL_VERSION_MIN}" in refusal
    rig.start(NEWER, "worker-2")
    assert await rig.ended("worker-2") == EXIT_CONFIG
    # a hello has no field that the older coordinator does not know
    assert f"this coordinator speaks protocol {PROTOCOL_VERSION_MIN}" in rig.children["worker-2"].tail()


async def test_rolling_upgrade_from_an_earlier_commit_loses_and_changes_nothing(
    tmp_path: Path, older_tree: Path
) -> None:
    async with older_cluster(tmp_path, older_tree) as (rig, load):
        if PROTOCOL_VERSION_MIN < PROTOCOL_VERSION:
            await newer_peers_are_refused(rig)
            await load.some_more()

        # The coordinator, and back, and again: each reads the journal of the other, with requests in it.
        for of, by in ((OLDER, NEWER), (NEWER, OLDER), (OLDER, NEWER)):
            await rig.replace_coordinator(of, by)
            await load.some_more()
        await rig.command(OLDER, "requests")  # rows without what the older command would refuse

        for worker in WORKERS:
            await rig.command(NEWER, "drain", worker, "--handover", "--wait")
            rig.children[worker].process.terminate()
            assert await rig.ended(worker) == 0
            rig.start(NEWER, worker)
            await rig.until_connected(NEWER)
            await load.some_more()

        async with open_client(rig.config.cluster.admin_endpoint, role="admin", name="test") as admin:
            audit = await admin.audit()
        assert audit.differences == ()
        assert all(row.answered for row in audit.audited)
