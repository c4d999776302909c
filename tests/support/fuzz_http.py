"""`python -m tests.support.fuzz_http --requests 1000000 --seed S`: hostile clients before real fronts, and one that is
not.

    coordinator   a gateway in a child process, that answers every prompt with three tokens
    fronts        `hisparse http`, one plain and one with TLS
    a client      with a separate API key, at an even pace in a child process: undisturbed first, then not
    attackers     CONNECTIONS at a time send what tests.support.hostile_http makes, mostly to the plain front

Judged as in tests.support.fuzz_rig. Exits with 1 when something is wrong, and leaves the logs behind.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import ssl
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Final

import msgspec
import trio

from coordinator.scheduling.events import Handle
from protocol import logs, messages
from tests.hisparse.test_http_tls import write_pair
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
from tests.support.gateway_rig import GatewayRig, running
from tests.support.hostile_http import attack
from worker.runners.tiny_template import TEMPLATES

#: Attackers at a time, and how many of a hundred go to the front with TLS.
CONNECTIONS: Final = 16
TLS_PERCENT: Final = 10
#: How long an attacker waits for answers after its last byte.
ANSWER_LIMIT_S: Final = 0.5
#: Requests before memory is measured: what is loaded late is loaded by then.
WARM_UP_REQUESTS: Final = 2_000
FUZZ_KEY: Final = "the-key-of-all-attackers-0"
CLIENT_KEY: Final = "the-key-of-another-client-0"


@dataclass
class Front(Target):
    port: int = 0


@dataclass
class Site:
    place: Path
    plain: Front
    secure: Front
    context: ssl.SSLContext
    sent: int = 0
    answered: dict[str, int] = field(default_factory=dict)

    @property
    def fronts(self) -> tuple[Front, Front]:
        return self.plain, self.secure


# ---------------------------------------------------------------- processes


class AnsweringRig(GatewayRig):
    """Answers each request with three tokens and forgets it."""

    def __init__(self, directory: Path, nursery: trio.Nursery) -> None:
        super().__init__(directory)
        self._nursery = nursery
        scheduler = self.scheduler
        model = scheduler.model()
        assert model is not None
        scheduler.served = msgspec.structs.replace(model, chat_template=TEMPLATES["glm-5"])
        self._submit = scheduler.submit
        scheduler.submit = self._answer  # type: ignore[method-assign]

    async def _answer(self, submit: messages.Submit, owner: str, user: str = "") -> Handle:
        handle = await self._submit(submit, owner, user)
        self.scheduler.commands.clear()
        self._nursery.start_soon(self._play, handle.request_id, submit.sampling.max_tokens)
        return handle

    async def _play(self, request_id: str, tokens: int) -> None:
        await trio.sleep(0.002)
        self.speak(request_id, [97, 98, 99][:tokens])
        self.scheduler.finish(request_id)
        await trio.sleep(0.05)
        self.scheduler.forget(request_id)


async def coordinate(directory: Path) -> None:
    logs.configure("info", "text")
    async with trio.open_nursery() as nursery, running(AnsweringRig(directory, nursery)):
        await trio.sleep_forever()


def ask_on(port: int) -> None:
    """The client: a line `time latency outcome` for each request, until it is killed."""
    body = json.dumps({"prompt": "abc", "max_tokens": 3}).encode()
    headers = {"Authorization": f"Bearer {CLIENT_KEY}"}
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    while True:
        began = time.monotonic()
        try:
            connection.request("POST", "/v1/completions", body, headers)
            answer = connection.getresponse()
            answer.read()
            outcome = "ok" if answer.status == 200 else str(answer.status)
        except (OSError, HTTPException) as error:
            connection.close()
            outcome = type(error).__name__
        print(f"{began} {time.monotonic() - began} {outcome}", flush=True)
        time.sleep(max(0.0, began + CLIENT_INTERVAL_S - time.monotonic()))


@contextmanager
def front(place: Path, name: str, *options: str) -> Iterator[Front]:
    log = place / f"{name}.log"
    keys = place / "api.keys"
    common = ("http", "--port", "0", "--metrics-port", "-1", "--api-keys", str(keys))
    env = {
        "HISPARSE_CLUSTER_RUNTIME_DIR": str(place),
        "HISPARSE_CLUSTER_CLIENT_ENDPOINT": f"ipc://{place}/run/client.sock",
    }
    with process("hisparse.cli", *common, *options, log=log, **env) as started:
        port = until(log, r"listening.*127\.0\.0\.1:(\d+)")
        until(log, r"()connected")
        yield Front(f"front {name}", started, log, port=int(port))


@contextmanager
def site(place: Path) -> Iterator[Site]:
    (place / "api.keys").write_text(f"{FUZZ_KEY}\n{CLIENT_KEY}\n")
    (place / "api.keys").chmod(0o600)
    cert, key = write_pair(place)
    context = ssl.create_default_context(cafile=cert)
    with (
        process("tests.support.fuzz_http", "--coordinate", str(place), log=place / "coordinator.log"),
        front(place, "plain") as plain,
        front(place, "tls", "--tls-cert", cert, "--tls-key", key) as secure,
    ):
        yield Site(place, plain, secure, context)


# ---------------------------------------------------------------- attackers


async def assail(at: Site, seed: int, requests: int, per_s: float) -> None:
    """Send `requests`, from CONNECTIONS connections at a time, `per_s` in a second at most."""
    began, goal = trio.current_time(), at.sent + requests

    async def attacker(number: int) -> None:
        dice = random.Random(f"{seed}/{number}")
        while at.sent < goal:
            data, count = attack(dice, dice.choice((FUZZ_KEY, FUZZ_KEY, "no-key-at-all-of-ours")))
            at.sent += count
            await trio.sleep_until(began + at.sent / per_s)
            answer = await connection(at, dice, data, secure=dice.randrange(100) < TLS_PERCENT)
            for status in re.findall(rb"HTTP/1\.1 (\d{3})", answer) or (b"none",):
                at.answered[status.decode()] = at.answered.get(status.decode(), 0) + 1

    async with trio.open_nursery() as nursery:
        for number in range(CONNECTIONS):
            nursery.start_soon(attacker, number)


async def connection(at: Site, dice: random.Random, data: bytes, *, secure: bool) -> bytes:
    """One attacker's: all of its bytes, and what is answered; it may leave without listening."""
    told = bytearray()
    port = (at.secure if secure else at.plain).port
    with suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
        stream: trio.abc.Stream = await trio.open_tcp_stream("127.0.0.1", port)
        if secure and dice.random() < 0.8:
            stream = trio.SSLStream(stream, at.context, server_hostname="localhost", https_compatible=True)
        try:
            with trio.move_on_after(ANSWER_LIMIT_S * 4):
                await _talk(stream, dice, data, told)
        finally:
            await trio.aclose_forcefully(stream)
    return bytes(told)


