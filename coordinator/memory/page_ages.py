"""Times for which host pages are held: from being taken to being free again, under any number of holders. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from coordinator.memory.ledger import Ledger

NO_AGES: Final = np.zeros(0)


class PageAges:
    """Ages of the pages of `ledger`, which is asked after each change; those held at the start count from there."""

    def __init__(self, ledger: Ledger, now: float) -> None:
        self._ledger = ledger
        self._since = np.full(ledger.pages_total, now)

    def note(self, free_before: int, now: float) -> npt.NDArray[np.float64]:
        """After one change of a ledger that had `free_before` free pages: the ages of the pages that it freed."""
        taken, freed = self._ledger.moved(free_before)
        if len(taken):
            self._since[taken] = now
        ages: npt.NDArray[np.float64] = now - self._since[freed] if len(freed) else NO_AGES
        return ages
