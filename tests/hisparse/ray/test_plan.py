"""`hisparse up --ray`: which group goes to which node, what is reserved there, what each process is told."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
from click.testing import CliRunner
from trio.testing import MockClock

from basics.processes import Process, process_of
from hisparse.cli import main
from hisparse.ray import host as hosting
from hisparse.ray import ray_cluster as cluster
from hisparse.ray import remains
from hisparse.ray import supervisor as supervising
from hisparse.ray import up as upping
from hisparse.ray.host import NodeHost, NodeReport
from hisparse.ray.plan import PORTS, NodeFacts, NodePlan, RayOptions, bundle
from hisparse.ray.settings import digest_of, make_plans
from hisparse.ray.supervisor import NodeStatus
from hisparse.ray.up import follow, make_way, run_ray_down, start_or_join
from protocol.config import HostFacts, build
from protocol.errors import CapacityError, ConfigError, HiSparseError, InternalError, NotFound, Unavailable, WrongState
from protocol.settings import Config
from worker.runners.tiny import write_tiny_checkpoint

GIB = 1 << 30


def config(**flags: object) -> Config:
    given: dict[str, object] = {
        "cluster.runtime_dir": "/tmp/hs",
        "coordinator.journal": "/data/journal.sqlite",
        "worker.host_mem": "2GiB",
    }
    given |= {name.replace("__", "."): value for name, value in flags.items()}
    return build({}, {}, given, HostFacts("operator", 7, 0))


def node(number: int, *, cpus: float = 8, gpus: float = 0, memory: float = 8 * GIB, **more: Any) -> NodeFacts:
    address = f"10.0.0.{number}"
    resources = {"CPU": cpus, "GPU": gpus, "memory": memory, f"node:{address}": 1.0}
    facts: dict[str, Any] = {"pool_free_bytes": 8 * GIB, "ports": (7001, 7002, 7003, 7004)} | more
    return NodeFacts(address, resources, number == 1, **facts)


def plans(
    options: RayOptions, nodes: list[NodeFacts], settings: Config | None = None, experts: int = 8
) -> dict[str, NodePlan]:
    return {it.address: it for it in make_plans(settings or config(), options, nodes, experts)}


def test_groups_stay_whole_and_spread_over_nodes_with_names_of_their_own() -> None:
    found = plans(RayOptions(groups=2, group_size=2, http=True), [node(1), node(2), node(3)])
    assert {it: [w.name for w in plan.workers] for it, plan in found.items()} == {
        "10.0.0.1": [],
        "10.0.0.2": ["w0-10-0-0-2", "w1-10-0-0-2"],
        "10.0.0.3": ["w2-10-0-0-3", "w3-10-0-0-3"],
    }
    second = found["10.0.0.2"]
    assert second.groups == {"g0-10-0-0-2": ("w0-10-0-0-2", "w1-10-0-0-2")}
    assert second.elsewhere == ("w2-10-0-0-3", "w3-10-0-0-3")
    assert [(it.coordinator, it.http) for it in found.values()] == [(True, True), (False, False), (False, False)]
    assert second.config.cluster.worker_endpoint == "tcp://10.0.0.1:7003"
    assert {it.runtime_dir for it in found.values()} == {f"/tmp/hs/hisparse-10-0-0-{n}" for n in (1, 2, 3)}
    assert second.workers[0].group_endpoint == "ipc:///tmp/hs/hisparse-10-0-0-2/group-g0-10-0-0-2.sock"
    assert second.workers[1].group_rank == 1


def test_groups_of_one_node_share_its_pool_and_take_gpus_in_order() -> None:
    settings = config(worker__device="cuda", worker__pool_dir="/dev/shm/hs")
    found = plans(RayOptions(groups=2, group_size=2), [node(1, gpus=4)], settings)["10.0.0.1"]
    assert [it.device for it in found.workers] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert {(it.node, it.pool_dir) for it in found.workers} == {("10-0-0-1", "/dev/shm/hs")}
    reserved = bundle(found, {"shm": 4.0 * GIB})
    assert reserved == {"CPU": 5.0, "GPU": 4.0, "memory": 2.0 * GIB, "shm": 2.0 * GIB, "node:10.0.0.1": 0.001}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_clusters_of_one_ray_cluster_share_no_directory(device: str) -> None:
    made = [
        plans(RayOptions(), [node(1, gpus=1)], config(worker__device=device, cluster__name=name))["10.0.0.1"]
        for name in ("a", "b")
    ]
    assert len({it.runtime_dir for it in made}) == 2
    assert len({it.workers[0].pool_dir for it in made}) == 2


def test_prefill_and_decode_are_kept_apart_when_asked() -> None:
    settings = config(worker__transfer="nixl", worker__transfer_address="tcp://127.0.0.1:0")
    roles = ("prefill", "decode", "decode")
    together = plans(RayOptions(3, 1, roles), [node(1), node(2)], settings)
    assert {w.role for w in together["10.0.0.2"].workers} == {"prefill", "decode"}
    apart = plans(RayOptions(3, 1, roles, apart=True), [node(1), node(2)], settings)
    assert [[w.role for w in it.workers] for it in apart.values()] == [["decode", "decode"], ["prefill"]]
    assert apart["10.0.0.2"].workers[0].transfer_address == "tcp://10.0.0.2:0"


@pytest.mark.parametrize(
    ("lacking", "why"),
    [
        ({"cpus": 2}, "3 of CPU, and it has 2"),
        ({"memory": GIB}, "of memory"),
        ({"pool_free_bytes": GIB}, "its directory has 1073741824 free"),
    ],
)
def test_group_without_room_is_refused_with_what_is_missing(lacking: dict[str, Any], why: str) -> None:
    assert plans(RayOptions(1, 2), [node(1, cpus=3)])
    with pytest.raises(CapacityError, match=why):
        plans(RayOptions(1, 2), [node(1, **lacking)])


def test_group_on_a_gpu_needs_as_many_as_it_has_ranks() -> None:
    settings = config(worker__device="cuda")
    with pytest.raises(CapacityError, match="2 of GPU, and it has 1"):
        plans(RayOptions(1, 2), [node(1, gpus=1)], settings)


@pytest.mark.refuses(
    "no node has room for group {}",
    "NotFound --coordinator-node={}",
    "so pages have to cross nodes",
    "needs a path that outlives the node's temporary files",
    "(name an absolute path)",
    "the nodes of a Ray cluster have no standbys",
    "the coordinator's node would need {} of CPU",
    "it ends with the login",
    "part of directories and of names of actors",
    "Ray has to know how much memory",
)
def test_refusals_of_the_plan_name_the_remedy() -> None:
    with pytest.raises(ConfigError, match="--journal"):
        plans(RayOptions(), [node(1)], config(coordinator__journal=""))
    with pytest.raises(ConfigError, match="absolute"):
        plans(RayOptions(), [node(1)], config(coordinator__journal="journal.sqlite"))
    with pytest.raises(ConfigError, match="--runtime-dir"):
        plans(RayOptions(), [node(1)], config(cluster__runtime_dir="/run/user/7/hisparse"))
    with pytest.raises(ConfigError, match="another name"):
        plans(RayOptions(), [node(1)], config(cluster__name="a/b"))
    with pytest.raises(CapacityError, match="would need 2 of CPU, and it has 1"):
        plans(RayOptions(http=True), [node(1, cpus=1), node(2)])
    with pytest.raises(ConfigError, match="900GiB"):
        plans(RayOptions(), [node(1)], config(worker__host_mem="auto"))
    with pytest.raises(ConfigError, match=r"standby=1: the nodes of a Ray cluster have no standbys: .*set it to 0"):
        plans(RayOptions(), [node(1)], config(worker__standby=1))
    with pytest.raises(NotFound, match=r"name one of 10\.0\.0\.1"):
        plans(RayOptions(coordinator_node="10.0.0.9"), [node(1)])
    with pytest.raises(CapacityError, match="no node has room"):
        plans(RayOptions(), [node(1, cpus=0)])
    with pytest.raises(ConfigError, match=r"worker\.transfer=nixl"):
        plans(RayOptions(2, 1, ("prefill", "decode")), [node(1), node(2)])


def test_the_same_is_asked_from_any_machine() -> None:
    options = RayOptions(2)
    same = build(
        {}, {}, {"cluster.runtime_dir": "/tmp/hs", "coordinator.journal": "/data/journal.sqlite",
                 "worker.host_mem": "2GiB", "cluster.keys_dir": "/home/a/keys"}, HostFacts("other", 8, 1)
    )  # fmt: skip
    assert digest_of(config(), options) == digest_of(same, options)
    assert digest_of(config(), options) != digest_of(config(), RayOptions(3))
    assert digest_of(config(), options) != digest_of(config(worker__seats=4), options)


def test_what_an_earlier_supervisor_left_is_ended_and_a_stranger_is_not(tmp_path: Path) -> None:
    left, stranger = (subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2))
    try:
        reused = process_of(stranger.pid)._replace(started=1)  # another process had this id
        processes = {"w0": process_of(left.pid), "w1": reused, "w2": process_of(stranger.pid)._replace(boot="earlier")}
        remains.note(tmp_path / "processes.json", processes, "/data/j")
        found = remains.read(tmp_path / "processes.json")
        assert found is not None
        ended = trio.run(remains.end_all, found)
        assert ended is None
        assert left.wait(60) == -9
        assert stranger.poll() is None
    finally:
        for child in (left, stranger):
            child.kill()
            child.wait()
    assert remains.read(tmp_path / "none.json") is None


# ---------------------------------------------------------------- Ray that is not there, or does not answer


class TaskFailed(OSError):
    """Stands for RayTaskError: code that ran on a node has raised."""


class NoRay:
    """Stands for the package `ray`."""

    exceptions = SimpleNamespace(GetTimeoutError=TimeoutError, RayError=OSError, RayTaskError=TaskFailed)
    util = SimpleNamespace(list_named_actors=list)

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "NodeID": "a", "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 1.0}}]

    def remote(self, **_: object) -> Any:
        asked = SimpleNamespace(remote=lambda *_: None)
        return lambda _: SimpleNamespace(options=lambda **_: asked)

    def init(self, **_: object) -> None:
        raise ConnectionError("nothing listens there")

    def get(self, reply: object, timeout: float) -> object:
        raise self.exceptions.GetTimeoutError


@pytest.mark.refuses(
    "no Ray cluster answers", "an actor does not answer", "Ray does not answer", "--ray needs the package {}"
)
def test_ray_that_does_not_answer_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"hisparse\[ray\]"):
        cluster.RayCluster("auto")
    monkeypatch.setattr(cluster, "_ray", NoRay)
    with pytest.raises(Unavailable, match="no Ray cluster answers: nothing listens there"):
        cluster.RayCluster("10.0.0.1:6379")
    monkeypatch.setattr(NoRay.util, "list_named_actors", NoRay().init)
    with pytest.raises(Unavailable, match="Ray does not answer"):
        cluster.RayCluster.hosts(object.__new__(cluster.RayCluster), "hisparse")
    host = cluster.RayHost(SimpleNamespace(report=SimpleNamespace(remote=lambda: None)))
    with pytest.raises(Unavailable, match="Its processes may still run"):
        host.report()


@pytest.mark.refuses("the node cannot be looked at")
def test_node_that_cannot_be_looked_at_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failed(reply: object, timeout: float) -> object:
        raise TaskFailed("ray::look_around() (pid=7)\nModuleNotFoundError: No module named 'hisparse'\n")

    def silent(reply: object, timeout: float) -> object:
        raise OSError("the node of the task is dead")

    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.util", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    ray = NoRay()
    monkeypatch.setattr(cluster, "_ray", lambda: ray)
    monkeypatch.setattr(ray, "get", failed, raising=False)
    own = object.__new__(cluster.RayCluster)
    with pytest.raises(Unavailable, match="same HiSparse") as found:
        own.nodes("hisparse", "/tmp", "/data/j")
    assert "cannot be looked at: ModuleNotFoundError: No module named 'hisparse'" in str(found.value)
    monkeypatch.setattr(ray, "get", silent)
    assert own.nodes("hisparse", "/tmp", "/data/j") == []
    assert "10.0.0.1 is left out" in caplog.text
    assert "the node of the task is dead" in caplog.text


@pytest.mark.refuses("Ray has not reserved {} within {} s")
def test_place_that_ray_does_not_give_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise ValueError(name)

    group = SimpleNamespace(wait=lambda limit_s: False)
    groups = SimpleNamespace(
        placement_group=lambda *_, **__: group, get_placement_group=none, remove_placement_group=none
    )
    monkeypatch.setitem(sys.modules, "ray.util.placement_group", groups)
    monkeypatch.setitem(
        sys.modules, "ray.util.scheduling_strategies", SimpleNamespace(PlacementGroupSchedulingStrategy=None)
    )
    monkeypatch.setattr(cluster, "_ray", NoRay)
    with pytest.raises(CapacityError, match="has not reserved"):
        cluster.RayCluster.start(object.__new__(cluster.RayCluster), "hisparse", [], [])


@pytest.mark.refuses("no such cluster runs there", "a cluster of that name runs with other settings")
def test_down_of_nothing_and_up_beside_another_are_refused() -> None:
    nothing: Any = SimpleNamespace(hosts=lambda name: {})
    with pytest.raises(NotFound, match="no such cluster"):
        run_ray_down(config(), nothing, 1.0)
    other: Any = SimpleNamespace(hosts=lambda name: {"a": SimpleNamespace(report=lambda: SimpleNamespace(asked="x"))})
    with pytest.raises(WrongState, match="hisparse down"):
        start_or_join(config(), RayOptions(), other)


def test_groups_that_ran_before_stay_on_their_nodes_when_the_coordinator_moves() -> None:
    nodes = [node(1), node(2), node(3)]
    before = plans(RayOptions(groups=2), nodes)
    names = [worker.name for plan in before.values() for worker in plan.workers]
    moved = RayOptions(groups=2, coordinator_node="10.0.0.2")
    after = {it.address: it for it in make_plans(config(), moved, nodes, 8, names)}
    assert {it: plan.workers for it, plan in after.items() if plan.workers} == {
        it: plan.workers for it, plan in before.items() if plan.workers
    }
    assert "10.0.0.2" not in {it for it, plan in plans(moved, nodes).items() if plan.workers}


@pytest.mark.refuses("another start goes on with a journal, and none is asked for", "where the coordinator is to run")
def test_pool_that_stays_needs_no_room_and_what_has_no_place_stops_nothing(tmp_path: Path) -> None:
    stopped: list[str] = []

    def stop(deadline_s: float, *, keeps_pool: bool) -> bool:
        stopped.append("10.0.0.2")
        return keeps_pool

    report = SimpleNamespace(workers=("w0-10-0-0-2",), is_home=False)
    hosts = {"10.0.0.2": SimpleNamespace(report=lambda: report, stop=stop)}
    ray: Any = SimpleNamespace(
        hosts=lambda name: hosts,
        nodes=lambda *_: [node(1, cpus=1, has_journal=True), node(2, pool_free_bytes=0)],
        remove=lambda name: hosts.clear(),
    )
    write_tiny_checkpoint(tmp_path / "model", "glm-5")
    settings = config(worker__model=str(tmp_path / "model"))
    with pytest.raises(NotFound, match="no such node"):
        make_way(settings, RayOptions(coordinator_node="10.0.0.9"), ray)
    with pytest.raises(CapacityError, match="no node has room"):
        make_way(settings, RayOptions(groups=20), ray)
    with pytest.raises(ConfigError, match=r"coordinator\.journal=/data/journal\.sqlite.*both nodes mount"):
        make_way(settings, RayOptions(coordinator_node="10.0.0.2"), ray)
    with pytest.raises(ConfigError, match="none is asked for"):
        make_way(config(coordinator__journal="none"), RayOptions(), ray)
    assert not stopped
    assert make_way(settings, RayOptions(), ray) == ("w0-10-0-0-2",)
    assert (stopped, hosts) == (["10.0.0.2"], {})
    assert make_way(settings, RayOptions(), ray) is None


@pytest.mark.refuses("may still write there")
def test_processes_that_run_on_are_not_replaced_without_an_operators_word(tmp_path: Path) -> None:
    def silent() -> None:
        raise Unavailable("an actor does not answer")

    ray: Any = SimpleNamespace(hosts=lambda name: {"10.0.0.1": SimpleNamespace(report=silent)})
    with pytest.raises(Unavailable, match=r"10\.0\.0\.1.*--i-am-sure"):
        make_way(config(), RayOptions(), ray)


@pytest.mark.refuses("did not stop there")
def test_node_that_answers_and_does_not_stop_is_not_replaced_by_any_word(tmp_path: Path) -> None:
    def stop(deadline_s: float, *, keeps_pool: bool) -> bool:
        return False

    def silent() -> None:
        raise Unavailable("an actor does not answer")

    report = SimpleNamespace(workers=(), is_home=True)
    removed: list[str] = []
    hosts = {
        "10.0.0.1": SimpleNamespace(report=lambda: report, stop=stop),
        "10.0.0.2": SimpleNamespace(report=silent),
        "10.0.0.3": SimpleNamespace(report=lambda: report, stop=lambda deadline_s, *, keeps_pool: True),
    }
    ray: Any = SimpleNamespace(
        hosts=lambda name: hosts, nodes=lambda *_: [node(1, has_journal=True)], remove=removed.append
    )
    write_tiny_checkpoint(tmp_path / "model", "glm-5")
    with pytest.raises(Unavailable, match=r"there: 10\.0\.0\.1 .*hisparse down --ray ADDRESS --i-am-sure"):
        make_way(config(worker__model=str(tmp_path / "model")), RayOptions(), ray, is_sure=True)
    assert not removed


@pytest.mark.parametrize(("keeps_pool", "more"), [(False, ()), (True, (True,))])
def test_stop_of_an_actor_names_the_pool_only_when_it_stays(
    keeps_pool: bool, more: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(cluster, "_get", lambda reply, limit_s: True)
    handle = SimpleNamespace(stop=SimpleNamespace(remote=lambda *given: asked.append(given)))
    assert cluster.RayHost(handle).stop(2.0, keeps_pool=keeps_pool)
    assert asked == [(2.0, *more)]


@pytest.mark.refuses("only some of its nodes have an actor")
def test_up_does_not_join_a_part_of_a_cluster() -> None:
    report = SimpleNamespace(asked=digest_of(config(), RayOptions()), nodes=2)
    part: Any = SimpleNamespace(hosts=lambda name: {"a": SimpleNamespace(report=lambda: report)})
    with pytest.raises(WrongState, match="cut short"):
        start_or_join(config(), RayOptions(), part)


def test_driver_ends_when_the_cluster_was_removed() -> None:
    def silent() -> None:
        raise Unavailable("an actor does not answer")

    removed: Any = SimpleNamespace(hosts=lambda name: {})
    hosts: Any = {"10.0.0.1": SimpleNamespace(report=silent)}
    assert follow(config(), removed, hosts, threading.Event(), None) == 0


class FakeAdmin:
    """A client of a coordinator that lists `rows`, and that refuses to forget as often as `refusals` has errors."""

    def __init__(self, rows: dict[str, str], refusals: list[HiSparseError | None], done: threading.Event) -> None:
        self.rows, self.refusals, self.done = rows, refusals, done
        self.asked: list[str] = []

    @asynccontextmanager
    async def open(self, *_: object) -> AsyncIterator[FakeAdmin]:
        yield self

    async def workers(self) -> list[object]:
        return [SimpleNamespace(worker=name, state=state) for name, state in self.rows.items()]

    async def release_quarantine(self, names: list[str]) -> list[str]:
        self.asked += names
        return ["released"]

    async def forget(self, names: list[str]) -> None:
        refusal = self.refusals.pop(0)
        while refusal is None:
            await trio.sleep_forever()
        if not self.refusals:
            self.done.set()
        raise refusal


def test_word_for_processes_from_before_is_given_again_until_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drained worker is connected; one that is about to be started again is not vouched for."""
    rows = {"w0-here": "drained", "w1-here": "connected", "w0-lost": "disconnected", "w0-cut-off": "connected"}
    refusals: list[HiSparseError | None] = [
        WrongState("is awaited"),
        Unavailable("no answer"),
        None,
        NotFound("no such worker"),
    ]
    asked = threading.Event()
    admin = FakeAdmin(rows, refusals, asked)
    monkeypatch.setattr(upping, "open_admin", admin.open)
    monkeypatch.setattr(upping, "FOLLOW_INTERVAL_S", 0.01)
    monkeypatch.setattr(upping, "ASK_LIMIT_S", 0.5)
    status = NodeStatus("up", {"coordinator": 1, "w0-here": 2})
    report = NodeReport("10.0.0.1", "", True, "tcp://a", "tcp://b", 9, status, None, 1, ("w0-here", "w1-here"))
    hosts: Any = {"10.0.0.1": SimpleNamespace(report=lambda: report)}
    nothing: Any = None
    assert follow(config(cluster__keys_dir=str(tmp_path)), nothing, hosts, asked, None, vouches=True) == 0
    assert admin.asked == ["w0-lost"] * 4


