"""What swap-in found, loaded and evicted, by index group and request, from the device's counters. Pure but for numpy.

The device counts hits and misses per group and seat, from the moment when the seat was cleared; the host sees them
about once a second, and a last time when the request leaves. Differences to what was seen before go to the totals. Of a
seat whose rows are all on the device when the host looks, hits go to its request alone: nothing was looked for in a hot
buffer, so a worker with resident requests only has no hit rate.

Evictions are reckoned, not counted: empty slots go before all others (kernels/reference/lru.py), so a buffer evicts
exactly when more rows have come into it than it had room for. Rows come as misses and as new tokens.

    evictions so far = max(what they were, misses + position - room)
    room             = misses + position + slots + tail slots - tokens in the buffer, at its set-up

`room` moves with the size of the buffer, so that rows which a smaller buffer gives up count as evicted. Until the tail
has been filled once, `tail slots` too few are counted; and what happened since the last look goes uncounted when a
buffer becomes resident.

Rejected: a third counter in the kernel (swap_in would have to tell full victims from empty ones for each miss of each
step, for a number that follows from the others).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from metrics.state import SwapTotals
from protocol.units import managed_chunks
from worker.device.hot_buffer import HotBufferChange, SetUp

Int64s: TypeAlias = npt.NDArray[np.int64]
_Count = TypeVar("_Count", int, Int64s)

#: Of a resident buffer, which evicts nothing.
BOUNDLESS: Final = 1 << 62


class SwapCounts:
    """Arrays by seat; `totals` grow by what each `take` brings."""

    def __init__(self, totals: SwapTotals, seats: int, tail_slots: int, slot_tokens: int = 1) -> None:
        """A slot holds `slot_tokens` neighbouring tokens; rows are counted in these."""
        groups = len(totals.hits)
        self._totals = totals
        self._tail_slots, self._unit = tail_slots, slot_tokens
        self._seen = np.zeros((2, seats, groups), np.int64)
        self._room = np.full((seats, groups), BOUNDLESS, np.int64)
        self._evicted = np.zeros((seats, groups), np.int64)
        self._is_managed = np.zeros(seats, np.bool_)

    def open(self, seat: int) -> None:
        """Another request takes `seat`, whose counters on the device start at 0."""
        self._seen[:, seat] = 0
        self._room[seat] = BOUNDLESS
        self._evicted[seat] = 0
        self._is_managed[seat] = False

    def set_up(self, seat: int, change: HotBufferChange, position: int) -> None:
        """The hot buffer of `seat` becomes that of `change`; the next row written is `position`."""
        hot_slots = change.buffer.hot_slots
        self._is_managed[seat] = hot_slots > 0
        match change.set_up:
            case SetUp.MANAGED:
                empty = self._slots(hot_slots) - self._units(change.tokens)
                self._room[seat] = self._seen[1, seat] + self._units(position) + empty - self._evicted[seat]
            case SetUp.RESIDENT:
                self._room[seat] = BOUNDLESS
            case SetUp.GROW | SetUp.SHRINK:
                self._room[seat] += self._slots(hot_slots) - self._slots(change.old_slots)

    def _units(self, tokens: _Count) -> _Count:
        return -(-tokens // self._unit)

    def _slots(self, hot_size: int) -> int:
        """Slots of a managed buffer, its tail among them."""
        return hot_size + self._tail_slots if self._unit == 1 else managed_chunks(hot_size)

    def fill(self, seat: int, tokens: Sequence[int]) -> None:
        """So many tokens of each group came into the empty buffer of `seat` beside steps."""
        self._room[seat] -= np.asarray(tokens, np.int64)

    def take(self, seats: Sequence[int], counts: Int64s, positions: Sequence[int]) -> tuple[list[int], list[int]]:
        """Hits and misses so far of the requests in `seats`, summed over groups.

        `counts` int64[2, n, G] are their hits and misses on the device, `positions` the rows that they have: what a
        request that has left its seat once had must not be given.
        """
        places = np.asarray(seats, np.intp)
        totals, fresh = self._totals, counts - self._seen[:, places]
        self._seen[:, places] = counts
        before = self._evicted[places]
        loads = counts[1] + self._units(np.asarray(positions, np.int64))[:, np.newaxis]
        evicted = np.maximum(before, loads - self._room[places])
        self._evicted[places] = evicted
        totals.hits += fresh[0][self._is_managed[places]].sum(0)
        totals.misses += fresh[1].sum(0)
        totals.evictions += (evicted - before).sum(0)
        hits, misses = counts.sum(2).tolist()
        return hits, misses
