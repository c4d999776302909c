"""The link's decisions: handshake, order of commands, incarnations, probes; and a network that does its worst.

`FakeCoordinator` below is the least a coordinator does: numbers, replay, incarnations. The state machine at the end
puts it behind a network that loses, repeats and reorders within and across connections.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from metrics.state import LinkCounters, WorkerCounters
from protocol.arrays import pack_int32, unpack_int32
from protocol.errors import InternalError, ProtocolError
from protocol.inventory import unpack_rows
from protocol.messages import (
    PROTOCOL_VERSION,
    WORKER_MESSAGE_BYTES_MAX,
    Admit,
    Command,
    Commands,
    CoordinatorMessage,
    Counters,
    Grant,
    Heartbeat,
    Message,
    ModelInfo,
    Refused,
    Released,
    ReplayCommands,
    ReplayReports,
    Report,
    ReportAck,
    Resize,
    Sampling,
    Started,
    Stop,
    Withdraw,
    WorkerCapacity,
    WorkerHello,
    WorkerMessage,
    WorkerWelcome,
    decode_coordinator,
)
from protocol.skew import read_frame
from tests.support.hostile import hostile_frames
from tests.support.limits import HANG_LIMIT_S
from worker.link.link_state import (
    PROBE_S,
    REPLAY_ASK_INTERVAL_S,
    REPORT_ACK_LIMIT_S,
    SILENCE_LIMIT_S,
    WELCOME_LIMIT_S,
    Action,
    Apply,
    Drop,
    GiveUp,
    LinkPhase,
    LinkState,
    Send,
    SendTokenizer,
    StopAsked,
    WorkerIdentity,
)
from worker.link.outbox import REPORTS_UNACKED_MAX, Outbox

MODEL = ModelInfo("f", "tiny", 8192, 260, 4, 128, (257,), "bytes", "")
CAPACITY = WorkerCapacity(8, 64, 64, 4_096, 64, 1024, (4096,), 8, 1, "/tmp/pool")


def admit(placement: int, generated: list[int] | None = None) -> Admit:
    return Admit(placement, 0, f"r{placement}", b"", pack_int32(generated or []), 0, Sampling(8), b"", 1, 0, 1)


def make(name_limit_s: float = float("inf")) -> LinkState:
    return LinkState(WorkerIdentity("w", "n", 1, MODEL, CAPACITY), Outbox(epoch=10), LinkCounters(), name_limit_s)


def welcomed(incarnation: int = 1) -> LinkState:
    state = make()
    state.connected(0.0)
    state.received(WorkerWelcome(PROTOCOL_VERSION, incarnation, 0, want_tokenizer=False), 0.0)
    assert state.phase is LinkPhase.WELCOMED
    return state


def reconnect(state: LinkState, incarnation: int, report_ack: int) -> list[Action]:
    state.disconnected()
    assert state.may_connect()
    state.connected(0.0)
    return state.received(WorkerWelcome(PROTOCOL_VERSION, incarnation, report_ack, want_tokenizer=False), 0.0)


def applied(actions: list[Action]) -> list[Command]:
    return [action.command for action in actions if isinstance(action, Apply)]


def test_hello_identifies_worker_and_position() -> None:
    state = welcomed(incarnation=3)
    state.received(Commands(3, 1, (admit(5, [1, 2]), admit(6))), 0.0)
    state.outbox.add_event(Started(5))
    assert state.tick(0.0) == []
    state.reports(0.0)
    state.disconnected()
    (action,) = state.connected(1.0)
    assert isinstance(action, Send)
    hello = action.message
    assert isinstance(hello, WorkerHello)
    assert (hello.worker, hello.epoch, hello.incarnation_seen, hello.command_ack, hello.report_next) == (
        "w",
        10,
        3,
        2,
        2,
    )
    assert [(row.placement, row.generated_tokens) for row in unpack_rows(hello.inventory)] == [(5, 2), (6, 0)]


def test_commands_apply_once_and_in_order() -> None:
    """I4."""
    state = welcomed()
    assert applied(state.received(Commands(1, 1, (admit(1), admit(2))), 0.0)) == [admit(1), admit(2)]
    assert applied(state.received(Commands(1, 1, (admit(1), admit(2), admit(3))), 0.0)) == [admit(3)]
    assert applied(state.received(Commands(1, 2, (admit(2),)), 0.0)) == []
    assert state.command_ack == 3
    assert state.counters.duplicate_commands == 3


def test_command_gap_request_is_rate_limited() -> None:
    state = welcomed()
    gap = Commands(1, 3, (admit(3),))
    assert state.received(gap, 1.0) == [Send(ReplayCommands(10, 1))]
    assert state.received(gap, 1.0 + REPLAY_ASK_INTERVAL_S / 2) == []
    assert state.received(gap, 1.0 + REPLAY_ASK_INTERVAL_S) == [Send(ReplayCommands(10, 1))]
    assert (state.command_ack, state.counters.command_gaps) == (0, 3)


def test_foreign_and_unwelcomed_commands_do_nothing() -> None:
    """I4: a lower incarnation is refused."""
    state = make()
    state.connected(0.0)
    assert state.received(Commands(1, 1, (admit(1),)), 0.0) == []
    state = welcomed(incarnation=2)
    assert state.received(Commands(1, 1, (admit(1),)), 0.0) == []
    assert state.command_ack == 0


def test_a_lower_incarnation_is_not_obeyed() -> None:
    state = welcomed(incarnation=4)
    (action,) = reconnect(state, incarnation=3, report_ack=0)
    assert isinstance(action, Drop)
    assert action.reason == "lower_incarnation"
    assert state.phase is not LinkPhase.WELCOMED


def test_incarnations_begin_at_one() -> None:
    state = make()
    state.connected(0.0)
    (action,) = state.received(WorkerWelcome(PROTOCOL_VERSION, 0, 0, want_tokenizer=False), 0.0)
    assert isinstance(action, Drop)
    state.check_invariants()


def test_higher_incarnation_empties_the_worker_first() -> None:
    """I2: the new epoch's empty hello is said only after every admission was released."""
    state = welcomed(incarnation=1)
    state.received(Commands(1, 1, (admit(1), admit(2))), 0.0)
    actions = reconnect(state, incarnation=2, report_ack=0)
    assert applied(actions) == [Withdraw(1), Withdraw(2)]
    assert isinstance(actions[-1], Drop)
    state.disconnected()
    state.outbox.add_event(Released(1, 0))
    assert not state.may_connect()
    assert state.reports(0.0) == []
    state.outbox.add_event(Released(2, 0))
    assert state.may_connect()
    (action,) = state.connected(0.0)
    assert isinstance(action, Send)
    hello = action.message
    assert isinstance(hello, WorkerHello)
    assert (hello.epoch, hello.incarnation_seen, hello.command_ack, hello.report_next, hello.inventory) == (
        11,
        2,
        0,
        1,
        b"",
    )


