"""Standbys of a node: when they are started, ordered, replaced and given up. Their processes are of plain Python."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from hisparse.cluster import restarts, standbys
from hisparse.cluster.children import Child
from hisparse.cluster.standbys import Standbys
from hisparse.cluster.supervision import COORDINATOR, ProcessSupervisor
from protocol.start_and_end import LEAVING, STANDBY
from tests.hisparse.cluster.test_supervision import CHILDREN_LIMIT_S, SLEEP, FakeCluster, clusters, row

__all__ = ["clusters"]

pytestmark = pytest.mark.process

SAY = "import os, sys, time; say = lambda step: open('/proc/self/comm', 'w').write(step); "
#: Prepares, waits, and takes over once it is ordered; the end of its input ends it.
OBEYS = SAY + "say('standby'); sys.stdin.read(1) or exit(0); say('takes over'); time.sleep(60)"
#: Prepares until `GO` is there, and then obeys.
PREPARES = SAY + "say('imports'); GO = {!r}\nwhile not os.path.exists(GO): time.sleep(0.01)\n" + OBEYS


class FakeNode:
    """A worker w0, in place of which a standby comes; `codes` are of its standbys in turn."""

    def __init__(self, *codes: str) -> None:
        self.codes = iter(codes)
        self.started: list[Child] = []
        self.placed: list[Child] = []
        self.standbys = Standbys(["w0"], self.start, lambda name, child: self.placed.append(child))
        self.said: list[str] = []

    def start(self, name: str) -> Child:
        command = [sys.executable, "-c", next(self.codes)]
        self.started.append(Child.start(name, command, os.environ, takes_orders=True))
        return self.started[-1]

    @asynccontextmanager
    async def kept(self, serves: Callable[[], bool] = lambda: True) -> AsyncIterator[None]:
        with trio.fail_after(CHILDREN_LIMIT_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.standbys.keep, "w0", serves, self.said.append, lambda: None)
                yield
                nursery.cancel_scope.cancel()

    async def until_ready(self, count: int) -> Child:
        """Wait for the standby that is the `count`th to be started, and until it is ready."""
        await until(lambda: len(self.started) >= count and self.standbys.is_ready("w0"))
        return self.started[count - 1]


@pytest.fixture
def nodes() -> Iterator[list[FakeNode]]:
    made: list[FakeNode] = []
    yield made
    for node in made:
        for child in node.started:
            child.process.kill()
            child.process.wait()


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(CHILDREN_LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


async def test_a_standby_that_is_ready_takes_over_and_another_is_started(nodes: list[FakeNode]) -> None:
    nodes.append(node := FakeNode(OBEYS, OBEYS))
    async with node.kept():
        first = await node.until_ready(1)
        await until(lambda: node.said)
        assert node.standbys.take_over("w0")
        assert node.placed == [first]
        assert not node.standbys.is_ready("w0")
        await until(lambda: first.step == "takes over")
        assert node.standbys.unheard(trio.current_time()) == []
        second = await node.until_ready(2)
        await until(lambda: len(node.said) == 2)
    assert list(node.standbys.children.values()) == [second]
    assert node.said == ["standby of w0 is ready"] * 2


async def test_a_standby_of_other_code_takes_the_place_of_one_and_is_followed_by_one(nodes: list[FakeNode]) -> None:
    """None is started beside it, and one that is dismissed is followed by another, too."""
    nodes.append(node := FakeNode(OBEYS, OBEYS, OBEYS, OBEYS, OBEYS))
    async with node.kept():
        first = await node.until_ready(1)
        other = node.start("w0")
        await node.standbys.put("w0", other)
        assert not first.running
        await trio.sleep(3 * standbys.LOOK_INTERVAL_S)
        assert node.started == [first, other]
        assert node.standbys.take_over("w0")
        assert node.placed == [other]
        await until(lambda: other.step == "takes over")
        assert node.standbys.unheard(trio.current_time()) == []
        await node.standbys.dismiss("w0", other)
        assert other.running, "it is the worker"
        await node.until_ready(3)
        await node.standbys.put("w0", last := node.start("w0"))
        await node.standbys.dismiss("w0", last)
        assert not last.running
        await node.until_ready(5)


async def test_no_standby_is_started_for_a_worker_that_does_not_serve(nodes: list[FakeNode]) -> None:
    nodes.append(node := FakeNode(OBEYS))
    serving: list[bool] = []
    async with node.kept(lambda: bool(serving)):
        await trio.sleep(3 * standbys.LOOK_INTERVAL_S)
        assert node.started == []
        serving.append(True)
        await node.until_ready(1)


async def test_a_standby_that_prepares_takes_over_once_it_is_ready(nodes: list[FakeNode], tmp_path: Path) -> None:
    """It is ahead of a process that is started now, and may take as long as one."""
    nodes.append(node := FakeNode(PREPARES.format(str(tmp_path / "go")), OBEYS))
    async with node.kept():
        await until(lambda: node.started and node.started[0].step == "imports")
        assert not node.standbys.is_ready("w0")
        assert node.standbys.take_over("w0")
        assert node.placed == node.started
        assert node.standbys.unheard(trio.current_time() + 2 * standbys.HEARD_LIMIT_S) == []
        (tmp_path / "go").touch()
        await until(lambda: node.placed[0].step == "takes over")
        await node.until_ready(2)
        await until(lambda: node.said)
    assert node.said == ["standby of w0 is ready"]


async def test_a_standby_that_dies_is_replaced_until_it_is_given_up(
    nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "RESTARTS_MAX", 1)
    monkeypatch.setattr(restarts, "RESTART_PAUSE_MIN_S", 0.01)
    nodes.append(node := FakeNode(OBEYS, "exit(3)"))
    async with node.kept():
        first = await node.until_ready(1)
        await until(lambda: node.said)
        first.signal(signal.SIGKILL)
        await until(lambda: len(node.said) == 3)
    assert node.said == [
        "standby of w0 is ready",
        "standby of w0 killed by SIGKILL; restarted in 0.01 s",
        "standby of w0 exited with 3; given up after too many restarts",
    ]
    assert not node.standbys.take_over("w0")


async def test_an_order_that_is_not_heard_is_noticed_once(nodes: list[FakeNode]) -> None:
    """A standby may be stopped while it waits: SIGSTOP is seen by no pidfd."""
    nodes.append(node := FakeNode(OBEYS))
    async with node.kept():
        stopped = await node.until_ready(1)
        stopped.signal(signal.SIGSTOP)
        assert node.standbys.take_over("w0")
        given_at = trio.current_time()
        assert node.standbys.unheard(given_at) == []
        assert node.standbys.unheard(given_at + standbys.HEARD_LIMIT_S + 1) == [stopped]
        assert node.standbys.unheard(given_at + standbys.HEARD_LIMIT_S + 1) == []


class WithStandbys(FakeCluster):
    """A coordinator and a worker w0, or the ranks of a group, with the standbys of `node`."""

    def __init__(self, runtime_dir: Path, lives: list[str], node: FakeNode, ranks: tuple[str, ...] = ()) -> None:
        names = ranks or ("w0",)
        super().__init__(
            runtime_dir, {COORDINATOR: [SLEEP], **dict.fromkeys(names, lives)}, {"g0": ranks} if ranks else None
        )
        node.standbys = Standbys(names, node.start, self._place)
        self.supervisor = ProcessSupervisor(self, node.said.append, lambda: None, standbys=node.standbys)

    def _place(self, name: str, child: Child) -> None:
        self.by_name[name] = child

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        with trio.fail_after(CHILDREN_LIMIT_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.supervisor.run)
                await trio.testing.wait_all_tasks_blocked()
                rows = [row(5, worker=name) for name in self.by_name if name != COORDINATOR]
                self.supervisor._watch.answered(rows, trio.current_time())
                yield
                nursery.cancel_scope.cancel()


async def test_the_order_comes_once_the_exit_of_the_worker_is_proved(
    tmp_path: Path, clusters: list[FakeCluster], nodes: list[FakeNode]
) -> None:
    """I2: pages of its requests are the standby's from then on. A worker that is stopped has not exited."""
    seen = tmp_path / "seen"
    nodes.append(node := FakeNode())
    clusters.append(cluster := WithStandbys(tmp_path, [SLEEP], node))
    dying = cluster.by_name["w0"]
    look = f"open({str(seen)!r}, 'w').write(str(os.path.exists('/proc/{dying.pid}'))); "
    node.codes = iter([OBEYS.replace("say('takes over')", look + "say('takes over')")])
    async with cluster.kept():
        await node.until_ready(1)
        dying.signal(signal.SIGSTOP)
        await trio.sleep(0.5)
        assert not seen.exists()
        dying.signal(signal.SIGKILL)
        await until(lambda: cluster.by_name["w0"].step == "takes over")
    assert seen.read_text() == "False"
    assert "w0 killed by SIGKILL; its standby takes over in 0 s" in node.said


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_worker_that_is_down_is_killed_for_its_standby_unless_it_leaves(
    tmp_path: Path, clusters: list[FakeCluster], nodes: list[FakeNode], leaves: bool
) -> None:
    """One that was asked to exit has told the coordinator so, and may free gigabytes before its process is gone."""
    nodes.append(node := FakeNode(OBEYS))
    step = LEAVING if leaves else "hisparse worker"
    clusters.append(cluster := WithStandbys(tmp_path, [SAY + f"say({step!r}); time.sleep(60)"], node))
    worker, watch = cluster.by_name["w0"], cluster.supervisor._watch
    watch.began("w0", trio.current_time())
    watch.answered([row(5)], trio.current_time())
    async with node.kept():
        await node.until_ready(1)
        await until(lambda: worker.step == step)
        watch.asks_anew()
        watch.answered([row(5)], trio.current_time())
        watch.answered([row(5, "disconnected")], trio.current_time())
        cluster.supervisor._look()
        assert ("w0 hangs; killed" in node.said) != leaves
        assert leaves or await worker.wait() == -signal.SIGKILL


