"""Resident memory of this process, and how glibc keeps what was freed."""

from __future__ import annotations

import ctypes
import functools
import os
from contextlib import suppress
from typing import Final

MAPPED_BYTES_MIN: Final = 128 * 1024
#: Of mallopt(3).
M_MMAP_THRESHOLD: Final = -3

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


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
