"""The journal on disk: one SQLite file, one table of records, written by one thread.

    records   number  order of commit
              request_index  of a lasting record, which stays until its request is forgotten; NULL for other rows
              body    records, msgpack: one lasting record, or a run of others
              digest  checksum of the row
              head    on the last row of a commit: the chain over commits (coordinator.journal.chain)

SQLite's write-ahead log with synchronous=FULL: a commit is one sequential write and one fsync of the log. A mark beside
the journal follows (coordinator.journal.files); only then is the commit acknowledged. The file is locked exclusively:
two coordinators cannot use one journal, and the log's index is in memory. A Forgotten deletes the rows of its requests.
A SummaryEnded voids all earlier rows at once, by one number in the head; each later commit deletes RETIRED_ROWS of
them. Free pages are used again. Those beyond FREE_PAGES_KEPT are given back to the file system, VACUUM_PAGES at a time,
and all of them while the disk is full.

Opening reads the whole file (coordinator.journal.inspection); a damaged one is refused, and not changed. An existing
journal opens on a disk without a free byte: before the first commit, which has the reserve, only the mark is written,
in place.

The reserve. A file of RESERVE_BYTES beside the journal is removed when the disk is full. Running requests go on with
that room, and `short` asks to refuse new requests until the reserve is back. The reserve comes back once FREE_SHARE of
the disk would be free beside it: with less, the next commits would fill the disk again, and new requests would be
refused and taken in turn. After another error than a full disk the reserve comes back as soon as it can be made.

A group that fails is rolled back. After a failing fsync the kernel may report pages as clean that never reached the
disk. So the retry writes the same records again, under the same numbers and at the same place of the log. A group that
was committed but could not be marked, or whose file was deleted, is not written again: the retry marks it.

Rejected: an own log file (SQLite's has torn-write recovery and thirty years of tests); a row per record (three times
the inserts, without a use: deletes need only `request_index`); an index over requests (one more page per commit, and
its damage would delete other rows; the rows of each request are known in memory).
"""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import trio

from coordinator.journal.chain import DIGEST_BYTES, TOTALS, Change, Contents, StoredRecord, first_head, plan
from coordinator.journal.files import (
    LOCK_WAIT_S,
    Identity,
    Mark,
    check_private,
    head_path,
    log_path,
    reserve_path,
    sync_directory,
    unusable,
)
from coordinator.journal.inspection import ROWS, SCHEMA, SQL_ERRORS, VERSION, inspect, read_form
from coordinator.journal.journal import JournalError
from coordinator.journal.records import Record, decode_all
from metrics.state import JournalCounters
from protocol.errors import ConfigError

#: Bytes written since the last summary before a new one: more than a minute at 88k tokens per second.
SUMMARY_BYTES: Final = 128 * 1024 * 1024
#: The same on a full disk, where running requests need the room that a summary saves.
SHORT_SUMMARY_BYTES: Final = 4 * 1024 * 1024
#: Room for running requests on a full disk: three million tokens.
RESERVE_BYTES: Final = 16 * 1024 * 1024
#: How often to try to make the reserve again.
RESERVE_RETRY_S: Final = 1.0
#: Share of the disk that is free beside the reserve when the disk counts as full no longer.
FREE_SHARE: Final = 0.1
#: SQLite copies the log into the file when it has this many pages (of 4 KiB); an fsync of the file goes with it.
CHECKPOINT_PAGES: Final = 1_024
#: Free pages that stay in the file: twice what the records up to the next summary take.
FREE_PAGES_KEPT: Final = 2 * SUMMARY_BYTES // 4_096
#: Free pages given back with one group, which takes a millisecond.
VACUUM_PAGES: Final = 256
#: Rows of one statement. Each statement releases the interpreter lock, and a busy loop gives it back after 5 ms.
STATEMENT_ROWS: Final = 256

T = TypeVar("T")

assert RESERVE_BYTES <= SUMMARY_BYTES  # a summary saves at least the reserve

_SETTINGS: Final = (
    "PRAGMA locking_mode = EXCLUSIVE",
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA secure_delete = OFF",
    f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}",
)


