"""W3C Trace Context: the headers traceparent and tracestate as a TraceContext, and which traces are sampled. Pure.

    traceparent   00-<trace id, 32 hex digits>-<span id, 16 hex digits>-<flags, 2 hex digits>

What the recommendation calls invalid is as good as absent: the request gets a trace of its own. Versions after 00 are
read as far as 00 goes, version ff is invalid. A tracestate that is too long loses its last members, as the
recommendation says.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from protocol.messages import SPAN_ID_BYTES, TRACE_ID_BYTES, TRACE_STATE_CHARS_MAX, TraceContext

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
SAMPLED: Final = 1
_FORM: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<rest>-[!-~]*)?",
    re.ASCII,
)
_STATE: Final = re.compile(r"[ -~]*", re.ASCII)
#: Random bits of a trace id that decide about sampling: the low ones, as OpenTelemetry's TraceIdRatioBased has it.
_RATIO_BYTES: Final = 8


def read_context(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """The caller's span; None for an empty or invalid `traceparent`."""
    found = _FORM.fullmatch(traceparent.strip())
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["rest"]):
        return None
    trace_id, span_id = bytes.fromhex(found["trace"]), bytes.fromhex(found["span"])
    if not any(trace_id) or not any(span_id):
        return None
    return TraceContext(trace_id, span_id, bool(int(found["flags"], 16) & SAMPLED), _state(tracestate))


def context_of_headers(headers: Sequence[tuple[str, str]]) -> TraceContext | None:
    """Of an HTTP request, names in lower case. Two traceparents are none; several tracestates are one."""
    parents = [value for name, value in headers if name == TRACEPARENT]
    if len(parents) != 1:
        return None
    return read_context(parents[0], ",".join(value for name, value in headers if name == TRACESTATE))


def headers_of(context: TraceContext | None) -> dict[str, str]:
    """What `read_context` reads, by name; without a context nothing."""
    if context is None:
        return {}
    parent = f"00-{context.trace_id.hex()}-{context.span_id.hex()}-{SAMPLED if context.is_sampled else 0:02x}"
    return {TRACEPARENT: parent, TRACESTATE: context.state}


def is_sampled(caller: TraceContext | None, trace_id: bytes, ratio: float) -> bool:
    """As the caller decided; without one, `ratio` of all traces, the same ones in every process."""
    if caller is not None:
        return caller.is_sampled
    return int.from_bytes(trace_id[-_RATIO_BYTES:], "big") < ratio * (1 << 8 * _RATIO_BYTES)


def _state(text: str) -> str:
    text = text.strip() if _STATE.fullmatch(text) else ""
    return text if len(text) <= TRACE_STATE_CHARS_MAX else text[: TRACE_STATE_CHARS_MAX + 1].rpartition(",")[0]


assert (TRACE_ID_BYTES, SPAN_ID_BYTES) == (16, 8)  # of version 00
