"""Samples of the coordinator's rows, and rates between them. Pure.

Workers' counters arrive once or twice a second, so a rate over one second would vary by half. Rates are taken over the
last WINDOW_S. Tokens per second are summed over the requests of each worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from protocol.messages import PoolRow, RequestDetail, RequestRow, WorkerRow

WINDOW_S: Final = 5.0
#: Most samples that are kept: a window with five samples a second.
SAMPLES_MAX: Final = 26

assert SAMPLES_MAX > 5 * WINDOW_S


@dataclass(frozen=True)
class Sample:
    """Rows at one time: `at_s`, by the clock of `hisparse top`. `history` is that of the opened request, if any."""

    at_s: float
    incarnation: int
    model: str
    requests: tuple[RequestRow, ...]
    truncated: bool
    workers: tuple[WorkerRow, ...]
    pools: tuple[PoolRow, ...]
    history: RequestDetail | None = None


@dataclass(frozen=True)
class WorkerRates:
    """Rates of one worker over the window. `hit_share` of the rows looked up; None: it looked up none."""

    tokens_per_s: float
    hit_share: float | None
    swapped_bytes_per_s: float
    prompt_tokens_per_s: float


class History:
    """The samples of the window, newest last; those of another incarnation of the coordinator are dropped."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)

    def add(self, sample: Sample) -> None:
        samples = self._samples
        if samples and samples[-1].incarnation != sample.incarnation:
            samples.clear()
        while len(samples) > 1 and sample.at_s - samples[1].at_s >= WINDOW_S:
            samples.popleft()
        samples.append(sample)

    @property
    def latest(self) -> Sample | None:
        return self._samples[-1] if self._samples else None

    def worker_rates(self) -> dict[str, WorkerRates]:
        """Rates by worker; without workers that were not there, in the same epoch, at the start of the window."""
        seconds = self._seconds()
        if not seconds:
            return {}
        first, last = self._samples[0], self._samples[-1]
        tokens = _tokens_by_worker(first.requests, last.requests)
        known = {(row.worker, row.epoch): row for row in first.workers}
        pairs = ((known.get((row.worker, row.epoch)), row) for row in last.workers)
        return {now.worker: _rates(before, now, tokens.get(now.worker, 0), seconds) for before, now in pairs if before}

    def request_rates(self) -> dict[str, float]:
        """Tokens per second by request id."""
        seconds = self._seconds()
        if not seconds:
            return {}
        before = {row.request_id: row.generated_tokens for row in self._samples[0].requests}
        return {
            row.request_id: (row.generated_tokens - before[row.request_id]) / seconds
            for row in self._samples[-1].requests
            if row.request_id in before
        }

    def _seconds(self) -> float:
        return self._samples[-1].at_s - self._samples[0].at_s if self._samples else 0.0


def _rates(before: WorkerRow, now: WorkerRow, tokens: int, seconds: float) -> WorkerRates:
    hits, misses = now.hits - before.hits, now.misses - before.misses
    share = hits / (hits + misses) if hits + misses > 0 else None
    swapped_bytes, prompt_tokens = (
        now.swapped_bytes - before.swapped_bytes,
        now.prompt_tokens - before.prompt_tokens,
    )
    return WorkerRates(tokens / seconds, share, swapped_bytes / seconds, prompt_tokens / seconds)


def _tokens_by_worker(before: Iterable[RequestRow], now: Iterable[RequestRow]) -> dict[str, int]:
    known = {row.request_id: row for row in before}
    tokens: dict[str, int] = {}
    for row in now:
        earlier = known.get(row.request_id)
        worker = row.worker or (earlier.worker if earlier else "")
        gained = row.generated_tokens - (earlier.generated_tokens if earlier else 0)
        tokens[worker] = tokens.get(worker, 0) + max(0, gained)
    return tokens
