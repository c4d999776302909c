"""The rate limiter of a listener: a token bucket per sender. Pure.

The sender is a user, with all of its connections, or one connection where there are no users. A message that its bucket
cannot pay for is in excess and is not read. Only the first in excess on a connection is answered: more answers would
feed a flood. A connection with more than CUT_AFTER messages in excess is ended.

    TAKE     within the rate
    REFUSE   the first in excess: answer with an error
    IGNORE   a further one in excess: count only
    CUT      more than CUT_AFTER in excess: end the connection

Once the bucket is half full again, the count of the excess starts anew.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from basics.token_bucket import TokenBuckets

#: Buckets and counts of excess that are kept. Beyond it, the least recently used one is forgotten and starts anew.
SENDERS_MAX: Final = 8_192
#: Messages in excess before the connection is ended.
CUT_AFTER: Final = 1_000


class RateVerdict(Enum):
    TAKE = "take"
    REFUSE = "refuse"
    IGNORE = "ignore"
    CUT = "cut"


class RateLimiter:
    """The buckets of one listener, and what is in excess."""

    def __init__(self, per_s: float, burst: float, senders_max: int = SENDERS_MAX) -> None:
        self.per_s = per_s
        self.burst = burst
        self._senders_max = senders_max
        self._buckets: TokenBuckets[bytes] = TokenBuckets(per_s, burst, senders_max)
        self._excess: dict[bytes, int] = {}  # by connection

    def __len__(self) -> int:
        return max(len(self._buckets), len(self._excess))

    def judge(self, sender: bytes, connection: bytes, cost: float, now: float) -> RateVerdict:
        """The verdict on a message of `cost` tokens. A cost above `burst` counts as `burst`."""
        if connection in self._excess and self._buckets.level(sender, now) >= self.burst / 2:
            del self._excess[connection]
        return RateVerdict.TAKE if self._buckets.take(sender, cost, now) else self._exceed(connection)

    def _exceed(self, connection: bytes) -> RateVerdict:
        excess = self._excess.pop(connection, 0) + 1
        if excess > CUT_AFTER:
            return RateVerdict.CUT
        if len(self._excess) >= self._senders_max:
            del self._excess[next(iter(self._excess))]
        self._excess[connection] = excess
        return RateVerdict.REFUSE if excess == 1 else RateVerdict.IGNORE
