"""What a coordinator makes of its journal at start: requests where they were, workers that are awaited. Pure but for
the actors that its caller makes.

    journal state of a request       it becomes
    ended                            an ended request, for as long as it would have been one
    waiting, or with kept pages      the same; if its end was decided, it ends now
    on a worker of a live epoch      on that worker, which is *awaited*: its inventory will say how far it has come
                                     (coordinator.scheduling.reconciliation). Workers decode on meanwhile
    on a worker of a lost epoch      departed: what the earlier incarnation had begun is finished

Holdings of a ledger that are no placement of a request, and are kept by none, are tickets
(coordinator.scheduling.entries): of the request whose rows are on their way there, or of no request. They go on, or are
revoked, when their worker is heard.

An awaited worker is a silent one: no request is admitted to it, and past the heartbeat limit it counts as lost, like
any other. Its pages are then in quarantine until its process is proved gone or has begun anew (I2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from coordinator.journal import records as journal
from coordinator.journal.state import JournalState, RequestRecord
from coordinator.memory.changes import Release
from coordinator.memory.ledger import EpochKey
from coordinator.scheduling.dispatch import Dispatch, Effects
from coordinator.scheduling.effects import LedgerStep
from coordinator.scheduling.entries import InboundTransfer, RequestEntry, WorkerDrain, WorkerEntry
from coordinator.scheduling.events import AddressedOrder, Ending, WorkerLost, WorkerPort
from coordinator.scheduling.placement_table import PlacementTable
from coordinator.scheduling.poison import POISON_STRIKES, poison_reason
from coordinator.scheduling.request_state import RequestState
from coordinator.scheduling.request_table import EndedRequest, LiveRequest, RequestTable
from coordinator.tokens.token_log import TokenLog
from protocol.messages import NO_TOKEN

if TYPE_CHECKING:
    from coordinator.scheduling.request import Request

    MakeRequest = Callable[[RequestState, WorkerPort | None], Request]


def expect_workers(
    book: JournalState, expect: Callable[[journal.WorkerJoined, bool], WorkerPort]
) -> dict[EpochKey, WorkerPort]:
    """Have the worker links expect every epoch of `book`, live or not; returns the ports of live ones."""
    ports: dict[EpochKey, WorkerPort] = {}
    for node, ledger in book.ledgers.items():
        for joined in sorted(book.joined(node), key=lambda it: it.epoch):
            is_live = ledger.has_live(joined.worker) and ledger.budget(joined.worker).epoch == joined.epoch
            port = expect(joined, is_live)
            if is_live:
                ports[joined.worker, joined.epoch] = port
    return ports


def endings_of(book: JournalState) -> Iterator[Ending]:
    """Of requests that ended in an earlier incarnation."""
    for known in book.requests.values():
        if (ended := known.ended) is not None:
            about = known.facts.request_index, known.facts.request_id
            yield Ending(*about, ended.outcome, ended.reason, ended.generated_tokens, ended.tail_text)


class Place(NamedTuple):
    """Where the recovered state goes."""

    dispatch: Dispatch
    requests: RequestTable
    token_log: TokenLog
    make_request: MakeRequest
    now: float
    wall_offset_s: float


def restore(book: JournalState, place: Place, ports: Mapping[EpochKey, WorkerPort]) -> Effects:
    """Fill placement table, requests and token log; returns what is to be done first. `ports` are those of live
    epochs."""
    placement_table = place.dispatch.placement_table
    placement_table.go_on_from(book.arrivals, book.placements)
    for drained in book.drains.values():
        drain = WorkerDrain(drained.until_s - place.wall_offset_s, drained.handover)
        placement_table.drains[drained.worker] = drained.epoch, drain
    for (name, epoch), port in ports.items():
        joined = book.workers[name, epoch]
        placement_table.add_worker(
            WorkerEntry(name, joined.node, epoch, joined.capacity, joined.model, port, awaited=True)
        )
    _restore_tickets(book, placement_table)
    effects = Effects()
    ended = sorted((it for it in book.requests.values() if it.ended), key=lambda it: it.ended.at_s if it.ended else 0.0)
    for known in [*(it for it in book.requests.values() if not it.ended), *ended]:
        effects = effects.plus(_restore_ended(known, book, place) if known.ended else _restore_live(known, book, place))
    for ticket in list(placement_table.tickets.values()):
        effects = effects.plus(_settle_ticket(ticket, book, place.dispatch))
    place.dispatch.dirty = True
    return effects


def _restore_tickets(book: JournalState, placement_table: PlacementTable) -> None:
    """Every holding that is no placement of a request, and is kept by none, is that of a ticket: some request's, or
    no request's."""
    stays: set[int] = set()
    owners: dict[int, int] = {}
    for known in book.requests.values():
        stay = known.stay
        if stay is None or not (known.on_worker or _is_held(stay, book)):
            continue
        if known.on_worker or book.ledgers[stay.node].holder_of(stay.placement) is None:
            stays.add(stay.placement)
        ticket = stay.ticket if known.on_worker else stay.placement
        if not known.ended:
            owners[ticket] = known.facts.request_index
    for node, ledger in book.ledgers.items():
        for placement in sorted(ledger.placements() - stays):
            key, pages = ledger.holder_of(placement), ledger.held(placement).host_pages
            placement_table.tickets[placement] = InboundTransfer(
                placement, owners.get(placement), node, *(key or ("", 0)), pages, arrived=key is None
            )


def _settle_ticket(ticket: InboundTransfer, book: JournalState, dispatch: Dispatch) -> Effects:
    """Close a ticket whose epoch is lost, and an arrived one that no request owns."""
    if ticket.arrived:
        return dispatch.revoke(ticket) if ticket.request_index is None else Effects()
    ledger = book.ledgers[ticket.node]
    if ledger.has_live(ticket.worker) and ledger.budget(ticket.worker).epoch == ticket.epoch:
        return Effects()
    return dispatch.close_ticket(ticket, f"{ticket.worker} was lost before", is_lost=True)


