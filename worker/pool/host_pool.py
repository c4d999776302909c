"""The host pool: one mapped file per node that holds every host page and outlives every worker.

The file, its header and who may use it: worker/pool/file.py. The first worker of a node creates it, later ones attach
and must agree on its shape. Every byte is touched at creation, in parallel: a full disk or tmpfs is an error at start,
never a SIGBUS in a step. A worker with a CUDA device registers its mapping, in parallel too (registration.py).
Who owns which page is the coordinator's ledger.

The process that started the workers removes the file at the end: a worker cannot know that it is the last. Mappings
stay valid.

Rejected: multiprocessing.shared_memory, which unlinks the segment when any attached process is killed.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from kernels.layout import Geometry
from protocol.errors import CapacityError
from protocol.logs import fields, logger
from protocol.start_and_end import tell_step
from worker.pool.file import HEADER_BYTES, Header, OpenPool, open_pool_file, truncate
from worker.pool.registration import (
    TOUCH_BYTES,
    CudaRegistrar,
    FirstTouch,
    Registration,
    cut,
    drop_mapping,
    huge_shared_bytes,
    in_threads,
    registration_bytes,
    thread_count,
)

#: Lines about the same thing come at most this often.
LINE_INTERVAL_S: Final = 5.0
GIB: Final = 1 << 30


@contextmanager
def progress(what: str, total_bytes: int, log: logging.Logger, step: str) -> Iterator[Callable[[int], None]]:
    """Gives `advance(bytes)`, to be called from any thread; a last line says how long all of it took."""
    began = time.monotonic()
    with _bar(what, total_bytes) if sys.stderr.isatty() else _lines(what, total_bytes, log) as advance:
        yield _telling(step, total_bytes, advance)
    took_s = time.monotonic() - began
    gb_per_s = total_bytes / 1e9 / took_s if took_s else 0.0
    log.info(what, extra=fields(bytes=total_bytes, seconds=round(took_s, 3), gb_per_s=round(gb_per_s, 2)))


def _telling(step: str, total_bytes: int, advance: Callable[[int], None]) -> Callable[[int], None]:
    lock, done = threading.Lock(), 0
    tell_step(step, 0.0)

    def advance_and_tell(more: int) -> None:
        nonlocal done
        with lock:
            done += more
            tell_step(step, done / max(total_bytes, 1))
        advance(more)

    return advance_and_tell


@contextmanager
def _bar(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    console = Console(stderr=True)
    with Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda done: bar.advance(task, done)


@contextmanager
def _lines(what: str, total_bytes: int, log: logging.Logger) -> Iterator[Callable[[int], None]]:
    lock, done, next_at = threading.Lock(), 0, time.monotonic() + LINE_INTERVAL_S

    def advance(more: int) -> None:
        nonlocal done, next_at
        with lock:
            done += more
            if time.monotonic() < next_at:
                return
            next_at = time.monotonic() + LINE_INTERVAL_S
            share = 100 * done // max(total_bytes, 1)
        log.info(what, extra=fields(gib=round(done / GIB, 1), of_gib=round(total_bytes / GIB, 1), percent=share))

    yield advance


#: Of a pool that no cluster owns: in tests and benchmarks.
NO_OWNER: Final[Mapping[str, object]] = {}

#: From this size on small pages are told: below, nothing takes long.
SMALL_PAGES_TOLD_BYTES: Final = 4 << 30
SMALL_PAGES: Final = {
    "costs": "start and the proof of a worker's death take several times as long (docs/operations.md, huge pages)",
    "remedy": "mount the tmpfs of worker.pool_dir with huge=always, as in: mount -o remount,huge=always /dev/shm",
}

log = logger("worker.pool.host_pool")


class MappedPool:
    """A mapping of the pool. `pages` is uint8[host_pages, page_bytes], shared with every process of the node."""

    def __init__(self, path: Path, mapping: mmap.mmap, header: Header, *, created: bool) -> None:
        self.path = path
        self.created = created
        self.pool_id = header.pool_id
        self._mapping = mapping
        body = torch.frombuffer(mapping, dtype=torch.uint8, offset=HEADER_BYTES, count=header.pages * header.page_bytes)
        self.pages = body.view(header.pages, header.page_bytes)
        self._registration: Registration | None = None

    @classmethod
    def open(
        cls,
        path: Path,
        geometry: Geometry,
        host_pages: int,
        model_fingerprint: str = "",
        *,
        owner: Mapping[str, object] = NO_OWNER,
        halted: threading.Event | None = None,
    ) -> MappedPool:
        """Create the pool at `path`, or attach to it.

        Raises ConfigError when a pool of another shape or model is in use there or the path cannot be opened,
        CapacityError when the file system has not the room, Unavailable once `halted` is set, within about one piece.
        A pool that could not be created is given back to the file system, in steps.
        """
        halted = halted or threading.Event()
        header = Header.of(geometry, host_pages, model_fingerprint, owner)
        opened = open_pool_file(path, header, halted)
        try:
            if opened.found is not None:
                mapping = mmap.mmap(opened.descriptor, opened.found.file_bytes)
                return cls(path, mapping, opened.found, created=False)
            return cls(path, _create(opened, header, halted), header, created=True)
        finally:
            os.close(opened.descriptor)  # the mapping has a duplicate, and with it the lock

    def register(self, registrar: CudaRegistrar, halted: threading.Event) -> None:
        """Register all pages with a device. Raises as `Registration.make` does; then nothing is registered."""
        pages, page_bytes = self.pages.shape
        pieces = cut(pages, page_bytes, registration_bytes(pages * page_bytes, thread_count()))
        registration = Registration(registrar, self.pages.data_ptr())
        with progress("host pool registered", pages * page_bytes, log, "pool pin") as advance:
            registration.make(pieces, halted, advance)
        self._registration = registration

    def close(self) -> None:
        """Unregister and unmap in pieces, once the last tensor over the pool is gone; the file stays."""
        if self._registration is not None:
            self._registration.undo()
            self._registration = None
        pages, page_bytes = self.pages.shape
        in_threads(cut(pages, page_bytes, TOUCH_BYTES), drop_mapping(self.pages.data_ptr()), threading.Event())
        del self.pages
        try:
            self._mapping.close()
        except BufferError:  # a tensor elsewhere still looks at it: unmapped with that one
            return


def _create(opened: OpenPool, header: Header, halted: threading.Event) -> mmap.mmap:
    """Size, map and touch the file, then write its header and share the lock. The file is empty when it fails."""
    descriptor = opened.descriptor
    try:
        truncate(descriptor)
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, header.file_bytes)
        mapping = mmap.mmap(descriptor, header.file_bytes)
        _touch(descriptor, mapping, header, halted)
    except BaseException as error:
        truncate(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # not left to close: a mapping that is still referenced has a duplicate
        if isinstance(error, OSError):
            raise CapacityError(
                f"the host pool needs {header.file_bytes} bytes: {error.strerror}",
                field="worker.host_mem",
                value=header.file_bytes,
                remedy="lower worker.host_mem or free space in worker.pool_dir",
            ) from error
        raise
    header.write(descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return mapping


def _touch(descriptor: int, mapping: mmap.mmap, header: Header, halted: threading.Event) -> None:
    address = torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()
    touch = FirstTouch(descriptor, address + HEADER_BYTES, HEADER_BYTES)
    huge_before = huge_shared_bytes()
    with progress("host pool touched", header.file_bytes, log, "pool touch") as advance:
        in_threads(cut(header.pages, header.page_bytes, TOUCH_BYTES), touch, halted, advance)
    # Of all processes of the machine: another one that starts or ends meanwhile makes the figure a rough one.
    huge_bytes = min(header.file_bytes, max(0, huge_shared_bytes() - huge_before))
    log.info("host pool created", extra=fields(pages=header.pages, bytes=header.file_bytes, huge_page_bytes=huge_bytes))
    if header.file_bytes >= SMALL_PAGES_TOLD_BYTES and huge_bytes < header.file_bytes // 2:
        log.warning("host pool lies in small pages", extra=fields(**SMALL_PAGES))
