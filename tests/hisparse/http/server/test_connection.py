"""Connections of the HTTP front over real sockets: what is refused, what is bounded, and that one ends alone."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import random
import re
import socket
import ssl
import sys
import termios
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import trio
import trio.testing

from hisparse.http import service as server
from hisparse.http.server import connection, listener
from hisparse.http.server.connection import End, Handler, HttpConnection
from hisparse.http.server.exchange import BODY_BYTES_MAX, Channel, HttpExchange
from hisparse.http.server.fairness import arrears, turns
from hisparse.http.server.fairness.arrears import Arrears
from hisparse.http.server.fairness.shares import Shares
from hisparse.http.server.listener import CONNECTIONS_MIN, HttpListener
from hisparse.http.server.tls import PacedTransport, Tls
from hisparse.http.server.wire import HEADER_BYTES_MAX, RequestHead
from metrics.state import HttpCounters
from protocol.errors import BadInput, HiSparseError
from protocol.settings import HttpSettings
from tests.support.limits import HANG_LIMIT_S
from tests.support.tls_pair import write_pair
from tools.fuzz.http import Aim, assail
from tools.fuzz.rig import Tally

GET: Final = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
CLOSE: Final = b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


async def echo(head: RequestHead, channel: Channel) -> None:
    """Answers with method, path and body; /defect raises, /hold keeps its connection until the client leaves."""
    exchange = HttpExchange(head, channel, Shares(1 << 30))
    if head.path == "/defect":
        raise ZeroDivisionError
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.watch)
        with exchange.leaving:
            if head.path.startswith("/known"):
                await exchange.admit("owner")
            if head.path == "/hold":
                await exchange.admit("")
                await exchange.open_stream()
                await trio.sleep_forever()
            if head.path.endswith("/unread"):
                await exchange.answer(403, b"{}")
            elif head.path == "/endless":
                await exchange.open_stream()
                while True:
                    await exchange.write(bytes(1 << 20))
            else:
                await said_again(exchange)
        nursery.cancel_scope.cancel()


async def said_again(exchange: HttpExchange) -> None:
    try:
        async with exchange.body("") as body:
            said = f"{exchange.method} {exchange.path} ".encode() + bytes(body[:100])
    except HiSparseError as error:
        await exchange.refuse(error)
    else:
        await exchange.answer(200, said)


class Rig:
    def __init__(self, address: tuple[str, int], counters: HttpCounters, stopping: trio.Event) -> None:
        self.address = address
        self.counters = counters
        self.stopping = stopping

    async def open(self) -> trio.SocketStream:
        return await trio.open_tcp_stream(*self.address)

    async def hold(self) -> trio.SocketStream:
        """A connection whose request is being answered."""
        stream = await self.open()
        await stream.send_all(GET.replace(b"/x", b"/hold"))
        with trio.fail_after(HANG_LIMIT_S):
            assert b"200" in await stream.receive_some()
        return stream

    async def send(self, data: bytes) -> bytes:
        """All that is answered to `data` until the connection ends."""
        async with await self.open() as stream:
            return await exchanged(stream, data)

    def ends(self) -> dict[str, int]:
        return {reason: count for (reason,), count in self.counters.connection_ends.items()}

    async def until(self, condition: Callable[[], bool]) -> None:
        with trio.fail_after(HANG_LIMIT_S):
            while not condition():  # noqa: ASYNC110
                await trio.sleep(0.005)


async def exchanged(stream: trio.abc.Stream, data: bytes) -> bytes:
    """What comes back until the end; a reset ends it, too."""
    told = bytearray()

    async def write() -> None:
        try:
            await stream.send_all(data)
        except trio.BrokenResourceError:
            return

    with trio.fail_after(HANG_LIMIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            try:
                while piece := await stream.receive_some(65_536):
                    told += piece
            except trio.BrokenResourceError:
                pass
    return bytes(told)


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


@asynccontextmanager
async def running(
    handler: Handler = echo,
    tls: Tls | None = None,
    connections: int = CONNECTIONS_MIN,
    idle_s: float = HttpSettings().idle_s,
) -> AsyncIterator[Rig]:
    counters, stopping = HttpCounters(), trio.Event()
    with server._listening(HttpSettings(port=0)) as sock:
        address = sock.getsockname()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(HttpListener(sock, handler, counters, tls, connections, idle_s).run, stopping)
            yield Rig(address, counters, stopping)
            nursery.cancel_scope.cancel()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running() as rig:
        yield rig


# ---------------------------------------------------------------- what is answered


async def test_connection_serves_requests_one_after_another(rig: Rig) -> None:
    post = b"POST /p%20q?r=s HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
    chunked = b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nde\r\n1\r\nf\r\n0\r\n\r\n"
    answer = await rig.send(post + chunked + CLOSE)
    assert [answer.count(it) for it in (b"POST /p q abc", b"POST /c def", b"GET /x ")] == [1, 1, 1]
    assert answer.count(b"HTTP/1.1 200") == 3
    await rig.until(lambda: rig.ends() == {"closed": 1})


async def test_head_has_no_body(rig: Rig) -> None:
    answer = await rig.send(CLOSE.replace(b"GET", b"HEAD"))
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"\r\n\r\n")


async def test_expect_100_continue_is_answered(rig: Rig) -> None:
    head = b"POST /%s HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"
    async with await rig.open() as stream:
        await stream.send_all(head % b"p")
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 100")
        await stream.send_all(b"abc")
        assert b"POST /p abc" in await stream.receive_some()
    assert status_of(await rig.send(head % b"unread")) == 403


async def test_http_1_0_client_gets_its_answer_and_the_end(rig: Rig) -> None:
    assert b"GET /x " in await rig.send(b"GET /x HTTP/1.0\r\n\r\n")


async def test_absolute_target_is_reduced_to_its_path(rig: Rig) -> None:
    assert b"GET /y " in await rig.send(CLOSE.replace(b"/x", b"http://host/y?z"))


# ---------------------------------------------------------------- what is refused

WEBSOCKET: Final = (
    b"GET /x HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: %s\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Protocol: %s\r\nSec-WebSocket-Extensions: %s\r\n\r\n"
)
H2C: Final = (
    b"GET /x HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: %s\r\n\r\n"
)
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
LENGTHS: Final = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: %s\r\nTransfer-Encoding: %s\r\n\r\n0\r\n\r\n"

#: What ended the whole front once, and what is like it; the status that answers it now.
REFUSED: Final = {
    "h2 preface": (PREFACE, 505),
    "h2 frames": (PREFACE + bytes(9) + b"\x00\x00\x05\x02\x00\x00\x00\x00\x01" * 100, 505),
    "h2c": (H2C % b"AAMAAABkAAQAAP__", 400),
    "h2c broken settings": (H2C % b"\xff!", 400),
    "websocket": (WEBSOCKET % (b"Upgrade", b"a", b"b"), 400),
    "websocket 0xff connection": (WEBSOCKET % (b"Upgrade, \xff", b"a", b"b"), 400),
    "websocket 0xff protocol": (WEBSOCKET % (b"Upgrade", b"\xff", b"b"), 400),
    "websocket 0xff extensions": (WEBSOCKET % (b"Upgrade", b"a", b"\xff"), 400),
    "websocket frames": (WEBSOCKET % (b"Upgrade", b"a", b"b") + b"\x81\x85\x00\x00\x00\x00hello" * 50, 400),
    "two lengths": (LENGTHS % (b"5", b"chunked"), 400),
    "odd encoding": (LENGTHS.replace(b"Content-Length: %s\r\n", b"") % b"gzip, chunked", 400),
    "encoding in 1.0": (LENGTHS.replace(b"Content-Length: %s\r\n", b"").replace(b"1.1", b"1.0") % b"chunked", 400),
    "connect": (b"CONNECT host:1 HTTP/1.1\r\nHost: x\r\n\r\n", 405),
    "connect a path": (b"CONNECT /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 405),
    "huge length": (b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 5_000 + b"\r\n\r\n", 400),
    "negative length": (b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
    "0xff path": (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "0xff method": (b"G\xff /x HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "no host": (b"GET /x HTTP/1.1\r\n\r\n", 400),
    "HTTP/3": (b"GET /x HTTP/3.0\r\nHost: x\r\n\r\n", 505),
    "TLS to plain": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), 400),
    "noise": (b"\x00\r\n\r\n", 400),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_foreign_protocol_ends_a_single_connection(rig: Rig, case: str) -> None:
    data, status = REFUSED[case]
    async with await rig.open() as other:
        await other.send_all(GET)
        assert b"200" in await other.receive_some()
        answer = await rig.send(data + CLOSE)
        assert (status_of(answer), len(re.findall(rb"HTTP/1.1 \d", answer))) == (status, 1)
        assert b"connection: close" in answer.lower()
        assert (b"\r\nallow: \r\n" in answer.lower()) == (status == 405), "no method is allowed"
        await other.send_all(GET)
        assert b"200" in await other.receive_some()
    await rig.until(lambda: rig.ends().get("refused") == 1)


@pytest.mark.parametrize(("extra", "status"), [(0, 200), (1, 431), (1_000, 431), (1_000_000, 431)])
@pytest.mark.parametrize("behind", [b"", GET])
async def test_header_limit_is_exact(rig: Rig, extra: int, status: int, behind: bytes) -> None:
    """Even when all of it comes at once, and behind another request."""
    bare = CLOSE.replace(b"Host", b"Padding: \r\nHost")
    data = bare.replace(b"Padding: ", b"Padding: " + b"p" * (HEADER_BYTES_MAX - len(bare) + extra))
    answer = await rig.send(behind + data)
    statuses = [status_of(b"HTTP/1.1" + it) for it in answer.split(b"HTTP/1.1")[1:]]
    assert statuses == [*([200] if behind else []), status]


# ---------------------------------------------------------------- what is contained


async def test_defect_ends_a_single_connection(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    async with await rig.open() as other:
        await other.send_all(GET)
        await other.receive_some()
        with caplog.at_level(logging.ERROR, "hisparse.http.server.listener"):
            for _ in range(3):
                assert await rig.send(GET.replace(b"/x", b"/defect")) == b""
        assert rig.ends() == {"defect": 3}
        assert len(caplog.records) == 1, "a flood of them fills no log"
        await other.send_all(CLOSE)
        assert b"200" in await other.receive_some()


@pytest.mark.parametrize(("path", "length", "status"), [(b"p", BODY_BYTES_MAX + 1, 413), (b"unread", 4 << 20, 403)])
async def test_answer_is_sent_before_an_unread_body_is_reset(rig: Rig, path: bytes, length: int, status: int) -> None:
    """Two ways to be refused early: by its length, and by a handler that does not want it."""
    answer = await rig.send(
        b"POST /%s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path, length) + bytes(length)
    )
    assert (status_of(answer), b"connection: close" in answer.lower()) == (status, True)
    await rig.until(lambda: rig.ends() == {"closed": 1})


async def test_disconnect_is_noticed_during_an_answer(rig: Rig) -> None:
    stream = await rig.hold()
    await stream.aclose()
    await rig.until(lambda: rig.ends() == {"unread": 1})


# ---------------------------------------------------------------- what is bounded


async def still_until(condition: Callable[[], bool]) -> None:
    """As Rig.until, while the clock stands still."""
    while not condition():
        await trio.lowlevel.checkpoint()


async def test_requests_that_came_in_time_are_answered_after_a_stall(
    rig: Rig, mock_clock: trio.testing.MockClock
) -> None:
    """All of them wait for their turns past the deadline."""
    streams = [await rig.open() for _ in range(6)]
    await still_until(lambda: rig.counters.connections == len(streams))
    for stream in streams:
        os.write(stream.socket.fileno(), CLOSE)
    mock_clock.jump(1.5 * HttpSettings().idle_s)  # the process has no core
    assert [status_of(await exchanged(stream, b"")) for stream in streams] == [200] * len(streams)


@asynccontextmanager
async def turning(
    turn: Callable[[], Awaitable[None]],
    end: connection.End = connection.End.CLOSED,
    idle_s: float = HttpSettings().idle_s,
    has_bytes: Callable[[], bool] = lambda: False,
) -> AsyncIterator[tuple[trio.abc.Stream, HttpConnection]]:
    """A client and its connection, which waits for `turn` before each look at a header. It must come to `end`."""
    clients = turns.ClientTurns()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(clients.strangers, "turn", lambda _: turn())
        client, stream = trio.testing.memory_stream_pair()
        served = HttpConnection(stream, echo, clients, "10.0.0.1", idle_s, has_bytes)

        async def serve() -> None:
            assert await served.run() is end
            await stream.aclose()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            yield client, served


IDLE_S: Final = 40.0


@pytest.mark.parametrize(
    ("data", "status", "limit_s"), [(b"", 0, IDLE_S), (GET[:20], 0, connection.HEADER_LIMIT_S), (GET, 200, IDLE_S)]
)
async def test_connection_without_a_header_in_time_is_closed(
    autojump_clock: trio.testing.MockClock, data: bytes, status: int, limit_s: float
) -> None:
    began = trio.current_time()
    async with turning(trio.lowlevel.checkpoint, connection.End.IDLE, IDLE_S) as (client, _):
        assert status_of(await exchanged(client, data)) == status
    assert trio.current_time() - began == pytest.approx(limit_s)


@pytest.mark.parametrize("pause_s", [16.0, 75.0, 90.0])
async def test_request_after_the_pause_of_a_proxy_is_served(
    autojump_clock: trio.testing.MockClock, pause_s: float
) -> None:
    async with turning(trio.lowlevel.checkpoint) as (client, _):
        await client.send_all(GET)
        assert b"200" in await client.receive_some()
        await trio.sleep(pause_s)
        assert status_of(await exchanged(client, CLOSE)) == 200


async def test_request_of_which_a_part_came_in_time_is_served(autojump_clock: trio.testing.MockClock) -> None:
    """Nothing of a TLS record can be read before all of it is there."""
    has_bytes = iter([True])
    async with turning(trio.lowlevel.checkpoint, idle_s=IDLE_S, has_bytes=lambda: next(has_bytes)) as (client, _):
        await trio.sleep(IDLE_S + connection.HEADER_LIMIT_S / 2)
        assert status_of(await exchanged(client, CLOSE)) == 200


async def test_part_of_a_request_is_waited_for_as_long_as_for_a_header(autojump_clock: trio.testing.MockClock) -> None:
    has_bytes, began = iter([True, False]), trio.current_time()
    idle = turning(trio.lowlevel.checkpoint, connection.End.IDLE, IDLE_S, lambda: next(has_bytes))
    async with idle as (client, _):
        assert await exchanged(client, b"") == b""
    assert trio.current_time() - began == pytest.approx(IDLE_S + connection.HEADER_LIMIT_S)


@pytest.mark.parametrize("is_secure", [False, True])
async def test_request_that_crosses_the_idle_limit_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_secure: bool
) -> None:
    """It comes between the limit and the last look; of a record of TLS its beginning does."""
    crossing, looked = list[bytes](), listener._has_bytes

    def look(connected: trio.socket.SocketType) -> bool:
        if crossing:
            os.write(client.socket.fileno(), crossing.pop())
        return looked(connected)

    monkeypatch.setattr(listener, "_has_bytes", look)
    cert, key = write_pair(tmp_path)
    async with running(tls=Tls(cert, key) if is_secure else None, idle_s=0.3) as rig:
        client = await rig.open()
        secure = TlsClient(client, ssl.create_default_context(cafile=cert))
        if is_secure:
            assert status_of(await secure.ask(GET)) == 200
        request = secure.sealed(CLOSE) if is_secure else CLOSE
        cut = 30 if is_secure else len(request)
        crossing.append(request[:cut])
        await rig.until(lambda: not crossing)
        await client.send_all(request[cut:])
        assert status_of(await secure.more() if is_secure else await exchanged(client, b"")) == 200
        await rig.until(lambda: rig.ends() == {"closed": 1})


@pytest.mark.parametrize(
    ("idle_s", "told"), [(120.0, b"timeout=115"), (12.5, b"timeout=7"), (10.0, b"timeout=5"), (2.0, b"timeout=1")]
)
async def test_answers_tell_for_how_long_a_connection_is_kept(idle_s: float, told: bytes) -> None:
    async with running(idle_s=idle_s) as rig, await rig.open() as stream:
        for _ in range(2):
            await stream.send_all(GET)
            answer = (await stream.receive_some()).lower()
            assert b"connection: keep-alive\r\nkeep-alive: " + told + b"\r\n" in answer
            assert b"connection: close" not in answer


@pytest.mark.parametrize(
    ("idle_s", "data"),
    [
        (0.5, GET),
        (120.0, CLOSE),
        (120.0, GET.replace(b"1.1", b"1.0")),
        (120.0, GET.replace(b"HTTP/1.1\r\n", b"HTTP/1.0\r\nConnection: keep-alive\r\n")),
        (120.0, GET.replace(b"/x", b"/p/unread").replace(b"\r\n\r\n", b"\r\nContent-Length: 3\r\n\r\n")),
        (120.0, b"no HTTP\r\n\r\n"),
    ],
)
async def test_answers_of_connections_that_end_tell_no_time(
    monkeypatch: pytest.MonkeyPatch, idle_s: float, data: bytes
) -> None:
    monkeypatch.setattr(connection, "LINGER_LIMIT_S", 0.1)
    async with running(idle_s=idle_s) as rig:
        answer = await rig.send(data)
    assert status_of(answer)
    assert b"keep-alive" not in answer.lower()


async def test_header_in_two_segments_is_answered_however_late_its_turns(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEADER_LIMIT_S", 1.0)
    async with turning(partial(trio.sleep, 2.0)) as (client, _):
        await client.send_all(CLOSE[:20])
        await trio.testing.wait_all_tasks_blocked()
        await client.send_all(CLOSE[20:])
        assert status_of(await exchanged(client, b"")) == 200


@pytest.mark.parametrize(("data", "status"), [(CLOSE[:20], 0), (GET, 200)])
async def test_stop_during_a_turn_waits_for_whole_headers_alone(
    autojump_clock: trio.testing.MockClock, data: bytes, status: int
) -> None:
    its_turn = trio.Event()
    async with turning(its_turn.wait) as (client, served):
        await client.send_all(data)
        await trio.testing.wait_all_tasks_blocked()
        served.finish()
        its_turn.set()
        assert status_of(await exchanged(client, b"")) == status


async def test_client_that_stops_reading_is_disconnected(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "READ_LIMIT_S", 0.2)
    async with await rig.open() as stream:
        await stream.send_all(GET.replace(b"/x", b"/endless"))
        await rig.until(lambda: rig.ends() == {"unread": 1})


async def test_pipelined_requests_wait_unread(rig: Rig) -> None:
    """Behind one that is being answered only so much is taken in."""
    async with await rig.hold() as stream:
        sent = 0
        with trio.move_on_after(1.0):
            while sent < 64 << 20:
                await stream.send_all(bytes(1 << 20))
                sent += 1 << 20
        assert sent < 64 << 20


class LoopTurnCount:
    """Counts turns of the event loop while `run` runs."""

    def __init__(self) -> None:
        self.turns = 0

    async def run(self) -> None:
        while True:
            self.turns += 1
            await trio.lowlevel.checkpoint()


@asynccontextmanager
async def counted_turns() -> AsyncIterator[LoopTurnCount]:
    count = LoopTurnCount()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(count.run)
        yield count
        nursery.cancel_scope.cancel()


STRANGERS: Final = 60


async def strangers_of(rig: Rig, stack: ExitStack) -> list[socket.socket]:
    """STRANGERS connections that have sent nothing yet."""
    open_before = rig.counters.connections
    peers = [stack.enter_context(socket.create_connection(rig.address, HANG_LIMIT_S)) for _ in range(STRANGERS)]
    await rig.until(lambda: rig.counters.connections == open_before + STRANGERS)
    return peers


def until_received(connected: socket.socket) -> None:
    """Block this thread, and so the event loop, until the kernel has all that was sent at the other end."""
    give_up_at = time.monotonic() + HANG_LIMIT_S
    while int.from_bytes(fcntl.ioctl(connected, termios.TIOCOUTQ, bytes(4)), sys.byteorder):
        assert time.monotonic() < give_up_at
        time.sleep(0.001)


@pytest.fixture
def fixed_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of the event loop have no further pieces, however long they take: a busy machine makes them long."""
    monkeypatch.setattr(turns, "PIECE_S", HANG_LIMIT_S)