async def _talk(stream: trio.abc.Stream, dice: random.Random, data: bytes, told: bytearray) -> None:
    cut = dice.randrange(len(data) + 1) if dice.random() < 0.2 else len(data)
    for piece in (data[:cut], data[cut:]):
        if piece:
            await stream.send_all(piece)
    if dice.random() < 0.2:
        return
    if isinstance(stream, trio.SocketStream) and dice.random() < 0.3:
        await stream.send_eof()
    limit_s = ANSWER_LIMIT_S if dice.random() < 0.3 else 0.02
    while True:
        with trio.move_on_after(limit_s) as waiting:
            if not (received := await stream.receive_some(65_536)):
                return
            told += received
        if waiting.cancelled_caught:
            return


# ---------------------------------------------------------------- the run


async def storm(at: Site, seed: int, requests: int, per_s: float) -> None:
    began = time.monotonic()

    async def tell() -> None:
        while True:
            await trio.sleep(30)
            rate = at.sent / (time.monotonic() - began)
            memory = "/".join(str(one.memory_bytes >> 20) for one in at.fronts)
            print(f"{at.sent} requests, {rate:.0f}/s, memory {memory} MiB", flush=True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell)
        await assail(at, seed, requests, per_s)
        nursery.cancel_scope.cancel()
    rate = at.sent / (time.monotonic() - began)
    print(f"{at.sent} requests, {rate:.0f}/s; answered {dict(sorted(at.answered.items()))}")


def fuzz(seed: int, requests: int, per_s: float, place: Path) -> list[str]:
    """What went wrong."""
    with site(place) as at:
        trio.run(assail, at, seed - 1, WARM_UP_REQUESTS, math.inf)
        at.sent = 0
        at.answered.clear()
        log = place / "client.log"
        with process("tests.support.fuzz_http", "--ask", str(at.plain.port), log=log):
            time.sleep(UNDISTURBED_S)
            for one in at.fronts:
                one.before_bytes = one.memory_bytes
            began = time.monotonic()
            trio.run(storm, at, seed, requests, per_s)
            ended = time.monotonic()
            time.sleep(SETTLE_S)
        wrong = [each for one in at.fronts for each in one.verdict()]
        return wrong + client_verdict(log, began, ended)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--rate", type=float, default=math.inf, help="requests a second, at most")
    parser.add_argument("--coordinate", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ask", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.coordinate:
        trio.run(coordinate, given.coordinate)
    if given.ask:
        ask_on(given.ask)
    print(f"seed {given.seed}", flush=True)
    place = Path(tempfile.mkdtemp(prefix="hisparse-fuzz-"))
    wrong = fuzz(given.seed, given.requests, given.rate, place)
    return conclude(wrong, place)


if __name__ == "__main__":
    sys.exit(main())
