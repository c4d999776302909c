"""trio and ZMQ: the only place that knows of ZMQ file descriptors, high-water marks and contexts.

pyzmq has no trio support, and the adapters that exist lose a message per cancelled receive. What follows waits on the
socket's descriptor itself. The rules, each with a test (tests/test_sockets.py):

  * The descriptor is edge-triggered and says "look again", not "readable": EVENTS is read before every wait.
  * Any send or receive may consume the edge that a parked task waits for, so EVENTS is read again afterwards and the
    parked task woken. Without that a stream stalls every few thousand messages.
  * A receive is a cancellation point only before it takes a message. It then drains without a checkpoint until the
    socket is empty or the batch is full: a cancelled receive loses nothing, a busy peer cannot starve other tasks.
  * A ROUTER past its high-water mark, or without a route, drops silently, with gaps. ROUTER_MANDATORY turns both into
    errors; `send` answers FULL or GONE and the caller keeps what it wanted to send (a cursor, never a queue in here).
  * A second bind to a live ipc path succeeds and steals it. A lock beside the path is taken before the bind.
  * A DEALER that reconnects by itself hides the loss of everything in flight behind a new routing id. So it does not:
    a lost connection raises Unavailable at once, and the owner opens a fresh DEALER and introduces itself again. Loss
    is seen on the socket's monitor, waited for together with the socket through one epoll descriptor. Reconnecting is
    put off rather than switched off: switched off, libzmq throws away what had arrived and was not yet read.
  * A routing id is the ROUTER's name for a connection and says nothing about who is there: identity is in the Hello.
    What libzmq attests of a connection comes with each message (guards.py): over ipc the process that made it, over
    tcp the user whose key it bears. The descriptor, too, is only a number, and may be the next connection's by now.
  * tcp takes CURVE keys on both ends (keys.py, zap.py), or the operator's word that none are wanted. An ipc path is as
    good as its directory: ours, a real one, mode 0700, checked by both ends.
  * libzmq accepts any number of connections; who does not introduce himself is shut out (visits.py, lobby.py).

Rejected: one thread per socket (a hand-over per message, and two more bounded queues); proxying through inproc.
Routers and dealers live in separate contexts, because within one context closing a ROUTER leaves its ipc connections
up until the context ends, which would hide the loss from dealers of the same process (tests, `hisparse up`).
"""

from __future__ import annotations

import enum
import functools
import os
import select
from collections.abc import Callable, Collection
from typing import Final, NamedTuple, TypeVar

import trio
import zmq
from zmq.utils.monitor import parse_monitor_message

from coordinator.errors import BadInput, ConfigError, Unavailable
from coordinator.transport.endpoint_lock import EndpointLock, check_private_dir
from coordinator.transport.guards import (
    Door,
    attested_pid,
    attested_user,
    check_guarded,
    guard_door,
    hung_up,
    not_allowed,
    show_key,
)
from coordinator.transport.keys import Insecure, PeerKey
from coordinator.transport.lobby import Lobby
from coordinator.transport.monitor import monitor_of
from coordinator.transport.visits import Visits

#: Messages taken per receive call, so that one busy socket cannot keep the other tasks waiting.
BATCH_MESSAGES_MAX: Final = 256
#: Messages libzmq queues per connection and direction. Past it a sender is told FULL or waits.
ROUTER_QUEUE_MESSAGES: Final = 1_000
DEALER_QUEUE_MESSAGES: Final = 1_000
#: A message above the role's limit but below this factor of it is received, refused and answered; above, libzmq
#: closes the connection, since it will not allocate what it would have to read to answer.
HARD_LIMIT_FACTOR: Final = 2
#: How long a closing socket goes on sending what it accepted.
LINGER_MS: Final = 200
#: Longest wait for a connection to be made and shaken hands on.
CONNECT_LIMIT_S: Final = 5.0
#: Half-open TCP connections are closed after this; ipc connections close with their process.
TRANSPORT_HEARTBEAT_MS: Final = 2_000

#: Connections that have not shaken hands by then are closed.
HANDSHAKE_LIMIT_MS: Final = 5_000
#: How often a door looks at who came and left.
SWEEP_INTERVAL_S: Final = 0.25
#: Introduced connections of one door, and of one user, unless the owner of the door says otherwise.
CONNECTIONS_MAX: Final = 4_096

#: As plain numbers: pyzmq's flags are enums, and its multipart calls combine them for each part, which takes twice as
#: long as the rest of a call.
NOBLOCK: Final = int(zmq.NOBLOCK)
NOBLOCK_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)

