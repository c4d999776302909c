"""The plan of what a card is to run: nothing of tests/gpu is left out, and what is measured runs alone."""

from __future__ import annotations

import shlex
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import ROOT
from tests.gpu.card import Step, main, next_step, plan, run_plan

NOTES = "import sys, time; log = open(sys.argv[1], 'a', 1); print('+', file=log); time.sleep(0.3); print('-', file=log)"


def test_plan_has_each_file_of_tests_and_programs_that_exist() -> None:
    words = [shlex.split(step.command) for step in plan()]
    tested = {word for command in words for word in command if word.startswith("tests/")}
    assert tested == {file.relative_to(ROOT).as_posix() for file in (ROOT / "tests/gpu").glob("test_*.py")}
    modules = {command[command.index("-m") + 1] for command in words}
    assert [name for name in modules if find_spec(name) is None] == []
    assert len({step.name for step in plan()}) == len(words)


def test_quiet_steps_run_with_nothing_beside_them(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = f"python -c {shlex.quote(NOTES)} {log}"
    steps = [Step(f"beside-{number}", command) for number in range(3)]
    steps[1:1] = [Step(f"quiet-{number}", command, quiet=True) for number in range(2)]
    ended = run_plan(steps, [0, 0], time.monotonic() + 60, tmp_path)
    assert [each.status for each in ended] == [0] * 5
    assert [each.step.name for each in ended[:2]] == ["quiet-0", "quiet-1"]
    assert log.read_text().split()[:4] == ["+", "-", "+", "-"]


def test_step_waits_for_its_cores() -> None:
    wide, narrow = Step("wide", "", cores=2), Step("narrow", "")
    assert next_step([wide, narrow], [], 2) is wide
    assert next_step([wide, narrow], [narrow], 1) is narrow
    assert next_step([wide], [narrow], 1) is None


def test_step_whose_time_is_up_ends_with_what_it_started(tmp_path: Path) -> None:
    child = "import signal, time; signal.signal(15, signal.SIG_IGN); print('held', flush=True); time.sleep(600)"
    parent = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}]); print(p.pid); p.wait()"
    steps = [Step("long", f"python -u -c {shlex.quote(parent)}", limit_s=5), Step("late", "python -c 0")]
    ended = run_plan(steps, [0], time.monotonic() + 5, tmp_path)
    assert [(each.step.name, each.status) for each in ended] == [("long", None), ("late", None)]
    pid, held = (tmp_path / "logs/long.txt").read_text().split()
    assert held == "held"
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_failed_step_has_its_status_and_its_output(tmp_path: Path) -> None:
    (ended,) = run_plan([Step("bad", "python -c 1/0")], [0], time.monotonic() + 60, tmp_path)
    assert ended.status == 1
    assert "ZeroDivisionError" in (tmp_path / "logs/bad.txt").read_text()


def test_unknown_step_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "rank", "no-such"])
    assert "--only no-such: no such step; take some of rank, " in capsys.readouterr().err
    assert main(["--list", "--only", "rank"]) == 0
    assert capsys.readouterr().out.startswith("rank ")
