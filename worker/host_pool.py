"""The host pool: one mapped file per node that holds every host page and outlives every worker.

    0                 header: magic, version, tokens per page, bytes per page, pages, hash of geometry and model
    HEADER_BYTES      page 0      (layout of a page: kernels/layout.py)
    + page_bytes      page 1 ...

The first worker of a node creates it under an exclusive lock on the file itself, later ones attach and must agree on
every field of the header. The header is written last, so a creator that dies half-way leaves a file that the next one
creates anew. Blocks are allocated at creation: a full disk or tmpfs is an error at start, never a SIGBUS in a step.
The lock is held for the moment of creation only; who owns which page is the coordinator's ledger.

Whoever started the workers unlinks the file at the end: a worker cannot know that it is the last. Mappings stay valid.

Rejected: multiprocessing.shared_memory, which unlinks the segment when any attached process is killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
from pathlib import Path
from typing import Final

import torch

from coordinator.errors import CapacityError, ConfigError
from kernels.layout import PAGE_TOKENS, Geometry

MAGIC: Final = b"HISPARSE"
VERSION: Final = 1
HEADER_BYTES: Final = 4_096  # one page of the mapping, so that host pages start aligned
_HEADER: Final = struct.Struct("<8sIIQQ64s")

assert _HEADER.size <= HEADER_BYTES


class HostPool:
    """A mapping of the pool. `pages` is uint8[host_pages, page_bytes], shared with every process of the node."""

    def __init__(self, path: Path, mapping: mmap.mmap, host_pages: int, page_bytes: int, *, created: bool) -> None:
        self.path = path
        self.created = created
        self._mapping = mapping
        body = torch.frombuffer(mapping, dtype=torch.uint8, offset=HEADER_BYTES, count=host_pages * page_bytes)
        self.pages = body.view(host_pages, page_bytes)

    @classmethod
    def open(cls, path: Path, geometry: Geometry, host_pages: int, model_fingerprint: str = "") -> HostPool:
        """Create the pool at `path`, or attach to it.

        Raises ConfigError when a pool of another shape or model lies there or the path cannot be opened, CapacityError
        when the file system has not the room.
        """
        header = _header(geometry, host_pages, model_fingerprint)
        total = HEADER_BYTES + host_pages * geometry.page_bytes
        descriptor = _open_file(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            found = os.pread(descriptor, _HEADER.size, 0)
            created = not found.startswith(MAGIC)
            if created:
                _create(descriptor, path, header, total)
            else:
                _check(path, found, header)
            mapping = mmap.mmap(descriptor, total)
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # not left to close: the mapping keeps a duplicate open
            os.close(descriptor)
        return cls(path, mapping, host_pages, geometry.page_bytes, created=created)

    def close(self) -> None:
        """Unmap, once the last tensor over the pool is gone; the file stays."""
        del self.pages
        try:
            self._mapping.close()
        except BufferError:  # a tensor elsewhere still looks at it: unmapped with that one
            return


def _open_file(path: Path) -> int:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"cannot open the host pool: {error.strerror}",
            field="worker.pool_dir",
            value=path,
            remedy="name a directory this user may write",
        ) from error


def _header(geometry: Geometry, host_pages: int, model_fingerprint: str) -> bytes:
    digest = hashlib.sha256(f"{geometry!r} {model_fingerprint}".encode()).hexdigest()
    return _HEADER.pack(MAGIC, VERSION, PAGE_TOKENS, geometry.page_bytes, host_pages, digest.encode())


def _create(descriptor: int, path: Path, header: bytes, total: int) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.posix_fallocate(descriptor, 0, total)
    except OSError as error:
        os.ftruncate(descriptor, 0)
        raise CapacityError(
            f"the host pool needs {total} bytes: {error.strerror}",
            field="worker.host_mem",
            value=path,
            remedy="lower worker.host_mem or free space there",
        ) from error
    os.pwrite(descriptor, header, 0)


def _check(path: Path, found: bytes, wanted: bytes) -> None:
    """ConfigError naming the first header field in which the pool found differs from the one wanted."""
    fields = ("magic", "version", "tokens per page", "bytes per page", "pages", "geometry and model")
    for name, ours, theirs in zip(fields, _HEADER.unpack(wanted), _HEADER.unpack(found), strict=True):
        if ours != theirs:
            raise ConfigError(
                f"the pool at {path} has {name} {_text(theirs)}, this worker {_text(ours)}",
                field="worker.host_mem" if name == "pages" else "worker.model",
                value=_text(ours),
                remedy="start every worker of a node with the same model and host_mem, or remove the pool file",
            )


def _text(value: bytes | int) -> str:
    return value.decode("ascii", "replace")[:16] if isinstance(value, bytes) else str(value)
