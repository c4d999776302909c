"""Recovery of a coordinator from its journal at start: requests where they were, workers that are awaited, and what
follows once they are back. Pure. Its caller makes the actors.

    journal state of a request       it becomes
    ended                            an ended request, for as long as it would have been one
    waiting, or with kept pages      the same; if its end was decided, it ends now
    on a worker of a live epoch      on that worker, which is *awaited*: its inventory will say how far it has come.
                                     Workers decode on meanwhile
    on a worker of a lost epoch      off that worker: what the earlier incarnation had begun is finished

Holdings of a ledger that are no placement of a request, and are kept by none, are transfers
(coordinator.state.worker_entry): of the request whose rows are on their way there, or of no request. They go on, or are
revoked, when their worker is heard.

An awaited worker is a silent one: no request is admitted to it, and past the heartbeat limit it counts as lost, like
any other. Its pages are then in quarantine until its process is proved gone or has begun anew (I2).

A worker that is back is adopted by its inventory, which says what it ran on with meanwhile:

    in the journal state   in the inventory   then
    yes                    yes                adopted: what it was given and never heard of is sent, what it had given
                                              back and the journal does not have is taken back; a wish that it leave is
                                              said again
    yes                    no                 its Admit never arrived, or its Released did and what follows was lost:
                                              its placement has ended
    no                     released           it left before, and only the acknowledgement was lost: nothing
    no                     held               the journal has lost something: the epoch is not to be trusted

Of a transfer likewise; one that its worker does not have, or that no request wants, is closed.

Reports that were not acknowledged come again behind the welcome, as usual. The journal state never has less than the
worker, since memory is given after its commit (I4); a worker that claims more is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from basics.request_states import POISON_STRIKES
from coordinator.journal import records as journal
from coordinator.journal.ledger_image import epochs_of
from coordinator.journal.state import JournalState, RequestRecord
from coordinator.memory.changes import Release, Shrink
from coordinator.memory.ledger import EpochKey, Ledger
from coordinator.policy.prefix_reuse import own_unit
from coordinator.state.events import (
    Ending,
    LedgerStep,
    PlacementAdopted,
    RequestOrder,
    RetractOrder,
    WorkerLost,
    WorkerPort,
    WorkerSend,
)
from coordinator.state.placement_table import PlacementTable
from coordinator.state.poison import poison_reason
from coordinator.state.request_state import RequestState
from coordinator.state.worker_entry import GroupLife, InboundTransfer, WorkerDrain, WorkerEntry
from coordinator.tokens.token_log import TokenLog
from coordinator.turn.dispatch import Dispatch, Effects, order_to
from coordinator.turn.request_table import RequestTable
from protocol.errors import WrongState
from protocol.inventory import InventoryRow
from protocol.messages import NO_TOKEN, Grant, Resize, Withdraw
from protocol.sizing import NO_MEMORY, RESIDENT, HotSize, Memory

if TYPE_CHECKING:
    from coordinator.state.request import Request

    MakeRequest = Callable[[RequestState, WorkerPort | None], Request]


def expect_workers(
    journal_state: JournalState, expect: Callable[[journal.WorkerJoined, bool], WorkerPort]
) -> dict[EpochKey, WorkerPort]:
    """Have the worker links expect every epoch of `journal_state`, live or not; returns the ports of live ones."""
    ports: dict[EpochKey, WorkerPort] = {}
    for node, ledger in journal_state.ledgers.items():
        for joined in sorted(journal_state.joined(node), key=lambda it: it.epoch):
            is_live = ledger.has_live(joined.worker) and ledger.budget(joined.worker).epoch == joined.epoch
            port = expect(joined, is_live)
            if is_live:
                ports[joined.worker, joined.epoch] = port
    return ports


def endings_of(journal_state: JournalState) -> Iterator[Ending]:
    """Yield the ends of requests that ended in an earlier incarnation."""
    for record in journal_state.requests.values():
        if (ended := record.ended) is not None:
            about = record.facts.request_index, record.facts.request_id
            yield Ending(*about, ended.outcome, ended.reason, ended.generated_tokens, ended.tail_text)


class Place(NamedTuple):
    """The journal's state, and where it goes."""

    journal_state: JournalState
    dispatch: Dispatch
    requests: RequestTable
    token_log: TokenLog
    make_request: MakeRequest
    now: float
    wall_offset_s: float


