"""The supervisor: how often and how late it restarts, which processes it takes for hung, when it gives up."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio

from hisparse.cluster import group_end
from hisparse.cluster import restarts as restarting
from hisparse.cluster import supervision as supervising
from hisparse.cluster.children import Child
from hisparse.cluster.group_end import PEER_END_LIMIT_S, RankEnd, blamed, end_text, follow_limit_s, is_wanted
from hisparse.cluster.restarts import RESTART_PAUSE_MAX_S, RESTARTS_MAX, STABLE_S, Restarts, unseen_service_s
from hisparse.cluster.supervision import (
    COORDINATOR,
    HTTP,
    ChildWatch,
    ProcessSupervisor,
)
from hisparse.cluster.weights import WeightKeepers
from protocol.config import HostFacts, build
from protocol.errors import WrongState
from protocol.messages import WorkerRow
from protocol.settings import Config
from tests.support.fakes.worker import CAPACITY
from worker.pool.file import PoolHold

LIMIT_S = 10.0
#: Ends a test of processes that hangs.
CHILDREN_LIMIT_S = 180.0


def row(epoch: int, state: str = "connected", worker: str = "w0", *, exit_proved: bool = False) -> WorkerRow:
    counts = 0, 0, 0, 0, 0, 0.0, 0, 0, 0.0, 0.0
    return WorkerRow(worker, "n0", state, epoch, 0, CAPACITY, *counts, exit_proved=exit_proved)


# ---------------------------------------------------------------- restarts


def test_restart_pauses_double_up_to_a_bound() -> None:
    restarts = Restarts()
    pauses = [restarts.after(0.0) for _ in range(RESTARTS_MAX + 1)]
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert pauses[-2:] == [RESTART_PAUSE_MAX_S, None]


def test_a_life_that_served_longer_than_the_pause_before_it_is_healthy() -> None:
    restarts = Restarts()
    assert [restarts.after(served_s) for served_s in (0.0, 0.4, 0.9)] == [0.5, 1.0, 2.0]
    assert restarts.after(2.0) == 4.0, "no longer than the pause"
    assert restarts.after(4.1) == 0.5
    assert restarts.after(0.6) == 0.5
    for _ in range(3 * RESTARTS_MAX):
        assert restarts.after(45.0) == 0.5, "a child that serves for 45 s each time is never given up"


def test_service_that_is_not_seen_begins_late() -> None:
    assert unseen_service_s(STABLE_S - 1) == 0.0
    assert unseen_service_s(STABLE_S) == STABLE_S


# ---------------------------------------------------------------- who hangs


def watching(*rows: WorkerRow) -> ChildWatch:
    watch = ChildWatch(LIMIT_S)
    watch.began("w0", 0.0)
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


def test_worker_with_a_ready_standby_hangs_once_it_is_down() -> None:
    watch = watching(row(5))
    watch.answered([row(5, "disconnected")], 1.0)
    assert watch.hung(1.0) == []
    assert watch.hung(1.0, ["w0"]) == ["w0"]
    watch.began("w0", 1.0)  # the standby's process: what is told of the epoch before it is not its own
    watch.answered([row(5, "disconnected")], 2.0)
    assert watch.hung(2.0, ["w0"]) == []


@pytest.mark.parametrize("silent_s", [1, 3], ids=["another connection", "a silence"])
def test_a_coordinator_that_has_not_heard_a_worker_yet_ends_none_with_a_standby(silent_s: int) -> None:
    """A coordinator that was restarted or stopped lists workers that live as disconnected, until it hears them."""
    watch = watching(row(5))
    if silent_s == 1:
        watch.asks_anew()
    watch.answered([row(5, "disconnected")], float(silent_s))
    assert watch.hung(silent_s, ["w0"]) == []
    answered_until(watch, silent_s + 1, row(5), since_s=silent_s + 1)
    watch.answered([row(5, "disconnected")], silent_s + 2.0)
    assert watch.hung(silent_s + 2.0, ["w0"]) == ["w0"]


def test_rank_of_a_group_is_killed_early_only_if_each_rank_has_a_standby() -> None:
    watch = ChildWatch(LIMIT_S, groups=[("g0r0", "g0r1")])
    for name in ("g0r0", "g0r1"):
        watch.began(name, 0.0)
    watch.answered([row(5, worker="g0r0"), row(5, worker="g0r1")], 0.0)
    watch.answered([row(5, worker="g0r0"), row(5, "disconnected", worker="g0r1")], 1.0)
    assert watch.hung(1.0, ["g0r1"]) == []
    assert watch.hung(1.0, ["g0r0", "g0r1"]) == ["g0r1"]


@pytest.mark.parametrize("state", ["draining", "drained"])
def test_drained_worker_does_not_hang(state: str) -> None:
    watch = watching(row(5))
    answered_until(watch, 60, row(5, state))
    assert watch.hung(60.0) == []


def test_slow_start_is_not_a_hang_until_its_limit() -> None:
    """As of a process that is stopped before it has met its group: nothing else would end the wait of its peers."""
    watch = watching()
    answered_until(watch, 600)
    assert watch.hung(600.0) == []
    watch.answered([], 601.0)
    assert watch.hung(601.0) == ["w0"]


def test_a_start_that_comes_further_does_not_hang_and_one_that_does_not_is_named() -> None:
    watch = watching()
    watch.came_to({"w0": "weights 1.0%"}, 1.0)
    answered_until(watch, 590)
    watch.came_to({"w0": "weights 1.1%"}, 590.0)
    answered_until(watch, 1_190, since_s=591)
    watch.came_to({"w0": "weights 1.1%"}, 1_190.0)
    assert watch.hung(1_190.0) == []
    assert watch.is_starting("w0")
    watch.answered([], 1_191.0)
    assert watch.hung(1_191.0) == ["w0"]


def test_a_worker_that_restarts_keeps_no_hung_start_alive() -> None:
    """It comes as far in each life, while another one hangs; the limit of that one is reached all the same."""
    watch = watching()
    watch.began("w1", 0.0)
    watch.came_to({"w0": "device", "w1": "model"}, 1.0)
    for second in range(2, 602):
        if second % 40 == 0:
            watch.began("w1", second)
        watch.came_to({"w0": "device", "w1": f"weights {second % 40}.0%"}, second)
        watch.answered([], second)
        assert watch.hung(second) == []
    watch.answered([], 602.0)
    assert watch.hung(602.0) == ["w0"]


def test_ranks_of_a_group_come_further_together() -> None:
    """A rank waits for the others' weights. One that is in no group does not."""
    watch = ChildWatch(LIMIT_S, groups=[("g0r0", "g0r1")])
    for name in ("g0r0", "g0r1", "w0"):
        watch.began(name, 0.0)
    steps = {"g0r0": "group", "g0r1": "group", "w0": "device"}
    watch.came_to(steps, 0.0)
    for second in range(1, 701):
        watch.came_to(steps | {"g0r1": f"weights {second}"}, second)
        watch.answered([], second)
    assert watch.hung(700.0) == ["w0"]


