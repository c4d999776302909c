"""Protocol bugs, planted one at a time in the real code while a seed runs.

Each is a plausible mistake, in one place or in the places that would be written together. Undisturbed,
a cluster with any of them works; under faults one of the named invariants must catch it (tests/sim/test_mutants.py).
What the design shrugs off is no use here: losing a command or a report by itself ends in a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch

from coordinator.gateway.connections import ClientConnections
from coordinator.gateway.deliveries import Deliveries
from coordinator.journal import records as journal_records
from coordinator.journal.journal import Commit
from coordinator.journal.state import JournalState
from coordinator.memory.changes import Evict, Release
from coordinator.memory.host_pool import HostPool
from coordinator.memory.ledger import Ledger
from coordinator.memory.prefix_index import PrefixIndex
from coordinator.scheduler import scheduler
from coordinator.state import events, placement_table
from coordinator.state.lifecycle import EventKind, Resolve
from coordinator.state.owner_turns import OwnerTurns
from coordinator.state.request import Request
from coordinator.state.request_state import _HANDLERS, RequestState
from coordinator.tokens.token_log import TokenLog
from coordinator.turn import dispatch
from coordinator.workers.worker_epoch import Arrival, WorkerEpoch
from coordinator.workers.worker_link import WorkerLinks
from protocol import messages, units
from protocol.messages import Withdraw
from tests.sim.transfer import FakeReceiver
from worker.link.link_state import LinkPhase, LinkState
from worker.loop.acceptance import RowProgress, StepProgress
from worker.transfer.handover import Incoming, Outgoing

MUTANTS: Final[dict[str, Any]] = {}


def plant(function: Callable[[], Iterator[tuple[Any, str, Any]]]) -> Callable[[], Any]:
    """`function` yields what to replace: owner, name, replacement."""

    @contextmanager
    def planted() -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, replacement in function():
                if isinstance(owner, dict):
                    stack.enter_context(patch.dict(owner, {name: replacement}))
                else:
                    stack.enter_context(patch.object(owner, name, replacement))
            yield

    MUTANTS[function.__name__] = planted
    return planted


Plan = Iterator[tuple[Any, Any, Any]]


# ---------------------------------------------------------------- commands and reports


@plant
def apply_commands_behind_a_gap() -> Plan:
    """The worker takes whatever comes next."""
    original = LinkState._commands

    def commands(self: LinkState, message: messages.Commands, now: float) -> Iterator[Any]:
        self.command_ack = max(self.command_ack, message.first - 1)
        return original(self, message, now)

    yield LinkState, "_commands", commands


@plant
def apply_replayed_commands_again() -> Plan:
    """The worker does not look at the numbers that it has applied."""

    def commands(self: LinkState, message: messages.Commands, now: float) -> Iterator[Any]:
        self.command_ack = max(self.command_ack, message.first + len(message.commands) - 1)
        for command in message.commands:
            yield from self._apply(command)

    yield LinkState, "_commands", commands


@plant
def skip_reports_that_are_missing() -> Plan:
    """The coordinator does not mind a gap in reports."""
    original = WorkerEpoch.report

    def report(self: WorkerEpoch, report: messages.Report, now: float) -> Arrival:
        self.report_ack = max(self.report_ack, report.number - 1)
        return original(self, report, now)

    yield WorkerEpoch, "report", report


@plant
def lose_the_outbox_on_reconnect() -> Plan:
    """What was in flight when a connection ended is not sent again; numbers go on where the coordinator is."""
    original = LinkState._welcome

    def welcome(self: LinkState, message: messages.WorkerWelcome, now: float) -> Iterator[Any]:
        if self.incarnation == message.incarnation and self.outbox._in_flight:
            self.outbox._in_flight.clear()
            self.outbox._next_number = message.report_ack + 1
        return original(self, message, now)

    yield LinkState, "_welcome", welcome


@plant
def hear_an_epoch_that_is_over() -> Plan:
    """A worker that was declared down is still heard, although other workers may have its requests."""
    hear, append = WorkerLinks._receive, TokenLog.append

    def receive(self: WorkerLinks, received: Any) -> None:
        link = self._by_peer.get(received.peer)
        if link is None or not link.is_down:
            return hear(self, received)
        link.is_down = False
        try:
            return hear(self, received)
        finally:
            link.is_down = True

    def append_any(self: TokenLog, progress: messages.Progress, source: int) -> Any:
        request_indices = self._unpack(progress)[0]
        now = self._placement[request_indices].astype("<i8")
        known = now >= 0
        if not known.all():
            return append(self, progress, source)
        owner = self._source[request_indices].copy()
        self._source[request_indices] = source
        try:
            fields = {name: getattr(progress, name) for name in progress.__struct_fields__}
            return append(self, messages.Progress(**(fields | {"placements": now.tobytes()})), source)
        finally:
            self._source[request_indices] = owner

    yield WorkerLinks, "_receive", receive
    yield TokenLog, "append", append_any


# ---------------------------------------------------------------- memory


@plant
def reuse_quarantined_pages() -> Plan:
    """A lost worker's pages are free at once."""
    original = Ledger.release

    def release(self: Ledger, placement: int) -> int:
        if (budget := self._holding(placement).budget) is not None and budget.lost:
            budget.exited = True
        return original(self, placement)

    yield Ledger, "release", release


