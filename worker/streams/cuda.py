"""Streams and fences on a GPU: one CUDA stream per name, fences as events.

| stream  | priority | why                                                                                     |
|---------|----------|-----------------------------------------------------------------------------------------|
| compute | high     | every other kernel in the way delays the next token of the whole batch                  |
| swap    | high     | layers of the same step wait for the rows that it replays                               |
| masks   | high     | the draws of a step wait for the masks that it copies                                   |
| stage   | low      | a prompt's copies may fill the card for milliseconds; the batch does not wait for them  |
| load    | low      | likewise, for a context that returns                                                    |
| refill  | low      | likewise, for earlier rows of prompts, which a later unit waits for                     |
| backup  | low      | has as many steps to finish as there are tail slots                                     |

Streams are non-blocking: nothing waits for the legacy default stream, and nothing there is ordered with them. So the
thread that launches adopts `compute` as its current stream: what is made outside of `launch` (scratch memory, tables)
is made there, and launching on it costs no switch.

Host waits poll the event and sleep in between, without the GIL. They see it 34 us late in the median (an event in
blocking-sync mode is seen after 66 us, a spinning one after 1 us and at the price of a core), which the step in flight
hides. And they end: a kernel that never does would hold a thread that blocks on its event, and with it the end of the
process, for ever.

All graphs share one private pool of memory: they run one after another on `compute`, and nothing in that memory lives
from one replay to the next. An event recorded inside a capture is an edge of the graph and is never used again.

What a fence costs is measured on a sample: around every SAMPLE_EVERY-th wait of a stream for a fence of that name, two
timing events, read when they are complete. Waits inside a graph are not measured: their events would be edges too. How
long work takes is measured alike (spans.py); in a graph by events that are nodes of it and cost a microsecond or two.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Final

import torch

from metrics.state import FenceWaits
from worker.device.gpu_memory import cuda_device
from worker.streams.capture import Capture, check_same
from worker.streams.fences import (
    HOST,
    STREAM_NAMES,
    Fence,
    FenceError,
    Spent,
    Stream,
    Streams,
    Work,
    check_omitted,
    check_record,
    check_wait,
)
from worker.streams.spans import Span, SpanQueue, TimedGraph

HIGH: Final = -1
LOW: Final = 0
PRIORITIES: Final = {
    "compute": HIGH,
    "swap": HIGH,
    "stage": LOW,
    "backup": LOW,
    "load": LOW,
    "masks": HIGH,
    "refill": LOW,
}
#: Between two looks at an event that the host waits for.
POLL_S: Final = 0.00005
#: A fence that takes longer will not come: a step or a unit of prompts takes seconds at most.
HOST_WAIT_LIMIT_S: Final = 60.0
#: What is queued at the end of the process gets this long; the thread that closes has JOIN_LIMIT_S (worker/process.py).
CLOSE_LIMIT_S: Final = 4.0
SAMPLE_EVERY: Final = 16
#: Timed waits that were not read yet; beyond them, none is timed.
SAMPLES_MAX: Final = 64
#: Events kept for the next fence: more than steps and requests have in flight.
EVENTS_MAX: Final = 1_024


class CudaFence(Fence):
    """An event, given back to the pool with the last reference; `capture` and `point` of one that is a graph's edge."""

    def __init__(self, streams: CudaStreams, stream: str, name: str, event: torch.cuda.Event, point: int) -> None:
        self.name = name
        self.stream = stream
        self.event = event
        self.capture = streams.capturing
        self.point = point
        self._streams = streams
        self._number = streams.next_number()

    def __str__(self) -> str:
        return f"{self.name}#{self._number} of {self.stream}"

    def __del__(self) -> None:
        self._streams.give_event(self)

    def done(self) -> bool:
        """May be asked from any thread."""
        check_wait(HOST, self.name)
        return self.name in self._streams.omit or self.event.query()

    def wait(self) -> None:
        check_wait(HOST, self.name)
        if self.name in self._streams.omit:
            return
        began = time.perf_counter()
        limit_s = float("inf") if self._streams.waits_for_peers else HOST_WAIT_LIMIT_S
        self._streams.wait_on_host(self.event, began + limit_s, str(self))
        self._streams.waits.observe(self.name, time.perf_counter() - began)


class CudaStream(Stream):
    def __init__(self, streams: CudaStreams, name: str, device: torch.device) -> None:
        self.name = name
        self.cuda = torch.cuda.Stream(device, priority=PRIORITIES[name])
        self._streams = streams

    def launch(self, label: str, work: Callable[[], object]) -> None:
        self._streams.check_use(self)
        if self._streams.capturing is not None:
            self._streams.capturing.launched(self.name)
        try:
            if self.name == "compute":
                work()
            else:
                self._streams.work_on(self, work)
        except Exception as error:
            error.add_note(f"in {label} on {self.name}")
            raise

    def record(self, name: str) -> Fence:
        check_record(self.name, name)
        self._streams.check_use(self)
        capture = self._streams.capturing
        point = 0 if capture is None else capture.recorded(self.name, name)
        event = self._streams.take_event()
        event.record(self.cuda)
        return CudaFence(self._streams, self.name, name, event, point)

    def wait(self, fence: Fence) -> None:
        check_wait(self.name, fence.name)
        if not isinstance(fence, CudaFence):
            raise FenceError("a fence of another backend", field="fence", value=fence.name)
        if fence.name in self._streams.omit:
            return
        self._streams.check_use(self)
        capture = self._streams.capturing
        check_same(str(fence), fence.name, fence.capture, capture)
        if capture is not None:
            capture.waited(self.name, fence.name, fence.stream, fence.point)
        if self._streams.is_sampled(self.name, fence):
            self._streams.time_wait(self.cuda, fence)
        else:
            self.cuda.wait_event(fence.event)


