"""Prometheus for tests: its programs, what an expression names, and a server that scrapes what it is told."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from metrics.families import MetricType
from metrics.names import BY_NAME
from tests import ROOT
from tests.support.limits import HANG_LIMIT_S

#: Where `.ci/prometheus` puts what is not on PATH.
UNPACKED: Final = ROOT / "build" / "prometheus" / "usr" / "bin"
#: Every expression has data after a few scrapes; more is a machine that does other things.
DATA_LIMIT_S: Final = 150.0
#: Series that Prometheus makes itself, and labels that it adds to every series.
BUILT_IN: Final = frozenset({"up", "ALERTS"})
ADDED_LABELS: Final = frozenset({"job", "instance"})
_SELECTOR: Final = re.compile(r"\b((?:hisparse|process)_\w+|up|ALERTS)\b(?:\{([^}]*)\})?")
_GROUPED: Final = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")
_MATCHER: Final = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')


def program(name: str) -> str:
    """The path of prometheus or promtool. Missing: the test is skipped; with REQUIRE_PROMETHEUS set, it fails."""
    found = shutil.which(name) or shutil.which(name, path=str(UNPACKED))
    if found is not None:
        return found
    message = f"{name} is not installed: .ci/prometheus fetches it"
    if os.environ.get("REQUIRE_PROMETHEUS"):
        pytest.fail(message)
    pytest.skip(message)


def unknown_in(expr: str) -> set[str]:
    """What `expr` names and no process exports: metrics, or labels that none of its metrics has."""
    unknown: set[str] = set()
    known_labels = set(ADDED_LABELS)
    for name, matchers in _SELECTOR.findall(expr):
        labels = _labels_of(name)
        if labels is None:
            unknown.add(name)
            continue
        known_labels |= labels
        unknown |= {f"{name}{{{label}}}" for label in _MATCHER.findall(matchers)} - {
            f"{name}{{{label}}}" for label in labels
        }
    for group in _GROUPED.findall(expr):
        unknown |= {label.strip() for label in group.split(",") if label.strip()} - known_labels
    return unknown


def _labels_of(name: str) -> set[str] | None:
    if name in BUILT_IN:
        return {*ADDED_LABELS, "alertname", "alertstate", "severity"}
    family = re.sub(r"_(bucket|sum|count)$", "", name)
    if family != name and (metric := BY_NAME.get(family)) is not None and metric.type is MetricType.HISTOGRAM:
        return {*metric.labels, *ADDED_LABELS, *(("le",) if name.endswith("_bucket") else ())}
    found = BY_NAME.get(name)
    return None if found is None or found.type is MetricType.HISTOGRAM else {*found.labels, *ADDED_LABELS}


@dataclass(frozen=True)
class Server:
    """A running Prometheus."""

    port: int

    def get(self, path: str, **query: str) -> Any:
        """`data` of an answer of its API. Raises AssertionError with its error, OSError while it starts."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=HANG_LIMIT_S) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            raise AssertionError(f"{query}: {json.load(error)['error']}") from None

    def query(self, expr: str) -> list[Mapping[str, Any]]:
        """The series that `expr` gives now."""
        data = self.get("query", query=expr)
        return data["result"] if data["resultType"] == "vector" else [data]

    def is_up(self, jobs: Mapping[str, Sequence[int]]) -> bool:
        """Whether every target of `jobs` was scraped."""
        try:
            return len(self.query("up == 1")) == sum(map(len, jobs.values()))
        except OSError:
            return False


@contextmanager
def prometheus(place: Path, port: int, jobs: Mapping[str, Sequence[int]]) -> Iterator[Server]:
    """Scrape the local ports of `jobs` twice a second, with the rules of the repository, until the end of the block."""
    config = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "1s"},
        "rule_files": [str(ROOT / "metrics" / "rules" / "*.yml")],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{it}" for it in ports]}]}
            for job, ports in jobs.items()
        ],
    }
    file = place / "prometheus.yml"
    file.write_text(json.dumps(config))  # YAML holds JSON
    flags = [f"--config.file={file}", f"--storage.tsdb.path={place / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}"]
    with (place / "prometheus.log").open("wb") as log:
        child = subprocess.Popen([program("prometheus"), *flags], stderr=log)
    try:
        yield Server(port)
    finally:
        child.kill()
        child.wait()


async def until(
    condition: Callable[[], object], explain: Callable[[], object] = lambda: "", limit_s: float = DATA_LIMIT_S
) -> None:
    """Poll `condition` in a thread until it holds, at most `limit_s`."""
    give_up_at = trio.current_time() + limit_s
    while not await trio.to_thread.run_sync(condition):
        assert trio.current_time() < give_up_at, explain()
        await trio.sleep(0.25)
