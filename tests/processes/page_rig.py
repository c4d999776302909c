"""`python -m tests.processes.page_rig docs/page.png`: the picture of the chat page in the guide, from real processes.

A tiny checkpoint, a worker, a front, Chromium: two questions, whose answers are random letters, as that model is.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.processes.test_up import Up, running
from tests.support.browser_rig import Browser, browser
from worker.runners.tiny import write_tiny_checkpoint

WIDTH: Final = 1_100
HEIGHT: Final = 640


@contextmanager
def conversing(directory: Path) -> Iterator[tuple[Up, Browser]]:
    """A cluster whose model is tiny and keeps prefixes, and a browser at its page."""
    model = directory / "tiny-glm"
    write_tiny_checkpoint(model, "glm-5", index_topk=16, context_max_tokens=8_192, layers=2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HISPARSE_COORDINATOR_PREFIX_REUSE", "own")
        run = directory / "run"
        run.mkdir(mode=0o700)
        options = ("--hot-size-classes", "64", "--log-level", "warning")
        with running(model, run, "--http", "127.0.0.1:0", *options) as up, browser(directory) as page:
            page.go(up.ready["http"]["url"])
            page.until("document.getElementById('health').textContent === 'ok'")
            yield up, page


def say(page: Browser, text: str, tokens: int) -> None:
    """Returns once the answer comes."""
    page.evaluate(f"document.getElementById('tokens').value = {tokens}")
    page.evaluate("document.getElementById('temperature').value = 0")
    page.evaluate(f"document.getElementById('text').value = {json.dumps(text)}")
    page.evaluate("document.getElementById('send').click()")
    page.until("document.querySelector('#turns li:last-child span:last-of-type').textContent")


def answered(page: Browser) -> None:
    page.until("!document.getElementById('send').disabled")


def main(path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="hs-") as place, conversing(Path(place)) as (_, page):
        say(page, "What is a hot buffer, and where are the rows that it does not hold while a request decodes?", 120)
        answered(page)
        say(page, "And what when it is full?", 400)
        answered(page)
        page.screenshot(path, WIDTH, HEIGHT)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
