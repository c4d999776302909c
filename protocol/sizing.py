"""How much memory a request needs: pages by its length, and the hot sizes that it may have. Pure.

A *hot size* is a number of slots with its chunks. The options of a request, ascending: the managed size classes that
are smaller than being resident, and resident last, which takes one chunk for each page granted. A short context has
only the last: a managed buffer would cost more than all of its rows. So the least that a request needs at its longest
is the smaller of the smallest class and its whole context, and it fits a worker alone exactly if that fits (`misfit`).

Index pages are granted with host pages, one for one. Slab pages hold the prompt while it is prefilled and staged.
Nothing is ever granted beyond prompt + max_tokens + overshoot, the tokens that a step already launched may write after
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
    """An amount of every kind of memory: what a request needs or holds, what a worker has or has left.

    All but `seats` (requests) in units of 64 tokens. `host_pages` are of a worker's node, the others of its device.
    A Struct, not a tuple, because policy compares thousands in a turn: a sum of two takes a third of the time."""

    host_pages: int = 0
    hot_chunks: int = 0
    index_pages: int = 0
    slab_pages: int = 0
    seats: int = 0

    def covers(self, need: Memory) -> bool:
        return (
            self.host_pages >= need.host_pages
            and self.hot_chunks >= need.hot_chunks
            and self.index_pages >= need.index_pages
            and self.slab_pages >= need.slab_pages
            and self.seats >= need.seats
        )

    def plus(self, other: Memory) -> Memory:
        return Memory(
            self.host_pages + other.host_pages,
            self.hot_chunks + other.hot_chunks,
            self.index_pages + other.index_pages,
            self.slab_pages + other.slab_pages,
            self.seats + other.seats,
        )

    def minus(self, other: Memory) -> Memory:
        return Memory(
            self.host_pages - other.host_pages,
            self.hot_chunks - other.hot_chunks,
            self.index_pages - other.index_pages,
            self.slab_pages - other.slab_pages,
            self.seats - other.seats,
        )

    def at_most(self, other: Memory) -> Memory:
        return Memory(*map(min, astuple(self), astuple(other)))

    def shortages(
        self, need: Memory, worker: str, pool: str = "pool", *, chunks: str = "hot chunks", left: str = ""
    ) -> tuple[str, ...]:
        """What of `need` is more than this, one phrase for each kind; empty exactly if this covers it."""
        kinds, places = ("host pages", chunks, "index pages", "slab pages", "seats"), (pool, *[worker] * 4)
        rows = zip(kinds, astuple(need), places, astuple(self), strict=True)
        return tuple(
            f"needs {needed} {kind}, {place} has {there}{left}" for kind, needed, place, there in rows if needed > there
        )


NO_MEMORY: Final = Memory()


def memory_of(capacity: WorkerCapacity) -> Memory:
    """All that an otherwise empty worker has."""
    return Memory(capacity.host_pages, capacity.hot_chunks, capacity.index_pages, capacity.slab_pages, capacity.seats)


class HotSize(NamedTuple):
    """`hot_slots` 0 is resident; NO_HOT_BUFFER for a stay that only computes the prompt."""

    hot_slots: int
    hot_chunks: int


NO_HOT_SIZE: Final = HotSize(NO_HOT_BUFFER, 0)


class Length(NamedTuple):
    """Tokens of a request: its prompt, generated so far, generated at most."""

    prompt: int
    generated: int
    max: int


def page_limit(length: Length, capacity: WorkerCapacity) -> int:
    """Pages of the longest that this request can become."""
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
    """The size that an operator asked for."""
    return HotSize(RESIDENT, pages) if hot_slots == RESIDENT else HotSize(hot_slots, managed_chunks(hot_slots))


def can_force(hot_slots: int, length: Length, capacity: WorkerCapacity) -> bool:
    """Whether a request could reach its longest with that size on an otherwise empty worker."""
    longest = forced_hot_size(hot_slots, page_limit(length, capacity))
    return hot_slots in (RESIDENT, *capacity.hot_size_classes) and longest.hot_chunks <= capacity.hot_chunks


def smallest_chunks(pages: int, hot_size_classes: tuple[int, ...]) -> int:
    """Chunks of the smallest hot size of a request with `pages` pages; classes ascending."""
    return min(managed_chunks(hot_size_classes[0]), pages)


def least_chunks(length: Length, capacity: WorkerCapacity) -> int:
    """Chunks without which a request cannot reach its longest."""
    return smallest_chunks(page_limit(length, capacity), capacity.hot_size_classes)


def misfit(length: Length, capacity: WorkerCapacity, worker: str, part: str = BOTH) -> tuple[str, ...]:
    """Why an otherwise empty worker could not do `part` of a request, with the arithmetic; empty: it could."""
    pages = page_limit(length, capacity)
    chunks = least_chunks(length, capacity) if part != PREFILL else 0
    slab_pages = pages_for(length.prompt) if part != DECODE else 0
    need, whole = Memory(pages, chunks, pages, slab_pages, 1), memory_of(capacity)
    return () if whole.covers(need) else whole.shortages(need, worker, chunks="hot chunks at the smallest hot size")


def first_memory(length: Length, pages: int, kept_pages: int, hot_size: HotSize) -> Memory:
    """What a placement takes: fresh host pages beside those kept, and the slab unless rows were kept."""
    slab_pages = 0 if kept_pages else pages_for(length.prompt)
    return Memory(pages - kept_pages, hot_size.hot_chunks, pages, slab_pages, 1)
