"""Bytes of a terminal as names of keys: "up", "enter", "escape", or the character itself. Pure.

A sequence may arrive in two reads (over ssh), and Escape is the first byte of every sequence. So a beginning is kept
until more bytes arrive. `flush`, called when none have arrived for a moment, takes it for the Escape key.
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
#: A whole control sequence, and the beginning of one (ECMA-48, 5.4).
WHOLE: Final = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|O.|[^\[O])", re.DOTALL)
BEGUN: Final = re.compile(rb"\x1b(\[[0-?]*[ -/]*|O)?\Z")
#: Longest beginning that is kept; no key has a longer sequence.
SEQUENCE_BYTES_MAX: Final = 32


class KeyDecoder:
    """Decodes bytes as they arrive. Unknown sequences are dropped."""

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
        """No byte arrived for a moment: a kept Escape is the key; another beginning is dropped."""
        pending, self._pending = self._pending, b""
        return ["escape"] if pending == b"\x1b" else []

    @property
    def waiting(self) -> bool:
        return bool(self._pending)

    def _characters(self, data: bytes) -> list[str]:
        text = self._text.decode(data)
        return [SINGLE.get(c, c) for c in text if c in SINGLE or c.isprintable()]
