"""How much each sender may say at a listener: token buckets. Pure.

A bucket holds `burst` tokens and gains `per_s` of them a second; a message takes what it costs. A bucket is a user's,
whatever the number of his connections, or a connection's where nobody knows users. What a connection says past an empty
bucket is not read: it is told so once, and what follows is only counted, since answering a flood feeds it. One that
goes on regardless for CUT_AFTER messages is cut off.

    TAKE     within the rate
    REFUSE   the first beyond it: tell the connection
    IGNORE   more of the same
    CUT      CUT_AFTER of them: end the connection

A connection that is heard again when its bucket is half full is told anew the next time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeVar

#: Senders and connections that are remembered; past it the one not heard for longest starts afresh.
SENDERS_MAX: Final = 8_192
#: Messages past an empty bucket until the connection is ended.
CUT_AFTER: Final = 1_000
#: One more token for each piece of this size, so that a few large messages count like many small ones.
BYTES_PER_TOKEN: Final = 64 * 1024

T = TypeVar("T")


class RateVerdict(Enum):
    TAKE = "take"
    REFUSE = "refuse"
    IGNORE = "ignore"
    CUT = "cut"


def cost_of(message_bytes: int) -> float:
    return 1.0 + message_bytes / BYTES_PER_TOKEN


@dataclass(slots=True)
class _TokenBucket:
    level: float
    at: float


class RateLimiter:
    """The buckets of one listener. Times are seconds of any clock that does not go back."""

    def __init__(self, per_s: float, burst: float, senders_max: int = SENDERS_MAX) -> None:
        self.per_s = per_s
        self.burst = burst
        self._senders_max = senders_max
        self._buckets: dict[bytes, _TokenBucket] = {}
        self._excess: dict[bytes, int] = {}

    def __len__(self) -> int:
        return max(len(self._buckets), len(self._excess))

    def judge(self, sender: bytes, connection: bytes, cost: float, now: float) -> RateVerdict:
        """What to do with a message that costs so much. One dearer than a whole bucket takes a full one."""
        bucket = self._buckets.pop(sender, None) or _TokenBucket(self.burst, now)
        self._remember(self._buckets, sender, bucket)
        bucket.level = min(self.burst, bucket.level + (now - bucket.at) * self.per_s)
        bucket.at = now
        if bucket.level >= self.burst / 2:
            self._excess.pop(connection, None)
        if bucket.level >= min(cost, self.burst):
            bucket.level -= min(cost, self.burst)
            return RateVerdict.TAKE
        return self._exceed(connection)

    def _exceed(self, connection: bytes) -> RateVerdict:
        excess = self._excess.pop(connection, 0) + 1
        if excess > CUT_AFTER:
            return RateVerdict.CUT
        self._remember(self._excess, connection, excess)
        return RateVerdict.REFUSE if excess == 1 else RateVerdict.IGNORE

    def _remember(self, known: dict[bytes, T], key: bytes, value: T) -> None:
        if len(known) >= self._senders_max:
            del known[next(iter(known))]
        known[key] = value
