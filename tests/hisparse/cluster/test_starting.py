"""The start of a cluster: what dies is restarted, what refuses ends the start, and none is left when it fails."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import trio

from hisparse.cluster import children as children_module
from hisparse.cluster import group_end, restarts, up
from hisparse.cluster.children import Child, stop_children
from hisparse.cluster.starting import started
from hisparse.cluster.supervision import COORDINATOR, Supervised
from hisparse.cluster.up import running_cluster
from hisparse.console import options
from protocol.config import HostFacts, build
from protocol.errors import (
    EXIT_PEER_LOST,
    BadInput,
    CapacityError,
    ConfigError,
    HiSparseError,
    NotAllowed,
    ProtocolError,
    Unavailable,
    WrongState,
)
from protocol.settings import Config
from tests import ROOT
from tests.hisparse.cluster.test_supervision import FakeCluster
from tests.support import zygote
from worker.runners.tiny import write_tiny_checkpoint

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

SLEEP = "import time; time.sleep(600)"
LIMIT_S = 150.0


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is slow to follow its peer follows it, and pauses are short."""
    monkeypatch.setattr(group_end, "PEER_END_LIMIT_S", LIMIT_S)
    monkeypatch.setattr(restarts, "RESTART_PAUSE_MIN_S", 0.01)


async def start_of(
    tmp_path: Path,
    codes: Mapping[str, list[str]],
    groups: Mapping[str, tuple[str, ...]] | None = None,
    *,
    lives: int = 0,
    limit_s: float = LIMIT_S,
) -> list[str]:
    """The lines of a start that is ready once there were so many lives of children, which run Python `codes`.

    0: never. Raises what the start raises.
    """
    cluster, said = FakeCluster(tmp_path, {COORDINATOR: [SLEEP], **codes}, groups), []

    async def ready() -> None:
        while not lives or cluster.lives < lives:  # noqa: ASYNC110
            await trio.sleep(0.02)

    try:
        with trio.fail_after(LIMIT_S):
            await started(cluster, list(codes), ready, limit_s, said.append)
        assert all(child.running for child in cluster.by_name.values()), "what was started runs on"
    finally:
        await stop_children(list(cluster.by_name.values()), 0)
        for child in cluster.by_name.values():
            child.close()
    return said


@pytest.mark.usefixtures("patient")
async def test_a_child_that_dies_during_the_start_is_restarted(tmp_path: Path) -> None:
    lives = ["import os; os.kill(os.getpid(), 9)", "exit(70)", "exit(6)", SLEEP]
    said = await start_of(tmp_path, {"w0": lives, "w1": [SLEEP]}, lives=6)
    assert [line.split("; restarted")[0] for line in said] == [
        "w0 killed by SIGKILL",
        "w0 exited with 70",
        "w0 exited with 6",
    ]


@pytest.mark.usefixtures("patient")
async def test_a_group_that_loses_a_rank_during_the_start_is_restarted_whole(tmp_path: Path) -> None:
    codes = {"w0": ["exit(71)", SLEEP], "w1": ["import time; time.sleep(0.8); exit(70)", SLEEP], "w2": [SLEEP]}
    said = await start_of(tmp_path, codes, {"g0": ("w0", "w1")}, lives=6)
    assert said == ["group g0 ended: w1 exited with 70; all of its ranks are restarted in 0.01 s"]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("code", "kind"), [(2, BadInput), (5, CapacityError), (7, ProtocolError), (8, ConfigError), (9, NotAllowed)]
)
async def test_a_child_that_refuses_to_start_ends_the_start_with_its_exit_code(
    tmp_path: Path, code: int, kind: type[HiSparseError]
) -> None:
    with pytest.raises(kind, match=f"process=w1: exited with {code} during start") as refused:
        await start_of(tmp_path, {"w0": [SLEEP], "w1": [f"exit({code})"]})
    assert options.EXIT_CODES[refused.value.code] == code


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    "codes",
    [
        ("exit(71)", "import time; time.sleep(0.8); exit(8)"),
        ("import time; time.sleep(0.8); exit(71)", "exit(8)"),
    ],
)
async def test_a_rank_that_has_lost_a_peer_is_not_blamed(tmp_path: Path, codes: tuple[str, str]) -> None:
    lives = {f"w{i}": [code] for i, code in enumerate(codes)}
    with pytest.raises(ConfigError) as refused:
        await start_of(tmp_path, lives, {"g0": ("w0", "w1")})
    assert refused.value.value == ("w0" if codes[0] == "exit(8)" else "w1")


