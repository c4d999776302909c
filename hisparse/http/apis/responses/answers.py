"""Outputs as OpenAI's responses: whole, or as the events of a stream. Pure.

A response's output is a list of items: reasoning, messages, calls. In a stream each is announced, grows by deltas, and
is told once more when it is whole; the last event holds the whole response. Events are numbered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from hisparse.http.apis.asks import Ask
from hisparse.http.apis.transcript import KEEPALIVE, LENGTH, Transcript, cached_tokens, event_of, made_id
from hisparse.http.errors import message_of, param_of
from hisparse.http.models.formats.replies import Piece, Reasoning, Text, ToolCall, merged
from protocol.errors import HiSparseError

DONE: Final = "completed"


class ResponsesAnswer:
    """One choice, whose pieces are items."""

    keepalive = KEEPALIVE

    def __init__(self, ask: Ask, created: int) -> None:
        self._ask = ask
        self._created = created
        self._events = 0
        self._items: list[dict[str, Any]] = []  # whole ones
        self._open: Text | Reasoning | None = None  # the item that grows, with its text so far

    def whole(self, pieces: Sequence[Sequence[Piece]], transcripts: Sequence[Transcript]) -> bytes:
        items = [self._item(piece, place, DONE) for place, piece in enumerate(merged(pieces[0]))]
        return msgspec.json.encode(self._ended(_cut(items, transcripts[0]), transcripts))

    def opening(self) -> list[bytes]:
        response = self._response("in_progress", [])
        return [self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress")]

    def delta(self, index: int, pieces: Sequence[Piece], transcripts: Sequence[Transcript]) -> list[bytes]:
        return [event for piece in pieces for event in self._told(piece)]

    def last(self, index: int, pieces: Sequence[Piece], transcripts: Sequence[Transcript]) -> list[bytes]:
        told = self.delta(index, pieces, transcripts)
        return [*told, *self._close("incomplete" if transcripts[0].finish_reason == LENGTH else DONE)]

    def closing(self, transcripts: Sequence[Transcript]) -> list[bytes]:
        response = self._ended(self._items, transcripts)
        return [self._event(f"response.{response['status']}", response=response)]

    def failure(self, error: HiSparseError) -> bytes:
        told = {"code": error.code, "message": message_of(error), "param": param_of(error) or None}
        return self._event("error", **told)

    # ------------------------------------------------------------ the response

    def _ended(self, items: list[dict[str, Any]], transcripts: Sequence[Transcript]) -> dict[str, Any]:
        cut = transcripts[0].finish_reason == LENGTH
        response = self._response("incomplete" if cut else DONE, items)
        response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        return response | {"usage": self._usage(transcripts)}

    def _response(self, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._ask.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._ask.model,
            "output": items,
            "previous_response_id": None,
            "store": False,
            "background": False,
            "truncation": "disabled",
            "usage": None,
            **self._ask.settings,
        }

    def _usage(self, transcripts: Sequence[Transcript]) -> dict[str, Any]:
        """`cache_write_tokens` is no count of ours: what is kept depends on what comes later."""
        prompt, output = self._ask.prompt_tokens, transcripts[0].tokens
        cached = cached_tokens(self._ask, transcripts)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": transcripts[0].reasoning_tokens},
            "total_tokens": prompt + output,
        }

    # ------------------------------------------------------------ items

    def _item(self, piece: Piece, place: int, status: str) -> dict[str, Any]:
        """With `in_progress` it is announced: it is empty then."""
        empty = status == "in_progress"
        if isinstance(piece, ToolCall):
            return {
                "type": "function_call",
                "id": self._id("fc_", place),
                "call_id": self._id("call_", place),
                "name": piece.name,
                "arguments": "" if empty else piece.arguments,
                "status": status,
            }
        content = [] if empty else [_part(piece)]
        if isinstance(piece, Reasoning):
            item = {"type": "reasoning", "id": self._id("rs_", place), "summary": [], "content": content}
            return item | {"status": status}
        item = {"type": "message", "id": self._id("msg_", place), "role": "assistant", "content": content}
        return item | {"status": status}

    def _id(self, prefix: str, place: int) -> str:
        return made_id(prefix, self._ask.id, 0, place)

    # ------------------------------------------------------------ events

    def _told(self, piece: Piece) -> list[bytes]:
        if isinstance(piece, ToolCall):
            return [*self._close(DONE), *self._call(piece)]
        if type(piece) is type(self._open):
            assert self._open is not None
            self._open = type(piece)(self._open.text + piece.text)
            return [self._grown(piece)]
        events = [*self._close(DONE), self._added(piece)]
        self._open = piece
        return [*events, self._place("response.content_part.added", part=_part(type(piece)(""))), self._grown(piece)]

    def _call(self, call: ToolCall) -> list[bytes]:
        place = len(self._items)
        item = self._item(call, place, DONE)
        where = {"item_id": item["id"], "output_index": place}
        kind = "response.function_call_arguments"
        events = [
            self._added(call),
            self._event(f"{kind}.delta", delta=call.arguments, **where),
            self._event(f"{kind}.done", arguments=call.arguments, name=call.name, **where),
        ]
        return [*events, self._finished(item)]

    def _close(self, status: str) -> list[bytes]:
        """Tell the item that grew as a whole."""
        said, self._open = self._open, None
        if said is None:
            return []
        item = self._item(said, len(self._items), status)
        done = self._place(f"{_kind(said)}.done", said, text=said.text, **_logprobs(said))
        part = self._place("response.content_part.done", said, part=_part(said))
        return [done, part, self._finished(item)]

    def _finished(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        return self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _added(self, piece: Piece) -> bytes:
        place = len(self._items)
        item = self._item(piece, place, "in_progress")
        return self._event("response.output_item.added", output_index=place, item=item)

    def _grown(self, piece: Text | Reasoning) -> bytes:
        return self._place(f"{_kind(piece)}.delta", delta=piece.text, **_logprobs(piece))

    def _place(self, event: str, piece: Text | Reasoning | None = None, **content: Any) -> bytes:
        """An event of the part of the item that grows, or that grew: `piece`."""
        said = self._open if piece is None else piece
        prefix = "rs_" if isinstance(said, Reasoning) else "msg_"
        place = len(self._items)
        return self._event(event, item_id=self._id(prefix, place), output_index=place, content_index=0, **content)

    def _event(self, kind: str, **content: Any) -> bytes:
        number, self._events = self._events, self._events + 1
        return event_of({"type": kind, "sequence_number": number} | content, kind)


def _cut(items: list[dict[str, Any]], transcript: Transcript) -> list[dict[str, Any]]:
    """The last item is incomplete where the output was cut in it; calls are told when they are whole."""
    if items and transcript.finish_reason == LENGTH and items[-1]["type"] != "function_call":
        items[-1]["status"] = "incomplete"
    return items


def _kind(piece: Text | Reasoning) -> str:
    return "response.reasoning_text" if isinstance(piece, Reasoning) else "response.output_text"


def _part(piece: Text | Reasoning) -> dict[str, Any]:
    if isinstance(piece, Reasoning):
        return {"type": "reasoning_text", "text": piece.text}
    return {"type": "output_text", "text": piece.text, "annotations": [], "logprobs": []}


def _logprobs(piece: Text | Reasoning) -> dict[str, Any]:
    return {"logprobs": []} if isinstance(piece, Text) else {}
