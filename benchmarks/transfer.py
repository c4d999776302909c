"""Page transfer against its limits: memcpy for `shared`, a plain TCP stream for engines that cross nodes.

    python -m benchmarks.transfer --dir /dev/shm [--engines shared nixl mooncake] [--netns] [--pages 128] [--rounds 5]

Sender and receiver are processes of their own. `--netns` (root) puts them into two network namespaces with addresses of
their own, joined by a bridge; without it they talk over loopback. In each round the limit and every engine take
their turn, so that all see the same neighbours; shares are of the limit of the same round, and the median is printed.

    limit tcp     one connection, sendall out of the pool, recv_into the pool: no checksum, no control messages
    limit memcpy  one thread copies page by page from pool to pool, both mapped files
    checksum      xxh3-64 of pages that are in no cache; copy with checksum as `shared` does both

An engine's time runs from the first `send` to the last `Delivered`: written, verified by the receiver and acknowledged.
CPU seconds are those of both processes. Writes benchmarks/results/transfer-NAME.json, which
benchmarks.report shows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.report import TRANSFER, part_text
from kernels.layout import Geometry
from tests.support.netns_rig import namespaces
from tests.support.transfer_rig import MODEL, make_pool
from worker.transfer import Arrived, Delivered, Layout, PoolMemory, open_receiver, open_sender
from worker.transfer.checksum import checksum, copy_with_checksum

RESULTS = Path(__file__).with_name("results")
#: DeepSeek-V3.2 with bf16 rows: a page is 5.0 MB.
GEOMETRY = Geometry(61, 1_152, tuple(range(61)), 132, 2_048)
LOOPBACK: Final = "127.0.0.1"
WAIT_S: Final = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--engines", nargs="*", default=["shared", "nixl", "mooncake"])
    parser.add_argument("--netns", action="store_true")
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="", help="of the file of results; default: netns or loopback")
    parser.add_argument("--role", choices=["send", "receive"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        serve(options)
        return
    if options.netns:
        with namespaces(2) as nodes:
            report(options, nodes[1].address, [node.prefix for node in nodes])
    else:
        report(options, LOOPBACK, [[], []])


# ---------------------------------------------------------------- both processes


class Process:
    """One of the two, which answers one line to each order."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def order(self, **what: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps(what), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"a process of the benchmark has ended: {self._process.wait()}")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(WAIT_S)


def report(options: argparse.Namespace, host: str, prefixes: list[list[str]]) -> None:
    own = [sys.executable, "-m", "benchmarks.transfer", "--dir", str(options.dir), "--pages", str(options.pages)]
    sender, receiver = (
        Process([*prefix, *own, "--role", role]) for prefix, role in zip(prefixes, ("send", "receive"), strict=True)
    )
    rounds: list[dict[str, Any]] = []
    transfer_id = 0
    for number in range(options.rounds + 1):  # the first one warms up: connections, pages of the pools
        row: dict[str, Any] = {}
        sender.order(what="memory")
        row |= sender.answer()
        for engine in ["tcp", *options.engines]:
            transfer_id += 1
            receiver.order(what=engine, transfer_id=transfer_id, host=host)
            receiver_says = receiver.answer()
            sender.order(what=engine, transfer_id=transfer_id, **receiver_says)
            sent, received = sender.answer(), receiver.answer()
            if not received["equal"]:
                raise SystemExit(f"{engine}: other bytes arrived")
            size = options.pages * GEOMETRY.page_bytes
            row[engine] = {"gbps": size / sent["s"] / 1e9, "cpu_s_per_gb": (sent["cpu"] + received["cpu"]) / size * 1e9}
        if number:
            rounds.append(row)
    sender.end()
    receiver.end()
    summarize(options, host, rounds)


def summarize(options: argparse.Namespace, host: str, rounds: list[dict[str, Any]]) -> None:
    machine = {"cores": os.cpu_count(), "load": os.getloadavg(), "cpu": platform.processor() or platform.machine()}
    result = {
        "between": "loopback" if host == LOOPBACK else "two network namespaces",
        "page_bytes": GEOMETRY.page_bytes,
        "pages": options.pages,
        "machine": machine,
        "rounds": rounds,
    }
    print(part_text(TRANSFER, result))
    RESULTS.mkdir(exist_ok=True)
    name = options.name or ("loopback" if host == LOOPBACK else "netns")
    (RESULTS / f"transfer-{name}.json").write_text(json.dumps(result, indent=1) + "\n")


# ---------------------------------------------------------------- one process


