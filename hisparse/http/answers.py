"""Outputs as OpenAI's objects: whole, or as the events of a stream. Pure.

An event of a stream is `data: JSON` and an empty line; the last is `data: [DONE]`. A chunk holds the text that the
tokens so far decide and that no chunk before it held: a character that is split over tokens comes whole, with its last
token. What was pending at the end, and the text before a stop string that no token carries, come with `finish_reason`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from hisparse.http.asks import Ask
from hisparse.http.errors import error_body
from protocol.errors import HiSparseError
from protocol.messages import Ended, ModelInfo
from protocol.text import Detokenizer

DONE: Final = b"data: [DONE]\n\n"
#: A comment line of the event stream: it tells proxies and sockets that the front is still there.
KEEPALIVE: Final = b": waiting\n\n"
#: Of the request's last word; whatever else ended an output is "stop".
LENGTH: Final = "length"


class Transcript:
    """The text of one choice as its tokens come."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self.tokens = 0
        self.finish_reason = ""
        self.prefix_tokens = 0

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is decided now and was not before."""
        self.tokens += len(tokens)
        return self._detokenizer.push(tokens)

    def end(self, ended: Ended) -> str:
        """The rest of the text; `finish_reason` and `tokens` are final after it."""
        self.tokens = ended.generated_tokens
        self.prefix_tokens = ended.prefix_tokens
        self.finish_reason = LENGTH if ended.reason == LENGTH else "stop"
        return self._detokenizer.finish() + ended.tail_text


class Answer:
    """The objects that answer one ask. `created` is in seconds since the epoch."""

    def __init__(self, ask: Ask, created: int) -> None:
        self._ask = ask
        self._created = created

    def whole(self, texts: Sequence[str], transcripts: Sequence[Transcript]) -> bytes:
        """The body of an answer that is not streamed."""
        choices = [
            {"index": index, **self._said(text), "logprobs": None, "finish_reason": transcript.finish_reason}
            for index, (text, transcript) in enumerate(zip(texts, transcripts, strict=True))
        ]
        name = "chat.completion" if self._ask.is_chat else "text_completion"
        return msgspec.json.encode(self._head(name) | {"choices": choices, "usage": self._usage(transcripts)})

    def opening(self) -> list[bytes]:
        """The events before the first text: in a chat, who speaks."""
        if not self._ask.is_chat:
            return []
        return [
            self._event(index, {"delta": {"role": "assistant", "content": ""}}, None, ())
            for index in range(len(self._ask.choices))
        ]

    def delta(self, index: int, text: str, transcripts: Sequence[Transcript]) -> bytes:
        """The event of new text of choice `index`."""
        return self._event(index, self._written(text), None, transcripts)

    def last(self, index: int, text: str, transcripts: Sequence[Transcript]) -> bytes:
        """The last event of choice `index`, with the rest of its text."""
        return self._event(index, self._written(text), transcripts[index].finish_reason, transcripts)

    def closing(self, transcripts: Sequence[Transcript]) -> list[bytes]:
        """The events after all choices have ended."""
        if not self._ask.include_usage:
            return [DONE]
        return [_event(self._head(self._chunk) | {"choices": [], "usage": self._usage(transcripts)}), DONE]

    def _event(
        self, index: int, said: dict[str, Any], finish_reason: str | None, transcripts: Sequence[Transcript]
    ) -> bytes:
        choice = {"index": index, **said, "logprobs": None, "finish_reason": finish_reason}
        chunk = self._head(self._chunk) | {"choices": [choice]}
        if self._ask.include_usage:
            chunk["usage"] = self._usage(transcripts) if self._ask.usage_in_every_chunk else None
        return _event(chunk)

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self._ask.id, "object": name, "created": self._created, "model": self._ask.model}

    @property
    def _chunk(self) -> str:
        return "chat.completion.chunk" if self._ask.is_chat else "text_completion"

    def _said(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}} if self._ask.is_chat else {"text": text}

    def _written(self, text: str) -> dict[str, Any]:
        if not self._ask.is_chat:
            return {"text": text}
        return {"delta": {"content": text} if text else {}}

    def _usage(self, transcripts: Sequence[Transcript]) -> dict[str, Any]:
        prompt, completion = self._ask.prompt_tokens, sum(it.tokens for it in transcripts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens(transcripts)},
        }

    def _cached_tokens(self, transcripts: Sequence[Transcript]) -> int:
        """Of each prompt, which counts once, those that its first sample reused."""
        digests = [choice.prompt_digest for choice in self._ask.choices]
        firsts = (index for index, digest in enumerate(digests) if not index or digests[index - 1] != digest)
        return sum(transcripts[index].prefix_tokens for index in firsts if index < len(transcripts))


def failure_event(error: HiSparseError) -> bytes:
    """The last event of a stream that cannot go on; [DONE] does not follow."""
    return b"data: " + error_body(error) + b"\n\n"


def model_card(model: ModelInfo, created: int) -> dict[str, Any]:
    """An entry of /v1/models; `max_model_len` is vLLM's name for the context."""
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "hisparse",
        "max_model_len": model.context_max_tokens,
    }


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
