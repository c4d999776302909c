"""The Python client: every verb of the service, and token streams that survive a lost connection.

    async with open_client(endpoint) as client:
        stream = await client.submit(prompt_ids, Sampling(max_tokens=100))
        async for tokens in stream:          # int32 arrays, each position once and in order (I5)
            ...
        print(stream.ended.outcome)

or, from code without trio, one action per connection:

    rows = run_client(endpoint, lambda client: client.requests())

One task receives and hands each message to whom it concerns: replies by tag to the calls that wait, deliveries by
handle to their streams. A stream buffers what its reader has not taken: at most the tokens that its request asked for.

When the connection is lost the task connects anew, for at most `reconnect_limit_s`, and attaches every unfinished
stream again at the offset it holds. A submission with a request id of the caller's choice is submitted again: the same
one under the same id is the same request. Other calls in flight raise ConnectionLost instead: whether a verb was
carried out cannot be known, and repeating it is the caller's choice. Admin verbs need a connection to the admin
endpoint with role "admin".
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import trio

from coordinator import messages
from coordinator.arrays import pack_tokens, unpack_int32
from coordinator.client.replies import Call, M, Reply, decode, encode, error_of, expect, ids, reply_of
from coordinator.client.token_stream import Stream
from coordinator.errors import CapacityError, HiSparseError, Unavailable
from coordinator.messages import CLIENT_MESSAGE_BYTES_MAX, PROTOCOL_VERSION, GatewayMessage, ModelInfo, Sampling
from coordinator.transport.keys import Insecure, PeerKey
from coordinator.transport.sockets import DealerSocket

#: Longest wait for a Welcome on a fresh connection.
WELCOME_LIMIT_S: Final = 5.0
#: Pauses between attempts to reconnect.
RECONNECT_PAUSE_MIN_S: Final = 0.05
RECONNECT_PAUSE_MAX_S: Final = 1.0
#: How long streams wait for the coordinator to come back, unless the caller says otherwise.
RECONNECT_LIMIT_S: Final = 30.0

T = TypeVar("T")


class ConnectionLost(Unavailable):
    """The connection went while a call was in flight; whether it was carried out is unknown."""


class Client:
    """Made by `open_client`. Any number of tasks of one trio run may call it at once."""

    def __init__(
        self, endpoint: str, role: str, name: str, reconnect_limit_s: float, key: PeerKey | Insecure | None = None
    ) -> None:
        self.endpoint = endpoint
        self._key = key
        self.reconnects = 0
        self._hello = messages.Hello(PROTOCOL_VERSION, role, name)
        self._reconnect_limit_s = reconnect_limit_s
        self._welcome: messages.Welcome | None = None
        self._dealer: DealerSocket | None = None
        self._ready = trio.Event()
        self._lost: HiSparseError | None = None
        self._is_lost = trio.Event()
        self._tag = 0
        self._calls: dict[int, Callable[[Reply], None]] = {}
        self._hellos: deque[Callable[[Reply], None]] = deque()
        self._streams: dict[int, Stream] = {}
        self._attaching: dict[int, Stream] = {}

    # ------------------------------------------------------------ requests

    async def submit(
        self,
        prompt: Sequence[int] | npt.NDArray[np.integer],
        sampling: Sampling,
        *,
        request_id: str = "",
        priority: int = 0,
        admission: str = messages.AUTO,
    ) -> Stream:
        """Submit `prompt`, token ids of the served model, and subscribe; returns once it is in the journal.

        With a `request_id` it outlives lost connections, for as long as the client does. A higher `priority`, -1000 to
        1000, goes first. `admission`, one of messages.ADMISSIONS, says how the prompt is to come to the worker that
        decodes it. Raises BadInput, WrongState (id of another request), CapacityError (it never fits, or the queue is
        full), Unavailable or ConnectionLost. Cancelled: it may have been submitted; without an id nobody knows of it.
        """
        packed = pack_tokens(prompt)
        return await self._surely(
            request_id,
            lambda: self._subscribe(
                lambda tag: messages.Submit(tag, packed, sampling, request_id, priority, True, admission), start=0
            ),
        )

    async def submit_detached(
        self,
        prompt: Sequence[int] | npt.NDArray[np.integer],
        sampling: Sampling,
        *,
        request_id: str = "",
        priority: int = 0,
        admission: str = messages.AUTO,
    ) -> str:
        """As `submit`, without subscribing; returns the request's id."""
        packed = pack_tokens(prompt)
        accepted = await self._surely(
            request_id,
            lambda: self._call(
                lambda tag: messages.Submit(tag, packed, sampling, request_id, priority, False, admission),
                messages.Accepted,
            ),
        )
        return accepted.request_id

    async def attach(self, request_id: str, offset: int = 0) -> Stream:
        """Subscribe from generated position `offset` on. Raises NotFound, or BadInput for an impossible offset."""
        return await self._subscribe(lambda tag: messages.Attach(tag, request_id, offset), start=offset)

    async def detach(self, stream: Stream) -> None:
        """Unsubscribe; the request goes on. The stream's iteration ends after what has arrived."""
        await self._call(lambda tag: messages.Detach(tag, stream.request_id), messages.Done)
        self._streams = {handle: other for handle, other in self._streams.items() if other is not stream}
        stream.end(None)

    async def abort(self, request_ids: Sequence[str]) -> tuple[str, ...]:
        """Abort all or none. Raises NotFound or WrongState."""
        return await self._do(lambda tag: messages.AbortRequests(tag, ids(request_ids)))

    async def acknowledge(self, request_ids: Sequence[str]) -> tuple[str, ...]:
        """The outputs of these ended requests are safe here: the coordinator need not keep them until
        `ended_keep_s` is over. Raises WrongState for a live one."""
        return await self._do(lambda tag: messages.AcknowledgeOutputs(tag, ids(request_ids)))

    # ------------------------------------------------------------ looking

    async def welcome(self) -> messages.Welcome:
        """Who the coordinator is and which model it serves now."""
        call = Call(lambda reply: expect(reply, messages.Welcome))
        dealer = await self._connected()
        self._hellos.append(call.take)
        await dealer.send(messages.encode(self._hello))
        return await call.wait()

    async def model(self) -> ModelInfo:
        """The served model. Raises Unavailable while no worker has registered."""
        model = self._welcome.model if self._welcome else None
        model = model or (await self.welcome()).model
        if model is None:
            raise Unavailable("no worker has registered yet", remedy="start one with: hisparse worker --model PATH")
        return model

    async def requests(self, limit: int = 10_000) -> messages.RequestRows:
        """Live and recently ended requests that this key may see, 20,000 at most; `truncated` tells of more."""
        return await self._call(lambda tag: messages.ListRequests(tag, limit), messages.RequestRows)

    async def request(self, request_id: str) -> messages.RequestDetail:
        """One request with its story. Raises NotFound."""
        return await self._call(lambda tag: messages.DescribeRequest(tag, request_id), messages.RequestDetail)

    async def workers(self) -> tuple[messages.WorkerRow, ...]:
        """Workers, lost ones that still have memory among them."""
        return (await self._call(messages.ListWorkers, messages.WorkerRows)).rows

    async def pools(self) -> tuple[messages.PoolRow, ...]:
        """Host pools: one per node."""
        return (await self._call(messages.ListPools, messages.PoolRows)).rows

    async def tokenizer(self) -> messages.TokenizerData:
        """The served model's tokenizer. Raises Unavailable until a worker has sent it."""
        return await self._call(messages.FetchTokenizer, messages.TokenizerData)

    # ------------------------------------------------------------ operating (role "admin")

    # Each takes effect for all that are named or for none, and returns a line for each, once it is decided: what
    # workers have to do for it follows. Each raises NotFound, WrongState (of the first that cannot) or NotAllowed.

    async def retract(self, request_ids: Sequence[str], *, keep: bool = True, hold: bool = True) -> tuple[str, ...]:
        """Take running requests off their workers. `keep` host pages, or free them too; `hold` until `resume`, or let
        policy bring them back."""
        return await self._do(lambda tag: messages.RetractRequests(tag, ids(request_ids), keep, hold))

    async def resume(self, request_ids: Sequence[str]) -> tuple[str, ...]:
        """Let held requests run again."""
        return await self._do(lambda tag: messages.ResumeRequests(tag, ids(request_ids)))

    async def resize(self, request_ids: Sequence[str], hot_slots: int) -> tuple[str, ...]:
        """Force hot buffers to a size class of the workers; 0: resident; -1: policy decides again. Raises BadInput or
        CapacityError for what no worker could give."""
        return await self._do(lambda tag: messages.ResizeRequests(tag, ids(request_ids), hot_slots))

    async def drain(
        self, workers: Sequence[str] = (), *, handover: bool = False, deadline_s: float = 300.0
    ) -> tuple[str, ...]:
        """Admit nobody to these workers (none named: all) any more. What runs there finishes, or moves to other workers
        (`handover`); past `deadline_s`, a day at most, the rest is retracted."""
        return await self._do(lambda tag: messages.DrainWorkers(tag, ids(workers), handover, deadline_s))

    async def undrain(self, workers: Sequence[str] = ()) -> tuple[str, ...]:
        """Admit to these workers (none named: all) again."""
        return await self._do(lambda tag: messages.UndrainWorkers(tag, ids(workers)))

    async def release_quarantine(self, workers: Sequence[str]) -> tuple[str, ...]:
        """Vouch that the processes of these workers' lost epochs are gone: see messages.ReleaseQuarantine."""
        return await self._do(lambda tag: messages.ReleaseQuarantine(tag, ids(workers)))

    async def audit(self) -> messages.AuditRows:
        """Compare what all workers hold with the ledgers, now and twice."""
        return await self._call(messages.AuditWorkers, messages.AuditRows)

    async def stop(self, deadline_s: float = 30.0) -> tuple[str, ...]:
        """Drain the coordinator; it exits when running requests have ended, at the latest after `deadline_s`."""
        return await self._do(lambda tag: messages.StopCoordinator(tag, deadline_s))

    # ------------------------------------------------------------ calls

    async def _surely(self, request_id: str, submit: Callable[[], Awaitable[T]]) -> T:
        """Submit until an answer comes, if that can be done twice."""
        while True:
            try:
                return await submit()
            except ConnectionLost:
                if not request_id or self._lost is not None:
                    raise
            await trio.sleep(RECONNECT_PAUSE_MIN_S)  # the receiving task may have frames to read before it notices

    async def _do(self, make: Callable[[int], messages.AdminMessage]) -> tuple[str, ...]:
        return (await self._call(make, messages.Done)).detail

    async def _subscribe(self, make: Callable[[int], messages.AdminMessage], start: int) -> Stream:
        """The stream exists from the moment its Accepted is read, so that the delivery right behind it finds it."""
        return await self._exchange(make, lambda reply: self._adopt(reply, start))

    async def _call(self, make: Callable[[int], messages.AdminMessage], expected: type[M]) -> M:
        return await self._exchange(make, lambda reply: expect(reply, expected))

    async def _exchange(self, make: Callable[[int], messages.AdminMessage], read: Callable[[Reply], T]) -> T:
        """Send, and return what `read` makes of the reply, in the same instant as the reply arrives.

        Raises what the reply says, or what `encode` does. Cancelled: the verb may still be carried out.
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

    def _adopt(self, reply: Reply, start: int) -> Stream:
        accepted = expect(reply, messages.Accepted)
        stream = Stream(accepted.request_id, start)
        self._streams[accepted.handle] = stream
        return stream

    # ------------------------------------------------------------ connection

    async def connect(self) -> None:
        """Connect and say hello. Raises Unavailable, NotAllowed, or what the gateway's Failure says."""
        dealer = await DealerSocket.connect(self.endpoint, message_bytes_max=CLIENT_MESSAGE_BYTES_MAX, key=self._key)
        try:
            with trio.fail_after(WELCOME_LIMIT_S):
                await dealer.send(messages.encode(self._hello))
                first, *rest = map(decode, await dealer.recv_batch())
            self._welcome = expect(reply_of(first), messages.Welcome)
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

    async def _attach_again(self, streams: Sequence[Stream]) -> None:
        """Ask for each stream at the offset it holds; replies come to the receiving task, which this runs in."""
        for stream in streams:
            self._tag += 1
            self._attaching[self._tag] = stream
        with suppress(Unavailable):  # lost again: the receiving task will see it and start over
            for tag, stream in tuple(self._attaching.items()):
                await (await self._connected()).send(
                    messages.encode(messages.Attach(tag, stream.request_id, stream.received))
                )

    def _give_up(self, error: HiSparseError, streams: Sequence[Stream]) -> None:
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
                self._welcome = message
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

    def _attached(self, stream: Stream, reply: Reply) -> None:
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


