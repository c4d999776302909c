"""Traces of requests, from the actors' histories to what an exporter was handed."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from trio.testing import MockClock

from basics.tracing import sender as sender_module
from basics.tracing.readable import Readable
from basics.tracing.sender import SpanSender, open_sender
from basics.tracing.spans import SpanCounters, TraceSpan
from coordinator.journal.records import RequestFacts
from coordinator.state.request_state import RequestState, Transition
from coordinator.tracing import EVENTS_MAX, RequestTrace, RequestTracing, own_context
from protocol import messages
from protocol.arrays import pack_int32
from protocol.errors import ConfigError
from protocol.messages import Sampling, TraceContext
from protocol.settings import ClusterSettings
from tests.support.limits import HANG_LIMIT_S
from tests.support.scheduler_rig import SchedulerRig, open_rig

CALLER = TraceContext(bytes(range(1, 17)), bytes(range(1, 9)), is_sampled=True, state="vendor=1")
FACTS = RequestFacts(0, "r1", (0, 0, 1), "test", "", 100, b"", Sampling(50), 1e9)
#: `wall_offset_s` of the rig's Scheduler.
OFFSET_S = 1e9


async def submit(rig: SchedulerRig, request_id: str, **more: Any) -> None:
    prompt = pack_int32([position % 1000 for position in range(100)])
    ask = messages.Submit(1, prompt, Sampling(max_tokens=1_000), request_id, **more)
    await rig.scheduler.submit(ask, "test")


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


async def test_retracted_resumed_handed_over_request_is_one_trace(autojump_clock: MockClock) -> None:
    """Prefilled by another worker, retracted, resumed, moved off a drained worker; read back from an exporter."""
    exporter, counters = InMemorySpanExporter(), SpanCounters()
    sender = SpanSender(exporter, Readable(Resource({})), counters)
    async with open_rig(begin_trace=RequestTracing(sender.put, 0.0, OFFSET_S).begin) as rig:
        await rig.add_worker("w0")
        await rig.add_worker("w1")
        await submit(rig, "r!", prefill_mode=messages.DIRECT, trace=CALLER)
        await submit(rig, "untraced")
        await rig.run_until("r!", "RUNNING")
        await rig.scheduler.retract(("r!",), "test", keep=True, hold=True)
        await rig.run_until("r!", "RETRACTED")
        await rig.scheduler.resume(("r!",), "test")
        await rig.run_until("r!", "RUNNING")
        source = rig.scheduler.describe("r!")[0].worker
        await rig.scheduler.drain((source,), "test", handover=True, deadline_s=100)
        await rig.run_until("r!", "FINISHED")
        row, history = rig.scheduler.describe("r!")
    sender.close()
    *stages, whole = exporter.get_finished_spans()
    assert counters.by_outcome == {"exported": len(stages) + 1, "failed": 0, "dropped": 0}
    names = [it.name for it in stages]
    assert names[:8] == [*("queued", "prefill", "transfer", "prefilled", "load"), "decode", "retraction", "retracted"]
    assert names[8:] == ["resume", "decode", "retraction", "retracted", "resume", "decode", "completion"]
    check_tree(stages, whole)
    decodes = [attributes(it) for it in stages if it.name == "decode"]
    assert [it["hisparse.ended_by"] for it in decodes] == ["retract", "retract", "ended"]
    assert sum(it["hisparse.decoded_tokens"] for it in decodes) == row.generated_tokens - 1  # one came with the prompt
    assert decodes[1]["hisparse.worker"] == source != decodes[2]["hisparse.worker"]
    prefill = next(it for it in stages if it.name == "prefill")
    assert attributes(prefill)["hisparse.worker"] != decodes[0]["hisparse.worker"]
    held = [attributes(it)["hisparse.held"] for it in stages if it.name == "retracted"]
    assert held == [True, False]
    said = attributes(whole)
    assert said == {
        "hisparse.request_id": "r!",
        "hisparse.outcome": "FINISHED",
        "hisparse.admissions": [line.event for line in history].count("admitted"),
        "hisparse.retractions": row.retractions,
        "hisparse.prefix_tokens": 0,
        "gen_ai.request.max_tokens": 1_000,
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": row.generated_tokens,
        "gen_ai.response.finish_reasons": (row.reason,),
    }
    assert times(whole)[1] == pytest.approx(history[-1].at_s * 1e9, rel=1e-9)


def check_tree(stages: Sequence[ReadableSpan], whole: ReadableSpan) -> None:
    """One trace, the caller's; stages are children of the request's span and follow each other without gaps."""
    spans = [*stages, whole]
    assert {it.context.trace_id for it in spans if it.context} == {int.from_bytes(CALLER.trace_id, "big")}
    assert len({it.context.span_id for it in spans if it.context}) == len(spans)
    assert whole.parent is not None
    assert whole.context is not None
    assert (whole.parent.span_id, whole.parent.is_remote) == (int.from_bytes(CALLER.span_id, "big"), True)
    assert {it.parent.span_id for it in stages if it.parent} == {whole.context.span_id}
    assert whole.context.trace_state.to_header() == CALLER.state
    assert all(times(it)[1] == times(after)[0] for it, after in pairwise(stages))
    assert times(stages[0])[0] == times(whole)[0]
    assert times(stages[-1])[1] == times(whole)[1]


async def test_failure_names_its_cause_and_no_text_of_a_worker(autojump_clock: MockClock) -> None:
    spans: list[TraceSpan] = []
    async with open_rig(begin_trace=RequestTracing(spans.extend, 1.0, OFFSET_S).begin) as rig:
        link = await rig.add_worker("w0")
        await submit(rig, "r!")
        await rig.run_until("r!", "RUNNING")
        (placement,) = link.worker.runs
        for said in (messages.Faulted(placement, "the prompt said: secret"), messages.Released(placement, 0)):
            rig.scheduler.on_event("w0", link.worker.epoch, said)
        await rig.settle()
    whole = spans[-1]
    assert (whole.name, whole.is_error, whole.attributes["error.type"]) == ("request", True, "fault")
    assert whole.parent_id == b""
    assert "secret" not in repr(spans)


async def test_untraced_coordinator_asks_nothing(autojump_clock: MockClock) -> None:
    spans: list[TraceSpan] = []
    async with open_rig(begin_trace=RequestTracing(spans.extend, 0.0, OFFSET_S).begin) as rig:
        await rig.add_worker("w0")
        await submit(rig, "r!")
        await submit(rig, "s!", trace=msgspec.structs.replace(CALLER, is_sampled=False))
        await rig.run_until("s!", "FINISHED")
    assert spans == []


def test_trace_goes_on_after_a_restart() -> None:
    """I5: the request's span comes once, of the incarnation in which it ends, with the ids that it had before."""
    facts = msgspec.structs.replace(FACTS, trace=CALLER)
    before = RequestTrace(facts, own_context(facts, 0.0), OFFSET_S)
    old = RequestState(facts)
    assert before.follow(old.lines_since(0), old, 0) == []
    after = RequestTrace(facts, own_context(facts, 0.0), OFFSET_S)
    state = RequestState(facts, submitted_at=-5.0)
    seen = after.follow(state.lines_since(0), state, 0)
    state.placement, state.worker = 3, "w0"
    state.recover_placed(7.0, staged=True)
    seen += after.follow(state.lines_since(1), state, 20)
    state.state = state.state.FINISHED
    seen += after.follow([Transition(9.0, "released", "FINISHED", "")], state, 50)
    load, whole = seen
    assert (load.name, load.start_s, load.end_s) == ("load", OFFSET_S + 7, OFFSET_S + 9)
    assert (whole.start_s, whole.end_s) == (facts.at_s, OFFSET_S + 9)
    assert [it.name for it in whole.events] == ["recovered"]
    assert (whole.trace_id, whole.parent_id) == (CALLER.trace_id, CALLER.span_id)
    assert whole.span_id == own_context(facts, 1.0).span_id == load.parent_id


