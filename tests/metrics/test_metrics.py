"""Metrics: the table is what is exported, the numbers are those of their owners, and the probes are honest."""

from __future__ import annotations

import dataclasses
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import trio
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from metrics import coordinator as coordinator_module
from metrics import executor
from metrics.coordinator import (
    CLUSTER_METRICS,
    ROUTER_METRICS,
    CoordinatorCollector,
    CoordinatorSources,
    CoordinatorView,
    ask_loop,
    coordinator_health,
    coordinator_readiness,
)
from metrics.exporter import CONNECTIONS_MAX, Exporter, Health, Probe, serve
from metrics.families import Metric, MetricType, families
from metrics.link import LINK_METRICS
from metrics.names import BY_NAME, COORDINATOR, TABLE, WORKER, as_markdown, exported_names
from metrics.state import (
    EXECUTOR_STALE_S,
    GAP_BOUNDS_S,
    GAP_FACTOR,
    Buckets,
    CoordinatorCounters,
    LinkCounters,
    MemoryUse,
    SwapTotals,
    TransferCounters,
    WorkerCounters,
)
from metrics.worker import WorkerCollector, WorkerSources, worker_health, worker_readiness
from protocol import messages
from protocol.errors import ConfigError, Unavailable
from protocol.messages import HotFloorRow, PoolRow, WorkerCapacity, WorkerRow
from tests import ROOT
from tests.metrics.test_rules import alerts
from tests.support.limits import HANG_LIMIT_S


def fine() -> Health:
    return Health(True, "fine")


class World:
    """A worker's numbers and whatever the probes ask for."""

    def __init__(self) -> None:
        self.counters = WorkerCounters(staged_bytes=1, backed_up_bytes=2, tokens=7)
        self.counters.swap = SwapTotals((0, 0, 1), row_bytes=100)
        self.counters.swap.hits += (10, 20)
        self.counters.swap.misses += (4, 6)
        self.counters.swap.spent(64, 1, 0.002)
        self.link = LinkCounters(welcomed=1, commands=4)
        self.counters.fence_waits.observe("sampled", 0.5)
        self.link.drops["lost"] += 2
        self.stopping = False
        self.received = TransferCounters(bytes=500, pages=5, revoked_transfers=1)
        self.sources = WorkerSources(
            worker="w1",
            version="0.1.0",
            seats=8,
            counters=self.counters,
            link=self.link,
            requests=lambda: {"running": 5, "parked": 1},
            hot_buffers=lambda: {"resident": 4, "4096": 1},
            memory=lambda: {"chunks": MemoryUse(6, 10, 1024)},
            unreported_tokens=lambda: 11,
            reports_in_flight=lambda: 2,
            stopping=lambda: self.stopping,
            weights=lambda: {"keeper": 0.25},
            weights_kept=lambda: 1.0,
            transfers=lambda: {"receiver": self.received},
        )


CAPACITY = WorkerCapacity(8, 64, 64, 4_096, 64, 1024, (4096,), 8, 1, "/tmp/pool")


SIZING = HotFloorRow(0, 63, 5_300.0, 5_288.0, 11_914.0, 4_096, 12_421.0, 1, "4096 slots promises 4% more")


def worker_row(state: str) -> WorkerRow:
    return WorkerRow("w1", "n", state, 1, 2, CAPACITY, 1, 1, 1, 1, 5, 10.0, 1, 1, 0.25, 1.0, hot_sizing=SIZING)


VIEW = CoordinatorView(
    requests={"RUNNING": 3, "QUEUED": 1},
    held=1,
    pools=(PoolRow("n", 100, 60, 30, 4, 6, 1024, 0, ("w1",)),),
    workers=(worker_row("connected"), worker_row("draining")),
    connections={"client": 2},
    stopping=False,
    model="m",
)


def coordinator_sources(view: Callable[[], CoordinatorView] = lambda: VIEW) -> CoordinatorSources:
    counters = CoordinatorCounters(submitted=9)
    counters.retractions["keep", "gpu_pressure"] += 2
    counters.command_ack_s.observe(0.003)
    return CoordinatorSources("hisparse", "0.1.0", counters, view)


