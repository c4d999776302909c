"""What the executor says and counts: each happening once, to the outbox and to the worker's counters.

Tokens go out before the event they lead to; a durable length never includes a row whose completion was not observed.
"""

from __future__ import annotations

from typing import Protocol

from coordinator.arrays import pack_int64
from coordinator.messages import (
    Admit,
    Counters,
    Event,
    Faulted,
    Finished,
    Inventory,
    Parked,
    Released,
    Resized,
    Staged,
    Started,
)
from kernels.layout import PAGE_TOKENS, Geometry
from metrics.logs import fields, logger
from metrics.state import WorkerCounters
from worker.batch import RunningRequest, Status
from worker.decode import StepTokens
from worker.output import Output

log = logger("worker.executor")


class Reports(Protocol):
    """Where results go; thread-safe and never waiting (worker/outbox.py)."""

    def add_tokens(self, slot: int, admission: int, start: int, ids: list[int], durable: int) -> None: ...
    def set_durable(self, slot: int, admission: int, durable: int) -> None: ...
    def add_event(self, event: Event) -> None: ...


class Reporter:
    """One per executor."""

    def __init__(self, reports: Reports, counters: WorkerCounters, geometry: Geometry) -> None:
        self._reports = reports
        self._counters = counters
        self._token_bytes = geometry.page_bytes // PAGE_TOKENS
        self._miss_bytes = geometry.row_bytes * geometry.layers / geometry.groups

    def publish(self, request: RunningRequest) -> None:
        """Tokens that may go out and have not, with what is durable by now."""
        self._counters.tokens += 1
        start, ids = request.output.take_publishable()
        if ids:
            self._reports.add_tokens(request.slot, request.admission, start, ids, request.durable())

    def durable(self, request: RunningRequest) -> None:
        """The durable length alone, of a request that draws no tokens at present."""
        self._reports.set_durable(request.slot, request.admission, request.durable())

    def prefilled(self, request: RunningRequest) -> None:
        self._counters.prefill_s.observe(request.prefill_s)
        self._counters.prompt_tokens += request.prompt_tokens

    def staged(self, request: RunningRequest, stage_s: float) -> None:
        self._counters.stage_s.observe(stage_s)
        self.durable(request)
        copied = request.prompt_tokens * self._token_bytes
        self._reports.add_event(Staged(request.admission, request.prefill_s * 1e3, stage_s * 1e3, copied))

    def started(self, request: RunningRequest) -> None:
        self._reports.add_event(Started(request.admission))

    def parked(self, request: RunningRequest) -> None:
        self._counters.parked += 1
        self.durable(request)
        self._reports.add_event(Parked(request.admission))

    def resized(self, request: RunningRequest) -> None:
        self._counters.resized += 1
        self._reports.add_event(Resized(request.admission, request.hot_slots, request.hot_chunks))

    def finished(self, request: RunningRequest) -> None:
        output = request.output
        self._reports.add_event(Finished(request.admission, output.reason, output.generated_tokens, output.tail_text))

    def outdone(self, admit: Admit, output: Output) -> None:
        """An admission whose output was complete before it came: nothing was touched."""
        self._reports.add_event(Finished(admit.admission, output.reason, output.generated_tokens, output.tail_text))
        self.released(admit.admission, admit.durable_tokens)

    def faulted(self, admission: int, error: Exception) -> None:
        """`error` ended the admission; its traceback goes to the log, its text to the coordinator."""
        self._counters.faulted += 1
        log.warning("request faulted", extra=fields(admission=admission), exc_info=error)
        self._reports.add_event(Faulted(admission, str(error) or type(error).__name__))

    def released(self, admission: int, durable: int, hits: int = 0, misses: int = 0) -> None:
        self._counters.released += 1
        self._reports.add_event(Released(admission, durable, hits, misses))

    def inventory(self, inventory: Inventory) -> None:
        """What is held, among the events that led to it."""
        self._reports.add_event(inventory)

    def swaps(self, step: StepTokens) -> None:
        """The hits and misses that came with a step, of its requests that are still here."""
        if step.counts is None:
            return
        hits, misses = step.counts
        live = [request for request in step.requests if request.status is not Status.LEAVING]
        for request in live:
            self.count_swaps(request, hits[request.seat], misses[request.seat])
        if live:
            self._reports.add_event(
                Counters(
                    pack_int64([request.admission for request in live]),
                    pack_int64([request.hits for request in live]),
                    pack_int64([request.misses for request in live]),
                )
            )

    def count_swaps(self, request: RunningRequest, hits: int, misses: int) -> None:
        """Raise the totals by what `request` has added since the last count."""
        self._counters.hits += hits - request.hits
        self._counters.misses += misses - request.misses
        self._counters.swapped_bytes += round((misses - request.misses) * self._miss_bytes)
        request.hits, request.misses = hits, misses
