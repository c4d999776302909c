"""From what clients and the worker saw to the figures of a cell. Pure.

Times are of one clock, seconds of time.monotonic(), which the processes of a machine share. A window is from `began` to
`ended`. What lies outside of it does not count.

Exchange between GPUs is not measured: one rank runs. `linked` figures are those with the exchange in: every step, and
every unit of prompts, takes longer by what the model of the links says (benchmarks/rank_floor.py), so that the window's
work would take `stretch` times as long.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

#: Kinds of records of the worker's journal: a decode step, one layer over prompt tokens, prompt tokens that were written
#: instead.
STEP, UNIT, WRITTEN = 1, 2, 3
#: `rows`: requests of a step, or tokens. `at`: when it was seen to be complete. `seconds`: of a step.
RECORD: Final = np.dtype([("kind", "u1"), ("rows", "<i4"), ("at", "<f8"), ("seconds", "<f8")], align=False)
PERCENTILES: Final = (1, 5, 10, 25, 50, 75, 90, 95, 99)

Records = npt.NDArray[np.void]


@dataclass
class Answer:
    """One request as its client saw it. `arrivals`: when how many tokens had come. `is_written`: its context was
    written, not computed. `cached_tokens` are known once it has ended."""

    prompt_tokens: int
    submitted: float
    is_written: bool
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    cached_tokens: int = 0
    ended: float | None = None
    #: It is a prompt beside the clients.
    is_long: bool = False

    @property
    def first(self) -> float | None:
        return self.arrivals[0][0] if self.arrivals else None


@dataclass(frozen=True)
class Window:
    began: float
    ended: float

    def __contains__(self, at: object) -> bool:
        return isinstance(at, float) and self.began <= at < self.ended

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` percent of `values` do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)]


def spread(values: Sequence[float], weights: Sequence[int] = ()) -> dict[str, float] | None:
    """p50, p99, the largest and how many; None of none. `weights`: how often each value counts."""
    if not len(values):
        return None
    counted = np.repeat(values, weights) if len(weights) else np.asarray(values)
    if not counted.size:
        return None
    found: list[float] = counted.tolist()
    return {"p50": percentile(found, 50), "p99": percentile(found, 99), "max": max(found), "count": float(len(found))}


def in_window(records: Records, window: Window, kind: int) -> Records:
    at = records["at"]
    found: Records = records[(records["kind"] == kind) & (at >= window.began) & (at < window.ended)]
    return found


def gaps_of(answer: Answer, window: Window) -> list[float]:
    """Seconds between arrivals of tokens that both lie in the window."""
    return [b - a for (a, _), (b, _) in pairwise(answer.arrivals) if a in window and b in window]


def received(answers: Iterable[Answer], window: Window) -> int:
    """Tokens that came in the window."""
    total = 0
    for answer in answers:
        before = 0
        for at, tokens in answer.arrivals:
            total += (tokens - before) if at in window else 0
            before = tokens
    return total


def link_seconds(steps: Records, units: Records, link_ms: Callable[[int], float], layers: int) -> float:
    """Return the seconds that the exchange would add to these steps, and to these units of one layer each."""
    of_steps, of_units = (sum(map(link_ms, map(int, it["rows"].tolist()))) for it in (steps, units))
    return (of_steps + of_units / layers) / 1e3


def measured(
    answers: Sequence[Answer],
    records: Records,
    window: Window,
    link_ms: Callable[[int], float],
    *,
    layers: int,
    reused_tokens: int,
    asked_tokens: int,
) -> dict[str, Any]:
    """The figures of a window of a model with `layers`. `reused_tokens`: of prompts that began in it, those that cached
    pages held, of `asked_tokens`."""
    steps, units = (in_window(records, window, kind) for kind in (STEP, UNIT))
    clients = [it for it in answers if not it.is_long]
    began = [it for it in answers if it.first in window and not it.is_written]
    first_tokens = [first - it.submitted for it in began if (first := it.first) is not None and not it.is_long]
    long_first = [first - it.submitted for it in began if (first := it.first) is not None and it.is_long]
    waiting = [
        window.ended - it.submitted
        for it in clients
        if it.submitted < window.ended and (it.first is None or it.first >= window.ended)
    ]
    tokens, computed = received(answers, window), int(units["rows"].sum()) / layers
    added = link_seconds(steps, units, link_ms, layers)
    stretch = (window.seconds + added) / window.seconds
    total = (tokens + computed + reused_tokens) / window.seconds
    seconds: list[float] = steps["seconds"].tolist()
    rows: list[int] = steps["rows"].tolist()
    linked = [second + link_ms(row) / 1e3 for second, row in zip(seconds, rows, strict=True)]
    return {
        "seconds": window.seconds,
        "output_per_s": tokens / window.seconds,
        "computed_per_s": computed / window.seconds,
        "reused_per_s": reused_tokens / window.seconds,
        "total_per_s": total,
        "stretch": stretch,
        "linked_output_per_s": tokens / window.seconds / stretch,
        "linked_total_per_s": total / stretch,
        "prefix_hits": reused_tokens / asked_tokens if asked_tokens else None,
        "ttft_s": spread(first_tokens),
        "long_ttft_s": spread(long_first),
        "waiting": len(waiting),
        "waiting_longest_s": max(waiting, default=0.0),
        "gap_s": spread([gap for it in clients for gap in gaps_of(it, window)]),
        "worker_gap_s": spread(seconds, rows),
        "linked_worker_gap_s": spread(linked, rows),
        "steps": len(steps),
        "step_rows": statistics.mean(rows) if rows else 0.0,
        "units": len(units),
        "written_tokens": int(in_window(records, window, WRITTEN)["rows"].sum()),
        "ended": sum(it.ended in window for it in clients),
        "aiperf": aiperf(answers, window, total),
    }


# ---------------------------------------------------------------- aiperf's form


def statistics_of(values: Sequence[float]) -> dict[str, float] | None:
    """The columns of aiperf's export; None of no values."""
    if not values:
        return None
    found = {"avg": statistics.mean(values), "min": min(values), "max": max(values), "sum": math.fsum(values)}
    found |= {f"p{share}": percentile(values, share) for share in PERCENTILES}
    return found | {"std": statistics.pstdev(values)}


