"""Peers that never send the last part of a message, before real listeners over ipc, plain tcp and CURVE."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import pytest
import trio
import zmq

from coordinator.listener import unfinished
from coordinator.listener.sweeper import LOOK_INTERVAL_S
from hisparse.client.client import Client, open_client
from protocol import messages
from protocol.messages import CLIENT_MESSAGE_BYTES_MAX, PROTOCOL_VERSION
from protocol.transport.dealer import DealerSocket
from protocol.transport.keys import Insecure, PeerKey
from tests.support.guarded_rig import Guarded, guarded
from tests.support.limits import HANG_LIMIT_S
from tests.support.zmtp_peer import MORE, Peer, curve_peer, frame

HELLO = messages.encode(messages.Hello(PROTOCOL_VERSION, "client", "hostile"))
PARTS = 160
PART = frame(bytes(CLIENT_MESSAGE_BYTES_MAX), MORE)
#: Without parts in buffers of their own: 2 bytes on the wire, 64 in memory.
TINY_PARTS = frame(b"", MORE) * 65_536


def key_of(it: Guarded, transport: str) -> PeerKey | Insecure | None:
    if transport == "curve":
        return it.key("client", "alice")
    return Insecure() if transport == "plain" else None


def another(it: Guarded, transport: str) -> AbstractAsyncContextManager[Client]:
    return open_client(it.endpoint("client"), name="test", key=key_of(it, transport), reconnect_limit_s=0)


def flood(endpoint: str, data: bytes, times: int, *, after_hello: bool) -> int:
    """Send `data` until the connection is ended, as fast as the loop of the coordinator turns; returns how many times
    it was sent."""
    peer = Peer(endpoint)
    if after_hello:
        peer.send(frame(HELLO))
        peer.socket.recv(65_536)
    try:
        for sent in range(times):
            trio.from_thread.run(trio.lowlevel.checkpoint)
            if not peer.send(data):
                return sent
        return times
    finally:
        peer.close()


def flood_curve(it: Guarded, *, after_hello: bool) -> int:
    """Send PARTS and the last part, which the relay holds back; returns the parts that it passed on."""
    part = bytes(CLIENT_MESSAGE_BYTES_MAX)
    with curve_peer(it.endpoint("client"), it.key("client", "bob")) as (dealer, relay):
        if after_hello:
            dealer.send(HELLO)
            dealer.recv()
        relay.hold_after = held = PARTS * CLIENT_MESSAGE_BYTES_MAX
        for _ in range(PARTS):
            dealer.send(part, zmq.SNDMORE, copy=False)
        dealer.send(part)
        relay.ended.wait(HANG_LIMIT_S / 2)
        return PARTS if not relay.ended.is_set() else (held - relay.hold_after) // CLIENT_MESSAGE_BYTES_MAX


@pytest.mark.parametrize("after_hello", [False, True], ids=["before hello", "after hello"])
@pytest.mark.parametrize("transport", ["ipc", "plain", "curve"])
async def test_unfinished_message_ends_its_connection(tmp_path: Path, transport: str, *, after_hello: bool) -> None:
    """I8: 160 parts of 8 MiB, and never the last."""
    with trio.fail_after(HANG_LIMIT_S):
        async with guarded(tmp_path, transport=transport) as it, another(it, transport) as client:
            if transport == "curve":
                attack = partial(flood_curve, it, after_hello=after_hello)
            else:
                attack = partial(flood, it.endpoint("client"), PART, PARTS, after_hello=after_hello)
            assert await trio.to_thread.run_sync(attack) < PARTS // 2
            assert it.dropped("client")["unfinished"] == 1
            assert await client.workers() == ()


async def test_parts_without_content_end_a_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bytes would be within the bound on bytes for long; their memory is not."""
    with trio.fail_after(HANG_LIMIT_S):
        async with guarded(tmp_path, transport="ipc") as it, another(it, "ipc") as client:
            monkeypatch.setattr(unfinished, "GROWTH_BYTES_MAX", 64 << 20)
            times = 2 * 8 * CLIENT_MESSAGE_BYTES_MAX // len(TINY_PARTS)
            attack = partial(flood, it.endpoint("client"), TINY_PARTS, times, after_hello=False)
            assert await trio.to_thread.run_sync(attack) < times
            assert it.dropped("client")["unfinished"] == 1
            assert await client.workers() == ()


@pytest.mark.parametrize("transport", ["ipc", "plain", "curve"])
async def test_message_that_stays_unfinished_ends_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    with trio.fail_after(HANG_LIMIT_S):
        async with guarded(tmp_path, transport=transport) as it, another(it, transport) as client:
            if transport == "curve":
                with curve_peer(it.endpoint("client"), it.key("client", "bob")) as (dealer, relay):
                    dealer.send(HELLO)
                    await trio.to_thread.run_sync(dealer.recv)
                    relay.hold_after = 10_000
                    dealer.send(bytes(20_000))
                    monkeypatch.setattr(unfinished, "UNFINISHED_LIMIT_S", 0.5)
                    await trio.to_thread.run_sync(relay.ended.wait)
            else:
                peer = await trio.to_thread.run_sync(Peer, it.endpoint("client"))
                peer.send(frame(bytes(20_000))[:10_000])
                monkeypatch.setattr(unfinished, "UNFINISHED_LIMIT_S", 0.5)
                assert await trio.to_thread.run_sync(peer.closed_by_peer)
                peer.close()
            assert it.dropped("client")["unfinished"] == 1
            assert await client.workers() == ()


@pytest.mark.parametrize("transport", ["ipc", "plain", "curve"])
async def test_whole_messages_leave_no_bytes_pending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """What is counted for a message is what libzmq writes, to the byte: a lasting connection gathers no error.

    One byte too few for the messages of one size would be pending for ever, and end the connection.
    """
    monkeypatch.setattr(unfinished, "SLACK_BYTES", 1_500)
    sizes = [size for size in (0, 1, 222, 223, 255, 256) for _ in range(1_600)] + [CLIENT_MESSAGE_BYTES_MAX + 1] * 5
    with trio.fail_after(HANG_LIMIT_S):
        async with guarded(tmp_path, transport=transport, messages_per_s=1e9, messages_burst=10**9) as it:
            dealer = await DealerSocket.connect(
                it.endpoint("client"), message_bytes_max=1 << 30, key=key_of(it, transport)
            )
            await dealer.send(HELLO)
            for size in sizes:
                await dealer.send(bytes(size))
            while it.dropped("client").get("protocol", 0) < len(sizes):  # noqa: ASYNC110
                await trio.sleep(0.01)
            # Only now: a message may be on its way for as long as a busy machine takes.
            monkeypatch.setattr(unfinished, "UNFINISHED_LIMIT_S", 0.0)
            with trio.move_on_after(2.5 * LOOK_INTERVAL_S):
                while True:
                    await dealer.recv_batch()
            assert it.dropped("client") == {"protocol": len(sizes)}
            dealer.close()
