"""`--watch` of the listings, against a scripted gateway: a process that goes on until Ctrl-C."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol import messages
from tests.hisparse.top.test_top import POOL, REQUEST, WORKER
from tests.support.fakes.gateway import FakeGateway, tag_of
from tests.support.limits import HANG_LIMIT_S
from tests.support.terminal_rig import on_a_terminal

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


class Cluster:
    """Its one request has `tokens` new tokens, and grows older with every look."""

    def __init__(self, runtime_dir: Path) -> None:
        self.runtime_dir = runtime_dir
        self.tokens = 1
        self.looks = 0
        self.gateway = self.start()

    def start(self) -> FakeGateway:
        gateway = FakeGateway(self.runtime_dir)
        gateway.on(messages.ListRequests, self._requests)
        gateway.on(messages.ListWorkers, lambda m: [messages.WorkerRows(tag_of(m), (WORKER,))])
        gateway.on(messages.ListPools, lambda m: [messages.PoolRows(tag_of(m), (POOL,))])
        return gateway.__enter__()

    def stop(self) -> None:
        self.gateway.__exit__(None, None, None)

    def _requests(self, ask: messages.AdminMessage) -> list[messages.GatewayMessage]:
        self.looks += 1
        row = msgspec.structs.replace(REQUEST, generated_tokens=self.tokens, age_s=float(self.looks))
        return [messages.RequestRows(tag_of(ask), (row,), truncated=True)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.stop()


class Watching:
    """Lines of a running command."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def line(self) -> str:
        return self._lines.get(timeout=HANG_LIMIT_S)

    def row(self) -> Any:
        return json.loads(self.line())

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)


@contextmanager
def watching(cluster: Cluster, *args: str) -> Iterator[Watching]:
    process = subprocess.Popen(
        [sys.executable, "-m", "hisparse.cli", *args],
        env=os.environ | {"HISPARSE_CLUSTER_RUNTIME_DIR": str(cluster.runtime_dir)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Watching(process)
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def test_rows_are_sent_only_when_changed(cluster: Cluster) -> None:
    with watching(cluster, "requests", "--watch", "0.1", "-o", "jsonl") as watch:
        assert watch.row()["generated_tokens"] == 1
        looks = cluster.looks
        while cluster.looks < looks + 5:
            pass  # older, and otherwise as before
        cluster.tokens = 2
        assert watch.row()["generated_tokens"] == 2
        watch.process.send_signal(signal.SIGINT)
        assert watch.process.wait(HANG_LIMIT_S) == 130
        assert watch.process.stderr is not None
        assert watch.process.stderr.read() == "only the first 1000 requests; raise --limit\n"


def test_watch_continues_when_the_coordinator_returns(cluster: Cluster) -> None:
    with watching(cluster, "requests", "-w", "0.1", "-o", "jsonl") as watch:
        watch.row()
        cluster.stop()
        cluster.tokens = 9
        cluster.gateway = cluster.start()
        assert watch.row()["generated_tokens"] == 9


@pytest.mark.parametrize(("command", "name"), [("requests", "r1"), ("workers", "w0"), ("pool", "n0")])
def test_json_output_is_an_array_per_interval(cluster: Cluster, command: str, name: str) -> None:
    with watching(cluster, command, "--watch", "0.1", "--json") as watch:
        for _ in range(3):
            (row,) = watch.row()
            assert next(iter(row.values())) == name


def test_without_a_terminal_tables_are_appended(cluster: Cluster) -> None:
    with watching(cluster, "pool", "--watch", "0.1") as watch:
        for _ in range(2):
            while not (line := watch.line()).startswith("NODE"):
                assert not line.strip() or "n0" in line


def test_on_a_terminal_the_table_is_redrawn(cluster: Cluster) -> None:
    environ = {"HISPARSE_CLUSTER_RUNTIME_DIR": str(cluster.runtime_dir)}
    with on_a_terminal(["requests", "--watch", "0.1"], environ, columns=200) as tty:
        tty.until("1/640")
        cluster.tokens = 7
        tty.until("7/640")
        assert sum("r1" in line for line in tty.lines) == 1
        assert "1/640" not in tty.text
        tty.process.send_signal(signal.SIGINT)
        assert tty.process.wait(HANG_LIMIT_S) == 130
        assert "7/640" in tty.text, "what was last stays"
