"""Children: their exit is seen, they are stopped within a grace period, and they never outlive their parent."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from hisparse.cluster.children import Child, child_environ, die_with_parent, exit_text, stop_children, wait_all
from protocol.errors import Unavailable
from protocol.start_and_end import REASON_CHARS_MAX
from tests import ROOT
from tests.support.limits import HANG_LIMIT_S

IGNORES_SIGTERM = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


pytestmark = pytest.mark.process


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.signal(signal.SIGKILL)
        child.process.wait()
        child.close()


def start(children: list[Child], code: str, log_path: Path | None = None) -> Child:
    children.append(Child.start(f"child{len(children)}", [sys.executable, "-c", code], os.environ, log_path))
    return children[-1]


async def eventually(condition: Callable[[], bool]) -> None:
    """In the time of the machine, whatever trio's clock says."""
    give_up_at = time.monotonic() + HANG_LIMIT_S
    while not condition():
        assert time.monotonic() < give_up_at
        await trio.to_thread.run_sync(time.sleep, 0.01)


async def logged(child: Child, text: str) -> None:
    await eventually(lambda: text in child.tail())


def test_child_has_the_folder_of_kernels_and_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HISPARSE_KERNEL_CACHE", "/var/cache/kernels")
    monkeypatch.setenv("HISPARSE_WORKER_SEATS", "4")
    environ = child_environ()
    assert {name for name in environ if name.startswith("HISPARSE_")} == {"HISPARSE_KERNEL_CACHE"}
    assert environ["HISPARSE_KERNEL_CACHE"] == "/var/cache/kernels"


GIVES_REASON = (
    "import sys; from protocol.start_and_end import *; from protocol.errors import Unavailable; "
    "leave_reasons_at(int(sys.argv[-1])); error = {}; error.add_note('in a step'); leave_reason(error); sys.exit(3)"
)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("ValueError('no\\n  memory')", "ValueError: no memory; in a step"),
        ("Unavailable('gone', field='peer', value=3, remedy='start it')", "peer=3: gone (start it); in a step"),
        ("ValueError('x' * 10_000)", "ValueError: " + "x" * (REASON_CHARS_MAX - 12)),
    ],
)
async def test_the_reason_of_an_end_is_told(children: list[Child], error: str, reason: str) -> None:
    command, environ = [sys.executable, "-c", GIVES_REASON.format(error)], os.environ | {"PYTHONPATH": str(ROOT)}
    children.append(child := Child.start("child", command, environ, gives_reason=True))
    assert child.end_text(await child.wait()) == f"exited with 3: {reason}"


async def test_exit_is_seen_by_all_waiters_at_once(children: list[Child]) -> None:
    child = start(children, "import time; time.sleep(0.3); raise SystemExit(7)")
    statuses: list[int] = []

    async def wait() -> None:
        statuses.append(await child.wait())

    with trio.fail_after(HANG_LIMIT_S):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(wait)
    assert statuses == [7, 7, 7]
    assert exit_text(7) == "exited with 7"


async def test_child_that_ignores_sigterm_is_killed_after_grace(
    children: list[Child], tmp_path: Path, mock_clock: MockClock
) -> None:
    deaf = start(children, IGNORES_SIGTERM, tmp_path / "deaf")
    polite = start(children, "import time; print('up', flush=True); time.sleep(60)", tmp_path / "polite")
    await logged(deaf, "up")
    await logged(polite, "up")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(stop_children, [deaf, polite], grace_s=30.0))
        await eventually(lambda: not polite.running)
        mock_clock.jump(29.9)
        await wait_all_tasks_blocked()
        assert deaf.running
        mock_clock.jump(0.2)
    assert exit_text(await deaf.wait()) == "killed by SIGKILL"
    assert exit_text(await polite.wait()) == "killed by SIGTERM"


async def test_stopping_is_complete_even_when_cancelled(children: list[Child], tmp_path: Path) -> None:
    deaf = start(children, IGNORES_SIGTERM, tmp_path / "deaf")
    await logged(deaf, "up")
    with trio.move_on_after(0.2):
        await stop_children([deaf], grace_s=30)
    assert not deaf.running


async def test_ctrl_c_in_the_terminal_reaches_only_the_parent(children: list[Child]) -> None:
    child = start(children, "import time; time.sleep(60)")
    assert os.getpgid(child.pid) != os.getpgrp()


async def test_wait_that_times_out_returns_false(children: list[Child]) -> None:
    child = start(children, "import time; time.sleep(60)")
    assert await wait_all([child], 0.05) is False


async def test_a_log_shows_its_last_lines_only(children: list[Child], tmp_path: Path) -> None:
    child = start(children, "for i in range(1000): print('line', i)", tmp_path / "log")
    await child.wait()
    lines = child.tail().splitlines()
    assert lines[-1] == "line 999"
    assert len(lines) == 12
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


async def test_child_dies_with_a_killed_parent(children: list[Child], tmp_path: Path) -> None:
    inner = (
        "import os, sys, time; from hisparse.cluster.children import die_with_parent; die_with_parent(os.getppid());"
    )
    inner += "print('pid', os.getpid(), flush=True); time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    parent = start(children, outer, tmp_path / "log")
    await logged(parent, "pid")
    grandchild = psutil.Process(int(parent.tail().split()[1]))
    parent.signal(signal.SIGKILL)
    await eventually(lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE)


#: Counts its SIGTERMs. The kernel tells a parent's end once for each thread, at moments that a test does not choose:
#: two more times are made here.
COUNTING = """
import os, signal, sys, time
from hisparse.cluster.children import PARENT_ENDED, stop_with_parent
got = []
signal.signal(signal.SIGTERM, lambda *_: got.append(1))
stop_with_parent(os.getppid())
print("ready", flush=True)
while not got:
    time.sleep(0.01)
for _ in range(2):
    signal.raise_signal(PARENT_ENDED)
print("got", len(got), flush=True)
"""


async def test_the_end_of_the_parent_is_one_sigterm_however_often_it_is_told(
    children: list[Child], tmp_path: Path
) -> None:
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {COUNTING!r}])"
    parent = start(children, outer, tmp_path / "log")
    await logged(parent, "ready")
    parent.signal(signal.SIGKILL)
    await logged(parent, "got")
    assert parent.tail().splitlines()[-1] == "got 1"


def test_orphaned_child_does_not_start() -> None:
    if (pid := os.fork()) == 0:  # prctl cannot be undone: ask for it in a child process
        try:
            die_with_parent(2**22 + 1)
        except Unavailable:
            os._exit(17)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 17
