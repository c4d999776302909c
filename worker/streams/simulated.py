"""Any order that the fences permit, drawn from a seed: a missing or misplaced fence shows as wrong bytes.

Operations are queued and run at host syncs and launches. The seed draws how likely each stream is to get the next turn,
over four orders of magnitude, and draws again now and then: uniform choices keep streams abreast and find nothing. As
little runs as a waiting host needs, so that streams lag as far as the fences let them. With `order="plain"` a mutant
without a fence still works, so it is the order that convicts it.

Rejected: real threads per stream on the CPU (races that no seed reproduces); recording a trace and checking it for
happens-before (it needs every operation to declare what it touches, and says nothing about bytes).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Final, Literal

from worker.streams.fences import (
    HOST,
    STREAM_NAMES,
    Fence,
    FenceError,
    Stream,
    Streams,
    check_omitted,
    check_record,
    check_wait,
)

Order = Literal["seeded", "plain"]

#: Operations a simulated stream holds before `launch` runs some, as a driver's queue would.
QUEUED_MAX: Final = 4_096
#: The least likely stream gets the next turn up to this many orders of magnitude less often than the likeliest.
WEIGHT_DECADES: Final = 4.0
#: Weights are kept for 10 to the power of between these many simulated operations.
KEPT_DECADES: Final = (1.0, 3.5)


@dataclass(slots=True)
class _Work:
    label: str
    run: Callable[[], object]


@dataclass(slots=True)
class _Record:
    fence: SimulatedFence


@dataclass(slots=True)
class _Wait:
    fence: SimulatedFence


class SimulatedFence(Fence):
    def __init__(self, streams: SimulatedStreams, stream: str, name: str, number: int) -> None:
        self.name = name
        self.complete = False
        self._streams = streams
        self._where = f"{name}#{number} of {stream}"

    def __str__(self) -> str:
        return self._where

    def done(self) -> bool:
        """Whether it is complete. Each call may let one more operation run, so polling makes progress."""
        check_wait(HOST, self.name)
        if self.name in self._streams.omit:
            return True
        if not self.complete:
            self._streams.run_one()
        return self.complete

    def wait(self) -> None:
        check_wait(HOST, self.name)
        if self.name in self._streams.omit:
            return
        began = perf_counter()
        while not self.complete:
            if not self._streams.run_one():
                raise FenceError(f"the host waits for {self} and nothing can run: {self._streams.describe()}")
        self._streams.waits.observe(self.name, perf_counter() - began)


class SimulatedStream(Stream):
    def __init__(self, streams: SimulatedStreams, name: str) -> None:
        self.name = name
        self.queue: deque[_Work | _Record | _Wait] = deque()
        self._streams = streams
        self._numbers = count(1)

    def launch(self, label: str, work: Callable[[], object]) -> None:
        self._streams.add(self, _Work(label, work))

    def record(self, name: str) -> Fence:
        check_record(self.name, name)
        fence = SimulatedFence(self._streams, self.name, name, next(self._numbers))
        self._streams.add(self, _Record(fence))
        return fence

    def wait(self, fence: Fence) -> None:
        check_wait(self.name, fence.name)
        if not isinstance(fence, SimulatedFence):
            raise FenceError("a fence of another backend", field="fence", value=fence.name)
        if fence.name not in self._streams.omit and not fence.complete:
            self._streams.add(self, _Wait(fence))

    def runnable(self) -> bool:
        if not self.queue:
            return False
        head = self.queue[0]
        return not isinstance(head, _Wait) or head.fence.complete

    def run_head(self) -> None:
        """Run or pass the head. What work raises names its label and stream in a note."""
        head = self.queue.popleft()
        if isinstance(head, _Work):
            try:
                head.run()
            except Exception as error:
                error.add_note(f"in {head.label} on {self.name}")
                raise
        elif isinstance(head, _Record):
            head.fence.complete = True


class SimulatedStreams(Streams):
    """Queues everything; a seed decides who runs next among the streams whose head may run."""

    def __init__(self, seed: int, order: Order, omit: frozenset[str]) -> None:
        super().__init__()
        check_omitted(omit)
        self.omit = omit
        self._plain = order == "plain"
        self._random = random.Random(seed)
        self._streams = [SimulatedStream(self, name) for name in STREAM_NAMES]
        self.compute, self.stage, self.backup, self.swap, self.load, self.masks, self.refill = self._streams
        self._eagerness = self._random.choice((0.0, 0.0, 0.1, 0.6))
        self._weights: dict[str, float] = {}
        self._kept = 0
        self._refusal = ""

    def add(self, stream: SimulatedStream, item: _Work | _Record | _Wait) -> None:
        if self._refusal:
            raise FenceError(self._refusal, field="stream", value=stream.name)
        stream.queue.append(item)
        if self._plain:
            stream.run_head()
        elif self._random.random() < self._eagerness:
            self.run_one()
        while len(stream.queue) > QUEUED_MAX:
            if not self.run_one():
                raise FenceError(f"{stream.name} holds {QUEUED_MAX} operations and nothing can run: {self.describe()}")

    def run_one(self) -> bool:
        """Run the head of one stream; False when none can run."""
        ready = [stream for stream in self._streams if stream.runnable()]
        if not ready:
            return False
        if not self._kept:
            self._weights = {name: 10 ** -self._random.uniform(0, WEIGHT_DECADES) for name in STREAM_NAMES}
            self._kept = int(10 ** self._random.uniform(*KEPT_DECADES))
        self._kept -= 1
        if len(ready) == 1:
            self._random.random()  # a seed draws as often whatever is ready
            ready[0].run_head()
        else:
            self._random.choices(ready, [self._weights[stream.name] for stream in ready])[0].run_head()
        return True

    def describe(self) -> str:
        """What each stream's head waits for: the cycle, when nothing can run."""
        heads = ((stream.name, stream.queue[0]) for stream in self._streams if stream.queue)
        return ", ".join(f"{name} waits for {head.fence}" for name, head in heads if isinstance(head, _Wait)) or "idle"

    def crash(self) -> None:
        """Drop what is queued, as the death of the process does, and refuse further use."""
        for stream in self._streams:
            stream.queue.clear()
        self._refusal = "the process has crashed"

    def close(self) -> None:
        while self.run_one():
            pass
        if any(stream.queue for stream in self._streams):
            raise FenceError(f"streams cannot drain: {self.describe()}")
        self._refusal = "the streams are closed"
