"""Fault drills: trouble is caused on real processes, and what the alert waits for holds in a real Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from coordinator.client.client import Client, open_client
from coordinator.errors import WrongState
from coordinator.messages import Sampling
from tests.process_rig import Place
from tests.prometheus_rig import Server, free_port, program, prometheus, until
from tests.test_rules import alerts

#: Of 73 host pages, three of these take 66 at once and 72 at their end.
PROMPT_TOKENS = 1_220
MAX_TOKENS = 300


@pytest.mark.process
async def test_each_trouble_is_seen_by_its_alert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one cluster, one after the other: hot buffers of 128 slots for long contexts, which fill the pool; a drain; a
    worker that is killed; a coordinator that is killed, and once more. None of it is there before."""
    from worker.runners.tiny import write_tiny_checkpoint

    program("prometheus")
    write_tiny_checkpoint(tmp_path / "model")
    port = free_port()
    monkeypatch.setenv("HISPARSE_COORDINATOR_METRICS_PORT", str(port))
    place = Place(tmp_path, tmp_path / "model")
    async with place.worker() as worker, place.coordinator() as coordinator:
        jobs = {"hisparse-coordinator": [port], "hisparse-worker": [await worker.metrics_port()]}
        with prometheus(tmp_path, free_port(), jobs) as server:
            await until(lambda: server.is_up(jobs))
            await until(lambda: server.query("hisparse_link_welcomed == 1"))
            assert [it["alert"] for it in alerts() if server.query(it["expr"])] == []

            async with open_client(place.endpoint("admin"), role="admin", name="drill") as client:
                await fill(client)
                await until(seen(server, "HiSparseHostPoolNearlyFull"))
                await until(seen(server, "HiSparseHitRateCollapse"))
                await running(client, await client.submit_detached([1] * 64, Sampling(4_000, ignore_eos=True)))
                await client.drain(["w0"])
                await until(seen(server, "HiSparseDrainStuck"))
            worker.popen.kill()
            await until(seen(server, "HiSparseWorkerDown"))

            coordinator.popen.kill()
            await until(seen(server, "HiSparseCoordinatorDown"))
            async with place.coordinator():
                await until(lambda: not seen(server, "HiSparseCoordinatorDown")())
                assert not seen(server, "HiSparseCoordinatorRestarts")()
            async with place.coordinator():
                await until(seen(server, "HiSparseCoordinatorRestarts"))


async def fill(client: Client) -> None:
    """Three requests with the smallest hot buffers there are, whose prompts differ."""
    ids = [
        await client.submit_detached(
            [(seed * at * 7919 + at * 31) % 250 for at in range(PROMPT_TOKENS)], Sampling(MAX_TOKENS, ignore_eos=True)
        )
        for seed in (1, 2, 3)
    ]
    while ids:
        rows = {row.request_id: row for row in (await client.requests()).rows}
        for request_id in [it for it in ids if rows[it].state == "RUNNING"]:
            try:
                await client.resize([request_id], 128)
                ids.remove(request_id)
            except WrongState:
                await trio.sleep(0.1)
        await trio.sleep(0.1)


async def running(client: Client, request_id: str) -> None:
    """Until it is: what the others hold comes back first."""
    while (request_id, "RUNNING") not in {(it.request_id, it.state) for it in (await client.requests()).rows}:  # noqa: ASYNC110
        await trio.sleep(0.1)


def seen(server: Server, alert: str) -> Callable[[], bool]:
    """Whether what must last for it to fire holds now."""
    (expr,) = (rule["expr"] for rule in alerts() if rule["alert"] == alert)
    return lambda: bool(server.query(expr))