def test_a_blank_epoch_adopts_a_higher_incarnation() -> None:
    state = welcomed(incarnation=1)
    reconnect(state, incarnation=5, report_ack=0)
    assert (state.phase, state.incarnation, state.outbox.epoch) == (LinkPhase.WELCOMED, 5, 10)


def test_forgotten_epoch_is_replaced_by_a_new_one() -> None:
    state = welcomed()
    state.received(Commands(1, 1, (admit(1),)), 0.0)
    state.reports(0.0)
    state.received(ReportAck(1, 1), 0.0)
    actions = reconnect(state, incarnation=1, report_ack=0)
    assert applied(actions) == [Withdraw(1)]
    state.outbox.add_event(Released(1, 0))
    state.disconnected()
    assert state.may_connect()
    assert state.outbox.epoch == 11


def test_reconnect_resends_unacknowledged_reports() -> None:
    state = welcomed()
    for placement in range(3):
        state.outbox.add_event(Started(placement))
        state.reports(0.0)
    actions = reconnect(state, incarnation=1, report_ack=1)
    sent = [action.message for action in actions if isinstance(action, Send)]
    assert [(report.number, report.events) for report in sent if isinstance(report, Report)] == [
        (2, (Started(1),)),
        (3, (Started(2),)),
    ]


def test_overdue_reports_are_sent_again() -> None:
    state = welcomed()
    state.outbox.add_event(Started(1))
    (first,) = state.reports(0.0)
    assert state.tick(REPORT_ACK_LIMIT_S) == []
    assert state.tick(REPORT_ACK_LIMIT_S + 0.1) == [first]
    assert state.tick(REPORT_ACK_LIMIT_S + 0.2) == []


