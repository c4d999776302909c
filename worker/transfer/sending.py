"""The sending end of page transfer as a state machine: what is posted, what has landed, what is tried again. Pure.

    of a transfer   BEGINNING ──Ready──► SENDING ──every unit checked──► (delivered)
                      │                   │ StopWriting, cancel, a limit, a checksum refused ATTEMPTS_MAX times
                      │                   ▼
                      │                STOPPING ──nothing in flight: Stopped, clean──► (failed)
                      └── BeginRefused, BEGIN_LIMIT_S ─────────────────────────────────────► (failed)
    of a unit     queued ──window──► posted ──the engine is done──► written ──Checked──► delivered, or queued again

A unit is posted again only after its last write was seen to end and its checksum was refused. A write that *fails* is
another matter: bytes that left this process may land at any later time. So a failed or overdue write breaks the
endpoint: all its transfers fail, and Stopped says `clean=False`, upon which the receiver destroys its side.

Bounded in flight: units posted or not yet checked count against a window of units and bytes for each receiver, first
come first served; what waits beyond it are page numbers only.

Rejected: retrying failed writes on a new connection (the old one may still deliver); one window for all receivers (one
that hangs would hold up the pages of all others until its limit); one for each transfer (no bound).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from protocol.arrays import pack_int64, unpack_int32
from protocol.errors import BadInput, CapacityError, ProtocolError, WrongState
from worker.transfer.interface import (
    PARTS_MAX,
    TRANSFER_PAGES_MAX,
    TRANSFER_VERSION,
    TRANSFERS_MAX,
    Delivered,
    Description,
    Failed,
    Layout,
)
from worker.transfer.outgoing import Lane, SenderPhase, SenderTransfer, Unit
from worker.transfer.sender_actions import (
    Action,
    Connect,
    Disconnect,
    EmitSenderEvent,
    Leave,
    Post,
    Reach,
    SendToReceiver,
)
from worker.transfer.wire import (
    Begin,
    BeginRefused,
    Checked,
    Ready,
    ReceiverMessage,
    Stopped,
    StopWriting,
    Unknown,
    Written,
)

#: A receiver may open a transfer this long after its sender: commands to both travel by different ways.
BEGIN_LIMIT_S: Final = 30.0
BEGIN_RESEND_S: Final = 0.1
#: A posted page takes milliseconds; a receiver that is this late hangs.
WRITE_LIMIT_S: Final = 30.0
CHECK_LIMIT_S: Final = 30.0
CHECK_RESEND_S: Final = 1.0
#: Connections to a receiver that had no transfer for this long are closed: it may be gone, or be elsewhere by now.
IDLE_LIMIT_S: Final = 300.0
#: Writes of one unit whose checksum did not fit, before the transfer fails.
ATTEMPTS_MAX: Final = 3
#: In flight to one receiver, posted or not yet checked: enough for 10 GB/s at 6 ms.
WINDOW_BYTES: Final = 64 << 20
WINDOW_UNITS: Final = 256
#: Ended transfers that are remembered: whether they ended cleanly.
ENDED_MAX: Final = 4_096

assert CHECK_RESEND_S * 4 < CHECK_LIMIT_S  # several messages may be lost
assert BEGIN_RESEND_S * 4 < BEGIN_LIMIT_S


class Sending:
    """Events in, actions out. `engines`: those that this process can send by, and what receivers that fetch are told of
    where its pages lie."""

    def __init__(
        self,
        layout: Layout,
        host_pages: int,
        engines: Mapping[str, bytes],
        *,
        window_bytes: int = WINDOW_BYTES,
        window_units: int = WINDOW_UNITS,
    ) -> None:
        self._layout = layout
        self._host_pages = host_pages
        self._engines = engines
        self._window_bytes = window_bytes
        self._window_units = window_units
        self._transfers: dict[int, SenderTransfer] = {}
        self._ended: OrderedDict[int, bool] = OrderedDict()  # transfer -> clean
        self._lanes: dict[str, Lane] = {}
        self._endpoints: dict[str, int] = {}

    @property
    def open_transfers(self) -> int:
        return len(self._transfers)

    @property
    def in_flight(self) -> tuple[int, int]:
        """Units and bytes posted or not yet checked."""
        return sum(lane.units for lane in self._lanes.values()), sum(lane.bytes for lane in self._lanes.values())

    # ---------------------------------------------------------------- the owner of the pages

    def open(
        self, transfer_id: int, description: bytes, pages: int, part_ends: Sequence[int], now: float
    ) -> list[Action]:
        """Raises as PageSender.open does; then nothing is open."""
        if transfer_id in self._transfers or transfer_id in self._ended:
            raise WrongState("it is open, or was", field="transfer_id", value=transfer_id)
        if len(self._transfers) >= TRANSFERS_MAX:
            raise CapacityError(
                f"{TRANSFERS_MAX} transfers are open", field="transfer_id", value=transfer_id, remedy="wait"
            )
        if not 0 < pages <= TRANSFER_PAGES_MAX:
            raise BadInput(f"1 to {TRANSFER_PAGES_MAX} pages travel with a transfer", field="pages", value=pages)
        theirs = Description.decode(description)
        self._layout.require_same(theirs.layout, theirs.name)
        if theirs.engine not in self._engines:
            raise BadInput(
                f"{theirs.name} receives by {theirs.engine}, this worker sends by {', '.join(sorted(self._engines))}",
                field="worker.transfer",
                value=theirs.engine,
                remedy="set one transfer engine for prefill and decode workers, and install it on both",
            )
        ends = tuple(part_ends) or (self._layout.page_bytes,)
        if not len(ends) <= PARTS_MAX or ends[-1] != self._layout.page_bytes or list(ends) != sorted({0, *ends})[1:]:
            raise BadInput(
                f"1 to {PARTS_MAX} ascending ends, the last {self._layout.page_bytes}", field="part_ends", value=ends
            )
        begin = Begin(
            TRANSFER_VERSION,
            theirs.receiver_id,
            transfer_id,
            pages,
            self._layout,
            pack_int64(ends),
            self._engines[theirs.engine],
        )
        self._lanes.setdefault(theirs.address, Lane())
        self._transfers[transfer_id] = SenderTransfer(
            theirs.address, begin, ends, theirs.engine, now + BEGIN_LIMIT_S, now + BEGIN_RESEND_S, pages_left=pages
        )
        return [Reach(theirs.address, theirs.key), SendToReceiver(theirs.address, begin)]

    def send(self, transfer_id: int, index: int, page: int, part: int, now: float) -> list[Action]:
        """Raises as PageSender.send does; then nothing is sent."""
        held = self._transfers.get(transfer_id)
        if held is None:
            if transfer_id not in self._ended:
                raise WrongState("it is not open", field="transfer_id", value=transfer_id)
            return []
        if not (0 <= index < held.begin.pages and 0 <= part < len(held.part_ends) and 0 <= page < self._host_pages):
            raise BadInput(
                f"the transfer has {held.begin.pages} pages in {len(held.part_ends)} parts, the pool "
                f"{self._host_pages}",
                field="index, part, page",
                value=(index, part, page),
            )
        unit = index * len(held.part_ends) + part
        if unit in held.sent:
            raise WrongState("it was sent", field="index, part", value=(index, part))
        if held.phase is SenderPhase.STOPPING:
            return []
        held.sent.add(unit)
        held.units[unit] = Unit(page)
        if held.phase is SenderPhase.BEGINNING:
            return []
        self._lanes[held.peer].add(transfer_id, (unit,))
        return self._fill(held.peer, now)

    def cancel(self, transfer_id: int, reason: str, now: float) -> list[Action]:
        return self._stop(transfer_id, reason, now) if transfer_id in self._transfers else []

    def cancel_all(self, reason: str, now: float) -> list[Action]:
        return [action for transfer_id in list(self._transfers) for action in self.cancel(transfer_id, reason, now)]

    # ---------------------------------------------------------------- the receiver

    def heard(self, peer: str, message: ReceiverMessage, now: float) -> list[Action]:
        """A message of the receiver at `peer`. Nothing that it may say raises."""
        transfer = self._transfers.get(message.transfer_id)
        if transfer is None or transfer.peer != peer:
            if isinstance(message, StopWriting) and transfer is None:  # our answer was lost
                clean = self._ended.get(message.transfer_id, False)
                return [SendToReceiver(peer, Stopped(message.transfer_id, clean, "the transfer has ended"))]
            return []
        actions: list[Action] = []
        match message:
            case Ready():
                actions = self._ready(message, transfer, now)
            case Unknown():
                pass  # asked again until BEGIN_LIMIT_S
            case BeginRefused():
                actions = self._stop(message.transfer_id, f"refused: {message.reason}", now)
            case Checked():
                actions = self._checked(message, transfer, now)
            case StopWriting():
                actions = self._stop(message.transfer_id, f"stopped by its receiver: {message.reason}", now)
        return actions

    def _ready(self, ready: Ready, transfer: SenderTransfer, now: float) -> list[Action]:
        if transfer.phase is not SenderPhase.BEGINNING:
            return []
        try:
            targets = unpack_int32(ready.pages, "pages")
        except ProtocolError as error:
            return self._stop(ready.transfer_id, str(error), now)
        if len(targets) != transfer.begin.pages:
            return self._stop(ready.transfer_id, f"{len(targets)} pages for {transfer.begin.pages}", now)
        transfer.phase, transfer.endpoint, transfer.targets = SenderPhase.SENDING, ready.endpoint, targets
        actions: list[Action] = []
        known = self._endpoints.get(transfer.peer)
        if known != ready.endpoint:
            if known is not None:  # the receiver has destroyed it
                actions += self._break(transfer.peer, known, "its receiver made a new endpoint")
            self._endpoints[transfer.peer] = ready.endpoint
            actions.append(Connect(transfer.peer, ready.endpoint, transfer.engine, ready.blob))
        self._lanes[transfer.peer].add(ready.transfer_id, transfer.units)
        return actions + self._fill(transfer.peer, now)

    def _checked(self, checked: Checked, transfer: SenderTransfer, now: float) -> list[Action]:
        unit = transfer.units.get(checked.unit)
        if (
            unit is None
            or not unit.written
            or unit.attempt != checked.attempt
            or transfer.phase is not SenderPhase.SENDING
        ):
            return []
        self._leave_flight(transfer, checked.unit)
        del transfer.units[checked.unit]
        if not checked.good:
            return self._again(checked.transfer_id, transfer, checked.unit, unit, now)
        actions: list[Action] = []
        index = checked.unit // len(transfer.part_ends)
        left = transfer.parts_left.get(index, len(transfer.part_ends)) - 1
        transfer.parts_left[index] = left
        if not left:
            transfer.pages_left -= 1
            actions.append(EmitSenderEvent(Delivered(checked.transfer_id, index)))
        if not transfer.pages_left:
            del self._transfers[checked.transfer_id]
            self._remember(checked.transfer_id, clean=True)
        return actions + self._fill(transfer.peer, now)

    def _again(self, number: int, transfer: SenderTransfer, at: int, unit: Unit, now: float) -> list[Action]:
        if unit.attempt >= ATTEMPTS_MAX:
            index = at // len(transfer.part_ends)
            return self._stop(number, f"page {index} arrived with a wrong checksum {ATTEMPTS_MAX} times", now)
        transfer.units[at] = Unit(unit.source, unit.attempt + 1)
        self._lanes[transfer.peer].add(number, (at,))
        return self._fill(transfer.peer, now)

    # ---------------------------------------------------------------- the engine

    def written(self, post: Post, checksum: int, error: str, now: float) -> list[Action]:
        """The write has ended: `error` is empty when its bytes have landed."""
        transfer = self._transfers.get(post.transfer_id)
        if transfer is None or transfer.endpoint != post.endpoint or post.unit not in transfer.units:
            return []  # the endpoint broke before
        if error:
            return self._break(post.peer, post.endpoint, f"a write failed: {error}")
        unit = transfer.units[post.unit]
        unit.posted, unit.written, unit.checksum = False, True, checksum
        unit.limit_at, unit.resend_at = now + CHECK_LIMIT_S, now + CHECK_RESEND_S
        transfer.posted -= 1
        if transfer.phase is SenderPhase.STOPPING:
            self._leave_flight(transfer, post.unit)
            return [] if transfer.posted else self._end(post.transfer_id, transfer.reason, clean=True)
        return [
            SendToReceiver(transfer.peer, Written(post.transfer_id, post.unit, unit.attempt, checksum, unit.source))
        ]

    def not_posted(self, post: Post, reason: str, now: float) -> list[Action]:
        """The engine could not begin the write: nothing has left, so the transfer ends cleanly. The next one connects
        anew."""
        transfer = self._transfers.get(post.transfer_id)
        if transfer is None or transfer.endpoint != post.endpoint or post.unit not in transfer.units:
            return []
        if self._endpoints.get(post.peer) == post.endpoint:
            del self._endpoints[post.peer]
        self._leave_flight(transfer, post.unit)
        del transfer.units[post.unit]
        transfer.posted -= 1
        if transfer.phase is SenderPhase.STOPPING:
            return [] if transfer.posted else self._end(post.transfer_id, transfer.reason, clean=True)
        return self._stop(post.transfer_id, f"cannot write to its pages: {reason}", now)

    def _fill(self, peer: str, now: float) -> list[Action]:
        """Post what the window of `peer` takes, a unit of each transfer in turn."""
        actions: list[Action] = []
        lane = self._lanes[peer]
        while lane.waiting:
            number, units = next(iter(lane.waiting.items()))
            transfer = self._transfers.get(number)
            if transfer is None or transfer.phase is not SenderPhase.SENDING or not units:
                del lane.waiting[number]
                continue
            at = units[0]
            offset, length = transfer.extent(at)
            is_full = lane.units >= self._window_units or lane.bytes + length > self._window_bytes
            if is_full and lane.units:  # a unit larger than the window travels alone
                break
            lane.take(number)
            lane.units += 1
            lane.bytes += length
            actions.append(self._post(number, transfer, at, offset, length, now))
        return actions

    def _post(self, number: int, transfer: SenderTransfer, at: int, offset: int, length: int, now: float) -> Post:
        assert transfer.targets is not None
        unit = transfer.units[at]
        unit.posted, unit.limit_at = True, now + WRITE_LIMIT_S
        transfer.posted += 1
        transfer.in_flight.add(at)
        target = int(transfer.targets[at // len(transfer.part_ends)])
        return Post(transfer.peer, transfer.endpoint, number, at, unit.attempt, unit.source, target, offset, length)

    def _leave_flight(self, transfer: SenderTransfer, unit: int) -> None:
        transfer.in_flight.remove(unit)
        lane = self._lanes[transfer.peer]
        lane.units -= 1
        lane.bytes -= transfer.extent(unit)[1]

    # ---------------------------------------------------------------- time

    def tick(self, now: float) -> list[Action]:
        """Repeat what was not answered, and give up what is overdue."""
        actions: list[Action] = []
        for number, transfer in list(self._transfers.items()):
            if number not in self._transfers:  # broken with another transfer of its endpoint
                continue
            if transfer.phase is SenderPhase.BEGINNING:
                actions += self._tick_beginning(number, transfer, now)
            else:
                actions += self._tick_units(number, transfer, now)
        in_use = {transfer.peer for transfer in self._transfers.values()}
        for peer, lane in list(self._lanes.items()):
            actions += self._fill(peer, now)
            if peer in in_use:
                lane.idle_at = None
            elif lane.idle_at is None:
                lane.idle_at = now
            elif now >= lane.idle_at + IDLE_LIMIT_S:
                actions += self._leave(peer)
        return actions

    def _leave(self, peer: str) -> list[Action]:
        del self._lanes[peer]
        endpoint = self._endpoints.pop(peer, None)
        return [Leave(peer)] if endpoint is None else [Disconnect(peer, endpoint), Leave(peer)]

    def _tick_beginning(self, number: int, transfer: SenderTransfer, now: float) -> list[Action]:
        if now >= transfer.limit_at:
            return self._end(number, f"its receiver did not answer within {BEGIN_LIMIT_S:g} s", clean=True)
        if now < transfer.resend_at:
            return []
        transfer.resend_at = now + BEGIN_RESEND_S
        return [SendToReceiver(transfer.peer, transfer.begin)]

    def _tick_units(self, number: int, transfer: SenderTransfer, now: float) -> list[Action]:
        actions: list[Action] = []
        for at in transfer.in_flight:
            unit = transfer.units[at]
            if unit.posted and now >= unit.limit_at:
                return self._break(transfer.peer, transfer.endpoint, f"a write took longer than {WRITE_LIMIT_S:g} s")
            if not unit.written or transfer.phase is not SenderPhase.SENDING:
                continue
            if now >= unit.limit_at:
                return actions + self._stop(number, f"a page was not verified within {CHECK_LIMIT_S:g} s", now)
            if now >= unit.resend_at:
                unit.resend_at = now + CHECK_RESEND_S
                actions.append(
                    SendToReceiver(transfer.peer, Written(number, at, unit.attempt, unit.checksum, unit.source))
                )
        return actions

    # ---------------------------------------------------------------- the end of transfers

    def _stop(self, number: int, reason: str, now: float) -> list[Action]:
        """Post no more; ends when nothing is in flight."""
        transfer = self._transfers[number]
        if transfer.phase is SenderPhase.STOPPING:
            return []
        transfer.phase, transfer.reason = SenderPhase.STOPPING, reason
        for at, unit in list(transfer.units.items()):
            if not unit.posted:
                del transfer.units[at]
                if unit.written:
                    self._leave_flight(transfer, at)
        if transfer.posted:
            return []
        return self._end(number, reason, clean=True) + self._fill(transfer.peer, now)

    def _break(self, peer: str, endpoint: int, reason: str) -> list[Action]:
        """A write has an unknown end: every transfer of the endpoint fails, uncleanly."""
        if self._endpoints.get(peer) == endpoint:
            del self._endpoints[peer]
        mine = [
            n for n, t in self._transfers.items() if t.peer == peer and t.endpoint == endpoint and t.targets is not None
        ]
        actions: list[Action] = [Disconnect(peer, endpoint)]
        for number in mine:
            transfer = self._transfers[number]
            for at in list(transfer.in_flight):
                self._leave_flight(transfer, at)
            actions += self._end(number, transfer.reason or reason, clean=False)
        return actions

    def _end(self, number: int, reason: str, *, clean: bool) -> list[Action]:
        transfer = self._transfers.pop(number)
        self._remember(number, clean=clean)
        return [SendToReceiver(transfer.peer, Stopped(number, clean, reason)), EmitSenderEvent(Failed(number, reason))]

    def _remember(self, number: int, *, clean: bool) -> None:
        self._ended[number] = clean
        while len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
