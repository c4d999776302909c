"""A worker's inventory against the journal state: what the worker ran on with while the coordinator was away, and what
now follows.

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
worker, since memory is given after its commit (I4); a worker that claims more is refused. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from coordinator.memory.changes import Shrink
from coordinator.memory.ledger import Ledger
from coordinator.policy.prefix_reuse import own_unit
from coordinator.state.events import (
    LedgerStep,
    PlacementAdopted,
    RequestOrder,
    RetractOrder,
    WorkerLost,
    WorkerSend,
)
from coordinator.state.request_state import RequestState
from coordinator.state.worker_entry import InboundTransfer, WorkerEntry
from coordinator.turn.dispatch import Dispatch, Effects, order_to
from protocol.errors import WrongState
from protocol.inventory import InventoryRow
from protocol.messages import Grant, Resize, Withdraw
from protocol.sizing import NO_MEMORY, RESIDENT, HotSize, Memory


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
