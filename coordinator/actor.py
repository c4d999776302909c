"""Actors: one bounded mailbox, one pure state, and one writer of it. An actor has a trio task, or another one steps it.

Rules, and why:

- `tell` never blocks, so no cycle of tells can deadlock. It is synchronous: the messages that one actor tells another
  arrive in the order of the calls.
- `ask` waits for a reply, so asks go one way only, from the Gateway to the Scheduler.
- Every mailbox is bounded (I8). A full mailbox refuses. An ask raises CapacityError, which its user can act on. A tell
  raises MailboxFullError, which ends the process: tells come from a bounded number of requests, workers and timers, so
  only a defect fills a mailbox with them. For a peer that may flood (a worker's events), the caller checks `room`.
- Crash-only: an exception that leaves an actor is logged with the actor's history and ends the process. An actor whose
  state may be half changed is never restarted; the next process recovers from the journal.
- An actor takes messages in batches: a wake-up costs about 10 us, a message in a batch a tenth of that.
- An actor that is *stepped* has no task: the task of the actor that steps it handles its messages, before each of its
  own batches and whenever it calls `step_ready`. Inboxes are taken in the order in which their first message arrived.
  What a step returns waits in `returned` for the next batch of the actor that steps, which handles it first.
  `handle` waits for nothing there, so that a step is whole; one that waits is a defect. Where what follows needs the
  answer, the task that steps an actor *calls* it: then no message is put anywhere. There are as many stepped actors as
  requests, and a task each would cost 20 us at each submission and 10 us at each message.

Rejected: trio memory channels (one message and one checkpoint per receive, two objects per actor); a task per
message (order is lost); restarting supervisors (they hide defects and need every actor to survive its peers' loss).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Generic, Protocol, TypeVar

import outcome
import trio

from protocol.errors import CapacityError, InternalError, Unavailable
from protocol.logs import fields, logger

#: Longest that one actor may take to drain its mailbox at shutdown; then it is cancelled.
SHUTDOWN_ACTOR_S: Final = 5.0

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
        self.closed = False
        self._messages: deque[M] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: M) -> None:
        """Append a message. Raises MailboxFullError. A closed mailbox drops it: the owner has stopped."""
        if self.closed:
            return
        if len(self._messages) >= self.capacity:
            raise MailboxFullError(
                f"mailbox of {self.owner} holds {self.capacity} messages", field="mailbox", value=self.owner
            )
        self._messages.append(message)

    def pop(self, batch_max: int) -> list[M]:
        """Take the first messages, at most `batch_max`, in order."""
        messages = self._messages
        return [messages.popleft() for _ in range(min(batch_max, len(messages)))]


class Parking:
    """Place where one task waits to be woken. A wake-up while no task waits is lost."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._task: trio.lowlevel.Task | None = None

    @property
    def is_taken(self) -> bool:
        return self._task is not None

    def wake(self) -> None:
        if self._task is not None:
            task, self._task = self._task, None
            trio.lowlevel.reschedule(task, outcome.Value(None))

    async def wait(self) -> None:
        """Return once woken. Raises InternalError when another task waits here."""
        if self._task is not None:
            raise InternalError(f"{self._owner} is run by a second task")
        self._task = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)


class Reply(Generic[T]):
    """The reply of one ask. The actor that handles the message sets or fails it, exactly once.

    `wait` and `value` give the result away: a Reply that kept an error would be in a cycle with the frames of its
    traceback, which hold the message. Garbage collection would find the cycle after minutes (basics.gc_policy), and
    messages have up to 16 MiB.
    """

    __slots__ = ("_event", "_is_given", "_result")

    def __init__(self) -> None:
        self._event: trio.Event | None = None
        self._is_given = False
        self._result: outcome.Outcome[T] | None = None

    def set(self, value: T) -> None:
        self._finish(outcome.Value(value))

    def fail(self, error: Exception) -> None:
        self._finish(outcome.Error(error))

    async def wait(self) -> T:
        """Return the value or raise the error; call once. Cancelled: the change that was asked for may still happen."""
        if not self._is_given:
            self._event = trio.Event()
            await self._event.wait()
        return self.value()

    def value(self) -> T:
        """Return the value or raise the error of a reply that was given; call once."""
        return self._take().unwrap()

    def _take(self) -> outcome.Outcome[T]:
        result, self._result = self._result, None
        assert result is not None
        return result

    def _finish(self, result: outcome.Outcome[T]) -> None:
        if self._is_given:
            raise InternalError("a reply was given twice")
        self._result, self._is_given = result, True
        if self._event is not None:
            self._event.set()


