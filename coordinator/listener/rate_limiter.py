"""The rate limiter of a listener: a token bucket per sender. Pure.

A bucket holds `burst` tokens and gains `per_s` of them a second; a message takes its cost. The sender is a user, with
all of its connections, or one connection where there are no users. A message that its bucket cannot pay for is in
excess and is not read. Only the first in excess on a connection is answered: more answers would feed a flood. A
connection with more than CUT_AFTER messages in excess is ended.

    TAKE     within the rate
    REFUSE   the first in excess: answer with an error
    IGNORE   a further one in excess: count only
    CUT      more than CUT_AFTER in excess: end the connection

Once the bucket is half full again, the count of the excess starts anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeVar

#: Buckets and counts of excess that are kept. Beyond it, the least recently used one is forgotten and starts anew.
SENDERS_MAX: Final = 8_192
#: Messages in excess before the connection is ended.
CUT_AFTER: Final = 1_000
#: One more token for each such piece of a message, so that a few large messages count like many small ones.
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
        """The verdict on a message of `cost` tokens. A cost above `burst` counts as `burst`."""
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
