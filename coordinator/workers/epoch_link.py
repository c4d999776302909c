"""The link of one worker epoch, what sends the commands of all links, and what acknowledges their reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from basics.processes import Process
from coordinator.journal.journal import Journal
from coordinator.listener.router import RouterSocket, Sent
from coordinator.state.events import LinkStats
from coordinator.workers.worker_epoch import WorkerEpoch
from metrics.state import CoordinatorCounters
from protocol import messages
from protocol.messages import NOT_SEEN, Command, WorkerHello
from protocol.skew import encode_for


class WorkerLink:
    """One epoch of one worker: its state, its connection (`peer`), and the WorkerPort for the actors.

    `number` is its source in the token log. `protocol` is the version that the process behind `peer` speaks. `process`
    is the attested process, 0 without attestation.
    """

    def __init__(
        self,
        hello: WorkerHello,
        process: Process,
        number: int,
        now: float,
        *,
        queue: Callable[[WorkerLink, Command], None],
        observe_round_trip: Callable[[float], None],
    ) -> None:
        self.state = WorkerEpoch(hello, observe_round_trip, now)
        self.model = hello.model
        self.protocol = hello.protocol
        self.attested = process
        self.number = number
        self.peer: bytes | None = None
        self.is_down = False
        self.is_awaited = False
        self.is_leaving = False
        self.proved_exit = False
        self.watch = trio.CancelScope()
        self._queue = queue

    @property
    def name(self) -> str:
        return self.state.worker

    @property
    def process(self) -> int:
        return self.attested.id

    def send(self, command: Command) -> None:
        """Append `command` to the log and wake the sender. Never blocks or fails: at a full log the worker is down."""
        self._queue(self, command)

    def step_s(self) -> float:
        return self.state.beat.step_us * 1e-6 if self.state.beat.steps else 0.0

    def stats(self) -> LinkStats:
        stats = self.state.stats(trio.current_time())
        return stats._replace(link_age_s=NOT_SEEN) if self.is_awaited else stats


#: How soon a link whose socket was full is tried again.
UNBLOCK_INTERVAL_S: Final = 0.02


class CommandSender:
    """One per worker socket. Commands queued in one turn of the loop leave in one message per worker."""

    def __init__(self, socket: RouterSocket, incarnation: int, counters: CoordinatorCounters) -> None:
        self._socket = socket
        self._incarnation = incarnation
        self._counters = counters
        self._waiting: dict[WorkerLink, None] = {}
        self._wake = trio.Event()

    def soon(self, link: WorkerLink) -> None:
        """Send the commands of `link` in the next turn of the loop."""
        self._waiting[link] = None
        self._wake.set()

    def forget(self, link: WorkerLink) -> None:
        self._waiting.pop(link, None)

    async def run(self) -> None:
        """Send commands, until cancelled."""
        while True:
            with trio.move_on_after(UNBLOCK_INTERVAL_S if self._waiting else float("inf")):
                await self._wake.wait()
            self._wake = trio.Event()
            self.send_all()

    def send_all(self) -> None:
        """Send the commands of all waiting links. A link whose socket is full stays waiting."""
        now = trio.current_time()
        for link in tuple(self._waiting):
            if self._send_to(link, now):
                del self._waiting[link]

    def _send_to(self, link: WorkerLink, now: float) -> bool:
        """Send what waits for `link`; return whether it is done for now. Commands of a link without a connection wait
        for its next hello."""
        log = link.state.commands
        while link.peer is not None and (batch := log.take(now)) is not None:
            commands = messages.Commands(self._incarnation, batch.first, batch.commands)
            sent = self._socket.send(link.peer, encode_for(commands, link.protocol))
            if sent is not Sent.OK:
                log.untake(batch)
                return sent is Sent.GONE
            self._counters.replayed_commands += batch.repeated
        return True


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
