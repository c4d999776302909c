"""A sender of pages that needs no receiver: it copies the moment it is told to, the earliest that any engine may."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from worker.transfer import Delivered, Failed, SenderEvent


class FakePageCopier:
    """Copies pages of one pool to `targets` of the other, one at a time; `sent` are the parts in order."""

    def __init__(self, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8], targets: Sequence[int]) -> None:
        self._source, self._target = source, target
        self.targets = targets
        self.parts_until_failure = 0  # 0: it never fails
        self.sent: list[tuple[int, int]] = []
        self._ends: Sequence[int] = ()
        self._events: list[SenderEvent] = []

    def open(self, transfer_id: int, description: bytes, pages: int, part_ends: Sequence[int] = ()) -> None:
        self._ends = part_ends
        self.sent = []

    def send(self, transfer_id: int, index: int, page: int, part: int = 0) -> None:
        if 0 < self.parts_until_failure <= len(self.sent):
            self._events.append(Failed(transfer_id, "the network is gone"))
            return
        extent = slice(self._ends[part - 1] if part else 0, self._ends[part])
        self._target[self.targets[index], extent] = self._source[page, extent]
        self.sent.append((index, part))
        if Counter(at for at, _ in self.sent)[index] == len(self._ends):
            self._events.append(Delivered(transfer_id, index))

    def cancel(self, transfer_id: int, reason: str) -> None:
        """What was copied has been delivered."""

    def poll(self) -> list[SenderEvent]:
        events, self._events = self._events, []
        return events

    def close(self) -> None: ...
