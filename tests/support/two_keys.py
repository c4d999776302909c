"""`python -m tests.support.two_keys --rounds 6`: two API keys before a real front, one hostile in turn with each of

    ids       bodies of 2,000,000 token ids with `n: 16`, far beyond the context
    text      bodies of 15 MiB of text
    heads     256 requests that send headers only, held open and opened again
    batch     16 requests at a time, at the highest priority that the key may ask for

The other key asks at an even pace from a process of its own (tests.support.fuzz_http). Undisturbed and hostile phases
alternate, so that what else runs on the machine falls on both. Prints p99 of each, their ratio over all phases and by
pairs of neighbours, and memory. Exits with 1 when a request of the other key was refused or cut, or a ratio over all
phases is above RATIO_MAX.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from itertools import pairwise
from pathlib import Path
from typing import Final

from tests.support.fuzz_http import FUZZ_KEY, Site, site
from tests.support.fuzz_rig import conclude, p99, process

RATIO_MAX: Final = 3.0
PHASE_S: Final = 8.0
#: Of a phase, not counted: what the phase before left behind is answered in it.
SETTLE_S: Final = 1.0
#: Connections of the hostile key that send large bodies.
SENDERS: Final = 4
BATCH: Final = 16
HEADS: Final = 256
LIMIT_S: Final = 60.0

_AUTHORIZED: Final = {"Authorization": f"Bearer {FUZZ_KEY}", "Content-Type": "application/json"}
IDS: Final = json.dumps({"prompt": [1] * 2_000_000, "n": 16}, separators=(",", ":")).encode()
TEXT: Final = json.dumps({"prompt": "all work and no play " * (15 * 1024 * 1024 // 21)}).encode()
SMALL: Final = json.dumps({"prompt": "abc", "max_tokens": 3}).encode()


def post(body: bytes) -> Callable[[int, threading.Event], None]:
    """Send `body` again and again, each time after the answer."""

    def keep_on(port: int, stop: threading.Event) -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
        while not stop.is_set():
            try:
                connection.request("POST", "/v1/completions", body, _AUTHORIZED)
                connection.getresponse().read()
            except (OSError, HTTPException):
                connection.close()

    return keep_on


def announce(port: int, stop: threading.Event) -> None:
    """HEADS requests without their bodies; a connection that is answered is replaced."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: 9\r\n\r\n"
    peers: list[socket.socket] = []
    while not stop.is_set():
        while len(peers) < HEADS:
            peer = socket.create_connection(("127.0.0.1", port), LIMIT_S)
            peer.sendall(head % FUZZ_KEY.encode())
            peer.setblocking(False)
            peers.append(peer)
        for peer in list(peers):
            with suppress(BlockingIOError):
                with suppress(OSError):
                    peer.recv(65_536)
                peers.remove(peer)
                peer.close()
        stop.wait(0.02)
    for peer in peers:
        peer.close()


#: By name: what a thread does, and how many of them.
ATTACKS: Final[dict[str, tuple[Callable[[int, threading.Event], None], int]]] = {
    "ids": (post(IDS), SENDERS),
    "text": (post(TEXT), SENDERS),
    "heads": (announce, 1),
    "batch": (post(SMALL), BATCH),
}


def attack(name: str, port: int) -> None:
    """Until the process is killed."""
    act, count = ATTACKS[name]
    stop = threading.Event()
    threads = [threading.Thread(target=act, args=(port, stop), daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    threads[0].join()


@contextmanager
def hostile(at: Site, name: str) -> Iterator[None]:
    with process("tests.support.two_keys", "--attack", name, str(at.plain.port), log=at.place / "attack.log"):
        yield


def phases(at: Site, name: str, rounds: int) -> list[tuple[bool, float, float]]:
    """Whether it was hostile, and when it was, from and to; undisturbed first and last."""
    took: list[tuple[bool, float, float]] = []

    def phase(*, is_hostile: bool) -> None:
        time.sleep(SETTLE_S)
        began = time.monotonic()
        time.sleep(PHASE_S)
        took.append((is_hostile, began, time.monotonic()))

    phase(is_hostile=False)
    for _ in range(rounds):
        with hostile(at, name):
            phase(is_hostile=True)
        phase(is_hostile=False)
    return took


def report(name: str, took: list[tuple[bool, float, float]], times: list[tuple[float, float, int]]) -> list[str]:
    """What is wrong, after saying what was measured."""
    by_phase = [(kind, [latency for at_s, latency, _ in times if began <= at_s < ended]) for kind, began, ended in took]
    calm = [latency for kind, latencies in by_phase if not kind for latency in latencies]
    stormy = [latency for kind, latencies in by_phase if kind for latency in latencies]
    pairs = [
        (p99(one), p99(other)) if kind else (p99(other), p99(one))
        for (kind, one), (_, other) in pairwise(by_phase)
        if one and other
    ]
    ratios = sorted(storm / quiet for storm, quiet in pairs)
    ratio = p99(stormy) / p99(calm)
    print(
        f"{name}: undisturbed p50 {1e3 * statistics.median(calm):.1f} p99 {1e3 * p99(calm):.1f} ms ({len(calm)}), "
        f"hostile p50 {1e3 * statistics.median(stormy):.1f} p99 {1e3 * p99(stormy):.1f} ms ({len(stormy)}), "
        f"ratio {ratio:.2f}; of neighbours {ratios[0]:.2f} to {ratios[-1]:.2f}, median {statistics.median(ratios):.2f}",
        flush=True,
    )
    refused = [status for at_s, _, status in times if took[0][1] <= at_s < took[-1][2] and status != 200]
    wrong = [f"{name}: the other key was refused or cut: {refused[:9]}"] if refused else []
    return wrong + ([f"{name}: p99 grew {ratio:.1f} x"] if ratio > RATIO_MAX else [])


def measure(at: Site, names: list[str], rounds: int) -> list[str]:
    wrong: list[str] = []
    for name in names:
        log = at.place / f"client-{name}.log"
        with process("tests.support.fuzz_http", "--ask", str(at.plain.port), log=log):
            time.sleep(1.0)
            took = phases(at, name, rounds)
        lines = (line.split() for line in log.read_text().splitlines()[:-1])
        wrong += report(name, took, [(float(at_s), float(latency), int(status)) for at_s, latency, status in lines])
        print(f"  memory of the front {at.plain.memory_bytes >> 20} MiB", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", choices=ATTACKS, action="append", help="one of the attacks")
    parser.add_argument("--attack", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.attack:
        attack(given.attack[0], int(given.attack[1]))
    place = Path(tempfile.mkdtemp(prefix="hisparse-keys-"))
    with site(place) as at:
        wrong = measure(at, given.only or list(ATTACKS), given.rounds)
    return conclude(wrong, place)


if __name__ == "__main__":
    sys.exit(main())
