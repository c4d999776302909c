"""Standbys of `hisparse up`: they take over from workers that die or stand still, and no output changes."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio

from basics.request_states import POISON_STRIKES
from hisparse.cluster.up import Cluster
from protocol.settings import Config
from tests.processes.test_main_job_crashes import LIMIT_S, REQUESTS, decode_all, histories, until_decoding
from tests.support.cluster_rig import (
    again_until,
    assert_nothing_leaked,
    cluster_of_two,
    crash_config,
    missed_soon,
    plant,
    prompts_of,
    until_all_connected,
    write_model,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def with_standbys(config: Config) -> Config:
    return msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, standby=1))


async def until_ready(cluster: Cluster, name: str, without: int = 0) -> int:
    """Wait until the standby of `name` is ready, another one than the process `without`; returns its number."""
    with trio.fail_after(LIMIT_S):
        while not (cluster.standbys.is_ready(name) and cluster.standbys.children[name].pid != without):  # noqa: ASYNC110
            await trio.sleep(0.05)
    return cluster.standbys.children[name].pid


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.deep)])
async def test_standby_takes_over_and_changes_no_output(model: Path, tmp_path: Path, number: signal.Signals) -> None:
    """I2, I3, I5: it has sent no hello, and writes nothing, before the exit of the worker is proved."""
    prompts, config = prompts_of(21, REQUESTS), with_standbys(crash_config(model, tmp_path))
    config = missed_soon(config) if number is signal.SIGSTOP else config
    async with cluster_of_two(config, tmp_path, kept=True) as (cluster, client, said):
        quiet, done, took_over = await decode_all(client, prompts, "quiet-"), trio.Event(), 0

        async def disturb() -> None:
            nonlocal took_over
            took_over = await until_ready(cluster, "w0")
            await until_decoding(client, "crashed-", "w0", 12)
            assert sorted(row.worker for row in await client.workers()) == ["w0", "w1"], "a standby has said hello"
            with trio.fail_after(LIMIT_S):
                while [row.standby for row in await client.workers() if row.worker == "w0"] != ["ready"]:  # noqa: ASYNC110
                    await trio.sleep(0.05)
            assert "has_pool=True has_weights=True" in (tmp_path / "w0.log").read_text()
            killed = cluster.workers["w0"]
            killed.signal(number)
            with trio.fail_after(LIMIT_S):
                while cluster.workers["w0"] is killed:  # noqa: ASYNC110
                    await trio.sleep(0.05)
            assert cluster.workers["w0"].pid == took_over
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturb)
            rounds = await again_until(done, partial(decode_all, client, prompts), quiet, "crashed-")
        await until_all_connected(client, LIMIT_S)
        assert cluster.workers["w0"].pid == took_over
        events = await histories(client, rounds)
        dying = await until_ready(cluster, "w0", without=took_over)
        cluster.standbys.children["w0"].signal(signal.SIGKILL)
        await until_ready(cluster, "w0", without=dying)
        assert await decode_all(client, prompts, "after-") == quiet
        await assert_nothing_leaked(client)
    assert "lost" in events
    if number is signal.SIGKILL:  # of a worker that is stopped less than a full page is not kept
        assert events.count("staged") < REQUESTS * rounds + events.count("lost"), "no request was resumed"
    assert "w0 killed by SIGKILL; its standby takes over in 0 s" in said
    assert "standby of w0 killed by SIGKILL; restarted in 0.5 s" in said


@pytest.mark.deep
async def test_standbys_of_a_group_take_over_together(model: Path, tmp_path: Path) -> None:
    """I2, I5: all ranks have ended before any standby is ordered, and the group meets anew."""
    prompts, config = prompts_of(17, REQUESTS), with_standbys(crash_config(model, tmp_path))
    async with cluster_of_two(config, tmp_path, kept=True, group_size=2) as (cluster, client, said):
        quiet, done = await decode_all(client, prompts, "quiet-"), trio.Event()

        async def disturb() -> None:
            waiting = {name: await until_ready(cluster, name) for name in ("w0", "w1")}
            await until_decoding(client, "crashed-", "w0", 12)
            killed = dict(cluster.workers)
            killed["w0"].signal(signal.SIGKILL)
            with trio.fail_after(LIMIT_S):
                while any(cluster.workers[name] is killed[name] for name in killed):  # noqa: ASYNC110
                    await trio.sleep(0.05)
            assert {name: child.pid for name, child in cluster.workers.items()} == waiting
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturb)
            await again_until(done, partial(decode_all, client, prompts), quiet, "crashed-")
        await until_all_connected(client, LIMIT_S)
        assert await decode_all(client, prompts, "after-") == quiet
        await assert_nothing_leaked(client)
    assert "group g0 ended: w0 killed by SIGKILL; the standbys of its ranks take over in 0 s" in said


@pytest.mark.deep
async def test_a_standby_that_fails_as_it_takes_over_says_why(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its traceback is in its log, the reason in the line about its end; a plain start follows."""
    plant(monkeypatch, "failing-loop", trigger := tmp_path / "fails")
    config = with_standbys(crash_config(model, tmp_path))
    async with cluster_of_two(config, tmp_path, kept=True) as (cluster, client, said):
        took_over = await until_ready(cluster, "w0")
        trigger.touch()
        with trio.fail_after(LIMIT_S):
            while not any(it.startswith("w0 ") and "; restarted in" in it for it in said):  # noqa: ASYNC110
                await trio.sleep(0.05)
        trigger.unlink()
        await until_all_connected(client, LIMIT_S)
        await assert_nothing_leaked(client)
    why = "w0 exited with 70: RuntimeError: planted in a turn"
    assert [it for it in said if it.startswith("w0 ")][:2] == [
        f"{why}; its standby takes over in 0 s",
        f"{why}; restarted in 1 s",
    ]
    assert cluster.workers["w0"].pid != took_over
    log = (tmp_path / "w0.log").read_text()
    assert log.count("RuntimeError: planted") >= 2
    assert "in fail" in log, "no traceback"


@pytest.mark.deep
async def test_poison_uses_up_standbys_and_is_failed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I5: takeovers are deaths like others, for the request and for the pauses."""
    prompts, poison = prompts_of(13, REQUESTS), "crashed-5"
    plant(monkeypatch, "poison", tmp_path / "poison")
    (tmp_path / "poison").write_text(poison)
    config = with_standbys(crash_config(model, tmp_path))
    async with cluster_of_two(config, tmp_path, kept=True) as (cluster, client, said):
        quiet = await decode_all(client, prompts, "quiet-")
        for name in ("w0", "w1"):
            await until_ready(cluster, name)
        crashed = await decode_all(client, prompts, "crashed-")
        detail = await client.request(poison)
        await until_all_connected(client, LIMIT_S)
        await assert_nothing_leaked(client)
    assert detail.row.state == "FAILED"
    assert f"its worker died {POISON_STRIKES} times without its coming further" in detail.row.reason
    deaths = [line for line in said if line.startswith("w") and "killed by SIGKILL" in line]
    assert len(deaths) == POISON_STRIKES
    assert any("its standby takes over" in line for line in deaths)
    assert {i: tokens for i, tokens in crashed.items() if i != 5} == {i: quiet[i] for i in quiet if i != 5}
