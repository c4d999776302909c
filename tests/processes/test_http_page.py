"""The page for people before real processes: a conversation, its life at the coordinator, and a drain, seen live."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.page_rig import HEIGHT, WIDTH, answered, conversing, say
from tests.support.browser_rig import CHROMIUM

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not CHROMIUM, reason="needs Debian's chromium"),
]


def test_conversation_and_drain_are_seen_live(tmp_path: Path) -> None:
    with conversing(tmp_path) as (up, page):
        say(page, "one", 150)
        answered(page)
        assert page.text("#turns li:last-child span:last-of-type")
        say(page, "two", 600)
        page.until("document.getElementById('state').textContent === 'RUNNING'")
        page.until("Number(document.getElementById('speed').textContent) > 0")
        assert page.text("#worker") == "w0"
        assert up.hisparse("drain", "w0", "--deadline", "600").returncode == 0
        page.until("document.getElementById('health').className === 'bad'")
        assert "w0" in page.text("#health") or "drain" in page.text("#health") or "worker" in page.text("#health")
        page.evaluate("document.getElementById('stop').click()")
        answered(page)
        assert "stopped" in page.text("#life")
        assert up.hisparse("undrain", "w0").returncode == 0
        page.until("document.getElementById('health').textContent === 'ok'")
        say(page, "three", 20)
        answered(page)
        assert int(page.text("#cached").split()[0]) > 0
        page.screenshot(tmp_path / "page.png", WIDTH, HEIGHT)
        assert (tmp_path / "page.png").stat().st_size > 10_000
        assert page.defects == []
