"""One client's connection: requests one after the other, each handed to the front, until either side ends it.

    wait    for the next request: `idle_s` for its first byte, HEADER_LIMIT_S for the rest of its header. A request that
            has come when the connection would be closed as idle is served
    serve   the handler reads the body and answers; every write must be taken within READ_LIMIT_S
    linger  after an answer that the rest of a request was not read for: what comes is thrown away, so that the client
            reads the answer before its connection is reset

A connection may be ended to make room for another while it waits, lingers, or serves a client that has shown no key or
is in arrears: `evictable` says so, and `scope` is cancelled. Those of clients that have shown a key are ended last
(`is_known`).

Each header that is looked at, and each part of a body, also one that is thrown away, is a piece of work in the event
loop, and waits for its turn (fairness/turns.py): among strangers, by address, until a request shows a key; among
owners from then on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Final

import trio

from hisparse.http.errors import error_body, error_headers, status_of
from hisparse.http.server.exchange import JSON, Channel, ClientGone
from hisparse.http.server.fairness.turns import ClientTurns
from hisparse.http.server.wire import HEADER_BYTES_MAX, RequestHead, Wire
from protocol.errors import BadInput

#: How long a client may leave what it was sent unread.
READ_LIMIT_S: Final = 60
#: How long a header, and a TLS handshake, may take from its first byte on.
HEADER_LIMIT_S: Final = 15
#: By so much clients are told a shorter time than `idle_s`, half of it at most: theirs begins later.
IDLE_MARGIN_S: Final = 5.0
#: How long the rest of a refused request is read.
LINGER_LIMIT_S: Final = 5.0
#: Read at once.
RECV_BYTES: Final = 64 * 1024
#: Written at once, within READ_LIMIT_S.
SEND_BYTES: Final = 64 * 1024
#: Parts of a body, as small as their sender makes them, that are one piece of work.
PARTS_PER_TURN: Final = 32

Handler = Callable[[RequestHead, Channel], Awaitable[None]]


def told_idle_s(idle_s: float) -> int:
    """Seconds that clients are told to keep an idle connection for at most."""
    return int(idle_s - min(IDLE_MARGIN_S, idle_s / 2))


class End(Enum):
    """Why a connection ended, as the metric says it."""

    CLOSED = "closed"  # by its client, or after the last answer
    IDLE = "idle"  # no request, or no whole header, in time
    REFUSED = "refused"  # no HTTP/1.1, too large a header, another protocol
    UNREAD = "unread"  # its client did not read, or left in the middle
    TLS = "tls"  # no handshake
    EVICTED = "evicted"  # another took its place
    STOPPED = "stopped"  # cut off when the front stopped
    DEFECT = "defect"  # an error of ours; the log says more


class HttpConnection:
    """`run` it in a task of its own. It does not close its stream. `idle_s` is how long it waits for a request, and
    `has_bytes` says whether any have come that were not received."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        handler: Handler,
        turns: ClientTurns,
        address: str,
        idle_s: float,
        has_bytes: Callable[[], bool],
    ) -> None:
        self.scope = trio.CancelScope()
        self.evictable = True
        self.evicted = False
        self._stream = stream
        self._handler = handler
        self._clients = turns
        self._turns = turns.strangers
        self._party = self._address = address
        self._is_in_arrears = False
        self._is_admitted = False  # whether the request that is served has shown whose it is
        self._parts = 0
        self._idle_s = idle_s
        self._has_bytes = has_bytes
        self._wire = Wire(told_idle_s(idle_s))
        self._waiting: trio.CancelScope | None = None
        self._last = False
        self._unsent = b""

    async def run(self) -> End:
        """Raises what the handler raises."""
        while True:
            try:
                head = await self._wait()
            except BadInput as error:
                return await self._refuse(error)
            if not isinstance(head, RequestHead):
                return head
            self._is_admitted = False
            await self._handler(head, self)
            self.evictable = True
            if not self._wire.answer_is_whole:
                return End.UNREAD
            if not self._wire.body_is_whole:
                return await self._linger(End.CLOSED)
            if not self._wire.reuse():
                return End.CLOSED

    def finish(self) -> None:
        """End after the request that is being served, at once when there is none."""
        self._last = True
        if self._waiting is not None:
            self._waiting.cancel()

    @contextmanager
    def waiting(self, deadline: float = math.inf) -> Iterator[trio.CancelScope]:
        """For a client's next bytes, outside of a request: `finish` cancels the block."""
        with trio.CancelScope(deadline=deadline) as scope:
            self._waiting = scope
            try:
                yield scope
            finally:
                self._waiting = None

    @property
    def party(self) -> str:
        """Whose turns it takes: the owner of the key that was shown last, or its client's address."""
        return self._party

    @property
    def is_known(self) -> bool:
        """Whether its client has shown a key, and is not in arrears."""
        return self._turns is self._clients.owners and not self._is_in_arrears

    def evict(self) -> None:
        self.evicted = True
        self.scope.cancel()

    # ------------------------------------------------------------ requests

    async def _wait(self) -> RequestHead | End:
        """The next request, or why there is none. Raises what Wire.next_head does.

        The deadline begins anew with the first byte, and is put off by the time that a header waits for its turns: a
        request that has come in time is served, however long it waits for its turn or the process for a core. Nothing
        waits between the last look for bytes and the end, so that few requests fall between them.
        """
        deadline = trio.current_time() + self._idle_s
        while True:
            begun = self._wire.has_begun
            if begun:
                before = trio.current_time()
                await self._turns.turn(self._party)
                deadline += trio.current_time() - before
                if (head := self._wire.next_head()) is not None:
                    return head
            if self._last and not self._has_bytes():
                return End.CLOSED
            with self.waiting(deadline) as scope:
                try:
                    if not await self._receive():
                        return End.CLOSED
                except ClientGone:
                    return End.UNREAD
            if scope.cancelled_caught and (begun or not self._has_bytes()):
                return End.CLOSED if self._last else End.IDLE
            if not begun:
                deadline = trio.current_time() + HEADER_LIMIT_S

    async def _receive(self) -> bool:
        """Feed what comes; False: the client has ended its side. Raises ClientGone."""
        try:
            data = await self._stream.receive_some(RECV_BYTES)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ClientGone from error
        if data:
            self._wire.feed(bytes(data))
        return bool(data)

    async def _refuse(self, error: BadInput) -> End:
        """Answer what is no request. The connection ends: where the next one begins cannot be known."""
        body = error_body(error)
        headers = {"content-type": JSON, "content-length": str(len(body))} | error_headers(error)
        self._last = True
        try:
            await self.start(status_of(error), headers)
            await self.write(body)
            await self.end()
        except ClientGone:
            return End.REFUSED
        return await self._linger(End.REFUSED)

    async def _linger(self, end: End) -> End:
        with trio.move_on_after(LINGER_LIMIT_S):
            try:
                if isinstance(self._stream, trio.abc.HalfCloseableStream):
                    await self._stream.send_eof()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return end
            await self._until_left()
        return end

    async def _until_left(self) -> None:
        """What comes meanwhile is thrown away, each part of it in a turn."""
        try:
            while await self._stream.receive_some(RECV_BYTES):
                await self._turns.turn(self._party)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return

    # ------------------------------------------------------------ for the exchange: Channel

    async def admit(self, owner: str) -> None:
        self._is_admitted = True
        party = owner or self._address
        is_new = (self._turns, self._party) != (self._clients.owners, party)
        self._turns, self._party = self._clients.owners, party
        self._is_in_arrears = True
        await self._wait_until(self._clients.arrears.next_at(party, trio.current_time()), self.left)
        self.evictable = self._is_in_arrears = False
        if is_new:
            await self._turns.turn(party)

    async def piece(self) -> bytes:
        if self._wire.waits_to_be_asked:
            await self._send(self._wire.go_on())
        while (piece := self._wire.next_piece()) is None:
            if not await self._receive():
                raise ClientGone
            self._parts = 0
            await self._turns.turn(self._party)
        self._parts += 1
        if self._parts % PARTS_PER_TURN == 0:
            await self._turns.turn(self._party)
        return piece

    async def left(self) -> None:
        """What comes meanwhile is kept: it belongs to the body, or to the next request. Past HEADER_BYTES_MAX of it
        nothing more is read, so that a client that leaves after that is noticed by the next read or write."""
        try:
            while self._wire.waiting_bytes <= HEADER_BYTES_MAX:
                if not await self._receive():
                    return
        except ClientGone:
            return
        await trio.sleep_forever()

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Goes out with what follows, in one piece."""
        if 400 <= status < 500:
            refused = self._party if self._is_admitted else self._address
            free_at = self._clients.arrears.refused(refused, trio.current_time())
            if not self._is_admitted:
                await self._wait_until(free_at, self._until_left)
        self._unsent = self._wire.start(status, headers, time.time(), last=self._last)

    async def _wait_until(self, at: float, left: Callable[[], Awaitable[None]]) -> None:
        """No checkpoint where `at` is past. Raises ClientGone once the client has left, which `left` waits for where
        the body was not read: its place is free then."""
        if at <= trio.current_time():
            return
        if self._wire.body_is_whole:  # the exchange watches, and cancels this
            await trio.sleep_until(at)
            return
        with trio.CancelScope(deadline=at):
            await left()
            raise ClientGone

    async def write(self, data: bytes) -> None:
        unsent, self._unsent = self._unsent, b""
        await self._send(unsent + self._wire.data(data))

    async def end(self) -> None:
        unsent, self._unsent = self._unsent, b""
        await self._send(unsent + self._wire.end())

    async def _send(self, data: bytes) -> None:
        pieces = memoryview(data)
        for at in range(0, len(data), SEND_BYTES):
            try:
                with trio.fail_after(READ_LIMIT_S):
                    await self._stream.send_all(pieces[at : at + SEND_BYTES])
            except (trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise ClientGone from error
