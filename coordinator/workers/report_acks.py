"""Reports of workers, acknowledged when what they said is in the journal: until then the worker keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import trio

from coordinator.journal.journal import Journal
from coordinator.workers.worker_epoch import WorkerEpoch


class ReportingLink(Protocol):
    """A worker link: whoever said something."""

    @property
    def state(self) -> WorkerEpoch: ...


L = TypeVar("L", bound=ReportingLink)


class ReportAcks(Generic[L]):
    """One commit covers all reports that came while the one before was written. `acknowledge` sends the word."""

    def __init__(self, journal: Journal, acknowledge: Callable[[L, int], None]) -> None:
        self._journal = journal
        self._acknowledge = acknowledge
        self._received: dict[L, int] = {}
        self._news = trio.Event()

    def received(self, link: L) -> None:
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