def test_free_ports_are_not_those_of_connections_and_the_same_at_each_start() -> None:
    name = f"test-{os.getpid()}"
    free, ports, has_journal = cluster.look_around(name, "/tmp", "127.0.0.1", "/tmp")
    assert free > 0
    assert not has_journal  # a directory
    assert len(set(ports)) == PORTS
    assert all(it in cluster.PORT_CHOICE for it in ports)
    assert cluster.look_around(name, "/tmp", "127.0.0.1", __file__)[1:] == (ports, True)
    with socket.create_server(("127.0.0.1", ports[0])):
        others = cluster.look_around(name, "/tmp", "127.0.0.1", "/none")[1]
        assert ports[0] not in others
        assert ports[1] in others


def test_each_worker_on_ray_has_a_metrics_port_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []
    monkeypatch.setattr(cluster, "RayCluster", lambda address: None)
    monkeypatch.setattr("hisparse.ray.up.run_ray_up", lambda config, *_, **__: seen.append(config) or 0)
    words = "up --ray auto --groups 3 --group-size 2 --metrics-port 9000 --journal /data/j.sqlite --runtime-dir /tmp/hs"
    result = CliRunner().invoke(main, words.split())
    assert result.exit_code == 0, result.output
    assert (seen[0].worker.metrics_port, seen[0].http.metrics_port) == (9001, 9007)


