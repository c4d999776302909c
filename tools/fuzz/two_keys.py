"""`python -m tools.fuzz.two_keys --rounds 6`: two API keys before a real front, one hostile in turn with each of

    ids       bodies of 2,000,000 token ids with `n: 16`, far beyond the context
    text      bodies of 15 MiB of text
    heads     512 requests at a time that send headers only, twice as many as have places; a connection that is
              refused or ends is opened again at once
    batch     16 requests at a time, at the highest priority that the key may ask for

or, with --rooms, before a front, a coordinator and a worker whose rooms (basics.rooms) are small, with each of

    outputs      128 long outputs at a time: places among requests, live and waiting ones, those that are answered
    prefixes     prompts that fill the prefix cache, each once
    ended        16 short requests at a time, each with an id of its own: outputs that are kept
    grammars     a grammar that was not seen before with each request
    connections  as many connections as the front keeps, and more, idle behind one answer

The other key asks at an even pace from a process of its own (tools.fuzz.http); attackers are nice. Undisturbed
and hostile phases alternate, so that what else runs on the machine falls on both. Prints p50 and p99 of each, their
ratio over all phases and by pairs of neighbours, and memory, as one line of JSON. Exits with 1 when a request of the
other key was refused or cut, or the ratio of p99 over all phases is above P99_GROWTH_MAX. --seconds bounds the whole:
fewer rounds are made.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from itertools import count, pairwise
from pathlib import Path
from typing import Final, TypeAlias

import trio

from tests.support.http_rig import write_chat_model
from tools.fuzz.http import FUZZ_KEY, Front, front, site, write_keys
from tools.fuzz.rig import (
    HOSTILE_NICENESS,
    P99_GROWTH_MAX,
    START_LIMIT_S,
    Cores,
    Report,
    Target,
    add_options,
    cores_given,
    p99,
    process,
    until,
    warmed_up,
)

PHASE_S: Final = 8.0
#: Of a phase, not counted: what the phase before left behind is answered in it.
SETTLE_S: Final = 1.0
#: Connections of the hostile key that send large bodies.
SENDERS: Final = 4
BATCH: Final = 16
HEADS: Final = 512
#: Long outputs at a time: more than there may be live requests. Connections: more than the front keeps.
OUTPUTS: Final = 128
CONNECTIONS: Final = 1_200
LIMIT_S: Final = 60.0
#: Until front and coordinator are there, at most.
START_S: Final = 20.0

#: Of a thread: it attacks the front at a port until it is stopped.
Act: TypeAlias = Callable[[int, threading.Event], None]
KEY: Final = FUZZ_KEY.encode()
#: Of the worker. Two requests at a time: on a CPU a step takes longer with each.
SIZES: Final = (
    *("--seats", "2", "--device-mem", "16MiB", "--host-mem", "8MiB"),
    *("--hot-size-classes", "128", "--threads", "1"),
)
_AUTHORIZED: Final = {"Authorization": f"Bearer {FUZZ_KEY}", "Content-Type": "application/json"}
IDS: Final = json.dumps({"prompt": [1] * 2_000_000, "n": 16}, separators=(",", ":")).encode()
TEXT: Final = json.dumps({"prompt": "all work and no play " * (15 * 1024 * 1024 // 21)}).encode()
SMALL: Final = json.dumps({"prompt": "abc", "max_tokens": 3}).encode()


def post(body: bytes) -> Act:
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
    """HEADS requests without their bodies, each from a task that does not wait for the others."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: 9\r\n\r\n"

    async def keep_on() -> None:
        while not stop.is_set():
            with suppress(OSError, trio.BrokenResourceError):
                async with await trio.open_tcp_stream("127.0.0.1", port) as peer:
                    await peer.send_all(head % FUZZ_KEY.encode())
                    while await peer.receive_some():
                        pass

    async def all_of_them() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(HEADS):
                nursery.start_soon(keep_on)

    trio.run(all_of_them)


def each_new(body: Callable[[int], object], headers: Callable[[int], dict[str, str]] = lambda _: {}) -> Act:
    """Send bodies that differ, one after the other. Numbers are those of all threads."""
    numbers = count()

    def keep_on(port: int, stop: threading.Event) -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
        while not stop.is_set():
            number = next(numbers)
            data = json.dumps(body(number)).encode()
            try:
                connection.request("POST", "/v1/completions", data, _AUTHORIZED | headers(number))
                connection.getresponse().read()
            except (OSError, HTTPException):
                connection.close()

    return keep_on


