"""What the engines share that write through a network: a write and the checksum of its bytes run side by side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import msgspec

from protocol.errors import ConfigError, HiSparseError, ProtocolError, Unavailable
from worker.transfer.checksum import checksum
from worker.transfer.engines.base import Jobs, WriteEnd
from worker.transfer.interface import PoolMemory
from worker.transfer.receiving import CheckUnit
from worker.transfer.sender_actions import Post

ConnectionT = TypeVar("ConnectionT")
HandleT = TypeVar("HandleT")


class Address(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The blob: whatever the engine names its endpoint by, and where page 0 lies in the memory of its process."""

    endpoint: bytes
    base: int


def not_installed(engine: str, wheel: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"cannot load it: {error}",
        field="worker.transfer",
        value=engine,
        remedy=f"pip install {wheel} on prefill and decode nodes (docs/prefill-decode.md)",
    )


class NetworkTarget:
    """Base of Targets: a unit is where its sender wrote it."""

    fetches = False

    def __init__(self, pool: PoolMemory) -> None:
        self._pool = pool

    def take(self, check: CheckUnit) -> int:
        return checksum(self._pool.pages[check.page, check.offset : check.offset + check.length])


@dataclass(slots=True)
class _Flight(Generic[HandleT]):
    post: Post
    handle: HandleT
    digest: Future[int]
    has_landed: bool = False


class NetworkSource(ABC, Generic[ConnectionT, HandleT]):
    """Base of Sources; subclasses say how to connect, to begin a write, and how it stands."""

    needs_progress = True

    def __init__(self, pool: PoolMemory, jobs: Jobs) -> None:
        self._pages = pool.pages
        self._page_bytes = pool.pages.shape[1]
        self._jobs = jobs
        self._connections: dict[tuple[str, int], tuple[ConnectionT, int]] = {}
        self._flights: deque[_Flight[HandleT]] = deque()

    @abstractmethod
    def _connect(self, endpoint: bytes) -> ConnectionT:
        """Raises HiSparseError."""

    @abstractmethod
    def _disconnect(self, connection: ConnectionT) -> None: ...

    @abstractmethod
    def _begin(self, connection: ConnectionT, source: int, target: int, length: int) -> HandleT:
        """Begin to write `length` bytes from one address to another. Raises HiSparseError when nothing has left."""

    @abstractmethod
    def _has_landed(self, handle: HandleT) -> bool:
        """Raises HiSparseError when it failed: then the bytes may land or not, at any time."""

    @abstractmethod
    def _release(self, handle: HandleT) -> None:
        """The write has ended, or is given up."""

    # ---------------------------------------------------------------- Source

    def connect(self, peer: str, endpoint: int, blob: bytes) -> None:
        self.disconnect(peer, endpoint)
        try:
            address = msgspec.msgpack.decode(blob, type=Address)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"not an endpoint's address: {error}", field="transfer") from error
        self._connections[peer, endpoint] = (self._connect(address.endpoint), address.base)

    def disconnect(self, peer: str, endpoint: int) -> None:
        for flight in [f for f in self._flights if (f.post.peer, f.post.endpoint) == (peer, endpoint)]:
            self._flights.remove(flight)
            self._release(flight.handle)
        connection = self._connections.pop((peer, endpoint), None)
        if connection is not None:
            self._disconnect(connection[0])

    def post(self, post: Post) -> None:
        connected = self._connections.get((post.peer, post.endpoint))
        if connected is None:
            raise Unavailable("not connected", field="transfer.peer", value=post.peer)
        connection, base = connected
        source = self._pages.ctypes.data + post.source * self._page_bytes + post.offset
        target = base + post.target * self._page_bytes + post.offset
        handle = self._begin(connection, source, target, post.length)
        extent = self._pages[post.source, post.offset : post.offset + post.length]
        self._flights.append(_Flight(post, handle, self._jobs.submit(partial(checksum, extent))))

    def poll(self) -> list[WriteEnd]:
        ended: list[WriteEnd] = []
        for _ in range(len(self._flights)):
            flight = self._flights.popleft()
            try:
                flight.has_landed = flight.has_landed or self._has_landed(flight.handle)
            except HiSparseError as error:
                self._release(flight.handle)
                ended.append(WriteEnd(flight.post, 0, str(error)))
                continue
            if flight.has_landed and flight.digest.done():
                self._release(flight.handle)
                ended.append(WriteEnd(flight.post, flight.digest.result(), ""))
            else:
                self._flights.append(flight)
        return ended

    def close(self) -> None:
        for key in list(self._connections):
            self.disconnect(*key)
