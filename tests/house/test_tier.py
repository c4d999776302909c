"""The parts of the deep tests: every one is in exactly one of them, and they take about the same time."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import ROOT
from tests.support.tier import DURATIONS, PARTS, UNKNOWN_S, StoredDurations, deal, deselect_other_parts, part_of

DURATIONS_S = st.dictionaries(st.text("abc[]", min_size=1, max_size=4), st.floats(0.1, 300.0), max_size=30)


@given(DURATIONS_S, st.sets(st.text("xyz", min_size=1, max_size=2), max_size=9))
def test_each_deep_test_is_in_one_part(durations_s: dict[str, float], unknown: set[str]) -> None:
    tests = sorted(unknown | set(durations_s))
    parts = deal(tests, durations_s)
    assert len(parts) == PARTS
    assert sorted(name for part in parts for name in part) == tests
    sums_s = [sum(durations_s.get(name, UNKNOWN_S) for name in part) for part in parts]
    longest = max([durations_s.get(name, UNKNOWN_S) for name in tests], default=0.0)
    assert max(sums_s) - min(sums_s) <= longest + 1e-6


@pytest.mark.parametrize(
    ("option", "commits", "part"),
    [("", 962, None), ("auto", 962, 2), ("auto", 963, 0), ("auto", None, 0), ("1", 963, 1), ("1", None, 1)],
)
def test_part_of_a_run(option: str, commits: int | None, part: int | None) -> None:
    assert part_of(option, commits) == part


@pytest.mark.parametrize(("option", "left"), [("", "abc"), ("0", "ab"), ("1", "ac"), ("2", "a")])
def test_a_mark_names_the_part_of_its_test(option: str, left: str) -> None:
    marks = {"a": None, "b": pytest.mark.deep(part=0).mark, "c": pytest.mark.deep(part=1).mark}
    items = [SimpleNamespace(nodeid=test, get_closest_marker=lambda _, it=mark: it) for test, mark in marks.items()]
    gone: list[str] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: gone.extend(item.nodeid for item in items))
    config = SimpleNamespace(getoption=lambda _: option, hook=hook)
    deselect_other_parts(cast("pytest.Config", config), cast("list[pytest.Item]", items))
    assert {item.nodeid for item in items} == set(left) == marks.keys() - set(gone)


def test_durations_of_what_ran_are_kept(tmp_path: Path) -> None:
    """Setup and call of a test count. A skipped test has none, though the end of its setup passes."""
    path = tmp_path / "durations.json"
    path.write_text('{"other": 4.0, "passed": 9.0}')
    stored = StoredDurations(path)
    reports = [("passed", "setup", "passed"), ("passed", "call", "passed")]
    reports += [("skipped", "setup", "skipped"), ("skipped", "teardown", "passed")]
    for test, when, outcome in reports:
        stored.pytest_runtest_logreport(
            pytest.TestReport(test, ("f", 1, test), {"deep": 1}, outcome, None, when, duration=1.25)  # type: ignore[arg-type]
        )
    stored.pytest_sessionfinish()
    assert json.loads(path.read_text()) == {"other": 4.0, "passed": 2.5}


def test_durations_are_of_tests_that_exist() -> None:
    for test in json.loads(DURATIONS.read_text()):
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), test
