"""What a journal's rows must be: a checksum of each, and a chain over commits. Pure.

    digest   of one row: over its number, its request index and its records
    head     what a commit leaves: how many commits there were, how many rows are there, the sum of their digests,
             and the chain
    chain    hash of a head, which has the chain of the head before

Rows are deleted all the time, when requests are forgotten and when a summary has said everything again. So the head
has a sum of the digests that are there (mod 2^128): a commit adds and subtracts, and nothing has to be read. A row that
is changed, missing, doubled or back again gives another sum; the chain tells commits of one journal from those of an
older copy, and in which order they came.

A head lies in the last row of its commit, and once more, as the *mark*, in a file beside the journal
(coordinator.journal.files): the one says what must be there, the other how far the commits went that were acknowledged.

Rejected: a hash of all rows in order (each commit would read all of them when one is deleted); CRC-32 (one damage of
four billion passes, and it saves 30 us for 40 KiB); a table for the head (one more page of the log for each commit).
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
    """The journal after its commit number `commits`. `last` is the number of its last row; rows without a request index
    before `begin` are void."""

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
    """Of an empty journal. `journal` is DIGEST_BYTES that no other journal has."""
    return Head(journal, 0, 0, 0, 0, 0, digest(journal))


def unpack(data: object) -> Head | None:
    """None: it is not a whole head."""
    if not isinstance(data, bytes) or len(data) < HEAD_BYTES:
        return None
    fields, chain = data[: _FIELDS.size], data[_FIELDS.size : HEAD_BYTES]
    magic, journal, commits, rows, last, begin, total, previous = _FIELDS.unpack(fields)
    if magic != _MAGIC or digest(fields) != chain:
        return None
    return Head(journal, commits, rows, last, begin, int.from_bytes(total, "little"), previous)


class StoredRecord(NamedTuple):
    """`head` on the last row of a commit."""

    number: int
    request_index: int | None
    body: bytes
    digest: bytes
    head: bytes | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is what was written; its head says that of itself."""
        kinds = type(self.number), type(self.body), type(self.digest)
        if kinds != (int, bytes, bytes) or not isinstance(self.request_index, int | None):
            return False
        return row_digest(self.number, self.request_index, self.body) == self.digest


class Change(NamedTuple):
    """What one commit does. Rows of `forgotten` requests and `retired` void ones are those of the numbers `deleted`."""

    head: Head
    begun: int
    forgotten: tuple[int, ...]
    retired: int
    deleted: tuple[int, ...]
    rows: tuple[StoredRecord, ...]


@dataclass(slots=True)
class Contents:
    """What is on disk, by numbers and digests: lasting rows by request index, the others in order. `begun` is the row
    of the last SummaryBegun, `head.begin` that of the last one whose summary is complete."""

    head: Head
    lasting: dict[int, dict[int, bytes]] = field(default_factory=dict)
    flow: deque[tuple[int, bytes]] = field(default_factory=deque)
    begun: int = 0

    def add(self, row: StoredRecord) -> None:
        """Rows come in the order of their numbers."""
        if row.request_index is None:
            self.flow.append((row.number, row.digest))
        else:
            self.lasting.setdefault(row.request_index, {})[row.number] = row.digest

    def apply(self, change: Change) -> None:
        """It is committed."""
        self.head, self.begun = change.head, change.begun
        for request_index in change.forgotten:
            self.lasting.pop(request_index, None)
        for _ in range(change.retired):
            self.flow.popleft()
        for row in change.rows:
            self.add(row)


def plan(contents: Contents, records: Sequence[Record]) -> Change | None:
    """The commit that makes `records` durable and deletes what they void. None: there is nothing to do."""
    head = contents.head
    void = _void_of(contents)
    if not records and not void:
        return None
    plan = _Plan(contents)
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


class _Plan:
    """Rows of one commit: those that stay, and which others go. A row may go in the commit that brought it."""

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
    """Records as rows hold them: each lasting one alone, the others between them together; a run begins with what
    voids others, or says from where. The last run, which may be empty, is none that may be forgotten: it has the head.
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
