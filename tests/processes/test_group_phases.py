"""A rank that is killed or stopped in each phase of its group's life: every output is as in the undisturbed run, the
rank that was lost is blamed and no rank that waits for it, nothing leaks, and the group is back."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import pytest
import trio

from hisparse.client.client import Client
from hisparse.cluster import group_end
from hisparse.cluster.up import Cluster
from protocol.settings import Config
from protocol.units import PAGE_TOKENS
from tests.support.cluster_rig import (
    PATIENCE_S,
    again_until,
    assert_nothing_leaked,
    cluster_of_two,
    missed_soon,
    plant,
    standing_model,
    until_all_connected,
)
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

pytestmark = [pytest.mark.process, pytest.mark.group, pytest.mark.timeout(1_200)]

RANKS = ("w0", "w1")
#: Longer than all requests take.
ROUND_S = 20.0
OWN_LIMIT_S: Final = group_end.PEER_END_LIMIT_S
#: Phases and the rank that is lost in each: the one that meets the other ranks (rank 0), and another one.
LOST = {"start": "w1", "prompt": "w0", "decode": "w1", "exchange": "w0", "leave": "w1", "coordinator": "w1"}
#: Likewise within passes that ranks split, whose owner is w1.
LOST_IN_SPLIT = (("hear", "w0"), ("split", "w0"), ("tell", "w1"), ("split", "w1"))
SPLIT_TOKENS: Final = 24


@pytest.fixture(scope="module")
def model(run_dir: Path) -> Path:
    return standing_model(run_dir)


class Order:
    """A file that tells a worker to send itself a signal at a point of its life (tests.support.planted)."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, name: str, point: str, number: int) -> None:
        self._path.write_text(f"{name} {point} {number:d}")

    def is_there(self) -> bool:
        return self._path.exists()

    async def until_taken(self) -> None:
        with trio.fail_after(BACK_LIMIT_S):
            while self.is_there():  # noqa: ASYNC110
                await trio.sleep(0.005)


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Order:
    plant(monkeypatch, "signal-at", tmp_path / "signal")
    monkeypatch.setattr(
        group_end, "PEER_END_LIMIT_S", PATIENCE_S
    )  # a rank that is slow to end has not lost its peer yet
    return Order(tmp_path / "signal")


@contextmanager
def stopped_rank_alone_is_left(phase: str, number: int) -> Iterator[None]:
    """Give a rank that stands still at its start, before it is connected, the product's own time to end.

    Its peer ends by itself, however slowly, and is not waited for then: the limit begins with that end.
    """
    with pytest.MonkeyPatch.context() as patched:
        if phase == "start" and number == signal.SIGSTOP:
            patched.setattr(group_end, "PEER_END_LIMIT_S", OWN_LIMIT_S)
        yield


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
    if phase == "leave":
        await drain_until_taken(client, name, order)
    await order.until_taken()


async def drain_until_taken(client: Client, name: str, order: Order) -> None:
    """Again where all of its requests have ended before."""
    while order.is_there():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(client.drain, (name,), handover=True, deadline_s=30.0))
            with trio.move_on_after(ROUND_S):
                await order.until_taken()
            nursery.cancel_scope.cancel()
        if order.is_there():
            await client.undrain((name,))


def without_cache(config: Config) -> Config:
    """Prompts are computed page by page, and none is cached: what a request begins with again is its own."""
    coordinator = msgspec.structs.replace(config.coordinator, prefix_reuse="off")
    worker = msgspec.structs.replace(config.worker, pass_tokens=PAGE_TOKENS)
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


#: Phases in which requests run that are looked at behind them.
COUNTED = frozenset({"decode", "exchange", "leave"})
#: Phases of one cluster whose ranks are stopped: each is seen by its silence.
STOPPED = (("start", "decode"), ("exchange", "leave"), ("prompt", "coordinator"))