def test_a_start_is_given_its_time_again_after_the_coordinator_was_silent() -> None:
    watch = watching()
    watch.answered([], 590.0)
    answered_until(watch, 1_190, since_s=591)
    assert watch.hung(1_190.0) == []
    watch.answered([], 1_191.0)
    assert watch.hung(1_191.0) == ["w0"]


def test_front_does_not_hang_though_the_coordinator_lists_it_never() -> None:
    watch = watching(row(5))
    watch.began(HTTP, 0.0)
    answered_until(watch, 1_000, row(5))
    assert watch.hung(1_000.0) == []


def test_successor_is_not_blamed_for_the_earlier_epoch() -> None:
    watch = watching(row(5))
    watch.began("w0", 0.0)
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
    watch.began(COORDINATOR, 20.1)
    assert watch.hung(1_000.0) == []


def test_the_coordinator_serves_from_its_first_answer() -> None:
    watch = ChildWatch(LIMIT_S)
    watch.began(COORDINATOR, 0.0)
    assert watch.serves_since([COORDINATOR]) is None
    watch.answered([], 3.0)
    watch.answered([], 4.0)
    assert watch.serves_since([COORDINATOR]) == 3.0
    watch.began(COORDINATOR, 5.0)
    assert watch.serves_since([COORDINATOR]) is None


def test_a_group_lives_from_when_all_of_its_ranks_are_connected() -> None:
    """Ranks warm up before they say hello; an earlier life, and one that is missing for a while, count for nothing."""
    watch = ChildWatch(LIMIT_S)
    for name in ("w0", "w1"):
        watch.began(name, 0.0)
    watch.answered([row(5)], 0.0)
    assert watch.serves_since(["w0", "w1"]) is None
    watch.answered([row(5), row(7, worker="w1")], 300.0)
    watch.answered([row(5, "disconnected"), row(7, worker="w1")], 301.0)
    watch.answered([row(5), row(7, worker="w1")], 302.0)
    assert watch.serves_since(["w0", "w1"]) == 300.0
    watch.began("w1", 302.0)
    watch.answered([row(5), row(7, worker="w1")], 303.0)
    assert watch.serves_since(["w0", "w1"]) is None
    watch.answered([row(5), row(8, worker="w1")], 304.0)
    assert watch.serves_since(["w0", "w1"]) == 304.0


# ---------------------------------------------------------------- forgetting


