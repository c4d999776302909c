"""The transition table: histories told by hand, and every order of events that hypothesis finds."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from basics.request_states import ACTIVE, TERMINAL, WAITING, State
from coordinator.state.events import (
    Admitted,
    DemoteOrder,
    Ending,
    EndOrder,
    GrantOrder,
    LinkStats,
    PlacementEnded,
    PlacementProgressed,
    RequestCommand,
    Stage,
    WorkerLost,
)
from coordinator.state.lifecycle import TRANSITIONS, EventKind, Resolve
from coordinator.state.request_state import HISTORY_LINES_MAX, Action, IllegalEventError, RequestState, Rows
from coordinator.turn.commands import check_command
from protocol import messages
from protocol.errors import InternalError, WrongState
from protocol.units import PAGE_TOKENS
from tests.support.facts import handle, make_facts, make_ordered, resume, retract
from tests.support.ownership import image_of_request

PROMPT = 100


class FakePort:
    """A port without traffic: the pure part only names it."""

    def send(self, command: messages.Command) -> None:
        raise AssertionError(command)

    def step_s(self) -> float:
        return 0.0

    def stats(self) -> LinkStats:
        return LinkStats(0, 0.0, 0, 0, 0.0, 0.0)


def admit(placement: int, durable: int = 0, *, prefills_only: bool = False) -> Admitted:
    sampling = messages.Sampling(max_tokens=50)
    hot = (messages.NO_HOT_BUFFER, 0) if prefills_only else (0, 2)
    command = messages.Admit(placement, 3, "r", b"", b"", durable, sampling, b"", 2, *hot)
    return Admitted(command, "w0", FakePort(), "fits")


def admit_behind_own(placement: int, prefix: int, *, by_steps: bool) -> Admitted:
    """The rest of its prompt is computed behind pages that it kept."""
    sampling = messages.Sampling(max_tokens=50)
    command = messages.Admit(
        placement, 3, "r", b"", b"", 0, sampling, b"", 2, 0, 2, prefix_tokens=prefix, by_steps=by_steps
    )
    return Admitted(command, "w0", FakePort(), "fits")


class History:
    """A request and what it did so far."""

    def __init__(self) -> None:
        self.request = RequestState(make_facts(3, PROMPT))
        self.rows = Rows(0, 0)
        self.now = 0.0

    def tell(self, *events: object) -> list[Action]:
        done: list[Action] = []
        for event in events:
            self.now += 1.0
            done += handle(self.request, event, self.rows, self.now)
            self.request.check_invariants()
        return done

    def run(self, placement: int = 1) -> None:
        self.tell(admit(placement), messages.Staged(placement, 1.0, 1.0), messages.Started(placement))


def finish(placement: int, generated: int) -> list[object]:
    return [messages.Finished(placement, "eos", generated, "tail"), messages.Released(placement, 0)]


def test_a_request_runs_to_its_end() -> None:
    history = History()
    history.run()
    history.rows = Rows(7, 106)
    actions = history.tell(*finish(1, 7))
    assert actions[1:] == [
        PlacementEnded(3, 1, 0, cacheable_tokens=106),
        Ending(3, "r", "FINISHED", "eos", 7, "tail"),
    ]
    states = [line.state for line in history.request.history()]
    assert states == ["QUEUED", "PREFILLING", "READY", "RUNNING", "RELEASING", "FINISHED"]


@pytest.mark.parametrize(
    ("generated", "durable", "kept"),
    [(7, 105, 105), (7, 200, 106), (1, 100, 100), (0, 100, 0), (7, 99, 0)],
    ids=["all", "more than rows exist", "first token only", "no token to go on from", "prompt not durable"],
)
def test_rows_are_kept_only_if_decode_can_continue(generated: int, durable: int, kept: int) -> None:
    """The next step feeds the token at position `durable`: it must be known, and past the prompt."""
    history = History()
    history.run()
    history.rows = Rows(generated, durable)
    assert history.tell(retract(True, False, "GPU pressure")) == [messages.Withdraw(1)]
    assert history.tell(messages.Released(1, durable)) == [PlacementEnded(3, 1, kept, cacheable_tokens=durable)]
    assert history.request.state == (State.RETRACTED if kept else State.QUEUED)
    history.tell(admit(2, kept))
    assert history.request.state == (State.READY if kept else State.PREFILLING)


@pytest.mark.parametrize(
    ("generated", "first_token", "kept"),
    [(1, messages.NO_TOKEN, PROMPT), (0, 7, PROMPT), (0, messages.NO_TOKEN, 0)],
    ids=["said", "held back", "not drawn"],
)
def test_a_prompt_prefilled_for_another_worker_is_handed_over(generated: int, first_token: int, kept: int) -> None:
    """A first token that a stop string may begin in is not said, but decoding goes on from it."""
    history = History()
    history.tell(admit(1, prefills_only=True))
    assert history.tell(messages.Staged(1, 1.0, 1.0)) == [PlacementProgressed(3, 1, Stage.STAGED, 0.002)]
    assert history.request.state is State.TRANSFERRING
    history.rows = Rows(generated, PROMPT)
    assert history.tell(messages.Released(1, PROMPT, first_token)) == [
        PlacementEnded(3, 1, kept, first_token, cacheable_tokens=PROMPT)
    ]
    assert history.request.state == (State.PREFILLED if kept else State.QUEUED)
    assert history.request.retractions == 0
    if kept:
        history.tell(retract(True, True, "operator"))
        assert history.request.state is State.RETRACTED
        history.tell(resume("operator"), admit(2, kept))
        assert history.request.state is State.READY
        history.tell(messages.Started(2))
        assert history.tell(retract(True, False, "GPU pressure")) == [messages.Withdraw(2)]


def test_prompt_lost_with_its_first_token_is_prefilled_again() -> None:
    history = History()
    history.tell(admit(1, prefills_only=True), messages.Staged(1, 1.0, 1.0))
    history.rows = Rows(0, 0)
    assert history.tell(WorkerLost(1, True, "killed")) == [PlacementEnded(3, 1, 0)]
    assert history.request.state is State.QUEUED


def test_dropped_request_queues_and_held_one_waits_for_resume() -> None:
    history = History()
    history.run()
    history.rows = Rows(7, 106)
    history.tell(retract(False, False, "host pages"), messages.Released(1, 106))
    assert (history.request.state, history.request.kept_tokens) == (State.QUEUED, 0)
    history.tell(retract(True, True, "operator"))
    assert (history.request.state, history.request.held) == (State.RETRACTED, True)
    history.tell(resume("operator"))
    assert (history.request.state, history.request.held) == (State.QUEUED, False)


def test_operator_hold_joins_a_policy_retraction() -> None:
    """The late retract adds its wishes to the one under way; only one Withdraw is sent."""
    history = History()
    history.run()
    history.rows = Rows(7, 106)
    assert history.tell(retract(True, False, "GPU pressure"), retract(False, True, "operator")) == [
        messages.Withdraw(1)
    ]
    history.tell(messages.Released(1, 106))
    assert (history.request.state, history.request.held, history.request.kept_tokens) == (State.RETRACTED, True, 0)


def test_policy_cannot_override_operator_orders() -> None:
    """The other way round: a late retract by policy, which carries the orders that stand, neither lets go nor keeps."""
    history = History()
    history.run()
    history.rows = Rows(7, 106)
    history.tell(
        retract(False, True, "operator"),
        retract(True, True, "GPU pressure"),
        messages.Released(1, 106),
    )
    assert (history.request.state, history.request.held, history.request.kept_tokens) == (State.RETRACTED, True, 0)


def test_finishing_overtakes_a_retraction() -> None:
    history = History()
    history.run()
    history.rows = Rows(7, 106)
    history.tell(retract(True, True, "operator"), *finish(1, 7))
    assert history.request.state is State.FINISHED


def test_first_end_decision_stands() -> None:
    """I5: an abort and the worker's Finished cross; the request ends once, as decided first."""
    history = History()
    history.run()
    history.rows = Rows(7, 106)
    actions = history.tell(EndOrder("ABORTED", "by client"), *finish(1, 7))
    assert [a for a in actions if isinstance(a, Ending)] == [Ending(3, "r", "ABORTED", "by client", 7)]


