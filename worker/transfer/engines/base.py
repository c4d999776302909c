"""What an engine implements, at the receiver and at the sender."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from worker.transfer.interface import PoolMemory
from worker.transfer.receiving import CheckUnit
from worker.transfer.sender_actions import Post

T = TypeVar("T")


class Jobs:
    """Threads for what reads whole pages: checksums and copies. `done` is called, in them, when one has ended."""

    def __init__(self, threads: int, done: Callable[[], None]) -> None:
        self._pool = ThreadPoolExecutor(threads, "transfer")
        self._done = done

    def submit(self, job: Callable[[], T]) -> Future[T]:
        future = self._pool.submit(job)
        future.add_done_callback(lambda _: self._done())
        return future

    def close(self) -> None:
        """Returns when the jobs that had begun have ended."""
        self._pool.shutdown(cancel_futures=True)


class WriteEnd(NamedTuple):
    """A write that has ended: its bytes, which have `checksum`, have landed or may be fetched; or `error` says why that
    is unknown."""

    post: Post
    checksum: int
    error: str


class Target(Protocol):
    """Brings pages of senders into the pool, or lets them write."""

    #: Whether `take` copies, and senders never write.
    fetches: bool
    #: Whether writes land only while `progress` is called.
    needs_progress: bool

    def admit(self, sender: str, place: bytes) -> bytes:
        """Make an endpoint for `sender`, whose pages lie at `place`; what its Source needs to connect. Raises
        HiSparseError."""
        ...

    def take(self, check: CheckUnit) -> int:
        """In another thread: the checksum of a unit in the pool, fetched before where that is this engine's way."""
        ...

    def shut_out(self, sender: str) -> None:
        """Destroy the endpoint of `sender`: after the return no write of it lands, begun or not. None of its units is
        being taken."""
        ...

    def progress(self) -> None: ...

    def close(self) -> None: ...


class Source(Protocol):
    """Writes pages of the pool to those of others."""

    #: Whether writes go on only while `poll` is called.
    needs_progress: bool

    def connect(self, peer: str, endpoint: int, blob: bytes) -> None:
        """Raises HiSparseError."""
        ...

    def disconnect(self, peer: str, endpoint: int) -> None:
        """Forget the endpoint and whatever is in flight to it, which `poll` no longer reports."""
        ...

    def post(self, post: Post) -> None:
        """Begin a write; `poll` reports its end. Raises HiSparseError when nothing has left."""
        ...

    def poll(self) -> list[WriteEnd]: ...

    def close(self) -> None: ...


SourceMaker: TypeAlias = Callable[[PoolMemory, Jobs], Source]
