"""The journal: facts are written down before anybody acts on them. One actor, one store, group commit.

    append ──► pending ──┐
                         ├── cut ──► store.write, in its thread ──► commits are done, tokens may be delivered
    tokens arrived ──────┘   ▲                    │
                             └──── the next one ──┘

`append` takes records in order and never waits; the Commit that it returns is waited for by whoever must not go on
before they are durable: a command that gives memory (I4), the answer to a submission or a command, the last word on a
request. While the store writes one group the next one gathers, so the slower the disk, the larger the groups. Groups
begin at least INTERVAL_S apart, which bounds what commits cost on a fast disk and is all that is waited for company.

Tokens are not appended: a group takes whatever the token log has by then, in one row of arrays, ahead of its other
records. So a record never becomes durable before the tokens on which it was decided, and nobody is woken per token.
While a summary is under way (coordinator.journal.summary), a group takes some of that too, behind its other records.

When the store fails (a full disk, a failing fsync) the group is tried again every RETRY_S until it succeeds, and
`failing` says why: new work is refused with that. Running work goes on: workers decode on the pages they hold, and
nothing is granted, acknowledged or delivered that is not durable. The store keeps a reserve for that time
(coordinator.journal.store), so that it is long.

Rejected: a commit per record (as many fsyncs as tokens); carrying on without the disk (what was granted or delivered
then would be forgotten in a crash, and pages would be given out twice).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

import trio

from coordinator.actor import Reply
from coordinator.journal.records import LedgerChanged, PoolOpened, Record, tokens_of
from coordinator.journal.state import JournalState
from coordinator.journal.summary import Summarizing
from coordinator.memory.changes import Change
from coordinator.memory.ledger import Ledger
from coordinator.tokens.token_log import News, TokenLog
from metrics.state import JournalCounters
from protocol.errors import InternalError, Unavailable
from protocol.logs import fields, logger

#: Least time between the beginnings of two groups.
INTERVAL_S: Final = 0.002
#: How soon a group that could not be written is tried again.
RETRY_S: Final = 0.5
#: Records that wait; those who append wait for their commits, so only a defect gets here.
PENDING_MAX: Final = 262_144
#: Longest that the acknowledgement of a submission or a command waits for its commit.
COMMIT_LIMIT_S: Final = 30.0

T = TypeVar("T")

log = logger("coordinator.journal.journal")


class JournalError(Exception):
    """The store could not write, and nothing of the group is durable as far as anybody may rely on."""


class JournalStore(Protocol):
    """Where records lie. Calls come one at a time."""

    async def load(self) -> list[Record]:
        """Every record that was committed and not replaced since, in order. Raises JournalError."""

    async def write(self, records: Sequence[Record]) -> None:
        """Make all of them durable, in order, or none: raises JournalError. Not cancellable. No records: find out
        whether the store is still `short`."""

    @property
    def short(self) -> str:
        """Why no new work should be taken although writing succeeds; empty: it may."""

    @property
    def wants_summary(self) -> bool:
        """Whether so much was written since the last SummaryBegun that another would save room."""

    def close(self) -> None: ...


class _Group:
    """Records of one transaction, and who waits for its end since `began`."""

    __slots__ = ("answers", "began", "committed", "records")

    def __init__(self) -> None:
        self.began = 0.0
        self.records: list[Record] = []
        self.committed = trio.Event()
        self.answers: list[tuple[Reply[Any], Any, str]] = []

    def end(self) -> None:
        """It is durable."""
        self.committed.set()
        for reply, value, _ in self.answers:
            reply.set(value)
        self.answers.clear()

    def give_up(self) -> None:
        """It may become durable, but nobody is left waiting for it."""
        for reply, _, what in self.answers:
            reply.fail(
                Unavailable(
                    f"{what}, but the journal has not written it for {COMMIT_LIMIT_S:g} s",
                    field="coordinator.journal",
                    remedy="make room on its disk; then ask again, under the same request id",
                )
            )
        self.answers.clear()


class Commit:
    """Records that are durable, or will be. Cheap to drop when nobody waits for it."""

    __slots__ = ("_group",)

    def __init__(self, group: _Group | None = None) -> None:
        self._group = group

    @property
    def done(self) -> bool:
        return self._group is None or self._group.committed.is_set()

    async def wait(self) -> None:
        """Until they are durable; at once, without a checkpoint, when they are. Cancelled: they may become so."""
        if self._group is not None and not self._group.committed.is_set():
            await self._group.committed.wait()

    def answer(self, reply: Reply[T], value: T, what: str) -> None:
        """Set `reply` once they are durable; after COMMIT_LIMIT_S fail it with Unavailable, naming `what` was done."""
        if self._group is None or self._group.committed.is_set():
            reply.set(value)
        else:
            self._group.answers.append((reply, value, what))


DONE: Final = Commit()


class Journal(Protocol):
    """What the actors need of it."""

    @property
    def is_kept(self) -> bool:
        """Whether anything survives this process."""

    @property
    def failing(self) -> str:
        """Why new work is to be refused; empty: it need not be."""

    @property
    def book(self) -> JournalState:
        """What the records so far amount to; `ledgers` in it are the live ones."""

    def summarize_if_long(self) -> None:
        """Begin to replace what was written by a summary, if that saves enough. Only between two turns of the
        Scheduler, when no change of a ledger is under way."""

    def append(self, records: Sequence[Record]) -> Commit:
        """Write `records` behind all that was appended before. No records: what was, and tokens that arrived."""

    def append_changes(self, node: str, changes: Sequence[Change], notes: Sequence[Record]) -> Commit:
        """Write the changes of a node's ledger, and `notes` behind them, in one commit."""

    def open_pool(self, opened: PoolOpened) -> Ledger:
        """Write that a node has a new pool; returns its ledger, which is empty and from now on in `book`."""

    def tokens_arrived(self) -> None:
        """The token log has news."""


