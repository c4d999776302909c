"""Engine `shared`: both nodes are on one host, and the receiver copies out of the sender's mapped pool file.

The sender only says which of its pages hold what, and with which checksum. So only the receiver's process ever
writes to the destination: a revocation waits for copies under way, and a sender that hangs or dies holds nothing up.
Its pages may get another owner while they are copied; then the checksum does not fit.

The mapping takes the shared lock by which the file counts as in use (worker/pool/file.py), so its memory is not
given back under a copy. Copies run in threads, without the GIL, with the checksum taken block by block on the way.

Rejected: the sender copies into the receiver's pool (as fast, but a sender that hangs in the middle of a copy cannot
be stopped, and the pool file outlives its receiver: pages would stay in quarantine until every such sender's exit is
proved).
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import deque
from concurrent.futures import Future
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from protocol.errors import ConfigError, ProtocolError, Unavailable
from worker.pool.file import Header, lock
from worker.transfer.checksum import checksum, copy_with_checksum
from worker.transfer.engines.base import Jobs, WriteEnd
from worker.transfer.interface import PoolMemory
from worker.transfer.receiving import CheckUnit
from worker.transfer.sender_actions import Post


class _PoolFile(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Which file, and that it is that one."""

    path: str
    file_offset: int
    pages: int
    page_bytes: int
    pool_id: int


class SharedTarget:
    fetches = True
    needs_progress = False

    def __init__(self, pool: PoolMemory) -> None:
        self._pages = pool.pages
        self._pools: dict[str, npt.NDArray[np.uint8]] = {}

    def admit(self, sender: str, place: bytes) -> bytes:
        """Map the pool of `sender`. Raises Unavailable when its file is gone or is another one, ProtocolError."""
        try:
            found = msgspec.msgpack.decode(place, type=_PoolFile)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"not the place of a pool: {error}", field="transfer", value=sender) from error
        if found.page_bytes != self._pages.shape[1]:
            raise ProtocolError(
                f"its pool has pages of {found.page_bytes} bytes, this one of {self._pages.shape[1]}", field="transfer"
            )
        self._pools[sender] = _map(found)
        return b""

    def take(self, check: CheckUnit) -> int:
        extent, pages = slice(check.offset, check.offset + check.length), self._pools[check.sender]
        if not 0 <= check.source < len(pages):
            return ~check.checksum  # no such page: nothing that fits
        return self.copy(self._pages[check.page, extent], pages[check.source, extent])

    def copy(self, target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> int:
        """The checksum of `target` after it."""
        return copy_with_checksum(target, source)

    def shut_out(self, sender: str) -> None:
        del self._pools[sender]

    def progress(self) -> None: ...

    def close(self) -> None:
        self._pools.clear()


class SharedSource:
    needs_progress = False

    def __init__(self, pool: PoolMemory, jobs: Jobs) -> None:
        self._pages = pool.pages
        self._jobs = jobs
        self._running: deque[tuple[Post, Future[int]]] = deque()

    def connect(self, peer: str, endpoint: int, blob: bytes) -> None: ...

    def disconnect(self, peer: str, endpoint: int) -> None:
        self._running = deque(it for it in self._running if (it[0].peer, it[0].endpoint) != (peer, endpoint))

    def post(self, post: Post) -> None:
        extent = self._pages[post.source, post.offset : post.offset + post.length]
        self._running.append((post, self._jobs.submit(partial(checksum, extent))))

    def poll(self) -> list[WriteEnd]:
        ended: list[WriteEnd] = []
        for _ in range(len(self._running)):  # each is asked once: a job may end between two questions
            post, digest = self._running.popleft()
            if digest.done():
                ended.append(WriteEnd(post, digest.result(), ""))
            else:
                self._running.append((post, digest))
        return ended

    def close(self) -> None: ...


def place_of(pool: PoolMemory) -> bytes:
    """What a receiver needs to map `pool`."""
    pages, page_bytes = pool.pages.shape
    return msgspec.msgpack.encode(_PoolFile(pool.path, pool.file_offset, pages, page_bytes, pool.pool_id))


def _map(place: _PoolFile) -> npt.NDArray[np.uint8]:
    """uint8[pages, page_bytes] over the pool at `place`. Raises Unavailable, ConfigError."""
    try:
        descriptor = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise Unavailable(
            f"cannot open the pool of the sender: {error.strerror}",
            field="worker.transfer",
            value=place.path,
            remedy="engine shared is for workers of one host that see one pool_dir; else use nixl or mooncake",
        ) from error
    try:
        if not lock(descriptor, fcntl.LOCK_SH):
            raise Unavailable("the sender is creating it", field="worker.transfer", value=place.path)
        header = Header.read(descriptor)
        if header is None or header.pool_id != place.pool_id:
            found = header.pool_id if header else "none"
            raise ConfigError(
                f"the sender's pool has id {place.pool_id}, the file here {found}",
                field="worker.transfer",
                value=place.path,
                remedy="engine shared is for workers of one host that see one pool_dir; else use nixl or mooncake",
            )
        mapping = mmap.mmap(descriptor, place.file_offset + place.pages * place.page_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)  # the mapping has a duplicate, and with it the lock
    body = np.frombuffer(mapping, np.uint8, place.pages * place.page_bytes, place.file_offset)
    return body.reshape(place.pages, place.page_bytes)
