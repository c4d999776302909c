"""Places of the token log's arena: which requests may take more of them, and where their extents lie. Pure.

An extent is a power of two, at least the smallest, and aligned to its size: a binary buddy system (Knowlton 1965). So
it is cut in place, and whatever is free can be had in one piece once all extents are packed: laid down anew, largest
first, they leave no gap.

A full arena. A request that may not grow waits without a grant. It may not before the arena is full, too, by the
banker's algorithm (Dijkstra 1965): all live requests must be able to come to their max_tokens, one after the other, in
the order of what they still need, when those that ended give their places back as they are forgotten. So there is
always one that may grow, and no two wait for each other. Requests that operators hold are counted on to be resumed. A
submission that finds no room is refused.

An owner at its share (basics.shares). Its submissions are refused, and its requests do not grow, but for one: the
one that still needs least, of those that no operator holds. So an owner's running requests leave others room, however
long their outputs are, and each owner always has a request that may come to its end: the first in the order of the
banker's algorithm is the first of its owner, too. One that has room for all that it may generate stays the first until
it has ended, so beyond its share an owner grows by one request at a time. A request that is held does not end, so
another is the first until it is resumed; whatever that one takes, the held one can still come to its end.

Rejected: room for max_tokens from the start (most outputs end long before, and a few hundred requests of one owner took
all places), or only a promise of so much (the same, in a larger number); a share that is checked at submission alone (a
few long outputs of one owner fill the arena, and others are refused until these are forgotten); growth beyond the share
while no other owner waits (places cannot be taken back, so the next owner would wait).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from basics.shares import may_take
from protocol.arrays import Int64Array
from protocol.errors import InternalError


class Extents:
    """Allocates extents out of `size` units. Sizes given here are those of extents: `rounded` makes one of a need."""

    def __init__(self, size: int, smallest: int) -> None:
        if size & (size - 1) or smallest & (smallest - 1) or not 0 < smallest <= size:
            raise InternalError("arena and smallest extent must be powers of two", field="size", value=size)
        self.size = size
        self.smallest = smallest
        self.free_units = size
        self._free: dict[int, set[int]] = {size: {0}}

    def rounded(self, units: int) -> int:
        """Size of the extent for `units`."""
        return max(self.smallest, 1 << max(units - 1, 0).bit_length())

    def allocate(self, extent: int) -> int | None:
        """Base of a free extent of that size; None when no block is large enough."""
        block = extent
        while not self._free.get(block):
            block *= 2
            if block > self.size:
                return None
        base = self._free[block].pop()
        self.free_units -= extent
        while block > extent:
            block //= 2
            self._free.setdefault(block, set()).add(base + block)
        return base

    def free(self, base: int, extent: int) -> None:
        """Return an extent, merging it with its free buddies."""
        block = extent
        self.free_units += extent
        while block < self.size and (base ^ block) in self._free.get(block, ()):
            self._free[block].remove(base ^ block)
            base &= ~block
            block *= 2
        self._free.setdefault(block, set()).add(base)

    def cut(self, base: int, extent: int, kept: int) -> None:
        """Return all of an extent but its first `kept` units, which are an extent."""
        self.free_units += extent - kept
        while extent > kept:
            extent //= 2
            self._free.setdefault(extent, set()).add(base + extent)


class _Endings(NamedTuple):
    """Live requests in the order of what they still need, as the banker's algorithm lets them end. The i-th needs
    `owed[i]` places; `free[i]` are free once all before it, and those that have ended, are forgotten, `free[-1]` once
    all are; `spare[i]` is the least that any of the first i + 1 leaves free. int64 arrays."""

    owed: Int64Array
    free: Int64Array
    spare: Int64Array


class Places:
    """Places of `extents` that requests have, and may come to have. A request is named by its index."""

    def __init__(self, request_indices: int, extents: Extents) -> None:
        self.extents = extents
        self.units: Int64Array = np.zeros(request_indices, np.int64)  # of its extent
        self._units_max: Int64Array = np.zeros(request_indices, np.int64)  # with room for all; 0: it has ended
        self._units_largest = 0  # no `_units_max` is larger
        self._owner: Int64Array = np.zeros(request_indices, np.int64)  # a hash of its name
        self._is_held: npt.NDArray[np.bool_] = np.zeros(request_indices, np.bool_)  # by an operator
        self._held: Counter[int] = Counter()  # units, by owner
        self._first_of: dict[int, int] = {}  # the request of an owner that needs least, until one of them changes
        self._endings: _Endings | None = None  # until any request changes

    def of(self, request_index: int) -> int:
        """Return the places that the request has."""
        return int(self.units[request_index])

    def held_by(self, owner: Hashable) -> int:
        """Return the places that requests of `owner` have, ended ones too."""
        return self._held[hash(owner)]

    def are_counted(self) -> bool:
        """Return whether places are counted by owner."""
        return sum(self._held.values()) == self.units.sum() and min(self._held.values(), default=1) > 0

    def enter(self, request_index: int, units_max: int, owner: Hashable) -> None:
        """Add a request of `owner` that comes to `units_max` places at most, and has none."""
        self._units_max[request_index], self._owner[request_index] = units_max, hash(owner)
        self._units_largest = max(self._units_largest, units_max)
        self.set_units(request_index, 0)

    def end(self, request_index: int) -> None:
        """Note that the request takes no more places. Its extent is set next."""
        self._units_max[request_index] = 0

    def leave(self, request_index: int) -> None:
        """Forget the request; its extent is free."""
        self._units_max[request_index], self._is_held[request_index] = 0, False
        self.set_units(request_index, 0)

    def hold(self, request_index: int, is_held: bool) -> None:
        """Note whether an operator holds the request: others of its owner do not wait for its end."""
        self._is_held[request_index] = is_held
        self._first_of.pop(int(self._owner[request_index]), None)

    def set_units(self, request_index: int, units: int) -> None:
        """Note that the request has `units`, and that the order in which requests can end may be another."""
        owner = int(self._owner[request_index])
        self._endings = None
        self._first_of.pop(owner, None)
        self._held[owner] += units - int(self.units[request_index])
        if not self._held[owner]:
            del self._held[owner]
        self.units[request_index] = units

    def may_grow(self, request_index: int, more: int) -> bool:
        """Return whether a request may take `more` places now."""
        owed = int(self._units_max[request_index] - self.units[request_index])
        return self._may_own(request_index, more) and self.are_safe(owed, more)

    def _may_own(self, request_index: int, more: int) -> bool:
        """Return whether its owner is within its share with `more` places, or no other request of the owner that is not
        held needs less to its end."""
        owner, used = int(self._owner[request_index]), self.extents.size - self.extents.free_units
        if may_take(0, held=self._held[owner] + more, used=used + more, limit=self.extents.size):
            return True
        first = self._first_of.get(owner)
        if first is None:
            live = np.flatnonzero((self._owner == owner) & (self._units_max > 0))
            owed = self._units_max[live] - self.units[live] + self.extents.size * self._is_held[live]  # held ones last
            first = self._first_of[owner] = int(live[np.argmin(owed)])
        return first == request_index

    def are_safe(self, owed: int, more: int) -> bool:
        """Return whether all requests can still come to their end, one after the other, if one that needs `owed` places
        to its end takes `more` of them now. They can before it does."""
        free = self.extents.free_units
        if free - more >= max(self._units_largest, owed):
            return True
        endings = self._endings = self._endings or self._order_endings()
        before = int(np.searchsorted(endings.owed, owed - more))  # as many then end before it; the others miss nothing
        if more > free or owed > endings.free[before]:
            return False
        return before == 0 or more <= int(endings.spare[before - 1])

    def _order_endings(self) -> _Endings:
        live = np.flatnonzero(self._units_max)
        owed = self._units_max[live] - self.units[live]
        order = np.argsort(owed)
        owed, given_back = owed[order], np.cumsum(self.units[live[order]])
        free = self.extents.size - (given_back[-1] if len(live) else 0) + np.concatenate([[0], given_back])
        return _Endings(owed, free, np.minimum.accumulate(free[:-1] - owed))