#: libzmq adds up to as much again at random, and counts in an int.
RECONNECT_NEVER_MS: Final = 3_600_000

#: Where libzmq asks who may come in, one per context.
ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"

T = TypeVar("T")


class Sent(enum.Enum):
    """What became of a message offered to a ROUTER: queued, refused for want of room, or without a route."""

    OK = "ok"
    FULL = "full"
    GONE = "gone"


class Received(NamedTuple):
    """`frame` from connection `peer`. A message that is not exactly one frame arrives as b"", which no codec accepts.

    `pid` is the process that made the connection, as the kernel attests it, 0 when unknown (not ipc, credentials not
    asked for, another namespace). `user` is whose key it bears, "" without keys. `descriptor` may be another's by now.
    """

    peer: bytes
    frame: bytes
    pid: int
    user: str = ""
    descriptor: int = -1


@functools.cache
def _context(kind: str) -> zmq.Context[zmq.Socket[bytes]]:
    context = zmq.Context(io_threads=1)
    context.max_sockets = 4096
    return context


def router_context() -> zmq.Context[zmq.Socket[bytes]]:
    """That of all doors: who answers for them has to live in it."""
    return _context("router")


class Watched:
    """A ZMQ socket whose readiness trio tasks of one thread wait for.

    At most one task waits on the descriptor (trio allows one); others park until it has looked. A wait that ends,
    by readiness or cancellation, unparks them, and one of them becomes the next to watch.
    """

    def __init__(self, socket: zmq.Socket[bytes], descriptor: int | None = None) -> None:
        self._socket = socket
        self._fd = int(socket.getsockopt(zmq.FD)) if descriptor is None else descriptor
        self._wanted: list[int] = []
        self._watch: trio.CancelScope | None = None
        self._parked = trio.lowlevel.ParkingLot()

    @property
    def closed(self) -> bool:
        return bool(self._socket.closed)

    def close(self) -> None:
        """Close now; queued messages are sent for LINGER_MS. Waiting tasks raise trio.ClosedResourceError."""
        if not self.closed:
            if self._watch is not None:
                trio.lowlevel.notify_closing(self._fd)
            self._socket.close()
            self._parked.unpark_all()

    def _drain(self, take: Callable[[], T]) -> list[T]:
        if self.closed:
            raise trio.ClosedResourceError("the socket was closed")
        batch: list[T] = []
        while len(batch) < BATCH_MESSAGES_MAX:
            try:
                batch.append(take())
            except zmq.Again:
                break
        self._stir()
        return batch

    def _events(self) -> int:
        if self.closed:
            raise trio.ClosedResourceError("the socket was closed")
        return int(self._socket.getsockopt(zmq.EVENTS))

    def _is_ready(self, mask: int) -> bool:
        return bool(self._events() & mask)

    def _stir(self) -> None:
        """After a send or receive, which may have consumed the edge: wake the watching task if its wish came true."""
        if self._watch is not None and any(map(self._is_ready, set(self._wanted))):
            self._rouse()

    def _rouse(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._parked.unpark_all()

    async def wait_for(self, mask: int) -> None:
        """Return once an event in `mask` is set. A checkpoint only if it has to wait; cancellable, no effect."""
        self._wanted.append(mask)
        try:
            while not self._is_ready(mask):
                if self._watch is not None:
                    await self._parked.park()
                else:
                    await self._watch_descriptor()
        finally:
            self._wanted.remove(mask)

    async def _watch_descriptor(self) -> None:
        self._watch = trio.CancelScope()
        try:
            with self._watch:
                await trio.lowlevel.wait_readable(self._fd)
        finally:
            self._watch = None
            self._parked.unpark_all()


class RouterSocket(Watched):
    """The coordinator's end: bound, addressed by connection, with a bounded queue per connection.

    `message_bytes_max` is what the role may send; the caller refuses larger frames (they still arrive, up to
    HARD_LIMIT_FACTOR times as large, so that the sender can be told).
    """

    def __init__(
        self,
        endpoint: str,
        *,
        message_bytes_max: int,
        credentials: bool = False,
        queue_messages: int = ROUTER_QUEUE_MESSAGES,
        unread_messages: int | None = None,
        guard: Door | Insecure | None = None,
        connections_max: int = CONNECTIONS_MAX,
        per_user_max: int = CONNECTIONS_MAX,
    ) -> None:
        """Bind to `endpoint`. Of one connection libzmq holds `queue_messages` unsent and `unread_messages` (default: as
        many) unread. Raises ConfigError (unusable or unguarded endpoint) or Unavailable (another holds it)."""
        check_guarded(endpoint, guard)
        self.endpoint = endpoint
        self.message_bytes_max = message_bytes_max
        self.lobby = Lobby(connections_max, per_user_max)
        self._lock = EndpointLock(endpoint)
        socket = router_context().socket(zmq.ROUTER)
        _set_options(socket, endpoint, queue_messages, bytes_max=message_bytes_max * HARD_LIMIT_FACTOR)
        if unread_messages is not None:
            socket.setsockopt(zmq.RCVHWM, unread_messages)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_LIMIT_MS)
        self._has_keys = isinstance(guard, Door) and not endpoint.startswith("ipc://")
        if isinstance(guard, Door) and self._has_keys:
            guard_door(socket, guard)
        self._visits = Visits(socket, self.lobby)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._visits.close()
            socket.close()
            self._lock.release()
            raise _unusable(endpoint, error) from error
        self._credentials = credentials and endpoint.startswith("ipc://")
        self.endpoint = str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        super().__init__(socket)

    async def recv_batch(self) -> list[Received]:
        """Wait for messages, then take all there are, at most BATCH_MESSAGES_MAX. Cancelled: nothing was taken."""
        await trio.lowlevel.checkpoint()
        while True:
            if batch := self._drain(self._take):
                return batch
            await self.wait_for(zmq.POLLIN)

    def _take(self) -> Received:
        peer = last = self._socket.recv(NOBLOCK, copy=False)
        frames: list[zmq.Frame] = []
        while last.more:
            last = self._socket.recv(NOBLOCK, copy=False)
            frames.append(last)
        return Received(
            peer.bytes,
            frames[0].bytes if len(frames) == 1 else b"",
            attested_pid(peer) if self._credentials else 0,
            attested_user(peer) if self._has_keys else "",
            int(peer.get(zmq.SRCFD)),
        )

    def send(self, peer: bytes, frame: bytes) -> Sent:
        """Queue `frame` for `peer`, at once or not at all; never blocks."""
        try:
            self._socket.send(peer, NOBLOCK_MORE)
            self._socket.send(frame, NOBLOCK)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return Sent.GONE
            raise
        finally:
            self._stir()
        return Sent.OK

    def introduce(self, received: Received) -> None:
        """The connection has said a hello that is accepted. Raises CapacityError when its user has too many."""
        self._visits.introduce(received.descriptor, received.user, trio.current_time())

    def cut(self, received: Received) -> None:
        """End the connection that `received` came by. Its owner is heard no more, and sees it as lost."""
        self._visits.cut(received.descriptor)

    def cut_users(self, users: Collection[str]) -> int:
        """End the connections of these users; returns how many."""
        return self._visits.cut_users(users, trio.current_time())

    async def sweep(self, on_cut: Callable[[str], None]) -> None:
        """Shut out who does not introduce himself, until cancelled or closed; `on_cut` is told the reason for each."""
        await trio.sleep(SWEEP_INTERVAL_S)
        while not self.closed:
            for _ in range(self._visits.cut_overdue(trio.current_time())):
                on_cut("no hello")
            await trio.sleep(SWEEP_INTERVAL_S)

    def close(self) -> None:
        if not self.closed:
            self._visits.close()
        super().close()
        self._lock.release()