class FakeAdmin:
    """A client whose coordinator has pages of `quarantined` in quarantine."""

    def __init__(self, quarantined: str) -> None:
        self.asked: list[str] = []
        self._quarantined = quarantined

    async def forget(self, workers: Sequence[str]) -> tuple[str, ...]:
        self.asked += workers
        if self._quarantined in workers:
            raise WrongState("has pages in quarantine", field="worker", value=self._quarantined)
        return ()


@dataclass
class FakeKept:
    config: Config
    by_name: Mapping[str, Child]
    groups: Mapping[str, tuple[str, ...]]
    pool_hold: PoolHold = field(default_factory=lambda: PoolHold(Path("/nowhere/n0.pool")))
    keepers: WeightKeepers = field(default_factory=lambda: WeightKeepers(lambda _: None))

    def restart(self, name: str) -> Child:
        raise AssertionError(f"{name} is not restarted here")


async def test_workers_that_are_not_wanted_are_forgotten_once_their_exit_is_proved() -> None:
    """w9 and w8 are of an earlier start. w0 is to be restarted."""
    config = build({}, {}, {"cluster.runtime_dir": "/tmp/none"}, HostFacts.read())
    children: Any = dict.fromkeys((COORDINATOR, "w0", "w1"))
    supervisor, admin = (
        ProcessSupervisor(FakeKept(config, children, {}), lambda line: None, lambda: None),
        FakeAdmin("w8"),
    )
    client: Any = admin
    silent = row(1, "disconnected", worker="w7")
    rows = [row(1, worker=it, state="disconnected", exit_proved=True) for it in ("w0", "w1", "w8", "w9")]
    supervisor._let_go("w1", children["w1"])
    for _ in range(2):
        await supervisor._forget_gone(client, [*rows, silent])
        rows = [it for it in rows if it.worker in ("w0", "w8")]  # the others are listed no longer
    assert admin.asked == ["w1", "w8", "w9"], "one that is refused is asked for once"


# ---------------------------------------------------------------- the end of a group


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ([RankEnd("w1", -9), RankEnd("w0", 71)], "group g0 ended: w1 killed by SIGKILL"),
        ([RankEnd("w0", 71), RankEnd("w1", 70), RankEnd("w2", -9)], "group g0 ended: w1 exited with 70"),
        ([RankEnd("w0", 0), RankEnd("w2", 71), RankEnd("w1", -11)], "group g0 ended: w1 killed by SIGSEGV"),
        ([RankEnd("w0", 0), RankEnd("w1", 71)], "group g0 ended: it was asked to"),
        ([RankEnd("w0", 71), RankEnd("w1", 71)], "group g0 ended: each rank has lost a peer"),
    ],
)
def test_the_first_rank_that_did_not_follow_another_is_blamed(ends: list[RankEnd], text: str) -> None:
    assert end_text("g0", ends) == text
    assert is_wanted(ends) == ("asked" in text)
    assert (blamed(ends) is None) == ("asked" in text or "each" in text)


def test_a_lost_peer_may_be_one_that_hangs() -> None:
    assert follow_limit_s(RankEnd("w0", -9), LIMIT_S) == PEER_END_LIMIT_S
    assert follow_limit_s(RankEnd("w0", 71), LIMIT_S) == LIMIT_S + PEER_END_LIMIT_S
    assert follow_limit_s(RankEnd("w0", 0), LIMIT_S) == float("inf")


# ---------------------------------------------------------------- children


class FakeCluster:
    """Children that run Python code; `codes` are for successive lives of each."""

    def __init__(
        self, runtime_dir: object, codes: Mapping[str, list[str]], groups: Mapping[str, tuple[str, ...]] | None = None
    ) -> None:
        self.config: Config = build({}, {}, {"cluster.runtime_dir": str(runtime_dir)}, HostFacts.read())
        self.codes = {name: iter(lives) for name, lives in codes.items()}
        self.by_name: dict[str, Child] = {}
        self.groups = groups or {}
        self.pool_hold = PoolHold(Path(str(runtime_dir)) / "n0.pool")
        self.keepers = WeightKeepers(lambda _: None)
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
    with trio.fail_after(CHILDREN_LIMIT_S):
        last = await ProcessSupervisor(cluster, said.append, lambda: changes.append(1)).run()
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
    with trio.fail_after(CHILDREN_LIMIT_S):
        last = await ProcessSupervisor(cluster, lambda line: None, lambda: None).run()
    assert last is cluster.by_name[COORDINATOR]
    assert cluster.lives == 3


#: A rank that follows its peer: it ends when the process whose id the file holds is gone.
FOLLOW = """
import os, sys, time
while True:
    try:
        os.kill(int(open({path!r}).read() or 0) or os.getpid(), 0)
    except ProcessLookupError:
        sys.exit(71)
    except (FileNotFoundError, ValueError):
        pass
    time.sleep(0.02)
"""


