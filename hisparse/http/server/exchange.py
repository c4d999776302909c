"""One HTTP request and its answer.

`body` reads what the client sends, once a handler wants it; from then on, or from the start where there is no body,
`watch` waits for the client to leave, which cancels the task that works on the answer. Bytes that a handler does not
want are not read: the connection ends after the answer then.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final, Protocol

import trio

from hisparse.http.errors import TooLarge, TooSlow, error_body, error_headers, status_of
from hisparse.http.server.fairness.shares import Shares
from hisparse.http.server.identities import TRACE_ID, trace_id_of
from hisparse.http.server.wire import RequestHead
from protocol.errors import CapacityError, HiSparseError
from protocol.messages import TraceContext

#: One body: a context of a million token ids with seven digits and their commas, twice.
BODY_BYTES_MAX: Final = 16 * 1024 * 1024
#: Bodies that are being received or tokenized, all together.
BODIES_BYTES_MAX: Final = 256 * 1024 * 1024
#: How long a body may take to arrive.
BODY_LIMIT_S: Final = 60.0

JSON: Final = "application/json"
SSE: Final = "text/event-stream"

NO_HEADERS: Final[Mapping[str, str]] = {}

assert BODY_BYTES_MAX < BODIES_BYTES_MAX


class ClientGone(Exception):
    """The client left, or does not read what it is sent."""


class Channel(Protocol):
    """The carrier of an exchange: hisparse.http.server.connection. All calls may raise ClientGone."""

    async def admit(self, owner: str) -> None:
        """Its client has a right to be here: the connection is not closed to make room for another. Waits for the
        owner's turn to work in the event loop; "" where there are no keys."""
        ...

    async def piece(self) -> bytes:
        """The next piece of the body; b"" once it is whole. Raises Malformed."""
        ...

    async def left(self) -> None:
        """Wait until the client has left. No piece of the body is read meanwhile."""
        ...

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Goes out with the first `write` or `end`. May wait before a refusal."""
        ...

    async def write(self, data: bytes) -> None: ...

    async def end(self) -> None: ...


class HttpExchange:
    """`status` is 0 until the answer begins. `leaving` is cancelled when the client goes before the answer is whole.
    `trace` is the span that requests of the coordinator are part of."""

    def __init__(
        self, head: RequestHead, channel: Channel, budget: Shares, headers: Mapping[str, str] = NO_HEADERS
    ) -> None:
        """`headers` are part of every answer, and so is the id of the client's trace."""
        self.method = head.method
        self.path = head.path
        self.header = head.header
        self.status = 0
        self.trace: TraceContext | None = None
        self.trace_id = trace_id_of(head.header(TRACE_ID))
        self.disconnected = False
        self.leaving = trio.CancelScope()
        self._head = head
        self._channel = channel
        self._budget = budget
        self._headers = {**headers, TRACE_ID: self.trace_id} if self.trace_id else dict(headers)
        self._received = trio.Event()
        self._answered = False
        if not head.has_body:
            self._received.set()

    @property
    def logged_ids(self) -> dict[str, str]:
        """The id of the client's trace as a field of log lines, if there is one."""
        return {"x_request_id": self.trace_id} if self.trace_id else {}

    async def admit(self, owner: str) -> None:
        """Its client was recognized: see Channel.admit."""
        try:
            await self._channel.admit(owner)
        except ClientGone:
            await self._leave()

    # ------------------------------------------------------------ what comes

    async def watch(self) -> None:
        """Until cancelled: wait for the client to leave."""
        await self._received.wait()
        await self._channel.left()
        self._gone()

    def _gone(self) -> None:
        if not self._answered:
            self.disconnected = True
            self.leaving.cancel()

    @asynccontextmanager
    async def body(self, owner: str) -> AsyncIterator[bytearray]:
        """The whole body, which counts against `owner`'s share until the block is left. Raises TooLarge, TooSlow,
        CapacityError or Malformed."""
        data = bytearray()
        try:
            with trio.move_on_after(BODY_LIMIT_S):
                await self._read(data, owner)
            if not self._received.is_set():
                raise TooSlow(f"not there after {BODY_LIMIT_S:g} s", field="body", remedy="send it faster")
            yield data
        finally:
            self._budget.give(owner, len(data))

    async def _read(self, data: bytearray, owner: str) -> None:
        if self._head.body_bytes > BODY_BYTES_MAX:
            raise _too_large()
        try:
            while piece := await self._channel.piece():
                if len(data) + len(piece) > BODY_BYTES_MAX:
                    raise _too_large()
                if not self._budget.take(owner, len(piece)):
                    text = f"bodies of all requests exceed {BODIES_BYTES_MAX} bytes, and this key has its share of them"
                    raise CapacityError(text, field="body", remedy="retry in a moment")
                data += piece
        except ClientGone:
            await self._leave()
        self._received.set()

    # ------------------------------------------------------------ what goes

    def identify(self, front_id: str, headers: Mapping[str, str]) -> None:
        """Name the request in whatever is answered from now on: by `headers`, and by the front's id where the client
        sent no id of a trace."""
        self._headers = {TRACE_ID: front_id, **self._headers, **headers}

    def tell(self, headers: Mapping[str, str]) -> None:
        """Add headers to the answer, whatever it will be."""
        self._headers |= headers

    async def answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """The whole answer, as JSON."""
        own = {"content-type": JSON, "content-length": str(len(body))}
        await self._start(status, own | dict(headers or {}))
        await self._finish(body)

    async def answer_without_body(self, headers: Mapping[str, str]) -> None:
        """204, which has no length either."""
        await self._start(204, headers)
        await self._finish(b"")

    async def refuse(self, error: HiSparseError, body: Callable[[HiSparseError], bytes] = error_body) -> None:
        """`body` makes the error object."""
        await self.answer(status_of(error), body(error), error_headers(error))

    async def open_stream(self) -> None:
        """Of server-sent events; `write` them, then `close`. Proxies are asked not to gather them."""
        await self._start(200, {"content-type": SSE, "cache-control": "no-store", "x-accel-buffering": "no"})
        await self.write(b"")

    async def write(self, data: bytes) -> None:
        try:
            await self._channel.write(data)
        except ClientGone:
            await self._leave()

    async def close(self) -> None:
        await self._finish(b"")

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        try:
            await self._channel.start(status, {**headers, **self._headers})
        except ClientGone:
            await self._leave()

    async def _finish(self, body: bytes) -> None:
        if body:
            await self.write(body)
        self._answered = True
        try:
            await self._channel.end()
        except ClientGone:
            self._answered = False
            await self._leave()

    async def _leave(self) -> None:
        """The client is gone: end the task that works on its answer."""
        self._gone()
        await trio.sleep_forever()


def _too_large() -> TooLarge:
    return TooLarge(f"more than {BODY_BYTES_MAX} bytes", field="body", remedy="send a smaller one")
