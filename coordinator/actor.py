"""Actors: one trio task, one bounded mailbox, one pure state.

Rules, and why:

- `tell` never blocks, so no cycle of tells can deadlock. It is synchronous: the messages that one actor tells another
  arrive in the order of the calls.
- `ask` waits for a reply, so asks go one way only: Gateway -> Scheduler -> HostPool -> Journal.
- Every mailbox is bounded (I8). A full mailbox refuses. An ask raises CapacityError, which its user can act on. A tell
  raises MailboxFullError, which ends the process: tells come from a bounded number of requests, workers and timers, so
  only a defect fills a mailbox with them. For a peer that may flood (a worker's events), the caller checks `room`.
- Crash-only: an exception that leaves an actor is logged with the actor's history and ends the process. An actor whose
  state may be half changed is never restarted; the next process recovers from the journal.
- An actor takes messages in batches: a wake-up costs about 10 us, a message in a batch a tenth of that.

Rejected: trio memory channels (one message and one checkpoint per receive, two objects per actor); a task per
message (order is lost); restarting supervisors (they hide defects and need every actor to survive its peers' loss).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from enum import IntEnum
from typing import Final, Generic, Protocol, TypeVar

import outcome
import trio

from protocol.errors import CapacityError, InternalError, Unavailable
from protocol.logs import fields, logger

#: Longest that one level of actors may take to drain its mailboxes at shutdown; then it is cancelled.
SHUTDOWN_LEVEL_S: Final = 5.0

M = TypeVar("M")
T = TypeVar("T")

log = logger("coordinator.actor")


class MailboxFullError(InternalError):
    """More messages than the mailbox's bound: a defect in their sender."""


class Mailbox(Generic[M]):
    """A bounded FIFO with any number of writers and one reader."""

    def __init__(self, owner: str, capacity: int) -> None:
        self.owner = owner
        self.capacity = capacity
        self._messages: deque[M] = deque()
        self._reader: trio.lowlevel.Task | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def closed(self) -> bool:
        return self._closed

    def put(self, message: M) -> None:
        """Append and wake the reader. Raises MailboxFullError. A closed mailbox drops it: the owner has stopped."""
        if self._closed:
            return
        if len(self._messages) >= self.capacity:
            raise MailboxFullError(
                f"mailbox of {self.owner} holds {self.capacity} messages", field="mailbox", value=self.owner
            )
        self._messages.append(message)
        self._wake()

    def close(self) -> None:
        """Accept no more messages. The reader still gets those in the mailbox, then an empty list. Idempotent."""
        self._closed = True
        self._wake()

    async def take(self, batch_max: int) -> list[M]:
        """The next 1 to `batch_max` messages, in order; an empty list once closed and empty.

        Cancelled: no message was taken. There is no checkpoint after the first message leaves the mailbox.
        """
        if self._messages or self._closed:
            await trio.lowlevel.checkpoint()
        else:
            await self._park()
        messages = self._messages
        return [messages.popleft() for _ in range(min(batch_max, len(messages)))]

    def _wake(self) -> None:
        if self._reader is not None:
            reader, self._reader = self._reader, None
            trio.lowlevel.reschedule(reader, outcome.Value(None))

    async def _park(self) -> None:
        if self._reader is not None:
            raise InternalError(f"mailbox of {self.owner} has a second reader")
        self._reader = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._reader = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)


class Reply(Generic[T]):
    """The reply of one ask. The actor that handles the message sets or fails it, exactly once.

    `wait` gives the result away: a Reply that kept an error would be in a cycle with the frames of its traceback, which
    hold the message. Garbage collection would find the cycle after minutes (basics.gc_policy), and messages have up to
    16 MiB.
    """

    __slots__ = ("_event", "_result")

    def __init__(self) -> None:
        self._event = trio.Event()
        self._result: outcome.Outcome[T] | None = None

    def set(self, value: T) -> None:
        self._finish(outcome.Value(value))

    def fail(self, error: Exception) -> None:
        self._finish(outcome.Error(error))

    async def wait(self) -> T:
        """Return the value or raise the error; call once. Cancelled: the change that was asked for may still happen."""
        await self._event.wait()
        return self._take().unwrap()

    def _take(self) -> outcome.Outcome[T]:
        result, self._result = self._result, None
        assert result is not None
        return result

    def _finish(self, result: outcome.Outcome[T]) -> None:
        if self._event.is_set():
            raise InternalError("a reply was given twice")
        self._result = result
        self._event.set()


