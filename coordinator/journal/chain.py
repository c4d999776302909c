"""Integrity of a journal's rows: a checksum of each row, and a chain over commits. Pure.

    digest   hash of one row: of its number, its request index and its records
    head     state after a commit: the number of commits, the number of rows, the sum of their digests, and the chain
    chain    hash of a head; each head contains the chain of the previous one

Rows are deleted all the time, when requests are forgotten and when a summary has replaced them. So the head holds the
sum of the digests of all rows (mod 2^128): a commit adds and subtracts, and reads no row. A row that is changed,
missing, doubled or restored gives another sum. The chain gives the order of commits, and distinguishes a journal from
an older copy of it.

A head lies in the last row of its commit, and once more, as the *mark*, in a file beside the journal
(coordinator.journal.files). The first describes the rows that must exist; the mark gives the last acknowledged commit.

Rejected: a hash of all rows in order (after a deletion, a commit would have to read all rows); CRC-32 (it misses one
damage in four billion, and saves 30 us for 40 KiB); a table for the head (one more page of the log for each commit).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, NamedTuple

from coordinator.journal.records import LASTING, Record, RequestsForgotten, SummaryBegun, SummaryEnded, encode
from protocol.arrays import unpack_int32

DIGEST_BYTES: Final = 16
#: Void rows deleted with one commit: a millisecond.
RETIRED_ROWS: Final = 16

_MAGIC: Final = b"HSPJRNL3"
_FIELDS: Final = struct.Struct("<8s16sQQQQ16s16s")
_PLACE: Final = struct.Struct("<qq")
#: Sums of digests are modulo this.
TOTALS: Final = 1 << 8 * DIGEST_BYTES
HEAD_BYTES: Final = _FIELDS.size + DIGEST_BYTES


def digest(*parts: bytes) -> bytes:
    hashed = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        hashed.update(part)
    return hashed.digest()


def row_digest(number: int, request_index: int | None, body: bytes) -> bytes:
    return digest(_PLACE.pack(number, -1 if request_index is None else request_index), body)


class Head(NamedTuple):
    """The journal after its commit number `commits`. `last` is the number of the last row.

    Rows without a request index and with a number below `begin` are void.
    """

    journal: bytes
    commits: int
    rows: int
    last: int
    begin: int
    total: int
    previous: bytes

    @property
    def chain(self) -> bytes:
        return digest(self._packed())

    def pack(self) -> bytes:
        fields = self._packed()
        return fields + digest(fields)

    def _packed(self) -> bytes:
        total = self.total.to_bytes(DIGEST_BYTES, "little")
        return _FIELDS.pack(_MAGIC, self.journal, self.commits, self.rows, self.last, self.begin, total, self.previous)


def first_head(journal: bytes) -> Head:
    """The head of an empty journal. `journal` is DIGEST_BYTES that no other journal has."""
    return Head(journal, 0, 0, 0, 0, 0, digest(journal))


def unpack(data: object) -> Head | None:
    """The head in `data`; None: `data` is not a whole head."""
    if not isinstance(data, bytes) or len(data) < HEAD_BYTES:
        return None
    fields, chain = data[: _FIELDS.size], data[_FIELDS.size : HEAD_BYTES]
    magic, journal, commits, rows, last, begin, total, previous = _FIELDS.unpack(fields)
    if magic != _MAGIC or digest(fields) != chain:
        return None
    return Head(journal, commits, rows, last, begin, int.from_bytes(total, "little"), previous)


class StoredRecord(NamedTuple):
    """One row. `head` is set on the last row of a commit."""

    number: int
    request_index: int | None
    body: bytes
    digest: bytes
    head: bytes | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether the row is what was written. This does not cover `head`, which has a checksum (`unpack`)."""
        kinds = type(self.number), type(self.body), type(self.digest)
        if kinds != (int, bytes, bytes) or not isinstance(self.request_index, int | None):
            return False
        return row_digest(self.number, self.request_index, self.body) == self.digest


class Change(NamedTuple):
    """One commit. It deletes the rows numbered `deleted`: those of `forgotten` requests and `retired` void ones."""

    head: Head
    begun: int
    forgotten: tuple[int, ...]
    retired: int
    deleted: tuple[int, ...]
    rows: tuple[StoredRecord, ...]


