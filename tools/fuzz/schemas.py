"""`python -m tools.fuzz.schemas --bodies 10000 --seed S`: drawn schemas and bodies before a real front.

    coordinator   a gateway in a child process, whose outputs are what their grammars allow
    front         `hisparse http`
    a client      with a key of its own, at an even pace in a child process, that asks for no form
    askers        ASKERS threads, each with a key: first what tests.support.hostile_schemas draws, then only bodies
                  whose grammars take minutes or gigabytes to build

Each answer is judged (`hostile_schemas.fault`), each bomb must be refused, and the client always served. Its latency is
told for three phases: nothing else, drawn bodies, bombs. Processes and their memory are judged as in
tools.fuzz.rig. Exits with 1 when something is wrong, and leaves the logs behind.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Final

from tests.support.hostile_schemas import Drawn, bomb, draw, fault
from tools.fuzz.http import CLIENT_KEY, Front, front
from tools.fuzz.http import MODULE as SITE
from tools.fuzz.rig import CLIENT_WARM_UP, SETTLE_S, Report, Target, p99, process, warmed_up

ASKERS: Final = 6
KEYS: Final = tuple(f"the-key-of-asker-number-{number:02}" for number in range(ASKERS))
#: Bodies before memory is measured.
WARM_UP_BODIES: Final = 600
CALM_S: Final = 10.0
#: Of each asker.
BOMBS: Final = 3
ANSWER_LIMIT_S: Final = 120.0
FAULTS_SHOWN: Final = 20


@dataclass
class Tally:
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def add(self, drawn: Drawn, status: int, answer: bytes) -> None:
        self.outcomes[str(status)] += 1
        if status == 200 and drawn.schema is not None:
            has_ended = json.loads(answer)["choices"][0]["finish_reason"] == "stop"
            self.outcomes["ended and valid" if has_ended else "length"] += 1
        if found := fault(drawn, status, answer):
            self.faults.append(f"{drawn.path} {drawn.body[:400]!r}: {found}")


def ask(port: int, key: str, bodies: list[Drawn], judge: Callable[[Drawn, int, bytes], None]) -> None:
    """In a thread: one body after the other."""
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWER_LIMIT_S)
    for drawn in bodies:
        connection.request("POST", drawn.path, drawn.body, {"Authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        judge(drawn, answer.status, answer.read())
    connection.close()


def ask_all(port: int, bodies: list[Drawn], judge: Callable[[Drawn, int, bytes], None]) -> tuple[float, float]:
    """All askers, each with its part of `bodies`: when it began and ended. Raises RuntimeError when an asker fails."""
    began, failed = time.monotonic(), list[BaseException]()

    def part(number: int) -> None:
        try:
            ask(port, KEYS[number], bodies[number::ASKERS], judge)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=part, args=(number,)) for number in range(ASKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise RuntimeError("an asker failed") from failed[0]
    return began, time.monotonic()


def fuzz(given: argparse.Namespace, place: Path) -> Report:
    report, tally, bombed = Report({"program": "schemas", "seed": given.seed}), Tally(), Counter[str]()
    dice = random.Random(f"{given.seed}")
    (place / "api.keys").write_text("\n".join((CLIENT_KEY, *KEYS)) + "\n")
    (place / "api.keys").chmod(0o600)
    coordinator_log, client_log = place / "coordinator.log", place / "client.log"
    with (
        process(SITE, "--coordinate", str(place), log=coordinator_log) as started,
        front(place, "front", cores=frozenset()) as at,
        process(SITE, "--ask", str(at.port), log=client_log),
    ):
        coordinator = Target("coordinator", started, coordinator_log)
        warmed_up(client_log)
        calm = (time.monotonic(), time.monotonic() + CALM_S)
        time.sleep(CALM_S)
        ask_all(at.port, [draw(dice) for _ in range(WARM_UP_BODIES)], tally.add)
        at.start()
        rest = [draw(dice) for _ in range(given.bodies - WARM_UP_BODIES)]
        drawn = ask_all(at.port, rest, tally.add)
        bombs = [Drawn("/v1/completions", bomb(dice)) for _ in range(BOMBS * ASKERS)]
        bombing = ask_all(at.port, bombs, partial(_judge_bomb, bombed))
        time.sleep(SETTLE_S)
        at.verdict(report)
        _alive(coordinator, report)
        report.measured["builders_mib"] = _children_mib(at)
    report.measured |= {"bodies": given.bodies, "answers": dict(sorted(tally.outcomes.items())), "bombs": dict(bombed)}
    report.wrong += tally.faults[:FAULTS_SHOWN] + [f"{len(tally.faults)} faults"] * bool(tally.faults)
    report.wrong += [f"bombs that were not refused: {dict(bombed)}"] if bombed.keys() != {"400"} else []
    _client(report, client_log, {"calm": calm, "drawn": drawn, "bombs": bombing})
    return report


def _judge_bomb(bombed: Counter[str], drawn: Drawn, status: int, answer: bytes) -> None:
    bombed[str(status) if not fault(drawn, status, answer) else answer.decode()[:300]] += 1


def _alive(target: Target, report: Report) -> None:
    report.wrong += [] if target.process.poll() is None else [f"{target.name} has exited"]


def _children_mib(at: Front) -> list[float]:
    """Resident memory of the front's processes that build grammars and check bodies."""
    pids = Path(f"/proc/{at.process.pid}/task").glob("*/children")
    children = [int(pid) for path in pids for pid in path.read_text().split()]
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in children]
    return [round(count * 4096 / (1 << 20), 1) for count in sorted(pages)]


def _client(report: Report, log: Path, phases: dict[str, tuple[float, float]]) -> None:
    lines = [line.split() for line in log.read_text().splitlines()[CLIENT_WARM_UP:-1]]
    refused = [line[2] for line in lines if line[2] != "ok"]
    report.wrong += [f"the client was refused: {refused[:9]}"] if refused else []
    for name, (began, ended) in phases.items():
        found = [float(line[1]) for line in lines if began <= float(line[0]) < ended]
        report.wrong += [] if found else [f"the client had no answer: {name}"]
        report.measured[f"client, {name}"] = {
            "requests": len(found),
            "p50_ms": round(1e3 * statistics.median(found or [0.0]), 2),
            "p99_ms": round(1e3 * p99(found), 2),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--json", type=Path, help="write what was measured there")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    place = Path(tempfile.mkdtemp(prefix="hisparse-schemas-"))
    return fuzz(given, place).conclude(place, given.json)


if __name__ == "__main__":
    sys.exit(main())
