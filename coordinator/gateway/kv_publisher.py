"""Publishes KV events over ZMQ, as vLLM's publisher does: at a PUB socket, and again at a ROUTER on request.

    PUB      topic · sequence number (8 bytes, big-endian, from 0) · payload (kv_format.py)
    ROUTER   a REQ or DEALER sends the first number that it wants (8 bytes, big-endian). It is sent number and payload
             of each later batch that is kept, as one message each; the last has number -1 and no payload

A thread of its own encodes and sends, so that neither long prompts nor subscribers hold up the coordinator's loop. What
waits for it is bounded. A batch that finds no room is dropped and counted, and its number is left out, as is one that
a slow subscriber's queue has no room for: a subscriber that misses a number asks for a replay. Numbers begin at 0 with
each coordinator, whose first event is AllBlocksCleared.

Events hold token ids. Over tcp a subscriber shows an admin's key; an ipc path is protected by its directory.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import zmq

from basics.rooms import RoomUse
from coordinator.gateway.kv_format import encode_batch
from coordinator.listener.endpoint_lock import EndpointLock
from coordinator.listener.router import HANDSHAKE_LIMIT_MS, CurveGuard, apply_guard
from coordinator.memory.kv_events import KvEvent
from metrics.state import CoordinatorCounters
from protocol.errors import ConfigError, Unavailable
from protocol.logs import logger
from protocol.transport.curve import check_guarded
from protocol.transport.keys import Insecure
from protocol.transport.watched import context_of, set_options

#: Batches that wait for the thread. One holds 16 events at most, of 64 KiB of tokens each.
QUEUE_BATCHES_MAX: Final = 256
BATCH_EVENTS_MAX: Final = 16
#: Batches that can be asked for again: their number and their bytes.
REPLAY_BATCHES_MAX: Final = 10_000
REPLAY_BYTES_MAX: Final = 64 * 1024 * 1024
#: Batches that libzmq keeps for a slow subscriber.
SUBSCRIBER_BATCHES_MAX: Final = 256
#: Largest message of a subscriber: a topic, or a number.
REQUEST_BYTES_MAX: Final = 1_024
NUMBER_BYTES: Final = 8
END_OF_REPLAY: Final = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
#: How long the thread may take to send what waits when the coordinator stops.
CLOSE_LIMIT_S: Final = 2.0

log = logger("coordinator.gateway.kv_publisher")


class Published(NamedTuple):
    """An endpoint, and the setting that names it."""

    field: str
    endpoint: str
    guard: CurveGuard | Insecure | None


class _Batch(NamedTuple):
    number: int
    at_s: float
    events: Sequence[KvEvent]


class KvPublisher:
    """`publish` is called by the coordinator's loop and never waits. Close it after the loop has ended."""

    def __init__(
        self,
        events: Published,
        replay: Published | None,
        *,
        topic: str,
        as_arrays: bool = False,
        counters: CoordinatorCounters,
    ) -> None:
        """Bind. `as_arrays` says the form (kv_format.py). Raises ConfigError or Unavailable naming the setting, with
        nothing left open."""
        self._as_arrays = as_arrays
        self._topic = topic.encode()
        self._counters = counters
        self._queue: deque[_Batch] = deque()
        self._next_number = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._locks: list[EndpointLock] = []
        self._router: zmq.Socket[bytes] | None = None
        self._pub = self._bind(zmq.PUB, events, SUBSCRIBER_BATCHES_MAX)
        self.endpoint = str(self._pub.getsockopt_string(zmq.LAST_ENDPOINT))
        self.replay_endpoint = ""
        if replay is not None:
            try:
                self._router = self._bind(zmq.ROUTER, replay, REPLAY_BATCHES_MAX + 1)
            except (ConfigError, Unavailable):
                self._close_sockets()
                raise
            self.replay_endpoint = str(self._router.getsockopt_string(zmq.LAST_ENDPOINT))
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Have these sent, in order. Drops what finds no room."""
        now = time.time()
        for start in range(0, len(events), BATCH_EVENTS_MAX):
            number, self._next_number = self._next_number, self._next_number + 1
            self._counters.kv_event_batches += 1
            if len(self._queue) >= QUEUE_BATCHES_MAX:
                self._counters.kv_event_batches_dropped += 1
                continue
            self._queue.append(_Batch(number, now, events[start : start + BATCH_EVENTS_MAX]))
        os.eventfd_write(self._wake, 1)

    def room_use(self) -> dict[str, RoomUse]:
        return {
            "kv_event_batches": RoomUse(len(self._queue), QUEUE_BATCHES_MAX),
            "kv_replay_bytes": RoomUse(self._kept_bytes, REPLAY_BYTES_MAX),
        }

    def close(self) -> None:
        """Send what waits, for CLOSE_LIMIT_S at most, and unbind."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(CLOSE_LIMIT_S)
        if self._thread.is_alive():
            log.error("the publisher of KV events has not ended")
            return
        self._close_sockets()
        os.close(self._wake)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
            try:
                while self._queue:
                    self._send(self._queue.popleft())
                if self._router in ready:
                    self._replay()
            except zmq.ZMQError:
                log.exception("KV events not sent")
            if self._closing and not self._queue:
                return

    def _send(self, batch: _Batch) -> None:
        payload = encode_batch(batch.events, batch.at_s, as_arrays=self._as_arrays)
        self._kept.append((batch.number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > REPLAY_BATCHES_MAX or self._kept_bytes > REPLAY_BYTES_MAX:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._pub.send_multipart([self._topic, _number(batch.number), payload], zmq.NOBLOCK)

    def _replay(self) -> None:
        """One request. A peer that does not read gets as much as its queue holds."""
        assert self._router is not None
        peer, *frames = self._router.recv_multipart(zmq.NOBLOCK)
        if len(frames) != 2 or frames[0] or len(frames[1]) != NUMBER_BYTES:
            return
        first = int.from_bytes(frames[1], "big")
        try:
            for number, payload in self._kept:
                if number >= first:
                    self._router.send_multipart([peer, b"", _number(number), payload], zmq.NOBLOCK)
            self._router.send_multipart([peer, b"", END_OF_REPLAY, b""], zmq.NOBLOCK)
        except zmq.Again:
            log.warning("a subscriber does not read the KV events that it asked for")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # it has left
                raise

    # ------------------------------------------------------------ sockets

    def _bind(self, kind: int, published: Published, queue_batches: int) -> zmq.Socket[bytes]:
        field, endpoint, guard = published
        try:
            check_guarded(endpoint, guard)
            self._locks.append(EndpointLock(endpoint))
        except (ConfigError, Unavailable) as error:
            self._close_locks()
            raise type(error)(error.message, field=field, value=endpoint, remedy=error.remedy) from error
        socket = context_of("router").socket(kind)
        set_options(socket, endpoint, queue_batches, bytes_max=REQUEST_BYTES_MAX)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_LIMIT_MS)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if isinstance(guard, CurveGuard) and not endpoint.startswith("ipc://"):
            apply_guard(socket, guard)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            self._close_locks()
            in_use = error.errno == zmq.EADDRINUSE
            remedy = "choose another port, or stop the process that has it" if in_use else "write tcp://HOST:PORT"
            what = "in use" if in_use else f"unusable: {error}"
            raise ConfigError(what, field=field, value=endpoint, remedy=remedy) from error
        return socket

    def _close_sockets(self) -> None:
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close()
        self._close_locks()

    def _close_locks(self) -> None:
        for lock in self._locks:
            lock.release()


def _number(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")
