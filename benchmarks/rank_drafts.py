"""Steps with drafts on one rank of a group at the size of the model: `python -m benchmarks.rank_drafts [--out FILE]`.

The rank of benchmarks.rank with the draft layer, and the other ranks synthesised beside it: experts have the load of
all ranks' rows, drafts included, and missed rows come over the link. Of each batch, two executors, one after the other:

    plain    worker.draft_tokens 0
    drafts   worker.draft_tokens auto; the number n of each step is set by hand, then (batch AUTO_BATCH) by the worker

Rows of a step select what their positions do (benchmarks.decode: Selections), so that each row misses as many entries
as the one before. Steps of as many rows get the same rows of other ranks, so that plain steps and those without drafts
read the same experts. Whether a draft holds is forced: behind the draws of a step, and before it is seen which rows
hold, the draw of each row is made the draft that follows it, with the chance that is asked for, or another token. All
that comes behind runs as with drafts that are right so often.

A row of the result is (batch, n) with a time of steps, and tokens a second for each chance; beside them what the chance
makes expected, from the time of all steps with n drafts. `links_ms` is computed (rank_floor.Links), for the exchanges
of the draft layer too. `auto` is worker.loop.draft_length over the times that were measured here, by batch and chance:
its tokens a second over plain's, for SIMULATED steps. Requests share host pages where the pool has fewer than they need
(`distinct_gib` are held, `wanted_gib` would be). Every row is written when it is there; what is missing when
--budget-seconds are over is left out. A request that faults ends the benchmark.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks import decode, rank_report
from benchmarks.decode import Cell, Clock, Selections, make_pool, open_executor, turn, turn_until
from benchmarks.rank import FAMILY, SynthesisedRanks
from benchmarks.rank_floor import Links
from benchmarks.swap_in import machine
from kernels.state import StepBatch
from protocol.byte_sizes import AUTO
from protocol.messages import DRAFT_TOKENS_MAX
from protocol.settings import DraftTokens
from protocol.units import pages_for
from worker.loop.batch import Status
from worker.loop.draft_length import DraftLengths, StepSeen
from worker.loop.executor import Executor
from worker.runners import transformers_dsa
from worker.runners.adjust import Adjust
from worker.runners.base import SamplerState, StepOutputs
from worker.runners.synthetic import synthetic_runner
from worker.runners.transformers_dsa import TransformersRunner
from worker.streams import Streams, make_streams
from worker.weights.synth import published_config

#: The most telling ones first.
BATCHES: Final = (16, 1, 64, 4)
#: Chances of a draft, by drafts of a step: those of which tokens a second are measured.
CHANCES: Final[Mapping[int, Sequence[float]]] = {
    1: (0.85, 0.5, 0.7, 0.95),
    2: (0.85, 0.5, 0.7, 0.95),
    4: (0.85, 0.95),
    3: (0.85,),
}
#: Those of `auto`.
AUTO_CHANCES: Final = (0.0, 0.5, 0.7, 0.85, 0.95)
#: Where a worker that chooses is measured too.
AUTO_BATCH: Final = 16
AUTO_MEASURED: Final = (0.85, 0.5)
#: Of which steps the kernels are listed; and how many such steps.
PROFILED_BATCHES, PROFILED_DRAFTS, PROFILED = (16, 64), (1, 2, 4), 2
SIMULATED: Final = 3_000
#: Not timed, behind each change: steps that began before it, and those whose drafts it has not reached.
WARM_UP: Final = 4
#: Timed of each chance, by batch; more of those that take less time.
STEPS: Final = {1: 24, 4: 20, 16: 16, 64: 8}
#: Drawn chances, as many steps; then they come again.
DRAWN: Final = 997
TAIL_SLOTS: Final = 2 * (1 + DRAFT_TOKENS_MAX)


@dataclass(frozen=True)
class Setup:
    """What all batches have. `device` is cuda but in tests."""

    runner: TransformersRunner
    ranks: SynthesisedRanks
    config: Any
    pool: Tensor
    of: int
    context: int
    hot_slots: int
    overlap: float
    device: str = "cuda"


class DraftClock(Clock):
    """Counts tokens too: `tokens[i]` are those of all requests before step i of the first one was read."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.tokens: list[int] = []

    def add_tokens(
        self, request_index: int, placement: int, start: int, ids: list[int], durable: int, rows: Sequence[bytes] = ()
    ) -> None:
        super().add_tokens(request_index, placement, start, ids, durable, rows)
        if request_index == 0:
            self.tokens.append(self.count)
        self.count += len(ids)


