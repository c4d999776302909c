"""Prefill and decode in different processes: two workers compute prompts, two others decode them, over one host pool or
from one pool to another.

Deterministic, so outputs are those of workers that do both; killed and stopped in the middle, too.
"""

from __future__ import annotations

import http.client
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from coordinator.client.client import Client, open_client
from coordinator.cluster.children import Child, stop_children
from coordinator.cluster.up import _answers, _start
from coordinator.config import Config, pool_path
from coordinator.errors import CapacityError
from coordinator.messages import AUTO, DIRECT, Sampling
from tests.cluster_rig import (
    assert_books_agreed,
    assert_nothing_leaked,
    cluster_of_two,
    crash_config,
    prompts_of,
    until_all_connected,
    write_model,
)
from tests.test_transfer_engines import why_absent
from worker.pool_file import remove_pool

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

REQUESTS = 64
ROLES = ("prefill", "prefill", "decode", "decode")
HOST_MEM = "48MiB"
#: Its prompt is on the prefill worker, or lately was.
SENT = ("PREFILLING", "TRANSFERRING", "PREFILLED")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def mixed_prompts() -> list[list[int]]:
    """One token, page borders and their neighbours, and what lies between."""
    edges = [1, 63, 64, 65, 128, 129, 255, 256, 257, 640]
    long = [[(7 * i + j) % 256 for j in range(tokens)] for i, tokens in enumerate(edges)]
    return long + prompts_of(6, REQUESTS - len(long))


async def decode_all(client: Client, prompts: list[list[int]], prefix: str, admission: str = AUTO) -> list[list[int]]:
    """Outputs in order: greedy and drawn, some ended by a stop string, some by their first token."""
    outputs: list[list[int]] = [[] for _ in prompts]

    async def collect(i: int) -> None:
        sampling = Sampling(
            max_tokens=(1, 9, 24, 40)[i % 4],
            temperature=(0.0, 0.8)[i % 2],
            seed=i,
            stop=("ab", "e", "\x01")[: i % 3],
            ignore_eos=i % 5 > 0,
        )
        stream = await client.submit(prompts[i], sampling, request_id=f"{prefix}{i}", admission=admission)
        async for tokens in stream:
            outputs[i] += tokens.tolist()
        assert stream.ended is not None
        assert stream.ended.outcome == "FINISHED", stream.ended

    async with trio.open_nursery() as nursery:
        for i in range(len(prompts)):
            nursery.start_soon(collect, i)
    return outputs


async def copied_bytes(log_dir: Path, worker: str) -> dict[str, float]:
    """What `worker` has copied, by purpose, as it exports it."""
    found = re.search(r"url=http://127\.0\.0\.1:(\d+)/metrics", (log_dir / f"{worker}.log").read_text())
    assert found

    def get() -> str:
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=10)
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()

    families = text_string_to_metric_families(await trio.to_thread.run_sync(get))
    samples = [it for family in families for it in family.samples if it.name == "hisparse_worker_copied_bytes_total"]
    return {it.labels["purpose"]: it.value for it in samples}


