"""The coordinator is killed at random moments while two real workers decode: nothing that was acknowledged is lost.

Workers go on decoding on the pages they hold; the coordinator that comes next replays the journal and adopts them; the
client reconnects and goes on at the position it holds. What it got must equal an undisturbed run token for token
(deterministic mode, simulated streams with lagging backups), each position once and in order (I5), and every page,
chunk and seat must be back at the end (I1, I2).
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import msgspec
import pytest
import trio

from hisparse.client.client import Client, open_client
from protocol.config import pool_path, to_environ
from protocol.errors import HiSparseError, NotFound, Unavailable, WrongState
from protocol.messages import Sampling
from protocol.settings import Config
from tests import ROOT
from tests.support import zygote
from tests.support.cluster_rig import assert_nothing_leaked, cluster_config, prompts_of, standing_model

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

REQUESTS = 6
NEW_TOKENS = 80
#: Of requests that have not ended when the coordinator is killed.
LONG_TOKENS = 380
KILLS = 2
#: A coordinator that does not come back, or a stream that stands still, fails the test after this long.
LIMIT_S = 180.0


@dataclass
class Crew:
    """The processes of a cluster, each of which can be killed and started again."""

    config: Config
    path: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str) -> None:
        command = ["coordinator"] if name == "coordinator" else ["worker", "--name", name, "--node", "n0"]
        quiet = {
            "OMP_NUM_THREADS": "1",
            "HISPARSE_COORDINATOR_METRICS_PORT": "-1",
            "HISPARSE_WORKER_METRICS_PORT": "-1",
        }
        with (self.path / f"{name}.log").open("ab") as log:
            self.running[name] = zygote.start(
                [sys.executable, "-m", "hisparse.cli", *command],
                cwd=ROOT,
                env=os.environ | to_environ(self.config) | quiet,
                stderr=log,
            )

    def kill(self, name: str) -> None:
        self.running[name].kill()
        self.running.pop(name).wait()

    def log(self, name: str) -> str:
        return (self.path / f"{name}.log").read_text()

    async def client_when(self, workers: int, state: str = "connected") -> None:
        """Until that many workers are `state`."""
        with trio.fail_after(LIMIT_S):
            while True:
                try:
                    async with open_client(self.config.cluster.client_endpoint) as client:
                        if sum(row.state == state for row in await client.workers()) == workers:
                            return
                except HiSparseError:
                    pass
                await trio.sleep(0.1)


@asynccontextmanager
async def crew_of(config: Config, path: Path, *workers: str) -> AsyncIterator[Crew]:
    crew = Crew(config, path)
    try:
        for name in ("coordinator", *workers):
            crew.start(name)
        await crew.client_when(len(workers))
        yield crew
    finally:
        for name in tuple(crew.running):
            crew.kill(name)


@pytest.fixture(scope="module")
def model(run_dir: Path) -> Path:
    return standing_model(run_dir)


async def collect(
    client: Client, name: str, prompt: Sequence[int], outputs: dict[str, list[int]], tokens: int = NEW_TOKENS
) -> None:
    stream = await client.submit(prompt, Sampling(max_tokens=tokens, ignore_eos=True), request_id=name)
    outputs[name] = []
    async for chunk in stream:
        outputs[name] += chunk.tolist()
    assert stream.ended is not None
    assert stream.ended.outcome == "FINISHED", stream.ended


async def decode_all(client: Client, prompts: Sequence[Sequence[int]], prefix: str) -> dict[str, list[int]]:
    outputs: dict[str, list[int]] = {}
    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            for i, prompt in enumerate(prompts):
                nursery.start_soon(collect, client, f"{prefix}{i}", prompt, outputs)
    return {name.removeprefix(prefix): tokens for name, tokens in outputs.items()}


async def test_killed_coordinator_loses_and_repeats_no_token(model: Path, tmp_path: Path) -> None:
    config, dice, prompts = cluster_config(model, tmp_path / "run"), random.Random(11), prompts_of(1, REQUESTS)
    async with crew_of(config, tmp_path, "w0", "w1") as crew:

        async def kill_at_random() -> None:
            for _ in range(KILLS):
                await trio.sleep(dice.uniform(0.05, 1.2))
                crew.kill("coordinator")
                await trio.sleep(dice.uniform(0.0, 0.3))
                crew.start("coordinator")
                await crew.client_when(2)

        async with open_client(config.cluster.client_endpoint, reconnect_limit_s=LIMIT_S) as client:
            quiet = await decode_all(client, prompts, "quiet-")
            outputs: dict[str, list[int]] = {}
            async with trio.open_nursery() as nursery:
                nursery.start_soon(kill_at_random)
                rounds = 0
                while crew.log("coordinator").count("worker back") < KILLS:  # until each life had work to go on with
                    rounds += 1
                    outputs = await decode_all(client, prompts, f"killed-{rounds}-")
                    assert outputs == quiet
            await assert_nothing_leaked(client)
            assert client.reconnects > 0
        assert crew.log("w0").count("welcomed") > 1
        assert set(re.findall(r"welcomed .*epoch=(\d+)", crew.log("w0"))) != set(), "adopted, not begun anew"
        assert len(set(re.findall(r"welcomed .*epoch=(\d+)", crew.log("w0")))) == 1
    assert {len(tokens) for tokens in quiet.values()} == {NEW_TOKENS}


async def start_decoding(
    nursery: trio.Nursery, client: Client, prompts: list[list[int]], outputs: dict[str, list[int]], prefix: str = ""
) -> None:
    """Collect each prompt's output in `outputs` from now on; returns once the first tokens are there."""
    for i, prompt in enumerate(prompts):
        nursery.start_soon(collect, client, f"{prefix}{i}", prompt, outputs)
    while sum(map(len, outputs.values())) < 20:  # noqa: ASYNC110
        await trio.sleep(0.01)