def aiperf(answers: Sequence[Answer], window: Window, total_per_s: float) -> dict[str, Any]:
    """Metrics under aiperf's names: `distributions` of requests, and `totals`. Requests whose contexts were written
    have no time to first token."""
    ended = [it for it in answers if it.ended in window and not it.is_long]
    computed = [it for it in answers if it.first in window and not it.is_written and not it.is_long]
    intervals = [
        (it.arrivals[-1][0] - it.arrivals[0][0]) / (it.arrivals[-1][1] - it.arrivals[0][1])
        for it in ended
        if len(it.arrivals) > 1
    ]
    gaps = [gap for it in answers if not it.is_long for gap in gaps_of(it, window)]
    distributions = {
        "Time to First Token (ms)": [1e3 * (it.arrivals[0][0] - it.submitted) for it in computed],
        "Inter Token Latency (ms)": [1e3 * it for it in intervals],
        "Inter Chunk Latency (ms)": [1e3 * it for it in gaps],
        "Request Latency (ms)": [1e3 * (it.ended - it.submitted) for it in ended if it.ended and not it.is_written],
        "Input Sequence Length (tokens)": [float(it.prompt_tokens) for it in ended],
        "Output Sequence Length (tokens)": [float(it.arrivals[-1][1]) for it in ended if it.arrivals],
        "Usage Prompt Cache Read Tokens (tokens)": [float(it.cached_tokens) for it in ended],
    }
    totals = {
        "Benchmark Duration (sec)": window.seconds,
        "Request Count": float(len(ended)),
        "Request Throughput (requests/sec)": len(ended) / window.seconds,
        "Output Token Throughput (tokens/sec)": received(answers, window) / window.seconds,
        "Total Token Throughput (tokens/sec)": total_per_s,
    }
    shown = {name: statistics_of(values) for name, values in distributions.items()}
    return {"distributions": {name: it for name, it in shown.items() if it}, "totals": totals}


def aiperf_csv(found: Mapping[str, Any]) -> str:
    """Return aiperf's export: a table of distributions, an empty line, a table of totals."""
    columns = ("avg", "min", "max", "sum", *(f"p{share}" for share in PERCENTILES), "std")
    lines = ["Metric," + ",".join(columns)]
    for name, values in sorted(found["distributions"].items()):
        lines.append(f"{name}," + ",".join(f"{values[column]:.2f}" for column in columns))
    lines += ["", "Metric,Value", *(f"{name},{value:.2f}" for name, value in sorted(found["totals"].items()))]
    return "\n".join(lines) + "\n"
