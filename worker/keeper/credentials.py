"""A check of the user at the other end of a socket of this machine by the kernel's word."""

from __future__ import annotations

import os
import socket
import struct
from typing import Final, Protocol

from protocol.errors import ProtocolError

#: pid, uid, gid
FORM: Final = "3i"


class _Socket(Protocol):
    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


def require_own_user(connection: _Socket, uid: int | None = None) -> None:
    """Raise ProtocolError unless the other end is a process of user `uid`, by default this process's."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(FORM))
    peer = int(struct.unpack(FORM, data)[1])
    if peer != (os.geteuid() if uid is None else uid):
        remedy = "use a runtime directory of your own"
        raise ProtocolError("a process of another user", field="uid", value=peer, remedy=remedy)
