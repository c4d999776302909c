"""Rows of requests, workers and pools during the demo, folded as they arrive. Pure.

All rows come from the operator's commands (`requests`, `workers`, `pool`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from hisparse.demo.plan import DemoRequest
from protocol.messages import PoolRow, RequestRow, WorkerRow

#: States in which a request is over.
ENDED: Final = frozenset({"FINISHED", "ABORTED", "FAILED"})
BEFORE_RUNNING: Final = frozenset({"QUEUED", "PREFILLING", "STAGING", "READY"})


def pages_in_use(pools: Iterable[PoolRow]) -> int:
    """Host pages that are neither free nor only cached, quarantined ones included; a leak would show here."""
    return sum(pool.host_pages - pool.free - pool.cached for pool in pools)


@dataclass
class DemoWatch:
    """The latest rows, and the maxima that the report needs. `expected`: requests until the end."""

    expected: int = 0

    rows: dict[str, RequestRow] = field(default_factory=dict)
    workers: dict[str, WorkerRow] = field(default_factory=dict)
    workers_of: dict[str, list[str]] = field(default_factory=dict)  # workers that a request was seen on, in order
    host_pages_peak: int = 0
    hot_chunks_peak: int = 0
    page_bytes: int = 0

    def saw_requests(self, rows: Iterable[RequestRow]) -> None:
        for row in rows:
            self.rows[row.request_id] = row
            seen = self.workers_of.setdefault(row.request_id, [])
            if row.worker and row.worker not in seen[-1:]:
                seen.append(row.worker)
        held = sum(row.hot_chunks for row in self.rows.values() if row.state not in ENDED)
        self.hot_chunks_peak = max(self.hot_chunks_peak, held)

    def saw_workers(self, rows: Iterable[WorkerRow]) -> None:
        for row in rows:
            self.workers[row.worker] = row

    def saw_pools(self, rows: Iterable[PoolRow]) -> None:
        rows = tuple(rows)
        self.host_pages_peak = max(self.host_pages_peak, pages_in_use(rows))
        self.page_bytes = max((row.page_bytes for row in rows), default=0)

    @property
    def over(self) -> bool:
        """Whether every request has ended; False before any was seen."""
        return len(self.rows) >= max(self.expected, 1) and all(row.state in ENDED for row in self.rows.values())

    def running_past(self, tokens: int) -> RequestRow | None:
        """The running request with the fewest new tokens, but at least `tokens`.

        None while other requests have not started to decode, unless it has half of its tokens.
        """
        running = [row for row in self.rows.values() if row.state == "RUNNING" and row.generated_tokens >= tokens]
        chosen = min(running, key=lambda row: row.generated_tokens, default=None)
        arriving = any(row.state in BEFORE_RUNNING for row in self.rows.values())
        return None if chosen and arriving and 2 * chosen.generated_tokens < chosen.max_tokens else chosen

    def running_on(self) -> Mapping[str, list[str]]:
        """Requests in RUNNING by worker."""
        by_worker: dict[str, list[str]] = {}
        for row in self.rows.values():
            if row.state == "RUNNING":
                by_worker.setdefault(row.worker, []).append(row.request_id)
        return by_worker


@dataclass
class Outcome:
    """Results of the scenario, filled while it runs. `tokens` by request id; `served`: the requests, each turn of a
    conversation by itself."""

    watch: DemoWatch = field(default_factory=DemoWatch)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    served: list[DemoRequest] = field(default_factory=list)
    retracted: list[str] = field(default_factory=list)
    drained: str = ""
    leaving: tuple[str, ...] = ()  # requests that ran on the drained worker
    host_pages_before: int = 0
    host_pages_after: int = 0
    serve_s: float = 0.0

    @property
    def handed_over(self) -> tuple[str, ...]:
        """Requests that ran on the drained worker and afterwards on another."""
        return tuple(name for name in self.leaving if self.watch.workers_of[name][-1] != self.drained)