def _restore_ended(known: RequestRecord, book: JournalState, place: Place) -> Effects:
    """What it had on its worker was released before its end was written; the ledger may not know yet."""
    ended, facts = known.ended, known.facts
    assert ended is not None
    at = ended.at_s - place.wall_offset_s
    state = _state_of(known, place)
    state.recover_end(at, ended.outcome, ended.reason, ended.tail_text)
    entry = RequestEntry(facts, known.ordered, ended.generated_tokens)
    live = LiveRequest(facts, state, place.make_request(state, None), entry, b"")
    place.requests.ended[facts.request_id] = EndedRequest(live, at)
    if (
        known.stay is None
        or not _is_held(known.stay, book)
        or known.stay.placement in place.dispatch.placement_table.tickets
    ):
        return Effects()
    return Effects(
        (LedgerStep(known.stay.node, Release(known.stay.placement), journal.RequestDeparted(facts.request_index, 0)),)
    )


def _is_held(stay: journal.RequestPlaced, book: JournalState) -> bool:
    """Not so when an audit has taken back what a request no longer had."""
    return stay.node in book.ledgers and book.ledgers[stay.node].holds(stay.placement)


def _restore_live(known: RequestRecord, book: JournalState, place: Place) -> Effects:
    facts, ordered, dispatch = known.facts, known.ordered, place.dispatch
    stay = known.stay if known.stay and _is_held(known.stay, book) else None
    entry = dispatch.placement_table.recover(facts, place.token_log.length(facts.request_index))
    dispatch.placement_table.poison_detector.recover(entry, known.strikes, known.mark)
    if known.strikes >= POISON_STRIKES and not ordered.outcome:  # decided, and its end was not written any more
        reason = poison_reason(entry, known.killed)
        ordered = msgspec.structs.replace(ordered, outcome="FAILED", reason=reason)
    if stay is not None:
        ticket = stay.ticket if known.on_worker else stay.placement
        entry.ticket = ticket if ticket in dispatch.placement_table.tickets else 0
    state = _state_of(known, place)
    worker = dispatch.placement_table.workers.get(stay.worker) if stay and known.on_worker else None
    if worker is not None and stay and worker.epoch != stay.epoch:
        worker = None
    request = place.make_request(state, worker.port if worker else None)
    live = LiveRequest(facts, state, request, entry, known.prompt)
    place.requests.add(live)
    if stay and known.on_worker:
        effects = _restore_stay(stay, ordered, known, live, worker, book, place)
    else:
        effects = _restore_waiting(stay, ordered, known, live, book, place)
    dispatch.placement_table.recover_orders(entry, ordered)
    return effects


def _restore_waiting(
    stay: journal.RequestPlaced | None,
    ordered: journal.RequestOrdered,
    known: RequestRecord,
    live: LiveRequest,
    book: JournalState,
    place: Place,
) -> Effects:
    """Keeping what is left of `stay`, if anything is."""
    entry, kept_tokens = live.entry, known.kept_tokens if stay else 0
    if stay is not None:
        pages = book.ledgers[stay.node].held(stay.placement).host_pages
        place.dispatch.placement_table.recover_kept(
            entry, stay.node, stay.placement, kept_tokens, pages, known.first_token if kept_tokens else NO_TOKEN
        )
    prefills_only = stay is not None and stay.prefills_only
    live.state.recover_waiting(
        place.now,
        ordered=ordered,
        kept_tokens=kept_tokens,
        prefills_only=prefills_only,
        known=_in_words(known, entry.generated),
    )
    if ordered.outcome:
        return place.dispatch.end(entry, ordered.outcome, ordered.reason)
    return Effects()


def _restore_stay(
    stay: journal.RequestPlaced,
    ordered: journal.RequestOrdered,
    known: RequestRecord,
    live: LiveRequest,
    worker: WorkerEntry | None,
    book: JournalState,
    place: Place,
) -> Effects:
    """On `worker`, or (None) on one that the earlier incarnation had lost."""
    placement_table, entry = place.dispatch.placement_table, live.entry
    ledger = book.ledgers[stay.node]
    memory = ledger.held(stay.placement)
    placement_table.recover_stay(
        entry, stay.node, stay.worker, stay.placement, memory, prefills_only=stay.prefills_only
    )
    placement_table.recover_place(entry, worker)
    staged = not memory.slab_pages
    live.state.recover_stay(
        place.now,
        stay.placement,
        stay.worker,
        staged=staged,
        ordered=ordered,
        prefills_only=stay.prefills_only,
        known=_in_words(known, entry.generated),
    )
    if ordered.outcome:
        live.state.recover_ending(place.now, ordered.outcome, ordered.reason)
    if ordered.outcome or ordered.held:
        placement_table.leave(entry, frees_pages=bool(ordered.outcome))
    place.requests.begin_placement(live, stay.placement, stay.epoch)
    if worker is not None:
        return Effects()
    exited = ledger.has_exited(stay.worker, stay.epoch)
    return Effects(
        (), (AddressedOrder(entry.request_index, WorkerLost(stay.placement, exited, f"{stay.worker} was lost before")),)
    )


def _in_words(known: RequestRecord, generated: int) -> str:
    strikes = f", {known.strikes} strikes, the last when {known.killed} died" if known.strikes else ""
    return f"{generated} tokens in the journal{strikes}"


def _state_of(known: RequestRecord, place: Place) -> RequestState:
    return RequestState(known.facts, now=known.facts.at_s - place.wall_offset_s, reason=f"by {known.facts.owner}")
