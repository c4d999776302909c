"""What a worker exports, read from its owners at scrape time, and whether it is healthy and ready."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Final

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from basics.rooms import RoomUse
from metrics.executor import EXECUTOR_METRICS, SWAP_METRICS
from metrics.exporter import Health
from metrics.families import Metric, families, gauge
from metrics.link import LINK_METRICS
from metrics.process import PROCESS_METRICS, ROOM_METRICS, process_statistics
from metrics.state import (
    EXECUTOR_STALE_S,
    LinkCounters,
    MemoryUse,
    TransferCounters,
    WorkerCounters,
)
from metrics.transfers import TRANSFER_METRICS


@dataclass(frozen=True)
class WorkerSources:
    """Where the numbers are. Callables run in the exporter's thread and must not wait for anything.

    `requests` counts by state, `hot_buffers` by size; `memory` is by name (chunks, index_pages); `stopping` tells that
    the process has been asked to leave; `weights` is how long its start took for them, by source (checkpoint, keeper);
    `weights_kept` has one value where there was a keeper: 1 while it has them;
    `transfers` is by end (sender, receiver), as far as there are any. A loop that ended is not asked about: its process
    ends with it.
    """

    worker: str
    version: str
    seats: int
    counters: WorkerCounters
    link: LinkCounters
    requests: Callable[[], Mapping[str, int]]
    hot_buffers: Callable[[], Mapping[str, int]]
    memory: Callable[[], Mapping[str, MemoryUse]]
    unreported_tokens: Callable[[], int]
    reports_in_flight: Callable[[], int]
    stopping: Callable[[], bool]
    weights: Callable[[], Mapping[str, float]] = dict
    weights_kept: Callable[[], float | Mapping[str, float]] = dict
    transfers: Callable[[], Mapping[str, TransferCounters]] = dict
    rooms: Callable[[], Mapping[tuple[str, str], RoomUse]] = dict


def _units(memory: Mapping[str, MemoryUse]) -> dict[tuple[str, str], float]:
    units: dict[tuple[str, str], float] = {}
    for name, use in memory.items():
        units[name, "used"], units[name, "free"] = use.used, use.total - use.used
    return units


WORKER_METRICS: Final[tuple[Metric[WorkerSources], ...]] = (
    gauge(
        "hisparse_worker_requests",
        "requests",
        "Requests by state.",
        "What are the seats doing? How many are parked?",
        lambda it: it.requests(),
        labels="state",
    ),
    gauge(
        "hisparse_worker_seats", "requests", "Most requests in one batch.", "Is the batch full?", lambda it: it.seats
    ),
    gauge(
        "hisparse_worker_memory_units",
        "units of 64 tokens",
        "Hot chunks, index pages and pages of the prefill slab, used and free.",
        "Which memory is short?",
        lambda it: _units(it.memory()),
        labels="memory state",
    ),
    gauge(
        "hisparse_worker_memory_unit_bytes",
        "bytes",
        "Device bytes of one unit.",
        "How many bytes are those units?",
        lambda it: {name: use.unit_bytes for name, use in it.memory().items()},
        labels="memory",
    ),
    gauge(
        "hisparse_worker_hot_buffers",
        "requests",
        "Hot buffers by size: resident, or managed with so many slots.",
        "Which sizes does policy give?",
        lambda it: it.hot_buffers(),
        labels="size",
    ),
    gauge(
        "hisparse_worker_weights_seconds",
        "seconds",
        "Time for which this process loaded its weights from the checkpoint, or mapped those that a keeper had.",
        "Did a restart have to load weights again?",
        lambda sources: sources.weights(),
        labels="source",
    ),
    gauge(
        "hisparse_worker_weights_kept",
        "weights",
        "1 while a keeper has the weights of this worker, 0 once it has not; of workers that found a keeper.",
        "Would the next start have to load weights?",
        lambda sources: sources.weights_kept(),
    ),
    gauge(
        "hisparse_worker_unreported_tokens",
        "tokens",
        "Tokens in no report yet.",
        "Is the coordinator behind?",
        lambda it: it.unreported_tokens(),
    ),
    gauge(
        "hisparse_link_reports_in_flight",
        "reports",
        "Reports not yet acknowledged.",
        "Is the link stuck?",
        lambda it: it.reports_in_flight(),
    ),
)


class WorkerCollector(Collector):
    def __init__(self, sources: WorkerSources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Family]:
        it = self._sources
        yield from families(PROCESS_METRICS, process_statistics("worker", it.worker, it.version))
        yield from families(ROOM_METRICS, it.rooms())
        yield from families(WORKER_METRICS, it)
        yield from families(EXECUTOR_METRICS, it.counters)
        yield from families(SWAP_METRICS, it.counters.swap)
        yield from families(LINK_METRICS, it.link)
        yield from families(TRANSFER_METRICS, it.transfers())


def worker_health(sources: WorkerSources) -> Health:
    """Unhealthy: the executor's loop has not turned for EXECUTOR_STALE_S. A restart is the remedy."""
    silent_s = monotonic() - sources.counters.beat_at
    if silent_s > EXECUTOR_STALE_S:
        return Health(False, f"executor: has not turned for {silent_s:.0f} s")
    return Health(True, "executor: turns")


def worker_readiness(sources: WorkerSources) -> Health:
    """Ready: healthy, welcomed by a coordinator and not about to leave."""
    health = worker_health(sources)
    if not health.ok:
        return health
    if sources.stopping():
        return Health(False, "stopping")
    if not sources.link.welcomed:
        return Health(False, "link: no coordinator has welcomed this worker")
    return Health(True, "link: welcomed")
