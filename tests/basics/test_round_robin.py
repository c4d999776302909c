"""The round robin: one item of each party, then the next of each."""

from __future__ import annotations

from basics.round_robin import RoundRobin


def test_parties_are_served_one_after_the_other() -> None:
    robin: RoundRobin[int] = RoundRobin()
    for item, party in enumerate("aaabbc"):
        robin.add(party, item)
    robin.remove("a", 1)
    robin.remove("c", 5)
    assert robin.take(lambda party: party != "a") == ("b", 3), "the first that may"
    assert [robin.take() for _ in range(4)] == [("a", 0), ("b", 4), ("a", 2), None]
    assert not robin
