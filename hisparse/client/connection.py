"""A client's connection, which comes back: calls that wait for replies, streams that take deliveries.

One task receives and hands each message to whom it concerns: replies by tag to the calls that wait, deliveries by
handle to their streams. A stream buffers what its reader has not taken: at most the tokens that its request asked for.

When the connection is lost the task connects anew, for at most `reconnect_limit_s`, and attaches every unfinished
stream again at the offset it holds. A submission with a request id of the caller's choice is submitted again: the same
one under the same id is the same request. Other calls in flight raise ConnectionLost instead: whether a command was
carried out cannot be known, and repeating it is the caller's choice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

import trio

from hisparse.client.replies import Call, Reply, decode, encode, error_of, expect, reply_of
from hisparse.client.token_stream import TokenStream
from protocol import messages
from protocol.arrays import unpack_int32
from protocol.errors import CapacityError, HiSparseError, Unavailable
from protocol.messages import CLIENT_MESSAGE_BYTES_MAX, PROTOCOL_VERSION, GatewayMessage
from protocol.transport.dealer import DealerSocket
from protocol.transport.keys import Insecure, PeerKey

#: Longest wait for a Welcome on a fresh connection.
WELCOME_LIMIT_S: Final = 5.0
#: Pauses between attempts to reconnect.
RECONNECT_PAUSE_MIN_S: Final = 0.05
RECONNECT_PAUSE_MAX_S: Final = 1.0

T = TypeVar("T")


class ConnectionLost(Unavailable):
    """The connection went while a call was in flight; whether it was carried out is unknown."""


class Connection:
    """Any number of tasks of one trio run may ask at once, while `run` runs. `welcome` is the gateway's latest."""

    def __init__(
        self, endpoint: str, role: str, name: str, reconnect_limit_s: float, key: PeerKey | Insecure | None
    ) -> None:
        self.endpoint = endpoint
        self.reconnects = 0
        self.welcome: messages.Welcome | None = None
        self._key = key
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

    async def submit_retrying(self, request_id: str, submit: Callable[[], Awaitable[T]]) -> T:
        """Submit until an answer comes, if that can be done twice."""
        while True:
            try:
                return await submit()
            except ConnectionLost:
                if not request_id or self._lost is not None:
                    raise
            await trio.sleep(RECONNECT_PAUSE_MIN_S)  # the receiving task may have frames to read before it notices

    async def exchange(self, make: Callable[[int], messages.AdminMessage], read: Callable[[Reply], T]) -> T:
        """Send, and return what `read` makes of the reply, in the same instant as the reply arrives.

        Raises what the reply says, or what `encode` does. Cancelled: the command may still be carried out.
        """
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
        """The receiving task sees a lost connection too, and connects anew."""
        try:
            await dealer.send(message)
        except (Unavailable, trio.ClosedResourceError) as error:
            raise self._connection_lost(str(error)) from error

    def _connection_lost(self, why: str) -> ConnectionLost:
        return ConnectionLost(
            f"the connection was lost ({why}); whether it was carried out is unknown",
            field="endpoint",
            value=self.endpoint,
            remedy="look at it with: hisparse requests",
        )

    async def _connected(self) -> DealerSocket:
        """The connection. One that was made may be lost again before whoever waited for it has run."""
        while self._dealer is None:
            if self._lost is not None:
                raise self._lost
            await self._ready.wait()
        return self._dealer

    def adopt(self, reply: Reply, start: int) -> TokenStream:
        """The stream that `reply`, an Accepted, begins at position `start`. From this moment it takes deliveries: read
        in `exchange`, before the one right behind the reply."""
        accepted = expect(reply, messages.Accepted)
        stream = TokenStream(accepted.request_id, start)
        self._streams[accepted.handle] = stream
        return stream

    def forget(self, stream: TokenStream) -> None:
        """Deliver nothing to it any more."""
        self._streams = {handle: other for handle, other in self._streams.items() if other is not stream}

    async def greet(self) -> messages.Welcome:
        """Say hello once more: who the coordinator is, and which model it serves, now."""
        call = Call(lambda reply: expect(reply, messages.Welcome))
        dealer = await self._connected()
        await dealer.send(messages.encode(self._hello))
        self._hellos.append(call.take)  # in the same instant: cancelled before, no answer will come for it
        return await call.wait()

    # ------------------------------------------------------------ connecting

    async def connect(self) -> None:
        """Connect and say hello. Raises Unavailable, NotAllowed, or what the gateway's Failure says."""
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
                    remedy="is it a coordinator that listens there, and does it turn? see its /healthz",
                ) from error
            raise
        self._dealer = dealer
        self._ready.set()
        for message in rest:
            self._take(message)

    async def lost(self) -> None:
        """Wait until the coordinator has stayed away for `reconnect_limit_s`: this client is of no more use."""
        await self._is_lost.wait()

    async def run(self) -> None:
        """Receive until cancelled or until the coordinator stays away. Never raises: calls and streams are told."""
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
        """Try until it works; after `reconnect_limit_s` raise why not."""
        pause_s = RECONNECT_PAUSE_MIN_S
        give_up_at = trio.current_time() + self._reconnect_limit_s
        while True:
            try:
                await self.connect()
            except (Unavailable, CapacityError):  # too many connections or messages: there will be room again
                if trio.current_time() + pause_s > give_up_at:
                    raise
            else:
                self.reconnects += 1
                return
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, RECONNECT_PAUSE_MAX_S)

    async def _attach_again(self, streams: Sequence[TokenStream]) -> None:
        """Ask for each stream at the offset it holds; replies come to the receiving task, which this runs in."""
        for stream in streams:
            self._tag += 1
            self._attaching[self._tag] = stream
        with suppress(Unavailable):  # lost again: the receiving task will see it and start over
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
        """Let go of the connection for good; `run` must not be running."""
        self._lost = self._lost or Unavailable("the client was closed", field="endpoint", value=self.endpoint)
        self._disconnect()

    def _disconnect(self) -> None:
        if self._dealer is not None:
            self._dealer.close()
            self._dealer = None

    # ------------------------------------------------------------ what arrives

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
        at = 0
        for handle, start, count in zip(handles, starts, counts, strict=True):
            stream = self._streams.get(handle)
            if stream is not None:
                stream.deliver(start, tokens[at : at + count])
            at += count
