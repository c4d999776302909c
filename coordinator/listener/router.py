"""The coordinator's end of every connection: a bound ROUTER under trio.

protocol/transport/watched.py explains how trio waits for a ZMQ socket. The rules of a ROUTER, each with a test
(tests/coordinator/listener/test_sockets.py):

  * A ROUTER past its high-water mark, or without a route, drops silently, with gaps. ROUTER_MANDATORY turns both into
    errors: `send` returns FULL or GONE. The caller keeps what it could not send, as a cursor; there is no queue here.
  * A second bind to a bound ipc path succeeds and takes it over. So a lock beside the path is taken before the bind.
  * A routing id is the ROUTER's name for a connection and identifies no peer: identity is in the Hello. Each message
    comes with the properties that libzmq attests: over ipc the process that made the connection,
    over tcp the user of its key. A descriptor is reused, and may belong to another connection by now.
  * tcp needs CURVE keys at both ends (protocol/transport/keys.py, zap.py), or `insecure`. An ipc path is protected by
    its directory, which both ends check: a directory, not a link, of this user, mode 0700.
  * libzmq accepts any number of connections; a connection without a hello is ended (connection_events.py,
    connection_tracker.py).
  * libzmq keeps an unfinished multipart message, of any size; its connection is ended (unfinished.py).

The attested properties of a connection come with each of its messages. A peer may add properties in its handshake, but
cannot replace those of libzmq, so it cannot claim another process or user. Without a ZAP handler libzmq sets no
User-Id, and the peer may set it: read it at guarded endpoints only.
"""

from __future__ import annotations

import enum
import resource
from typing import Final, NamedTuple

import trio
import zmq

from coordinator.listener.connection_events import ConnectionEvents
from coordinator.listener.connection_tracker import ConnectionTracker
from coordinator.listener.endpoint_lock import EndpointLock
from coordinator.listener.unfinished import UnfinishedMessages, wire_bytes
from protocol.logs import fields, logger
from protocol.transport.curve import check_guarded
from protocol.transport.keys import Insecure, ServerKey
from protocol.transport.watched import Watched, context_of, set_options, unusable

#: Messages libzmq queues per connection and direction. Beyond it `send` returns FULL.
ROUTER_QUEUE_MESSAGES: Final = 1_000
#: A message larger than the role's limit, up to this factor of it, is received and answered with a refusal. libzmq does
#: not read a still larger one and closes the connection.
HARD_LIMIT_FACTOR: Final = 2
#: libzmq closes connections whose handshake takes longer.
HANDSHAKE_LIMIT_MS: Final = 5_000
#: Introduced connections of one listener, and of one user, by default.
CONNECTIONS_MAX: Final = 4_096

#: Messages, and parts of them, taken per receive call. All other tasks wait while these are handled, those of the
#: other listeners too: 16 take 1 to 2 ms. A multipart message is taken over several calls: one of a million parts
#: would hold up all other tasks for seconds.
BATCH_MESSAGES_MAX: Final = 16
BATCH_PARTS_MAX: Final = 256
#: A batch ends with the message that brings it to so many bytes.
BATCH_BYTES_MAX: Final = 256 * 1024

#: As plain numbers: pyzmq's flags are enums, and its multipart calls combine them for each part, which takes twice as
#: long as the rest of a call.
NOBLOCK: Final = int(zmq.NOBLOCK)
NOBLOCK_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)

#: Where libzmq asks the ZAP handler, one per context.
ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"

#: Descriptors for other uses: sockets of libzmq, journal files, exporter, epoll sets, watched processes.
OTHER_DESCRIPTORS: Final = 1_536

log = logger("coordinator.listener.descriptors")


class CurveGuard(NamedTuple):
    """Guard of a tcp endpoint: the coordinator's key, and the role whose keys are allowed (zap.py)."""

    key: ServerKey
    role: str


def apply_guard(socket: zmq.Socket[bytes], guard: CurveGuard) -> None:
    """Set the CURVE options of `socket`, before it is bound."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, guard.key.secret.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, guard.role.encode())
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


# ---------------------------------------------------------------- attested properties


def attested_user(frame: zmq.Frame) -> str:
    """User of the key of `frame`'s connection; only for guarded endpoints."""
    return _property(frame, "User-Id")


def attested_pid(frame: zmq.Frame) -> int:
    """Process that made the ipc connection of `frame`, from "address:uid:gid:pid". 0: unknown."""
    pid = _property(frame, "Peer-Address").rpartition(":")[2]
    return int(pid) if pid.isdecimal() else 0


def descriptor_of(frame: zmq.Frame) -> int:
    """Descriptor of `frame`'s connection. -1: the peer speaks ZMTP 1.0 or 2.0, to which libzmq gives no properties."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def _property(frame: zmq.Frame, name: str) -> str:
    try:
        return str(frame.get(name))
    except zmq.ZMQError:
        return ""


class Sent(enum.Enum):
    """Result of a send on a ROUTER: queued, the connection's queue is full, or no route to the peer."""

    OK = "ok"
    FULL = "full"
    GONE = "gone"


