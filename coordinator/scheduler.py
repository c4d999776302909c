"""The Scheduler actor: its facade for the gateway and the worker links."""

from __future__ import annotations

from collections.abc import Callable

import trio

from coordinator import events, messages
from coordinator.actor import Actor, Supervisor
from coordinator.arrays import Int32Array
from coordinator.config import CoordinatorSettings
from coordinator.events import Handle, Listener, TokenLog, Verb, WorkerPort


class Scheduler(Actor[object]):
    """Run it with `supervisor.start(scheduler, Level.SCHEDULER)`. It starts Request and HostPool actors itself.

    `clock` gives seconds on the scheduler's time line, `wall_offset_s` what to add for seconds since the epoch.
    `stopped` is set when a requested stop is complete: every request is terminal.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        *,
        token_log: TokenLog,
        listener: Listener,
        supervisor: Supervisor,
        clock: Callable[[], float] = trio.current_time,
        wall_offset_s: float = 0.0,
    ) -> None:
        super().__init__("scheduler", mailbox_max=1, batch_max=1)
        self.stopped = trio.Event()

    # ---------------------------------------------------------------- for the gateway

    async def submit(self, submit: messages.Submit, owner: str) -> Handle:
        """Validate, queue and acknowledge a request. Refused in full or accepted in full.

        Raises BadInput (field, value, remedy), WrongState for an id in use, CapacityError when it could never fit or
        the queue is full, Unavailable while stopping or before the first worker has registered. Cancelled: it may have been
        accepted; look the id up.
        """
        return await self.ask(lambda reply: events.SubmitAsk(submit, owner, reply))

    async def abort(self, request_ids: tuple[str, ...], owner: str) -> tuple[str, ...]:
        """Abort all or none; one line per request. Raises NotFound or WrongState naming id, state and remedy."""
        return await self._verb(Verb.ABORT, request_ids, owner)

    async def retract(self, request_ids: tuple[str, ...], owner: str, *, keep: bool, hold: bool) -> tuple[str, ...]:
        """Take all or none off their workers; `keep` their host pages, `hold` them until an operator resumes them."""
        return await self._verb(Verb.RETRACT, request_ids, owner, keep=keep, hold=hold)

    async def resume(self, request_ids: tuple[str, ...], owner: str) -> tuple[str, ...]:
        """Let held requests wait for memory again; all or none."""
        return await self._verb(Verb.RESUME, request_ids, owner)

    async def resize(self, request_ids: tuple[str, ...], owner: str, *, hot_slots: int) -> tuple[str, ...]:
        """Force hot buffers to `hot_slots` (0 resident, -1 back to policy); all or none. CapacityError: not now."""
        return await self._verb(Verb.RESIZE, request_ids, owner, hot_slots=hot_slots)

    async def drain(
        self, workers: tuple[str, ...], owner: str, *, handover: bool, deadline_s: float
    ) -> tuple[str, ...]:
        """Stop admitting to workers (none named: all); returns at once. See messages.DrainWorkers."""
        return await self.ask(lambda reply: events.DrainAsk(workers, owner, reply, handover, deadline_s))

    async def undrain(self, workers: tuple[str, ...], owner: str) -> tuple[str, ...]:
        """Admit to workers again (none named: all)."""
        return await self.ask(lambda reply: events.DrainAsk(workers, owner, reply, undrain=True))

    async def stop(self, deadline_s: float, owner: str) -> tuple[str, ...]:
        """Refuse new work from now on; set `stopped` when all has ended, after `deadline_s` by failing the rest."""
        return await self.ask(lambda reply: events.StopAsk(deadline_s, owner, reply))

    def lookup(self, request_id: str) -> int:
        """The slot of a live or recently ended request. Raises NotFound."""
        raise NotImplementedError

    def ending(self, request_id: str) -> events.Ending | None:
        """How a request ended; None while it is live. Raises NotFound."""
        raise NotImplementedError

    def model(self) -> messages.ModelInfo | None:
        """The model served, None until the first worker has registered."""
        raise NotImplementedError

    def request_rows(self, limit: int) -> list[messages.RequestRow]:
        """Live requests in rank order, then ended ones, latest first; at most `limit`."""
        raise NotImplementedError

    def describe(self, request_id: str) -> tuple[messages.RequestRow, tuple[messages.StoryLine, ...]]:
        """One request and its story. Raises NotFound."""
        raise NotImplementedError

    def worker_rows(self) -> list[messages.WorkerRow]:
        raise NotImplementedError

    def pool_rows(self) -> list[messages.PoolRow]:
        raise NotImplementedError

    # ---------------------------------------------------------------- for the worker links

    async def worker_up(self, hello: messages.WorkerHello, port: WorkerPort) -> None:
        """A new epoch of a worker joins; commands may reach `port` before this returns.

        Call it once per epoch, and `worker_down` for the epoch before it first. Raises ConfigError when its model or
        pool differs from its group's, WrongState when the epoch was already declared down.
        """
        await self.ask(lambda reply: events.WorkerUp(hello, port, reply))

    def worker_down(self, worker: str, epoch: int, proved_exit: bool) -> None:
        """The epoch is over. Without `proved_exit` its pages stay quarantined until `worker_exited`."""
        self.tell(events.WorkerDown(worker, epoch, proved_exit))

    def worker_exited(self, worker: str, epoch: int) -> None:
        """The process of an epoch that was declared down is proved gone."""
        self.tell(events.WorkerExited(worker, epoch))

    def on_event(self, worker: str, epoch: int, event: messages.Event) -> None:
        """Route a worker's event to its Request. An admission that has departed, or is another worker's: dropped.

        Raises ProtocolError when one request is flooded: the worker is broken.
        """
        raise NotImplementedError

    def starving(self, slots: Int32Array) -> None:
        """Slots whose granted headroom is short; repeating a slot costs next to nothing."""
        raise NotImplementedError

    async def _verb(
        self,
        verb: Verb,
        request_ids: tuple[str, ...],
        owner: str,
        *,
        keep: bool = True,
        hold: bool = True,
        hot_slots: int = -1,
    ) -> tuple[str, ...]:
        return await self.ask(
            lambda reply: events.VerbAsk(verb, request_ids, owner, reply, keep=keep, hold=hold, hot_slots=hot_slots)
        )

    async def handle(self, batch: list[object]) -> None:
        raise NotImplementedError
