"""One request: its life cycle, by the table of coordinator.state.lifecycle, its place and its history. Pure.

Where it is, policy reads of three facts:

    `worker`    set from its admission until the Scheduler has heard that its placement is over
    `leaving`   asked to leave it, or its end is decided: its memory is as good as free, but not yet
    `state`     RUNNING: in the decode batch, so that its hot buffer can be resized

The first two change in the Scheduler's turns. The state changes when a worker's event or an order is handled: behind a
plan, and ahead of what follows from an event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import islice
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias

from msgspec import structs

from basics.request_states import ACTIVE, RESUMABLE, TERMINAL, WAITING, State
from coordinator.journal.state import RequestRecord
from coordinator.memory.prefix_index import Chain, Match
from coordinator.state.events import (
    Admitted,
    DemoteOrder,
    Ending,
    EndOrder,
    GrantOrder,
    PlacementAdopted,
    PlacementEnded,
    PlacementProgressed,
    RequestOrder,
    ResumeOrder,
    RetractOrder,
    Stage,
    StillWaits,
    WorkerLost,
)
from coordinator.state.lifecycle import (
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
from protocol.errors import InternalError, ProtocolError
from protocol.messages import Rank, Sampling
from protocol.sizing import NO_HOT_SIZE, HotSize, Length, Memory
from protocol.units import PAGE_TOKENS

#: Causes of failures after which the rows of a placement are not reused.
SUSPECT_CAUSES: Final = frozenset({"fault", "lost_tokens", "poison"})
#: Read in loops of policy: a name of an enum takes three times as long.
RUNNING: Final = State.RUNNING
#: States in which it takes more memory.
STAYING: Final = ACTIVE - {State.RETRACTING, State.RELEASING}
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
Action: TypeAlias = messages.Command | PlacementProgressed | PlacementEnded | Ending


class Rows(NamedTuple):
    """Counts of the token log: tokens generated, rows reported durable."""

    generated: int
    durable: int


class Swaps(NamedTuple):
    """Rows that swap-in found hot, and rows that it loaded."""

    hits: int
    misses: int


class Drafts(NamedTuple):
    """Drafts that steps verified, and those that were right."""

    drafted: int
    accepted: int


NO_SWAPS = Swaps(0, 0)
NO_DRAFTS = Drafts(0, 0)


class Transition(NamedTuple):
    """One line of a history; `at` on the coordinator's clock."""

    at: float
    event: str
    state: str
    reason: str


