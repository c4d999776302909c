"""Acknowledges workers' reports once they are in the journal; until then the worker keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from coordinator.journal.journal import Journal

if TYPE_CHECKING:
    from coordinator.workers.epoch_link import WorkerLink


class ReportAcks:
    """One per worker socket.

    One commit covers all reports that arrived during the previous one. `acknowledge` sends a ReportAck.
    """

    def __init__(self, journal: Journal, acknowledge: Callable[[WorkerLink, int], None]) -> None:
        self._journal = journal
        self._acknowledge = acknowledge
        self._received: dict[WorkerLink, int] = {}
        self._news = trio.Event()

    def received(self, link: WorkerLink) -> None:
        """All reports of `link` up to its `report_ack` were applied."""
        self._received[link] = link.state.report_ack
        self._news.set()

    async def run(self) -> None:
        """Commit and acknowledge reports, until cancelled."""
        while True:
            await self._news.wait()
            self._news = trio.Event()
            received, self._received = self._received, {}
            await self._journal.append(()).wait()
            for link, number in received.items():
                link.state.report_durable = number
                self._acknowledge(link, number)
