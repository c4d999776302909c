"""Outputs on stdout: text as it completes, raw ids, or JSON. Prompts and outputs are tokenized here, at the client."""

from __future__ import annotations

import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio

from basics.request_states import TERMINAL
from hisparse.client.client import Client, run_client
from hisparse.client.token_stream import TokenStream
from hisparse.client.tokenizer_cache import fetch_tokenizer
from hisparse.console.options import EXIT_FAILED, EXIT_INTERRUPTED
from hisparse.console.output import note, write_json, write_line
from hisparse.console.rows import count_text, swap_text
from protocol.arrays import Int32Array
from protocol.errors import BadInput, HiSparseError, InternalError, Unavailable
from protocol.logprobs import TokenLogprobs
from protocol.messages import Ended, RequestRow, Sampling
from protocol.text import Tokenizer
from protocol.transport.keys import Insecure, PeerKey

FINISHED: Final = "FINISHED"
#: When no token has come for this long, a person is told what the request waits for.
SILENCE_S: Final = 2.0
#: Longest wait for the coordinator's answer to what a request waits for.
ANSWER_LIMIT_S: Final = 2.0


def _ended_by_ctrl_c(action: Callable[[Client], Awaitable[int]]) -> Callable[[Client], Awaitable[int]]:
    """`action`, which Ctrl-C ends at a checkpoint, with KeyboardInterrupt: trio alone would raise it between any two
    instructions, amid what must not be left half done. For the main thread."""

    async def run(client: Client) -> int:
        token = trio.lowlevel.current_trio_token()
        with trio.CancelScope() as scope:
            before = signal.signal(signal.SIGINT, lambda *_: token.run_sync_soon(scope.cancel, idempotent=True))
            try:
                return await action(client)
            finally:
                signal.signal(signal.SIGINT, before)
        raise KeyboardInterrupt

    return run


@dataclass
class Follow:
    """How an output is shown, and its stream.

    `output` is table (text as it arrives), json (one object at the end) or jsonl (one object per arrival and one at the
    end). `raw` shows token ids instead of text. `timeout_s`: seconds until the request must have ended; None: no limit.
    `tells_waits`: what it waits for goes to stderr. `tells_end`: so do its id, tokens and hit rate at the end.
    """

    endpoint: str
    output: str
    raw: bool = False
    role: str = "client"
    key: PeerKey | Insecure | None = None
    timeout_s: float | None = None
    tells_waits: bool = False
    tells_end: bool = False
    stream: TokenStream | None = None
    _told: str = field(default="", init=False)  # kind of the wait that was told last

    def run(self, action: Callable[[Client], Awaitable[int]]) -> int:
        """Run `action` on a connection; returns its exit code. After Ctrl-C, prints how to attach again."""
        try:
            timed = action if self.timeout_s is None else lambda client: self._timed(client, action)
            return run_client(self.endpoint, _ended_by_ctrl_c(timed), role=self.role, name="hisparse", key=self.key)
        except KeyboardInterrupt:
            if self.stream is not None:
                name = self.stream.request_id
                note(f"{name} goes on; hisparse attach {name} --from {self.stream.offset}, or hisparse abort {name}")
            return EXIT_INTERRUPTED

    async def _timed(self, client: Client, action: Callable[[Client], Awaitable[int]]) -> int:
        """Raises Unavailable past `timeout_s`; the request goes on."""
        assert self.timeout_s is not None
        with trio.move_on_after(self.timeout_s):
            return await action(client)
        limit = f"after {self.timeout_s:g} s"
        if self.stream is None:
            raise Unavailable(
                f"no answer {limit}", field="--timeout", value=self.timeout_s, remedy="see: hisparse requests"
            )
        name, row = self.stream.request_id, await _row_of(client, self.stream.request_id)
        state = "" if row is None or row.state in TERMINAL else f", it {_wait_text(row) or f'is {row.state}'}"
        raise Unavailable(
            f"not ended {limit}{state}",
            field="request_id",
            value=name,
            remedy=f"it goes on: hisparse attach {name} --from {self.stream.offset}, or hisparse abort {name}",
        )

    async def show(self, client: Client, stream: TokenStream, tokenizer: Tokenizer | None) -> int:
        """Print the output until the request ends; returns 0 when it finished, 1 when it was aborted or failed."""
        self.stream = stream
        sink = _make_sink(self.output, tokenizer, stream.request_id)
        start = stream.offset
        try:
            while (tokens := await self._next(client, stream)) is not None:
                sink.push(start, [int(token) for token in tokens], stream.logprobs)
                start = stream.offset
        except BaseException:  # what is said of it begins on a line of its own
            sink.break_line()
            raise
        if stream.ended is None:
            raise InternalError("the stream ended without Ended", field="request_id", value=stream.request_id)
        sink.end(stream.ended)
        return await self._end(client, stream, stream.ended)

    async def _end(self, client: Client, stream: TokenStream, ended: Ended) -> int:
        said = f"{stream.request_id} {ended.outcome}: {ended.reason}"
        if ended.outcome != FINISHED:
            note(said)
            return EXIT_FAILED
        if self.tells_end:
            row = await _row_of(client, stream.request_id)
            note(
                f"{said}, {count_text(ended.generated_tokens, 'token')}"
                + (f", swap-in: {swap_text(row)}" if row else "")
            )
        return 0

    async def _next(self, client: Client, stream: TokenStream) -> Int32Array | None:
        """The next tokens, None after the last."""
        while True:
            with trio.move_on_after(SILENCE_S):
                tokens = await anext(stream, None)
                self._told = ""
                return tokens
            if self.tells_waits:
                await self._tell_wait(client, stream)

    async def _tell_wait(self, client: Client, stream: TokenStream) -> None:
        """Say what the request waits for, once for each kind of wait."""
        row = await _row_of(client, stream.request_id)
        if not stream.unfinished:
            return
        kind, text = (row.waits_for, _wait_text(row)) if row else ("answer", "waits: the coordinator does not answer")
        if kind != self._told and text:
            note(f"{stream.request_id} {text}")
        self._told = kind


