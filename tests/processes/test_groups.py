"""Groups of real processes: their requests go on elsewhere, they share work and pages, and ranks that cannot start are
refused. Ranks that die in each phase: test_group_phases.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatch
from itertools import count
from pathlib import Path

import msgspec
import pytest
import trio

from hisparse.client.client import Client
from hisparse.cluster.children import child_environ
from protocol.config import to_environ
from protocol.errors import EXIT_PEER_LOST
from protocol.messages import Sampling
from protocol.settings import Config
from tests.support import zygote
from tests.support.cluster_rig import (
    assert_nothing_leaked,
    cluster_of_two,
    missed_soon,
    standing_model,
    until_all_connected,
)
from tests.support.group_cluster import (
    BACK_LIMIT_S,
    NEW_TOKENS,
    assert_nothing_prefilled_again,
    decode_all,
    group_config,
    rows_of,
    states_of,
    until_decoding,
    until_drained,
)

pytestmark = [pytest.mark.process, pytest.mark.group, pytest.mark.timeout(600)]


#: For a worker to start on busy cores.
START_LIMIT_S = 240.0
PROMPT = [31 * place % 250 for place in range(600)]


@pytest.fixture(scope="module")
def model(run_dir: Path) -> Path:
    return standing_model(run_dir)


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
        await assert_nothing_prefilled_again(client, "crashed")
        assert any("w3 killed by SIGKILL" in line for line in said)
    assert crashed == quiet


async def draw(client: Client, name: str, prompt: Sequence[int]) -> tuple[str, int, list[int]]:
    """The worker that a request runs on, the tokens of its prompt that were reused, and what it draws."""
    stream = await client.submit(prompt, Sampling(max_tokens=NEW_TOKENS, ignore_eos=True), request_id=name)
    worker, drawn = "", []
    async for tokens in stream:
        worker = worker or (await client.request(name)).row.worker
        drawn += tokens.tolist()
    assert stream.ended is not None
    return worker, stream.ended.prefix_tokens, drawn


async def test_requests_move_between_ranks_and_groups_and_share_pages(model: Path, tmp_path: Path) -> None:
    """A rank is drained with handover, then a group, while requests decode. Then each rank in turn gets a prompt that
    another one has computed: all ranks of a node have one pool, and so one index of prefixes."""
    config = group_config(model, tmp_path)
    coordinator = msgspec.structs.replace(config.coordinator, prefix_reuse="own")
    config, roles = msgspec.structs.replace(config, coordinator=coordinator), ("both",) * 4
    async with cluster_of_two(config, tmp_path, roles=roles, group_size=2) as (_, client, _):
        quiet = await decode_all(client, "quiet")

        async def drain(prefix: str) -> None:
            await until_decoding(client, prefix, 8)
            for name, ranks in (("w0", {"w0"}), ("g1", {"w2", "w3"})):
                await client.drain((name,), handover=True, deadline_s=60.0)
                await until_drained(client, ranks)
                await client.undrain((name,))

        for turn in count(1):  # where this process has no core, requests end before the drain
            prefix = f"moved{turn}"
            async with trio.open_nursery() as nursery:
                nursery.start_soon(drain, prefix)
                assert await decode_all(client, prefix) == quiet
            await assert_nothing_prefilled_again(client, prefix)
            states = [await states_of(client, row.request_id) for row in await rows_of(client, prefix)]
            if max(it.count("RUNNING") for it in states) > 1:
                break

        served: list[str] = []
        texts = []
        for number in range(len(roles)):
            worker, reused, text = await draw(client, f"same-{number}", PROMPT)
            assert reused == (512 if served else 0)  # whole chunks of 256: what deterministic mode reuses
            served.append(worker)
            texts.append(text)
            if len(served) < len(roles):
                await client.drain((worker,))
        assert sorted(served) == ["w0", "w1", "w2", "w3"]
        assert texts == [texts[0]] * len(roles)
        await assert_nothing_leaked(client)


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


async def test_steps_of_ranks_are_looked_at_together(model: Path, tmp_path: Path) -> None:
    """Long requests decode until the coordinator has a hot floor for the group, the same on both ranks."""
    async with cluster_of_two(group_config(model, tmp_path), tmp_path, group_size=2) as (_, client, _):
        for number in range(2):
            sampling = Sampling(max_tokens=900, ignore_eos=True)
            await client.submit(PROMPT[:100], sampling, request_id=f"long-{number}")
        with trio.fail_after(START_LIMIT_S):
            while not all(rows := [row.hot_sizing for row in await client.workers()]):  # noqa: ASYNC110
                await trio.sleep(0.2)
        first, second = rows
        assert first == second
        assert first is not None
        assert first.observed_step_us > 0


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(it, marks=pytest.mark.deep) for it in (signal.SIGTERM, signal.SIGSTOP))],
)
async def test_a_rank_lost_during_start_is_started_again_with_its_group(
    number: signal.Signals, model: Path, tmp_path: Path
) -> None:
    """One that was told to end ends with 130, which is no end that `hisparse up` asked for."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kill_when_met, tmp_path, number)
        async with cluster_of_two(missed_soon(group_config(model, tmp_path)), tmp_path, group_size=2) as (
            cluster,
            client,
            _,
        ):
            assert {row.state for row in await client.workers()} == {"connected"}
            assert all(child.running for child in cluster.children)
    assert (tmp_path / "w1.log").read_text().count("group met") >= 2
    assert workers_of(tmp_path) == []