def test_up_on_ray_takes_an_engine_without_an_address_of_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []
    monkeypatch.setattr(cluster, "RayCluster", lambda address: None)
    monkeypatch.setattr("hisparse.ray.up.run_ray_up", lambda config, *_, **__: seen.append(config) or 0)
    words = "--set worker.transfer=nixl --journal /data/j.sqlite --runtime-dir /tmp/hs --host-mem 2GiB"
    result = CliRunner().invoke(main, ["up", "--ray", "auto", *words.split()])
    assert result.exit_code == 0, result.output
    assert plans(RayOptions(), [node(1)], seen[0])["10.0.0.1"].workers[0].transfer_address == "tcp://10.0.0.1:0"
    alone = CliRunner().invoke(main, ["up", *words.split()])
    assert "needs an address" in alone.output


# ---------------------------------------------------------------- actors and supervisors


class DyingChild:
    """Stands for a supervisor that a signal ends at once. `started`: how many were."""

    started = 0
    pid = 0

    def __init__(self) -> None:
        self.process = SimpleNamespace(wait=lambda: -signal.SIGKILL)

    @classmethod
    def start(cls, *_: object) -> DyingChild:
        cls.started += 1
        return cls()

    def signal(self, number: signal.Signals) -> None: ...
    def close(self) -> None: ...


