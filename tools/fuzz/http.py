"""`python -m tools.fuzz.http --requests 1000000 --seed S`: hostile clients before real fronts, and one that is
not.

    coordinator   a gateway in a child process, that answers every prompt with three tokens
    fronts        `hisparse http`, one plain and one with TLS
    a client      with a separate API key, at an even pace in a child process: undisturbed first, then not
    attackers     --attackers processes, CONNECTIONS each, send what tests.support.hostile_http makes, mostly to the
                  plain front

Memory is first measured after 5,000 requests, and after each front had as many connections as it keeps at once, all
waiting in a header: the interpreter does not return all of what those take. So the verdict is about what time adds,
and `memory_mib` begins with a front that was full once. Judged as in tools.fuzz.rig. Exits with 1 when
something is wrong, and leaves the logs behind.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import resource
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec
import trio

from basics import gc_policy
from coordinator.state.events import Handle
from hisparse.http.server.listener import CONNECTIONS_MIN
from protocol import logs, messages
from protocol.errors import BadInput
from tests.support.gateway_rig import GatewayRig, running
from tests.support.hostile_http import attack
from tests.support.tiny_templates import TEMPLATES
from tests.support.tls_pair import pair_in
from tests.support.walks import walk
from tools.fuzz.rig import (
    CLIENT_INTERVAL_S,
    SETTLE_S,
    START_LIMIT_S,
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

MODULE: Final = "tools.fuzz.http"
#: Connections of one process at a time, and how many of a hundred go to the front with TLS.
CONNECTIONS: Final = 64
TLS_PERCENT: Final = 25
#: How long an attacker waits for answers after its last byte.
ANSWER_LIMIT_S: Final = 0.5
#: Requests before memory is measured: what is loaded late is loaded by then.
WARM_UP_REQUESTS: Final = 5_000
#: Tokens of an output by a grammar.
OUTPUT_TOKENS_MAX: Final = 300
#: Requests that the coordinator knows at once, and for how long after their end. A connection that has not read an
#: output by then is dropped, and its next message, too.
REQUEST_INDICES: Final = 2_048
FORGET_AFTER_S: Final = 1.0
FUZZ_KEY: Final = "the-key-of-all-attackers-0"
CLIENT_KEY: Final = "the-key-of-another-client-0"


@dataclass
class Front(Target):
    port: int = 0


@dataclass
class Site:
    place: Path
    coordinator: Target
    plain: Front
    secure: Front
    cert: str
    key: str

    @property
    def fronts(self) -> tuple[Front, Front]:
        return self.plain, self.secure


# ---------------------------------------------------------------- processes


class AnsweringRig(GatewayRig):
    """Answers each request with three tokens, or what its grammar allows, and forgets it."""

    def __init__(self, directory: Path, nursery: trio.Nursery) -> None:
        super().__init__(directory, request_indices=REQUEST_INDICES)
        self._nursery = nursery
        scheduler = self.scheduler
        model = scheduler.model()
        assert model is not None
        scheduler.served = msgspec.structs.replace(model, chat_template=TEMPLATES["glm-5"])
        self._submit = scheduler.submit
        scheduler.submit = self._answer  # type: ignore[method-assign]

    async def _answer(
        self, submit: messages.Submit, owner: str, user: str = "", *, prefix_tenant: str | None = None
    ) -> Handle:
        is_new = submit.request_id not in self.scheduler.request_indices
        handle = await self._submit(submit, owner, user, prefix_tenant=prefix_tenant)
        self.scheduler.commands.clear()
        if is_new:  # else the front lost its connection, and sends it again
            self._nursery.start_soon(self._play, handle.request_id, submit.sampling)
        return handle

    async def _play(self, request_id: str, sampling: messages.Sampling) -> None:
        await trio.sleep(0.002)
        outcome, reason = "FINISHED", "length"
        try:
            text = await trio.to_thread.run_sync(_output, sampling)  # it may take a second
        except BadInput as error:  # as a worker's requests end
            text, outcome, reason = "", "FAILED", str(error)
        if sampling.grammar and text:
            reason = "eos"
        self.speak(request_id, [*text.encode()])
        self.scheduler.finish(request_id, outcome, reason=reason)
        await trio.sleep(FORGET_AFTER_S)
        self.scheduler.forget(request_id)


def _output(sampling: messages.Sampling) -> str:
    """Empty: by its grammar it has not ended. Raises BadInput where the grammar is too much for the library."""
    if not sampling.grammar:
        return "abc"[: sampling.max_tokens]
    return walk(sampling.grammar, sampling.seed, ends_after=12, most=min(sampling.max_tokens, OUTPUT_TOKENS_MAX))


async def coordinate(directory: Path) -> None:
    logs.configure("info", "text")
    async with trio.open_nursery() as nursery, running(AnsweringRig(directory, nursery)):
        gc_policy.settle()  # as coordinator.service does
        await gc_policy.collect()


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


def write_keys(place: Path) -> None:
    """The file of API keys: of all attackers, and of the client."""
    (place / "api.keys").write_text(f"{FUZZ_KEY}\n{CLIENT_KEY}\n")
    (place / "api.keys").chmod(0o600)


@contextmanager
def front(
    place: Path, name: str, *options: str, cores: frozenset[int], settings: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Front]:
    """`settings`: variables of the environment."""
    log = place / f"{name}.log"
    keys = place / "api.keys"
    common = ("http", "--port", "0", "--metrics-port", "-1", "--api-keys", str(keys))
    env = {
        "HISPARSE_CLUSTER_RUNTIME_DIR": str(place),
        "HISPARSE_CLUSTER_CLIENT_ENDPOINT": f"ipc://{place}/run/client.sock",
        **settings,
    }
    with process("hisparse.cli", *common, *options, log=log, cores=cores, env=env) as started:
        port = until(log, r"listening.*127\.0\.0\.1:(\d+)")
        until(log, r"()connected")
        yield Front(f"front {name}", started, log, port=int(port))


@contextmanager
def site(place: Path, cores: frozenset[int] = frozenset()) -> Iterator[Site]:
    """Coordinator and fronts in the directory `place`, on these cores."""
    write_keys(place)
    cert, key = pair_in(place)
    with (
        process(MODULE, "--coordinate", str(place), log=place / "coordinator.log", cores=cores) as coordinator,
        front(place, "plain", cores=cores) as plain,
        front(place, "tls", "--tls-cert", cert, "--tls-key", key, cores=cores) as secure,
    ):
        yield Site(place, Target("coordinator", coordinator, place / "coordinator.log"), plain, secure, cert, key)


# ---------------------------------------------------------------- attackers


class Aim:
    """Where attackers send to: ports of the plain front and the one with TLS, whose certificate is `cert`."""

    def __init__(self, plain: int, secure: int, cert: str) -> None:
        self.plain, self.secure = plain, secure
        self.context = ssl.create_default_context(cafile=cert)


async def assail(aim: Aim, tally: Tally, seed: str, count: int, per_s: float = math.inf) -> None:
    """Send `count` requests, from CONNECTIONS connections at a time, `per_s` in a second at most."""
    began = trio.current_time()

    async def attacker(number: int) -> None:
        dice = random.Random(f"{seed}/{number}")
        while tally.sent < count:
            data, requests_sent = attack(dice, dice.choice((FUZZ_KEY, FUZZ_KEY, "no-key-at-all-of-ours")))
            tally.sent += requests_sent
            await trio.sleep_until(began + tally.sent / per_s)
            answer = await connection(aim, dice, data, secure=dice.randrange(100) < TLS_PERCENT)
            for status in re.findall(rb"HTTP/1\.1 (\d{3})", answer) or (b"none",):
                tally.outcomes[status.decode()] += 1

    async with trio.open_nursery() as nursery:
        for number in range(CONNECTIONS):
            nursery.start_soon(attacker, number)


async def connection(aim: Aim, dice: random.Random, data: bytes, *, secure: bool) -> bytes:
    """One attacker's: all of its bytes, and what is answered; it may leave without listening."""
    told = bytearray()
    port = aim.secure if secure else aim.plain
    with suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
        stream: trio.abc.Stream = await trio.open_tcp_stream("127.0.0.1", port)
        if secure and dice.random() < 0.8:
            stream = trio.SSLStream(stream, aim.context, server_hostname="localhost", https_compatible=True)
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


