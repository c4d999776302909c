"""Streams and fences: the only way in which memory is touched, and the only order that anybody may rely on.

A stream runs its operations one after another; two streams run in any order, except where one waits for a fence that
the other recorded. Streams and fences mean what CUDA's streams and events mean: `launch` queues and returns, `record`
marks the point reached so far, `wait` holds back what is launched after it. Host memory that operations read when they
run (step inputs, results) is ordered by fences too: the host is a consumer like any stream. The other direction needs
none: what the host writes before it launches an operation is seen by it (`inputs_ready` is launch order).

Every dependency between two streams is declared once, in FENCES; `record` and `wait` refuse any other. What a fence
need not cover is stream order: a chunk that changes hands on `compute` alone, the steps of one ring on `backup`.

| backend   | runs an operation                                   | finds                                       |
|-----------|-----------------------------------------------------|---------------------------------------------|
| inline    | inside `launch`                                     | nothing: launch order satisfies every fence |
| simulated | at host syncs and launches, any order fences permit | a missing or misplaced fence, as wrong bytes|

The simulated backend draws from its seed how likely each stream is to get the next turn, over four orders of
magnitude, and draws again now and then: uniform choices keep streams abreast and find nothing. It runs as little as a
waiting host needs, so that streams lag as far as the fences let them. `omit` names fences whose waits do nothing,
on streams and host alike; with `order="plain"` such a mutant still works, so it is the order that convicts it.

Rejected: real threads per stream on the CPU (races that no seed reproduces); recording a trace and checking it for
happens-before (it needs every operation to declare what it touches, and says nothing about bytes).
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Final, Literal

from coordinator.errors import ConfigError, InternalError

Placement = Literal["between replays", "inside capture"]
Order = Literal["seeded", "plain"]

HOST: Final = "host"
STREAM_NAMES: Final = ("compute", "stage", "backup", "swap")
#: Operations a simulated stream holds before `launch` runs some, as a driver's queue would.
QUEUED_MAX: Final = 4_096
#: The least likely stream gets the next turn up to this many orders of magnitude less often than the likeliest.
WEIGHT_DECADES: Final = 4.0
#: Weights are kept for 10 to the power of between these many simulated operations.
KEPT_DECADES: Final = (1.0, 3.5)


class FenceError(InternalError):
    """A fence used against its declaration, or a host wait that nothing can end."""


@dataclass(frozen=True)
class FenceSpec:
    """Who records a fence, who may wait for it, what would be wrong without it, and where it lies with graphs."""

    producers: frozenset[str]
    consumers: frozenset[str]
    guards: str
    placement: Placement = "between replays"


def _spec(producers: str, consumers: str, guards: str, placement: Placement = "between replays") -> FenceSpec:
    return FenceSpec(frozenset(producers.split()), frozenset(consumers.split()), guards, placement)


FENCES: Final[dict[str, FenceSpec]] = {
    "inputs_consumed": _spec("compute", "host", "a buffer of the input ring is overwritten only after it was read"),
    "prefill_written": _spec("compute", "stage", "staging reads slab rows and index keys that prefill has written"),
    "staged": _spec("stage", "host", "decoding reads the prompt's host rows; its slab chunks are used again"),
    "row_written": _spec("compute", "backup", "backup reads the plan, the new row and index key of every layer"),
    "backed_up": _spec("backup", "compute", "a tail slot retires, so swap-in may read its host row; plans are reused"),
    "durable": _spec("backup", "host", "the durable length in reports: only completions that were observed"),
    "preloaded": _spec("swap", "compute host", "decoding reads rows that were loaded from host pages"),
    "index_loaded": _spec("swap", "compute host", "decoding reads index keys that were loaded from host pages"),
    "plan_ready": _spec("compute", "swap", "replay reads the miss plan of the group's anchor layer", "inside capture"),
    "prefetched": _spec("swap", "compute", "a shared-index layer gathers rows that replay copied", "inside capture"),
    "chunk_reclaimed": _spec("compute", "swap", "rows are loaded into chunks that launched steps still read"),
    "sampled": _spec("compute", "host", "the host reads the tokens of a step"),
    "quiesced": _spec("compute stage backup swap", "host", "memory of a request that left goes to another owner"),
}


class Fence(ABC):
    """One recorded point of one stream. Complete once everything launched on that stream before it has run."""

    name: str

    @abstractmethod
    def done(self) -> bool:
        """Whether the host has seen it complete. FenceError when the host is no consumer of this fence."""

    @abstractmethod
    def wait(self) -> None:
        """Block the host until it is complete. FenceError as for `done`, and when nothing can complete it."""


class Stream(ABC):
    """A FIFO of operations. One thread launches."""

    name: str

    @abstractmethod
    def launch(self, label: str, work: Callable[[], object]) -> None:
        """Queue `work`. It may run now or at any later launch or host sync; what it raises comes out there."""

    @abstractmethod
    def record(self, name: str) -> Fence:
        """Mark the point reached by what was launched so far. FenceError unless FENCES[name] is produced here."""

    @abstractmethod
    def wait(self, fence: Fence) -> None:
        """Hold back what is launched from now on until `fence` is complete. FenceError unless declared for here."""


class Streams(ABC):
    """The four streams of one executor."""

    compute: Stream
    stage: Stream
    backup: Stream
    swap: Stream

    @property
    def all(self) -> tuple[Stream, Stream, Stream, Stream]:
        return (self.compute, self.stage, self.backup, self.swap)

    @abstractmethod
    def close(self) -> None:
        """Run everything queued, then refuse use."""


def make_streams(backend: str = "inline", seed: int = 0, order: Order = "seeded", omit: Iterable[str] = ()) -> Streams:
    """Streams of `backend`; `seed`, `order` and `omit` concern the simulated one. ConfigError for an unknown one."""
    if backend == "inline":
        return InlineStreams()
    if backend == "simulated":
        return SimulatedStreams(seed, order, frozenset(omit))
    raise ConfigError(
        "unknown stream backend", field="worker.stream_backend", value=backend, remedy="use inline or simulated"
    )


def check_record(stream: str, name: str) -> None:
    """FenceError unless FENCES declares that `stream` records `name`."""
    spec = FENCES.get(name)
    if spec is None or stream not in spec.producers:
        raise FenceError(f"fence {name} is not declared to be recorded on {stream}", field="fence", value=name)


def check_wait(consumer: str, name: str) -> None:
    """FenceError unless FENCES declares that `consumer` waits for `name`."""
    if consumer not in FENCES[name].consumers:
        raise FenceError(f"fence {name} is not declared to be waited for by {consumer}", field="fence", value=name)


# ---------------------------------------------------------------- inline


class InlineFence(Fence):
    def __init__(self, name: str) -> None:
        self.name = name

    def done(self) -> bool:
        check_wait(HOST, self.name)
        return True

    def wait(self) -> None:
        check_wait(HOST, self.name)


class InlineStream(Stream):
    """Operations run inside `launch`: every fence is complete when recorded, and one object per name serves all."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._fences: dict[str, InlineFence] = {}

    def launch(self, label: str, work: Callable[[], object]) -> None:
        del label
        work()

    def record(self, name: str) -> Fence:
        fence = self._fences.get(name)
        if fence is None:
            check_record(self.name, name)
            fence = self._fences[name] = InlineFence(name)
        return fence

    def wait(self, fence: Fence) -> None:
        check_wait(self.name, fence.name)


class InlineStreams(Streams):
    def __init__(self) -> None:
        self.compute, self.stage, self.backup, self.swap = (InlineStream(name) for name in STREAM_NAMES)

    def close(self) -> None:
        return


# ---------------------------------------------------------------- simulated


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
        while not self.complete:
            if not self._streams.run_one():
                raise FenceError(f"the host waits for {self} and nothing can run: {self._streams.describe()}")


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
        unknown = omit - FENCES.keys()
        if unknown:
            raise FenceError("no such fence", field="omit", value=",".join(sorted(unknown)))
        self.omit = omit
        self._plain = order == "plain"
        self._random = random.Random(seed)
        self._streams = [SimulatedStream(self, name) for name in STREAM_NAMES]
        self.compute, self.stage, self.backup, self.swap = self._streams
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
        weights = [self._weights[stream.name] for stream in ready]
        self._random.choices(ready, weights)[0].run_head()
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
