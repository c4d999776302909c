"""What the coordinator exports, and whether it is healthy and ready.

Its state belongs to trio tasks; the exporter's thread may not walk it. So a scrape asks the loop for a view
(`ask_loop`) and waits at most LOOP_LIMIT_S: a loop that does not answer is exactly what /healthz is asked about.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import trio
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from basics.request_states import WAITING
from basics.rooms import RoomUse
from metrics.coordinator_totals import COORDINATOR_METRICS, JOURNAL_METRICS, WAIT_METRICS
from metrics.exporter import Health
from metrics.families import Metric, counter, families, gauge
from metrics.process import PROCESS_METRICS, ROOM_METRICS, process_statistics
from metrics.state import CoordinatorCounters
from protocol.errors import Unavailable
from protocol.messages import NOT_SEEN, HotFloorRow, PoolRow, WorkerRow

#: Longest that a healthy trio loop takes to run a callback; a turn of it is bounded by batches of messages.
LOOP_LIMIT_S: Final = 5.0

T = TypeVar("T")


@dataclass(frozen=True)
class CoordinatorView:
    """What is true now: taken in one piece, in the trio loop. `requests` counts live ones by state; `journal_failing`
    says why new work is refused; `unready`, why a request submitted now would not be served. `model` is the name of the
    served model, empty until a worker has registered. `rooms` has what is used of each room that clients fill, and its
    limit, by its name and what happens when it is full."""

    requests: Mapping[str, int]
    held: int
    pools: Sequence[PoolRow]
    workers: Sequence[WorkerRow]
    connections: Mapping[str, int]
    stopping: bool
    journal_failing: str = ""
    unready: str = ""
    model: str = ""
    rooms: Mapping[tuple[str, str], RoomUse] = field(default_factory=dict)


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


def _host_pages(pools: Sequence[PoolRow]) -> dict[tuple[str, str], float]:
    states = ("free", "cached", "owned", "shared", "quarantined")
    return {(pool.node, state): getattr(pool, state) for pool in pools for state in states}


def _group_ranks(workers: Sequence[WorkerRow]) -> dict[tuple[str, str], float]:
    """A rank of an earlier incarnation lacks all ranks; what the others lack is what the group lacks."""
    missing: dict[str, int] = {}
    there: dict[str, set[int]] = {}
    for row in workers:
        if row.group and (row.state != "disconnected" or row.ranks_missing):
            lacks = len(row.ranks_missing)
            missing[row.group] = min(lacks, missing.get(row.group, lacks))
            ranks = there.setdefault(row.group, set())
            if row.state != "disconnected" and row.rank not in row.ranks_missing:
                ranks.add(row.rank)
    connected = {(group, "connected"): float(len(ranks)) for group, ranks in there.items()}
    return connected | {(group, "missing"): float(count) for group, count in missing.items()}


def _by_sizing(workers: Sequence[WorkerRow], read: Callable[[HotFloorRow], T]) -> dict[str, T]:
    """Of each worker whose hot floor is chosen by what its steps cost."""
    return {row.worker: read(row.hot_sizing) for row in workers if row.hot_sizing and row.state != "disconnected"}


def _steps_of_floors(workers: Sequence[WorkerRow]) -> dict[tuple[str, str], float]:
    observed = _by_sizing(workers, lambda it: it.observed_step_us / 1e6)
    predicted = _by_sizing(workers, lambda it: it.predicted_step_us / 1e6)
    return {(name, "observed"): it for name, it in observed.items()} | {
        (name, "predicted"): it for name, it in predicted.items()
    }


def _tokens_of_floors(workers: Sequence[WorkerRow]) -> dict[tuple[str, str], float]:
    now = _by_sizing(workers, lambda it: it.predicted_tokens_per_s)
    best = _by_sizing(workers, lambda it: it.best_tokens_per_s)
    return {(name, "chosen"): it for name, it in now.items()} | {(name, "best"): it for name, it in best.items()}


def _waiting(view: CoordinatorView) -> int:
    """Held requests wait for an operator, not for capacity; they are RETRACTED or on their way to it."""
    return max(0, sum(view.requests.get(state, 0) for state in WAITING) - view.held)


def _running(view: CoordinatorView) -> int:
    return sum(count for state, count in view.requests.items() if state not in WAITING)


def _kv_use(view: CoordinatorView) -> float:
    """Share of all host pages that hold rows of requests; rows that are only cached make room for others."""
    total = sum(pool.host_pages for pool in view.pools)
    free = sum(pool.free + pool.cached for pool in view.pools)
    return (total - free) / total if total else 0.0


def _by_model(read: Callable[[CoordinatorView], float]) -> Callable[[CoordinatorView], dict[str, float]]:
    """No sample until the model's name is known."""
    return lambda view: {view.model: read(view)} if view.model else {}


