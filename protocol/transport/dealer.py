"""A peer's end of a connection to the coordinator.

A DEALER that reconnects hides the loss of all messages in flight behind a new routing id. So this one never reconnects:
a lost connection raises Unavailable at once, and the owner opens a new DEALER and sends hello again. The loss shows on
the socket's monitor; one epoll descriptor waits for socket and monitor together. Reconnecting is delayed past the
close of the socket instead of disabled: when disabled, libzmq drops messages that arrived and were not read.

tcp needs CURVE keys at both ends, or `insecure`. An ipc path is protected by its directory, which both ends check: it
must be a directory, not a link, of this user and with mode 0700.
"""

from __future__ import annotations

import os
import select
from typing import Final

import trio
import zmq
from zmq.utils.monitor import parse_monitor_message

from protocol.errors import BadInput
from protocol.transport.curve import check_guarded, hung_up, not_allowed, show_key
from protocol.transport.keys import Insecure, PeerKey
from protocol.transport.private_dir import check_private_dir
from protocol.transport.watched import Watched, context_of, monitor_of, set_options, unavailable, unusable

#: Messages libzmq queues per connection and direction. Past it a sender waits.
DEALER_QUEUE_MESSAGES: Final = 1_000
#: Limit of connecting and the handshake together.
CONNECT_LIMIT_S: Final = 5.0
#: Longer than any owner keeps a lost socket. libzmq adds a random time up to the same again, and counts in an int.
RECONNECT_NEVER_MS: Final = 3_600_000

#: Monitor events at the begin and end of a dealer's connection.
DEALER_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
)


class DealerSocket(Watched):
    """One connection, made by `connect`. After its loss every call raises Unavailable."""

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
        """Connect and finish the handshake. Cancelled: nothing is left open.

        `message_bytes_max` is the largest frame that `send` takes. Raises Unavailable (no coordinator listens, or
        CONNECT_LIMIT_S passed), NotAllowed (the key is not allowed here), or ConfigError (unknown transport, tcp
        without a key, a directory of sockets that other users may enter).
        """
        check_guarded(endpoint, key)
        if endpoint.startswith("ipc://"):
            check_private_dir(os.path.dirname(endpoint.removeprefix("ipc://")) or ".", missing_ok=True)
        socket = context_of("dealer").socket(zmq.DEALER)
        set_options(socket, endpoint, queue_messages, bytes_max=-1)
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
                raise unusable(endpoint, error) from error
            if isinstance(error, trio.TooSlowError):
                raise unavailable(endpoint, f"no answer within {CONNECT_LIMIT_S:g} s") from error
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
                    raise unavailable(self.endpoint, "no coordinator listens there")
                case int():
                    raise hung_up(self.endpoint, self._key)

    def _next_event(self) -> int | None:
        if not int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return None
        return int(parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"])

    def _check_lost(self) -> bool:
        """Whether the connection is lost. The call that sees the loss first wakes all waiting tasks."""
        if not self._lost and self._next_event() is not None:
            self._lost = True
            self._rouse()
        return self._lost

    def _is_ready(self, mask: int) -> bool:
        """As in Watched. Raises Unavailable when the connection is lost and all messages received before were taken."""
        is_lost = not self.closed and self._check_lost()
        events = self._events()  # read after the monitor, so that it includes messages that arrived before the loss
        if is_lost and not events & mask & zmq.POLLIN:
            raise unavailable(self.endpoint, "the connection was lost")
        return bool(events & mask)

    async def recv_batch(self) -> list[bytes]:
        """Wait for messages, then take all that have arrived, at most BATCH_MESSAGES_MAX. Cancelled: none was taken.

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
            raise unavailable(self.endpoint, "the connection was lost")
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
