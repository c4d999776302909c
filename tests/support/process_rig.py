"""Real processes of one node for tests: a runtime directory, `hisparse worker` and `hisparse coordinator` in it."""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from tests import ROOT
from tests.support import zygote

#: Importing torch and loading a checkpoint while the other core is busy.
LIMIT_S: Final = 240.0
PROGRAM: Final = ("-m", "hisparse.cli")
SIZES: Final = ("--hot-size-classes", "128", "--device-mem", "16MiB", "--host-mem", "8MiB", "--threads", "1")


@dataclass
class Process:
    """A child whose stderr goes to `log`."""

    popen: subprocess.Popen[bytes]
    log: Path

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    async def exit(self) -> tuple[int, str]:
        """Exit code, and what it wrote to stderr."""
        code = await trio.to_thread.run_sync(self.popen.wait, abandon_on_cancel=True)
        return code, self.log.read_text()

    async def metrics_port(self) -> int:
        """The port it says it serves metrics on."""
        while not (found := re.search(r"url=http://127\.0\.0\.1:(\d+)/metrics", self.log.read_text())):  # noqa: ASYNC110
            await trio.sleep(0.05)
        return int(found[1])

    async def url(self) -> str:
        """Where it says it listens, of an HTTP front."""
        while not (found := re.search(r"listening .*url=(http://\S+)", self.log.read_text())):  # noqa: ASYNC110
            await trio.sleep(0.05)
        return found[1]

    async def get(self, path: str) -> tuple[int, str]:
        """Status and body of a page of its exporter."""
        port = await self.metrics_port()
        return await trio.to_thread.run_sync(_get, port, path)


def _get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


@dataclass
class Place:
    """A runtime directory, short enough for Unix sockets, and the checkpoint that its workers serve."""

    path: Path
    model: Path
    draft_tokens: int = field(default=0, kw_only=True)
    #: What a worker runs, behind `python`, and how long each process may take at most.
    worker_program: Sequence[str] = field(default=PROGRAM, kw_only=True)
    limit_s: float = field(default=LIMIT_S, kw_only=True)

    @property
    def runtime_dir(self) -> Path:
        return self.path / "run"

    def endpoint(self, role: str) -> str:
        return f"ipc://{self.runtime_dir}/{role}.sock"

    @property
    def pool(self) -> Path:
        return self.path / "n0.pool"

    @asynccontextmanager
    async def worker(self, *flags: str) -> AsyncIterator[Process]:
        """Worker w0 of node n0; killed at the end if it is still there."""
        flags = ("--model", str(self.model), "--name", "w0", "--node", "n0", *SIZES, *flags)
        flags = flags if self.draft_tokens else ("--deterministic", *flags)
        async with self._running("worker", *flags, "--pool-dir", str(self.path)) as process:
            yield process

    @asynccontextmanager
    async def coordinator(self) -> AsyncIterator[Process]:
        async with self._running("coordinator") as process:
            yield process

    @asynccontextmanager
    async def http(self) -> AsyncIterator[Process]:
        """The HTTP front, at any free port."""
        async with self._running("http", "--port", "0") as process:
            yield process

    @asynccontextmanager
    async def _running(self, subcommand: str, *flags: str) -> AsyncIterator[Process]:
        process = self._start(subcommand, flags)
        try:
            with trio.fail_after(self.limit_s):
                yield process
        finally:
            process.popen.kill()
            process.popen.wait()

    def _start(self, subcommand: str, flags: Sequence[str]) -> Process:
        program = self.worker_program if subcommand == "worker" else PROGRAM
        command = [sys.executable, *program, subcommand, *flags]
        settings = {
            "OMP_NUM_THREADS": "1",
            "HISPARSE_CLUSTER_RUNTIME_DIR": str(self.runtime_dir),
            "HISPARSE_WORKER_DRAFT_TOKENS": str(self.draft_tokens),
        }
        log = self.path / f"{subcommand}.log"
        with log.open("wb") as file:
            return Process(zygote.start(command, cwd=ROOT, env=os.environ | settings, stderr=file), log)


async def eventually(condition: Callable[[], object]) -> None:
    """Poll until `condition` holds; the caller bounds it."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.05)
