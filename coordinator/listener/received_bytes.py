"""Bytes that libzmq has read from a connection, as the kernel counts them.

    tcp     TCP_INFO: bytes received since the connection began, less those that wait in the kernel
    ipc     SO_PEEK_OFF: the kernel lowers this offset, which serves MSG_PEEK alone, by each byte that is read

An ipc connection is counted from the moment that its accept is noticed; what libzmq read before is unknown.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
from contextlib import suppress
from typing import Final

#: Of socket(7); Python has no name for it.
SO_PEEK_OFF: Final = 42
#: Where the offset starts, and below which it is set there again.
OFFSET_MAX: Final = (1 << 31) - 1
OFFSET_MIN: Final = 1 << 30
#: Place of tcpi_bytes_received in struct tcp_info.
RECEIVED_AT: Final = 128


class ByteCounter:
    """Counts the bytes of one connection. A descriptor that has closed meanwhile counts nothing."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._offset = OFFSET_MAX
        self._total = 0
        self._family = socket.AF_UNIX
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            self._family = connection.family
            if self._family == socket.AF_UNIX:
                connection.setsockopt(socket.SOL_SOCKET, SO_PEEK_OFF, OFFSET_MAX)

    @property
    def is_exact(self) -> bool:
        """Return whether the first byte counts."""
        return self._family != socket.AF_UNIX

    def arrived(self) -> int:
        """Bytes that libzmq has read since the last call."""
        try:
            with self._socket() as connection:
                return self._read_tcp(connection) if self.is_exact else self._read_ipc(connection)
        except OSError:
            return 0

    def _socket(self) -> socket.socket:
        """The connection under another descriptor. Naming family and type saves calls of the kernel."""
        return socket.socket(self._family, socket.SOCK_STREAM, 0, os.dup(self._descriptor))

    def _read_tcp(self, connection: socket.socket) -> int:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED_AT + 8)
        (received,) = struct.unpack_from("=Q", info, RECEIVED_AT)
        (waiting,) = struct.unpack("=i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))
        arrived = max(received - waiting - self._total, 0)
        self._total += arrived
        return int(arrived)

    def _read_ipc(self, connection: socket.socket) -> int:
        offset = connection.getsockopt(socket.SOL_SOCKET, SO_PEEK_OFF)
        arrived, self._offset = self._offset - offset, offset
        if offset < OFFSET_MIN:
            connection.setsockopt(socket.SOL_SOCKET, SO_PEEK_OFF, OFFSET_MAX)
            self._offset = connection.getsockopt(socket.SOL_SOCKET, SO_PEEK_OFF)  # a read may have come between
        return max(arrived, 0)
