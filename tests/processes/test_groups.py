"""Groups of real processes while their ranks die, stop and come back: every output as in the undisturbed run, the right
rank is blamed, nothing leaks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio

from hisparse.client.client import Client
from hisparse.cluster.children import child_environ
from hisparse.cluster.up import Cluster
from protocol.config import to_environ
from protocol.errors import HiSparseError
from protocol.messages import Sampling
from protocol.settings import Config
from tests.support.cluster_rig import (
    assert_nothing_leaked,
    cluster_of_two,
    crash_config,
    prompts_of,
    until_all_connected,
    write_model,
)

pytestmark = [pytest.mark.process, pytest.mark.group, pytest.mark.timeout(600)]

REQUESTS = 6
NEW_TOKENS = 48
#: Time for a group to be restarted, and to answer.
BACK_LIMIT_S = 90.0

Disturb = Callable[[Cluster, Client], Awaitable[None]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def group_config(model: Path, runtime_dir: Path) -> Config:
    config = crash_config(model, runtime_dir)
    return msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, stream_backend="inline"))


async def decode_all(client: Client, prefix: str) -> dict[int, list[int]]:
    prompts, outputs = prompts_of(21, REQUESTS), {}

    async def collect(number: int) -> None:
        sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.8, seed=number)
        stream = await client.submit(prompts[number], sampling, request_id=f"{prefix}-{number}")
        outputs[number] = [token async for tokens in stream for token in tokens.tolist()]

    async with trio.open_nursery() as nursery:
        for number in range(REQUESTS):
            nursery.start_soon(collect, number)
    return outputs


async def until_decoding(client: Client, prefix: str, tokens: int) -> None:
    while not any(  # noqa: ASYNC110
        row.request_id.startswith(prefix) and row.generated_tokens >= tokens for row in (await client.requests()).rows
    ):
        await trio.sleep(0.02)


async def until_restarted(cluster: Cluster, names: tuple[str, ...], before: dict[str, int]) -> float:
    """Seconds until all of `names` are other processes."""
    began = trio.current_time()
    with trio.fail_after(BACK_LIMIT_S):
        while any(cluster.workers[name].pid == before[name] for name in names):  # noqa: ASYNC110
            await trio.sleep(0.05)
    return trio.current_time() - began


def pids(cluster: Cluster) -> dict[str, int]:
    return {name: child.pid for name, child in cluster.workers.items()}


async def test_ranks_that_die_or_stop_change_no_output(model: Path, tmp_path: Path) -> None:
    """Killed in a prompt round and while decoding, stopped while decoding, and killed amid a drain; the rank that died
    or stopped is blamed, and no rank that waits for it."""
    config = group_config(model, tmp_path)
    async with cluster_of_two(config, tmp_path, kept=True, group_size=2) as (cluster, client, said):
        quiet = await decode_all(client, "quiet")

        async def disturbed(name: str, disturb: Disturb, blamed: str) -> None:
            before, told = pids(cluster), len(said)
            async with trio.open_nursery() as nursery:

                async def play() -> None:
                    await disturb(cluster, client)
                    took_s = await until_restarted(cluster, ("w0", "w1"), before)
                    await until_all_connected(client, BACK_LIMIT_S)
                    print(f"{name}: restarted after {took_s:.1f} s")

                nursery.start_soon(play)
                assert await decode_all(client, name) == quiet
            ends = [line for line in said[told:] if "ended" in line or "hangs" in line]
            assert blamed in " ".join(ends), said[told:]
            await assert_nothing_leaked(client)

        def kill(rank: int, number: signal.Signals, tokens: int, prefix: str) -> Disturb:
            async def disturb(cluster: Cluster, client: Client) -> None:
                if tokens:
                    await until_decoding(client, prefix, tokens)
                else:
                    await trio.sleep(0.3)
                cluster.workers[f"w{rank}"].signal(number)

            return disturb

        async def drain_and_kill(cluster: Cluster, client: Client) -> None:
            await until_decoding(client, "drain", 8)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(client.drain, ("w0",), handover=True, deadline_s=30.0))
                await trio.sleep(0.1)
                cluster.workers["w1"].signal(signal.SIGKILL)
                nursery.cancel_scope.cancel()

        await disturbed("prompt", kill(1, signal.SIGKILL, 0, "prompt"), "w1 killed by SIGKILL")
        await disturbed("decode", kill(0, signal.SIGKILL, 10, "decode"), "w0 killed by SIGKILL")
        await disturbed("stopped", kill(1, signal.SIGSTOP, 10, "stopped"), "w1 hangs")
        await disturbed("drain", drain_and_kill, "w1 killed by SIGKILL")
    log = (tmp_path / "w0.log").read_text()
    assert "the group lost a rank" in log
    assert {len(tokens) for tokens in quiet.values()} == {NEW_TOKENS}


async def test_requests_of_a_dead_group_continue_on_another_at_once(model: Path, tmp_path: Path) -> None:
    """Two groups, one coordinator that dies too. What was staged is not prefilled again."""
    config, roles = group_config(model, tmp_path), ("both",) * 4
    async with cluster_of_two(config, tmp_path, kept=True, roles=roles, group_size=2) as (cluster, client, said):
        quiet = await decode_all(client, "quiet")
        crashed: dict[int, list[int]] = {}

        async def disturb() -> None:
            await until_decoding(client, "crashed", 10)
            cluster.workers["w3"].signal(signal.SIGKILL)
            cluster.coordinator.signal(signal.SIGKILL)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturb)
            crashed = await decode_all(client, "crashed")
        await until_all_connected(client, BACK_LIMIT_S)
        await assert_nothing_leaked(client)
        assert any("w3 killed by SIGKILL" in line for line in said)
    assert crashed == quiet


async def test_groups_of_one_role_each_share_the_work_and_stop_cleanly(model: Path, tmp_path: Path) -> None:
    """A group prefills, another one decodes. Stopped together, no rank takes the end of another for a loss."""
    async with cluster_of_two(group_config(model, tmp_path), tmp_path) as (_, client, _):
        alone = await decode_all(client, "alone")
    apart = tmp_path / "apart"
    apart.mkdir(mode=0o700)
    roles = ("prefill", "prefill", "decode", "decode")
    async with cluster_of_two(group_config(model, apart), apart, roles=roles, group_size=2) as (_, client, _):
        assert await decode_all(client, "apart") == alone
        await assert_nothing_leaked(client)
    for number in range(4):
        log = (apart / f"w{number}.log").read_text()
        assert "lost a rank" not in log
        assert "worker.process stopped" in log


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
async def test_a_rank_lost_during_start_ends_the_start_and_leaves_no_process(
    number: signal.Signals, model: Path, tmp_path: Path
) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(HiSparseError, match="during start")):
        await start_with_a_loss(group_config(model, tmp_path), tmp_path, number)
    assert workers_of(tmp_path) == []


async def start_with_a_loss(config: Config, tmp_path: Path, number: signal.Signals) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kill_when_met, tmp_path, number)
        async with cluster_of_two(config, tmp_path, group_size=2):
            pytest.fail("the group started")


async def kill_when_met(runtime_dir: Path, number: signal.Signals) -> None:
    log = runtime_dir / "w1.log"
    while not log.exists() or "group met" not in log.read_text():  # noqa: ASYNC110
        await trio.sleep(0.02)
    for pid in workers_of(runtime_dir, "w1"):
        os.kill(pid, number)


def workers_of(runtime_dir: Path, name: str = "") -> list[int]:
    """Process numbers of the workers, or of worker `name`, of the cluster in `runtime_dir`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environ = (process / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        ours = f"HISPARSE_CLUSTER_RUNTIME_DIR={runtime_dir}" in environ
        if ours and any(it.startswith(f"HISPARSE_WORKER_NAME={name}") for it in environ):
            found.append(int(process.name))
    return found


def start_rank(config: Config, rank: int, log: Path, **changed: object) -> subprocess.Popen[bytes]:
    own = {"name": f"w{rank}", "group": "g0", "group_rank": rank, "group_size": 2} | changed
    worker = msgspec.structs.replace(config.worker, **own)
    environ = child_environ() | to_environ(msgspec.structs.replace(config, worker=worker))
    with log.open("wb") as file:
        return subprocess.Popen([sys.executable, "-m", "hisparse.cli", "worker"], env=environ, stderr=file)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"seats": 3}, "worker.seats=3: rank 0 has 16"),
        ({"group_rank": 0}, "worker.group_endpoint="),
        ({"group_size": 3}, "worker.group_size=3"),
    ],
)
async def test_ranks_that_disagree_are_refused_by_name(
    changed: dict[str, object], named: str, model: Path, tmp_path: Path
) -> None:
    """Other values are compared alike (tests/worker/group/test_hub.py). The rank that is right goes on waiting, with a
    line that says for which."""
    config = group_config(model, tmp_path)
    endpoint = f"ipc://{tmp_path}/group-g0.sock"
    config = msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, group_endpoint=endpoint))
    first = start_rank(config, 0, tmp_path / "0.log")
    try:
        with trio.fail_after(60):
            while not (tmp_path / "group-g0.sock").exists():  # noqa: ASYNC110
                await trio.sleep(0.05)
            other = start_rank(config, 1, tmp_path / "1.log", **changed)
            assert await trio.to_thread.run_sync(other.wait) == 8
            assert named in (tmp_path / "1.log").read_text()
            while "missing=1" not in (tmp_path / "0.log").read_text():  # noqa: ASYNC110
                await trio.sleep(0.05)
    finally:
        first.send_signal(signal.SIGTERM)
        assert first.wait(30) == 130
