"""What lockstep costs the hosts of a group: rounds that agree and compute nothing, sleep, and waking.

    python -m benchmarks.group [--ranks 8] [--rounds 2000]

Starts the ranks as processes on this machine, on a CPU over gloo, and prints one JSON object. Of each rank's decode
loop: `decide_us` and `publish_us`, host time of a round for what the next round is and for publishing a wish, without
the collective; `round_us`, a whole round with it. Asleep: the share of a core of each process. Awake: milliseconds
from a rank's first wish to the end of the round that gathered it, at the rank that was woken last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from protocol.settings import ClusterSettings, Config, WorkerSettings
from worker.group.agreement import Agreement, Wish
from worker.group.group import Group
from worker.loop.rounds import Rounds
from worker.streams import make_streams

ASLEEP_S: Final = 5.0
WAKES: Final = 20
LAG: Final = 2


class Unsent:
    """Collectives that send nothing: the host's part of a round alone."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def all_gather(self, output: Tensor, own: Tensor) -> None:
        output.view(self.size, -1).copy_(own.expand(self.size, -1))

    def all_to_all(self, output: Tensor, parts: Tensor) -> None:
        raise NotImplementedError


def rounds_of(group: Any) -> Rounds:
    agreement = Agreement(lag=LAG, batch_sizes=[1, 2, 4, 8], chunk_sizes=[512], prompt_rounds_max=1)
    return Rounds(group, agreement, make_streams("inline").compute, "cpu")


def timed_rounds(rounds: Rounds, count: int, wish: Wish) -> dict[str, float]:
    """Medians over rounds, in microseconds."""
    decide, publish, whole = [], [], []
    for _ in range(count):
        began = time.perf_counter()
        this = rounds.next(has_work=True)
        assert this is not None
        decided = time.perf_counter()
        rounds.begin(this)
        rounds.end(this, wish)
        ended = time.perf_counter()
        decide.append(decided - began)
        publish.append(ended - decided)
        whole.append(ended - began)
    return {name: median(it) * 1e6 for name, it in (("decide", decide), ("publish", publish), ("whole", whole))}


def drain(rounds: Rounds) -> None:
    """Rounds without a wish, until the group sleeps."""
    while (this := rounds.next(has_work=False)) is not None:
        rounds.begin(this)
        rounds.end(this, Wish())


def rank(config: Config, count: int) -> dict[str, Any]:
    """One process of the group."""
    group = Group.join(config, "no model")
    news = threading.Event()
    group.control.on_wake = news.set
    rounds = rounds_of(group)
    timed_rounds(rounds, 50, Wish(rows=1))
    cpu, began = time.process_time(), time.perf_counter()
    found: dict[str, Any] = {"round_us": timed_rounds(rounds, count, Wish(rows=1))["whole"]}
    found["cpu_us"] = (time.process_time() - cpu) / count * 1e6
    found["mean_round_us"] = (time.perf_counter() - began) / count * 1e6
    drain(rounds)
    time.sleep(0.5)
    news.clear()
    cpu = time.process_time()
    deadline = time.monotonic() + ASLEEP_S
    while time.monotonic() < deadline:  # as the decode loop sleeps
        news.wait(0.05)
    found["asleep_core_share"] = (time.process_time() - cpu) / ASLEEP_S
    found["wake_ms"] = [wake(rounds, group, news, number) for number in range(WAKES)]
    alone: Any = SimpleNamespace(size=group.size, control=group.control, collectives=Unsent(group.size))
    host = timed_rounds(rounds_of(alone), count, Wish(rows=1))
    group.leave()
    return found | {"decide_us": host["decide"], "publish_us": host["publish"]}


def wake(rounds: Rounds, group: Group, news: threading.Event, number: int) -> float | None:
    """Rank `number` gets work; milliseconds until its wish was gathered here. All clocks are of one machine."""
    waker = number % group.size == group.rank
    key = f"wake {number}"
    if waker:
        time.sleep(0.2)
        began = time.monotonic()
        group.control.set(key, str(began).encode())
    while (this := rounds.next(has_work=waker)) is None:
        news.wait(0.05)
        news.clear()
    rounds.begin(this)
    rounds.end(this, Wish())
    ended = time.monotonic()
    drain(rounds)
    return (ended - float(group.control.get(key))) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2_000)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--directory", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank >= 0:
        torch.set_num_threads(1)
        endpoint = f"ipc://{asked.directory}/group.sock"
        settings = WorkerSettings(
            name=f"w{asked.rank}", group="g0", group_rank=asked.rank, group_size=asked.ranks, group_endpoint=endpoint
        )
        config = Config(cluster=ClusterSettings(runtime_dir=asked.directory), worker=settings)
        print(json.dumps(rank(config, asked.rounds)))
        return
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(summary(run(asked.ranks, asked.rounds, Path(directory))), indent=1))


def run(ranks: int, rounds: int, directory: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.group", "--ranks", str(ranks), "--rounds", str(rounds)]
    children = [
        subprocess.Popen(
            [*command, "--rank", str(number), "--directory", str(directory)], stdout=subprocess.PIPE, text=True
        )
        for number in range(ranks)
    ]
    return [json.loads(child.communicate(timeout=300)[0]) for child in children]


def summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over ranks, and the slowest of each wake."""
    wakes = [max(times) for times in zip(*(found["wake_ms"] for found in ranks), strict=True)]
    names = ("decide_us", "publish_us", "round_us", "mean_round_us", "cpu_us", "asleep_core_share")
    about = {name: round(median(found[name] for found in ranks), 4) for name in names}
    return {"ranks": len(ranks), "cores": os.cpu_count()} | about | {"wake_ms": [round(it, 2) for it in sorted(wakes)]}


if __name__ == "__main__":
    main()