def test_tokens_that_never_arrived_fail_the_request() -> None:
    """I5: its client would see a gap."""
    history = History()
    history.run()
    history.rows = Rows(5, 100)
    ending = history.tell(*finish(1, 7))[-1]
    assert ending == Ending(3, "r", "FAILED", "the worker counts 7 tokens, 5 arrived", 5)


@pytest.mark.parametrize(
    ("proved", "durable", "kept", "state"),
    [
        (True, 104, 104, State.RETRACTED),
        (False, 104, 64, State.RETRACTED),  # its full page has not the whole prompt: the rest is computed again
        (False, 127, 64, State.RETRACTED),
        (False, 128, 128, State.RETRACTED),
        (False, 150, 128, State.RETRACTED),
    ],
)
def test_lost_worker_leaves_durable_rows(proved: bool, durable: int, kept: int, state: State) -> None:
    """I2, I3: a process not proved gone may still write its partial page."""
    history = History()
    history.run()
    history.rows = Rows(60, durable)
    assert history.tell(WorkerLost(1, proved, "no heartbeat for 5 s")) == [
        PlacementEnded(3, 1, kept, cacheable_tokens=durable if proved else durable // PAGE_TOKENS * PAGE_TOKENS)
    ]
    assert history.request.state is state
    assert history.tell(messages.Released(1, 106)) == []


@pytest.mark.parametrize("proved", [True, False])
def test_staged_prompt_whose_first_token_was_not_heard_keeps_its_full_pages(proved: bool) -> None:
    """Decoding cannot go on without a token; the page with the last row is computed again, and draws it."""
    history = History()
    history.tell(admit(1), messages.Staged(1, 1.0, 1.0))
    history.tell(WorkerLost(1, proved, "gone"))
    assert (history.request.state, history.request.kept_tokens) == (State.RETRACTED, 64)


def test_prompt_that_was_not_staged_is_queued_again() -> None:
    history = History()
    history.tell(admit(1))
    history.rows = Rows(0, 64)
    history.tell(WorkerLost(1, True, "killed"))
    assert (history.request.state, history.request.kept_tokens) == (State.QUEUED, 0)


@pytest.mark.parametrize(("unit", "kept"), [(0, 0), (PAGE_TOKENS, 64), (2 * PAGE_TOKENS, 0)])
def test_pages_of_a_prompt_are_kept_in_units_that_can_be_begun_with(unit: int, kept: int) -> None:
    """In deterministic mode whole chunks of prompts, and none where no worker there prefills."""
    history = History()
    history.run()
    history.rows = Rows(5, 104)
    history.tell(WorkerLost(1, False, "gone", unit))
    assert history.request.kept_tokens == kept


@pytest.mark.parametrize("by_steps", [True, False], ids=["by steps", "prefill"])
@pytest.mark.parametrize("ends", ["lost", "retracted"])
def test_own_pages_outlive_a_second_placement_that_does_not_come_further(by_steps: bool, ends: str) -> None:
    history = History()
    history.run()
    history.rows = Rows(5, 104)
    history.tell(WorkerLost(1, False, "gone"), admit_behind_own(2, 64, by_steps=by_steps))
    assert history.request.state is (State.READY if by_steps else State.PREFILLING)
    history.rows = Rows(5, 64)
    if ends == "lost":
        history.tell(WorkerLost(2, True, "killed"))
    else:
        history.tell(retract(True, False, "GPU pressure"), messages.Released(2, 0))
    assert (history.request.state, history.request.kept_tokens) == (State.RETRACTED, 64)
    history.tell(retract(False, False, "host pages"), DemoteOrder("dropped"))
    assert (history.request.state, history.request.kept_tokens) == (State.QUEUED, 0)


def test_memory_granted_to_a_leaving_request_is_not_announced() -> None:
    history = History()
    history.run()
    grant = GrantOrder(messages.Grant(1, b"", 1, 0))
    assert history.tell(grant) == [grant.command]
    history.tell(EndOrder("ABORTED", "by client"))
    assert history.tell(grant) == []


def test_history_is_bounded_and_names_dropped_lines() -> None:
    """I8."""
    history = History()
    history.run()
    for _ in range(200):
        history.tell(messages.Parked(1), GrantOrder(messages.Grant(1, b"", 1, 0)))
    lines = history.request.history()
    assert len(lines) == HISTORY_LINES_MAX + 1
    assert lines[0].event == "submitted"
    assert lines[1].reason == f"{203 - (HISTORY_LINES_MAX - 1)} lines dropped"


def test_repeated_worker_event_counts_once() -> None:
    """I8: a worker cannot make a request flood the Scheduler."""
    history = History()
    history.run()
    assert history.tell(messages.Parked(1), messages.Parked(1)) == [PlacementProgressed(3, 1, Stage.PARKED)]
    history.tell(GrantOrder(messages.Resize(1, 128, 3)))
    with pytest.raises(IllegalEventError):
        history.tell(messages.Resized(1, 128, 5))
    assert history.tell(messages.Resized(1, 128, 3)) == [PlacementProgressed(3, 1, Stage.RESIZED)]
    with pytest.raises(IllegalEventError):
        history.tell(messages.Resized(1, 128, 3))
    history.tell(retract(True, False, "GPU pressure"))
    assert history.tell(messages.Staged(1, 1.0, 1.0), messages.Started(1)) == []


@pytest.mark.parametrize("event", [messages.Started(1), messages.Released(1, 0)])
def test_event_of_an_ended_placement_is_ignored(event: messages.Event) -> None:
    history = History()
    history.run()
    history.tell(WorkerLost(1, False, "gone"))
    assert history.tell(event) == []


def test_illegal_event_is_refused_with_the_history() -> None:
    history = History()
    history.tell(admit(1))
    before = image_of_request(history.request)
    with pytest.raises(
        IllegalEventError, match=r"started cannot come to a request that is PREFILLING .*submitted admitted"
    ):
        history.tell(messages.Started(1))
    assert image_of_request(history.request) == before
    with pytest.raises(InternalError, match="admitted cannot come"):
        history.request.handle(admit(2), history.rows, history.now)
    assert image_of_request(history.request) == before


@pytest.mark.parametrize(
    ("command", "states"),
    [
        (
            RequestCommand.ABORT,
            {"QUEUED", "PREFILLING", "TRANSFERRING", "PREFILLED", "READY", "RUNNING", "RETRACTING", "RETRACTED"},
        ),
        (
            RequestCommand.RETRACT,
            {"QUEUED", "PREFILLING", "TRANSFERRING", "PREFILLED", "READY", "RUNNING", "RETRACTING", "RETRACTED"},
        ),
        (
            RequestCommand.RESIZE,
            {"QUEUED", "PREFILLING", "TRANSFERRING", "PREFILLED", "READY", "RUNNING", "RETRACTING", "RETRACTED"},
        ),
        (RequestCommand.RESUME, set()),
    ],
)
def test_operator_commands_are_checked_against_the_state(command: RequestCommand, states: set[str]) -> None:
    for state in State:
        request = RequestState(make_facts(3, PROMPT))
        request.state = state
        if state in states:
            check_command(request, command)
        else:
            with pytest.raises(WrongState, match=f"cannot {command.value} a request that is {state}") as caught:
                check_command(request, command)
            assert caught.value.remedy
    request.state, request.ordered = State.RETRACTED, make_ordered(3, held=True)
    check_command(request, RequestCommand.RESUME)
    with pytest.raises(WrongState, match="cannot retract a request that is HELD"):
        check_command(request, RequestCommand.RETRACT)


def test_every_state_leads_to_an_end() -> None:
    """Reachability over the table itself, with the targets that depend on more than state and event spread out."""
    spread = {
        Resolve.SAME: set[State](),
        Resolve.WAIT: set(WAITING),
        Resolve.START: {State.PREFILLING, State.READY},
        Resolve.HAND_ON: {State.TRANSFERRING, State.READY},
        Resolve.OUTCOME: set(TERMINAL),
    }
    reached = set(TERMINAL)
    for _ in State:
        for state, row in TRANSITIONS.items():
            targets = {s for t in row.values() for s in (spread[t] if isinstance(t, Resolve) else {t})}
            if targets & reached:
                reached.add(state)
    assert reached == set(State)
    assert all(EventKind.END in row for row in TRANSITIONS.values())
    assert all(EventKind.LOST in TRANSITIONS[state] for state in ACTIVE)


class LifecycleMachine(RuleBasedStateMachine):
    """A scheduler that keeps its side of the bargain, and a worker that may say anything at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.request = RequestState(make_facts(3, PROMPT))
        self.rows = Rows(0, 0)
        self.now = 0.0
        self.placements = 0
        self.done: list[Action] = []

    def tell(self, event: object) -> None:
        self.now += 1.0
        before = image_of_request(self.request)
        try:
            self.done += handle(self.request, event, self.rows, self.now)
        except IllegalEventError:
            assert image_of_request(self.request) == before

    @precondition(lambda self: self.request.state in WAITING and not self.request.held)
    @rule(prefills_only=st.booleans())
    def admitted(self, prefills_only: bool) -> None:
        self.placements += 1
        kept = self.request.kept_tokens
        self.tell(admit(self.placements, kept, prefills_only=prefills_only and not kept))

    @rule(
        event=st.sampled_from(["staged", "started", "parked", "resized", "finished", "faulted", "released"]),
        data=st.data(),
    )
    def worker_says(self, event: str, data: st.DataObject) -> None:
        placement = data.draw(st.integers(max(0, self.placements - 1), self.placements))
        self.tell(
            {
                "staged": lambda: messages.Staged(placement, 1.0, 1.0),
                "started": lambda: messages.Started(placement),
                "parked": lambda: messages.Parked(placement),
                "resized": lambda: messages.Resized(placement, 0, 2),
                "finished": lambda: messages.Finished(placement, "eos", self.rows.generated),
                "faulted": lambda: messages.Faulted(placement, "bad row"),
                "released": lambda: messages.Released(
                    placement, data.draw(st.integers(0, 200)), data.draw(st.sampled_from([messages.NO_TOKEN, 7]))
                ),
            }[event]()
        )

    @precondition(lambda self: self.request.state is State.RUNNING)
    @rule(tokens=st.integers(1, 3))
    def tokens_arrive(self, tokens: int) -> None:
        self.rows = Rows(self.rows.generated + tokens, PROMPT + self.rows.generated)

    @rule(keep=st.booleans(), hold=st.booleans())
    def retract(self, keep: bool, hold: bool) -> None:
        self.tell(retract(keep, hold, "retract"))

    @rule()
    def resume(self) -> None:
        self.tell(resume("resume"))

    @precondition(lambda self: self.request.state not in ACTIVE)
    @rule()
    def demoted(self) -> None:
        self.tell(DemoteOrder("host pages"))

    @rule()
    def given(self) -> None:
        self.tell(GrantOrder(messages.Grant(self.placements, b"", 1, 1)))

    @rule(proved=st.booleans())
    def lost(self, proved: bool) -> None:
        self.tell(WorkerLost(self.placements, proved, "gone"))

    @precondition(lambda self: self.now > 5)
    @rule(outcome=st.sampled_from(["ABORTED", "FAILED"]))
    def end(self, outcome: str) -> None:
        self.tell(EndOrder(outcome, "told"))

    @invariant()
    def consistent(self) -> None:
        self.request.check_invariants()

    @invariant()
    def ends_once(self) -> None:
        """I5."""
        endings = [action for action in self.done if isinstance(action, Ending)]
        assert len(endings) == (self.request.state in TERMINAL)
        assert not endings or endings[0].outcome == self.request.state

    @invariant()
    def every_placement_is_withdrawn_and_ends_at_most_once(self) -> None:
        """I2: memory goes back on one PlacementEnded, after which nothing is sent to that placement."""
        ended: set[int] = set()
        withdrawn: set[int] = set()
        for action in self.done:
            if isinstance(action, PlacementEnded):
                assert action.placement not in ended
                ended.add(action.placement)
            elif isinstance(action, messages.Withdraw | messages.Grant | messages.Admit):
                assert action.placement not in ended | withdrawn
            if isinstance(action, messages.Withdraw):
                withdrawn.add(action.placement)
        assert self.placements - len(ended) == (self.request.state in ACTIVE)


TestLifecycleMachine = LifecycleMachine.TestCase
TestLifecycleMachine.settings = settings(max_examples=80, stateful_step_count=30)
