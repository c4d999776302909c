"""Token buckets: what a party may do at once and in a second, and that the number of parties is bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basics.token_bucket import TokenBuckets

PER_S, BURST = 10.0, 20.0


def buckets_of(parties_max: int = 1, debt_max: float = float("inf")) -> TokenBuckets[str]:
    return TokenBuckets(PER_S, BURST, parties_max, debt_max)


@given(st.lists(st.tuples(st.floats(0.1, 30.0), st.floats(0.0, 3.0)), max_size=50))
def test_party_takes_no_more_than_its_bucket_holds(asked: list[tuple[float, float]]) -> None:
    buckets, now, taken = buckets_of(), 1_000.0, 0.0
    for cost, pause in asked:
        now += pause
        level, counts = buckets.level("a", now), min(cost, BURST)
        took = buckets.take("a", cost, now)
        assert took == (level >= counts)
        taken += counts * took
        assert buckets.level("a", now) == pytest.approx(level - counts * took)
    assert taken <= BURST + PER_S * (now - 1_000.0) + 1e-6


def test_pace_is_kept_after_its_burst() -> None:
    buckets, now = buckets_of(), 100.0
    for _ in range(4):
        buckets.spend("a", 5.0, now)
        assert buckets.free_at("a", now) == now
    for _ in range(3):
        buckets.spend("a", 10.0, now)
        now = buckets.free_at("a", now)
    assert now == pytest.approx(103.0)
    buckets.spend("a", 20.0, now + 100)
    assert buckets.free_at("a", now + 100) == now + 100


def test_debt_is_bounded() -> None:
    buckets = buckets_of(debt_max=5.0)
    buckets.spend("a", 1e9, 0.0)
    assert buckets.free_at("a", 0.0) == pytest.approx(0.5)


def test_full_buckets_are_forgotten_when_another_party_comes() -> None:
    """Else parties that each came once, such as connections, would take their room for good."""
    buckets = buckets_of(parties_max=1_000)
    for number in range(100):
        buckets.spend(str(number), 1.0, number * 0.05)
        assert len(buckets) <= 3
    assert buckets.level("99", 99 * 0.05) == BURST - 1.0, "it is not forgotten before it is full"


def test_least_recently_used_party_is_forgotten_and_full_ones_behind_it() -> None:
    buckets = buckets_of(parties_max=3)
    for party, cost in (("a", 20.0), ("b", 5.0), ("c", 20.0)):
        buckets.spend(party, cost, 0.0)
    assert not buckets.take("a", 2.0, 0.1), "used again"
    buckets.spend("d", 20.0, 0.1)
    assert [buckets.level(it, 0.1) for it in "abcd"] == [1.0, BURST, 1.0, 0.0]
    assert len(buckets) == 3
    buckets.spend("e", 1.0, 9.0)
    assert len(buckets) == 1