class Actor(ABC, Generic[M]):
    """Base of every actor. Subclasses keep a pure state and implement `handle`."""

    def __init__(self, name: str, *, mailbox_max: int, batch_max: int) -> None:
        self.name = name
        self._batch_max = batch_max
        self._mailbox: Mailbox[M] = Mailbox(name, mailbox_max)

    @abstractmethod
    async def handle(self, batch: list[M]) -> None:
        """Handle messages in order. An exception that leaves it ends the process."""

    def history(self) -> tuple[str, ...]:
        """Recent history, one line each, logged when the actor fails."""
        return ()

    def tell(self, message: M) -> None:
        """Put `message` into the mailbox; never blocks. Raises MailboxFullError."""
        self._mailbox.put(message)

    def room(self) -> int:
        """Messages that still fit; 0 when closed."""
        return 0 if self._mailbox.closed else self._mailbox.capacity - len(self._mailbox)

    async def ask(self, make: Callable[[Reply[T]], M]) -> T:
        """Send `make(reply)` and wait for the reply. Raises the error that the handler set.

        Raises Unavailable when the actor has stopped, CapacityError when its mailbox is full. Cancelled after sending:
        the change may still happen.
        """
        if self._mailbox.closed:
            raise Unavailable(f"{self.name} has stopped", remedy="reconnect later")
        if not self.room():
            raise CapacityError(f"{self.name} has {self._mailbox.capacity} messages waiting", remedy="retry later")
        reply: Reply[T] = Reply()
        self._mailbox.put(make(reply))
        return await reply.wait()

    def close(self) -> None:
        """Handle the messages in the mailbox, then end. Idempotent."""
        self._mailbox.close()

    async def run(self) -> None:
        """The actor's task, until closed. Subclasses with timers extend it."""
        while batch := await self._mailbox.take(self._batch_max):
            await self.handle(batch)


class Runs(Protocol):
    """A task that a Supervisor starts and stops: an Actor, or a task that reads something else than a mailbox."""

    @property
    def name(self) -> str: ...
    async def run(self) -> None: ...
    def close(self) -> None: ...
    def history(self) -> tuple[str, ...]: ...


class Level(IntEnum):
    """Order of shutdown: a level stops before the levels that it sends messages to."""

    GATEWAY = 0
    SCHEDULER = 1
    REQUEST = 2
    WORKER_LINK = 3
    HOST_POOL = 4
    JOURNAL = 5


class Supervisor:
    """Runs actors in one nursery per level, fails with the first that fails, stops them level by level.

    There is no cancel scope per actor: there are as many actors as requests, and a scope costs 4 us at each submission.
    """

    def __init__(self, nurseries: Mapping[Level, trio.Nursery]) -> None:
        self._nurseries = nurseries
        self._running: dict[Level, dict[Runs, None]] = {level: {} for level in Level}
        self._emptied = {level: trio.Event() for level in Level}

    def start(self, actor: Runs, level: Level) -> None:
        """Run `actor` in a new task until it ends, fails, or its level is shut down."""
        self._running[level][actor] = None
        self._nurseries[level].start_soon(self._run, actor, level, name=actor.name)

    def count(self, level: Level) -> int:
        return len(self._running[level])

    async def shutdown(self) -> None:
        """Close each level in order; cancel actors that have not drained after SHUTDOWN_LEVEL_S. Call once."""
        for level in Level:
            for actor in self._running[level]:
                actor.close()
            with trio.move_on_after(SHUTDOWN_LEVEL_S):
                await self._wait_empty(level)
            for actor in self._running[level]:
                log.warning("actor cancelled", extra=fields(actor=actor.name, not_drained_within_s=SHUTDOWN_LEVEL_S))
                self._nurseries[level].cancel_scope.cancel()
            await self._wait_empty(level)

    async def _wait_empty(self, level: Level) -> None:
        while self._running[level]:
            self._emptied[level] = trio.Event()
            await self._emptied[level].wait()

    async def _run(self, actor: Runs, level: Level) -> None:
        try:
            await actor.run()
        except Exception:
            log.exception("actor failed", extra=fields(actor=actor.name, history="; ".join(actor.history())))
            raise
        finally:
            del self._running[level][actor]
            if not self._running[level]:
                self._emptied[level].set()


@asynccontextmanager
async def open_supervisor() -> AsyncIterator[Supervisor]:
    """A Supervisor for the time of the block; leaving the block cancels all actors that still run."""
    async with trio.open_nursery() as nursery:
        yield Supervisor(await nursery.start(_hold_levels))
        nursery.cancel_scope.cancel()


async def _hold_levels(task_status: trio.TaskStatus[dict[Level, trio.Nursery]]) -> None:
    """One nursery per level, nested, the level that stops first innermost.

    So a level has ended before the nursery closes in which it may start actors, even when all are cancelled at once.
    """
    async with AsyncExitStack() as stack:
        nurseries = {level: await stack.enter_async_context(trio.open_nursery()) for level in reversed(Level)}
        task_status.started(nurseries)
        await trio.sleep_forever()
