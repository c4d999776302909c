"""The page for people, in Debian's Chromium: what models write stays text, and its policy is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest
import trio

from protocol.settings import HttpSettings
from tests.support.agents_rig import agents_rig
from tests.support.browser_rig import CHROMIUM, Browser, browser
from tests.support.http_rig import KEY, front_rig
from tests.support.limits import HANG_LIMIT_S

needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="needs Debian's chromium")

#: What a page that trusted it would run.
HOSTILE: Final = (
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>&amp; <b>bold</b>"
)


def say(page: Browser, text: str) -> None:
    page.evaluate(f"document.getElementById('text').value = {json.dumps(text)}")
    page.evaluate("document.getElementById('send').click()")
    page.until("!document.getElementById('send').disabled")


@needs_chromium
@pytest.mark.timeout(300)
async def test_page_shows_outputs_as_text_and_the_life_of_its_request(tmp_path: Path) -> None:
    def converse(url: str) -> None:
        with browser(tmp_path) as page:
            page.go(url)
            page.until("document.getElementById('health').textContent === 'ok'")
            say(page, "<i>hello</i>")
            assert "Authorization: Bearer KEY" in page.text(".error"), "without a key the error is told"
            page.evaluate(f"document.getElementById('key').value = '{KEY}'")
            page.evaluate("document.getElementById('clear').click()")
            say(page, "<i>hello</i>")
            assert page.text("#turns li.user span:last-of-type") == "<i>hello</i>"
            assert page.text("#turns li.assistant .reasoning") == "Hm."
            assert HOSTILE in page.text("#turns li.assistant span:last-of-type")
            assert (
                page.evaluate("document.querySelectorAll('#turns img, #turns script, #turns b, #turns i').length") == 0
            )
            assert page.evaluate("document.title") == "HiSparse"
            assert page.text("#id").startswith("page-")
            assert page.text("#cached") == "7 tokens"
            assert "answered" in page.text("#life")
            say(page, "again")
            assert page.evaluate("document.querySelectorAll('#turns li').length") == 4
            assert page.defects == []
            # The policy refuses what a script that got in would ask for.
            blocked = "fetch('http://example.invalid/').then(() => 'sent', () => 'blocked')"
            assert page.evaluate(blocked) == "blocked"
            assert any("Content Security Policy" in it for it in page.problems)

    def script(prompt: str) -> str:
        return f"<think>Hm.</think>{HOSTILE}"

    async with agents_rig(tmp_path, script, keys=(KEY,)) as rig:
        scheduler = rig.front.gateway.scheduler
        finish = scheduler.finish
        scheduler.finish = lambda name, *a, **k: finish(name, *a, **(k | {"prefix_tokens": 7}))  # type: ignore[method-assign]
        await trio.to_thread.run_sync(converse, f"{rig.url}/", abandon_on_cancel=True)
    assert "again" in rig.model.prompts[-1]
    assert "&amp; <b>bold</b>" in rig.model.prompts[-1], "the conversation goes on"


async def test_page_has_a_policy_and_can_be_switched_off(tmp_path: Path) -> None:
    async with front_rig(tmp_path / "on", HttpSettings()) as rig:
        peer = rig.open("GET", "/")
        with trio.fail_after(HANG_LIMIT_S):
            await peer.complete.wait()
    assert peer.headers["content-security-policy"].startswith("default-src 'self';")
    assert (peer.status, peer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert not any(text in peer.body for text in (b"http:", b"https:", b"onclick", b"style="))
    async with front_rig(tmp_path / "off", HttpSettings(page=False)) as rig:
        for path in ("/", "/page.js", "/page.css"):
            peer = rig.open("GET", path)
            await peer.answer()
            assert peer.status == 404
