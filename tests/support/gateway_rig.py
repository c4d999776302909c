"""A real Gateway over real ipc sockets in front of a FakeScheduler, for tests of the gateway and of the client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import trio

from coordinator.gateway.deliveries import Deliveries
from coordinator.gateway.gateway import Gateway
from coordinator.listener.router import RouterSocket
from coordinator.scheduler.api import SchedulerApi
from coordinator.tokens.token_log import TokenLog
from metrics.state import CoordinatorCounters
from protocol import messages
from protocol.errors import ConfigError, Unavailable
from protocol.messages import CLIENT_MESSAGE_BYTES_MAX, PROTOCOL_VERSION, GatewayMessage
from protocol.transport.dealer import DealerSocket
from tests.support.fakes.scheduler import FakeScheduler
from tests.support.limits import HANG_LIMIT_S


class FakeTokenizers:
    def __init__(self) -> None:
        self.data = b""

    def tokenizer(self, model: messages.ModelInfo | None) -> tuple[str, str, bytes]:
        if not self.data:
            raise Unavailable("the tokenizer has not arrived yet", remedy="retry in a moment")
        return "json", "hash", self.data


class GatewayRig:
    """One coordinator's front: sockets, deliveries, gateway."""

    def __init__(
        self,
        directory: Path,
        incarnation: int = 1,
        connections_max: int = 64,
        queue_messages: int = 1000,
        rate: tuple[float, float] = (2_000.0, 20_000.0),
        request_indices: int = 64,
    ):
        sockets = [
            RouterSocket(
                f"ipc://{directory}/run/{role}.sock",
                message_bytes_max=CLIENT_MESSAGE_BYTES_MAX,
                queue_messages=queue_messages,
            )
            for role in ("client", "admin")
        ]
        self.client_socket, self.admin_socket = sockets
        self.counters = CoordinatorCounters()
        self.log = TokenLog(request_indices, arena_tokens=1 << 22)
        self.deliveries = Deliveries(self.log, self.counters, connections_max=connections_max, flush_interval_s=0.001)
        self.scheduler = FakeScheduler(self.log, self.deliveries)
        self.tokenizers = FakeTokenizers()
        self.gateway = Gateway(
            cast(SchedulerApi, self.scheduler),
            self.deliveries,
            self.log,
            self.tokenizers,
            self.counters,
            client_socket=self.client_socket,
            admin_socket=self.admin_socket,
            incarnation=incarnation,
            version="test",
            rate=rate,
            reload_keys=self._reload_keys,
        )
        #: What a reload of keys finds.
        self.reloaded: str | ConfigError = "allowed keys: changed"
        self._scope = trio.CancelScope()
        self._stopped = trio.Event()

    def _reload_keys(self) -> str:
        if isinstance(self.reloaded, ConfigError):
            raise self.reloaded
        return self.reloaded

    @property
    def connections(self) -> int:
        return len(self.deliveries.connections)

    def dropped(self, socket: str = "client") -> dict[str, int]:
        return {reason: n for (where, reason), n in self.counters.dropped_messages.items() if where == socket}

    def speak(self, request_id: str, tokens: list[int]) -> None:
        self.scheduler.speak(request_id, tokens)
        self.deliveries.wake()

    async def dealer(self, role: str = "client") -> DealerSocket:
        socket = self.client_socket if role == "client" else self.admin_socket
        return await DealerSocket.connect(socket.endpoint, message_bytes_max=1 << 30)

    async def run(self) -> None:
        """Serve until `kill` or `gateway.close`; connections are cut on the way out."""
        try:
            with self._scope:
                await self.gateway.run()
        finally:
            self.client_socket.close()
            self.admin_socket.close()
            self._stopped.set()

    async def kill(self) -> None:
        self._scope.cancel()
        await self._stopped.wait()


@asynccontextmanager
async def running(rig: GatewayRig) -> AsyncIterator[GatewayRig]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.run)
        yield rig
        await rig.kill()


async def say(dealer: DealerSocket, *sent: messages.Message | bytes) -> None:
    for message in sent:
        await dealer.send(message if isinstance(message, bytes) else messages.encode(message))


async def hear(dealer: DealerSocket, count: int = 1, *, at_least: bool = False) -> list[GatewayMessage]:
    """The next `count` messages (or more, with `at_least`), keepalives apart."""
    heard: list[GatewayMessage] = []
    with trio.fail_after(HANG_LIMIT_S):
        while len(heard) < count:
            for frame in await dealer.recv_batch():
                message = messages.decode_gateway(frame)
                if message != messages.Delivery(b"", b"", b"", b""):
                    heard.append(message)
    assert at_least or len(heard) == count, heard
    return heard


async def introduce(rig: GatewayRig, role: str = "client") -> DealerSocket:
    dealer = await rig.dealer(role)
    await say(dealer, messages.Hello(PROTOCOL_VERSION, role, "test"))
    (welcome,) = await hear(dealer)
    assert isinstance(welcome, messages.Welcome)
    return dealer
