"""A process on a pseudo-terminal, and what its screen shows: a terminal emulator reads what it writes."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, Final

import pyte

from tests import ROOT

LIMIT_S: Final = 240.0


class Tty:
    """`lines` are what is on the screen now; `raw` all that was written."""

    def __init__(self, master: int, process: subprocess.Popen[bytes], columns: int, lines: int) -> None:
        self.process = process
        self.raw = b""
        self._master = master
        self._is_there = True
        self._emulator = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._emulator)
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def lines(self) -> list[str]:
        with self._lock:
            return [line.rstrip() for line in self._emulator.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def resize(self, columns: int, lines: int) -> None:
        with self._lock:
            self._emulator.resize(lines, columns)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process.send_signal(signal.SIGWINCH)

    def until(self, *texts: str) -> None:
        """Wait until the screen shows all of them."""
        give_up_at = time.monotonic() + LIMIT_S
        while not all(text in self.text for text in texts):
            assert time.monotonic() < give_up_at, f"no {texts} in:\n{self.text}"
            time.sleep(0.02)

    def vanish(self) -> None:
        """As when an ssh connection dies."""
        if self._is_there:
            os.close(self._master)
        self._is_there = False

    def modes(self) -> list[Any]:
        """Of the terminal, as its user would find them."""
        return termios.tcgetattr(self._master)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65_536)
            except OSError:
                return
            if not data:
                return
            with self._lock:
                self.raw += data
                self._stream.feed(data)


@contextmanager
def on_a_terminal(
    command: Sequence[str], environ: dict[str, str], columns: int = 80, lines: int = 24, stderr: IO[bytes] | None = None
) -> Iterator[Tty]:
    """Run `python -m hisparse.cli COMMAND`; killed at the end. `stderr` is the terminal by default."""
    master, slave = os.openpty()
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "hisparse.cli", *command],
        cwd=ROOT,
        env=inherited | {"TERM": "xterm-256color"} | environ,  # the size is that of the terminal: xdist exports another
        stdin=slave,
        stdout=slave,
        stderr=slave if stderr is None else stderr,
        start_new_session=True,
    )
    tty = Tty(master, process, columns, lines)
    try:
        yield tty
    finally:
        process.kill()
        process.wait()
        os.close(slave)
        tty.vanish()
