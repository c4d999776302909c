"""Dashboards: files as written by the code, over metrics that exist, and run against a real Prometheus and cluster."""

from __future__ import annotations

import json
import re
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest
import trio
import yaml

from hisparse.client.client import Client, open_client
from metrics.families import Metric
from metrics.names import BY_NAME
from protocol.errors import BadInput, WrongState
from protocol.messages import Sampling
from tests import ROOT
from tests.metrics.test_rules import alerts
from tests.support.limits import HANG_LIMIT_S
from tests.support.ports import free_ports
from tests.support.process_rig import Place
from tests.support.prometheus_rig import Server, program, prometheus, unknown_in, until
from tools.dashboards import DASHBOARDS, DIRECTORY, as_text
from tools.dashboards.grafana import COLUMNS, NAME_AND_INSTANCE, Dashboard, Panel, Query
from tools.dashboards.worker import ONE

PANELS: Final = [(dashboard, panel) for dashboard in DASHBOARDS.values() for panel in dashboard.panels]
ALL_PANELS: Final = pytest.mark.parametrize(
    ("dashboard", "panel"), PANELS, ids=[f"{dashboard.uid}: {panel.title}" for dashboard, panel in PANELS]
)
#: Expressions without a series for each process.
AGGREGATED: Final = re.compile(r"(sum|max|count)(\(| by)|histogram_quantile")
#: The scrape interval of the test is half a second; scrapes that take longer fail.
WINDOW: Final = "12s"
#: Metrics of alerts without a sample until there is trouble, a GPU, a standby or a keeper of weights.
SILENT: Final = re.compile(r"hisparse_(audit_differences|worker_fence|group|worker_standbys|worker_weights)_\w+")


# ---------------------------------------------------------------- the files


@pytest.mark.parametrize("name", DASHBOARDS)
def test_dashboard_file_matches_its_code(name: str) -> None:
    assert (DIRECTORY / name).read_text() == as_text(DASHBOARDS[name]), "run: make docs"


def test_no_other_file_is_provisioned() -> None:
    assert {path.name for path in DIRECTORY.glob("*.json")} == DASHBOARDS.keys()


@ALL_PANELS
def test_a_panel_reads_metrics_that_exist(dashboard: Dashboard, panel: Panel) -> None:
    for query in panel.queries:
        assert unknown_in(query.expr) == set()
        assert set(re.findall(r"\$(\w+)", query.expr)) <= {"__rate_interval", *(it.name for it in dashboard.variables)}


@ALL_PANELS
def test_operands_are_all_summed_by_worker_or_none(dashboard: Dashboard, panel: Panel) -> None:
    """Targets may have labels of their own, as on Kubernetes, and series match by all their labels."""
    for query in panel.queries:
        summed = len(re.findall(r"sum by \(job, instance(?:, \w+)?\) \(rate\(", query.expr))
        assert summed in (0, query.expr.count("rate("))


@ALL_PANELS
def test_panel_describes_bad_values(dashboard: Dashboard, panel: Panel) -> None:
    shown, bad, rest = panel.description.partition(" Bad: ")
    assert shown.endswith((".", ")"))
    assert bad
    assert rest.endswith(".")


@ALL_PANELS
def test_panel_series_have_distinct_legends(dashboard: Dashboard, panel: Panel) -> None:
    if len(panel.queries) > 1:
        legends = Counter(query.legend for query in panel.queries)
        assert legends.most_common(1)[0][1] == 1
        assert "" not in legends


@pytest.mark.parametrize("name", DASHBOARDS)
def test_titles_differ_within_a_dashboard(name: str) -> None:
    titles = Counter(panel.title for panel in DASHBOARDS[name].panels)
    assert [title for title, count in titles.items() if count > 1] == []