@contextmanager
def served(*collectors: Collector, healthy: Probe = fine, ready: Probe = fine) -> Iterator[Exporter]:
    exporter = serve(collectors, healthy=healthy, ready=ready)
    try:
        yield exporter
    finally:
        exporter.close()


def get(exporter: Exporter, path: str, method: str = "GET") -> tuple[int, str]:
    parts = urlsplit(exporter.url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=HANG_LIMIT_S)
    connection.request(method, path)
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return response.status, body


def scrape(exporter: Exporter) -> dict[str, Family]:
    """Families by the table's names."""
    status, body = get(exporter, "/metrics")
    assert status == 200, body
    parsed = text_string_to_metric_families(body)
    return {family.name + ("_total" if family.type == "counter" else ""): family for family in parsed}


def values(family: Family) -> dict[tuple[str, ...], float]:
    return {tuple(sample.labels.values()): sample.value for sample in family.samples}


# ---------------------------------------------------------------- the table


@pytest.mark.parametrize(
    ("metrics", "collector"),
    [
        (WORKER, WorkerCollector(World().sources)),
        (COORDINATOR, CoordinatorCollector(coordinator_sources())),
    ],
)
def test_exported_equals_table(metrics: tuple[Metric[Any], ...], collector: Collector) -> None:
    """Over HTTP: the very names, kinds and labels of the table, each once, and nothing else."""
    with served(collector) as exporter:
        scraped = scrape(exporter)
    assert scraped.keys() == exported_names(metrics)
    for name, family in scraped.items():
        metric = BY_NAME[name]
        assert family.type == metric.type.value, name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels), name


def test_table_rows_are_complete_and_follow_the_conventions() -> None:
    """SGLang #26608: totals are counters."""
    for metric in TABLE:
        assert metric.help.endswith("."), metric.name
        assert metric.question.endswith("?"), metric.name
        assert metric.name.endswith("_total") == (metric.type is MetricType.COUNTER), metric.name
        assert metric.name.endswith("_seconds") <= (metric.unit == "seconds"), metric.name


def test_the_documented_table_is_the_table() -> None:
    page = ROOT / "docs" / "metrics.md"
    assert page.read_text() == as_markdown(), "run: make docs"


# ---------------------------------------------------------------- the numbers


def test_routers_read_waiting_running_and_use_by_model() -> None:
    """By vLLM's names: held requests do not wait for capacity, cached pages are room."""
    requests = {"QUEUED": 4, "PREFILLED": 2, "RETRACTED": 3, "PREFILLING": 1, "RUNNING": 5, "RELEASING": 1}
    pools = (PoolRow("n", 60, 6, 30, 0, 4, 1024, 0, (), cached=20), PoolRow("o", 40, 24, 16, 0, 0, 1024, 0, ()))
    view = CoordinatorView(requests, 2, pools, (), {}, stopping=False, model="m")
    with served(CoordinatorCollector(coordinator_sources(lambda: view))) as exporter:
        scraped = scrape(exporter)
    told = {name.removeprefix("vllm:"): values(it) for name, it in scraped.items() if name.startswith("vllm:")}
    assert told == {
        "num_requests_waiting": {("m",): 7},
        "num_requests_running": {("m",): 7},
        "kv_cache_usage_perc": {("m",): 0.5},
    }
    nameless = CoordinatorView({}, 0, (), (), {}, stopping=False)
    assert [it.samples for it in families(ROUTER_METRICS, nameless)] == [[], [], []]