@plant
def keep_pages_of_a_process_that_may_live() -> Plan:
    """Silence counts as proof of exit: rows are kept, and their request goes on elsewhere."""
    original = WorkerLinks._put_down

    def put_down(self: WorkerLinks, link: Any, **how: Any) -> None:
        original(self, link, **(how | {"proved_exit": True}))

    yield WorkerLinks, "_put_down", put_down


def _end_at_once(original: Any, *, durable: bool) -> Any:
    def handler(self: RequestState, event: Any, target: Any, rows: Any, now: float) -> list[Any]:
        actions: list[Any] = original(self, event, target, rows, now)
        if not any(isinstance(action, Withdraw) for action in actions):
            return actions
        way = Resolve.WAIT if durable else Resolve.OUTCOME
        return actions + self._end_placement(EventKind.RELEASED, way, rows.durable if durable else 0, rows, now)

    return handler


@plant
def free_a_retracted_request_before_released() -> Plan:
    """Withdraw was sent: that must do."""
    yield (
        _HANDLERS,
        events.RetractOrder,
        (EventKind.RETRACT, _end_at_once(RequestState._retract, durable=True)),
    )


@plant
def free_an_aborted_request_before_released() -> Plan:
    """Its output is not wanted, so the mutant does not wait."""
    yield _HANDLERS, events.EndOrder, (EventKind.END, _end_at_once(RequestState._ended, durable=False))


@plant
def begin_a_new_epoch_with_work_in_flight() -> Plan:
    """The worker forgets what it held instead of waiting for the executor."""
    original = LinkState.may_connect

    def may_connect(self: LinkState) -> bool:
        if self.phase is LinkPhase.EMPTYING:
            self.outbox._rows.clear()
        return original(self)

    yield LinkState, "may_connect", may_connect


@plant
def free_kept_pages_twice() -> Plan:
    """What is given back stays in the list of what is kept."""
    original = Ledger.keep

    def keep(self: Ledger, placement: int, pages: int) -> int:
        everything = self._holding(placement).all_pages()
        freed = original(self, placement, pages)
        holding = self._holding(placement)
        holding.pages, holding.page_count = [everything], len(everything)
        return freed

    yield Ledger, "keep", keep


@plant
def drop_the_last_page_of_what_is_kept() -> Plan:
    """Rows kept, rounded down to pages."""
    yield dispatch, "pages_for", lambda tokens: tokens // units.PAGE_TOKENS or int(tokens > 0)


@plant
def resume_beyond_the_durable_length() -> Plan:
    """Every token that was delivered counts as a row."""
    original = RequestState._end_placement

    def end_placement(
        self: RequestState, kind: EventKind, target: Any, durable: int, rows: Any, *rest: Any, **named: Any
    ) -> Any:
        beyond = durable and self.facts.prompt_tokens + rows.generated - 1
        return original(self, kind, target, beyond, rows, *rest, **named)

    yield RequestState, "_end_placement", end_placement


# ---------------------------------------------------------------- prefill for another worker


