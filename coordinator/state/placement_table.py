"""Table of requests and workers: who waits, who is where, in what order. Pure.

Rank decides everything: priority first, then the owner's turn, then arrival; it is total and never changes, so
"lower-ranked" is well founded and policy cannot go in circles. Waiting requests and those on each worker are kept in
sorted lists: insertion moves at most a few thousand pointers (2 us at 10,000), and both ends are at hand.

What an entry holds is a mirror of the ledger's holding, kept for speed; `check_invariants` compares them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final

from msgspec.structs import replace

from coordinator.journal.records import DRAINS_MAX, RequestFacts, RequestOrdered, RequestPlaced
from coordinator.journal.state import RequestRecord, no_order
from coordinator.memory.ledger import EpochKey, Ledger, is_same_process
from coordinator.state.owner_turns import Owner, OwnerTurns
from coordinator.state.poison import PoisonDetector
from coordinator.state.request_state import RequestState
from coordinator.state.worker_entry import InboundTransfer, WorkerDrain, WorkerEntry, life_of, missing_of, ranks_of
from protocol.errors import InternalError
from protocol.messages import NO_HOT_BUFFER, NO_TOKEN, FirstToken, Rank
from protocol.sizing import NO_HOT_SIZE, RESIDENT, HotSize, Memory

#: Epochs that went down whose processes' ids are remembered.
LOST_MAX: Final = 1_024


class PlacementTable:
    """All live requests and workers."""

    def __init__(self) -> None:
        self.entries: dict[int, RequestState] = {}
        self.by_rank: dict[Rank, RequestState] = {}
        self.waiting: list[Rank] = []
        self.workers: dict[str, WorkerEntry] = {}
        self.changes = 0  # of `workers`: that one came or went
        self.unexplained: dict[int, RequestState] = {}  # waiting, and no reason is in the history yet
        self.starving: dict[int, RequestState] = {}
        self.kept: dict[int, RequestState] = {}  # off their workers, with host pages
        self.forcing: dict[int, RequestState] = {}  # an operator's hot size has yet to be applied
        self.promised: dict[int, RequestState] = {}  # on one worker for their prompt, with a `decoder`
        self.computing: dict[int, RequestState] = {}  # on a worker, their prompts not staged yet
        self.transfers: dict[int, InboundTransfer] = {}  # by placement
        self.pids: OrderedDict[EpochKey, int] = OrderedDict()  # of epochs that went down without proof
        self.drains: OrderedDict[str, tuple[int, WorkerDrain]] = OrderedDict()  # with the epoch; of gone workers too
        self.poison_detector = PoisonDetector()
        self._turns = OwnerTurns()
        self._arrivals = 0
        self._placements = 0

    # ---------------------------------------------------------------- requests

    def next_rank(self, priority: int, owner: Owner = ("", "")) -> Rank:
        """Return the rank of a request of `owner` that arrives now."""
        self._arrivals += 1
        return -priority, self._turns.next(priority, owner), self._arrivals

    def add(self, facts: RequestFacts, now: float = 0.0, prompt: bytes = b"", grammar: str = "") -> RequestState:
        """Add a request that was submitted at `now`, waiting."""
        return self._add(RequestState(facts, prompt, grammar, submitted_at=now))

    def _add(self, entry: RequestState) -> RequestState:
        self.entries[entry.request_index] = self.by_rank[entry.rank] = self.unexplained[entry.request_index] = entry
        insort(self.waiting, entry.rank)
        self._turns.add(entry.facts)
        return entry

    def remove(self, entry: RequestState) -> None:
        """The request is over and holds nothing."""
        self._unlist(entry)
        self.forcing.pop(entry.request_index, None)
        self.promised.pop(entry.request_index, None)
        self.poison_detector.forget(entry)
        self._turns.remove(entry.facts)
        del self.entries[entry.request_index], self.by_rank[entry.rank]

    def admit(
        self,
        entry: RequestState,
        worker: WorkerEntry,
        memory: Memory,
        hot_size: HotSize,
        decoder: str = "",
        *,
        computes_prompt: bool = False,
    ) -> int:
        """It takes `memory` (fresh pages beside those kept) on `worker`; returns the number of this placement. With a
        `decoder` it is there for its prompt alone, and that worker is to have room for it afterwards."""
        self._unlist(entry)
        self._placements += 1
        entry.worker, entry.node = worker.name, worker.node
        entry.own_tokens, entry.kept_tokens = entry.facts.part_of_prompt(entry.kept_tokens), 0
        entry.placement, entry.stranded_at = self._placements, None
        entry.prefills_only = hot_size.hot_slots == NO_HOT_BUFFER
        entry.first_token, entry.decoder, entry.reasons_told = NO_TOKEN, decoder, frozenset()
        if decoder:
            self.promised[entry.request_index] = entry
        entry.came_with = entry.generated
        if entry.ordered.forced_slots != NO_HOT_BUFFER:
            self.forcing[entry.request_index] = entry
        entry.pages, entry.hot = memory.index_pages, hot_size
        if computes_prompt:
            self.computing[entry.request_index] = entry
        insort(worker.ranks, entry.rank)
        self._note_size(entry, worker)
        return entry.placement

    def open_transfer(self, entry: RequestState, worker: WorkerEntry, pages: int) -> int:
        """`worker` is to take its rows in; returns the transfer's number. Before `admit`."""
        self._placements += 1
        inbound = InboundTransfer(self._placements, entry.request_index, worker.node, worker.name, worker.epoch, pages)
        self.transfers[inbound.placement] = inbound
        entry.transfer_id = inbound.placement
        return inbound.placement

    def transfer_of(self, entry: RequestState) -> InboundTransfer | None:
        return self.transfers.get(entry.transfer_id)

    def receives(self, inbound: InboundTransfer) -> RequestState | None:
        """Return the request whose rows a transfer takes in; None: no live one wants them."""
        return None if inbound.request_index is None else self.entries.get(inbound.request_index)

    def close_transfer(self, inbound: InboundTransfer) -> None:
        """Its pages are free, or a request's like any other."""
        del self.transfers[inbound.placement]
        entry = self.receives(inbound)
        if entry is not None and entry.transfer_id == inbound.placement:
            entry.transfer_id = 0

    def hand_over(
        self, entry: RequestState, inbound: InboundTransfer, kept_tokens: int, first_token: FirstToken
    ) -> None:
        """It is off its worker, and what it keeps is where its transfer is."""
        self.end_placement(entry, kept_tokens, inbound.pages, first_token)
        entry.node, entry.placement = inbound.node, inbound.placement

    def transfers_to(self, worker: str, epoch: int) -> list[InboundTransfer]:
        """Those that the epoch has yet to let go."""
        return [it for it in self.transfers.values() if (it.worker, it.epoch) == (worker, epoch) and not it.arrived]

    def stage(self, entry: RequestState) -> None:
        """Its prompt is in host pages."""
        self.computing.pop(entry.request_index, None)

    def grant(self, entry: RequestState, more: Memory) -> None:
        entry.pages += more.host_pages
        entry.hot = HotSize(entry.hot.hot_slots, entry.hot.hot_chunks + more.hot_chunks)
        self.starving.pop(entry.request_index, None)

    def resize(self, entry: RequestState, hot_size: HotSize, now: float) -> None:
        """A Resize is under way; `chunks` covers both sizes until `resized`."""
        worker = self.workers[entry.worker]
        if hot_size.hot_chunks < entry.hot.hot_chunks:
            worker.shrunk_at = now
        entry.resizing = hot_size
        worker.resizing[entry.request_index] = entry

    def resized(self, entry: RequestState) -> int:
        """The Resize under way took effect; returns chunks that are free now."""
        assert entry.resizing is not None
        before, entry.hot, entry.resizing = entry.chunks, entry.resizing, None
        worker = self.workers.get(entry.worker)
        if worker is not None and not entry.leaving:
            del worker.resizing[entry.request_index]
            self._note_size(entry, worker)
        return before - entry.hot.hot_chunks

    def leave(self, entry: RequestState, *, frees_pages: bool) -> None:
        """It will leave its worker by itself or was told to. Told twice: pages once to be freed stay so."""
        if entry.leaving:
            entry.frees_pages = entry.frees_pages or frees_pages
            return
        self._unlist(entry)
        entry.leaving, entry.frees_pages = True, frees_pages
        if worker := self.workers.get(entry.worker):
            worker.leaving[entry.request_index] = entry

    def end_placement(
        self, entry: RequestState, kept_tokens: int, kept_pages: int, first_token: FirstToken = NO_TOKEN
    ) -> None:
        """It is off its worker, and waits again unless it is to end: on its node if it keeps pages."""
        self._unlist(entry)
        self.promised.pop(entry.request_index, None)
        entry.first_token, entry.decoder = first_token, ""
        entry.worker, entry.hot, entry.resizing = "", NO_HOT_SIZE, None
        entry.pages, entry.kept_tokens = kept_pages, kept_tokens
        entry.leaving = entry.frees_pages = entry.lost = False
        if kept_pages:
            self.kept[entry.request_index] = entry
        else:
            entry.placement, entry.node = 0, ""
        if entry.waits and not entry.ordered.held:
            insort(self.waiting, entry.rank)
            self.unexplained[entry.request_index] = entry

    def demote(self, entry: RequestState) -> None:
        """A waiting request gives its kept pages up."""
        self.kept.pop(entry.request_index, None)
        entry.pages = entry.kept_tokens = entry.placement = 0
        entry.node, entry.stranded_at, entry.first_token = "", None, NO_TOKEN

    def hold(self, entry: RequestState, held: bool) -> None:
        if entry.waits and held != entry.ordered.held:
            if held:
                _discard(self.waiting, entry.rank)
                self.unexplained.pop(entry.request_index, None)
            else:
                insort(self.waiting, entry.rank)
                self.unexplained[entry.request_index] = entry
        entry.ordered = replace(entry.ordered, held=held)
        self._turns.hold(entry.facts, held)

    def force(self, entry: RequestState, hot_slots: int) -> None:
        """An operator's choice of hot size; NO_HOT_BUFFER leaves it to policy again."""
        entry.ordered = replace(entry.ordered, forced_slots=hot_slots)
        self.forcing.pop(entry.request_index, None)
        if hot_slots != NO_HOT_BUFFER:
            self.forcing[entry.request_index] = entry

    def order_end(self, entry: RequestState, outcome: str, reason: str) -> None:
        """It is to end, and waits no more. The first such order stands."""
        if not entry.is_ending:
            entry.ordered = replace(entry.ordered, outcome=outcome, reason=reason)
        if not entry.worker:
            self._unlist(entry)

    def _unlist(self, entry: RequestState) -> None:
        """Take it out of the lists of those that wait, or of its worker."""
        self.starving.pop(entry.request_index, None)
        self.unexplained.pop(entry.request_index, None)
        self.kept.pop(entry.request_index, None)
        self.computing.pop(entry.request_index, None)
        if not entry.worker:
            _discard(self.waiting, entry.rank)
        worker = self.workers.get(entry.worker)
        if worker is not None:
            _discard(worker.ranks, entry.rank)
            worker.leaving.pop(entry.request_index, None)
            worker.resizing.pop(entry.request_index, None)
            worker.managed.pop(entry.request_index, None)

    def _note_size(self, entry: RequestState, worker: WorkerEntry) -> None:
        worker.managed.pop(entry.request_index, None)
        if entry.hot.hot_slots > RESIDENT:
            worker.managed[entry.request_index] = entry

    # ---------------------------------------------------------------- from the journal

    def go_on_from(self, arrivals: int, placements: int) -> None:
        """These were the highest numbers of an earlier incarnation."""
        self._arrivals, self._placements = arrivals, placements

    def recover(self, record: RequestRecord, generated: int, now: float) -> RequestState:
        """Add a request of an earlier incarnation that was submitted at `now`, waiting, as its history says. Its orders
        come with `recover_orders`."""
        entry = RequestState.of(record, now)
        entry.generated, entry.ordered = generated, no_order(entry.request_index)
        self._add(entry)
        del self.unexplained[entry.request_index]
        self.poison_detector.recover(entry)
        return entry

    def recover_kept(self, entry: RequestState, placed: RequestPlaced, pages: int) -> None:
        """It keeps `pages` of an ended placement."""
        entry.node, entry.placement, entry.prefills_only = placed.node, placed.placement, placed.prefills_only
        entry.pages = pages
        self.kept[entry.request_index] = entry

    def recover_placed(
        self, entry: RequestState, placed: RequestPlaced, memory: Memory, worker: WorkerEntry | None
    ) -> None:
        """It is on `worker`, which is yet to be heard, or (None) leaves one that was lost. Which hot size it has, the
        inventory will say; no row of its prompt counts as durable before the worker says so."""
        self._unlist(entry)
        entry.leaving = entry.lost = worker is None
        entry.node, entry.worker, entry.placement = placed.node, placed.worker, placed.placement
        entry.pages, entry.prefills_only, entry.by_steps = memory.host_pages, placed.prefills_only, True
        entry.own_tokens = entry.facts.part_of_prompt(placed.durable_tokens)
        entry.hot = NO_HOT_SIZE if placed.prefills_only else HotSize(RESIDENT, memory.hot_chunks)
        if worker is not None:
            insort(worker.ranks, entry.rank)

    def recover_orders(self, entry: RequestState, ordered: RequestOrdered) -> None:
        """The last of an earlier incarnation."""
        self.hold(entry, ordered.held)
        self.force(entry, ordered.forced_slots)
        entry.ordered = ordered

    def adopt(self, entry: RequestState, hot: HotSize, resizing: HotSize | None, *, staged: bool) -> None:
        """Note what its worker says of its hot buffer, and whether its prompt is staged."""
        worker = self.workers[entry.worker]
        entry.hot, entry.resizing = hot, resizing
        if not entry.leaving:
            self._note_size(entry, worker)
            if not staged:
                self.computing[entry.request_index] = entry
            if resizing is not None:
                worker.resizing[entry.request_index] = entry

    # ---------------------------------------------------------------- workers

    def add_worker(self, worker: WorkerEntry) -> None:
        """A new epoch. Equal capacities are made identical, so that they can be compared by identity; so are sizes."""
        self.changes += 1
        for other in self.workers.values():
            if other.capacity == worker.capacity:
                worker.capacity = other.capacity
            if other.sizes == worker.sizes:
                worker.sizes = other.sizes
        self.workers[worker.name] = worker
        epoch, drain = self.drains.pop(worker.name, (0, None))
        if is_same_process(epoch, worker.epoch, worker.first_epoch):
            self.drain(worker, drain)
        self._note_group(worker)

    def worker_back(self, worker: WorkerEntry) -> None:
        """An awaited epoch has said hello."""
        worker.awaited = False
        self._note_group(worker)

    def _note_group(self, changed: WorkerEntry) -> None:
        """Note on each rank of its group which ranks are missing."""
        if changed.member is not None:
            for name, missing in missing_of(changed.member.group, self.workers.values()).items():
                self.workers[name].ranks_missing = missing

    def beside(self, worker: WorkerEntry) -> list[WorkerEntry]:
        """The workers whose steps are its steps: the connected ranks of its group's life, or itself alone."""
        if worker.member is None:
            return [worker]
        return [it for it in ranks_of(worker.member.group, self.workers.values()) if life_of(it) == life_of(worker)]

    def drain(self, worker: WorkerEntry, drain: WorkerDrain | None) -> None:
        """None: it takes requests again. A drain is of a process: it outlives an epoch, and not a restart."""
        worker.drain = drain
        self.drains.pop(worker.name, None)
        if drain is not None:
            self.drains[worker.name] = worker.epoch, drain
            if len(self.drains) > DRAINS_MAX:
                self.drains.popitem(last=False)

    def lose(self, worker: WorkerEntry) -> list[RequestState]:
        """The worker is gone; returns its requests, all leaving now."""
        entries = list(self.on(worker.name))
        self.pids[worker.name, worker.epoch] = worker.pid
        if len(self.pids) > LOST_MAX:
            self.pids.popitem(last=False)
        for entry in entries:
            self.leave(entry, frees_pages=False)
            entry.lost = True
        del self.workers[worker.name]
        self.changes += 1
        self._note_group(worker)
        return entries

    def on(self, worker: str) -> Iterator[RequestState]:
        """Requests on a worker: those not leaving, best rank first, then those leaving."""
        there = self.workers[worker]
        yield from self.staying_on(there)
        yield from list(there.leaving.values())

    def staying_on(self, worker: WorkerEntry) -> list[RequestState]:
        """Return the requests on a worker that are not leaving, best rank first."""
        return [self.by_rank[rank] for rank in worker.ranks]

    def in_view(self) -> list[RequestState]:
        """Return the requests whose progress the next plan looks at: those short of pages, and all on a worker while
        some suspect is to be cleared."""
        if not self.poison_detector:
            return list(self.starving.values())
        return [entry for worker in self.workers for entry in self.on(worker)]

    def count_waiting(self, owner: Owner) -> int:
        """Requests of `owner` that wait. Takes time in proportion to all that wait: 1 ms for eight thousand."""
        return sum(self.by_rank[rank].facts.turn_owner == owner for rank in self.waiting)

    def of_node(self, node: str) -> list[WorkerEntry]:
        return [worker for worker in self.workers.values() if worker.node == node]

    # ---------------------------------------------------------------- invariants

    def check_invariants(self, ledger_of: Callable[[str], Ledger]) -> None:
        """Lists agree with entries, and entries with the ledgers. Raises InternalError naming the request."""
        for entry in self.entries.values():
            worker = self.workers.get(entry.worker)
            listed = {
                "waiting": entry.rank in self.waiting,
                "on its worker": worker is not None and entry.rank in worker.ranks,
                "leaving": worker is not None and entry.request_index in worker.leaving,
                "kept": entry.request_index in self.kept,
                "managed": worker is not None and entry.request_index in worker.managed,
            }
            is_listed = bool(entry.worker) and not entry.leaving
            expected = {
                "waiting": entry.waits and not entry.ordered.held,
                "on its worker": is_listed,
                "leaving": entry.leaving and not entry.lost,
                "kept": not entry.worker and entry.pages > 0,
                "managed": is_listed and entry.hot.hot_slots > RESIDENT,
            }
            holds = ledger_of(entry.node).held(entry.placement) if entry.node else None
            memory = entry.memory
            if (
                holds and entry.transfer_id == entry.placement
            ):  # rows yet to arrive: its worker's seat is the transfer's
                memory = replace(memory, seats=holds.seats)
            if listed != expected or (holds and holds != memory):
                found = f"{listed}, not {expected}; holds {holds}, not {memory}"
                raise InternalError(f"request {entry.request_index} in {entry.state}: {found}")
            if self._turns.counts(entry.facts) == entry.ordered.held:
                raise InternalError(f"request {entry.request_index} in {entry.state}: its turn is counted wrongly")
        if len(self._turns) != len(self.entries):
            raise InternalError("the turn of a request that is over is counted")
        listed_ranks = sum(len(worker.ranks) for worker in self.workers.values()) + len(self.waiting)
        if listed_ranks > len(self.entries) or len(self.by_rank) != len(self.entries):
            raise InternalError("a list names a request that is over")


def _discard(ranks: list[Rank], rank: Rank) -> None:
    at = bisect_left(ranks, rank)
    if at < len(ranks) and ranks[at] == rank:
        del ranks[at]