def test_worker_numbers_are_read_at_scrape_time() -> None:
    world = World()
    with served(WorkerCollector(world.sources)) as exporter:
        before = scrape(exporter)
        world.counters.swap.hits[0] += 5
        world.counters.stepped(0.004, 1)
        after = scrape(exporter)
    assert values(before["hisparse_worker_hits_total"]) == {(): 30}
    assert values(after["hisparse_worker_hits_total"]) == {(): 35}
    assert values(after["hisparse_worker_requests"]) == {("running",): 5, ("parked",): 1}
    assert values(after["hisparse_worker_copied_bytes_total"])["to_host", "backup"] == 2
    assert values(after["hisparse_worker_copied_bytes_total"])["to_device", "swap"] == 4 * 200 + 6 * 100
    assert values(after["hisparse_worker_copy_seconds_total"])["to_device", "swap"] == pytest.approx(64 * 0.002)
    assert values(after["hisparse_swap_misses_total"]) == {("0",): 4, ("1",): 4, ("2",): 6}
    assert values(after["hisparse_swap_seconds_total"]) == {
        ("0", "compute"): 0,
        ("1", "swap"): pytest.approx(64 * 0.002),
        ("2", "compute"): 0,
    }
    assert values(after["hisparse_worker_memory_units"]) == {("chunks", "used"): 6, ("chunks", "free"): 4}
    assert values(after["hisparse_worker_weights_seconds"]) == {("keeper",): 0.25}
    assert values(after["hisparse_worker_weights_kept"]) == {(): 1}
    assert values(after["hisparse_link_drops_total"]) == {("lost",): 2}
    assert values(after["hisparse_transfer_bytes_total"]) == {("receiver",): 500}
    assert values(after["hisparse_transfer_ended_early_total"]) == {("receiver",): 1}
    assert values(after["hisparse_worker_fence_waits_total"]) == {("sampled",): 1}
    steps = {
        sample.labels.get("le", sample.name): sample.value for sample in after["hisparse_worker_step_seconds"].samples
    }
    assert steps["0.002"] == 0
    assert steps["0.005"] == steps["+Inf"] == 1
    assert steps["hisparse_worker_step_seconds_sum"] == pytest.approx(0.004)


def test_each_copy_purpose_has_bytes_and_seconds() -> None:
    world = World()
    it = world.counters
    it.staged_bytes, it.backed_up_bytes, it.preloaded_bytes, it.refilled_bytes = 11, 12, 13, 14
    for seconds, busy in enumerate((it.staging, it.backing_up, it.preloading, it.refilling), 1):
        busy.spent(seconds)
    ways = [("to_host", "stage"), ("to_host", "backup"), ("to_device", "preload"), ("to_device", "refill")]
    with served(WorkerCollector(world.sources)) as exporter:
        scraped = scrape(exporter)
    copied, spent = (values(scraped[f"hisparse_worker_{it}_total"]) for it in ("copied_bytes", "copy_seconds"))
    assert [copied[way] for way in ways] == [11, 12, 13, 14]
    assert [spent[way] for way in ways] == [1, 2, 3, 4]
    assert copied.keys() == spent.keys() == {*ways, ("to_device", "swap")}


def test_prompts_are_counted_by_age_at_scrape_time() -> None:
    world = World()
    it, now = world.counters, time.monotonic()
    with served(WorkerCollector(world.sources)) as exporter:
        before = scrape(exporter)
        it.prompts_since = (now, now - 20, now - 100, now - 1_000)
        after = scrape(exporter)
    waiting = "hisparse_worker_prompts_waiting"
    assert values(before[waiting]) == {("0",): 0, ("1",): 0, ("10",): 0, ("60",): 0}
    assert values(before["hisparse_worker_prompt_wait_seconds"]) == {(): 0}
    counts = values(after[waiting])
    assert (counts["0",], counts["10",], counts["60",]) == (4, 3, 2)
    assert 1_000 <= values(after["hisparse_worker_prompt_wait_seconds"])[()] < 1_000 + HANG_LIMIT_S


def test_work_on_prompts_and_gaps_have_their_names() -> None:
    world = World()
    it = world.counters
    it.prompt_units, it.prompt_s, it.gap_target_s, it.plain_step_s, it.gap_target_too_small = 7, 0.5, 0.04, 0.05, True
    it.prompt_pass_tokens = 900
    it.gap_s.observe(0.06)
    with served(WorkerCollector(world.sources)) as exporter:
        scraped = scrape(exporter)
    names = (
        *("prompt_units_total", "prompt_seconds_total", "prompt_pass_tokens_total"),
        *("gap_target_seconds", "plain_step_seconds"),
    )
    assert [values(scraped[f"hisparse_worker_{name}"])[()] for name in names] == [7, 0.5, 900, 0.04, 0.05]
    assert values(scraped["hisparse_worker_gap_target_too_small"]) == {(): 1}
    gaps = {it.labels["le"]: it.value for it in scraped["hisparse_worker_gap_seconds"].samples if "le" in it.labels}
    assert (gaps["0.05551"], gaps["0.06939"], gaps["+Inf"]) == (0, 1, 1)


