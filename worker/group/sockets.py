"""The sockets of a group's control connection: a DEALER on each rank, a ROUTER on rank 0.

On a path the endpoint is protected by its directory (0700). On tcp the ranks prove that they know one secret: both key
pairs of CURVE, that of rank 0 and that of all ranks, are derived from it. The connections of the collectives are not
encrypted: they need a network that strangers cannot reach (docs/security.md).

Rank 0 bounds the connections that say nothing (Newcomers), and ends one by the shutdown of its descriptor, which
libzmq takes for a disconnect by the peer. The end of such a connection is none of a rank's.

libzmq accepts any number of connections, and each takes a descriptor of the process. A rank says who it is as soon as
its handshake is done, in milliseconds, and again every second. So a connection that stays silent, whether in its
handshake or behind it, is a stranger's: past a time, and beyond a number, it is ended.
"""

from __future__ import annotations

import hashlib
import os
import socket as unix
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from protocol.errors import ConfigError, NotAllowed
from protocol.settings import Config
from protocol.small_files import read_small_file
from protocol.transport.private_dir import make_private_dir
from protocol.transport.watched import end_connection, monitor_of
from worker.group.messages import MESSAGE_BYTES_MAX

#: From accept to the first message. A rank that was ended by mistake connects again.
SPEAK_LIMIT_S: Final = 10.0
#: Silent connections at once; the oldest beyond it are ended.
NEWCOMERS_MAX: Final = 128


class Newcomers:
    """Connections by descriptor, in order of their accept."""

    def __init__(self) -> None:
        self._came_at: dict[int, float] = {}
        self._ended: set[int] = set()  # and not closed yet

    def __len__(self) -> int:
        return len(self._came_at)

    def came(self, descriptor: int, now: float) -> None:
        """A connection was accepted. An earlier one with this descriptor has closed."""
        self.left(descriptor)
        self._came_at[descriptor] = now

    def spoke(self, descriptor: int) -> None:
        """A message came: it is a rank's connection."""
        self._came_at.pop(descriptor, None)

    def left(self, descriptor: int) -> bool:
        """The connection has closed. Returns whether it was silent until then."""
        was_ended = descriptor in self._ended
        self._ended.discard(descriptor)
        return self._came_at.pop(descriptor, None) is not None or was_ended

    def take_overdue(self, now: float) -> list[int]:
        """Those to end, each once: past SPEAK_LIMIT_S, and the oldest beyond NEWCOMERS_MAX."""
        surplus = len(self._came_at) - NEWCOMERS_MAX
        overdue = [
            descriptor
            for place, (descriptor, at) in enumerate(self._came_at.items())
            if place < surplus or now - at > SPEAK_LIMIT_S
        ]
        for descriptor in overdue:
            del self._came_at[descriptor]
        self._ended.update(overdue)
        return overdue


SECRET_CHARS_MIN: Final = 32
SECRET_BYTES_MAX: Final = 4_096
#: For messages queued when the process ends.
LINGER_MS: Final = 500
RECONNECT_MS: Final = 50
#: libzmq closes connections whose handshake takes longer.
HANDSHAKE_LIMIT_MS: Final = 5_000
IDENTITY_BYTES: Final = 16
#: Messages taken at once from one socket; the rest is taken next.
MESSAGES_MAX: Final = 1_024