@pytest.mark.usefixtures("fixed_turns")
async def test_strangers_take_turns_and_a_known_client_does_not_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One refused request in a turn of the loop, however many come at once; the other's is served meanwhile.

    The kernel has all requests before the loop goes on: on a busy machine it delivers one of them turns later.
    """
    refused, before_known, refuse = list[HttpConnection](), list[int](), HttpConnection._refuse

    async def counted(it: HttpConnection, error: BadInput) -> End:
        refused.append(it)
        return await refuse(it, error)

    async def serve(head: RequestHead, channel: Channel) -> None:
        before_known.append(len(refused))
        await echo(head, channel)

    monkeypatch.setattr(HttpConnection, "_refuse", counted)
    with ExitStack() as stack:
        async with running(serve) as rig, await rig.open() as known:
            await known.send_all(GET.replace(b"/x", b"/known"))
            assert b"200" in await known.receive_some()
            peers = await strangers_of(rig, stack)
            async with counted_turns() as count:
                for peer in peers:
                    peer.send(b"no HTTP\r\n\r\n")
                    peer.shutdown(socket.SHUT_WR)
                os.write(known.socket.fileno(), GET.replace(b"/x", b"/known"))
                with socket.socket(fileno=os.dup(known.socket.fileno())) as same:
                    for each in (*peers, same):
                        until_received(each)
                assert b"200" in await known.receive_some()
                await rig.until(lambda: rig.ends().get("refused") == STRANGERS)
            assert before_known[1] < STRANGERS / 4
            assert count.turns >= STRANGERS


async def test_what_comes_behind_a_refusal_is_thrown_away_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, clients = list[str](), turns.ClientTurns()

    async def turn(party: str) -> None:
        taken.append(party)

    async def serve(head: RequestHead, channel: Channel) -> None:
        pytest.fail("no request came")

    monkeypatch.setattr(clients.strangers, "turn", turn)
    client, stream = trio.testing.memory_stream_pair()
    with trio.fail_after(HANG_LIMIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.HttpConnection(stream, serve, clients, "10.0.0.1", 60.0, lambda: False).run)
            await client.send_all(b"no HTTP\r\n\r\n")
            assert (await client.receive_some()).startswith(b"HTTP/1.1 400")
            before = len(taken)
            for _ in range(3):
                await client.send_all(b"more")
                await trio.testing.wait_all_tasks_blocked()
            assert taken[before:] == ["10.0.0.1"] * 3
            await client.aclose()


@pytest.fixture
def four_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many are free; the next waits for longer than any test."""
    monkeypatch.setattr(turns, "Arrears", partial(Arrears, per_s=0.01, burst=3))
    monkeypatch.setattr(arrears, "DEBT_MAX_S", 6 * HANG_LIMIT_S)