def test_bounds_of_gaps_are_no_farther_apart_than_the_alert_allows() -> None:
    """An estimated quantile lies in the bucket of the true one."""
    ratios = [above / below for below, above in pairwise(GAP_BOUNDS_S)]
    assert max(ratios) == pytest.approx(GAP_FACTOR, rel=1e-3)
    assert GAP_BOUNDS_S[-1] > 5
    rule = next(rule for rule in alerts() if rule["alert"] == "HiSparseGapTargetMissed")
    assert f"> {GAP_FACTOR} * (hisparse_worker_gap_target_seconds" in rule["expr"]


def test_each_number_of_a_transfer_has_its_name() -> None:
    world = World()
    world.received = TransferCounters(*range(1, 11))
    with served(WorkerCollector(world.sources)) as exporter:
        scraped = scrape(exporter)
    told = {name: values(it)["receiver",] for name, it in scraped.items() if name.startswith("hisparse_transfer_")}
    assert {name.removeprefix("hisparse_transfer_"): value for name, value in told.items()} == {
        "bytes_total": 1,
        "pages_total": 2,
        "refused_units_total": 3,
        "ended_early_total": 4 + 5,
        "shut_out_total": 6,
        "unreadable_total": 7,
        "checksum_seconds_total": 8,
        "open": 9,
        "in_flight_bytes": 10,
    }


def test_each_wait_of_a_request_has_its_histogram() -> None:
    sources = coordinator_sources()
    waits = sources.counters.waits
    each = {
        "queue_wait": waits.queue_s,
        "retract": waits.retract_s,
        "hand_over": waits.hand_over_s,
        "resume": waits.resume_s,
        "time_to_first_token": waits.first_token_s,
        "inter_token": waits.token_s,
        "host_page_lifetime": sources.counters.host_page_s,
        "journal_commit": sources.counters.journal.commit_s,
    }
    for seconds, buckets in enumerate(each.values(), 1):
        buckets.observe(seconds)
    with served(CoordinatorCollector(sources)) as exporter:
        scraped = scrape(exporter)
    sums = {
        name: next(it.value for it in scraped[f"hisparse_{name}_seconds"].samples if it.name.endswith("_sum"))
        for name in each
    }
    assert sums == {name: seconds for seconds, name in enumerate(each, 1)}


def test_coordinator_metrics_share_a_view() -> None:
    with served(CoordinatorCollector(coordinator_sources())) as exporter:
        scraped = scrape(exporter)
    assert values(scraped["hisparse_requests"]) == {("RUNNING",): 3, ("QUEUED",): 1}
    assert values(scraped["hisparse_host_pages"]) == {
        ("n", "free"): 60,
        ("n", "cached"): 0,
        ("n", "owned"): 30,
        ("n", "shared"): 4,
        ("n", "quarantined"): 6,
    }
    assert values(scraped["hisparse_retractions_total"]) == {("keep", "gpu_pressure"): 2}
    assert values(scraped["hisparse_workers"]) == {("connected",): 1, ("draining",): 1}
    assert values(scraped["hisparse_hot_floor_slots"]) == {("w1",): 0}
    assert values(scraped["hisparse_hot_floor_step_seconds"]) == {
        ("observed", "w1"): pytest.approx(0.0053),
        ("predicted", "w1"): pytest.approx(0.005288),
    }
    assert values(scraped["hisparse_hot_floor_tokens_per_second"]) == {("chosen", "w1"): 11_914, ("best", "w1"): 12_421}
    assert values(scraped["hisparse_hot_floor_changes_total"]) == {("w1",): 1}