@pytest.fixture(scope="module")
def colocated(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What workers that do both say."""
    directory = tmp_path_factory.mktemp("both")

    async def run() -> list[list[int]]:
        async with cluster_of_two(crash_config(model, directory, HOST_MEM), directory) as (_, client, _):
            return await decode_all(client, mixed_prompts(), "both-")

    return trio.run(run)


async def test_two_and_two_say_what_workers_say_that_do_both(
    model: Path, colocated: list[list[int]], tmp_path: Path
) -> None:
    """And no byte is staged where it is decoded."""
    config = crash_config(model, tmp_path, HOST_MEM)
    async with cluster_of_two(config, tmp_path, roles=ROLES) as (_, client, _):
        for admission in (AUTO, DIRECT):
            assert await decode_all(client, mixed_prompts(), f"{admission}-", admission) == colocated
        copied = {worker: await copied_bytes(tmp_path, worker) for worker in ("w0", "w1", "w2", "w3")}
        story = (await client.request("auto-9")).story
        await assert_nothing_leaked(client)
    assert all(copied[worker]["stage"] > 0 for worker in ("w0", "w1"))
    assert all(copied[worker]["stage"] == 0 for worker in ("w2", "w3"))
    assert all(copied[worker]["preload"] > 0 for worker in ("w2", "w3"))
    assert all(copied[worker]["backup"] == 0 for worker in ("w0", "w1"))
    passed = [line.state for line in story if line.event in ("admitted", "staged", "released", "started")]
    assert passed[:4] == ["PREFILLING", "TRANSFERRING", "PREFILLED", "READY"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_prompts_of_a_worker_that_is_lost_are_prefilled_by_another(
    model: Path, colocated: list[list[int]], tmp_path: Path, number: int
) -> None:
    """I2: what it may still write stays in quarantine until it is gone. The keeper kills it then."""
    config = crash_config(model, tmp_path, HOST_MEM)
    async with cluster_of_two(config, tmp_path, kept=True, roles=ROLES) as (cluster, client, said):

        async def disturb() -> None:
            for name in ("w0", "w2"):
                while not any(row.worker == name for row in (await client.requests()).rows):  # noqa: ASYNC110
                    await trio.sleep(0.005)
                cluster.workers[name].signal(number)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturb)
            assert await decode_all(client, mixed_prompts(), "lost-", DIRECT) == colocated
            nursery.cancel_scope.cancel()
        with suppress(trio.TooSlowError):
            await until_all_connected(client, 60)
        await assert_nothing_leaked(client)
        stories = [(await client.request(f"lost-{i}")).story for i in range(REQUESTS)]
    assert any(line.event == "lost" for story in stories for line in story), said


# ---------------------------------------------------------------- two nodes


@asynccontextmanager
async def two_nodes(
    config: Config, log_dir: Path, engine: str, *, decoder_page: str = "auto"
) -> AsyncIterator[tuple[dict[str, Child], Client]]:
    """A coordinator, two workers that prefill on node a and two that decode on node b: two pools, on one machine."""
    address = "" if engine == "shared" else "tcp://127.0.0.1:0"
    children = {"coordinator": _start("coordinator", config, log_dir)}
    try:
        for i, role in enumerate(ROLES):
            own = msgspec.structs.replace(
                config.worker,
                name=f"w{i}",
                role=role,
                node="a" if role == "prefill" else "b",
                transfer=engine,
                transfer_address=address,
                kv_dtype="auto" if role == "prefill" else decoder_page,
            )
            children[own.name] = _start("worker", msgspec.structs.replace(config, worker=own), log_dir)
        with trio.fail_after(240):
            while not await _answers(config):  # noqa: ASYNC110
                await trio.sleep(0.1)
        async with open_client(config.cluster.admin_endpoint, role="admin", name="test") as client:
            with trio.fail_after(240):
                while sum(row.state == "connected" for row in await client.workers()) < len(ROLES):  # noqa: ASYNC110
                    await trio.sleep(0.1)
            yield children, client
            assert_books_agreed(log_dir, await client.audit())
    finally:
        await stop_children(list(children.values()), 10.0)
        for child in children.values():
            child.close()
        for node in "ab":
            remove_pool(pool_path(config.worker.pool_dir, node))


@pytest.fixture(params=["shared", "nixl", "mooncake"])
def engine(request: pytest.FixtureRequest) -> str:
    """One that can be had here."""
    name: str = request.param
    if name != "shared" and (reason := why_absent(name)):
        pytest.skip(reason)
    return name


async def test_rows_of_one_node_are_decoded_on_another(
    model: Path, colocated: list[list[int]], tmp_path: Path, engine: str
) -> None:
    """Outputs as of workers that do both; not a byte is staged where it is decoded."""
    config = crash_config(model, tmp_path, HOST_MEM)
    async with two_nodes(config, tmp_path, engine) as (_, client):
        assert await decode_all(client, mixed_prompts(), "far-") == colocated
        copied = {worker: await copied_bytes(tmp_path, worker) for worker in ("w0", "w1", "w2", "w3")}
        story = (await client.request("far-9")).story
        await assert_nothing_leaked(client)
    assert all(copied[worker]["stage"] > 0 for worker in ("w0", "w1"))
    assert all(copied[worker]["stage"] == 0 for worker in ("w2", "w3"))
    assert "w2" in " ".join(line.reason for line in story) or "w3" in " ".join(line.reason for line in story)


@pytest.mark.parametrize("victim", ["w0", "w2"], ids=["prefills", "decodes"])
async def test_a_worker_killed_amid_transfers_costs_no_output(
    model: Path, colocated: list[list[int]], tmp_path: Path, victim: str
) -> None:
    """I2, I5: others take its requests on; nothing leaks, on either node. Some clients lose interest meanwhile."""
    config = crash_config(model, tmp_path, HOST_MEM)
    async with two_nodes(config, tmp_path, "shared") as (children, client):

        async def disturb() -> None:
            while not any(row.state == "TRANSFERRING" for row in (await client.requests()).rows):  # noqa: ASYNC110
                await trio.sleep(0.002)
            children[victim].signal(signal.SIGKILL)
            for i in range(3):
                await client.submit_detached([1] * 600, Sampling(400, ignore_eos=True), request_id=f"gone-{i}")
            await trio.sleep(0.05)
            await client.abort([f"gone-{i}" for i in range(3)])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturb)
            assert await decode_all(client, mixed_prompts(), "far-") == colocated
        await assert_nothing_leaked(client)


async def test_a_coordinator_killed_amid_transfers_finds_them_again(
    model: Path, colocated: list[list[int]], tmp_path: Path
) -> None:
    """I2, I4, I5: from the journal and from what workers say that they have; pages went on travelling meanwhile."""
    config = crash_config(model, tmp_path, HOST_MEM)
    async with two_nodes(config, tmp_path, "shared") as (children, client):

        async def disturb() -> None:
            for kill in range(2):
                while sum(row.state in SENT for row in (await client.requests()).rows) < 1 + kill:  # noqa: ASYNC110
                    await trio.sleep(0.002)
                children["coordinator"].signal(signal.SIGKILL)
                await children["coordinator"].wait()
                children["coordinator"].close()
                children["coordinator"] = _start("coordinator", config, tmp_path)
                while not await _answers(config):  # noqa: ASYNC110
                    await trio.sleep(0.05)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturb)
            assert await decode_all(client, mixed_prompts(), "far-") == colocated
            nursery.cancel_scope.cancel()
        with trio.fail_after(60):
            while sum(row.state == "connected" for row in await client.workers()) < len(ROLES):  # noqa: ASYNC110
                await trio.sleep(0.1)
        await assert_nothing_leaked(client)


async def test_pages_of_another_layout_are_refused_with_both_sizes(model: Path, tmp_path: Path) -> None:
    config = crash_config(model, tmp_path, HOST_MEM)
    async with two_nodes(config, tmp_path, "shared", decoder_page="bfloat16") as (_, client):
        with pytest.raises(CapacityError, match=r"host pages of w\d have \d+ bytes, those of w\d \d+"):
            await client.submit([1] * 100, Sampling(8))