async def waits(stream: trio.SocketStream, data: bytes) -> bool:
    await stream.send_all(data)
    with trio.move_on_after(0.3) as waiting:
        await stream.receive_some()
    return waiting.cancelled_caught


@pytest.mark.usefixtures("four_refusals")
async def test_refusals_of_an_address_are_slowed_down() -> None:
    async with running() as rig, await rig.open() as stranger:
        for _ in range(4):
            assert status_of(await rig.send(b"no HTTP\r\n\r\n")) == 400
        assert await waits(stranger, b"no HTTP\r\n\r\n")


@pytest.mark.usefixtures("four_refusals")
@pytest.mark.parametrize(
    "data",
    [
        b"no HTTP\r\n\r\n",
        GET.replace(b"/x", b"/unread"),
        b"POST /unread HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1",
    ],
    ids=["no request", "whole request", "unread body"],
)
async def test_refusal_that_waits_ends_when_its_client_leaves(data: bytes) -> None:
    async with running() as rig:
        for _ in range(4):
            assert status_of(await rig.send(b"no HTTP\r\n\r\n")) == 400
        stranger = await rig.open()
        assert await waits(stranger, data)
        await stranger.aclose()
        await rig.until(lambda: not rig.counters.connections)


@pytest.mark.usefixtures("four_refusals")
async def test_refused_owner_is_slowed_down() -> None:
    """Also where the next request is a good one, on another connection."""
    async with running() as rig, await rig.open() as refused, await rig.open() as another:
        for _ in range(4):
            await refused.send_all(GET.replace(b"/x", b"/known/unread"))
            assert b"403" in await refused.receive_some()
        assert await waits(refused, GET.replace(b"/x", b"/known"))
        assert await waits(another, GET.replace(b"/x", b"/known"))


