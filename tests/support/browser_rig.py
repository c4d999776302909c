"""Chromium without a window, driven over pipes by its DevTools protocol: one page, its script, its console.

Messages are JSON, each ended by a zero byte; the browser reads them at descriptor 3 and writes at 4.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

CHROMIUM: Final = shutil.which("chromium") or ""
FLAGS: Final = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run", "--disable-dev-shm-usage", "--remote-debugging-pipe", "--hide-scrollbars"),
)
#: Of one command, and of what a page is to show, on a machine whose cores are busy.
LIMIT_S: Final = 90.0
POLL_S: Final = 0.1


class Browser:
    """`problems`: what the console logged as an error or a warning, violations of the page's policy among them."""

    def __init__(self, commands: int, events: int) -> None:
        self.problems: list[str] = []
        self._commands = commands
        self._events = events
        self._read = b""
        self._numbers = 0
        target = self._call("Target.createTarget", "", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", "", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    @property
    def defects(self) -> list[str]:
        """Problems that the page should not have: not answers without a key, and looks at a request too early."""
        return [it for it in self.problems if not re.search("401|favicon|503|404.*/v1/requests/", it)]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Of the page. Raises RuntimeError for what the browser refuses."""
        return self._call(method, self._session, **parameters)

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of a script's expression, which is awaited."""
        told = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in told:
            raise RuntimeError(f"{expression}: {told['exceptionDetails']}")
        return told["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until it is true."""
        end = time.monotonic() + LIMIT_S
        while not (value := self.evaluate(expression)):
            if time.monotonic() > end:
                raise TimeoutError(f"{expression}: {self.evaluate('document.body.innerText')}")
            time.sleep(POLL_S)
        return value

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))

    def screenshot(self, path: Path, width: int, height: int) -> None:
        """A PNG."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _call(self, method: str, session: str, **parameters: Any) -> dict[str, Any]:
        self._numbers += 1
        number = self._numbers
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (told := self._next()).get("id") != number:
            self._note(told)
        if "error" in told:
            raise RuntimeError(f"{method}: {told['error']}")
        result: dict[str, Any] = told["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            piece = os.read(self._events, 1 << 16)
            if not piece:
                raise EOFError("the browser has ended")
            self._read += piece
        message, _, self._read = self._read.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        return told

    def _note(self, event: dict[str, Any]) -> None:
        entry = event.get("params", {}).get("entry", {})
        if event.get("method") == "Log.entryAdded" and entry["level"] in ("error", "warning"):
            self.problems.append(f"{entry['text']} {entry.get('url', '')}")
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(event["params"]["exceptionDetails"]))


@contextmanager
def browser(directory: Path) -> Iterator[Browser]:
    """Its profile is in `directory`, and fresh."""
    commands_read, commands = os.pipe()
    events, events_write = os.pipe()
    redirected = f'exec "$@" 3<&{commands_read} 4>&{events_write}'
    process = subprocess.Popen(
        ["bash", "-c", redirected, "bash", CHROMIUM, *FLAGS, f"--user-data-dir={directory / 'profile'}"],
        pass_fds=(commands_read, events_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(commands_read)
    os.close(events_write)
    try:
        yield Browser(commands, events)
    finally:
        os.killpg(process.pid, 9)
        process.wait()
        os.close(commands)
        os.close(events)
