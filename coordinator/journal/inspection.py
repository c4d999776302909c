"""Inspection of a closed journal, without changing it: whether it is whole, and if not, what is lost.

    files     regular, of one user, not too short; the form in SQLite's header
    tables    those of this form; SQLite's check of its pages (a page that two rows use, or none)
    rows      each agrees with its digest
    chain     each commit since the last summary exists and follows from the previous one
    head      number and sum of the rows agree with the newest head
    mark      the newest commit is not older than the last acknowledged one

SQLite opens the journal read-only. A connection that may write copies the log into the file when it closes, and frames
behind a damaged one would be lost for good. SQLite keeps the index of the log in memory, so that a journal can be read
on a disk without a free byte: `readonly_shm` allows no writes to the file of the index, which exists and is empty.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

from coordinator.journal.chain import TOTALS, Contents, Head, StoredRecord, first_head, unpack
from coordinator.journal.files import Mark, head_path, index_path, log_path, unusable
from protocol.errors import ConfigError

#: The form of the file; a journal of another form is refused.
VERSION: Final = 6
SCHEMA: Final = (
    "CREATE TABLE records (number INTEGER PRIMARY KEY, request_index INTEGER, body BLOB NOT NULL, digest BLOB NOT NULL,"
    " head BLOB)"
)
ROWS: Final = "SELECT number, request_index, body, digest, head FROM records WHERE number > ? ORDER BY number"
#: Errors of SQLite on damaged pages, texts and numbers.
SQL_ERRORS: Final = (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError)
#: Most damages that are looked for and reported.
DAMAGES_MAX: Final = 100
DAMAGE_CHARS_MAX: Final = 300

_HEADER_BYTES: Final = 100
_FORM_AT: Final = 60


class Inspection(NamedTuple):
    """`damages` describe what is wrong and what is lost; empty: `contents` has all acknowledged commits."""

    contents: Contents
    mark: Head | None
    damages: tuple[str, ...]


class FileForm(NamedTuple):
    """The form in a file's header; None: the file is not a database."""

    form: int | None
    is_empty: bool


def read_form(path: Path) -> FileForm:
    """Read the header of `path`. Raises OSError.

    SQLite must not have opened `path` in this process (coordinator.journal.files.Identity).
    """
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    is_database = len(header) == _HEADER_BYTES and header.startswith(b"SQLite format 3\0")
    return FileForm(int.from_bytes(header[_FORM_AT : _FORM_AT + 4], "big") if is_database else None, not header)


def inspect(path: Path, mark: Mark | None) -> Inspection:
    """Inspect a journal that no other process has open. Raises ConfigError when it is not of this form, or OSError."""
    _check_form(path, mark)
    head = mark.head if mark else None
    found = _Finding()
    if path.exists() and (form := read_form(path).form) != VERSION:
        found.note(f"its header says form {form}, it has form {VERSION}")
    with suppress(FileNotFoundError):
        try:
            with closing(open_read_only(path)) as connection:
                found.take(connection)
        except SQL_ERRORS as error:
            found.note(f"SQLite cannot read it: {error}")
        finally:
            drop_index(path)
    found.compare(head, path)
    return Inspection(found.contents, head, tuple(found.damages))


def _check_form(path: Path, mark: Mark | None) -> None:
    form = read_form(path).form if path.exists() else None
    has_mark = mark is not None and mark.head is not None
    if form == VERSION or has_mark:
        return  # a journal, or what is left of one
    if form is None:
        raise unusable(path, "it is not a journal", "name another file, or one that does not exist yet")
    raise ConfigError(
        f"it has form {form}, this hisparse uses form {VERSION}",
        field="coordinator.journal",
        value=path,
        remedy="let its requests end under the hisparse that wrote it, then move it away",
    )