class SqliteStore:
    """Opened by `open_store`. One thread of trio's at a time uses the connection."""

    def __init__(
        self, path: Path, connection: sqlite3.Connection, mark: Mark, contents: Contents, counters: JournalCounters
    ) -> None:
        self.path = path
        self.short = ""
        self._connection = connection
        self._mark = mark
        self._contents = contents
        self._counters = counters
        self._identity = Identity(path)
        self._unmarked: Sequence[Record] | None = None
        self._flow_bytes = 0
        self._reserve_at = 0.0
        self._was_full = False
        self._keep_reserve()

    @property
    def wants_summary(self) -> bool:
        return self._flow_bytes > (SHORT_SUMMARY_BYTES if self.short else SUMMARY_BYTES)

    async def load(self) -> list[Record]:
        return await trio.to_thread.run_sync(self.read)

    async def write(self, records: Sequence[Record]) -> None:
        await trio.to_thread.run_sync(self.write_now, records)

    def close(self) -> None:
        """Copy the log into the file, release the lock, remove the reserve. Idempotent."""
        self._connection.close()
        self._mark.close()
        self._reserve.unlink(missing_ok=True)

    # ------------------------------------------------------------ in the thread

    def read(self) -> list[Record]:
        """All records that are not void, in order. Raises JournalError when the file is not what was written."""
        head, total, rows, records = self._contents.head, 0, 0, []
        self._flow_bytes = 0
        try:
            for values in self._connection.execute(ROWS, (-1,)):
                row = StoredRecord(*values)
                if not row.is_whole:
                    raise JournalError(f"{self.path}: row {row.number} is not what was written")
                rows, total = rows + 1, total + int.from_bytes(row.digest, "little")
                if row.request_index is not None or row.number >= head.begin:
                    self._flow_bytes += len(row.body) if row.request_index is None else 0
                    records += decode_all(row.body)
        except SQL_ERRORS as error:
            raise JournalError(f"{self.path}: {error}") from error
        if (rows, total % TOTALS) != (head.rows, head.total):
            raise JournalError(f"{self.path}: {head.rows} rows were written, {rows} are there, and they do not add up")
        return records

    def write_now(self, records: Sequence[Record]) -> None:
        """One transaction, and its mark. On a full disk the reserve is removed before the group fails."""
        if self._unmarked is not None:
            self._put_mark()
            marked, self._unmarked = self._unmarked, None
            if marked is records:
                return
        change, short = plan(self._contents, records), self.short
        if change is not None:
            self._commit(change)
            self._unmarked = records
            self._put_mark()
            self._unmarked = None
        if self.short or (change is not None and change.deleted):
            self._vacuum()
        if short and self.short == short and time.monotonic() - self._reserve_at > RESERVE_RETRY_S:
            with suppress(sqlite3.Error):
                self._ask("PRAGMA wal_checkpoint(TRUNCATE)")  # only this frees the pages that were given back
            self._reserve_at = time.monotonic()
            if not self._was_full or has_room(self.path.parent):
                self._keep_reserve()

    def _put_mark(self) -> None:
        """Mark the last commit, which may be acknowledged then. Raises JournalError."""
        self._identity.check()
        try:
            self._mark.write(self._contents.head)
        except OSError as error:
            raise JournalError(f"{head_path(self.path)}: {error.strerror}") from error

    def _commit(self, change: Change) -> None:
        try:
            self._write_rows(change)
        except sqlite3.Error as error:
            if not self._give_up_reserve(error):
                raise JournalError(f"{self.path}: {error}") from error
            try:
                self._write_rows(change)
            except sqlite3.Error as again:
                raise JournalError(f"{self.path}: {again}") from again
        self._contents.apply(change)
        for row in change.rows:
            if row.number == change.begun:
                self._flow_bytes = 0
            self._flow_bytes += len(row.body) if row.request_index is None else 0
        self._counters.written_bytes += sum(len(row.body) for row in change.rows)

    def _write_rows(self, change: Change) -> None:
        run = self._connection.execute
        run("BEGIN IMMEDIATE")
        try:
            for numbers in _batches(change.deleted):
                self._delete(numbers)
            for rows in _batches(change.rows):
                values = ", ".join(["(?, ?, ?, ?, ?)"] * len(rows))
                run(f"INSERT INTO records VALUES {values}", [it for row in rows for it in row])
            run("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                run("ROLLBACK")
            raise

    def _delete(self, numbers: Sequence[int]) -> None:
        places = ", ".join("?" * len(numbers))
        deleted = self._connection.execute(f"DELETE FROM records WHERE number IN ({places})", numbers).rowcount
        if deleted != len(numbers):
            raise JournalError(f"{self.path}: of {len(numbers)} rows to delete {deleted} are there")

    def _vacuum(self) -> None:
        """Give back some free pages. The group is written already, so an error (a full disk) is ignored."""
        with suppress(sqlite3.Error):
            if self._ask("PRAGMA freelist_count") > (0 if self.short else FREE_PAGES_KEPT):
                self._connection.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES})")  # to its end

    def _ask(self, query: str) -> int:
        number: int = self._connection.execute(query).fetchone()[0]
        return number

    # ------------------------------------------------------------ the reserve

    @property
    def _reserve(self) -> Path:
        return reserve_path(self.path)

    def _keep_reserve(self) -> None:
        self._reserve_at = time.monotonic()
        try:
            descriptor = os.open(self._reserve, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._reserve.unlink(missing_ok=True)
            self._was_full |= error.errno == errno.ENOSPC
            self.short = self.short or f"no room for its reserve: {error.strerror}"
        else:
            self._was_full, self.short = False, ""

    def _give_up_reserve(self, error: sqlite3.Error) -> bool:
        """Remove the reserve; whether there was one."""
        self._was_full |= getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL
        if not self._reserve.exists():
            return False
        self._reserve.unlink()
        self._reserve_at = time.monotonic()
        self.short = f"{error}; running requests use the reserve"
        return True


def has_room(directory: Path) -> bool:
    """Return whether FREE_SHARE of the disk of `directory` would be free beside the reserve."""
    try:
        status = os.statvfs(directory)
    except OSError:  # the next commit says what is wrong there
        return False
    return status.f_bavail * status.f_frsize >= FREE_SHARE * status.f_blocks * status.f_frsize + RESERVE_BYTES


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """`items` in pieces of STATEMENT_ROWS."""
    return (items[start : start + STATEMENT_ROWS] for start in range(0, len(items), STATEMENT_ROWS))


def open_store(path: Path, counters: JournalCounters) -> SqliteStore:
    """The journal at `path`, made if there was none. Raises ConfigError when it cannot be used, or is damaged."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(path)
        mark = Mark(path)
    except BlockingIOError as error:
        raise unusable(path, "it is locked by another process") from error
    except OSError as error:
        raise unusable(path, str(error)) from error
    try:
        if _is_new(path, mark):
            _create(path, mark)
        contents = _inspected(path, mark)
        return SqliteStore(path, _connect(path), mark, contents, counters)
    except (OSError, *SQL_ERRORS) as error:
        mark.close()
        raise unusable(path, str(error)) from error
    except BaseException:
        mark.close()
        raise


def _is_new(path: Path, mark: Mark) -> bool:
    is_there = path.exists() and not read_form(path).is_empty
    return not is_there and (mark.is_blank or (mark.head is not None and mark.head.commits == 0))


def _create(path: Path, mark: Mark) -> None:
    """Make the mark of an empty journal, then the journal, by one rename."""
    mark.reset(first_head(os.urandom(DIGEST_BYTES)))
    draft = path.with_name(path.name + ".new")
    for file in (draft, log_path(draft), log_path(path)):
        file.unlink(missing_ok=True)
    os.close(os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    connection = _connect(draft, "PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute(SCHEMA)
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.close()
    os.replace(draft, path)
    sync_directory(path)


def _inspected(path: Path, mark: Mark) -> Contents:
    """Inspect `path` and write its newest head into both slots of the mark. Raises ConfigError when it is damaged."""
    contents, _, damages = inspect(path, mark)
    if damages:
        more = f"; {len(damages) - 1} more" if len(damages) > 1 else ""
        raise ConfigError(
            f"the journal is damaged: {damages[0]}{more}",
            field="coordinator.journal",
            value=path,
            remedy="see what is lost with hisparse journal check; then restore a backup of all its files, or keep "
            "whole requests with hisparse journal salvage, or move all its files away: its requests are lost then",
        )
    mark.reset(contents.head)
    return contents


def _connect(path: Path, *form: str) -> sqlite3.Connection:
    """Open `path` for writing; `form`: settings that the file keeps, which SQLite writes even where they are kept."""
    connection = sqlite3.connect(path, timeout=LOCK_WAIT_S, isolation_level=None, check_same_thread=False)
    try:
        for setting in (*form, *_SETTINGS):
            connection.execute(setting)
    except BaseException:
        connection.close()
        raise
    return connection