def test_waiting_progress_leaves_only_when_a_window_opens() -> None:
    """An acknowledgement that answered at once would send reports as fast as the network turns."""
    state = welcomed()
    for number in range(1, REPORTS_UNACKED_MAX + 2):
        state.outbox.add_event(Started(number))
        state.reports(0.0)
    (action,) = state.received(ReportAck(1, 1), 0.0)
    assert isinstance(action, Send)
    assert isinstance(action.message, Report)
    assert action.message.events == (Started(REPORTS_UNACKED_MAX + 1),)
    state.received(ReportAck(1, 5), 0.0)
    state.outbox.add_event(Started(0))
    assert state.received(ReportAck(1, 6), 0.0) == []


def test_epoch_declared_down_is_emptied_and_replaced() -> None:
    """I2: what the coordinator has given up on is released before the worker shows its face again."""
    state = welcomed()
    state.received(Commands(1, 1, (admit(1),)), 0.0)
    assert applied(state.received(Refused("wrong_state", "declared down"), 0.0)) == [Withdraw(1)]
    state.check_invariants()
    state.disconnected()
    assert not state.may_connect()
    state.outbox.add_event(Released(1, 0))
    assert state.may_connect()
    assert (state.outbox.epoch, state.incarnation) == (11, 1)
    (action,) = state.connected(0.0)
    assert isinstance(action, Send)
    assert isinstance(action.message, WorkerHello)
    assert (action.message.first_epoch, action.message.epoch) == (10, 11)


def test_silence_is_probed_and_then_ends_the_connection() -> None:
    """I8: a wait has a bound."""
    state = welcomed()
    assert state.tick(PROBE_S) == []
    (probe,) = state.tick(PROBE_S + 0.1)
    assert isinstance(probe, Send)
    assert probe.message == Report(1, 10, 0, None, ())
    assert state.tick(PROBE_S + 0.2) == []
    (action,) = state.tick(SILENCE_LIMIT_S + 0.1)
    assert isinstance(action, Drop)
    assert action.reason == "silent"


def test_an_answered_probe_keeps_the_connection() -> None:
    state = welcomed()
    state.tick(PROBE_S + 0.1)
    state.received(ReportAck(1, 1), PROBE_S + 0.2)
    assert state.tick(SILENCE_LIMIT_S + 0.1) != []
    assert all(isinstance(action, Send) for action in state.tick(SILENCE_LIMIT_S + 0.1))


def test_an_unanswered_hello_is_given_up() -> None:
    state = make()
    state.connected(0.0)
    assert state.tick(WELCOME_LIMIT_S) == []
    (action,) = state.tick(WELCOME_LIMIT_S + 0.1)
    assert isinstance(action, Drop)
    assert action.reason == "no_welcome"


def test_refusals_are_final_unless_transient() -> None:
    state = make()
    state.connected(0.0)
    (action,) = state.received(Refused("config", "model f differs from the group's g", "start with --model g"), 0.0)
    assert isinstance(action, GiveUp)
    assert "differs" in str(action.error)
    assert "start with" in str(action.error)
    for code in ("unavailable", "capacity"):
        (action,) = state.received(Refused(code, "not now"), 0.0)
        assert isinstance(action, Drop)


def test_a_name_that_stays_taken_is_given_up() -> None:
    """A holder that is gone is found out within a heartbeat limit; one that lives keeps the name."""
    state, taken = make(name_limit_s=15.0), Refused("name_taken", "process 7 has this name", "stop it")
    for now in (0.0, 8.0, 15.0):
        assert state.may_connect()
        state.connected(now)
        assert state.received(taken, now) == [Drop("refused", "process 7 has this name")]
        state.disconnected()
    state.connected(16.0)
    (action,) = state.received(taken, 16.0)
    assert isinstance(action, GiveUp)
    expected = "worker.name=w: process 7 has this name, and still does after 15 s (stop it)"
    assert (str(action.error), action.error.code) == (expected, "config")


def test_a_name_that_was_free_in_between_may_be_taken_again() -> None:
    state, taken = make(name_limit_s=15.0), Refused("name_taken", "process 7 has this name")
    state.connected(0.0)
    state.received(taken, 0.0)
    state.disconnected()
    state.connected(1.0)
    state.received(WorkerWelcome(PROTOCOL_VERSION, 1, 0, want_tokenizer=False), 1.0)
    state.disconnected()
    for now in (60.0, 120.0):  # and nothing was heard for long
        state.connected(now)
        assert state.received(taken, now) == [Drop("refused", "process 7 has this name")]
        state.disconnected()