def serve(options: argparse.Namespace) -> None:
    """Orders from stdin, answers to stdout, until stdin ends."""
    path = options.dir / f"hisparse-bench-{options.role}.pool"
    pool = make_pool(path, GEOMETRY, options.pages)
    end = SendEnd(pool) if options.role == "send" else ReceiveEnd(pool)
    try:
        for line in sys.stdin:
            end.obey(json.loads(line))
    finally:
        end.close()
        path.unlink()
    sys.stdout.flush()
    os._exit(0)  # engines keep threads


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def timed(action: Any, *arguments: Any) -> tuple[float, float]:
    """Seconds by the clock, and of this process's CPU."""
    cpu, began = time.process_time(), time.perf_counter()
    action(*arguments)
    return time.perf_counter() - began, time.process_time() - cpu


class SendEnd:
    def __init__(self, pool: PoolMemory) -> None:
        self.pool = pool
        self.spare = make_pool(Path(f"{pool.path}.spare"), GEOMETRY, len(pool.pages))
        generator = np.random.default_rng(0)
        for index, page in enumerate(pool.pages):
            page[:] = generator.integers(0, 256, len(page), dtype=np.uint8)
            page[:8].view(np.uint64)[0] = index
        self.sender = open_sender(pool, Layout.of(GEOMETRY, MODEL), name=f"sender/{os.getpid()}")
        self.stream: socket.socket | None = None

    def obey(self, order: dict[str, Any]) -> None:
        match order["what"]:
            case "memory":
                say(**{name: {"gbps": self.memory(name)} for name in ("memcpy", "checksum", "copy_with_checksum")})
            case "tcp":
                seconds, cpu = timed(self.plain, order["host"], order["port"])
                say(s=seconds, cpu=cpu)
            case _:
                seconds, cpu = timed(self.pages, order["transfer_id"], bytes.fromhex(order["description"]))
                say(s=seconds, cpu=cpu)

    def memory(self, name: str) -> float:
        """GB/s over all pages."""

        def go() -> None:
            for source, target in zip(self.pool.pages, self.spare.pages, strict=True):
                match name:
                    case "memcpy":
                        target[:] = source
                    case "checksum":
                        checksum(source)
                    case _:
                        copy_with_checksum(target, source)

        return self.pool.pages.nbytes / timed(go)[0] / 1e9

    def plain(self, host: str, port: int) -> None:
        if self.stream is None:
            self.stream = socket.create_connection((host, port))
        for page in self.pool.pages:
            self.stream.sendall(page.data)
        self.stream.recv(1)

    def pages(self, transfer_id: int, description: bytes) -> None:
        count = len(self.pool.pages)
        self.sender.open(transfer_id, description, count)
        for index in range(count):
            self.sender.send(transfer_id, index, index)
        delivered = 0
        while delivered < count:
            for event in self.sender.poll():
                if not isinstance(event, Delivered):
                    raise SystemExit(str(event))
                delivered += 1
            time.sleep(0.0005)

    def close(self) -> None:
        self.sender.close()
        os.unlink(self.spare.path)


class ReceiveEnd:
    def __init__(self, pool: PoolMemory) -> None:
        self.pool = pool
        self.receivers: dict[str, Any] = {}
        self.server: socket.socket | None = None
        self.stream: socket.socket | None = None

    def obey(self, order: dict[str, Any]) -> None:
        self.pool.pages[:, :8] = 0
        cpu = self.plain(order["host"]) if order["what"] == "tcp" else self.transfer_id(order)
        heads = self.pool.pages[:, :8].copy().view(np.uint64)[:, 0]
        say(cpu=cpu, equal=bool((heads == np.arange(len(heads))).all()))

    def plain(self, host: str) -> float:
        if self.server is None:
            self.server = socket.create_server((host, 0))
        say(host=host, port=self.server.getsockname()[1])
        if self.stream is None:
            self.stream, _ = self.server.accept()
        cpu = time.process_time()
        for page in self.pool.pages:
            view = page.data
            while view:
                view = view[self.stream.recv_into(view) :]
        self.stream.sendall(b".")
        return time.process_time() - cpu

    def transfer_id(self, order: dict[str, Any]) -> float:
        engine, count = order["what"], len(self.pool.pages)
        if engine not in self.receivers:
            layout, address = Layout.of(GEOMETRY, MODEL), f"tcp://{order['host']}:0"
            self.receivers[engine] = open_receiver(engine, self.pool, layout, name=f"bench-{engine}", address=address)
        receiver = self.receivers[engine]
        cpu = time.process_time()
        receiver.open(order["transfer_id"], list(range(count)))
        say(description=receiver.describe().hex())
        arrived = 0
        while arrived < count:
            arrived += sum(isinstance(event, Arrived) for event in receiver.poll())
            time.sleep(0.0005)
        return time.process_time() - cpu

    def close(self) -> None:
        for receiver in self.receivers.values():
            receiver.close()


if __name__ == "__main__":
    main()
