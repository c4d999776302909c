"""`python -m tools.fuzz.zmq --messages 100000 --seed S`: hostile peers before a real coordinator, and a client
that is not.

    coordinator   `hisparse coordinator`, with a journal, over ipc
    a client      asks for pools, workers and requests at an even pace, in a process of its own: undisturbed, then not
    attackers     CONNECTIONS at a time send what tools.fuzz.hostile_zmq makes, to all three listeners

Judged as in tools.fuzz.rig. Exits with 1 when something is wrong, and leaves the logs behind.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import trio

from hisparse.client.client import Client, open_client
from protocol.errors import HiSparseError
from tests.support.zmtp_peer import GREETING, READY
from tools.fuzz.hostile_zmq import ROLES, attack
from tools.fuzz.rig import (
    CLIENT_INTERVAL_S,
    SETTLE_S,
    Cores,
    Report,
    Tally,
    Target,
    add_options,
    client_verdict,
    cores_given,
    process,
    rounds,
    storm,
    tell,
    until,
    warmed_up,
)
from tools.fuzz.sink import sink

MODULE: Final = "tools.fuzz.zmq"
#: Attackers at a time.
CONNECTIONS: Final = 16
#: Messages before memory is measured: what is loaded late is loaded by then, and bounded tables are full.
WARM_UP_MESSAGES: Final = 20_000
#: How long an attacker listens after its last byte, and sends at most.
LISTEN_S: Final = 0.02
SEND_LIMIT_S: Final = 5.0


@dataclass
class Site:
    place: Path
    coordinator: Target


@contextmanager
def site(place: Path, cores: frozenset[int] = frozenset()) -> Iterator[Site]:
    """A coordinator in the directory `place`, on these cores."""
    log = place / "coordinator.log"
    # few ended requests are kept, so that the table is full after the warm-up
    env = {"HISPARSE_CLUSTER_RUNTIME_DIR": f"{place}/run", "HISPARSE_COORDINATOR_ENDED_KEEP_MAX": "64"}
    with process("hisparse.cli", "coordinator", "--metrics-port", "-1", log=log, cores=cores, env=env) as started:
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


async def assail(place: Path, tally: Tally, seed: int, count: int, per_s: float = math.inf) -> None:
    """Send `count` messages, from CONNECTIONS connections at a time, `per_s` in a second at most."""
    began = trio.current_time()

    async def attacker(number: int) -> None:
        dice = random.Random(f"{seed}/{number}")
        while tally.sent < count:
            role = dice.choice(ROLES)
            opening, data, messages_sent = attack(dice, role)
            tally.sent += messages_sent
            await trio.sleep_until(began + tally.sent / per_s)
            tally.outcomes[await connection(f"{place}/run/{role}.sock", dice, opening, data)] += 1

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


def fuzz(given: argparse.Namespace, cores: Cores, place: Path) -> Report:
    report = Report({"program": "zmq", "seed": given.seed})
    job = {"place": str(place), "seed": given.seed - 1, "count": WARM_UP_MESSAGES, "seconds": given.seconds}
    with site(place, cores.service) as at:
        attack_with = partial(storm, MODULE, place, cores=cores.attackers, targets=[at.coordinator])
        attack_with([job])
        log = place / "client.log"
        with (
            sink(place, cores=cores.attackers) as aside,
            process(MODULE, "--ask", str(place), log=log, cores=cores.client),
        ):
            warmed_up(log)
            time.sleep(SETTLE_S)
            at.coordinator.start()
            job |= {"seed": given.seed, "count": given.messages}
            job |= {"per_s": given.rate} if given.rate else {}
            spans = rounds(attack_with, [job], {"place": str(aside.place)})
            time.sleep(SETTLE_S)
        tally = spans.sent
        report.measured |= {
            "messages": tally.sent,
            "per_s": {"at_most": given.rate or None, "sent": round(tally.sent / spans.stormy_s)},
            "connections": dict(tally.outcomes),
        }
        at.coordinator.verdict(report)
    client_verdict(report, log, spans, given.floor_ms)
    report.wrong += [] if tally.sent >= given.messages else [f"the time ended after {tally.sent} messages"]
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=0.0, help="messages a second, at most; 0: as fast as it goes")
    add_options(parser)
    parser.add_argument("--ask", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--assail", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ask:
        trio.run(ask, given.ask)
    if job := given.assail:
        tally, place, seconds = Tally(), Path(job.pop("place")), job.pop("seconds")
        trio.run(tell, tally, partial(assail, place, tally, **job), seconds)
        return 0
    print(f"seed {given.seed}", flush=True)
    place = Path(tempfile.mkdtemp(prefix="hisparse-fuzz-"))
    return fuzz(given, cores_given(given), place).conclude(place, given.json)


if __name__ == "__main__":
    sys.exit(main())
