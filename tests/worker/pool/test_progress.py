"""Progress of a long start: lines now and then, a bar on a terminal, one last line with the rate either way."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from worker.pool import host_pool as room
from worker.pool.host_pool import progress


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> logging.Logger:
    caplog.set_level(logging.INFO)
    return logging.getLogger("test.progress")


def test_progress_lines_are_rate_limited_and_end_with_the_rate(
    log: logging.Logger, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(room.time, "monotonic", lambda: clock[0])
    with progress("pool touched", 4 << 30, log, "pool touch") as advance:
        for _ in range(64):
            clock[0] += 0.25
            advance(64 << 20)
    seen = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert [line["percent"] for line in seen[:-1]] == [31, 62, 93]
    assert seen[-1] == {"bytes": 4 << 30, "seconds": 16.0, "gb_per_s": 0.27}


def test_terminal_gets_a_bar_without_lines(
    log: logging.Logger, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(room, "LINE_INTERVAL_S", 0.0)
    with progress("pool touched", 1_000, log, "pool touch") as advance:
        for _ in range(10):
            advance(100)
    assert "pool touched" in terminal.getvalue()
    assert len(caplog.records) == 1
