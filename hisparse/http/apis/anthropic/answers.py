"""Outputs as Anthropic's messages: whole, or as the events of a stream. Pure.

A stream is message_start, then each block as content_block_start, its deltas and content_block_stop, then message_delta
with why it ended, and message_stop. `input_tokens` are those that were computed: what was reused is in
`cache_read_input_tokens`, which is known at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from hisparse.http.apis.asks import Ask
from hisparse.http.apis.transcript import LENGTH, Transcript, cached_tokens, event_of, made_id
from hisparse.http.errors import anthropic_error
from hisparse.http.models.formats.replies import Piece, Reasoning, Text, ToolCall, merged
from protocol.errors import HiSparseError

_DELTAS: Final = {"text": "text_delta", "thinking": "thinking_delta"}


class MessagesAnswer:
    """One choice, whose pieces are blocks."""

    keepalive = event_of({"type": "ping"}, "ping")

    def __init__(self, ask: Ask, created: int) -> None:
        self._ask = ask
        self._blocks = 0  # begun so far
        self._open = ""  # the type of the block that has begun and not ended
        self._calls = 0

    def whole(self, pieces: Sequence[Sequence[Piece]], transcripts: Sequence[Transcript]) -> bytes:
        blocks = [self._block(piece) for piece in merged(pieces[0])]
        message = self._message(blocks) | self._end(transcripts[0]) | {"usage": self._usage(transcripts)}
        return msgspec.json.encode(message)

    def opening(self) -> list[bytes]:
        usage = {"input_tokens": self._ask.prompt_tokens, "output_tokens": 0}
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
        return [_event("message_start", message=message)]

    def delta(self, index: int, pieces: Sequence[Piece], transcripts: Sequence[Transcript]) -> list[bytes]:
        return [event for piece in pieces for event in self._events(piece)]

    def last(self, index: int, pieces: Sequence[Piece], transcripts: Sequence[Transcript]) -> list[bytes]:
        return [*self.delta(index, pieces, transcripts), *self._stop()]

    def closing(self, transcripts: Sequence[Transcript]) -> list[bytes]:
        usage = self._usage(transcripts)
        return [_event("message_delta", delta=self._end(transcripts[0]), usage=usage), _event("message_stop")]

    def failure(self, error: HiSparseError) -> bytes:
        return event_of(anthropic_error(error), "error")

    # ------------------------------------------------------------ parts

    def _message(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._ask.id, "type": "message", "role": "assistant", "model": self._ask.model}
        return head | {"content": blocks}

    def _block(self, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, ToolCall):
            return self._call(piece) | {"input": msgspec.Raw(piece.arguments.encode())}
        if isinstance(piece, Reasoning):
            return {"type": "thinking", "thinking": piece.text, "signature": ""}
        return {"type": "text", "text": piece.text}

    def _call(self, call: ToolCall) -> dict[str, Any]:
        made = made_id("toolu_", self._ask.id, 0, self._calls)
        self._calls += 1
        return {"type": "tool_use", "id": made, "name": call.name, "input": {}}

    def _events(self, piece: Piece) -> list[bytes]:
        if isinstance(piece, ToolCall):
            delta = {"type": "input_json_delta", "partial_json": piece.arguments}
            return [*self._stop(), *self._start(self._call(piece)), self._change(delta), *self._stop()]
        kind = "text" if isinstance(piece, Text) else "thinking"
        began = [] if self._open == kind else [*self._stop(), *self._start(self._block(type(piece)("")))]
        return [*began, self._change({"type": _DELTAS[kind], kind: piece.text})]

    def _start(self, block: dict[str, Any]) -> list[bytes]:
        self._open = block["type"]
        self._blocks += 1
        return [_event("content_block_start", index=self._blocks - 1, content_block=block)]

    def _change(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _stop(self) -> list[bytes]:
        if not self._open:
            return []
        self._open = ""
        return [_event("content_block_stop", index=self._blocks - 1)]

    def _end(self, transcript: Transcript) -> dict[str, Any]:
        """`stop_sequence` is null where several could have ended it: which one did is not known here."""
        stops = self._ask.stops
        if transcript.finish_reason == LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if transcript.stopped:
            return {"stop_reason": "stop_sequence", "stop_sequence": stops[0] if len(stops) == 1 else None}
        return {"stop_reason": "tool_use" if transcript.calls else "end_turn", "stop_sequence": None}

    def _usage(self, transcripts: Sequence[Transcript]) -> dict[str, Any]:
        cached = cached_tokens(self._ask, transcripts)
        return {
            "input_tokens": self._ask.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": transcripts[0].tokens,
        }


def _event(kind: str, **content: Any) -> bytes:
    return event_of({"type": kind} | content, kind)
