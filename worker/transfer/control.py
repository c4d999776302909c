"""The control sockets: a ROUTER at the receiver, a DEALER for each receiver at the sender. Used by one thread each.

A sender's routing id is its name, which one process has at a time; libzmq reconnects by itself, and whatever it loses
is asked for again (wire.py). Over tcp the channel is CURVE-encrypted with a key drawn for this receiver: its
description, which only the coordinator hands out, says whom to trust; the number `receiver_id` in it, drawn for each
receiver, says who may begin.

CURVE does not protect the data path of an engine: UCX and Mooncake on TCP let any peer that reaches their ports
write to the process's memory. Only the cluster's nodes may reach their network (docs/prefill-decode.md).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

import zmq

from protocol.errors import ConfigError, ProtocolError
from worker.transfer.wire import CONTROL_BYTES_MAX, ReceiverMessage, SenderMessage, encode, from_receiver, from_sender

#: Messages that libzmq queues per connection; more are dropped, and asked for again.
QUEUE_MESSAGES: Final = 10_000
#: Messages taken at one go, so that engines get their turn.
BATCH_MESSAGES_MAX: Final = 256
#: Half-open connections are closed, and opened again, after this.
HEARTBEAT_MS: Final = 2_000
LINGER_MS: Final = 200


class ReceiverControl:
    """Binds to `address` (tcp://host:port, port 0 for any; ipc://path). Raises ConfigError when that cannot be had."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnect may come before the loss was noticed
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        _configure(self.socket)
        self.key = b""
        self.unreadable = 0
        try:
            if address.startswith("tcp:"):
                self.key, secret = zmq.curve_keypair()
                self.socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
                self.socket.setsockopt(zmq.CURVE_SERVER, 1)
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"cannot listen for senders of pages: {error}",
                field="worker.transfer_address",
                value=address,
                remedy="name an address of this node, tcp://HOST:PORT, that no other process uses",
            ) from error
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def host(self) -> str:
        return urlsplit(self.address).hostname or "127.0.0.1"

    def receive(self) -> list[tuple[str, SenderMessage]]:
        """What has come, at most BATCH_MESSAGES_MAX; unreadable messages are counted and dropped."""
        heard: list[tuple[str, SenderMessage]] = []
        for _ in range(BATCH_MESSAGES_MAX):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                sender, data = frames
                heard.append((sender.decode(), from_sender(data)))
            except (ValueError, ProtocolError):
                self.unreadable += 1
        return heard

    def send(self, sender: str, message: ReceiverMessage) -> None:
        """Dropped when the sender is gone or its queue is full."""
        with suppress(zmq.ZMQError):
            self.socket.send_multipart((sender.encode(), encode(message)), zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.close(LINGER_MS)
        self._context.term()


class SenderControl:
    """Connections to any number of receivers, by their addresses."""

    def __init__(self, name: str) -> None:
        self._name = name.encode()
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._keys: dict[str, bytes] = {}
        self.poller = zmq.Poller()
        self.unreadable = 0

    def reach(self, address: str, key: bytes) -> None:
        """Connect to `address`, anew when another receiver is there now."""
        if address in self._sockets and self._keys[address] == key:
            return
        self.leave(address)
        socket = self._context.socket(zmq.DEALER)
        _configure(socket)
        socket.setsockopt(zmq.IDENTITY, self._name)
        if key:
            public, secret = zmq.curve_keypair()
            socket.setsockopt(zmq.CURVE_SERVERKEY, key)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.connect(address)
        self._sockets[address], self._keys[address] = socket, key
        self.poller.register(socket, zmq.POLLIN)

    def leave(self, address: str) -> None:
        socket = self._sockets.pop(address, None)
        if socket is not None:
            self.poller.unregister(socket)
            socket.close(LINGER_MS)

    def receive(self) -> list[tuple[str, ReceiverMessage]]:
        """What has come, at most BATCH_MESSAGES_MAX from each; unreadable messages are counted and dropped."""
        return [(address, message) for address, socket in self._sockets.items() for message in self._drain(socket)]

    def _drain(self, socket: zmq.Socket[bytes]) -> list[ReceiverMessage]:
        heard: list[ReceiverMessage] = []
        for _ in range(BATCH_MESSAGES_MAX):
            try:
                heard.append(from_receiver(socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
            except ProtocolError:
                self.unreadable += 1
        return heard

    def send(self, address: str, message: SenderMessage) -> None:
        """Dropped when the queue is full, or the receiver was left."""
        with suppress(zmq.ZMQError, KeyError):
            self._sockets[address].send(encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        for address in list(self._sockets):
            self.leave(address)
        self._context.term()


def _configure(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, CONTROL_BYTES_MAX)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * HEARTBEAT_MS)
