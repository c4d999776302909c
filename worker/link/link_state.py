"""What the link to the coordinator decides; pure: messages and times in, actions out.

    DOWN ── connected ──► GREETED ── welcome ──► WELCOMED ── drop, cut ──► DOWN
     ▲                        │ the coordinator does not know this epoch
     └── nothing held ── EMPTYING

Commands apply once and in order within an epoch (I4): the next number is applied, lower ones are duplicates, a higher
one is a gap and is answered by ReplayCommands. Reports are the outbox's business; here it is decided when they go.

Incarnations. A coordinator of a higher incarnation either says that it adopts this epoch, which it knows from its
journal: then all goes on, from the numbers that the hello had. Or it knows nothing of what runs here: every placement
is withdrawn quietly (its reports go nowhere), and once the executor has released all of them a new epoch begins with an
empty hello.
The same goes for a coordinator that is through with this epoch: it refuses it (we were silent for too long and were
declared down), or welcomes it with a report number before what it once acknowledged. An epoch in which nothing has
happened yet suits any incarnation that is not lower. A lower one is a coordinator that was superseded: not obeyed, the
link is dropped.

Silence. ZMQ reconnects beneath us without a word, and a coordinator that is idle says nothing; so a link that heard
nothing for PROBE_S sends an empty report, which must be acknowledged, and drops itself after SILENCE_LIMIT_S. A fresh
hello then tells either side where to go on.

Rejected: trusting order and delivery within one connection (a ROUTER past its high-water mark drops with gaps);
acknowledging each command by a message of its own (reports and heartbeats carry a cumulative number).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from metrics.state import LinkCounters, WorkerCounters
from protocol.errors import (
    CapacityError,
    ConfigError,
    HiSparseError,
    InternalError,
    NameTaken,
    ProtocolError,
    Unavailable,
    WrongState,
)
from protocol.messages import (
    PROTOCOL_VERSION,
    Admit,
    Command,
    Commands,
    CoordinatorMessage,
    Grant,
    GroupMember,
    Heartbeat,
    ModelInfo,
    Receive,
    Refused,
    ReplayCommands,
    ReplayReports,
    ReportAck,
    Resize,
    Stop,
    Withdraw,
    WorkerCapacity,
    WorkerHello,
    WorkerMessage,
    WorkerWelcome,
)
from worker.link.outbox import REPORTS_UNACKED_MAX, Outbox

#: A hello that is not answered within this time is said again on a fresh connection.
WELCOME_LIMIT_S: Final = 5.0
#: Reports not acknowledged within this time are sent again.
REPORT_ACK_LIMIT_S: Final = 2.0
#: Having heard nothing for this long, ask for an acknowledgement.
PROBE_S: Final = 2.0
#: Having heard nothing for this long, give the connection up.
SILENCE_LIMIT_S: Final = 8.0
#: The same gap is asked for at most this often.
REPLAY_ASK_INTERVAL_S: Final = 0.25
#: A name that another process had is free after one heartbeat limit of the coordinator, if that process is gone. A
#: worker whose name is refused for this many of them gives up.
NAME_LIMITS: Final = 3

assert PROBE_S + REPORT_ACK_LIMIT_S < SILENCE_LIMIT_S  # a lost probe is sent again before the link is given up

#: Refusals that pass by themselves (an old connection of this worker not yet seen dead, a coordinator that stops).
PASSING_REFUSALS: Final = frozenset({Unavailable.code, CapacityError.code})
#: Refusals of this epoch alone: it was declared down while it was silent.
EPOCH_REFUSALS: Final = frozenset({WrongState.code})


class LinkPhase(Enum):
    DOWN = "down"
    GREETED = "greeted"
    WELCOMED = "welcomed"
    EMPTYING = "emptying"


@dataclass(frozen=True)
class WorkerIdentity:
    """Who this worker is, for its hello."""

    worker: str
    node: str
    pid: int
    model: ModelInfo
    capacity: WorkerCapacity
    receiver: bytes = b""
    member: GroupMember | None = None


@dataclass(frozen=True)
class Send:
    message: WorkerMessage


@dataclass(frozen=True)
class Apply:
    """Hand `command` to the executor."""

    command: Command


@dataclass(frozen=True)
class SendTokenizer:
    """The coordinator wants the tokenizer, in chunks between other messages."""


@dataclass(frozen=True)
class StopAsked:
    """The coordinator wants this process gone once its requests have ended, at the latest after `deadline_s`."""

    deadline_s: float


@dataclass(frozen=True)
class Drop:
    """Close this connection and connect anew; `reason` is a metrics label, `detail` for the log."""

    reason: str
    detail: str = ""


@dataclass(frozen=True)
class GiveUp:
    """The coordinator will never take this worker as it is."""

    error: HiSparseError


Action: TypeAlias = Send | Apply | SendTokenizer | StopAsked | Drop | GiveUp


class LinkState:
    """One per worker process, across all its connections and epochs. All times are seconds of one monotonic clock."""

    def __init__(
        self, identity: WorkerIdentity, outbox: Outbox, counters: LinkCounters, name_limit_s: float = float("inf")
    ) -> None:
        """`name_limit_s`: for how long the name may be refused because another process has it."""
        self.identity = identity
        self.outbox = outbox
        self.counters = counters
        self.phase = LinkPhase.DOWN
        self.incarnation = 0
        self.command_ack = 0
        self.stopping = False
        self._first_epoch = outbox.epoch
        self._next_incarnation = 0
        self._heard_at = 0.0
        self._asked_at = -REPLAY_ASK_INTERVAL_S
        self._name_limit_s = name_limit_s
        self._name_taken: tuple[float, float] | None = None  # first and latest refusal in a row because of the name

    # ---------------------------------------------------------------- connection

    def may_connect(self) -> bool:
        """Whether a fresh connection would make sense now; begins the new epoch once the executor is empty."""
        if self.phase is LinkPhase.EMPTYING and not self.outbox.held():
            self.outbox.restart(self.outbox.epoch + 1)
            self.incarnation = self._next_incarnation
            self.command_ack = 0
            self.counters.epochs += 1
            self.phase = LinkPhase.DOWN
        return self.phase is LinkPhase.DOWN

    def connected(self, now: float) -> list[Action]:
        """A fresh connection is there: say hello. InternalError when `may_connect` would have said no."""
        if self.phase is not LinkPhase.DOWN:
            raise InternalError("connected twice", field="phase", value=self.phase.value)
        self.phase = LinkPhase.GREETED
        self._heard_at = now
        self._asked_at = now - REPLAY_ASK_INTERVAL_S
        self.counters.connects += 1
        return [Send(self._hello())]

    def disconnected(self) -> None:
        """The connection is gone, cut by either side. Nothing else changes: numbers go on where they were."""
        if self.phase is not LinkPhase.EMPTYING:
            self.phase = LinkPhase.DOWN
        self.counters.welcomed = 0

    def _hello(self) -> WorkerHello:
        me = self.identity
        return WorkerHello(
            protocol=PROTOCOL_VERSION,
            worker=me.worker,
            node=me.node,
            epoch=self.outbox.epoch,
            pid=me.pid,
            incarnation_seen=self.incarnation,
            command_ack=self.command_ack,
            report_next=self.outbox.next_number,
            model=me.model,
            capacity=me.capacity,
            inventory=self.outbox.inventory(),
            report_first=self.outbox.first_number,
            receiver=me.receiver,
            member=me.member,
            first_epoch=self._first_epoch,
        )

    # ---------------------------------------------------------------- messages

    def received(self, message: CoordinatorMessage, now: float) -> list[Action]:
        """React to one message of the coordinator. Never raises for what the peer said: the worst is a Drop."""
        if self.phase is LinkPhase.WELCOMED:
            self._heard_at = now
        try:
            return list(self._react(message, now))
        except ProtocolError as error:
            return [Drop("protocol", str(error))]

    def _react(self, message: CoordinatorMessage, now: float) -> Iterator[Action]:
        match message:
            case WorkerWelcome() if self.phase is LinkPhase.GREETED:
                yield from self._welcome(message, now)
            case Refused() if self.phase is not LinkPhase.EMPTYING:
                yield from self._refusal(message, now)
            case Commands() if self._obeyed(message.incarnation):
                yield from self._commands(message, now)
            case ReportAck() if self._obeyed(message.incarnation):
                was_full = self.outbox.in_flight >= REPORTS_UNACKED_MAX
                self.outbox.ack(message.number)
                if was_full:
                    yield from self.reports(now)
            case ReplayReports() if self._obeyed(message.incarnation):
                yield from self._replay(message.first, now)
            case _:  # late, early or of another incarnation: the peer repeats what it needs
                return

    def _obeyed(self, incarnation: int) -> bool:
        return self.phase is LinkPhase.WELCOMED and incarnation == self.incarnation

    def _welcome(self, message: WorkerWelcome, now: float) -> Iterator[Action]:
        if message.protocol != PROTOCOL_VERSION:
            yield GiveUp(_foreign_protocol(message.protocol))
        elif message.incarnation < max(self.incarnation, 1):
            yield Drop("lower_incarnation", f"coordinator {message.incarnation}, obeying {self.incarnation}")
        elif self._is_stranger(message):
            yield from self._empty_out(
                message.incarnation, f"coordinator {message.incarnation} does not know epoch {self.outbox.epoch}"
            )
        else:
            self.outbox.ack(message.report_ack)
            self.incarnation = message.incarnation
            self.phase = LinkPhase.WELCOMED
            self._name_taken = None
            self._heard_at = now
            self.counters.welcomed = 1
            self.counters.welcomes += 1
            if message.want_tokenizer:
                yield SendTokenizer()
            if message.adopted:
                self.outbox.repeat_swap_totals()
            yield from self._replay(message.report_ack + 1, now)
            yield from self.reports(now)

    def _is_stranger(self, message: WorkerWelcome) -> bool:
        """Whether the coordinator does not know what this epoch has done."""
        if self.command_ack == 0 and self.outbox.next_number == 1:
            return False
        is_successor = message.incarnation > self.incarnation
        return (is_successor and not message.adopted) or not self.outbox.can_replay(message.report_ack + 1)

    def _empty_out(self, incarnation: int, reason: str) -> Iterator[Action]:
        self._next_incarnation = incarnation
        self.phase = LinkPhase.EMPTYING
        self.counters.welcomed = 0
        yield from self._withdraw_held()
        yield Drop("new_epoch", reason)

    def _withdraw_held(self) -> list[Action]:
        return [Apply(Withdraw(placement)) for placement in self.outbox.held()]

    def _refusal(self, message: Refused, now: float) -> Iterator[Action]:
        is_stray = message.code == ProtocolError.code and self.phase is LinkPhase.WELCOMED  # a fresh hello settles it
        is_passing = message.code in PASSING_REFUSALS
        if message.code == NameTaken.code:
            first, latest = self._name_taken or (now, now)
            first = first if now - latest <= self._name_limit_s else now  # the coordinator was away meanwhile
            self._name_taken = first, now
            is_passing = now - first <= self._name_limit_s
        if is_passing or is_stray:
            yield Drop("refused", message.message)
        elif message.code in EPOCH_REFUSALS:
            yield from self._empty_out(self.incarnation, message.message)
        else:
            yield GiveUp(self._refused_for_good(message))

    def _refused_for_good(self, message: Refused) -> ConfigError:
        if message.code == NameTaken.code:
            text = f"{message.message}, and still does after {self._name_limit_s:g} s"
            return ConfigError(text, field="worker.name", value=self.identity.worker, remedy=message.remedy)
        return ConfigError(message.message, field="coordinator refuses", value=message.code, remedy=message.remedy)

    def _commands(self, message: Commands, now: float) -> Iterator[Action]:
        expected = self.command_ack + 1
        if message.first > expected:
            self.counters.command_gaps += 1
            if now - self._asked_at >= REPLAY_ASK_INTERVAL_S:
                self._asked_at = now
                yield Send(ReplayCommands(self.outbox.epoch, expected))
            return
        known = min(expected - message.first, len(message.commands))
        self.counters.duplicate_commands += known
        for command in message.commands[known:]:
            self.command_ack += 1
            self.counters.commands += 1
            yield from self._apply(command)

    def _apply(self, command: Command) -> Iterator[Action]:
        match command:
            case Stop():
                yield StopAsked(command.deadline_s)
            case Admit() | Receive():
                self.outbox.hold(command)
                yield Apply(command)
                if self.stopping:
                    yield Apply(Withdraw(command.placement))
            case Grant() | Resize():
                self.outbox.give(command)
                yield Apply(command)
            case _:
                yield Apply(command)

    def _replay(self, first: int, now: float) -> Iterator[Action]:
        for report in self.outbox.replay(first):
            self.counters.replayed_reports += 1
            yield Send(report)
        self.outbox.touch(now)

    # ---------------------------------------------------------------- time

    def reports(self, now: float) -> list[Action]:
        """Every report that may go now."""
        actions: list[Action] = []
        if self.phase is LinkPhase.WELCOMED:
            while (report := self.outbox.take(self.command_ack, now)) is not None:
                self.counters.reports += 1
                actions.append(Send(report))
        return actions

    def tick(self, now: float) -> list[Action]:
        """What the passing of time asks for: overdue reports again, a probe, or the end of a silent connection."""
        silent_s = now - self._heard_at
        if self.phase is LinkPhase.GREETED and silent_s > WELCOME_LIMIT_S:
            return [Drop("no_welcome", f"no answer to hello within {WELCOME_LIMIT_S} s")]
        if self.phase is not LinkPhase.WELCOMED:
            return []
        if silent_s > SILENCE_LIMIT_S:
            return [Drop("silent", f"nothing heard for {SILENCE_LIMIT_S} s")]
        overdue = self.outbox.overdue(now, REPORT_ACK_LIMIT_S)
        if overdue is not None:
            return list(self._replay(overdue, now))
        if silent_s > PROBE_S and not self.outbox.in_flight:
            probe = self.outbox.take(self.command_ack, now, probe=True)
            return [Send(probe)] if probe else []
        return []

    def heartbeat(self, executor: WorkerCounters) -> list[Action]:
        """A Heartbeat with the executor's progress, while welcomed."""
        if self.phase is not LinkPhase.WELCOMED:
            return []
        prompts_waiting, prompt_wait_s = executor.prompts_waiting
        beat = Heartbeat(
            epoch=self.outbox.epoch,
            command_ack=self.command_ack,
            executor_beats=executor.beats,
            steps=executor.steps,
            step_us=executor.step_us,
            leaving=self.stopping,
            awaits=executor.awaits,
            step_s=executor.step_s.total,
            load_s=executor.swap.waited_seconds,
            alone_steps=executor.alone_steps,
            alone_s=executor.alone_s,
            alone_requests=executor.alone_requests,
            step_requests=executor.step_requests,
            prompt_tokens=executor.prompt_pass_tokens,
            prompts_waiting=prompts_waiting,
            prompt_wait_s=prompt_wait_s,
        )
        return [Send(beat)]

    def stop(self, executor: WorkerCounters) -> list[Action]:
        """Say that we leave; withdraw everything, and what is admitted before the coordinator has heard of it."""
        self.stopping = True
        return [*self.heartbeat(executor), *self._withdraw_held()]

    def owes(self) -> bool:
        """Whether the coordinator has yet to learn or to acknowledge something."""
        return self.outbox.in_flight > 0 or self.outbox.is_dirty(self.command_ack)

    def check_invariants(self) -> None:
        """Raise InternalError when a relation between the fields does not hold."""
        if self.counters.welcomed != (self.phase is LinkPhase.WELCOMED):
            raise InternalError("link gauge and phase disagree", field="phase", value=self.phase.value)
        if self.phase is LinkPhase.WELCOMED and self.incarnation < 1:
            raise InternalError("welcomed without an incarnation", field="incarnation", value=self.incarnation)
        if self.phase is LinkPhase.EMPTYING and self._next_incarnation < self.incarnation:
            raise InternalError("emptying for a coordinator that was superseded", value=self._next_incarnation)
        if self.outbox.in_flight > REPORTS_UNACKED_MAX:
            raise InternalError("more reports in flight than allowed", value=self.outbox.in_flight)


def _foreign_protocol(version: int) -> ConfigError:
    return ConfigError(
        f"the coordinator speaks protocol {version}, this worker {PROTOCOL_VERSION}",
        field="protocol",
        value=version,
        remedy="install the same hisparse version on both",
    )
