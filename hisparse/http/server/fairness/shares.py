"""What the owners of API keys may hold at once of what is scarce: places, bytes. Fair by owner. Pure.

An owner is an API key, or all clients together where there are no keys. An owner may use what the others do not: a
share is no wall. But what an owner lacks of its share is never refused to it, whatever the others hold already.
"""

from __future__ import annotations

from collections import Counter

from basics.rooms import RoomUse


class Shares:
    """`limit` of something, divided among the owners who hold any of it.

    An owner with less than limit / owners is let in past the limit, which the others have used up. All together they
    then hold at most limit x (1 + 1/2 + ... + 1/owners): 1.5 x for two hostile keys, 3 x for ten.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._held: Counter[str] = Counter()

    def take(self, owner: str, count: int = 1) -> bool:
        """False: refused, and nothing was taken."""
        owners = len(self._held) + (owner not in self._held)
        share = max(1, self.limit // owners)
        if self.total + count > self.limit and self._held[owner] + count > share:
            self._forget(owner)
            return False
        self._held[owner] += count
        self.total += count
        return True

    @property
    def use(self) -> RoomUse:
        return RoomUse(self.total, self.limit)

    def give(self, owner: str, count: int = 1) -> None:
        self._held[owner] -= count
        self.total -= count
        self._forget(owner)

    def _forget(self, owner: str) -> None:
        if not self._held[owner]:
            del self._held[owner]
