"""Origin of a connection, in words for logs."""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

#: Of a connection that is gone, or whose descriptor libzmq does not tell.
UNKNOWN: Final = "unknown"
#: `struct ucred` of SO_PEERCRED: pid, uid, gid.
UCRED: Final = struct.Struct("3i")


def peer_address(descriptor: int) -> str:
    """The peer of the socket `descriptor`: "10.0.0.2:41234", or "pid 4711" over ipc, or UNKNOWN.

    The descriptor belongs to libzmq, which may have closed it and used its number again.
    """
    try:
        duplicate = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return UNKNOWN
    with duplicate:
        try:
            if duplicate.family == socket.AF_UNIX:
                credentials = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size)
                return f"pid {UCRED.unpack(credentials)[0]}"
            host, port, *_ = duplicate.getpeername()
        except (OSError, ValueError):
            return UNKNOWN
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
