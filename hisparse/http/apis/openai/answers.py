"""Outputs as OpenAI's objects of completions and chats: whole, or as the events of a stream. Pure.

An event of a stream is `data: JSON` and an empty line; the last is `data: [DONE]`. A chunk holds what the tokens so far
decide and no chunk before it held: a character that is split over tokens comes whole, with its last token, and a call
when it is whole. Log-probabilities come with the first chunk behind their tokens. What was pending at the end, and the
text before a stop string that no token carries, come with `finish_reason`.

Ids of calls are made from the request's id, the choice and the call's place in it, so that the same request has them
again.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Collection, Sequence
from typing import Any, Final, Protocol

import msgspec

from hisparse.http.apis.asks import Ask
from hisparse.http.apis.logprobs import ToldTokens
from hisparse.http.errors import error_body
from hisparse.http.models.formats.replies import PLAIN, Piece, Reasoning, ReplyParser, ReplyPlan, Text, ToolCall
from protocol.arrays import Int32Array
from protocol.errors import HiSparseError
from protocol.logprobs import NO_ROWS
from protocol.messages import Ended, ModelInfo
from protocol.text import Detokenizer

DONE: Final = b"data: [DONE]\n\n"
#: A comment line of the event stream: it tells proxies and sockets that the front is still there.
KEEPALIVE: Final = b": waiting\n\n"
#: Of the request's last word; whatever else ended an output is "stop".
LENGTH: Final = "length"
#: Where a token ended an output: one of the model's, or of the request's.
BY_TOKEN: Final = "eos"
#: Of an id that is made.
ID_CHARS: Final = 24


class Transcript:
    """What one choice says, as its tokens come. `stopped`: by a stop string. `told` are its log-probabilities; None:
    the ask has none. `end_ids` are the tokens by which the model itself ends an output."""

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
        """What is decided now and was not before. Token by token, so that what it counts does not depend on cuts.
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


class OpenAiAnswer:
    """What completions and chats have in common. `created` is in seconds since the epoch."""

    keepalive = KEEPALIVE
    object = ""
    chunk = ""

    def __init__(self, ask: Ask, created: int) -> None:
        self._ask = ask
        self._created = created

    def closing(self, transcripts: Sequence[Transcript]) -> list[bytes]:
        if not self._ask.include_usage:
            return [DONE]
        return [event_of(self._head(self.chunk) | {"choices": [], "usage": self._usage(transcripts)}), DONE]

    def failure(self, error: HiSparseError) -> bytes:
        """[DONE] does not follow."""
        return b"data: " + error_body(error) + b"\n\n"

    def _whole(self, choices: list[dict[str, Any]], transcripts: Sequence[Transcript]) -> bytes:
        return msgspec.json.encode(self._head(self.object) | {"choices": choices, "usage": self._usage(transcripts)})

    def _event(
        self, index: int, said: dict[str, Any], finish_reason: str | None, transcripts: Sequence[Transcript]
    ) -> bytes:
        told = transcripts[index].told if transcripts else None
        logprobs = self._logprobs(told) if told is not None and told.is_pending else None
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = self._head(self.chunk) | {"choices": [choice]}
        if self._ask.include_usage:
            chunk["usage"] = self._usage(transcripts) if self._ask.usage_in_every_chunk else None
        return event_of(chunk)

    def _logprobs(self, told: ToldTokens | None) -> dict[str, Any] | None:
        """Of the tokens that no event before had."""
        raise NotImplementedError

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self._ask.id, "object": name, "created": self._created, "model": self._ask.model}

    def _usage(self, transcripts: Sequence[Transcript]) -> dict[str, Any]:
        prompt, completion = self._ask.prompt_tokens, sum(it.tokens for it in transcripts)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached_tokens(self._ask, transcripts)},
        }
        if details := self._details(transcripts):
            usage["completion_tokens_details"] = details
        return usage

    def _details(self, transcripts: Sequence[Transcript]) -> dict[str, int]:
        """Of what the answer has; drafts are counted once their choice has ended. Rejected ones are no tokens of the
        completion, and do not count as such."""
        drafted = sum(it.drafted_tokens for it in transcripts)
        accepted = sum(it.accepted_tokens for it in transcripts)
        drafts = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        reasoning = {"reasoning_tokens": sum(it.reasoning_tokens for it in transcripts)}
        return (reasoning if self._ask.plan.reasons else {}) | (drafts if drafted else {})


