"""Sends the commands of all command logs, after new ones or a replay and again where a socket was full."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from coordinator.listener.router import RouterSocket, Sent
from metrics.state import CoordinatorCounters
from protocol import messages
from protocol.skew import encode_for

if TYPE_CHECKING:
    from coordinator.workers.epoch_link import WorkerLink

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