async def test_cluster_killed_at_once_recovers_with_a_new_pool(model: Path, tmp_path: Path) -> None:
    """A node restart: the pool file went with its processes. Prompts are prefilled again, delivered tokens forced."""
    config, prompts = cluster_config(model, tmp_path / "run"), prompts_of(2, 4)
    async with (
        crew_of(config, tmp_path, "w0") as crew,
        open_client(config.cluster.client_endpoint, reconnect_limit_s=LIMIT_S) as client,
    ):
        quiet = await decode_all(client, prompts, "quiet-")
        is_amid = False
        for turn in count(1):  # where this process has no core, requests end before the kill
            outputs: dict[str, list[int]] = {}
            async with trio.open_nursery() as nursery:
                await start_decoding(nursery, client, prompts, outputs, f"{turn}-")
                for name in ("coordinator", "w0"):
                    crew.kill(name)
                pool_path(config.worker.pool_dir, "n0").unlink()
                is_amid = all(len(tokens) < NEW_TOKENS for tokens in outputs.values())
                for name in ("coordinator", "w0"):
                    crew.start(name)
                nursery.cancel_scope.deadline = trio.current_time() + LIMIT_S
            assert {name.removeprefix(f"{turn}-"): tokens for name, tokens in outputs.items()} == quiet
            if is_amid:
                break
        await assert_nothing_leaked(client)


@pytest.mark.deep
async def test_coordinator_is_replaced_while_requests_run(model: Path, tmp_path: Path) -> None:
    """A stop with no time to finish: what runs is left to the next coordinator, and to its worker."""
    config, prompts = cluster_config(model, tmp_path / "run"), prompts_of(7, 3)
    async with (
        crew_of(config, tmp_path, "w0") as crew,
        open_client(config.cluster.client_endpoint, reconnect_limit_s=LIMIT_S) as client,
    ):
        quiet = await decode_all(client, prompts, "quiet-")
        outputs: dict[str, list[int]] = {}
        async with trio.open_nursery() as nursery:
            await start_decoding(nursery, client, prompts, outputs)
            async with open_client(config.cluster.admin_endpoint, role="admin") as admin:
                await admin.stop(deadline_s=0.0)
            stopped = crew.running.pop("coordinator")
            assert await trio.to_thread.run_sync(stopped.wait) == 0
            crew.start("coordinator")
            nursery.cancel_scope.deadline = trio.current_time() + LIMIT_S
        assert outputs == quiet
        assert "worker back" in crew.log("coordinator")
        await assert_nothing_leaked(client)


