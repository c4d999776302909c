"""`python -m tools.fuzz.peak_memory`: the peak memory of a coordinator under each attack with unfinished messages.

Each case has a `hisparse coordinator` of its own, over ipc, plain tcp or CURVE. Its connections send parts that
announce another one, at the same time, until they are ended or have sent all; the last part never comes. Prints the
table of docs/security.md. Exits with 1 when a coordinator ended, logged a defect, or passed PEAK_BYTES_MAX.

What API keys do to the memory of a front is measured by tools.fuzz.two_keys.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq

from protocol import messages
from protocol.messages import CLIENT_MESSAGE_BYTES_MAX, PROTOCOL_VERSION
from protocol.transport.keys import add_peer, make_keys, read_peer_key
from tests.support.guarded_rig import ANY_PORT
from tests.support.zmtp_peer import MORE, Peer, curve_peer, frame
from tools.fuzz.rig import Report, Target, process, until

HELLO: Final = messages.encode(messages.Hello(PROTOCOL_VERSION, "client", "hostile"))
PARTS: Final = 160
LARGE: Final = frame(bytes(CLIENT_MESSAGE_BYTES_MAX), MORE)
#: 2 bytes on the wire, 64 in memory: as many as libzmq's largest message has bytes, and twice as many.
TINY: Final = frame(b"", MORE) * 65_536
TINY_TIMES: Final = 2 * 8 * CLIENT_MESSAGE_BYTES_MAX // len(TINY)
SMALL: Final = frame(bytes(40), MORE)
SMALL_PARTS: Final = 48_000
PEAK_BYTES_MAX: Final = 1 << 30
SETTLE_S: Final = 2.0
#: For one connection.
LIMIT_S: Final = 60.0


@dataclass(frozen=True)
class Case:
    transport: str
    connections: int
    after_hello: bool
    what: str
    data: bytes
    times: int

    @property
    def title(self) -> str:
        hello = "after their hello" if self.after_hello else "without a hello"
        return f"{self.transport}, {self.connections} connections {hello}, {self.what}"


CASES: Final = (
    Case("ipc", 1, False, "160 parts of 8 MiB", LARGE, PARTS),
    Case("plain tcp", 1, True, "160 parts of 8 MiB", LARGE, PARTS),
    Case("CURVE", 1, True, "160 parts of 8 MiB", LARGE, PARTS),
    Case("ipc", 64, False, "160 parts of 8 MiB", LARGE, PARTS),
    Case("plain tcp", 64, True, "160 parts of 8 MiB", LARGE, PARTS),
    Case("CURVE", 8, True, "160 parts of 8 MiB", LARGE, PARTS),
    Case("ipc", 1, False, "parts of no bytes", TINY, TINY_TIMES),
    Case("ipc", 64, True, "parts of no bytes", TINY, TINY_TIMES),
    Case("ipc", 1, False, "48,000 parts of 40 bytes, one at a time", SMALL, SMALL_PARTS),
)


@contextmanager
def coordinator(place: Path, transport: str) -> Iterator[tuple[Target, str]]:
    """With the endpoint of its clients."""
    env = {"HISPARSE_CLUSTER_RUNTIME_DIR": f"{place}/run"}
    if transport != "ipc":
        env |= {f"HISPARSE_CLUSTER_{role.upper()}_ENDPOINT": endpoint for role, endpoint in ANY_PORT.items()}
        env |= {"HISPARSE_CLUSTER_INSECURE": "true"} if transport == "plain tcp" else {}
    if transport == "CURVE":
        make_keys(place / "keys")
        add_peer(place / "keys", "client", "hostile", output=place / "client.key")
        env["HISPARSE_CLUSTER_KEYS_DIR"] = f"{place}/keys"
    log = place / "coordinator.log"
    no_cores: frozenset[int] = frozenset()
    with process("hisparse.cli", "coordinator", "--metrics-port", "-1", log=log, cores=no_cores, env=env) as started:
        endpoint = until(log, r"listening to=clients endpoint=(\S+)")
        until(log, r"(listening to=workers)")
        yield Target("coordinator", started, log), endpoint


def send(endpoint: str, case: Case) -> None:
    """One connection's: all parts, until it is ended."""
    peer = Peer(endpoint)
    try:
        if case.after_hello:
            peer.send(frame(HELLO))
            peer.socket.recv(65_536)
        for _ in range(case.times):
            if not peer.send(case.data):
                return
        time.sleep(SETTLE_S)
    finally:
        peer.close()


def send_by_curve(endpoint: str, place: Path, case: Case) -> None:
    part = bytes(CLIENT_MESSAGE_BYTES_MAX)
    with curve_peer(endpoint, read_peer_key(place, "client")) as (dealer, relay):
        dealer.send(HELLO)
        dealer.recv()
        relay.hold_after = case.times * CLIENT_MESSAGE_BYTES_MAX
        for _ in range(case.times):
            dealer.send(part, zmq.SNDMORE, copy=False)
        dealer.send(part)
        relay.ended.wait(LIMIT_S)


def measure(case: Case, report: Report) -> None:
    place = Path(tempfile.mkdtemp(prefix="hisparse-peak-"))
    with coordinator(place, case.transport) as (target, endpoint):
        before = target.memory_bytes
        arguments = (endpoint, place, case) if case.transport == "CURVE" else (endpoint, case)
        act = send_by_curve if case.transport == "CURVE" else send
        threads = [threading.Thread(target=act, args=arguments, daemon=True) for _ in range(case.connections)]
        for thread in threads:
            thread.start()
        limit = time.monotonic() + LIMIT_S
        for thread in threads:
            thread.join(max(0.0, limit - time.monotonic()))
        time.sleep(SETTLE_S)
        peak = target.peak_bytes if target.process.poll() is None else 0
        print(f"| {case.title} | {before >> 20} | {peak >> 20} MiB |", flush=True)
        report.measured[case.title] = {"before_mib": before >> 20, "peak_mib": peak >> 20}
        report.wrong += [] if peak else [f"{case.title}: the coordinator ended"]
        report.wrong += [] if peak <= PEAK_BYTES_MAX else [f"{case.title}: peak {peak >> 20} MiB"]
        report.wrong += [f"{case.title}: a defect"] if "Traceback" in target.log.read_text() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", help="cases whose title contains this")
    parser.add_argument("--json", type=Path, help="write what was measured there")
    given = parser.parse_args()
    report = Report({"program": "peak_memory"})
    print("| attack | MiB before | peak |\n|---|---|---|")
    for case in CASES:
        if not given.only or given.only in case.title:
            measure(case, report)
    return report.conclude(Path(tempfile.mkdtemp(prefix="hisparse-peak-")), given.json)


if __name__ == "__main__":
    sys.exit(main())