def restore(place: Place, ports: Mapping[EpochKey, WorkerPort]) -> Effects:
    """Fill placement table, requests and token log; returns what is to be done first. `ports` are those of live
    epochs."""
    journal_state, placement_table = place.journal_state, place.dispatch.placement_table
    placement_table.go_on_from(journal_state.arrivals, journal_state.placements)
    for drained in journal_state.drains.values():
        drain = WorkerDrain(drained.until_s - place.wall_offset_s, drained.handover)
        placement_table.drains[drained.worker] = drained.epoch, drain
    for (name, epoch), port in ports.items():
        joined = journal_state.workers[name, epoch]
        placement_table.add_worker(
            WorkerEntry(
                name,
                joined.node,
                epoch,
                joined.capacity,
                joined.model,
                port,
                awaited=True,
                first_epoch=joined.first_epoch,
                member=joined.member,
            )
        )
    for life in _lives_ended(journal_state):
        placement_table.poison_detector.ended(life)
    _restore_transfers(journal_state, placement_table)
    effects = Effects()
    ended = sorted(
        (it for it in journal_state.requests.values() if it.ended), key=lambda it: it.ended.at_s if it.ended else 0.0
    )
    for record in [*(it for it in journal_state.requests.values() if not it.ended), *ended]:
        effects = effects.plus(_restore_ended(record, place) if record.ended else _restore_live(record, place))
    for transfer_id in list(placement_table.transfers.values()):
        effects = effects.plus(_settle_transfer(transfer_id, journal_state, place.dispatch))
    place.dispatch.dirty = True
    return effects


def _lives_ended(journal_state: JournalState) -> set[GroupLife]:
    """Lives of groups that lost a rank before: the requests of all their ranks were struck, if it was for a death.

    A rank lost without a request on it counts too, since its ledger tells nothing more of it; then a strike is missed.
    """
    members = {key: it.member for key, it in journal_state.workers.items() if it.member is not None}
    latest = dict(sorted(members))  # highest epoch of each worker
    ledgers = journal_state.ledgers.values()
    left = {key for ledger in ledgers for key in epochs_of(ledger) if not ledger.has_exited(*key)}
    return {
        GroupLife(member.group, member.incarnation)
        for (name, epoch), member in members.items()
        if epoch == latest[name] and (name, epoch) not in left
    }


def _restore_transfers(journal_state: JournalState, placement_table: PlacementTable) -> None:
    """Every holding that is no placement of a request, and is kept by none, is that of a transfer: some request's, or
    no request's."""
    placements: set[int] = set()
    owners: dict[int, int] = {}
    for record in journal_state.requests.values():
        placed = record.placed
        if placed is None or not (record.on_worker or _is_held(placed, journal_state)):
            continue
        if record.on_worker or journal_state.ledgers[placed.node].holder_of(placed.placement) is None:
            placements.add(placed.placement)
        transfer_id = placed.transfer_id if record.on_worker else placed.placement
        if not record.ended:
            owners[transfer_id] = record.facts.request_index
    for node, ledger in journal_state.ledgers.items():
        for placement in sorted(ledger.placements() - placements):
            key, pages = ledger.holder_of(placement), ledger.held(placement).host_pages
            placement_table.transfers[placement] = InboundTransfer(
                placement, owners.get(placement), node, *(key or ("", 0)), pages, arrived=key is None
            )


def _settle_transfer(inbound: InboundTransfer, journal_state: JournalState, dispatch: Dispatch) -> Effects:
    """Close a transfer whose epoch is lost, and an arrived one that no request owns."""
    if inbound.arrived:
        return dispatch.revoke(inbound) if inbound.request_index is None else Effects()
    ledger = journal_state.ledgers[inbound.node]
    if ledger.has_live(inbound.worker) and ledger.budget(inbound.worker).epoch == inbound.epoch:
        return Effects()
    return dispatch.close_transfer(inbound, f"{inbound.worker} was lost before", is_lost=True)


def _restore_ended(record: RequestRecord, place: Place) -> Effects:
    """Restore a request that has ended. Its memory was released before its end was written; the ledger may not know
    yet."""
    ended, facts = record.ended, record.facts
    assert ended is not None
    at = ended.at_s - place.wall_offset_s
    state = RequestState.of(record, facts.at_s - place.wall_offset_s)
    place.journal_state.requests[state.request_index] = state
    state.generated = ended.generated_tokens
    state.recover_end(at, ended.outcome, ended.reason, ended.tail_text)
    place.requests.add_ended(state)
    if (
        record.placed is None
        or not _is_held(record.placed, place.journal_state)
        or record.placed.placement in place.dispatch.placement_table.transfers
    ):
        return Effects()
    note = journal.RequestPlacementEnded(facts.request_index, 0)
    return Effects((LedgerStep(record.placed.node, Release(record.placed.placement), note),))


