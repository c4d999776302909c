"""The events of a ZMQ socket, which libzmq sends to another socket of the same context, and how a connection that they
name is ended."""

from __future__ import annotations

import itertools
import os
import socket as std_socket
import struct
from contextlib import suppress
from typing import Final

import zmq

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
