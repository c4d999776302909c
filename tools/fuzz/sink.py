"""`python -m tools.fuzz.sink`: stands in for a service, and takes what attackers send without doing any work.

Attackers take a part of a machine beside that of their target. A client that is measured while they are busy with a
sink, at the same rate as later with the service, is disturbed by them as a neighbour is. What it waits longer for, once
they attack the service that it asks, is the service's part.
"""

from __future__ import annotations

import argparse
import socket
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import trio

from tools.fuzz.hostile_zmq import ROLES
from tools.fuzz.rig import HOSTILE_NICENESS, process, until

MODULE: Final = "tools.fuzz.sink"
BODY: Final = b'{"error": {"message": "not here"}}'
ANSWER: Final = b"HTTP/1.1 400 \r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (len(BODY), BODY)
#: How long a connection is read, at most.
READ_LIMIT_S: Final = 1.0


@dataclass
class Sink:
    """Ports for plain HTTP and TLS; `place` stands for the directory of a coordinator's sockets."""

    plain: int
    secure: int
    place: Path


@contextmanager
def sink(place: Path, cert: str = "", key: str = "", cores: frozenset[int] = frozenset()) -> Iterator[Sink]:
    """In a process of its own, as nice as attackers. `cert` and `key` are for TLS."""
    log = place / "sink.log"
    (place / "sink" / "run").mkdir(parents=True)
    pair = ("--pair", cert, key) if cert else ()
    options = ("--place", str(place / "sink"), *pair)
    with process(MODULE, *options, log=log, cores=cores, niceness=HOSTILE_NICENESS):
        plain, secure = until(log, r"ports (\d+ \d+)").split()
        yield Sink(int(plain), int(secure), place / "sink")


# ---------------------------------------------------------------- the process


async def take(stream: trio.SocketStream, context: ssl.SSLContext | None = None, answer: bytes = b"") -> None:
    """One connection: what comes first is answered, and the connection ends."""
    taken: trio.abc.Stream = stream
    try:
        with trio.move_on_after(READ_LIMIT_S):
            if context is not None:
                taken = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
            await taken.receive_some(65_536)
            if answer:
                await taken.send_all(answer)
    except (trio.BrokenResourceError, OSError):
        pass
    finally:
        stream.socket.close()
        if isinstance(taken, trio.SSLStream):
            vars(taken).clear()  # it refers to itself


async def serve(place: Path, pair: tuple[str, str] | None) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH) if pair else None
    if context is not None and pair is not None:
        context.load_cert_chain(*pair)
    async with trio.open_nursery() as nursery:
        ports = []
        for used in (None, context):
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            ports.append(listener.socket.getsockname()[1])
            nursery.start_soon(trio.serve_listeners, partial(take, context=used, answer=ANSWER), [listener])
        for role in ROLES:
            unix = trio.socket.socket(socket.AF_UNIX)
            await unix.bind(f"{place}/run/{role}.sock")
            unix.listen(256)
            nursery.start_soon(trio.serve_listeners, take, [trio.SocketListener(unix)])
        print("ports", *ports, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--place", type=Path, required=True)
    parser.add_argument("--pair", nargs=2)
    given = parser.parse_args()
    trio.run(serve, given.place, given.pair)
    return 0


if __name__ == "__main__":
    sys.exit(main())
