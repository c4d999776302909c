"""The trace of one request, made of the transitions of its history. Pure. Lines in, finished spans out.

    request ─┬─ queued        QUEUED         waits for memory
             ├─ prefill       PREFILLING     prompt computed, staged to host pages
             ├─ transfer      TRANSFERRING   leaves its prefill worker, rows go where they will be decoded
             ├─ prefilled     PREFILLED      waits for a worker to decode it
             ├─ load          READY          index keys are loaded, the batch takes it in
             ├─ resume        READY          the same, with rows that were kept when it was retracted
             ├─ decode        RUNNING
             ├─ retraction    RETRACTING     leaves its worker
             ├─ retracted     RETRACTED      off its worker: held, or waits with its rows kept
             └─ completion    RELEASING      its end is decided, memory comes back

A line with another state ends a stage and begins the next. A line without is an event of the stage's span. Spans hold
ids, names and counts, and never the texts of a history's reasons: those of failures are written by workers.

Ids follow from the request's facts, so that a coordinator that restarts goes on in the same trace and its last span,
the request's own, is the parent of all. A stage that ran when the earlier incarnation ended has no span.

Rejected: spans opened and closed where things happen (the calls would be all over the actors, and the history says the
same already); one export at the end (a history keeps 64 lines, and a crash would lose the whole trace).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from basics.request_states import TERMINAL, State
from basics.tracing.spans import AttributeValue, Put, SpanEvent, TraceSpan
from coordinator.journal.records import RequestFacts
from coordinator.state.lifecycle import EventKind
from coordinator.state.request_state import RequestState, Transition
from protocol.messages import SPAN_ID_BYTES, TRACE_ID_BYTES, TraceContext
from protocol.trace_context import is_sampled

if TYPE_CHECKING:
    from coordinator.state.request import Follow

#: Events of one span: parking, new sizes, reasons to wait. Further ones are counted.
EVENTS_MAX: Final = 64
#: Why a request finished, as a worker says it: any other word is not handed on.
FINISH_REASONS: Final = frozenset({"eos", "stop", "length"})
STAGES: Final[Mapping[str, str]] = {
    State.QUEUED: "queued",
    State.PREFILLING: "prefill",
    State.TRANSFERRING: "transfer",
    State.PREFILLED: "prefilled",
    State.READY: "load",
    State.RUNNING: "decode",
    State.RETRACTING: "retraction",
    State.RETRACTED: "retracted",
    State.RELEASING: "completion",
}
RESUME: Final = "resume"
#: The line of a history with which a new incarnation goes on.
RECOVERED: Final = "recovered"

assert STAGES.keys() | TERMINAL == {*State}


@dataclass(slots=True)
class _Stage:
    """A state that a request is in."""

    state: str
    name: str
    since_s: float
    generated: int
    attributes: dict[str, AttributeValue]
    events: list[SpanEvent] = field(default_factory=list)
    events_dropped: int = 0

    def note(self, event: SpanEvent) -> None:
        if len(self.events) < EVENTS_MAX:
            self.events.append(event)
        else:
            self.events_dropped += 1


def own_context(facts: RequestFacts, ratio: float) -> TraceContext:
    """The span of a request: within its caller's trace, or in one of its own. The same in each incarnation."""
    made = blake2b(f"{facts.at_s!r} {facts.request_id}".encode(), digest_size=TRACE_ID_BYTES + SPAN_ID_BYTES).digest()
    caller, span_id = facts.trace, made[TRACE_ID_BYTES:]
    trace_id = made[:TRACE_ID_BYTES] if caller is None else caller.trace_id
    return TraceContext(trace_id, span_id, is_sampled(caller, trace_id, ratio), caller.state if caller else "")


