"""The programs that attack a service for long (tools.fuzz.all): who gets which cores and how much time, and what
their verdicts find. The attacks themselves are run short by the fuzz tests."""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tools.fuzz import rig as fuzz_rig
from tools.fuzz.all import BESIDE_CORES_MIN, OWN_CORES_MIN, command, plan
from tools.fuzz.rig import (
    CLIENT_WARM_UP,
    ROUNDS,
    Cores,
    Report,
    Spans,
    Tally,
    client_verdict,
    cores_of,
    rounds,
    text_of,
)
from tools.fuzz.two_keys import judge, rounds_within

GIVEN = argparse.Namespace(
    seed=7, requests=1_000_000, messages=100_000, rounds=6, floor_ms=0.0, seconds=540.0, out=None
)


@pytest.mark.parametrize("count", [1, 2, OWN_CORES_MIN - 1, OWN_CORES_MIN, BESIDE_CORES_MIN, BESIDE_CORES_MIN + 1, 64])
def test_sides_share_no_core_and_lanes_end_in_time(count: int) -> None:
    lanes = plan(range(count), 540)
    assert [run.program for lane in lanes for run in lane] == ["http", "zmq", "two_keys"]
    assert len(lanes) == (2 if count >= BESIDE_CORES_MIN else 1)
    for lane in lanes:
        assert sum(run.seconds for run in lane) == pytest.approx(540)
        sides = [lane[0].cores.service, lane[0].cores.client, lane[0].cores.attackers]
        assert {run.cores for run in lane} == {lane[0].cores}
        assert all(sides) == (count >= OWN_CORES_MIN)
        assert sum(map(len, sides)) == len(frozenset().union(*sides))
    used = [
        frozenset().union(*(it.cores.service | it.cores.client | it.cores.attackers for it in lane)) for lane in lanes
    ]
    assert sum(map(len, used)) == len(frozenset().union(*used)) == (count if count >= OWN_CORES_MIN else 0)


@pytest.mark.parametrize(("count", "beside"), [(16, False), (12, True)])
def test_rates_end_attacks_in_time(count: int, beside: bool) -> None:
    (http,), (zmq, _) = plan(range(count), 540, beside=beside)
    for run, wanted in ((http, GIVEN.requests), (zmq, GIVEN.messages)):
        arguments = command(run, GIVEN)
        rate = float(arguments[arguments.index("--rate") + 1])
        assert 0.9 * run.attack_s < wanted / rate < run.attack_s
        assert run.attack_s < run.seconds


def test_lanes_beside_each_other_on_12_cores() -> None:
    (http,), (zmq, two_keys) = plan(range(12), 540, beside=True)
    assert http.cores == Cores(frozenset({0, 1, 2}), frozenset({3}), frozenset({4, 5}))
    assert zmq.cores == two_keys.cores == Cores(frozenset({6, 7, 8}), frozenset({9}), frozenset({10, 11}))
    assert zmq.seconds + two_keys.seconds == http.seconds == 540
    with pytest.raises(ValueError, match="needs 12 cores, not 11"):
        plan(range(11), 540, beside=True)


def test_program_alone_has_all_cores_and_the_whole_time(tmp_path: Path) -> None:
    for count, attackers in ((2, 0), (OWN_CORES_MIN, 3), (32, 27)):
        ((run,),) = plan(range(count), 570, only="http")
        assert (run.program, run.seconds, len(run.cores.attackers)) == ("http", 570, attackers)
        arguments = command(run, argparse.Namespace(**{**vars(GIVEN), "out": tmp_path}))
        assert arguments[arguments.index("--json") + 1] == str(tmp_path / "http.json")
        assert arguments[arguments.index("--attackers") + 1] == str(max(attackers, 1))


@pytest.mark.process
def test_processes_of_a_rig_end_when_it_is_killed() -> None:
    """The rig cannot end them itself then."""
    code = (
        "import sys; from pathlib import Path; from tools.fuzz.rig import process;"
        "held = process('timeit', '-n', '1', 'import time; time.sleep(600)', log=Path('/dev/null'));"
        "print(held.__enter__().pid, flush=True); sys.stdin.read()"
    )
    rig = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert rig.stdout is not None
    child = os.pidfd_open(int(rig.stdout.readline()))
    rig.kill()
    rig.communicate()
    try:
        ended, _, _ = select.select([child], [], [], 30)
        if not ended:
            signal.pidfd_send_signal(child, signal.SIGKILL)
        assert ended
    finally:
        os.close(child)


