"""The program that tries the front behind nginx: it sees a request that meets the close of its connection."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.support.limits import HANG_LIMIT_S
from tools.faults.nginx_front import MODES, Asked, asks, nginx, report

pytestmark = pytest.mark.process

NGINX: Final = shutil.which("nginx", path="/usr/sbin:/usr/bin:/sbin:/bin")
ANSWER: Final = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@contextmanager
def closing_upstream() -> Iterator[int]:
    """The port of a server that answers the first request of each connection, and closes on the second."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    peer, _ = listening.accept()
                except OSError:
                    return
                with peer:
                    peer.settimeout(HANG_LIMIT_S)
                    peer.recv(65_536)
                    peer.sendall(ANSWER)
                    peer.recv(65_536)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(HANG_LIMIT_S)


@pytest.mark.skipif(NGINX is None, reason="needs nginx")
def test_request_that_meets_a_close_is_seen(tmp_path: Path) -> None:
    mode = MODES[1]._replace(pauses_s=(0.05, 0.1), lanes=1)
    with closing_upstream() as upstream, nginx(str(NGINX), tmp_path, upstream, mode) as port:
        asked = asks(port, 0, mode, "1", time.monotonic() + 2.0)
    told = report(mode, "1", asked)
    assert told["opened"].keys() == {"200"}
    assert told["kept"].keys() == {"502"}
    assert told["failed_share"] == 1.0


def test_report_tells_shares_and_times_of_failures() -> None:
    mode = MODES[1]
    asked = [Asked(-1.0, "200"), Asked(mode.idle_s + 0.012, "502"), *[Asked(mode.idle_s - 0.04, "200")] * 3]
    told = report(mode, "1", asked)
    assert (told["opened"], told["kept"]) == ({"200": 1}, {"502": 1, "200": 3})
    assert (told["failed_share"], told["failed_ms"]) == (0.25, {10: 1})
