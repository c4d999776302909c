"""Operations run inside `launch`: every fence is complete when recorded, and launch order satisfies them all.

A capture keeps operations instead of running them, and its replay runs them in the order in which they were launched.
That is no faster; it holds what a runner launches to the rules of a capture where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from worker.streams.capture import Capture, check_same
from worker.streams.fences import HOST, STREAM_NAMES, Fence, FenceError, Stream, Streams, check_record, check_wait


class InlineFence(Fence):
    """`capture` and `point` of one recorded inside a capture."""

    def __init__(self, name: str, stream: str, capture: Capture | None = None, point: int = 0) -> None:
        self.name = name
        self.stream = stream
        self.capture = capture
        self.point = point

    def __str__(self) -> str:
        return f"{self.name} of {self.stream}"

    def done(self) -> bool:
        check_wait(HOST, self.name)
        return True

    def wait(self) -> None:
        check_wait(HOST, self.name)


class InlineStream(Stream):
    """Outside of captures, one fence object per name serves all."""

    def __init__(self, streams: InlineStreams, name: str) -> None:
        self.name = name
        self._streams = streams
        self._fences: dict[str, InlineFence] = {}

    def launch(self, label: str, work: Callable[[], object]) -> None:
        del label
        if self._streams.capturing is None:
            work()
            return
        self._streams.capturing.launched(self.name)
        self._streams.captured.append(work)

    def record(self, name: str) -> Fence:
        capture = self._streams.capturing
        fence = self._fences.get(name)
        if fence is None:
            check_record(self.name, name)
            fence = self._fences[name] = InlineFence(name, self.name)
        return fence if capture is None else InlineFence(name, self.name, capture, capture.recorded(self.name, name))

    def wait(self, fence: Fence) -> None:
        check_wait(self.name, fence.name)
        if not isinstance(fence, InlineFence):
            raise FenceError("a fence of another backend", field="fence", value=fence.name)
        capture = self._streams.capturing
        check_same(str(fence), fence.name, fence.capture, capture)
        if capture is not None:
            capture.waited(self.name, fence.name, fence.stream, fence.point)


class InlineStreams(Streams):
    def __init__(self) -> None:
        super().__init__()
        self.capturing: Capture | None = None
        self.captured: list[Callable[[], object]] = []
        self._captures = count(1)
        streams = (InlineStream(self, name) for name in STREAM_NAMES)
        self.compute, self.stage, self.backup, self.swap, self.load, self.masks, self.refill = streams

    def capture(self, launch: Callable[[], None]) -> Callable[[], object]:
        self.capturing = capture = Capture(next(self._captures))
        self.captured = []
        try:
            launch()
            capture.check_joined()
        finally:
            self.capturing = None
        operations = tuple(self.captured)

        def replay() -> None:
            for operation in operations:
                operation()

        return replay

    def close(self) -> None:
        return