@pytest.mark.usefixtures("four_refusals")
@pytest.mark.parametrize(
    "data",
    [
        GET.replace(b"/x", b"/known"),
        b"POST /known HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1",
        b"POST /known HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n123456789",
    ],
    ids=["no body", "part of a body", "whole body"],
)
async def test_request_of_a_refused_owner_ends_when_its_client_leaves(data: bytes) -> None:
    async with running() as rig:
        async with await rig.open() as refused:
            for _ in range(4):
                await refused.send_all(GET.replace(b"/x", b"/known/unread"))
                assert b"403" in await refused.receive_some()
        stream = await rig.open()
        assert await waits(stream, data)
        await stream.aclose()
        await rig.until(lambda: not rig.counters.connections)


async def test_body_of_a_refused_owner_that_comes_meanwhile_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "Arrears", partial(Arrears, per_s=0.01, burst=3))
    monkeypatch.setattr(arrears, "DEBT_MAX_S", 0.5)
    async with running() as rig, await rig.open() as stream:
        for _ in range(4):
            await stream.send_all(GET.replace(b"/x", b"/known/unread"))
            assert b"403" in await stream.receive_some()
        head, body = b"POST /known HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n", b"a" * (2 * HEADER_BYTES_MAX)
        await stream.send_all(head % len(body) + body)
        with trio.fail_after(HANG_LIMIT_S):
            assert (await stream.receive_some()).endswith(b"POST /known " + body[:100])


