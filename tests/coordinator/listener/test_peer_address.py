"""Addresses of peers in logs: of real connections over ipc and tcp, of one that is gone, of a handshake."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from coordinator.listener.dropped import UNKNOWN, Dropped, peer_address
from coordinator.listener.router import RouterSocket
from protocol.logs import LogfmtFormatter
from protocol.transport.dealer import DealerSocket
from protocol.transport.keys import Insecure

BYTES_MAX = 1_000


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
async def test_address_is_the_process_over_ipc_and_the_socket_over_tcp(tmp_path: Path, kind: str) -> None:
    endpoint = f"ipc://{tmp_path}/run/client.sock" if kind == "ipc" else "tcp://127.0.0.1:*"
    router = RouterSocket(endpoint, message_bytes_max=BYTES_MAX, guard=None if kind == "ipc" else Insecure())
    dealer = await DealerSocket.connect(
        router.endpoint, message_bytes_max=BYTES_MAX, key=None if kind == "ipc" else Insecure()
    )
    try:
        await dealer.send(b"hello")
        (received,) = await router.recv_batch()
        address = peer_address(received.descriptor)
        assert address == f"pid {os.getpid()}" if kind == "ipc" else re.fullmatch(r"127\.0\.0\.1:\d{2,5}", address)
    finally:
        dealer.close()
        router.close()


def test_unknown_connection_has_no_address(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        assert peer_address(file.fileno()) == UNKNOWN, "libzmq closed the socket, and its number was used again"
    assert peer_address(-1) == UNKNOWN


@pytest.mark.parametrize(("peer", "said"), [("10.0.0.2", "peer=10.0.0.2"), (-1, f"peer={UNKNOWN}")])
def test_dropped_message_is_logged_with_the_address(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, peer: int | str, said: str
) -> None:
    monkeypatch.setattr(logging.getLogger("hisparse"), "propagate", True)
    Dropped("client", Counter()).note("rate", peer, "too many", 1.0)
    (record,) = caplog.records
    assert said in LogfmtFormatter({}).format(record)
