"""The ports on which gloo listens: closed to new connections once all ranks are connected.

Gloo asks no connection who it is, keeps each that is made, and never stops listening. A filter on the listening socket
drops what is sent to it from then on; connections that were accepted before have no filter. Between the start of the
listener and `close_to_strangers` a peer that reaches the port could still stand in for a rank (docs/security.md).

Rejected: shutting the socket down (the thread of gloo that accepts would see it ready for ever); gloo's TLS (torch is
built without it); a firewall (needs rights that a worker does not have).
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

#: setsockopt(2) of Linux, and one instruction of a classic BPF program: return 0, which drops the packet.
SO_ATTACH_FILTER: Final = 26
DROP_ALL: Final = struct.pack("HBBI", 0x06, 0, 0, 0)


def listening() -> frozenset[int]:
    """Descriptors of this process's listening TCP sockets."""
    return frozenset(number for number in map(int, os.listdir("/proc/self/fd")) if _listens(number))


def close_to_strangers(descriptors: Iterable[int]) -> None:
    """Let no further connection be made to these listening sockets. They stay open, and so do accepted connections.

    Raises OSError where the kernel takes no filter.
    """
    program = ctypes.create_string_buffer(DROP_ALL, len(DROP_ALL))
    filter_of_one = struct.pack("@HP", 1, ctypes.addressof(program))
    for number in descriptors:
        with _borrowed(number) as listener:
            listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, filter_of_one)


def _listens(number: int) -> bool:
    with suppress(OSError), _borrowed(number) as found:  # OSError: it is no socket, or was closed meanwhile
        is_tcp = found.family in (socket.AF_INET, socket.AF_INET6)
        return is_tcp and bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


@contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """A socket object for a descriptor that is not closed with it."""
    found = socket.socket(fileno=number)
    try:
        yield found
    finally:
        found.detach()
