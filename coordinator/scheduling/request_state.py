"""One request's state: the transition table of coordinator.scheduling.lifecycle applied, its history kept. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias

from basics.request_states import ACTIVE, RESUMABLE, TERMINAL, WAITING, State, state_text
from coordinator.journal.records import RequestFacts
from coordinator.journal.state import no_order
from coordinator.scheduling.entries import RequestEntry
from coordinator.scheduling.events import (
    Admitted,
    Ending,
    EndOrder,
    HotBufferResized,
    MemoryGiven,
    PlacementAdopted,
    PlacementEnded,
    PlacementProgressed,
    RequestCommand,
    RequestOrder,
    ResumeOrder,
    RetractOrder,
    RowsGivenUp,
    Stage,
    StillWaits,
    WorkerLost,
)
from coordinator.scheduling.lifecycle import (
    BY_WORKER,
    HAND_ON,
    OF_PLACEMENT,
    OUTCOME,
    SAME,
    TRANSITIONS,
    WAIT,
    EventKind,
    Resolve,
    Target,
)
from protocol import messages
from protocol.errors import InternalError, ProtocolError, WrongState
from protocol.units import PAGE_TOKENS

#: Causes of failures after which the rows of a placement are not reused.
SUSPECT_CAUSES: Final = frozenset({"fault", "lost_tokens", "poison"})
#: Lines of a request's history; older ones are dropped, the first (how it came) stays.
HISTORY_LINES_MAX: Final = 64


class IllegalEventError(ProtocolError):
    """A worker said something that cannot be said in this state: dropped, counted and logged with its peer."""


WorkerEvent: TypeAlias = (
    messages.Staged
    | messages.Started
    | messages.Parked
    | messages.Resized
    | messages.Finished
    | messages.Faulted
    | messages.Released
)
Action: TypeAlias = messages.Command | PlacementProgressed | HotBufferResized | PlacementEnded | Ending


class Rows(NamedTuple):
    """Counts of the token log: tokens generated, rows reported durable."""

    generated: int
    durable: int


class Transition(NamedTuple):
    """One line of a history; `at` on the coordinator's clock."""

    at: float
    event: str
    state: str
    reason: str


