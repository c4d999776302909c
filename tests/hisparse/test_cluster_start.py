"""The start of a cluster: which child is to blame when it fails, and that none is left when it never completes."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from hisparse.cluster import children as children_module
from hisparse.cluster import up
from hisparse.cluster.children import Child, stop_children
from hisparse.cluster.up import running_cluster
from hisparse.console import options
from protocol.config import HostFacts, build
from protocol.errors import EXIT_PEER_LOST, ConfigError, Unavailable, WrongState
from protocol.settings import Config
from tests.support import zygote
from worker.runners.tiny import write_tiny_checkpoint

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

SLEEP = "import time; time.sleep(600)"
LIMIT_S = 150.0


async def never() -> bool:
    return False


@asynccontextmanager
async def children(*codes: str) -> AsyncIterator[list[Child]]:
    """Children that run Python code, named w0, w1, ..."""
    started = [Child.start(f"w{i}", [sys.executable, "-c", code], os.environ) for i, code in enumerate(codes)]
    try:
        yield started
    finally:
        await stop_children(started, 0)
        for child in started:
            child.close()


@pytest.mark.parametrize(
    ("codes", "error", "name"),
    [
        pytest.param(
            ("exit(71)", "import time; time.sleep(0.8); exit(8)"),
            ConfigError,
            "w1",
            marks=pytest.mark.refuses("{} during start"),
        ),
        (("exit(71)", "import time; time.sleep(0.8); exit(70)"), Unavailable, "w1"),
        (("import time; time.sleep(0.8); exit(71)", "exit(8)"), ConfigError, "w1"),
    ],
)
async def test_a_rank_that_has_lost_a_peer_is_not_blamed(
    codes: tuple[str, ...], error: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "PEER_END_LIMIT_S", LIMIT_S)
    async with children(*codes) as started:
        with trio.fail_after(LIMIT_S), pytest.raises(error) as refused:
            await up.started(started, never, LIMIT_S)
    assert refused.value.value == name


def test_the_listed_exit_code_of_a_rank_that_lost_a_peer_is_that_of_workers() -> None:
    assert options.EXIT_PEER_LOST == EXIT_PEER_LOST


async def test_ranks_that_all_lost_a_peer_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "PEER_END_LIMIT_S", 0.5)
    async with children("exit(71)", SLEEP) as started:
        with trio.fail_after(LIMIT_S), pytest.raises(Unavailable, match="exited with 71"):
            await up.started(started, never, LIMIT_S)


@pytest.mark.refuses("not ready after {} s")
async def test_a_group_that_never_completes_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks wait for one that never comes; the start ends at its limit."""
    write_tiny_checkpoint(tmp_path / "model")
    flags = {"cluster.runtime_dir": str(tmp_path), "worker.model": str(tmp_path / "model")}
    start, until_ready, started = up.start_child, up.started, []

    def start_waiting(subcommand: str, config: Config, log_dir: Path | None) -> Child:
        if subcommand != "worker":
            child = start(subcommand, config, log_dir)
        else:
            child = Child.start(config.worker.name, [sys.executable, "-c", SLEEP], os.environ)
        started.append(child)
        return child

    async def limited(children: Sequence[Child], ready: Callable[[], Awaitable[bool]], limit_s: float) -> None:
        """The limit is that of the ranks."""
        await until_ready(children, ready, limit_s if len(children) > 1 else LIMIT_S)

    monkeypatch.setattr(up, "start_child", start_waiting)
    monkeypatch.setattr(up, "started", limited)
    with trio.fail_after(LIMIT_S), pytest.raises(Unavailable, match="not ready after 3 s") as refused:
        async with running_cluster(
            build({}, {}, flags, HostFacts.read()), 4, group_size=2, log_dir=tmp_path, start_limit_s=3.0
        ):
            raise AssertionError("no rank has registered")
    assert "w0 w1 w2 w3" in refused.value.value
    assert len(started) == 5
    assert not any(child.running for child in started)
    assert [name for name in os.listdir(tmp_path) if name.endswith(".pool")] == []


def config_with_front(tmp_path: Path, port: int) -> Config:
    flags = {"cluster.runtime_dir": str(tmp_path), "worker.model": str(tmp_path / "model"), "http.port": port}
    return build({}, {}, flags, HostFacts.read())


async def test_port_that_another_process_has_bound_is_refused_before_any_start(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "model")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))  # it does not listen
        port = other.getsockname()[1]
        with pytest.raises(WrongState, match=f"http.port={port}: another process listens there"):
            async with running_cluster(config_with_front(tmp_path, port), 1, http=True, log_dir=tmp_path):
                raise AssertionError("the port is taken")
    assert os.listdir(tmp_path) == ["model"]


async def test_listener_of_another_process_is_not_taken_for_the_front(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It takes the port while the workers start."""
    monkeypatch.setattr(children_module, "subprocess", zygote.FORKING)
    write_tiny_checkpoint(tmp_path / "model")
    start = up.start_child
    with ExitStack() as stack:

        def start_late(subcommand: str, config: Config, *others: Any) -> Child:
            if subcommand == "http":
                stack.enter_context(socket.create_server(("127.0.0.1", config.http.port)))
            return start(subcommand, config, *others)

        monkeypatch.setattr(up, "start_child", start_late)
        with trio.fail_after(LIMIT_S), pytest.raises(ConfigError, match="process=http: exited with 8 during start"):
            async with running_cluster(config_with_front(tmp_path, 0), 1, http=True, log_dir=tmp_path):
                raise AssertionError("the front cannot listen")
    said = capfd.readouterr().err
    assert re.search(r"http: .*http\.host=127\.0\.0\.1:\d+: cannot listen there: Address already in use \(choose", said)
