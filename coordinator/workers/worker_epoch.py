"""One worker epoch in the coordinator: what its hello leads to, numbers, acknowledgements, liveness. Pure.

    reports   are numbered from 1 and apply once and in order; after a gap the missing ones are requested, at most every
              REPLAY_ASK_INTERVAL_S; a repeated one is acknowledged again and has no effect
    commands  coordinator.workers.command_log
    liveness  any message shows that the link is alive. `executor_beats` in heartbeats shows that the executor is, since
              the link thread may run on while the executor's loop hangs. Time in which the coordinator stood still
              does not count

An epoch that was declared down stays down: its later messages are refused, so that the worker withdraws all requests
and begins a new epoch. So both sides agree, although they may measure the silence differently.

A report is acknowledged once it is in the journal (`report_durable`); until then the worker keeps it.

A hello is judged with its attested process and the known worker of its name:

    epoch of the hello           known worker        leads to
    the known epoch              up                  CONTINUE: new connection, the numbers continue
                                 awaited             ADOPT: the worker ran on while the coordinator was down; its
                                                     inventory gives its progress, the numbers continue
                                 down                WrongState: an epoch that was declared down stays down
                                 another process     NameTaken: a second process uses the name
    another, which has applied   any                 SEND_AWAY under a higher incarnation: the worker withdraws all
    commands or sent reports                         requests and returns; otherwise WrongState, with the same result
    another, new                 none, down          JOIN
                                 the same process    SUCCEED: JOIN, and proof that the earlier epoch is quiesced, since
                                                     a worker begins a new epoch only without requests
                                 another process     NameTaken

Process 0 is not attested: it equals no process. Over tcp a process is known by the numbers of its epochs: the first is
the time of its start, later ones count on, and the hello says which was the first. So an earlier epoch between the two
was its own.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final, NamedTuple

from msgspec.structs import replace

from coordinator.state.events import LinkStats
from coordinator.workers.command_log import CommandLog
from protocol.errors import BadInput, NameTaken, ProtocolError, Unavailable, WrongState
from protocol.messages import NAME_CHARS_MAX, Counters, Heartbeat, Report, WorkerHello
from protocol.skew import check_version


class Course(Enum):
    CONTINUE = "continue"
    ADOPT = "adopt"
    SEND_AWAY = "send away"
    JOIN = "join"
    SUCCEED = "succeed"


class KnownWorker(NamedTuple):
    """The latest epoch under a name. `is_awaited`: from the journal, not seen by this coordinator."""

    epoch: int
    process: int
    is_down: bool
    is_awaited: bool = False


def judge(hello: WorkerHello, process: int, known: KnownWorker | None, incarnation: int) -> Course:
    """The course of `hello`. Raises the refusal: ProtocolError, BadInput (final), Unavailable, NameTaken (for now),
    WrongState."""
    _check(hello, incarnation)
    if known is not None and known.epoch == hello.epoch:
        if known.is_down:
            raise WrongState("this epoch was declared down", field="epoch", value=hello.epoch, remedy="begin a new one")
        if known.process != process:
            raise _taken(hello, known)
        return Course.ADOPT if known.is_awaited else Course.CONTINUE
    if hello.command_ack or hello.report_next > 1 or hello.inventory:
        if hello.incarnation_seen == incarnation:
            raise WrongState("this epoch is not known", field="epoch", value=hello.epoch, remedy="begin a new one")
        return Course.SEND_AWAY
    if known is not None and _is_same(hello, process, known):
        return Course.SUCCEED
    if known is not None and not known.is_down:
        raise _taken(hello, known)
    return Course.JOIN


def _is_same(hello: WorkerHello, process: int, known: KnownWorker) -> bool:
    """Return whether the process of a new epoch is that of the known one."""
    if process or known.process:
        return process == known.process
    return 0 < hello.first_epoch <= known.epoch < hello.epoch


def _check(hello: WorkerHello, incarnation: int) -> None:
    check_version(hello.protocol)
    for field, name in (("worker", hello.worker), ("node", hello.node)):
        if not 0 < len(name) <= NAME_CHARS_MAX:
            raise BadInput(f"not 1 to {NAME_CHARS_MAX} characters", field=field, value=name[:NAME_CHARS_MAX])
    if hello.incarnation_seen > incarnation:
        raise Unavailable(
            f"this worker has seen a later coordinator, incarnation {hello.incarnation_seen}",
            field="incarnation",
            value=incarnation,
        )


def _taken(hello: WorkerHello, known: KnownWorker) -> NameTaken:
    holder = f"process {known.process}" if known.process else "another process"
    return NameTaken(
        f"{holder} has this name",
        field="worker",
        value=hello.worker,
        remedy="stop it, or choose another worker.name",
    )


#: Missing reports are requested at most this often.
REPLAY_ASK_INTERVAL_S: Final = 0.25
#: Weight of the latest round trip in `command_ack_ms`.
ROUND_TRIP_WEIGHT: Final = 1 / 8
#: Fields of the latest heartbeat that LinkStats has too.
TOLD: Final = sorted(set(LinkStats._fields) & set(Heartbeat.__struct_fields__))


class Arrival(Enum):
    """Kind of a report, by its number."""

    NEXT = "next"
    REPEATED = "repeated"
    GAP = "gap"


class WorkerEpoch:
    """Times are seconds of one monotonic clock. `observe` is called with the seconds of each command round trip."""

    def __init__(self, hello: WorkerHello, observe: Callable[[float], None], now: float) -> None:
        self.worker = hello.worker
        self.node = hello.node
        self.epoch = hello.epoch
        self.pid = hello.pid
        self.commands = CommandLog()
        self.report_ack = 0
        self.report_durable = 0
        self.round_trip_s = 0.0
        self._observe = observe
        self.beat = Heartbeat(hello.epoch, 0, executor_beats=-1, steps=0, step_us=0.0)  # the latest
        self.hits = 0
        self.misses = 0
        self.swapped_bytes = 0
        self._beat_at = now
        self._heard_at = now
        self._asked_at = now - REPLAY_ASK_INTERVAL_S

    def reconnect(self, hello: WorkerHello, now: float) -> None:
        """A new connection of this epoch. Raises WrongState, unchanged, when the numbers of both sides contradict."""
        if hello.report_next <= self.report_ack:
            raise WrongState(
                f"report {self.report_ack} was received",
                field="report_next",
                value=hello.report_next,
                remedy="begin a new epoch",
            )
        try:
            self.commands.reconnect(hello.command_ack, now)
        except ProtocolError as error:
            raise WrongState(error.message, field=error.field, value=error.value, remedy="begin a new epoch") from error
        self._heard_at = self._beat_at = now

    def adopt(self, hello: WorkerHello, now: float) -> None:
        """First connection to this incarnation of an epoch from the journal: continue with the numbers of its hello."""
        self.commands.rebase(hello.command_ack)
        self.report_ack = self.report_durable = hello.report_first - 1
        self._heard_at = self._beat_at = now

    # ------------------------------------------------------------ messages

    def report(self, report: Report, now: float) -> Arrival:
        """Order `report` by its number; the caller applies a NEXT. Raises ProtocolError for an impossible number."""
        self._heard_at = now
        self.acknowledge(report.command_ack, now)
        if report.number < 1:
            raise ProtocolError("reports are numbered from 1", field="number", value=report.number)
        if report.number > self.report_ack + 1:
            return Arrival.GAP
        if report.number <= self.report_ack:
            return Arrival.REPEATED
        self.report_ack = report.number
        return Arrival.NEXT

    def should_ask_again(self, now: float) -> bool:
        """Return whether to request the missing reports now."""
        if now - self._asked_at < REPLAY_ASK_INTERVAL_S:
            return False
        self._asked_at = now
        return True

    def heartbeat(self, beat: Heartbeat, now: float) -> None:
        self._heard_at = now
        self.acknowledge(beat.command_ack, now)
        if beat.executor_beats != self.beat.executor_beats:
            self._beat_at = now
        self.beat = replace(beat, awaits=beat.awaits[:NAME_CHARS_MAX])

    def count_swaps(self, counters: Counters) -> None:
        self.hits, self.misses, self.swapped_bytes = counters.total_hits, counters.total_misses, counters.total_bytes

    def acknowledge(self, number: int, now: float) -> None:
        round_trip_s = self.commands.acknowledge(number, now)
        if round_trip_s is not None:
            self._observe(round_trip_s)
            self.round_trip_s += (round_trip_s - self.round_trip_s) * (ROUND_TRIP_WEIGHT if self.round_trip_s else 1.0)

    # ------------------------------------------------------------ liveness

    def excuse(self, seconds: float, now: float) -> None:
        """The coordinator's loop stood still for so long until `now`: what it did not hear meanwhile is no silence."""
        self._heard_at = min(self._heard_at + seconds, now)
        self._beat_at = min(self._beat_at + seconds, now)

    def failing(self, now: float, limit_s: float) -> str:
        """Why this epoch counts as down at `now`; empty while it does not."""
        if now - self._heard_at > limit_s:
            return f"no message for {limit_s:g} s"
        if now - self._beat_at > limit_s:
            return f"its executor has not turned for {limit_s:g} s"
        return ""

    def stats(self, now: float) -> LinkStats:
        return LinkStats(
            hits=self.hits,
            misses=self.misses,
            swapped_bytes=self.swapped_bytes,
            link_age_s=now - self._heard_at,
            command_ack_ms=1e3 * self.round_trip_s,
            **{name: getattr(self.beat, name) for name in TOLD},
        )
