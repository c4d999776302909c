"""Each room that refuses: one owner fills it until it is refused, and the next owner finds its share at once."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest
import trio

from basics.rooms import BY_NAME, WhenFull
from coordinator.gateway import deliveries as deliveries_module
from coordinator.gateway import gateway as gateway_module
from coordinator.listener.connection_tracker import ConnectionTracker
from coordinator.tokens.token_log import TokenLog
from coordinator.turn import request_table
from hisparse.http import front as front_module
from hisparse.http.server.body_reader import place_in
from hisparse.http.server.exchange import Channel
from hisparse.http.server.listener import HttpListener
from hisparse.http.server.wire import RequestHead
from metrics.state import HttpCounters
from protocol import messages
from protocol.arrays import pack_int32
from protocol.errors import CapacityError
from protocol.settings import CoordinatorSettings, HttpSettings
from tests.coordinator.test_rooms import FullSocket
from tests.support.gateway_rig import GatewayRig
from tests.support.http_rig import FrontRig, Peer, front_rig
from tests.support.limits import HANG_LIMIT_S
from tests.support.scheduler_rig import open_rig

#: An owner takes one thing more; False: it is refused.
Take: TypeAlias = Callable[[str], Awaitable[bool]]
Room: TypeAlias = Callable[[Path, pytest.MonkeyPatch], AbstractAsyncContextManager[Take]]

HOSTILE: Final = "key-of-the-hostile-owner-00000001"
OTHER: Final = "key-of-another-owner-000000000002"
#: More than any of the rooms holds here.
TAKES_MAX: Final = 200
#: Of what the next owner gets at once.
OTHERS: Final = 2


def taking(act: Callable[[str], object]) -> Take:
    """Make a Take of what raises CapacityError where it refuses."""

    async def take(owner: str) -> bool:
        try:
            act(owner)
        except CapacityError:
            return False
        return True

    return take


@asynccontextmanager
async def output_places(path: Path, patch: pytest.MonkeyPatch) -> AsyncIterator[Take]:
    """Outputs that grow as far as they may."""
    log = TokenLog(request_indices=500, arena_tokens=1 << 14)
    opened: dict[str, list[int]] = {HOSTILE: [], OTHER: []}

    def act(owner: str) -> None:
        opened[owner].append(log.open(300, tokens=10, owner=owner))
        for request_index in opened[HOSTILE]:
            log.make_room(request_index, 300)
        assert owner == HOSTILE or log.make_room(opened[owner][0], 300)

    yield taking(act)


def submitting(settings: CoordinatorSettings, prompt_bytes_max: int = 1 << 20) -> Room:
    @asynccontextmanager
    async def open_room(path: Path, patch: pytest.MonkeyPatch) -> AsyncIterator[Take]:
        patch.setattr(request_table, "PROMPT_BYTES_MAX", prompt_bytes_max)
        numbers = count()
        async with open_rig(settings=settings) as rig:
            await rig.add_worker("w0", seats=1)

            async def take(owner: str) -> bool:
                try:
                    await rig.submit(f"r{next(numbers)}!", 100, tenant=owner)
                except CapacityError:
                    return False
                return True

            yield take

    return open_room


@asynccontextmanager
async def connections(path: Path, patch: pytest.MonkeyPatch) -> AsyncIterator[Take]:
    tracker, descriptors = ConnectionTracker(connections_max=16, per_user_max=4), count()

    def act(owner: str) -> None:
        tracker.came(descriptor := next(descriptors), 0.0)
        tracker.introduce(descriptor, owner)

    yield taking(act)


@asynccontextmanager
async def subscriptions(path: Path, patch: pytest.MonkeyPatch) -> AsyncIterator[Take]:
    patch.setattr(deliveries_module, "SUBSCRIPTIONS_MAX", 32)
    rig = GatewayRig(path)
    unread: Any = FullSocket()
    peers = {it: rig.deliveries.connections.open(unread, it.encode(), "client", "", 0.0, it) for it in (HOSTILE, OTHER)}

    def act(owner: str) -> None:
        rig.deliveries.check_room(peers[owner])
        rig.deliveries.subscribe(peers[owner], rig.log.open(10), 0)

    yield taking(act)
    rig.client_socket.close()
    rig.admin_socket.close()


@asynccontextmanager
async def commands(path: Path, patch: pytest.MonkeyPatch) -> AsyncIterator[Take]:
    """Submissions that the Scheduler does not answer."""
    patch.setattr(gateway_module, "ASKS_MAX", 32)
    rig = GatewayRig(path)

    async def never(*_: object, **__: object) -> None:
        await trio.sleep_forever()

    patch.setattr(rig.scheduler, "submit", never)
    unread: Any = FullSocket()
    peers = {it: rig.deliveries.connections.open(unread, it.encode(), "client", "", 0.0, it) for it in (HOSTILE, OTHER)}
    submit = messages.Submit(1, pack_int32([1]), messages.Sampling(4))
    async with trio.open_nursery() as nursery:
        yield taking(lambda owner: rig.gateway._start(peers[owner], submit, 1, nursery))
        nursery.cancel_scope.cancel()
    rig.client_socket.close()
    rig.admin_socket.close()


# ---------------------------------------------------------------- of the front


def fronting(take_of: Callable[[FrontRig, ExitStack], Take], requests_max: int = 8) -> Room:
    @asynccontextmanager
    async def open_room(path: Path, patch: pytest.MonkeyPatch) -> AsyncIterator[Take]:
        patch.setattr(front_module, "BODIES_BYTES_MAX", 2_000)
        async with front_rig(path, HttpSettings(requests_max=requests_max), keys=(HOSTILE, OTHER)) as rig:
            with ExitStack() as stack:
                yield take_of(rig, stack)

    return open_room


def bearer(owner: str) -> dict[str, str]:
    return {"authorization": f"Bearer {owner}"}


async def settled(peer: Peer, is_in: Callable[[], bool]) -> bool:
    """Wait until the peer is let in, or refused."""
    with trio.fail_after(HANG_LIMIT_S):
        while not (peer.status or is_in()):  # noqa: ASYNC110
            await trio.sleep(0.002)
    assert peer.status in (0, 200, 429)
    return peer.status != 429


def answered(rig: FrontRig, _: ExitStack) -> Take:
    """Streams that do not end."""

    async def take(owner: str) -> bool:
        before = len(rig.gateway.scheduler.request_indices)
        peer = await rig.complete({"prompt": "abc", "stream": True, "max_tokens": 4}, **bearer(owner))
        return await settled(peer, lambda: len(rig.gateway.scheduler.request_indices) > before)

    return take


def arriving(sent: bytes, room: str) -> Callable[[FrontRig, ExitStack], Take]:
    """Bodies that begin and do not go on."""

    def take_of(rig: FrontRig, _: ExitStack) -> Take:
        async def take(owner: str) -> bool:
            before = rig.front.room_use()[room].used
            peer = rig.open("POST", "/v1/completions", bearer(owner))
            await peer.say(sent, more=True)
            return await settled(peer, lambda: rig.front.room_use()[room].used > before)

        return take

    return take_of


def getting(rig: FrontRig, stack: ExitStack) -> Take:
    return taking(lambda owner: stack.enter_context(place_in(rig.front._gets, owner)))


@asynccontextmanager
async def http_connections(path: Path, patch: pytest.MonkeyPatch) -> AsyncIterator[Take]:
    """Connections that stay open; the owner is in their path."""
    with ExitStack() as stack:
        async with trio.open_nursery() as nursery:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            server.setblocking(False)

            async def serve(head: RequestHead, channel: Channel) -> None:
                await channel.admit(head.path)
                await channel.start(204, {})
                await channel.end()

            listener = HttpListener(server, serve, HttpCounters(), connections_max=16)
            nursery.start_soon(listener.run, trio.Event())
            peers = []

            async def take(owner: str) -> bool:
                peers.append(peer := await trio.open_tcp_stream(*server.getsockname()))
                await peer.send_all(b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % owner.encode())
                return bool(await peer.receive_some())

            yield take
            nursery.cancel_scope.cancel()


ROOMS: Final[dict[str, Room]] = {
    "output_places": output_places,
    "live_requests": submitting(CoordinatorSettings(live_requests_max=32, queue_max=1_000, prefix_reuse="off")),
    "waiting_requests": submitting(CoordinatorSettings(live_requests_max=1_000, queue_max=32, prefix_reuse="off")),
    "prompt_bytes": submitting(CoordinatorSettings(prefix_reuse="off"), prompt_bytes_max=12_800),
    "connections": connections,
    "subscriptions": subscriptions,
    "commands": commands,
    "http_requests": fronting(answered),
    "http_arriving": fronting(arriving(b"", "http_arriving")),
    "http_gets": fronting(getting),
    "http_body_bytes": fronting(arriving(bytes(200), "http_body_bytes"), requests_max=1_000),
    "http_connections": http_connections,
}


@pytest.mark.parametrize("name", ROOMS)
async def test_one_owner_fills_a_room_and_the_next_has_its_share_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ROOMS[name](tmp_path, monkeypatch) as take:
        taken = 0
        while taken < TAKES_MAX and await take(HOSTILE):
            taken += 1
        assert taken < TAKES_MAX or name == "http_connections", "that one closes an older one for each that comes"
        assert taken >= OTHERS
        assert [await take(OTHER) for _ in range(OTHERS)] == [True] * OTHERS


def test_every_room_that_refuses_is_tried() -> None:
    refusing = {name for name, room in BY_NAME.items() if room.when_full is WhenFull.REFUSES}
    assert refusing - ROOMS.keys() == {"journal_records"}, "its bound follows from others"
    assert ROOMS.keys() <= refusing
