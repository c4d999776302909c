"""`python -m tools.faults.nginx_front --seconds 600`: the front behind nginx, and pauses between requests.

    defaults    both as they come, and pauses of up to twice the time for which nginx keeps a connection to the front.
                Every answer must be 200
    crossing    nginx keeps connections for longer than the front, whose limit is CROSSING_IDLE_S here, and pauses end
                within CROSSING_MARGIN_S of that limit. Requests that cross the close fail: how many?

Each lane has a connection of its own from nginx to the front, and asks by POST, which nginx does not repeat. The front
is that of `hisparse up`, with a tiny checkpoint. Prints one line of JSON for each mode, and exits with 1 when a request
of the first has failed. Needs nginx (of Debian: nginx-light).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from hisparse.cluster.children import die_with_parent
from protocol.settings import HttpSettings
from tests.support.ports import free_ports
from tools.fuzz.rig import START_LIMIT_S, process
from worker.runners.tiny import write_tiny_checkpoint

#: For how long nginx keeps an idle connection to an upstream, unless it is told.
NGINX_IDLE_S: Final = 60.0
CROSSING_IDLE_S: Final = 2.0
CROSSING_MARGIN_S: Final = 0.05
#: In the report, of the ends of pauses around the front's limit.
STEP_MS: Final = 10
ANSWER_LIMIT_S: Final = 60.0
SIZES: Final = ("--host-mem", "64MiB", "--device-mem", "32MiB", "--hot-size-classes", "64,128", "--threads", "1")
BODY: Final = json.dumps({"prompt": "abc", "max_tokens": 1})
OK: Final = "200"


class Mode(NamedTuple):
    """`keeps` is what nginx is told of its own limit; `pauses_s` are the shortest and the longest."""

    name: str
    idle_s: float
    keeps: str
    pauses_s: tuple[float, float]
    lanes: int
    may_fail: bool


MODES: Final = (
    Mode("defaults", HttpSettings().idle_s, "", (0.0, 2 * NGINX_IDLE_S), 128, may_fail=False),
    Mode(
        "crossing",
        CROSSING_IDLE_S,
        f"keepalive_timeout {5 * CROSSING_IDLE_S:g}s;",
        (CROSSING_IDLE_S - CROSSING_MARGIN_S, CROSSING_IDLE_S + CROSSING_MARGIN_S),
        16,
        may_fail=True,
    ),
)


class Asked(NamedTuple):
    """One request: the pause before it, -1 for the first over a connection, and its status, or the error."""

    pause_s: float
    outcome: str


# ---------------------------------------------------------------- processes


@contextmanager
def front(place: Path, idle_s: float) -> Iterator[int]:
    """The port of a front with a tiny checkpoint, in the directory `place`."""
    model, ready = place / "model", place / "ready.json"
    write_tiny_checkpoint(model, index_topk=64)
    told = ("--runtime-dir", str(place / "run"), "--ready-file", str(ready), "--set", f"http.idle_s={idle_s:g}")
    command = ("hisparse.cli", "up", "--model", str(model), "--http", "127.0.0.1:0", *SIZES, *told)
    with process(*command, log=place / "up.log") as started:
        until_there(ready, started, place / "up.log")
        yield int(urlsplit(json.loads(ready.read_text())["http"]["url"]).port or 0)


@contextmanager
def nginx(binary: str, place: Path, upstream: int, mode: Mode) -> Iterator[int]:
    """The port of an nginx in front of the front at port `upstream`."""
    port = free_ports(1)
    file, log, pid = place / "nginx.conf", place / "nginx.log", place / "nginx.pid"
    lanes = range(mode.lanes)
    kept = [f"upstream lane{lane} {{ server 127.0.0.1:{upstream}; keepalive 1; {mode.keeps} }}" for lane in lanes]
    paths = [f"location /{lane}/ {{ proxy_pass http://lane{lane}/; }}" for lane in lanes]
    temporary = [f"{kind}_temp_path {place}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")]
    lines = (
        *("daemon off;", "worker_processes 1;", f"pid {pid};", f"error_log {log};"),
        *("events { worker_connections 4096; }", "http {", "access_log off;", *temporary, *kept),
        *(f"server {{ listen 127.0.0.1:{port};", "proxy_http_version 1.1;", 'proxy_set_header Connection "";'),
        *(*paths, "}}"),
    )
    file.write_text("\n".join(lines))
    parent = os.getpid()
    started = subprocess.Popen(
        [binary, "-c", str(file), "-e", str(log)],
        preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509 - this process has one thread
    )
    try:
        until_there(pid, started, log)
        yield port
    finally:
        started.terminate()
        started.wait(ANSWER_LIMIT_S)


def until_there(path: Path, started: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for the file `path`. Raises RuntimeError when the process ends before, or takes too long."""
    limit = time.monotonic() + START_LIMIT_S
    while not path.exists():
        if started.poll() is not None or time.monotonic() > limit:
            raise RuntimeError(f"did not start:\n{log.read_text()}")
        time.sleep(0.05)


