"""Fault drills: trouble is caused on real processes, and what the alert waits for holds in a real Prometheus."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.prometheus_rig import program
from tools.faults import drills
from tools.faults.drills import HEADER, SCENES, Play, Sighting, Trouble, as_row, rules, shrunk

#: Half a minute of standing still, or of quiet to compare with, or a minute of waiting: by hand,
#: `python -m tools.faults.drills`.
LONG = (drills.hang, drills.waits, drills.slow_prompts)
QUICK = [(play, troubles) for play, troubles in SCENES if play not in LONG]


@pytest.mark.process
@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("play", "troubles"), QUICK, ids=[play.__name__ for play, _ in QUICK])
async def test_each_drill_fires_its_alert(play: Play, troubles: tuple[Trouble, ...], tmp_path: Path) -> None:
    """None of it is there before."""
    program("prometheus")
    assert tuple(sighting.trouble for sighting in await play(tmp_path)) == troubles


def test_every_alert_has_a_drill() -> None:
    assert {trouble.alert for _, troubles in SCENES for trouble in troubles} == {*rules()}


def test_windows_are_shrunk_in_proportion() -> None:
    assert shrunk("rate(a[10m]) > 3 * rate(a[6h] offset 10m)") == "rate(a[10s]) > 3 * rate(a[60s] offset 10s)"


def test_drill_results_form_a_table() -> None:
    row = as_row(Sighting(Trouble("HiSparseX", "a cause", "max(x)"), "0", "3", 4.2))
    assert row == "| HiSparseX | a cause | `max(x)` | 0 | 3 | 4 s |"
    assert {line.count("|") for line in (*HEADER, row)} == {7}