class RequestState:
    """One request. `handle` is the only way to change it, but for `entry`, which is the Scheduler's."""

    def __init__(self, facts: RequestFacts, *, now: float, reason: str = "", entry: RequestEntry | None = None) -> None:
        self.facts = facts
        self.entry = entry or RequestEntry(facts, no_order(facts.request_index))
        self.state = State.QUEUED
        self.keep = False  # what RETRACTING is to do with the rows
        self.placement = 0  # 0: on no worker
        self.worker = ""
        self.kept_tokens = 0
        self.prefills_only = False  # this placement, or the last one: its worker does not decode it
        self.retractions = 0
        self.admissions = 0
        self.prefix_tokens = 0  # of its prompt, reused when it was first admitted
        self.own_tokens = 0  # of its prompt, and not all: rows with which this placement, or the last one, began
        self.is_staged = False  # in this placement, or the last one
        # what the worker has yet to say in this placement; said twice, it is heard once
        self.staging = False
        self.parked = False
        self.resize: messages.Resize | None = None
        self.outcome = State.FAILED  # in RELEASING: how it will end, and why
        self.verdict = ""
        self.cause = ""  # of a failure, in one word
        self.reason = ""
        self.tail_text = ""
        self.first = Transition(now, "submitted", self.state, reason)
        self.lines: deque[Transition] = deque(maxlen=HISTORY_LINES_MAX - 1)
        self.lines_dropped = 0

    # ---------------------------------------------------------------- from the journal

    # `known`: what the journal knows of it, for the history, which is not in the journal itself

    def recover_waiting(
        self,
        now: float,
        *,
        kept_tokens: int,
        prefills_only: bool = False,
        known: str = "",
    ) -> None:
        """It was on no worker when the coordinator stopped."""
        self.kept_tokens, self.prefills_only = kept_tokens, prefills_only
        self._move(WAIT, now, "recovered", _restarted(known, f"{kept_tokens} rows kept" if kept_tokens else ""))

    def recover_placed(
        self,
        now: float,
        placement: int,
        worker: str,
        *,
        staged: bool,
        own_tokens: int = 0,
        prefills_only: bool = False,
        known: str = "",
    ) -> None:
        """It was on a worker that is yet to be heard. How far it is there, `PlacementAdopted` will say; told to leave
        in the earlier incarnation, it is leaving."""
        self.placement, self.worker, self.keep, self.staging = placement, worker, True, not staged
        self.prefills_only, self.own_tokens = prefills_only, own_tokens
        self._move(
            State.RETRACTING if self.entry.ordered.held else HAND_ON if staged else State.PREFILLING,
            now,
            "recovered",
            _restarted(known, f"on {worker}, which is awaited"),
        )

    def recover_ending(self, now: float, outcome: str, reason: str) -> None:
        """Recover a request on a worker whose end was decided, after `recover_placed`."""
        self.outcome, self.verdict = State(outcome), reason
        self._move(State.RELEASING, now, "recovered", reason)

    def recover_end(self, now: float, outcome: str, reason: str, tail_text: str) -> None:
        """It is over."""
        self.outcome, self.verdict, self.tail_text = State(outcome), reason, tail_text
        self._move(OUTCOME, now, "recovered", reason)

    # ---------------------------------------------------------------- queries

    @property
    def held(self) -> bool:
        """Return whether it waits, or will once it has left its worker, for an operator to resume it."""
        return self.entry.ordered.held and self.state in RESUMABLE

    def check_command(self, command: RequestCommand) -> None:
        """Raise WrongState, naming id, state and remedy, when an operator may not ask for `command` now."""
        remedy = _refusal(self, command)
        if remedy is not None:
            raise WrongState(
                f"cannot {command.value} a request that is {state_text(self.state, self.held)}",
                field="request_id",
                value=self.facts.request_id,
                remedy=remedy,
            )

    def history(self) -> tuple[Transition, ...]:
        """Every line that is kept, oldest first; a gap is said."""
        if not self.lines_dropped:
            return (self.first, *self.lines)
        gap = Transition(self.lines[0].at, "...", "", f"{self.lines_dropped} lines dropped")
        return (self.first, gap, *self.lines)

    @property
    def lines_count(self) -> int:
        """Lines that the history has had, dropped ones too."""
        return 1 + self.lines_dropped + len(self.lines)

    def lines_since(self, count: int) -> tuple[Transition, ...]:
        """Return the lines that the history has gained since it had `count` lines, as far as it is kept."""
        fresh = [*islice(reversed(self.lines), self.lines_count - count)][::-1]
        return tuple(fresh) if count else (self.first, *fresh)

    def check_invariants(self) -> None:
        checks = {
            "on a worker exactly when active": (self.placement != 0) == (self.state in ACTIVE),
            "RETRACTED is held or keeps rows": self.state is not State.RETRACTED or self.held or self.kept_tokens > 0,
            "PREFILLED keeps rows": self.state is not State.PREFILLED or self.kept_tokens > 0,
            "QUEUED holds nothing": self.state is not State.QUEUED or not (self.held or self.kept_tokens),
            "kept rows can be resumed, or begun with": not self.facts.part_of_prompt(self.kept_tokens) % PAGE_TOKENS,
        }
        for claim, holds in checks.items():
            if not holds:
                raise InternalError(f"request {self.facts.request_id} in {self.state}: not so: {claim}")

    # ---------------------------------------------------------------- events

    def handle(self, event: RequestOrder | WorkerEvent, rows: Rows, now: float) -> list[Action]:
        """Apply one event; returns what to do, in order. Raises IllegalEventError or InternalError: nothing changed.

        What a worker says of a placement that this request has left is acknowledged by doing nothing.
        """
        kind, apply = _HANDLERS[type(event)]
        if kind in OF_PLACEMENT and event.placement != (self.placement or None):  # type: ignore[union-attr]
            return []
        target = TRANSITIONS[self.state].get(kind)
        if target is None:
            raise self._illegal(kind, by_worker=kind in BY_WORKER)
        return apply(self, event, target, rows, now)

    def _staged(self, event: messages.Staged, target: Target, _: Rows, now: float) -> list[Action]:
        if not self.staging:
            return []
        self.staging, self.is_staged = False, True
        self._move(target, now, EventKind.STAGED, f"prefill {event.prefill_ms:.0f} ms, staging {event.stage_ms:.0f} ms")
        took_s = (event.prefill_ms + event.stage_ms) / 1e3
        return [PlacementProgressed(self.facts.request_index, self.placement, Stage.STAGED, took_s)]

    def _started(self, _: messages.Started, target: Target, __: Rows, now: float) -> list[Action]:
        if target is SAME:
            return []
        self._move(target, now, EventKind.STARTED, f"on {self.worker}")
        return [self._progressed(Stage.STARTED)]

    def _parked(self, _: messages.Parked, target: Target, __: Rows, now: float) -> list[Action]:
        if self.parked:
            return []
        self.parked = True
        self._move(target, now, EventKind.PARKED, "out of granted pages")
        return [self._progressed(Stage.PARKED)]

    def _resized(self, event: messages.Resized, target: Target, _: Rows, now: float) -> list[Action]:
        asked = self.resize
        if asked is None or (event.hot_slots, event.hot_chunks) != (asked.hot_slots, asked.hot_chunks):
            raise self._illegal(EventKind.RESIZED, by_worker=True)
        self.resize = None
        self._move(target, now, EventKind.RESIZED, describe_size(event.hot_slots))
        return [HotBufferResized(self.facts.request_index, self.placement)]

    def _finished(self, event: messages.Finished, target: Target, rows: Rows, now: float) -> list[Action]:
        if event.generated_tokens != rows.generated:
            lost = f"the worker counts {event.generated_tokens} tokens, {rows.generated} arrived"
            return self._decide(State.FAILED, lost, target, now, "lost_tokens")
        if self.state is not State.RELEASING:
            self.tail_text = event.tail_text
        return self._decide(State.FINISHED, event.reason, target, now)

    def _faulted(self, event: messages.Faulted, target: Target, _: Rows, now: float) -> list[Action]:
        return self._decide(State.FAILED, event.message, target, now, "fault")

    def _decide(self, outcome: State, reason: str, target: Target, now: float, cause: str = "") -> list[Action]:
        """The worker says how it ends; the first decision stands. Released follows."""
        if target is SAME:
            return []
        self.outcome, self.verdict, self.cause = outcome, reason, cause
        self._move(target, now, EventKind.ENDED, reason)
        return [self._progressed(Stage.LEAVING)]

    def _released(self, event: messages.Released, target: Target, rows: Rows, now: float) -> list[Action]:
        first_token = messages.NO_TOKEN if rows.generated else event.first_token
        durable, warm_start, own = event.durable_tokens, event.warm_start, self.own_tokens
        return self._depart(
            EventKind.RELEASED, target, durable, rows, now, first_token=first_token, warm_start=warm_start, own=own
        )

    def _lost(self, event: WorkerLost, target: Target, rows: Rows, now: float) -> list[Action]:
        """A process not proved gone shares full pages of durable rows with its successor; it may still write the page
        after them, whose rows are therefore computed again."""
        durable = rows.durable if event.proved_exit else rows.durable // PAGE_TOKENS * PAGE_TOKENS
        own = self._own_after_loss(rows, event.unit_tokens)
        return self._depart(EventKind.LOST, target, durable, rows, now, event.reason, own=own)

    def _own_after_loss(self, rows: Rows, unit_tokens: int) -> int:
        """Rows of its prompt, and not all, that it keeps where decoding cannot go on from what is durable. Of a prompt
        that was not staged, those with which its placement began."""
        if not unit_tokens or self.prefills_only:
            return 0
        prompt = self.facts.prompt_tokens
        durable = prompt if self.is_staged else self.own_tokens if self.staging else max(self.own_tokens, rows.durable)
        return min(durable, prompt - 1) // unit_tokens * unit_tokens

    def _depart(
        self,
        kind: EventKind,
        target: Target,
        durable: int,
        rows: Rows,
        now: float,
        reason: str = "",
        first_token: messages.FirstToken = messages.NO_TOKEN,
        warm_start: bytes = b"",
        own: int = 0,
    ) -> list[Action]:
        """Leave the worker. Rows are kept if decoding can go on from them: prompt rows, and the token after, be it one
        that was said or `first_token`. Else `own` rows of the prompt are, to compute the rest behind them."""
        known = rows.generated or int(first_token != messages.NO_TOKEN)
        kept = min(durable, self.facts.prompt_tokens + known - 1)
        resumes = self.keep and target is WAIT and kept >= self.facts.prompt_tokens
        self.kept_tokens = kept if resumes else own if self.keep and target is WAIT else 0
        first_token = first_token if resumes else messages.NO_TOKEN
        warm_start = warm_start if resumes else b""
        has_failed = target is OUTCOME and self.outcome is State.FAILED
        cacheable = durable if kind is EventKind.LOST else max(durable, rows.durable)
        departed = PlacementEnded(
            self.facts.request_index,
            self.placement,
            self.kept_tokens,
            target is OUTCOME,
            first_token,
            warm_start,
            0 if has_failed else cacheable,
            has_failed and self.cause in SUSPECT_CAUSES,
        )
        self.placement, self.worker = 0, ""
        reason = reason or (f"{self.kept_tokens} rows kept" if self.kept_tokens else "")
        if target is OUTCOME:
            return [departed, *self._end(kind, rows, now)]
        self._move(target, now, kind, reason)
        return [departed]

    def _adopted(self, event: PlacementAdopted, _: Target, __: Rows, now: float) -> list[Action]:
        """Its worker may never have heard that it is to leave, nor of its last grant."""
        self.staging, self.parked, self.resize = not event.is_staged, event.is_parked, event.resize
        if self.state in (State.RETRACTING, State.RELEASING):
            self._note(now, EventKind.ADOPTED, f"leaves {self.worker}")
            return [messages.Withdraw(self.placement)]
        staged = HAND_ON if event.is_staged else State.PREFILLING
        self._move(State.RUNNING if event.is_started else staged, now, EventKind.ADOPTED, f"on {self.worker}")
        return [] if event.grant is None else [event.grant]

    def _admitted(self, event: Admitted, target: Target, _: Rows, now: float) -> list[Action]:
        self.placement, self.worker, self.keep = event.command.placement, event.worker, True
        self.own_tokens, self.is_staged = self.facts.part_of_prompt(self.kept_tokens), False
        self.staging, self.parked, self.resize = event.command.computes_prompt, False, None
        self.prefills_only = event.command.hot_slots == messages.NO_HOT_BUFFER
        if not self.admissions:
            self.prefix_tokens = event.command.prefix_tokens
        self.admissions += 1
        self._move(target, now, EventKind.ADMITTED, event.reason)
        self.kept_tokens = 0
        return [event.command]

    def _given(self, event: MemoryGiven, _: Target, __: Rows, now: float) -> list[Action]:
        """Sent unless the request is leaving or has left: then the memory goes back with the rest."""
        command = event.command
        if command.placement != self.placement or self.state in (State.RETRACTING, State.RELEASING):
            return []
        self.parked = False
        if isinstance(command, messages.Resize):
            self.resize = command
            self._note(now, "resize", describe_size(command.hot_slots))
        return [command]

    def _retract(self, event: RetractOrder, target: Target, _: Rows, now: float) -> list[Action]:
        if self.state in TERMINAL or self.state is State.RELEASING:
            return []
        if self.state in WAITING:
            self._move(target, now, EventKind.RETRACT, event.reason)
            return []
        self.keep = self.keep and event.keep
        if target is SAME:
            self._note(now, EventKind.RETRACT, event.reason)
            return []
        self.retractions += 1
        self._move(target, now, EventKind.RETRACT, event.reason)
        return [messages.Withdraw(self.placement)]

    def _resume(self, event: ResumeOrder, target: Target, _: Rows, now: float) -> list[Action]:
        if self.state in RESUMABLE:
            self._move(target, now, EventKind.RESUME, event.reason)
        return []

    def _demoted(self, event: RowsGivenUp, target: Target, _: Rows, now: float) -> list[Action]:
        if self.kept_tokens:
            self.kept_tokens = 0
            self._move(target, now, EventKind.DEMOTED, event.reason)
        return []

    def _still_waits(self, event: StillWaits, _: Target, __: Rows, now: float) -> list[Action]:
        self._note(now, EventKind.WAITS, event.reason)
        return []

    def _ended(self, event: EndOrder, target: Target, rows: Rows, now: float) -> list[Action]:
        if target is SAME:
            return []
        withdrawn = self.state is State.RETRACTING
        self.outcome, self.verdict, self.cause = State(event.outcome), event.reason, event.cause
        self.kept_tokens = 0
        if target is OUTCOME:
            return self._end(EventKind.END, rows, now)
        self._move(target, now, EventKind.END, event.reason)
        return [] if withdrawn else [messages.Withdraw(self.placement)]

    # ---------------------------------------------------------------- parts

    def _end(self, kind: EventKind, rows: Rows, now: float) -> list[Action]:
        self._move(OUTCOME, now, kind, self.verdict)
        about = self.facts.request_index, self.facts.request_id
        return [Ending(*about, self.state, self.verdict, rows.generated, self.tail_text, self.prefix_tokens)]

    def _progressed(self, stage: Stage) -> PlacementProgressed:
        return PlacementProgressed(self.facts.request_index, self.placement, stage)

    def _move(self, target: Target, now: float, event: str, reason: str) -> None:
        match target:
            case State():
                self.state = target
            case Resolve.WAIT:
                kept = State.PREFILLED if self.prefills_only else State.RETRACTED
                self.state = State.RETRACTED if self.held else kept if self.kept_tokens else State.QUEUED
            case Resolve.START:
                self.state = State.PREFILLING if self.staging else State.READY
            case Resolve.HAND_ON:
                self.state = State.TRANSFERRING if self.prefills_only else State.READY
            case Resolve.OUTCOME:
                self.state = self.outcome
        self._note(now, event, reason)

    def _note(self, now: float, event: str, reason: str) -> None:
        if len(self.lines) == self.lines.maxlen:
            self.lines_dropped += 1
        self.lines.append(Transition(now, event, self.state, reason))
        self.reason = reason or self.reason

    def _illegal(self, kind: EventKind, *, by_worker: bool) -> IllegalEventError | InternalError:
        recent = " ".join(line.event for line in self.history()[-8:])
        what = f"{kind} cannot come to a request that is {self.state} (its history: {recent})"
        if by_worker:
            return IllegalEventError(what, field="request_id", value=self.facts.request_id, remedy="restart the worker")
        return InternalError(what, field="request_id", value=self.facts.request_id)


