"""Two ranks of one process: they meet, wake each other and blame the one that is awaited, never one that waits."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from metrics.state import WorkerCounters
from protocol.errors import EXIT_PEER_LOST, ConfigError
from protocol.settings import ClusterSettings, Config, CoordinatorSettings, WorkerSettings
from tests.support.limits import HANG_LIMIT_S
from worker.group import control as control_module
from worker.group import exchange as exchange_module
from worker.group import group as group_module
from worker.group.control import Control, PeersMissingError
from worker.group.group import Group


def config_of(directory: Path, rank: int, heartbeat_limit_s: float = HANG_LIMIT_S) -> Config:
    return Config(
        cluster=ClusterSettings(runtime_dir=str(directory)),
        coordinator=CoordinatorSettings(heartbeat_limit_s=heartbeat_limit_s),
        worker=WorkerSettings(
            name=f"w{rank}",
            group="g0",
            group_rank=rank,
            group_size=2,
            group_endpoint=f"ipc://{directory}/group-g0.sock",
        ),
    )


class Ended(SystemExit):
    """In place of the end of the process."""


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """Names of control threads and the code with which each would have ended its process."""
    found: list[tuple[str, int]] = []
    threads: list[threading.Thread] = []

    def exit_thread(code: int) -> None:
        threads.append(threading.current_thread())
        found.append((threads[-1].name, code))
        raise Ended

    monkeypatch.setattr(os, "_exit", exit_thread)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    yield found
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(HANG_LIMIT_S)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Control, Control]]:
    tmp_path.chmod(0o700)
    yield (pair := meet(tmp_path))
    for control in pair:
        control.is_done = lambda: True
    for control in pair:
        control.close()


def meet(directory: Path, heartbeat_limit_s: float = HANG_LIMIT_S) -> tuple[Control, Control]:
    pair = (
        Control(config_of(directory, 0, heartbeat_limit_s), {}),
        Control(config_of(directory, 1, heartbeat_limit_s), {}),
    )
    pair[1]._thread.name = "rank 1"
    other = threading.Thread(target=pair[1].join)
    other.start()
    pair[0].join()
    other.join(HANG_LIMIT_S)
    return pair


def until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + HANG_LIMIT_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def test_ranks_meet_under_one_incarnation_and_share_a_store(pair: tuple[Control, Control]) -> None:
    zero, one = pair
    assert zero.incarnation == one.incarnation > 1_600_000_000_000
    assert [member.worker for member in one.members] == ["w0", "w1"]
    threading.Timer(0.2, lambda: zero.set("address", b"here")).start()
    assert one.get("address") == b"here"


@pytest.mark.parametrize(("rank", "missing"), [(0, "rank 1"), (1, "rank 0")])
def test_a_group_that_never_completes_is_refused_with_the_rank_that_is_missing(
    rank: int, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    control = Control(config_of(tmp_path, rank), {})

    def lower_limit() -> None:
        until(lambda: rank == 1 or control._missing == (1,))  # rank 0 tells itself
        monkeypatch.setattr(control_module, "MEET_LIMIT_S", 1.5)

    lowering = threading.Thread(target=lower_limit)
    lowering.start()
    with pytest.raises(PeersMissingError, match=f"of group g0 {missing} did not come within 1.5 s"):
        control.join()
    lowering.join()
    control.close()
    control._thread.join(HANG_LIMIT_S)
    assert not control._thread.is_alive()


def test_a_wake_reaches_all_ranks(pair: tuple[Control, Control]) -> None:
    woken = threading.Event()
    pair[0].on_wake = woken.set
    pair[1].wake(7)
    assert woken.wait(HANG_LIMIT_S)
    until(lambda: pair[1].woken_at == pair[0].woken_at == 7)


def test_a_rank_that_leaves_ends_the_other_unless_that_needs_no_peer(
    pair: tuple[Control, Control], exits: list[tuple[str, int]]
) -> None:
    zero, one = pair
    zero.is_done = lambda: True
    one.leave()
    until(lambda: zero._lost is not None)
    time.sleep(1.0)
    assert exits == []
    zero.is_done = lambda: False
    until(lambda: exits == [("group", EXIT_PEER_LOST)])


def test_the_awaited_rank_is_named_and_the_loop_that_waits_goes_on_beating(pair: tuple[Control, Control]) -> None:
    zero, one = pair
    zero.counters, one.counters = WorkerCounters(), WorkerCounters()
    zero.progress.launched = one.progress.launched = 5
    zero.progress.entered, one.progress.entered = 9, 8
    zero.progress.waits_since = time.monotonic() - 2.0
    until(lambda: zero.counters is not None and zero.counters.awaits == "w1")
    until(lambda: zero.counters is not None and zero.counters.beats > 3)
    assert (one.counters.beats, one.counters.awaits) == (0, "")
    one.progress.entered = 9
    zero.progress.end_wait()
    until(lambda: zero.counters is not None and zero.counters.awaits == "")


def test_a_rank_without_progress_is_lost_after_two_heartbeat_limits(
    tmp_path: Path, exits: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(control_module, "silent", lambda *_: None)  # a busy machine may keep ranks from beating so long
    zero, one = meet(tmp_path, heartbeat_limit_s=0.75)
    one.is_done = lambda: True
    for control in (zero, one):
        control.progress.turns, control.progress.launched = True, 5
    zero.progress.entered, one.progress.entered = 9, 8
    zero.progress.waits_since = began = time.monotonic()
    until(lambda: exits == [("group", EXIT_PEER_LOST)])
    assert time.monotonic() - began > 1.5
    assert zero._lost is not None
    assert "no progress" in zero._lost[1]
    one.close()


def test_a_rank_that_stood_still_reads_before_it_judges(
    pair: tuple[Control, Control], exits: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 was not silent meanwhile: what it said is there."""
    one, stood = pair[1], threading.Event()
    has_news = one._sockets.has_news
    until(lambda: bool(one._standings))

    def stand_still() -> bool:
        if not stood.is_set():
            time.sleep(2 * control_module.BEAT_S)  # the next look at time is due
            until(has_news)
            one._standings_at -= 10 * one._hung_s
            stood.set()
        return has_news()

    monkeypatch.setattr(one._sockets, "has_news", stand_still)
    assert stood.wait(HANG_LIMIT_S)
    until(lambda: time.monotonic() - one._standings_at < one._hung_s)
    assert one._lost is None
    assert exits == []


