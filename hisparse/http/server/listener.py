"""Connections of the front: accepted, bounded, contained, and drained at the end.

Each runs in a task of its own under `_contain`: whatever a connection raises ends that connection alone, and is counted
and logged. There are `connections_max` at most. When all are taken, the oldest that are `evictable` make room: those of
clients that have shown no key, or are in arrears, or hold more than their share, before those that wait for other known
clients. A new one is closed when there is none.
"""

from __future__ import annotations

import math
import select
import socket
from collections import Counter
from functools import partial
from ipaddress import IPv6Address, IPv6Network
from typing import Final

import trio

from basics.rooms import RoomUse
from hisparse.http.server.connection import HEADER_LIMIT_S, End, Handler, HttpConnection
from hisparse.http.server.fairness.turns import ClientTurns
from hisparse.http.server.tls import PacedTransport, Tls
from metrics.state import HttpCounters
from protocol.logs import logger
from protocol.settings import HttpSettings

#: Connections that the kernel holds until they are accepted.
BACKLOG: Final = 256
#: Open at the same time, at least, and for each request that may be answered.
CONNECTIONS_MIN: Final = 1_024
CONNECTIONS_PER_PLACE: Final = 4
#: One in so many of all connections may be idle ones of one known client before they are like those of strangers.
KNOWN_SHARE: Final = 4
#: One in so many is closed at once when all are taken: looking for them takes time for each that is open.
ROOM_SHARE: Final = 64
#: How long answers may go on after the front was told to stop.
STOP_DEADLINE_S: Final = 30.0
#: How long saying goodbye may take, over TLS.
CLOSE_LIMIT_S: Final = 1.0
#: Defects are logged with their traceback this often at most; all are counted.
DEFECT_LOG_INTERVAL_S: Final = 1.0

log = logger("http.listener")


def connections_max(requests_max: int) -> int:
    """Of a front that answers so many requests at a time."""
    return max(CONNECTIONS_MIN, CONNECTIONS_PER_PLACE * requests_max)


class HttpListener:
    """Serves a listening socket. One for each process."""

    def __init__(
        self,
        listening: socket.socket,
        handler: Handler,
        counters: HttpCounters,
        tls: Tls | None = None,
        connections_max: int = CONNECTIONS_MIN,
        idle_s: float = HttpSettings().idle_s,
    ) -> None:
        """The socket is closed at the end of `run`."""
        self._connections_max = connections_max
        self._idle_s = idle_s
        self._socket = listening
        self._handler = handler
        self._counters = counters
        self._tls = tls
        self._turns = ClientTurns()
        self._open: dict[HttpConnection, None] = {}  # the oldest first
        self._logged_at = -math.inf

    def room_use(self) -> dict[str, RoomUse]:
        """Measure the rooms of connections, and of clients that were refused. From any thread."""
        connections = RoomUse(len(self._open), self._connections_max)
        return {"http_connections": connections, "http_arrears": self._turns.arrears.use}

    async def run(self, stopping: trio.Event) -> None:
        """Until `stopping`, and until the last answer is whole, or STOP_DEADLINE_S after that."""
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._socket))
        async with trio.open_nursery() as dealing:
            dealing.start_soon(self._turns.run)
            async with trio.open_nursery() as connections:
                async with trio.open_nursery() as accepting:
                    serve = partial(trio.serve_listeners, handler_nursery=connections)
                    accepting.start_soon(serve, self._run, [listener])
                    await stopping.wait()
                    accepting.cancel_scope.cancel()
                await listener.aclose()
                for connection in tuple(self._open):
                    connection.finish()
                connections.cancel_scope.deadline = trio.current_time() + STOP_DEADLINE_S
            dealing.cancel_scope.cancel()

    async def _run(self, stream: trio.SocketStream) -> None:
        """One connection, to its end. Raises nothing."""
        end = End.STOPPED
        try:
            end = await self._contain(stream)
        finally:
            self._counters.connection_ends[(end.value,)] += 1
            stream.socket.close()  # at once: with aclose a refused connection takes a fifth more

    async def _contain(self, stream: trio.SocketStream) -> End:
        if not self._make_room():
            return End.EVICTED
        try:
            return await self._serve(stream)
        except Exception:  # of one connection: the others have done nothing
            if trio.current_time() >= self._logged_at + DEFECT_LOG_INTERVAL_S:
                self._logged_at = trio.current_time()
                log.exception("defect")
            return End.DEFECT

    async def _serve(self, socket_stream: trio.SocketStream) -> End:
        stream: trio.abc.Stream = socket_stream
        try:
            address = party_of(socket_stream.socket.getpeername()[0])
        except OSError:
            return End.UNREAD  # the client has left already
        if self._tls is not None:
            transport = PacedTransport(socket_stream, partial(self._turns.strangers.turn, address), HEADER_LIMIT_S)
            stream = trio.SSLStream(transport, self._tls.context, server_side=True, https_compatible=True)
        has_bytes = partial(_has_bytes, socket_stream.socket)
        connection = HttpConnection(stream, self._handler, self._turns, address, self._idle_s, has_bytes)
        self._open[connection] = None
        self._counters.connections = len(self._open)
        try:
            with connection.scope:
                if isinstance(stream, trio.SSLStream):
                    with connection.waiting() as handshake:
                        if not await _shake_hands(stream):
                            return End.TLS
                    if handshake.cancelled_caught:
                        return End.STOPPED
                end = await connection.run()
                if isinstance(stream, trio.SSLStream):
                    with trio.move_on_after(CLOSE_LIMIT_S):
                        await stream.aclose()
                return end
            return End.EVICTED
        finally:
            del self._open[connection]
            self._counters.connections = len(self._open)
            if isinstance(stream, trio.SSLStream):
                vars(stream).clear()  # it refers to itself, and holds 50 KB and more until a full collection

    def _make_room(self) -> bool:
        if len(self._open) < self._connections_max:
            return True
        held = Counter(it.party for it in self._open if it.is_known)
        share = max(1, self._connections_max // KNOWN_SHARE)
        evictable = [it for it in self._open if it.evictable and not it.evicted]
        evictable.sort(key=lambda it: it.is_known and held[it.party] <= share)
        for it in evictable[: max(1, self._connections_max // ROOM_SHARE)]:
            it.evict()
        return bool(evictable)


def party_of(host: str) -> str:
    """The client with this address; of IPv6 the network of 64 bits, of which one client may have all addresses."""
    if ":" not in host:
        return host
    address = IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or IPv6Network((address, 64), strict=False))


def _has_bytes(connected: trio.socket.SocketType) -> bool:
    """Tell whether there is something to read: bytes, the end of the other side, or an error."""
    look = select.poll()
    look.register(connected.fileno(), select.POLLIN)
    return bool(look.poll(0))


async def _shake_hands(stream: trio.SSLStream[PacedTransport]) -> bool:
    try:
        await stream.do_handshake()
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return False
    stream.transport_stream.pace = None
    return True
