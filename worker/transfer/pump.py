"""The thread of one end: it performs what a pure core asks for, and tells the core what came of it.

The core is called under one lock, by the executor's thread (open, send, revoke) and by this one (messages, completions,
time); what it asks for goes into one queue, in order, and is performed here only. A core takes microseconds: no thread
waits for the network under the lock.

How often the thread turns: at once when something was asked for or came over the control socket; else every TICK_S, or,
while an engine needs progress, every PROGRESS_S. Measured: NIXL's own progress thread takes half a core when idle.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Generic, TypeVar

import zmq

from protocol.errors import InternalError
from protocol.logs import logger
from worker.transfer.engines.base import Jobs

#: Deadlines are looked at this often.
TICK_S: Final = 0.02
#: Pause between two looks at an engine that works by being looked at: a socket buffers this long at 10 GB/s. Longer
#: where nothing has happened for QUIET_S, as between two passes of a prompt: 4 instead of 10 % of a core.
PROGRESS_S: Final = 0.0001
QUIET_PROGRESS_S: Final = 0.001
QUIET_S: Final = 0.02
#: Threads that take checksums, and copy; few, since the decode loop of the process wants its core.
JOB_THREADS: Final = min(4, len(os.sched_getaffinity(0)))
#: How long `close` waits for the thread.
CLOSE_LIMIT_S: Final = 10.0

log = logger("worker.transfer")

ActionT = TypeVar("ActionT")
EventT = TypeVar("EventT")


class Pump(ABC, Generic[ActionT, EventT]):
    """Base of both ends. Subclasses set up everything, then call `start`."""

    def __init__(self, name: str, poller: zmq.Poller, wake: Callable[[], None]) -> None:
        self._poller = poller
        self._wake = wake
        self._lock = threading.Lock()
        self._actions: deque[ActionT] = deque()
        self._events: deque[EventT] = deque()
        self._kick = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._halted = threading.Event()
        self._broken: Exception | None = None
        self.jobs = Jobs(JOB_THREADS, self._nudge)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        poller.register(self._kick, zmq.POLLIN)

    def start(self) -> None:
        self._thread.start()

    def poll(self) -> list[EventT]:
        """Raises InternalError when the thread has died."""
        if self._broken is not None:
            raise InternalError(f"page transfer has ended by an error of its own: {self._broken}") from self._broken
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events

    # ---------------------------------------------------------------- for subclasses

    def _ask(self, step: Callable[[], Sequence[ActionT]]) -> None:
        """Call the core; what it asks for is performed by the thread. Whatever `step` raises is the caller's."""
        with self._lock:
            actions = step()
            self._actions.extend(actions)
        if actions and threading.current_thread() is not self._thread:
            self._nudge()

    def _nudge(self) -> None:
        """Have the thread turn, from whatever thread."""
        with suppress(ValueError):  # -1: it turns no more
            os.eventfd_write(self._kick, 1)

    def _tell(self, event: EventT) -> None:
        with self._lock:
            self._events.append(event)
        self._wake()

    @abstractmethod
    def _hear(self) -> bool:
        """Hand the core what came over the control socket and from the engine; whether there was anything."""

    @abstractmethod
    def _tick(self, now: float) -> Sequence[ActionT]:
        """The core's."""

    @abstractmethod
    def _perform(self, action: ActionT) -> None: ...

    @property
    @abstractmethod
    def _needs_progress(self) -> bool:
        """Asked under the lock."""

    @abstractmethod
    def _tear_down(self) -> None:
        """Last act of the thread."""

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            tick_at = busy_at = 0.0
            while not self._halted.is_set():
                is_busy = self._hear()
                now = time.monotonic()
                if now >= tick_at:
                    tick_at = now + TICK_S
                    self._ask(partial(self._tick, now))
                is_busy |= self._perform_all()
                if is_busy:
                    busy_at = now
                else:
                    self._rest(PROGRESS_S if now - busy_at < QUIET_S else QUIET_PROGRESS_S)
            self._perform_all()
        except Exception as error:
            log.exception("page transfer has ended by an error of its own")
            self._broken = error
            self._wake()
        finally:
            self._tear_down()

    def _perform_all(self) -> bool:
        """Whether there was anything to perform."""
        was_asked = bool(self._actions)
        while self._actions:
            self._perform(self._actions.popleft())
        return was_asked

    def _rest(self, progress_s: float) -> None:
        with self._lock:
            needs_progress = self._needs_progress
        if needs_progress:
            time.sleep(progress_s)
        elif dict(self._poller.poll(int(TICK_S * 1e3))).get(self._kick):
            os.eventfd_read(self._kick)

    def _halt(self) -> None:
        """Stop the thread; its last act is `_tear_down`."""
        self._halted.set()
        self._nudge()
        self._thread.join(CLOSE_LIMIT_S)
        if not self._thread.is_alive() and self._kick >= 0:
            kick, self._kick = self._kick, -1
            os.close(kick)
