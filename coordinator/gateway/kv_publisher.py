"""Publishes KV events over ZMQ, as vLLM's publisher does: at a PUB socket, and again at a ROUTER on request.

    PUB      topic · sequence number (8 bytes, big-endian, from 0) · payload (below)
    ROUTER   a REQ or DEALER sends the first number that it wants (8 bytes, big-endian). It is sent number and payload
             of each later batch that is kept, as one message each; the last has number -1 and no payload

A thread of its own encodes and sends, so that neither long prompts nor subscribers hold up the coordinator's loop. What
waits for it is bounded. A batch that finds no room is dropped and counted, and its number is left out, as is one that
a slow subscriber's queue has no room for: a subscriber that misses a number asks for a replay. Numbers begin at 0 with
each coordinator, whose first event is AllBlocksCleared.

Events hold token ids. Over tcp a subscriber shows an admin's key; an ipc path is protected by its directory.

A batch is as vLLM publishes it, so that routers made for vLLM read it: an array `[ts, events, data_parallel_rank]`.
Fields of events at their defaults are left out.

    BlockStored       block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name, extra_keys
    BlockRemoved      block_hashes, medium
    AllBlocksCleared

In the form `map`, of vLLM 0.24 and later (its pull request 42892; fields as in streams of 0.31), an event is a map with
its class as `type`. In the form `array`, of vLLM 0.10.2 to 0.23 and routers of that time, it is an array that begins
with its class. Source: vllm/distributed/kv_events.py.

A hash is the first 8 bytes of a page's digest, as an unsigned integer: routers compare hashes and never compute ours.
`medium` is what vLLM calls host memory. `extra_keys` has one entry for each block: in the first block of a prompt user,
tenant and cache_salt, as far as there are any (vLLM: cache_salt), else null.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import zmq

from basics.rooms import RoomUse
from coordinator.listener.endpoint_lock import EndpointLock
from coordinator.listener.router import HANDSHAKE_LIMIT_MS, CurveGuard, apply_guard
from coordinator.memory.kv_events import KvEvent, PagesRemoved, PagesStored
from coordinator.memory.prefix_index import Digest
from metrics.state import CoordinatorCounters
from protocol.errors import ConfigError, Unavailable
from protocol.logs import logger
from protocol.transport.curve import check_guarded
from protocol.transport.keys import Insecure
from protocol.transport.watched import context_of, set_options
from protocol.units import PAGE_TOKENS

MEDIUM: Final = "CPU"
HASH_BYTES: Final = 8
#: One service is one rank to a router.
RANK: Final = 0


class BlockStored(msgspec.Struct, frozen=True, omit_defaults=True, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, frozen=True, omit_defaults=True, tag="AllBlocksCleared"):
    pass


BlockEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """`ts`: seconds since the epoch."""

    ts: float
    events: list[Any]  # BlockEvent, or one as an array
    data_parallel_rank: int


_encode = msgspec.msgpack.Encoder().encode


def encode_batch(events: Iterable[KvEvent], ts: float, *, as_arrays: bool) -> bytes:
    """The payload of one message."""
    blocks: list[Any] = [_block_event(it) for it in events]
    return _encode(EventBatch(ts, [_array(it) for it in blocks] if as_arrays else blocks, RANK))


def _array(event: BlockEvent) -> list[object]:
    """The class, and all fields up to the last that is not at its default."""
    fields = [type(event).__name__, *msgspec.structs.astuple(event)]
    return fields[:-1] if isinstance(event, BlockStored) and event.extra_keys is None else fields


def _block_event(event: KvEvent) -> BlockEvent:
    match event:
        case PagesStored(digests, parent, tokens, scope):
            keys = [scope, *[None] * (len(digests) - 1)] if scope else None
            return BlockStored(
                block_hashes=[_hash(it) for it in digests],
                parent_block_hash=None if parent is None else _hash(parent),
                token_ids=np.frombuffer(tokens, dtype=np.int32).tolist(),
                block_size=PAGE_TOKENS,
                lora_id=None,
                medium=MEDIUM,
                lora_name=None,
                extra_keys=keys,
            )
        case PagesRemoved(digests):
            return BlockRemoved([_hash(it) for it in digests], MEDIUM)
        case _:
            return AllBlocksCleared()


def _hash(digest: Digest) -> int:
    return int.from_bytes(digest[:HASH_BYTES], "big")


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
        """Bind. `as_arrays` says the form. Raises ConfigError or Unavailable naming the setting, with
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