async def kill_when_met(runtime_dir: Path, number: signal.Signals) -> None:
    log = runtime_dir / "w1.log"
    while not log.exists() or "group met" not in log.read_text():  # noqa: ASYNC110
        await trio.sleep(0.02)
    for pid in workers_of(runtime_dir, "w1"):
        os.kill(pid, number)


def workers_of(runtime_dir: Path, name: str = "w?") -> list[int]:
    """Process numbers of the workers, or of worker `name`, of the cluster in `runtime_dir`: who writes their logs."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if fnmatch(os.readlink(process / "fd" / "2"), f"{runtime_dir}/{name}.log"):
                found.append(int(process.name))
    return found


WORKER = ("-m", "hisparse.cli", "worker")
IMPATIENT = ("-m", "tests.support.planted", "brief-meeting", "worker")


def start_rank(
    config: Config, rank: int, log: Path, command: Sequence[str] = WORKER, **changed: object
) -> subprocess.Popen[bytes]:
    own = {"name": f"w{rank}", "group": "g0", "group_rank": rank, "group_size": 2} | changed
    worker = msgspec.structs.replace(config.worker, **own)
    environ = child_environ() | to_environ(msgspec.structs.replace(config, worker=worker))
    with log.open("wb") as file:
        return zygote.start([sys.executable, *command], env=environ, stderr=file)


def meeting_at(config: Config, directory: Path) -> Config:
    worker = msgspec.structs.replace(config.worker, group_endpoint=f"ipc://{directory}/group-g0.sock")
    return msgspec.structs.replace(config, worker=worker)


def test_a_rank_alone_ends_in_time_and_names_the_one_that_is_missing(model: Path, tmp_path: Path) -> None:
    alone = start_rank(meeting_at(group_config(model, tmp_path), tmp_path), 0, tmp_path / "0.log", IMPATIENT)
    assert alone.wait(START_LIMIT_S) == EXIT_PEER_LOST
    last = (tmp_path / "0.log").read_text().splitlines()[-1]
    assert "the group did not meet" in last
    assert "of group g0 rank 1 did not come within 1 s" in last


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"seats": 3}, "worker.seats=3: rank 0 has 16"),
        pytest.param({"group_rank": 0}, "worker.group_endpoint=", marks=pytest.mark.deep),
        pytest.param({"group_size": 3}, "worker.group_size=3", marks=pytest.mark.deep),
    ],
)
async def test_ranks_that_disagree_are_refused_by_name(
    changed: dict[str, object], named: str, model: Path, tmp_path: Path
) -> None:
    """Other values are compared alike (tests/worker/group/test_hub.py). The rank that is right goes on waiting, with a
    line that says for which."""
    config = meeting_at(group_config(model, tmp_path), tmp_path)
    first = start_rank(config, 0, tmp_path / "0.log")
    try:
        with trio.fail_after(START_LIMIT_S):
            while not (tmp_path / "group-g0.sock").exists():  # noqa: ASYNC110
                await trio.sleep(0.05)
            other = start_rank(config, 1, tmp_path / "1.log", **changed)
            assert await trio.to_thread.run_sync(other.wait) == 8
            assert named in (tmp_path / "1.log").read_text()
            while "missing=1" not in (tmp_path / "0.log").read_text():  # noqa: ASYNC110
                await trio.sleep(0.05)
    finally:
        first.send_signal(signal.SIGTERM)
        assert first.wait(START_LIMIT_S) == 130