@ALL_PANELS
def test_panel_title_names_what_is_shown(dashboard: Dashboard, panel: Panel) -> None:
    """By words of its metrics: their names, labels, units and meanings."""
    words = set(re.findall(r"[a-z]{3,}", panel.title.lower())) - {"the", "and", "per", "was"}
    declared = [metric for query in panel.queries for metric in metrics_of(query)]
    about = " ".join(" ".join((it.name, *it.labels, it.unit, it.help)) for it in declared).lower()
    assert len(panel.title.split()) > 1
    assert any(re.search(rf"(?<![a-z]){word[:4]}", about) for word in words) or not declared


@ALL_PANELS
def test_legend_calls_a_process_by_its_name(dashboard: Dashboard, panel: Panel) -> None:
    """Not by its address alone, which a person cannot tell from another."""
    for query in panel.queries:
        assert ("{{name}}" in query.legend) == query.expr.endswith("group_left (name) hisparse_info")
        assert "{{name}}" in query.legend or "{{instance}}" not in query.legend
        is_by_process = re.search(r"\binstance\b", query.expr.replace(ONE, "")) or not re.match(AGGREGATED, query.expr)
        assert "{{name}}" in query.legend or "{{worker}}" in query.legend or not is_by_process


@ALL_PANELS
def test_panel_unit_is_that_of_its_queries(dashboard: Dashboard, panel: Panel) -> None:
    for query in panel.queries:
        units = {metric.unit for metric in metrics_of(query)}
        match panel.unit:
            case "s":
                assert "seconds" in units
            case "bytes" | "Bps":
                assert "bytes" in units
            case "percentunit":
                assert " / " in query.expr or units == {"seconds"}
        assert panel.unit not in ("Bps", "cps", "reqps") or "rate(" in query.expr


def metrics_of(query: Query) -> list[Metric[Any]]:
    """The metrics that a query shows; not `hisparse_info`, which gives their processes' names."""
    names = [re.sub("_(bucket|sum|count)$", "", it) for it in re.findall(r"\b(?:hisparse|process)_\w+", query.expr)]
    return [BY_NAME[name] for name in names if name != "hisparse_info"]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_fill_the_grid_without_overlap(name: str) -> None:
    written = json.loads((DIRECTORY / name).read_text())
    assert len({panel["id"] for panel in written["panels"]}) == len(written["panels"])
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in written["panels"]):
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= COLUMNS
        taken |= cells


def test_variable_offers_names_and_stands_for_instances() -> None:
    """The line is one of Grafana's `query_result`, the expression one of JavaScript."""
    line = 'hisparse_info{instance="10.0.0.1:9401",job="hisparse-worker",name="w0",process="worker",version="1"} 1 17'
    matches = list(re.finditer(NAME_AND_INSTANCE.strip("/g").replace("(?<", "(?P<"), line))
    assert [it["text"] for it in matches if it["text"]] == ["w0"]
    assert [it["value"] for it in matches if it["value"]] == ["10.0.0.1:9401"]
    for variable in (it for dashboard in DASHBOARDS.values() for it in dashboard.variables):
        assert unknown_in(variable.query) == set()


def test_grafana_has_the_data_source_that_panels_name() -> None:
    given = yaml.safe_load((ROOT / "metrics" / "provisioning" / "datasources" / "prometheus.yml").read_text())
    named = {json.dumps(panel["datasource"]["uid"]) for panel in _written() if "datasource" in panel}
    assert named == {json.dumps(source["uid"]) for source in given["datasources"]}


def _written() -> list[dict[str, Any]]:
    return [panel for name in DASHBOARDS for panel in json.loads((DIRECTORY / name).read_text())["panels"]]


# ---------------------------------------------------------------- against a real Prometheus


def filled(expr: str) -> str:
    """`expr` as Grafana sends it when everything is chosen."""
    return re.sub(r"\$(?!__)\w+", ".*", expr.replace("$__rate_interval", WINDOW))


