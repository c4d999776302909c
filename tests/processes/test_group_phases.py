"""A rank that is killed or stopped in each phase of its group's life: every output is as in the undisturbed run, the
rank that was lost is blamed and no rank that waits for it, nothing leaks, and the group is back."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio

from hisparse.client.client import Client
from hisparse.cluster import keeper, up
from hisparse.cluster.children import Child, child_environ
from hisparse.cluster.up import Cluster
from protocol.config import to_environ
from protocol.settings import Config
from protocol.units import PAGE_TOKENS
from tests.support.cluster_rig import assert_nothing_leaked, cluster_of_two, until_all_connected, write_model
from tests.support.group_cluster import (
    BACK_LIMIT_S,
    assert_nothing_prefilled_again,
    count_prefilled_from_full_pages,
    decode_all,
    group_config,
    pids,
    until_decoding,
    until_restarted,
)
from tests.support.planted import PLANTED_WHILE

pytestmark = [pytest.mark.process, pytest.mark.group, pytest.mark.timeout(1_200)]

RANKS = ("w0", "w1")
#: Phases and the rank that is lost in each: the one that meets the other ranks (rank 0), and another one.
LOST = {"start": "w1", "prompt": "w0", "decode": "w1", "exchange": "w0", "leave": "w1", "coordinator": "w1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


class Order:
    """A file that tells a worker to send itself a signal at a point of its life (tests.support.planted)."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, name: str, point: str, number: int) -> None:
        self._path.write_text(f"{name} {point} {number:d}")

    async def until_taken(self) -> None:
        with trio.fail_after(BACK_LIMIT_S):
            while self._path.exists():  # noqa: ASYNC110
                await trio.sleep(0.005)


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Order:
    start = up.start_child

    def start_planted(subcommand: str, config: Config, log_dir: Path | None) -> Child:
        if subcommand != "worker" or log_dir is None:
            return start(subcommand, config, log_dir)
        command = [sys.executable, "-m", "tests.support.planted", "signal-at", "worker", "--die-with", str(os.getpid())]
        environ = child_environ() | to_environ(config)
        return Child.start(config.worker.name, command, environ, log_dir / f"{config.worker.name}.log")

    monkeypatch.setattr(up, "start_child", start_planted)
    monkeypatch.setenv(PLANTED_WHILE, str(tmp_path / "signal"))
    monkeypatch.setattr(keeper, "STABLE_S", 0.0)  # so that each pause is the first
    return Order(tmp_path / "signal")


async def lose(cluster: Cluster, client: Client, phase: str, number: int, order: Order) -> None:
    """Bring the group to `phase`, and let its rank get the signal there."""
    name, point = LOST[phase], "decode" if phase == "coordinator" else phase
    if phase != "prompt":
        await until_decoding(client, phase, 10)
        order.write(name, point, number)
    if phase == "start":  # another rank ends first: this one is lost while the group starts again
        cluster.workers["w0"].signal(signal.SIGKILL)
    if phase == "coordinator":
        cluster.coordinator.signal(number)
    async with trio.open_nursery() as nursery:
        if phase == "leave":
            nursery.start_soon(partial(client.drain, (name,), handover=True, deadline_s=30.0))
        await order.until_taken()
        nursery.cancel_scope.cancel()


def without_cache(config: Config) -> Config:
    """Prompts are computed page by page, and none is cached: what a request begins with again is its own."""
    coordinator = msgspec.structs.replace(config.coordinator, prefix_reuse="off")
    worker = msgspec.structs.replace(config.worker, prefill_chunk_tokens=PAGE_TOKENS)
    return msgspec.structs.replace(config, coordinator=coordinator, worker=worker)


def losses_in(log: Path) -> list[str]:
    """The lines with which a rank has ended because it lost a peer: one for each of its lives."""
    return [line for line in log.read_text().splitlines() if "the group lost a rank" in line]


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def until_gone(processes: Mapping[str, int]) -> float:
    """Seconds until the last of them is gone."""
    began = trio.current_time()
    with trio.fail_after(BACK_LIMIT_S):
        while any(map(is_there, processes.values())):  # noqa: ASYNC110
            await trio.sleep(0.01)
    return trio.current_time() - began


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_rank_lost_in_any_phase_changes_no_output(
    number: signal.Signals, model: Path, tmp_path: Path, order: Order
) -> None:
    config = without_cache(group_config(model, tmp_path))
    async with cluster_of_two(config, tmp_path, kept=True, group_size=2) as (cluster, client, said):
        quiet = await decode_all(client, "quiet")

        async def disturb(phase: str) -> None:
            await lose(cluster, client, phase, number, order)
            lost_at, lost = trio.current_time(), pids(cluster)
            ended = await until_gone(lost)
            await until_restarted(cluster, RANKS, lost)
            await until_all_connected(client, BACK_LIMIT_S)
            back = trio.current_time() - lost_at
            print(f"{phase} {number.name}: processes gone after {ended:.2f} s, all ranks connected after {back:.1f} s")

        losses, begun_anew = dict.fromkeys(RANKS, 0), 0
        for phase, name in LOST.items():
            told = len(said)
            if phase == "prompt":
                order.write(name, phase, number)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(disturb, phase)
                assert await decode_all(client, phase) == quiet, phase
            ends = [line for line in said[told:] if line.startswith("group g0 ended")]
            assert f"{name} killed by SIGKILL" in ends[-1], said[told:]
            assert len(ends) == (2 if phase == "start" else 1), said[told:]
            other = next(other for other in RANKS if other != name)
            assert not [line for line in said[told:] if f"{other} hangs" in line]
            losses[other] += 1
            losses[name] += phase == "start"  # it saw the end of the other one before
            assert len(losses_in(tmp_path / f"{other}.log")) == losses[other], phase
            assert f"lost={RANKS.index(name)} " in losses_in(tmp_path / f"{other}.log")[-1], phase
            if phase in ("decode", "exchange", "leave"):
                if number == signal.SIGKILL:
                    await assert_nothing_prefilled_again(client, phase)
                else:  # a stopped rank may still write the last page of its requests
                    begun_anew += await count_prefilled_from_full_pages(client, phase)
            await assert_nothing_leaked(client)
        assert bool(begun_anew) == (number == signal.SIGSTOP)
