"""Connections of a socket as libzmq's events report them, and how unwanted connections are ended.

libzmq accepts any number of connections, gives none a name before its first message, and has no call to end one. But
its events name the descriptor of each connection that opened or closed, and it treats the shutdown of a descriptor as a
disconnect by the peer. Events are read as they come, while `watch` runs, and before each use of a descriptor.

The number of a descriptor is reused once its connection has closed. So events are read right before a number is used,
and libzmq reports the end of a connection before it closes the descriptor. What remains is a race of microseconds, in
which another connection may be ended; its peer reconnects.

libzmq still reads what the kernel holds of a connection that is shut down. Rejected: reading it here first. libzmq
would go on in the middle of a frame, and take the peer's payload for frames.

The kernel counts the bytes that libzmq has read from a connection:

    tcp     TCP_INFO: bytes received since the connection began, less those that wait in the kernel
    ipc     SO_PEEK_OFF: the kernel lowers this offset, which serves MSG_PEEK alone, by each byte that is read

An ipc connection is counted from the moment that its accept is noticed; what libzmq read before is unknown.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
from collections.abc import Collection
from contextlib import suppress
from typing import Final

import trio
import zmq
from zmq.utils.monitor import parse_monitor_message

from basics.process_memory import resident_bytes
from coordinator.listener.connection_tracker import ConnectionTracker
from coordinator.listener.unfinished import UnfinishedMessages
from protocol.transport.watched import Watched, end_connection, monitor_of

#: Of socket(7); Python has no name for it.
SO_PEEK_OFF: Final = 42
#: Where the offset starts, and below which it is set there again.
OFFSET_MAX: Final = (1 << 31) - 1
OFFSET_MIN: Final = 1 << 30
#: Place of tcpi_bytes_received in struct tcp_info.
RECEIVED_AT: Final = 128


class ByteCounter:
    """Counts the bytes of one connection. A descriptor that has closed meanwhile counts nothing."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._offset = OFFSET_MAX
        self._total = 0
        self._family = socket.AF_UNIX
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            self._family = connection.family
            if self._family == socket.AF_UNIX:
                connection.setsockopt(socket.SOL_SOCKET, SO_PEEK_OFF, OFFSET_MAX)

    @property
    def is_exact(self) -> bool:
        """Return whether the first byte counts."""
        return self._family != socket.AF_UNIX

    def arrived(self) -> int:
        """Bytes that libzmq has read since the last call."""
        try:
            with self._socket() as connection:
                return self._read_tcp(connection) if self.is_exact else self._read_ipc(connection)
        except OSError:
            return 0

    def _socket(self) -> socket.socket:
        """The connection under another descriptor. Naming family and type saves calls of the kernel."""
        return socket.socket(self._family, socket.SOCK_STREAM, 0, os.dup(self._descriptor))

    def _read_tcp(self, connection: socket.socket) -> int:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED_AT + 8)
        (received,) = struct.unpack_from("=Q", info, RECEIVED_AT)
        (waiting,) = struct.unpack("=i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))
        arrived = max(received - waiting - self._total, 0)
        self._total += arrived
        return int(arrived)

    def _read_ipc(self, connection: socket.socket) -> int:
        offset = connection.getsockopt(socket.SOL_SOCKET, SO_PEEK_OFF)
        arrived, self._offset = self._offset - offset, offset
        if offset < OFFSET_MIN:
            connection.setsockopt(socket.SOL_SOCKET, SO_PEEK_OFF, OFFSET_MAX)
            self._offset = connection.getsockopt(socket.SOL_SOCKET, SO_PEEK_OFF)  # a read may have come between
        return max(arrived, 0)


class ConnectionEvents:
    """Feeds the events of `socket`, which must not be bound yet, to the connection tracker and to `unfinished`.

    Times are trio's.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], connection_tracker: ConnectionTracker, unfinished: UnfinishedMessages
    ) -> None:
        self.connection_tracker = connection_tracker
        self.unfinished = unfinished
        self._socket = socket
        self._events = monitor_of(socket, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._watched = Watched(self._events)
        self._counters: dict[int, ByteCounter] = {}
        #: When a connection with an unfinished message ended last.
        self.given_up_at = float("-inf")

    async def watch(self) -> None:
        """Read events as they come, until cancelled or closed: what libzmq reads earlier over ipc is not counted."""
        with suppress(trio.ClosedResourceError):
            while True:
                await self._watched.wait_for(zmq.POLLIN)
                self._read(trio.current_time())
                await trio.lowlevel.checkpoint()

    def introduce(self, descriptor: int, user: str) -> None:
        """The connection has sent an accepted hello. Raises CapacityError when there are too many."""
        self._read(trio.current_time())
        self.connection_tracker.introduce(descriptor, user)
        self.unfinished.introduce(descriptor)

    def took(self, descriptor: int, taken_bytes: int) -> None:
        """The router took a message that had so many bytes on the connection."""
        if descriptor not in self.unfinished:
            self._read(trio.current_time())
        self.unfinished.took(descriptor, taken_bytes)

    def cut_overdue(self) -> int:
        """End connections without an accepted hello in time; returns how many."""
        if self._watched.closed:
            return 0
        now = trio.current_time()
        self._read(now)
        return self._cut_all(self.connection_tracker.overdue(now))

    def look(self, now: float) -> None:
        """Count the bytes that arrived at each connection."""
        self._read(now)
        arrived = {descriptor: counter.arrived() for descriptor, counter in self._counters.items()}
        self.unfinished.look(arrived, resident_bytes(), now)

    def cut_unfinished(self, now: float, *, is_empty: bool) -> list[str]:
        """After `look`: end connections with an unfinished message over a bound; returns which bound, for each.

        `is_empty`: no whole message has waited for the router since.
        """
        overdue = self.unfinished.overdue(now, is_empty=is_empty)
        self._cut_all([descriptor for descriptor, _ in overdue])
        return [rule for _, rule in overdue]

    def cut_users(self, users: Collection[str]) -> int:
        """End the connections of these users; returns how many."""
        self._read(trio.current_time())
        return self._cut_all(self.connection_tracker.of(users))

    def cut(self, descriptor: int) -> None:
        """End a connection. libzmq sees a disconnect and cleans up. Does nothing when the connection has closed."""
        self._forget(descriptor, trio.current_time())
        end_connection(descriptor)

    def close(self) -> None:
        """Stop reading events; call before the socket closes."""
        self._socket.disable_monitor()
        self._watched.close()

    def _cut_all(self, descriptors: Collection[int]) -> int:
        for descriptor in descriptors:
            self.cut(descriptor)
        return len(descriptors)

    def _read(self, now: float) -> None:
        while True:
            try:
                event = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            descriptor = int(event["value"])
            self._forget(descriptor, now)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._counters[descriptor] = counter = ByteCounter(descriptor)
                self.connection_tracker.came(descriptor, now)
                self.unfinished.came(descriptor, resident_bytes(), now, is_exact=counter.is_exact)

    def _forget(self, descriptor: int, now: float) -> None:
        self.connection_tracker.left(descriptor)
        self._counters.pop(descriptor, None)
        if self.unfinished.left(descriptor):
            self.given_up_at = now