@dataclass(slots=True)
class Contents:
    """The rows on disk, as numbers and digests: lasting rows by request index, the others in order.

    `begun` is the row of the last SummaryBegun, `head.begin` the row of the last SummaryBegun with a SummaryEnded.
    """

    head: Head
    lasting: dict[int, dict[int, bytes]] = field(default_factory=dict)
    flow: deque[tuple[int, bytes]] = field(default_factory=deque)
    begun: int = 0

    def add(self, row: StoredRecord) -> None:
        """Add a row. Rows must be added in the order of their numbers."""
        if row.request_index is None:
            self.flow.append((row.number, row.digest))
        else:
            self.lasting.setdefault(row.request_index, {})[row.number] = row.digest

    def apply(self, change: Change) -> None:
        """`change` was committed."""
        self.head, self.begun = change.head, change.begun
        for request_index in change.forgotten:
            self.lasting.pop(request_index, None)
        for _ in range(change.retired):
            self.flow.popleft()
        for row in change.rows:
            self.add(row)


def plan(contents: Contents, records: Sequence[Record]) -> Change | None:
    """The commit that makes `records` durable and deletes the rows that they void. None: there is nothing to do."""
    head = contents.head
    void = _void_of(contents)
    if not records and not void:
        return None
    plan = _CommitPlan(contents)
    for number, run in enumerate(_runs(records), head.last + 1):
        plan.take(number, run)
    rows, deleted = list(plan.rows.values()), plan.deleted | void
    added = sum(int.from_bytes(row.digest, "little") for row in rows)
    gone = sum(int.from_bytes(it, "little") for it in deleted.values())
    after = Head(
        head.journal,
        head.commits + 1,
        head.rows + len(rows) - len(deleted),
        rows[-1].number,
        plan.begin,
        (head.total + added - gone) % TOTALS,
        head.chain,
    )
    rows[-1] = rows[-1]._replace(head=after.pack())
    return Change(after, plan.begun, tuple(plan.forgotten), len(void), tuple(deleted), tuple(rows))


class _CommitPlan:
    """Rows of one commit: those added and those deleted. A commit may delete a row that it adds."""

    def __init__(self, contents: Contents) -> None:
        self.begun, self.begin = contents.begun, contents.head.begin
        self.rows: dict[int, StoredRecord] = {}
        self.deleted: dict[int, bytes] = {}
        self.forgotten: list[int] = []
        self._lasting = contents.lasting
        self._added: dict[int, list[int]] = {}

    def take(self, number: int, run: Sequence[Record]) -> None:
        first = run[0] if run else None
        request_index = first.request_index if isinstance(first, LASTING) else None
        match first:
            case RequestsForgotten(request_indices):
                self._forget(unpack_int32(request_indices, "request_indices").tolist())
            case SummaryBegun():
                self.begun = number
            case SummaryEnded():
                self.begin = self.begun
        body = encode(run)
        self.rows[number] = StoredRecord(number, request_index, body, row_digest(number, request_index, body))
        if request_index is not None:
            self._added.setdefault(request_index, []).append(number)

    def _forget(self, request_indices: Iterable[int]) -> None:
        for request_index in request_indices:
            self.forgotten.append(request_index)
            self.deleted |= self._lasting.get(request_index, {})
            for number in self._added.pop(request_index, ()):
                del self.rows[number]


def _void_of(contents: Contents) -> dict[int, bytes]:
    void: dict[int, bytes] = {}
    for number, row_sum in contents.flow:
        if number >= contents.head.begin or len(void) == RETIRED_ROWS:
            break
        void[number] = row_sum
    return void


def _runs(records: Sequence[Record]) -> list[list[Record]]:
    """Records grouped into rows. A lasting record has a row alone; the other records between two of them share one.

    RequestsForgotten, SummaryBegun and SummaryEnded begin a new row. The last row holds the head, so it must not be a
    lasting one, which may be deleted; it may be empty.
    """
    runs: list[list[Record]] = []
    for record in records:
        is_alone = isinstance(record, (*LASTING, RequestsForgotten, SummaryBegun, SummaryEnded))
        if is_alone or not runs or isinstance(runs[-1][0], LASTING):
            runs.append([record])
        else:
            runs[-1].append(record)
    if not runs or isinstance(runs[-1][0], LASTING):
        runs.append([])
    return runs
