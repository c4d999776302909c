"""Token buckets: how much each party may do at once, and in a second. Pure.

A bucket holds `burst` tokens and gains `per_s` of them a second; what its party does costs tokens. Either the party
does nothing that its bucket cannot pay for (`take`), or it may do all, and waits until the bucket is not overdrawn any
more (`spend`, `free_at`).
"""

from __future__ import annotations

import math
from typing import Final, Generic, TypeVar

#: One more token for each such piece of a message, so that a few large messages count like many small ones.
BYTES_PER_TOKEN: Final = 64 * 1024

K = TypeVar("K")


def cost_of(message_bytes: int) -> float:
    return 1.0 + message_bytes / BYTES_PER_TOKEN


class TokenBuckets(Generic[K]):
    """The buckets of `parties_max` parties, each overdrawn by `debt_max` tokens at most. A bucket is full at first.
    When a party is new, the least recently used buckets are forgotten while they are full; beyond `parties_max`, the
    first of them in any case. Times are seconds of any clock that does not go back."""

    def __init__(self, per_s: float, burst: float, parties_max: int, debt_max: float = math.inf) -> None:
        self._per_s: Final = per_s
        self._burst: Final = burst
        self._parties_max: Final = parties_max
        self._lacking_max: Final = burst + debt_max
        self._lacking: dict[K, tuple[float, float]] = {}  # tokens, and when; the least recently used bucket first

    def __len__(self) -> int:
        return len(self._lacking)

    def level(self, party: K, now: float) -> float:
        """The tokens in a bucket; below zero, it is overdrawn."""
        return self._burst - self._lacks(party, now)

    def take(self, party: K, cost: float, now: float) -> bool:
        """Take `cost`; False: there is less, and nothing was taken. A cost above `burst` counts as `burst`."""
        cost, lacking = min(cost, self._burst), self._lacks(party, now)
        is_covered = self._burst - lacking >= cost
        self._keep(party, lacking + cost if is_covered else lacking, now)
        return is_covered

    def spend(self, party: K, cost: float, now: float) -> None:
        """Take `cost`, whatever there is."""
        self._keep(party, min(self._lacks(party, now) + cost, self._lacking_max), now)

    def free_at(self, party: K, now: float) -> float:
        """Return when the bucket of `party` is no longer overdrawn: `now`, or later."""
        return now + max(0.0, -self.level(party, now)) / self._per_s

    def _lacks(self, party: K, now: float) -> float:
        lacking, since = self._lacking.get(party, (0.0, now))
        return max(0.0, lacking - (now - since) * self._per_s)

    def _keep(self, party: K, lacking: float, now: float) -> None:
        if self._lacking.pop(party, None) is None:
            if len(self._lacking) >= self._parties_max:
                del self._lacking[next(iter(self._lacking))]
            while self._lacking and not self._lacks(first := next(iter(self._lacking)), now):
                del self._lacking[first]
        self._lacking[party] = lacking, now
