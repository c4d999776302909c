"""The events of a ZMQ socket, as libzmq tells them to another socket of the same context."""

from __future__ import annotations

import itertools
from typing import Final

import zmq

#: Numbers for the addresses. pyzmq would take the socket's descriptor, which the next socket may have before libzmq has
#: let go of the address, as it closes sockets later: "Address already in use".
_NUMBERS: Final = itertools.count()


def monitor_of(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """A socket that these `events` of `socket` (zmq.EVENT_*, or-ed) are read from, by parse_monitor_message.

    It is the caller's to close, after `socket.disable_monitor()`.
    """
    address = f"inproc://monitor-{next(_NUMBERS)}"
    socket.monitor(address, events)
    told: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    told.setsockopt(zmq.RCVHWM, 0)  # libzmq would wait for room, and with it every connection
    told.connect(address)
    return told