@pytest.mark.usefixtures("four_refusals")
@pytest.mark.parametrize("strangers", [4, 40])
async def test_known_client_is_not_slowed_down_for_strangers(strangers: int) -> None:
    """Of the same address, on a new connection, too: nothing is known of it before its header is read."""
    async with running() as rig, await rig.open() as known:
        await known.send_all(GET.replace(b"/x", b"/known"))
        assert b"200" in await known.receive_some()
        async with trio.open_nursery() as nursery:
            for _ in range(strangers):
                nursery.start_soon(rig.send, b"no HTTP\r\n\r\n")
            await rig.until(lambda: rig.ends().get("refused", 0) == 4)
            for stream in (known, await rig.open()):
                with trio.fail_after(HANG_LIMIT_S):
                    await stream.send_all(GET.replace(b"/x", b"/known"))
                    assert b"200" in await stream.receive_some()
            nursery.cancel_scope.cancel()


@pytest.mark.usefixtures("four_refusals")
async def test_refusals_of_strangers_slow_down_no_owner_of_a_connection() -> None:
    """A proxy sends requests of several clients over one connection."""
    async with running() as rig, await rig.open() as shared, await rig.open() as own:
        for stream in (own, shared):
            await stream.send_all(GET.replace(b"/x", b"/known"))
            assert b"200" in await stream.receive_some()
        for _ in range(4):
            await shared.send_all(GET.replace(b"/x", b"/unread"))
            assert b"403" in await shared.receive_some()
        with trio.fail_after(HANG_LIMIT_S):
            await own.send_all(GET.replace(b"/x", b"/known"))
            assert b"200" in await own.receive_some()


