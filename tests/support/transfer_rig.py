"""Pools, and ends of page transfer in child processes that fail as they are told."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kernels.layout import Geometry
from tests.support.limits import HANG_LIMIT_S
from worker.pool.file import HEADER_BYTES, Header
from worker.transfer import Arrived, Failed, Layout, PoolMemory, ReceiverEvent, open_receiver, open_sender
from worker.transfer.engines.network import NetworkSource
from worker.transfer.engines.shared import SharedSource

MODEL: Final = "model"
SMALL: Final = Geometry(layers=4, row_bytes=96, group_of_layer=(0, 0, 1, 1), index_row_bytes=16, topk=64)
#: 16 MiB a page: no socket takes it at one go, no copy is over before a signal.
LARGE: Final = Geometry(layers=4, row_bytes=65_536, group_of_layer=(0, 0, 0, 0), index_row_bytes=0, topk=64)
GEOMETRIES: Final = {"small": SMALL, "large": LARGE}
MARK: Final = b"said: "


def make_pool(path: Path, geometry: Geometry, pages: int) -> PoolMemory:
    """A pool file as the first worker of a node makes it, zeroed."""
    header = Header.of(geometry, pages, MODEL, {})
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(descriptor, header.file_bytes)
    header.write(descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    mapping = mmap.mmap(descriptor, header.file_bytes)
    os.close(descriptor)
    body = np.frombuffer(mapping, np.uint8, pages * geometry.page_bytes, HEADER_BYTES)
    return PoolMemory(body.reshape(pages, geometry.page_bytes), str(path), HEADER_BYTES, header.pool_id)


def content(index: int, page_bytes: int) -> npt.NDArray[np.uint8]:
    """What the `index`-th page of every transfer holds. Never zero, never OTHERS."""
    return np.random.default_rng(index).integers(1, 200, page_bytes, dtype=np.uint8)


OTHERS: Final = 0xEE


def wait_for(
    poll: Callable[[], Iterable[Any]], is_enough: Callable[[list[Any]], bool], limit_s: float = HANG_LIMIT_S
) -> list[Any]:
    """Events until there are enough of them. Fails past `limit_s`."""
    seen: list[Any] = []
    give_up_at = time.monotonic() + limit_s
    while not is_enough(seen):
        assert time.monotonic() < give_up_at, f"only {seen}"
        seen += poll()
        time.sleep(0.002)
    return seen


def arrivals(events: Iterable[ReceiverEvent]) -> set[int]:
    return {event.index for event in events if isinstance(event, Arrived)}


class Peer:
    """The process of one end, and what it said."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._unread = b""
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)

    def said(self) -> list[str]:
        """Whole lines of the rig; engines print others."""
        assert self.process.stdout is not None
        *lines, self._unread = (self._unread + (self.process.stdout.read() or b"")).split(b"\n")
        return [line[len(MARK) :].decode() for line in lines if line.startswith(MARK)]

    def kill(self) -> None:
        """Returns when its exit is proved."""
        self.process.kill()
        self.process.wait()


@contextmanager
def peer_process(folder: Path, **order: Any) -> Iterator[Peer]:
    """A sender or receiver that carries out `order` (see `send` and `receive`) and lives until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.transfer_rig", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(order).encode() + b"\n")
    process.stdin.flush()
    try:
        yield Peer(process)
    finally:
        process.send_signal(signal.SIGCONT)
        process.stdin.close()
        try:
            assert process.wait(HANG_LIMIT_S) in (0, -signal.SIGKILL)
        finally:
            process.kill()


# ---------------------------------------------------------------- the other process


def receive(folder: Path, order: dict[str, Any]) -> None:
    """Open `transfer` on the first `pages` pages, say the description, and receive by `engine` until stdin ends."""
    pool = make_pool(folder / "receiver.pool", SMALL, order["pages"])
    layout, address = Layout.of(SMALL, MODEL), "tcp://127.0.0.1:0"
    receiver = open_receiver(order["engine"], pool, layout, name="decode-0/1", address=address)
    receiver.open(order["transfer_id"], range(order["pages"]))
    say(receiver.describe().hex())
    sys.stdin.read()
    receiver.close()


def send(folder: Path, order: dict[str, Any]) -> None:
    """Send `pages` pages for `transfer` to `description`, in parts that end at `part_ends`.

    `withheld`: pages from the front that are not sent, as if prefill were still at them; `withheld_parts`: parts from
    the end of each page.
    `fault`: "flip" a byte of the first `times` writes; "halt", stop this process in the middle of the first write.
    """
    geometry = GEOMETRIES[order.get("geometry", "small")]
    pages: int = order["pages"]
    pool = make_pool(folder / "sender.pool", geometry, pages + 1)
    for index in range(pages):
        pool.pages[index] = content(index, geometry.page_bytes)
    pool.pages[pages] = pool.pages[pages - 1]  # the first to be sent
    pool.pages[pages, 7] ^= 1
    plant(order.get("fault", ""), order.get("times", 1), pool, pages)
    part_ends = order.get("part_ends", [])
    sender = open_sender(pool, Layout.of(geometry, MODEL), name=order["name"])
    sender.open(order["transfer_id"], bytes.fromhex(order["description"]), order.get("claimed_pages", pages), part_ends)
    for part in range((len(part_ends) or 1) - order.get("withheld_parts", 0)):
        for index in reversed(range(order.get("withheld", 0), pages)):
            sender.send(order["transfer_id"], index, index, part)
    left = pages
    while left:
        for event in sender.poll():
            left = 0 if isinstance(event, Failed) else left - 1
            say(event.reason if isinstance(event, Failed) else f"delivered {event.index}")
        time.sleep(0.001)
    sys.stdin.read()
    sender.close()


def say(line: str) -> None:
    print(MARK.decode() + line, flush=True)


def plant(fault: str, times: int, pool: PoolMemory, flipped: int) -> None:
    """Put `fault` into the first `times` writes. (`shared` writes nothing: it only halts, with a page to tell of.)"""
    left = [times]

    def is_due() -> bool:
        left[0] -= 1
        return left[0] >= 0

    def halt() -> None:
        say("halted")
        os.kill(os.getpid(), signal.SIGSTOP)

    def tell(self: SharedSource, post: Any) -> None:
        if is_due():
            halt()
        whole_tell(self, post)

    def post(self: NetworkSource[Any, Any], post: Any) -> None:
        begin = self._begin

        def begin_wrong(connection: Any, source: int, target: int, length: int) -> Any:
            wrong = pool.pages.ctypes.data + flipped * pool.pages.shape[1]
            handle = begin(connection, wrong if fault == "flip" else source, target, length)
            if fault == "halt":
                halt()
            return handle

        if is_due():
            self._begin = begin_wrong  # type: ignore[method-assign]
        try:
            whole_post(self, post)
        finally:
            self._begin = begin  # type: ignore[method-assign]

    whole_tell, whole_post = SharedSource.post, NetworkSource.post
    if fault:
        SharedSource.post = tell  # type: ignore[method-assign]
        NetworkSource.post = post  # type: ignore[method-assign]


if __name__ == "__main__":
    what = json.loads(sys.stdin.readline())
    (receive if "engine" in what else send)(Path(sys.argv[1]), what)
