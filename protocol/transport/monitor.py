"""The events of a ZMQ socket, which libzmq sends to another socket of the same context."""

from __future__ import annotations

import itertools
from typing import Final

import zmq

#: Numbers of the addresses. pyzmq would use the socket's descriptor. A new socket may get the same descriptor before
#: libzmq frees the address, because libzmq closes sockets later: "Address already in use".
_NUMBERS: Final = itertools.count()


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
