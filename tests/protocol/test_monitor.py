"""How a connection of libzmq is ended, with sockets of the kernel alone."""

from __future__ import annotations

import socket

import pytest

from protocol.transport.watched import end_connection

#: Far above what it takes; without a reset, Linux takes minutes.
HEARD_S = 10.0


def test_peer_that_waits_for_room_hears_of_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as peer:
        here, _ = server.accept()
        peer.settimeout(0.2)
        with pytest.raises(TimeoutError):
            peer.sendall(bytes(64 << 20))  # more than both ends hold
        end_connection(here.fileno())
        while here.recv(65_536):  # as libzmq does, until it finds the end
            pass
        here.close()
        peer.settimeout(HEARD_S)
        with pytest.raises(ConnectionError):
            peer.sendall(bytes(64 << 20))


def test_end_of_what_has_closed_does_nothing() -> None:
    one, other = socket.socketpair()
    descriptor = one.fileno()
    one.close()
    other.close()
    end_connection(descriptor)
