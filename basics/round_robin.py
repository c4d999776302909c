"""Parties that wait, in the order in which they are served: one item of each, then the next of each. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class RoundRobin(Generic[T]):
    """What waits, by party. A party is the owner of an API key, or a client's address."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}  # the party that comes next is first

    def __len__(self) -> int:
        return sum(map(len, [*self._waiting.values()]))  # a copy: other threads may ask

    def add(self, party: str, item: T) -> None:
        """Put `item` behind what waits of the same party."""
        self._waiting.setdefault(party, deque()).append(item)

    def remove(self, party: str, item: T) -> None:
        """Forget `item`, which was added and not taken."""
        self._waiting[party].remove(item)
        if not self._waiting[party]:
            del self._waiting[party]

    def take(self, may: Callable[[str], bool] = lambda _: True) -> tuple[str, T] | None:
        """Take the next item of the first party that `may`, which goes behind the others then; None: there is none."""
        party = next((it for it in self._waiting if may(it)), None)
        if party is None:
            return None
        items = self._waiting.pop(party)
        item = items.popleft()
        if items:
            self._waiting[party] = items
        return party, item