async def test_acknowledged_state_survives_a_crash(model: Path, tmp_path: Path) -> None:
    """Submissions without a client, ended outputs, holds and aborts, a drain and its end."""
    config, prompts = cluster_config(model, tmp_path / "run"), prompts_of(3, 3)
    endpoint = config.cluster.client_endpoint
    async with crew_of(config, tmp_path, "w0") as crew:
        outputs: dict[str, list[int]] = {}
        async with open_client(endpoint) as client:
            await collect(client, "ended", prompts[0], outputs, tokens=10)
        async with open_client(config.cluster.admin_endpoint, role="admin") as admin:
            sampling = Sampling(max_tokens=100, ignore_eos=True)
            await admin.drain(["w0"], handover=False, deadline_s=600.0)  # so that none of these ends
            for name in ("held", "aborted"):
                await admin.submit_detached(prompts[1], sampling, request_id=name)
            await admin.retract(["held"], hold=True)
            await admin.abort(["aborted"])
            detached = await admin.submit_detached(prompts[2], Sampling(max_tokens=30, ignore_eos=True))
        crew.kill("coordinator")
        crew.start("coordinator")
        await crew.client_when(1, state="drained")
        async with open_client(config.cluster.admin_endpoint, role="admin") as admin:
            await admin.undrain(["w0"])
        crew.kill("coordinator")
        crew.start("coordinator")
        await crew.client_when(1)
        async with open_client(config.cluster.admin_endpoint, role="admin") as admin:
            assert (await (await admin.attach("ended")).collect()).tolist() == outputs["ended"]
            again = await admin.submit(prompts[0], Sampling(max_tokens=10, ignore_eos=True), request_id="ended")
            assert (await again.collect()).tolist() == outputs["ended"], "the same submission is the same request"
            with pytest.raises(WrongState, match="another request"):
                await admin.submit(prompts[1], Sampling(max_tokens=10, ignore_eos=True), request_id="ended")
            assert len(await (await admin.attach(detached)).collect()) == 30
            stream = await admin.attach("aborted")
            await stream.collect()
            assert stream.ended is not None
            assert stream.ended.outcome == "ABORTED"
            assert (await admin.request("held")).row.held
            await admin.resume(["held"])
            assert len(await (await admin.attach("held")).collect()) == 100
            await assert_nothing_leaked(admin)


async def test_a_damaged_journal_is_refused_and_salvaged(model: Path, tmp_path: Path) -> None:
    """The end of the log is cut off while nothing runs but the worker, which goes on decoding. What is salvaged is
    decoded to its end, token for token; the worker gives up what the new journal does not know of."""
    config, prompts = cluster_config(model, tmp_path / "run"), prompts_of(9, 3)
    journal = Path(config.coordinator.journal)
    async with crew_of(config, tmp_path, "w0") as crew:
        async with open_client(config.cluster.client_endpoint) as client:
            quiet = await decode_all(client, prompts, "quiet-")
            for i, prompt in enumerate(prompts):
                await client.submit_detached(prompt, Sampling(LONG_TOKENS, ignore_eos=True), request_id=f"again-{i}")
            stream = await client.attach("again-2")
            while stream.offset < NEW_TOKENS // 2:
                await stream.__anext__()
        crew.kill("coordinator")
        log = journal.with_name(journal.name + "-wal")
        os.truncate(log, log.stat().st_size - 9_000)
        crew.start("coordinator")
        refused = crew.running.pop("coordinator")
        assert await trio.to_thread.run_sync(refused.wait) == 8
        assert "missing at its end, all acknowledged" in crew.log("coordinator")
        salvaged = await trio.run_process(
            [sys.executable, "-m", "hisparse.cli", "journal", "salvage", str(journal)], capture_stdout=True, cwd=ROOT
        )
        assert b"left: 3 live requests, 3 ended ones" in salvaged.stdout, salvaged.stdout
        crew.start("coordinator")
        await crew.client_when(1)
        async with open_client(config.cluster.client_endpoint) as client:
            with trio.fail_after(LIMIT_S):
                for i in quiet:
                    assert (await (await client.attach(f"quiet-{i}")).collect()).tolist() == quiet[i]
                    again = (await (await client.attach(f"again-{i}")).collect()).tolist()
                    assert (again[:NEW_TOKENS], len(again)) == (quiet[i], LONG_TOKENS)
            await assert_nothing_leaked(client)
        assert len(set(re.findall(r"welcomed .*epoch=(\d+)", crew.log("w0")))) == 2, "begun anew"


async def test_workers_begin_anew_without_a_journal(model: Path, tmp_path: Path) -> None:
    config = cluster_config(model, tmp_path / "run")
    config = msgspec.structs.replace(config, coordinator=msgspec.structs.replace(config.coordinator, journal="none"))
    async with (
        crew_of(config, tmp_path, "w0") as crew,
        open_client(config.cluster.client_endpoint, reconnect_limit_s=LIMIT_S) as client,
    ):
        stream = await client.submit(prompts_of(4, 1)[0], Sampling(max_tokens=400, ignore_eos=True), request_id="lost")
        await stream.__anext__()
        crew.kill("coordinator")
        crew.start("coordinator")
        with pytest.raises((NotFound, Unavailable)):
            await stream.collect()
        await crew.client_when(1)
        await assert_nothing_leaked(client)
        assert len(set(re.findall(r"welcomed .*epoch=(\d+)", crew.log("w0")))) == 2
