"""The tier `deep`: tests that start many processes to show what others show too. A run may take a third of them.

`--part 0`, `1` or `2` runs that part of them beside all other tests; `--part auto` another part with each commit.
Without the option all of them run. Parts are balanced by tests/durations.json, which `--store-durations` writes.

`@pytest.mark.deep(part=1)` names the part, where tests share what is costly to make, as compiled kernels. Such tests
are even by themselves, and not counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from tests import ROOT
from tests.support.history import first_parent_commits

PARTS: Final = 3
DURATIONS: Final = ROOT / "tests" / "durations.json"
#: Seconds of a deep test that the file does not name.
UNKNOWN_S: Final = 10.0


def deal(tests: Sequence[str], durations_s: Mapping[str, float]) -> list[set[str]]:
    """Return `tests` in PARTS disjoint sets of similar duration: the longest first, each to the shortest set so far."""
    parts: list[set[str]] = [set() for _ in range(PARTS)]
    sums_s = [0.0] * PARTS
    for test in sorted(tests, key=lambda name: (-durations_s.get(name, UNKNOWN_S), name)):
        shortest = sums_s.index(min(sums_s))
        parts[shortest].add(test)
        sums_s[shortest] += durations_s.get(test, UNKNOWN_S)
    return parts


def part_of(option: str, commits: int | None) -> int | None:
    """Return the part that `--part` names; None if every deep test runs."""
    if not option:
        return None
    return (commits or 0) % PARTS if option == "auto" else int(option)


def add_options(parser: pytest.Parser) -> None:
    """Declare `--part` and `--store-durations`."""
    choices = ["", "auto", *map(str, range(PARTS))]
    parser.addoption("--part", default="", choices=choices, help="the third of the deep tests to run; default: all")
    parser.addoption("--store-durations", action="store_true", help="write the seconds of deep tests to durations.json")


def header(config: pytest.Config) -> str:
    """Return the line that begins a run: which deep tests run, and why these."""
    option, commits = config.getoption("--part"), first_parent_commits()
    part = part_of(option, commits)
    if part is None:
        return "deep tests: all"
    counted = "no history, or a shallow clone" if commits is None else f"{commits} commits"
    return f"deep tests: part {part} of 0 to {PARTS - 1} ({counted if option == 'auto' else 'as asked'})"


def deselect_other_parts(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the deep tests of other parts."""
    part = part_of(config.getoption("--part"), first_parent_commits())
    if part is None:
        return
    marks = {item.nodeid: mark for item in items if (mark := item.get_closest_marker("deep"))}
    dealt = [test for test, mark in marks.items() if "part" not in mark.kwargs]
    named = {test for test, mark in marks.items() if mark.kwargs.get("part") == part}
    others = marks.keys() - named - deal(dealt, json.loads(DURATIONS.read_text()))[part]
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in others])
    items[:] = [item for item in items if item.nodeid not in others]


class StoredDurations:
    """A plugin that writes the seconds of each deep test that ran and passed, setup included, to `path` at the end.

    Tests that did not run keep what the file says of them.
    """

    def __init__(self, path: Path = DURATIONS) -> None:
        self._path = path
        self._seconds: dict[str, float] = {}
        self._called: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "deep" in report.keywords and report.passed:
            self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
            self._called |= {report.nodeid} if report.when == "call" else set()

    def pytest_sessionfinish(self) -> None:
        known = json.loads(self._path.read_text()) if self._path.exists() else {}
        seconds = known | {test: round(self._seconds[test], 1) for test in self._called}
        self._path.write_text(json.dumps(seconds, indent=0, sort_keys=True) + "\n")


def store_durations(config: pytest.Config) -> None:
    """Write the seconds of deep tests at the end of this run, if it was asked to; in its first process only."""
    if config.getoption("--store-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(StoredDurations())
