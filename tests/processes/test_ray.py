"""`hisparse up --ray` and `down` over a Ray that is none, with real processes: two nodes, one with the coordinator.

The real one: tests/cluster.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio

from basics.processes import process_of
from basics.request_states import POISON_STRIKES
from hisparse import Client, TokenStream, open_client
from hisparse.cluster.supervision import open_admin
from hisparse.ray.host import NodeReport
from hisparse.ray.plan import RayOptions
from hisparse.ray.remains import runs
from hisparse.ray.up import follow, keys_dir_of, make_way, run_ray_down, start_or_join
from protocol.errors import Unavailable, WrongState
from protocol.messages import Sampling
from protocol.settings import Config
from protocol.transport.keys import access
from tests.support.cluster_rig import again_until, crash_config, missed_soon, prompts_of, write_model
from tests.support.fakes.ray import FakeRay
from tests.support.ray_client import decode_anywhere

pytestmark = [pytest.mark.process, pytest.mark.ray, pytest.mark.timeout(600)]
HOME, OTHER = "127.0.0.1", "127.0.0.2"
LIMIT_S = 240.0
REQUESTS = 4
TOKENS = 150  # so many that none of them ends before it is disturbed
#: Longer than REQUESTS take.
ROUND_S = 20.0
OPTIONS = RayOptions(groups=2, group_size=1)


@pytest.fixture
def ray() -> Iterator[FakeRay]:
    found = FakeRay((HOME, OTHER))
    yield found
    found.end()


def ray_config(tmp_path: Path) -> Config:
    config = missed_soon(crash_config(write_model(tmp_path / "model"), tmp_path / "run"))  # exits are seen elsewhere
    settings = msgspec.structs.replace(config.coordinator, journal=str(tmp_path / "journal.sqlite"))
    return msgspec.structs.replace(config, coordinator=settings)


def home_of(ray: FakeRay) -> NodeReport:
    return next(report for it in ray.actors.values() if not it.lost and (report := it.report()).is_home)


@asynccontextmanager
async def admin_of(config: Config, ray: FakeRay) -> AsyncIterator[Client]:
    home = home_of(ray)
    cluster = msgspec.structs.replace(
        config.cluster, admin_endpoint=home.admin_endpoint, keys_dir=str(keys_dir_of(config))
    )
    async with open_admin(msgspec.structs.replace(config, cluster=cluster), "test") as client:
        yield client


async def until(holds: Callable[[], bool]) -> None:
    with trio.fail_after(LIMIT_S):
        while not holds():  # noqa: ASYNC110 - other processes change it
            await trio.sleep(0.1)


async def until_connected(client: Client, count: int) -> None:
    with trio.fail_after(LIMIT_S):
        while sum(it.state == "connected" for it in await client.workers()) < count:  # noqa: ASYNC110
            await trio.sleep(0.1)


async def until_whole(config: Config, ray: FakeRay) -> None:
    """Until both workers are connected; then no page is in quarantine."""
    async with admin_of(config, ray) as client:
        await until_connected(client, 2)
        assert [it.quarantined for it in await client.pools()] == [0, 0]


async def outputs_of(
    config: Config, ray: FakeRay, prefix: str, disturb: Callable[[list[list[int]]], Awaitable[None]] | None = None
) -> list[list[int]]:
    """Of REQUESTS requests, greedy; `disturb` gets what they have said so far, and runs beside them."""
    cluster = msgspec.structs.replace(config.cluster, keys_dir=str(keys_dir_of(config)))
    endpoint = ray.actors[HOME].report().client_endpoint
    outputs: list[list[int]] = [[] for _ in range(REQUESTS)]

    async def collect(i: int, stream: TokenStream) -> None:
        async for said in stream:
            outputs[i] += said.tolist()

    key = access(cluster, "client", endpoint)
    async with (
        open_client(endpoint, role="client", name="test", reconnect_limit_s=LIMIT_S, key=key) as client,
        trio.open_nursery() as nursery,
    ):
        sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
        for i, prompt in enumerate(prompts_of(5, REQUESTS)):
            nursery.start_soon(collect, i, await client.submit(prompt, sampling, request_id=f"{prefix}{i}"))
        if disturb is not None:
            nursery.start_soon(disturb, outputs)
    return outputs


async def kill_while_it_decodes(config: Config, ray: FakeRay, worker: str, pid: int, outputs: list[list[int]]) -> None:
    """SIGKILL to `worker`, once one of its requests has said something."""
    async with admin_of(config, ray) as client:
        with trio.fail_after(LIMIT_S):
            while True:
                rows = [it for it in (await client.requests()).rows if it.worker == worker and it.state == "RUNNING"]
                if any(outputs[int(it.request_id[-1])] for it in rows):
                    break
                await trio.sleep(0.02)
    os.kill(pid, signal.SIGKILL)


async def kill_amid_requests(config: Config, ray: FakeRay, worker: str, pid: int, undisturbed: list[list[int]]) -> None:
    """As `kill_while_it_decodes`: no output differs."""
    killed = trio.Event()

    async def disturb(outputs: list[list[int]]) -> None:
        if not killed.is_set():
            with trio.move_on_after(ROUND_S):  # all may have said all they say
                await kill_while_it_decodes(config, ray, worker, pid, outputs)
                killed.set()

    await again_until(killed, lambda prefix: outputs_of(config, ray, prefix, disturb), undisturbed, "b")


def is_running(pid: int) -> bool:
    return runs(process_of(pid))


async def test_a_cluster_of_two_nodes_outlives_its_driver_and_what_is_killed(tmp_path: Path, ray: FakeRay) -> None:
    config = ray_config(tmp_path)
    hosts = start_or_join(config, OPTIONS, ray)
    await until(ray.are_up)
    names = [f"w0-{OTHER.replace('.', '-')}", f"w1-{HOME.replace('.', '-')}"]
    async with admin_of(config, ray) as client:
        await until_connected(client, 2)
        assert sorted(it.worker for it in await client.workers()) == names

    # a driver that ends leaves all as it is, and its successor joins; another one is refused
    ready, asked = tmp_path / "ready.json", threading.Event()
    ended: list[int] = []
    driver = threading.Thread(target=lambda: ended.append(follow(config, ray, hosts, asked, ready)))
    driver.start()
    await until(ready.exists)
    asked.set()
    driver.join(LIMIT_S)
    assert (ended, ready.exists()) == ([0], False)
    assert start_or_join(config, OPTIONS, ray).keys() == {HOME, OTHER}
    with pytest.raises(WrongState, match="runs with other settings"):
        start_or_join(config, RayOptions(groups=1), ray)

    # a worker is restarted, and the coordinator of another node is told that it has ended: no page stays in quarantine
    undisturbed = await outputs_of(config, ray, "a")
    worker = ray.actors[OTHER].report().status.processes[names[0]]
    await kill_amid_requests(config, ray, names[0], worker, undisturbed)
    await until(lambda: ray.actors[OTHER].report().status.processes.get(names[0], worker) != worker)
    assert any("released what its lost epochs" in it for it in ray.actors[OTHER].report().status.said)
    await until_whole(config, ray)

    # a supervisor that is killed: the next one ends what it left, before it starts the same again
    before = ray.actors[HOME].report()
    os.kill(before.supervisor, signal.SIGKILL)
    await until(lambda: ray.actors[HOME].report().supervisor != before.supervisor)
    await until(ray.are_up)
    after = ray.actors[HOME].report()
    assert not set(before.status.processes.values()) & set(after.status.processes.values())
    assert not [pid for pid in before.status.processes.values() if is_running(pid)]
    await until_whole(config, ray)

    # an actor that is made again while the supervisor of the one before runs: that one is stopped first
    before = ray.actors[OTHER].report()
    ray.make_again(OTHER)
    await until(lambda: ray.are_up() and ray.actors[OTHER].report().supervisor not in (0, before.supervisor))
    assert not [pid for pid in (before.supervisor, *before.status.processes.values()) if is_running(pid)]
    await until_whole(config, ray)

    # Ray's word that a node is dead: nothing of it is given up, and down says so
    ray.actors[OTHER].lost = True
    running = ray.actors[OTHER].inner
    assert run_ray_down(config, ray, 1.0) == 6
    assert ray.actors.keys() == {HOME, OTHER}
    ray.actors[OTHER].lost = False
    assert run_ray_down(config, ray, 1.0) == 0
    assert not ray.actors
    assert running._ended.is_set()
    assert not list((tmp_path / "run").rglob("*.pool"))


@pytest.mark.deep
async def test_coordinator_moves_to_another_node_by_an_operators_word(tmp_path: Path, ray: FakeRay) -> None:
    """Its node is off. The group that was there goes to the other node, whose rows stay."""
    config, ready = ray_config(tmp_path), tmp_path / "ready.json"
    start_or_join(config, OPTIONS, ray)
    await until(ray.are_up)
    remaining = f"w0-{OTHER.replace('.', '-')}"
    async with admin_of(config, ray) as client:
        await until_connected(client, 2)
        incarnation = (await client.welcome()).incarnation
    keys, where = str(keys_dir_of(config)), ""

    def endpoint() -> str:
        nonlocal where
        with suppress(StopIteration):  # no coordinator runs
            where = home_of(ray).client_endpoint
        return where

    undisturbed, outputs = ([[] for _ in range(2 * REQUESTS)] for _ in range(2))
    await decode_anywhere(endpoint, keys, "a", undisturbed)
    moved = RayOptions(groups=2, group_size=1, coordinator_node=OTHER)
    asked = threading.Event()
    drivers: list[threading.Thread] = []

    async def move() -> None:
        await until(lambda: all(outputs))
        ray.lose_node(HOME)
        before = ray.actors[OTHER].report().status.processes
        with pytest.raises(WrongState, match="--replace"):
            start_or_join(config, moved, ray)
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1.*--i-am-sure"):
            make_way(config, moved, ray)
        assert ray.actors[OTHER].report().status.processes == before  # refused, with nothing stopped
        pool = next((tmp_path / "run").rglob(f"*{OTHER.replace('.', '-')}*/**/*.pool"))
        kept = pool.stat().st_ino
        names = await trio.to_thread.run_sync(partial(make_way, config, moved, ray, is_sure=True))
        assert names == (remaining,)
        assert pool.stat().st_ino == kept
        hosts = start_or_join(config, moved, ray, names)
        run = partial(follow, config, ray, hosts, asked, ready, vouches=True)
        drivers.append(threading.Thread(target=run))
        drivers[0].start()
        await until(ready.exists)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(move)
        await decode_anywhere(endpoint, keys, "b", outputs)
    assert outputs == undisturbed
    async with admin_of(config, ray) as client:
        assert (await client.welcome()).incarnation > incarnation
        assert sorted(it.worker for it in await client.workers()) == [remaining, f"w1-{OTHER.replace('.', '-')}"]
        assert not any(it.quarantined for it in await client.pools())
    asked.set()
    drivers[0].join(LIMIT_S)


@pytest.mark.deep
async def test_request_that_kills_its_worker_is_failed(tmp_path: Path, ray: FakeRay) -> None:
    """I5: the coordinator sees no exit of a process on another node, and takes the word of its supervisor. The test
    plays the request, by killing its worker at once."""
    config = ray_config(tmp_path)
    start_or_join(config, OPTIONS, ray)
    await until(ray.are_up)
    name, kills = f"w0-{OTHER.replace('.', '-')}", 0
    async with admin_of(config, ray) as client:
        await until_connected(client, 2)
        await client.drain([f"w1-{HOME.replace('.', '-')}"])
        asked = Sampling(max_tokens=1_000, ignore_eos=True)
        poison = await client.submit_detached([1, 2, 3], asked)
        with trio.fail_after(2 * LIMIT_S):
            while (row := (await client.request(poison)).row).state != "FAILED":
                if row.state == "FINISHED":  # this process had no core for that long
                    poison = await client.submit_detached([1, 2, 3], asked)
                pid = ray.actors[OTHER].report().status.processes.get(name, 0)
                if row.worker == name and pid:
                    os.kill(pid, signal.SIGKILL)
                    kills += 1
                    await until(lambda: ray.actors[OTHER].report().status.processes.get(name, pid) != pid)  # noqa: B023
                await trio.sleep(0.01)
    assert f"its worker died {POISON_STRIKES} times without its coming further" in row.reason
    assert kills >= POISON_STRIKES  # one that it had come further at began the count again
