"""What libzmq has read from a connection, as the kernel counts it, and the memory of the process.

    tcp     TCP_INFO: bytes received since the connection began, less those that wait in the kernel
    ipc     SO_PEEK_OFF: the kernel lowers this offset, which serves MSG_PEEK alone, by each byte that is read

An ipc connection is counted from the moment that its accept is noticed; what libzmq read before is unknown.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
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

MAPPED_BYTES_MIN: Final = 128 * 1024
#: Of mallopt(3).
M_MMAP_THRESHOLD: Final = -3

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


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
        """Whether the first byte counts."""
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


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(os.pread(_statm(os.getpid()), 128, 0).split()[1]) * PAGE_BYTES


@functools.cache
def _statm(pid: int) -> int:
    """A descriptor that is read again and again."""
    return os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)


def map_large_buffers() -> None:
    """Have glibc map buffers from MAPPED_BYTES_MIN on and unmap them when they are freed. By itself it learns from each
    large buffer that is freed to keep the next ones, up to 32 MiB; `return_memory` then has to find them. At the start
    of the process; other C libraries are left as they are."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES_MIN)


def return_memory() -> None:
    """Have glibc return its free memory to the system, so that `resident_bytes` shows what is in use."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
