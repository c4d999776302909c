"""The Request actor: one task per live request, owner of its life cycle.

It hears the Scheduler and its worker's events, and does what request_state.RequestState decides: commands to the worker
link, tells to the Scheduler, the end to the gateway. It ends when the request is terminal and the gateway was told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from coordinator import messages
from coordinator.actor import Actor
from coordinator.events import Admitted, Closed, Departed, Ending, Listener, Progressed, Resized, Told, WorkerPort
from coordinator.request_state import Action, IllegalEventError, RequestState, Rows, WorkerEvent
from coordinator.token_log import TokenLog
from metrics.logs import fields, logger

#: Messages that may wait; the Scheduler has a handful under way, a sane worker fewer.
MAILBOX_MAX: Final = 256
BATCH_MAX: Final = 64

ToScheduler: TypeAlias = Progressed | Resized | Departed | Closed

log = logger("coordinator.request")


class Request(Actor[Told | WorkerEvent]):
    """`state` may be read by anyone between turns; only this actor changes it."""

    def __init__(
        self,
        state: RequestState,
        *,
        token_log: TokenLog,
        listener: Listener,
        tell_scheduler: Callable[[ToScheduler], None],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(f"request {state.request_id}", mailbox_max=MAILBOX_MAX, batch_max=BATCH_MAX)
        self.state = state
        self._token_log = token_log
        self._listener = listener
        self._tell_scheduler = tell_scheduler
        self._clock = clock
        self._port: WorkerPort | None = None

    def story(self) -> tuple[str, ...]:
        return tuple(f"{line.at:.3f} {line.event} -> {line.state} {line.reason}" for line in self.state.story())

    async def handle(self, batch: list[Told | WorkerEvent]) -> None:
        for event in batch:
            if isinstance(event, Admitted):
                self._port = event.port
            self._apply(event)

    def _apply(self, event: Told | WorkerEvent) -> None:
        state, token_log = self.state, self._token_log
        rows = Rows(token_log.length(state.slot), token_log.durable(state.slot))
        try:
            actions = state.handle(event, rows, self._clock())
        except IllegalEventError as error:
            log.warning("event dropped", extra=fields(worker=state.worker, error=error))
            return
        for action in actions:
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case Ending():
                self._listener.ended(action)
            case Departed():
                self._token_log.end_admission(action.slot)
                self._tell_scheduler(action)
            case Closed():
                self._tell_scheduler(action)
                self.close()
            case Progressed() | Resized():
                self._tell_scheduler(action)
            case messages.Admit() | messages.Grant() | messages.Resize() | messages.Withdraw() | messages.Stop():
                assert self._port is not None
                self._port.send(action)
