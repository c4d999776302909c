"""Reactions of the Scheduler to what it hears: placement table and ledger changes in, decisions and tells out. Pure.

One turn of the Scheduler, which the tests drive without any actor:

    events ──► `hear` ──► ledger changes, to be applied (and committed) before anything else
               `plan` ──► decisions, each with its ledger change
    applied ─► `told`  ─► what to tell the Request concerned (I4: only after its change is committed)

A ledger change comes with the fact to which it belongs (coordinator.journal.records): both are written down together.

A Request is the owner of its life cycle, the dispatch of its memory. They hear of each other's decisions late, so every
event names its placement, and one of a placement that has ended changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from basics.request_states import POISON_STRIKES
from coordinator.journal import records as journal
from coordinator.memory.changes import AddWorker, Extend, Keep, LoseWorker, ProveExit, Release, Reserve, Shrink
from coordinator.memory.ledger import EpochKey, Ledger
from coordinator.memory.prefix_index import Chain
from coordinator.policy import decisions
from coordinator.policy.policy import Policy
from coordinator.policy.prefix_reuse import OFF, PrefixReuse, own_unit
from coordinator.state.events import (
    AddressedOrder,
    DemoteOrder,
    EndOrder,
    GrantOrder,
    LedgerStep,
    PlacementEnded,
    PlacementProgressed,
    RequestOrder,
    ResumeOrder,
    RetractOrder,
    Stage,
    WorkerLost,
    WorkerSend,
)
from coordinator.state.placement_table import PlacementTable
from coordinator.state.poison import poison_reason
from coordinator.state.request_state import RequestState
from coordinator.state.worker_entry import InboundTransfer, WorkerDrain, WorkerEntry, life_of
from protocol.arrays import Int32Array
from protocol.messages import NO_TOKEN, Exited, Grant, Resize, Withdraw
from protocol.sizing import NO_MEMORY, Memory
from protocol.units import PAGE_TOKENS, pages_for


class Effects(NamedTuple):
    """Ledger changes to apply first, then tells and commands."""

    steps: tuple[LedgerStep, ...] = ()
    tells: tuple[AddressedOrder, ...] = ()
    sends: tuple[WorkerSend, ...] = ()

    def plus(self, other: Effects) -> Effects:
        return Effects(self.steps + other.steps, self.tells + other.tells, self.sends + other.sends)


NOTHING = Effects()
#: Transfers of one request that may fail, with both workers alive, before it does.
TRANSFERS_FAILED_MAX: Final = 6
#: Pause after the first of them, twice as long after each: what fails at once may do so until its cause is gone.
TRANSFER_PAUSE_S: Final = 0.5


def order_to(entry: RequestState, order: RequestOrder) -> AddressedOrder:
    return AddressedOrder(entry.request_index, order)


def in_transactions(steps: Sequence[LedgerStep]) -> Iterator[tuple[str, list[int]]]:
    """Nodes, and the numbers of their steps, so that each node is asked as seldom as may be.

    Steps of a node keep their order, and so do the notes of a request, which lie in one journal: a request is demoted
    on one node before it is placed on another.
    """
    by_node: dict[str, list[int]] = {}
    noted: dict[int, str] = {}
    for number, step in enumerate(steps):
        request_index = getattr(step.note, "request_index", None)
        if request_index is not None and noted.setdefault(request_index, step.node) != step.node:
            yield from by_node.items()
            by_node, noted = {}, {request_index: step.node}
        by_node.setdefault(step.node, []).append(number)
    yield from by_node.items()


class Dispatch:
    """`ledgers`, by node, are read for planning; they change only through the steps returned here."""

    def __init__(
        self,
        ledgers: Mapping[str, Ledger],
        ahead_tokens: int,
        prefix_reuse: PrefixReuse | None = None,
        makes_output_room: Callable[[RequestState], bool] = lambda _: True,
        holds_output: Callable[[int, bool], None] = lambda _request_index, _is_held: None,
    ) -> None:
        """`makes_output_room`: see Policy. `holds_output` is told of each request that operators hold, or resume."""
        self.placement_table = PlacementTable()
        self.prefix_reuse = prefix_reuse or PrefixReuse(OFF)
        self.policy = Policy(self.placement_table, ledgers, ahead_tokens, self.prefix_reuse, makes_output_room)
        self.dirty = False
        self._holds_output = holds_output
        self._now = 0.0  # of the last plan

    # ---------------------------------------------------------------- from Requests

    def progressed(self, event: PlacementProgressed) -> Effects:
        entry = self._current(event.request_index, event.placement)
        if entry is None:
            return NOTHING
        self.dirty = True
        match event.stage:
            case Stage.STAGED:
                self.placement_table.stage(entry)
                computed = entry.facts.prompt_tokens - entry.shared_pages * PAGE_TOKENS
                self.policy.prefill_costs.note(entry.worker, computed, event.took_s)
                cached = self.prefix_reuse.keep_prompt(entry, self.policy.ledgers[entry.node])
                if entry.prefills_only:
                    self.placement_table.leave(entry, frees_pages=False)
                return Effects(cached)
            case Stage.STARTED:
                if not entry.by_steps:  # rows of its prompt have come from another node
                    return Effects(self.prefix_reuse.keep_prompt(entry, self.policy.ledgers[entry.node]))
            case Stage.PARKED:
                self.starve(entry)
            case Stage.RESIZED:
                if entry.resizing is not None and (freed := self.placement_table.resized(entry)):
                    return _effects(LedgerStep(entry.node, Shrink(entry.placement, Memory(hot_chunks=freed))))
            case Stage.LEAVING:
                self.placement_table.leave(entry, frees_pages=True)
        return NOTHING

    def placement_ended(self, event: PlacementEnded, generated: int, tokens: Callable[[], bytes] = bytes) -> Effects:
        """The placement is over: keep its rows, or release everything. Full pages of rows stay in the cache either
        way. `tokens`: its prompt and its output, int32."""
        entry = self._current(event.request_index, event.placement)
        if entry is None:
            return NOTHING
        self.dirty = True
        ledger = self.policy.ledgers[entry.node]
        cached = (
            self.prefix_reuse.distrust_pages(entry, ledger)
            if event.is_suspect
            else self.prefix_reuse.keep_rows(entry, ledger, event.cacheable_tokens, generated, tokens)
        )
        return Effects(cached).plus(self._placement_ended(entry, event, generated))

    def prompt_rows(self, entry: RequestState, durable_tokens: int) -> Effects:
        """So many rows of a prompt that is being computed are durable: cache their pages, and look at who waits for
        them."""
        if not entry.worker:
            return NOTHING
        cached = self.prefix_reuse.keep_prompt(entry, self.policy.ledgers[entry.node], durable_tokens)
        self.dirty = self.dirty or bool(cached)
        return Effects(cached)

    def digested(self, facts: journal.RequestFacts, chain: Chain) -> None:
        """A request of an earlier incarnation may begin with cached pages, and what it computes may be cached."""
        entry = self.placement_table.entries.get(facts.request_index)
        if entry is not None and entry.facts is facts:
            entry.chain = chain
            self.dirty = True

    def _placement_ended(self, entry: RequestState, event: PlacementEnded, generated: int) -> Effects:
        if transfer_id := self.placement_table.transfer_of(entry):
            return self._sender_ended(entry, transfer_id, event, generated)
        kept_tokens = 0 if entry.frees_pages else min(event.durable_tokens, entry.pages * PAGE_TOKENS)
        first_token = event.first_token if kept_tokens else NO_TOKEN
        pages = self._pages_kept(entry, kept_tokens)
        step = LedgerStep(
            entry.node,
            Keep(entry.placement, pages) if kept_tokens else Release(entry.placement),
            journal.RequestPlacementEnded(entry.request_index, kept_tokens, first_token),
        )
        entry.generated = generated
        self.placement_table.end_placement(entry, kept_tokens, pages, first_token)
        dropped = event.durable_tokens and not kept_tokens
        return Effects((step,), (order_to(entry, DemoteOrder("dropped")),) if dropped else ())

    def _sender_ended(
        self, entry: RequestState, inbound: InboundTransfer, event: PlacementEnded, generated: int
    ) -> Effects:
        """It has left the worker that was to send its rows away. They are taken for sent on that worker's word; whether
        they have arrived, the other one says."""
        entry.generated = generated
        has_rows = (
            event.durable_tokens and not (entry.frees_pages or entry.is_ending) and (inbound.arrived or not entry.lost)
        )
        if has_rows:
            kept_tokens = min(event.durable_tokens, entry.facts.prompt_tokens)
            key = inbound.node, inbound.worker, inbound.epoch
            note = journal.RequestHandedOver(
                entry.request_index, inbound.placement, *key, kept_tokens, event.first_token
            )
            step = LedgerStep(entry.node, Release(entry.placement), note)
            self.placement_table.hand_over(entry, inbound, kept_tokens, event.first_token)
            if inbound.arrived:
                self.placement_table.close_transfer(inbound)
            return _effects(step)
        is_failure = not (entry.lost or entry.frees_pages or entry.is_ending)
        step = LedgerStep(entry.node, Release(entry.placement), journal.RequestPlacementEnded(entry.request_index, 0))
        tells = (order_to(entry, DemoteOrder("its rows had not arrived")),) if event.durable_tokens else ()
        suspect = self.prefix_reuse.distrust_pages(entry, self.policy.ledgers[entry.node]) if is_failure else ()
        self.placement_table.end_placement(entry, 0, 0)
        effects = self.revoke(inbound)
        effects = Effects((*suspect, step, *effects.steps), tells, effects.sends)
        if not is_failure:
            return effects
        return effects.plus(self._count_failure(entry, f"sending to {inbound.worker} failed"))

    def revoke(self, inbound: InboundTransfer) -> Effects:
        """No request wants the rows any more. Pages that may still be written wait for their worker's word (I2)."""
        entry = self.placement_table.receives(inbound)
        if entry is not None:
            entry.transfer_id = 0
        inbound.request_index = None
        if not inbound.arrived:
            return Effects(sends=(WorkerSend(inbound.worker, Withdraw(inbound.placement)),))
        self.placement_table.close_transfer(inbound)
        return _effects(LedgerStep(inbound.node, Release(inbound.placement)))

    def _count_failure(self, entry: RequestState, reason: str) -> Effects:
        entry.transfers_failed += 1
        if entry.transfers_failed < TRANSFERS_FAILED_MAX:
            entry.paused_until = self._now + TRANSFER_PAUSE_S * 2 ** (entry.transfers_failed - 1)
            return NOTHING
        return self.end(entry, "FAILED", f"{TRANSFERS_FAILED_MAX} transfers failed, the last: {reason}")

    def transfer_closed(self, worker: str, epoch: int, placement: int, durable_tokens: int) -> Effects:
        """The worker has let go of a transfer: nothing is written to its pages any more. All rows have arrived, or none
        count."""
        inbound = self.placement_table.transfers.get(placement)
        if inbound is None or (inbound.worker, inbound.epoch) != (worker, epoch) or inbound.arrived:
            return NOTHING
        if not durable_tokens:
            return self.close_transfer(inbound, f"{worker} has not taken its rows in", is_lost=False)
        self.dirty = True
        entry = self.placement_table.receives(inbound)
        if entry is None:
            return self.close_transfer(inbound, "", is_lost=False)
        inbound.arrived = True
        if not entry.worker:
            self.placement_table.close_transfer(inbound)
        return _effects(LedgerStep(inbound.node, Keep(placement, inbound.pages)))

    def close_transfer(self, inbound: InboundTransfer, reason: str, *, is_lost: bool) -> Effects:
        """None of its rows count: whose they were loses them. `is_lost`: with the worker that was to take them in."""
        self.dirty = True
        entry = self.placement_table.receives(inbound)
        self.placement_table.close_transfer(inbound)
        released = Effects((LedgerStep(inbound.node, Release(inbound.placement)),))
        return released if entry is None else self._transfer_failed(entry, released, reason, is_lost=is_lost)

    def _transfer_failed(self, entry: RequestState, released: Effects, reason: str, *, is_lost: bool) -> Effects:
        """Its worker is told to leave, or a request whose rows were taken for sent is demoted."""
        if entry.worker:
            self.placement_table.leave(entry, frees_pages=True)
            effects = released._replace(tells=(order_to(entry, RetractOrder(False, reason)),))
        else:
            self.placement_table.demote(entry)
            note = journal.RequestPlacementEnded(entry.request_index, 0)
            effects = Effects((released.steps[0]._replace(note=note),), (order_to(entry, DemoteOrder(reason)),))
        if is_lost or entry.is_ending:
            return effects
        return effects.plus(self._count_failure(entry, reason))

    @staticmethod
    def _pages_kept(entry: RequestState, kept_tokens: int) -> int:
        """Those with rows; of a prompt that is handed over, all that were reserved for decoding it, unless its worker
        may still write there."""
        if kept_tokens and entry.prefills_only and not entry.lost:
            return entry.pages
        return pages_for(kept_tokens)

    def closed(self, request_index: int) -> None:
        """The request is over; nothing of it is left anywhere."""
        self.placement_table.remove(self.placement_table.entries[request_index])

    def starve(self, entry: RequestState) -> None:
        """It is short of granted pages."""
        if entry.worker and not entry.leaving:
            self.placement_table.starving[entry.request_index] = entry
            self.dirty = True

    # ---------------------------------------------------------------- from worker links

    def worker_up(self, worker: WorkerEntry, process: tuple[int, int, str] = journal.NOT_ATTESTED) -> Effects:
        """An epoch joins. Its process is written in the commit of its budgets, so that no coordinator knows of memory
        that it may touch, and not how its exit is proved (I2)."""
        self.placement_table.add_worker(worker)
        self.dirty = True
        about = worker.node, worker.name, worker.epoch, worker.capacity, worker.model
        joined = journal.WorkerJoined(*about, *process, worker.member, worker.first_epoch)
        return _effects(LedgerStep(worker.node, AddWorker(worker.name, worker.epoch, worker.capacity), joined))

    def worker_down(
        self, worker: WorkerEntry, *, proved_exit: bool, died: bool = False, is_leaving: bool = False
    ) -> Effects:
        """An epoch is over. `died`: its process ended, and requests on it are failed past the poison limit.
        `is_leaving`: it had said so."""
        reason = f"{worker.name} exited" if proved_exit else f"{worker.name} is lost"
        lost = self.placement_table.lose(worker)
        key = worker.name, worker.epoch
        self.placement_table.poison_detector.lost(key, lost, life_of(worker), is_leaving=is_leaving)
        self.dirty = True
        ends, struck = self._judge(key, died=died) if proved_exit else (NOTHING, None)
        unit = own_unit(worker.model, worker.capacity)
        tells = tuple(order_to(it, WorkerLost(it.placement, proved_exit, reason, unit)) for it in lost)
        step = LedgerStep(worker.node, LoseWorker(worker.name, worker.epoch, proved_exit), struck)
        effects = Effects((step, *ends.steps), (*ends.tells, *tells), ends.sends)
        for transfer_id in self.placement_table.transfers_to(*key):
            effects = effects.plus(self.close_transfer(transfer_id, reason, is_lost=True))
        return effects.plus(self._tell_exited(key)) if proved_exit and died else effects

    def _tell_exited(self, key: EpochKey) -> Effects:
        """Tell the workers that may wait for this process to let go of their pages."""
        pid = self.placement_table.pids.pop(key, 0)
        takers = {it.worker for it in self.placement_table.transfers.values() if not it.arrived}
        return Effects(sends=tuple(WorkerSend(name, Exited(key[0], pid)) for name in sorted(takers)))

    def worker_exited(self, worker: str, epoch: int, *, died: bool = True) -> Effects:
        self.dirty = True
        ends, struck = self._judge((worker, epoch), died=died)
        nodes = enumerate(self.policy.ledgers)
        steps = [LedgerStep(node, ProveExit(worker, epoch), None if number else struck) for number, node in nodes]
        effects = Effects((*steps, *ends.steps), ends.tells, ends.sends)
        return effects.plus(self._tell_exited((worker, epoch))) if died else effects

    def beside_lost(self, key: EpochKey) -> list[RequestState]:
        """Requests on the connected ranks of the group's life in which an epoch went down."""
        life = self.placement_table.poison_detector.life_of(key)
        ranks = [it for it in self.placement_table.workers.values() if life is not None and life_of(it) == life]
        return [entry for it in ranks for entry in self.placement_table.on(it.name)]

    def _judge(self, key: EpochKey, *, died: bool) -> tuple[Effects, journal.RequestsStruck | None]:
        """Fail those for whom this death was one too many. Strikes are written down with the change that the death is,
        so that none counts twice, and none is forgotten once its request is admitted again."""
        if not died:
            self.placement_table.poison_detector.survived(key)
            return NOTHING, None
        detector, entries = self.placement_table.poison_detector, self.placement_table.entries
        effects, struck = NOTHING, detector.died(key, entries, self.beside_lost(key))
        for entry in struck:
            if entry.strikes >= POISON_STRIKES and (entry.worker or entry.waits):
                effects = effects.plus(Effects(self.prefix_reuse.distrust_epoch(key)))
                effects = effects.plus(self.end(entry, "FAILED", poison_reason(entry, key[0]), "poison"))
        said = [(entry.request_index, entry.strikes, entry.mark) for entry in struck]
        return effects, journal.struck_of(key[0], said) if said else None

    # ---------------------------------------------------------------- from operators

    def retract(self, entry: RequestState, *, keep: bool, hold: bool, reason: str) -> Effects:
        self._hold(entry, entry.ordered.held or hold)
        tell = order_to(entry, RetractOrder(keep, reason))
        if entry.worker:
            self.placement_table.leave(entry, frees_pages=not keep)
            return Effects((), (tell,))
        return NOTHING._replace(tells=(tell,)) if keep else self._demote(entry, reason, tell)

    def resume(self, entry: RequestState, reason: str) -> Effects:
        self._hold(entry, False)
        return Effects((), (order_to(entry, ResumeOrder(reason)),))

    def _hold(self, entry: RequestState, is_held: bool) -> None:
        self.dirty = True
        self.placement_table.hold(entry, is_held)
        self._holds_output(entry.request_index, is_held)

    def end(self, entry: RequestState, outcome: str, reason: str, cause: str = "") -> Effects:
        """Abort it, or fail it for `cause`, wherever it is."""
        self.dirty = True
        self.placement_table.order_end(entry, outcome, reason)
        tell = order_to(entry, EndOrder(outcome, reason, cause))
        if entry.worker:
            self.placement_table.leave(entry, frees_pages=True)
            return Effects((), (tell,))
        return self._demote(entry, reason, tell)

    def force(self, entry: RequestState, hot_slots: int) -> Effects:
        self.placement_table.force(entry, hot_slots)
        self.dirty = True
        return NOTHING

    def drain(self, worker: WorkerEntry, drain: WorkerDrain | None) -> None:
        self.placement_table.drain(worker, drain)
        self.dirty = True

    def _demote(self, entry: RequestState, reason: str, tell: AddressedOrder) -> Effects:
        """A waiting request loses what it keeps."""
        if not entry.pages:
            return Effects((), (tell,))
        note, effects = journal.RequestPlacementEnded(entry.request_index, 0), NOTHING
        step = LedgerStep(entry.node, Release(entry.placement))
        if inbound := self.placement_table.transfer_of(entry):
            effects = self.revoke(
                inbound
            )  # takes nothing back before its worker has let go: the note goes all the same
            step = next(iter(effects.steps), LedgerStep(inbound.node, Shrink(inbound.placement, NO_MEMORY)))
        self.placement_table.demote(entry)
        tells = tell, order_to(entry, DemoteOrder(reason))
        return effects._replace(steps=(step._replace(note=note),), tells=tells)

    # ---------------------------------------------------------------- decisions

    def plan(self, now: float, *, tick: bool = False) -> list[decisions.Decision]:
        """Decide, if anything has changed or time has passed. Carry each out by `step`, apply it, then `told`."""
        self._now = now
        if not self.dirty and not tick:
            return []
        self.dirty = False
        return self.policy.plan(now, tick=tick)

    @staticmethod
    def step(decision: decisions.Decision) -> LedgerStep | None:
        """The ledger change of a decision; None: it has none, or only later, on the worker's word."""
        match decision:
            case decisions.AdmitDecision(
                entry, worker, placement, take_over, durable_tokens, memory, _, _, decoder, transfer, share
            ):
                key, transfer_id = (worker.node, worker.name, worker.epoch), transfer.transfer_id if transfer else 0
                placed = journal.RequestPlaced(
                    entry.request_index, placement, *key, durable_tokens, bool(decoder), transfer_id
                )
                return LedgerStep(
                    worker.node, Reserve(placement, worker.name, memory, take_over, share.tobytes()), placed
                )
            case decisions.GrantDecision(entry, more):
                return LedgerStep(entry.node, Extend(entry.placement, more))
            case decisions.ResizeDecision(entry, _, more) if more:
                return LedgerStep(entry.node, Extend(entry.placement, Memory(hot_chunks=more)))
            case decisions.DemoteDecision(entry, node, placement):
                return LedgerStep(node, Release(placement), journal.RequestPlacementEnded(entry.request_index, 0))
        return None

    @staticmethod
    def transfer_step(decision: decisions.Decision) -> LedgerStep | None:
        """The change of another node's ledger that goes with a decision: carried out before `step`."""
        if not isinstance(decision, decisions.AdmitDecision) or decision.transfer is None:
            return None
        transfer_id, worker, pages, share = msgspec.structs.astuple(decision.transfer)
        fresh = Memory(pages - share.size)
        return LedgerStep(worker.node, Reserve(transfer_id, worker.name, fresh, None, share.tobytes()))

    @staticmethod
    def told(
        decision: decisions.Announced,
        pages: Int32Array,
    ) -> AddressedOrder:
        """Return the order to the Request of a decision that was carried out; `pages` are those given out.

        An Admit is told by the Scheduler, which has the prompt.
        """
        entry = decision.entry
        match decision:
            case decisions.GrantDecision(_, more):
                grant = Grant(entry.placement, pages.tobytes(), more.index_pages, more.hot_chunks)
                return order_to(entry, GrantOrder(grant))
            case decisions.ResizeDecision(_, hot_size):
                return order_to(entry, GrantOrder(Resize(entry.placement, hot_size.hot_slots, hot_size.hot_chunks)))
            case decisions.RetractDecision(_, keep, _, reason):
                return order_to(entry, RetractOrder(keep, reason))
            case decisions.DemoteDecision():
                return order_to(entry, DemoteOrder(decision.reason))

    def _current(self, request_index: int, placement: int) -> RequestState | None:
        entry = self.placement_table.entries.get(request_index)
        return entry if entry is not None and entry.worker and entry.placement == placement else None


def _effects(*steps: LedgerStep) -> Effects:
    return Effects(steps)