def hold_open(port: int, stop: threading.Event) -> None:
    """CONNECTIONS connections that had one answer each; one that is closed is opened again."""

    async def keep_on() -> None:
        while not stop.is_set():
            with suppress(OSError, trio.BrokenResourceError):
                async with await trio.open_tcp_stream("127.0.0.1", port) as peer:
                    await peer.send_all(b"GET /version HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n\r\n" % KEY)
                    while await peer.receive_some():
                        pass

    async def all_of_them() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(CONNECTIONS):
                nursery.start_soon(keep_on)

    trio.run(all_of_them)


def _schema(number: int) -> dict[str, object]:
    return {"type": "object", "properties": {f"p{number}": {"type": "integer"}}, "required": [f"p{number}"]}


#: By name: what a thread does, and how many of them.
ATTACKS: Final[dict[str, tuple[Act, int]]] = {
    "ids": (post(IDS), SENDERS),
    "text": (post(TEXT), SENDERS),
    "heads": (announce, 1),
    "batch": (post(SMALL), BATCH),
}
#: Likewise, on rooms that are small.
ROOM_ATTACKS: Final[dict[str, tuple[Act, int]]] = {
    "outputs": (each_new(lambda it: {"prompt": f"{it}", "max_tokens": 1_000, "ignore_eos": True}), OUTPUTS),
    "prefixes": (each_new(lambda it: {"prompt": [it % 251, it // 251, *[7] * 600], "max_tokens": 1}), SENDERS),
    "ended": (each_new(lambda _: {"prompt": "a", "max_tokens": 1}, lambda it: {"Idempotency-Key": f"e{it}"}), BATCH),
    "grammars": (
        each_new(lambda it: {"prompt": "a", "max_tokens": 4, "structured_outputs": {"json": _schema(it)}}),
        SENDERS,
    ),
    "connections": (hold_open, 1),
}
#: Of the coordinator and the front: a hostile key fills them within a phase.
SMALL_ROOMS: Final = {
    "HISPARSE_COORDINATOR_LIVE_REQUESTS_MAX": "64",
    "HISPARSE_COORDINATOR_QUEUE_MAX": "48",
    "HISPARSE_COORDINATOR_ENDED_KEEP_MAX": "64",
    "HISPARSE_HTTP_REQUESTS_MAX": "32",
}


@dataclass
class Attacked:
    """Processes that are attacked through `front`, and whose memory is measured."""

    place: Path
    coordinator: Target
    front: Front


@contextmanager
def answering(place: Path, cores: frozenset[int]) -> Iterator[Attacked]:
    """A front whose coordinator answers at once."""
    with site(place, cores) as at:
        yield Attacked(place, at.coordinator, at.plain)


@contextmanager
def serving(place: Path, cores: frozenset[int]) -> Iterator[Attacked]:
    """A front, a coordinator and a worker of a tiny model, with SMALL_ROOMS."""
    write_keys(place)
    (place / "model").mkdir()
    model, log = write_chat_model(place / "model"), place / "coordinator.log"
    env = {"HISPARSE_CLUSTER_RUNTIME_DIR": f"{place}/run", "OMP_NUM_THREADS": "1", **SMALL_ROOMS}
    flags = ("--model", str(model), "--name", "w0", "--pool-dir", str(place), *SIZES)
    with (
        process("hisparse.cli", "coordinator", log=log, cores=cores, env=env) as coordinator,
        process("hisparse.cli", "worker", *flags, log=place / "worker.log", cores=cores, env=env),
        front(place, "front", cores=cores, settings=SMALL_ROOMS) as plain,
    ):
        limit = time.monotonic() + START_LIMIT_S
        while not _is_served(plain.port):
            if time.monotonic() > limit:
                raise TimeoutError(log.read_text())
            time.sleep(0.1)
        yield Attacked(place, Target("coordinator", coordinator, log), plain)


def _is_served(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    connection.request("GET", "/health")
    return connection.getresponse().status == 200


def attack(name: str, port: int) -> None:
    """Until the process is killed."""
    act, threads_count = (ATTACKS | ROOM_ATTACKS)[name]
    stop = threading.Event()
    threads = [threading.Thread(target=act, args=(port, stop), daemon=True) for _ in range(threads_count)]
    for thread in threads:
        thread.start()
    print("attacking", flush=True)
    threads[0].join()


@contextmanager
def hostile(at: Attacked, name: str, cores: frozenset[int]) -> Iterator[None]:
    log = at.place / "attack.log"
    arguments = ("tools.fuzz.two_keys", "--attack", name, str(at.front.port))
    with process(*arguments, log=log, cores=cores, niceness=HOSTILE_NICENESS):
        until(log, "(attacking)")
        yield


def phases(at: Attacked, name: str, rounds: int, cores: frozenset[int]) -> list[tuple[bool, float, float]]:
    """Whether it was hostile, and when it was, from and to; undisturbed first and last."""
    took: list[tuple[bool, float, float]] = []

    def phase(*, is_hostile: bool) -> None:
        time.sleep(SETTLE_S)
        began = time.monotonic()
        time.sleep(PHASE_S)
        took.append((is_hostile, began, time.monotonic()))

    phase(is_hostile=False)
    for _ in range(rounds):
        with hostile(at, name, cores):
            phase(is_hostile=True)
        phase(is_hostile=False)
    return took


def judge(
    report: Report, name: str, took: list[tuple[bool, float, float]], times: list[tuple[float, float, str]]
) -> None:
    by_phase = [(kind, [latency for at_s, latency, _ in times if began <= at_s < ended]) for kind, began, ended in took]
    calm = [latency for kind, latencies in by_phase if not kind for latency in latencies]
    stormy = [latency for kind, latencies in by_phase if kind for latency in latencies]
    if not calm or not stormy:
        report.wrong.append(f"{name}: the other key had no answer")
        return
    pairs = [
        (p99(one), p99(other)) if kind else (p99(other), p99(one))
        for (kind, one), (_, other) in pairwise(by_phase)
        if one and other
    ]
    ratios = [storm / quiet for storm, quiet in pairs]
    ratio = p99(stormy) / p99(calm)
    refused = [outcome for at_s, _, outcome in times if took[0][1] <= at_s < took[-1][2] and outcome != "ok"]
    report.measured[name] = {
        "requests": [len(calm), len(stormy)],
        "p50_ms": [round(1e3 * statistics.median(it), 2) for it in (calm, stormy)],
        "p99_ms": [round(1e3 * p99(it), 2) for it in (calm, stormy)],
        "p99_growth": round(ratio, 2),
        "growth_of_neighbours": [round(it, 2) for it in (min(ratios), statistics.median(ratios), max(ratios))],
        "refused": len(refused),
    }
    report.wrong += [f"{name}: the other key was refused or cut: {refused[:9]}"] if refused else []
    report.wrong += [f"{name}: p99 grew {ratio:.1f} x"] if ratio > P99_GROWTH_MAX else []


def measure(at: Attacked, names: list[str], rounds: int, cores: Cores) -> Report:
    report = Report({"program": "two_keys", "rounds": rounds})
    for name in names:
        log = at.place / f"client-{name}.log"
        with process("tools.fuzz.http", "--ask", str(at.front.port), log=log, cores=cores.client):
            warmed_up(log)
            for target in (at.front, at.coordinator):
                target.forget_peak()
            took = phases(at, name, rounds, cores.attackers)
        lines = (line.split() for line in log.read_text().splitlines()[:-1])
        judge(report, name, took, [(float(at_s), float(latency), outcome) for at_s, latency, outcome in lines])
        memory = {
            f"{target.name} {what}": value >> 20
            for target in (at.front, at.coordinator)
            for what, value in (("peak_mib", target.peak_bytes), ("after_mib", target.memory_bytes))
        }
        report.measured.setdefault(name, {}).update(memory)
        print(name, report.measured[name], flush=True)
    return report


def rounds_within(seconds: float, attacks: int) -> int:
    """Most rounds that fit; one at least."""
    phase_s = PHASE_S + SETTLE_S
    return max(1, int(((seconds - START_S) / attacks - phase_s) / (2 * phase_s)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--rooms", action="store_true", help="attack small rooms of a real service")
    parser.add_argument("--only", choices=ATTACKS | ROOM_ATTACKS, action="append", help="one of the attacks")
    add_options(parser)
    parser.add_argument("--attack", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.attack:
        attack(given.attack[0], int(given.attack[1]))
    place, names, cores = (
        Path(tempfile.mkdtemp(prefix="hisparse-keys-")),
        given.only or list(ROOM_ATTACKS if given.rooms else ATTACKS),
        cores_given(given),
    )
    rounds = (
        given.rounds if given.seconds == float("inf") else min(given.rounds, rounds_within(given.seconds, len(names)))
    )
    with (serving if given.rooms else answering)(place, cores.service) as at:
        report = measure(at, names, rounds, cores)
    return report.conclude(place, given.json)


if __name__ == "__main__":
    sys.exit(main())
