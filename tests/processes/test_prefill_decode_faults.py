"""What may fail between a prefill and a decode node, once each with real processes: outputs stay those of a run that
nothing disturbs, and every page comes back (I1). Faults are planted by tests/support/faulty_worker.py; the rest is the
cluster's own doing.

I2: pages go to another owner when nothing can land in them. I5: each output once and whole, or aborted. I8: nothing is
waited for without end. Workers are audited all the time.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import trio

from hisparse.client.client import Client
from protocol.messages import Sampling
from protocol.units import pages_for
from tests.support.cluster_rig import (
    KV_DTYPE,
    again_until,
    assert_nothing_leaked,
    crash_config,
    kept_as,
    missed_soon,
    standing_model,
)
from tests.support.nodes_rig import Nodes, Spot, colocated_outputs, decode_all, mixed_prompts, running_nodes
from tests.support.planted import PLANTED_WHILE
from tests.worker.transfer.test_engines import why_absent

pytestmark = [pytest.mark.pd, pytest.mark.process, pytest.mark.timeout(600)]

#: One token, page borders, and prompts of many pages.
PROMPTS = mixed_prompts()
#: Some 80 pages a node: each has many owners in a run.
HOST_MEM = "4MiB"
#: How long what a child has done may take to be in its log.
LIMIT_S = 150.0


@pytest.fixture(scope="module")
def model(run_dir: Path) -> Path:
    return standing_model(run_dir)


@pytest.fixture(scope="module")
def undisturbed(model: Path, run_dir: Path) -> list[list[int]]:
    """What workers that do both say."""
    return colocated_outputs(model, run_dir)


@pytest.fixture(params=["shared", "nixl"])
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name != "shared" and (reason := why_absent(name)):
        pytest.skip(reason)
    return name


def faulty(engine: str, *, prefill: Sequence[str] = ("",), decode: str = "") -> list[Spot]:
    """Workers with their faults, "" for none: some that prefill, w0, w1, ..., and a last one that decodes."""
    return [
        *(Spot("prefill", "a", engine, fault=fault) for fault in prefill),
        Spot("decode", "b", engine, fault=decode),
    ]


async def said(nodes: Nodes, words: str) -> list[str]:
    """Which children say `words`; waits for one."""
    with trio.fail_after(LIMIT_S):
        while not (found := [name for name in nodes.children if words in nodes.said(name)]):  # noqa: ASYNC110
            await trio.sleep(0.02)
    return found


async def received(nodes: Nodes, metric: str) -> float:
    """What the decode worker, the last one, has counted."""
    return (await nodes.samples(f"w{len(nodes.spots) - 1}", f"hisparse_transfer_{metric}_total", "end"))["receiver"]


@pytest.mark.deep
async def test_refusing_decode_node_is_asked_again(
    model: Path, undisturbed: list[list[int]], tmp_path: Path, engine: str
) -> None:
    config = kept_as(crash_config(model, tmp_path, HOST_MEM), KV_DTYPE)
    async with running_nodes(config, tmp_path, faulty(engine, decode="refuse")) as (nodes, client):
        assert await decode_all(client, PROMPTS, "far-") == undisturbed
        assert await said(nodes, "planted: transfer") == ["w1"]
        await assert_nothing_leaked(client)


@pytest.mark.deep
async def test_timed_out_transfer_begins_anew(
    model: Path, undisturbed: list[list[int]], tmp_path: Path, engine: str
) -> None:
    """I8: some whose transfers are never answered, some whose pages are never acknowledged."""
    config = kept_as(crash_config(model, tmp_path, HOST_MEM), KV_DTYPE)
    async with running_nodes(config, tmp_path, faulty(engine, prefill=["impatient"], decode="mute")) as (nodes, client):
        assert await decode_all(client, PROMPTS, "far-") == undisturbed
        assert await said(nodes, "planted: Ready of transfer") == ["w1"]
        assert await said(nodes, "planted: Checked of transfer") == ["w1"]
        assert "w0" in await said(nodes, "did not answer within 4 s")
        assert "w0" in await said(nodes, "not verified within 4 s")
        await assert_nothing_leaked(client)


async def test_abort_during_a_transfer_leaks_nothing(
    model: Path, undisturbed: list[list[int]], tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No page is verified before the last abort."""
    config, unchecked = kept_as(crash_config(model, tmp_path, HOST_MEM), KV_DTYPE), tmp_path / "unchecked"
    unchecked.touch()
    monkeypatch.setenv(PLANTED_WHILE, str(unchecked))
    async with running_nodes(config, tmp_path, faulty(engine, decode="slow")) as (nodes, client):
        gone = [await client.submit([1 + i] * 640, Sampling(40), request_id=f"gone-{i}") for i in range(3)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(abort_amid_transfer, client, [stream.request_id for stream in gone], unchecked)
            assert await decode_all(client, PROMPTS, "far-") == undisturbed
        for stream in gone:
            await stream.collect()
        assert [stream.ended.outcome for stream in gone if stream.ended] == ["ABORTED"] * 3
        assert await received(nodes, "ended_early") >= 1
        await assert_nothing_leaked(client)


async def abort_amid_transfer(client: Client, names: list[str], unchecked: Path) -> None:
    left = set(names)
    while left:
        for name in list(left):
            if (await client.request(name)).row.state == "TRANSFERRING":
                await client.abort([name])
                left.remove(name)
        await trio.sleep(0.005)
    unchecked.unlink()  # noqa: ASYNC240


@pytest.mark.deep
async def test_repeated_messages_take_effect_once(
    model: Path, undisturbed: list[list[int]], tmp_path: Path, engine: str
) -> None:
    """Pages written and verified, transfers begun, stopped and ended, memory released."""
    config = kept_as(crash_config(model, tmp_path, HOST_MEM), KV_DTYPE)
    async with running_nodes(config, tmp_path, faulty(engine, prefill=["twice"], decode="twice")) as (nodes, client):
        assert await decode_all(client, PROMPTS, "far-") == undisturbed
        arrived = await received(nodes, "pages")
        assert 0 < arrived <= sum(pages_for(len(prompt)) for prompt in PROMPTS)  # fewer: some end by their first token
        await assert_nothing_leaked(client)


@pytest.mark.deep
async def test_corrupted_pages_are_resent_then_given_up(
    model: Path, undisturbed: list[list[int]], tmp_path: Path, engine: str
) -> None:
    """A page that was spoilt once arrives the second time; a prompt whose pages always are begins anew."""
    config = kept_as(crash_config(model, tmp_path, HOST_MEM), KV_DTYPE)
    async with running_nodes(config, tmp_path, faulty(engine, decode="flip")) as (nodes, client):
        assert await decode_all(client, PROMPTS, "far-") == undisturbed
        assert await said(nodes, "spoilt") == ["w1"]
        assert "w0" in await said(nodes, "wrong checksum 3 times")
        assert await received(nodes, "refused_units") >= 4
        await assert_nothing_leaked(client)


async def test_prefill_worker_dies_during_a_write(
    model: Path, undisturbed: list[list[int]], tmp_path: Path, engine: str
) -> None:
    """I2: what is left of it in the network lands nowhere. Its next life serves."""
    config = kept_as(crash_config(model, tmp_path, HOST_MEM), KV_DTYPE)
    async with running_nodes(config, tmp_path, faulty(engine, prefill=["die", ""])) as (nodes, client):
        assert await decode_all(client, PROMPTS, "far-") == undisturbed
        await said(nodes, "planted: SIGKILL amid transfer")
        await nodes.children["w0"].wait()
        nodes.spots = faulty(engine, prefill=["", ""])
        nodes.start("w0")
        await nodes.until_connected(client)
        assert await decode_all(client, PROMPTS, "again-") == undisturbed
        await assert_nothing_leaked(client)


@pytest.mark.deep
async def test_late_write_reaches_no_other_request(
    model: Path, undisturbed: list[list[int]], tmp_path: Path, engine: str
) -> None:
    """I2, SGLang #24578: a prefill worker stops with one write begun and others queued. Its transfers are revoked, its
    pages at the decode node get other owners, many times over; then it goes on, while others decode.

    Where its endpoint is left open instead, other requests say other things."""
    config = missed_soon(kept_as(crash_config(model, tmp_path, HOST_MEM), KV_DTYPE))
    async with running_nodes(config, tmp_path, faulty(engine, prefill=["halt", ""])) as (nodes, client):
        assert await decode_all(client, PROMPTS, "far-") == undisturbed
        await said(nodes, "planted: SIGSTOP amid transfer")
        with trio.fail_after(LIMIT_S):
            while engine != "shared" and not await received(nodes, "shut_out"):  # noqa: ASYNC110
                await trio.sleep(0.1)
        done = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(go_on_amid_others, nodes, client, done)
            await again_until(done, partial(decode_all, client, PROMPTS), undisturbed, "again-")
        await nodes.until_connected(client)
        assert await decode_all(client, PROMPTS, "after-") == undisturbed
        await assert_nothing_leaked(client)


async def go_on_amid_others(nodes: Nodes, client: Client, done: trio.Event) -> None:
    while sum(row.state == "RUNNING" for row in (await client.requests()).rows) < 4:  # noqa: ASYNC110
        await trio.sleep(0.005)
    nodes.children["w0"].signal(signal.SIGCONT)
    done.set()