@pytest.mark.usefixtures("fixed_turns")
async def test_handshakes_take_turns(tmp_path: Path) -> None:
    async with running(tls=Tls(*write_pair(tmp_path))) as rig:
        with ExitStack() as stack:
            peers = await strangers_of(rig, stack)
            async with counted_turns() as count:
                for peer in peers:
                    peer.send(b"\x16\x03\x01\x00\x05\x01" + bytes(50))
                await rig.until(lambda: rig.ends().get("tls") == STRANGERS)
            assert count.turns >= STRANGERS


@pytest.mark.usefixtures("fixed_turns")
async def test_body_in_tiny_parts_does_not_keep_the_loop(rig: Rig) -> None:
    """All parts come at once: reading one takes no time of waiting."""
    parts = b"1\r\nx\r\n" * 9_000
    head = b"POST /p HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    with socket.create_connection(rig.address, HANG_LIMIT_S) as peer:
        await rig.until(lambda: rig.counters.connections == 1)
        async with counted_turns() as count:
            whole = head + b"Connection: close\r\n\r\n" + parts + b"0\r\n\r\n"
            assert peer.send(whole) == len(whole), "the kernel has room for it"
            await rig.until(lambda: rig.ends() == {"closed": 1})
    assert count.turns >= 9_000 / connection.PARTS_PER_TURN


@pytest.mark.parametrize(
    ("first", "second", "are_one"),
    [
        ("203.0.113.1", "203.0.113.1", True),
        ("203.0.113.1", "203.0.113.2", False),
        ("::ffff:203.0.113.1", "203.0.113.1", True),
        ("::ffff:203.0.113.1", "::ffff:203.0.113.2", False),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2", True),
    ],
)
def test_addresses_of_one_party(first: str, second: str, are_one: bool) -> None:
    assert (listener.party_of(first) == listener.party_of(second)) == are_one


async def test_oldest_idle_connection_is_closed_for_a_new_one() -> None:
    """Held ones stay; when all are held a new one is closed."""
    async with running(connections=3) as rig:
        held = [await rig.hold()]
        idle = [await rig.open() for _ in range(2)]
        await rig.until(lambda: rig.counters.connections == 3)
        assert b"200" in await rig.send(CLOSE)
        assert rig.ends() == {"evicted": 1, "closed": 1}
        assert await idle[0].receive_some() == b""
        held += [await rig.hold() for _ in range(2)]
        assert await rig.send(CLOSE) == b""


async def known_client(rig: Rig, path: bytes = b"/known", status: bytes = b"200") -> trio.SocketStream:
    stream = await rig.open()
    await stream.send_all(GET.replace(b"/x", path))
    assert status in await stream.receive_some()
    return stream


async def test_idle_connection_of_a_known_client_is_closed_last() -> None:
    async with running(connections=3) as rig:
        known = await known_client(rig)
        strangers = [await rig.open() for _ in range(2)]
        await rig.until(lambda: rig.counters.connections == 3)
        assert b"200" in await rig.send(CLOSE)
        assert await strangers[0].receive_some() == b""
        await known.send_all(GET.replace(b"/x", b"/known"))
        assert b"200" in await known.receive_some()


async def test_flood_of_idle_strangers_does_not_delay_a_known_client() -> None:
    """They keep their connections for as long as they may be idle, and the oldest make room."""
    server._raise_descriptor_limit()
    async with running() as rig:
        known = await known_client(rig)
        flood = [await rig.open() for _ in range(CONNECTIONS_MIN + 100)]
        await rig.until(lambda: sum(rig.ends().values()) + rig.counters.connections == len(flood) + 1)
        with trio.fail_after(HANG_LIMIT_S):
            await known.send_all(GET.replace(b"/x", b"/known"))
            assert b"200" in await known.receive_some()
            another = await known_client(rig)
        assert rig.ends().keys() == {"evicted"}
        assert 100 <= rig.ends()["evicted"] < CONNECTIONS_MIN / 2
        for stream in (*flood, another, known):
            await stream.aclose()