class ControlSockets:
    """The DEALER to rank 0 and, on rank 0, the ROUTER. Used by the control thread alone."""

    def __init__(self, config: Config, is_hub: bool) -> None:
        self._endpoint = config.worker.group_endpoint
        self._is_hub = is_hub
        self._secret = _secret(config)
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] | None = None
        self._newcomers = Newcomers()
        self._monitors: list[zmq.Socket[bytes]] = []
        self._authenticator: ThreadAuthenticator | None = None
        if self._endpoint.startswith("ipc://"):
            make_private_dir(str(Path(self._endpoint.removeprefix("ipc://")).parent))

    def open(self) -> None:
        """Bind and connect. Raises ConfigError when another process has the endpoint."""
        server, client = (_pair(self._secret, role) for role in ("rank 0", "rank"))
        self._router = self._bind(server, client) if self._is_hub else None
        self._dealer = self._socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.IDENTITY, b"rank" + os.urandom(IDENTITY_BYTES))  # kept over a broken connection
        if self._secret:
            self._dealer.curve_serverkey = server[0]
            self._dealer.curve_publickey, self._dealer.curve_secretkey = client
        self._dealer.connect(self._endpoint)

    @property
    def descriptors(self) -> list[int]:
        """To poll for reading; after that `has_news` says whether there is any."""
        return [int(socket.getsockopt(zmq.FD)) for socket in self._all()]

    def has_news(self) -> bool:
        return any(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN for socket in self._all())

    def send(self, frame: bytes) -> None:
        with suppress(zmq.Again):  # thousands of messages that rank 0 did not take: it is silent, and judged for that
            self._dealer.send(frame, zmq.DONTWAIT)

    def send_to(self, peer: bytes, frame: bytes) -> None:
        assert self._router is not None
        try:
            self._router.send_multipart([peer, frame], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):  # a rank that takes nothing, or is gone
                raise

    def from_hub(self) -> list[bytes]:
        return [frames[-1].bytes for frames in _received(self._dealer)]

    def from_ranks(self) -> list[tuple[bytes, bytes]]:
        if self._router is None:
            return []
        received = _received(self._router)
        for frames in received:
            self._newcomers.spoke(_descriptor_of(frames[-1]))
        return [(frames[0].bytes, frames[1].bytes) for frames in received if len(frames) == 2]

    def broke(self) -> bool:
        """Whether a connection of a rank broke since the last call."""
        found = False
        for monitor in self._monitors:
            with suppress(zmq.Again):
                while True:
                    event = parse_monitor_message(monitor.recv_multipart(zmq.DONTWAIT))
                    found |= self._ended(int(event["event"]), int(event["value"]))
        return found

    def end_strangers(self) -> int:
        """On rank 0: end connections that stay silent; returns how many. After `broke`, which reads what has closed."""
        overdue = self._newcomers.take_overdue(time.monotonic())
        for descriptor in overdue:
            end_connection(descriptor)
        return len(overdue)

    def _ended(self, event: int, descriptor: int) -> bool:
        """Whether this event is the end of a connection of a rank."""
        if event == zmq.EVENT_ACCEPTED:
            self._newcomers.came(descriptor, time.monotonic())
            return False
        return not self._newcomers.left(descriptor)

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=LINGER_MS)

    def _all(self) -> Iterator[zmq.Socket[bytes]]:
        yield self._dealer
        yield from self._monitors
        if self._router is not None:
            yield self._router

    def _bind(self, server: tuple[bytes, bytes], client: tuple[bytes, bytes]) -> zmq.Socket[bytes]:
        router = self._socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a rank is back before its broken connection is seen to be over
        if self._secret:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(domain="*", credentials_provider=_OneKey(client[0]))
            router.curve_server = True
            router.curve_publickey, router.curve_secretkey = server
        path = self._endpoint.removeprefix("ipc://")
        if path != self._endpoint and _answers(path):
            raise _in_use(self._endpoint)
        try:
            router.bind(self._endpoint)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise _in_use(self._endpoint) from error
            raise ConfigError(
                f"cannot listen there: {error.strerror}",
                field="worker.group_endpoint",
                value=self._endpoint,
                remedy="name an address of the machine of rank 0",
            ) from error
        return router

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.linger = LINGER_MS
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_LIMIT_MS)
        self._monitors.append(monitor_of(socket, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED))
        return socket


class _OneKey:
    """ZAP: the key of the ranks alone."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        del domain
        return key == self._key


def _descriptor_of(frame: zmq.Frame) -> int:
    """Of the frame's connection. -1: the peer speaks a ZMTP before 3.0, to which libzmq gives no properties."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def _received(socket: zmq.Socket[bytes]) -> list[list[zmq.Frame]]:
    found: list[list[zmq.Frame]] = []
    with suppress(zmq.Again):
        while len(found) < MESSAGES_MAX:
            found.append(socket.recv_multipart(zmq.DONTWAIT, copy=False))
    return found


def _answers(path: str) -> bool:
    """Whether a process listens at a path, which ZMQ would take over."""
    with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def _in_use(endpoint: str) -> ConfigError:
    return ConfigError(
        "another process listens there",
        field="worker.group_endpoint",
        value=endpoint,
        remedy="stop it, or give the group another endpoint",
    )


def _secret(config: Config) -> bytes:
    """The secret of a group over tcp; empty for a path, or with cluster.insecure."""
    settings = config.worker
    if not settings.group_endpoint.startswith("tcp://"):
        return b""
    if not settings.group_secret_file:
        if config.cluster.insecure:
            return b""
        raise ConfigError(
            "a group over tcp needs a secret",
            field="worker.group_secret_file",
            value="",
            remedy="head -c 32 /dev/urandom | base64 > FILE, and give FILE to all ranks",
        )
    path = settings.group_secret_file
    data, mode = read_small_file(path, "worker.group_secret_file", bytes_max=SECRET_BYTES_MAX)
    text = data.strip()
    if mode & 0o077:
        raise NotAllowed(
            f"mode {mode & 0o777:04o}: others could read it",
            field="worker.group_secret_file",
            value=path,
            remedy=f"chmod 600 {path}",
        )
    if len(text) < SECRET_CHARS_MIN:
        raise ConfigError(
            f"has {len(text)} characters",
            field="worker.group_secret_file",
            value=path,
            remedy=f"write at least {SECRET_CHARS_MIN} random characters into it",
        )
    return text


def _pair(secret: bytes, role: str) -> tuple[bytes, bytes]:
    """The CURVE key pair of a role, public key first, in Z85: any 32 bytes are a secret key of Curve25519."""
    key = z85.encode(hashlib.blake2b(secret, digest_size=32, person=role.encode()).digest())
    return zmq.curve_public(key), key
