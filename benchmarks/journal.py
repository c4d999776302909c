"""How long commits take while requests decode and the journal is summarized. `python -m benchmarks.journal`.

The real actor (group commit) over a real file, token log, journal state and ledgers of `--requests` live requests, all
of them decoding: every worker reports one token of each of its requests at the offered rate, and pages are given as
they fill up. Beside them one probe appends a record, waits for its commit, and again: that is the wait of a command.

    commit_*_ms      from a probe's append to its commit; `in summary` of those during which a summary was under way
    group_*_ms       of the store alone: one transaction with its fsync
    loop_late_*_ms   how late the event loop wakes a sleeper: what any other actor waits
    fsync_*_ms       the disk alone, measured before: 4 KiB written and synced

A disk's fsync decides most of it: take `--dir /dev/shm` to see what is the program's.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import trio

from basics import gc_policy as garbage
from coordinator.journal.journal import GroupCommit
from coordinator.journal.records import (
    LedgerChanged,
    PoolOpened,
    Record,
    RequestOrdered,
    RequestPlaced,
    SummaryEnded,
    WorkerJoined,
)
from coordinator.journal.state import JournalState
from coordinator.journal.store import SqliteStore, open_store
from coordinator.memory.changes import AddWorker, Change, Extend, Reserve, apply
from coordinator.memory.ledger import Ledger
from coordinator.scheduler.scheduler import TICK_S
from coordinator.tokens.token_log import TokenLog
from metrics.state import JournalCounters
from protocol.arrays import pack_int32, pack_int64
from protocol.messages import ModelInfo, Progress, WorkerCapacity
from protocol.sizing import Memory
from protocol.units import PAGE_TOKENS
from tests.support.facts import make_accepted

WORKERS: Final = 16
PROMPT_TOKENS: Final = 2_048
MAX_TOKENS: Final = 16_384
#: Pages are given this far ahead.
GRANT_PAGES: Final = 2
FSYNCS: Final = 200
#: Least time between two probes.
PROBE_INTERVAL_S: Final = 0.001
NODE: Final = "bench"
MODEL: Final = ModelInfo("bench", "bench", 1 << 20, 32_000, 4, 128, (), "bytes", "")


class TimedStore:
    """A store, how long each of its groups took, and how many summaries were complete."""

    def __init__(self, store: SqliteStore) -> None:
        self.seconds: list[float] = []
        self.summaries = 0
        self._store = store
        self.close = store.close
        self.load = store.load

    @property
    def short(self) -> str:
        return self._store.short

    @property
    def wants_summary(self) -> bool:
        return self._store.wants_summary

    async def write(self, records: Sequence[Record]) -> None:
        began = time.perf_counter()
        await self._store.write(records)
        self.seconds.append(time.perf_counter() - began)
        self.summaries += any(isinstance(record, SummaryEnded) for record in records)


class Load:
    """All requests decode. `journal` runs elsewhere."""

    def __init__(self, journal: GroupCommit, token_log: TokenLog, requests: int) -> None:
        self._journal = journal
        self._token_log = token_log
        pages = requests * (-(-(PROMPT_TOKENS + MAX_TOKENS) // PAGE_TOKENS))
        self._ledger = journal.state.ledgers[NODE] = Ledger(pages)
        per_worker = -(-requests // WORKERS)
        chunks = pages // WORKERS + per_worker
        self._capacity = WorkerCapacity(
            per_worker, chunks, chunks, PROMPT_TOKENS, pages, 1 << 20, (4096,), 8, 2, pool_path="/bench.pool"
        )
        self._request_indices = np.arange(requests, dtype=np.int32)
        self._positions = np.zeros(requests, np.int32)
        self._granted = np.zeros(requests, np.int32)
        self.tokens = 0

    def begin(self) -> None:
        """Every request is placed and has the pages of its prompt."""
        self._journal.append([PoolOpened(NODE, self._capacity, MODEL)])
        for name in (f"w{number}" for number in range(WORKERS)):
            self._change(AddWorker(name, 1, self._capacity), WorkerJoined(NODE, name, 1, self._capacity, MODEL))
        pages = PROMPT_TOKENS // PAGE_TOKENS + GRANT_PAGES
        for number in range(len(self._request_indices)):
            request_index, worker, placement = self._token_log.open(MAX_TOKENS), f"w{number % WORKERS}", number + 1
            prompt = bytes(4 * PROMPT_TOKENS)
            rank, name = (0, 0, number + 1), f"r{number}"
            self._journal.append([make_accepted(request_index, prompt, MAX_TOKENS, request_id=name, rank=rank)])
            placed = RequestPlaced(request_index, placement, NODE, worker, 1, 0)
            self._change(Reserve(placement, worker, Memory(pages, 1, pages)), placed)
            granted_tokens = PROMPT_TOKENS + GRANT_PAGES * PAGE_TOKENS
            assert self._token_log.make_room(request_index, GRANT_PAGES * PAGE_TOKENS)
            self._token_log.begin_placement(request_index, placement, PROMPT_TOKENS, granted_tokens)
            self._token_log.bind(request_index, number % WORKERS)
            self._granted[request_index] = GRANT_PAGES * PAGE_TOKENS

    def _change(self, change: Change, *notes: Record) -> None:
        apply(self._ledger, change)
        self._journal.append([LedgerChanged(NODE, (change,)), *notes])

    def report(self, worker: int) -> None:
        """One decode step of a worker."""
        request_indices = self._request_indices[worker::WORKERS]
        starts = self._positions[request_indices]
        ones = np.ones(len(request_indices), np.int32)
        said = (ones, starts % 32_000, PROMPT_TOKENS + starts)
        indices, placements = pack_int32(request_indices), pack_int64(request_indices.astype(np.int64) + 1)
        counts, tokens, durables = (pack_int32(it) for it in said)
        self._token_log.append(Progress(indices, placements, pack_int32(starts), counts, tokens, durables), worker)
        self._positions[request_indices] += 1
        self.tokens += len(request_indices)
        self._journal.tokens_arrived()
        for request_index in request_indices[
            self._positions[request_indices] + PAGE_TOKENS > self._granted[request_indices]
        ].tolist():
            self._granted[request_index] += GRANT_PAGES * PAGE_TOKENS
            assert self._token_log.make_room(request_index, int(self._granted[request_index]))
            self._token_log.grant(request_index, PROMPT_TOKENS + int(self._granted[request_index]))
            self._change(Extend(request_index + 1, Memory(GRANT_PAGES, 0, GRANT_PAGES)))

    async def run(self, rate: float) -> None:
        """Reports in turn, `rate` tokens a second; what the loop is too slow for is not made up."""
        interval = len(self._request_indices) / WORKERS / rate
        worker, due = 0, trio.current_time()
        while True:
            self.report(worker)
            worker = (worker + 1) % WORKERS
            due = max(due + interval, trio.current_time() - 10 * interval)
            await trio.sleep_until(due)


class Probe:
    """Waits for commits, and for nothing."""

    def __init__(self, journal: GroupCommit) -> None:
        self._journal = journal
        self.commits: list[tuple[float, bool]] = []
        self.late: list[float] = []

    async def commit(self) -> None:
        for number in range(1 << 62):
            began, in_summary = time.perf_counter(), self._journal.is_summarizing
            await self._journal.append([RequestOrdered(number % 64, held=False, forced_slots=-1)]).wait()
            in_summary = in_summary or self._journal.is_summarizing
            self.commits.append((time.perf_counter() - began, in_summary))
            await trio.sleep(PROBE_INTERVAL_S)

    async def sleep(self) -> None:
        while True:
            due = trio.current_time() + PROBE_INTERVAL_S
            await trio.sleep_until(due)
            self.late.append(trio.current_time() - due)

    async def tick(self) -> None:
        """As the Scheduler's turns do."""
        while True:
            await trio.sleep(TICK_S)
            self._journal.summarize_if_long()