async def test_client_that_holds_all_connections_keeps_out_no_stranger() -> None:
    """A new client has shown no key before its header is read, and others come meanwhile."""
    async with running(connections=16) as rig:
        held = [await known_client(rig) for _ in range(15)]
        newcomer = await rig.open()
        await rig.until(lambda: rig.counters.connections == 16)
        another = await rig.open()
        await newcomer.send_all(CLOSE)
        assert b"200" in await exchanged(newcomer, b"")
        assert rig.ends() == {"evicted": 1, "closed": 1}
        assert await held[0].receive_some() == b""
        await another.aclose()


@pytest.mark.usefixtures("four_refusals")
async def test_connection_in_arrears_is_closed_before_an_idle_one() -> None:
    async with running(connections=2) as rig:
        idle = await known_client(rig)
        refused = await known_client(rig, b"/known/unread", b"403")
        for _ in range(3):
            await refused.send_all(GET.replace(b"/x", b"/known/unread"))
            assert b"403" in await refused.receive_some()
        assert await waits(refused, GET.replace(b"/x", b"/known"))
        assert b"200" in await rig.send(CLOSE)
        assert await refused.receive_some() == b""
        with trio.move_on_after(0.1) as open_still:
            await idle.receive_some()
        assert open_still.cancelled_caught


async def test_stopping_lets_the_last_answer_finish() -> None:
    begun, resumed = trio.Event(), trio.Event()

    async def slow(head: RequestHead, channel: Channel) -> None:
        exchange = HttpExchange(head, channel, Shares(1))
        begun.set()
        await resumed.wait()
        await exchange.answer(200, b"done")

    async with running(slow) as rig:
        idle, busy = await rig.open(), await rig.open()
        await busy.send_all(GET)
        await begun.wait()
        await rig.until(lambda: rig.counters.connections == 2)
        rig.stopping.set()
        with trio.fail_after(HANG_LIMIT_S):
            assert await idle.receive_some() == b""
            with pytest.raises(OSError, match="connect"):
                await rig.open()
            resumed.set()
            answer = await exchanged(busy, b"")
        assert answer.endswith(b"done")
        assert b"connection: close" in answer.lower()


async def test_endless_answer_is_cut_off_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "STOP_DEADLINE_S", 0.1)
    async with running() as rig, await rig.hold():
        rig.stopping.set()
        await rig.until(lambda: rig.ends() == {"stopped": 1})


# ---------------------------------------------------------------- TLS


async def test_tls_connection_follows_the_same_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_LIMIT_S", 0.1)
    cert, key = write_pair(tmp_path)
    async with running(tls=Tls(cert, key)) as rig:
        context = ssl.create_default_context(cafile=cert)
        context.set_alpn_protocols(["h2", "http/1.1"])

        async def secure() -> trio.SSLStream[trio.SocketStream]:
            return trio.SSLStream(await rig.open(), context, server_hostname="localhost", https_compatible=True)

        for data, status in ((CLOSE, 200), (PREFACE, 505), (H2C % b"\xff", 400), (b"\x00\r\n\r\n", 400)):
            stream = await secure()
            assert status_of(await exchanged(stream, data)) == status
            assert stream.selected_alpn_protocol() == "http/1.1"
        for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05\x01" + bytes(50), b""):
            async with await rig.open() as plain:
                await plain.send_all(noise)
                await plain.send_eof()
                assert b"HTTP" not in await plain.receive_some()
        await rig.until(lambda: rig.ends() == {"closed": 1, "refused": 3, "tls": 3})


@dataclass
class TlsClient:
    """Over TLS, of which the test says when each part is sent."""

    stream: trio.SocketStream
    context: ssl.SSLContext

    def __post_init__(self) -> None:
        self._heard, self._said = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = self.context.wrap_bio(self._heard, self._said, server_hostname="localhost")

    def greet(self) -> None:
        """Send the first message of the handshake, within this turn of the loop."""
        with suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
        os.write(self.stream.socket.fileno(), self._said.read())

    async def ask(self, data: bytes) -> bytes:
        """What is answered to `data` behind the handshake."""
        await self._pumped(self._tls.do_handshake)
        self._tls.write(data)
        return await self.more()

    def sealed(self, data: bytes) -> bytes:
        """`data` as the records that it is sent in."""
        self._tls.write(data)
        return self._said.read()

    async def more(self) -> bytes:
        """Read the next bytes."""
        return bytes(await self._pumped(partial(self._tls.read, 65_536)))

    async def _pumped(self, step: Callable[[], Any]) -> Any:
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                await self.stream.send_all(self._said.read())
                if not (data := await self.stream.receive_some()):
                    return b""
                self._heard.write(data)


