"""The keeper: how often and how late it restarts, which processes it takes for hung, when it gives up."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping

import pytest
import trio

from hisparse.cluster.children import Child
from hisparse.cluster.keeper import (
    COORDINATOR,
    HTTP,
    RESTART_PAUSE_MAX_S,
    RESTARTS_MAX,
    STABLE_S,
    ChildWatch,
    Keeper,
    Restarts,
)
from protocol.config import HostFacts, build
from protocol.messages import WorkerRow
from protocol.settings import Config
from tests.support.fakes.worker import CAPACITY

LIMIT_S = 10.0


def row(epoch: int, state: str = "connected", worker: str = "w0") -> WorkerRow:
    return WorkerRow(worker, "n0", state, epoch, 0, CAPACITY, 0, 0, 0, 0, 0, 0.0, 0, 0, 0.0, 0.0)


# ---------------------------------------------------------------- restarts


def test_restart_pauses_double_up_to_a_bound() -> None:
    restarts = Restarts()
    pauses = [restarts.after(1.0) for _ in range(RESTARTS_MAX + 1)]
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert pauses[-2:] == [RESTART_PAUSE_MAX_S, None]


def test_long_uptime_resets_the_pauses() -> None:
    restarts = Restarts()
    for _ in range(RESTARTS_MAX):
        assert restarts.after(1.0) is not None
    assert restarts.after(STABLE_S) == 0.5
    assert restarts.after(1.0) == 1.0


# ---------------------------------------------------------------- who hangs


def watching(*rows: WorkerRow) -> ChildWatch:
    watch = ChildWatch(LIMIT_S)
    watch.began("w0")
    watch.answered(rows, 0.0)
    return watch


def answered_until(watch: ChildWatch, until_s: int, *rows: WorkerRow, since_s: int = 1) -> None:
    for now in range(since_s, until_s + 1):
        watch.answered(rows, float(now))


def test_missing_worker_hangs_once_it_was_connected() -> None:
    watch = watching(row(5))
    answered_until(watch, 10, row(5, "disconnected"))
    assert watch.hung(10.0) == []
    watch.answered([], 11.0)
    assert watch.hung(11.0) == ["w0"]


@pytest.mark.parametrize("state", ["draining", "drained"])
def test_drained_worker_does_not_hang(state: str) -> None:
    watch = watching(row(5))
    answered_until(watch, 60, row(5, state))
    assert watch.hung(60.0) == []


def test_slow_start_is_not_a_hang() -> None:
    watch = watching()
    answered_until(watch, 600)
    assert watch.hung(600.0) == []


def test_successor_is_not_blamed_for_the_earlier_epoch() -> None:
    watch = watching(row(5))
    watch.began("w0")
    answered_until(watch, 3, row(5))  # not yet seen to be gone
    answered_until(watch, 600, row(5, "disconnected"), since_s=4)
    assert watch.hung(600.0) == []
    watch.answered([row(6)], 601.0)
    answered_until(watch, 612, row(6, "disconnected"), since_s=602)
    assert watch.hung(612.0) == ["w0"]


def test_no_worker_is_blamed_while_the_coordinator_is_silent() -> None:
    watch = watching(row(5))
    assert watch.hung(19.0) == []
    watch.answered([], 19.0)  # restarted: it has not heard of any worker yet
    assert watch.hung(19.0) == []
    answered_until(watch, 30, since_s=20)
    assert watch.hung(30.0) == ["w0"]


def test_silent_coordinator_hangs_in_the_end() -> None:
    watch = ChildWatch(LIMIT_S)
    assert watch.hung(1_000.0) == []
    watch.answered([], 0.0)
    assert watch.hung(20.0) == []
    assert watch.hung(20.1) == [COORDINATOR]
    watch.began(COORDINATOR)
    assert watch.hung(1_000.0) == []


# ---------------------------------------------------------------- children


class FakeCluster:
    """Children that run Python code; `codes` are for successive lives of each."""

    def __init__(self, runtime_dir: object, codes: Mapping[str, list[str]]) -> None:
        self.config: Config = build({}, {}, {"cluster.runtime_dir": str(runtime_dir)}, HostFacts.read())
        self.codes = {name: iter(lives) for name, lives in codes.items()}
        self.by_name: dict[str, Child] = {}
        self.lives = 0
        for name in codes:
            self.restart(name)

    def restart(self, name: str) -> Child:
        if name in self.by_name:
            self.by_name[name].close()
        self.lives += 1
        self.by_name[name] = Child.start(name, [sys.executable, "-c", next(self.codes[name])], os.environ)
        return self.by_name[name]


SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def clusters() -> Iterator[list[FakeCluster]]:
    made: list[FakeCluster] = []
    yield made
    for cluster in made:
        for child in cluster.by_name.values():
            child.signal(signal.SIGKILL)
            child.process.wait()
            child.close()


@pytest.mark.process
async def test_dead_workers_restart_and_dismissed_ones_do_not(tmp_path: object, clusters: list[FakeCluster]) -> None:
    codes = {
        COORDINATOR: [SLEEP],
        "w0": ["exit(3)", "exit(0)"],
        "w1": ["import os; os.kill(os.getpid(), 9)", "exit(0)"],
        HTTP: [SLEEP],  # without workers it is of no use
    }
    said: list[str] = []
    changes: list[int] = []
    cluster = FakeCluster(tmp_path, codes)
    clusters.append(cluster)
    with trio.fail_after(30):
        last = await Keeper(cluster, said.append, lambda: changes.append(1)).run()
    assert last in (cluster.by_name["w0"], cluster.by_name["w1"])
    assert len(changes) == 2
    assert sorted(said) == [
        "w0 exited with 0; not restarted",
        "w0 exited with 3; restarted in 0.5 s",
        "w1 exited with 0; not restarted",
        "w1 killed by SIGKILL; restarted in 0.5 s",
    ]


@pytest.mark.process
async def test_keeper_ends_when_the_coordinator_leaves(tmp_path: object, clusters: list[FakeCluster]) -> None:
    cluster = FakeCluster(tmp_path, {COORDINATOR: ["exit(5)", "exit(0)"], "w0": [SLEEP]})
    clusters.append(cluster)
    with trio.fail_after(30):
        last = await Keeper(cluster, lambda line: None, lambda: None).run()
    assert last is cluster.by_name[COORDINATOR]
    assert cluster.lives == 3
