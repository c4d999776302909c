"""An output as what it says: reasoning, text, calls. While it comes, and the same for any cut of it. Pure.

    [<think>] reasoning </think> text  call  call  text
    [<think>] reasoning  call  call

Where the prompt ends with <think> the output begins within the reasoning. Blanks beside a marker belong to the marker,
of those before it MARKER_BLANKS_MAX.
Whatever is not what the format has there is text, to the last character, and so is a call that the output breaks off.

Models forget </think> before a call. Calls end the reasoning where the model itself ended the output with them: only
blanks and calls stand behind the first whole one. Else they are reasoning. So what may be such calls is told once
</think> or the end has come.

A call is told when it is whole. Rejected: its arguments piece by piece, as they come. A call that turns out to be none,
or that breaks off, would have been announced by then, and could be text no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, TypeAlias

from hisparse.http.models.formats.scanning import Reading, Scan, Unfinished, UnreadableOutput

THINK: Final = "<think>"
THINK_END: Final = "</think>"
#: Of an output, from a call in its reasoning on, that waits to be told. What is longer is reasoning.
HELD_CHARS_MAX: Final = 256 * 1024
#: Looks behind a marker of a call in the reasoning of one output: each may go through all that is held. Further calls
#: in it are reasoning.
LOOKS_MAX: Final = 256


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
    too, and not text. `think`, `think_end`: the markers of reasoning; an output that has none may begin with the
    second (`may_begin_with_end`)."""

    reasons: bool = False
    is_within: bool = False
    syntax: CallSyntax | None = None
    many: bool = True
    schemas: Schemas = field(default_factory=dict)
    may_reason: bool = False
    think: str = THINK
    think_end: str = THINK_END
    may_begin_with_end: bool = False


#: All is text.
PLAIN: Final = ReplyPlan()