def open_read_only(path: Path, *, with_log: bool = True) -> sqlite3.Connection:
    """Open the file read-only, with its log if there is one; raises sqlite3.DatabaseError for an empty file.

    With a log, an empty file for its index is made, which `drop_index` removes. Raises OSError.
    """
    log = log_path(path)
    has_log = with_log and log.exists() and log.stat().st_size > 0
    if not path.stat().st_size:  # SQLite would take the log away from an empty file
        raise sqlite3.DatabaseError("the file is empty")
    if has_log:
        drop_index(path)
        os.close(os.open(index_path(path), os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    options = "mode=ro&readonly_shm=1" if has_log else "mode=ro&immutable=1"
    connection = sqlite3.connect(f"file:{quote(str(path.absolute()))}?{options}", uri=True, isolation_level=None)
    connection.text_factory = lambda text: text.decode(errors="replace")
    return connection


def drop_index(path: Path) -> None:
    """Remove the index of the log; SQLite can make it again at any time."""
    with suppress(OSError):
        index_path(path).unlink(missing_ok=True)


def read_rows(connection: sqlite3.Connection, errors: list[str]) -> Iterator[StoredRecord]:
    """All readable rows, in order; places that cannot be read are skipped and described in `errors`."""
    after, skip = -1, 1
    while len(errors) < DAMAGES_MAX:
        try:
            for row in connection.execute(ROWS, (after,)):
                yield StoredRecord(*row)
                after, skip = (row[0], 1) if isinstance(row[0], int) else (after, skip)
        except SQL_ERRORS as error:
            errors.append(f"rows behind number {after} cannot be read: {error}")
            after, skip = after + skip, 2 * skip
            if after >= 1 << 62:
                return
        else:
            return


class _Finding:
    """Results of an inspection in progress."""

    def __init__(self) -> None:
        self.damages: list[str] = []
        self.contents = Contents(first_head(b""))
        self._head: Head | None = None
        self._row: StoredRecord | None = None  # the newest one
        self._rows = 0
        self._sum = 0
        self._seals: list[Head] = []

    def note(self, damage: str) -> None:
        if len(self.damages) < DAMAGES_MAX:
            self.damages.append(damage[:DAMAGE_CHARS_MAX].encode("ascii", "backslashreplace").decode())

    def take(self, connection: sqlite3.Connection) -> None:
        tables = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
        if tables != [("table", "records", SCHEMA)]:
            self.note("its tables are not those of a journal")
            return
        for (result,) in connection.execute("PRAGMA quick_check(8)").fetchall():
            if result != "ok":
                self.note(f"SQLite's pages are damaged: {result}")
        errors: list[str] = []
        for row in read_rows(connection, errors):
            self._take_row(row)
        for error in errors:
            self.note(error)
        self._check_chain()

    def _take_row(self, row: StoredRecord) -> None:
        self._row = row
        self._rows += 1
        if not row.is_whole:
            where = f"row {row.number}"
            self.note(f"{where} is not what was written: {_what(row)}")
            return
        self._sum += int.from_bytes(row.digest, "little")
        self.contents.add(row)
        if row.head is None:
            return
        head = unpack(row.head)
        if head is None or head.last != row.number:
            self.note(f"the head of the commit that ends with row {row.number} is not what was written")
        else:
            self._seals.append(head)

    def _check_chain(self) -> None:
        newest = self._seals[-1] if self._seals else None
        if newest is None:
            if self._rows:
                self.note("no commit has a head")
            return
        self._head = self.contents.head = newest
        self.contents.begun = newest.begin
        counted = [head for head in self._seals if head.last >= newest.begin]
        first = counted[0].commits if newest.begin else 1
        before: Head | None = None
        for head in counted:
            expected = before.commits + 1 if before else first
            if head.commits != expected:
                self.note(f"{_commits(expected, head.commits - 1)} missing in its middle")
            elif before and head.previous != before.chain:
                self.note(f"commit {head.commits} does not follow from the one before")
            before = head
        row = self._row
        if row is None or newest.last != row.number:
            self.note("its last row is of no commit")
        elif not self.damages and (self._rows, self._sum % TOTALS) != (newest.rows, newest.total):
            self.note(f"{newest.rows} rows were written, {self._rows} are there, and they do not add up")

    def compare(self, mark: Head | None, path: Path) -> None:
        head = self._head
        if mark is None:
            self.note(f"{head_path(path).name}, which has the last acknowledged commit, is missing or damaged")
        elif head is None:
            if not mark.commits and not self.damages and path.exists():
                self.contents.head = mark
            elif mark.commits or path.exists():
                self.note(f"{_commits(1, mark.commits)} missing: all that was acknowledged")
        elif head.journal != mark.journal:
            self.note(f"{head_path(path).name} belongs to another journal")
        elif head.commits < mark.commits:
            self.note(f"{_commits(head.commits + 1, mark.commits)} missing at its end, all acknowledged")
        elif (head.commits == mark.commits and head.chain != mark.chain) or (
            head.commits == mark.commits + 1 and head.previous != mark.chain
        ):
            self.note(f"commit {head.commits} is not the one that was acknowledged: this is another copy")


def _commits(first: int, last: int) -> str:
    return f"commit {first} is" if first >= last else f"commits {first} to {last} are"


def _what(row: StoredRecord) -> str:
    return (
        f"it had a record of the request of index {row.request_index}"
        if isinstance(row.request_index, int)
        else "it had records"
    )