def host_of(directory: Path) -> NodeHost:
    plan = plans(RayOptions(), [node(1)], config(cluster__runtime_dir=str(directory)))["10.0.0.1"]
    return NodeHost(msgspec.json.encode(msgspec.structs.replace(plan, files={"keys/admin.key": "secret"})))


def test_stop_between_two_supervisors_starts_no_other_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "Child", DyingChild)
    monkeypatch.setattr(DyingChild, "started", 0)
    host = host_of(tmp_path / "run")
    while DyingChild.started == 0:
        time.sleep(0.01)
    assert host.stop(0.0)
    assert DyingChild.started == 1


def test_node_whose_processes_outlived_their_supervisor_is_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "Child", DyingChild)
    monkeypatch.setattr(hosting, "STOP_GRACE_S", 0.2)
    host = host_of(tmp_path / "run")
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        path = Path(host._plan.runtime_dir) / hosting.REMAINS_FILE
        remains.note(path, {"w0": process_of(left.pid)}, "/data/j")
        assert not host.stop(0.0)
        left.kill()
        assert host.stop(0.0)  # it has ended, and was not waited for
    finally:
        left.kill()
        left.wait()


@pytest.mark.refuses("a file in it cannot be written")
def test_node_that_cannot_write_its_files_says_so_and_ends_the_driver(tmp_path: Path) -> None:
    (tmp_path / "run" / "hisparse-10-0-0-1").mkdir(parents=True, mode=0o700)
    (tmp_path / "run").chmod(0o700)
    (tmp_path / "run" / "hisparse-10-0-0-1" / "keys").touch()
    host = host_of(tmp_path / "run")
    report = msgspec.json.decode(host.report(), type=NodeReport)
    assert "keys" in report.status.said[0]
    actor: Any = SimpleNamespace(report=lambda: report)
    nothing: Any = None
    assert follow(config(), nothing, {"10.0.0.1": actor}, threading.Event(), None) == 8
    assert host.stop(0.0)


