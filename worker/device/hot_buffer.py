"""What becomes of a hot buffer: which chunks stay, which go, and what its tables are set up with. Pure.

A hot buffer is its chunks, in the order of the chunk table, and its mode: resident (`hot_slots` 0; chunk i holds tokens
64i..64i+63) or managed (H slots and a tail).

| from     | to           | chunks that stay                      | set up                          | rows come from |
|----------|--------------|---------------------------------------|---------------------------------|----------------|
| a prompt | resident     | all                                   | slot = token                    | the slab       |
| a prompt | managed      | all                                   | the newest tokens in slots 0..  | the slab       |
| resident | resident     | all, or the first that are wanted     |                                 | where they are |
| resident | managed      | the newest that fit H, then any       | their tokens in slots 0..       | where they are |
| managed  | larger       | all                                   | new slots empty                 | where they are |
| managed  | smaller      | the first                             | tokens of higher slots absent;  | where they are |
|          |              |                                       | of pages: all but the newest    |                |
| managed  | resident     | any                                   | slot = token                    | host pages     |

The pages that a buffer takes of a prompt (`pages_taken`) are copied from the slab layer by layer while the prompt is
computed. Nothing is copied on the device in any other change. All rows must be in host memory before one is carried
out, since every change but growing may drop some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from protocol.errors import BadInput
from protocol.units import PAGE_TOKENS, managed_chunks, pages_for


@dataclass(frozen=True)
class HotBuffer:
    """`hot_slots` 0 is resident. `chunks` in the order of the chunk table."""

    hot_slots: int = 0
    chunks: tuple[int, ...] = ()

    @property
    def rows_max(self) -> int | None:
        """Longest context it can hold; None when chunks are no limit."""
        return None if self.hot_slots else len(self.chunks) * PAGE_TOKENS


class SetUp(Enum):
    """What is to be done with the seat's tables."""

    NOTHING = "nothing"
    RESIDENT = "resident"
    MANAGED = "managed"
    GROW = "grow"
    SHRINK = "shrink"


@dataclass(frozen=True)
class HotBufferChange:
    """`buffer` replaces one of `old_slots`; `freed` chunks go. `first_token` and `tokens` concern SetUp.MANAGED."""

    buffer: HotBuffer
    freed: tuple[int, ...]
    set_up: SetUp
    first_token: int = 0
    tokens: int = 0
    reload: bool = False  # rows come from host pages: 0..length-1, or of a managed buffer those that it begins with
    old_slots: int = 0


def check_size(hot_slots: int, hot_chunks: int, length: int, classes: Sequence[int], chunks_max: int) -> None:
    """BadInput unless a buffer of `hot_slots` in `hot_chunks` chunks is one that this worker offers."""
    if hot_slots and hot_slots not in classes:
        raise BadInput("not a size class", field="hot_slots", value=hot_slots, remedy=f"0 or one of {tuple(classes)}")
    least = managed_chunks(hot_slots) if hot_slots else pages_for(length)
    most = least if hot_slots else chunks_max
    if not least <= hot_chunks <= most:
        raise BadInput(
            f"{hot_slots} slots for {length} tokens take {least} to {most} chunks", field="hot_chunks", value=hot_chunks
        )


def pages_taken(buffer: HotBuffer, length: int, tail_chunks: int = 1) -> range:
    """Return the pages of a prompt of `length` that `buffer` holds, in its first chunks; its tail has `tail_chunks` to
    itself (Geometry.tail_chunks)."""
    pages = pages_for(length)
    return range(_first_page(pages, buffer.hot_slots, tail_chunks) if buffer.hot_slots else 0, pages)


def _first_page(pages: int, hot_slots: int, tail_chunks: int) -> int:
    """Return the first of the newest of `pages` that the ordinary slots of a managed buffer hold."""
    return max(0, pages - (hot_slots // PAGE_TOKENS + 1 - tail_chunks))


def set_up_prompt(buffer: HotBuffer, length: int, tail_chunks: int = 1) -> HotBufferChange:
    """Return the change by which `buffer`, holding `pages_taken` of a prompt of `length`, serves its first step."""
    first_token = pages_taken(buffer, length, tail_chunks).start * PAGE_TOKENS
    kind = SetUp.MANAGED if buffer.hot_slots else SetUp.RESIDENT
    return HotBufferChange(buffer, (), kind, first_token, length - first_token)


def change(
    old: HotBuffer, hot_slots: int, hot_chunks: int, length: int, extra: Sequence[int], tail_chunks: int = 1
) -> HotBufferChange:
    """`old`, holding rows 0..length-1, becomes `hot_slots` in `hot_chunks` chunks, with `extra` new ones at hand.

    Sizes as `check_size` accepts them; `extra` brings the chunks that `old` lacks, max(0, hot_chunks - held). A smaller
    buffer of pages, whose tail has more than one chunk to itself, begins anew.
    """
    if not old.hot_slots and hot_slots:
        return _manage(old, hot_slots, hot_chunks, length, extra, tail_chunks)
    pool = (*old.chunks, *extra)
    kept, freed = pool[:hot_chunks], pool[hot_chunks:]
    set_up, reload = _set_up(old.hot_slots, hot_slots), bool(old.hot_slots) > bool(hot_slots)
    if set_up is SetUp.SHRINK and tail_chunks > 1:
        set_up, reload = SetUp.MANAGED, True
    return HotBufferChange(HotBuffer(hot_slots, kept), freed, set_up, reload=reload, old_slots=old.hot_slots)


def _set_up(old: int, new: int) -> SetUp:
    if not new:
        return SetUp.RESIDENT if old else SetUp.NOTHING
    return SetUp.GROW if new > old else SetUp.SHRINK if new < old else SetUp.NOTHING


def _manage(
    old: HotBuffer, hot_slots: int, hot_chunks: int, length: int, extra: Sequence[int], tail_chunks: int
) -> HotBufferChange:
    """The chunks of the newest tokens come first in the table, so that those tokens lie in slots 0.. as they are."""
    pages = pages_for(length)
    first = _first_page(pages, hot_slots, tail_chunks)
    newest = old.chunks[first:pages]
    others = (*old.chunks[:first], *old.chunks[pages:], *extra)
    split = hot_chunks - len(newest)
    buffer = HotBuffer(hot_slots, (*newest, *others[:split]))
    first_token = first * PAGE_TOKENS
    return HotBufferChange(buffer, others[split:], SetUp.MANAGED, first_token, max(0, length - first_token))
