"""Who comes to a socket and leaves it, as libzmq's events say, and the end of connections that are not wanted.

libzmq takes any number of connections, names none of them before it speaks, and has no call to end one. But it says
which descriptor came and left, and takes the shutdown of a descriptor for its peer's hanging up. Events are read when
somebody introduces himself, and now and then.

A descriptor's number is another's as soon as its connection has ended. Events are read right before a number is used,
and libzmq tells of an end before it closes; what is left is a race of microseconds for one connection too many, whose
peer comes back.
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
    """The events of one `socket`, not yet bound, and the connection tracker that they fill. Times are trio's."""

    def __init__(self, socket: zmq.Socket[bytes], connection_tracker: ConnectionTracker) -> None:
        self.connection_tracker = connection_tracker
        self._socket = socket
        self._events = monitor_of(socket, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)

    def introduce(self, descriptor: int, user: str, now: float) -> None:
        """Raises CapacityError when there are too many."""
        self._read(now)
        self.connection_tracker.introduce(descriptor, user)

    def cut_overdue(self, now: float) -> int:
        """End what nobody has introduced in time; returns how many."""
        self._read(now)
        return self._cut_all(self.connection_tracker.overdue(now))

    def cut_users(self, users: Collection[str], now: float) -> int:
        """End the connections of these users; returns how many."""
        self._read(now)
        return self._cut_all(self.connection_tracker.of(users))

    def cut(self, descriptor: int) -> None:
        """libzmq sees the peer hang up and cleans up by itself. A number that is no connection any more: nothing."""
        self.connection_tracker.left(descriptor)
        with suppress(OSError), std_socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(std_socket.SHUT_RDWR)

    def close(self) -> None:
        """Before the socket closes."""
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
