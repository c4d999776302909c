"""A ZMQ socket that trio tasks wait for: descriptors, edges, contexts and the options that both ends set.

pyzmq has no trio support, and existing adapters lose a message with each cancelled receive. This module waits on the
socket's descriptor. The rules, each with a test (tests/coordinator/listener/test_sockets.py):

  * The descriptor is edge-triggered and means "look again", not "readable": EVENTS is read before every wait.
  * Any send or receive may consume the edge that a parked task waits for, so EVENTS is read again afterwards and the
    parked task woken. Without that a stream stalls every few thousand messages.
  * A receive is a cancellation point only before it takes a message. It then drains without a checkpoint until the
    socket is empty or the batch is full: a cancelled receive loses nothing, a busy peer cannot starve other tasks.

Routers and dealers have separate contexts. In one context, the ipc connections of a closed ROUTER would stay up until
the context ends, and dealers of the same process (tests, `hisparse up`) would not see the loss.

Rejected: one thread per socket (a hand-over per message, and two more bounded queues); proxying through inproc.
"""

from __future__ import annotations

import functools
import itertools
import os
import socket as std_socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Literal, TypeVar

import trio
import zmq

from protocol.errors import ConfigError, Unavailable

#: Messages taken per receive call, so that one busy socket cannot keep the other tasks waiting.
BATCH_MESSAGES_MAX: Final = 256
#: How long a closing socket goes on sending queued messages.
LINGER_MS: Final = 200
#: TCP probes a silent connection after KEEPALIVE_S, and again after as long; it ends when KEEPALIVE_PROBES are not
#: answered, or bytes are not acknowledged for as long. ipc connections end with their process. libzmq's heartbeats are
#: off: they add bytes to a connection that are of no message (coordinator/listener/unfinished.py).
KEEPALIVE_S: Final = 2
KEEPALIVE_PROBES: Final = 2
#: Option of a context: whether parts of messages are kept inside the buffers of 8 KiB that libzmq reads into. A part of
#: 40 bytes that is kept so occupies a buffer. pyzmq has no name for it.
ZERO_COPY_RECV: Final = 10

T = TypeVar("T")


@functools.cache
def context_of(kind: Literal["router", "dealer"]) -> zmq.Context[zmq.Socket[bytes]]:
    """The context of all sockets of one kind in this process."""
    context = zmq.Context(io_threads=1)
    context.max_sockets = 4096
    context.set(ZERO_COPY_RECV, 0)
    return context


class Watched:
    """A ZMQ socket whose readiness trio tasks of one thread wait for.

    At most one task waits on the descriptor (trio allows one); other tasks park. When its wait ends, by readiness or
    cancellation, the parked tasks run, and one of them becomes the next to wait on the descriptor.
    """

    def __init__(self, socket: zmq.Socket[bytes], descriptor: int | None = None) -> None:
        self._socket = socket
        self._fd = int(socket.getsockopt(zmq.FD)) if descriptor is None else descriptor
        self._wanted: list[int] = []
        self._watch: trio.CancelScope | None = None
        self._is_roused = False
        self._parked = trio.lowlevel.ParkingLot()

    @property
    def closed(self) -> bool:
        return bool(self._socket.closed)

    def close(self) -> None:
        """Close now; queued messages are sent for LINGER_MS. Waiting tasks raise trio.ClosedResourceError."""
        if not self.closed:
            if self._watch is not None:
                trio.lowlevel.notify_closing(self._fd)
            self._socket.close()
            self._parked.unpark_all()

    def _drain(self, take: Callable[[], T], most: int = BATCH_MESSAGES_MAX) -> list[T]:
        if self.closed:
            raise trio.ClosedResourceError("the socket was closed")
        batch: list[T] = []
        while len(batch) < most:
            try:
                batch.append(take())
            except zmq.Again:
                break
        self._stir()
        return batch

    def _events(self) -> int:
        if self.closed:
            raise trio.ClosedResourceError("the socket was closed")
        return int(self._socket.getsockopt(zmq.EVENTS))

    def _is_ready(self, mask: int) -> bool:
        return bool(self._events() & mask)

    def _stir(self) -> None:
        """After a send or receive, which may have consumed the edge: wake the waiting tasks if an event is set. Tasks
        that were woken and have not run yet look for themselves."""
        if self._watch is not None and not self._is_roused and any(map(self._is_ready, set(self._wanted))):
            self._rouse()

    def _rouse(self) -> None:
        if self._watch is not None:
            self._is_roused = True
            self._watch.cancel()
        self._parked.unpark_all()

    async def wait_for(self, mask: int) -> None:
        """Return once an event in `mask` is set. A checkpoint only if it has to wait. Cancelled: nothing changes."""
        mask = int(mask)  # not an enum of pyzmq: its `&` takes half as long as the look at the socket
        self._wanted.append(mask)
        try:
            while not self._is_ready(mask):
                if self._watch is not None:
                    await self._parked.park()
                else:
                    await self._watch_descriptor()
        finally:
            self._wanted.remove(mask)

    async def _watch_descriptor(self) -> None:
        self._watch = trio.CancelScope()
        try:
            with self._watch:
                await trio.lowlevel.wait_readable(self._fd)
        finally:
            self._watch, self._is_roused = None, False
            self._parked.unpark_all()


def set_options(socket: zmq.Socket[bytes], endpoint: str, queue_messages: int, *, bytes_max: int) -> None:
    socket.setsockopt(zmq.SNDHWM, queue_messages)
    socket.setsockopt(zmq.RCVHWM, queue_messages)
    socket.setsockopt(zmq.MAXMSGSIZE, bytes_max)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    if not endpoint.startswith("ipc://"):
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
        socket.setsockopt(zmq.TCP_MAXRT, 1_000 * KEEPALIVE_S * (KEEPALIVE_PROBES + 1))


def unavailable(endpoint: str, message: str) -> Unavailable:
    return Unavailable(
        message, field="endpoint", value=endpoint, remedy="start the coordinator, or wait until it is back"
    )


def unusable(endpoint: str, error: zmq.ZMQError) -> ConfigError:
    return ConfigError(
        f"unusable: {error}", field="endpoint", value=endpoint, remedy="use ipc:///PATH or tcp://HOST:PORT"
    )


#: Numbers of the addresses. pyzmq would use the socket's descriptor. A new socket may get the same descriptor before
#: libzmq frees the address, because libzmq closes sockets later: "Address already in use".
_NUMBERS: Final = itertools.count()
#: SO_LINGER of a connection whose close resets it.
_RESET: Final = struct.pack("ii", 1, 0)


def monitor_of(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """A socket that receives these `events` of `socket` (zmq.EVENT_*, or-ed), for parse_monitor_message.

    The caller closes it, after `socket.disable_monitor()`.
    """
    address = f"inproc://monitor-{next(_NUMBERS)}"
    socket.monitor(address, events)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)  # unbounded: at a bound libzmq would wait, and all connections with it
    monitor.connect(address)
    return monitor


def end_connection(descriptor: int) -> None:
    """End a connection of libzmq, which takes a shutdown of its descriptor for a disconnect by the peer and closes it.

    The close resets a tcp connection. Without that, a peer that waits for room to send would not hear of the end for
    minutes: Linux announces no room once reading is shut down. Does nothing where the connection has closed already.
    """
    with suppress(OSError), std_socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.setsockopt(std_socket.SOL_SOCKET, std_socket.SO_LINGER, _RESET)
        connection.shutdown(std_socket.SHUT_RDWR)
