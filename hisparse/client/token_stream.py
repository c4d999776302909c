"""The output of one request at the client: chunks of tokens, each position once and in order (I5), with their rows of
log-probabilities where the request asks for them."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np
import trio

from protocol.arrays import Int32Array
from protocol.errors import HiSparseError, ProtocolError
from protocol.logprobs import NO_ROWS, TokenLogprobs, read_rows
from protocol.messages import Ended


class StreamNews(Protocol):
    """What the reader of a stream waits for. `set` is called where tokens arrive, `pause` and `wait` where it reads."""

    def set(self) -> None: ...

    async def pause(self) -> None:
        """Let other tasks run, and be cancelled."""

    async def wait(self) -> None:
        """Wait until `set` was called since the last `wait` returned."""


class TrioNews:
    def __init__(self) -> None:
        self._event = trio.Event()

    def set(self) -> None:
        self._event.set()

    async def pause(self) -> None:
        await trio.lowlevel.checkpoint()

    async def wait(self) -> None:
        await self._event.wait()
        self._event = trio.Event()


class TokenStream:
    """The output of one request from generated position `start` on. One reader; made by Client.submit and attach.

    `offset` is the position of the next chunk, `logprobs` are those of the tokens that were returned last. `ended` is
    the request's Ended, once the iteration is over. The reader may run in another thread than the
    connection: chunks pass through a deque, and the end is set behind the last one.
    """

    def __init__(self, request_id: str, start: int, news: StreamNews) -> None:
        self.request_id = request_id
        self.offset = start
        self.ended: Ended | None = None
        self.rows: Int32Array = NO_ROWS  # int32[tokens, words], of the tokens that were returned last
        self._received = start
        self._chunks: deque[tuple[Int32Array, Int32Array]] = deque()
        self._failure: HiSparseError | None = None
        self._is_over = False
        self._news = news

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Int32Array:
        """The next tokens, int32[n], at least one. Cancelled: none were taken.

        Raises Unavailable (the coordinator did not come back) or NotFound (it no longer knows the request).
        """
        await self._news.pause()
        while True:
            failure, is_over = self._failure, self._is_over  # read before the chunks, which arrive first
            if chunks := [self._chunks.popleft() for _ in range(len(self._chunks))]:
                break
            if failure is not None:
                raise failure
            if is_over:
                raise StopAsyncIteration
            await self._news.wait()
        tokens = np.concatenate([it for it, _ in chunks])
        self.rows = np.concatenate([rows for _, rows in chunks])
        self.offset += len(tokens)
        return tokens

    async def collect(self) -> Int32Array:
        """All tokens from `offset` to the end, int32[n]. Raises as iterating does. Cancelled: tokens read are lost."""
        chunks = [(tokens, self.rows) async for tokens in self]
        if not chunks:
            self.rows = NO_ROWS
            return np.empty(0, np.int32)
        self.rows = np.concatenate([rows for _, rows in chunks])
        return np.concatenate([tokens for tokens, _ in chunks])

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Log-probabilities of the tokens that iterating, or `collect`, returned last: one of each token; empty where
        the request asks for none (`Sampling.logprobs`)."""
        return read_rows(self.rows) if self.rows.shape[1] else []

    @property
    def unfinished(self) -> bool:
        return not self._is_over and self._failure is None

    @property
    def received(self) -> int:
        """Position of the next token to arrive, to attach at after a reconnect."""
        return self._received

    def deliver(self, start: int, tokens: Int32Array, rows: Int32Array) -> None:
        """Add tokens from position `start` on, and their rows int32[n, words], of 0 words where none are asked for;
        known positions are dropped. Raises ProtocolError at a gap."""
        if start > self._received:
            raise ProtocolError(f"position {self._received} is missing", field="starts", value=start)
        known = self._received - start
        fresh = tokens[known:]
        if len(fresh):
            self._chunks.append((fresh, rows[known:]))
            self._received += len(fresh)
            self._news.set()

    def end(self, ended: Ended | None) -> None:
        """End the iteration after the tokens that have arrived. None: the stream was detached."""
        self.ended = ended
        self._is_over = True
        self._news.set()

    def fail(self, error: HiSparseError) -> None:
        self._failure = error
        self._news.set()