#: By the names of vLLM, which routers (Gateway API's inference extension) and autoscalers look for.
ROUTER_METRICS: Final[tuple[Metric[CoordinatorView], ...]] = (
    gauge(
        "vllm:num_requests_waiting",
        "requests",
        "Requests that wait for a place on a worker, held ones aside. By vLLM's name, for routers and autoscalers.",
        "Are more groups needed?",
        _by_model(_waiting),
        labels="model_name",
    ),
    gauge(
        "vllm:num_requests_running",
        "requests",
        "Requests on workers. By vLLM's name, for routers and autoscalers.",
        "Which deployment is least busy?",
        _by_model(_running),
        labels="model_name",
    ),
    gauge(
        "vllm:kv_cache_usage_perc",
        "",
        "Share of host pages in use, 0 to 1; cached ones count as free. By vLLM's name, for routers and autoscalers.",
        "Has this deployment room for another request?",
        _by_model(_kv_use),
        labels="model_name",
    ),
)

CLUSTER_METRICS: Final[tuple[Metric[CoordinatorView], ...]] = (
    gauge(
        "hisparse_requests",
        "requests",
        "Live requests by state.",
        "What are requests waiting for?",
        lambda it: it.requests,
        labels="state",
    ),
    gauge(
        "hisparse_requests_held",
        "requests",
        "Held until an operator resumes them.",
        "Did an operator forget one?",
        lambda it: it.held,
    ),
    gauge(
        "hisparse_host_pages",
        "pages",
        "Host pages by state.",
        "Is the pool full? Does it leak?",
        lambda it: _host_pages(it.pools),
        labels="node state",
    ),
    gauge(
        "hisparse_host_page_bytes",
        "bytes",
        "Bytes of one host page.",
        "How many bytes are those units?",
        lambda it: {pool.node: pool.page_bytes for pool in it.pools},
        labels="node",
    ),
    gauge(
        "hisparse_workers",
        "workers",
        "Workers by state.",
        "Which workers take work?",
        lambda it: Counter(row.state for row in it.workers),
        labels="state",
    ),
    gauge(
        "hisparse_group_ranks",
        "workers",
        "Ranks of groups by state: connected or missing. A group of which no rank is known has none.",
        "Does a group wait for a rank?",
        lambda it: _group_ranks(it.workers),
        labels="group state",
    ),
    gauge(
        "hisparse_worker_link_age_seconds",
        "seconds",
        "Time since the worker was last heard; of those that this coordinator has heard.",
        "Is a worker gone?",
        lambda it: {row.worker: row.link_age_s for row in it.workers if row.link_age_s != NOT_SEEN},
        labels="worker",
    ),
    gauge(
        "hisparse_worker_standbys_ready",
        "processes",
        "Standbys that are ready to take over from the worker; of workers that are to have one.",
        "Would the death of a worker cost seconds?",
        lambda view: {row.worker: float(row.standby == "ready") for row in view.workers if row.standby},
        labels="worker",
    ),
    gauge(
        "hisparse_hot_floor_slots",
        "slots",
        "Smallest hot size that policy gives on a worker; 0: resident. Of workers whose steps were observed.",
        "Do hot buffers pay here?",
        lambda it: _by_sizing(it.workers, lambda row: row.hot_slots),
        labels="worker",
    ),
    gauge(
        "hisparse_hot_floor_step_seconds",
        "seconds",
        "Decode step at the hot floor: observed since the last look, and as the model of steps predicts it.",
        "Is the model of steps right?",
        lambda it: _steps_of_floors(it.workers),
        labels="worker kind",
    ),
    gauge(
        "hisparse_hot_floor_tokens_per_second",
        "tokens per second",
        "What the model of steps promises: at the chosen hot floor, and at the best one.",
        "What do hot buffers cost, or give?",
        lambda it: _tokens_of_floors(it.workers),
        labels="worker floor",
    ),
    counter(
        "hisparse_hot_floor_changes_total",
        "times",
        "Changes of a worker's hot floor, of its present process.",
        "Does it go back and forth?",
        lambda it: _by_sizing(it.workers, lambda row: row.changes),
        labels="worker",
    ),
    gauge(
        "hisparse_connections",
        "connections",
        "Client and admin connections.",
        "How many clients and admins are connected?",
        lambda it: it.connections,
        labels="role",
    ),
    gauge(
        "hisparse_journal_failing",
        "",
        "1 while the journal refuses new work.",
        "Is its disk full or failing?",
        lambda it: bool(it.journal_failing),
    ),
)


class CoordinatorCollector(Collector):
    def __init__(self, sources: CoordinatorSources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Family]:
        it = self._sources
        view = it.view()
        yield from families(PROCESS_METRICS, process_statistics("coordinator", it.name, it.version))
        yield from families(CLUSTER_METRICS, view)
        yield from families(ROUTER_METRICS, view)
        yield from families(ROOM_METRICS, view.rooms)
        yield from families(COORDINATOR_METRICS, it.counters)
        yield from families(WAIT_METRICS, it.counters.waits)
        yield from families(JOURNAL_METRICS, it.counters.journal)


def coordinator_health(sources: CoordinatorSources) -> Health:
    """Unhealthy: the event loop does not turn. A restart is the remedy."""
    try:
        sources.view()
    except Unavailable as error:
        return Health(False, f"loop: {error.message}")
    return Health(True, "loop: turns")


def coordinator_readiness(sources: CoordinatorSources) -> Health:
    """Ready: healthy, and a request submitted now would be taken by a worker. The HTTP front's /health is the same."""
    try:
        view = sources.view()
    except Unavailable as error:
        return Health(False, f"loop: {error.message}")
    return Health(not view.unready, view.unready or "requests are served")