class Received(NamedTuple):
    """`frame` from connection `peer`. A message that is not exactly one frame arrives as b"", which no codec accepts.
    So does a frame above the role's limit: copying 16 MiB that are refused would hold up the other tasks for 10 ms.

    `pid` is the process that made the connection, attested by the kernel; 0 when unknown (not ipc, `credentials` not
    set, another namespace). `user` is the user of the connection's key, "" without keys. `descriptor` may have been
    reused for another connection by now; -1: unknown (ZMTP 1.0 or 2.0).
    """

    peer: bytes
    frame: bytes
    pid: int
    user: str = ""
    descriptor: int = -1
    too_large_bytes: int = 0  # of a frame above the role's limit; 0 of others

    @property
    def frame_bytes(self) -> int:
        """Bytes of the frame as it was sent; 0 of several frames."""
        return self.too_large_bytes or len(self.frame)


class RouterSocket(Watched):
    """A bound ROUTER, addressed by connection, with a bounded queue per connection.

    `message_bytes_max` is the role's largest message; the caller refuses larger frames. They still arrive, up to
    HARD_LIMIT_FACTOR times as large, so that the refusal can be answered.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        message_bytes_max: int,
        credentials: bool = False,
        queue_messages: int = ROUTER_QUEUE_MESSAGES,
        unread_messages: int | None = None,
        guard: CurveGuard | Insecure | None = None,
        connections_max: int = CONNECTIONS_MAX,
        per_user_max: int = CONNECTIONS_MAX,
    ) -> None:
        """Bind to `endpoint`. Raises ConfigError (unusable or unguarded endpoint) or Unavailable (another process
        serves it).

        Per connection, libzmq holds at most `queue_messages` unsent and `unread_messages` (default: the same number)
        unread messages.
        """
        check_guarded(endpoint, guard)
        self.endpoint = endpoint
        self.message_bytes_max = message_bytes_max
        self.connection_tracker = ConnectionTracker(connections_max, per_user_max)
        self._lock = EndpointLock(endpoint)
        socket = context_of("router").socket(zmq.ROUTER)
        set_options(socket, endpoint, queue_messages, bytes_max=message_bytes_max * HARD_LIMIT_FACTOR)
        if unread_messages is not None:
            socket.setsockopt(zmq.RCVHWM, unread_messages)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_LIMIT_MS)
        self._has_keys = isinstance(guard, CurveGuard) and not endpoint.startswith("ipc://")
        if isinstance(guard, CurveGuard) and self._has_keys:
            apply_guard(socket, guard)
        unfinished = UnfinishedMessages(message_bytes_max * HARD_LIMIT_FACTOR)
        self.connection_events = ConnectionEvents(socket, self.connection_tracker, unfinished)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.connection_events.close()
            socket.close()
            self._lock.release()
            raise unusable(endpoint, error) from error
        self._peer: zmq.Frame | None = None
        self._parts = self._taken_bytes = self._parts_left = self._bytes_left = 0
        self._frame, self._too_large_bytes = b"", 0
        self._credentials = credentials and endpoint.startswith("ipc://")
        self.endpoint = str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        super().__init__(socket)

    async def recv_batch(self) -> list[Received]:
        """Wait for messages, then take all that have arrived, at most BATCH_MESSAGES_MAX. Cancelled: none was taken."""
        while True:
            await trio.lowlevel.checkpoint()
            self._parts_left, self._bytes_left = BATCH_PARTS_MAX, BATCH_BYTES_MAX
            if batch := self._drain(self._take, BATCH_MESSAGES_MAX):
                return batch
            await self.wait_for(zmq.POLLIN)

    def _take(self) -> Received:
        """The next message. Raises zmq.Again when there is none, and when the batch has had its parts: a message is
        continued in the next one."""
        if self._peer is None:
            self._peer = self._socket.recv(NOBLOCK, copy=False)
            self._parts, self._taken_bytes, self._frame, self._too_large_bytes = 0, 0, b"", 0
        more = True
        while more:
            if self._parts_left <= 0 or self._bytes_left <= 0:
                raise zmq.Again
            part = self._socket.recv(NOBLOCK, copy=False)
            more = part.more
            self._parts_left -= 1
            self._bytes_left -= len(part)
            self._parts += 1
            self._taken_bytes += wire_bytes(len(part), is_curve=self._has_keys)
            is_whole = self._parts == 1 and not more
            self._too_large_bytes = len(part) if is_whole and len(part) > self.message_bytes_max else 0
            self._frame = part.bytes if is_whole and not self._too_large_bytes else b""
        peer, self._peer = self._peer, None
        descriptor = descriptor_of(peer)
        self.connection_events.took(descriptor, self._taken_bytes)
        return Received(
            peer.bytes,
            self._frame,
            attested_pid(peer) if self._credentials else 0,
            attested_user(peer) if self._has_keys else "",
            descriptor,
            self._too_large_bytes,
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

    def cut_unfinished(self) -> list[str]:
        """End connections with an unfinished message over a bound (unfinished.py); returns which bound, for each."""
        if self.closed:
            return []
        now = trio.current_time()
        self.connection_events.look(now)
        rules = self.connection_events.cut_unfinished(now, is_empty=not self._is_ready(zmq.POLLIN))
        self._stir()
        return rules

    def close(self) -> None:
        if not self.closed:
            self.connection_events.close()
        super().close()
        self._lock.release()


def make_room(connections: int) -> None:
    """Raise the soft limit so that `connections` fit; log a warning when the hard limit is too low. Never lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + OTHER_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    granted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, granted), hard))
    if granted < needed:
        log.warning("too few descriptors for all connections; raise ulimit -n", extra=fields(has=granted, needs=needed))