def describe_size(hot_slots: int) -> str:
    if hot_slots == messages.NO_HOT_BUFFER:
        return "for its prompt alone"
    return f"{hot_slots} hot slots" if hot_slots else "resident"


def _restarted(*known: str) -> str:
    """The reason of a history's first line in this incarnation."""
    return "; ".join(["the coordinator restarted", *filter(None, known)])


def _refusal(request: RequestState, command: RequestCommand) -> str | None:
    """Return what to do instead, or None when the command may be asked for."""
    state = request.state
    if state in TERMINAL:
        return "it has ended: read its output, or submit it again"
    if state is State.RELEASING:
        return "its end is decided and it is giving its memory back: wait"
    if command is RequestCommand.RETRACT and request.held:
        return "it is held already: resume it, or abort it"
    if command is RequestCommand.RESUME and not request.held:
        return "only a held request can be resumed: this one goes on by itself"
    return None


Handler: TypeAlias = Callable[[RequestState, Any, Target, Rows, float], list[Action]]

_HANDLERS: Final[dict[type, tuple[EventKind, Handler]]] = {
    messages.Staged: (EventKind.STAGED, RequestState._staged),
    messages.Started: (EventKind.STARTED, RequestState._started),
    messages.Parked: (EventKind.PARKED, RequestState._parked),
    messages.Resized: (EventKind.RESIZED, RequestState._resized),
    messages.Finished: (EventKind.ENDED, RequestState._finished),
    messages.Faulted: (EventKind.ENDED, RequestState._faulted),
    messages.Released: (EventKind.RELEASED, RequestState._released),
    Admitted: (EventKind.ADMITTED, RequestState._admitted),
    MemoryGiven: (EventKind.GIVEN, RequestState._given),
    RetractOrder: (EventKind.RETRACT, RequestState._retract),
    ResumeOrder: (EventKind.RESUME, RequestState._resume),
    RowsGivenUp: (EventKind.DEMOTED, RequestState._demoted),
    StillWaits: (EventKind.WAITS, RequestState._still_waits),
    EndOrder: (EventKind.END, RequestState._ended),
    WorkerLost: (EventKind.LOST, RequestState._lost),
    PlacementAdopted: (EventKind.ADOPTED, RequestState._adopted),
}
