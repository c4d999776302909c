"""FakeStore: a journal's store in memory, whose disk fails when told to, and forgets what was not committed."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from coordinator.journal.journal import JournalError
from coordinator.journal.records import LASTING, Record, RequestsForgotten, SummaryBegun, SummaryEnded, decode, encode
from protocol.arrays import unpack_int32


def kept_of(records: Sequence[Record]) -> list[Record]:
    """What a store still has of `records`: a Forgotten deletes those of its slots, a SummaryEnded all before its
    SummaryBegun but what outlives it."""
    kept: list[Record] = []
    begun = 0
    for record in records:
        if isinstance(record, RequestsForgotten):
            request_indices = set(unpack_int32(record.request_indices, "request_indices").tolist())
            before, since = (
                [it for it in part if not (isinstance(it, LASTING) and it.request_index in request_indices)]
                for part in (kept[:begun], kept[begun:])
            )
            kept, begun = before + since, len(before)
        elif isinstance(record, SummaryBegun):
            begun = len(kept)
        elif isinstance(record, SummaryEnded):
            before = [it for it in kept[:begun] if isinstance(it, LASTING)]
            kept, begun = before + kept[begun:], len(before)
        kept.append(record)
    return kept


class FakeStore:
    """`commit_s` is how long a group takes on trio's clock. While `error` is set every write fails with it. Each group
    that was committed is in `groups`; a store made of them is what a restarted coordinator finds."""

    def __init__(self, groups: Sequence[Sequence[Record]] = (), *, commit_s: float = 0.0) -> None:
        self.groups: list[list[Record]] = [list(group) for group in groups]
        self.commit_s = commit_s
        self.error = ""
        self.short = ""
        self.wants_summary = False
        self.attempts = 0

    @property
    def records(self) -> list[Record]:
        return kept_of([record for group in self.groups for record in group])

    async def load(self) -> list[Record]:
        await trio.lowlevel.checkpoint()
        return self.records

    async def write(self, records: Sequence[Record]) -> None:
        self.attempts += 1
        await trio.sleep(self.commit_s)
        if self.error:
            raise JournalError(self.error)
        self.groups.append([decode(encode(record)) for record in records])

    def close(self) -> None:
        """Nothing to let go of."""
