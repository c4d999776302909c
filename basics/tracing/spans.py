"""Finished spans of traces, as processes hand them to a SpanSender. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

AttributeValue: TypeAlias = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SpanEvent:
    at_s: float
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """Finished. Times are seconds since 1970. `parent_id` b"": the first of its trace. `has_remote_parent`: the parent
    is of another process. `is_server`: it answers a request from outside."""

    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    start_s: float
    end_s: float
    attributes: Mapping[str, AttributeValue]
    events: Sequence[SpanEvent] = ()
    state: str = ""
    has_remote_parent: bool = False
    is_server: bool = False
    is_error: bool = False


#: Takes finished spans, and never waits.
Put: TypeAlias = Callable[[Sequence[TraceSpan]], None]


@dataclass(slots=True)
class SpanCounters:
    """Spans of traces. `dropped` is the loop's, found no room in the queue; the others are the sending thread's."""

    exported: int = 0
    failed: int = 0  # the receiver did not take them
    dropped: int = 0

    @property
    def by_outcome(self) -> dict[str, int]:
        return {"exported": self.exported, "failed": self.failed, "dropped": self.dropped}