class CudaStreams(Streams):
    """Raises ConfigError when there is no such device."""

    def __init__(self, device: str, omit: frozenset[str]) -> None:
        super().__init__()
        check_omitted(omit)
        self.omit = omit
        self._device = cuda_device(device)
        self._numbers = count(1)
        self._events: list[torch.cuda.Event] = []
        self._sampler = _WaitSampler(self.waits)
        self._spans = SpanQueue()
        self._captured_spans: list[Span] = []
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._captures = count(1)
        self.capturing: Capture | None = None
        self._memory = torch.cuda.graph_pool_handle()
        self._thread = 0
        self._closed = False
        self._by_name = {name: CudaStream(self, name, self._device) for name in STREAM_NAMES}
        streams = self._by_name.values()
        self.compute, self.stage, self.backup, self.swap, self.load, self.masks, self.refill = streams

    def adopt_thread(self) -> None:
        """Blocks until the device is idle: what others launched before, on any stream, is done."""
        torch.cuda.set_device(self._device)
        torch.cuda.synchronize()
        torch.cuda.set_stream(self._by_name["compute"].cuda)
        self._thread = threading.get_ident()

    def close(self) -> None:
        self._closed = True
        give_up_at = time.perf_counter() + CLOSE_LIMIT_S
        for stream in self._by_name.values():
            event = torch.cuda.Event()
            event.record(stream.cuda)
            self.wait_on_host(event, give_up_at, f"the end of {stream.name}")
        self.drop_graphs()

    # ---------------------------------------------------------------- graphs

    def drop_graphs(self) -> None:
        """NCCL ends a communicator only once no graph refers to it."""
        while self._graphs:
            self._graphs.pop().reset()

    def capture(self, launch: Callable[[], None]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        problem: Exception | None = None
        self._captured_spans = []
        self.capturing = capture = Capture(next(self._captures))
        compute = self._by_name["compute"].cuda
        try:
            with (
                _without_collection(),
                torch.cuda.graph(graph, pool=self._memory, stream=compute, capture_error_mode="thread_local"),
            ):
                try:
                    launch()
                    capture.check_joined()
                except Exception as error:
                    problem = error
                    raise
        except Exception as error:  # leaving a broken capture raises too, and says less
            raise problem or error from None
        finally:
            self.capturing = None
        return TimedGraph(graph.replay, self._captured_spans).replay if self._captured_spans else graph.replay

    def timed(self, work: Work, spent: Spent) -> Work:
        """In a capture, the span is part of the graph and measured at each replay."""
        return partial(self._run_timed, work, spent)

    def _run_timed(self, work: Work, spent: Spent) -> None:
        if self.capturing is None:
            self._spans.run(work, spent)
            return
        self._captured_spans.append(span := Span(spent, external=True))
        span.run(work)

    def work_on(self, stream: CudaStream, work: Callable[[], object]) -> None:
        """Do `work` with `stream` as the current one in place of compute."""
        torch.cuda.set_stream(stream.cuda)
        try:
            work()
        finally:
            torch.cuda.set_stream(self._by_name["compute"].cuda)

    def check_use(self, stream: CudaStream) -> None:
        """FenceError when `stream` may not be used any more, or not by this thread."""
        if self._closed:
            raise FenceError("the streams are closed", field="stream", value=stream.name)
        if threading.get_ident() != self._thread:
            raise FenceError("this thread has not adopted the streams", field="stream", value=stream.name)

    # ---------------------------------------------------------------- events

    def next_number(self) -> int:
        return next(self._numbers)

    def take_event(self) -> torch.cuda.Event:
        return self._events.pop() if self._events and not self.capturing else torch.cuda.Event()

    def give_event(self, fence: CudaFence) -> None:
        """A wait that was launched holds the moment it was for: the event may be recorded anew at once."""
        if not fence.capture and len(self._events) < EVENTS_MAX:
            self._events.append(fence.event)

    def wait_on_host(self, event: torch.cuda.Event, give_up_at: float, what: str) -> None:
        """Sleep until `event` is complete. FenceError naming `what` at `give_up_at` (time.perf_counter)."""
        while not event.query():
            if time.perf_counter() > give_up_at:
                raise FenceError(f"the host gave up waiting for {what}", field="fence", value=what)
            time.sleep(POLL_S)

    def is_sampled(self, consumer: str, fence: CudaFence) -> bool:
        return self.capturing is None and self._sampler.is_due(consumer, fence.name)

    def time_wait(self, stream: torch.cuda.Stream, fence: CudaFence) -> None:
        self._sampler.wait(stream, fence)


@contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage collection: a graph that dies within a capture, a cycle's perhaps, invalidates it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _WaitSampler:
    """Waits of streams, timed now and then."""

    def __init__(self, waits: FenceWaits) -> None:
        self._waits = waits
        self._seen: Counter[tuple[str, str]] = Counter()
        self._timed: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()

    def is_due(self, consumer: str, name: str) -> bool:
        self._seen[consumer, name] += 1
        return self._seen[consumer, name] % SAMPLE_EVERY == 1

    def wait(self, stream: torch.cuda.Stream, fence: CudaFence) -> None:
        """Make `stream` wait between two timing events, unless too many are out."""
        self._read()
        if len(self._timed) >= SAMPLES_MAX:
            stream.wait_event(fence.event)
            return
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(fence.event)
        after.record(stream)
        self._timed.append((fence.name, before, after))

    def _read(self) -> None:
        """Count those that are over. Never blocks."""
        for _ in range(len(self._timed)):
            name, before, after = self._timed.popleft()
            if after.query():
                self._waits.observe(name, before.elapsed_time(after) / 1e3, SAMPLE_EVERY)
            else:
                self._timed.append((name, before, after))