@dataclass(slots=True, eq=False)
class RequestState(RequestRecord):
    """One live request: its durable half, its life cycle, its place.

    The Request changes its life cycle, by `handle`; the Scheduler changes the rest, by its PlacementTable; `placed`,
    `on_worker`, `killed` and `ended` are as appended to the journal. `pages` and `hot` are the node's ledger's with the
    plan under way; `PlacementTable.check_invariants` compares them. `kept_tokens` is also written by the step that ends
    a placement, before the table knows.
    """

    submitted_at: float = 0.0  # on the coordinator's clock

    # durable, as `placed`, which follows a plan
    placement: int = 0  # on a worker, or where its kept pages are
    worker: str = ""
    node: str = ""
    own_tokens: int = 0  # of its prompt, and not all: rows with which this placement, or the last one, began
    prefills_only: bool = False  # this placement, or the last one: its worker does not decode it
    transfer_id: int = 0  # key in PlacementTable.transfers: the rows are on their way there, or have arrived

    # durable with the end
    outcome: State = State.FAILED  # in RELEASING: how it will end, and why
    verdict: str = ""
    tail_text: str = ""

    # from the token log and the node's ledger
    generated: int = 0  # read before each plan
    pages: int = 0  # host pages held; index pages too while on a worker
    hot: HotSize = NO_HOT_SIZE

    # from its worker's inventory, or from what is durable
    state: State = State.QUEUED
    leaving: bool = False
    keep: bool = False  # what RETRACTING is to do with the rows
    frees_pages: bool = False  # leaving: its host pages will be free
    lost: bool = False  # leaving: its worker is gone
    is_staged: bool = False  # in this placement, or the last one
    staging: bool = False  # said twice in a placement, it is heard once; so are the next two
    parked: bool = False
    resize: messages.Resize | None = None
    resizing: HotSize | None = None

    # policy finds them again
    chain: Chain | None = None  # None: it reuses nothing, and nothing of it is reused
    matches: dict[str, Match] = field(default_factory=dict)  # by node, while it waits
    shared_pages: int = 0  # of its placement: written before, and with which its page list began
    follows: tuple[int, int, float] | None = None  # waiting: a leader's placement, its pages cached, since when
    goes_alone: bool = False  # it has followed for long enough (coordinator.policy.following)
    by_steps: bool = False  # the rest of its prompt, behind cached pages, goes through decode steps
    indexed: int = 0  # pages of its placement that the index was told of, from the first on
    decoder: str = ""  # there for its prompt alone: the worker whose memory it was promised
    displaced: bool = False  # policy took it off a worker
    thinned: bool = False  # policy took it off a worker so that the others there could rise to the hot floor
    came_with: int = 0  # generated tokens when it was admitted
    transfers_failed: int = 0
    warm_start: bytes = b""  # waiting: what its next worker loads first, unread; a hint on which nothing depends
    paused_until: float = 0.0  # waiting: after a failed transfer
    stranded_at: float | None = None  # waiting: since when its kept pages are where no worker can take it
    reasons_told: frozenset[str] = frozenset()  # waiting: kinds of reasons that its history names already

    # not kept: counts and words of this incarnation
    swaps_before: Swaps = NO_SWAPS  # of earlier placements
    swaps: Swaps = NO_SWAPS  # of this one, so far, as its worker counts
    drafts_before: Drafts = NO_DRAFTS
    drafts: Drafts = NO_DRAFTS
    retractions: int = 0
    admissions: int = 0
    prefix_tokens: int = 0  # of its prompt, reused when it was first admitted
    cause: str = ""  # of a failure, in one word
    reason: str = ""
    lines: deque[Transition] = field(default_factory=lambda: deque(maxlen=HISTORY_LINES_MAX - 1))
    lines_dropped: int = 0

    @classmethod
    def of(cls, record: RequestRecord, submitted_at: float) -> RequestState:
        """Return the live request whose durable half is `record`."""
        state = cls(record.facts, submitted_at=submitted_at)
        for known in fields(RequestRecord):
            setattr(state, known.name, getattr(record, known.name))
        return state

    @property
    def rank(self) -> Rank:
        return self.facts.rank

    @property
    def length(self) -> Length:
        facts = self.facts
        return Length(facts.prompt_tokens, self.generated, facts.sampling.max_tokens)

    @property
    def prompt_bytes(self) -> int:
        """Bytes of its prompt and its grammar, while it lives."""
        return len(self.prompt) + len(self.grammar)

    @property
    def sampling(self) -> Sampling:
        """Sampling parameters as they were submitted, until the request ends."""
        known = self.facts.sampling
        return structs.replace(known, grammar=self.grammar) if self.grammar else known

    @property
    def swaps_in_all(self) -> Swaps:
        return Swaps(self.swaps_before.hits + self.swaps.hits, self.swaps_before.misses + self.swaps.misses)

    @property
    def drafts_in_all(self) -> Drafts:
        before, now = self.drafts_before, self.drafts
        return Drafts(before.drafted + now.drafted, before.accepted + now.accepted)

    @property
    def own_pages(self) -> int:
        """Waiting: full pages that it keeps, where they do not hold all rows of its prompt."""
        return self.facts.part_of_prompt(self.kept_tokens) // PAGE_TOKENS

    @property
    def is_ending(self) -> bool:
        """Return whether it will not wait again: its end was ordered, or it is over."""
        return bool(self.ordered.outcome) or self.state in TERMINAL

    @property
    def waits(self) -> bool:
        """Return whether it is to be admitted, now or once an operator resumes it."""
        return not (self.worker or self.is_ending)

    @property
    def runs(self) -> bool:
        """Return whether it decodes, and is not to leave."""
        return self.state is RUNNING and not self.leaving

    @property
    def chunks(self) -> int:
        """Chunks accounted for: while resizing, the larger of before and after."""
        return max(self.hot.hot_chunks, self.resizing.hot_chunks) if self.resizing else self.hot.hot_chunks

    @property
    def memory(self) -> Memory:
        on_worker = bool(self.worker)
        return Memory(self.pages, self.chunks, self.pages * on_worker, int(on_worker))

    # ---------------------------------------------------------------- from the journal

    # `known`: what the journal knows of it, for the history, which is not in the journal itself

    def recover_waiting(self, now: float, *, known: str = "") -> None:
        """It was on no worker when the coordinator stopped."""
        self._move(WAIT, now, "recovered", _restarted(known, self._rows_kept()))

    def recover_placed(self, now: float, *, staged: bool, known: str = "") -> None:
        """It was on a worker that is yet to be heard. How far it is there, `PlacementAdopted` will say; told to leave
        in the earlier incarnation, it is leaving."""
        self.keep, self.staging = True, not staged
        target = State.RETRACTING if self.ordered.held else HAND_ON if staged else State.PREFILLING
        self._move(target, now, "recovered", _restarted(known, f"on {self.worker}, which is awaited"))

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
    def is_placed(self) -> bool:
        """Return whether it is on a worker, as far as that worker was heard."""
        return self.state in ACTIVE

    @property
    def active_worker(self) -> str:
        """Name of the worker that it is on; empty on none."""
        return self.worker if self.is_placed else ""

    @property
    def held(self) -> bool:
        """Return whether it waits, or will once it has left its worker, for an operator to resume it."""
        return self.ordered.held and self.state in RESUMABLE

    @property
    def first(self) -> Transition:
        """First line of its history, which is kept."""
        return Transition(self.submitted_at, "submitted", State.QUEUED, self.facts.submission)

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
        kept_tokens = self.kept_tokens
        checks = {
            "on a worker when active": self.placement != 0 or self.state not in ACTIVE,
            "RETRACTED is held or keeps rows": self.state is not State.RETRACTED or self.held or kept_tokens > 0,
            "PREFILLED keeps rows": self.state is not State.PREFILLED or kept_tokens > 0,
            "QUEUED holds nothing": self.state is not State.QUEUED or not (self.held or kept_tokens),
            "kept rows can be resumed, or begun with": not self.facts.part_of_prompt(kept_tokens) % PAGE_TOKENS,
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
        if kind in OF_PLACEMENT and not (self.is_placed and event.placement == self.placement):  # type: ignore[union-attr]
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
        return [self._progressed(Stage.STAGED, took_s)]

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
        return [self._progressed(Stage.RESIZED)]

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
        return self._end_placement(
            EventKind.RELEASED, target, durable, rows, now, first_token=first_token, warm_start=warm_start, own=own
        )

    def _lost(self, event: WorkerLost, target: Target, rows: Rows, now: float) -> list[Action]:
        """A process not proved gone shares full pages of durable rows with its successor; it may still write the page
        after them, whose rows are therefore computed again."""
        durable = rows.durable if event.proved_exit else rows.durable // PAGE_TOKENS * PAGE_TOKENS
        own = self._own_after_loss(rows, event.unit_tokens)
        return self._end_placement(EventKind.LOST, target, durable, rows, now, event.reason, own=own)

    def _own_after_loss(self, rows: Rows, unit_tokens: int) -> int:
        """Rows of its prompt, and not all, that it keeps where decoding cannot go on from what is durable. Of a prompt
        that was not staged, those with which its placement began."""
        if not unit_tokens or self.prefills_only:
            return 0
        prompt, own = self.facts.prompt_tokens, self.own_tokens
        durable = prompt if self.is_staged else own if self.staging else max(own, rows.durable)
        return min(durable, prompt - 1) // unit_tokens * unit_tokens

    def _end_placement(
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
        ended = PlacementEnded(
            self.facts.request_index,
            self.placement,
            self.kept_tokens,
            first_token,
            warm_start,
            0 if has_failed else cacheable,
            has_failed and self.cause in SUSPECT_CAUSES,
        )
        if target is OUTCOME:
            return [ended, *self._end(kind, rows, now)]
        self._move(target, now, kind, reason or self._rows_kept())
        return [ended]

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
        self.keep, self.is_staged = True, False
        self.staging, self.parked, self.resize = event.command.computes_prompt, False, None
        if not self.admissions:
            self.prefix_tokens = event.command.prefix_tokens
        self.admissions += 1
        self._move(target, now, EventKind.ADMITTED, event.reason)
        return [event.command]

    def _granted(self, event: GrantOrder, _: Target, __: Rows, now: float) -> list[Action]:
        """Sent unless the request is leaving or has left: then the memory goes back with the rest."""
        command = event.command
        if self.state not in STAYING or command.placement != self.placement:
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

    def _demoted(self, event: DemoteOrder, target: Target, _: Rows, now: float) -> list[Action]:
        if self.state in WAITING:
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
        if target is OUTCOME:
            return self._end(EventKind.END, rows, now)
        self._move(target, now, EventKind.END, event.reason)
        return [] if withdrawn else [messages.Withdraw(self.placement)]

    # ---------------------------------------------------------------- parts

    def _end(self, kind: EventKind, rows: Rows, now: float) -> list[Action]:
        self._move(OUTCOME, now, kind, self.verdict)
        about = self.facts.request_index, self.facts.request_id
        return [Ending(*about, self.state, self.verdict, rows.generated, self.tail_text, self.prefix_tokens)]

    def _progressed(self, stage: Stage, took_s: float = 0.0) -> PlacementProgressed:
        return PlacementProgressed(self.facts.request_index, self.placement, stage, took_s)

    def _rows_kept(self) -> str:
        return f"{self.kept_tokens} rows kept" if self.kept_tokens else ""

    def _move(self, target: Target, now: float, event: str, reason: str) -> None:
        match target:
            case State():
                self.state = target
            case Resolve.WAIT:
                kept = State.PREFILLED if self.prefills_only else State.RETRACTED
                self.state = State.RETRACTED if self.ordered.held else kept if self.kept_tokens else State.QUEUED
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


#: To sort by: best rank first.
RANK_OF: Final[Callable[[RequestState], Rank]] = attrgetter("facts.rank")


def describe_size(hot_slots: int) -> str:
    if hot_slots == messages.NO_HOT_BUFFER:
        return "for its prompt alone"
    return f"{hot_slots} hot slots" if hot_slots else "resident"


def _restarted(*known: str) -> str:
    """The reason of a history's first line in this incarnation."""
    return "; ".join(["the coordinator restarted", *filter(None, known)])


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
    GrantOrder: (EventKind.GRANTED, RequestState._granted),
    RetractOrder: (EventKind.RETRACT, RequestState._retract),
    ResumeOrder: (EventKind.RESUME, RequestState._resume),
    DemoteOrder: (EventKind.DEMOTED, RequestState._demoted),
    StillWaits: (EventKind.WAITS, RequestState._still_waits),
    EndOrder: (EventKind.END, RequestState._ended),
    WorkerLost: (EventKind.LOST, RequestState._lost),
    PlacementAdopted: (EventKind.ADOPTED, RequestState._adopted),
}
