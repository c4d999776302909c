"""`hisparse top` as an operator has it: under tmux, over a real cluster of three workers and fifty requests."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import trio

from hisparse.client.client import Client
from protocol.messages import RequestDetail
from tests.support.cluster_rig import plant
from tests.support.top_rig import COLUMNS, LIMIT_S, LINES, REQUESTS, WORKERS, Tmux, watched_cluster

pytestmark = [
    pytest.mark.process,
    pytest.mark.deep,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux: apt-get install tmux"),
]


async def test_request_is_retracted_and_resumed_across_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests decode slowly, so that workers rest while screens are awaited."""
    (slow := tmp_path / "slow").touch()
    plant(monkeypatch, "slow-steps", slow)
    async with watched_cluster(tmp_path) as (cluster, tmux):
        screen = await tmux.until("connected", f"{WORKERS} of {WORKERS} workers", f"{REQUESTS} requests", "RUNNING")
        lines = screen.splitlines()
        assert len(lines) == LINES
        assert max(map(len, lines)) <= COLUMNS
        assert [line.split()[0] for line in lines if re.match(r" w\d ", line)] == ["w0", "w1", "w2"]

        chosen = await retract_by_key(tmux)
        async with cluster.client("test") as client:
            held = await client.request(chosen)
        assert held.row.held
        assert [event for event in events(held) if event != "resized"][-2:] == ["retract", "released"]

        tmux.press("/", *chosen, "Enter")
        await tmux.until(f">{chosen}")
        tmux.press("R")
        await tmux.until(f"resume {chosen}?")
        tmux.press("y")
        async with cluster.client("test") as client:
            resumed = await until_started_again(client, held)
        assert "resume" in events(resumed)
        assert "QUEUED" not in {line.state for line in resumed.history[len(held.history) :]}, "its rows were kept"

        before = cluster.coordinator.pid
        os.kill(before, signal.SIGSTOP)  # it is seen to be away, however soon the keeper restarts it
        await tmux.until("DISCONNECTED")
        os.kill(before, signal.SIGKILL)
        await tmux.until("  connected", f"{WORKERS} of {WORKERS} workers", f">{chosen}")
        tmux.press("q")


async def retract_by_key(tmux: Tmux) -> str:
    """Retract whatever runs and is selected; its id, once it is held."""
    tmux.press("Down", "Down", "Down", "r")
    question = re.search(r"retract (\S+) and hold it", await tmux.until("and hold it until it is resumed"))
    assert question
    tmux.press("y")
    await tmux.until("1 retracted (1 held)")
    return question[1]


async def until_started_again(client: Client, held: RequestDetail) -> RequestDetail:
    give_up_at = trio.current_time() + LIMIT_S
    while trio.current_time() < give_up_at:
        detail = await client.request(held.row.request_id)
        if "started" in events(detail)[len(events(held)) :]:
            return detail
        await trio.sleep(0.1)
    raise AssertionError(f"not resumed: {detail.history}")


def events(detail: RequestDetail) -> list[str]:
    return [line.event for line in detail.history]
