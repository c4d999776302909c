"""`hisparse top` on a pseudo-terminal against a scripted gateway: what is seen, what keys do, what nothing breaks."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from protocol import messages
from tests.hisparse.top.test_top import POOL, REQUEST, WORKER
from tests.support.fakes.gateway import FakeGateway, tag_of
from tests.support.terminal_rig import LIMIT_S, Tty, on_a_terminal

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

MODEL = messages.ModelInfo("f", "tiny", 8192, 264, 4, 128, (257,), "bytes", "")


class Cluster:
    """A gateway of two requests whose retraction shows in its rows."""

    def __init__(self, runtime_dir: Path) -> None:
        self.runtime_dir = runtime_dir
        self.held = False
        self.gateway = self._gateway()

    def _gateway(self) -> FakeGateway:
        gateway = FakeGateway(self.runtime_dir, MODEL)
        gateway.on(messages.ListRequests, lambda m: [messages.RequestRows(tag_of(m), self._rows())])
        gateway.on(messages.ListWorkers, lambda m: [messages.WorkerRows(tag_of(m), (WORKER,))])
        gateway.on(messages.ListPools, lambda m: [messages.PoolRows(tag_of(m), (POOL,))])
        gateway.on(messages.RetractRequests, self._retract)
        gateway.on(messages.DescribeRequest, self._describe)
        gateway.refuse(messages.AbortRequests, "wrong_state", "it is FINISHED", field="request_id", value="r1")
        return gateway

    def restart(self) -> None:
        self.gateway = self._gateway()
        self.gateway.__enter__()

    def stop(self) -> None:
        self.gateway.__exit__(None, None, None)

    def _rows(self) -> tuple[messages.RequestRow, ...]:
        state = "RETRACTED" if self.held else "RUNNING"
        return (REQUEST, msgspec.structs.replace(REQUEST, request_id="r2", state=state, held=self.held))

    def _retract(self, ask: messages.AdminMessage) -> list[messages.GatewayMessage]:
        assert isinstance(ask, messages.RetractRequests)
        assert (ask.request_ids, ask.keep, ask.hold) == (("r2",), True, True)
        self.held = True
        return [messages.Done(ask.tag, ("r2: leaves w0, then held",))]

    def _describe(self, ask: messages.AdminMessage) -> list[messages.GatewayMessage]:
        history = (messages.HistoryLine(1.5, "submitted", "QUEUED", "by me"),)
        return [messages.RequestDetail(tag_of(ask), REQUEST, history)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    cluster.gateway.__enter__()
    yield cluster
    cluster.stop()


def written(tty: Tty, condition: Callable[[], bool]) -> None:
    """Wait until what it has written is so."""
    give_up_at = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < give_up_at, tty.raw[-200:]
        time.sleep(0.02)


@pytest.fixture
def tty(cluster: Cluster) -> Iterator[Tty]:
    with on_a_terminal(["top", "--interval", "0.2"], {"HISPARSE_CLUSTER_RUNTIME_DIR": str(cluster.runtime_dir)}) as tty:
        tty.until("connected", ">r1")
        yield tty


def test_top_retracts_the_selected_request_once_confirmed(cluster: Cluster, tty: Tty) -> None:
    tty.press(b"\x1b[B")
    tty.until(">r2")
    tty.press(b"r")
    tty.until("retract r2 and hold it")
    tty.press(b"n")
    tty.until("cancelled")
    assert not cluster.held
    tty.press(b"ry")
    tty.until("r2: leaves w0, then held", "HELD")
    assert cluster.gateway.roles.count("admin") == 1, "what looks is a client, what acts an admin"


def test_refusal_is_shown_with_its_reason(tty: Tty) -> None:
    tty.press(b"ay")
    tty.until("request_id=r1: it is FINISHED")


def test_history_opens_with_a_key(tty: Tty) -> None:
    tty.press(b"\r")
    tty.until("submitted", "by me")
    tty.press(b"\x1b")
    tty.until("2 requests: 2 running")


def test_top_outlives_the_coordinator(cluster: Cluster, tty: Tty) -> None:
    cluster.stop()
    tty.until("DISCONNECTED", ">r1")
    tty.press(b"ry")
    tty.until("not connected")
    cluster.restart()
    tty.until("  connected")
    assert tty.process.poll() is None


def test_silent_coordinator_counts_as_disconnected(cluster: Cluster, tty: Tty) -> None:
    """One that hangs keeps its connections."""
    cluster.gateway.on(messages.ListPools, lambda _: [])
    tty.until("DISCONNECTED", "no answer within 5 s", ">r1")
    cluster.gateway.on(messages.ListPools, lambda m: [messages.PoolRows(tag_of(m), (POOL,))])
    tty.until("  connected")


def test_top_starts_without_a_coordinator(tmp_path: Path) -> None:
    with on_a_terminal(["top"], {"HISPARSE_CLUSTER_RUNTIME_DIR": str(tmp_path)}) as tty:
        tty.until("DISCONNECTED, trying again")
        tty.press(b"q")
        assert tty.process.wait(LIMIT_S) == 0


def test_resize_redraws_the_screen(tty: Tty) -> None:
    tty.resize(120, 40)
    tty.until("ACK MS", "PAGES")
    assert tty.lines[39].strip().endswith("q quit")
    tty.resize(80, 24)
    tty.until(">r1")
    assert "ACK MS" not in tty.text
    tty.resize(40, 10)
    tty.until("40x10 is too small")


@pytest.mark.parametrize("how", ["q", signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_terminal_is_restored_after_any_exit(cluster: Cluster, how: object) -> None:
    environ = {"HISPARSE_CLUSTER_RUNTIME_DIR": str(cluster.runtime_dir)}
    with on_a_terminal(["top"], environ) as tty:
        before = tty.modes()
        tty.until("connected")
        assert tty.modes() != before
        if isinstance(how, signal.Signals):
            tty.process.send_signal(how)
        else:
            tty.press(b"q")
        assert tty.process.wait(LIMIT_S) == 0
        assert tty.modes() == before
        written(tty, lambda: tty.raw.endswith(b"\x1b[?25h\x1b[?1049l"))


def test_top_exits_silently_when_the_terminal_vanishes(cluster: Cluster, tmp_path: Path) -> None:
    environ = {"HISPARSE_CLUSTER_RUNTIME_DIR": str(cluster.runtime_dir)}
    with (tmp_path / "stderr").open("w+b") as stderr, on_a_terminal(["top"], environ, stderr=stderr) as tty:
        tty.until("connected")
        tty.vanish()
        assert tty.process.wait(LIMIT_S) == 0
        stderr.seek(0)
        assert stderr.read() == b""


def test_top_restores_the_terminal_when_stopped_and_resumes(tty: Tty) -> None:
    tty.process.send_signal(signal.SIGTSTP)
    written(tty, lambda: tty.raw.endswith(b"\x1b[?1049l"))
    tty.process.send_signal(signal.SIGCONT)
    before = len(tty.raw)
    tty.until(">r1")
    written(tty, lambda: b"\x1b[?1049h" in tty.raw[before - 20 :])


def test_quiet_cluster_sends_almost_no_bytes(tty: Tty) -> None:
    """Only what changed is written: over ssh, a second of nothing new is a second of nothing sent. Where the gateway of
    this process has no core, the screen says how old it is, and is quiet again later."""
    give_up_at, sent = time.monotonic() + LIMIT_S, 1_000
    while sent >= 200:
        assert time.monotonic() < give_up_at, tty.raw[-sent:]
        before = len(tty.raw)
        time.sleep(2)
        sent = len(tty.raw) - before


def test_top_without_a_terminal_names_the_alternative(tmp_path: Path) -> None:
    with on_a_terminal(["top"], {"HISPARSE_CLUSTER_RUNTIME_DIR": str(tmp_path), "TERM": "dumb"}) as tty:
        assert tty.process.wait(LIMIT_S) == 2
        tty.until("terminal=dumb: not a terminal that can draw (use: hisparse re")