def test_a_connection_of_a_stranger_that_breaks_loses_no_rank(
    pair: tuple[Control, Control], exits: list[tuple[str, int]], tmp_path: Path
) -> None:
    for _ in range(5):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(tmp_path / "group-g0.sock"))
            stranger.send(os.urandom(64))
        time.sleep(0.3)
    assert all(control._lost is None for control in pair)
    assert exits == []


def test_a_second_rank_0_is_refused(pair: tuple[Control, Control], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another process listens there"):
        Control(config_of(tmp_path, 0), {}).join()


class WaitedForTheEndError(Exception):
    """In place of a wait for the end of the process."""


def test_a_failed_connection_of_ranks_waits_for_the_end_only_where_a_rank_is_lost(
    pair: tuple[Control, Control], exits: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, one = pair

    def fails(settings: WorkerSettings, store: object) -> None:
        raise RuntimeError("Gloo connectFullMesh failed")

    def waits() -> None:
        raise WaitedForTheEndError

    monkeypatch.setattr(group_module, "_process_group", fails)
    monkeypatch.setattr(exchange_module, "_never", waits)
    monkeypatch.setattr(control_module, "VERDICT_S", 0.1)  # both ranks are there
    settings = config_of(tmp_path, 0).worker
    with pytest.raises(RuntimeError, match="connectFullMesh failed"):
        Group(zero, settings)

    monkeypatch.setattr(control_module, "VERDICT_S", HANG_LIMIT_S)
    one.leave()  # while rank 0 needs it
    with pytest.raises(WaitedForTheEndError):
        Group(zero, settings)
    until(lambda: bool(exits))
    assert exits == [("group", EXIT_PEER_LOST)]