@pytest.mark.parametrize("whole", [True, False])
async def test_standbys_of_a_group_take_over_together_once_all_ranks_have_ended(
    tmp_path: Path, clusters: list[FakeCluster], nodes: list[FakeNode], whole: bool
) -> None:
    """I2: a rank that lingers may write. Where one rank has no standby, all start again."""
    nodes.append(node := FakeNode(*[OBEYS] * 4))
    clusters.append(cluster := WithStandbys(tmp_path, [SLEEP] * 2, node, ranks=("w0", "w1")))
    first = dict(cluster.by_name)
    async with cluster.kept():
        await until(lambda: sorted(node.standbys.ready) == ["w0", "w1"])
        waiting = dict(node.standbys.children)
        if not whole:
            waiting["w1"].signal(signal.SIGKILL)
            await until(lambda: not node.standbys.has("w1"))
        first["w0"].signal(signal.SIGKILL)
        await until(lambda: not first["w0"].running)
        assert all(child.step == STANDBY for name, child in waiting.items() if whole or name == "w0")
        first["w1"].signal(signal.SIGKILL)
        await until(lambda: all(cluster.by_name[name] is not first[name] for name in ("w0", "w1")))
        taken = {name for name in ("w0", "w1") if cluster.by_name[name] is waiting[name]}
    assert taken == ({"w0", "w1"} if whole else set())
    what = "the standbys of its ranks take over in 0 s" if whole else "all of its ranks are restarted in 0.5 s"
    firsts = [f"group g0 ended: {name} killed by SIGKILL; {what}" for name in ("w0", "w1")]  # seen first, if at once
    assert not set(firsts).isdisjoint(node.said)