class RequestTrace:
    """Trace of one sampled request: `follow` its history."""

    def __init__(self, facts: RequestFacts, context: TraceContext, wall_offset_s: float) -> None:
        """`wall_offset_s` is added to times of the history for seconds since 1970."""
        self._facts = facts
        self._context = context
        self._wall_offset_s = wall_offset_s
        self._stage: _Stage | None = None
        self._stages = 0
        self._recoveries: list[SpanEvent] = []

    def follow(self, lines: Sequence[Transition], state: RequestState, generated: int) -> list[TraceSpan]:
        """The spans that end with these lines. `state` is that after the last of them, `generated` counts tokens."""
        spans = []
        for line in lines:
            at_s = line.at + self._wall_offset_s
            event, stage = SpanEvent(at_s, str(line.event)), self._stage
            if line.event == RECOVERED:
                self._recoveries.append(event)
                self._stage = None
            elif stage is not None and stage.state == line.state:
                stage.note(event)
            elif stage is not None:
                spans.append(self._ended(stage, event, generated))
            if line.state in TERMINAL:
                spans.append(self._whole(at_s, state, generated))
            elif self._stage is None or self._stage.state != line.state:
                self._stage = self._begun(line, at_s, state, generated)
        return spans

    def _begun(self, line: Transition, at_s: float, state: RequestState, generated: int) -> _Stage:
        before = self._stage.state if self._stage is not None else ""
        resumes = line.state == State.READY and before == State.RETRACTED
        attributes: dict[str, AttributeValue] = {"hisparse.worker": worker} if (worker := state.active_worker) else {}
        if line.state == State.RETRACTED:
            attributes |= {"hisparse.kept_tokens": state.kept_tokens, "hisparse.held": state.held}
        return _Stage(line.state, RESUME if resumes else STAGES[line.state], at_s, generated, attributes)

    def _ended(self, stage: _Stage, by: SpanEvent, generated: int) -> TraceSpan:
        attributes = {**stage.attributes, "hisparse.ended_by": by.name}
        if stage.state == State.RUNNING:
            attributes["hisparse.decoded_tokens"] = generated - stage.generated
        if stage.events_dropped:
            attributes["hisparse.events_dropped"] = stage.events_dropped
        self._stages += 1
        unique = f"{self._stages} {stage.since_s!r}".encode()
        return TraceSpan(
            name=stage.name,
            trace_id=self._context.trace_id,
            span_id=blake2b(unique, key=self._context.span_id, digest_size=SPAN_ID_BYTES).digest(),
            parent_id=self._context.span_id,
            start_s=stage.since_s,
            end_s=by.at_s,
            attributes=attributes,
            events=stage.events,
            state=self._context.state,
            is_error=by.name == EventKind.LOST,
        )

    def _whole(self, at_s: float, state: RequestState, generated: int) -> TraceSpan:
        caller, facts = self._facts.trace, self._facts
        attributes: dict[str, AttributeValue] = {
            "hisparse.request_id": facts.request_id,
            "hisparse.outcome": str(state.state),
            "hisparse.admissions": state.admissions,
            "hisparse.retractions": state.retractions,
            "hisparse.prefix_tokens": state.prefix_tokens,
            "gen_ai.request.max_tokens": facts.sampling.max_tokens,
            "gen_ai.usage.input_tokens": facts.prompt_tokens,
            "gen_ai.usage.output_tokens": generated,
        }
        if state.state == State.FINISHED and state.verdict in FINISH_REASONS:
            attributes["gen_ai.response.finish_reasons"] = (state.verdict,)
        if state.state == State.FAILED:
            attributes["error.type"] = state.cause or "unknown"
        return TraceSpan(
            name="request",
            trace_id=self._context.trace_id,
            span_id=self._context.span_id,
            parent_id=caller.span_id if caller is not None else b"",
            start_s=facts.at_s,
            end_s=at_s,
            attributes=attributes,
            events=self._recoveries,
            state=self._context.state,
            has_remote_parent=caller is not None,
            is_error=state.state == State.FAILED,
        )


class RequestTracing:
    """Begins the traces of a coordinator's requests."""

    def __init__(self, put: Put, ratio: float, wall_offset_s: float) -> None:
        self._put = put
        self._ratio = ratio
        self._wall_offset_s = wall_offset_s

    def begin(self, facts: RequestFacts) -> Follow | None:
        """Return the function that takes each line of the request's history; None: the request is not sampled."""
        context = own_context(facts, self._ratio)
        if not context.is_sampled:
            return None
        trace = RequestTrace(facts, context, self._wall_offset_s)

        def follow(lines: Sequence[Transition], state: RequestState, generated: int) -> None:
            self._put(trace.follow(lines, state, generated))

        return follow
