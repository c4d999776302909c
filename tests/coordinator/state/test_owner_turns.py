"""Turns: owners of one priority go one after the other, and the oldest request of an owner is never overtaken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from basics.request_states import State
from coordinator.journal.records import RequestFacts
from coordinator.state.owner_turns import Owner, OwnerTurns
from protocol.messages import Rank
from tests.coordinator.policy.test_policy import LONG, cluster, is_running, run_until
from tests.support.facts import make_facts
from tests.support.fakes.fake_cluster import FakeCluster


@dataclass
class Arrivals:
    """Requests that arrive, in no placement table."""

    turns: OwnerTurns = field(default_factory=OwnerTurns)
    live: dict[str, RequestFacts] = field(default_factory=dict)
    arrivals: int = 0

    def arrive(self, name: str, tenant: str, priority: int = 0) -> RequestFacts:
        self.arrivals += 1
        rank = -priority, self.turns.next(priority, ("", tenant)), self.arrivals
        facts = make_facts(self.arrivals, 1, request_id=name, rank=rank, tenant=tenant)
        self.turns.add(facts)
        self.live[name] = facts
        return facts

    def end(self, name: str) -> None:
        self.turns.remove(self.live.pop(name))

    def order(self) -> str:
        return " ".join(sorted(self.live, key=lambda name: self.live[name].rank))


def arrivals(*names: str) -> Arrivals:
    """Owners are the first letters."""
    made = Arrivals()
    for name in names:
        made.arrive(name, name[0])
    return made


def test_single_owner_is_served_in_order_of_arrival() -> None:
    it = arrivals("a1", "a2", "a3")
    it.end("a1")
    it.arrive("a4", "a")
    it.end("a2")
    it.arrive("a5", "a")
    assert it.order() == "a3 a4 a5"


def test_batches_of_two_owners_alternate() -> None:
    assert arrivals("a1", "a2", "a3", "a4", "b1", "b2", "c1", "b3").order() == "a1 b1 c1 a2 b2 a3 b3 a4"


def test_newcomer_has_only_the_oldest_request_of_a_batch_ahead_of_it() -> None:
    it = arrivals(*(f"a{number}" for number in range(1_000)))
    for number in range(500):
        it.end(f"a{number}")
    it.arrive("b", "b")
    assert it.order().startswith("a500 b a501")


def test_priority_comes_before_turns() -> None:
    it = arrivals("a1", "a2", "b1")
    it.arrive("high", "a", priority=1)
    assert it.order() == "high a1 b1 a2"


def test_held_request_does_not_keep_the_first_turn() -> None:
    """Else every newcomer would come before all that its owner has besides."""
    it = arrivals("a1", *(f"a{number}" for number in range(2, 6)))
    for number in (2, 3):
        it.end(f"a{number}")
    it.turns.hold(it.live["a1"], True)
    it.arrive("b1", "b")
    assert it.order() == "a1 a4 b1 a5"
    assert (it.turns.counts(it.live["a1"]), len(it.turns)) == (False, 4)
    it.turns.hold(it.live["a1"], False)
    it.turns.hold(it.live["a1"], False)
    assert (it.turns.counts(it.live["a1"]), len(it.turns)) == (True, 4)


def test_request_behind_a_held_one_of_its_owner_stays_behind_it() -> None:
    it = arrivals("a1")
    it.turns.hold(it.live["a1"], True)
    it.arrive("a2", "a")
    assert it.order() == "a1 a2"


def test_ended_requests_leave_nothing_behind() -> None:
    it = arrivals("a1", "b1")
    it.end("a1")
    it.end("b1")
    assert (len(it.turns), it.turns._counted, it.turns._held) == (0, {}, {})


class TurnMachine(RuleBasedStateMachine):
    """Whatever comes and goes: later requests overtake as many as their owner has ahead of them, and no more."""

    def __init__(self) -> None:
        super().__init__()
        self.it = Arrivals()
        self.ahead: dict[str, dict[str, int]] = {}  # of each live request, by overtaker's owner: live overtakers

    @rule(tenant=st.sampled_from("abcd"), priority=st.sampled_from([0, 0, 1]), count=st.integers(1, 4))
    def arrive(self, tenant: str, priority: int, count: int) -> None:
        for _ in range(count):
            older = [it for it in self.it.live.values() if it.priority == priority]
            facts = self.it.arrive(f"{tenant}{self.it.arrivals}", tenant, priority)
            depth = sum(it.tenant == tenant for it in older)
            for tenant_ in {it.tenant for it in older} - {tenant}:
                ranks = sorted(it.rank for it in older if it.tenant == tenant_)
                behind = sum(rank < facts.rank for rank in ranks)
                assert behind > min(depth, len(ranks) - 1), "it overtakes no more than its owner has ahead of it"
            assert all(it.rank < facts.rank for it in older if it.tenant == tenant), "in order of arrival"

    @precondition(lambda self: self.it.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.it.end(data.draw(st.sampled_from(sorted(self.it.live))))

    @invariant()
    def all_live_requests_count(self) -> None:
        assert len(self.it.turns) == len(self.it.live)


TestTurnMachine = TurnMachine.TestCase
TestTurnMachine.settings = settings(max_examples=100, stateful_step_count=40)


# ---------------------------------------------------------------- policy


def admitted(fake: FakeCluster) -> Iterator[int]:
    """Request indices in the order of their first admissions, without end."""
    seen: set[int] = set()
    while True:
        fake.round()
        entries = sorted(fake.dispatch.placement_table.entries.values(), key=lambda it: it.placement)
        for entry in entries:
            if entry.placement and entry.request_index not in seen:
                seen.add(entry.request_index)
                yield entry.request_index


def test_waiting_requests_of_two_owners_are_admitted_in_turns() -> None:
    """One seat: the second owner's requests came last, and are not last."""
    fake = cluster(seats=1)
    for request_index in range(8):
        fake.submit(request_index, 100, 40, tenant="batch")
    for request_index in range(8, 11):
        fake.submit(request_index, 100, 40, tenant="other")
    order = admitted(fake)
    assert [next(order) for _ in range(7)] == [0, 8, 1, 9, 2, 10, 3]
    assert fake.retracted == []


