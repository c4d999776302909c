"""Bodies on their way in: who may send one now, and whose turn it is to have one read.

A body is read in a thread, when it is its owner's turn. It takes a place among those that are answered once it is
there, so that a client that only announces a body takes nothing from others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final, TypeVar

import trio

from basics.rooms import RoomUse
from hisparse.http.server.exchange import HttpExchange
from hisparse.http.server.fairness.shares import Shares
from hisparse.http.server.fairness.turns import Turns
from metrics.state import HttpCounters
from protocol.errors import CapacityError, HiSparseError

#: Bodies that are decoded, rendered and tokenized at the same time, in threads beside the loop; of one API key.
READERS_MAX: Final = 4
READERS_PER_KEY: Final = 2

T = TypeVar("T")


class BodyReader:
    """`requests_max` bodies under way, and as many that are answered, shared by owner."""

    def __init__(self, requests_max: int, counters: HttpCounters) -> None:
        self._counters = counters
        self._arriving = Shares(requests_max)
        self._places = Shares(requests_max)
        self._readers = Turns(READERS_MAX, READERS_PER_KEY)
        self._threads = trio.CapacityLimiter(READERS_MAX)

    async def receive(self, exchange: HttpExchange, owner: str, place: ExitStack, read: Callable[[bytearray], T]) -> T:
        """What `read` makes of the body, in a thread. `place` is entered once the body is there. Its bytes are free
        when this returns. Raises CapacityError, what HttpExchange.body does, and HiSparseError as `read` does."""
        with ExitStack() as arriving:
            arriving.enter_context(self._share(self._arriving, owner))
            async with exchange.body(owner) as data:
                arriving.close()
                place.enter_context(self._share(self._places, owner))
                async with self._readers.turn(owner):
                    return await in_thread(partial(read, data), self._threads)

    def room_use(self) -> dict[str, RoomUse]:
        """Measure the rooms of bodies that arrive, and of requests that are answered."""
        return {"http_arriving": self._arriving.use, "http_requests": self._places.use}

    @property
    def waiting(self) -> int:
        """Return how many bodies are there and wait to be read."""
        return self._readers.waiting

    @contextmanager
    def _share(self, shares: Shares, owner: str) -> Iterator[None]:
        try:
            with place_in(shares, owner):
                self._counters.in_flight = self._places.total
                yield
        finally:
            self._counters.in_flight = self._places.total


@contextmanager
def place_in(shares: Shares, owner: str) -> Iterator[None]:
    """One of those whose requests are answered. Raises CapacityError."""
    if not shares.take(owner):
        raise CapacityError(
            f"{shares.limit} requests are being answered, and this key has its share of them",
            field="http.requests_max",
            value=shares.limit,
            remedy="retry later",
        )
    try:
        yield
    finally:
        shares.give(owner)


async def in_thread(read: Callable[[], T], limiter: trio.CapacityLimiter) -> T:
    """What `read` returns. Raises the HiSparseError that it does, in no cycle. Cancelled: once `read` is done."""
    result = await trio.to_thread.run_sync(_refusal_or, read, limiter=limiter)
    if not isinstance(result, HiSparseError):
        return result
    try:
        raise result
    finally:
        del result


def _refusal_or(read: Callable[[], T]) -> T | HiSparseError:
    """What `read` returns or raises. With its traceback and that of its cause, an error would be part of a cycle with
    the frames of the thread, which hold the body, until a full collection."""
    try:
        return read()
    except HiSparseError as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
