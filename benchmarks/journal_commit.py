"""What one commit of the journal costs, here and in another checkout.

`python -m benchmarks.journal_commit --against DIR`

The store alone, one process for each checkout, a few commits of each in turn, so that both meet the same disk:

    order      one small record, as for the answer to a command
    submit     one request with a prompt of 2,048 tokens
    tokens     one token of each of 440 requests: 2 ms at 220,000 tokens per second

    commit_*_ms    by the clock, fsync included
    cpu_p50_us     of a processor, fsync's share included
    ratio_*        here by there; of the medians, of the means

A child of an old checkout imports that one's store: only names that both have are used.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

KINDS: Final = ("order", "submit", "tokens")
COMMITS_EACH: Final = 5
PROMPT_BYTES: Final = 4 * 2_048
REQUESTS: Final = 440
HERE: Final = Path(__file__).resolve().parents[1]


def _accepted(records: Any, number: int) -> Any:
    """A submission in the form of the checkout."""
    prompt, sampling, name = bytes(PROMPT_BYTES), records.Sampling(9), f"r{number}"
    if not hasattr(records, "RequestFacts"):
        return records.RequestAccepted(number, number, name, "me", 0, prompt, sampling, 0.5)
    digest = records.digest_of(prompt)
    rank, tokens = (0, 0, number), len(prompt) // 4
    return records.RequestAccepted(
        records.RequestFacts(number, name, rank, "me", "", tokens, digest, sampling, 0.5), prompt
    )


def child(place: Path) -> None:
    """Commits `KIND COUNT` for each line of stdin; answers with seconds by the clock and of a processor."""
    from coordinator.journal import records
    from coordinator.journal.store import open_store
    from metrics.state import JournalCounters

    column = np.arange(REQUESTS, dtype=np.int32).tobytes()
    groups: dict[str, Callable[[int], Any]] = {
        "order": lambda n: records.RequestOrdered(n % 64, held=False, forced_slots=-1),
        "submit": lambda n: _accepted(records, n),
        "tokens": lambda n: records.TokensAppended(column, column, column, column, column),
    }
    store = open_store(place / "journal.sqlite", JournalCounters())
    for number, line in enumerate(sys.stdin):
        kind, count = line.split()
        took = []
        for at in range(int(count)):
            group = [groups[kind](number * COMMITS_EACH + at)]
            cpu, began = time.thread_time(), time.perf_counter()
            store.write_now(group)
            took.append((time.perf_counter() - began, time.thread_time() - cpu))
        print(json.dumps(took), flush=True)
    store.close()


class Checkout:
    def __init__(self, root: Path, place: Path) -> None:
        place.mkdir()
        environ = os.environ | {"PYTHONPATH": str(root)}
        command = [sys.executable, "-P", str(Path(__file__).resolve()), "--child", str(place)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environ, cwd=root, stdin=pipe, stdout=pipe, text=True)
        self.took: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}

    def commit(self, kind: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(kind, COMMITS_EACH, file=self._process.stdin, flush=True)
        self.took[kind] += json.loads(self._process.stdout.readline())

    def end(self) -> None:
        self._process.communicate()

    def figures(self, kind: str) -> dict[str, float]:
        seconds, cpu = (list(column) for column in zip(*self.took[kind], strict=True))
        p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
        return {
            "commit_p50_ms": round(p50, 3),
            "commit_mean_ms": round(1e3 * statistics.mean(seconds), 3),
            "commit_p99_ms": round(p99, 3),
            "cpu_p50_us": round(1e6 * statistics.median(cpu)),
        }


def compare(root: Path, place: Path, rounds: int) -> dict[str, Any]:
    here, there = Checkout(HERE, place / "here"), Checkout(root, place / "there")
    for number in range(rounds):
        for kind in KINDS:
            for checkout in (here, there) if number % 2 else (there, here):
                checkout.commit(kind)
    here.end()
    there.end()
    result: dict[str, Any] = {}
    for kind in KINDS:
        ours, theirs = here.figures(kind), there.figures(kind)
        ratios = {
            f"ratio_{it}": round(ours[f"commit_{it}_ms"] / theirs[f"commit_{it}_ms"], 2) for it in ("p50", "mean")
        }
        result[kind] = {"here": ours, "there": theirs, **ratios}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, default=HERE, help="another checkout (default: this one, twice)")
    parser.add_argument(
        "--rounds", type=int, default=200, help=f"of {COMMITS_EACH} commits each (default: %(default)s)"
    )
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where the journals lie (default: %(default)s)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    with tempfile.TemporaryDirectory(dir=options.dir) as place:
        print(json.dumps(compare(options.against.resolve(), Path(place), options.rounds), indent=1))


if __name__ == "__main__":
    main()