def test_unknown_connection_is_reopened() -> None:
    hello_is_wrong, connection_is_wrong = make(), welcomed()
    hello_is_wrong.connected(0.0)
    (action,) = hello_is_wrong.received(Refused("protocol", "another version"), 0.0)
    assert isinstance(action, GiveUp)
    (action,) = connection_is_wrong.received(Refused("protocol", "send WorkerHello first"), 0.0)
    assert isinstance(action, Drop)


def test_foreign_protocol_version_is_final() -> None:
    state = make()
    state.connected(0.0)
    (action,) = state.received(WorkerWelcome(PROTOCOL_VERSION + 1, 1, 0, want_tokenizer=False), 0.0)
    assert isinstance(action, GiveUp)
    assert str(PROTOCOL_VERSION + 1) in str(action.error)


def test_impossible_acknowledgements_drop_the_connection() -> None:
    state = welcomed()
    for message in (ReportAck(1, 7), ReplayReports(1, 9)):
        (action,) = state.received(message, 0.0)
        assert isinstance(action, Drop)
        assert action.reason == "protocol"


def test_tokenizer_and_stop_are_passed_on() -> None:
    state = make()
    state.connected(0.0)
    assert SendTokenizer() in state.received(WorkerWelcome(PROTOCOL_VERSION, 1, 0, want_tokenizer=True), 0.0)
    assert StopAsked(3.0) in state.received(Commands(1, 1, (Stop(3.0),)), 0.0)


def test_stopping_withdraws_held_and_later_requests() -> None:
    state = welcomed()
    state.received(Commands(1, 1, (admit(1),)), 0.0)
    beat, *withdrawals = state.stop(WorkerCounters())
    assert isinstance(beat, Send)
    assert isinstance(beat.message, Heartbeat)
    assert beat.message.leaving
    assert applied(withdrawals) == [Withdraw(1)]
    assert applied(state.received(Commands(1, 2, (admit(2), Grant(2, b"", 0, 0))), 0.0)) == [
        admit(2),
        Withdraw(2),
        Grant(2, b"", 0, 0),
    ]


def test_swap_totals_are_repeated_to_a_coordinator_that_adopts() -> None:
    """It knows nothing of what was counted before its start; an idle worker counts no more."""
    state = welcomed()
    state.outbox.count_swaps({1: (5, 2)}, (5, 2, 99))
    assert state.outbox.take(0, 0.0) is not None
    state.outbox.ack(1)
    state.disconnected()
    assert state.may_connect()
    state.connected(0.0)
    actions = state.received(WorkerWelcome(PROTOCOL_VERSION, 2, 1, want_tokenizer=False, adopted=True), 0.0)
    (report,) = [action.message for action in actions if isinstance(action, Send)]
    assert isinstance(report, Report)
    assert report.events == (Counters(5, 2, 99, b"", b"", b""),)


def test_heartbeats_carry_executor_state_after_welcome() -> None:
    since = monotonic() - 30.0
    counters = WorkerCounters(beats=4, steps=9, prompt_pass_tokens=800, prompts_since=(since + 20.0, since))
    assert make().heartbeat(counters) == []
    (action,) = welcomed().heartbeat(counters)
    assert isinstance(action, Send)
    assert isinstance(action.message, Heartbeat)
    beat = action.message
    assert (beat.executor_beats, beat.steps, beat.epoch, beat.leaving) == (4, 9, 10, False)
    assert (beat.prompt_tokens, beat.prompts_waiting) == (800, 2)
    assert 30.0 <= beat.prompt_wait_s < 30.0 + HANG_LIMIT_S


def test_connecting_twice_is_an_internal_error() -> None:
    state = make()
    state.connected(0.0)
    with pytest.raises(InternalError, match="twice"):
        state.connected(0.0)


# ---------------------------------------------------------------- a coordinator that is none

COORDINATOR_SEEDS: tuple[Message, ...] = (
    WorkerWelcome(PROTOCOL_VERSION, 1, 0, want_tokenizer=True),
    Commands(1, 1, (admit(1, [2]), Grant(1, b"", 1, 0), Resize(1, 0, 2), Withdraw(1))),
    Commands(1, 3, (Stop(1.0),)),
    ReportAck(1, 1),
    ReplayReports(1, 1),
    Refused("unavailable", "not now"),
)


