"""What the HTTP front exports, read from its owners at scrape time, and whether it is healthy and ready."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from basics.rooms import RoomUse
from metrics.exporter import Health
from metrics.families import Metric, counter, families, gauge, histogram
from metrics.process import PROCESS_METRICS, ROOM_METRICS, process_statistics
from metrics.state import HttpCounters


@dataclass(frozen=True)
class HttpSources:
    """Where the numbers are. Callables run in the exporter's thread and must not wait for anything."""

    name: str
    version: str
    counters: HttpCounters
    connected: Callable[[], bool]
    stopping: Callable[[], bool]
    rooms: Callable[[], Mapping[tuple[str, str], RoomUse]] = dict


HTTP_METRICS: Final[tuple[Metric[HttpSources], ...]] = (
    gauge(
        "hisparse_http_requests",
        "requests",
        "Completions being answered.",
        "How near is http.requests_max?",
        lambda it: it.counters.in_flight,
    ),
    gauge(
        "hisparse_http_connected",
        "",
        "1 while a coordinator is connected.",
        "Can it answer at all?",
        lambda it: it.connected(),
    ),
    gauge(
        "hisparse_http_connections",
        "connections",
        "Open connections of clients.",
        "How near is their limit?",
        lambda it: it.counters.connections,
    ),
    counter(
        "hisparse_http_connection_ends_total",
        "connections",
        "Ended connections by why: closed, idle, refused, unread, tls, evicted, stopped, defect.",
        "Do clients fail, or attack? Is there a defect of ours?",
        lambda it: {reason: count for (reason,), count in dict(it.counters.connection_ends).items()},
        labels="reason",
    ),
    counter(
        "hisparse_http_answers_total",
        "answers",
        "Answers by path and status.",
        "Who is refused?",
        lambda it: dict(it.counters.answers),
        labels="path status",
    ),
    counter(
        "hisparse_http_disconnects_total",
        "clients",
        "Left before their answer.",
        "Do clients give up?",
        lambda it: it.counters.disconnects,
    ),
    counter(
        "hisparse_http_abandoned_total",
        "requests",
        "Aborted after their last client left.",
        "What do those clients cost?",
        lambda it: it.counters.abandoned,
    ),
    counter(
        "hisparse_http_spans_total",
        "spans",
        "Spans of traces: exported, failed (the receiver did not take them) or dropped (the queue was full).",
        "Are traces whole?",
        lambda it: it.counters.spans.by_outcome,
        labels="outcome",
    ),
    histogram(
        "hisparse_http_answer_seconds",
        "To the end of a completion.",
        "How long do clients wait?",
        lambda it: it.counters.answer_s,
    ),
    histogram(
        "hisparse_http_first_token_seconds",
        "To a first token.",
        "How long until they see anything?",
        lambda it: it.counters.first_token_s,
    ),
)


class HttpCollector(Collector):
    def __init__(self, sources: HttpSources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Family]:
        it = self._sources
        yield from families(PROCESS_METRICS, process_statistics("http", it.name, it.version))
        yield from families(ROOM_METRICS, it.rooms())
        yield from families(HTTP_METRICS, it)


def scrape(sources: HttpSources) -> bytes:
    """One page, in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(HttpCollector(sources))
    return generate_latest(registry)


def http_health(sources: HttpSources) -> Health:
    """Always healthy while this thread answers: whatever is wrong elsewhere, a restart of the front cures nothing."""
    return Health(True, f"answering {sources.counters.in_flight}")


def http_readiness(sources: HttpSources) -> Health:
    """Ready: not stopping, and connected to a coordinator."""
    if sources.stopping():
        return Health(False, "stopping")
    return Health(sources.connected(), "coordinator: connected" if sources.connected() else "coordinator: not there")