def test_word_waits_for_a_coordinator_that_comes_back_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plans(RayOptions(), [node(1, cpus=1), node(2)], config(cluster__runtime_dir=str(tmp_path)))["10.0.0.2"]
    Path(plan.runtime_dir).mkdir()
    told: list[object] = []

    async def tell(*names: object, **more: object) -> list[str]:
        told.append((*names, more))
        return ["released"]

    async def scenario() -> None:
        back_at = trio.current_time() + 600

        @asynccontextmanager
        async def open_admin(*_: object) -> AsyncIterator[object]:
            if trio.current_time() < back_at:
                raise Unavailable("no coordinator answers")
            yield SimpleNamespace(release_quarantine=tell, forget=tell)

        monkeypatch.setattr(supervising, "open_admin", open_admin)
        await supervising.NodeSupervisor(plan)._vouch(["w0"], died=False)

    trio.run(scenario, clock=MockClock(autojump_threshold=0))
    assert told == [(["w0"], {"died": False}), (["w0"], {})]


def test_word_of_a_group_is_given_in_the_order_in_which_its_ranks_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plans(RayOptions(), [node(1, cpus=1), node(2)], config(cluster__runtime_dir=str(tmp_path)))["10.0.0.2"]
    Path(plan.runtime_dir).mkdir()
    told: list[str] = []

    async def release(names: list[str], **_: object) -> list[str]:
        told.append(names[0])
        return ["released"]

    async def forget(names: list[str]) -> None:
        if len(told) == 1:
            raise WrongState("is connected")  # the first to end is not missed yet

    @asynccontextmanager
    async def open_admin(*_: object) -> AsyncIterator[object]:
        yield SimpleNamespace(release_quarantine=release, forget=forget)

    monkeypatch.setattr(supervising, "open_admin", open_admin)
    trio.run(supervising.NodeSupervisor(plan)._vouch, ["w2", "w0", "w1"], clock=MockClock(autojump_threshold=0))
    assert told == ["w2", "w2", "w0", "w1"]