# ---------------------------------------------------------------- requests


def asks(port: int, lane: int, mode: Mode, seed: str, until: float) -> list[Asked]:
    """Send the requests of one lane until then, with pauses between them."""
    dice, told, pause_s = random.Random(f"{seed}/{mode.name}/{lane}"), list[Asked](), -1.0
    while True:
        told.append(Asked(pause_s, outcome_of(port, lane)))
        pause_s = dice.uniform(*mode.pauses_s)
        if time.monotonic() + pause_s > until:
            return told
        time.sleep(pause_s)
        pause_s = pause_s if told[-1].outcome == OK else -1.0


def outcome_of(port: int, lane: int) -> str:
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWER_LIMIT_S)
    try:
        headers = {"content-type": "application/json", "connection": "close"}
        connection.request("POST", f"/{lane}/v1/completions", BODY, headers)
        answer = connection.getresponse()
        answer.read()
        return str(answer.status)
    except (OSError, HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()


def report(mode: Mode, seed: str, asked: Sequence[Asked]) -> dict[str, Any]:
    """Count outcomes of requests over kept connections, and of those that opened one. Pauses of failed ones are told in
    ms from the front's limit."""
    kept = [one for one in asked if one.pause_s >= 0]
    failed = [one for one in kept if one.outcome != OK]
    steps = Counter(STEP_MS * round(1e3 * (one.pause_s - mode.idle_s) / STEP_MS) for one in failed)
    return {
        "mode": mode.name,
        "seed": seed,
        "opened": dict(Counter(one.outcome for one in asked if one.pause_s < 0)),
        "kept": dict(Counter(one.outcome for one in kept)),
        "failed_share": round(len(failed) / max(1, len(kept)), 6),
        "failed_ms": dict(sorted(steps.items())),
    }


def run(binary: str, mode: Mode, seconds: float, seed: str) -> bool:
    """Run one mode, print its report, and return whether all is well. Logs are kept where it is not."""
    place = Path(tempfile.mkdtemp(prefix="nginx-front-"))
    with front(place, mode.idle_s) as upstream, nginx(binary, place, upstream, mode) as port:
        until = time.monotonic() + seconds
        with ThreadPoolExecutor(mode.lanes) as pool:
            lanes = list(pool.map(lambda lane: asks(port, lane, mode, seed, until), range(mode.lanes)))
    asked = [one for lane in lanes for one in lane]
    print(json.dumps(report(mode, seed, asked)), flush=True)
    kept = [one for one in asked if one.pause_s >= 0]
    is_well = bool(kept) and all(one.outcome == OK for one in asked if one.pause_s < 0 or not mode.may_fail)
    if is_well:
        shutil.rmtree(place)
    else:
        print(f"logs: {place}", file=sys.stderr)
    return is_well


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    names = [mode.name for mode in MODES]
    parser.add_argument("--mode", choices=names, action="append", help="default: both, one after the other")
    parser.add_argument("--seconds", type=float, default=600.0, help="of each mode")
    parser.add_argument("--seed", default=str(random.SystemRandom().randrange(1 << 31)))
    given = parser.parse_args()
    binary = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if binary is None:
        parser.error("no nginx in PATH (of Debian: apt-get install nginx-light)")
    chosen = [mode for mode in MODES if mode.name in (given.mode or names)]
    return min(1, sum(not run(binary, mode, given.seconds, given.seed) for mode in chosen))


if __name__ == "__main__":
    sys.exit(main())
