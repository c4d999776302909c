"""What the demo saw while it ran: rows of requests, workers and pools, folded as they arrive. Pure.

Everything here comes through the operator's verbs (`requests`, `workers`, `pool`), the way anyone else would see it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from coordinator.messages import PoolRow, RequestRow, WorkerRow

#: States in which a request is over.
ENDED: frozenset[str] = frozenset({"FINISHED", "ABORTED", "FAILED"})


def pages_in_use(pools: Iterable[PoolRow]) -> int:
    """Host pages that are not free, quarantined ones included: what a leak would show up in."""
    return sum(pool.host_pages - pool.free for pool in pools)


@dataclass
class Watch:
    """The latest rows, and the maxima that the report needs."""

    rows: dict[str, RequestRow] = field(default_factory=dict)
    workers: dict[str, WorkerRow] = field(default_factory=dict)
    workers_of: dict[str, list[str]] = field(default_factory=dict)  # workers that a request was seen on, in order
    host_pages_peak: int = 0
    hot_chunks_peak: int = 0
    page_bytes: int = 0
    events: list[str] = field(default_factory=list)

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
    def handed_over(self) -> int:
        """Requests that were seen on more than one worker."""
        return sum(len(set(seen)) > 1 for seen in self.workers_of.values())

    def running_on(self) -> Mapping[str, list[str]]:
        """Requests in RUNNING by worker."""
        by_worker: dict[str, list[str]] = {}
        for row in self.rows.values():
            if row.state == "RUNNING":
                by_worker.setdefault(row.worker, []).append(row.request_id)
        return by_worker
