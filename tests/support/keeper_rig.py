"""A keeper of weights in a thread of this process, and what connects to it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

from worker.keeper.messages import CPU, TABLE_VERSION, WeightsIdentity
from worker.keeper.process import WeightKeeper

#: Of whatever a keeper is to answer, on busy cores.
LIMIT_S = 60.0

IDENTITY = WeightsIdentity("0123", TABLE_VERSION, CPU, "float32", "FP8 decoded", "all", "without a draft layer")


@contextmanager
def keeping(path: Path, uid: int | None = None) -> Iterator[Path]:
    """A keeper that listens at `path` and serves the user `uid`, by default this one."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()
    scope, token = trio.CancelScope(), list[trio.lowlevel.TrioToken]()
    begun = threading.Event()

    async def serve() -> None:
        token.append(trio.lowlevel.current_trio_token())
        begun.set()
        with scope, trio.socket.from_stdlib_socket(listener) as bound:
            await WeightKeeper(os.geteuid() if uid is None else uid).serve(bound)

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    begun.wait()
    try:
        yield path
    finally:
        if thread.is_alive():
            token[0].run_sync_soon(scope.cancel)
        thread.join()


def connected(path: Path) -> socket.socket:
    """A process at the other end."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found.settimeout(LIMIT_S)
    found.connect(str(path))
    return found
