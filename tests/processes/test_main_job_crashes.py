"""The main job while its processes die, stop and come back: every output as in the undisturbed run, nothing leaked.

Real processes, simulated streams with a backup that lags, a fixed batch shape (deterministic): what a crash costs is a
pause. Between the durable length and what was delivered, tokens are forced, never drawn again.
"""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from coordinator.scheduling.poison import POISON_STRIKES
from hisparse.client.client import Client
from protocol.errors import NotFound
from protocol.messages import Sampling
from tests.support.cluster_rig import (
    HEARTBEAT_LIMIT_S,
    assert_nothing_leaked,
    cluster_of_two,
    crash_config,
    lengths,
    prompts_of,
    until_all_connected,
    write_model,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

REQUESTS = 8
NEW_TOKENS = 96


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


async def decode_all(client: Client, prompts: list[list[int]], prefix: str) -> dict[int, list[int]]:
    outputs: dict[int, list[int]] = {}

    async def collect(i: int) -> None:
        sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.8, seed=i)
        stream = await client.submit(prompts[i], sampling, request_id=f"{prefix}{i}")
        outputs[i] = []
        async for tokens in stream:
            outputs[i] += tokens.tolist()

    async with trio.open_nursery() as nursery:
        for i in range(len(prompts)):
            nursery.start_soon(collect, i)
    return outputs


async def until_decoding(client: Client, prefix: str, tokens: int) -> None:
    """Until one request has more than `tokens`, or all have ended."""
    while True:
        rows = [row for row in (await client.requests()).rows if row.request_id.startswith(prefix)]
        if any(row.state == "RUNNING" and row.generated_tokens >= tokens for row in rows):
            print(lengths(rows))
            return
        if rows and all(row.state == "FINISHED" for row in rows):
            return
        await trio.sleep(0.05)


async def histories(client: Client, prefix: str) -> list[str]:
    return [line.event for i in range(REQUESTS) for line in (await client.request(f"{prefix}{i}")).history]


async def test_workers_killed_in_turn_change_no_output(model: Path, tmp_path: Path) -> None:
    """I2, I3, I5: by SIGKILL and by SIGSTOP, from which the keeper frees them by another SIGKILL."""
    prompts, dice = prompts_of(11, REQUESTS), random.Random(11)
    async with cluster_of_two(crash_config(model, tmp_path), tmp_path, kept=True) as (cluster, client, said):
        quiet = await decode_all(client, prompts, "quiet-")
        crashed: dict[int, list[int]] = {}

        async def disturb() -> None:
            for kill, number in enumerate((signal.SIGKILL, signal.SIGSTOP)):
                await until_decoding(client, "crashed-", 6 + 20 * kill)
                await trio.sleep(dice.uniform(0.0, 0.2))
                child = cluster.workers[f"w{kill}"]
                child.signal(number)
                with trio.fail_after(90):
                    while cluster.workers[child.name] is child:  # noqa: ASYNC110
                        await trio.sleep(0.1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturb)
            crashed.update(await decode_all(client, prompts, "crashed-"))
            events = await histories(client, "crashed-")
            nursery.cancel_scope.cancel()
        await assert_nothing_leaked(client)
    assert crashed == quiet
    assert {len(tokens) for tokens in quiet.values()} == {NEW_TOKENS}
    assert events.count("lost") >= 2
    assert events.count("staged") < REQUESTS + events.count("lost"), "no request was resumed"
    assert sum("killed by SIGKILL" in line for line in said) >= 2


async def test_stopped_and_continued_worker_does_no_harm(model: Path, tmp_path: Path) -> None:
    """I2: what it may still write stays quarantined, though others want it; its late reports are refused, it empties
    itself and begins anew. The pool is just large enough for the requests."""
    prompts = prompts_of(12, REQUESTS)
    async with cluster_of_two(crash_config(model, tmp_path, "6MiB"), tmp_path) as (cluster, client, _):
        quiet = await decode_all(client, prompts, "quiet-")
        crashed: dict[int, list[int]] = {}
        quarantined = 0

        async def disturb() -> None:
            nonlocal quarantined
            await until_decoding(client, "crashed-", 10)
            stopped = cluster.workers["w0"].pid
            os.kill(stopped, signal.SIGSTOP)
            for _ in range(int(4 * HEARTBEAT_LIMIT_S / 0.1)):
                await trio.sleep(0.1)
                quarantined = max(quarantined, (await client.pools())[0].quarantined)
            os.kill(stopped, signal.SIGCONT)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturb)
            crashed.update(await decode_all(client, prompts, "crashed-"))
        events = await histories(client, "crashed-")
        await until_all_connected(client, 60)
        await assert_nothing_leaked(client)
    assert crashed == quiet
    assert "lost" in events
    assert quarantined > 0


async def test_poison_alone_is_failed(model: Path, tmp_path: Path) -> None:
    """I5: the test plays the poison, by killing whatever worker has it, at once."""
    prompts, poison = prompts_of(13, REQUESTS), "crashed-5"
    async with cluster_of_two(crash_config(model, tmp_path), tmp_path, kept=True) as (cluster, client, _):
        quiet = await decode_all(client, prompts, "quiet-")
        kills = 0

        async def kill() -> None:
            nonlocal kills
            while True:
                await trio.sleep(0.01)
                with suppress(NotFound):
                    row = (await client.request(poison)).row
                    child = cluster.workers.get(row.worker)
                    if child is not None and row.state in ("PREFILLING", "READY", "RUNNING") and child.running:
                        child.signal(signal.SIGKILL)
                        kills += 1
                        await child.wait()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            crashed = await decode_all(client, prompts, "crashed-")
            nursery.cancel_scope.cancel()
        detail = await client.request(poison)
        await assert_nothing_leaked(client)
    assert detail.row.state == "FAILED"
    assert f"its worker died {POISON_STRIKES} times without its coming further" in detail.row.reason
    assert kills == POISON_STRIKES
    assert {i: tokens for i, tokens in crashed.items() if i != 5} == {i: quiet[i] for i in quiet if i != 5}
