"""The main job while its processes die, stop and come back: every output as in the undisturbed run, nothing leaked.

Real processes, simulated streams with a backup that lags, a fixed batch shape (deterministic): what a crash costs is a
pause. Between the durable length and what was delivered, tokens are forced, never drawn again.
"""

from __future__ import annotations

import os
import random
import signal
from functools import partial
from pathlib import Path

import pytest
import trio

from basics.request_states import POISON_STRIKES
from hisparse.client.client import Client
from protocol.messages import Sampling
from tests.support.cluster_rig import (
    HEARTBEAT_LIMIT_S,
    KV_DTYPE,
    again_until,
    assert_nothing_leaked,
    cluster_of_two,
    crash_config,
    kept_as,
    lengths,
    missed_soon,
    plant,
    prompts_of,
    standing_model,
    until_all_connected,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

REQUESTS = 8
NEW_TOKENS = 40
#: Of a worker's way back, on busy cores.
LIMIT_S = 150.0
#: How long pages stay quarantined while requests wait for pages.
OTHERS_WANT_S = 2.0


@pytest.fixture(scope="module")
def model(run_dir: Path) -> Path:
    return standing_model(run_dir)


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


async def until_decoding(client: Client, prefix: str, worker: str, tokens: int) -> None:
    """Until a request on `worker` has `tokens`, or more."""
    while True:
        rows = [row for row in (await client.requests()).rows if row.request_id.startswith(prefix)]
        if any((row.state, row.worker) == ("RUNNING", worker) and row.generated_tokens >= tokens for row in rows):
            print(lengths(rows))
            return
        await trio.sleep(0.05)


async def histories(client: Client, rounds: int) -> list[str]:
    names = [f"crashed-{turn}-{i}" for turn in range(1, rounds + 1) for i in range(REQUESTS)]
    return [line.event for name in names for line in (await client.request(name)).history]


async def test_workers_killed_in_turn_change_no_output(model: Path, tmp_path: Path) -> None:
    """I2, I3, I5: by SIGKILL and by SIGSTOP, from which the keeper frees them by another SIGKILL."""
    prompts, dice = prompts_of(11, REQUESTS), random.Random(11)
    config = missed_soon(kept_as(crash_config(model, tmp_path), KV_DTYPE))
    async with cluster_of_two(config, tmp_path, kept=True) as (cluster, client, said):
        quiet, done = await decode_all(client, prompts, "quiet-"), trio.Event()

        async def disturb() -> None:
            for kill, number in enumerate((signal.SIGKILL, signal.SIGSTOP)):
                await until_decoding(client, "crashed-", f"w{kill}", 6 + 12 * kill)
                await trio.sleep(dice.uniform(0.0, 0.2))
                child = cluster.workers[f"w{kill}"]
                child.signal(number)
                if kill:
                    done.set()
                with trio.fail_after(LIMIT_S):
                    while cluster.workers[child.name] is child:  # noqa: ASYNC110
                        await trio.sleep(0.1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturb)
            rounds = await again_until(done, partial(decode_all, client, prompts), quiet, "crashed-")
        events = await histories(client, rounds)
        await assert_nothing_leaked(client)
    assert {len(tokens) for tokens in quiet.values()} == {NEW_TOKENS}
    assert events.count("lost") >= 2
    assert events.count("staged") < REQUESTS * rounds + events.count("lost"), "no request was resumed"
    assert sum("killed by SIGKILL" in line for line in said) >= 2


@pytest.mark.deep
async def test_stopped_and_continued_worker_does_no_harm(model: Path, tmp_path: Path) -> None:
    """I2: what it may still write stays quarantined, though others want it; its late reports are refused, it empties
    itself and begins anew. The pool is just large enough for the requests."""
    prompts, quarantined = prompts_of(12, REQUESTS), 0
    config = missed_soon(kept_as(crash_config(model, tmp_path, "3MiB"), KV_DTYPE))
    async with cluster_of_two(config, tmp_path) as (cluster, client, _):
        quiet, done = await decode_all(client, prompts, "quiet-"), trio.Event()

        async def disturb() -> None:
            nonlocal quarantined
            stopped = cluster.workers["w0"].pid
            while not quarantined:  # else its requests had ended before
                await until_decoding(client, "crashed-", "w0", 10)
                os.kill(stopped, signal.SIGSTOP)
                with trio.move_on_after(3 * HEARTBEAT_LIMIT_S):
                    while not quarantined:
                        await trio.sleep(0.1)
                        quarantined = (await client.pools())[0].quarantined
                    await trio.sleep(OTHERS_WANT_S)
                os.kill(stopped, signal.SIGCONT)
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturb)
            rounds = await again_until(done, partial(decode_all, client, prompts), quiet, "crashed-")
        events = await histories(client, rounds)
        await until_all_connected(client, LIMIT_S)
        await assert_nothing_leaked(client)
    assert "lost" in events
    assert quarantined > 0


@pytest.mark.deep
async def test_poison_alone_is_failed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I5: of a request that ends its worker each time that it is admitted."""
    prompts, poison = prompts_of(13, REQUESTS), "crashed-5"
    plant(monkeypatch, "poison", tmp_path / "poison")
    (tmp_path / "poison").write_text(poison)
    async with cluster_of_two(kept_as(crash_config(model, tmp_path), KV_DTYPE), tmp_path, kept=True) as (
        _,
        client,
        said,
    ):
        quiet = await decode_all(client, prompts, "quiet-")
        crashed = await decode_all(client, prompts, "crashed-")
        detail = await client.request(poison)
        await until_all_connected(client, LIMIT_S)
        await assert_nothing_leaked(client)
    assert detail.row.state == "FAILED"
    assert f"its worker died {POISON_STRIKES} times without its coming further" in detail.row.reason
    assert sum("killed by SIGKILL" in line for line in said) == POISON_STRIKES
    assert {i: tokens for i, tokens in crashed.items() if i != 5} == {i: quiet[i] for i in quiet if i != 5}
