"""One HTTP request and its answer, on ASGI's two callables.

`listen` takes in what the client sends for as long as it is there: the body, and at last that it left, which cancels
whatever works on the answer. It reads on when the body is not wanted any more, since the server stops reading from the
socket, and does not see the client leave, while a few messages wait (ten in hypercorn, where even the end of our own
answer would wait behind them).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import trio

from hisparse.http.errors import TooLarge, TooSlow, error_body, error_headers, status_of
from protocol.errors import CapacityError, HiSparseError

#: One body: a context of a million token ids with seven digits and their commas, twice.
BODY_BYTES_MAX: Final = 16 * 1024 * 1024
#: Bodies that are being received or tokenized, all together.
BODIES_BYTES_MAX: Final = 256 * 1024 * 1024
#: How long a body may take to arrive.
BODY_LIMIT_S: Final = 60.0

JSON: Final = "application/json"
SSE: Final = "text/event-stream"

assert BODY_BYTES_MAX < BODIES_BYTES_MAX

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Budget:
    """Bytes of bodies that are in memory."""

    def __init__(self, bytes_max: int) -> None:
        self._left = bytes_max

    def take(self, count: int) -> bool:
        if count > self._left:
            return False
        self._left -= count
        return True

    def give(self, count: int) -> None:
        self._left += count


class Exchange:
    """`status` is 0 until the answer begins. `leaving` is cancelled when the client goes before the answer is whole."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, budget: Budget) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.status = 0
        self.disconnected = False
        self.leaving = trio.CancelScope()
        self._headers = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        self._receive = receive
        self._send = send
        self._budget = budget
        self._body = bytearray()
        self._refusal: HiSparseError | None = None
        self._received = trio.Event()
        self._answered = False

    def header(self, name: str) -> str:
        """The first of that name (lower case), "" when there is none."""
        return next((value for known, value in self._headers if known == name), "")

    # ------------------------------------------------------------ what comes

    async def listen(self) -> None:
        """Until the client has left, or the answer is complete. What nobody wanted of the body is let go then."""
        try:
            while (message := await self._receive())["type"] != "http.disconnect":
                self._take(message.get("body", b""))
                if not message.get("more_body", False):
                    self._received.set()
        finally:
            self._drop_body()
        if not self._answered:
            self.disconnected = True
            self.leaving.cancel()

    def _take(self, piece: bytes) -> None:
        if self._refusal is not None:
            return
        if len(self._body) + len(piece) > BODY_BYTES_MAX:
            self._refuse(TooLarge(f"more than {BODY_BYTES_MAX} bytes", field="body", remedy="send a smaller one"))
        elif not self._budget.take(len(piece)):
            text = f"bodies of all requests exceed {BODIES_BYTES_MAX} bytes"
            self._refuse(CapacityError(text, field="body", remedy="retry in a moment"))
        else:
            self._body += piece

    def _refuse(self, error: HiSparseError) -> None:
        self._refusal = error
        self._received.set()
        self._drop_body()

    def _drop_body(self) -> None:
        self._budget.give(len(self._body))
        self._body = bytearray()

    @asynccontextmanager
    async def body(self) -> AsyncIterator[bytes]:
        """The whole body, which counts against the budget until the block is left. Raises TooLarge, TooSlow or
        CapacityError."""
        try:
            with trio.move_on_after(BODY_LIMIT_S):
                await self._received.wait()
            if not self._received.is_set():
                self._refuse(TooSlow(f"not there after {BODY_LIMIT_S:g} s", field="body", remedy="send it faster"))
            if self._refusal is not None:
                raise self._refusal
            yield bytes(self._body)
        finally:
            self._drop_body()

    # ------------------------------------------------------------ what goes

    async def answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """The whole answer, as JSON."""
        await self._start(status, {"content-type": JSON, "content-length": str(len(body))} | dict(headers or {}))
        await self._finish(body)

    async def refuse(self, error: HiSparseError, headers: Mapping[str, str] | None = None) -> None:
        await self.answer(status_of(error), error_body(error), error_headers(error) | dict(headers or {}))

    async def open_stream(self, headers: Mapping[str, str]) -> None:
        """Of server-sent events; `write` them, then `close`. Proxies are asked not to gather them."""
        own = {"content-type": SSE, "cache-control": "no-store", "x-accel-buffering": "no"}
        await self._start(200, own | dict(headers))

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def close(self) -> None:
        await self._finish(b"")

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _finish(self, body: bytes) -> None:
        self._answered = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
