"""How long work takes on a GPU: two timing events on the current stream, read once they are complete.

Between two launches the events lie in the stream; inside a capture they are nodes of the graph (external events), each
replay records them anew, and the next one reads what the last has measured. So a graph with spans is replayed now and
then, beside one without: an event node costs a step a microsecond or two, and a step has two per layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import torch

from worker.streams.fences import Spent, Work

#: Spans that were not read yet: more than the copies of a long context in flight. Beyond them, none is measured.
SPANS_MAX: Final = 1_024
#: Looked at before another is begun.
READ_MAX: Final = 8


class Span:
    """`spent` is told in `read`."""

    def __init__(self, spent: Spent, *, external: bool = False) -> None:
        self.before = torch.cuda.Event(enable_timing=True, external=external)
        self.after = torch.cuda.Event(enable_timing=True, external=external)
        self.spent = spent

    def run(self, work: Work) -> None:
        self.before.record()
        work()
        self.after.record()

    def read(self) -> bool:
        """Whether it is over and was told. Never blocks."""
        if not self.after.query():
            return False
        self.spent(self.before.elapsed_time(self.after) / 1e3)
        return True


class SpanQueue:
    """Spans in flight, of all streams; their events are used again."""

    def __init__(self) -> None:
        self._open: deque[Span] = deque()
        self._free: list[Span] = []

    def run(self, work: Work, spent: Spent) -> None:
        """Do `work` within a span, or without one when too many are out."""
        self._read()
        if len(self._open) >= SPANS_MAX:
            work()
            return
        span = self._free.pop() if self._free else Span(spent)
        span.spent = spent
        span.run(work)
        self._open.append(span)

    def _read(self) -> None:
        """Tell of a few that are over; those of different streams end in any order."""
        for _ in range(min(len(self._open), READ_MAX)):
            span = self._open.popleft()
            (self._free if span.read() else self._open).append(span)


class TimedGraph:
    """A graph with spans in it."""

    def __init__(self, replay: Callable[[], object], spans: Sequence[Span]) -> None:
        self._replay = replay
        self._spans = tuple(spans)
        self._replayed = False

    def replay(self) -> None:
        """Tell what the last replay has measured, if that is over, and replay."""
        if self._replayed:
            for span in self._spans:
                span.read()
        self._replay()
        self._replayed = True
