"""What grammars and log-probabilities cost requests without them: a worker's processor time for each token.

    git archive COMMIT | tar x -C DIR
    python -m benchmarks.agents_cost --against DIR [--runs 8] [--core 1 ...]

64 requests decode on a worker in three processes: of the commit in DIR, of this one, and of this one with a grammar for
every second request (masks). All three are pinned to one core, have one thread of torch and no collector, and decode
BLOCK steps in turn, so that drift hits all alike. None follows itself, which would find its own caches; the first two
change places halfway, and the run after begins with the other one. A step ahead of each block is not measured. The
median of the blocks' ratios is a run; the processes of a run are new ones, since a process keeps its luck with
addresses. Several cores have a run each at a time. What counts is processor time of the whole process, threads that
compute masks included; a GPU's host has other cores for these. Give the commit itself as DIR to see what this machine
can tell apart.

The model is a tiny GLM-5 in float32 on a CPU, through the executor with its streams, swap-in and draws. The commit in
DIR needs `tests/support/worker_rig.py`. The bounds are BASE_SHARE_MAX and MASKS_SHARE_MAX; past one the exit code is 1.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import click

REQUESTS: Final = 64
#: Steps measured together, and such blocks of each process in a run.
BLOCK, BLOCKS = 4, 32
#: Of the three processes, in the first half of the blocks and in the second.
ORDERS: Final = ((0, 1, 2), (1, 0, 2))
#: More processor time than of the earlier commit, and than without grammars, as shares.
BASE_SHARE_MAX: Final = 0.01
MASKS_SHARE_MAX: Final = 0.03
#: A process: it says what it needs no more than once, and then the nanoseconds of the steps that it is asked for.
WORKER: Final = """
import gc, os, sys, time
os.sched_setaffinity(0, {int(sys.argv[4])})  # of this thread, and of those that it starts
import msgspec, torch
torch.set_num_threads(1)
from tests.support.worker_rig import SETTINGS, Rig
from worker.runners.load import load_runner

model, requests, every = sys.argv[1], *map(int, sys.argv[2:4])
settings = msgspec.structs.replace(
    SETTINGS, model=model, dtype="float32", seats=requests, hot_size_classes=(64,), host_mem="64MiB",
    device_mem="128MiB", threads=1,
)
rig = Rig(settings=settings, runner=load_runner(settings))
lives = []
for number in range(requests):
    grammar = {"grammar": "start: /([a-m][n-z]){200}/"} if every and number % every == 0 else {}
    lives.append(rig.coordinator.create(number + 1, 20, 400, **grammar))
    rig.run_until(lambda: rig.coordinator.admit(lives[-1], 64))

def steps(count):
    until = min(len(life.tokens) for life in lives) + count
    rig.run_until(lambda: min(len(life.tokens) for life in lives) >= until)

steps(4)
gc.collect()
gc.freeze()
gc.disable()
print("ready", flush=True)
for line in sys.stdin:
    steps(1)
    tokens = sum(len(life.tokens) for life in lives)
    began = time.process_time_ns()
    steps(int(line))
    print((time.process_time_ns() - began) // (sum(len(life.tokens) for life in lives) - tokens), flush=True)
"""


class Worker:
    """A process that runs the code in `directory`; each `every`-th request has a grammar, or (0) none."""

    def __init__(self, directory: Path, model: str, core: int, every: int = 0) -> None:
        command = [sys.executable, "-c", WORKER, model, *map(str, (REQUESTS, every, core))]
        path = os.pathsep.join(filter(None, (str(directory), os.environ.get("PYTHONPATH"))))
        environ = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, cwd=directory, env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise click.ClickException(f"a worker has ended with {self._process.wait()}")
        return line

    def token_ns(self) -> int:
        """Of BLOCK steps."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{BLOCK}\n")
        self._process.stdin.flush()
        return int(self.line())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def measure(workers: Sequence[Worker]) -> list[list[int]]:
    """Nanoseconds per token of each block, by worker."""
    for worker in workers:
        worker.line()
    found: list[list[int]] = [[] for _ in workers]
    for block in range(BLOCKS):
        for place in ORDERS[2 * block // BLOCKS]:
            found[place].append(workers[place].token_ns())
    return found


def share(blocks: Sequence[int], against: Sequence[int]) -> float:
    """More time than `against`, in the median of blocks."""
    return statistics.median(a / b for a, b in zip(blocks, against, strict=True)) - 1


def run_once(against: Path, model: str, core: int, *, now_first: bool) -> tuple[float, float, float]:
    """Microseconds per token, and the shares of this commit and of masks."""
    here, workers = Path(__file__).parents[1], list[Worker]()
    try:
        places = (here, against) if now_first else (against, here)
        workers += [*(Worker(place, model, core) for place in places), Worker(here, model, core, 2)]
        *plain, masks = measure(workers)
        now, base = plain if now_first else reversed(plain)
    finally:
        for worker in workers:
            worker.close()
    return statistics.median(now) / 1e3, share(now, base), share(masks, now)


@click.command()
@click.option("--against", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--runs", default=8)
@click.option("--core", "cores", multiple=True, type=int, default=[max(os.sched_getaffinity(0))])
def main(against: Path, runs: int, cores: Sequence[int]) -> None:
    from worker.runners.tiny import write_tiny_checkpoint

    results = []
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(len(cores)) as pool:
        write_tiny_checkpoint(Path(directory), "glm-5", index_topk=16, context_max_tokens=512)

        def run_on(place: int) -> None:
            """Every so many-th run, one after the other. The order alternates on each core."""
            for number in range(place, runs, len(cores)):
                now_first = (number // len(cores) + place) % 2 > 0
                result = run_once(against.resolve(), directory, cores[place], now_first=now_first)
                results.append(result)
                click.echo("{:7.1f} us a token, {:+.2%} of the earlier commit, {:+.2%} with masks".format(*result))

        list(pool.map(run_on, range(len(cores))))
    _, bases, masks = zip(*results, strict=True)
    base, mask = statistics.median(bases), statistics.median(masks)
    click.echo(
        f"median {base:+.2%} (bound {BASE_SHARE_MAX:.0%}, {min(bases):+.2%} to {max(bases):+.2%}); "
        f"masks {mask:+.2%} (bound {MASKS_SHARE_MAX:.0%}, {min(masks):+.2%} to {max(masks):+.2%})"
    )
    sys.exit(int(base > BASE_SHARE_MAX or mask > MASKS_SHARE_MAX))


if __name__ == "__main__":
    main()
