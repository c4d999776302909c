"""Outputs as OpenAI's objects of completions and chats: whole, or as the events of a stream. Pure.

An event of a stream is `data: JSON` and an empty line; the last is `data: [DONE]`. A chunk holds what the tokens so far
decide and no chunk before it held: a character that is split over tokens comes whole, with its last token, and a call
when it is whole. Log-probabilities come with the first chunk behind their tokens. What was pending at the end, and the
text before a stop string that no token carries, come with `finish_reason`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from hisparse.http.apis.asks import Ask
from hisparse.http.apis.logprobs import ToldTokens
from hisparse.http.apis.transcript import (
    KEEPALIVE,
    LENGTH,
    Transcript,
    cached_tokens,
    event_of,
    made_id,
    reasoning_in,
    text_in,
)
from hisparse.http.errors import error_body
from hisparse.http.models.formats.replies import Piece, Reasoning, Text, ToolCall
from protocol.errors import HiSparseError
from protocol.messages import ModelInfo

DONE: Final = b"data: [DONE]\n\n"


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


def model_card(model: ModelInfo, created: int) -> dict[str, Any]:
    """An entry of /v1/models; `max_model_len` is vLLM's name for the context."""
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "hisparse",
        "max_model_len": model.context_max_tokens,
    }
