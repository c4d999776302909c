"""The journal: facts are durable before they take effect. One actor, one store, group commit.

    append ──► pending ──┐
                         ├── cut ──► store.write, in its thread ──► commits are done, tokens may be delivered
    tokens arrived ──────┘   ▲                    │
                             └──── the next one ──┘

`append` takes records in order and never waits. It returns a Commit, to wait for before an effect that needs durable
records: a command that grants memory (I4), the answer to a submission or a command, the Ended of a request. While the
store writes one group, the records of the next one gather: the slower the disk, the larger the groups. Groups begin at
least INTERVAL_S apart, which bounds the cost of commits on a fast disk; that is the only delay to gather records.

A turn of the Scheduler appends in several places and waits for nothing in between but a commit, so no group ends
within a turn: a request that finds room is accepted and placed in one.

Tokens are not appended. Each group takes the new tokens of the token log, in one row of arrays, ahead of its other
records. So a record never becomes durable before the tokens on which it was decided, and no task is woken per token.
While a summary is under way (coordinator.journal.summary), each group also takes some of its records, behind the
others.

When the store fails (a full disk, a failing fsync), the group is tried again every RETRY_S until it succeeds, and
`failing` gives the reason, with which new requests are refused. Running requests go on: workers decode on the pages
that they hold. Only durable records are granted, acknowledged or delivered. The store's reserve
(coordinator.journal.store) makes this time long.

Rejected: a commit per record (as many fsyncs as tokens); going on without the disk (a crash would forget grants and
deliveries, and pages would be granted twice).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

import trio

from basics.rooms import RoomUse
from coordinator.actor import Reply
from coordinator.journal.records import LedgerChanged, PoolOpened, Record, RequestAccepted, WorkerJoined, tokens_of
from coordinator.journal.state import JournalState, RequestRecord
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
#: Records of the pending group. Callers wait for their commits, so only a defect exceeds it.
PENDING_MAX: Final = 262_144
#: Longest wait of an acknowledgement of a submission or a command for its commit.
COMMIT_LIMIT_S: Final = 30.0

T = TypeVar("T")

log = logger("coordinator.journal.journal")


class JournalError(Exception):
    """The store could not write; treat no record of the group as durable."""


class JournalStore(Protocol):
    """A store of records. Calls are made one at a time."""

    async def load(self) -> list[Record]:
        """All records that were committed and not replaced since, in order. Raises JournalError."""

    async def write(self, records: Sequence[Record]) -> None:
        """Make all records durable, in order, or none and raise JournalError. Not cancellable.

        Without records: check whether the store is still `short`.
        """

    @property
    def short(self) -> str:
        """Why new requests should be refused although writes succeed; empty: they need not be."""

    @property
    def wants_summary(self) -> bool:
        """Return whether a new summary would save enough room, by the bytes written since the last SummaryBegun."""

    def close(self) -> None: ...


class _Group:
    """Records of one transaction, the calls that wait for it, and the replies that do since `began`."""

    __slots__ = ("answers", "began", "calls", "committed", "records")

    def __init__(self) -> None:
        self.began = 0.0
        self.records: list[Record] = []
        self.committed = trio.Event()
        self.calls: list[Callable[[], None]] = []
        self.answers: list[tuple[Reply[Any], Any, str]] = []

    def end(self) -> None:
        """The group is durable: make its calls, set its replies."""
        self.committed.set()
        for then in self.calls:
            then()
        self.calls.clear()
        for reply, value, _ in self.answers:
            reply.set(value)
        self.answers.clear()

    def give_up(self) -> None:
        """Fail waiting replies with Unavailable; the records may still be committed."""
        for reply, _, what in self.answers:
            reply.fail(
                Unavailable(
                    f"{what}, but the journal has not written it for {COMMIT_LIMIT_S:g} s",
                    field="coordinator.journal",
                    remedy="make room on its disk; then repeat the call, with the same request id",
                )
            )
        self.answers.clear()


class Commit:
    """Records that are durable, or will be. Dropping it costs nothing."""

    __slots__ = ("_group",)

    def __init__(self, group: _Group | None = None) -> None:
        self._group = group

    @property
    def done(self) -> bool:
        return self._group is None or self._group.committed.is_set()

    async def wait(self) -> None:
        """Return once the records are durable; without a checkpoint if they are. Cancelled: they may become durable."""
        if self._group is not None and not self._group.committed.is_set():
            await self._group.committed.wait()

    def then(self, call: Callable[[], None]) -> None:
        """Call `call` once the records are durable, and all tokens that arrived before; at once if they are. It must
        not fail: what leaves it ends the Journal."""
        if self._group is None or self._group.committed.is_set():
            call()
        else:
            self._group.calls.append(call)

    def answer(self, reply: Reply[T], value: T, what: str) -> None:
        """Set `reply` once the records are durable; after COMMIT_LIMIT_S fail it with Unavailable.

        `what` describes what was done, for the error.
        """
        if self._group is None or self._group.committed.is_set():
            reply.set(value)
        else:
            self._group.answers.append((reply, value, what))


DONE: Final = Commit()


class Journal(ABC):
    """The journal as the other actors use it. `state` is what the records so far lead to; its `ledgers` are the live
    ones. `is_kept`: records outlive this process."""

    is_kept = True

    def __init__(self, state: JournalState) -> None:
        self.state = state

    @property
    @abstractmethod
    def failing(self) -> str:
        """Why new requests must be refused; empty: they need not be."""

    @abstractmethod
    def room_use(self) -> dict[str, RoomUse]:
        """Count the records that wait for the next commit."""

    @abstractmethod
    def append(self, records: Sequence[Record]) -> Commit:
        """Write `records` behind all earlier ones. Without records: a Commit of earlier records and arrived tokens."""

    @abstractmethod
    def tokens_arrived(self) -> None:
        """The token log has new tokens or durable rows."""

    def accept(self, accepted: RequestAccepted, live: RequestRecord) -> Commit:
        """Write that a request was accepted; `live` is what `state` has of it from now on."""
        commit = self.append([accepted])
        self.state.requests[live.request_index] = live
        return commit

    def append_changes(self, node: str, changes: Sequence[Change], notes: Sequence[Record]) -> Commit:
        """Write the changes of a node's ledger, then `notes`, in one commit."""
        return self.append([LedgerChanged(node, tuple(changes)), *notes])

    def open_pool(self, opened: PoolOpened) -> Ledger:
        """Write that a node has a new pool. Returns its empty ledger, which is in `state` from now on."""
        self.append([opened])
        return self.state.open_pool(opened)

    def summarize_if_long(self) -> None:
        """Begin a summary, which replaces earlier records, if that saves enough.

        Call only between two turns of the Scheduler, when no change of a ledger is in progress.
        """
        return


