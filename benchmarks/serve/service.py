"""The service as processes: a coordinator, a worker of benchmarks/serve/worker.py, an HTTP front; and where it runs."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import trio

from benchmarks.serve.client import Front
from benchmarks.serve.measures import RECORD, Records
from benchmarks.serve.model import Spec, write_tokenizer
from hisparse.client.client import Client
from hisparse.cluster.children import Child, child_environ, exit_text, stop_children
from hisparse.cluster.supervision import COORDINATOR, HTTP, REFUSALS, open_admin
from hisparse.cluster.up import CONNECTED, POLL_INTERVAL_S, answers, start_child
from protocol.config import HostFacts, build, pool_path, to_environ
from protocol.errors import Unavailable
from protocol.messages import PoolRow, WorkerRow
from protocol.settings import Config
from worker.pool.file import remove_pool

WORKER: Final = "w0"
MODEL: Final = "model"
START_LIMIT_S: Final = 300.0
STOP_GRACE_S: Final = 10.0
#: Of each process, shown where the service fails.
LOG_LINES: Final = 40
#: Longest that the worker takes to see the control file: several of its looks, and units of a prompt of a large model.
CONTROL_S: Final = 0.5
#: States of requests that are over.
ENDED: Final = ("FINISHED", "ABORTED", "FAILED")
#: Longest for the requests of a cell to leave the worker.
IDLE_LIMIT_S: Final = 60.0


@dataclass(frozen=True)
class Service:
    """A service that is up. `directory` has its logs, the control file and the worker's journal."""

    client: Client
    front: Front
    directory: Path

    async def set_writing(self, writing: bool) -> None:
        """Contexts of prompts that are begun from now on are written, or computed."""
        path = control_of(self.directory)
        partial_path = path.with_suffix(".partial")
        partial_path.write_text("writing" if writing else "computing")
        partial_path.replace(path)
        await trio.sleep(CONTROL_S)

    def records(self) -> Records:
        """The worker's journal so far."""
        data = journal_of(self.directory).read_bytes()
        return np.frombuffer(data[: len(data) // RECORD.itemsize * RECORD.itemsize], dtype=RECORD)

    async def worker(self) -> WorkerRow:
        (row,) = await self.client.workers()
        return row

    async def pool(self) -> PoolRow:
        (row,) = await self.client.pools()
        return row

    async def until_idle(self) -> None:
        """Until no request is left. Raises Unavailable after IDLE_LIMIT_S."""
        with trio.move_on_after(IDLE_LIMIT_S):
            while (await self.pool()).reservations or await self._has_live():  # noqa: ASYNC110
                await trio.sleep(0.1)
            return
        raise Unavailable("requests do not leave", field="cell", value=f"{IDLE_LIMIT_S:g} s")

    async def _has_live(self) -> bool:
        return any(row.state not in ENDED for row in (await self.client.requests()).rows)


def control_of(directory: Path) -> Path:
    return directory / "control"


def journal_of(directory: Path) -> Path:
    return directory / "journal"


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def configured(directory: Path, settings: Mapping[str, object], chosen: Mapping[str, str]) -> Config:
    """`settings` of the benchmark and those that were `chosen` by hand, which win. Raises ConfigError."""
    flags: dict[str, object] = {
        "cluster.runtime_dir": str(directory),
        "coordinator.stop_deadline_s": 0.0,
        "worker.name": WORKER,
        "worker.model": str(directory / MODEL),
        "worker.served_model_name": MODEL,
        "http.port": free_port(),
    }
    return build({}, {}, flags | dict(settings) | dict(chosen), HostFacts.read())


@asynccontextmanager
async def running(config: Config, spec: Spec, directory: Path) -> AsyncIterator[Service]:
    """The service, once it takes requests; its processes are gone, and its pool is, when the block has ended.

    Raises Unavailable when one of them ends before the block does, ConfigError when one refuses a setting; the ends of
    their logs go to stderr.
    """
    described = _write_model(config, spec, directory)
    children = [
        _start(COORDINATOR, "benchmarks.serve.resident", [COORDINATOR], config, directory)
        if spec.resident
        else start_child(COORDINATOR, config, directory)
    ]
    try:
        await _until(partial(answers, config), children)
        children.append(_start(WORKER, "benchmarks.serve.worker", [str(described), "worker"], config, directory))
        async with open_admin(config, "benchmark") as client:
            await _until(partial(_is_connected, client), children)
            children.append(start_child(HTTP, config, directory))
            await _until(partial(_is_healthy, config), children)
            async with trio.open_nursery() as nursery:
                for child in children:
                    nursery.start_soon(_require, child)
                yield Service(client, Front(config.http.host, config.http.port, MODEL), directory)
                nursery.cancel_scope.cancel()
    except Exception:
        for child in children:
            lines = (directory / f"{child.name}.log").read_text(errors="replace").splitlines()[-LOG_LINES:]
            print(f"---- end of the log of {child.name}:", *lines, sep="\n", file=sys.stderr, flush=True)
        raise
    finally:
        with trio.CancelScope(shield=True):
            try:
                await stop_children(children, STOP_GRACE_S)
            finally:
                for child in children:
                    child.close()
                remove_pool(pool_path(config.worker.pool_dir, config.worker.node), config.cluster.worker_endpoint)


def _start(name: str, module: str, arguments: list[str], config: Config, directory: Path) -> Child:
    """`hisparse` from a module of the benchmark."""
    command = [sys.executable, "-m", module, *arguments, "--die-with", str(os.getpid())]
    return Child.start(name, command, child_environ() | to_environ(config), directory / f"{name}.log")


def _write_model(config: Config, spec: Spec, directory: Path) -> Path:
    """The file that the worker makes its model of."""
    model = Path(config.worker.model)
    model.mkdir()
    write_tokenizer(model, spec.config.vocab_size)
    described = directory / "spec.json"
    described.write_bytes(msgspec.json.encode(spec))
    journal_of(directory).touch()
    return described


async def _is_connected(client: Client) -> bool:
    return any(row.state == CONNECTED for row in await client.workers())


async def _is_healthy(config: Config) -> bool:
    return await trio.to_thread.run_sync(_answers_health, config.http.host, config.http.port, abandon_on_cancel=True)


def _answers_health(host: str, port: int) -> bool:
    connection = HTTPConnection(host, port, timeout=START_LIMIT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == HTTPStatus.OK
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


async def _until(ready: Callable[[], Awaitable[bool]], children: Sequence[Child]) -> None:
    """Return once `ready`. None of the `children` is started again: figures would not be those of one service."""
    with trio.move_on_after(START_LIMIT_S):
        while not await ready():
            for child in children:
                if not child.running:
                    await _require(child)
            await trio.sleep(POLL_INTERVAL_S)
        return
    names = " ".join(child.name for child in children)
    raise Unavailable(f"not ready after {START_LIMIT_S:g} s", field="processes", value=names)


async def _require(child: Child) -> None:
    status = await child.wait()
    kind = REFUSALS.get(status, Unavailable)
    raise kind(f"{exit_text(status)} while it was needed", field="process", value=child.name)
