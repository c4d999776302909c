"""`python -m tools.fuzz.growing_grammars --rounds 3`: outputs of one API key whose grammars grow, beside another key's.

OUTPUTS requests of the hostile key are held to `a: a a | "x"` at a time. Each token of such an output takes longer than
the one before, until the worker ends it. The other key asks for CLIENT_TOKENS tokens, one answer after the other; with
--held its outputs have a grammar too, which costs little. The service is `hisparse up` with a tiny checkpoint on this
machine's CPU: a step takes some milliseconds, and there are few cores, so that this is the worst case.

Undisturbed and hostile phases alternate. Prints p50 and p99 of the other key's seconds in both, their ratio, and how
the hostile outputs ended, as one line of JSON. Exits with 1 when an answer of the other key was refused or cut, when
the ratio of p99 is above P99_GROWTH_MAX, or when a hostile output has ended as anything but failed by its grammar.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from tools.faults.nginx_front import SIZES, until_there
from tools.fuzz.http import CLIENT_KEY, FUZZ_KEY
from tools.fuzz.rig import Report, process
from tools.fuzz.two_keys import SETTLE_S, judge
from worker.runners.tiny import write_tiny_checkpoint

OUTPUTS: Final = 6
CLIENT_TOKENS: Final = 32
#: Of a hostile output: behind so many its grammar has long been too much.
HOSTILE_TOKENS: Final = 1_200
ANSWER_LIMIT_S: Final = 120.0
#: Of either kind of phase. Six hostile outputs end within it on two cores that do nothing else.
PHASE_S: Final = 120.0

#: It cannot end, since its last character is never drawn.
HOSTILE: Final = {
    "prompt": "abc",
    "max_tokens": HOSTILE_TOKENS,
    "structured_outputs": {"grammar": 'start: a "!"\na: a a | "x"'},
    "logit_bias": {str(ord("!")): -100},
}
CLIENT: Final = {"prompt": "abc", "max_tokens": CLIENT_TOKENS, "ignore_eos": True}
HELD: Final = {"prompt": "abc", "max_tokens": CLIENT_TOKENS, "structured_outputs": {"regex": "[a-z]{64}"}}


def ask(connection: HTTPConnection, key: str, body: object) -> tuple[int, Any]:
    """The status of an answer, and what it says; 0 and the error's name where there was none."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    except (OSError, HTTPException, ValueError) as error:
        connection.close()
        return 0, type(error).__name__


class Client:
    """Asks one answer after the other from a thread; `times` has the start, the seconds and the outcome of each."""

    def __init__(self, port: int, body: object) -> None:
        self.times: list[tuple[float, float, str]] = []
        self._body = body
        self._connection = HTTPConnection("127.0.0.1", port, timeout=ANSWER_LIMIT_S)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_on, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _keep_on(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            status, said = ask(self._connection, CLIENT_KEY, self._body)
            is_whole = status == 200 and said["usage"]["completion_tokens"] == CLIENT_TOKENS
            self.times.append((began, time.monotonic() - began, "ok" if is_whole else f"{status} {said}"))


@contextmanager
def hostile(port: int, ends: Counter[str]) -> Iterator[None]:
    """OUTPUTS threads, each with an output at a time; the last ones are given up. Counts in `ends` how they ended."""
    stop, connections = threading.Event(), list[HTTPConnection]()

    def keep_on() -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=ANSWER_LIMIT_S)
        connections.append(connection)
        while not stop.is_set():
            status, said = ask(connection, FUZZ_KEY, HOSTILE)
            error = said.get("error", {}) if isinstance(said, dict) else {"message": said}
            if not stop.is_set():
                is_outgrown = "held to its grammar any further" in error.get("message", "")
                ends["outgrown" if status == 500 and is_outgrown else f"{status} {error}"] += 1

    threads = [threading.Thread(target=keep_on, daemon=True) for _ in range(OUTPUTS)]
    for thread in threads:
        thread.start()
    yield
    stop.set()
    for connection in connections:
        if connection.sock is not None:
            connection.sock.shutdown(2)
    for thread in threads:
        thread.join()


@contextmanager
def service(place: Path) -> Iterator[int]:
    """The port of a front with a tiny checkpoint, in the directory `place`."""
    model, ready, keys = place / "model", place / "ready.json", place / "api.keys"
    keys.touch(mode=0o600)
    keys.write_text(f"{FUZZ_KEY}\n{CLIENT_KEY}\n")
    write_tiny_checkpoint(model, index_topk=64)
    told = ("--runtime-dir", str(place / "run"), "--ready-file", str(ready), "--set", f"http.api_keys_file={keys}")
    command = ("hisparse.cli", "up", "--model", str(model), "--http", "127.0.0.1:0", *SIZES, *told)
    with process(*command, log=place / "up.log") as started:
        until_there(ready, started, place / "up.log")
        yield int(urlsplit(json.loads(ready.read_text())["http"]["url"]).port or 0)


def measure(port: int, rounds: int, phase_s: float, *, held: bool) -> Report:
    report, ends, took = Report({"program": "growing_grammars", "rounds": rounds}), Counter[str](), []
    client = Client(port, HELD if held else CLIENT)

    def phase(*, is_hostile: bool) -> None:
        time.sleep(SETTLE_S)
        began = time.monotonic()
        time.sleep(phase_s)
        took.append((is_hostile, began, time.monotonic()))

    phase(is_hostile=False)
    for _ in range(rounds):
        with hostile(port, ends):
            phase(is_hostile=True)
        phase(is_hostile=False)
    client.close()
    judge(report, "held" if held else "free", took, client.times)
    report.measured["ends"] = dict(ends)
    report.wrong += [f"an output ended otherwise: {end}" for end in ends if end != "outgrown"]
    report.wrong += [] if ends["outgrown"] else ["no output was ended by its grammar"]
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--phase-s", type=float, default=PHASE_S)
    parser.add_argument("--held", action="store_true", help="the other key's outputs have a grammar, too")
    parser.add_argument("--json", type=Path, help="write what was measured there")
    given = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="hisparse-grammars-"))
    with service(place) as port:
        report = measure(port, given.rounds, given.phase_s, held=given.held)
    return report.conclude(place, given.json)


if __name__ == "__main__":
    sys.exit(main())