class Forced:
    """Draws of a runner's steps that make drafts right with a chance. Wraps its `launch_sample`."""

    def __init__(self, runner: TransformersRunner, requests: int, device: str) -> None:
        self._sample = runner.launch_sample
        self._chance = torch.zeros(1, device=device)
        self._drawn = torch.rand(DRAWN, DRAFT_TOKENS_MAX, requests, device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._vocab = runner.info.vocab_size

    def set(self, chance: float) -> None:
        """Of steps launched from now on."""
        self._chance.fill_(chance)

    def launch_sample(
        self, streams: Streams, sampler: SamplerState, batch: StepBatch, outputs: StepOutputs, adjust: Adjust | None
    ) -> None:
        self._sample(streams, sampler, batch, outputs, adjust)
        if batch.seat_rows > 1:
            streams.compute.launch("force", partial(self._force, batch, outputs))

    def _force(self, batch: StepBatch, outputs: StepOutputs) -> None:
        rows, seats = batch.seat_rows, len(batch.seats) // batch.seat_rows
        drawn, drafts = outputs.tokens.view(rows, seats)[:-1], batch.inputs.view(rows, seats)[1:]
        numbers = self._drawn.index_select(0, self._step % DRAWN)[0, : rows - 1, :seats]
        self._step.add_(1)
        forced = torch.where(numbers < self._chance, drafts, (drafts + 1) % self._vocab)
        drawn.copy_(torch.where((drawn >= 0) & (drafts >= 0), forced, drawn))


@dataclass
class Steps:
    """Steps that were measured: seconds of each, tokens, and rows that a request missed in a step of one group."""

    seconds: list[float]
    tokens: int
    misses: float

    @property
    def seconds_each(self) -> float:
        return statistics.fmean(self.seconds)


def take(executor: Executor, clock: DraftClock, steps: int) -> Steps:
    """Measure `steps` steps, behind WARM_UP others."""
    misses, began = _misses(executor), len(clock.steps)
    turn_until(executor, clock, began + WARM_UP)
    first = len(clock.steps) - 1
    turn_until(executor, clock, first + 1 + steps)
    last, at = len(clock.steps) - 1, clock.steps
    seconds = [after - before for before, after in zip(at[first:last], at[first + 1 :], strict=False)]
    tokens = clock.tokens[last] - clock.tokens[first]
    return Steps(seconds, tokens, (_misses(executor) - misses) / (len(at) - began))


def _misses(executor: Executor) -> float:
    """Of a request in a layer of the model."""
    counted = executor.state.misses[:-1]
    return float(counted.sum()) / counted.numel()


@contextmanager
def executing(setup: Setup, batch: int, draft_tokens: DraftTokens) -> Iterator[tuple[Executor, DraftClock]]:
    """An executor all of whose requests decode. The caller keeps none of it: its memory is needed for the next."""
    geometry = setup.runner.geometry
    cell = Cell(setup.context, "hisparse", batch, setup.overlap)
    size = geometry.groups, batch, setup.context, geometry.topk
    setup.runner.after_index_topk = Selections(*size, setup.overlap, setup.device)
    launch = setup.runner.launch_forward

    def launch_forward(*step: Any) -> None:
        setup.ranks.at = 0
        launch(*step)

    clock, streams = DraftClock(), make_streams("cuda" if setup.device == "cuda" else "inline")
    parts = setup.runner, setup.pool, cell, setup.hot_slots, clock, streams
    with patch.object(setup.runner, "launch_forward", launch_forward):
        executor = open_executor(*parts, device=setup.device, timed_every=0, draft_tokens=draft_tokens)
        for _ in range(decode.TURNS_MAX):
            if executor.count_by_status()[Status.RUNNING.value] == batch:
                break
            turn(executor, clock)
        else:
            raise SystemExit(f"batch {batch}: not all requests run after {decode.TURNS_MAX} turns")
        yield executor, clock
    tripped = executor.state.tripwires.tolist()
    streams.close()
    if any(tripped):
        raise SystemExit(f"batch {batch}: tripwires {tripped}")


def plain_row(setup: Setup, batch: int, steps: int) -> tuple[dict[str, Any], Steps]:
    """Of a worker that drafts nothing."""
    with executing(setup, batch, draft_tokens=0) as (executor, clock):
        found = take(executor, clock, steps)
        return row_of(setup, batch, "plain", 0, {0.0: found}, found) | parts_of(setup, batch, executor, clock), found


def draft_rows(setup: Setup, batch: int, steps: int, plain: Steps, auto_steps: int = 0) -> Iterator[dict[str, Any]]:
    """Rows by drafts of a step; with `auto_steps`, behind them, those of a worker that chooses, behind half as many."""
    forced = Forced(setup.runner, batch, setup.device)
    with (
        patch.object(setup.runner, "launch_sample", forced.launch_sample),
        executing(setup, batch, draft_tokens=AUTO) as (executor, clock),
    ):
        for drafts, chances in {0: (0.0,), **CHANCES}.items():
            executor._lengths = Always(drafts)
            found = {}
            for chance in chances:
                forced.set(chance)
                found[chance] = take(executor, clock, steps)
            row = row_of(setup, batch, "drafts", drafts, found, plain)
            yield row | (parts_of(setup, batch, executor, clock) if drafts in PROFILED_DRAFTS else {})
        for chance in AUTO_MEASURED if auto_steps else ():
            forced.set(chance)
            executor._lengths = lengths = DraftLengths(DRAFT_TOKENS_MAX)
            take(executor, clock, auto_steps // 2)
            found = {chance: take(executor, clock, auto_steps // 2)}
            yield row_of(setup, batch, "auto", lengths.choose(batch), found, plain)


class Always(DraftLengths):
    """The same number of drafts in all steps."""

    def __init__(self, drafts: int) -> None:
        super().__init__(DRAFT_TOKENS_MAX)
        self._drafts = drafts

    def choose(self, seats: int) -> int:
        del seats
        return self._drafts

    def observe(self, seen: StepSeen) -> None:
        """Nothing follows from it."""


def measure(setup: Setup, batch: int, steps: int, auto_steps: int = 0) -> Iterator[dict[str, Any]]:
    """All rows of one batch, plain ones first."""
    row, plain = plain_row(setup, batch, steps)
    free()
    yield row
    yield from draft_rows(setup, batch, steps, plain, auto_steps)


def free() -> None:
    """The memory of executors that ended: graphs hold it in cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def parts_of(setup: Setup, batch: int, executor: Executor, clock: DraftClock) -> dict[str, Any]:
    """Milliseconds of kernels by kind in a step, as benchmarks.decode has them, where they are measured."""
    if setup.device != "cuda" or batch not in PROFILED_BATCHES:
        return {}
    return {"parts_ms": decode.profile(executor, clock)}


def row_of(
    setup: Setup, batch: int, mode: str, drafts: int, found: Mapping[float, Steps], plain: Steps
) -> dict[str, Any]:
    """One row of the result: of `found`, by chance."""
    links = links_ms(setup, batch, drafts)
    plain_s = plain.seconds_each + links_ms(setup, batch, 0) / 1e3
    wanted = batch * pages_for(setup.context + decode.TOKENS_AHEAD) * setup.runner.geometry.page_bytes
    seconds = [it for steps in found.values() for it in steps.seconds]
    step_s = statistics.fmean(seconds) + links / 1e3
    by_chance = {}
    for chance, steps in found.items():
        taken_s = sum(steps.seconds) + len(steps.seconds) * links / 1e3
        rate = steps.tokens / taken_s
        by_chance[f"{chance:.2f}"] = {
            "tokens_per_step": steps.tokens / len(steps.seconds) / batch,
            "tokens_per_s": rate,
            "expected_x1": tokens_of(drafts, chance) * plain_s / step_s,
            "x1": rate * plain_s / batch,
        }
    return {
        "batch": batch,
        "mode": mode,
        "drafts": drafts,
        "step_ms": statistics.fmean(seconds) * 1e3,
        "step_min_ms": min(seconds) * 1e3,
        "step_max_ms": max(seconds) * 1e3,
        "steps": len(seconds),
        "links_ms": links,
        "step_x1": step_s / plain_s,
        "misses": statistics.fmean(steps.misses for steps in found.values()),
        "wanted_gib": wanted / 2**30,
        "distinct_gib": min(wanted, setup.pool.numel()) / 2**30,
        "chances": by_chance,
        "seconds": [round(it, 7) for it in seconds],
    }


def links_ms(setup: Setup, batch: int, drafts: int) -> float:
    """Of a step's exchanges with the other ranks: those of the model, and of the draft layer's launches."""
    links, config = Links(setup.of), setup.config
    rows = (1 + drafts) * batch
    launches = [rows, *[batch] * (drafts - 1)] if drafts else []
    return links.step_ms(config, rows) + sum(links.mixture_ms(config, it) for it in launches)


def tokens_of(drafts: int, chance: float) -> float:
    """Of a request in a step, where each draft holds with this chance, if those before it do."""
    return sum(chance**depth for depth in range(drafts + 1))


# ---------------------------------------------------------------- auto, over the times that were measured


def auto_over_plain(rows: Sequence[Mapping[str, Any]], batch: int, chance: float, seed: int = 0) -> float | None:
    """Tokens a second of a worker that chooses, over plain's: SIMULATED steps whose times are drawn from those of rows
    with as many drafts. None while a number of drafts is missing."""
    own = [row for row in rows if row["batch"] == batch]
    plain = [row for row in own if row["mode"] == "plain"]
    times = {row["drafts"]: row for row in own if row["mode"] == "drafts"}
    if not plain or set(times) != set(range(DRAFT_TOKENS_MAX + 1)):
        return None
    lengths, chances = DraftLengths(DRAFT_TOKENS_MAX), random.Random(seed)
    spent, tokens, before = 0.0, 0, 0
    for _ in range(SIMULATED):
        drafts = lengths.choose(batch)
        held = [_held(chances, min(before, drafts), chance) for _ in range(batch)]
        before = drafts
        seconds = chances.choice(times[drafts]["seconds"]) + times[drafts]["links_ms"] / 1e3
        holding = [sum(it >= depth for it in held) for depth in range(1, 1 + drafts)]
        lengths.observe(StepSeen(batch, drafts, batch, batch + sum(held), holding, seconds))
        spent, tokens = spent + seconds, tokens + batch + sum(held)
    plain_s = statistics.fmean(plain[0]["seconds"]) + plain[0]["links_ms"] / 1e3
    return float(tokens / spent * plain_s / batch)


def _held(chances: random.Random, drafts: int, chance: float) -> int:
    """Drafts that hold of a request, in order."""
    if not drafts or chance <= 0:
        return 0
    number = chances.random()
    return min(drafts, int(math.log(number) / math.log(chance))) if number > 0 else drafts


def auto(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    found = []
    for batch in dict.fromkeys(row["batch"] for row in rows):
        for chance in AUTO_CHANCES:
            ratio = auto_over_plain(rows, batch, chance)
            if ratio is not None:
                found.append({"batch": batch, "chance": chance, "x1": ratio})
    return found


def tokens_ahead(steps: int, auto_steps: int) -> int:
    """That a request may generate: of every draft, all hold."""
    each = steps + WARM_UP + PROFILED
    drafted = sum((1 + drafts) * each * len(chances) for drafts, chances in CHANCES.items())
    chosen = len(AUTO_MEASURED) * (1 + DRAFT_TOKENS_MAX) * (auto_steps + 2 * WARM_UP)
    return drafted + each + chosen + 128


def write(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rank_drafts")
    parser.add_argument("--of", type=int, default=8, help="ranks of the group")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rank-drafts.json"))
    parser.add_argument("--layers", type=int, default=0, help="0: as published")
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--hot-slots", type=int, default=4096)
    parser.add_argument("--overlap", type=float, default=0.99, help="of the selections of successive positions")
    parser.add_argument("--pool-gib", type=int, default=64, help="host pool; a power of two")
    parser.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    parser.add_argument("--auto-steps", type=int, default=160, help=f"steps of auto at batch {AUTO_BATCH}")
    parser.add_argument("--budget-seconds", type=float, default=150)
    options = parser.parse_args()
    began = time.monotonic()
    config = published_config(FAMILY, layers=options.layers)
    rows_max = (1 + DRAFT_TOKENS_MAX) * max(options.batches)
    ranks = SynthesisedRanks.draw(config, options.of, rows_max, "cuda")
    runner = synthetic_runner(config, kv_dtype="fp8", fp8=True, collectives=ranks, rows_max=rows_max, draft_tokens=1)
    print(f"weights {sum(runner.weights_bytes().values()) / 1e9:.1f} GB, {time.monotonic() - began:.1f} s", flush=True)
    pool = make_pool(runner.geometry, config, options.pool_gib)
    setup = Setup(runner, ranks, config, pool, options.of, options.context, options.hot_slots, options.overlap)
    torch.cuda.empty_cache()
    print(f"set up in {time.monotonic() - began:.1f} s", flush=True)
    about = {
        **{name: getattr(options, name) for name in ("of", "context", "hot_slots", "overlap", "pool_gib")},
        "layers": config.num_hidden_layers,
        "weights_bytes": runner.weights_bytes(),
        "links": asdict(Links(options.of)),
        "steps": STEPS,
    }
    command = " ".join(["python", "-m", "benchmarks.rank_drafts", *sys.argv[1:]])
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"machine": machine() | {"command": command}, "setting": about, "rows": rows, "auto": []}
    for batch in options.batches:
        steps, auto_steps = STEPS.get(batch, 8), options.auto_steps if batch == AUTO_BATCH else 0
        with ExitStack() as stack:
            # a warm-up runs all the sizes that steps have
            stack.enter_context(patch.object(transformers_dsa, "PREPARED_ROWS", [batch]))
            stack.enter_context(patch.object(decode, "TAIL_SLOTS", TAIL_SLOTS))
            stack.enter_context(patch.object(decode, "PROFILED", PROFILED))
            stack.enter_context(patch.object(decode, "TOKENS_AHEAD", tokens_ahead(steps, auto_steps)))
            for row in measure(setup, batch, steps, auto_steps):
                rows.append(row | {"at_s": round(time.monotonic() - began, 1)})
                write(options.out, result)
                print(f"{rank_report.drafts_line(rows[-1])}  at {rows[-1]['at_s']} s", flush=True)
                if time.monotonic() - began > options.budget_seconds:
                    break
        result["auto"] = auto(rows)
        write(options.out, result)
        free()
        if time.monotonic() - began > options.budget_seconds:
            print("out of budget", flush=True)
            break
    print(rank_report.drafts(result))


if __name__ == "__main__":
    main()
