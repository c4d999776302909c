"""The link of one worker epoch, as the actors and the rooms of this folder see it."""

from __future__ import annotations

from collections.abc import Callable

import trio

from basics.processes import Process
from coordinator.state.events import LinkStats
from coordinator.workers.worker_epoch import WorkerEpoch
from protocol.messages import NOT_SEEN, Command, WorkerHello


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