def fill(one: Front, context: ssl.SSLContext | None = None) -> None:
    """Open all the connections that a front keeps, each of which waits in a header, and close them again."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with ExitStack() as stack:
        for _ in range(CONNECTIONS_MIN):
            peer = socket.create_connection(("127.0.0.1", one.port), START_LIMIT_S)
            peer = context.wrap_socket(peer, server_hostname="localhost") if context is not None else peer
            stack.enter_context(peer).sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")


def fuzz(given: argparse.Namespace, cores: Cores, place: Path) -> Report:
    report = Report({"program": "http", "seed": given.seed})
    with site(place, cores.service) as at:
        aim = {"plain": at.plain.port, "secure": at.secure.port, "cert": at.cert, "seconds": given.seconds}
        jobs = [{**aim, "seed": f"{given.seed}/{number}"} for number in range(given.attackers)]
        jobs = [it | ({"per_s": given.rate / len(jobs)} if given.rate else {}) for it in jobs]
        attack = partial(storm, MODULE, place, cores=cores.attackers, targets=at.fronts)
        attack([it | {"count": WARM_UP_REQUESTS // len(jobs)} for it in jobs])
        fill(at.plain)
        fill(at.secure, ssl.create_default_context(cafile=at.cert))
        time.sleep(SETTLE_S)
        log = place / "client.log"
        with (
            sink(place, at.cert, at.key, cores.attackers) as aside,
            process(MODULE, "--ask", str(at.plain.port), log=log, cores=cores.client),
        ):
            warmed_up(log)
            for one in (*at.fronts, at.coordinator):
                one.start()
            jobs = [it | {"seed": f"{it['seed']}/storm", "count": given.requests // len(jobs) + 1} for it in jobs]
            spans = rounds(attack, jobs, {"plain": aside.plain, "secure": aside.secure})
            time.sleep(SETTLE_S)
        tally = spans.sent
        report.measured |= {
            "requests": tally.sent,
            "per_s": {"at_most": given.rate or None, "sent": round(tally.sent / spans.stormy_s)},
            "answers": dict(sorted(tally.outcomes.items())),
        }
        for one in (*at.fronts, at.coordinator):
            one.verdict(report)
        dropped = at.coordinator.log.read_text().count("message dropped")
        report.wrong += [f"the coordinator dropped {dropped} messages of the fronts"] if dropped else []
    client_verdict(report, log, spans, given.floor_ms)
    report.wrong += [] if tally.sent >= given.requests else [f"the time ended after {tally.sent} requests"]
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--attackers", type=int, default=1, help="processes that attack")
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second, at most; 0: as fast as it goes")
    add_options(parser)
    parser.add_argument("--coordinate", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ask", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--assail", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.coordinate:
        trio.run(coordinate, given.coordinate)
    if given.ask:
        ask_on(given.ask)
    if job := given.assail:
        aim, tally, seconds = Aim(job.pop("plain"), job.pop("secure"), job.pop("cert")), Tally(), job.pop("seconds")
        trio.run(tell, tally, partial(assail, aim, tally, **job), seconds)
        return 0
    print(f"seed {given.seed}", flush=True)
    place = Path(tempfile.mkdtemp(prefix="hisparse-fuzz-"))
    return fuzz(given, cores_given(given), place).conclude(place, given.json)


if __name__ == "__main__":
    sys.exit(main())