class NoJournal(Journal):
    """`--journal none`: every record counts as durable at once; a crash loses all requests."""

    is_kept = False
    failing = ""

    def __init__(self, on_tokens: Callable[[], None] = lambda: None) -> None:
        super().__init__(JournalState())
        self._on_tokens = on_tokens

    def room_use(self) -> dict[str, RoomUse]:
        return {"journal_records": RoomUse(0, PENDING_MAX)}

    def append(self, records: Sequence[Record]) -> Commit:
        for record in records:
            if not isinstance(record, WorkerJoined):  # epochs are known for a restart alone
                self.state.note(record)
        return DONE

    def tokens_arrived(self) -> None:
        self._on_tokens()


class GroupCommit(Journal):
    """The Journal actor. `on_tokens` is called when tokens were committed and may be delivered."""

    name = "journal"

    def __init__(
        self,
        store: JournalStore,
        state: JournalState,
        token_log: TokenLog,
        *,
        on_tokens: Callable[[], None],
        counters: JournalCounters | None = None,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        super().__init__(state)
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
        self._summary = DONE  # commit of the last group of the last summary

    @property
    def is_summarizing(self) -> bool:
        return self._summarizing is not None or not self._summary.done

    @property
    def failing(self) -> str:
        return self._error or self._store.short

    def room_use(self) -> dict[str, RoomUse]:
        return {"journal_records": RoomUse(len(self._pending.records), PENDING_MAX)}

    def append(self, records: Sequence[Record]) -> Commit:
        group = self._pending
        if len(group.records) + len(records) > PENDING_MAX:
            raise InternalError("records wait for the journal", field="PENDING_MAX", value=PENDING_MAX)
        for record in records:
            self.state.note(record)
        if not group.answers:
            group.began = self._clock()
        group.records += records
        self._news.set()
        return Commit(group)

    def summarize_if_long(self) -> None:
        if self._store.wants_summary and not self.is_summarizing:
            self._summarizing = Summarizing(self.state, self._token_log)
            self._pending.records.append(self._summarizing.begun)
            self._news.set()

    def tokens_arrived(self) -> None:
        self._news.set()

    def close(self) -> None:
        """Write the pending records, then end. Idempotent."""
        self._closing = True
        self._news.set()

    def history(self) -> tuple[str, ...]:
        return (f"{len(self._pending.records)} records pending", f"failing: {self.failing or 'no'}")

    async def run(self) -> None:
        """Commit groups, until closed. Cancelled: uncommitted records are lost; none of them was acknowledged."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._give_up_overdue)
            await self._commit_groups()
            nursery.cancel_scope.cancel()

    async def _give_up_overdue(self) -> None:
        """Fail replies that have waited for COMMIT_LIMIT_S, as when the disk fails or hangs (I8)."""
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
        if news is not None:
            self._token_log.commit(news)
            self._on_tokens()
        group.end()

    def _cut(self) -> News | None:
        """End the pending group, with new tokens, which are returned, ahead of its records."""
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
        """Write `group`, again until it succeeds."""
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
            log.error("cannot write; new requests are refused until it can", extra=fields(error=error))
        self._error = error

    def _note_success(self, seconds: float, records: int) -> None:
        if self._error:
            log.warning("writes again", extra=fields(after=self._error))
        self._error = ""
        self._counters.commits += 1
        self._counters.records += records
        self._counters.commit_s.observe(seconds)


def check_writes(journal: Journal) -> None:
    """Raise Unavailable, with the reason, while new requests must be refused."""
    if journal.failing:
        raise Unavailable(
            f"the journal takes no new requests: {journal.failing}",
            field="coordinator.journal",
            remedy="correct the cause, or make room on its disk, and retry; running requests go on",
        )
