"""Who holds which chunk or index page of the device: a free list whose entries may still be in use by launched work.

Counts are the coordinator's business (its ledger promises that `take` never runs short); which id is handed out is
decided here, oldest freed first, so that a fence on it has most probably completed by then.

Memory that leaves an owner whose work is still queued is given with the fences of that work. The next owner gets those
not yet complete and waits for them on any stream that is not ordered by itself behind that work. Memory whose last use
the host has observed (`staged`, `quiesced`) needs none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from coordinator.errors import CapacityError, InternalError
from worker.streams import Fence


class Arena:
    """Ids 0..count-1 of one kind of memory, each free or held."""

    def __init__(self, unit: str, count: int) -> None:
        self.unit = unit
        self.count = count
        self._free: deque[tuple[int, tuple[Fence, ...]]] = deque((number, ()) for number in range(count))
        self._held = bytearray(count)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> tuple[list[int], list[Fence]]:
        """`count` ids and the fences that guard them. CapacityError, holding nothing, when fewer are free."""
        if count > len(self._free):
            raise CapacityError(f"needs {count} {self.unit}s, {len(self._free)} are free", field=self.unit, value=count)
        ids: list[int] = []
        fences: dict[int, Fence] = {}
        for _ in range(count):
            number, guards = self._free.popleft()
            self._held[number] = 1
            ids.append(number)
            fences.update((id(fence), fence) for fence in guards)
        return ids, list(fences.values())

    def give(self, ids: Iterable[int], fences: Sequence[Fence] = ()) -> None:
        """Return `ids`; work up to `fences` may still use them. InternalError when one is not held."""
        guards = tuple(fences)
        for number in ids:
            if not 0 <= number < self.count or not self._held[number]:
                raise InternalError("given back without being held", field=self.unit, value=number)
            self._held[number] = 0
            self._free.append((number, guards))

    def check_invariants(self, held: Iterable[int] = ()) -> None:
        """InternalError unless exactly `held` are held, each once, and all others are free once (I1)."""
        holders = sorted(held)
        free = sorted(number for number, _ in self._free)
        if sorted(holders + free) != list(range(self.count)):
            raise InternalError(
                f"{len(holders)} held and {len(free)} free of {self.count} {self.unit}s, or one of them twice",
                field=self.unit,
                value=f"held {holders[:16]}",
            )