def _is_held(placed: journal.RequestPlaced, journal_state: JournalState) -> bool:
    """Return whether the placement still holds pages: not so when an audit has taken back what a request no longer
    had."""
    return placed.node in journal_state.ledgers and journal_state.ledgers[placed.node].holds(placed.placement)


def _restore_live(record: RequestRecord, place: Place) -> Effects:
    facts, ordered, dispatch = record.facts, record.ordered, place.dispatch
    placed = record.placed if record.placed and _is_held(record.placed, place.journal_state) else None
    generated = place.token_log.length(facts.request_index)
    entry = dispatch.placement_table.recover(record, generated, facts.at_s - place.wall_offset_s)
    place.journal_state.requests[entry.request_index] = entry
    if record.strikes >= POISON_STRIKES and not ordered.outcome:  # decided, and its end was not written any more
        reason = poison_reason(entry, record.killed)
        ordered = msgspec.structs.replace(ordered, outcome="FAILED", reason=reason)
    if placed is not None:
        transfer_id = placed.transfer_id if record.on_worker else placed.placement
        entry.transfer_id = transfer_id if transfer_id in dispatch.placement_table.transfers else 0
    dispatch.placement_table.recover_orders(entry, ordered)
    place.token_log.hold(facts.request_index, ordered.held)
    worker = dispatch.placement_table.workers.get(placed.worker) if placed and record.on_worker else None
    if worker is not None and placed and worker.epoch != placed.epoch:
        worker = None
    place.requests.add(place.make_request(entry, worker.port if worker else None))
    if placed and record.on_worker:
        return _restore_placed(placed, entry, worker, place)
    return _restore_waiting(placed, entry, place)


def _restore_waiting(placed: journal.RequestPlaced | None, entry: RequestState, place: Place) -> Effects:
    """Keeping what is left of `placed`, if anything is."""
    if placed is not None:
        pages = place.journal_state.ledgers[placed.node].held(placed.placement).host_pages
        place.dispatch.placement_table.recover_kept(entry, placed, pages)
    else:
        entry.kept_tokens, entry.first_token = 0, NO_TOKEN
    entry.recover_waiting(place.now, known=_in_words(entry))
    if entry.ordered.outcome:
        return place.dispatch.end(entry, entry.ordered.outcome, entry.ordered.reason)
    return Effects()


def _restore_placed(
    placed: journal.RequestPlaced,
    entry: RequestState,
    worker: WorkerEntry | None,
    place: Place,
) -> Effects:
    """Restore a request on `worker`, or (None) on one that the earlier incarnation had lost."""
    placement_table, facts, ordered = place.dispatch.placement_table, entry.facts, entry.ordered
    ledger = place.journal_state.ledgers[placed.node]
    placement_table.recover_placed(entry, placed, ledger.held(placed.placement), worker)
    staged = place.token_log.durable(facts.request_index) >= facts.prompt_tokens
    entry.recover_placed(place.now, staged=staged, known=_in_words(entry))
    if ordered.outcome:
        entry.recover_ending(place.now, ordered.outcome, ordered.reason)
    if ordered.outcome or ordered.held:
        placement_table.leave(entry, frees_pages=bool(ordered.outcome))
    place.requests.by_placement[placed.placement] = entry
    if worker is not None:
        return Effects()
    exited = ledger.has_exited(placed.worker, placed.epoch)
    joined = place.journal_state.workers.get((placed.worker, placed.epoch))
    unit = own_unit(joined.model, joined.capacity) if joined is not None else 0
    lost = WorkerLost(placed.placement, exited, f"{placed.worker} was lost before", unit)
    return Effects((), (order_to(entry, lost),))


def _in_words(entry: RequestState) -> str:
    generated, strikes = entry.generated, entry.strikes
    text = f"{generated} token{'s' * (generated != 1)} in the journal"
    return f"{text}, {strikes} strike{'s' * (strikes != 1)}, the last when {entry.killed} died" if strikes else text


