"""The journal on disk: one SQLite file, one table of records, written by one thread.

    records   number  order of commit
              slot    whose record it is, for one that outlives a summary; NULL for a run of others
              body    records, msgpack: one, or as many as came in a row
    summary   number  of the row where the last complete summary begins: rows without a slot before it are void

Write-ahead log with synchronous=FULL: a commit is one sequential write and one fsync of the log. Locked exclusively:
two coordinators cannot keep one journal, and the log's index lies on the heap. A Forgotten deletes the rows of its
slots. A SummaryEnded makes rows void in one stroke, by one number; the groups that follow delete RETIRED_ROWS of them
each, or the next start all. Pages that become free are used again; those beyond a summary's worth are given back to the
file system, and all of them when it is short, VACUUM_PAGES at a time likewise.

The reserve. A file of RESERVE_BYTES beside the journal is removed when the disk is full: with that room running work
goes on, and `short` says that no new work should be taken until the reserve is back.

A group that fails is rolled back. After a failing fsync the kernel may call pages clean that never reached the disk,
so nothing is trusted but what is written again: the retry writes the same records under the same numbers, over the same
place of the log.

Rejected: a log file of our own (SQLite's has checksums, torn-write recovery and thirty years of tests); a row per
record (three times the inserts for nothing: `request_index` is all that deletes need).
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import trio

from coordinator.journal.journal import JournalError
from coordinator.journal.records import (
    LASTING,
    Record,
    RequestsForgotten,
    SummaryBegun,
    SummaryEnded,
    decode_all,
    encode,
)
from metrics.state import JournalCounters
from protocol.arrays import unpack_int32
from protocol.errors import ConfigError

#: The form of the file; a journal of a later one is refused.
VERSION: Final = 2
#: The form before: the same without `summary`, and with summaries whole in one commit. Opening it makes it this one.
VERSION_BEFORE: Final = 1
#: Bytes written without a summary until one is wanted: more than a minute at 88k tokens per second.
SUMMARY_BYTES: Final = 128 * 1024 * 1024
#: The same on a disk that is short: what a summary saves is what running work can go on with.
SHORT_SUMMARY_BYTES: Final = 4 * 1024 * 1024
#: Room kept for running work on a full disk: three million tokens.
RESERVE_BYTES: Final = 16 * 1024 * 1024
#: How often to try to have it back.
RESERVE_RETRY_S: Final = 1.0
#: SQLite copies the log into the file when it has this many pages (of 4 KiB); an fsync of the file goes with it.
CHECKPOINT_PAGES: Final = 1_024
#: Free pages that stay in the file: what the records up to the next summary will take, with room to spare.
FREE_PAGES_KEPT: Final = 2 * SUMMARY_BYTES // 4_096
#: Void rows deleted, and free pages given back, with one group: a millisecond each.
RETIRED_ROWS: Final = 16
VACUUM_PAGES: Final = 256
#: Rows of one statement. The interpreter is given up for each statement, and a busy loop lends it back after 5 ms.
STATEMENT_ROWS: Final = 256
#: A lock held by another process is waited for this long: it may be one that is just ending.
LOCK_WAIT_S: Final = 5.0

T = TypeVar("T")

assert RESERVE_BYTES <= SUMMARY_BYTES  # a reserve that a summary would not outgrow

_SETTINGS: Final = (
    "PRAGMA locking_mode = EXCLUSIVE",
    "PRAGMA auto_vacuum = INCREMENTAL",
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA secure_delete = OFF",
    f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}",
    "CREATE TABLE IF NOT EXISTS records (number INTEGER PRIMARY KEY, slot INTEGER, body BLOB NOT NULL)",
    "CREATE INDEX IF NOT EXISTS by_slot ON records (slot) WHERE slot IS NOT NULL",
    "CREATE TABLE IF NOT EXISTS summary (only INTEGER PRIMARY KEY CHECK (only = 0), number INTEGER NOT NULL)",
)
_FIRST_FLOW: Final = "SELECT coalesce(min(number), 0) FROM records WHERE slot IS NULL"


class StoredRecord(NamedTuple):
    """A row of the table, and the first of its records."""

    number: int
    request_index: int | None
    body: bytes
    first: Record


class SqliteStore:
    """Opened by `open_store`. The connection is used by one thread at a time, whichever trio lends."""

    def __init__(self, path: Path, connection: sqlite3.Connection, counters: JournalCounters) -> None:
        self.path = path
        self.short = ""
        self._connection = connection
        self._counters = counters
        self._flow_bytes = 0
        self._last = self._ask("SELECT coalesce(max(number), 0) FROM records")
        self._begun = self._begin = self._ask("SELECT coalesce(max(number), 0) FROM summary")
        self._retired = self._ask(_FIRST_FLOW) - 1  # no void row has this number or a lower one
        self._reserve_at = 0.0
        self._keep_reserve()

    @property
    def wants_summary(self) -> bool:
        return self._flow_bytes > (SHORT_SUMMARY_BYTES if self.short else SUMMARY_BYTES)

    async def load(self) -> list[Record]:
        return await trio.to_thread.run_sync(self.read)

    async def write(self, records: Sequence[Record]) -> None:
        await trio.to_thread.run_sync(self.write_now, records)

    def close(self) -> None:
        """Fold the log into the file and let go of it; the reserve goes too."""
        self._connection.close()
        self._reserve.unlink(missing_ok=True)

    # ------------------------------------------------------------ in the thread

    def read(self) -> list[Record]:
        """Every record that counts, in order. Raises JournalError when the file is damaged."""
        try:
            with suppress(sqlite3.Error):  # a full disk: they go later
                self._connection.execute("DELETE FROM records WHERE slot IS NULL AND number < ?", (self._begin,))
                self._retired = max(self._retired, self._begin - 1)
            counting = "slot IS NOT NULL OR number >= ?"
            rows = self._connection.execute(
                f"SELECT body, slot IS NULL FROM records WHERE {counting} ORDER BY number", (self._begin,)
            )
            return [record for body, is_flow in rows for record in self._decode(body, bool(is_flow))]
        except (sqlite3.Error, ValueError) as error:
            raise JournalError(f"{self.path}: {error}") from error

    def _decode(self, body: bytes, is_flow: bool) -> list[Record]:
        self._flow_bytes += len(body) if is_flow else 0
        return decode_all(body)

    def write_now(self, records: Sequence[Record]) -> None:
        """One transaction. A full disk costs the reserve before it costs the group."""
        rows = [
            StoredRecord(number, run[0].request_index if isinstance(run[0], LASTING) else None, encode(run), run[0])
            for number, run in enumerate(_runs(records), self._last + 1)
        ]
        try:
            self._write_rows(rows)
        except sqlite3.Error as error:
            if not self._give_up_reserve(str(error)):
                raise JournalError(f"{self.path}: {error}") from error
            try:
                self._write_rows(rows)
            except sqlite3.Error as again:
                raise JournalError(f"{self.path}: {again}") from again
        else:
            if self.short and time.monotonic() - self._reserve_at > RESERVE_RETRY_S:
                with suppress(sqlite3.Error):
                    self._ask("PRAGMA wal_checkpoint(TRUNCATE)")  # what was given back is free only then
                self._keep_reserve()
        self._last += len(rows)
        self._counters.written_bytes += sum(len(row.body) for row in rows)

    def _write_rows(self, rows: Sequence[StoredRecord]) -> None:
        run = self._connection.execute
        begun = next((row.number for row in rows if isinstance(row.first, SummaryBegun)), self._begun)
        run("BEGIN IMMEDIATE")
        try:
            for part in _parts(rows):
                self._write_part(part, begun)
            retired = min(self._retired + RETIRED_ROWS, self._begin - 1)
            if retired > self._retired:
                void = self._retired, retired
                run("DELETE FROM records WHERE slot IS NULL AND number > ? AND number <= ?", void)
            run("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                run("ROLLBACK")
            raise
        has_deleted, self._retired = retired > self._retired, max(self._retired, retired)
        for row in rows:
            self._count(row)
        if has_deleted or self.short:
            self._vacuum()

    def _write_part(self, part: Sequence[StoredRecord], begun: int) -> None:
        run = self._connection.execute
        if isinstance(first := part[0].first, RequestsForgotten):
            for request_indices in _batches(unpack_int32(first.request_indices, "request_indices").tolist()):
                run(f"DELETE FROM records WHERE slot IN ({', '.join('?' * len(request_indices))})", request_indices)
        elif isinstance(first, SummaryEnded):
            run("INSERT OR REPLACE INTO summary VALUES (0, ?)", (begun,))
        for batch in _batches(part):
            values = ", ".join(["(?, ?, ?)"] * len(batch))
            run(f"INSERT OR REPLACE INTO records VALUES {values}", [it for row in batch for it in row[:3]])

    def _count(self, row: StoredRecord) -> None:
        """It is written."""
        if isinstance(row.first, SummaryBegun):
            self._begun, self._flow_bytes = row.number, 0
        elif isinstance(row.first, SummaryEnded):
            self._begin = self._begun
        self._flow_bytes += len(row.body) if row.request_index is None else 0

    def _vacuum(self) -> None:
        """Give back some of what will not be needed soon. The group is written: a disk too full for this is no
        failure."""
        with suppress(sqlite3.Error):
            if self._ask("PRAGMA freelist_count") > (0 if self.short else FREE_PAGES_KEPT):
                self._connection.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES})")  # to its end

    def _ask(self, query: str) -> int:
        number: int = self._connection.execute(query).fetchone()[0]
        return number

    # ------------------------------------------------------------ the reserve

    @property
    def _reserve(self) -> Path:
        return self.path.with_name(self.path.name + ".reserve")

    def _keep_reserve(self) -> None:
        self._reserve_at = time.monotonic()
        try:
            descriptor = os.open(self._reserve, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._reserve.unlink(missing_ok=True)
            self.short = self.short or f"no room for its reserve: {error.strerror}"
        else:
            self.short = ""

    def _give_up_reserve(self, reason: str) -> bool:
        """Whether there was one to give up."""
        if not self._reserve.exists():
            return False
        self._reserve.unlink()
        self._reserve_at = time.monotonic()
        self.short = f"{reason}; running work lives on the reserve"
        return True


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """STATEMENT_ROWS at a time."""
    return (items[start : start + STATEMENT_ROWS] for start in range(0, len(items), STATEMENT_ROWS))


def _runs(records: Sequence[Record]) -> list[list[Record]]:
    """Records as rows hold them: each lasting one alone, the others between them together; a run begins with what
    voids others, or says from where."""
    runs: list[list[Record]] = []
    for record in records:
        is_alone = isinstance(record, (*LASTING, RequestsForgotten, SummaryBegun, SummaryEnded))
        if is_alone or not runs or isinstance(runs[-1][0], LASTING):
            runs.append([record])
        else:
            runs[-1].append(record)
    return runs


def _parts(rows: Sequence[StoredRecord]) -> Iterator[Sequence[StoredRecord]]:
    """Rows cut before each one that voids others."""
    cuts = [0, *(at for at, row in enumerate(rows) if at and isinstance(row.first, (RequestsForgotten, SummaryEnded)))]
    for start, stop in zip(cuts, [*cuts[1:], len(rows)], strict=True):
        if start < stop:
            yield rows[start:stop]


def open_store(path: Path, counters: JournalCounters) -> SqliteStore:
    """The journal at `path`, made if it is not there. Raises ConfigError when it cannot be used."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        connection = sqlite3.connect(path, timeout=LOCK_WAIT_S, isolation_level=None, check_same_thread=False)
        for setting in _SETTINGS:
            connection.execute(setting)
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version in (0, VERSION_BEFORE):
            connection.execute(f"PRAGMA user_version = {VERSION}")
    except (OSError, sqlite3.Error) as error:
        raise _unusable(path, str(error)) from error
    if version not in (0, VERSION_BEFORE, VERSION):
        raise _unusable(path, f"it has form {version}, this hisparse writes form {VERSION}")
    return SqliteStore(path, connection, counters)


def _unusable(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"cannot keep the journal: {reason}",
        field="coordinator.journal",
        value=path,
        remedy="name a file on a disk with room that no other coordinator keeps, or none",
    )
