"""The parts of torch.cuda that streams and fences use, without a device: work runs when it is launched, on whatever
stream is current, and an event is complete unless its stream is stuck."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch


class FakeCudaStream:
    """`waited` are the events that it was told to wait for."""

    numbers = count(1)

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.cuda_stream = next(FakeCudaStream.numbers)
        self.priority = priority
        self.stuck = False
        self.waited: list[FakeEvent] = []

    def wait_event(self, event: FakeEvent) -> None:
        assert event.stream is not None, "an event that was never recorded orders nothing"
        self.waited.append(event)


class FakeEvent:
    """Timed events are 2 ms apart."""

    current: FakeCuda | None = None

    def __init__(self, enable_timing: bool = False, external: bool = False) -> None:
        self.timed = enable_timing
        self.stream: FakeCudaStream | None = None

    def record(self, stream: FakeCudaStream | None = None) -> None:
        if stream is None:
            assert FakeEvent.current is not None
            stream = FakeEvent.current.current
        self.stream = stream

    def query(self) -> bool:
        assert self.stream is not None
        return not self.stream.stuck

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.timed
        assert other.timed
        return 2.0


class FakeGraph:
    def replay(self) -> None:
        return


class FakeCuda:
    """Put in the place of torch.cuda's functions by `install`; `current` is the current stream of the thread."""

    def __init__(self) -> None:
        self.current: FakeCudaStream | None = None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fakes: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "synchronize": lambda device=None: None,
            "set_stream": self.set_stream,
            "Stream": FakeCudaStream,
            "Event": FakeEvent,
            "CUDAGraph": FakeGraph,
            "graph": self.graph,
            "graph_pool_handle": lambda: (0, 1),
        }
        monkeypatch.setattr(FakeEvent, "current", self)
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def set_stream(self, stream: FakeCudaStream) -> None:
        self.current = stream

    @contextmanager
    def graph(
        self, graph: FakeGraph, *, pool: object, stream: FakeCudaStream, capture_error_mode: str
    ) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before