def test_requests_without_a_caller_have_traces_of_their_own() -> None:
    other = msgspec.structs.replace(FACTS, at_s=FACTS.at_s + 1)
    contexts = [own_context(it, 1.0) for it in (FACTS, FACTS, other)]
    assert contexts[0] == contexts[1] != contexts[2]
    assert contexts[0].trace_id != contexts[2].trace_id


def test_events_of_a_stage_are_bounded() -> None:
    trace, state = RequestTrace(FACTS, own_context(FACTS, 1.0), OFFSET_S), RequestState(FACTS)
    trace.follow([Transition(float(number), "waits", "QUEUED", "") for number in range(EVENTS_MAX + 4)], state, 0)
    (queued,) = trace.follow([Transition(99.0, "admitted", "READY", "")], state, 0)
    assert len(queued.events) == EVENTS_MAX
    assert queued.attributes["hisparse.events_dropped"] == 3


# ---------------------------------------------------------------- the sender


class RefusingExporter(SpanExporter):
    """Takes nothing: answers FAILURE, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._error is not None:
            raise self._error
        return SpanExportResult.FAILURE


def one_span() -> TraceSpan:
    trace, state = RequestTrace(FACTS, own_context(FACTS, 1.0), OFFSET_S), RequestState(FACTS)
    trace.follow(state.lines_since(0), state, 0)
    return trace.follow([Transition(1.0, "admitted", "PREFILLING", "")], state, 0)[0]


@pytest.mark.parametrize("error", [None, ValueError("a defect")], ids=["refuses", "raises"])
def test_spans_that_are_not_taken_are_counted(error: Exception | None) -> None:
    counters = SpanCounters()
    sender = SpanSender(RefusingExporter(error), Readable(Resource({})), counters)
    sender.put([one_span()] * 3)
    sender.close()
    assert counters.by_outcome == {"exported": 0, "failed": 3, "dropped": 0}


def test_spans_without_room_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "QUEUE_SPANS_MAX", 2)
    exporter, counters = InMemorySpanExporter(), SpanCounters()
    sender = SpanSender(exporter, Readable(Resource({})), counters)
    sender.put([one_span()] * 5)
    sender.close()
    assert counters.dropped == 3
    assert len(exporter.get_finished_spans()) == counters.exported == 2


def test_spans_wait_while_the_receiver_does_not_answer() -> None:
    taken, goes_on = threading.Event(), threading.Event()

    class SlowExporter(InMemorySpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            taken.set()
            goes_on.wait(HANG_LIMIT_S)
            return super().export(spans)

    sender = SpanSender(SlowExporter(), Readable(Resource({})), SpanCounters())
    sender.put([one_span()])
    assert taken.wait(HANG_LIMIT_S)
    sender.put([one_span()] * 3)
    assert sender.waiting == 3
    goes_on.set()
    sender.close()
    assert sender.waiting == 0


def test_endpoint_without_the_extra_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    cluster = ClusterSettings(traces_endpoint="http://127.0.0.1:4318/v1/traces")
    with (
        pytest.raises(ConfigError, match=r"cluster\.traces_endpoint.*pip install 'hisparse\[otel\]'"),
        open_sender(cluster, "coordinator", SpanCounters()),
    ):
        pass
    with open_sender(ClusterSettings(), "coordinator", SpanCounters()) as sender:
        assert sender is None