@pytest.mark.parametrize(
    ("number", "phases"),
    [
        pytest.param(signal.SIGKILL, tuple(LOST), id="killed"),
        *(pytest.param(signal.SIGSTOP, it, id=f"stopped-{it[0]}", marks=pytest.mark.deep) for it in STOPPED),
    ],
)
async def test_rank_lost_in_any_phase_changes_no_output(
    number: signal.Signals, phases: tuple[str, ...], model: Path, tmp_path: Path, order: Order
) -> None:
    config = without_cache(group_config(model, tmp_path))
    config = missed_soon(config) if number is signal.SIGSTOP else config
    async with cluster_of_two(config, tmp_path, kept=True, group_size=2) as (cluster, client, said):
        quiet = await decode_all(client, "quiet")

        async def disturb(phase: str, done: trio.Event) -> None:
            await lose(cluster, client, phase, number, order)
            done.set()
            lost_at, lost = trio.current_time(), pids(cluster)
            with stopped_rank_alone_is_left(phase, number):
                ended = await until_gone(lost)
            await until_restarted(cluster, RANKS, lost)
            await until_all_connected(client, BACK_LIMIT_S)
            back = trio.current_time() - lost_at
            print(f"{phase} {number.name}: processes gone after {ended:.2f} s, all ranks connected after {back:.1f} s")

        losses, begun_anew = dict.fromkeys(RANKS, 0), 0
        for phase in phases:
            name, told = LOST[phase], len(said)
            if phase == "prompt":
                order.write(name, phase, number)
            async with trio.open_nursery() as nursery:
                done = trio.Event()
                nursery.start_soon(disturb, phase, done)
                turns = await again_until(done, partial(decode_all, client), quiet, phase)
            last = f"{phase}{turns}-"
            ends = [line for line in said[told:] if line.startswith("group g0 ended")]
            assert f"{name} killed by SIGKILL" in ends[-1], said[told:]
            assert len(ends) == (2 if phase == "start" else 1), said[told:]
            other = next(other for other in RANKS if other != name)
            assert not [line for line in said[told:] if f"{other} hangs" in line]
            losses[other] += 1
            losses[name] += phase == "start"  # it saw the end of the other one before
            assert len(losses_in(tmp_path / f"{other}.log")) == losses[other], phase
            assert f"lost={RANKS.index(name)} " in losses_in(tmp_path / f"{other}.log")[-1], phase
            if phase in COUNTED:
                if number == signal.SIGKILL:
                    await assert_nothing_prefilled_again(client, last)
                else:  # a stopped rank may still write the last page of its requests
                    begun_anew += await count_prefilled_from_full_pages(client, last)
            await assert_nothing_leaked(client)
        assert bool(begun_anew) == (number == signal.SIGSTOP and not COUNTED.isdisjoint(phases))


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.deep)],
)
async def test_rank_lost_amid_a_split_pass_changes_no_output(
    number: signal.Signals, model: Path, tmp_path: Path, order: Order
) -> None:
    """A drained rank has no prompts: it has stripes of the other one's."""
    config = without_cache(group_config(model, tmp_path))
    config = missed_soon(config) if number is signal.SIGSTOP else config
    worker = msgspec.structs.replace(config.worker, deterministic=False, split_tokens=SPLIT_TOKENS)
    config = msgspec.structs.replace(config, worker=worker)
    async with cluster_of_two(config, tmp_path, kept=True, group_size=2) as (cluster, client, said):
        await client.drain(("w0",))
        quiet = await decode_all(client, "quiet")
        for turn, (point, name) in enumerate(LOST_IN_SPLIT):
            told, lost = len(said), pids(cluster)
            order.write(name, point, number)
            assert await decode_all(client, f"{point}-{name}") == quiet
            assert not order.is_there()
            await until_restarted(cluster, RANKS, lost)
            await until_all_connected(client, BACK_LIMIT_S)
            await client.drain(("w0",))
            ends = [line for line in said[told:] if line.startswith("group g0 ended")]
            assert [f"{name} killed by SIGKILL" in line for line in ends] == [True], said[told:]
            other = next(other for other in RANKS if other != name)
            assert f"lost={RANKS.index(name)} " in losses_in(tmp_path / f"{other}.log")[-1], turn
            await assert_nothing_leaked(client)