@plant
def take_the_prompt_of_a_worker_that_may_live() -> Plan:
    """Its rows are durable, the last page's too, and prompts do not change."""
    original = RequestState._lost

    def lost(self: RequestState, event: events.WorkerLost, target: Any, rows: Any, now: float) -> list[Any]:
        if not self.prefills_only:
            return original(self, event, target, rows, now)
        return self._end_placement(EventKind.LOST, target, rows.durable, rows, now, event.reason)

    yield _HANDLERS, events.WorkerLost, (EventKind.LOST, lost)


# ---------------------------------------------------------------- transfer between nodes


@plant
def reuse_destination_pages_before_revocation() -> Plan:
    """The sender is gone: what should still write to the pages that it was given?"""
    original = dispatch.Dispatch._sender_ended

    def sender_ended(self: Any, entry: Any, transfer: Any, event: Any, generated: int) -> Any:
        was_lost = entry.lost and not transfer.arrived
        heard = original(self, entry, transfer, event, generated)
        if not was_lost or transfer.placement not in self.placement_table.transfers:
            return heard
        self.placement_table.close_transfer(transfer)
        return heard.plus(dispatch.Effects((dispatch.LedgerStep(transfer.node, Release(transfer.placement)),)))

    yield dispatch.Dispatch, "_sender_ended", sender_ended


@plant
def admit_when_the_last_page_has_arrived() -> Plan:
    """Pages come in order, so the last one ends it."""

    def is_whole(self: Incoming) -> bool:
        return units.pages_for(self.prompt_tokens) - 1 in self.arrived

    def is_delivered(self: Outgoing) -> bool:
        return not self.failure and self.pages - 1 in self.delivered

    yield Incoming, "is_whole", property(is_whole)
    yield Outgoing, "is_delivered", property(is_delivered)


@plant
def skip_the_checksum() -> Plan:
    """TCP has a checksum, too."""
    yield FakeReceiver, "verify", lambda self, rows, expected: True


# ---------------------------------------------------------------- reuse of prefixes


@plant
def cache_a_prompt_before_it_is_durable() -> Plan:
    """It is being computed: what should keep its pages from being reused?"""
    original = dispatch.Dispatch.prompt_rows

    def prompt_rows(self: Any, entry: Any, durable_tokens: int) -> Any:
        return original(self, entry, entry.facts.prompt_tokens)

    yield dispatch.Dispatch, "prompt_rows", prompt_rows


@plant
def evict_a_page_that_is_held() -> Plan:
    """The cache is its owner: so it is free once it is evicted."""

    def evict(self: Ledger, pages: Any) -> int:
        self._is_cached[pages] = False
        self.pages_cached -= pages.size
        self._refcounts[pages] = 0
        self.pages_idle = int((self._is_cached & (self._refcounts == 1)).sum())
        return self._free_unheld(pages)

    yield PrefixIndex, "_may_go", lambda self, node, is_idle, spared: node.page not in spared
    yield Ledger, "evict", evict


@plant
def evict_without_a_word_to_the_journal() -> Plan:
    """Only the cache had it."""

    async def handle(self: HostPool[Any, Any], batch: list[Any]) -> Any:
        append = self._append
        self._append = lambda node, changes, notes: append(
            node, [it for it in changes if not isinstance(it, Evict)], notes
        )
        applied = await handle_all(self, batch)
        self._append = append
        return applied

    handle_all = HostPool.handle
    yield HostPool, "handle", handle


@plant
def let_a_transfer_write_to_shared_pages() -> Plan:
    """The list begins with them, and the rows are the same."""

    def pages(self: Incoming) -> list[int]:
        return self.host_pages[: units.pages_for(self.prompt_tokens) - self.shared_pages]

    yield Incoming, "pages", property(pages)


@plant
def share_pages_that_are_given_out_in_the_same_turn() -> Plan:
    """They were idle when they were matched."""
    original = HostPool._make_room
    yield HostPool, "_make_room", lambda self, pages, changes: original(self, pages, ())


@plant
def prefill_again_what_a_lost_worker_had_staged() -> Plan:
    """Decoding cannot go on from the full pages: so they are of no use."""
    yield RequestState, "_own_after_loss", lambda self, rows, unit_tokens: 0


# ---------------------------------------------------------------- drafts


