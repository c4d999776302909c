"""When basics.gc_policy collects, and that a front leaves no collection to Python."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import trio
import trio.testing

from basics import gc_policy
from basics.gc_policy import FULL_SHARE_MAX, MIDDLE, YOUNG_INTERVAL_S
from tests.support.limits import HANG_LIMIT_S

FRONT = """
import gc
import os
from hisparse.cli import main
from hisparse.http import service as server

async def run(self, stopping):
    gc.collect()
    print(gc.isenabled(), gc.get_freeze_count() > 10_000, len(gc.get_objects()) < 5_000, flush=True)
    os._exit(0)

server.HttpListener.run = run
main(["http", "--port", "0", "--metrics-port", "-1"])
"""


async def fulls(
    monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock, interval_s: float, takes_s: float, within_s: float
) -> list[float]:
    """When everything was collected, where that takes so long."""
    times: list[float] = []
    began = trio.current_time()

    def collect(generation: int = 2) -> int:
        if generation != MIDDLE:
            times.append(trio.current_time() - began)
            clock.jump(takes_s)
        return 0

    monkeypatch.setattr(gc, "collect", collect)
    with trio.move_on_after(within_s):
        await gc_policy.collect(interval_s)
    return times


async def test_full_collections_keep_their_interval(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    times = await fulls(monkeypatch, autojump_clock, 30.0, 0.0, 100.0)
    assert times == pytest.approx([30.0, 60.0, 90.0], abs=4 * YOUNG_INTERVAL_S)


async def test_long_full_collections_come_less_often(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """So that they take FULL_SHARE_MAX of the time at most."""
    takes_s = 0.1
    first, second, *_ = await fulls(monkeypatch, autojump_clock, 30.0, takes_s, 300.0)
    assert second - first >= takes_s / FULL_SHARE_MAX


@pytest.mark.process
def test_front_leaves_no_collection_to_python(tmp_path: Path) -> None:
    """By itself Python visits all objects of a front, for 25 to 40 ms, each time that many connections were opened."""
    env = {"HISPARSE_CLUSTER_RUNTIME_DIR": str(tmp_path), "PATH": ""}
    told = subprocess.run(
        [sys.executable, "-c", FRONT], capture_output=True, env=env, timeout=HANG_LIMIT_S, check=True, text=True
    )
    assert told.stdout.split() == ["False", "True", "True"], told.stderr