#: How a connection of a dealer begins and ends.
DEALER_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
)


class DealerSocket(Watched):
    """The peer's end: one connection, made by `connect`; once it is lost, Unavailable is raised for good."""

    def __init__(
        self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], endpoint: str, message_bytes_max: int
    ) -> None:
        self._both = select.epoll()
        for descriptor in (socket.getsockopt(zmq.FD), monitor.getsockopt(zmq.FD)):
            self._both.register(int(descriptor), select.EPOLLIN)
        super().__init__(socket, self._both.fileno())
        self.endpoint = endpoint
        self._monitor = monitor
        self._key: PeerKey | None = None
        self._message_bytes_max = message_bytes_max
        self._lost = False

    @classmethod
    async def connect(
        cls,
        endpoint: str,
        *,
        message_bytes_max: int,
        queue_messages: int = DEALER_QUEUE_MESSAGES,
        key: PeerKey | Insecure | None = None,
    ) -> DealerSocket:
        """Connect, or raise Unavailable (nobody there, CONNECT_LIMIT_S passed), NotAllowed (the key is not), or
        ConfigError (no such transport, tcp without a key, a directory of sockets that is not ours alone).

        `message_bytes_max` bounds what may be sent. Cancelled: nothing is left open.
        """
        check_guarded(endpoint, key)
        if endpoint.startswith("ipc://"):
            check_private_dir(os.path.dirname(endpoint.removeprefix("ipc://")) or ".", missing_ok=True)
        socket = _context("dealer").socket(zmq.DEALER)
        _set_options(socket, endpoint, queue_messages, bytes_max=-1)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_NEVER_MS)
        dealer = cls(socket, monitor_of(socket, DEALER_EVENTS), endpoint, message_bytes_max)
        if isinstance(key, PeerKey) and not endpoint.startswith("ipc://"):
            dealer._key = key
            show_key(socket, key)
        try:
            socket.connect(endpoint)
            with trio.fail_after(CONNECT_LIMIT_S):
                await dealer._shake_hands()
        except BaseException as error:
            dealer.close()
            if isinstance(error, zmq.ZMQError):
                raise _unusable(endpoint, error) from error
            if isinstance(error, trio.TooSlowError):
                raise _unavailable(endpoint, f"no answer within {CONNECT_LIMIT_S:g} s") from error
            raise
        return dealer

    async def _shake_hands(self) -> None:
        watched = Watched(self._monitor)
        while True:
            await watched.wait_for(zmq.POLLIN)
            match self._next_event():
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    return
                case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    raise not_allowed(self.endpoint, self._key)
                case zmq.EVENT_CLOSED:
                    raise _unavailable(self.endpoint, "nobody listens there")
                case int():
                    raise hung_up(self.endpoint, self._key)

    def _next_event(self) -> int | None:
        if not int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return None
        return int(parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"])

    def _check_lost(self) -> bool:
        """Whether the connection is lost; the first to see it wakes whoever waits."""
        if not self._lost and self._next_event() is not None:
            self._lost = True
            self._rouse()
        return self._lost

    def _is_ready(self, mask: int) -> bool:
        """As for any socket. Raises Unavailable when the connection is lost and what arrived before was taken."""
        is_lost = not self.closed and self._check_lost()
        events = self._events()  # behind the look at the monitor: what arrived before the loss is counted in
        if is_lost and not events & mask & zmq.POLLIN:
            raise _unavailable(self.endpoint, "the connection was lost")
        return bool(events & mask)

    async def recv_batch(self) -> list[bytes]:
        """Wait for messages, then take all there are, at most BATCH_MESSAGES_MAX. Cancelled: nothing was taken.

        A message that is not exactly one frame arrives as b"". Raises Unavailable when the connection is lost.
        """
        await trio.lowlevel.checkpoint()
        while True:
            if batch := self._drain(self._take):
                return batch
            await self.wait_for(zmq.POLLIN)

    def _take(self) -> bytes:
        frames = self._socket.recv_multipart(zmq.NOBLOCK)
        return frames[0] if len(frames) == 1 else b""

    async def send(self, frame: bytes) -> None:
        """Queue `frame`, waiting while the queue is full. Cancelled: it was not queued.

        Raises BadInput (too large) or Unavailable (the connection is lost).
        """
        if len(frame) > self._message_bytes_max:
            raise BadInput(
                f"a message of {len(frame)} bytes exceeds the limit of {self._message_bytes_max}",
                field="message",
                value=f"{len(frame)} bytes",
                remedy="send a shorter prompt or fewer ids",
            )
        await trio.lowlevel.checkpoint()
        while not self._queue(frame):
            await self.wait_for(zmq.POLLOUT)

    def _queue(self, frame: bytes) -> bool:
        if self.closed:
            raise trio.ClosedResourceError("the socket was closed")
        if self._check_lost():
            raise _unavailable(self.endpoint, "the connection was lost")
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._stir()
        return True

    def close(self) -> None:
        if not self.closed:
            self._socket.disable_monitor()
            self._monitor.close()
            super().close()
            self._both.close()


def _set_options(socket: zmq.Socket[bytes], endpoint: str, queue_messages: int, *, bytes_max: int) -> None:
    socket.setsockopt(zmq.SNDHWM, queue_messages)
    socket.setsockopt(zmq.RCVHWM, queue_messages)
    socket.setsockopt(zmq.MAXMSGSIZE, bytes_max)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    if not endpoint.startswith("ipc://"):
        socket.setsockopt(zmq.HEARTBEAT_IVL, TRANSPORT_HEARTBEAT_MS)


def _unavailable(endpoint: str, message: str) -> Unavailable:
    return Unavailable(message, field="endpoint", value=endpoint, remedy="start it with: hisparse up")


def _unusable(endpoint: str, error: zmq.ZMQError) -> ConfigError:
    return ConfigError(
        f"unusable: {error}", field="endpoint", value=endpoint, remedy="use ipc:///PATH or tcp://HOST:PORT"
    )
