"""Which chunk or index page of the device is whose: a free list of ids.

Counts are the coordinator's business (its ledger promises that `take` never runs short); which id is handed out is
decided here, the one free longest first. An id is given back when its last use was observed (`staged`, `quiesced`) or
when everything that uses it was launched on `compute`: the next owner's work there comes after it, and its work on
`load` waits for `chunk_reclaimed` (worker/loop/swap.py).

Rejected: fences kept with each id. They spare a load the wait for steps in flight, a few milliseconds before a copy of
many, and make every owner carry fences of strangers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from protocol.errors import CapacityError, InternalError


class Arena:
    """Ids 0..count-1 of one kind of memory, each free or held."""

    def __init__(self, unit: str, count: int) -> None:
        self.unit = unit
        self.count = count
        self._free = deque(range(count))
        self._held = bytearray(count)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` ids. CapacityError, holding nothing, when fewer are free."""
        if count > len(self._free):
            raise CapacityError(f"needs {count} {self.unit}s, {len(self._free)} are free", field=self.unit, value=count)
        ids = [self._free.popleft() for _ in range(count)]
        for number in ids:
            self._held[number] = 1
        return ids

    def give(self, ids: Iterable[int]) -> None:
        """Return `ids`. InternalError when one is not held."""
        for number in ids:
            if not 0 <= number < self.count or not self._held[number]:
                raise InternalError("given back without being held", field=self.unit, value=number)
            self._held[number] = 0
            self._free.append(number)

    def check_invariants(self, held: Iterable[int] = ()) -> None:
        """InternalError unless exactly `held` are held, each once, and all others are free once (I1)."""
        holders = sorted(held)
        if sorted([*holders, *self._free]) != list(range(self.count)):
            raise InternalError(
                f"{len(holders)} held and {self.free} free of {self.count} {self.unit}s, or one of them twice",
                field=self.unit,
                value=f"held {holders[:16]}",
            )