class Actor(ABC, Generic[M]):
    """Base of every actor. Subclasses keep a pure state and implement `handle`."""

    def __init__(self, name: str, *, mailbox_max: int, batch_max: int, stepped_by: Actor[Any] | None = None) -> None:
        """`stepped_by`: the actor whose task handles the messages; None: this one has a task, which calls `run`."""
        self.name = name
        self._batch_max = batch_max
        self._mailbox: Mailbox[M] = Mailbox(name, mailbox_max)
        self._stepped_by = stepped_by
        if stepped_by is None:
            self._parking = Parking(name)
            self._ready: deque[Actor[Any]] = deque()  # stepped ones with messages, each once, by their first message
            self.returned: list[Any] = []  # by steps, in order

    @abstractmethod
    async def handle(self, batch: list[M]) -> Sequence[object] | None:
        """Handle messages in order; an actor that is stepped may return facts. An exception that leaves it ends the
        process."""

    def history(self) -> tuple[str, ...]:
        """Recent history, one line each, logged when the actor fails."""
        return ()

    def tell(self, message: M) -> None:
        """Put `message` into the mailbox; never blocks. Raises MailboxFullError."""
        self._mailbox.put(message)
        if len(self._mailbox) == 1:
            if self._stepped_by is None:
                self._parking.wake()
            else:
                self._stepped_by._add_ready(self)

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
        self.tell(make(reply))
        return await reply.wait()

    def close(self) -> None:
        """Handle the messages in the mailbox, then end. Idempotent."""
        self._mailbox.closed = True
        if self._stepped_by is None:
            self._parking.wake()

    # ---------------------------------------------------------------- in the task

    async def run(self) -> None:
        """The actor's task, until closed. Subclasses with timers extend it.

        Cancelled: messages that wait are lost. There is no checkpoint between leaving the mailbox and `handle`.
        """
        while True:
            if self._mailbox or self._mailbox.closed or self._ready or self.returned:
                await trio.lowlevel.checkpoint()
            else:
                await self._parking.wait()
            self.step_ready()
            batch = self._mailbox.pop(self._batch_max)
            if batch or self.returned:
                await self.handle(batch)
            elif self._mailbox.closed:
                return

    def step_ready(self) -> None:
        """Have each stepped actor with messages handle a batch of them, one after the other, until none has any."""
        while self._ready:
            stepped = self._ready.popleft()
            self.returned += stepped._step(stepped._next_batch())

    def _add_ready(self, stepped: Actor[Any]) -> None:
        self._ready.append(stepped)
        self._parking.wake()

    def call(self, message: M) -> Sequence[object]:
        """Handle `message` at once, past the mailbox; return what `handle` returned.

        For the task that steps this actor. Raises InternalError when messages wait, which would come behind it.
        """
        if self._mailbox:
            raise InternalError("is called while messages wait", field="mailbox", value=self.name)
        return self._step([message])

    def _next_batch(self) -> list[M]:
        batch = self._mailbox.pop(self._batch_max)
        if self._mailbox and self._stepped_by is not None:
            self._stepped_by._add_ready(self)
        return batch

    def _step(self, batch: list[M]) -> Sequence[object]:
        try:
            return self._handle_at_once(batch)
        except Exception:
            log_failure(self)
            raise

    def _handle_at_once(self, batch: list[M]) -> Sequence[object]:
        step = self.handle(batch)
        try:
            step.send(None)
        except StopIteration as end:
            return end.value or ()
        step.close()
        raise InternalError(f"{self.name} waits, and has no task to wait in")


class Runs(Protocol):
    """A task that a Supervisor starts and stops: an Actor, or a task that reads something else than a mailbox."""

    @property
    def name(self) -> str: ...
    async def run(self) -> None: ...
    def close(self) -> None: ...
    def history(self) -> tuple[str, ...]: ...


def log_failure(actor: Runs) -> None:
    """Log the exception that leaves `actor`, with the actor's history."""
    log.exception("actor failed", extra=fields(actor=actor.name, history=_history_of(actor)))


def _history_of(actor: Runs) -> str:
    return "; ".join(actor.history())


class Supervisor:
    """Runs actors in one nursery, fails with the first that fails, stops them in the reverse order of their starts.

    So start an actor behind those that it sends messages to.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._running: list[tuple[Runs, trio.CancelScope, trio.Event]] = []

    def start(self, actor: Runs) -> None:
        """Run `actor` in a new task until it ends, fails, or is shut down."""
        running = actor, trio.CancelScope(), trio.Event()
        self._running.append(running)
        self._nursery.start_soon(self._run, *running, name=actor.name)

    async def shutdown(self) -> None:
        """Close one actor after the other; cancel each that has not drained after SHUTDOWN_ACTOR_S. Call once."""
        for actor, scope, ended in reversed(self._running):
            actor.close()
            with trio.move_on_after(SHUTDOWN_ACTOR_S):
                await ended.wait()
            if not ended.is_set():
                about = fields(actor=actor.name, not_drained_within_s=SHUTDOWN_ACTOR_S, history=_history_of(actor))
                log.warning("actor cancelled", extra=about)
                scope.cancel()
                await ended.wait()

    @staticmethod
    async def _run(actor: Runs, scope: trio.CancelScope, ended: trio.Event) -> None:
        try:
            with scope:
                await actor.run()
        except Exception:
            log_failure(actor)
            raise
        finally:
            ended.set()


@asynccontextmanager
async def open_supervisor() -> AsyncIterator[Supervisor]:
    """A Supervisor for the time of the block; leaving the block cancels all actors that still run."""
    async with trio.open_nursery() as nursery:
        yield Supervisor(nursery)
        nursery.cancel_scope.cancel()