@plant
def count_rejected_rows_as_durable() -> Plan:
    """The step was seen in host memory, and so were its rows."""
    original = StepProgress.read

    def read(self: StepProgress, accepted: Sequence[int]) -> list[int]:
        firsts = original(self, accepted)
        self._stops = [first + it.step_rows for first, it in zip(firsts, self._progress, strict=True)]
        return firsts

    yield StepProgress, "read", read


@plant
def write_more_rows_than_granted() -> Plan:
    """A step has room for its first row: so it may write its rows."""
    yield RowProgress, "rows_end", property(lambda self: self.position + self.step_rows)


# ---------------------------------------------------------------- clients


@plant
def count_refused_deliveries_as_sent() -> Plan:
    """A cursor moves although the socket was full."""
    original = ClientConnections.offer

    def offer(self: ClientConnections, connection: Any, frame: bytes, now: float) -> bool:
        return original(self, connection, frame, now) or (
            not connection.is_gone and isinstance(messages.decode_gateway(frame), messages.Delivery)
        )

    yield ClientConnections, "offer", offer


@plant
def attach_from_the_beginning() -> Plan:
    """The offset of an Attach is not looked at."""
    original = Deliveries.subscribe

    def subscribe(self: Deliveries, connection: Any, request_index: int, cursor: int) -> int:
        return original(self, connection, request_index, 0)

    yield Deliveries, "subscribe", subscribe


# ---------------------------------------------------------------- the journal


@plant
def deliver_before_commit() -> Plan:
    """Tokens go out as they come."""
    original = TokenLog.append

    def append(self: TokenLog, progress: messages.Progress, source: int) -> Any:
        appended = original(self, progress, source)
        self.committed[:] = self.lengths
        return appended

    yield TokenLog, "append", append


@plant
def acknowledge_before_commit() -> Plan:
    """A submission is queued: that must do."""

    def answer(self: Commit, reply: Any, value: Any, what: str) -> None:
        reply.set(value)

    yield Commit, "answer", answer


@plant
def grant_before_commit() -> Plan:
    """The ledger has changed: the command may go."""
    yield scheduler, "GIVING", ()


@plant
def say_the_end_before_commit() -> Plan:
    """The client hears of the end while it is being written."""

    def write_end(self: Request, it: events.Ending) -> None:
        ended = journal_records.RequestEnded(
            it.request_index, it.outcome, it.reason, it.generated_tokens, it.tail_text, 0.0
        )

        def tell() -> None:  # its tokens are delivered: without faults no check sees it
            self._parts.journal.append([ended])
            self._tell_end(it)

        self._parts.journal.append([]).then(tell)

    yield Request, "_write_end", write_end


@plant
def take_absence_for_death_in_recovery() -> Plan:
    """A new coordinator process sees no workers, and takes all of them for dead."""
    original = WorkerLinks._watch_process

    async def watch_process(self: WorkerLinks, link: Any) -> None:
        if link.is_awaited:
            self._prove(link, died=True)
        else:
            await original(self, link)

    yield WorkerLinks, "_watch_process", watch_process


@plant
def obey_an_earlier_coordinator() -> Plan:
    """Every coordinator on the connection is obeyed."""
    yield LinkState, "_obeyed", lambda self, incarnation: self.phase is LinkPhase.WELCOMED


@plant
def forget_drains_with_the_coordinator() -> Plan:
    """A new life knows every request: that must do."""
    original = JournalState._note_of_node

    def note(self: JournalState, record: Any) -> None:
        if not isinstance(record, journal_records.WorkerDrained):
            original(self, record)

    yield JournalState, "_note_of_node", note


@plant
def forget_turns_with_the_coordinator() -> Plan:
    """A new life orders new requests by arrival alone: the journal has the ranks of the others."""
    recover, next_turn = placement_table.PlacementTable.recover, OwnerTurns.next

    def recover_without(self: placement_table.PlacementTable, *about: Any) -> Any:
        self._turns.is_mutant = True  # type: ignore[attr-defined]
        return recover(self, *about)

    yield placement_table.PlacementTable, "recover", recover_without
    yield OwnerTurns, "next", lambda self, *about: 0 if hasattr(self, "is_mutant") else next_turn(self, *about)


@plant
def drain_a_process_for_the_one_before() -> Plan:
    """A worker is its name."""
    yield placement_table, "is_same_process", lambda before, epoch, first_epoch: bool(before)
