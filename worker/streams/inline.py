"""Operations run inside `launch`: every fence is complete when recorded, and launch order satisfies them all."""

from __future__ import annotations

from collections.abc import Callable

from worker.streams.fences import HOST, STREAM_NAMES, Fence, Stream, Streams, check_record, check_wait


class InlineFence(Fence):
    def __init__(self, name: str) -> None:
        self.name = name

    def done(self) -> bool:
        check_wait(HOST, self.name)
        return True

    def wait(self) -> None:
        check_wait(HOST, self.name)


class InlineStream(Stream):
    """One fence object per name serves all."""

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
        super().__init__()
        self.compute, self.stage, self.backup, self.swap = (InlineStream(name) for name in STREAM_NAMES)

    def close(self) -> None:
        return
