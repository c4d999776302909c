"""What the coordinator exports, and whether it is healthy and ready.

Its state belongs to trio tasks; the exporter's thread may not walk it. So a scrape asks the loop for a view
(`ask_loop`) and waits at most LOOP_LIMIT_S: a loop that does not answer is exactly what /healthz is asked about.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import trio
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from metrics.exporter import Health
from metrics.families import histogram, labelled, number, process_families
from metrics.state import CoordinatorCounters
from protocol.errors import Unavailable
from protocol.messages import PoolRow, WorkerRow

#: Longest that a healthy trio loop takes to run a callback; a turn of it is bounded by batches of messages.
LOOP_LIMIT_S: Final = 5.0

T = TypeVar("T")


@dataclass(frozen=True)
class CoordinatorView:
    """What is true now: taken in one piece, in the trio loop. `requests` counts live ones by state; `journal_failing`
    says why new work is refused."""

    requests: Mapping[str, int]
    held: int
    pools: Sequence[PoolRow]
    workers: Sequence[WorkerRow]
    connections: Mapping[str, int]
    stopping: bool
    journal_failing: str = ""


def ask_loop(token: trio.lowlevel.TrioToken, look: Callable[[], T]) -> T:
    """Run `look` in the trio loop of `token`, from another thread.

    Raises Unavailable when the loop has ended or does not answer within LOOP_LIMIT_S, and what `look` raises.
    """
    answered = threading.Event()
    result: list[T] = []
    failure: list[Exception] = []

    def run() -> None:
        try:
            result.append(look())
        except Exception as error:  # it must not end the loop: raised again in the asking thread
            failure.append(error)
        answered.set()

    try:
        token.run_sync_soon(run)
    except trio.RunFinishedError:
        raise Unavailable("the event loop has ended") from None
    if not answered.wait(LOOP_LIMIT_S):
        raise Unavailable(f"the event loop has not turned for {LOOP_LIMIT_S:g} s")
    if failure:
        raise failure[0]
    return result[0]


@dataclass(frozen=True)
class CoordinatorSources:
    """Where the numbers are; `view` may wait and raise as `ask_loop` does."""

    name: str
    version: str
    counters: CoordinatorCounters
    view: Callable[[], CoordinatorView]


class CoordinatorCollector(Collector):
    def __init__(self, sources: CoordinatorSources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Family]:
        it = self._sources
        view = it.view()
        yield labelled("hisparse_info", {("coordinator", it.name, it.version): 1})
        yield from process_families()
        yield from _now(view)
        yield from _totals(it.counters)


def _now(view: CoordinatorView) -> Iterator[Family]:
    yield labelled("hisparse_requests", view.requests)
    yield number("hisparse_requests_held", view.held)
    yield labelled("hisparse_connections", view.connections)
    yield number("hisparse_journal_failing", bool(view.journal_failing))
    yield labelled("hisparse_workers", Counter(row.state for row in view.workers))
    yield labelled("hisparse_worker_link_age_seconds", {row.worker: row.link_age_s for row in view.workers})
    pages = {}
    for pool in view.pools:
        for state in ("free", "owned", "shared", "quarantined"):
            pages[pool.node, state] = getattr(pool, state)
    yield labelled("hisparse_host_pages", pages)
    yield labelled("hisparse_host_page_bytes", {pool.node: pool.page_bytes for pool in view.pools})


def _totals(counters: CoordinatorCounters) -> Iterator[Family]:
    yield labelled("hisparse_refused_total", counters.refused)
    yield labelled("hisparse_ended_total", counters.ended)
    yield labelled("hisparse_failed_total", counters.failed)
    yield labelled("hisparse_retractions_total", counters.retractions)
    yield labelled("hisparse_dropped_messages_total", counters.dropped_messages)
    yield labelled("hisparse_audit_differences_total", counters.audit_differences)
    for name, buckets in (
        ("queue_wait", counters.waits.queue_s),
        ("retract", counters.waits.retract_s),
        ("hand_over", counters.waits.hand_over_s),
        ("resume", counters.waits.resume_s),
        ("time_to_first_token", counters.waits.first_token_s),
        ("inter_token", counters.waits.token_s),
        ("host_page_lifetime", counters.host_page_s),
        ("command_ack", counters.command_ack_s),
    ):
        yield histogram(f"hisparse_{name}_seconds", buckets)
    yield histogram("hisparse_journal_commit_seconds", counters.journal.commit_s)
    for name in ("commits", "records", "written_bytes", "errors"):
        yield number(f"hisparse_journal_{name}_total", getattr(counters.journal, name))
    for name in ("submitted", "admissions", "prompt_tokens", "tokens", "repeated_tokens", "deliveries"):
        yield number(f"hisparse_{name}_total", getattr(counters, name))
    for name in ("stalled_deliveries", "commands", "replayed_commands", "reports", "report_gaps", "audits"):
        yield number(f"hisparse_{name}_total", getattr(counters, name))


def coordinator_health(sources: CoordinatorSources) -> Health:
    """Unhealthy: the event loop does not turn. A restart is the remedy."""
    try:
        sources.view()
    except Unavailable as error:
        return Health(False, f"loop: {error.message}")
    return Health(True, "loop: turns")


def coordinator_readiness(sources: CoordinatorSources) -> Health:
    """Ready: healthy, not stopping, able to write its journal, and at least one worker takes requests."""
    try:
        view = sources.view()
    except Unavailable as error:
        return Health(False, f"loop: {error.message}")
    if view.stopping:
        return Health(False, "stopping")
    if view.journal_failing:
        return Health(False, f"journal: {view.journal_failing}")
    connected = sum(row.state == "connected" for row in view.workers)
    return Health(connected > 0, f"workers: {connected} connected")
