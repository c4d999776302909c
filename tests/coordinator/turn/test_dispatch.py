"""Crossings between a Request and the Scheduler: each hears late what the other decided, and no memory is lost."""

from __future__ import annotations

import pytest

from basics.request_states import State
from coordinator.journal import records as journal
from coordinator.memory.changes import Keep, Release, apply
from coordinator.memory.ledger import Ledger
from coordinator.policy.decisions import AdmitDecision, DemoteDecision
from coordinator.policy.policy import STRANDED_LIMIT_S
from coordinator.state.events import (
    DemoteOrder,
    EndOrder,
    LedgerStep,
    PlacementEnded,
    PlacementProgressed,
    RetractOrder,
    Stage,
    WorkerLost,
)
from coordinator.state.request_state import RequestState
from coordinator.state.worker_entry import WorkerEntry
from coordinator.turn.dispatch import NOTHING, Dispatch, Effects, in_transactions
from tests.support.facts import add_request
from tests.support.fakes.fake_cluster import MODEL, FakePort, capacity


class Desk:
    """A dispatch with one worker and one running request; steps are applied as they come."""

    def __init__(self) -> None:
        self.ledger = Ledger(32)
        self.dispatch = Dispatch({"n0": self.ledger}, 96)
        self.worker = WorkerEntry("w0", "n0", 1, capacity(), MODEL, FakePort())
        self.hear(self.dispatch.worker_up(self.worker))
        self.entry = add_request(self.dispatch.placement_table, 7, 0, 100, 300)
        self.settle()
        for stage in (Stage.STAGED, Stage.STARTED):
            self.hear(self.dispatch.progressed(PlacementProgressed(7, self.entry.placement, stage)))
        self.entry.state = State.RUNNING

    def settle(self) -> list[object]:
        self.dispatch.dirty = True
        plan = self.dispatch.plan(0.0)
        for decision in plan:
            if step := self.dispatch.step(decision):
                apply(self.ledger, step.change)
        return list(plan)

    def hear(self, heard: Effects) -> Effects:
        for step in heard.steps:
            apply(self.ledger, step.change)
        self.dispatch.placement_table.check_invariants(lambda _: self.ledger)
        self.ledger.check_invariants()
        return heard

    def end_placement(self, durable_tokens: int, state: State = State.RETRACTED) -> Effects:
        self.entry.state = state
        return self.hear(self.dispatch.placement_ended(PlacementEnded(7, self.entry.placement, durable_tokens), 40))


@pytest.fixture
def desk() -> Desk:
    return Desk()


def steps(heard: Effects) -> list[object]:
    return [step.change for step in heard.steps]


def test_durable_rows_are_kept(desk: Desk) -> None:
    """SGLang #40729, #33385: a retraction keeps what has reached the host, and coming back starts there."""
    placement = desk.entry.placement
    assert steps(desk.end_placement(130)) == [Keep(placement, 3)]
    assert (desk.entry.waits, desk.entry.pages, desk.entry.generated) == (True, 3, 40)
    (again,) = desk.settle()
    assert isinstance(again, AdmitDecision)
    assert (again.take_over, again.durable_tokens, again.resumed_tokens) == (placement, 130, 130)


@pytest.mark.parametrize("deterministic", [False, True], ids=["rest by decode steps", "rest by prefill"])
def test_request_begins_again_with_its_own_pages(desk: Desk, deterministic: bool) -> None:
    """I3: full pages of a prompt that does not end with them, after a loss without proof. Prefix reuse is off."""
    desk.dispatch.prefix_reuse.with_generated = not deterministic
    placement = desk.entry.placement
    own = desk.ledger.pages_of(placement)[:1].tolist()
    desk.hear(desk.dispatch.worker_down(desk.worker, proved_exit=False))
    assert steps(desk.end_placement(64)) == [Keep(placement, 1)]
    desk.hear(desk.dispatch.worker_up(WorkerEntry("w0", "n0", 2, capacity(), MODEL, FakePort())))
    (again,) = desk.settle()
    assert isinstance(again, AdmitDecision)
    assert (again.take_over, again.prefix_tokens, again.resumed_tokens) == (placement, 64, 0)
    assert (desk.entry.by_steps, desk.entry.shared_pages) == (not deterministic, 1)
    assert (7 in desk.dispatch.placement_table.computing) == deterministic
    assert desk.ledger.pages_of(again.placement)[:1].tolist() == own
    desk.ledger.check_invariants()


def test_own_pages_that_are_no_whole_chunk_wait_to_be_given_up(desk: Desk) -> None:
    """A request of deterministic mode begins anew in the end, when workers came back with larger prompt blocks."""
    desk.dispatch.prefix_reuse.with_generated, desk.dispatch.prefix_reuse.unit_tokens = False, 128
    desk.end_placement(64)
    assert desk.settle() == []
    desk.dispatch.plan(0.0, tick=True)
    assert DemoteDecision in map(type, desk.dispatch.plan(STRANDED_LIMIT_S, tick=True))


def test_more_rows_than_pages_are_refused(desk: Desk) -> None:
    pages = desk.entry.pages
    desk.end_placement(10**9)
    assert (desk.entry.pages, desk.entry.kept_tokens) == (pages, pages * 64)