@pytest.mark.usefixtures("patient")
async def test_a_child_that_was_asked_to_exit_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="process=w0: exited with 0 during start"):
        await start_of(tmp_path, {"w0": ["exit(0)"], "w1": [SLEEP]})


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("groups", [None, {"g0": ("w0", "w1")}])
async def test_a_child_that_does_not_stay_ends_the_start_with_70(
    tmp_path: Path, groups: Mapping[str, tuple[str, ...]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "RESTARTS_MAX", 2)
    codes = {"w0": ["exit(3)"] * 3, "w1": [SLEEP if groups is None else "import time; time.sleep(0.5); exit(71)"] * 3}
    with pytest.raises(HiSparseError, match="process=w0: exited with 3 during start") as lost:
        await start_of(tmp_path, codes, groups)
    assert options.EXIT_CODES[lost.value.code] == up.EXIT_CHILD_LOST


def test_the_listed_exit_code_of_a_rank_that_lost_a_peer_is_that_of_workers() -> None:
    assert options.EXIT_PEER_LOST == EXIT_PEER_LOST


#: Goes through the steps of a start, one in each 0.3 s.
STEPS = """
import time
from protocol.start_and_end import tell_step
for step in {steps}:
    tell_step("weights", step)
    time.sleep(0.3)
time.sleep(600)
"""


@pytest.mark.refuses("no process has come further for {} s")
async def test_a_start_that_comes_no_further_ends_and_says_what_it_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start goes on for as long as one of its processes comes further, whatever the others wait for."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    codes = {"w0": [STEPS.format(steps=[0.125])], "w1": [STEPS.format(steps=[it / 20 for it in range(20)])]}
    began = trio.current_time()
    with pytest.raises(Unavailable) as stuck:
        await start_of(tmp_path, codes, limit_s=2.0)
    assert trio.current_time() - began > 0.3 * 19 + 1.5
    assert str(stuck.value).startswith(
        "processes=w0 (weights 12.5%), w1 (weights 95.0%): no process has come further for 2 s (see their output"
    )


async def test_a_group_that_never_completes_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks wait for one that never comes; the start ends at its limit."""
    write_tiny_checkpoint(tmp_path / "model", layers=2)
    flags = {"cluster.runtime_dir": str(tmp_path), "worker.model": str(tmp_path / "model")}
    start, until_ready, running = up.start_child, up.started, []

    def start_waiting(subcommand: str, config: Config, log_dir: Path | None, **_: Any) -> Child:
        if subcommand != "worker":
            child = start(subcommand, config, log_dir)
        else:
            child = Child.start(config.worker.name, [sys.executable, "-c", SLEEP], os.environ)
        running.append(child)
        return child

    async def limited(kept: Supervised, names: Sequence[str], ready: Any, limit_s: float, report: Any) -> None:
        """The limit is that of the ranks."""
        await until_ready(kept, names, ready, limit_s if len(names) > 1 else LIMIT_S, report)

    monkeypatch.setattr(up, "start_child", start_waiting)
    monkeypatch.setattr(up, "started", limited)
    with trio.fail_after(LIMIT_S), pytest.raises(Unavailable, match="come further for 3 s") as refused:
        async with running_cluster(
            build({}, {}, flags, HostFacts.read()), 4, group_size=2, log_dir=tmp_path, start_limit_s=3.0
        ):
            raise AssertionError("no rank has registered")
    assert re.sub(r" \([^)]*\)", "", refused.value.value) == "w0, w1, w2, w3"
    assert len(running) == 5
    assert not any(child.running for child in running)
    assert [name for name in os.listdir(tmp_path) if name.endswith(".pool")] == []


@pytest.mark.parametrize("group_size", [1, 2])
async def test_processes_that_are_killed_while_they_start_are_restarted_and_the_cluster_serves(
    tmp_path: Path, group_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them once: the coordinator again while a worker loads, the front before it listens."""
    monkeypatch.setattr(children_module, "subprocess", zygote.FORKING)
    write_tiny_checkpoint(tmp_path / "model", layers=2)
    start, names = up.start_child, []

    def start_and_kill(subcommand: str, config: Config, *others: Any, **how: Any) -> Child:
        child = start(subcommand, config, *others, **how)
        names.append(child.name)
        if names.count(child.name) == 1:
            child.signal(signal.SIGKILL)
        return child

    monkeypatch.setattr(up, "start_child", start_and_kill)
    with trio.fail_after(LIMIT_S):
        async with running_cluster(
            config_with_front(tmp_path, 0), 2, http=True, group_size=group_size, log_dir=tmp_path
        ) as cluster:
            assert all(child.running for child in cluster.children)
            assert {child.step for child in cluster.workers.values()} == {"hisparse worker"}, "the last step of a start"
            async with cluster.client("test") as client:
                assert {row.state for row in await client.workers()} == {"connected"}
            url = f"{cluster.config.http.url}/health"
            assert await trio.to_thread.run_sync(lambda: urlopen(url, timeout=LIMIT_S).status) == 200
    assert {name: names.count(name) for name in names} == {COORDINATOR: 2, "w0": 2, "w1": 2, "http": 2}
    assert [name for name in os.listdir(tmp_path) if name.endswith((".pool", ".sock"))] == []


def config_with_front(tmp_path: Path, port: int) -> Config:
    flags = {"cluster.runtime_dir": str(tmp_path), "worker.model": str(tmp_path / "model"), "http.port": port}
    return build({}, {}, flags, HostFacts.read())


async def test_port_that_another_process_has_bound_is_refused_before_any_start(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "model", layers=2)
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
    write_tiny_checkpoint(tmp_path / "model", layers=2)
    start = up.start_child
    with ExitStack() as stack:

        def start_late(subcommand: str, config: Config, *others: Any, **how: Any) -> Child:
            if subcommand == "http":
                stack.enter_context(socket.create_server(("127.0.0.1", config.http.port)))
            return start(subcommand, config, *others, **how)

        monkeypatch.setattr(up, "start_child", start_late)
        with trio.fail_after(LIMIT_S), pytest.raises(ConfigError, match="process=http: exited with 8 during start"):
            async with running_cluster(config_with_front(tmp_path, 0), 1, http=True, log_dir=tmp_path):
                raise AssertionError("the front cannot listen")
    said = capfd.readouterr().err
    assert re.search(r"http: .*http\.host=127\.0\.0\.1:\d+: cannot listen there: Address already in use \(choose", said)
