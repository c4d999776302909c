"""The publisher of KV events, heard by subscribers written after vLLM's: its structs, its sockets, its replay."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import trio
import zmq

from coordinator.gateway import kv_publisher
from coordinator.gateway.kv_publisher import KvPublisher, Published
from coordinator.listener.router import CurveGuard
from coordinator.listener.zap import AllowList, ZapHandler
from coordinator.memory.kv_events import AllRemoved, KvEvent, PagesRemoved, PagesStored
from metrics.state import CoordinatorCounters
from protocol.errors import ConfigError, Unavailable
from protocol.transport.curve import show_key
from protocol.transport.keys import Insecure, PeerKey, read_allowed, read_peer_key, read_server_key
from protocol.units import PAGE_TOKENS
from tests.support.guarded_rig import new_keys
from tests.support.limits import HANG_LIMIT_S
from tests.support.ports import free_ports

EVENTS, REPLAY = "coordinator.kv_events_endpoint", "coordinator.kv_events_replay_endpoint"
LIMIT_MS = int(1_000 * HANG_LIMIT_S)


# As vllm/distributed/kv_events.py declares them: since 0.24 events are maps; in array_like form, from 0.10.2 to 0.23.


class MapEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(MapEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(MapEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(MapEvent):
    pass


class MapBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class ArrayEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class ArrayStored(ArrayEvent, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class ArrayRemoved(ArrayEvent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None


class ArrayCleared(ArrayEvent, tag="AllBlocksCleared"):
    pass


class ArrayBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[ArrayStored | ArrayRemoved | ArrayCleared]
    data_parallel_rank: int | None = None


def digest(number: int) -> bytes:
    return number.to_bytes(8, "big") + bytes(8)


def stored(first: int, pages: int, *scope: str) -> PagesStored:
    """Pages `first` and on; the token ids of each are its number and above."""
    ids = np.concatenate([np.arange(n, n + PAGE_TOKENS, dtype=np.int32) for n in range(first, first + pages)])
    digests = tuple(digest(n) for n in range(first, first + pages))
    return PagesStored(digests, digest(first - 1) if first else None, ids.tobytes(), scope)


def is_pages(event: BlockStored | ArrayStored, first: int, pages: int) -> bool:
    ids = [token for n in range(first, first + pages) for token in range(n, n + PAGE_TOKENS)]
    hashes = [*range(first, first + pages)]
    return (event.block_hashes, event.token_ids, event.block_size) == (hashes, ids, PAGE_TOKENS)


class Subscriber:
    """As in vLLM's examples/online_serving/kv_events_subscriber.py."""

    def __init__(self, publisher: KvPublisher, topic: str = "", key: PeerKey | None = None) -> None:
        self.context = zmq.Context()
        self.sub, self.req = self.context.socket(zmq.SUB), self.context.socket(zmq.REQ)
        for sock, endpoint in ((self.sub, publisher.endpoint), (self.req, publisher.replay_endpoint)):
            sock.setsockopt(zmq.RCVTIMEO, LIMIT_MS)
            sock.setsockopt(zmq.LINGER, 0)
            if key is not None:
                show_key(sock, key)
            if endpoint:
                sock.connect(endpoint)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, topic)

    def join(self, publisher: KvPublisher) -> None:
        """Subscriptions travel behind the handshake: publish until a batch comes, and read all of them."""
        deadline = time.monotonic() + HANG_LIMIT_S
        while not self.sub.poll(50):
            assert time.monotonic() < deadline
            publisher.publish([AllRemoved()])
        last = publisher._counters.kv_event_batches - 1
        while int.from_bytes(self.sub.recv_multipart()[1], "big") < last:
            pass

    def hear(self) -> tuple[bytes, int, MapBatch]:
        topic, number, payload = self.sub.recv_multipart()
        return topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=MapBatch)

    def close(self) -> None:
        self.context.destroy(0)


@contextmanager
def publishing(directory: Path, topic: str = "kv-events", *, as_arrays: bool = False) -> Iterator[KvPublisher]:
    directory.chmod(0o700)
    publisher = KvPublisher(
        Published(EVENTS, f"ipc://{directory}/events", None),
        Published(REPLAY, f"ipc://{directory}/replay", None),
        topic=topic,
        as_arrays=as_arrays,
        counters=CoordinatorCounters(),
    )
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def subscribed(publisher: KvPublisher, topic: str = "", key: PeerKey | None = None) -> Iterator[Subscriber]:
    it = Subscriber(publisher, topic, key)
    try:
        yield it
    finally:
        it.close()


ALL: list[KvEvent] = [stored(0, 3, "shop", "salt"), stored(3, 1), PagesRemoved((digest(3), digest(2))), AllRemoved()]