def fsync_seconds(place: Path) -> list[float]:
    seconds = []
    with (place / "probe").open("wb") as file:
        for _ in range(FSYNCS):
            file.write(bytes(4096))
            file.flush()
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            seconds.append(time.perf_counter() - began)
    return seconds


def percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the longest, in ms."""
    if not seconds:
        return {}
    p50, p99, longest = np.percentile(seconds, [50, 99, 100]) * 1e3
    return {f"{name}_p50_ms": round(p50, 2), f"{name}_p99_ms": round(p99, 2), f"{name}_max_ms": round(longest, 2)}


async def measure(options: argparse.Namespace, place: Path) -> dict[str, float]:
    store = open_store(place / "journal.sqlite", JournalCounters())
    timed, token_log = TimedStore(store), TokenLog(options.requests, journalled=True)
    journal = GroupCommit(timed, JournalState(), token_log, on_tokens=lambda: None)
    load, probe = Load(journal, token_log, options.requests), Probe(journal)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(journal.run)
        load.begin()
        await journal.append(()).wait()
        timed.seconds.clear()
        garbage.settle()
        for task in (garbage.collect, probe.commit, probe.sleep, probe.tick):
            nursery.start_soon(task)
        nursery.start_soon(load.run, options.rate)
        await trio.sleep(options.seconds)
        nursery.cancel_scope.cancel()
    store.close()
    during = [seconds for seconds, in_summary in probe.commits if in_summary]
    return {
        "requests": options.requests,
        "tokens_per_s": round(load.tokens / options.seconds),
        "summaries": timed.summaries,
        "journal_mib": round((place / "journal.sqlite").stat().st_size / 2**20),
        **percentiles("fsync", fsync_seconds(place)),
        **percentiles("group", timed.seconds),
        **percentiles("commit", [seconds for seconds, _ in probe.commits]),
        **percentiles("commit_in_summary", during),
        **percentiles("loop_late", probe.late),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="live requests (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=220_000.0, help="tokens per second (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="default: %(default)s")
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where the journal lies (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as place:
        print(json.dumps(trio.run(measure, options, Path(place)), indent=1))


if __name__ == "__main__":
    main()
