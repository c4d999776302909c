"""Turns: how owners of requests share one priority. Pure.

A request gets the number of its turn when it arrives. Rank is priority, then turn, then arrival, so a turn changes no
rule of policy: rank stays a total order that never changes. An *owner* is a user, or a tenant of that user
(RequestFacts); each takes one turn after the other, so a single owner is served in the order of arrival.

A request that comes when `k` live requests of its owner are ahead of it comes after the first k + 1 live requests of
every other owner, and before the rest of them:

    turn = max(own last turn + 1, for every other owner: the turn of its request k, or of its last one if it has fewer)

So, among requests of one priority:

- The oldest live request of an owner is overtaken by no later one. It waits for what is ahead of it, and nothing is
  added to that.
- The first request of a new owner beside one other has only the oldest request of the other ahead of it, however many
  of them wait or run. Preemption does the rest: policy may retract the others' last turns for it (keep), and no more
  of them than the newcomer has requests. With equally many requests each, nothing is retracted.

What operators hold does not count: it would keep its owner's first turn for as long as it is held. Nothing but live
requests counts, so the journal's requests give the same turns after a crash, and an owner without requests has neither
credit nor debt.

Left alone: two owners together can let a newcomer wait for what they have submitted before (one of them submits
thousands and aborts all but the last, whose turn is late). What they submit later comes after the newcomer.

Rejected: the owner with the fewest running requests first (rank would change as requests end, and who is retracted for
whom could go in circles); virtual time of service, as in start-time fair queueing (a newcomer then waits for the first
end of a long output, and starting it behind that time lets owners come and go to be always first).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TypeAlias

from coordinator.journal.records import Rank, RequestFacts

#: User and tenant.
Owner: TypeAlias = tuple[str, str]


class Turns:
    """Ranks of the live requests of each owner, by priority."""

    def __init__(self) -> None:
        self._live: dict[int, dict[Owner, list[Rank]]] = {}
        self._counted: dict[int, dict[Owner, list[Rank]]] = {}  # those not held

    def next(self, priority: int, owner: Owner) -> int:
        """The turn of a request that arrives now. Takes time in proportion to the owners with requests of that
        priority."""
        counted = self._counted.get(-priority, {})
        own = self._live.get(-priority, {}).get(owner)
        at = len(counted.get(owner, ()))
        turn = own[-1][1] + 1 if own else 0
        for other, ranks in counted.items():
            if other != owner:
                turn = max(turn, ranks[min(at, len(ranks) - 1)][1])
        return turn

    def add(self, facts: RequestFacts) -> None:
        _insert(self._live, facts)
        _insert(self._counted, facts)

    def hold(self, facts: RequestFacts, held: bool) -> None:
        """It counts, or counts no more. Idempotent."""
        _remove(self._counted, facts)
        if not held:
            _insert(self._counted, facts)

    def remove(self, facts: RequestFacts) -> None:
        _remove(self._live, facts)
        _remove(self._counted, facts)

    def counts(self, facts: RequestFacts) -> tuple[bool, bool]:
        """Whether it is known as live, and counted."""
        return _find(self._live, facts) is not None, _find(self._counted, facts) is not None

    def __len__(self) -> int:
        return sum(len(ranks) for owners in self._live.values() for ranks in owners.values())


def _insert(lists: dict[int, dict[Owner, list[Rank]]], facts: RequestFacts) -> None:
    insort(lists.setdefault(facts.rank[0], {}).setdefault(facts.turn_owner, []), facts.rank)


def _find(lists: dict[int, dict[Owner, list[Rank]]], facts: RequestFacts) -> int | None:
    ranks = lists.get(facts.rank[0], {}).get(facts.turn_owner, [])
    at = bisect_left(ranks, facts.rank)
    return at if at < len(ranks) and ranks[at] == facts.rank else None


def _remove(lists: dict[int, dict[Owner, list[Rank]]], facts: RequestFacts) -> None:
    """Empty lists go too: what is kept is in proportion to live requests."""
    at = _find(lists, facts)
    if at is None:
        return
    owners = lists[facts.rank[0]]
    del owners[facts.turn_owner][at]
    if not owners[facts.turn_owner]:
        del owners[facts.turn_owner]
    if not owners:
        del lists[facts.rank[0]]
