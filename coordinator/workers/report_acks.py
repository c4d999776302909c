"""Reports of workers, acknowledged when what they said is in the journal: until then the worker keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from coordinator.journal.journal import Journal

if TYPE_CHECKING:
    from coordinator.workers.worker_link import WorkerLink


class ReportAcks:
    """One commit covers all reports that came while the one before was written. `acknowledge` sends the word."""

    def __init__(self, journal: Journal, acknowledge: Callable[[WorkerLink, int], None]) -> None:
        self._journal = journal
        self._acknowledge = acknowledge
        self._received: dict[WorkerLink, int] = {}
        self._news = trio.Event()

    def received(self, link: WorkerLink) -> None:
        """All of its reports up to `report_ack` were applied."""
        self._received[link] = link.state.report_ack
        self._news.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._news.wait()
            self._news = trio.Event()
            received, self._received = self._received, {}
            await self._journal.append(()).wait()
            for link, number in received.items():
                link.state.report_durable = number
                self._acknowledge(link, number)