async def test_tls_clients_that_came_in_time_are_answered_after_a_stall(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    """Their first messages are read when the time for a handshake is over."""
    cert, key = write_pair(tmp_path)
    context = ssl.create_default_context(cafile=cert)
    async with running(tls=Tls(cert, key)) as rig:
        clients = [TlsClient(await rig.open(), context) for _ in range(6)]
        await still_until(lambda: rig.counters.connections == len(clients))
        for client in clients:
            client.greet()
        mock_clock.jump(1.5 * HttpSettings().idle_s)  # the process has no core
        assert [status_of(await client.ask(CLOSE)) for client in clients] == [200] * len(clients)


async def test_handshake_ends_however_late_its_turns(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    cert, key = write_pair(tmp_path)
    ours, theirs = trio.testing.memory_stream_pair()
    paced = PacedTransport(ours, partial(trio.sleep, 20.0), 1.0)
    client = trio.SSLStream(theirs, ssl.create_default_context(cafile=cert), server_hostname="localhost")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.SSLStream(paced, Tls(cert, key).context, server_side=True).do_handshake)
        await client.do_handshake()
    assert trio.current_time() >= 2 * 20.0


@pytest.mark.parametrize(("sent", "ends_at_s"), [(0, 1.0), (1, 0.5 + 20.0 + 1.0), (None, 0.5 + 20.0 + 1.0)])
async def test_handshake_that_a_client_leaves_is_ended(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, sent: int | None, ends_at_s: float
) -> None:
    """After none, one or all bytes of its first message; it takes no answer."""
    hello = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost").do_handshake()
    ours, theirs = trio.testing.lockstep_stream_pair()
    paced = PacedTransport(ours, partial(trio.sleep, 20.0), 1.0)

    async def shake_hands() -> None:
        with pytest.raises(trio.BrokenResourceError, match="the client did not"):
            await trio.SSLStream(paced, Tls(*write_pair(tmp_path)).context, server_side=True).do_handshake()
        assert trio.current_time() == pytest.approx(ends_at_s)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(shake_hands)
        await trio.sleep(0.5)
        if sent != 0:
            await theirs.send_all(hello.read()[:sent])


async def test_stop_gives_up_handshakes_and_finishes_answers(tmp_path: Path) -> None:
    resumed = trio.Event()

    async def slow(head: RequestHead, channel: Channel) -> None:
        await resumed.wait()
        await HttpExchange(head, channel, Shares(1)).answer(200, b"done")

    cert, key = write_pair(tmp_path)
    async with running(slow, Tls(cert, key)) as rig:
        silent, begun = await rig.open(), await rig.open()
        await begun.send_all(b"\x16\x03\x01\x02\x00\x01")
        context = ssl.create_default_context(cafile=cert)
        busy = trio.SSLStream(await rig.open(), context, server_hostname="localhost", https_compatible=True)
        await busy.send_all(GET)
        await rig.until(lambda: rig.counters.connections == 3)
        await trio.testing.wait_all_tasks_blocked(0.05)
        rig.stopping.set()
        await rig.until(lambda: rig.ends() == {"stopped": 2})
        for stream in (silent, begun):
            await stream.aclose()
        resumed.set()
        assert (await exchanged(busy, b"")).endswith(b"done")
        await rig.until(lambda: rig.ends() == {"stopped": 2, "closed": 1})


async def test_ended_tls_connections_leave_nothing_for_the_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each held 50 KB until a full collection, which is rare."""
    monkeypatch.setattr(listener, "HEADER_LIMIT_S", 0.1)

    def streams() -> int:
        return sum(isinstance(it, trio.SSLStream) for it in gc.get_objects())

    cert, key = write_pair(tmp_path)
    gc.collect()
    gc.disable()
    try:
        async with running(tls=Tls(cert, key)) as rig:
            for _ in range(3):
                async with await rig.open() as stream:
                    with suppress(trio.BrokenResourceError):
                        await stream.send_all(b"\x16\x03\x01 no hello")
                        await stream.receive_some()
            await rig.until(lambda: rig.ends() == {"tls": 3})
            assert streams() == 0
    finally:
        gc.enable()


async def test_refused_connections_leave_nothing_for_the_collector(rig: Rig) -> None:
    """Each was part of a cycle with h11's error until a full collection: 10 MiB of a front of 60, under attack."""
    gc.collect()
    gc.disable()
    try:
        for data, _ in REFUSED.values():
            await rig.send(data)
        await rig.until(lambda: rig.ends() == {"refused": len(REFUSED)} and not rig.counters.connections)
        await trio.testing.wait_all_tasks_blocked()
        assert not [it for it in gc.get_objects() if issubclass(type(it), HttpConnection)]
    finally:
        gc.enable()


async def test_a_storm_leaves_nothing_for_the_collector(tmp_path: Path) -> None:
    """Hostile requests of all kinds, some cut off or left without listening, over plain HTTP and TLS; SEED replays."""
    cert, key = write_pair(tmp_path)
    seed = os.environ.get("SEED") or str(random.SystemRandom().randrange(1 << 31))
    print(f"SEED={seed}")
    gc.collect()
    gc.disable()
    try:
        async with running() as plain, running(tls=Tls(cert, key)) as secure:
            await assail(Aim(plain.address[1], secure.address[1], cert), Tally(), seed, 1_500)
            await plain.until(lambda: not plain.counters.connections + secure.counters.connections)
            assert min(sum(rig.ends().values()) for rig in (plain, secure)) > 100
            assert not [it for it in gc.get_objects() if type(it) is HttpConnection]
    finally:
        gc.enable()


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with (
            pytest.raises(Exception, match="cannot listen there"),
            server._listening(HttpSettings(port=taken.getsockname()[1])),
        ):
            pass
