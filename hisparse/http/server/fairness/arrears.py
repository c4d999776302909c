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

REFUSALS_PER_S: Final = 100.0
REFUSALS_BURST: Final = 200.0
#: A party waits so long at most, however often it was refused.
DEBT_MAX_S: Final = 2.0
#: Parties that are remembered. Past it the one that was refused first is forgotten.
PARTIES_MAX: Final = 4_096


class Arrears:
    """By party, when all of its refusals will have been paid for. Times are in seconds of one clock."""

    def __init__(self, per_s: float = REFUSALS_PER_S, burst: float = REFUSALS_BURST) -> None:
        self._cost_s: Final = 1 / per_s
        self._burst_s: Final = burst / per_s
        self._paid_at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._paid_at)

    def refused(self, party: str, now: float) -> float:
        """When the refusal may go out, if it is one of a party that has no next request to wait."""
        if party not in self._paid_at and len(self._paid_at) >= PARTIES_MAX:
            self._forget(now)
        return self._charge(party, now)

    def next_at(self, party: str, now: float) -> float:
        """When the party's next request may be read: `now`, or, in arrears, one after the other."""
        if self._paid_at.get(party, now) - self._burst_s <= now:
            return now
        return self._charge(party, now)

    def _charge(self, party: str, now: float) -> float:
        paid_at = max(self._paid_at.get(party, now), now)
        self._paid_at[party] = min(paid_at + self._cost_s, now + self._burst_s + DEBT_MAX_S)
        return max(paid_at - self._burst_s, now)

    def _forget(self, now: float) -> None:
        """Those that have paid; when there are none, one."""
        self._paid_at = {party: paid_at for party, paid_at in self._paid_at.items() if paid_at > now}
        if len(self._paid_at) >= PARTIES_MAX:
            del self._paid_at[next(iter(self._paid_at))]