@pytest.mark.fuzz
@settings(max_examples=400)
@given(hostile_frames(COORDINATOR_SEEDS), st.booleans())
def test_hostile_bytes_raise_nothing_and_keep_invariants(frames: list[bytes], was_welcomed: bool) -> None:
    """I4: whatever arrives, commands are counted as they are applied."""
    state = welcomed() if was_welcomed else make()
    if not was_welcomed:
        state.connected(0.0)
    count = 0
    for frame in frames:
        state.outbox.add_event(Started(1))
        try:
            message = read_frame(decode_coordinator, frame, WORKER_MESSAGE_BYTES_MAX, "coordinator")
        except ProtocolError:
            continue
        actions = state.received(message, 0.0)
        emptied = any(isinstance(action, Drop) and action.reason == "new_epoch" for action in actions)
        count += sum(isinstance(action, Apply | StopAsked) for action in actions if not emptied)
        assert state.command_ack == count
        state.check_invariants()


# ---------------------------------------------------------------- a network that does its worst


@dataclass
class FakeCoordinator:
    """Numbers commands, acknowledges and replays reports, greets workers: no more than the protocol asks of it."""

    incarnation: int = 1
    epoch: int = 0
    log: list[Command] = field(default_factory=list)
    report_ack: int = 0
    events: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def restart(self) -> None:
        self.__init__(incarnation=self.incarnation + 1)  # type: ignore[misc]

    def received(self, message: WorkerMessage) -> list[CoordinatorMessage]:
        match message:
            case WorkerHello():
                return self._greet(message)
            case Report() if message.epoch == self.epoch:
                return self._report(message)
            case ReplayCommands() if message.epoch == self.epoch:
                return self.commands(message.first)
        return []

    def _greet(self, hello: WorkerHello) -> list[CoordinatorMessage]:
        known = hello.epoch == self.epoch
        blank = hello.report_next == 1 and hello.command_ack == 0 and not hello.inventory
        welcome = WorkerWelcome(
            PROTOCOL_VERSION, self.incarnation, self.report_ack if known else 0, want_tokenizer=False
        )
        if not known and blank and hello.epoch > self.epoch and hello.incarnation_seen <= self.incarnation:
            self.epoch, self.log, self.report_ack, self.events, self.tokens = hello.epoch, [], 0, [], []
        return [welcome, *(self.commands(hello.command_ack + 1) if known else [])]

    def commands(self, first: int) -> list[CoordinatorMessage]:
        return [Commands(self.incarnation, first, tuple(self.log[first - 1 :]))] if first <= len(self.log) else []

    def _report(self, report: Report) -> list[CoordinatorMessage]:
        if report.number > self.report_ack + 1:
            return [ReplayReports(self.incarnation, self.report_ack + 1)]
        if report.number == self.report_ack + 1:
            self.report_ack += 1
            if report.progress:
                start = int(unpack_int32(report.progress.starts, "starts")[0])
                assert start == len(self.tokens)
                self.tokens += unpack_int32(report.progress.tokens, "tokens").tolist()
            self.events += [event.placement for event in report.events if isinstance(event, Started)]
        return [ReportAck(self.incarnation, self.report_ack)]


