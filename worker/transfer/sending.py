"""The sending end of page transfer as a state machine: what is posted, what has landed, what is tried again.

    of a ticket   BEGINNING ──Ready──► SENDING ──every unit checked──► (delivered)
                      │                   │ StopWriting, cancel, a limit, a checksum refused ATTEMPTS_MAX times
                      │                   ▼
                      │                STOPPING ──nothing in flight: Stopped, clean──► (failed)
                      └── BeginRefused, BEGIN_LIMIT_S ─────────────────────────────────────► (failed)
    of a unit     queued ──window──► posted ──the engine is done──► written ──Checked──► delivered, or queued again

A unit is posted again only after its last write was seen to end and its checksum was refused. A write that *fails* is
another matter: bytes that left this process may land at any later time. So a failed or overdue write breaks the
endpoint: all its tickets fail, and Stopped says `clean=False`, upon which the receiver destroys its side.

Bounded in flight: units posted or not yet checked count against a window of units and bytes for each receiver, first
come first served; what waits beyond it are page numbers only.

Rejected: retrying failed writes on a new connection (the old one may still deliver); one window for all receivers (one
that hangs would hold up the pages of all others until its limit); one for each ticket (no bound).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from protocol.arrays import pack_int64, unpack_int32
from protocol.errors import BadInput, CapacityError, ProtocolError, WrongState
from worker.transfer.interface import (
    PARTS_MAX,
    TICKET_PAGES_MAX,
    TICKETS_MAX,
    TRANSFER_VERSION,
    Delivered,
    Description,
    Failed,
    Layout,
)
from worker.transfer.outgoing import Lane, SenderPhase, SenderTicket, Unit
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

#: A receiver may open a ticket this long after its sender: commands to both travel by different ways.
BEGIN_LIMIT_S: Final = 30.0
BEGIN_RESEND_S: Final = 0.1
#: A posted page takes milliseconds; a receiver that is this late hangs.
WRITE_LIMIT_S: Final = 30.0
CHECK_LIMIT_S: Final = 30.0
CHECK_RESEND_S: Final = 1.0
#: Connections to a receiver that had no ticket for this long are closed: it may be gone, or be elsewhere by now.
IDLE_LIMIT_S: Final = 300.0
#: Writes of one unit whose checksum did not fit, before the ticket fails.
ATTEMPTS_MAX: Final = 3
#: In flight to one receiver, posted or not yet checked: enough for 10 GB/s at 6 ms.
WINDOW_BYTES: Final = 64 << 20
WINDOW_UNITS: Final = 256
#: Ended tickets that are remembered: whether they ended cleanly.
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
        self._tickets: dict[int, SenderTicket] = {}
        self._ended: OrderedDict[int, bool] = OrderedDict()  # ticket -> clean
        self._lanes: dict[str, Lane] = {}
        self._endpoints: dict[str, int] = {}

    @property
    def open_tickets(self) -> int:
        return len(self._tickets)

    @property
    def in_flight(self) -> tuple[int, int]:
        """Units and bytes posted or not yet checked."""
        return sum(lane.units for lane in self._lanes.values()), sum(lane.bytes for lane in self._lanes.values())

    # ---------------------------------------------------------------- the owner of the pages

    def open(self, ticket: int, description: bytes, pages: int, part_ends: Sequence[int], now: float) -> list[Action]:
        """Raises as PageSender.open does; then nothing is open."""
        if ticket in self._tickets or ticket in self._ended:
            raise WrongState("it is open, or was", field="ticket", value=ticket)
        if len(self._tickets) >= TICKETS_MAX:
            raise CapacityError(f"{TICKETS_MAX} transfers are open", field="ticket", value=ticket, remedy="wait")
        if not 0 < pages <= TICKET_PAGES_MAX:
            raise BadInput(f"1 to {TICKET_PAGES_MAX} pages travel with a ticket", field="pages", value=pages)
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
            TRANSFER_VERSION, theirs.life, ticket, pages, self._layout, pack_int64(ends), self._engines[theirs.engine]
        )
        self._lanes.setdefault(theirs.address, Lane())
        self._tickets[ticket] = SenderTicket(
            theirs.address, begin, ends, theirs.engine, now + BEGIN_LIMIT_S, now + BEGIN_RESEND_S, pages_left=pages
        )
        return [Reach(theirs.address, theirs.key), SendToReceiver(theirs.address, begin)]

    def send(self, ticket: int, index: int, page: int, part: int, now: float) -> list[Action]:
        """Raises as PageSender.send does; then nothing is sent."""
        held = self._tickets.get(ticket)
        if held is None:
            if ticket not in self._ended:
                raise WrongState("it is not open", field="ticket", value=ticket)
            return []
        if not (0 <= index < held.begin.pages and 0 <= part < len(held.part_ends) and 0 <= page < self._host_pages):
            raise BadInput(
                f"the ticket has {held.begin.pages} pages in {len(held.part_ends)} parts, the pool {self._host_pages}",
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
        self._lanes[held.peer].queue.append((ticket, unit))
        return self._fill(held.peer, now)

    def cancel(self, ticket: int, reason: str, now: float) -> list[Action]:
        return self._stop(ticket, reason, now) if ticket in self._tickets else []

    def cancel_all(self, reason: str, now: float) -> list[Action]:
        return [action for ticket in list(self._tickets) for action in self.cancel(ticket, reason, now)]

    # ---------------------------------------------------------------- the receiver

    def heard(self, peer: str, message: ReceiverMessage, now: float) -> list[Action]:
        """A message of the receiver at `peer`. Nothing that it may say raises."""
        ticket = self._tickets.get(message.ticket)
        if ticket is None or ticket.peer != peer:
            if isinstance(message, StopWriting) and ticket is None:  # our answer was lost
                clean = self._ended.get(message.ticket, False)
                return [SendToReceiver(peer, Stopped(message.ticket, clean, "the ticket has ended"))]
            return []
        actions: list[Action] = []
        match message:
            case Ready():
                actions = self._ready(message, ticket, now)
            case Unknown():
                pass  # asked again until BEGIN_LIMIT_S
            case BeginRefused():
                actions = self._stop(message.ticket, f"refused: {message.reason}", now)
            case Checked():
                actions = self._checked(message, ticket, now)
            case StopWriting():
                actions = self._stop(message.ticket, f"stopped by its receiver: {message.reason}", now)
        return actions

    def _ready(self, ready: Ready, ticket: SenderTicket, now: float) -> list[Action]:
        if ticket.phase is not SenderPhase.BEGINNING:
            return []
        try:
            targets = unpack_int32(ready.pages, "pages")
        except ProtocolError as error:
            return self._stop(ready.ticket, str(error), now)
        if len(targets) != ticket.begin.pages:
            return self._stop(ready.ticket, f"{len(targets)} pages for {ticket.begin.pages}", now)
        ticket.phase, ticket.endpoint, ticket.targets = SenderPhase.SENDING, ready.endpoint, targets
        actions: list[Action] = []
        known = self._endpoints.get(ticket.peer)
        if known != ready.endpoint:
            if known is not None:  # the receiver has destroyed it
                actions += self._break(ticket.peer, known, "its receiver made a new endpoint")
            self._endpoints[ticket.peer] = ready.endpoint
            actions.append(Connect(ticket.peer, ready.endpoint, ticket.engine, ready.blob))
        lane = self._lanes[ticket.peer]
        lane.queue.extend((ready.ticket, unit) for unit in ticket.units)
        return actions + self._fill(ticket.peer, now)

    def _checked(self, checked: Checked, ticket: SenderTicket, now: float) -> list[Action]:
        unit = ticket.units.get(checked.unit)
        if (
            unit is None
            or not unit.written
            or unit.attempt != checked.attempt
            or ticket.phase is not SenderPhase.SENDING
        ):
            return []
        self._leave_flight(ticket, checked.unit)
        del ticket.units[checked.unit]
        if not checked.good:
            return self._again(checked.ticket, ticket, checked.unit, unit, now)
        actions: list[Action] = []
        index = checked.unit // len(ticket.part_ends)
        left = ticket.parts_left.get(index, len(ticket.part_ends)) - 1
        ticket.parts_left[index] = left
        if not left:
            ticket.pages_left -= 1
            actions.append(EmitSenderEvent(Delivered(checked.ticket, index)))
        if not ticket.pages_left:
            del self._tickets[checked.ticket]
            self._remember(checked.ticket, clean=True)
        return actions + self._fill(ticket.peer, now)

    def _again(self, number: int, ticket: SenderTicket, at: int, unit: Unit, now: float) -> list[Action]:
        if unit.attempt >= ATTEMPTS_MAX:
            index = at // len(ticket.part_ends)
            return self._stop(number, f"page {index} arrived with a wrong checksum {ATTEMPTS_MAX} times", now)
        ticket.units[at] = Unit(unit.source, unit.attempt + 1)
        self._lanes[ticket.peer].queue.append((number, at))
        return self._fill(ticket.peer, now)

    # ---------------------------------------------------------------- the engine

    def written(self, post: Post, checksum: int, error: str, now: float) -> list[Action]:
        """The write has ended: `error` is empty when its bytes have landed."""
        ticket = self._tickets.get(post.ticket)
        if ticket is None or ticket.endpoint != post.endpoint or post.unit not in ticket.units:
            return []  # the endpoint broke before
        if error:
            return self._break(post.peer, post.endpoint, f"a write failed: {error}")
        unit = ticket.units[post.unit]
        unit.posted, unit.written, unit.checksum = False, True, checksum
        unit.limit_at, unit.resend_at = now + CHECK_LIMIT_S, now + CHECK_RESEND_S
        ticket.posted -= 1
        if ticket.phase is SenderPhase.STOPPING:
            self._leave_flight(ticket, post.unit)
            return [] if ticket.posted else self._end(post.ticket, ticket.reason, clean=True)
        return [SendToReceiver(ticket.peer, Written(post.ticket, post.unit, unit.attempt, checksum, unit.source))]

    def not_posted(self, post: Post, reason: str, now: float) -> list[Action]:
        """The engine could not begin the write: nothing has left, so the ticket ends cleanly. The next one connects
        anew."""
        ticket = self._tickets.get(post.ticket)
        if ticket is None or ticket.endpoint != post.endpoint or post.unit not in ticket.units:
            return []
        if self._endpoints.get(post.peer) == post.endpoint:
            del self._endpoints[post.peer]
        self._leave_flight(ticket, post.unit)
        del ticket.units[post.unit]
        ticket.posted -= 1
        if ticket.phase is SenderPhase.STOPPING:
            return [] if ticket.posted else self._end(post.ticket, ticket.reason, clean=True)
        return self._stop(post.ticket, f"cannot write to its pages: {reason}", now)

    def _fill(self, peer: str, now: float) -> list[Action]:
        """Post what the window of `peer` takes."""
        actions: list[Action] = []
        lane = self._lanes[peer]
        while lane.queue:
            number, at = lane.queue[0]
            ticket = self._tickets.get(number)
            if ticket is None or ticket.phase is not SenderPhase.SENDING:
                lane.queue.popleft()
                continue
            offset, length = ticket.extent(at)
            is_full = lane.units >= self._window_units or lane.bytes + length > self._window_bytes
            if is_full and lane.units:  # a unit larger than the window travels alone
                break
            lane.queue.popleft()
            lane.units += 1
            lane.bytes += length
            actions.append(self._post(number, ticket, at, offset, length, now))
        return actions

    def _post(self, number: int, ticket: SenderTicket, at: int, offset: int, length: int, now: float) -> Post:
        assert ticket.targets is not None
        unit = ticket.units[at]
        unit.posted, unit.limit_at = True, now + WRITE_LIMIT_S
        ticket.posted += 1
        ticket.in_flight.add(at)
        target = int(ticket.targets[at // len(ticket.part_ends)])
        return Post(ticket.peer, ticket.endpoint, number, at, unit.attempt, unit.source, target, offset, length)

    def _leave_flight(self, ticket: SenderTicket, unit: int) -> None:
        ticket.in_flight.remove(unit)
        lane = self._lanes[ticket.peer]
        lane.units -= 1
        lane.bytes -= ticket.extent(unit)[1]

    # ---------------------------------------------------------------- time

    def tick(self, now: float) -> list[Action]:
        """Repeat what was not answered, and give up what is overdue."""
        actions: list[Action] = []
        for number, ticket in list(self._tickets.items()):
            if number not in self._tickets:  # broken with another ticket of its endpoint
                continue
            if ticket.phase is SenderPhase.BEGINNING:
                actions += self._tick_beginning(number, ticket, now)
            else:
                actions += self._tick_units(number, ticket, now)
        in_use = {ticket.peer for ticket in self._tickets.values()}
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

    def _tick_beginning(self, number: int, ticket: SenderTicket, now: float) -> list[Action]:
        if now >= ticket.limit_at:
            return self._end(number, f"its receiver did not answer within {BEGIN_LIMIT_S:g} s", clean=True)
        if now < ticket.resend_at:
            return []
        ticket.resend_at = now + BEGIN_RESEND_S
        return [SendToReceiver(ticket.peer, ticket.begin)]

    def _tick_units(self, number: int, ticket: SenderTicket, now: float) -> list[Action]:
        actions: list[Action] = []
        for at in ticket.in_flight:
            unit = ticket.units[at]
            if unit.posted and now >= unit.limit_at:
                return self._break(ticket.peer, ticket.endpoint, f"a write took longer than {WRITE_LIMIT_S:g} s")
            if not unit.written or ticket.phase is not SenderPhase.SENDING:
                continue
            if now >= unit.limit_at:
                return actions + self._stop(number, f"a page was not verified within {CHECK_LIMIT_S:g} s", now)
            if now >= unit.resend_at:
                unit.resend_at = now + CHECK_RESEND_S
                actions.append(
                    SendToReceiver(ticket.peer, Written(number, at, unit.attempt, unit.checksum, unit.source))
                )
        return actions

    # ---------------------------------------------------------------- the end of tickets

    def _stop(self, number: int, reason: str, now: float) -> list[Action]:
        """Post no more; ends when nothing is in flight."""
        ticket = self._tickets[number]
        if ticket.phase is SenderPhase.STOPPING:
            return []
        ticket.phase, ticket.reason = SenderPhase.STOPPING, reason
        for at, unit in list(ticket.units.items()):
            if not unit.posted:
                del ticket.units[at]
                if unit.written:
                    self._leave_flight(ticket, at)
        if ticket.posted:
            return []
        return self._end(number, reason, clean=True) + self._fill(ticket.peer, now)

    def _break(self, peer: str, endpoint: int, reason: str) -> list[Action]:
        """A write has an unknown end: every ticket of the endpoint fails, uncleanly."""
        if self._endpoints.get(peer) == endpoint:
            del self._endpoints[peer]
        mine = [
            n for n, t in self._tickets.items() if t.peer == peer and t.endpoint == endpoint and t.targets is not None
        ]
        actions: list[Action] = [Disconnect(peer, endpoint)]
        for number in mine:
            ticket = self._tickets[number]
            for at in list(ticket.in_flight):
                self._leave_flight(ticket, at)
            actions += self._end(number, ticket.reason or reason, clean=False)
        return actions

    def _end(self, number: int, reason: str, *, clean: bool) -> list[Action]:
        ticket = self._tickets.pop(number)
        self._remember(number, clean=clean)
        return [SendToReceiver(ticket.peer, Stopped(number, clean, reason)), EmitSenderEvent(Failed(number, reason))]

    def _remember(self, number: int, *, clean: bool) -> None:
        self._ended[number] = clean
        while len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