def test_subscriber_decodes_batches_with_the_structs_of_vllm(tmp_path: Path) -> None:
    with publishing(tmp_path) as publisher, subscribed(publisher, "kv-") as it:
        it.join(publisher)
        before = time.time()
        publisher.publish(ALL)
        topic, first, batch = it.hear()
        assert (topic, batch.data_parallel_rank) == (b"kv-events", 0)
        assert before <= batch.ts <= time.time()
        beginning, more, removed, cleared = batch.events
        assert isinstance(beginning, BlockStored)
        assert isinstance(more, BlockStored)
        assert is_pages(beginning, 0, 3)
        assert is_pages(more, 3, 1)
        assert (beginning.parent_block_hash, beginning.extra_keys) == (None, [("shop", "salt"), None, None])
        assert (more.parent_block_hash, more.extra_keys, more.medium) == (2, None, "CPU")
        assert removed == BlockRemoved([3, 2], "CPU")
        assert cleared == AllBlocksCleared()
        publisher.publish([stored(9, 1)])
        assert it.hear()[1] == first + 1


def test_earlier_form_is_decoded_with_the_structs_of_that_time(tmp_path: Path) -> None:
    with publishing(tmp_path, as_arrays=True) as publisher, subscribed(publisher) as it:
        it.join(publisher)
        publisher.publish(ALL)
        _, _, payload = it.sub.recv_multipart()
        beginning, more, removed, cleared = msgspec.msgpack.decode(payload, type=ArrayBatch).events
        assert isinstance(beginning, ArrayStored)
        assert is_pages(beginning, 0, 3)
        assert beginning.extra_keys == [("shop", "salt"), None, None]
        assert isinstance(more, ArrayStored)
        assert (more.parent_block_hash, more.extra_keys) == (2, None)
        assert (removed, cleared) == (ArrayRemoved([3, 2], "CPU"), ArrayCleared())


def test_other_topics_are_not_heard(tmp_path: Path) -> None:
    with publishing(tmp_path) as publisher, subscribed(publisher) as all_topics, subscribed(publisher, "other") as it:
        all_topics.join(publisher)
        publisher.publish([AllRemoved()])
        all_topics.hear()
        assert not it.sub.poll(200)


def test_missed_batches_are_replayed(tmp_path: Path) -> None:
    with publishing(tmp_path) as publisher, subscribed(publisher) as it:
        for number in range(5):
            publisher.publish([stored(number, 1)])
        it.join(publisher)
        it.req.send((3).to_bytes(8, "big"))
        number, payload = it.req.recv_multipart()
        (event,) = msgspec.msgpack.decode(payload, type=MapBatch).events
        assert (int.from_bytes(number, "big"), event.block_hashes) == (3, [3])  # type: ignore[union-attr]


def replayed(publisher: KvPublisher, first: int) -> list[int]:
    """All numbers of one replay. A DEALER takes all answers; a REQ takes one for each request."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVTIMEO, LIMIT_MS)
    dealer.connect(publisher.replay_endpoint)
    dealer.send_multipart([b"", first.to_bytes(8, "big")])
    numbers = []
    while True:
        _, number, payload = dealer.recv_multipart()
        if not payload:
            context.destroy(0)
            assert number == (-1).to_bytes(8, "big", signed=True)
            return numbers
        numbers.append(int.from_bytes(number, "big"))


def test_kept_batches_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I8: by number and by bytes."""
    monkeypatch.setattr(kv_publisher, "REPLAY_BATCHES_MAX", 3)
    with publishing(tmp_path) as publisher:
        for number in range(6):
            publisher.publish([stored(number, 1)])
        assert replayed(publisher, 0) == [3, 4, 5]
        assert replayed(publisher, 5) == [5]
        assert replayed(publisher, 6) == []
        monkeypatch.setattr(kv_publisher, "REPLAY_BYTES_MAX", 1)
        publisher.publish([AllRemoved()])
        assert replayed(publisher, 0) == []
        assert publisher._kept_bytes == 0


