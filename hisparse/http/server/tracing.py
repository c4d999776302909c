"""The front's span of each completion: from its head to the end of its answer, a child of the caller's span.

Requests of the coordinator are children of the front's span, which is handed to them whether it is sampled or not: what
the front decides holds for the whole trace. Without `cluster.traces_endpoint` they are children of the caller's.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from basics.tracing.spans import AttributeValue, Put, TraceSpan
from hisparse.http.server.exchange import HttpExchange
from protocol.messages import SPAN_ID_BYTES, TRACE_ID_BYTES, TraceContext
from protocol.trace_context import is_sampled


@dataclass(frozen=True, slots=True)
class ServerSpan:
    """Under way. `began_s`: seconds since 1970."""

    context: TraceContext
    caller: TraceContext | None
    began_s: float


class ServerTracing:
    """Of one front. `put` takes what has ended."""

    def __init__(self, put: Put, ratio: float) -> None:
        self._put = put
        self._ratio = ratio

    def begin(self, exchange: HttpExchange) -> ServerSpan:
        """From now on `exchange.trace` is the front's span."""
        caller = exchange.trace
        trace_id = os.urandom(TRACE_ID_BYTES) if caller is None else caller.trace_id
        sampled = is_sampled(caller, trace_id, self._ratio)
        context = TraceContext(trace_id, os.urandom(SPAN_ID_BYTES), sampled, caller.state if caller else "")
        exchange.trace = context
        return ServerSpan(context, caller, time.time())

    def end(self, span: ServerSpan, exchange: HttpExchange, route: str) -> None:
        """Its answer is whole, or its client has left."""
        if not span.context.is_sampled:
            return
        attributes: dict[str, AttributeValue] = {"http.request.method": exchange.method, "http.route": route}
        if exchange.status:
            attributes["http.response.status_code"] = exchange.status
        if exchange.disconnected:
            attributes["error.type"] = "client_disconnected"
        self._put(
            [
                TraceSpan(
                    name=f"{exchange.method} {route}",
                    trace_id=span.context.trace_id,
                    span_id=span.context.span_id,
                    parent_id=span.caller.span_id if span.caller is not None else b"",
                    start_s=span.began_s,
                    end_s=time.time(),
                    attributes=attributes,
                    state=span.context.state,
                    has_remote_parent=span.caller is not None,
                    is_server=True,
                    is_error=exchange.disconnected or exchange.status >= 500,
                )
            ]
        )