def test_ranks_of_groups_are_counted_without_stale_and_gone_ones() -> None:
    def rank(name: str, group: str, number: int, missing: tuple[int, ...] = (), state: str = "connected") -> WorkerRow:
        about = {"worker": name, "group": group, "rank": number, "ranks_missing": missing}
        return msgspec.structs.replace(worker_row(state), **about)

    rows = (
        rank("a", "g0", 0, (2, 3)),
        rank("b", "g0", 1, (2, 3)),
        rank("old", "g0", 2, (0, 1, 2, 3)),
        rank("gone", "g0", 3, state="disconnected"),
        rank("c", "g1", 0),
        rank("d", "g1", 1, state="draining"),
        rank("e", "g2", 0, state="disconnected"),
        rank("f", "g3", 0, (0, 1), state="disconnected"),
        worker_row("connected"),
    )
    view = dataclasses.replace(VIEW, workers=rows)
    (family,) = [it for it in families(CLUSTER_METRICS, view) if it.name == "hisparse_group_ranks"]
    assert values(family) == {
        ("g0", "connected"): 2,
        ("g0", "missing"): 2,
        ("g1", "connected"): 2,
        ("g1", "missing"): 0,
        ("g3", "connected"): 0,
        ("g3", "missing"): 2,
    }


def test_buckets_count_at_most_the_bound() -> None:
    buckets = Buckets((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        buckets.observe(value)
    assert buckets.counts == [2, 2, 1]
    assert buckets.total == 14.0


def test_steps_beside_prompts_are_told_apart() -> None:
    counters = WorkerCounters()
    counters.stepped(0.010, 4)
    counters.stepped(0.500, 7, is_alone=False)
    counters.stepped(0.020, 5)
    assert (counters.steps, counters.alone_steps, counters.alone_s) == (3, 2, pytest.approx(0.030))
    assert (counters.step_requests, counters.alone_requests) == (16, 9)


def test_step_average_starts_at_the_first_step() -> None:
    counters = WorkerCounters()
    counters.stepped(0.010, 1)
    assert counters.step_us == pytest.approx(10_000)
    for _ in range(200):
        counters.stepped(0.002, 1)
    assert counters.step_us == pytest.approx(2_000, rel=0.01)


# ---------------------------------------------------------------- the probes


def test_worker_with_a_stalled_loop_is_unhealthy() -> None:
    world = World()
    assert worker_health(world.sources).ok
    world.counters.beat_at = time.monotonic() - EXECUTOR_STALE_S - 1
    assert not worker_health(world.sources).ok
    assert not worker_readiness(world.sources).ok
    world.counters.beat()
    assert worker_health(world.sources).ok


@pytest.mark.parametrize(("welcomed", "stopping", "ready"), [(1, False, True), (0, False, False), (1, True, False)])
def test_worker_is_ready_while_welcomed_and_staying(welcomed: int, stopping: bool, ready: bool) -> None:
    world = World()
    world.link.welcomed, world.stopping = welcomed, stopping
    assert worker_health(world.sources).ok
    assert worker_readiness(world.sources).ok == ready


def test_probes_answer_503_with_the_reason() -> None:
    with served(healthy=lambda: Health(False, "executor: hangs"), ready=fine) as exporter:
        assert get(exporter, "/healthz") == (503, "executor: hangs\n")
        assert get(exporter, "/readyz") == (200, "fine\n")


async def test_coordinator_view_is_read_in_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "LOOP_LIMIT_S", HANG_LIMIT_S)
    token = trio.lowlevel.current_trio_token()
    task = trio.lowlevel.current_task

    def look() -> CoordinatorView:
        task()  # raises outside of the loop's thread
        return VIEW

    sources = coordinator_sources(lambda: ask_loop(token, look))
    assert (await trio.to_thread.run_sync(coordinator_health, sources)).ok
    assert (await trio.to_thread.run_sync(coordinator_readiness, sources)) == Health(True, "requests are served")


async def test_stalled_loop_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """I8: the wait for the loop is bounded."""
    monkeypatch.setattr(coordinator_module, "LOOP_LIMIT_S", 0.05)
    token = trio.lowlevel.current_trio_token()
    sources = coordinator_sources(lambda: ask_loop(token, lambda: VIEW))
    verdicts: list[Health] = []
    scraper = threading.Thread(target=lambda: verdicts.append(coordinator_health(sources)))
    scraper.start()
    scraper.join()  # no checkpoint: the loop stands still
    assert not verdicts[0].ok
    assert "not turned" in verdicts[0].detail


def test_ended_loop_is_unhealthy() -> None:
    async def main() -> trio.lowlevel.TrioToken:
        return trio.lowlevel.current_trio_token()

    token = trio.run(main)
    with pytest.raises(Unavailable, match="ended"):
        ask_loop(token, lambda: VIEW)


@pytest.mark.parametrize("reason", ["", "no worker is connected"])
def test_coordinator_is_ready_while_a_new_request_would_be_served(reason: str) -> None:
    view = CoordinatorView({}, 0, (), (), {}, stopping=False, unready=reason)
    expected = Health(not reason, reason or "requests are served")
    assert coordinator_readiness(coordinator_sources(lambda: view)) == expected


def test_age_of_a_link_that_was_never_heard_is_not_exported() -> None:
    rows = tuple(msgspec.structs.replace(worker_row("disconnected"), worker=it, link_age_s=age) for it, age in AGES)
    sources = coordinator_sources(lambda: CoordinatorView({}, 0, (), rows, {}, stopping=False))
    with served(CoordinatorCollector(sources)) as exporter:
        ages = [line for line in get(exporter, "/metrics")[1].splitlines() if line.startswith(LINK_AGE)]
    assert ages == [LINK_AGE + '{worker="w1"} 2.5']


AGES = (("w0", messages.NOT_SEEN), ("w1", 2.5))
LINK_AGE = "hisparse_worker_link_age_seconds"


# ---------------------------------------------------------------- the server


def test_paths_and_methods() -> None:
    with served() as exporter:
        assert exporter.host == "127.0.0.1"
        assert exporter.port > 0
        assert get(exporter, "/")[0] == 404
        assert [get(exporter, path, "POST")[0] for path in ("/metrics", "/healthz", "/readyz")] == [405] * 3


class FakeBrokenCollector(Collector):
    def __init__(self) -> None:
        self.broken = False

    def collect(self) -> Iterator[Family]:
        if self.broken:
            raise Unavailable("the event loop has ended")
        yield from families(LINK_METRICS, LinkCounters())


def test_failing_scrape_answers_500() -> None:
    collector = FakeBrokenCollector()
    with served(collector) as exporter:
        collector.broken = True
        status, body = get(exporter, "/metrics")
        assert (status, "loop has ended" in body) == (500, True)
        collector.broken = False
        assert get(exporter, "/metrics")[0] == 200


def test_a_taken_port_is_refused_with_its_remedy() -> None:
    with served() as exporter, pytest.raises(ConfigError, match="metrics_port"):
        serve([], healthy=fine, ready=fine, port=exporter.port)


def test_idle_peers_hold_a_bounded_number_of_threads() -> None:
    """I8: past CONNECTIONS_MAX a connection is closed at once, and the slots come back."""
    with served() as exporter:
        idle = [socket.create_connection((exporter.host, exporter.port)) for _ in range(CONNECTIONS_MAX)]
        deadline = time.monotonic() + HANG_LIMIT_S
        with socket.create_connection((exporter.host, exporter.port)) as one_more:
            one_more.settimeout(HANG_LIMIT_S)
            assert one_more.recv(1) == b""
        for peer in idle:
            peer.close()
        status = 0
        while status != 200:
            assert time.monotonic() < deadline
            try:
                status, _ = get(exporter, "/healthz")
            except (OSError, http.client.HTTPException):
                time.sleep(0.01)


def test_coordinator_with_a_failing_journal_is_not_ready() -> None:
    failing = CoordinatorView({}, 0, (), (), {}, False, journal_failing="disk full", unready="disk full")
    sources = coordinator_sources(lambda: failing)
    assert coordinator_readiness(sources) == Health(False, "disk full")
    with served(CoordinatorCollector(sources)) as exporter:
        assert "hisparse_journal_failing 1.0" in get(exporter, "/metrics")[1]


def test_swap_in_has_the_numbers_of_layers_that_select() -> None:
    """Heads of a layer are one series; a layer that selects nothing has none."""
    swap = SwapTotals((-1, 0, 0, 1), row_bytes=100, heads=2)
    swap.misses += (1, 2, 3, 4)
    swap.spent(64, 2, 0.5)
    assert executor._by_layer(swap, swap.misses) == {"1": 3, "2": 3, "3": 7}
    assert executor._swap_seconds(swap) == {("1", "compute"): 0, ("2", "swap"): 32, ("3", "compute"): 0}
    assert (swap.loaded_bytes, swap.waited_seconds) == (1_300, 0)