def test_publish_never_waits_and_drops_what_finds_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I8. The thread is held up; the loop is not."""
    with publishing(tmp_path) as publisher:
        released, send = threading.Event(), publisher._send

        def held_up(batch: Any) -> None:
            released.wait(HANG_LIMIT_S)
            send(batch)

        monkeypatch.setattr(publisher, "_send", held_up)
        publisher.publish([AllRemoved()])
        while publisher._queue:  # the thread has taken it
            time.sleep(0.01)
        extra = 5
        for _ in range(kv_publisher.QUEUE_BATCHES_MAX + extra):
            publisher.publish([AllRemoved()])
        counters = publisher._counters
        assert (counters.kv_event_batches_dropped, len(publisher._queue)) == (extra, kv_publisher.QUEUE_BATCHES_MAX)
        released.set()
        while publisher._queue:
            time.sleep(0.01)
        publisher.publish([stored(1, 1)])
        last = counters.kv_event_batches - 1
        assert replayed(publisher, last - extra - 1)[-2:] == [last - extra - 1, last], "the numbers show the gap"


def test_subscriber_that_does_not_read_holds_up_no_other(tmp_path: Path) -> None:
    with publishing(tmp_path) as publisher, subscribed(publisher) as silent, subscribed(publisher) as it:
        silent.join(publisher)
        it.join(publisher)
        batches = 4 * kv_publisher.SUBSCRIBER_BATCHES_MAX
        heard = 0
        for number in range(batches):
            publisher.publish([stored(0, 16)])
            if number % 16 == 15:
                while heard <= number - 16:
                    it.hear()
                    heard += 1
        assert publisher._counters.kv_event_batches_dropped == 0


def test_nonsense_at_the_replay_endpoint_is_ignored(tmp_path: Path) -> None:
    with publishing(tmp_path) as publisher:
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(publisher.replay_endpoint)
        for frames in ([b"x"], [b"", b"short"], [b"", bytes(8), b"more"], [b"y", bytes(8)], [b""] * 9):
            dealer.send_multipart(frames)
        publisher.publish([AllRemoved()])
        assert replayed(publisher, 0) == [0]
        assert not dealer.poll(100)
        context.destroy(0)


def _until_bound(events: Published, counters: CoordinatorCounters) -> None:
    """libzmq lets go of an address a little after its socket was closed."""
    ends_at = time.monotonic() + HANG_LIMIT_S
    while True:
        try:
            return KvPublisher(events, None, topic="", counters=counters).close()
        except ConfigError:
            if time.monotonic() > ends_at:
                raise
            time.sleep(0.01)


def test_endpoint_in_use_is_refused_by_its_setting(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, other = taken.getsockname()[1], free_ports(1)
        counters = CoordinatorCounters()
        events = Published(EVENTS, f"tcp://127.0.0.1:{other}", Insecure())
        replay = Published(REPLAY, f"tcp://127.0.0.1:{port}", Insecure())
        with pytest.raises(ConfigError, match="in use") as caught:
            KvPublisher(replay, None, topic="", counters=counters)
        assert (caught.value.field, caught.value.value) == (REPLAY, f"tcp://127.0.0.1:{port}")
        assert "another port" in caught.value.remedy
        with pytest.raises(ConfigError, match="in use"):
            KvPublisher(events, replay, topic="", counters=counters)
        _until_bound(events, counters)  # the first was unbound again
    with publishing(tmp_path), pytest.raises(Unavailable) as held:
        KvPublisher(Published(EVENTS, f"ipc://{tmp_path}/events", None), None, topic="", counters=counters)
    assert held.value.field == EVENTS


def test_tcp_without_keys_is_refused() -> None:
    with pytest.raises(ConfigError, match="without keys") as caught:
        KvPublisher(Published(EVENTS, "tcp://127.0.0.1:0", None), None, topic="", counters=CoordinatorCounters())
    assert caught.value.field == EVENTS


async def test_only_an_admins_key_subscribes_over_tcp(tmp_path: Path) -> None:
    keys = new_keys(tmp_path)
    zap = ZapHandler(AllowList(read_allowed(keys)), CoordinatorCounters().dropped_messages)
    guard = CurveGuard(read_server_key(keys), "admin")
    publisher = KvPublisher(
        Published(EVENTS, "tcp://127.0.0.1:*", guard),
        Published(REPLAY, "tcp://127.0.0.1:*", guard),
        topic="",
        counters=CoordinatorCounters(),
    )
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(zap.run)
            with (
                subscribed(publisher, key=read_peer_key(keys, "admin")) as admin,
                subscribed(publisher, key=read_peer_key(keys, "client")) as client,
                subscribed(publisher) as stranger,
            ):
                await trio.to_thread.run_sync(admin.join, publisher)
                publisher.publish([stored(0, 1)])
                _, _, batch = await trio.to_thread.run_sync(admin.hear)
                assert isinstance(batch.events[0], BlockStored)
                admin.req.send(bytes(8))
                assert len(await trio.to_thread.run_sync(admin.req.recv_multipart)) == 2
                for other in (client, stranger):
                    assert not await trio.to_thread.run_sync(other.sub.poll, 300)
                    with suppress(zmq.Again):  # libzmq gives up a connection that is refused
                        other.req.send(bytes(8), zmq.NOBLOCK)
                    assert not await trio.to_thread.run_sync(other.req.poll, 100)
            nursery.cancel_scope.cancel()
    finally:
        publisher.close()
        zap.close()
