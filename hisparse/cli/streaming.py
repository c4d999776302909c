"""Outputs on stdout: text as it completes, raw ids, or JSON. Prompts and outputs are tokenized here, at the client."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from hisparse.client.client import Client, run_client
from hisparse.client.token_stream import TokenStream
from hisparse.client.tokenizer_cache import fetch_tokenizer
from hisparse.console.options import EXIT_FAILED, EXIT_INTERRUPTED
from hisparse.console.output import note, write_json, write_line
from protocol.errors import BadInput, InternalError
from protocol.messages import Ended, Sampling
from protocol.text import Tokenizer
from protocol.transport.keys import Insecure, PeerKey

FINISHED: Final = "FINISHED"


@dataclass
class Follow:
    """How an output is shown, and its stream.

    `output` is table (text as it arrives), json (one object at the end) or jsonl (one object per arrival and one at the
    end). `raw` shows token ids instead of text.
    """

    endpoint: str
    output: str
    raw: bool = False
    role: str = "client"
    key: PeerKey | Insecure | None = None
    stream: TokenStream | None = None

    def run(self, action: Callable[[Client], Awaitable[int]]) -> int:
        """Run `action` on a connection; returns its exit code. After Ctrl-C, prints how to attach again."""
        try:
            return run_client(self.endpoint, action, role=self.role, name="hisparse", key=self.key)
        except KeyboardInterrupt:
            if self.stream is not None:
                name = self.stream.request_id
                note(f"\n{name} goes on; hisparse attach {name} --from {self.stream.offset}, or hisparse abort {name}")
            return EXIT_INTERRUPTED

    async def show(self, stream: TokenStream, tokenizer: Tokenizer | None) -> int:
        """Print the output until the request ends; returns 0 when it finished, 1 when it was aborted or failed."""
        self.stream = stream
        sink = _make_sink(self.output, tokenizer, stream.request_id)
        start = stream.offset
        async for tokens in stream:
            sink.push(start, [int(token) for token in tokens])
            start = stream.offset
        if stream.ended is None:
            raise InternalError("the stream ended without Ended", field="request_id", value=stream.request_id)
        sink.end(stream.ended)
        if stream.ended.outcome != FINISHED:
            note(f"{stream.request_id} {stream.ended.outcome}: {stream.ended.reason}")
            return EXIT_FAILED
        return 0


def submit_and_follow(
    follow: Follow,
    prompt: str | Sequence[int],
    sampling: Sampling,
    *,
    request_id: str,
    priority: int,
    prefill_mode: str,
    detach: bool,
) -> int:
    """Submit `prompt` (text, or ids) and show its output; with `detach` print only the request's id."""

    async def action(client: Client) -> int:
        tokenizer = None if follow.raw else await fetch_tokenizer(client)
        ids = tokenizer.encode(prompt) if tokenizer and isinstance(prompt, str) else [int(token) for token in prompt]
        if not ids:
            raise BadInput("empty prompt", field="prompt", value="", remedy="give it at least one token")
        if detach:
            accepted = await client.submit_detached(
                ids, sampling, request_id=request_id, priority=priority, prefill_mode=prefill_mode
            )
            write_line(accepted) if follow.output == "table" else write_json({"request_id": accepted})
            return 0
        stream = await client.submit(ids, sampling, request_id=request_id, priority=priority, prefill_mode=prefill_mode)
        return await follow.show(stream, tokenizer)

    return follow.run(action)


def attach_and_follow(follow: Follow, request_id: str, offset: int) -> int:
    """Show the output of a request from generated position `offset` on."""

    async def action(client: Client) -> int:
        tokenizer = None if follow.raw else await fetch_tokenizer(client)
        return await follow.show(await client.attach(request_id, offset), tokenizer)

    return follow.run(action)


# ---------------------------------------------------------------- sinks


class _Sink(Protocol):
    def push(self, start: int, tokens: list[int]) -> None: ...

    def end(self, ended: Ended) -> None: ...


class _Text:
    """Decodes tokens as they arrive; the end adds `tail_text`."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._detokenizer = tokenizer.detokenizer() if tokenizer else None

    def push(self, tokens: list[int]) -> str:
        return self._detokenizer.push(tokens) if self._detokenizer else ""

    def end(self, ended: Ended) -> str:
        return self._detokenizer.finish() + ended.tail_text if self._detokenizer else ""


class _TextSink:
    def __init__(self, text: _Text) -> None:
        self._text = text

    def push(self, start: int, tokens: list[int]) -> None:
        sys.stdout.write(self._text.push(tokens))
        sys.stdout.flush()

    def end(self, ended: Ended) -> None:
        write_line(self._text.end(ended))


class _IdSink:
    def push(self, start: int, tokens: list[int]) -> None:
        sys.stdout.write("".join(f"{token} " for token in tokens))
        sys.stdout.flush()

    def end(self, ended: Ended) -> None:
        write_line("")


class _JsonSink:
    """One object at the end, or (`each`) one per arrival and a last one without tokens."""

    def __init__(self, text: _Text, request_id: str, *, each: bool) -> None:
        self._text = text
        self._request_id = request_id
        self._each = each
        self._tokens: list[int] = []
        self._pieces: list[str] = []

    def push(self, start: int, tokens: list[int]) -> None:
        piece = self._text.push(tokens)
        if self._each:
            write_json({"request_id": self._request_id, "start": start, "tokens": tokens, "text": piece})
            sys.stdout.flush()
        else:
            self._tokens += tokens
            self._pieces.append(piece)

    def end(self, ended: Ended) -> None:
        last = {
            "request_id": self._request_id,
            "outcome": ended.outcome,
            "reason": ended.reason,
            "generated_tokens": ended.generated_tokens,
        }
        tail = self._text.end(ended)
        output = {"text": tail} if self._each else {"tokens": self._tokens, "text": "".join([*self._pieces, tail])}
        write_json(last | output)


def _make_sink(output: str, tokenizer: Tokenizer | None, request_id: str) -> _Sink:
    text = _Text(tokenizer)
    if output == "table":
        return _TextSink(text) if tokenizer else _IdSink()
    return _JsonSink(text, request_id, each=output == "jsonl")