class CompletionAnswer(OpenAiAnswer):
    """Texts, behind those of their prompts where the ask has echoes."""

    object = "text_completion"
    chunk = "text_completion"

    def whole(self, pieces: Sequence[Sequence[Piece]], transcripts: Sequence[Transcript]) -> bytes:
        choices = [
            {
                "index": index,
                "text": self._echo(index) + text_in(said),
                "logprobs": self._logprobs(transcript.told),
                "finish_reason": transcript.finish_reason,
            }
            for index, (said, transcript) in enumerate(zip(pieces, transcripts, strict=True))
        ]
        return self._whole(choices, transcripts)

    def opening(self) -> list[bytes]:
        return [self._event(index, {"text": echo}, None, ()) for index, echo in enumerate(self._ask.echoes)]

    def delta(self, index: int, pieces: Sequence[Piece], transcripts: Sequence[Transcript]) -> list[bytes]:
        return [self._event(index, {"text": text}, None, transcripts)] if (text := text_in(pieces)) else []

    def last(self, index: int, pieces: Sequence[Piece], transcripts: Sequence[Transcript]) -> list[bytes]:
        return [self._event(index, {"text": text_in(pieces)}, transcripts[index].finish_reason, transcripts)]

    def _logprobs(self, told: ToldTokens | None) -> dict[str, Any] | None:
        return None if told is None else told.completion()

    def _echo(self, index: int) -> str:
        return self._ask.echoes[index] if self._ask.echoes else ""


class ChatAnswer(OpenAiAnswer):
    """Messages of the assistant: reasoning apart, and calls with their ids."""

    object = "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(self, ask: Ask, created: int) -> None:
        super().__init__(ask, created)
        self._calls: Counter[int] = Counter()  # told so far, by choice

    def whole(self, pieces: Sequence[Sequence[Piece]], transcripts: Sequence[Transcript]) -> bytes:
        choices = [
            {
                "index": index,
                "message": self._message(index, said),
                "logprobs": self._logprobs(transcript.told),
                "finish_reason": _chat_reason(transcript),
            }
            for index, (said, transcript) in enumerate(zip(pieces, transcripts, strict=True))
        ]
        return self._whole(choices, transcripts)

    def opening(self) -> list[bytes]:
        """Who speaks."""
        first = {"delta": {"role": "assistant", "content": ""}}
        return [self._event(index, first, None, ()) for index in range(len(self._ask.choices))]

    def delta(self, index: int, pieces: Sequence[Piece], transcripts: Sequence[Transcript]) -> list[bytes]:
        return [self._event(index, {"delta": self._delta(index, piece)}, None, transcripts) for piece in pieces]

    def last(self, index: int, pieces: Sequence[Piece], transcripts: Sequence[Transcript]) -> list[bytes]:
        """The reason comes with the last piece where that is text, so that short answers have few events."""
        ends_with_text = bool(pieces) and isinstance(pieces[-1], Text)
        before = self.delta(index, pieces[:-1] if ends_with_text else pieces, transcripts)
        said = self._delta(index, pieces[-1]) if ends_with_text else {}
        return [*before, self._event(index, {"delta": said}, _chat_reason(transcripts[index]), transcripts)]

    def _logprobs(self, told: ToldTokens | None) -> dict[str, Any] | None:
        return None if told is None else told.chat()

    def _message(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        calls = [self._call(index, piece) for piece in pieces if isinstance(piece, ToolCall)]
        text, reasoning = text_in(pieces), reasoning_in(pieces)
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not text else text}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, Reasoning):
            return {"reasoning_content": piece.text}
        if isinstance(piece, Text):
            return {"content": piece.text}
        return {"tool_calls": [{"index": self._calls[index]} | self._call(index, piece)]}

    def _call(self, index: int, call: ToolCall) -> dict[str, Any]:
        made = made_id("call_", self._ask.id, index, self._calls[index])
        self._calls[index] += 1
        return {"id": made, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chat_reason(transcript: Transcript) -> str:
    return "tool_calls" if transcript.calls and transcript.finish_reason != LENGTH else transcript.finish_reason


def made_id(prefix: str, ask_id: str, choice: int, place: int) -> str:
    """Of a part of an answer: the same for the same request."""
    return prefix + hashlib.sha256(f"{ask_id}\0{choice}\0{place}".encode()).hexdigest()[:ID_CHARS]


def text_in(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Text))


def reasoning_in(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))


def cached_tokens(ask: Ask, transcripts: Sequence[Transcript]) -> int:
    """Of each prompt, which counts once, those that its first sample reused."""
    digests = [choice.prompt_digest for choice in ask.choices]
    firsts = (index for index, digest in enumerate(digests) if not index or digests[index - 1] != digest)
    return sum(transcripts[index].prefix_tokens for index in firsts if index < len(transcripts))


def model_card(model: ModelInfo, created: int) -> dict[str, Any]:
    """An entry of /v1/models; `max_model_len` is vLLM's name for the context."""
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "hisparse",
        "max_model_len": model.context_max_tokens,
    }


def event_of(content: dict[str, Any], name: str = "") -> bytes:
    """A server-sent event, of type `name` where the API has types."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(content) + b"\n\n"
