"""Bytes of a terminal as names of keys: "up", "enter", "escape", or the character itself. Pure.

A key may arrive in pieces (over ssh a sequence can span two reads), and Escape is the first byte of every sequence. So
what may go on is kept until more comes; `flush`, called when nothing came for a moment, says that it was Escape.
"""

from __future__ import annotations

import codecs
import re
from typing import Final

SEQUENCES: Final = {
    **{b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down"},
    **{b"\x1b[5~": "page_up", b"\x1b[6~": "page_down"},
    **{b"\x1b[H": "home", b"\x1bOH": "home", b"\x1b[1~": "home", b"\x1b[7~": "home"},
    **{b"\x1b[F": "end", b"\x1bOF": "end", b"\x1b[4~": "end", b"\x1b[8~": "end"},
}
SINGLE: Final = {"\r": "enter", "\n": "enter", "\t": "tab", "\x7f": "backspace", "\x08": "backspace"}
#: A whole control sequence, and one that may still go on (ECMA-48, 5.4).
WHOLE: Final = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|O.|[^\[O])", re.DOTALL)
BEGUN: Final = re.compile(rb"\x1b(\[[0-?]*[ -/]*|O)?\Z")
#: Longest sequence that is waited for: a peer that sends more is not a keyboard.
SEQUENCE_BYTES_MAX: Final = 32


class KeyDecoder:
    """`feed` bytes as they arrive. Sequences of no key here are dropped whole."""

    def __init__(self) -> None:
        self._pending = b""
        self._text = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> list[str]:
        """The keys that `data` completes, by name (`SEQUENCES`) or as their character."""
        keys: list[str] = []
        data = self._pending + data
        self._pending = b""
        while data:
            head, escape, rest = data.partition(b"\x1b")
            keys += self._characters(head)
            data = escape + rest
            whole = WHOLE.match(data)
            if whole:
                name = SEQUENCES.get(whole[0])
                keys += [name] if name else []
                data = data[whole.end() :]
            elif data:
                self._pending = data if BEGUN.match(data) and len(data) <= SEQUENCE_BYTES_MAX else b""
                break
        return keys

    def flush(self) -> list[str]:
        """Nothing came for a moment: what waits for more is Escape, or nothing."""
        pending, self._pending = self._pending, b""
        return ["escape"] if pending == b"\x1b" else []

    @property
    def waiting(self) -> bool:
        return bool(self._pending)

    def _characters(self, data: bytes) -> list[str]:
        text = self._text.decode(data)
        return [SINGLE.get(c, c) for c in text if c in SINGLE or c.isprintable()]