def test_supervisor_waits_until_the_one_before_is_named_and_asks_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked, waits = tmp_path / "lock", [], []
    first = path.open("wb")
    fcntl.flock(first, fcntl.LOCK_EX)  # and not yet written

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 1:
            first.write(msgspec.json.encode(process_of(1)))
            first.flush()
        elif len(waits) == 3:
            first.close()

    monkeypatch.setattr(supervising, "ask_to_stop", asked.append)
    monkeypatch.setattr(supervising, "time", SimpleNamespace(sleep=wait))
    with supervising._only_one(path):
        assert asked == [process_of(1)]
        assert msgspec.json.decode(path.read_bytes(), type=Process) == process_of(os.getpid())


async def endless(_: object) -> None:
    await trio.sleep_forever()


def test_process_that_does_not_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remains, "KILL_LIMIT_S", 0.05)
    monkeypatch.setattr(remains, "_end", endless)
    left = remains.Remains({"w0": process_of(1)})
    with pytest.raises(InternalError, match="still run"):
        trio.run(remains.end_all, left)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        pytest.param("up --groups 2", "need --ray", marks=pytest.mark.refuses("{} need --ray")),
        pytest.param("up --ray auto -n 2", "use --groups", marks=pytest.mark.refuses("{} cannot be used with --ray")),
        ("up --ray auto --deadline 3", "pass it to down"),
        ("up --ray auto --abort-unfinished", "cannot be used with --ray"),
        ("up --ray auto", "name one with --journal"),
        ("up --replace", "need --ray"),
        pytest.param(
            "up --ray auto --i-am-sure", "needs --replace", marks=pytest.mark.refuses("--i-am-sure needs --replace")
        ),
    ],
    ids=["groups", "workers", "deadline", "abort", "journal", "replace", "sure"],
)
def test_options_that_do_not_go_together_are_refused(words: str, text: str) -> None:
    result = CliRunner().invoke(main, words.split())
    assert text in " ".join(result.output.split()), result.output
    assert result.exit_code in (2, 8)
