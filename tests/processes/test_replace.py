"""`hisparse up --replace-workers`: workers of other code take the places of those that serve, and no token differs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import trio

from hisparse.client.client import Client, open_client
from hisparse.cluster.children import child_environ
from tests import ROOT
from tests.processes.test_up import Up, running
from tests.processes.test_upgrade import LIMIT_S, Load
from tests.support.checkpoints import tiny_checkpoint
from tests.support.cluster_rig import RECONNECT_LIMIT_S, until_all_connected

pytestmark = [pytest.mark.process, pytest.mark.deep, pytest.mark.timeout(600)]

PACKAGES: Final = ("basics", "coordinator", "hisparse", "kernels", "metrics", "protocol", "worker")
CLIENTS: Final = 2
REFUSES: Final = "def stand_by(config: Config, halted: threading.Event) -> Prepared:"


class Tree:
    """A copy of the code whose version is NEXT."""

    VERSION: Final = "next"

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in PACKAGES:
            shutil.copytree(ROOT / name, path / name, ignore=shutil.ignore_patterns("__pycache__"))
        with (path / "protocol/version.py").open("a") as file:
            file.write(f"\n\ndef our_version() -> str:\n    return {self.VERSION!r}\n")

    def refuse(self) -> None:
        """Have its standbys refuse to start."""
        path = self.path / "worker/standby.py"
        path.write_text(path.read_text().replace(REFUSES, f"{REFUSES}\n    raise ConfigError('no such release')"))

    async def replace(self, runtime_dir: Path, *options: str) -> subprocess.CompletedProcess[bytes]:
        """Run the command of this code."""
        words = ["up", "--replace-workers", "--runtime-dir", str(runtime_dir), *options]
        with trio.fail_after(LIMIT_S):
            return await trio.run_process(
                [sys.executable, "-m", "hisparse.cli", *words],
                env=child_environ() | {"PYTHONPATH": str(self.path)},
                capture_stdout=True,
                stderr=subprocess.STDOUT,
                check=False,
            )


@pytest.fixture
def up(run_dir: Path, tmp_path: Path) -> Iterator[Up]:
    """Two workers, executed: forked ones would run the code of this tree, whatever its version."""
    model = tiny_checkpoint(run_dir, index_topk=64, context_max_tokens=4_096, layers=2)
    with running(model, tmp_path, "-n", "2", "--deterministic", "--dtype", "float32", start=subprocess.Popen) as up:
        yield up


async def test_workers_are_replaced_under_load_by_code_of_another_tree(up: Up, tmp_path: Path) -> None:
    """Weights are mapped, not read. A release that refuses to start changes nothing; other commands are refused."""
    tree = Tree(tmp_path / "next")
    async with (
        open_client(up.ready["client_endpoint"], reconnect_limit_s=RECONNECT_LIMIT_S) as client,
        trio.open_nursery() as nursery,
    ):
        load = Load(client)
        for number in range(CLIENTS):
            await load.once(number, f"undisturbed-{number}")
        for number in range(CLIENTS):
            nursery.start_soon(load.keep_on, number)
        before = await epochs(client)
        done = await tree.replace(tmp_path)
        assert done.returncode == 0, done.stdout.decode()
        replaced = await epochs(client)
        assert sorted(before) == sorted(replaced) == ["w0", "w1"]
        assert all(replaced[name] > before[name] for name in before)
        said = done.stdout.decode().splitlines()
        assert [line for line in said if "replaced" in line] == [
            "w0: replaced",
            "w1: replaced",
            "all workers are replaced",
        ]
        await load.some_more()
        tree.refuse()
        refused = await tree.replace(tmp_path)
        assert refused.returncode == 1, refused.stdout.decode()
        assert "worker=w0: its new process exited with 8: no such release" in refused.stdout.decode()
        assert await epochs(client) == replaced
        await load.some_more()
        await until_all_connected(client, LIMIT_S)
        kept = await tree.replace(tmp_path, "--seats", "3")
        assert (kept.returncode, b"settings stay as they are" in kept.stdout) == (2, True)
        nursery.cancel_scope.cancel()
    elsewhere = await tree.replace(tmp_path / "none")
    assert elsewhere.returncode == 6, elsewhere.stdout.decode()
    log = (tmp_path / "up.log").read_text().splitlines()
    assert sum(f"version={Tree.VERSION}" in line for line in log) == CLIENTS
    assert sum("weights attached" in line for line in log) >= CLIENTS, os.linesep.join(log)


async def epochs(client: Client) -> dict[str, int]:
    return {row.worker: row.epoch for row in await client.workers()}
