"""What belongs to a graph while it is captured, and that all of it comes back to `compute`.

`compute` is part of a capture from the start, another stream from its first wait for a fence of a part. Whatever such a
stream does must be waited for by `compute` again before the capture ends: what a graph has not joined, a replay would
not wait for. A fence recorded inside is an edge of that one graph and means nothing elsewhere.

Points count what a stream did in the capture, launches and waits. A fence stands for the point it was recorded at.
"""

from __future__ import annotations

from worker.streams.fences import FENCES, FenceError

COMPUTE = "compute"


class Capture:
    """One capture. `number` tells it from others of the same streams."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._points = {COMPUTE: 0}
        self._joined: dict[str, int] = {}

    def __str__(self) -> str:
        return f"capture {self.number}"

    def launched(self, stream: str) -> None:
        """FenceError when `stream` is no part of the capture: its work would run now, once, beside the graph."""
        self._require_part(stream)
        self._points[stream] += 1

    def recorded(self, stream: str, name: str) -> int:
        """The point that the fence stands for. FenceError when it lies between replays."""
        _require_inside(name)
        self._require_part(stream)
        return self._points[stream]

    def waited(self, stream: str, name: str, source: str, point: int) -> None:
        """`stream` waits for a fence that `source` recorded at `point` of this capture."""
        _require_inside(name)
        if stream == COMPUTE:
            self._joined[source] = max(self._joined.get(source, 0), point)
        self._points[stream] = self._points.get(stream, 0) + 1

    def check_joined(self) -> None:
        """FenceError when `compute` has not waited for all that another stream did."""
        for stream, point in self._points.items():
            if stream != COMPUTE and self._joined.get(stream, 0) < point:
                raise FenceError(
                    f"{stream} does not rejoin compute before the capture ends", field="stream", value=stream
                )

    def _require_part(self, stream: str) -> None:
        if stream not in self._points:
            raise FenceError(
                f"{stream} is not part of the capture: it has waited for no fence in it", field="stream", value=stream
            )


def check_same(fence: str, name: str, recorded: Capture | None, waiting: Capture | None) -> None:
    """FenceError unless a fence is waited for where it was recorded: inside the same capture, or outside of any."""
    if recorded is not waiting:
        raise FenceError(
            f"{fence} was recorded {_place(recorded)} and is waited for {_place(waiting)}", field="fence", value=name
        )


def _place(capture: Capture | None) -> str:
    return f"inside {capture}" if capture else "outside of captures"


def _require_inside(name: str) -> None:
    if FENCES[name].placement != "inside capture":
        raise FenceError(f"fence {name} lies between replays, and this is inside a capture", field="fence", value=name)
