"""Attacks on a real front: after each the same process answers another client, and nothing was logged as a defect."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection

import pytest
import trio

from tests.hisparse.http.server.test_connection import REFUSED
from tools.fuzz.http import CLIENT_KEY, FUZZ_KEY, Aim, Site, assail, site
from tools.fuzz.rig import Tally

pytestmark = [pytest.mark.process, pytest.mark.fuzz, pytest.mark.timeout(900)]

LIMIT_S = 240.0


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    place = tmp_path_factory.mktemp("fuzz")
    with site(place) as site_:
        yield site_
    assert " defect " not in (place / "plain.log").read_text() + (place / "tls.log").read_text()


def answers(at: Site) -> None:
    """Another client is served by the same process."""
    assert [one.process.poll() for one in at.fronts] == [None, None]
    connection = HTTPConnection("127.0.0.1", at.plain.port, timeout=LIMIT_S)
    body = b'{"prompt": "abc", "max_tokens": 3}'
    connection.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {CLIENT_KEY}"})
    answer = connection.getresponse()
    assert (answer.status, b'"text":"abc"' in answer.read()) == (200, True)
    connection.close()


def test_hostile_peer_does_not_stop_the_front(at: Site) -> None:
    """Without a key. Most of these ended the process once. In one test: a site starts in 1.6 s of CPU time."""
    for case, (data, status) in REFUSED.items():
        with socket.create_connection(("127.0.0.1", at.plain.port), LIMIT_S) as peer:
            peer.sendall(data)
            assert int(peer.recv(65_536).split()[1]) == status, case
        answers(at)


def test_announced_bodies_of_a_key_do_not_block_other_keys(at: Site) -> None:
    """A key that takes all places of a front by headers alone: it is refused past its share, another key is not."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: 9\r\n\r\n"
    peers = [socket.create_connection(("127.0.0.1", at.plain.port), LIMIT_S) for _ in range(300)]
    for peer in peers:
        peer.sendall(head % FUZZ_KEY.encode())
    answers(at)
    for peer in peers:
        peer.close()
    answers(at)


def test_memory_of_ended_connections_is_returned(at: Site) -> None:
    """30 KiB of a header each; without a call glibc keeps all of it."""
    with ExitStack() as stack:
        for _ in range(300):
            peer = stack.enter_context(socket.create_connection(("127.0.0.1", at.plain.port), LIMIT_S))
            peer.sendall(b"GET / HTTP/1.1\r\nA: " + bytes(30_000).replace(b"\0", b"a"))
        answers(at)
        full = at.plain.memory_bytes
    limit = time.monotonic() + LIMIT_S
    while at.plain.memory_bytes > full - (4 << 20):
        assert time.monotonic() < limit
        time.sleep(0.1)


def test_front_survives_a_storm_of_hostile_requests(at: Site) -> None:
    """A short run of `python -m tools.fuzz.http`; SEED replays it."""
    seed = int(os.environ.get("SEED", "0")) or int.from_bytes(os.urandom(4), "little")
    print(f"SEED={seed}")
    tally = Tally()
    trio.run(assail, Aim(at.plain.port, at.secure.port, at.cert), tally, str(seed), 3_000)
    assert tally.sent >= 3_000
    answers(at)
