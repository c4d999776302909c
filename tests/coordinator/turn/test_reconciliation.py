"""What a worker ran while the coordinator was away, compared with the ledger: adopted, completed, gone, refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from basics.request_states import State
from coordinator.journal.records import RequestPlaced
from coordinator.journal.state import RequestRecord
from coordinator.memory.changes import Shrink, apply
from coordinator.memory.ledger import Ledger
from coordinator.state import events
from coordinator.state.events import PlacementAdopted, RetractOrder, WorkerLost
from coordinator.state.request_state import RequestState, Rows
from coordinator.state.worker_entry import WorkerEntry
from coordinator.turn.dispatch import Dispatch, Effects
from coordinator.turn.recovery import adopt
from protocol.errors import WrongState
from protocol.inventory import InventoryRow
from protocol.messages import Grant, Resize, Resized, Staged, Withdraw
from protocol.sizing import NO_HOT_SIZE, HotSize, Memory
from tests.support.facts import add_request, make_facts, make_ordered
from tests.support.fakes.fake_cluster import MODEL, FakePort, capacity

PAGES = 6
STARTING = Memory(PAGES, PAGES, PAGES)
RESIDENT = InventoryRow(
    1, PAGES, PAGES, request_index=7, generated_tokens=30, durable_tokens=100, is_staged=True, is_started=True
)


class Desk:
    """A recovered request of slot 7 on an awaited worker, as the ledger has it."""

    def __init__(self, memory: Memory = STARTING) -> None:
        self.ledger = Ledger(32)
        self.ledger.add_worker("w0", 1, capacity())
        self.ledger.reserve(1, "w0", memory)
        self.dispatch = Dispatch({"n0": self.ledger}, 96)
        self.worker = WorkerEntry("w0", "n0", 1, capacity(), MODEL, FakePort(), awaited=True)
        placement_table = self.dispatch.placement_table
        placement_table.go_on_from(arrivals=1, placements=1)
        placement_table.add_worker(self.worker)
        record = RequestRecord(make_facts(7, 100, 300))
        self.entry: RequestState = placement_table.recover(record, 30, 0.0)
        placed = RequestPlaced(7, 1, "n0", "w0", 1, 0)
        placement_table.recover_placed(self.entry, placed, memory, self.worker)
        self.entry.recover_placed(0.0, staged=False)
        placement_table.check_invariants(lambda _: self.ledger)

    def adopt(self, *held: InventoryRow) -> Effects:
        heard = adopt(self.dispatch, self.worker, held, self.ledger)
        for step in heard.steps:
            apply(self.ledger, step.change)
        self.ledger.check_invariants()
        for tell in heard.tells:
            self.entry.handle(tell.event, Rows(30, 100), 1.0)
        self.dispatch.placement_table.check_invariants(lambda _: self.ledger)
        return heard

    def adopted(self, *held: InventoryRow) -> PlacementAdopted:
        event = self.adopt(*held).tells[0].event
        assert isinstance(event, PlacementAdopted)
        return event


def held(**changes: Any) -> InventoryRow:
    return replace(RESIDENT, **changes)


def test_awaited_worker_is_given_nothing() -> None:
    desk = Desk()
    add_request(desk.dispatch.placement_table, 8, 0, 64, 64)
    desk.dispatch.dirty = True
    assert desk.dispatch.plan(0.0, tick=True) == []
    desk.adopt(held())
    desk.dispatch.dirty = True
    assert len(desk.dispatch.plan(0.0, tick=True)) == 1


def test_staged_prompt_holds_what_it_was_given() -> None:
    desk = Desk()
    assert desk.adopted(held()) == PlacementAdopted(1, True, True, False, None, None)
    assert (desk.entry.runs, desk.dispatch.placement_table.computing) == (True, {})
    assert desk.ledger.held(1) == Memory(PAGES, PAGES, PAGES, 1)


def test_prompt_in_prefill_continues() -> None:
    desk = Desk()
    assert desk.adopted(held(is_staged=False, is_started=False)) == PlacementAdopted(1, False, False, False, None, None)
    assert (desk.entry.runs, desk.dispatch.placement_table.computing) == (False, {7: desk.entry})


def test_lost_grant_is_resent_with_the_same_pages() -> None:
    desk = Desk()
    grant = desk.adopted(held(host_pages=4, hot_chunks=4)).grant
    pages = desk.ledger.pages_of(1)
    assert grant == Grant(1, pages[4:].astype(np.int32).tobytes(), 2, 2)
    assert desk.entry.hot == HotSize(0, PAGES)


def test_a_grant_to_a_managed_buffer_brings_no_chunks() -> None:
    desk = Desk(Memory(PAGES, 3, PAGES))
    grant = desk.adopted(held(host_pages=4, hot_slots=128, hot_chunks=3)).grant
    assert grant is not None
    assert (grant.index_pages, grant.hot_chunks) == (2, 0)
    assert desk.entry.hot == HotSize(128, 3)
    assert desk.worker.managed == {7: desk.entry}


def test_chunks_of_a_lost_resize_are_taken_back() -> None:
    desk = Desk(Memory(PAGES, PAGES, PAGES))
    heard = desk.adopt(held(hot_slots=128, hot_chunks=3))
    assert [step.change for step in heard.steps] == [Shrink(1, Memory(hot_chunks=PAGES - 3))]


def test_resize_under_way_is_awaited_and_completes() -> None:
    desk = Desk(Memory(PAGES, PAGES, PAGES))
    adopted = desk.adopted(held(resize_slots=128, resize_chunks=3))
    assert adopted.resize == Resize(1, 128, 3)
    assert (desk.entry.hot, desk.entry.resizing) == (HotSize(0, PAGES), HotSize(128, 3))
    state = recovered_state()
    state.handle(adopted, Rows(30, 100), 1.0)
    assert state.handle(Resized(1, 128, 3), Rows(30, 100), 1.0) == [
        events.PlacementProgressed(7, 1, events.Stage.RESIZED)
    ]


def test_grant_lost_under_a_resize_ends_the_placement() -> None:
    desk = Desk(Memory(PAGES, PAGES, PAGES))
    tells = desk.adopt(held(host_pages=4, hot_chunks=4, resize_slots=128, resize_chunks=3)).tells
    assert isinstance(tells[0].event, PlacementAdopted)
    assert tells[0].event.grant is None
    assert isinstance(tells[1].event, RetractOrder)
    assert tells[1].event.keep


def test_grant_whose_chunks_were_reclaimed_ends_the_placement() -> None:
    """It was leaving in that life, which came to an end before it had left; then an operator resumed it."""
    desk = Desk(Memory(PAGES, 4, PAGES))
    heard = desk.adopt(held(host_pages=4, hot_chunks=4))
    assert [type(tell.event) for tell in heard.tells] == [PlacementAdopted, RetractOrder]
    assert (heard.steps, desk.ledger.held(1).hot_chunks) == ((), 4)


def test_starving_request_is_granted_pages() -> None:
    desk = Desk()
    desk.adopt(held(is_parked=True))
    assert desk.dispatch.placement_table.starving == {7: desk.entry}


def test_missing_placement_has_ended() -> None:
    desk = Desk()
    (tell,) = desk.adopt().tells
    assert tell.event == WorkerLost(1, True, "w0 has it no more")
    assert desk.entry.leaving


def test_unacknowledged_release_is_accepted_again() -> None:
    desk = Desk()
    assert len(desk.adopt(held(), held(placement=99, is_released=True)).tells) == 1


@pytest.mark.parametrize(
    "claims",
    [
        held(host_pages=PAGES + 1),
        held(hot_chunks=PAGES + 1),
        held(resize_slots=0, resize_chunks=PAGES + 1),
        held(placement=99),
    ],
)
def test_worker_that_claims_too_much_is_refused(claims: InventoryRow) -> None:
    """I4: memory is given after its commit, so the ledger never has less."""
    desk = Desk()
    with pytest.raises(WrongState):
        desk.adopt(claims)
    assert desk.worker.awaited, "nothing changed"
    assert desk.entry.hot != NO_HOT_SIZE


# ---------------------------------------------------------------- the request's side


def recovered_state(*, hold: bool = False, outcome: str = "") -> RequestState:
    state = RequestState(make_facts(7, 100))
    state.ordered = make_ordered(7, held=hold)
    state.placement, state.worker = 1, "w0"
    state.recover_placed(1.0, staged=False)
    if outcome:
        state.recover_ending(1.0, outcome, "abort by me")
    state.check_invariants()
    return state


@pytest.mark.parametrize(
    ("staged", "started", "expected"),
    [(False, False, State.PREFILLING), (True, False, State.READY), (True, True, State.RUNNING)],
)
def test_request_is_placed_where_its_worker_reports(staged: bool, started: bool, expected: State) -> None:
    state, grant = recovered_state(), Grant(1, bytes(4), 1, 0)
    assert state.handle(PlacementAdopted(1, staged, started, False, None, grant), Rows(0, 0), 2.0) == [grant]
    assert state.state is expected
    state.check_invariants()
    if not staged:  # the report that was not acknowledged comes again
        state.handle(Staged(1, 1.0, 1.0), Rows(0, 100), 2.0)
        assert state.state is State.READY


@pytest.mark.parametrize(("wish", "left"), [({"hold": True}, State.RETRACTED), ({"outcome": "ABORTED"}, State.ABORTED)])
def test_withdraw_is_sent_again(wish: dict[str, Any], left: State) -> None:
    state = recovered_state(**wish)
    assert state.handle(PlacementAdopted(1, True, True, False, None, None), Rows(5, 104), 2.0) == [Withdraw(1)]
    state.handle(WorkerLost(1, True, "gone"), Rows(5, 104), 3.0)
    assert state.state is left


def test_placement_on_a_worker_that_never_returns_is_lost() -> None:
    state = recovered_state()
    state.handle(WorkerLost(1, True, "exited"), Rows(5, 104), 3.0)
    assert (state.state, state.kept_tokens) == (State.RETRACTED, 104)
    assert state.handle(PlacementAdopted(1, True, True, False, None, None), Rows(5, 104), 4.0) == [], (
        "of an ended placement"
    )
