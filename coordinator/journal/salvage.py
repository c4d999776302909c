"""Salvage of a damaged journal: a new journal of the requests, tokens and ends that are whole. `rebuild` is pure.

    from whole rows   requests with a whole submission, their tokens up to the first gap, ends with a whole output,
                      orders of operators as far as they are left
    left out          pools, workers, ledgers: each may have changed in a lost row

A request that had not ended is queued again and prefilled, and its salvaged tokens are forced, as after the loss of a
host pool. Workers that still hold requests are sent away to withdraw them. So no page can be granted twice, however
little is left. Tokens behind a gap are decoded again, and a request whose end is lost runs again.

Rows are taken from two views, the file with its log and the file alone. If the log was copied into the file already and
is damaged in its middle, the file has rows that the log has lost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from coordinator.journal.chain import Head, StoredRecord, unpack
from coordinator.journal.files import Mark, check_private, files_of, head_path, sync_directory, unusable
from coordinator.journal.inspection import SQL_ERRORS, drop_index, inspect, open_read_only, read_rows
from coordinator.journal.journal import JournalError
from coordinator.journal.records import (
    Record,
    RequestAccepted,
    RequestEnded,
    RequestHandedOver,
    RequestOutput,
    RequestPlaced,
    RequestsForgotten,
    SummaryBegun,
    SummaryEnded,
    TokensAppended,
    decode_all,
)
from coordinator.journal.state import JournalState
from coordinator.journal.store import open_store
from coordinator.journal.summary import facts_of
from coordinator.tokens.logprob_rows import unpack_logprobs
from metrics.state import JournalCounters
from protocol.arrays import unpack_int32
from protocol.logprobs import row_words

#: Placement numbers that the lost part may have used; workers may still hold such placements.
PLACEMENTS_SKIPPED: Final = 1 << 24
#: Records written with one commit.
RECORDS_EACH: Final = 512


class Salvaged(NamedTuple):
    """`records` are the new journal; `lost` has a line for each incomplete request, with what is lost."""

    records: tuple[Record, ...]
    live: int
    ended: int
    tokens: int
    lost: tuple[str, ...]


@dataclass(slots=True)
class _Request:
    """A submission and pieces of its output: (start position, int32 tokens, int32 rows of log-probabilities)."""

    accepted: RequestAccepted
    pieces: list[tuple[int, bytes, bytes]] = field(default_factory=list)

    def output(self) -> tuple[bytes, bytes, bool]:
        """Tokens (int32) and rows (int32) up to the first gap, and whether there is no gap."""
        whole, rows, words = bytearray(), bytearray(), row_words(self.accepted.facts.sampling.logprobs)
        for start, tokens, its_rows in sorted(self.pieces, key=lambda piece: piece[0]):
            known = len(whole) - 4 * start
            if known < 0:
                return bytes(whole), bytes(rows), False
            whole += tokens[known:]
            rows += its_rows[known * words :]
        return bytes(whole), bytes(rows), True


class _Rebuilding:
    def __init__(self) -> None:
        self.state = JournalState()
        self.requests: dict[int, _Request] = {}
        self.lost: list[str] = []
        self._orphans: set[int] = set()  # request indices with records, but without a submission

    def take(self, record: Record) -> None:
        match record:
            case RequestAccepted(facts):
                self.requests[facts.request_index] = _Request(record)
                self._orphans.discard(facts.request_index)
            case RequestsForgotten(request_indices):
                for request_index in unpack_int32(request_indices, "request_indices").tolist():
                    self.requests.pop(request_index, None)
                    self._orphans.discard(request_index)
            case RequestEnded(request_index) if request_index not in self.requests:
                self._orphans.add(request_index)
            case RequestOutput(request_index, start, tokens, logprobs=rows):
                self._add(request_index, start, tokens, rows)
            case TokensAppended():
                self._take_tokens(record)
            case RequestPlaced(placement=number) | RequestHandedOver(transfer_id=number):
                self.state.placements = max(self.state.placements, number)
        if not isinstance(record, RequestPlaced | RequestHandedOver):
            self.state.note(record)

    def _take_tokens(self, news: TokensAppended) -> None:
        columns = [unpack_int32(it, "news") for it in (news.request_indices, news.starts, news.counts)]
        logprobs, at = unpack_logprobs(news.logprobs, columns[2]), 0
        entries = zip(*(column.tolist() for column in columns), strict=True)
        for entry, (request_index, start, count) in enumerate(entries):
            rows = b"" if logprobs is None else logprobs.of(entry).tobytes()
            self._add(request_index, start, news.tokens[4 * at : 4 * (at + count)], rows)
            at += count

    def _add(self, request_index: int, start: int, tokens: bytes, rows: bytes) -> None:
        if request_index not in self.requests:
            self._orphans.add(request_index)
        elif tokens:
            self.requests[request_index].pieces.append((start, tokens, rows))

    def finish(self) -> Salvaged:
        state = self.state
        self.lost += [
            f"the request of index {request_index}: its submission is gone" for request_index in sorted(self._orphans)
        ]
        begun = SummaryBegun(
            state.arrivals, state.placements + PLACEMENTS_SKIPPED, (), (), tuple(state.drains.values())
        )
        by_arrival = sorted(self.requests.items(), key=lambda item: item[1].accepted.facts.arrival)
        newest = {it.accepted.facts.request_id: request_index for request_index, it in by_arrival}
        kept = [record for request_index in sorted(newest.values()) for record in self._records_of(request_index)]
        ended = sum(isinstance(it, RequestEnded) for it in kept)
        live = sum(isinstance(it, RequestAccepted) for it in kept) - ended
        tokens = sum(len(it.tokens) // 4 for it in kept if isinstance(it, RequestOutput))
        return Salvaged((begun, *kept, SummaryEnded()), live, ended, tokens, tuple(self.lost))

    def _records_of(self, request_index: int) -> list[Record]:
        request, record = self.requests[request_index], self.state.requests[request_index]
        (output, rows, is_whole), ended = request.output(), record.ended
        name, tokens = f"request {request.accepted.facts.request_id}", len(output) // 4
        if ended is not None and tokens != ended.generated_tokens:
            self.lost.append(f"{name}, which has ended: {tokens} of {ended.generated_tokens} tokens are left")
            return []
        if not is_whole:
            self.lost.append(f"{name}: tokens from position {tokens} on")
        outputs: list[Record] = [RequestOutput(request_index, 0, output, 0, rows)] if output else []
        return [request.accepted, *facts_of(record), *outputs, *([ended] if ended else [])]


def rebuild(rows: Sequence[StoredRecord]) -> Salvaged:
    """Salvage `rows`, which must be whole and in the order of their numbers."""
    heads = [head for row in rows if row.head is not None and (head := unpack(row.head))]
    begin = heads[-1].begin if heads else 0
    rebuilding = _Rebuilding()
    for row in rows:
        if row.request_index is not None or row.number >= begin:
            for record in decode_all(row.body):
                rebuilding.take(record)
    return rebuilding.finish()


# ---------------------------------------------------------------- on disk


class Check(NamedTuple):
    """Result of a check: the newest head, the damages, and what `salvage` would keep."""

    head: Head | None
    damages: tuple[str, ...]
    salvaged: Salvaged


def check(path: Path) -> Check:
    """Check the journal at `path`, without changing it. Raises ConfigError, also when a coordinator has it open."""
    with _held(path) as mark:
        return _check(path, mark)


def salvage(path: Path) -> tuple[Check, Path | None]:
    """Replace a damaged journal by one of what is whole; its files are moved to the returned directory.

    None: the journal is whole and was not changed. Raises ConfigError.
    """
    with _held(path) as mark:
        found = _check(path, mark)
        if not found.damages:
            return found, None
        draft = path.with_name(path.name + ".salvaged")
        aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}")
        try:
            _write_draft(draft, found.salvaged)
            aside.mkdir(mode=0o700)
            for file in (*files_of(path)[1:], path):  # the journal last: without it nothing starts
                with suppress(FileNotFoundError):
                    os.rename(file, aside / file.name)
            os.rename(head_path(draft), head_path(path))
            os.rename(draft, path)
            sync_directory(path)
        except OSError as error:
            raise unusable(path, str(error)) from error
        return found, aside


@contextmanager
def _held(path: Path) -> Iterator[Mark | None]:
    """Hold the journal's lock, if its mark exists; gives the mark. Raises ConfigError."""
    try:
        check_private(path)
        mark = Mark(path, is_kept=False) if head_path(path).exists() else None
    except BlockingIOError as error:
        raise unusable(path, "a coordinator has it open", "stop it first: hisparse stop --deadline 0") from error
    except OSError as error:
        raise unusable(path, str(error)) from error
    try:
        if not path.exists() and mark is None:
            raise unusable(path, "it does not exist", "name the file that coordinator.journal names")
        yield mark
    finally:
        if mark is not None:
            mark.close()


def _check(path: Path, mark: Mark | None) -> Check:
    try:
        contents, _, damages = inspect(path, mark)
        rows: dict[int, StoredRecord] = {}
        for with_log in (False, True):
            rows |= _whole_rows(path, with_log=with_log)
    except OSError as error:
        raise unusable(path, str(error)) from error
    head = contents.head if contents.head.commits else None
    return Check(head, damages, rebuild([rows[number] for number in sorted(rows)]))


def _whole_rows(path: Path, *, with_log: bool) -> dict[int, StoredRecord]:
    try:
        with closing(open_read_only(path, with_log=with_log)) as connection:
            return {row.number: row for row in read_rows(connection, []) if row.is_whole}
    except (FileNotFoundError, *SQL_ERRORS):
        return {}
    finally:
        drop_index(path)


def _write_draft(draft: Path, salvaged: Salvaged) -> None:
    for file in files_of(draft):
        file.unlink(missing_ok=True)
    store = open_store(draft, JournalCounters())
    try:
        for start in range(0, len(salvaged.records), RECORDS_EACH):
            store.write_now(salvaged.records[start : start + RECORDS_EACH])
    except JournalError as error:
        raise unusable(draft, str(error), "make room on its disk") from error
    finally:
        store.close()
