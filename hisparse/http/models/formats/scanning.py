"""Reading an output while it comes: a generator reads, and yields whenever it needs more. Pure.

What a reader decides depends on the text alone, never on how it was cut: it goes on only when what it looks for is
whole or can no longer come.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")
#: A reader of a part of the output: yields while it needs more text, and returns what it read.
Reading: TypeAlias = Generator[None, None, T]

#: Names of tools and of what models call.
NAME_CHARS_MAX: Final = 128
NAME: Final = re.compile(rf"[A-Za-z0-9_.:/-]{{0,{NAME_CHARS_MAX}}}")
#: Blanks that belong to the marker behind them. Those before are text, so that an output of blanks is told as it comes.
MARKER_BLANKS_MAX: Final = 1_024
_BLANKS: Final = re.compile(r"\s*")


class UnreadableOutput(Exception):
    """The text from `Scan.at` on is not what the format has there."""


class Unfinished(UnreadableOutput):
    """The output ended within what was being read."""


class Scan:
    """Text that has come and is not yet used up. `at`: what a reader has read of it. `used`: characters before it."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.used = 0
        self.ended = False
        self._blanks = -1, 0  # a place, and where the blanks from there on end, as far as they have come

    def feed(self, text: str) -> None:
        self.text += text

    def use(self, chars: int) -> str:
        """The first `chars`, which are gone then; `at` is the start again."""
        used, self.text, self.at = self.text[:chars], self.text[chars:], 0
        self._blanks = -1, 0
        self.used += len(used)
        return used

    # ------------------------------------------------------------ for readers

    def more(self) -> Reading[None]:
        """Raises Unfinished when nothing more will come."""
        if self.ended:
            raise Unfinished
        yield

    def until(self, end: str) -> Reading[str]:
        """What stands before the next `end`, which is read too. Raises Unfinished."""
        looked = self.at
        while (found := self.text.find(end, looked)) < 0:
            looked = max(self.at, len(self.text) - len(end) + 1)
            yield from self.more()
        read, self.at = self.text[self.at : found], found + len(end)
        return read

    def expect(self, *options: str) -> Reading[str]:
        """The option that stands next, blanks before it apart. Raises UnreadableOutput."""
        while True:
            start = self._blanks_end()
            for option in options:
                if self.text.startswith(option, start):
                    self.at = start + len(option)
                    return option
            rest = self.text[start : start + max(map(len, options))]
            if not any(option.startswith(rest) for option in options):
                raise UnreadableOutput
            yield from self.more()

    def name(self) -> Reading[str]:
        """A name of one character at least, blanks before it apart. Raises UnreadableOutput."""
        while True:
            start = self._blanks_end()
            found = NAME.match(self.text, start)
            assert found is not None
            if found.end() < len(self.text):
                if found.end() == start:
                    raise UnreadableOutput
                self.at = found.end()
                return found[0]
            yield from self.more()

    def starts_with(self, marker: str) -> Reading[bool]:
        """Return whether `marker` stands first, MARKER_BLANKS_MAX before it apart; it is used up then."""
        while True:
            start = self._blanks_end()
            if start - self.at > MARKER_BLANKS_MAX:
                return False
            if self.text.startswith(marker, start):
                self.use(start + len(marker))
                return True
            if self.ended or not marker.startswith(self.text[start:]):
                return False
            yield

    def skip_blanks(self) -> Reading[None]:
        """Use up blanks."""
        while True:
            self.use(self._blanks_end())
            if self.text or self.ended:
                return
            yield

    def is_over(self) -> Reading[bool]:
        """Return whether nothing but blanks comes; they are read."""
        while (end := self._blanks_end()) == len(self.text) and not self.ended:
            yield
        self.at = end
        return end == len(self.text)

    def _blanks_end(self) -> int:
        """Return where the blanks at `at` end. Blanks that it has seen before are not looked at again."""
        at, stop = self._blanks
        found = _BLANKS.match(self.text, stop if at == self.at else self.at)
        assert found is not None
        self._blanks = self.at, found.end()
        return found.end()

    def decided(self, *markers: str) -> int:
        """Return how many characters are neither a part of one of `markers` nor blanks that may belong to it."""
        most = min(len(self.text), max(map(len, markers)))
        size = next((n for n in range(most, 0, -1) if self._ends_within(n, markers)), 0)
        return self.before_blanks(len(self.text) - size)

    def before_blanks(self, end: int) -> int:
        """Return how many characters stand before the blanks of a marker at `end`."""
        first = max(0, end - MARKER_BLANKS_MAX)
        return first + len(self.text[first:end].rstrip())

    def _ends_within(self, chars: int, markers: Sequence[str]) -> bool:
        return any(chars <= len(marker) and self.text.endswith(marker[:chars]) for marker in markers)
