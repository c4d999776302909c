"""Spans as the SDK of OpenTelemetry exports them. The only module that imports the SDK as it is loaded."""

from __future__ import annotations

from typing import Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from basics.tracing.spans import TraceSpan
from protocol.version import our_version

NS_PER_S: Final = 1_000_000_000


class Readable:
    """Called with a TraceSpan."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self._scope = InstrumentationScope("hisparse", our_version())

    def __call__(self, span: TraceSpan) -> ReadableSpan:
        parent = _context(span, span.parent_id, is_remote=span.has_remote_parent) if span.parent_id else None
        return ReadableSpan(
            name=span.name,
            context=_context(span, span.span_id),
            parent=parent,
            resource=self._resource,
            attributes=dict(span.attributes),
            events=[Event(it.name, timestamp=_ns(it.at_s)) for it in span.events],
            kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR if span.is_error else StatusCode.UNSET),
            start_time=_ns(span.start_s),
            end_time=_ns(span.end_s),
            instrumentation_scope=self._scope,
        )


def _context(span: TraceSpan, span_id: bytes, *, is_remote: bool = False) -> SpanContext:
    state = TraceState.from_header([span.state]) if span.state else None
    trace, own = int.from_bytes(span.trace_id, "big"), int.from_bytes(span_id, "big")
    return SpanContext(trace, own, is_remote, TraceFlags(TraceFlags.SAMPLED), state)


def _ns(seconds: float) -> int:
    return int(seconds * NS_PER_S)