class NoJournal:
    """`--journal none`: everything counts at once, and nothing is left of it after a crash."""

    is_kept = False
    failing = ""

    def __init__(self, on_tokens: Callable[[], None] = lambda: None) -> None:
        self.book = JournalState()
        self._on_tokens = on_tokens

    def summarize_if_long(self) -> None:
        return

    def append(self, records: Sequence[Record]) -> Commit:
        return DONE

    def append_changes(self, node: str, changes: Sequence[Change], notes: Sequence[Record]) -> Commit:
        return DONE

    def open_pool(self, opened: PoolOpened) -> Ledger:
        return self.book.open_pool(opened)

    def tokens_arrived(self) -> None:
        self._on_tokens()


class GroupCommit:
    """The actor. `on_tokens` is called when tokens may be delivered; run it at Level.JOURNAL."""

    name = "journal"
    is_kept = True

    def __init__(
        self,
        store: JournalStore,
        book: JournalState,
        token_log: TokenLog,
        *,
        on_tokens: Callable[[], None],
        counters: JournalCounters | None = None,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        self.book = book
        self._store = store
        self._token_log = token_log
        self._on_tokens = on_tokens
        self._counters = counters or JournalCounters()
        self._clock = clock
        self._pending = _Group()
        self._writing = self._pending
        self._news = trio.Event()
        self._closing = False
        self._error = ""
        self._summarizing: Summarizing | None = None
        self._summary = DONE  # the last group of the last summary

    @property
    def is_summarizing(self) -> bool:
        return self._summarizing is not None or not self._summary.done

    @property
    def failing(self) -> str:
        return self._error or self._store.short

    def append(self, records: Sequence[Record]) -> Commit:
        pending = self._pending
        if len(pending.records) + len(records) > PENDING_MAX:
            raise InternalError("records wait for the journal", field="PENDING_MAX", value=PENDING_MAX)
        for record in records:
            self.book.note(record)
        if not pending.answers:
            pending.began = self._clock()
        pending.records += records
        self._news.set()
        return Commit(pending)

    def append_changes(self, node: str, changes: Sequence[Change], notes: Sequence[Record]) -> Commit:
        return self.append([LedgerChanged(node, tuple(changes)), *notes])

    def open_pool(self, opened: PoolOpened) -> Ledger:
        self.append([opened])
        return self.book.open_pool(opened)

    def summarize_if_long(self) -> None:
        if self._store.wants_summary and not self.is_summarizing:
            self._summarizing = Summarizing(self.book, self._token_log)
            self._pending.records.append(self._summarizing.begun)
            self._news.set()

    def tokens_arrived(self) -> None:
        self._news.set()

    def close(self) -> None:
        """Write what is there, then end. Idempotent."""
        self._closing = True
        self._news.set()

    def history(self) -> tuple[str, ...]:
        return (f"{len(self._pending.records)} records pending", f"failing: {self.failing or 'no'}")

    async def run(self) -> None:
        """Until closed. Cancelled: what was not committed is lost, and nobody was told otherwise."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._give_up_overdue)
            await self._commit_groups()
            nursery.cancel_scope.cancel()

    async def _give_up_overdue(self) -> None:
        """Whoever waits for a disk that fails, or hangs, is told in the end (I8)."""
        while True:
            await trio.sleep(COMMIT_LIMIT_S / 4)
            for group in (self._writing, self._pending):
                if group.answers and self._clock() - group.began > COMMIT_LIMIT_S:
                    group.give_up()

    async def _commit_groups(self) -> None:
        while True:
            with trio.move_on_after(RETRY_S if self._store.short else math.inf):
                await self._news.wait()
            began = self._clock()
            self._news = trio.Event()
            await self._commit_group()
            if self._closing and not self._news.is_set():
                return
            if not self._closing:
                await trio.sleep_until(began + INTERVAL_S)

    async def _commit_group(self) -> None:
        news = self._cut()
        group = self._writing
        if group.records or self._store.short:
            await self._write(group.records)
        group.end()
        if news is not None:
            self._token_log.commit(news)
            self._on_tokens()

    def _cut(self) -> News | None:
        """End the pending group, with the tokens that it returns ahead of its records."""
        group, self._pending = self._pending, _Group()
        self._writing = group
        news = self._token_log.take_news()
        if news is not None:
            group.records.insert(0, tokens_of(news))
        if self._summarizing is not None:
            group.records += self._summarizing.more()
            if self._summarizing.is_over:
                self._summarizing, self._summary = None, Commit(group)
        return news

    async def _write(self, group: Sequence[Record]) -> None:
        """Until it succeeds."""
        while True:
            began = self._clock()
            try:
                await self._store.write(group)
            except JournalError as error:
                self._note_failure(str(error))
                await trio.sleep(RETRY_S)
            else:
                self._note_success(self._clock() - began, len(group))
                return

    def _note_failure(self, error: str) -> None:
        self._counters.errors += 1
        self._counters.last_error = error
        if error != self._error:
            log.error("cannot write; new work is refused until it can", extra=fields(error=error))
        self._error = error

    def _note_success(self, seconds: float, records: int) -> None:
        if self._error:
            log.warning("writes again", extra=fields(after=self._error))
        self._error = ""
        self._counters.commits += 1
        self._counters.records += records
        self._counters.commit_s.observe(seconds)


def check_writes(journal: Journal) -> None:
    """Raise Unavailable, with the reason, while no new work may be taken."""
    if journal.failing:
        raise Unavailable(
            f"the journal cannot take more: {journal.failing}",
            field="coordinator.journal",
            remedy="put right what it says, or make room; running requests go on, and this can be asked for again then",
        )
