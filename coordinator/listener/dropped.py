"""Dropped messages: each is counted; one a second at most is logged, so that no peer can flood the log."""

from __future__ import annotations

import os
import socket
import struct
from collections import Counter
from typing import Final

from protocol.logs import fields, logger

#: Of a connection that is gone, or whose descriptor libzmq does not tell.
UNKNOWN: Final = "unknown"
#: `struct ucred` of SO_PEERCRED: pid, uid, gid.
UCRED: Final = struct.Struct("3i")
LOG_INTERVAL_S: Final = 1.0

log = logger("coordinator.listener.dropped")


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


class Dropped:
    """`counter` is keyed by (socket, reason). Reasons are few, because they label a metric."""

    def __init__(self, socket: str, counter: Counter[tuple[str, str]]) -> None:
        self._socket = socket
        self._counter = counter
        self._quiet_until = float("-inf")
        self._unlogged = 0

    def note(self, reason: str, peer: int | str, detail: str, now: float) -> None:
        """Count a dropped message; log it unless another was logged less than LOG_INTERVAL_S ago.

        `peer`: the descriptor of its connection, or the address that is known.
        """
        self._counter[self._socket, reason] += 1
        if now < self._quiet_until:
            self._unlogged += 1
            return
        address = peer if isinstance(peer, str) else peer_address(peer)
        log.warning(
            "message dropped",
            extra=fields(socket=self._socket, reason=reason, peer=address, detail=detail, unlogged=self._unlogged),
        )
        self._quiet_until = now + LOG_INTERVAL_S
        self._unlogged = 0
