"""The receiving end of page transfer as a state machine: what may be written, what has arrived, what is revoked. Pure.

    open ──► WAITING ──Begin──► LIVE ──all pages checked──► (arrived)
                │                │ revoke; Stopped from the sender
                │ revoke         ▼
                │             STOPPING ──Stopped, clean; or nothing more is fetched──► (revoked)
                │                │ silence past STOP_LIMIT_S, not clean, or its exit is proved
                │                ▼
                │             ShutOut(sender) ──► (revoked, with all transfers of that sender)
                └──────────────────────────────► (revoked)

An engine that *fetches* has the receiver copy each page; so what may land is known here, and a revocation waits for
copies under way and for nothing else. With the others the sender writes, and is asked to stop, or shut out.

A page counts as arrived when the checksum fits *after* its sender said that the write had completed. Since a unit is
written again only after it was refused here, and an attempt refused once is never looked at again, no write to an
arrived page is under way: the decoder may append to the last page at once.

Rejected: taking a fitting checksum without Written (bytes may fit while a repeated write is still under way);
deregistering memory as a revocation (measured with NIXL on TCP: a write after deregistration lands all the same).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

from protocol.arrays import pack_int32, unpack_int64
from protocol.errors import BadInput, CapacityError, HiSparseError, WrongState
from worker.transfer.interface import (
    PARTS_MAX,
    TRANSFER_PAGES_MAX,
    TRANSFER_VERSION,
    TRANSFERS_MAX,
    Arrived,
    Layout,
    ReceiverEvent,
    Revoked,
)
from worker.transfer.wire import (
    Begin,
    BeginRefused,
    Checked,
    Ready,
    ReceiverMessage,
    SenderMessage,
    Stopped,
    StopWriting,
    Unknown,
    Written,
)

#: A sender that answers has stopped within the time of its window; past this it is shut out.
STOP_LIMIT_S: Final = 2.0
STOP_RESEND_S: Final = 0.2
#: Senders with an endpoint, and exited ones whose late words are ignored.
SENDERS_MAX: Final = 256
#: Ended transfers that are remembered, to answer what comes late.
ENDED_MAX: Final = 4_096

assert STOP_RESEND_S * 4 < STOP_LIMIT_S  # several Stops may be lost


@dataclass(frozen=True)
class SendToSender:
    sender: str
    message: ReceiverMessage


@dataclass(frozen=True)
class AdmitSender:
    """Make an endpoint for `sender`, whose pages lie at `place`; `admitted` or `not_admitted` answers."""

    sender: str
    place: bytes


@dataclass(frozen=True)
class ShutOut:
    """Destroy the endpoint of `sender`; `shut_out` answers, when nothing of it can land."""

    sender: str


@dataclass(frozen=True)
class CheckUnit:
    """Take the checksum of `length` bytes at `offset` of host page `page`, fetched before from host page `source` of
    `sender` where the engine does that; `checked` answers."""

    sender: str
    transfer_id: int
    unit: int
    attempt: int
    page: int
    source: int
    offset: int
    length: int
    checksum: int


@dataclass(frozen=True)
class EmitReceiverEvent:
    event: ReceiverEvent


Action: TypeAlias = SendToSender | AdmitSender | ShutOut | CheckUnit | EmitReceiverEvent


class ReceiverPhase(Enum):
    WAITING = "waiting"
    LIVE = "live"
    STOPPING = "stopping"


@dataclass(slots=True)
class ReceiverTransfer:
    pages: tuple[int, ...]
    opened: int
    phase: ReceiverPhase = ReceiverPhase.WAITING
    sender: str = ""
    part_ends: tuple[int, ...] = ()
    good: set[int] = field(default_factory=set)
    checking: dict[int, int] = field(default_factory=dict)  # unit -> attempt
    refused: dict[int, int] = field(default_factory=dict)  # unit -> last attempt that did not fit
    parts_left: dict[int, int] = field(default_factory=dict)  # index -> parts, once one has arrived
    pages_left: int = 0
    reason: str = ""
    stop_at: float = 0.0
    resend_at: float = 0.0


@dataclass(slots=True)
class _Endpoint:
    number: int
    blob: bytes | None = None  # None: being made
    shutting: bool = False


class Receiving:
    """Events in, actions out. `fetches`: the receiver copies, not the sender."""

    def __init__(self, layout: Layout, host_pages: int, receiver_id: int, *, fetches: bool) -> None:
        self._layout = layout
        self._host_pages = host_pages
        self._receiver_id = receiver_id
        self._fetches = fetches
        self._transfers: dict[int, ReceiverTransfer] = {}
        self._ended: OrderedDict[int, bool] = OrderedDict()  # transfer -> whether all of it arrived
        self._endpoints: dict[str, _Endpoint] = {}
        self._exited: OrderedDict[str, int] = OrderedDict()  # sender -> transfers that had been opened by then
        self._opened = 0
        self._endpoint_numbers = receiver_id  # so that no two receivers at one address give out the same

    @property
    def open_transfers(self) -> int:
        return len(self._transfers)

    @property
    def is_idle(self) -> bool:
        """Whether no sender may be writing."""
        return all(transfer.phase is ReceiverPhase.WAITING for transfer in self._transfers.values())

    # ---------------------------------------------------------------- the owner of the pages

    def open(self, transfer_id: int, pages: Sequence[int]) -> list[Action]:
        """Raises as PageReceiver.open does; then nothing is open."""
        if transfer_id in self._transfers or transfer_id in self._ended:
            raise WrongState("it is open, or was", field="transfer_id", value=transfer_id)
        if len(self._transfers) >= TRANSFERS_MAX:
            raise CapacityError(
                f"{TRANSFERS_MAX} transfers are open", field="transfer_id", value=transfer_id, remedy="wait"
            )
        if not 0 < len(pages) <= TRANSFER_PAGES_MAX:
            raise BadInput(f"1 to {TRANSFER_PAGES_MAX} pages travel with a transfer", field="pages", value=len(pages))
        beyond = [page for page in pages if not 0 <= page < self._host_pages]
        if beyond:
            raise BadInput(f"not among the {self._host_pages} of the pool", field="pages", value=beyond)
        if len(set(pages)) < len(pages):
            raise BadInput("a page is named twice", field="pages", value=sorted(pages))
        self._opened += 1
        self._transfers[transfer_id] = ReceiverTransfer(tuple(pages), self._opened, pages_left=len(pages))
        return []

    def revoke(self, transfer_id: int, reason: str, now: float) -> list[Action]:
        held = self._transfers.get(transfer_id)
        if held is None or held.phase is ReceiverPhase.STOPPING:
            return []
        held.reason = reason
        if held.phase is ReceiverPhase.WAITING:
            return [self._end(transfer_id)]
        held.phase, held.stop_at, held.resend_at = ReceiverPhase.STOPPING, now + STOP_LIMIT_S, now + STOP_RESEND_S
        return [SendToSender(held.sender, StopWriting(transfer_id, reason)), *self._end_if_fetched(transfer_id)]

    def sender_exited(self, sender: str) -> list[Action]:
        """Its process is gone; what a network still holds of it is not, where there is one. Another process may have
        its name later, for transfers that are opened later."""
        self._exited[sender] = self._opened
        self._exited.move_to_end(sender)
        while len(self._exited) > SENDERS_MAX:
            self._exited.popitem(last=False)
        return self._cut_off(sender)

    # ---------------------------------------------------------------- senders

    def heard(self, sender: str, message: SenderMessage, now: float) -> list[Action]:
        """A message of `sender`. Nothing that it may say raises."""
        match message:
            case Begin():
                return self._begin(sender, message)
            case Written():
                return self._written(sender, message)
            case Stopped():
                return self._stopped(sender, message)

    def _begin(self, sender: str, begin: Begin) -> list[Action]:
        transfer = self._transfers.get(begin.transfer_id)
        if transfer is None and begin.transfer_id not in self._ended and begin.receiver_id == self._receiver_id:
            return [SendToSender(sender, Unknown(begin.transfer_id))]
        try:
            part_ends = self._require_fit(sender, begin, transfer)
        except HiSparseError as error:
            return [SendToSender(sender, BeginRefused(begin.transfer_id, str(error)))]
        assert transfer is not None
        if transfer.phase is ReceiverPhase.WAITING:
            transfer.sender, transfer.part_ends = sender, part_ends
        endpoint = self._endpoints.get(sender)
        if endpoint is None:
            self._endpoint_numbers += 1
            self._endpoints[sender] = _Endpoint(self._endpoint_numbers)
            return [AdmitSender(sender, begin.place)]
        return self._ready(begin.transfer_id, transfer, endpoint)

    def _require_fit(self, sender: str, begin: Begin, transfer: ReceiverTransfer | None) -> tuple[int, ...]:
        """The ends of parts. Raises HiSparseError saying why `begin` is refused."""
        if begin.version != TRANSFER_VERSION:
            raise BadInput(
                f"the sender speaks version {begin.version}, this receiver {TRANSFER_VERSION}", field="version"
            )
        if begin.receiver_id != self._receiver_id:
            raise WrongState(
                "the receiver that this was meant for is gone", field="receiver_id", value=begin.receiver_id
            )
        self._layout.require_same(begin.layout, sender)
        if transfer is None or transfer.phase is ReceiverPhase.STOPPING:
            raise WrongState("the transfer is closed", field="transfer_id", value=begin.transfer_id)
        if transfer.opened <= self._exited.get(sender, 0):
            raise WrongState("its process was proved dead when the transfer was open", field="sender", value=sender)
        if transfer.sender not in ("", sender):
            raise WrongState(f"{transfer.sender} has begun it", field="transfer_id", value=begin.transfer_id)
        if begin.pages != len(transfer.pages):
            raise BadInput(f"{begin.pages} pages to send, {len(transfer.pages)} reserved", field="pages")
        if sender not in self._endpoints and len(self._endpoints) >= SENDERS_MAX:
            raise CapacityError(
                f"{SENDERS_MAX} senders have endpoints, and none was said to have exited", field="sender", value=sender
            )
        ends = tuple(unpack_int64(begin.part_ends, "part_ends").tolist())
        if (
            not 0 < len(ends) <= PARTS_MAX
            or ends[-1] != self._layout.page_bytes
            or list(ends) != sorted({0, *ends})[1:]
        ):
            raise BadInput(
                f"1 to {PARTS_MAX} ascending ends, the last {self._layout.page_bytes}", field="part_ends", value=ends
            )
        return ends

    def admitted(self, sender: str, blob: bytes) -> list[Action]:
        """The endpoint of `sender` is made; transfers that wait for it may be written."""
        endpoint = self._endpoints[sender]
        endpoint.blob = blob
        mine = [(number, transfer) for number, transfer in self._transfers.items() if transfer.sender == sender]
        return [action for number, transfer in mine for action in self._ready(number, transfer, endpoint)]

    def not_admitted(self, sender: str, reason: str) -> list[Action]:
        """No endpoint could be made: nothing was written, and those who wait may go elsewhere."""
        del self._endpoints[sender]
        waiting = [number for number, transfer in self._transfers.items() if transfer.sender == sender]
        for number in waiting:
            self._transfers[number].sender = ""
        return [SendToSender(sender, BeginRefused(number, reason)) for number in waiting]

    def _ready(self, number: int, transfer: ReceiverTransfer, endpoint: _Endpoint) -> list[Action]:
        if (
            endpoint.blob is None
            or endpoint.shutting
            or transfer.phase not in (ReceiverPhase.WAITING, ReceiverPhase.LIVE)
        ):
            return []  # it asks again
        transfer.phase = ReceiverPhase.LIVE
        return [
            SendToSender(transfer.sender, Ready(number, pack_int32(transfer.pages), endpoint.number, endpoint.blob))
        ]

    def _written(self, sender: str, written: Written) -> list[Action]:
        number, unit = written.transfer_id, written.unit
        transfer = self._transfers.get(number)
        if transfer is None:
            arrived = self._ended.get(number, False)
            answer = (
                Checked(number, unit, written.attempt, True)
                if arrived
                else StopWriting(number, "the transfer is closed")
            )
            return [SendToSender(sender, answer)]
        if transfer.sender != sender or not 0 <= unit < len(transfer.pages) * len(transfer.part_ends):
            return []
        if transfer.phase is not ReceiverPhase.LIVE:
            return [SendToSender(sender, StopWriting(number, transfer.reason))]
        if unit in transfer.good or written.attempt <= transfer.refused.get(unit, 0):  # the answer was lost
            return [SendToSender(sender, Checked(number, unit, written.attempt, unit in transfer.good))]
        if unit in transfer.checking:
            return []
        transfer.checking[unit] = written.attempt
        index, part = divmod(unit, len(transfer.part_ends))
        offset = transfer.part_ends[part - 1] if part else 0
        length = transfer.part_ends[part] - offset
        page, source = transfer.pages[index], written.source
        return [CheckUnit(sender, number, unit, written.attempt, page, source, offset, length, written.checksum)]

    def checked(self, check: CheckUnit, good: bool) -> list[Action]:
        """The checksum was taken."""
        number, unit = check.transfer_id, check.unit
        transfer = self._transfers.get(number)
        if transfer is None:
            return []
        del transfer.checking[unit]
        if transfer.phase is not ReceiverPhase.LIVE:
            return self._end_if_fetched(number)
        answer = SendToSender(transfer.sender, Checked(number, unit, check.attempt, good))
        if not good:
            transfer.refused[unit] = check.attempt
            return [answer]
        transfer.good.add(unit)
        index = unit // len(transfer.part_ends)
        left = transfer.parts_left.get(index, len(transfer.part_ends)) - 1
        transfer.parts_left[index] = left
        if left:
            return [answer]
        transfer.pages_left -= 1
        if not transfer.pages_left:
            del self._transfers[number]
            self._remember(number, arrived=True)
        return [answer, EmitReceiverEvent(Arrived(number, index))]

    def _stopped(self, sender: str, stopped: Stopped) -> list[Action]:
        transfer = self._transfers.get(stopped.transfer_id)
        if transfer is None or transfer.sender != sender:
            return []
        transfer.reason = transfer.reason or stopped.reason
        transfer.phase = ReceiverPhase.STOPPING
        if self._fetches:
            return self._end_if_fetched(stopped.transfer_id)
        return [self._end(stopped.transfer_id)] if stopped.clean else self._cut_off(sender)

    # ---------------------------------------------------------------- time

    def tick(self, now: float) -> list[Action]:
        """Repeat StopWriting, and shut out senders that do not answer."""
        actions: list[Action] = []
        for number, transfer in list(self._transfers.items()):
            if transfer.phase is not ReceiverPhase.STOPPING or self._fetches:
                continue
            if now >= transfer.stop_at:
                actions += self._cut_off(transfer.sender)
            elif now >= transfer.resend_at:
                transfer.resend_at = now + STOP_RESEND_S
                actions.append(SendToSender(transfer.sender, StopWriting(number, transfer.reason)))
        return actions

    # ---------------------------------------------------------------- the end of transfers

    def shut_out(self, sender: str) -> list[Action]:
        """Nothing of `sender` can land any more."""
        del self._endpoints[sender]
        mine = [number for number, transfer in self._transfers.items() if transfer.sender == sender]
        for number in mine:
            self._transfers[number].reason = self._transfers[number].reason or f"{sender} was shut out"
        return [self._end(number) for number in mine]

    def _cut_off(self, sender: str) -> list[Action]:
        """End every transfer of `sender`, by its endpoint."""
        endpoint = self._endpoints.get(sender)
        if endpoint is None or endpoint.shutting:
            return []
        endpoint.shutting = True
        return [ShutOut(sender)]

    def _end_if_fetched(self, number: int) -> list[Action]:
        """End a stopping transfer whose pages only this end writes to, once it does not."""
        return [self._end(number)] if self._fetches and not self._transfers[number].checking else []

    def _end(self, number: int) -> Action:
        transfer = self._transfers.pop(number)
        self._remember(number, arrived=False)
        return EmitReceiverEvent(Revoked(number, transfer.reason))

    def _remember(self, number: int, *, arrived: bool) -> None:
        self._ended[number] = arrived
        while len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