def test_newcomer_takes_a_seat_from_a_batch_that_has_all() -> None:
    """Its outputs are long: waiting for one to end is no bound. The batch's last turn is kept, and comes back."""
    fake = cluster(seats=4)
    for request_index in range(6):
        fake.submit(request_index, 100, LONG // 50, tenant="batch")
    run_until(fake, lambda: is_running(fake, 0, 1, 2, 3))
    fake.submit(6, 100, 40, tenant="other")
    run_until(fake, lambda: is_running(fake, 6))
    assert [entry.request_index for entry, _ in fake.retracted] == [3]
    assert fake.entry(3).kept_tokens > 100
    run_until(fake, lambda: is_running(fake, 0, 1, 2, 3))
    assert len(fake.retracted) == 1


def test_owners_with_as_many_requests_each_retract_nothing() -> None:
    """Seats go half and half, and stay so: no request of either is retracted for more of the other."""
    fake = cluster(seats=4)
    for request_index in range(10):
        fake.submit(request_index, 100, LONG // 50, tenant="batch")
    run_until(fake, lambda: is_running(fake, 0, 1, 2, 3))
    for request_index in range(10, 20):
        fake.submit(request_index, 100, LONG // 50, tenant="other")
    run_until(fake, lambda: is_running(fake, 0, 1, 10, 11))
    assert len(fake.retracted) == 2
    for _ in range(30):
        fake.round()
    assert (len(fake.retracted), is_running(fake, 0, 1, 10, 11)) == (2, True)


def test_batch_is_not_starved_by_an_owner_that_comes_again_and_again() -> None:
    """Whose requests are short: the batch's oldest request is never overtaken, so the batch goes on."""
    fake = cluster(seats=1)
    for request_index in range(3):
        fake.submit(request_index, 100, 40, tenant="batch")
    order: list[int] = []
    watch, comes = admitted(fake), 100
    while not {0, 1, 2} <= set(order):
        waiting = [index for index, live in fake.live.items() if index >= 100 and live.state.state is State.QUEUED]
        if not waiting:
            fake.submit(comes, 100, 40, tenant="short")
            comes += 1
        order.append(next(watch))
    assert order.index(2) <= 6, order


def test_recovered_requests_keep_their_turns() -> None:
    """Turns are part of the rank, which the journal holds; those that come after a crash see the same owners."""
    it = arrivals("a1", "a2", "a3", "b1")
    it.end("a1")
    after = OwnerTurns()
    for facts in reversed(it.live.values()):
        after.add(facts)
    owners: list[Owner] = [("", "a"), ("", "b"), ("", "c"), ("user", "a")]
    assert [after.next(0, owner) for owner in owners] == [it.turns.next(0, owner) for owner in owners]
    ranks: list[Rank] = sorted(facts.rank for facts in it.live.values())
    assert ranks == [(0, 0, 4), (0, 1, 2), (0, 2, 3)]


@pytest.mark.mutation
@pytest.mark.parametrize(
    "shown",
    [
        test_waiting_requests_of_two_owners_are_admitted_in_turns,
        test_newcomer_takes_a_seat_from_a_batch_that_has_all,
        test_newcomer_has_only_the_oldest_request_of_a_batch_ahead_of_it,
    ],
)
def test_ignored_turns_are_noticed(shown: Callable[[], None]) -> None:
    """A planted bug: requests of one priority go by arrival alone."""
    with patch.object(OwnerTurns, "next", lambda *_: 0), pytest.raises(AssertionError):
        shown()
