"""Connections to rank 0 on which no message of a rank has come yet. Pure.

libzmq accepts any number of connections, and each takes a descriptor of the process. A rank says who it is as soon as
its handshake is done, in milliseconds, and again every second. So a connection that stays silent, whether in its
handshake or behind it, is a stranger's: past a time, and beyond a number, it is ended.
"""

from __future__ import annotations

from typing import Final

#: From accept to the first message. A rank that was ended by mistake connects again.
SPEAK_LIMIT_S: Final = 10.0
#: Silent connections at once; the oldest beyond it are ended.
NEWCOMERS_MAX: Final = 128


class Newcomers:
    """Connections by descriptor, in order of their accept."""

    def __init__(self) -> None:
        self._came_at: dict[int, float] = {}
        self._ended: set[int] = set()  # and not closed yet

    def __len__(self) -> int:
        return len(self._came_at)

    def came(self, descriptor: int, now: float) -> None:
        """A connection was accepted. An earlier one with this descriptor has closed."""
        self.left(descriptor)
        self._came_at[descriptor] = now

    def spoke(self, descriptor: int) -> None:
        """A message came: it is a rank's connection."""
        self._came_at.pop(descriptor, None)

    def left(self, descriptor: int) -> bool:
        """The connection has closed. Returns whether it was silent until then."""
        was_ended = descriptor in self._ended
        self._ended.discard(descriptor)
        return self._came_at.pop(descriptor, None) is not None or was_ended

    def take_overdue(self, now: float) -> list[int]:
        """Those to end, each once: past SPEAK_LIMIT_S, and the oldest beyond NEWCOMERS_MAX."""
        surplus = len(self._came_at) - NEWCOMERS_MAX
        overdue = [
            descriptor
            for place, (descriptor, at) in enumerate(self._came_at.items())
            if place < surplus or now - at > SPEAK_LIMIT_S
        ]
        for descriptor in overdue:
            del self._came_at[descriptor]
        self._ended.update(overdue)
        return overdue
