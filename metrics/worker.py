"""What a worker exports, read from its owners at scrape time, and whether it is healthy and ready."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from metrics.exporter import Health
from metrics.families import histogram, labelled, number, process_families
from metrics.state import (
    EXECUTOR_STALE_S,
    WARM_STARTS,
    LinkCounters,
    MemoryUse,
    SwapTotals,
    TransferCounters,
    WorkerCounters,
)


@dataclass(frozen=True)
class WorkerSources:
    """Where the numbers are. Callables run in the exporter's thread and must not wait for anything.

    `requests` counts by state, `hot_buffers` by size; `memory` is by name (chunks, index_pages); `stopping` tells that
    the process has been asked to leave; `transfers` is by end (sender, receiver), as far as there are any. A loop that
    ended is not asked about: its process ends with it.
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
    transfers: Callable[[], Mapping[str, TransferCounters]] = dict


class WorkerCollector(Collector):
    def __init__(self, sources: WorkerSources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Family]:
        it = self._sources
        yield labelled("hisparse_info", {("worker", it.worker, it.version): 1})
        yield from process_families()
        yield from self._executor(it.counters)
        yield from _copies(it.counters)
        yield from _swaps(it.counters.swap)
        yield from self._memory()
        yield from self._link(it.link)
        yield from _transfers(it.transfers())

    def _executor(self, counters: WorkerCounters) -> Iterator[Family]:
        yield labelled("hisparse_worker_requests", self._sources.requests())
        yield number("hisparse_worker_seats", self._sources.seats)
        yield number("hisparse_worker_executor_silent_seconds", monotonic() - counters.beat_at)
        yield number("hisparse_worker_executor_beats_total", counters.beats)
        yield number("hisparse_worker_unreported_tokens", self._sources.unreported_tokens())
        for name in ("steps", "tokens", "surplus_tokens", "prompt_tokens", "hits", "misses"):
            yield number(f"hisparse_worker_{name}_total", getattr(counters, name))
        for name in ("admitted", "released", "faulted", "parked", "resized"):
            yield number(f"hisparse_worker_{name}_total", getattr(counters, name))
        starts = {outcome: counters.warm_starts[outcome] for outcome in WARM_STARTS}
        yield labelled("hisparse_worker_warm_starts_total", starts)
        for name in ("step", "prefill", "stage", "load"):
            yield histogram(f"hisparse_worker_{name}_seconds", getattr(counters, f"{name}_s"))
        yield number("hisparse_worker_compute_seconds_total", counters.computing_s)
        yield labelled("hisparse_worker_fence_wait_seconds_total", dict(counters.fence_waits.seconds))
        yield labelled("hisparse_worker_fence_waits_total", dict(counters.fence_waits.samples))

    def _memory(self) -> Iterator[Family]:
        memory = self._sources.memory()
        units = {}
        for name, use in memory.items():
            units[name, "used"] = use.used
            units[name, "free"] = use.total - use.used
        yield labelled("hisparse_worker_memory_units", units)
        yield labelled("hisparse_worker_hot_buffers", self._sources.hot_buffers())
        yield labelled("hisparse_worker_memory_unit_bytes", {name: use.unit_bytes for name, use in memory.items()})

    def _link(self, link: LinkCounters) -> Iterator[Family]:
        yield number("hisparse_link_welcomed", link.welcomed)
        yield number("hisparse_link_reports_in_flight", self._sources.reports_in_flight())
        yield labelled("hisparse_link_drops_total", link.drops)
        for name in ("connects", "welcomes", "epochs", "commands", "duplicate_commands", "command_gaps", "unreadable"):
            yield number(f"hisparse_link_{name}_total", getattr(link, name))
        for name in ("reports", "replayed_reports"):
            yield number(f"hisparse_link_{name}_total", getattr(link, name))


def _copies(counters: WorkerCounters) -> Iterator[Family]:
    rows = {
        ("to_host", "stage"): (counters.staged_bytes, counters.staging.seconds),
        ("to_host", "backup"): (counters.backed_up_bytes, counters.backing_up.seconds),
        ("to_device", "swap"): (counters.swapped_bytes, sum(counters.swap.seconds)),
        ("to_device", "preload"): (counters.preloaded_bytes, counters.preloading.seconds),
    }
    yield labelled("hisparse_worker_copied_bytes_total", {key: copied for key, (copied, _) in rows.items()})
    yield labelled("hisparse_worker_copy_seconds_total", {key: seconds for key, (_, seconds) in rows.items()})


def _swaps(swap: SwapTotals) -> Iterator[Family]:
    """By layer: what its group found, loaded and evicted, and the time of its own copies. Numbers of one width, so that
    series sort."""
    groups = swap.group_of_layer
    width = len(str(len(groups) - 1))
    layers = [f"{layer:0{width}}" for layer in range(len(groups))]

    def by_layer(counts: Sequence[int]) -> dict[str, int]:
        return {layer: counts[group] for layer, group in zip(layers, groups, strict=True)}

    misses = by_layer(swap.misses.tolist())
    yield labelled("hisparse_swap_hits_total", by_layer(swap.hits.tolist()))
    yield labelled("hisparse_swap_misses_total", misses)
    yield labelled("hisparse_swap_evictions_total", by_layer(swap.evictions.tolist()))
    yield labelled("hisparse_swap_bytes_total", {layer: rows * swap.row_bytes for layer, rows in misses.items()})
    streams = ("compute" if groups.index(group) == layer else "swap" for layer, group in enumerate(groups))
    seconds = dict(zip(zip(layers, streams, strict=True), swap.seconds, strict=True))
    yield labelled("hisparse_swap_seconds_total", seconds)


def _transfers(ends: Mapping[str, TransferCounters]) -> Iterator[Family]:
    def by_end(read: Callable[[TransferCounters], float]) -> dict[str, float]:
        return {end: read(counters) for end, counters in ends.items()}

    yield labelled("hisparse_transfer_open", by_end(lambda it: it.open_tickets))
    yield labelled("hisparse_transfer_in_flight_bytes", by_end(lambda it: it.in_flight_bytes))
    yield labelled("hisparse_transfer_bytes_total", by_end(lambda it: it.bytes))
    yield labelled("hisparse_transfer_pages_total", by_end(lambda it: it.pages))
    yield labelled("hisparse_transfer_refused_units_total", by_end(lambda it: it.refused_units))
    yield labelled("hisparse_transfer_ended_early_total", by_end(lambda it: it.failed_tickets + it.revoked_tickets))
    yield labelled("hisparse_transfer_shut_out_total", by_end(lambda it: it.shut_out_senders))
    yield labelled("hisparse_transfer_unreadable_total", by_end(lambda it: it.unreadable_messages))
    yield labelled("hisparse_transfer_checksum_seconds_total", by_end(lambda it: it.checksum_seconds))


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