class ReplyParser:
    """One output: `push` what comes, then `finish`.

    Characters `reasoning_begin` to `reasoning_end` of the output, markers between them included, are known to be
    reasoning. `may_reason`: what follows may be, too.
    """

    def __init__(self, plan: ReplyPlan = PLAIN) -> None:
        self._plan = plan
        self._scan = Scan()
        self._pieces: list[Piece] = []
        self._calls_told = 0
        self._ended_itself = False
        self.reasoning_begin = 0
        self.reasoning_end = 0
        self.may_reason = plan.reasons
        self._steps = self._read()
        next(self._steps)

    def push(self, text: str) -> list[Piece]:
        """What the output says by now and was not told before."""
        if text:
            self._scan.feed(text)
            next(self._steps)
        return self._taken()

    def finish(self, *, ended_itself: bool = False) -> list[Piece]:
        """The rest; nothing may be pushed after it. `ended_itself`: the model ended the output, and no limit did."""
        self._scan.ended, self._ended_itself = True, ended_itself
        for _ in self._steps:
            pass
        return self._taken()

    def _taken(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    # ------------------------------------------------------------ the reader

    def _read(self) -> Reading[None]:
        yield
        if self._plan.reasons and (self._plan.is_within or (yield from self._scan.starts_with(self._plan.think))):
            self.reasoning_begin = self.reasoning_end = self._scan.used
            yield from self._scan.skip_blanks()
            yield from self._reasoning()
        else:
            self.may_reason = False
            if self._plan.may_begin_with_end and (yield from self._scan.starts_with(self._plan.think_end)):
                yield from self._scan.skip_blanks()
        while not self._scan.ended or self._scan.text:
            yield from self._text()

    def _reasoning(self) -> Reading[None]:
        """Reasoning, up to THINK_END, to calls in its place, or to the end."""
        scan, syntax, think_end = self._scan, self._plan.syntax, self._plan.think_end
        looks = 0
        while syntax is not None:
            blanks = yield from self._stream(Reasoning, think_end, syntax.start)
            looks += 1
            if blanks is None or scan.text.startswith(think_end):
                break
            try:
                if (yield from self._ends_with_calls(syntax)):
                    self.may_reason = False
                    return
            except UnreadableOutput:
                self._tell(Reasoning, blanks + scan.use(scan.at))
                syntax = syntax if looks < LOOKS_MAX else None
            else:
                self._tell(Reasoning, blanks)
                syntax = None
        yield from self._stream(Reasoning, think_end)
        if scan.text:
            scan.use(len(think_end))
            self.reasoning_end, self.may_reason = scan.used, False
            yield from scan.skip_blanks()

    def _ends_with_calls(self, syntax: CallSyntax) -> Reading[bool]:
        """Return whether the model ended the output with calls, of which the first stands here. Uses nothing up. Raises
        UnreadableOutput where none stands here; `at` is how far the text was read then."""
        scan, ahead, looked, think_end = self._scan, Scan(), 0, self._plan.think_end
        reader = _only_calls(ahead, syntax, self._plan.schemas)
        while True:
            if scan.text.find(think_end, looked) >= 0:
                return False
            looked = max(0, len(scan.text) - len(think_end) + 1)
            ahead.feed(scan.text[len(ahead.text) : HELD_CHARS_MAX + 1])
            ahead.ended = scan.ended and len(ahead.text) == len(scan.text)
            try:
                next(reader)
            except StopIteration as read:
                return bool(read.value) and self._ended_itself
            except UnreadableOutput:
                scan.at = ahead.at
                raise
            if len(ahead.text) > HELD_CHARS_MAX:
                return False
            yield

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
            yield from _calls(self._scan, syntax, self._plan.schemas, self._plan.many, self._tell_call)
        except UnreadableOutput as error:
            read = len(self._scan.text) if isinstance(error, Unfinished) else self._scan.at
            self._tell(Text, (blanks if self._calls_told == told else "") + self._scan.use(read))
        else:
            self._scan.use(self._scan.at)
            yield from self._scan.skip_blanks()

    def _tell_call(self, call: ToolCall) -> None:
        """Tell `call`, and use up what has been read."""
        self._scan.use(self._scan.at)
        self._pieces.append(call)
        self._calls_told += 1

    def _stream(self, kind: type[Reasoning] | type[Text], *markers: str) -> Reading[str | None]:
        """Tell what stands before the first of `markers`, which is left to its reader. The blanks before it; None: none
        came."""
        scan = self._scan
        while (found := min((at for at in map(scan.text.find, markers) if at >= 0), default=-1)) < 0:
            self._tell(kind, scan.use(scan.decided(*markers)))
            if scan.ended:
                self._tell(kind, scan.use(len(scan.text)))
                return None
            yield
        said = scan.before_blanks(found)
        before = scan.use(found)
        self._tell(kind, before[:said])
        return before[said:]

    def _all_text(self) -> Reading[None]:
        self._tell(Text, self._scan.use(len(self._scan.text)))
        if not self._scan.ended:
            yield

    def _tell(self, kind: type[Reasoning] | type[Text], text: str) -> None:
        if text:
            self._pieces.append(kind(text))
        if kind is Reasoning:
            self.reasoning_end = self._scan.used


def _calls(
    scan: Scan, syntax: CallSyntax, schemas: Schemas, many: bool, tell: Callable[[ToolCall], None]
) -> Reading[None]:
    """Read the calls of one `start`, which stands first. Raises UnreadableOutput."""
    yield from scan.expect(syntax.start)
    if syntax.next_call:
        yield from scan.expect(syntax.next_call)
    while True:
        tell(ToolCall(*(yield from syntax.read(scan, schemas))))
        if not syntax.next_call:
            return
        options = (syntax.next_call, syntax.block_end) if many else (syntax.block_end,)
        if (yield from scan.expect(*options)) == syntax.block_end:
            return


def _only_calls(scan: Scan, syntax: CallSyntax, schemas: Schemas) -> Reading[bool]:
    """Return whether calls and blanks are all that comes. Raises UnreadableOutput where no call comes first."""
    read: list[ToolCall] = []
    try:
        while True:
            yield from _calls(scan, syntax, schemas, True, read.append)
            if (yield from scan.is_over()):
                return True
    except UnreadableOutput:
        if read:
            return False
        raise


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours of one kind as one: a whole output, however it came."""
    whole: list[Piece] = []
    for kind, neighbours in groupby(pieces, type):
        if kind is ToolCall:
            whole += neighbours
        else:
            whole.append(kind("".join(piece.text for piece in neighbours if not isinstance(piece, ToolCall))))
    return whole
