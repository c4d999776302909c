"""Replacement of workers by other code: its order, and what becomes of it when a process ends or does not come up."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from hisparse.cluster import replacing
from hisparse.cluster.children import Child, Code
from hisparse.cluster.replacing import (
    ReplaceFailedError,
    ReplaceOrder,
    ReplaceServer,
    WorkerReplacement,
    ask_replacement,
    control_socket,
)
from hisparse.cluster.supervision import COORDINATOR
from protocol.errors import Unavailable, WrongState
from protocol.messages import WorkerRow
from tests.hisparse.cluster.test_standbys import OBEYS, FakeNode, WithStandbys, nodes, until
from tests.hisparse.cluster.test_supervision import CHILDREN_LIMIT_S, SLEEP, FakeCluster, clusters, row

__all__ = ["clusters", "nodes"]

pytestmark = pytest.mark.process

#: Exits when it is asked to, as a worker that holds nothing.
LEAVES = "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); " + SLEEP
ORDER = ReplaceOrder(Code("python-of-2", "/tree-of-2"), 30.0)
OTHER = row(5, worker="w9")


class FakeCoordinator:
    """The workers of the cluster as a coordinator sees them, whose drains end once `may_end` is set."""

    def __init__(self, cluster: Replaced, others: Sequence[WorkerRow]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.may_end = trio.Event()
        self.may_end.set()
        self._cluster, self._others = cluster, others

    async def workers(self) -> list[WorkerRow]:
        drains = self.calls and self.calls[-1][0] == "drain"
        state = ("drained" if self.may_end.is_set() else "draining") if drains else "connected"
        return [row(5, state=state), *self._others]

    async def drain(self, names: Sequence[str], *, handover: bool, deadline_s: float) -> tuple[str, ...]:
        assert self._cluster.standbys_of["w0"].step == "standby", "drained before its successor was ready"
        self.calls.append(("drain", *names, handover, deadline_s))
        return ("w0: draining",)

    async def undrain(self, names: Sequence[str]) -> tuple[str, ...]:
        self.calls.append(("undrain", *names))
        return ()


class Replaced(WithStandbys):
    """A worker w0 whose lives run `lives`; the standby that is to replace it runs `successor`."""

    def __init__(
        self, runtime_dir: Path, node: FakeNode, successor: str, lives: list[str], others: Sequence[WorkerRow] = ()
    ) -> None:
        super().__init__(runtime_dir, lives, node)
        node.codes = iter([successor])
        self.node = node
        self.standbys_of: dict[str, Child] = {}
        self.started_with: list[Code | None] = []
        self.codes_of_workers: dict[str, Code] = {}
        self.admin = FakeCoordinator(self, others)
        self.said: list[str] = []
        node.standbys.names = ()

    @property
    def workers(self) -> dict[str, Child]:
        return {name: child for name, child in self.by_name.items() if name != COORDINATOR}

    def start_standby(self, name: str, code: Code | None = None) -> Child:
        self.started_with.append(code)
        self.standbys_of[name] = self.node.start(name)
        return self.standbys_of[name]

    @asynccontextmanager
    async def client(self, name: str) -> AsyncIterator[Any]:
        yield self.admin

    async def hear(self) -> None:
        """Tell the supervisor that each process which has taken over is connected as an epoch of its own."""
        while True:
            child = self.by_name["w0"]
            epoch = 6 if child.step == "takes over" else 5
            self.supervisor._watch.answered([row(epoch)], trio.current_time())
            await trio.sleep(0.05)

    async def replace(self, limit_s: float = CHILDREN_LIMIT_S) -> None:
        adapter: Any = Adapter(self)
        await WorkerReplacement(adapter, self.supervisor, ORDER, self.said.append, limit_s).run()

    @asynccontextmanager
    async def heard(self) -> AsyncIterator[trio.Nursery]:
        async with self.kept(), trio.open_nursery() as nursery:
            nursery.start_soon(self.hear)
            yield nursery
            nursery.cancel_scope.cancel()


class Adapter:
    """`codes` of a FakeCluster are those of lives: here, those of workers."""

    def __init__(self, cluster: Replaced) -> None:
        self._cluster = cluster
        self.codes = cluster.codes_of_workers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)


Makes = Callable[..., Replaced]


@pytest.fixture
def make(tmp_path: Path, clusters: list[FakeCluster], nodes: list[FakeNode]) -> Makes:
    def made(successor: str, *lives: str, others: Sequence[WorkerRow] = ()) -> Replaced:
        nodes.append(node := FakeNode())
        clusters.append(cluster := Replaced(tmp_path, node, successor, list(lives), others))
        return cluster

    return made


@pytest.mark.parametrize(("others", "deadline_s"), [((OTHER,), 30.0), ((), 0.0)])
async def test_the_new_process_is_ready_before_the_drain_and_takes_over_behind_it(
    make: Makes, others: Sequence[WorkerRow], deadline_s: float
) -> None:
    """I2: the exit of the old one is proved first. Without another worker no request can be handed over."""
    cluster = make(OBEYS, LEAVES, others=others)
    old = cluster.by_name["w0"]
    async with cluster.heard():
        await cluster.replace()
        assert cluster.by_name["w0"] is cluster.standbys_of["w0"]
        assert not old.running
    assert cluster.admin.calls == [("drain", "w0", True, deadline_s)]
    assert cluster.started_with == [ORDER.code]
    assert cluster.codes_of_workers == {"w0": ORDER.code}
    assert cluster.said[-1] == "w0: replaced"
    assert "w0 exited with 0; its standby takes over in 0 s" in cluster.node.said


@pytest.mark.parametrize(
    ("successor", "limit_s", "why"),
    [
        pytest.param(*("exit(8)", CHILDREN_LIMIT_S, "exited with 8"), marks=pytest.mark.refuses("its new process {}")),
        pytest.param(
            *(SLEEP, 0.3, "has come no further than 'python"),
            marks=pytest.mark.refuses("ReplaceFailedError worker={}: {}"),
        ),
    ],
)
async def test_a_process_that_does_not_come_up_leaves_the_worker_alone(
    make: Makes, successor: str, limit_s: float, why: str
) -> None:
    cluster = make(successor, LEAVES)
    old = cluster.by_name["w0"]
    async with cluster.heard():
        with pytest.raises(ReplaceFailedError, match=why):
            await cluster.replace(limit_s)
        assert cluster.by_name["w0"] is old
        assert old.running
        assert not cluster.standbys_of["w0"].running
    assert cluster.admin.calls == []
    assert cluster.codes_of_workers == {}
    assert not cluster.node.standbys.children


async def test_a_process_that_ends_during_the_drain_ends_it(make: Makes) -> None:
    cluster = make(OBEYS, LEAVES, others=(OTHER,))
    old, cluster.admin.may_end = cluster.by_name["w0"], trio.Event()
    async with cluster.heard() as nursery:

        async def kill() -> None:
            await until(lambda: cluster.admin.calls)
            cluster.standbys_of["w0"].signal(signal.SIGKILL)

        nursery.start_soon(kill)
        with pytest.raises(ReplaceFailedError, match="its new process killed by SIGKILL"):
            await cluster.replace()
        assert old.running
    assert [call[0] for call in cluster.admin.calls] == ["drain", "undrain"]


async def test_a_worker_that_is_killed_amid_is_followed_by_its_new_process(make: Makes) -> None:
    cluster = make(OBEYS, LEAVES, others=(OTHER,))
    old, cluster.admin.may_end = cluster.by_name["w0"], trio.Event()
    async with cluster.heard() as nursery:

        async def kill() -> None:
            await until(lambda: cluster.admin.calls)
            old.signal(signal.SIGKILL)

        nursery.start_soon(kill)
        await cluster.replace()
        assert cluster.by_name["w0"] is cluster.standbys_of["w0"]
    assert "w0 killed by SIGKILL; its standby takes over in 0 s" in cluster.node.said


async def test_a_process_that_ends_as_it_takes_over_is_followed_by_the_code_before(make: Makes) -> None:
    dies = OBEYS.replace("say('takes over'); time.sleep(60)", "exit(7)")
    cluster = make(dies, LEAVES, LEAVES)
    async with cluster.heard():
        with pytest.raises(ReplaceFailedError, match="its new process exited with 7"):
            await cluster.replace()
        await until(lambda: cluster.lives == 3)  # the coordinator and two of w0
        assert cluster.by_name["w0"].running
    assert cluster.codes_of_workers == {}


@pytest.mark.refuses("not drained in time")
async def test_a_drain_that_does_not_end_is_taken_back(make: Makes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacing, "DRAIN_MARGIN_S", 0.1)
    cluster = make(OBEYS, LEAVES)
    old, cluster.admin.may_end = cluster.by_name["w0"], trio.Event()
    async with cluster.heard():
        with pytest.raises(ReplaceFailedError, match="worker=w0: not drained in time"):
            await cluster.replace()
        assert old.running
    assert [call[0] for call in cluster.admin.calls] == ["drain", "undrain"]


@pytest.mark.refuses("not drained: {}")
async def test_a_coordinator_that_cannot_drain_leaves_the_worker_alone(
    make: Makes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> tuple[str, ...]:
        raise Unavailable("the coordinator has gone")

    monkeypatch.setattr(FakeCoordinator, "drain", refuse)
    cluster = make(OBEYS, LEAVES)
    old = cluster.by_name["w0"]
    async with cluster.heard():
        with pytest.raises(ReplaceFailedError, match="not drained: the coordinator has gone"):
            await cluster.replace()
        assert cluster.by_name["w0"] is old
        assert old.running


@pytest.mark.refuses("the worker ended, and was restarted")
async def test_a_restart_in_place_of_the_takeover_is_told(make: Makes) -> None:
    cluster = make(OBEYS, LEAVES, LEAVES)
    old, child = cluster.by_name["w0"], cluster.start_standby("w0")
    adapter: Any = Adapter(cluster)
    placed = WorkerReplacement(adapter, cluster.supervisor, ORDER, cluster.said.append)._placed("w0", old, child)
    assert not placed()
    old.signal(signal.SIGKILL)
    await old.wait()
    cluster.restart("w0")
    with pytest.raises(ReplaceFailedError, match="the worker ended, and was restarted"):
        placed()


@pytest.mark.refuses("ranks of a group are not replaced", "WrongState worker={}: does not serve")
async def test_what_cannot_be_replaced_is_refused_before_any_is(make: Makes) -> None:
    cluster = make(OBEYS, LEAVES)
    async with cluster.heard():
        cluster.supervisor._watch.began("w0", trio.current_time())
        with pytest.raises(WrongState, match="worker=w0: does not serve"):
            await cluster.replace()
        cluster.groups = {"g0": ("w0",)}
        with pytest.raises(WrongState, match="group=g0: ranks of a group are not replaced"):
            await cluster.replace()
    assert cluster.started_with == []


# ---------------------------------------------------------------- the socket


async def test_orders_are_carried_out_one_at_a_time_though_the_command_is_gone(tmp_path: Path) -> None:
    directory, go, done = tmp_path / "run", trio.Event(), trio.Event()
    said: list[str] = []

    async def replace(order: ReplaceOrder, report: Callable[[str], None]) -> None:
        assert order == ORDER
        report("begins")
        await go.wait()
        report("goes on")
        done.set()

    with control_socket(str(directory)) as listener:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ReplaceServer(replace, said.append).serve, listener)
            async with await trio.open_unix_socket(directory / "up.sock") as first:
                await first.send_all(msgspec.json.encode(ORDER) + b"\n")
                assert b"begins" in await first.receive_some()
                second: list[str] = []
                assert await ask(directory, second.append) == 4
                assert second == ["workers are being replaced already"]
            go.set()
            with trio.fail_after(CHILDREN_LIMIT_S):
                await done.wait()
            last: list[str] = []
            assert await ask(directory, last.append) == 0
            assert last == ["begins", "goes on", "all workers are replaced"]
            nursery.cancel_scope.cancel()
    assert said == ["begins", "goes on"] * 2


@pytest.mark.refuses("no `hisparse up` listens there")
async def test_errors_of_a_replacement_reach_the_command(tmp_path: Path) -> None:
    directory, errors = tmp_path / "run", iter([ReplaceFailedError("exited with 8"), WrongState("does not serve")])

    async def replace(order: ReplaceOrder, report: Callable[[str], None]) -> None:
        raise next(errors)

    with control_socket(str(directory)) as listener:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ReplaceServer(replace, lambda _: None).serve, listener)
            said: list[str] = []
            assert [await ask(directory, said.append) for _ in range(2)] == [1, 4]
            nursery.cancel_scope.cancel()
    assert said == ["not replaced: exited with 8", "not replaced: does not serve"]
    with pytest.raises(Unavailable, match="no `hisparse up` listens there"):
        await ask(directory, said.append)


@pytest.mark.parametrize(
    ("reads", "why"),
    [
        pytest.param(
            *(True, "ended before its workers were replaced"),
            marks=pytest.mark.refuses("hisparse up ended before its workers were replaced"),
        ),
        pytest.param(False, "does not answer", marks=pytest.mark.refuses("hisparse up does not answer")),
    ],
)
async def test_an_up_that_ends_amid_is_told(tmp_path: Path, reads: bool, why: str) -> None:
    directory = tmp_path / "run"
    with control_socket(str(directory)) as listener:
        accepting = trio.socket.from_stdlib_socket(listener)

        async def end() -> None:
            connection, _ = await accepting.accept()
            with connection:
                if reads:  # unread, the order is a reset
                    await connection.recv(65_536)
                else:
                    await trio.sleep(0.2)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(end)
            with pytest.raises(Unavailable, match=why):
                await ask(directory, lambda _: None)


async def ask(directory: Path, note: Callable[[str], None]) -> int:
    return await trio.to_thread.run_sync(ask_replacement, str(directory), ORDER, note)
