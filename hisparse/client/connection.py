"""A client's connection, with reconnects: calls wait for replies, streams take deliveries.

One task receives all messages. It passes replies by tag to the waiting calls, and deliveries by handle to their
streams. A stream buffers tokens that its reader has not taken: at most the request's max_tokens.

When the connection is lost, the task tries to connect again, for at most `reconnect_limit_s`, and attaches every
unfinished stream at its offset. A submission with a request id chosen by the caller is repeated: the same submission
under the same id is the same request. Other calls in flight raise ConnectionLost: it is unknown whether their command
was carried out, and the caller decides whether to repeat it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, TypeVar

import trio

from hisparse.client.replies import Call, Reply, decode, encode, error_of, expect, reply_of
from hisparse.client.token_stream import StreamNews, TokenStream, TrioNews
from protocol import messages
from protocol.arrays import Int32Array, unpack_int32
from protocol.errors import CapacityError, HiSparseError, Unavailable
from protocol.logprobs import NO_ROWS
from protocol.messages import CLIENT_MESSAGE_BYTES_MAX, PROTOCOL_VERSION, GatewayMessage
from protocol.transport.dealer import DealerSocket
from protocol.transport.keys import Insecure, PeerKey

#: Longest wait for the Welcome on a new connection.
WELCOME_LIMIT_S: Final = 5.0
#: Pauses between attempts to reconnect.
RECONNECT_PAUSE_MIN_S: Final = 0.05
RECONNECT_PAUSE_MAX_S: Final = 1.0

T = TypeVar("T")


def client_closed(endpoint: str) -> Unavailable:
    return Unavailable("the client was closed", field="endpoint", value=endpoint)


class ConnectionLost(Unavailable):
    """The connection was lost during a call; whether its command was carried out is unknown."""


class Connection:
    """For any number of tasks of one trio run at once, while `run` runs. `welcome` is the gateway's latest Welcome.

    `make_news`: what a reader of a stream waits for, one for each stream.
    """

    def __init__(
        self,
        endpoint: str,
        role: str,
        name: str,
        reconnect_limit_s: float,
        key: PeerKey | Insecure | None,
        make_news: Callable[[], StreamNews] = TrioNews,
    ) -> None:
        self.endpoint = endpoint
        self.reconnects = 0
        self.welcome: messages.Welcome | None = None
        self._key = key
        self._make_news = make_news
        self._hello = messages.Hello(PROTOCOL_VERSION, role, name)
        self._reconnect_limit_s = reconnect_limit_s
        self._dealer: DealerSocket | None = None
        self._ready = trio.Event()
        self._lost: HiSparseError | None = None
        self._is_lost = trio.Event()
        self._tag = 0
        self._calls: dict[int, Callable[[Reply], None]] = {}
        self._hellos: deque[Callable[[Reply], None]] = deque()
        self._streams: dict[int, TokenStream] = {}
        self._attaching: dict[int, TokenStream] = {}

    # ------------------------------------------------------------ for the client

    async def exchange(
        self, make: Callable[[int], messages.AdminMessage], read: Callable[[Reply], T], *, repeatable: bool = False
    ) -> T:
        """Send `make(tag)` and return `read(reply)`, which is called as soon as the reply arrives.

        `repeatable`: after ConnectionLost send it again, once there is a connection. Raises the error in the reply, or
        as `encode` does. Cancelled: the command may still be carried out.
        """
        while True:
            try:
                return await self._exchange_once(make, read)
            except ConnectionLost:
                if not repeatable or self._lost is not None:
                    raise
            await trio.sleep(RECONNECT_PAUSE_MIN_S)  # the receiving task may read frames before it sees the loss

    async def _exchange_once(self, make: Callable[[int], messages.AdminMessage], read: Callable[[Reply], T]) -> T:
        self._tag += 1
        tag = self._tag
        message = encode(make(tag), self._hello.role)
        call = Call(read)
        dealer = await self._connected()
        self._calls[tag] = call.take
        try:
            await self._send(dealer, message)
            return await call.wait()
        finally:
            self._calls.pop(tag, None)

    async def _send(self, dealer: DealerSocket, message: bytes) -> None:
        """Send; raises ConnectionLost. The receiving task sees the loss, too, and reconnects."""
        try:
            await dealer.send(message)
        except (Unavailable, trio.ClosedResourceError) as error:
            raise self._connection_lost(str(error)) from error

    def _connection_lost(self, why: str) -> ConnectionLost:
        return ConnectionLost(
            f"the connection was lost ({why}); whether the command was carried out is unknown",
            field="endpoint",
            value=self.endpoint,
            remedy="see: hisparse requests",
        )

    async def _connected(self) -> DealerSocket:
        """The connection, once there is one. It may be lost again before a waiting task runs, hence the loop."""
        while self._dealer is None:
            if self._lost is not None:
                raise self._lost
            await self._ready.wait()
        return self._dealer

    def adopt(self, reply: Reply, start: int) -> TokenStream:
        """The stream of `reply`, an Accepted, from position `start` on. It takes deliveries from now on.

        Call it as `read` of `exchange`, so that it gets the Delivery right behind the reply.
        """
        accepted = expect(reply, messages.Accepted)
        stream = TokenStream(accepted.request_id, start, self._make_news())
        self._streams[accepted.handle] = stream
        return stream

    def forget(self, stream: TokenStream) -> None:
        """Stop deliveries to `stream`; it ends after the tokens that have arrived."""
        self._streams = {handle: other for handle, other in self._streams.items() if other is not stream}
        stream.end(None)

    async def greet(self) -> messages.Welcome:
        """Send another Hello, for the current Welcome: the coordinator's version and incarnation, and its model."""
        call = Call(lambda reply: expect(reply, messages.Welcome))
        dealer = await self._connected()
        await self._send(dealer, messages.encode(self._hello))
        self._hellos.append(call.take)  # no checkpoint since the send: a cancelled send expects no answer
        return await call.wait()

    # ------------------------------------------------------------ connecting

    async def connect(self) -> None:
        """Connect and send Hello. Raises Unavailable, NotAllowed, or the error of the gateway's Failure."""
        dealer = await DealerSocket.connect(self.endpoint, message_bytes_max=CLIENT_MESSAGE_BYTES_MAX, key=self._key)
        try:
            with trio.fail_after(WELCOME_LIMIT_S):
                await dealer.send(messages.encode(self._hello))
                first, *rest = map(decode, await dealer.recv_batch())
            self.welcome = expect(reply_of(first), messages.Welcome)
        except BaseException as error:
            dealer.close()
            if isinstance(error, trio.TooSlowError):
                raise Unavailable(
                    f"no answer to hello within {WELCOME_LIMIT_S:g} s",
                    field="endpoint",
                    value=self.endpoint,
                    remedy="check that a coordinator listens there, and its /healthz",
                ) from error
            raise
        self._dealer = dealer
        self._ready.set()
        for message in rest:
            self._take(message)

    async def lost(self) -> None:
        """Wait until reconnecting has failed for `reconnect_limit_s`."""
        await self._is_lost.wait()

    async def run(self) -> None:
        """Receive until cancelled or until reconnecting fails. Never raises: calls and streams raise the error."""
        while self._dealer is not None:
            try:
                for frame in await self._dealer.recv_batch():
                    self._take(decode(frame))
            except HiSparseError as error:
                await self._recover(error)

    async def _recover(self, cause: HiSparseError) -> None:
        self._disconnect()
        self._ready = trio.Event()
        self._fail_calls(self._connection_lost(cause.message))
        streams = [stream for stream in (*self._streams.values(), *self._attaching.values()) if stream.unfinished]
        self._streams.clear()
        self._attaching.clear()
        try:
            await self._reconnect()
        except HiSparseError as error:
            self._give_up(error, streams)
        else:
            await self._attach_again(streams)

    async def _reconnect(self) -> None:
        """Try to connect until it succeeds; after `reconnect_limit_s` raise the last error."""
        pause_s = RECONNECT_PAUSE_MIN_S
        give_up_at = trio.current_time() + self._reconnect_limit_s
        while True:
            try:
                await self.connect()
            except (Unavailable, CapacityError):  # CapacityError: too many connections or messages for now
                if trio.current_time() + pause_s > give_up_at:
                    raise
            else:
                self.reconnects += 1
                return
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, RECONNECT_PAUSE_MAX_S)

    async def _attach_again(self, streams: Sequence[TokenStream]) -> None:
        """Attach each stream at its offset. The receiving task runs this, and reads the replies later."""
        for stream in streams:
            self._tag += 1
            self._attaching[self._tag] = stream
        with suppress(Unavailable):  # lost again: the receiving task will see it and reconnect
            for tag, stream in tuple(self._attaching.items()):
                await (await self._connected()).send(
                    messages.encode(messages.Attach(tag, stream.request_id, stream.received))
                )

    def _give_up(self, error: HiSparseError, streams: Sequence[TokenStream]) -> None:
        self._lost = error
        self._is_lost.set()
        self._disconnect()
        self._ready.set()
        self._fail_calls(error)
        for stream in streams:
            stream.fail(error)

    def _fail_calls(self, error: HiSparseError) -> None:
        takers = [*self._calls.values(), *self._hellos]
        self._calls.clear()
        self._hellos.clear()
        for take in takers:
            take(error)

    def close(self) -> None:
        """Close for good; `run` must not be running. Calls and streams that still wait raise Unavailable."""
        if self._lost is None:
            error = client_closed(self.endpoint)
            streams = [*self._streams.values(), *self._attaching.values()]
            self._give_up(error, [stream for stream in streams if stream.unfinished])

    def _disconnect(self) -> None:
        if self._dealer is not None:
            self._dealer.close()
            self._dealer = None

    # ------------------------------------------------------------ receiving

    def _take(self, message: GatewayMessage) -> None:
        match message:
            case messages.Delivery():
                self._deliver(message)
            case messages.Ended(handle=handle):
                stream = self._streams.pop(handle, None)
                if stream is not None:
                    stream.end(message)
            case messages.Welcome():
                self.welcome = message
                if self._hellos:
                    self._hellos.popleft()(message)
            case messages.Failure(tag=-1):
                raise error_of(message)
            case _ if message.tag in self._attaching:
                self._attached(self._attaching.pop(message.tag), reply_of(message))
            case _ if message.tag in self._calls:
                self._calls.pop(message.tag)(reply_of(message))
            case _:
                return  # the reply to a call that was cancelled

    def _attached(self, stream: TokenStream, reply: Reply) -> None:
        if isinstance(reply, HiSparseError):
            stream.fail(reply)
        else:
            self._streams[expect(reply, messages.Accepted).handle] = stream

    def _deliver(self, delivery: messages.Delivery) -> None:
        handles = unpack_int32(delivery.handles, "handles").tolist()
        starts = unpack_int32(delivery.starts, "starts").tolist()
        counts = unpack_int32(delivery.counts, "counts").tolist()
        tokens = unpack_int32(delivery.tokens, "tokens")
        words, rows = _rows_of(delivery, len(counts))
        at = row = 0
        for handle, start, count, size in zip(handles, starts, counts, words, strict=True):
            stream = self._streams.get(handle)
            if stream is not None:
                its = rows[row : row + count * size].reshape(count, size)
                stream.deliver(start, tokens[at : at + count], its)
            at, row = at + count, row + count * size


def _rows_of(delivery: messages.Delivery, entries: int) -> tuple[list[int], Int32Array]:
    """Words of a row of each entry's tokens, 0: it has none, and all rows."""
    if delivery.logprobs is None:
        return [0] * entries, NO_ROWS.reshape(0)
    words = unpack_int32(delivery.logprobs.words, "logprobs.words").tolist()
    return words, unpack_int32(delivery.logprobs.rows, "logprobs.rows")


@asynccontextmanager
async def connected(connection: Connection) -> AsyncIterator[Connection]:
    """`connection`, connected and receiving inside the block; closed afterwards.

    Raises as `Connection.connect`. An exception of the block is raised as it is, not in a group.
    """
    await connection.connect()
    failure: Exception | None = None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.run)
            try:
                yield connection
            except Exception as error:
                failure = error
            finally:
                nursery.cancel_scope.cancel()
    finally:
        connection.close()
    if failure is not None:
        raise failure
