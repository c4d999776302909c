"""What the executor says and counts: each happening once, to the outbox and to the worker's counters.

Tokens go out before the event they lead to; a durable length never includes a row whose completion was not observed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from metrics.state import WorkerCounters
from protocol.errors import HiSparseError
from protocol.logs import fields, logger
from protocol.messages import (
    NO_DRAFTS,
    NO_TOKEN,
    Admit,
    Event,
    Faulted,
    Finished,
    FirstToken,
    Inventory,
    Parked,
    Released,
    Resized,
    Staged,
    Started,
)
from worker.loop.batch import RunningRequest, Status
from worker.loop.decode import StepTokens
from worker.loop.output import Output
from worker.loop.swap_counts import Int64s, SwapCounts

log = logger("worker.loop.executor")


class Reports(Protocol):
    """Where results go; thread-safe and never waiting. A port: worker.link.outbox.Outbox in a worker, others in
    benchmarks and tests, which run an executor without a link."""

    def add_tokens(
        self, request_index: int, placement: int, start: int, ids: list[int], durable: int, rows: Sequence[bytes] = ()
    ) -> None: ...
    def set_durable(self, request_index: int, placement: int, durable: int) -> None: ...
    def add_event(self, event: Event) -> None: ...
    def count_swaps(
        self,
        requests: Mapping[int, tuple[int, int]],
        totals: tuple[int, int, int],
        drafts: Mapping[int, tuple[int, int]] = NO_DRAFTS,
    ) -> None: ...


class Reporter:
    """One per executor."""

    def __init__(self, reports: Reports, counters: WorkerCounters, swap_counts: SwapCounts) -> None:
        self._reports = reports
        self._counters = counters
        self._swap_counts = swap_counts

    def publish(self, request: RunningRequest, drawn: int) -> None:
        """Tokens that may go out and have not, with what is durable by now; `drawn` tokens came since the last call."""
        self._counters.tokens += drawn
        start, ids = request.output.take_publishable()
        if ids:
            rows = request.output.take_rows(len(ids)) if request.logprob_words else ()
            self._reports.add_tokens(request.request_index, request.placement, start, ids, request.durable(), rows)

    def durable(self, request: RunningRequest) -> None:
        """The durable length alone, of a request that draws no tokens at present."""
        self._reports.set_durable(request.request_index, request.placement, request.durable())

    def prompt_rows(self, request: RunningRequest, rows: int) -> None:
        """So many rows of its prompt are in host memory, whole pages: others may reuse them, whatever becomes of it."""
        self._reports.set_durable(request.request_index, request.placement, rows)

    def prefilled(self, request: RunningRequest) -> None:
        self._counters.prefill_s.observe(request.prefill_s)
        self._counters.prompt_tokens += request.prompt_tokens - request.durable_rows  # without a shared prefix

    def staged(self, request: RunningRequest, stage_s: float) -> None:
        self._counters.stage_s.observe(stage_s)
        self.durable(request)
        self._reports.add_event(Staged(request.placement, request.prefill_s * 1e3, stage_s * 1e3))

    def loaded(self, load_s: float) -> None:
        """A resumed request, or one whose buffer became resident, has its keys and rows again."""
        self._counters.load_s.observe(load_s)

    def started(self, request: RunningRequest) -> None:
        self._reports.add_event(Started(request.placement))

    def parked(self, request: RunningRequest) -> None:
        self._counters.parked += 1
        self.durable(request)
        self._reports.add_event(Parked(request.placement))

    def resized(self, request: RunningRequest) -> None:
        self._counters.resized += 1
        self._reports.add_event(Resized(request.placement, request.memory.hot_slots, request.memory.hot_chunks))

    def finished(self, request: RunningRequest) -> None:
        output = request.output
        self._reports.add_event(Finished(request.placement, output.reason, output.generated_tokens, output.tail_text))

    def already_complete(self, admit: Admit, output: Output) -> None:
        """A placement whose output was complete before it came: nothing was touched."""
        self._reports.add_event(Finished(admit.placement, output.reason, output.generated_tokens, output.tail_text))
        self.released(admit.placement, admit.durable_tokens)

    def faulted(self, placement: int, error: Exception) -> None:
        """`error` ended the placement; its text goes to the coordinator and the log, there with its traceback where it
        is none of ours, which say what was wrong."""
        self._counters.faulted += 1
        text, is_known = str(error) or type(error).__name__, isinstance(error, HiSparseError)
        said = fields(placement=placement, error=text)
        log.warning("request faulted", extra=said, exc_info=None if is_known else error)
        self._reports.add_event(Faulted(placement, text))

    def released(
        self,
        placement: int,
        durable: int,
        first_token: FirstToken = NO_TOKEN,
        warm_start: bytes = b"",
    ) -> None:
        self._counters.released += 1
        self._reports.add_event(Released(placement, durable, first_token, warm_start))

    def inventory(self, inventory: Inventory) -> None:
        """What is held, among the events that led to it."""
        self._reports.add_event(inventory)

    def swaps(self, step: StepTokens) -> None:
        """The hits and misses that came with a step, of its requests that are still here."""
        if step.counts is None:
            return
        rows = zip(step.requests, step.positions, strict=True)
        live = [(request, position + 1) for request, position in rows if request.status is not Status.LEAVING]
        if live:
            requests, positions = zip(*live, strict=True)
            seats = [request.seat for request in requests]
            self._count(requests, step.counts[:, :, seats].transpose(0, 2, 1), positions)

    def last_swaps(self, request: RunningRequest, counts: Int64s) -> None:
        """The final hits and misses of `request`, int64[2, G]; before it is released."""
        self._count([request], counts[:, np.newaxis], [request.position])

    def _count(self, requests: Sequence[RunningRequest], counts: Int64s, positions: Sequence[int]) -> None:
        """Take in what the device counted for `requests`, int64[2, n, G]."""
        hits, misses = self._swap_counts.take([request.seat for request in requests], counts, positions)
        placements = [request.placement for request in requests]
        pairs = zip(hits, misses, strict=True)
        drafts = {it.placement: (it.drafted, it.accepted) for it in requests if it.drafted}
        self._reports.count_swaps(dict(zip(placements, pairs, strict=True)), self._counters.swap.totals, drafts)
