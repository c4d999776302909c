"""Engine `shared`: both nodes are on one host, and the sender copies into the receiver's mapped pool file by itself.

The receiver's part is to say where the file is; it cannot stop a copy. So a sender that does not answer keeps its pages
in quarantine until its exit is proved: no CPU store outlives the process. The mapping takes the shared lock by which
the file counts as in use (worker/pool_file.py), so nobody reclaims it under a copy.

Copies run in threads, without the GIL, with the checksum taken block by block on the way.
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

from coordinator.errors import ConfigError, ProtocolError, Unavailable
from worker.pool_file import Header, lock
from worker.transfer.checksum import copy_with_checksum
from worker.transfer.engines.base import Jobs, Written
from worker.transfer.interface import PoolMemory
from worker.transfer.sender_actions import Post


class _Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The blob: which file, and that it is that one."""

    path: str
    file_offset: int
    pages: int
    page_bytes: int
    pool_id: int


class SharedTarget:
    can_shut_out = False
    needs_progress = False

    def __init__(self, pool: PoolMemory) -> None:
        pages, page_bytes = pool.pages.shape
        self._blob = msgspec.msgpack.encode(_Place(pool.path, pool.file_offset, pages, page_bytes, pool.pool_id))

    def admit(self, sender: str) -> bytes:
        return self._blob

    def shut_out(self, sender: str) -> None:
        raise NotImplementedError("the receiver asks only engines that can")

    def progress(self) -> None: ...

    def close(self) -> None: ...


class SharedSource:
    needs_progress = False

    def __init__(self, pool: PoolMemory, jobs: Jobs) -> None:
        self._pages = pool.pages
        self._jobs = jobs
        self._pools: dict[tuple[str, int], npt.NDArray[np.uint8]] = {}
        self._running: deque[tuple[Post, Future[int]]] = deque()

    def connect(self, peer: str, endpoint: int, blob: bytes) -> None:
        """Map the pool of `peer`. Raises Unavailable when its file is gone or is another one, ProtocolError."""
        try:
            place = msgspec.msgpack.decode(blob, type=_Place)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"not the place of a pool: {error}", field="transfer") from error
        self._pools[peer, endpoint] = _map(place)

    def disconnect(self, peer: str, endpoint: int) -> None:
        self._pools.pop((peer, endpoint), None)  # unmapped when the last copy into it ends

    def post(self, post: Post) -> None:
        target = self._pools.get((post.peer, post.endpoint))
        if target is None:
            raise Unavailable("its pool is not mapped", field="transfer.peer", value=post.peer)
        extent = slice(post.offset, post.offset + post.length)
        copy = partial(self.copy, target[post.target, extent], self._pages[post.source, extent])
        self._running.append((post, self._jobs.submit(copy)))

    def copy(self, target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> int:
        """Copy, in a thread of the pool; the checksum of `source`."""
        return copy_with_checksum(target, source)

    def poll(self) -> list[Written]:
        ended: list[Written] = []
        for _ in range(len(self._running)):
            post, copy = self._running.popleft()
            if copy.done():
                ended.append(Written(post, copy.result(), ""))
            else:
                self._running.append((post, copy))
        return ended

    def close(self) -> None:
        self._pools.clear()


def _map(place: _Place) -> npt.NDArray[np.uint8]:
    """uint8[pages, page_bytes] over the pool at `place`. Raises Unavailable, ConfigError."""
    try:
        descriptor = os.open(place.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise Unavailable(
            f"cannot open the pool of its receiver: {error.strerror}",
            field="transfer.engine",
            value=place.path,
            remedy="engine shared is for workers of one host that see one pool_dir; else use nixl or mooncake",
        ) from error
    try:
        if not lock(descriptor, fcntl.LOCK_SH):
            raise Unavailable("its receiver is creating it", field="transfer.engine", value=place.path)
        header = Header.read(descriptor)
        if header is None or header.pool_id != place.pool_id:
            found = header.pool_id if header else "none"
            raise ConfigError(
                f"its receiver's pool has id {place.pool_id}, the file here {found}",
                field="transfer.engine",
                value=place.path,
                remedy="engine shared is for workers of one host that see one pool_dir; else use nixl or mooncake",
            )
        mapping = mmap.mmap(descriptor, place.file_offset + place.pages * place.page_bytes)
    finally:
        os.close(descriptor)  # the mapping has a duplicate, and with it the lock
    body = np.frombuffer(mapping, np.uint8, place.pages * place.page_bytes, place.file_offset)
    return body.reshape(place.pages, place.page_bytes)
