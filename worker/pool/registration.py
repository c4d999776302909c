"""Touching and registering a large mapping in parallel pieces, and letting it go in pieces too.

Why pieces. One registration of 512 GiB or more fails (SGLang #36798), a copy across two registrations fails, and one
call over a terabyte can be neither interrupted nor shared among threads. So a piece ends where an OS page and a host
page both end, no copy of rows or pages crosses two of them, and a stop waits for one piece at most.

    touch        MADV_POPULATE_WRITE (Linux 5.14): pages are allocated and mapped, and a full file system is an error
                 code instead of a SIGBUS; without it `posix_fallocate`, which allocates and does not map. Huge pages
                 are asked for: a tmpfs mounted with huge=always gives them, one with huge=advise because of that
    register     cudaHostRegister, which pins what was touched
    let go       unregister, then drop the page tables of each piece: the unmapping that is left costs nothing

Threads help because the kernel zeroes pages in the thread that touches them; both calls are made without the GIL.

Rejected: cudaHostAlloc and torch's pinned allocator (no file behind it, so nothing outlives the process, and sizes are
rounded up to a power of two: SGLang #36562); one registration per host page (hundreds of thousands of them).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from math import gcd
from pathlib import Path
from typing import Any, Final, NamedTuple

from protocol.errors import CapacityError, ConfigError, InternalError, Unavailable

#: What one thread touches, or lets go, between two looks at `halted`: 0.2 s where 16 threads share 4.7 GB/s.
TOUCH_BYTES: Final = 64 << 20
#: Largest registration, far below the 512 GiB that fail; 0.9 s where 16 threads share 19 GB/s. Smaller where that gives
#: each thread one.
REGISTER_BYTES_MAX: Final = 1 << 30
REGISTER_BYTES_MIN: Final = 256 << 20
THREADS_MAX: Final = 16
#: How often the waiting thread wakes, so that signals are handled.
WAKE_S: Final = 0.1
OS_PAGE_BYTES: Final = mmap.PAGESIZE
#: madvise(2): not in Python's mmap module.
MADV_POPULATE_WRITE: Final = 23
MADV_DONTNEED: Final = 4
MADV_HUGEPAGE: Final = 14
#: cudaHostRegisterPortable | cudaHostRegisterMapped
REGISTER_FLAGS: Final = 3

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

assert REGISTER_BYTES_MAX < 512 << 30


class Piece(NamedTuple):
    """Bytes of the host pages, from the first page on."""

    offset: int
    length: int


def cut(pages: int, page_bytes: int, piece_bytes: int) -> list[Piece]:
    """`pages` host pages in pieces of about `piece_bytes`, whose borders are those of a host page and of an OS page."""
    unit_pages = OS_PAGE_BYTES // gcd(page_bytes, OS_PAGE_BYTES)
    step = max(1, piece_bytes // (unit_pages * page_bytes)) * unit_pages
    return [Piece(at * page_bytes, min(step, pages - at) * page_bytes) for at in range(0, pages, step)]


def thread_count() -> int:
    return min(THREADS_MAX, len(os.sched_getaffinity(0)))


def registration_bytes(total_bytes: int, threads: int) -> int:
    """Size of a registration, so that every thread has one and none is too large."""
    return min(REGISTER_BYTES_MAX, max(REGISTER_BYTES_MIN, total_bytes // threads))


def in_threads(
    pieces: Sequence[Piece],
    action: Callable[[Piece], None],
    halted: threading.Event,
    advance: Callable[[int], None] = lambda length: None,
    threads: int = 0,
) -> None:
    """Do `action` to every piece. Raises what the first failing one raised, Unavailable once `halted`.

    However it ends, no thread is left: pieces begun are finished, others are not begun. `advance` is told the bytes of
    each piece done, from any thread.
    """
    failed = threading.Event()

    def one(piece: Piece) -> None:
        if halted.is_set() or failed.is_set():
            return
        action(piece)
        advance(piece.length)

    with ThreadPoolExecutor(threads or thread_count(), "pool") as executor:
        left = {executor.submit(one, piece) for piece in pieces}
        try:
            while left:
                done, left = wait(left, WAKE_S, FIRST_EXCEPTION)
                for future in done:
                    future.result()
        except BaseException:
            failed.set()
            raise
    if halted.is_set():
        raise Unavailable("stopped", field="worker.pool_dir", value="host pool")


# ---------------------------------------------------------------- first touch


class FirstTouch:
    """Allocates and maps pieces of a file mapped at `address`, whose host pages begin at `offset` in the file."""

    def __init__(self, descriptor: int, address: int, offset: int) -> None:
        self._descriptor = descriptor
        self._address = address
        self._offset = offset

    def __call__(self, piece: Piece) -> None:
        """Raises CapacityError when the file system or the memory limit has not the room."""
        begin, length = self._address + piece.offset, _whole_pages(piece.length)
        _libc.madvise(begin, length, MADV_HUGEPAGE)  # a wish: refused where the kernel has none
        if _libc.madvise(begin, length, MADV_POPULATE_WRITE) == 0:
            return
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            raise _no_room(code)
        try:
            os.posix_fallocate(self._descriptor, self._offset + piece.offset, piece.length)
        except OSError as error:
            raise _no_room(error.errno or 0) from error


def huge_shared_bytes() -> int:
    """Shared memory of this machine that lies in transparent huge pages; 0 where the kernel has none."""
    sizes = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next((int(size[1]) << 10 for size in sizes if size[0] == "ShmemHugePages:"), 0)


def _no_room(code: int) -> CapacityError:
    full = code in (errno.EFAULT, errno.ENOMEM, errno.ENOSPC)
    reason = "no room left on the file system, or in memory" if full else os.strerror(code)
    return CapacityError(
        f"the host pool could not be touched: {reason} ({errno.errorcode.get(code, code)})",
        remedy="lower worker.host_mem or free space in worker.pool_dir",
    )


def drop_mapping(address: int) -> Callable[[Piece], None]:
    """Gives the page tables of a piece back; its bytes stay in the file, and the next access maps them again."""

    def drop(piece: Piece) -> None:
        _libc.madvise(address + piece.offset, _whole_pages(piece.length), MADV_DONTNEED)

    return drop


def _whole_pages(length: int) -> int:
    return -(-length // OS_PAGE_BYTES) * OS_PAGE_BYTES


# ---------------------------------------------------------------- registration


class CudaRegistrar:
    """Pins memory for a device, and lets it go, through torch's runtime. Calls come from any thread."""

    def __init__(self, device: str) -> None:
        import torch

        cuda: Any = torch.cuda  # parts of it are not typed
        cuda.init()
        self._device = torch.device(device).index or 0
        self._runtime = cuda.cudart()
        self._set_device = cuda.set_device

    def register(self, address: int, length: int) -> None:
        """Raises ConfigError when the driver refuses."""
        self._set_device(self._device)
        code = int(self._runtime.cudaHostRegister(address, _whole_pages(length), REGISTER_FLAGS))
        if code:
            raise ConfigError(
                f"CUDA cannot register {length} bytes of the host pool (cudaError {code})",
                field="worker.pool_dir",
                value=code,
                remedy="put it on a tmpfs such as /dev/shm, and raise the limit of locked memory",
            )

    def unregister(self, address: int) -> None:
        """Raises InternalError when it was not registered."""
        self._set_device(self._device)
        code = int(self._runtime.cudaHostUnregister(address))
        if code:
            raise InternalError("not registered with CUDA", field="address", value=f"{address:#x} (cudaError {code})")


class Registration:
    """The registrations of one mapping, made and undone in parallel."""

    def __init__(self, registrar: CudaRegistrar, address: int, threads: int = 0) -> None:
        self._registrar = registrar
        self._address = address
        self._threads = threads
        self._made: list[Piece] = []

    def make(
        self,
        pieces: Sequence[Piece],
        halted: threading.Event,
        advance: Callable[[int], None] = lambda length: None,
    ) -> None:
        """Register every piece. Raises as `in_threads` does, and then nothing is registered."""

        def register(piece: Piece) -> None:
            self._registrar.register(self._address + piece.offset, piece.length)
            self._made.append(piece)

        try:
            in_threads(pieces, register, halted, advance, self._threads)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Unregister what is registered. Nothing may still copy."""
        made, self._made = self._made, []

        def unregister(piece: Piece) -> None:
            self._registrar.unregister(self._address + piece.offset)

        in_threads(made, unregister, threading.Event(), threads=self._threads)