async def _row_of(client: Client, request_id: str) -> RequestRow | None:
    """None: the coordinator does not answer, or does not know the request."""
    with trio.move_on_after(ANSWER_LIMIT_S):
        try:
            return (await client.request(request_id)).row
        except HiSparseError:
            return None
    return None


def _wait_text(row: RequestRow) -> str:
    return f"waits: {row.reason}" if row.waits_for else ""


def submit_and_follow(
    follow: Follow,
    prompt: str | Sequence[int],
    sampling: Sampling,
    *,
    request_id: str,
    priority: int,
    prefill_mode: str,
    draft_tokens: int,
    detach: bool,
) -> int:
    """Submit `prompt` (text, or ids) and show its output; with `detach` print only the request's id."""

    async def action(client: Client) -> int:
        tokenizer = None if follow.raw else await fetch_tokenizer(client)
        ids = tokenizer.encode(prompt) if tokenizer and isinstance(prompt, str) else [int(token) for token in prompt]
        if not ids:
            raise BadInput("empty prompt", field="prompt", value="", remedy="give it at least one token")
        submit = client.submit_detached if detach else client.submit
        submitted = await submit(
            ids,
            sampling,
            request_id=request_id,
            priority=priority,
            prefill_mode=prefill_mode,
            draft_tokens=draft_tokens,
        )
        if isinstance(submitted, str):
            write_line(submitted) if follow.output == "table" else write_json({"request_id": submitted})
            return 0
        return await follow.show(client, submitted, tokenizer)

    return follow.run(action)


def attach_and_follow(follow: Follow, request_id: str, offset: int) -> int:
    """Show the output of a request from generated position `offset` on."""

    async def action(client: Client) -> int:
        tokenizer = None if follow.raw else await fetch_tokenizer(client)
        return await follow.show(client, await client.attach(request_id, offset), tokenizer)

    return follow.run(action)


# ---------------------------------------------------------------- sinks


class _Sink(Protocol):
    def push(self, start: int, tokens: list[int], logprobs: list[TokenLogprobs]) -> None:
        """`logprobs` has one of each token, or none."""

    def break_line(self) -> None:
        """End a line that was begun: the output stops here for now."""

    def end(self, ended: Ended) -> None: ...


class _Text:
    """Decodes tokens as they arrive; the end adds `tail_text`."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._detokenizer = tokenizer.detokenizer() if tokenizer else None

    def push(self, tokens: list[int]) -> str:
        return self._detokenizer.push(tokens) if self._detokenizer else ""

    def end(self, ended: Ended) -> str:
        return self._detokenizer.finish() + ended.tail_text if self._detokenizer else ""


class _LineSink:
    """Writes pieces as they come; `_is_begun`: the last one left the cursor in a line."""

    _is_begun = False

    def write(self, piece: str) -> None:
        if piece:  # before it is written: Ctrl-C may come at once
            self._is_begun = not piece.endswith("\n")
        sys.stdout.write(piece)
        sys.stdout.flush()

    def break_line(self) -> None:
        if self._is_begun:
            self.write("\n")


class _TextSink(_LineSink):
    def __init__(self, text: _Text) -> None:
        self._text = text

    def push(self, start: int, tokens: list[int], logprobs: list[TokenLogprobs]) -> None:
        self.write(self._text.push(tokens))

    def end(self, ended: Ended) -> None:
        self.write(self._text.end(ended) + "\n")


class _IdSink(_LineSink):
    def push(self, start: int, tokens: list[int], logprobs: list[TokenLogprobs]) -> None:
        self.write("".join(f"{token} " for token in tokens))

    def end(self, ended: Ended) -> None:
        self.write("\n")


class _JsonSink:
    """One object at the end, or (`each`) one per arrival and a last one without tokens."""

    def __init__(self, text: _Text, request_id: str, *, each: bool) -> None:
        self._text = text
        self._request_id = request_id
        self._each = each
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._pieces: list[str] = []

    def push(self, start: int, tokens: list[int], logprobs: list[TokenLogprobs]) -> None:
        piece = self._text.push(tokens)
        if self._each:
            arrival = {"request_id": self._request_id, "start": start, "tokens": tokens, "text": piece}
            write_json(arrival | _shown(logprobs))
            sys.stdout.flush()
        else:
            self._tokens += tokens
            self._logprobs += logprobs
            self._pieces.append(piece)

    def break_line(self) -> None:
        """It writes whole lines."""

    def end(self, ended: Ended) -> None:
        last = {
            "request_id": self._request_id,
            "outcome": ended.outcome,
            "reason": ended.reason,
            "generated_tokens": ended.generated_tokens,
        }
        tail = self._text.end(ended)
        output = {"text": tail} if self._each else {"tokens": self._tokens, "text": "".join([*self._pieces, tail])}
        write_json(last | output | _shown(self._logprobs))


def _shown(logprobs: list[TokenLogprobs]) -> dict[str, object]:
    """A field with one object for each token; nothing where none were asked for."""
    told = [{"logprob": it.logprob, "top": [{"token": token, "logprob": p} for token, p in it.top]} for it in logprobs]
    return {"logprobs": told} if told else {}


def _make_sink(output: str, tokenizer: Tokenizer | None, request_id: str) -> _Sink:
    text = _Text(tokenizer)
    if output == "table":
        return _TextSink(text) if tokenizer else _IdSink()
    return _JsonSink(text, request_id, each=output == "jsonl")