class HostileNetwork(RuleBasedStateMachine):
    """Commands reach the executor once and in order, reports reach the coordinator once and in order, in every epoch,
    whatever is lost, repeated, reordered or cut (I4, I5)."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.coordinator = FakeCoordinator()
        self.worker = LinkState(WorkerIdentity("w", "n", 1, MODEL, CAPACITY), Outbox(epoch=1), LinkCounters())
        self.is_up = False
        self.to_worker: list[CoordinatorMessage] = []
        self.to_coordinator: list[WorkerMessage] = []
        self.executed: dict[tuple[int, int], list[int]] = {}  # by incarnation and epoch
        self.sent: dict[tuple[int, int], list[int]] = {}
        self.written: dict[int, int] = {}
        self.started: dict[int, list[int]] = {}
        self.placements = 0

    # the world

    @property
    def worker_life(self) -> tuple[int, int]:
        return self.worker.incarnation, self.worker.outbox.epoch

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self.to_coordinator.append(action.message)
                case Apply(Admit() as command):
                    self.executed.setdefault(self.worker_life, []).append(command.placement)
                case Apply(Withdraw() as command):
                    self.worker.outbox.add_event(Released(command.placement, 0))
                case Drop():
                    self.cut()
                case _:
                    raise AssertionError(action)

    def cut(self) -> None:
        self.is_up = False
        self.to_worker.clear()
        self.to_coordinator.clear()
        self.worker.disconnected()

    def deliver_to_worker(self, message: CoordinatorMessage) -> None:
        self.perform(self.worker.received(message, self.now))

    def deliver_to_coordinator(self, message: WorkerMessage) -> None:
        self.to_worker += self.coordinator.received(message)

    # rules

    @precondition(lambda self: not self.is_up)
    @rule()
    def connect(self) -> None:
        if self.worker.may_connect():
            self.is_up = True
            self.perform(self.worker.connected(self.now))

    @precondition(lambda self: self.is_up)
    @rule()
    def lose_connection(self) -> None:
        self.cut()

    @rule()
    def command(self) -> None:
        if self.coordinator.epoch:
            self.placements += 1
            self.coordinator.log.append(admit(self.placements))
            self.sent.setdefault((self.coordinator.incarnation, self.coordinator.epoch), []).append(self.placements)
            self.to_worker += self.coordinator.commands(len(self.coordinator.log))

    @rule(count=st.integers(1, 3))
    def decode(self, count: int) -> None:
        epoch = self.worker.outbox.epoch
        start = self.written.get(epoch, 0)
        self.worker.outbox.add_tokens(0, 0, start, list(range(start, start + count)), 0)
        self.written[epoch] = start + count

    @rule(placement=st.integers(0, 99))
    def event(self, placement: int) -> None:
        self.started.setdefault(self.worker.outbox.epoch, []).append(placement)
        self.worker.outbox.add_event(Started(placement))

    @rule(seconds=st.sampled_from([0.02, 0.3, 2.5, 9.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.perform([*self.worker.reports(self.now), *self.worker.tick(self.now)])

    @rule(index=st.integers(0, 9), repeat=st.booleans())
    def network_to_worker(self, index: int, repeat: bool) -> None:
        if self.to_worker:
            index %= len(self.to_worker)
            self.deliver_to_worker(self.to_worker[index] if repeat else self.to_worker.pop(index))

    @rule(index=st.integers(0, 9), repeat=st.booleans())
    def network_to_coordinator(self, index: int, repeat: bool) -> None:
        if self.to_coordinator:
            index %= len(self.to_coordinator)
            self.deliver_to_coordinator(self.to_coordinator[index] if repeat else self.to_coordinator.pop(index))

    @rule(index=st.integers(0, 9), towards_worker=st.booleans())
    def lose(self, index: int, towards_worker: bool) -> None:
        queue: list[object] = self.to_worker if towards_worker else self.to_coordinator  # type: ignore[assignment]
        if queue:
            queue.pop(index % len(queue))

    @rule()
    def superseded_coordinator_speaks(self) -> None:
        self.deliver_to_worker(Commands(self.worker.incarnation - 1, self.worker.command_ack + 1, (admit(-1),)))

    @rule()
    def coordinator_restarts(self) -> None:
        if self.is_up:
            self.cut()
        self.coordinator.restart()

    # what must hold

    @invariant()
    def commands_once_and_in_order(self) -> None:
        for life, placements in self.executed.items():
            assert placements == self.sent.get(life, [])[: len(placements)]

    @invariant()
    def reports_once_and_in_order(self) -> None:
        epoch = self.coordinator.epoch
        assert self.coordinator.tokens == list(range(len(self.coordinator.tokens)))
        assert len(self.coordinator.tokens) <= self.written.get(epoch, 0)
        events = self.coordinator.events
        assert events == self.started.get(epoch, [])[: len(events)]

    @invariant()
    def relations(self) -> None:
        self.worker.check_invariants()

    def teardown(self) -> None:
        """The network heals: everything arrives, whatever happened before."""
        for _ in range(60):
            self.connect() if not self.is_up else None
            self.now += 0.5
            self.perform([*self.worker.reports(self.now), *self.worker.tick(self.now)])
            self.to_worker += self.coordinator.commands(self.worker.command_ack + 1)  # overdue: replayed
            while self.to_coordinator or self.to_worker:
                if self.to_coordinator:
                    self.deliver_to_coordinator(self.to_coordinator.pop(0))
                if self.to_worker:
                    self.deliver_to_worker(self.to_worker.pop(0))
        epoch = self.worker.outbox.epoch
        assert self.worker.phase is LinkPhase.WELCOMED
        assert epoch == self.coordinator.epoch
        assert self.executed.get(self.worker_life, []) == self.sent.get(self.worker_life, [])
        assert self.coordinator.tokens == list(range(self.written.get(epoch, 0)))
        assert self.coordinator.events == self.started.get(epoch, [])


TestHostileNetwork = HostileNetwork.TestCase
TestHostileNetwork.settings = settings(max_examples=200, stateful_step_count=50)
