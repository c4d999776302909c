"""Memory that a request needs: pages by its length, and the hot sizes that it may have. Pure.

A *hot size* is a number of slots with its chunks. The options of a request, ascending, are the managed size classes
that take fewer chunks than resident, and resident last, which takes one chunk for each granted page. A short context
has only resident: a managed buffer would take more chunks than all of its rows. At its longest, a request needs at
least the smaller of the smallest class and its whole context. It fits an empty worker exactly if that fits (`misfit`).

Index pages are granted with host pages, one for one. Memory of prompt passes is the worker's to give; a request asks
only that a pass has room for its prompt.
Grants end at prompt + max_tokens + overshoot. The overshoot is the tokens that a step already launched may write after
the end is seen.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import astuple

from protocol.messages import BOTH, DECODE, NO_HOT_BUFFER, PREFILL, WorkerCapacity
from protocol.units import managed_chunks, pages_for

RESIDENT: Final = 0


class Memory(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An amount of every kind of memory: needed or held by a request, total or free on a worker.

    `seats` count requests, the other fields units of 64 tokens. `host_pages` are of a worker's node, the others of its
    device. A Struct, not a tuple, because the policy compares thousands in a turn: a sum of two takes a third of the
    time.
    """

    host_pages: int = 0
    hot_chunks: int = 0
    index_pages: int = 0
    seats: int = 0

    def covers(self, need: Memory) -> bool:
        return (
            self.host_pages >= need.host_pages
            and self.hot_chunks >= need.hot_chunks
            and self.index_pages >= need.index_pages
            and self.seats >= need.seats
        )

    def plus(self, other: Memory) -> Memory:
        return Memory(
            self.host_pages + other.host_pages,
            self.hot_chunks + other.hot_chunks,
            self.index_pages + other.index_pages,
            self.seats + other.seats,
        )

    def minus(self, other: Memory) -> Memory:
        return Memory(
            self.host_pages - other.host_pages,
            self.hot_chunks - other.hot_chunks,
            self.index_pages - other.index_pages,
            self.seats - other.seats,
        )

    def at_most(self, other: Memory) -> Memory:
        return Memory(*map(min, astuple(self), astuple(other)))


NO_MEMORY: Final = Memory()


def memory_of(capacity: WorkerCapacity) -> Memory:
    """The memory of an empty worker and of its node's pool."""
    return Memory(capacity.host_pages, capacity.hot_chunks, capacity.index_pages, capacity.seats)


class HotSize(NamedTuple):
    """`hot_slots` 0 is resident; NO_HOT_BUFFER for a placement that only computes the prompt."""

    hot_slots: int
    hot_chunks: int


NO_HOT_SIZE: Final = HotSize(NO_HOT_BUFFER, 0)


class Length(NamedTuple):
    """Tokens of a request: its prompt, generated so far, generated at most."""

    prompt: int
    generated: int
    max: int


def page_limit(length: Length, capacity: WorkerCapacity) -> int:
    """Pages of the request at its longest."""
    return pages_for(length.prompt + length.max + capacity.overshoot_tokens)


def pages_wanted(length: Length, ahead_tokens: int, capacity: WorkerCapacity) -> int:
    """Pages that cover the rows so far, `ahead_tokens` more, and the overshoot."""
    tokens = length.prompt + min(length.generated + ahead_tokens, length.max) + capacity.overshoot_tokens
    return pages_for(tokens)


def hot_sizes_for(pages: int, capacity: WorkerCapacity) -> list[HotSize]:
    """Hot sizes for a request with `pages` granted pages, ascending by chunks; the last is resident."""
    return [hot_size for hot_size in _managed(capacity.hot_size_classes) if hot_size.hot_chunks < pages] + [
        HotSize(RESIDENT, pages)
    ]


@lru_cache(maxsize=64)
def _managed(hot_size_classes: tuple[int, ...]) -> tuple[HotSize, ...]:
    return tuple(HotSize(slots, managed_chunks(slots)) for slots in hot_size_classes)


def largest_hot_size(pages: int, chunks: int, capacity: WorkerCapacity) -> HotSize | None:
    """The largest hot size for `pages` pages within `chunks` chunks; None when not even the smallest fits."""
    return next(
        (hot_size for hot_size in reversed(hot_sizes_for(pages, capacity)) if hot_size.hot_chunks <= chunks), None
    )


def forced_hot_size(hot_slots: int, pages: int) -> HotSize:
    """The hot size of a request with `pages` pages whose operator forced `hot_slots`."""
    return HotSize(RESIDENT, pages) if hot_slots == RESIDENT else HotSize(hot_slots, managed_chunks(hot_slots))


def can_force(hot_slots: int, length: Length, capacity: WorkerCapacity) -> bool:
    """Whether a request could reach its greatest length with that hot size on an otherwise empty worker."""
    longest = forced_hot_size(hot_slots, page_limit(length, capacity))
    return hot_slots in (RESIDENT, *capacity.hot_size_classes) and longest.hot_chunks <= capacity.hot_chunks


def smallest_chunks(pages: int, hot_size_classes: tuple[int, ...]) -> int:
    """Chunks of the smallest hot size of a request with `pages` pages; classes ascending."""
    return min(managed_chunks(hot_size_classes[0]), pages)


def least_chunks(length: Length, capacity: WorkerCapacity) -> int:
    """Least chunks with which a request can reach its greatest length."""
    return smallest_chunks(page_limit(length, capacity), capacity.hot_size_classes)


class Misfit(NamedTuple):
    """A kind of memory of which a request needs more than an empty worker has; `setting` gives the worker more."""

    text: str
    setting: str


def misfit(length: Length, capacity: WorkerCapacity, worker: str, part: str = BOTH) -> tuple[Misfit, ...]:
    """Reasons, with the arithmetic, why an otherwise empty worker could not do `part` of a request; empty: it could.
    Host pages come before index pages where these are no more, since a worker has no more index pages than host pages.
    """
    pages = page_limit(length, capacity)
    chunks = least_chunks(length, capacity) if part != PREFILL else 0
    prompt = length.prompt if part != DECODE else 0
    rows = (
        (pages, "index pages", capacity.index_pages, "device_mem"),
        (pages, "host pages", capacity.host_pages, "host_mem"),
        (chunks, "hot chunks at the smallest hot size", capacity.hot_chunks, "device_mem"),
        (prompt, "prompt tokens in a pass", capacity.prompt_max_tokens, "device_mem"),
        (1, "seats", capacity.seats, "seats"),
    )
    return tuple(
        Misfit(f"needs {needed} {kind}, {worker} has {there}", f"worker.{setting}")
        for needed, kind, there, setting in (rows if capacity.index_pages < capacity.host_pages else rows[1:])
        if needed > there
    )


def first_memory(pages: int, kept_pages: int, hot_size: HotSize) -> Memory:
    """Memory of a new placement: fresh host pages beside those kept."""
    return Memory(pages - kept_pages, hot_size.hot_chunks, pages, 1)
