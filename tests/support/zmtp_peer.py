"""A peer that speaks ZMTP 3.0 by hand, so that it may leave a multipart message unfinished: libzmq's sockets cannot.

Peer           NULL mechanism, over ipc or tcp without keys: every byte is written here
curve_peer     CURVE: a DEALER of libzmq sends a whole message, and a relay holds the end of it back
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import zmq

from protocol.transport.curve import show_key
from protocol.transport.keys import PeerKey
from tests.support.limits import HANG_LIMIT_S

MORE: Final = 1
LONG: Final = 2
COMMAND: Final = 4
#: Signature, version 3.0, mechanism, not a server.
GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
READY: Final = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"


def frame(body: bytes, flags: int = 0) -> bytes:
    """`body` with the header of a frame."""
    if len(body) > 255:
        return bytes([flags | LONG]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, len(body)]) + body


def connect(endpoint: str) -> socket.socket:
    """A connection to an endpoint of ZMQ, without a word said."""
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc":
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(HANG_LIMIT_S)
        connection.connect(address)
        return connection
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=HANG_LIMIT_S)


class Peer:
    """After the handshake. `send` returns False once the other end has closed."""

    def __init__(self, endpoint: str) -> None:
        self.socket = connect(endpoint)
        self.socket.sendall(GREETING + frame(READY, COMMAND))
        self._read(64)
        flags, size = self._read(2)
        assert flags == COMMAND
        assert self._read(size).startswith(b"\x05READY")

    def _read(self, count: int) -> bytes:
        got = b""
        while len(got) < count:
            piece = self.socket.recv(count - len(got))
            if not piece:
                raise ConnectionError("closed in the handshake")
            got += piece
        return got

    def send(self, data: bytes) -> bool:
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        return True

    def closed_by_peer(self) -> bool:
        """Wait for the end of the connection, HANG_LIMIT_S at most, reading what comes before."""
        with suppress(ConnectionError):
            try:
                while self.socket.recv(65_536):
                    pass
            except TimeoutError:
                return False
        return True

    def close(self) -> None:
        self.socket.close()


class Relay:
    """Passes bytes between one connection of a dealer and `endpoint`; once `hold_after` is set, only so many more
    of the dealer's."""

    def __init__(self, endpoint: str) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._there = connect(endpoint)
        self._there.settimeout(None)
        self.hold_after: int | None = None
        self.ended = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        self._here, _ = self._listener.accept()
        threading.Thread(target=self._back, daemon=True).start()
        with suppress(OSError):
            while data := self._here.recv(1 << 20):
                if self.hold_after is not None:
                    data = data[: self.hold_after]
                    self.hold_after -= len(data)
                self._there.sendall(data)

    def _back(self) -> None:
        with suppress(OSError):
            while data := self._there.recv(1 << 20):
                self._here.sendall(data)
        self.ended.set()

    def close(self) -> None:
        for each in (self._listener, self._here, self._there):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@contextmanager
def curve_peer(endpoint: str, key: PeerKey) -> Iterator[tuple[zmq.Socket[bytes], Relay]]:
    """A dealer with `key`, behind a relay."""
    relay = Relay(endpoint)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    show_key(dealer, key)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.RECONNECT_IVL, -1)
    dealer.connect(relay.endpoint)
    try:
        yield dealer, relay
    finally:
        relay.close()
        context.destroy(linger=0)
