"""Connections of a socket as libzmq's events report them, and how unwanted connections are ended.

libzmq accepts any number of connections, gives none a name before its first message, and has no call to end one. But
its events name the descriptor of each connection that opened or closed, and it treats the shutdown of a descriptor as a
disconnect by the peer. Events are read at each hello, and every SWEEP_INTERVAL_S (router.py).

The number of a descriptor is reused once its connection has closed. So events are read right before a number is used,
and libzmq reports the end of a connection before it closes the descriptor. What remains is a race of microseconds, in
which another connection may be ended; its peer reconnects.
"""

from __future__ import annotations

import os
import socket as std_socket
from collections.abc import Collection
from contextlib import suppress

import zmq
from zmq.utils.monitor import parse_monitor_message

from coordinator.listener.connection_tracker import ConnectionTracker
from protocol.transport.monitor import monitor_of


class ConnectionEvents:
    """Feeds the events of `socket`, which must not be bound yet, to the connection tracker. Times are trio's."""

    def __init__(self, socket: zmq.Socket[bytes], connection_tracker: ConnectionTracker) -> None:
        self.connection_tracker = connection_tracker
        self._socket = socket
        self._events = monitor_of(socket, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)

    def introduce(self, descriptor: int, user: str, now: float) -> None:
        """The connection has sent an accepted hello. Raises CapacityError when there are too many."""
        self._read(now)
        self.connection_tracker.introduce(descriptor, user)

    def cut_overdue(self, now: float) -> int:
        """End connections without an accepted hello in time; returns how many."""
        self._read(now)
        return self._cut_all(self.connection_tracker.overdue(now))

    def cut_users(self, users: Collection[str], now: float) -> int:
        """End the connections of these users; returns how many."""
        self._read(now)
        return self._cut_all(self.connection_tracker.of(users))

    def cut(self, descriptor: int) -> None:
        """End a connection. libzmq sees a disconnect and cleans up. Does nothing when the connection has closed."""
        self.connection_tracker.left(descriptor)
        with suppress(OSError), std_socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(std_socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop reading events; call before the socket closes."""
        self._socket.disable_monitor()
        self._events.close()

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
            if event["event"] == zmq.EVENT_ACCEPTED:
                self.connection_tracker.came(int(event["value"]), now)
            else:
                self.connection_tracker.left(int(event["value"]))
