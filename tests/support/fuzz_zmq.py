"""`python -m tests.support.fuzz_zmq --messages 100000 --seed S`: hostile peers before a real coordinator, and a client
that is not.

    coordinator   `hisparse coordinator`, with a journal, over ipc
    a client      asks for pools, workers and requests at an even pace, in a process of its own: undisturbed, then not
    attackers     CONNECTIONS at a time send what tests.support.hostile_zmq makes, to all three listeners

Judged as in tests.support.fuzz_rig. Exits with 1 when something is wrong, and leaves the logs behind.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from hisparse.client.client import Client, open_client
from protocol.errors import HiSparseError
from tests.support.fuzz_rig import (
    CLIENT_INTERVAL_S,
    SETTLE_S,
    UNDISTURBED_S,
    Target,
    client_verdict,
    conclude,
    process,
    until,
)
from tests.support.hostile_zmq import ROLES, attack
from tests.support.zmtp_peer import GREETING, READY

#: Attackers at a time.
CONNECTIONS: Final = 16
#: Messages before memory is measured: what is loaded late is loaded by then, and bounded tables are full.
WARM_UP_MESSAGES: Final = 5_000
#: How long an attacker listens after its last byte, and sends at most.
LISTEN_S: Final = 0.02
SEND_LIMIT_S: Final = 5.0


@dataclass
class Site:
    place: Path
    coordinator: Target
    sent: int = 0
    connections: Counter[str] = field(default_factory=Counter)

    def path(self, role: str) -> str:
        return f"{self.place}/run/{role}.sock"


@contextmanager
def site(place: Path) -> Iterator[Site]:
    log = place / "coordinator.log"
    # few ended requests are kept, so that the table is full after the warm-up
    env = {"HISPARSE_CLUSTER_RUNTIME_DIR": f"{place}/run", "HISPARSE_COORDINATOR_ENDED_KEEP_MAX": "64"}
    with process("hisparse.cli", "coordinator", "--metrics-port", "-1", log=log, **env) as started:
        until(log, r"(listening|ready|serving)")
        yield Site(place, Target("coordinator", started, log))


# ---------------------------------------------------------------- the client


async def ask(place: Path) -> None:
    """A line `time latency outcome` for each request, until it is killed."""
    async with open_client(f"ipc://{place}/run/client.sock", name="another", reconnect_limit_s=0) as client:
        while True:
            began = time.monotonic()
            try:
                await request(client)
                outcome = "ok"
            except HiSparseError as error:
                outcome = type(error).__name__
            print(f"{began} {time.monotonic() - began} {outcome}", flush=True)
            await trio.sleep(max(0.0, began + CLIENT_INTERVAL_S - time.monotonic()))


async def request(client: Client) -> None:
    await client.pools()
    await client.workers()
    await client.requests()


# ---------------------------------------------------------------- attackers


async def assail(at: Site, seed: int, count: int, per_s: float) -> None:
    """Send `count` messages, from CONNECTIONS connections at a time, `per_s` in a second at most."""
    began, first, goal = trio.current_time(), at.sent, at.sent + count

    async def attacker(number: int) -> None:
        dice = random.Random(f"{seed}/{number}")
        while at.sent < goal:
            role = dice.choice(ROLES)
            opening, data, messages_sent = attack(dice, role)
            at.sent += messages_sent
            await trio.sleep_until(began + (at.sent - first) / per_s)
            at.connections[await connection(at.path(role), dice, opening, data)] += 1

    async with trio.open_nursery() as nursery:
        for number in range(CONNECTIONS):
            nursery.start_soon(attacker, number)


async def connection(path: str, dice: random.Random, opening: bytes, data: bytes) -> str:
    """One attacker's: all of its bytes, those behind the handshake in one piece or two; how it ended."""
    try:
        stream = await trio.open_unix_socket(path)
    except OSError:
        return "not accepted"
    ending = "stuck"
    try:
        with trio.move_on_after(SEND_LIMIT_S):
            await stream.send_all(opening)
            await _hear(stream, len(GREETING) + len(READY) if data else 0)
            cut = dice.randrange(len(data) + 1) if dice.random() < 0.2 else len(data)
            for piece in (data[:cut], data[cut:]):
                if piece:
                    await stream.send_all(piece)
            ending = "left" if dice.random() < 0.5 else await _hear(stream, 1 << 30)
    except (OSError, trio.BrokenResourceError):
        ending = "cut"
    finally:
        with suppress(OSError):
            await trio.aclose_forcefully(stream)
    return ending


async def _hear(stream: trio.SocketStream, count: int) -> str:
    """Read `count` bytes, as long as another comes within LISTEN_S."""
    while count > 0:
        with trio.move_on_after(LISTEN_S) as waiting:
            if not (received := await stream.receive_some(65_536)):
                return "ended"
            count -= len(received)
        if waiting.cancelled_caught:
            return "heard"
    return "heard"


# ---------------------------------------------------------------- the run


async def storm(at: Site, seed: int, count: int, per_s: float) -> None:
    began = time.monotonic()

    async def tell() -> None:
        while True:
            await trio.sleep(30)
            rate = at.sent / (time.monotonic() - began)
            print(f"{at.sent} messages, {rate:.0f}/s, memory {at.coordinator.memory_bytes >> 20} MiB", flush=True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell)
        await assail(at, seed, count, per_s)
        nursery.cancel_scope.cancel()
    print(f"{at.sent} messages, {at.sent / (time.monotonic() - began):.0f}/s; connections {dict(at.connections)}")


def fuzz(seed: int, count: int, per_s: float, place: Path) -> list[str]:
    """What went wrong."""
    with site(place) as at:
        trio.run(assail, at, seed - 1, WARM_UP_MESSAGES, per_s)
        at.sent = 0
        at.connections.clear()
        log = place / "client.log"
        with process("tests.support.fuzz_zmq", "--ask", str(place), log=log):
            time.sleep(UNDISTURBED_S)
            at.coordinator.before_bytes = at.coordinator.memory_bytes
            began = time.monotonic()
            trio.run(storm, at, seed, count, per_s)
            ended = time.monotonic()
            time.sleep(SETTLE_S)
        return at.coordinator.verdict() + client_verdict(log, began, ended)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--rate", type=float, default=math.inf, help="messages a second, at most")
    parser.add_argument("--ask", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ask:
        trio.run(ask, given.ask)
    print(f"seed {given.seed}", flush=True)
    place = Path(tempfile.mkdtemp(prefix="hisparse-fuzz-"))
    wrong = fuzz(given.seed, given.messages, given.rate, place)
    return conclude(wrong, place)


if __name__ == "__main__":
    sys.exit(main())
