"""Outputs of choices as they come, and what the answers of all APIs have in common. Pure.

Ids of parts of an answer are made from the request's id, the choice and the part's place in it, so that the same
request has them again.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, Final, Protocol

import msgspec

from hisparse.http.apis.asks import Ask
from hisparse.http.apis.logprobs import ToldTokens
from hisparse.http.models.formats.replies import PLAIN, Piece, Reasoning, ReplyParser, ReplyPlan, Text, ToolCall
from protocol.arrays import Int32Array
from protocol.errors import HiSparseError
from protocol.logprobs import NO_ROWS
from protocol.messages import Ended
from protocol.text import Detokenizer

#: A comment line of the event stream: it tells proxies and sockets that the front is still there.
KEEPALIVE: Final = b": waiting\n\n"
#: Of the request's last word; whatever else ended an output is "stop".
LENGTH: Final = "length"
#: Where a token ended an output: one of the model's, or of the request's.
BY_TOKEN: Final = "eos"
#: Of an id that is made.
ID_CHARS: Final = 24


class Transcript:
    """The pieces of one choice, as its tokens come. `stopped`: by a stop string. `told` are its log-probabilities;
    None: the ask has none. `end_ids` are the tokens by which the model itself ends an output."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        plan: ReplyPlan = PLAIN,
        told: ToldTokens | None = None,
        end_ids: Collection[int] = (),
    ) -> None:
        self.told = told
        self._detokenizer = detokenizer
        self._chars = 0
        self._parser = ReplyParser(plan)
        self._offsets: deque[int] = deque()  # of tokens that may be reasoning
        self._end_ids = end_ids
        self._ends = False  # with the last token, which is one of them
        self.tokens = 0
        self.reasoning_tokens = 0
        self.calls = 0
        self.finish_reason = ""
        self.stopped = False
        self.prefix_tokens = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0

    def push(self, tokens: Sequence[int], rows: Int32Array = NO_ROWS) -> list[Piece]:
        """Return the pieces that these tokens decide. They are read one by one, so that counts do not depend on cuts.
        `rows`, int32[tokens, words], are their log-probabilities if they are asked for."""
        self.tokens += len(tokens)
        pieces: list[Piece] = []
        offsets: list[int] = []
        may_reason = self._parser.may_reason
        for token in tokens:
            offsets.append(self._chars)
            text = self._detokenizer.push((token,))
            self._chars += len(text)
            pieces += self._parser.push(text)
            self._ends = token in self._end_ids
        if may_reason:
            self._offsets.extend(offsets)
        if self.told is not None:
            self.told.add(tokens, offsets, rows)
        return self._counted(pieces)

    def end(self, ended: Ended) -> list[Piece]:
        """The rest; `finish_reason` and `tokens` are final after it."""
        self.tokens = ended.generated_tokens
        self.prefix_tokens = ended.prefix_tokens
        self.drafted_tokens, self.accepted_tokens = ended.drafted_tokens, ended.accepted_tokens
        self.stopped = ended.reason == "stop"
        self.finish_reason = LENGTH if ended.reason == LENGTH else "stop"
        pieces = self._counted(self._parser.push(self._detokenizer.finish() + ended.tail_text))
        return pieces + self._rest(ended_itself=ended.reason == BY_TOKEN and self._ends)

    def break_off(self) -> list[Piece]:
        """The rest of an output that fails, but for a character that is not whole."""
        return self._rest(ended_itself=False)

    def _rest(self, *, ended_itself: bool) -> list[Piece]:
        pieces = self._counted(self._parser.finish(ended_itself=ended_itself))
        if self._parser.may_reason:
            self.reasoning_tokens += len(self._offsets)
        return pieces

    def _counted(self, pieces: list[Piece]) -> list[Piece]:
        self.calls += sum(isinstance(piece, ToolCall) for piece in pieces)
        parser, offsets = self._parser, self._offsets
        while offsets and offsets[0] < parser.reasoning_end:
            self.reasoning_tokens += offsets.popleft() >= parser.reasoning_begin
        if not parser.may_reason:
            offsets.clear()
        return pieces


class Answer(Protocol):
    """The objects that answer one ask, in the words of its API. Pieces are of one choice, as its Transcript has
    them."""

    @property
    def keepalive(self) -> bytes:
        """An event that says nothing."""
        ...

    def whole(self, pieces: Sequence[Sequence[Piece]], transcripts: Sequence[Transcript]) -> bytes:
        """The body of an answer that is not streamed."""
        ...

    def opening(self) -> list[bytes]:
        """The events before the first piece."""
        ...

    def delta(self, index: int, pieces: Sequence[Piece], transcripts: Sequence[Transcript]) -> list[bytes]:
        """The events of new pieces of choice `index`."""
        ...

    def last(self, index: int, pieces: Sequence[Piece], transcripts: Sequence[Transcript]) -> list[bytes]:
        """The last events of choice `index`, with the rest of its pieces."""
        ...

    def closing(self, transcripts: Sequence[Transcript]) -> list[bytes]:
        """The events after all choices have ended."""
        ...

    def failure(self, error: HiSparseError) -> bytes:
        """The last event of a stream that cannot go on; none of `closing` follows."""
        ...


def made_id(prefix: str, ask_id: str, choice: int, place: int) -> str:
    """Make the id of a part of an answer: the same for the same request."""
    return prefix + hashlib.sha256(f"{ask_id}\0{choice}\0{place}".encode()).hexdigest()[:ID_CHARS]


def text_in(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Text))


def reasoning_in(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))


def cached_tokens(ask: Ask, transcripts: Sequence[Transcript]) -> int:
    """Count the tokens that prompts reused; the first sample of a prompt counts for all of its samples."""
    digests = [choice.prompt_digest for choice in ask.choices]
    firsts = (index for index, digest in enumerate(digests) if not index or digests[index - 1] != digest)
    return sum(transcripts[index].prefix_tokens for index in firsts if index < len(transcripts))


def event_of(content: dict[str, Any], name: str = "") -> bytes:
    """A server-sent event, of type `name` where the API has types."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(content) + b"\n\n"