@pytest.mark.process
async def test_every_panel_and_rule_has_data_from_a_real_cluster(tmp_path: Path) -> None:
    """A coordinator, a worker and the HTTP front under load, scraped by Prometheus: no expression fails, and each that
    is not about trouble gives series."""
    from worker.runners.tiny import write_tiny_checkpoint

    program("prometheus")
    write_tiny_checkpoint(tmp_path / "model")
    place = Place(tmp_path, tmp_path / "model", draft_tokens=1)
    async with place.coordinator() as coordinator, place.worker() as worker, place.http() as http:
        jobs = {
            "hisparse-http": [await http.metrics_port()],
            "hisparse-coordinator": [await coordinator.metrics_port()],
            "hisparse-worker": [await worker.metrics_port()],
        }
        with prometheus(tmp_path, free_ports(1), jobs) as server:
            await until(lambda: server.is_up(jobs))
            await until(lambda: server.query("min(hisparse_link_welcomed) + min(hisparse_http_connected) == 2"))
            async with load(place), trio.open_nursery() as nursery:
                nursery.start_soon(_completions, await http.url())
                wanted = [query.expr for _, panel in PANELS for query in panel.queries if not query.rare]
                wanted += [f"count({name})" for name in _metrics_of_alerts() if not SILENT.fullmatch(name)]
                await until(lambda: not without_data(server, wanted), lambda: without_data(server, wanted))
                for _, panel in PANELS:
                    for query in panel.queries:
                        labels = set(re.findall(r"\{\{(\w+)}}", query.legend))
                        for series in server.query(filled(query.expr)):
                            assert labels <= series.get("metric", {}).keys(), query
                await until(lambda: all(rule["health"] != "unknown" for rule in rules_of(server)))  # each was evaluated
                rules = rules_of(server)
                assert {rule["name"]: rule["health"] for rule in rules} == {it["alert"]: "ok" for it in alerts()}
                assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
                nursery.cancel_scope.cancel()


def rules_of(server: Server) -> list[dict[str, Any]]:
    return [rule for group in server.get("rules")["groups"] for rule in group["rules"]]


def without_data(server: Server, exprs: list[str]) -> list[str]:
    """Those that give no series, or nothing but 0 / 0."""
    return [expr for expr in exprs if all(it["value"][1] == "NaN" for it in server.query(filled(expr)))]


def _metrics_of_alerts() -> set[str]:
    return {name for rule in alerts() for name in re.findall(r"\b(?:hisparse|process)_\w+", rule["expr"])}


@asynccontextmanager
async def load(place: Place) -> AsyncIterator[None]:
    """Requests all the time, with hot buffers: short ones end, one of them is retracted and resumed, one is refused,
    again and again. Long ones stay for seconds, so that their hot buffers are looked at twice."""
    async with (
        open_client(place.endpoint("admin"), role="admin", name="load") as client,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(_requests, client, "short", 48)
        nursery.start_soon(_requests, client, "long", 800)
        nursery.start_soon(_trouble, client)
        yield
        nursery.cancel_scope.cancel()


async def _requests(client: Client, name: str, tokens: int) -> None:
    for number in count():
        sampling = Sampling(tokens, ignore_eos=True)
        stream = await client.submit(list(name[:1].encode() * 200), sampling, request_id=f"{name}-{number}")
        async for _ in stream:
            pass


async def _completions(url: str) -> None:
    """Answers over HTTP, one after the other."""
    body = json.dumps({"model": "model", "prompt": "hello", "max_tokens": 20, "stream": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    while True:
        await trio.to_thread.run_sync(lambda: urllib.request.urlopen(request, timeout=HANG_LIMIT_S).read())
        await trio.sleep(0.1)


async def _trouble(client: Client) -> None:
    (worker,) = await client.workers()
    while True:
        with pytest.raises(BadInput):
            await client.submit_detached([1] * 100, Sampling(10_000_000))
        running = [row.request_id for row in (await client.requests()).rows if row.state == "RUNNING"]
        for request_id in running:
            with suppress(WrongState):  # it may have ended meanwhile
                await client.resize([request_id], worker.capacity.hot_size_classes[0])
        for request_id in [it for it in running if it.startswith("short")][:1]:
            with suppress(WrongState):
                await client.retract([request_id])
                await trio.sleep(0.2)
                await client.resume([request_id])
        await trio.sleep(0.5)
