"""What a worker owes the coordinator: tokens, durable lengths and events, cut into numbered reports.

The executor thread writes, the link reads; every method holds one lock for a bounded time and none waits. Progress is
state, not a queue: tokens of one request coalesce until a report takes them, a durable length replaces the one before,
and so do hits and misses. A coordinator that is away therefore costs no more than the tokens of the pages it granted,
and a slow one gets fewer, larger reports.

    dirty ── take ──► in flight (numbered, kept) ── ack ──► forgotten
                            └── replay ──► sent again, the very same bytes

A report stays in flight until a cumulative acknowledgement covers it; `REPORTS_UNACKED_MAX` of them and `take` answers
None while dirt goes on coalescing. Receivers apply the tokens of a report before its events; so events wait while
tokens that were added before them do not all fit (`REPORT_TOKENS_MAX`).

The outbox also keeps the inventory that a hello carries. A placement is held from the moment the link hands its Admit
to the executor until the executor says Released; it is listed until Released was acknowledged. What was given to it is
noted as commands pass by, its progress as events are acknowledged: inventory and reports in flight together say all.

Rejected: one message per step and request (4 us each, and a queue that grows without a reader); renumbering on
reconnect (a report that did arrive would be applied twice).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from basics.rooms import RoomUse
from protocol.arrays import pack_int32, pack_int64
from protocol.errors import InternalError, ProtocolError
from protocol.inventory import NO_RESIZE, InventoryRow, pack_rows
from protocol.messages import (
    NO_DRAFTS,
    NO_HOT_BUFFER,
    WARM_START_BYTES_MAX,
    WORKER_MESSAGE_BYTES_MAX,
    Admit,
    Counters,
    Event,
    Grant,
    Inventory,
    Logprobs,
    Parked,
    Progress,
    Receive,
    Released,
    Report,
    Resize,
    Resized,
    Staged,
    Started,
)

#: Reports sent and not acknowledged; at one per 20 ms they cover an absence of a second before coalescing begins.
REPORTS_UNACKED_MAX: Final = 64
#: Tokens in one report, and words of their rows of log-probabilities: 1 MiB on the wire.
REPORT_TOKENS_MAX: Final = 262_144
#: Requests whose progress one report carries; 28 bytes each.
REPORT_REQUESTS_MAX: Final = 16_384
#: Events in one report.
REPORT_EVENTS_MAX: Final = 4_096
#: Bytes of last top-k in one report, but for those of one more request.
REPORT_TOPK_BYTES_MAX: Final = 4 * 1024 * 1024
#: Events not yet in a report. Each answers a command, so only an executor gone wild gets here.
EVENTS_PENDING_MAX: Final = 1_048_576

assert 4 * REPORT_TOKENS_MAX + 28 * REPORT_REQUESTS_MAX < WORKER_MESSAGE_BYTES_MAX // 4  # room for events' texts,
assert REPORT_TOPK_BYTES_MAX + WARM_START_BYTES_MAX < WORKER_MESSAGE_BYTES_MAX // 2  # and for what they carry


@dataclass(slots=True)
class _Dirt:
    """Progress of one placement since the last report that carried it. `ids` are generated positions `start`... ."""

    request_index: int
    start: int
    durable: int
    ids: list[int] = field(default_factory=list)
    rows: list[bytes] = field(default_factory=list)  # of log-probabilities: one of each token, or none

    @property
    def places(self) -> int:
        """Words that a token takes in a report, with its row."""
        return 1 + len(self.rows[0]) // 4 if self.rows else 1

    def cut(self, count: int) -> _Dirt:
        """Take the first `count` tokens off."""
        first = _Dirt(self.request_index, self.start, self.durable, self.ids[:count], self.rows[:count])
        self.start, self.ids, self.rows = self.start + count, self.ids[count:], self.rows[count:]
        return first


@dataclass(slots=True)
class _HeldRow(InventoryRow):
    """Of one placement, for the hello."""

    chunks_since: int = 0  # granted while the Resize was under way: for the buffer that it makes


@dataclass(frozen=True, slots=True)
class _InFlight:
    report: Report
    sent_at: float


def _ignore() -> None:
    return


class Outbox:
    """Thread-safe. `on_dirty` is called, from the writer's thread and outside the lock, when there is news again."""

    def __init__(self, epoch: int, on_dirty: Callable[[], None] = _ignore) -> None:
        self.epoch = epoch
        self.on_dirty = on_dirty
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._dirt: dict[int, _Dirt] = {}
        self._events: deque[Event] = deque()
        self._swaps: dict[int, tuple[int, int]] = {}  # hits and misses by placement, in no report yet
        self._drafts: dict[int, tuple[int, int]] = {}  # likewise, drafted and accepted; they go with the hits
        self._swap_totals = (0, 0, 0)
        self._has_swaps = False
        self._in_flight: deque[_InFlight] = deque()
        self._rows: dict[int, _HeldRow] = {}
        self._next_number = 1
        self._command_ack = 0
        self._signalled = False

    def restart(self, epoch: int) -> None:
        """Forget everything and number from 1 again: a new epoch. InternalError while a placement is held."""
        if held := self.held():
            raise InternalError("a new epoch while admissions are held", field="held", value=len(held))
        with self._lock:
            self.epoch = epoch
            self._clear()

    # ---------------------------------------------------------------- executor's side

    def add_tokens(
        self, request_index: int, placement: int, start: int, ids: list[int], durable: int, rows: Sequence[bytes] = ()
    ) -> None:
        """`ids` are the tokens at generated positions `start`...; `durable` rows are known to be in host memory. `rows`
        are their log-probabilities, of a request that asks for them.

        Raises InternalError when they do not continue what this placement added before and no report took yet.
        """
        with self._lock:
            dirt = self._dirt.get(placement)
            if dirt is None:
                self._dirt[placement] = _Dirt(request_index, start, durable, list(ids), list(rows))
            else:
                _extend(dirt, placement, start, ids)
                dirt.rows.extend(rows)
                dirt.durable = max(dirt.durable, durable)
            self._note(placement, start + len(ids), durable)
        self._signal()

    def set_durable(self, request_index: int, placement: int, durable: int) -> None:
        """Rows of this placement known to be in host memory; never lowers what was said before."""
        with self._lock:
            dirt = self._dirt.setdefault(placement, _Dirt(request_index, 0, durable))
            dirt.durable = max(dirt.durable, durable)
            self._note(placement, 0, durable)
        self._signal()

    def add_event(self, event: Event) -> None:
        """Append `event`. Raises InternalError past EVENTS_PENDING_MAX."""
        with self._lock:
            if isinstance(event, Released) and (row := self._rows.get(event.placement)) is not None:
                row.is_released = True
            if len(self._events) >= EVENTS_PENDING_MAX:
                raise InternalError("events that no report took", field="EVENTS_PENDING_MAX", value=EVENTS_PENDING_MAX)
            self._events.append(event)
        self._signal()

    def count_swaps(
        self,
        requests: Mapping[int, tuple[int, int]],
        totals: tuple[int, int, int],
        drafts: Mapping[int, tuple[int, int]] = NO_DRAFTS,
    ) -> None:
        """Hits and misses so far of `requests`, by placement; hits, misses and bytes of the worker; drafts and accepted
        ones of requests that have any."""
        with self._lock:
            self._swaps.update(requests)
            self._drafts.update(drafts)
            self._swap_totals, self._has_swaps = totals, True
        self._signal()

    def _signal(self) -> None:
        if not self._signalled:
            self._signalled = True
            self.on_dirty()

    # ---------------------------------------------------------------- link's side

    def hold(self, admit: Admit | Receive) -> None:
        """The executor is about to get this placement; it is held until Released."""
        row = _HeldRow(
            admit.placement, len(admit.host_pages) // 4, request_index=admit.request_index, hot_slots=NO_HOT_BUFFER
        )
        if isinstance(admit, Admit):
            row.hot_slots, row.hot_chunks = admit.hot_slots, admit.hot_chunks
            row.generated_tokens, row.durable_tokens = len(admit.generated) // 4, admit.durable_tokens
            row.is_staged = not admit.computes_prompt
        with self._lock:
            self._rows[admit.placement] = row

    def give(self, command: Grant | Resize) -> None:
        """The executor is about to get this too. Of a placement that has departed: nothing."""
        with self._lock:
            row = self._rows.get(command.placement)
            if row is None:
                return
            if isinstance(command, Grant):
                row.host_pages += len(command.host_pages) // 4
                row.hot_chunks += command.hot_chunks
                row.chunks_since += command.hot_chunks
                row.is_parked = False
            else:
                row.resize_slots, row.resize_chunks = command.hot_slots, command.hot_chunks
                row.chunks_since = 0

    def held(self) -> list[int]:
        """Every placement the executor may still touch memory of."""
        with self._lock:
            return [row.placement for row in self._rows.values() if not row.is_released]

    def inventory(self) -> bytes:
        """The rows of those, and of the ones whose Released was not acknowledged."""
        with self._lock:
            return pack_rows(self._rows.values())

    def repeat_swap_totals(self) -> None:
        """Another coordinator listens: say the totals of swap-in again, in the next report."""
        with self._lock:
            self._has_swaps = True

    def take(self, command_ack: int, now: float, *, probe: bool = False) -> Report | None:
        """The next report, kept until it is acknowledged; None when nothing is new or too much is in flight.

        A `command_ack` higher than the last one sent is news too; a `probe` goes without news, to be acknowledged.
        `now` (seconds, any clock) dates the report for `overdue`.
        """
        with self._lock:
            self._signalled = False
            news = probe or self._is_dirty(command_ack)
            if not news or len(self._in_flight) >= REPORTS_UNACKED_MAX:
                return None
            progress = self._cut_progress()
            events = () if self._dirt else tuple(self._cut_events())
            report = Report(self._next_number, self.epoch, command_ack, progress, events)
            self._next_number += 1
            self._command_ack = command_ack
            self._in_flight.append(_InFlight(report, now))
            return report

    def ack(self, number: int) -> None:
        """Reports up to `number` arrived. An old number does nothing; ProtocolError for one that was never sent."""
        with self._lock:
            if number >= self._next_number:
                raise ProtocolError(
                    f"acknowledges a report that was never sent (last: {self._next_number - 1})",
                    field="ReportAck.number",
                    value=number,
                )
            while self._in_flight and self._in_flight[0].report.number <= number:
                for event in self._in_flight.popleft().report.events:
                    self._acknowledged(event)

    def can_replay(self, first: int) -> bool:
        """Whether every report from `first` on is still here (or `first` is the next one)."""
        with self._lock:
            return self._next_number - len(self._in_flight) <= first <= self._next_number

    def replay(self, first: int) -> list[Report]:
        """The reports in flight from `first` on, unchanged. ProtocolError when it was acknowledged or never sent."""
        with self._lock:
            oldest = self._next_number - len(self._in_flight)
            if not oldest <= first <= self._next_number:
                raise ProtocolError(
                    f"reports {oldest}..{self._next_number - 1} can be sent again",
                    field="ReplayReports.first",
                    value=first,
                )
            return [kept.report for kept in islice(self._in_flight, first - oldest, None)]

    def overdue(self, now: float, limit_s: float) -> int | None:
        """Number of the oldest report in flight when it was sent more than `limit_s` ago."""
        with self._lock:
            if self._in_flight and now - self._in_flight[0].sent_at > limit_s:
                return self._in_flight[0].report.number
            return None

    def touch(self, now: float) -> None:
        """Date everything in flight anew: it was just sent again."""
        with self._lock:
            self._in_flight = deque(_InFlight(kept.report, now) for kept in self._in_flight)

    def is_dirty(self, command_ack: int) -> bool:
        """Whether `take` has news to report."""
        with self._lock:
            return self._is_dirty(command_ack)

    @property
    def next_number(self) -> int:
        return self._next_number

    @property
    def first_number(self) -> int:
        """The oldest report in flight; with none, the next one."""
        return self._next_number - len(self._in_flight)

    def room_use(self) -> dict[str, RoomUse]:
        """Measure what waits for the next report; from any thread."""
        return {"worker_reports": RoomUse(len(self._events), EVENTS_PENDING_MAX)}

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def pending_tokens(self) -> int:
        """Tokens that no report has taken yet; a scrape-time sum."""
        with self._lock:
            return sum(len(dirt.ids) for dirt in self._dirt.values())

    # ---------------------------------------------------------------- under the lock

    def _note(self, placement: int, generated: int, durable: int) -> None:
        row = self._rows.get(placement)
        if row is not None:
            row.generated_tokens = max(row.generated_tokens, generated)
            row.durable_tokens = max(row.durable_tokens, durable)

    def _acknowledged(self, event: Event) -> None:
        """The coordinator will not forget it: the inventory says so from now on."""
        row = None if isinstance(event, Inventory | Counters) else self._rows.get(event.placement)
        match event:
            case Released(placement):
                self._rows.pop(placement, None)
            case Staged() if row:
                row.is_staged = True
            case Started() if row:
                row.is_started = True
            case Parked() if row:
                row.is_parked = True
            case Resized() if row:
                row.hot_slots, row.hot_chunks = event.hot_slots, event.hot_chunks + row.chunks_since
                row.resize_slots, row.resize_chunks = NO_RESIZE, 0

    def _is_dirty(self, command_ack: int) -> bool:
        return bool(self._dirt or self._events or self._has_swaps or command_ack > self._command_ack)

    def _cut_progress(self) -> Progress | None:
        """Take dirt up to the report's bounds, splitting the token list of the request that crosses them."""
        room = REPORT_TOKENS_MAX
        cut: list[tuple[int, _Dirt]] = []
        for placement in list(islice(self._dirt, REPORT_REQUESTS_MAX)):
            dirt = self._dirt[placement]
            fits = room // dirt.places
            if len(dirt.ids) > fits:
                if fits:
                    cut.append((placement, dirt.cut(fits)))
                break
            room -= len(dirt.ids) * dirt.places
            cut.append((placement, self._dirt.pop(placement)))
        return _pack(cut) if cut else None

    def _cut_events(self) -> Iterator[Event]:
        """Counts of swap-in come before the Released of their requests."""
        if self._has_swaps:
            yield self._cut_swaps()
        topk_bytes = 0
        for _ in range(min(len(self._events), REPORT_EVENTS_MAX)):
            if topk_bytes > REPORT_TOPK_BYTES_MAX:
                return
            event = self._events.popleft()
            topk_bytes += len(event.warm_start) if isinstance(event, Released) else 0
            yield event

    def _cut_swaps(self) -> Counters:
        swaps, self._swaps, self._has_swaps = self._swaps, {}, False
        hits, misses = zip(*swaps.values(), strict=True) if swaps else ((), ())
        drafts = [self._drafts.pop(placement, (0, 0)) for placement in swaps]
        counted = [pack_int64(column) for column in zip(*drafts, strict=True)] if any(map(any, drafts)) else []
        return Counters(*self._swap_totals, pack_int64(list(swaps)), pack_int64(hits), pack_int64(misses), *counted)


