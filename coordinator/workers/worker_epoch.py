"""One worker epoch in the coordinator: numbers, acknowledgements, liveness. Pure.

    reports   are numbered from 1 and apply once and in order; after a gap the missing ones are requested, at most every
              REPLAY_ASK_INTERVAL_S; a repeated one is acknowledged again and has no effect
    commands  coordinator.workers.command_log
    liveness  any message shows that the link is alive. `executor_beats` in heartbeats shows that the executor is, since
              the link thread may run on while the executor's loop hangs. Time in which the coordinator stood still
              does not count

An epoch that was declared down stays down: its later messages are refused, so that the worker withdraws all requests
and begins a new epoch. So both sides agree, although they may measure the silence differently.

A report is acknowledged once it is in the journal (`report_durable`); until then the worker keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

from msgspec.structs import replace

from coordinator.state.events import LinkStats
from coordinator.workers.command_log import CommandLog
from protocol.errors import ProtocolError, WrongState
from protocol.messages import NAME_CHARS_MAX, Counters, Heartbeat, Report, WorkerHello

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