@asynccontextmanager
async def open_client(
    endpoint: str,
    *,
    role: str = "client",
    name: str = "",
    reconnect_limit_s: float = RECONNECT_LIMIT_S,
    key: PeerKey | Insecure | None = None,
) -> AsyncIterator[Client]:
    """A connected Client; closed on leaving. `reconnect_limit_s` 0: a lost connection is final. `key`: over tcp
    (coordinator.transport.keys.access finds it by the settings).

    Raises Unavailable when nobody answers, NotAllowed when the key is not let in. What the block raises comes out as it
    is, not in a group.
    """
    client = Client(endpoint, role, name, reconnect_limit_s, key)
    await client.connect()
    failure: Exception | None = None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.run)
            try:
                yield client
            except Exception as error:
                failure = error
            finally:
                nursery.cancel_scope.cancel()
    finally:
        client.close()
    if failure is not None:
        raise failure


def run_client(
    endpoint: str,
    action: Callable[[Client], Awaitable[T]],
    *,
    role: str = "client",
    name: str = "",
    key: PeerKey | Insecure | None = None,
) -> T:
    """Connect, await `action(client)`, disconnect: the client for code without trio. Raises what the action raises.

    Ctrl-C arrives as KeyboardInterrupt; the action's own cleanup has run by then.
    """

    async def session() -> T:
        async with open_client(endpoint, role=role, name=name, key=key) as client:
            return await action(client)

    try:
        return trio.run(session)
    except BaseExceptionGroup as group:
        if group.subgroup(KeyboardInterrupt) is not None:
            raise KeyboardInterrupt from group
        raise
