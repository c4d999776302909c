"""Clients that are refused again and again are slowed down. Pure.

A refusal costs the event loop as much as many a request that is served, and a client may come again at once. So each
party, an owner of API keys or an address without a key, may be refused REFUSALS_BURST times at once, and REFUSALS_PER_S
times in a second. Past that it is in arrears, until it has kept still for long enough, DEBT_MAX_S at most. All requests
of an owner in arrears are read at that pace. An address gets its refusals at that pace; many clients may share one, so
that a request with a key from there is not slowed down. No request waits longer than DEBT_MAX_S: a party that has more
connections than are refused in that time gets as many refusals in DEBT_MAX_S as it has connections.
"""

from __future__ import annotations

from typing import Final

from basics.rooms import RoomUse
from basics.token_bucket import TokenBuckets

REFUSALS_PER_S: Final = 100.0
REFUSALS_BURST: Final = 200.0
#: A party waits so long at most, however often it was refused.
DEBT_MAX_S: Final = 2.0
#: Parties that are remembered.
PARTIES_MAX: Final = 4_096


class Arrears:
    """A token bucket for each party that was refused."""

    def __init__(self, per_s: float = REFUSALS_PER_S, burst: float = REFUSALS_BURST) -> None:
        self._buckets: TokenBuckets[str] = TokenBuckets(per_s, burst, PARTIES_MAX, debt_max=DEBT_MAX_S * per_s)

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def use(self) -> RoomUse:
        return RoomUse(len(self), PARTIES_MAX)

    def refused(self, party: str, now: float) -> float:
        """Charge a refusal. Returns when that of an address may go out; that of an owner goes out at once, and the next
        request of the owner waits."""
        free_at = self._buckets.free_at(party, now)
        self._buckets.spend(party, 1.0, now)
        return free_at

    def next_at(self, party: str, now: float) -> float:
        """When the party's next request may be read: `now`, or, in arrears, one after the other."""
        return now if self._buckets.free_at(party, now) <= now else self.refused(party, now)
