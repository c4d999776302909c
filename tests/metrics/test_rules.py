"""Alert rules: valid, over metrics that exist, tried by promtool, and each explained in the runbook."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests import ROOT
from tests.support.prometheus_rig import program, unknown_in

RULES: Final = ROOT / "metrics" / "rules"
CASES: Final = RULES / "tests" / "hisparse_test.yml"
RUNBOOK: Final = (ROOT / "docs" / "runbook.md").read_text()


def alerts() -> list[dict[str, Any]]:
    groups = [group for file in RULES.glob("*.yml") for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(
        [program("promtool"), *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_the_rules() -> None:
    assert f"{len(alerts())} rules found" in promtool("check", "rules", *sorted(RULES.glob("*.yml")))


def test_promtool_accepts_the_configuration() -> None:
    promtool("check", "config", ROOT / "metrics" / "prometheus.yml")


def test_every_case_of_every_alert_holds() -> None:
    promtool("test", "rules", CASES)


def test_every_alert_has_a_firing_and_a_silent_case() -> None:
    """Silent: a moment without a sample of the alert, or an instance in the same case that does not fire."""
    firing, silent = set(), set()
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        for step in case.get("promql_expr_test", ()):
            name = re.search(r'alertname="(\w+)"', step["expr"])[1]
            (firing if step["exp_samples"] else silent).add(name)
            instances = {
                it for series in case["input_series"] for it in re.findall(r'instance="(\w+)"', series["series"])
            }
            if len(instances) > len(step["exp_samples"]):
                silent.add(name)
    assert firing == silent == {rule["alert"] for rule in alerts()}


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_is_complete(rule: dict[str, Any]) -> None:
    assert unknown_in(rule["expr"]) == set()
    assert rule["alert"].startswith("HiSparse")
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() == {"summary", "description", "runbook"}
    path, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert (ROOT / path).exists()
    assert anchor == rule["alert"].lower()


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_a_summary_calls_a_process_by_its_name(rule: dict[str, Any]) -> None:
    """Not by its address alone, which a person cannot tell from another."""
    summary = rule["annotations"]["summary"]
    named = re.findall(r'printf "(.*?)" \$labels.instance \| query', summary)
    assert len(named) == summary.count('label "name" }} at {{ end }}{{ $labels.instance }}') <= 1
    assert summary.count("$labels.instance") == 2 * len(named)
    assert [unknown_in(query.replace("%q", '"w0"')) for query in named] == [set()] * len(named)


def test_runbook_explains_exactly_the_alerts() -> None:
    sections = dict(re.findall(r"^## (HiSparse\w+)\n(.*?)(?=^## |\Z)", RUNBOOK, re.MULTILINE | re.DOTALL))
    assert sections.keys() == {rule["alert"] for rule in alerts()}
    for name, text in sections.items():
        assert [mark for mark in ("**Means.**", "**Look.**", "**Do.**") if mark not in text] == [], name


def test_runbook_metrics_and_labels_exist() -> None:
    expressions = re.findall(r"`((?:hisparse|process)_[\w{}=\"]+)`", RUNBOOK)
    assert len(expressions) > 5
    for expr in expressions:
        assert unknown_in(expr) == set()


@pytest.mark.parametrize(
    ("expr", "unknown"),
    [
        ("rate(hisparse_journal_commit_seconds_bucket[5m])", set()),
        ('sum by (node, state) (hisparse_host_pages{state="free"})', set()),
        ("hisparse_made_up", {"hisparse_made_up"}),
        ("hisparse_journal_commit_seconds", {"hisparse_journal_commit_seconds"}),
        ("hisparse_tokens_total_sum", {"hisparse_tokens_total_sum"}),
        ('hisparse_host_pages{worker="w0"}', {"hisparse_host_pages{worker}"}),
        ("sum by (fence) (hisparse_host_pages)", {"fence"}),
    ],
)
def test_unknown_names_are_found(expr: str, unknown: set[str]) -> None:
    assert unknown_in(expr) == unknown