def test_cores_are_read_as_they_are_written() -> None:
    assert cores_of("0-3,8") == {0, 1, 2, 3, 8}
    assert cores_of(text_of(frozenset({5, 1, 9}))) == {1, 5, 9}
    assert cores_of("") == Cores().service == frozenset()


def verdict(log: Path, calm_ms: float, stormy_ms: float, outcome: str = "ok", floor_ms: float = 0.0) -> list[str]:
    """Of a client with 90 answers in calm spans before 100 s, and 200 behind; slow between them, where nothing is
    judged."""
    lines = [
        f"{at} {(9.0 if 50 <= at < 60 else (calm_ms if at < 100 else stormy_ms) / 1e3)} ok"
        for at in range(-CLIENT_WARM_UP, 300)
    ]
    lines.insert(-5, f"299.5 {stormy_ms / 1e3} {outcome}")
    log.write_text("\n".join([*lines, "cut o"]))
    report = Report()
    client_verdict(report, log, Spans([(0, 50), (60, 100)], [(100, 300)]), floor_ms)
    return report.wrong


def test_verdict_on_a_client(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert verdict(log, 2, 5.9) == []
    assert verdict(log, 2, 6.1) == ["p99 of the client grew 3.0 x"]
    assert verdict(log, 2, 6.1, floor_ms=50) == []
    assert verdict(log, 20, 61, floor_ms=50) == ["p99 of the client grew 3.0 x"]
    assert verdict(log, 2, 2, "429") == ["the client was refused: ['429']"]


def test_attackers_send_to_the_sink_and_to_the_service_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same rate; only what the service got counts."""
    now, jobs = [0.0], []

    def attack(told: Sequence[Mapping[str, Any]]) -> Tally:
        jobs.append(told)
        now[0] += min(told[0]["seconds"], 20.0)
        return Tally(told[0]["count"] if told[0]["port"] == 1 else 10**9)

    monkeypatch.setattr(fuzz_rig.time, "monotonic", lambda: now[0])
    spans = rounds(attack, [{"port": 1, "count": 1_000, "seconds": 400.0, "seed": "s", "per_s": 5.0}], {"port": 2})
    assert [told[0]["port"] for told in jobs] == [2, 1] * ROUNDS
    assert {told[0]["per_s"] for told in jobs} == {5.0}
    assert len({told[0]["seed"] for told in jobs}) == ROUNDS
    assert spans.sent.sent == pytest.approx(1_000, abs=ROUNDS)
    assert spans.stormy_s == ROUNDS * (20.0 - fuzz_rig.ATTACKERS_START_S)
    edges = [edge for pair in zip(spans.calm, spans.stormy, strict=True) for span in pair for edge in span]
    assert edges == sorted(edges)


def test_client_without_answers_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("")
    report = Report()
    client_verdict(report, tmp_path / "log", Spans([(0, 1)], [(1, 2)]), 0.0)
    assert report.wrong == ["the client had no answer", "the client had no answer undisturbed"]


@pytest.mark.parametrize(("stormy_ms", "outcome", "wrong"), [(29, "ok", 0), (31, "ok", 1), (10, "429", 1)])
def test_verdict_on_two_keys(stormy_ms: float, outcome: str, wrong: int) -> None:
    phases = [(False, 0.0, 100.0), (True, 100.0, 200.0), (False, 200.0, 300.0)]
    times = [(float(at), (stormy_ms if 100 <= at < 200 else 10.0) / 1e3, outcome) for at in range(300)]
    report = Report()
    judge(report, "ids", phases, times)
    assert len(report.wrong) == wrong
    assert report.measured["ids"]["refused"] == (300 if outcome != "ok" else 0)


def test_rounds_fit_the_time() -> None:
    assert rounds_within(540, attacks=4) == 6
    assert rounds_within(10, attacks=4) == 1
