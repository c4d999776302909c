"""The receiving end: control socket, engine, checks in threads, round the core of receiving.py."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial

import zmq

from metrics.state import TransferCounters
from protocol.errors import HiSparseError
from protocol.logs import fields
from worker.transfer.control import ReceiverControl
from worker.transfer.engines.base import Target
from worker.transfer.interface import TRANSFER_VERSION, Arrived, Description, Layout, PoolMemory, ReceiverEvent, Revoked
from worker.transfer.pump import Pump, log
from worker.transfer.receiving import (
    Action,
    AdmitSender,
    CheckUnit,
    EmitReceiverEvent,
    Receiving,
    SendToSender,
    ShutOut,
)


class PageReceiver(Pump[Action, ReceiverEvent]):
    """The end that owns the destination pages. Use `worker.transfer.open_receiver`."""

    def __init__(
        self,
        engine: str,
        target: Target,
        control: ReceiverControl,
        pool: PoolMemory,
        layout: Layout,
        name: str,
        wake: Callable[[], None],
    ) -> None:
        poller = zmq.Poller()
        poller.register(control.socket, zmq.POLLIN)
        super().__init__(f"receiver {name}", poller, wake)
        self.counters = TransferCounters()
        self._target = target
        self._control = control
        receiver_id = secrets.randbits(61) + 1
        self._description = Description(
            TRANSFER_VERSION, engine, name, control.address, receiver_id, control.key, layout
        )
        self._core = Receiving(layout, len(pool.pages), receiver_id, fetches=target.fetches)
        self._checks: deque[tuple[CheckUnit, Future[tuple[int, float]]]] = deque()
        self.start()

    def describe(self) -> bytes:
        """An encoded Description: what senders need, and what a coordinator hands on unread."""
        return self._description.encode()

    def open(self, transfer_id: int, pages: Sequence[int]) -> None:
        """Let one sender write to host pages `pages`, in the order of the context, for `transfer_id`.

        `transfer_id` is a placement number: never reused in one incarnation of either end. Raises WrongState when it is
        open, CapacityError beyond TRANSFERS_MAX transfers, BadInput for pages that the pool has not.
        """
        self._ask(lambda: self._core.open(transfer_id, pages))

    def revoke(self, transfer_id: int, reason: str) -> None:
        """Close `transfer_id`, whatever has arrived. `Revoked` follows: at once when no sender has begun, else when
        the last page is copied, or the sender has stopped or was shut out, within seconds. Does nothing for a transfer
        that is not open: all its pages have arrived, or it was revoked before."""
        self._ask(lambda: self._core.revoke(transfer_id, reason, time.monotonic()))

    def sender_exited(self, sender: str) -> None:
        """The process of `sender` is proved gone. Every transfer that it began ends with `Revoked`, and it begins none
        that is open now. A later process may have the same name."""
        self._ask(lambda: self._core.sender_exited(sender))

    def close(self) -> None:
        """Stop receiving; returns within seconds, when nothing can be written through this end any more."""
        self._halt()

    # ---------------------------------------------------------------- Pump

    @property
    def _needs_progress(self) -> bool:
        return self._target.needs_progress and not self._core.is_idle

    def _hear(self) -> bool:
        heard = self._control.receive()
        for sender, message in heard:
            self._ask(partial(self._core.heard, sender, message, time.monotonic()))
        self._target.progress()
        ended = 0
        while self._checks and self._checks[0][1].done():
            check, future = self._checks.popleft()
            found, seconds = future.result()
            self.counters.checksum_seconds += seconds
            self.counters.bytes += check.length * (found == check.checksum)
            self.counters.refused_units += found != check.checksum
            self._ask(partial(self._core.checked, check, found == check.checksum))
            ended += 1
        return bool(heard or ended)

    def _tick(self, now: float) -> Sequence[Action]:
        self.counters.open_transfers = self._core.open_transfers
        self.counters.unreadable_messages = self._control.unreadable
        return self._core.tick(now)

    def _perform(self, action: Action) -> None:
        match action:
            case SendToSender(sender, message):
                self._control.send(sender, message)
            case CheckUnit():
                self._checks.append((action, self.jobs.submit(partial(self._take, action))))
            case EmitReceiverEvent(event):
                self._count(event)
                self._tell(event)
            case AdmitSender(sender, place):
                self._admit(sender, place)
            case ShutOut(sender):
                wait([future for check, future in self._checks if check.sender == sender])
                self._target.shut_out(sender)
                self.counters.shut_out_senders += 1
                log.warning("sender of pages shut out", extra=fields(sender=sender))
                self._ask(partial(self._core.shut_out, sender))

    def _take(self, check: CheckUnit) -> tuple[int, float]:
        """Checksum, and the seconds it took, with the copy where there is one."""
        began = time.perf_counter()
        return self._target.take(check), time.perf_counter() - began

    def _admit(self, sender: str, place: bytes) -> None:
        try:
            blob = self._target.admit(sender, place)
        except HiSparseError as error:
            log.warning("sender of pages not admitted", extra=fields(sender=sender, reason=str(error)))
            self._ask(partial(self._core.not_admitted, sender, str(error)))
        else:
            self._ask(partial(self._core.admitted, sender, blob))

    def _count(self, event: ReceiverEvent) -> None:
        match event:
            case Arrived():
                self.counters.pages += 1
            case Revoked(transfer_id, reason):
                self.counters.revoked_transfers += 1
                log.info("page transfer revoked", extra=fields(transfer_id=transfer_id, reason=reason))

    def _tear_down(self) -> None:
        self.jobs.close()
        self._target.close()
        self._control.close()