def adopt(dispatch: Dispatch, worker: WorkerEntry, inventory: Sequence[InventoryRow], ledger: Ledger) -> Effects:
    """Go on with an awaited worker. Raises WrongState, having changed nothing, when its inventory cannot be."""
    held = {it.placement: it for it in inventory}
    entries = list(dispatch.placement_table.on(worker.name))
    transfers = dispatch.placement_table.transfers_to(worker.name, worker.epoch)
    _check(held, {entry.placement for entry in entries} | {inbound.placement for inbound in transfers}, ledger)
    dispatch.placement_table.worker_back(worker)
    dispatch.dirty = True
    parts = [
        _adopt(dispatch, entry, held[entry.placement], ledger)
        if entry.placement in held
        else _end_placement(dispatch, entry, worker)
        for entry in entries
    ]
    parts += [_adopt_transfer(dispatch, inbound, held.get(inbound.placement)) for inbound in transfers]
    return reduce(Effects.plus, parts, Effects())


def _check(held: dict[int, InventoryRow], known: set[int], ledger: Ledger) -> None:
    for placement, row in held.items():
        if placement not in known and not row.is_released:
            raise WrongState("was never given, as far as is known", field="placement", value=placement)
    for placement in known & held.keys():
        has, given = _memory(held[placement], 0), ledger.held(placement)
        if has.host_pages > given.host_pages or has.hot_chunks > given.hot_chunks:
            raise WrongState(f"holds {has}, was given {given}", field="placement", value=placement)


def _adopt_transfer(dispatch: Dispatch, inbound: InboundTransfer, row: InventoryRow | None) -> Effects:
    """It goes on, if the worker has it and a request wants it. What it never heard of, or has let go of, has failed."""
    if row is None:
        return dispatch.close_transfer(inbound, f"{inbound.worker} has its transfer no more", is_lost=True)
    if inbound.request_index is None and not row.is_released:
        return Effects(sends=(WorkerSend(inbound.worker, Withdraw(inbound.placement)),))
    return Effects()


def _memory(row: InventoryRow, missing_pages: int) -> Memory:
    """Host pages and the larger of its two hot sizes, once it has `missing_pages` more."""
    more = _more_chunks(row, missing_pages)
    chunks = max(row.hot_chunks + more, row.resizing[1] if row.resizing else 0)
    return Memory(row.host_pages + missing_pages, chunks)


def _more_chunks(row: InventoryRow, missing_pages: int) -> int:
    return missing_pages if row.hot_slots == RESIDENT else 0


def _end_placement(dispatch: Dispatch, entry: RequestState, worker: WorkerEntry) -> Effects:
    dispatch.placement_table.leave(entry, frees_pages=entry.frees_pages)
    unit = own_unit(worker.model, worker.capacity)
    lost = WorkerLost(entry.placement, True, f"{worker.name} has it no more", unit)
    return Effects((), (order_to(entry, lost),))


def _adopt(dispatch: Dispatch, entry: RequestState, row: InventoryRow, ledger: Ledger) -> Effects:
    given = ledger.held(entry.placement)
    missing = 0 if entry.leaving else given.host_pages - row.host_pages
    # chunks of a lost grant: a resize crossed it, and whose they are cannot be told any more; or an earlier
    # incarnation, in which it was leaving, has taken them back
    is_torn = missing > 0 and (row.resizing is not None or _memory(row, missing).hot_chunks > given.hot_chunks)
    missing = 0 if is_torn else missing
    more = _more_chunks(row, missing)
    use = _memory(row, missing)
    hot = HotSize(row.hot_slots, row.hot_chunks + more)
    dispatch.placement_table.adopt(entry, hot, HotSize(*row.resizing) if row.resizing else None, staged=row.is_staged)
    if row.is_staged and not row.is_started and entry.prefills_only:
        dispatch.placement_table.leave(entry, frees_pages=False)
    grant = None
    if missing:
        pages = ledger.pages_of(entry.placement)[row.host_pages :]
        grant = Grant(entry.placement, pages.tobytes(), missing, more)
    elif row.is_parked:
        dispatch.starve(entry)
    spare = Memory(hot_chunks=given.hot_chunks - use.hot_chunks)
    steps = (LedgerStep(entry.node, Shrink(entry.placement, spare)),) if spare != NO_MEMORY else ()
    return Effects(steps, tuple(order_to(entry, event) for event in _tells(entry, row, grant, is_torn=is_torn)))


def _tells(entry: RequestState, row: InventoryRow, grant: Grant | None, *, is_torn: bool) -> list[RequestOrder]:
    resize = Resize(entry.placement, *row.resizing) if row.resizing else None
    adopted = PlacementAdopted(entry.placement, row.is_staged, row.is_started, row.is_parked, resize, grant)
    return [adopted, RetractOrder(True, "a grant was lost")] if is_torn else [adopted]