def _extend(dirt: _Dirt, placement: int, start: int, ids: list[int]) -> None:
    if not dirt.ids:
        dirt.start = start
    elif start != dirt.start + len(dirt.ids):
        raise InternalError(
            f"tokens of admission {placement} do not continue position {dirt.start + len(dirt.ids)}",
            field="start",
            value=start,
        )
    dirt.ids.extend(ids)


def _pack(cut: list[tuple[int, _Dirt]]) -> Progress:
    return Progress(
        request_indices=pack_int32([dirt.request_index for _, dirt in cut]),
        placements=pack_int64([placement for placement, _ in cut]),
        starts=pack_int32([dirt.start for _, dirt in cut]),
        counts=pack_int32([len(dirt.ids) for _, dirt in cut]),
        tokens=pack_int32([token for _, dirt in cut for token in dirt.ids]),
        durables=pack_int32([dirt.durable for _, dirt in cut]),
        logprobs=_pack_logprobs([dirt for _, dirt in cut]),
    )


def _pack_logprobs(cut: Sequence[_Dirt]) -> Logprobs | None:
    if not any(dirt.rows for dirt in cut):
        return None
    words = pack_int32([dirt.places - 1 for dirt in cut])
    return Logprobs(words, b"".join(row for dirt in cut for row in dirt.rows))
