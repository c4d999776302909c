"""What the HTTP front exports, read from its owners at scrape time, and whether it is healthy and ready."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from metrics.exporter import Health
from metrics.families import histogram, labelled, number, process_families
from metrics.state import HttpCounters


@dataclass(frozen=True)
class HttpSources:
    """Where the numbers are. Callables run in the exporter's thread and must not wait for anything."""

    name: str
    version: str
    counters: HttpCounters
    connected: Callable[[], bool]
    stopping: Callable[[], bool]


class HttpCollector(Collector):
    def __init__(self, sources: HttpSources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Family]:
        it, counters = self._sources, self._sources.counters
        yield labelled("hisparse_info", {("http", it.name, it.version): 1})
        yield from process_families()
        yield number("hisparse_http_requests", counters.in_flight)
        yield number("hisparse_http_connected", it.connected())
        yield number("hisparse_http_connections", counters.connections)
        yield labelled("hisparse_http_connection_ends_total", dict(counters.connection_ends))
        yield labelled("hisparse_http_answers_total", dict(counters.answers))
        yield number("hisparse_http_disconnects_total", counters.disconnects)
        yield number("hisparse_http_abandoned_total", counters.abandoned)
        yield histogram("hisparse_http_answer_seconds", counters.answer_s)
        yield histogram("hisparse_http_first_token_seconds", counters.first_token_s)


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
