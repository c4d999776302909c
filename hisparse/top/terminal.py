"""The terminal: its modes, its size, and drawing the lines that changed.

On entering: the alternate screen, no cursor, keys at once and without echo (keys for signals still work). On leaving,
all of this is undone. Only lines that have changed are written, so an idle cluster sends nothing over a slow link.

A terminal may be lost at any time (its ssh connection ends). Then `read` returns b"", and other calls do nothing.
"""

from __future__ import annotations

import os
import sys
import termios
import tty
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, TextIO

from rich.console import Console
from rich.text import Text

from protocol.errors import BadInput

ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[2J"
LEAVE: Final = "\x1b[?25h\x1b[?1049l"
READ_BYTES: Final = 1024


class Terminal:
    """stdin and stdout, which must be one terminal. Raises BadInput when they are not."""

    def __init__(self, source: TextIO = sys.stdin, target: TextIO = sys.stdout) -> None:
        if not (source.isatty() and target.isatty()) or os.environ.get("TERM") == "dumb":
            raise BadInput(
                "not a terminal that can draw",
                field="terminal",
                value=os.environ.get("TERM", ""),
                remedy="use: hisparse requests --watch",
            )
        self.descriptor = source.fileno()
        self._target = target.fileno()
        self._console = Console(file=target, highlight=False, legacy_windows=False)
        self._before: list[Any] = []
        self._shown: list[Text] = []
        self._size = (80, 24)

    def __enter__(self) -> Terminal:
        self.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def enter(self) -> None:
        self._before = termios.tcgetattr(self.descriptor)
        tty.setcbreak(self.descriptor, termios.TCSADRAIN)
        self._write(ENTER)
        self._shown = []

    def leave(self) -> None:
        self._write(LEAVE)
        with suppress(OSError, termios.error):
            termios.tcsetattr(self.descriptor, termios.TCSADRAIN, self._before)

    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        with suppress(OSError):
            columns, lines = os.get_terminal_size(self._target)
            self._size = columns, lines
        return self._size

    def read(self) -> bytes:
        """Bytes that were typed, waiting for some; b"" when the terminal is lost."""
        try:
            return os.read(self.descriptor, READ_BYTES)
        except OSError:  # EIO: the other end of a pseudo-terminal was closed
            return b""

    def draw(self, lines: Sequence[Text]) -> None:
        """Make the terminal show `lines`. If their number has changed, all are drawn, else those that differ."""
        written = []
        if len(lines) != len(self._shown):
            self._shown = []
            written.append("\x1b[0m\x1b[2J")
        for number, line in enumerate(lines):
            if number >= len(self._shown) or self._shown[number] != line:
                written.append(f"\x1b[{number + 1};1H{self._render(line)}\x1b[0m\x1b[K")
        self._shown = list(lines)
        if written:
            self._write("".join(written))

    def forget(self) -> None:
        """The content of the terminal is unknown: draw all lines next time."""
        self._shown = []

    def _render(self, line: Text) -> str:
        with self._console.capture() as captured:
            self._console.print(line, end="", no_wrap=True, crop=False, soft_wrap=True)
        return captured.get()

    def _write(self, text: str) -> None:
        data = text.encode(errors="replace")
        with suppress(OSError):
            while data:
                data = data[os.write(self._target, data) :]
