"""A whole coordinator in this process, over tcp with keys, without them, or over ipc: what its listeners let through,
and who may do what."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import msgspec
import trio

from coordinator.listener.router import RouterSocket
from coordinator.service import Coordinator, open_sockets, open_zap
from hisparse.client.client import Client, open_client
from metrics.state import CoordinatorCounters
from protocol import messages
from protocol.config import HostFacts, build
from protocol.messages import WorkerWelcome
from protocol.settings import Config
from protocol.transport.dealer import DealerSocket
from protocol.transport.keys import PeerKey, add_peer, make_keys, read_peer_key
from tests.support.fakes.worker import FakeWorker, hello

#: Each listener needs a separate endpoint before it knows its port.
ANY_PORT = {"client": "tcp://127.0.0.1:*", "admin": "tcp://127.0.0.2:*", "worker": "tcp://127.0.0.3:*"}


def new_keys(directory: Path) -> Path:
    """Keys of one client, admin and worker, and of the clients alice and bob."""
    keys = directory / "keys"
    make_keys(keys)
    for name in ("alice", "bob"):
        add_peer(keys, "client", name)
    return keys


class Guarded:
    def __init__(self, coordinator: Coordinator, sockets: dict[str, RouterSocket], keys: Path) -> None:
        self.coordinator = coordinator
        self.sockets = sockets
        self.keys = keys

    def endpoint(self, role: str) -> str:
        return self.sockets[role].endpoint

    def key(self, role: str, name: str = "") -> PeerKey:
        """As its bearer has it: under the name of its role in a separate directory."""
        if not name:
            return read_peer_key(self.keys, role)
        own = self.keys / name
        own.mkdir(mode=0o700, exist_ok=True)
        target = own / f"{role}.key"
        target.unlink(missing_ok=True)
        target.touch(0o600)
        target.write_text((self.keys / f"{role}.{name}.key").read_text())
        return read_peer_key(own, role)

    def stranger(self, role: str, directory: Path) -> PeerKey:
        """A key that is not on the list, of a client that knows the coordinator's."""
        make_keys(directory)
        return dataclasses.replace(read_peer_key(directory, role), server=self.key(role).server)

    def client(self, name: str = "", reconnect_limit_s: float = 0.0) -> AbstractAsyncContextManager[Client]:
        key = self.key("client", name)
        return open_client(self.endpoint("client"), name="test", key=key, reconnect_limit_s=reconnect_limit_s)

    def admin(self) -> AbstractAsyncContextManager[Client]:
        return open_client(
            self.endpoint("admin"), role="admin", name="test", key=self.key("admin"), reconnect_limit_s=0
        )

    async def dealer(self, role: str, name: str = "") -> DealerSocket:
        return await DealerSocket.connect(self.endpoint(role), message_bytes_max=1 << 30, key=self.key(role, name))

    async def worker(self) -> FakeWorker:
        worker = await FakeWorker.connect(self.endpoint("worker"), key=self.key("worker"))
        await worker.say(hello())
        assert isinstance(await worker.hear(), WorkerWelcome)
        return worker

    def lose_patience(self, heartbeat_limit_s: float) -> None:
        """From now on a worker is down when it says nothing for so long."""
        msgspec.structs.force_setattr(self.coordinator._config.coordinator, "heartbeat_limit_s", heartbeat_limit_s)

    def dropped(self, role: str) -> dict[str, int]:
        return {reason: n for (where, reason), n in self.coordinator.counters.dropped_messages.items() if where == role}


def guarded_config(directory: Path, keys: Path, transport: str = "curve", **settings: object) -> Config:
    flags: dict[str, object] = {
        "cluster.runtime_dir": f"{directory}/run",
        "coordinator.live_requests_max": 256,
        "coordinator.queue_max": 256,
        "coordinator.ended_keep_max": 64,
        "coordinator.metrics_port": -1,
        "coordinator.flush_interval_ms": 1.0,
        "coordinator.heartbeat_limit_s": 600.0,  # fake workers say nothing by themselves
    }
    for role, endpoint in ANY_PORT.items():
        ipc = f"ipc://{directory}/run/{role}.sock"
        flags[f"cluster.{role}_endpoint"] = ipc if transport == "ipc" else endpoint
    if transport == "curve":
        flags["cluster.keys_dir"] = str(keys)
    flags["cluster.insecure"] = transport == "plain"
    return build({}, {}, flags | {f"coordinator.{name}": value for name, value in settings.items()}, HostFacts.read())


@asynccontextmanager
async def guarded(
    directory: Path, keys: Path | None = None, transport: str = "curve", **settings: object
) -> AsyncIterator[Guarded]:
    """A coordinator over "curve", "plain" (tcp without keys) or "ipc"; `settings` of its table."""
    keys = keys or new_keys(directory)
    config, counters = guarded_config(directory, keys, transport, **settings), CoordinatorCounters()
    with open_zap(config, counters) as zap, open_sockets(config) as sockets:
        coordinator = Coordinator(config, *sockets, zap=zap, counters=counters)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(coordinator.serve)
            await coordinator.started.wait()
            yield Guarded(coordinator, dict(zip(("client", "admin", "worker"), sockets, strict=True)), keys)
            nursery.cancel_scope.cancel()


async def next_command(worker: FakeWorker) -> messages.Command:
    while True:
        match await worker.hear():
            case messages.Commands(commands=(command, *_)):
                return command
