"""The Request actor: one per live request, owner of its life cycle. The Scheduler steps it (coordinator.actor).

It hears the Scheduler and its worker's events, and does what request_state.RequestState decides: commands to the worker
link, the end to the gateway. What the Scheduler is to know, a step returns. Its end is told by the commit that has it;
nothing waits for that.

Waits of a request in the eyes of an operator, and their lengths:

    queue     a place on a worker, whenever it may have one: QUEUED, PREFILLED, or RETRACTED and not held, until it is
              admitted
    retract   its worker to let go: RETRACTING, until the memory is back
    hand_over its rows to reach where they will be decoded: TRANSFERRING, until PREFILLED
    resume    its kept rows to be used: READY from waiting, until it runs

A wait that comes to nothing (aborted, held, its worker lost) is not told: its length says nothing about the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from msgspec import structs

from basics.request_states import ACTIVE, WAITING, State
from coordinator.actor import Actor
from coordinator.journal.journal import Journal
from coordinator.journal.records import RequestEnded, RequestFacts
from coordinator.state.events import (
    Admitted,
    Ending,
    Listener,
    PlacementEnded,
    PlacementProgressed,
    RequestOrder,
    Word,
    WorkerPort,
)
from coordinator.state.request_state import (
    Action,
    IllegalEventError,
    RequestState,
    Rows,
    Transition,
    WorkerEvent,
)
from coordinator.tokens.token_log import TokenLog
from metrics.state import CoordinatorCounters
from protocol.logs import fields, logger


class WaitFor(Enum):
    QUEUE = "queue"
    RETRACT = "retract"
    HAND_OVER = "hand_over"
    RESUME = "resume"


class Waited(NamedTuple):
    what: WaitFor
    seconds: float


_FULFILLED: Final[dict[WaitFor, frozenset[State]]] = {
    WaitFor.QUEUE: ACTIVE - {State.RETRACTING, State.RELEASING},
    WaitFor.RETRACT: WAITING,
    WaitFor.HAND_OVER: frozenset({State.PREFILLED}),
    WaitFor.RESUME: frozenset({State.RUNNING}),
}


class Waits:
    """Waits of one request. `note` is told of its state after each event."""

    __slots__ = ("_since", "_state", "_what")

    def __init__(self, state: State, held: bool, now: float) -> None:
        self._state = state
        self._what = WaitFor.QUEUE if state in WAITING and not held else None
        self._since = now

    def note(self, state: State, held: bool, now: float) -> Waited | None:
        """The wait that ended with this event, if one did."""
        what = self._next(state, held)
        self._state = state
        if what is self._what:
            return None
        before, since = self._what, self._since
        self._what, self._since = what, now
        return Waited(before, now - since) if before is not None and state in _FULFILLED[before] else None

    def _next(self, state: State, held: bool) -> WaitFor | None:
        if state in WAITING:
            return None if held else WaitFor.QUEUE
        if state is State.RETRACTING:
            return WaitFor.RETRACT
        if state is State.TRANSFERRING:
            return WaitFor.HAND_OVER
        if state is State.READY and (self._state in WAITING or self._what is WaitFor.RESUME):
            return WaitFor.RESUME
        return None


#: Messages that may wait; the Scheduler has a handful under way, a sane worker fewer.
MAILBOX_MAX: Final = 256
BATCH_MAX: Final = 64
#: The cause of a failure that was decided in an earlier incarnation of the coordinator.
UNKNOWN: Final = "unknown"

#: Told the lines that a history has gained, the state after them and the tokens generated. Never waits.
Follow: TypeAlias = Callable[[Sequence[Transition], RequestState, int], None]
#: Asked once for each request; None: its history is followed by nothing. coordinator.tracing, which is a room above.
BeginTrace: TypeAlias = Callable[[RequestFacts], Follow | None]

log = logger("coordinator.state.request")


class RequestParts(NamedTuple):
    """Parts of the coordinator that its Requests use. Times are of `clock`; `wall_offset_s` gives seconds since 1970.

    `begin_trace` None: there are no traces.
    """

    token_log: TokenLog
    listener: Listener
    scheduler: Actor[Any]
    clock: Callable[[], float]
    journal: Journal
    wall_offset_s: float
    counters: CoordinatorCounters
    begin_trace: BeginTrace | None = None


class Request(Actor[RequestOrder | WorkerEvent | Ending]):
    """`state` may be read by anyone between turns; only this actor changes it."""

    def __init__(self, state: RequestState, parts: RequestParts, port: WorkerPort | None = None) -> None:
        name = f"request {state.facts.request_id}"
        super().__init__(name, mailbox_max=MAILBOX_MAX, batch_max=BATCH_MAX, stepped_by=parts.scheduler)
        self.state = state
        self._parts = parts
        self._port = port
        self._follow = parts.begin_trace(state.facts) if parts.begin_trace is not None else None
        self._waits = Waits(state.state, state.held, parts.clock())
        self._lines_logged = 0

    def history(self) -> tuple[str, ...]:
        return tuple(f"{line.at:.3f} {line.event} -> {line.state} {line.reason}" for line in self.state.history())

    def tell_history(self) -> None:
        """One log line for each line that the history has gained since the last call; its trace hears of them, too."""
        state, logged = self.state, self._lines_logged
        self._lines_logged = state.lines_count
        if self._follow is not None and state.lines_count > logged:
            self._follow(state.lines_since(logged), state, self._parts.token_log.length(state.facts.request_index))
        if not log.isEnabledFor(logging.INFO):
            return
        for line in state.lines_since(logged):
            detail = {"worker": state.active_worker, "reason": line.reason}
            known = {name: value for name, value in detail.items() if value}
            log.info(line.event, extra=fields(request=state.facts.request_id, state=line.state, **known))

    async def handle(self, batch: list[RequestOrder | WorkerEvent | Ending]) -> list[Word]:
        words: list[Word] = []
        for event in batch:
            if isinstance(event, Ending):  # written, and told
                self.close()
                words.append(event)
            else:
                if isinstance(event, Admitted):
                    self._port = event.port
                words += self._apply(event)
        return words

    def _apply(self, event: RequestOrder | WorkerEvent) -> list[Word]:
        state, token_log, request_index = self.state, self._parts.token_log, self.state.facts.request_index
        rows, now = Rows(token_log.length(request_index), token_log.durable(request_index)), self._parts.clock()
        try:
            actions = state.handle(event, rows, now)
        except IllegalEventError as error:
            log.warning("event dropped", extra=fields(worker=state.worker, error=error))
            return []
        self.tell_history()
        self._note_wait(now)
        return [word for action in actions for word in self._perform(action)]

    def _note_wait(self, now: float) -> None:
        waited, waits = self._waits.note(self.state.state, self.state.held, now), self._parts.counters.waits
        if waited is None:
            return
        match waited.what:
            case WaitFor.QUEUE:
                waits.queue_s.observe(waited.seconds)
            case WaitFor.RETRACT:
                waits.retract_s.observe(waited.seconds)
            case WaitFor.HAND_OVER:
                waits.hand_over_s.observe(waited.seconds)
            case WaitFor.RESUME:
                waits.resume_s.observe(waited.seconds)

    def _write_end(self, ending: Ending) -> None:
        """Its tokens go into the journal before it, or with it (I5)."""
        at_s = self._parts.clock() + self._parts.wall_offset_s
        about = ending.outcome, ending.reason, ending.generated_tokens, ending.tail_text
        ended = RequestEnded(ending.request_index, *about, at_s)
        self._parts.journal.append([ended]).then(partial(self._tell_end, ending))

    def _tell_end(self, ending: Ending) -> None:
        """The end is written: the client may hear of it, and nothing more is to come."""
        if ending.outcome == State.FAILED:
            self._parts.counters.failed[self.state.cause or UNKNOWN] += 1
        drafted, accepted = self.state.drafts_in_all
        self._parts.listener.ended(structs.replace(ending, drafted_tokens=drafted, accepted_tokens=accepted))
        self.tell(ending)

    def _perform(self, action: Action) -> Iterator[Word]:
        """Carry `action` out; yield it if the Scheduler is to know."""
        match action:
            case Ending():
                self._write_end(action)
            case PlacementProgressed():
                yield action
            case PlacementEnded():
                self._parts.token_log.end_placement(action.request_index)
                yield action
            case _:
                assert self._port is not None
                self._port.send(action)
