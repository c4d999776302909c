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

Rejected: the owner with the fewest running requests first (rank would change as requests end, and retractions could go
in circles); virtual time of service, as in start-time fair queueing (a newcomer then waits for the first
end of a long output, and starting it behind that time lets owners come and go to be always first).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TypeAlias

from coordinator.journal.records import RequestFacts
from protocol.messages import Rank

#: User and tenant.
Owner: TypeAlias = tuple[str, str]


class OwnerTurns:
    """Ranks of the live requests of each owner, by priority: those that count, and those that are held."""

    def __init__(self) -> None:
        self._counted: dict[int, dict[Owner, list[Rank]]] = {}
        self._held: dict[int, dict[Owner, list[Rank]]] = {}

    def next(self, priority: int, owner: Owner) -> int:
        """The turn of a request that arrives now. Takes time in proportion to the owners with requests of that
        priority: 0.1 ms for a thousand."""
        counted = self._counted.get(-priority, {})
        own, held = counted.get(owner, []), self._held.get(-priority, {}).get(owner, [])
        at = len(own)
        least = 1 + max((ranks[-1][1] for ranks in (own, held) if ranks), default=-1)
        turns = [(ranks[at] if len(ranks) > at else ranks[-1])[1] for ranks in counted.values()]
        return max(least, *turns) if turns else least

    def add(self, facts: RequestFacts) -> None:
        _insert(self._counted, facts)

    def hold(self, facts: RequestFacts, held: bool) -> None:
        """It counts no more, or counts again. Idempotent."""
        self.remove(facts)
        _insert(self._held if held else self._counted, facts)

    def remove(self, facts: RequestFacts) -> None:
        if not _remove(self._counted, facts):
            _remove(self._held, facts)

    def counts(self, facts: RequestFacts) -> bool:
        return _find(self._counted, facts) is not None

    def __len__(self) -> int:
        lists = (self._counted, self._held)
        return sum(len(ranks) for it in lists for owners in it.values() for ranks in owners.values())


def _insert(lists: dict[int, dict[Owner, list[Rank]]], facts: RequestFacts) -> None:
    rank = facts.rank
    insort(lists.setdefault(rank[0], {}).setdefault(facts.turn_owner, []), rank)


def _find(lists: dict[int, dict[Owner, list[Rank]]], facts: RequestFacts) -> int | None:
    rank = facts.rank
    ranks = lists.get(rank[0], {}).get(facts.turn_owner, [])
    at = bisect_left(ranks, rank)
    return at if at < len(ranks) and ranks[at] == rank else None


def _remove(lists: dict[int, dict[Owner, list[Rank]]], facts: RequestFacts) -> bool:
    """Remove the rank of a request; return whether it was there. Empty lists go too: what is kept is in proportion to
    live requests."""
    at = _find(lists, facts)
    if at is None:
        return False
    owners = lists[facts.rank[0]]
    ranks = owners[facts.turn_owner]
    del ranks[at]
    if not ranks:
        del owners[facts.turn_owner]
    if not owners:
        del lists[facts.rank[0]]
    return True
