"""An output as what it says: reasoning, text, calls. While it comes, and the same for any cut of it. Pure.

    [<think>] reasoning </think> text  call  call  text

Where the prompt ends with <think> the output begins within the reasoning. Blanks beside a marker belong to the marker.
Whatever is not what the format has there is text, to the last character, and so is a call that the output breaks off.

A call is told when it is whole. Rejected: its arguments piece by piece, as they come. A call that turns out to be none,
or that breaks off, would have been announced by then, and could be text no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from hisparse.http.models.formats.scanning import Reading, Scan, Unfinished, UnreadableOutput

THINK: Final = "<think>"
THINK_END: Final = "</think>"


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class ToolCall:
    """`arguments` is a JSON object, as text."""

    name: str
    arguments: str


Piece: TypeAlias = Reasoning | Text | ToolCall
#: Parameters of each tool, as JSON schemas, by its name.
Schemas: TypeAlias = Mapping[str, Mapping[str, Any] | None]


@dataclass(frozen=True)
class CallSyntax:
    """How a model writes calls.

    `read` reads one call and returns its name and its arguments. `start` opens a call, or a block of them that ends
    with `block_end`, in which each begins with `next_call`.
    """

    start: str
    read: Callable[[Scan, Schemas], Reading[tuple[str, str]]]
    next_call: str = ""
    block_end: str = ""


@dataclass(frozen=True)
class ReplyPlan:
    """What an output is read as. `reasons`: it may begin with reasoning; `is_within`: it begins in the middle of it.
    `may_reason`: one that is held to a grammar may begin with reasoning, too.
    `syntax`: None where no call is expected, so that all that follows is text. `many`: calls after the first are calls
    too, and not text."""

    reasons: bool = False
    is_within: bool = False
    syntax: CallSyntax | None = None
    many: bool = True
    schemas: Schemas = field(default_factory=dict)
    may_reason: bool = False


#: All is text.
PLAIN: Final = ReplyPlan()


class ReplyParser:
    """One output: `push` what comes, then `finish`."""

    def __init__(self, plan: ReplyPlan = PLAIN) -> None:
        self._plan = plan
        self._scan = Scan()
        self._pieces: list[Piece] = []
        self._calls_told = 0
        self.is_reasoning = plan.reasons and plan.is_within
        self._steps = self._read()
        next(self._steps)

    def push(self, text: str) -> list[Piece]:
        """What the output says by now and was not told before."""
        if text:
            self._scan.feed(text)
            next(self._steps)
        return self._taken()

    def finish(self) -> list[Piece]:
        """The rest; nothing may be pushed after it."""
        self._scan.ended = True
        for _ in self._steps:
            pass
        return self._taken()

    def _taken(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    # ------------------------------------------------------------ the reader

    def _read(self) -> Reading[None]:
        yield
        if self._plan.reasons and (self._plan.is_within or (yield from self._scan.starts_with(THINK))):
            self.is_reasoning = True
            yield from self._scan.skip_blanks()
            yield from self._stream(Reasoning, THINK_END)
            self.is_reasoning = False
            yield from self._scan.skip_blanks()
        while not self._scan.ended or self._scan.text:
            yield from self._text()

    def _text(self) -> Reading[None]:
        """Text, and the call or block of calls after it."""
        syntax = self._plan.syntax
        if syntax is None or (self._calls_told and not self._plan.many):
            yield from self._all_text()
            return
        blanks = yield from self._stream(Text, syntax.start)
        if blanks is None:
            return
        told = self._calls_told
        try:
            yield from self._calls(syntax)
        except UnreadableOutput as error:
            read = len(self._scan.text) if isinstance(error, Unfinished) else self._scan.at
            self._tell(Text, (blanks if self._calls_told == told else "") + self._scan.use(read))
        else:
            yield from self._scan.skip_blanks()

    def _calls(self, syntax: CallSyntax) -> Reading[None]:
        """Of one `start`, which stands first. What was told is used up. Raises UnreadableOutput."""
        yield from self._scan.expect(syntax.start)
        if syntax.next_call:
            yield from self._scan.expect(syntax.next_call)
        while True:
            name, arguments = yield from syntax.read(self._scan, self._plan.schemas)
            self._scan.use(self._scan.at)
            self._pieces.append(ToolCall(name, arguments))
            self._calls_told += 1
            if not syntax.next_call:
                return
            options = (syntax.next_call, syntax.block_end) if self._plan.many else (syntax.block_end,)
            if (yield from self._scan.expect(*options)) == syntax.block_end:
                self._scan.use(self._scan.at)
                return

    def _stream(self, kind: type[Reasoning] | type[Text], marker: str) -> Reading[str | None]:
        """Tell what stands before `marker`. Of reasoning the marker is used up, of text it is left to its reader. The
        blanks before it; None: it did not come."""
        scan = self._scan
        while (found := scan.text.find(marker)) < 0:
            self._tell(kind, scan.use(scan.decided(marker)))
            if scan.ended:
                self._tell(kind, scan.use(len(scan.text)))
                return None
            yield
        before = scan.use(found)
        said = before.rstrip()
        self._tell(kind, said)
        if kind is Reasoning:
            scan.use(len(marker))
        return before[len(said) :]

    def _all_text(self) -> Reading[None]:
        self._tell(Text, self._scan.use(len(self._scan.text)))
        if not self._scan.ended:
            yield

    def _tell(self, kind: type[Reasoning] | type[Text], text: str) -> None:
        if text:
            self._pieces.append(kind(text))


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours of one kind as one: a whole output, however it came."""
    whole: list[Piece] = []
    for piece in pieces:
        last = whole[-1] if whole else None
        if isinstance(piece, Text) and isinstance(last, Text):
            whole[-1] = Text(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            whole[-1] = Reasoning(last.text + piece.text)
        else:
            whole.append(piece)
    return whole
