"""How much each peer of a door may say: token buckets. Pure.

A bucket holds `burst` tokens and gains `per_s` of them a second; a message takes what it costs. What a peer says past
an empty bucket is not read: it is told so once, and what follows is only counted, since answering a flood feeds it.
One that goes on regardless for CUT_AFTER messages is cut off.

    TAKE     within its rate
    REFUSE   the first beyond it: tell the peer
    IGNORE   more of the same
    CUT      CUT_AFTER of them: end its connection

A bucket counts as recovered, so that its peer would be told again, when it is half full.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

#: Peers whose buckets are remembered; past it the one not heard for longest starts afresh.
PEERS_MAX: Final = 8_192
#: Messages past an empty bucket until the connection is ended.
CUT_AFTER: Final = 1_000
#: One more token for each piece of this size, so that a few large messages count like many small ones.
BYTES_PER_TOKEN: Final = 64 * 1024


class Verdict(Enum):
    TAKE = "take"
    REFUSE = "refuse"
    IGNORE = "ignore"
    CUT = "cut"


def cost_of(message_bytes: int) -> float:
    return 1.0 + message_bytes / BYTES_PER_TOKEN


@dataclass(slots=True)
class _Bucket:
    level: float
    at: float
    excess: int = 0


class Meter:
    """The buckets of one door, by peer. Times are seconds of any clock that does not go back."""

    def __init__(self, per_s: float, burst: float, peers_max: int = PEERS_MAX) -> None:
        self.per_s = per_s
        self.burst = burst
        self._peers_max = peers_max
        self._buckets: dict[bytes, _Bucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def judge(self, peer: bytes, cost: float, now: float) -> Verdict:
        """What to do with a message of `peer` that costs so much. One dearer than a whole bucket takes a full one."""
        bucket = self._buckets.pop(peer, None) or _Bucket(self.burst, now)
        if len(self._buckets) >= self._peers_max:
            del self._buckets[next(iter(self._buckets))]
        self._buckets[peer] = bucket
        bucket.level = min(self.burst, bucket.level + (now - bucket.at) * self.per_s)
        bucket.at = now
        if bucket.level >= self.burst / 2:
            bucket.excess = 0
        if bucket.level >= min(cost, self.burst):
            bucket.level -= min(cost, self.burst)
            return Verdict.TAKE
        bucket.excess += 1
        if bucket.excess == 1:
            return Verdict.REFUSE
        return Verdict.CUT if bucket.excess > CUT_AFTER else Verdict.IGNORE

    def forgive(self, peer: bytes) -> None:
        """Count its excess from nothing again; its bucket stays as empty as it is."""
        if (bucket := self._buckets.get(peer)) is not None:
            bucket.excess = 0
