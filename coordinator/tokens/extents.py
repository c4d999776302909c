"""Extents of the token log's arena: a binary buddy system (Knowlton 1965). Pure.

An extent is a power of two, at least the smallest, and aligned to its size. So it is cut in place, and whatever is
free can be had in one piece once all extents are packed: laid down anew, largest first, they leave no gap.
"""

from __future__ import annotations

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