def test_ended_request_of_a_lost_worker_is_not_placed_again(desk: Desk) -> None:
    """The Request heard of the loss first, so its placement ends; its Ending comes when its end is in the journal."""
    desk.hear(desk.dispatch.worker_down(desk.worker, proved_exit=True))
    desk.hear(desk.dispatch.end(desk.entry, "ABORTED", "operator"))
    desk.end_placement(130)
    desk.hear(desk.dispatch.worker_up(WorkerEntry("w0", "n0", 2, capacity(), MODEL, FakePort())))
    assert desk.settle() == []
    assert (desk.entry.worker, desk.entry.waits, desk.ledger.pages_free) == ("", False, 32)
    desk.dispatch.closed(7)
    assert not desk.dispatch.placement_table.entries


def test_operator_drop_holds_after_late_departure(desk: Desk) -> None:
    """The Request kept its rows, not having heard yet; the memory goes, and it is told."""
    placement = desk.entry.placement
    desk.hear(desk.dispatch.retract(desk.entry, keep=False, hold=True, reason="operator"))
    heard = desk.end_placement(130)
    assert steps(heard) == [Release(placement)]
    assert [tell.event for tell in heard.tells] == [DemoteOrder("dropped")]
    assert desk.ledger.pages_free == 32
    assert desk.entry.ordered.held
    assert desk.settle() == []


def test_ended_request_is_not_placed_again(desk: Desk) -> None:
    """I5: PlacementEnded and Ending may come in different turns."""
    desk.end_placement(0, State.FINISHED)
    assert desk.settle() == []
    desk.dispatch.closed(7)
    assert desk.dispatch.placement_table.entries == {}


@pytest.mark.parametrize("is_ended", [True, False], ids=["ended", "admitted again"])
def test_events_of_an_ended_placement_change_nothing(desk: Desk, is_ended: bool) -> None:
    old = desk.entry.placement
    desk.end_placement(130)
    if not is_ended:
        desk.settle()
    before = (desk.entry.worker, desk.entry.leaving, desk.entry.memory, desk.ledger.pages_free)
    for stage in Stage:
        assert desk.dispatch.progressed(PlacementProgressed(7, old, stage)) == NOTHING
    assert desk.dispatch.placement_ended(PlacementEnded(7, old, 0), 40) == NOTHING
    assert (desk.entry.worker, desk.entry.leaving, desk.entry.memory, desk.ledger.pages_free) == before


def test_abort_of_a_waiting_request_frees_kept_pages(desk: Desk) -> None:
    placement = desk.entry.placement
    desk.end_placement(130)
    heard = desk.hear(desk.dispatch.end(desk.entry, "ABORTED", "client"))
    assert heard.steps == (LedgerStep("n0", Release(placement), journal.RequestPlacementEnded(7, 0)),)
    assert [type(tell.event) for tell in heard.tells] == [EndOrder, DemoteOrder]
    assert desk.ledger.pages_free == 32


def test_operator_drops_kept_rows(desk: Desk) -> None:
    desk.end_placement(130)
    heard = desk.hear(desk.dispatch.retract(desk.entry, keep=False, hold=False, reason="operator"))
    assert [type(tell.event) for tell in heard.tells] == [RetractOrder, DemoteOrder]
    assert (desk.entry.pages, desk.entry.ordered.held, desk.ledger.pages_free) == (0, False, 32)


def test_lost_worker_takes_no_placement_and_requests_hear_of_it(desk: Desk) -> None:
    placement = desk.entry.placement
    heard = desk.hear(desk.dispatch.worker_down(desk.worker, proved_exit=False))
    assert [tell.event for tell in heard.tells] == [WorkerLost(placement, False, "w0 is lost")]
    pages = desk.entry.pages
    assert steps(desk.end_placement(0)) == [Release(placement)]
    assert desk.ledger.count_pages().quarantined == pages
    assert desk.settle() == []
    desk.hear(desk.dispatch.worker_exited("w0", 1))
    assert desk.ledger.pages_free == 32


def test_staged_prompt_is_computed_no_more_and_holds_what_it_held(desk: Desk) -> None:
    table = desk.dispatch.placement_table
    other: RequestState = add_request(table, 8, 0, 100, 300)
    desk.settle()
    held = desk.ledger.held(other.placement)
    assert 8 in table.computing
    assert steps(desk.hear(desk.dispatch.progressed(PlacementProgressed(8, other.placement, Stage.STAGED)))) == []
    assert 8 not in table.computing
    assert desk.ledger.held(other.placement) == held


def test_notes_of_a_request_are_written_in_order_across_nodes() -> None:
    """One plan admits 1 on n1, gives up the rows of 2 on n0, and admits 2 on n1; then 3 on n0."""

    def placed(request_index: int, node: str) -> LedgerStep:
        return LedgerStep(node, Release(0), journal.RequestPlaced(request_index, 9, node, "w", 1, 0))

    given_up = LedgerStep("n0", Release(5), journal.RequestPlacementEnded(2, 0))
    steps = [placed(1, "n1"), given_up, placed(2, "n1"), placed(3, "n0"), LedgerStep("n1", Release(6))]
    assert list(in_transactions(steps)) == [("n1", [0]), ("n0", [1]), ("n1", [2, 4]), ("n0", [3])]
    assert list(in_transactions([steps[0], steps[3], steps[2]])) == [("n1", [0, 2]), ("n0", [1])]