def leader(path: Path, end: str) -> str:
    """A rank that writes its process id to `path`, and goes to its end a little later."""
    return f"import os, time; open({str(path)!r}, 'w').write(str(os.getpid())); time.sleep(0.5); {end}"


def follower(path: Path) -> str:
    return FOLLOW.format(path=str(path))


async def kept(cluster: FakeCluster, said: list[str], gone: list[tuple[str, ...]] | None = None) -> Child:
    """`gone` gets the names of each word for processes that have ended."""

    async def vouch(names: Sequence[str]) -> None:
        if gone is not None:
            gone.append(tuple(names))

    with trio.fail_after(CHILDREN_LIMIT_S):
        return await ProcessSupervisor(cluster, said.append, lambda: None, vouch=vouch).run()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is slow to follow its peer follows it."""
    monkeypatch.setattr(group_end, "PEER_END_LIMIT_S", CHILDREN_LIMIT_S)


@pytest.mark.process
@pytest.mark.usefixtures("patient")
async def test_a_group_is_restarted_whole_and_its_rank_to_blame_is_named(
    tmp_path: Path, clusters: list[FakeCluster]
) -> None:
    lives = [tmp_path / f"life{number}" for number in range(3)]
    codes = {
        COORDINATOR: [SLEEP],
        "w0": [follower(path) for path in lives],
        "w1": [
            leader(lives[0], "os.kill(os.getpid(), 9)"),
            leader(lives[1], "exit(70)"),
            leader(lives[2], "exit(0)"),
        ],
        "w2": ["exit(0)"],
    }
    cluster = FakeCluster(tmp_path, codes, {"g0": ("w0", "w1")})
    clusters.append(cluster)
    said: list[str] = []
    last = await kept(cluster, said)
    assert last in (cluster.by_name["w0"], cluster.by_name["w1"])
    assert [line for line in said if "g0" in line] == [
        "group g0 ended: w1 killed by SIGKILL; all of its ranks are restarted in 0.5 s",
        "group g0 ended: w1 exited with 70; all of its ranks are restarted in 1 s",
        "group g0 ended: it was asked to; not restarted",
    ]
    assert "w2 exited with 0; not restarted" in said
    assert cluster.lives == 1 + 3 + 3 + 1


@pytest.mark.process
async def test_a_rank_that_does_not_follow_is_killed(
    tmp_path: Path, clusters: list[FakeCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank of the next life starts before all of this one have ended."""
    monkeypatch.setattr(supervising, "follow_limit_s", lambda end, hung_limit_s: 0.5 if end.status else 60.0)
    codes = {COORDINATOR: [SLEEP], "w0": [SLEEP, "exit(0)"], "w1": ["exit(5)", "exit(0)"]}
    cluster = FakeCluster(tmp_path, codes, {"g0": ("w0", "w1")})
    clusters.append(cluster)
    said: list[str] = []
    first = cluster.by_name["w0"].process
    await kept(cluster, said)
    assert first.returncode == -signal.SIGKILL
    assert said == [
        "w0 did not end with group g0; killed",
        "group g0 ended: w1 exited with 5; all of its ranks are restarted in 0.5 s",
        "group g0 ended: it was asked to; not restarted",
    ]


@pytest.mark.process
@pytest.mark.usefixtures("patient")
async def test_short_lives_of_a_group_are_counted_together(
    tmp_path: Path, clusters: list[FakeCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever rank ends it. A life in which a rank was never connected is short, however long its start took."""
    monkeypatch.setattr(restarting, "RESTARTS_MAX", 3)
    monkeypatch.setattr(restarting, "RESTART_PAUSE_MIN_S", 0.01)
    lives = [tmp_path / f"life{number}" for number in range(4)]
    codes = {
        COORDINATOR: [SLEEP],
        "w0": [follower(path) if number % 2 else leader(path, "exit(3)") for number, path in enumerate(lives)],
        "w1": [leader(path, "exit(3)") if number % 2 else follower(path) for number, path in enumerate(lives)],
    }
    cluster = FakeCluster(tmp_path, codes, {"g0": ("w0", "w1")})
    clusters.append(cluster)
    said: list[str] = []
    gone: list[tuple[str, ...]] = []
    last = await kept(cluster, said, gone)
    assert last is cluster.by_name["w1"]
    assert gone == [("w0", "w1"), ("w1", "w0")] * 2  # in the order in which they ended
    assert [line.split(";")[0] for line in said] == [
        f"group g0 ended: {name} exited with 3" for name in ("w0", "w1", "w0", "w1")
    ]
    assert said[-1].endswith("; given up after too many restarts")
