"""The journal's disk, in memory: it outlives coordinators, loses what was not committed, and can be full or slow.

A group that is being written when its coordinator is killed is durable or is not, as the seed decides; neither was
acknowledged. What is durable is kept as bytes, as a file would be, and read into a second state, with which the checker
compares what was acknowledged.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import trio

from coordinator.journal import records
from coordinator.journal.journal import JournalError
from coordinator.journal.ledger_image import ledger_from, parts_of
from coordinator.journal.records import LASTING, Record
from coordinator.memory.changes import Change, apply
from coordinator.memory.ledger import Ledger
from protocol.arrays import unpack_int32
from protocol.errors import HiSparseError
from tests.sim.alarms import sleep
from tests.sim.trace import Trace, Violation

#: Seconds that a commit takes, and one of a slow disk.
COMMIT_S: Final = (0.0005, 0.01)
SLOW_COMMIT_S: Final = (0.05, 0.4)
#: Records written until a summary is wanted.
SUMMARY_RECORDS: Final = 120


class FakeDisk:
    """What is committed. `full_until` and `slow_until` are moments on the simulated clock."""

    def __init__(self, rng: random.Random, trace: Trace) -> None:
        self.rng = rng
        self.trace = trace
        self.rows: dict[int, tuple[int | None, bytes]] = {}
        self.since_summary = 0
        self._number = self._begun = 0
        self._frozen: dict[str, list[records.NodePart]] = {}
        self._said: dict[str, list[records.NodePart]] = {}
        self.full_until = 0.0
        self.slow_until = 0.0
        self.ledgers: dict[str, Ledger] = {}
        self.request_indices: dict[int, str] = {}
        self.tokens: dict[str, int] = {}
        self.outcomes: dict[str, str] = {}
        self.drained: dict[str, int] = {}  # workers, and the epoch that was told

    def commit(self, group: Sequence[Record]) -> None:
        """All of `group`, in order."""
        self.trace.note("disk", "commits", f"{len(group)} records")
        for record in group:
            if isinstance(record, records.RequestsForgotten):
                gone = set(unpack_int32(record.request_indices, "request_indices").tolist())
                self._delete(number for number, (request_index, _) in self.rows.items() if request_index in gone)
            elif isinstance(record, records.SummaryBegun):
                self._begun, self.since_summary = self._number, 0
            elif isinstance(record, records.SummaryEnded):
                void = (
                    number
                    for number, (request_index, _) in self.rows.items()
                    if request_index is None and number < self._begun
                )
                self._delete(void)
            self.rows[self._number] = (
                record.request_index if isinstance(record, LASTING) else None,
                records.encode(record),
            )
            self._number += 1
            self.since_summary += 1
            self._note(record)

    @property
    def rows_seen(self) -> int:
        """Number of rows that were ever written."""
        return self._number

    def read(self) -> list[Record]:
        """Every row that is left, in order."""
        return [records.decode(body) for _, body in self.rows.values()]

    def _delete(self, numbers: Iterable[int]) -> None:
        for number in list(numbers):
            del self.rows[number]

    def _note(self, record: Record) -> None:
        match record:
            case records.RequestAccepted(facts):
                request_index, request_id = facts.request_index, facts.request_id
                self.request_indices[request_index] = request_id
                self.tokens.setdefault(request_id, 0)
            case records.TokensAppended():
                arrays = (
                    unpack_int32(part, "tokens") for part in (record.request_indices, record.starts, record.counts)
                )
                for request_index, start, count in zip(*(array.tolist() for array in arrays), strict=True):
                    self.tokens[self.request_indices[request_index]] = max(
                        self.tokens[self.request_indices[request_index]], start + count
                    )
            case records.RequestEnded(request_index=request_index, outcome=outcome):
                self.outcomes[self.request_indices[request_index]] = outcome
            case records.WorkerDrained(worker=worker, epoch=epoch):
                self.drained[worker] = epoch
            case records.WorkerUndrained(worker=worker):
                self.drained.pop(worker, None)
            case records.PoolOpened(node=node, capacity=capacity):
                self.ledgers[node] = Ledger(capacity.host_pages)
                self._frozen.pop(node, None)
            case records.SummaryBegun():
                self._frozen = {node: list(parts_of(node, ledger)) for node, ledger in self.ledgers.items()}
                self._said = {node: [] for node in self.ledgers}
            case records.NodePart(node=node):
                self._said[node].append(record)
            case records.SummaryEnded():
                self._check_summary()
            case records.LedgerChanged(node=node, changes=changes):
                self._change(node, changes)

    def _check_summary(self) -> None:
        for node, parts in self._frozen.items():
            if list(parts_of(node, ledger_from(self._said[node]))) != parts:
                raise Violation("I1", f"a summary's ledger of {node} is not what its changes amount to")

    def _change(self, node: str, changes: Sequence[Change]) -> None:
        try:
            for change in changes:
                apply(self.ledgers[node], change)
        except HiSparseError as error:
            raise Violation("I1", f"what the journal says of {node} does not add up: {error}") from error


class FakeStore:
    """One coordinator's hold on the disk: coordinator.journal.journal.JournalStore."""

    path = Path("/sim/journal")

    def __init__(self, disk: FakeDisk) -> None:
        self._disk = disk

    @property
    def short(self) -> str:
        return ""

    @property
    def wants_summary(self) -> bool:
        return self._disk.since_summary > SUMMARY_RECORDS

    async def load(self) -> list[Record]:
        return self._disk.read()

    async def write(self, group: Sequence[Record]) -> None:
        disk = self._disk
        now = trio.current_time()
        try:
            await sleep(disk.rng.uniform(*(SLOW_COMMIT_S if now < disk.slow_until else COMMIT_S)))
        except trio.Cancelled:
            if now >= disk.full_until and disk.rng.random() < 0.5:
                disk.commit(group)
            raise
        if now < disk.full_until:
            raise JournalError("no space left on the simulated disk")
        disk.commit(group)

    def close(self) -> None:
        return
