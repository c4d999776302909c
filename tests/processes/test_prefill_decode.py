"""Prefill and decode in different processes: two workers compute prompts, two others decode them, over one host pool,
from one pool to another, and between network namespaces.

Deterministic, so outputs are those of workers that do both; killed and stopped in the middle, too.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio

from protocol.errors import CapacityError, WrongState
from protocol.messages import AUTO, DIRECT, RequestRow, Sampling
from tests.support.checkpoints import LATENT
from tests.support.cluster_rig import (
    KV_DTYPE,
    again_until,
    assert_nothing_leaked,
    cluster_of_two,
    crash_config,
    kept_as,
    missed_soon,
    standing_model,
    until_all_connected,
)
from tests.support.history import in_turn
from tests.support.netns_rig import Namespace, namespaces, why_not
from tests.support.nodes_rig import (
    COORDINATOR,
    REQUESTS,
    Spot,
    colocated_outputs,
    decode_all,
    decode_hot,
    mixed_prompts,
    running_nodes,
    samples,
    two_and_two,
)
from tests.worker.transfer.test_engines import why_absent

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

COPIED = "hisparse_worker_copied_bytes_total"
WARM_STARTS = "hisparse_worker_warm_starts_total"
PAGES = "hisparse_transfer_pages_total"
ROLES = ("prefill", "prefill", "decode", "decode")
HOST_MEM = "24MiB"
#: Of the mixed prompts, with 640 tokens.
LONGEST = 9
#: Its prompt is on the prefill worker, or lately was.
SENT = ("PREFILLING", "TRANSFERRING", "PREFILLED")


@pytest.fixture(scope="module")
def model(run_dir: Path) -> Path:
    return standing_model(run_dir, in_turn(LATENT))


@pytest.fixture(scope="module")
def colocated(model: Path, run_dir: Path) -> list[list[int]]:
    """What workers that do both say."""
    return colocated_outputs(model, run_dir)


async def test_split_workers_give_the_tokens_of_combined_ones(
    model: Path, colocated: list[list[int]], tmp_path: Path
) -> None:
    """And no byte is staged where it is decoded."""
    config = kept_as(crash_config(model, tmp_path, HOST_MEM), KV_DTYPE)
    async with cluster_of_two(config, tmp_path, roles=ROLES) as (_, client, _):
        for placement in (AUTO, DIRECT):
            assert await decode_all(client, mixed_prompts(), f"{placement}-", placement) == colocated
        assert await decode_hot(client, mixed_prompts(), LONGEST, "hot-", 64) == colocated[LONGEST]
        copied = {worker: await samples(tmp_path, worker, COPIED, "purpose") for worker in ("w0", "w1", "w2", "w3")}
        starts = [await samples(tmp_path, worker, WARM_STARTS, "outcome") for worker in ("w2", "w3")]
        history = (await client.request("auto-9")).history
        await assert_nothing_leaked(client)
    assert all(copied[worker]["stage"] > 0 for worker in ("w0", "w1"))
    assert all(copied[worker]["stage"] == 0 for worker in ("w2", "w3"))
    assert all(copied[worker]["preload"] > 0 for worker in ("w2", "w3"))
    assert all(copied[worker]["backup"] == 0 for worker in ("w0", "w1"))
    assert sum(it["warm"] for it in starts) > 0 == sum(it["refused"] for it in starts)
    passed = [line.state for line in history if line.event in ("admitted", "staged", "released", "started")]
    assert passed[:4] == ["PREFILLING", "TRANSFERRING", "PREFILLED", "READY"]


def on_its_way(row: RequestRow, worker: str) -> bool:
    return row.worker == worker and row.state not in ("FINISHED", "ABORTED", "FAILED")


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.deep)],
)
async def test_prompts_of_a_lost_worker_are_prefilled_by_another(
    model: Path, colocated: list[list[int]], tmp_path: Path, number: signal.Signals
) -> None:
    """I2: what it may still write stays in quarantine until it is gone. The keeper kills it then."""
    config = missed_soon(kept_as(crash_config(model, tmp_path, HOST_MEM), KV_DTYPE))
    async with cluster_of_two(config, tmp_path, kept=True, roles=ROLES) as (cluster, client, said):
        done = trio.Event()

        async def disturb() -> None:
            for name in ("w0", "w2"):
                while not any(on_its_way(row, name) for row in (await client.requests()).rows):  # noqa: ASYNC110
                    await trio.sleep(0.005)
                cluster.workers[name].signal(number)
            done.set()

        async def decode(prefix: str) -> list[list[int]]:
            return await decode_all(client, mixed_prompts(), prefix, DIRECT)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturb)
            rounds = await again_until(done, decode, colocated, "lost-")
        await until_all_connected(client, 150)
        await assert_nothing_leaked(client)
        names = [f"lost-{turn}-{i}" for turn in range(1, rounds + 1) for i in range(REQUESTS)]
        histories = [(await client.request(name)).history for name in names]
    assert any(line.event == "lost" for history in histories for line in history), said


# ---------------------------------------------------------------- two nodes


@pytest.fixture(params=["shared", "nixl", "mooncake"])
def engine(request: pytest.FixtureRequest) -> str:
    """One that can be had here."""
    name: str = request.param
    if name != "shared" and (reason := why_absent(name)):
        pytest.skip(reason)
    return name


async def test_rows_prefilled_on_a_node_are_decoded_on_another(
    model: Path, colocated: list[list[int]], tmp_path: Path, engine: str
) -> None:
    """Outputs as of workers that do both; not a byte is staged where it is decoded."""
    config = kept_as(crash_config(model, tmp_path, HOST_MEM), KV_DTYPE)
    async with running_nodes(config, tmp_path, two_and_two(engine)) as (nodes, client):
        assert await decode_all(client, mixed_prompts(), "far-") == colocated
        assert await decode_hot(client, mixed_prompts(), LONGEST, "hot-", 64) == colocated[LONGEST]
        copied = {worker: await nodes.samples(worker, COPIED, "purpose") for worker in ("w0", "w1", "w2", "w3")}
        starts = [await nodes.samples(worker, WARM_STARTS, "outcome") for worker in ("w2", "w3")]
        history = (await client.request("far-9")).history
        await assert_nothing_leaked(client)
    assert all(copied[worker]["stage"] > 0 for worker in ("w0", "w1"))
    assert all(copied[worker]["stage"] == 0 for worker in ("w2", "w3"))
    assert sum(it["warm"] for it in starts) > 0 == sum(it["refused"] for it in starts)
    assert "w2" in " ".join(line.reason for line in history) or "w3" in " ".join(line.reason for line in history)


@pytest.mark.deep
@pytest.mark.parametrize("victim", [pytest.param("w0", id="prefills"), pytest.param("w2", id="decodes")])
async def test_a_worker_killed_amid_transfers_costs_no_output(
    model: Path, colocated: list[list[int]], tmp_path: Path, victim: str
) -> None:
    """I2, I5: others take its requests on; nothing leaks, on either node. Some clients lose interest meanwhile."""
    config = kept_as(crash_config(model, tmp_path, HOST_MEM), KV_DTYPE)
    async with running_nodes(config, tmp_path, two_and_two("shared")) as (nodes, client):
        done = trio.Event()

        async def disturb() -> None:
            while not any(row.state == "TRANSFERRING" for row in (await client.requests()).rows):  # noqa: ASYNC110
                await trio.sleep(0.002)
            nodes.children[victim].signal(signal.SIGKILL)
            for i in range(3):
                await client.submit_detached([1] * 600, Sampling(400, ignore_eos=True), request_id=f"gone-{i}")
            await trio.sleep(0.05)
            for i in range(3):
                with suppress(WrongState):  # it has ended
                    await client.abort([f"gone-{i}"])
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturb)
            await again_until(done, partial(decode_all, client, mixed_prompts()), colocated, "far-")
        await assert_nothing_leaked(client)


async def test_a_coordinator_killed_amid_transfers_finds_them_again(
    model: Path, colocated: list[list[int]], tmp_path: Path
) -> None:
    """I2, I4, I5: from the journal and from what workers say that they have; pages went on travelling meanwhile."""
    config = kept_as(crash_config(model, tmp_path, HOST_MEM), KV_DTYPE)
    async with running_nodes(config, tmp_path, two_and_two("shared")) as (nodes, client):
        done = trio.Event()

        async def disturb() -> None:
            for kill in range(2):
                while sum(row.state in SENT for row in (await client.requests()).rows) < 1 + kill:  # noqa: ASYNC110
                    await trio.sleep(0.002)
                nodes.children[COORDINATOR].signal(signal.SIGKILL)
                await nodes.children[COORDINATOR].wait()
                nodes.start(COORDINATOR)
                await nodes.until_answering()
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturb)
            await again_until(done, partial(decode_all, client, mixed_prompts()), colocated, "far-")
        await nodes.until_connected(client)
        await assert_nothing_leaked(client)


async def test_pages_of_another_layout_are_refused(model: Path, tmp_path: Path) -> None:
    config = kept_as(crash_config(model, tmp_path, HOST_MEM), KV_DTYPE)
    spots = [replace(it, kv_dtype="bfloat16") if it.role == "decode" else it for it in two_and_two("shared")]
    async with running_nodes(config, tmp_path, spots) as (_, client):
        with pytest.raises(CapacityError, match=r"host pages of w\d have \d+ bytes, those of w\d \d+"):
            await client.submit([1] * 100, Sampling(8))


# ---------------------------------------------------------------- network namespaces


@pytest.fixture
def five_places() -> Iterator[list[Namespace]]:
    """A network namespace, with its address, for the coordinator and for each worker."""
    if reason := why_not():
        pytest.skip(reason)
    with namespaces(5) as found:
        yield found


@pytest.mark.parametrize("engine", ["nixl", "mooncake"], indirect=True)
async def test_workers_that_share_only_a_network(
    model: Path, colocated: list[list[int]], tmp_path: Path, engine: str, five_places: list[Namespace]
) -> None:
    """Four nodes. Commands and reports go over tcp with keys, pages by an engine; loopbacks are separate."""
    home, *places = five_places
    spots = [Spot(role, node, engine, namespace=place) for role, node, place in zip(ROLES, "abcd", places, strict=True)]
    config = kept_as(crash_config(model, tmp_path, HOST_MEM), KV_DTYPE)
    async with running_nodes(config, tmp_path, spots, home) as (nodes, client):
        for placement in (AUTO, DIRECT):
            assert await decode_all(client, mixed_prompts(), f"{placement}-", placement) == colocated
        copied = {worker: await nodes.samples(worker, COPIED, "purpose") for worker in ("w0", "w1", "w2", "w3")}
        pages = {worker: (await nodes.samples(worker, PAGES, "end"))["receiver"] for worker in ("w2", "w3")}
        await assert_nothing_leaked(client)
    assert all(copied[worker]["stage"] > 0 for worker in ("w0", "w1"))
    assert all(copied[worker]["stage"] == 0 for worker in ("w2", "w3"))
    assert all(copied[worker]["preload"] > 0 for worker in ("w2", "w3"))
    assert all(pages[worker] > 0 for worker in ("w2", "w3"))