async def test_a_takeover_counts_as_a_restart(
    tmp_path: Path, clusters: list[FakeCluster], nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that dies at once takes one standby, and then the pauses of restarts."""
    monkeypatch.setattr(restarts, "RESTARTS_MAX", 3)
    monkeypatch.setattr(restarts, "RESTART_PAUSE_MIN_S", 0.01)
    monkeypatch.setattr(ProcessSupervisor, "_served_s", lambda *_: 0.0)
    dies = "import os; os.kill(os.getpid(), 9)"
    nodes.append(node := FakeNode(*[OBEYS.replace("time.sleep(60)", "os.kill(os.getpid(), 9)")] * 2))
    clusters.append(cluster := WithStandbys(tmp_path, [SLEEP, dies, dies], node))
    async with cluster.kept():
        await node.until_ready(1)
        cluster.by_name["w0"].signal(signal.SIGKILL)
        await until(lambda: any("given up" in line for line in node.said))
    assert [line for line in node.said if line.startswith("w0")] == [
        "w0 killed by SIGKILL; its standby takes over in 0 s",
        "w0 killed by SIGKILL; restarted in 0.02 s",
        "w0 killed by SIGKILL; restarted in 0.04 s",
        "w0 killed by SIGKILL; given up after too many restarts",
    ]
    assert len(node.started) == 1
