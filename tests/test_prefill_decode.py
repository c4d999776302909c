"""Prefill and decode in different processes: two workers compute prompts, two others decode them, over one host pool.

Deterministic, so outputs are those of workers that do both; killed and stopped in the middle, too.
"""

from __future__ import annotations

import http.client
import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from coordinator.client.client import Client
from coordinator.messages import AUTO, DIRECT, Sampling
from tests.cluster_rig import (
    assert_nothing_leaked,
    cluster_of_two,
    crash_config,
    prompts_of,
    until_all_connected,
    write_model,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

REQUESTS = 64
ROLES = ("prefill", "prefill", "decode", "decode")
HOST_MEM = "48MiB"


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
