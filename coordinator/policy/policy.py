"""Policy: who is admitted, who gets more, who is retracted and how, how large hot buffers are. Pure.

`Policy.plan` looks at the placement table and the ledgers and returns decisions, in the order in which they are to be
carried out; the placement table already reflects them. It is called after every batch of events, and its common path
costs a few microseconds per admission. Where a request could run is coordinator.policy.candidates' part.

Order. Demands are served strictly by rank, which is priority, then the turn of its owner, then arrival
(coordinator.state.owner_turns): running requests that need pages and waiting ones that need everything. A
waiting request that does not fit blocks the nodes on which it could run for every lower-ranked one, so no request
overtakes it there; what is on its way to it (`claims`) is not given to lower-ranked growth either.

Room is made in this order, and only if all of it together suffices (no request is retracted in vain):
  GPU    what leaving requests will free; hot buffers shrunk, largest first, one hot size at a time; then lower-ranked
         requests retracted (keep), lowest first
  host   kept requests demoted: lower-ranked ones, lowest first, then held ones of any rank, since they make no
         progress by themselves; then lower-ranked requests retracted (drop), lowest first
Shrinking takes from any request; retraction only from the lower-ranked, so the request of the first rank is
never a victim. A running request makes room only when it is URGENT, that is, nearly out of pages.

Two ways to be admitted (messages.PREFILL_MODES). Staged: one worker of role `both` computes the prompt and decodes it.
Direct: one worker computes the prompt into the host pages of the node of another, which then resumes it as if it had
been retracted; on another node, its rows are sent to pages there that an *inbound transfer* holds, with a seat of the
receiving worker (coordinator.state.worker_entry). The pair is admitted at once or not at all: host pages and the first
worker's memory are reserved, the second worker's are *promised* until the prompt is there, that is, subtracted at the
request's place in the order of rank. So only a better-ranked request can come between, and a coordinator that restarts
has no promise to look after. Asked for neither, a request goes directly while there is a worker that does nothing but
prefill, else staged.

Hot buffers. Resident while chunks suffice, else the largest class that fits. Grown lazily, smallest first, while
no request waits, a reserve stays free and nothing was shrunk for GROW_QUIET_S. A size forced by an operator takes
effect once its chunks are free, and policy leaves it alone.

Hot floors. Below its hot floor (coordinator.policy.throughput) a worker gives no hot size. So fewer requests run
there; those below it rise to it first, and where they cannot, the last in rank are retracted (keep). A running request
that is nearly out of pages may still shrink others below it. What no worker could hold at the floor is exempt.

Room for outputs. Pages are granted only where the token log has room for what they let a worker generate
(`makes_output_room`). A running request without it is retracted (drop), and a waiting one blocks none: so those that
the token log lets go on never wait for memory of those that it does not.

No livelock. Rank is a total order that never changes, and victims are ranked below whom they make room for. So the
highest-ranked request that is not held gets all it needs as soon as its inferiors have left, runs to its end, and
then the next one does. Thrashing is bounded too: a request that policy has displaced comes back only where there is
room for the remaining growth of those ahead of it (`Candidates._with_margin`), so they will not displace it again.

Rejected: reserving the second worker's memory in the ledger (a second placement of one request at the same time,
known to every room, for the second that a prompt takes); fair sharing of decode time between requests that do not fit
together (each switch costs an index reload; owners share by turns at submission, and each arrival displaces at most
once what it needs); letting small requests overtake a large waiting one (it starves);
retracting for a request's possible length at admission (most end long before max_tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from msgspec.structs import replace

from coordinator.memory.ledger import NO_PAGES, Ledger
from coordinator.policy.candidates import Candidates
from coordinator.policy.decisions import (
    DISPLACING,
    AdmitDecision,
    Cause,
    Decision,
    DemoteDecision,
    GrantDecision,
    ResizeDecision,
    RetractDecision,
    Transfer,
)
from coordinator.policy.following import Leaders
from coordinator.policy.free_memory import NO_PLAN_OUTCOME, FreeMemory, PlacementAsk, PlanOutcome, Refusal
from coordinator.policy.preemption import Frees, Preemption, find_preemption, next_lower, size_at_floor
from coordinator.policy.prefix_reuse import PrefillCosts, PrefixReuse
from coordinator.state.placement_table import PlacementTable
from coordinator.state.request_state import RANK_OF, RequestState
from coordinator.state.worker_entry import WorkerEntry
from protocol.arrays import Int32Array
from protocol.messages import DECODE, Rank
from protocol.sizing import (
    RESIDENT,
    HotSize,
    Memory,
    first_memory,
    forced_hot_size,
    hot_sizes_for,
    largest_hot_size,
    pages_wanted,
)
from protocol.units import PAGE_TOKENS

#: Pages beyond what is needed that a grant adds while memory is plentiful: fewer, larger grants.
GRANT_STEP_PAGES: Final = 2
#: With fewer granted tokens left than this, a running request makes others make room.
URGENT_TOKENS: Final = PAGE_TOKENS
#: Hot buffers grow only when none on the worker was shrunk for this long, ...
GROW_QUIET_S: Final = 5.0
#: ... and only while this share of the hot chunks stays free, for growing residents and newcomers, ...
GROW_RESERVE_SHARE: Final = 1 / 8
#: ... and at most this many at a time.
GROW_BATCH_MAX: Final = 4
#: Hot buffers that grow to their worker's hot floor at a time.
RAISE_BATCH_MAX: Final = 8
#: As many of the requests on a worker may stay below its hot floor.
BELOW_FLOOR_SHARE: Final = 1 / 50
#: Requests that one plan retracts for the others to rise to the floor.
THIN_BATCH_MAX: Final = 8
#: Requests that one plan takes off a draining worker.
HANDOVER_BATCH_MAX: Final = 16
#: A request that can begin anew is demoted once no worker on the node of its kept pages could take it for so long.
STRANDED_LIMIT_S: Final = 60.0

assert GROW_QUIET_S < STRANDED_LIMIT_S


class Policy:
    """Plans over one placement table. `ledgers`, by node, are read, never changed; `ahead_tokens` are granted ahead of
    need. `makes_output_room` is asked before a request is admitted or granted pages."""

    def __init__(
        self,
        placement_table: PlacementTable,
        ledgers: Mapping[str, Ledger],
        ahead_tokens: int,
        prefix_reuse: PrefixReuse,
        makes_output_room: Callable[[RequestState], bool] = lambda _: True,
    ) -> None:
        self.placement_table = placement_table
        self.ledgers = ledgers
        self.ahead_tokens = ahead_tokens
        self.prefix_reuse = prefix_reuse
        self.makes_output_room = makes_output_room
        self.prefill_costs = PrefillCosts()
        self.outcome = NO_PLAN_OUTCOME  # of the last plan

    def plan(self, now: float, *, tick: bool = False) -> list[Decision]:
        """Decide what to do now: applied to the placement table, yet to be applied to the ledgers. `tick`: do what can
        wait, too."""
        table = self.placement_table
        table.poison_detector.clear()
        demands = table.waiting or table.starving or table.promised or table.forcing
        if not (tick or demands or any(worker.drain is not None for worker in table.workers.values())):
            self.outcome = NO_PLAN_OUTCOME  # most turns of a cluster with room only note what has happened
            return []
        plan = _Plan(self, now)
        plan.meet_deadlines()
        if tick:
            plan.demote_stranded()
            plan.keep_floors()
        plan.meet_demands()
        plan.hand_over()
        plan.apply_forced()
        if tick and not table.waiting and not table.starving:
            plan.enlarge()
        self.outcome = PlanOutcome(plan.free, plan.refused, plan.blocked)
        return plan.decisions


class _Plan:
    """One call of `Policy.plan`. Free counts are as they will be once the decisions so far are carried out."""

    def __init__(self, policy: Policy, now: float) -> None:
        self.placement_table = policy.placement_table
        self.ahead_tokens = policy.ahead_tokens
        self.makes_output_room = policy.makes_output_room
        self.now = now
        self.decisions: list[Decision] = []
        self.blocked: dict[str, RequestState] = {}  # nodes, and who blocks them
        self.refused: dict[int, Refusal] = {}
        self.free = FreeMemory(policy.ledgers, policy.placement_table.workers.values())
        self.leaders = Leaders(policy.placement_table, policy.prefix_reuse)
        self.candidates = Candidates(
            policy.placement_table,
            self.free,
            self.blocked,
            self.leaders,
            policy.ahead_tokens,
            policy.prefix_reuse,
            policy.prefill_costs,
        )
        self._nodes = {worker.node for worker in self.placement_table.workers.values()}

    def freeing(self, node: str, share: Int32Array = NO_PAGES) -> Callable[[], Frees]:
        """Sets of requests on `node` that end after the decisions so far, while `share` is held."""

        def begin() -> Frees:
            freeing = self.free.held_after(node).copy()
            freeing.hold(share)
            return lambda entry: freeing.add(entry.placement)

        return begin

    # ---------------------------------------------------------------- demands, by rank

    def meet_demands(self) -> None:
        """Serve starving and waiting requests, and those to whom memory is promised, best rank first."""
        at, demands = 0, self.placement_table.starving | self.placement_table.promised
        for entry in sorted(demands.values(), key=RANK_OF):
            at = self._admit_until(at, entry.rank)
            if entry.decoder:
                self._promise(entry)
            elif entry.runs and entry.resizing is None:
                self._grant_pages(entry, self.placement_table.workers[entry.worker])
        self._admit_until(at, None)

    def _admit_until(self, at: int, rank: Rank | None) -> int:
        """Consider waiting requests from list index `at` on that outrank `rank`; returns where to go on."""
        waiting = self.placement_table.waiting
        nodes = self._nodes
        while at < len(waiting) and (rank is None or waiting[at] < rank) and not nodes <= self.blocked.keys():
            at += not self._consider(self.placement_table.by_rank[waiting[at]])
        return at

    def _consider(self, entry: RequestState) -> bool:
        """Admit a waiting request, or block the nodes it waits for. One that no worker can take on, or that is not to
        be tried again yet, blocks none."""
        is_paused = self.now < entry.paused_until
        if is_paused or not self.makes_output_room(entry):
            self.refused[entry.request_index] = Refusal([], lacks_output_room=not is_paused)
            return False
        if (plain := self.candidates.plain(entry)) is not None:
            self._admit(entry, plain)
            return True
        all_asks = self.candidates.of(entry)
        poison_detector = self.placement_table.poison_detector
        asks = [ask for ask in all_asks if self._may_join(entry, ask.worker)] if poison_detector else all_asks
        if following := self.leaders.followed_by(entry, {ask.worker.node for ask in asks}, self.now):
            self.refused[entry.request_index] = Refusal([], following=following)
            return False
        if (best := self.candidates.best_fitting(asks)) is not None:
            self._admit(entry, best)
            return True
        made = self._make_room(entry, asks)
        if made is not None and self.candidates.fits(made):
            self._admit(entry, made)
            return True
        told = [ask._replace(need=self.candidates.need_of(ask)) for ask in asks]
        self.refused[entry.request_index] = Refusal(told, bool(all_asks) and not asks, made is not None)
        for ask in all_asks:
            self.blocked.setdefault(ask.worker.node, entry)
        return False

    def _may_join(self, entry: RequestState, worker: WorkerEntry) -> bool:
        """Return whether poison detection lets it: a suspect waits its turn, and blocks like a request that waits for
        room."""
        present = (it for peer in self.placement_table.beside(worker) for it in self.placement_table.on(peer.name))
        return self.placement_table.poison_detector.may_join(entry, present)

    def _promise(self, entry: RequestState) -> None:
        """Reserve what a prompt under way was promised: for all requests after it, that counts as taken."""
        worker = self.placement_table.workers.get(entry.decoder)
        shape = self.candidates.shape(entry, worker, DECODE) if worker is not None and worker.takes else None
        if worker is not None and shape is not None:
            has_transfer = entry.transfer_id in self.placement_table.transfers  # with a seat and host pages
            need = replace(
                shape.need, seats=int(not has_transfer), host_pages=0 if has_transfer else shape.need.host_pages
            )
            self.free.promise(worker, need)

    def _admit(self, entry: RequestState, ask: PlacementAsk) -> None:
        worker = ask.worker
        chunks = self.free.on(worker).hot_chunks - ask.spare_chunks
        hot_size = next(hot_size for hot_size in reversed(ask.hot_sizes) if hot_size.hot_chunks <= chunks)
        memory = first_memory(ask.pages, entry.pages, hot_size)
        memory = replace(memory, host_pages=memory.host_pages - ask.prefix.size)
        taken = memory.plus(Memory(self._hold(worker.node, ask.prefix)))
        take_over, durable_tokens = (entry.placement, entry.kept_tokens) if entry.pages else (None, 0)
        first_token, decoder = entry.first_token, ask.decoder.worker.name if ask.decoder else ""
        transfer = self._open_transfer(entry, ask)
        shared_pages = int(ask.prefix.size) or entry.own_pages
        computes = not ask.by_steps and durable_tokens == entry.facts.part_of_prompt(durable_tokens)
        placement = self.placement_table.admit(entry, worker, memory, hot_size, decoder, computes_prompt=computes)
        self.leaders.begun(entry)
        entry.shared_pages, entry.by_steps = shared_pages, ask.by_steps
        entry.follows, entry.goes_alone = None, False
        self.free.take(worker, taken)
        entry.matches.clear()
        if ask.decoder:
            unheld = self._hold(ask.decoder.worker.node, transfer.share) if transfer else 0
            fresh = transfer.pages - transfer.share.size if transfer else 0
            promised = replace(ask.decoder.need, host_pages=fresh + unheld)
            self.free.promise(ask.decoder.worker, promised)
            self.candidates.add_promised(decoder)
        self.decisions.append(
            AdmitDecision(
                entry,
                worker,
                placement,
                take_over,
                durable_tokens,
                memory,
                hot_size,
                first_token,
                decoder,
                transfer,
                ask.prefix,
            )
        )

    def _hold(self, node: str, share: Int32Array) -> int:
        """These cached pages of `node` will be held; how many nothing but the cache holds before."""
        unheld = self.free.held_after(node).count_unheld(share)
        self.free.held_after(node).hold(share)
        return unheld

    def _open_transfer(self, entry: RequestState, ask: PlacementAsk) -> Transfer | None:
        """Open a transfer if the decoder is of another node, else return None."""
        if ask.decoder is None or not ask.is_far:
            return None
        worker, pages = ask.decoder.worker, ask.decoder.pages
        return Transfer(self.placement_table.open_transfer(entry, worker, pages), worker, pages, ask.decoder.share)

    # ---------------------------------------------------------------- growth

    def _grant_pages(self, entry: RequestState, worker: WorkerEntry) -> None:
        """Grant pages to a running request that is short of them; when it is urgent, make room for it."""
        if not self.makes_output_room(entry):
            return self._retract(entry, False, Cause.OUTPUT_ROOM, "no room for more of its output")
        length = entry.length
        plenty, enough, least = (
            max(0, pages_wanted(length, ahead_tokens, worker.capacity) - entry.pages)
            for ahead_tokens in (
                self.ahead_tokens + GRANT_STEP_PAGES * PAGE_TOKENS,
                self.ahead_tokens,
                min(self.ahead_tokens, URGENT_TOKENS),
            )
        )
        if not plenty:
            del self.placement_table.starving[entry.request_index]
        for pages in (plenty, enough, least):
            if pages and self.free.on(worker).covers(_growth(entry, pages)):
                return self._grant(entry, worker, pages)
        if least:
            self._grant_urgently(entry, worker, least)
        return None

    def _grant_urgently(self, entry: RequestState, worker: WorkerEntry, pages: int) -> None:
        ask = PlacementAsk(worker, pages, [], _growth(entry, pages))
        if ask.need.hot_chunks > self.free.on(worker).hot_chunks and self._become_managed(entry, worker, pages):
            return
        if self._make_room(entry, [ask]) and self.candidates.fits(ask):
            self._grant(entry, worker, pages)

    def _grant(self, entry: RequestState, worker: WorkerEntry, pages: int) -> None:
        more = _growth(entry, pages)
        self.placement_table.grant(entry, more)
        self.free.take(worker, more)
        self.decisions.append(GrantDecision(entry, more))

    def _become_managed(self, entry: RequestState, worker: WorkerEntry, pages: int) -> bool:
        """A resident that runs out of chunks shrinks itself, unless a larger one can."""
        larger = (e for e in self._resizable(worker) if e.chunks > entry.chunks and next_lower(e, e.chunks, worker))
        chunks = entry.chunks + self.free.on(worker).hot_chunks
        hot_size = largest_hot_size(entry.pages + pages, chunks, worker.capacity)
        if worker.pins(entry) or hot_size is None or hot_size.hot_slots == RESIDENT or any(larger):
            return False
        self._resize(entry, worker, hot_size)
        return True

    def _resizable(self, worker: WorkerEntry) -> Iterator[RequestState]:
        entries = self.placement_table.staying_on(worker)
        return (entry for entry in entries if entry.runs and entry.resizing is None)

    # ---------------------------------------------------------------- making room

    def _make_room(self, entry: RequestState, asks: list[PlacementAsk]) -> PlacementAsk | None:
        """Begin the cheapest remedy. What it has not freed at once is claimed for `entry`. None: there is none."""
        found = [
            (_cost(remedies), at, remedies) for at, ask in enumerate(asks) if (remedies := self._remedies(entry, ask))
        ]
        if not found:
            return None
        _, at, remedies = min(found, key=lambda it: it[:2])
        for part, remedy in zip(asks[at].parts, remedies, strict=True):
            self._carry_out(entry, part, remedy)
        return asks[at]

    def _remedies(self, entry: RequestState, ask: PlacementAsk) -> list[Preemption]:
        """One for each worker concerned; none when one of them has none."""
        remedies: list[Preemption] = []
        for part in ask.parts:
            free = self.free.on(part.worker)
            remedy = find_preemption(
                self.placement_table,
                part.worker,
                free,
                self.candidates.need_of(part),
                entry,
                self.freeing(part.worker.node, part.share),
            )
            if remedy is None:
                return []
            remedies.append(remedy)
        return remedies

    def _carry_out(self, entry: RequestState, ask: PlacementAsk, remedy: Preemption) -> None:
        worker, whom = ask.worker, f"a request of priority {entry.facts.priority}"
        for kept in remedy.demote:
            self._demote(kept, f"host pages go to {whom}")
        for victim in remedy.drop:
            self._retract(victim, False, Cause.HOST_PAGES, f"host pages go to {whom}")
        for victim in remedy.retract:
            self._retract(victim, True, Cause.GPU_MEMORY, f"GPU memory goes to {whom}")
        for shrunk, hot_size in remedy.shrink:
            self._resize(shrunk, worker, hot_size)
        need = self.candidates.need_of(ask)
        if not self.free.on(worker).covers(need):
            self.free.claim(worker, remedy.will_be_free.minus(need))

    def _demote(self, entry: RequestState, reason: str) -> None:
        self.free.add_host_pages(entry.node, self.free.held_after(entry.node).add(entry.placement))
        self.decisions.append(DemoteDecision(entry, entry.node, entry.placement, reason))
        self.placement_table.demote(entry)

    def _retract(self, entry: RequestState, keep: bool, cause: Cause, reason: str) -> None:
        entry.displaced = entry.displaced or cause in DISPLACING
        self.placement_table.leave(entry, frees_pages=not keep)
        self.decisions.append(RetractDecision(entry, keep, cause, reason))

    def _resize(self, entry: RequestState, worker: WorkerEntry, hot_size: HotSize) -> None:
        more = max(0, hot_size.hot_chunks - entry.chunks)
        self.placement_table.resize(entry, hot_size, self.now)
        self.free.take(worker, Memory(hot_chunks=more))
        self.decisions.append(ResizeDecision(entry, hot_size, more))

    # ---------------------------------------------------------------- what no request demands

    def meet_deadlines(self) -> None:
        """Past its deadline a draining worker keeps no request."""
        for worker in self.placement_table.workers.values():
            if worker.drain is not None and self.now >= worker.drain.deadline:
                for entry in self.placement_table.staying_on(worker):
                    self._retract(entry, True, Cause.DRAIN, f"{worker.name} drains: deadline passed")

    def hand_over(self) -> None:
        """Take running requests off a draining worker while another of its node has, or can make, room for them."""
        for worker in self.placement_table.workers.values():
            if worker.drain is None or not worker.drain.handover or worker.node in self.blocked:
                continue
            running = [entry for entry in self.placement_table.staying_on(worker) if entry.runs]
            for entry in running[:HANDOVER_BATCH_MAX]:
                if not self._hand_over(entry, worker):
                    break

    def _hand_over(self, entry: RequestState, worker: WorkerEntry) -> bool:
        """No request is retracted for it; shrinking is left to its admission, which follows."""
        for ask in self.candidates.of_part(entry, DECODE):
            target = ask.worker
            free = self.free.on(target)
            remedy = find_preemption(self.placement_table, target, free, ask.need, entry, self.freeing(target.node))
            if remedy is not None and not any(remedy.cost[:3]):
                self.free.claim(target, remedy.will_be_free.minus(ask.need))
                self._retract(entry, True, Cause.HANDOVER, f"{worker.name} drains: to {target.name}")
                return True
        return False

    def apply_forced(self) -> None:
        """Begin the resizes that operators asked for, as far as chunks are free."""
        for entry in list(self.placement_table.forcing.values()):
            worker = self.placement_table.workers.get(entry.worker)
            if worker is None or not entry.runs or entry.resizing is not None:
                continue
            hot_size = forced_hot_size(entry.ordered.forced_slots, entry.pages)
            if hot_size == entry.hot or not worker.pins(entry):
                del self.placement_table.forcing[entry.request_index]
            elif hot_size.hot_chunks - entry.chunks <= self.free.on(worker).hot_chunks:
                del self.placement_table.forcing[entry.request_index]
                self._resize(entry, worker, hot_size)

    # ---------------------------------------------------------------- hot floors

    def keep_floors(self) -> None:
        """Requests below their worker's hot floor rise to it, unless residents there wait for chunks to grow. One that
        waits for pages gets them first: as a resident it could lack the chunks for them, and would shrink again."""
        for worker in self.placement_table.workers.values():
            if worker.hot_floor is None or not worker.takes:
                continue
            self._probe(worker)
            others = {worker.probed, *self.placement_table.starving}
            managed = (entry for entry in self._resizable(worker) if entry.request_index not in others)
            below = [(entry, size) for entry in managed if (size := size_at_floor(entry, worker)) is not None]
            starving = (it for it in self.placement_table.starving.values() if it.worker == worker.name)
            if not any(it.hot.hot_slots == RESIDENT for it in starving):
                below = self._raise_to_floor(worker, below)
            is_settled = not worker.leaving and not worker.resizing
            if is_settled and len(below) > BELOW_FLOOR_SHARE * len(worker.ranks):
                self._thin_out(worker, below)

    def _probe(self, worker: WorkerEntry) -> None:
        """The last in rank that can gets the hot size that is to be observed."""
        probed = self.placement_table.entries.get(worker.probed)
        if worker.probe_slots is None:
            worker.probed = -1
        elif probed is None or probed.worker != worker.name or not probed.runs:
            for entry in reversed(list(self._resizable(worker))):
                smaller = [it for it in hot_sizes_for(entry.pages, worker.capacity) if it.hot_chunks < entry.chunks]
                size = next((it for it in smaller if it.hot_slots == worker.probe_slots), None)
                if size is not None and not worker.pins(entry):
                    worker.probed = entry.request_index
                    self._resize(entry, worker, size)
                    return

    def _raise_to_floor(
        self, worker: WorkerEntry, below: list[tuple[RequestState, HotSize]]
    ) -> list[tuple[RequestState, HotSize]]:
        """Resize, best rank first, as far as chunks are free; returns those that stay below."""
        left: list[tuple[RequestState, HotSize]] = []
        for entry, size in below:
            fits = size.hot_chunks - entry.chunks <= self.free.on(worker).hot_chunks
            if fits and len(worker.resizing) < RAISE_BATCH_MAX:
                self._resize(entry, worker, size)
            else:
                left.append((entry, size))
        return left

    def _thin_out(self, worker: WorkerEntry, below: list[tuple[RequestState, HotSize]]) -> None:
        """Retract (keep) the last in rank until the others below the floor could rise to it."""
        lacking = {entry.request_index: size.hot_chunks - entry.chunks for entry, size in below}
        free = self.free.on(worker).hot_chunks
        for entry in reversed(list(self._resizable(worker))[1:]):
            if sum(lacking.values()) <= free or len(worker.leaving) >= THIN_BATCH_MAX:
                return
            lacking.pop(entry.request_index, None)
            free += entry.chunks
            entry.thinned = True
            self._retract(entry, True, Cause.THROUGHPUT, f"hot buffers on {worker.name} would be too small to pay")

    def enlarge(self) -> None:
        """Grow managed hot buffers, smallest first, out of chunks that no request has asked for in a while."""
        for worker in self.placement_table.workers.values():
            if worker.takes and not worker.resizing and self.now - worker.shrunk_at >= GROW_QUIET_S:
                managed = [e for e in worker.managed.values() if e.runs and not worker.pins(e)]
                managed.sort(key=lambda entry: entry.chunks)
                for entry in managed[:GROW_BATCH_MAX]:
                    self._enlarge(entry, worker)

    def _enlarge(self, entry: RequestState, worker: WorkerEntry) -> None:
        above = [
            hot_size for hot_size in hot_sizes_for(entry.pages, worker.capacity) if hot_size.hot_chunks > entry.chunks
        ]
        reserve = worker.capacity.hot_chunks * GROW_RESERVE_SHARE
        if above and self.free.on(worker).hot_chunks - (above[0].hot_chunks - entry.chunks) >= reserve:
            self._resize(entry, worker, above[0])

    def demote_stranded(self) -> None:
        """Kept pages tie a request to their node. Without a worker there to decode it for long, let it be prefilled
        again, where that can be. Its own node may do that too: pages of a prompt that was to be decoded on another
        lie there."""
        for entry in list(self.placement_table.kept.values()):
            if (
                entry.ordered.held
                or entry.transfer_id
                or self.candidates.of(entry)
                or not self.candidates.could_begin_anew(entry)
            ):
                entry.stranded_at = None
            elif entry.stranded_at is None:
                entry.stranded_at = self.now
            elif self.now - entry.stranded_at >= STRANDED_LIMIT_S:
                self._demote(entry, f"no worker on {entry.node} could decode it for {STRANDED_LIMIT_S:g} s")


def _cost(remedies: list[Preemption]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*(remedy.cost for remedy in remedies), strict=True)))


def _growth(entry: RequestState, pages: int) -> Memory:
    """Return the memory that `pages` more pages take: index pages one for one, and chunks too when all rows are
    resident."""
    return Memory(pages, pages if entry.hot.hot_slots == RESIDENT else 0, pages)
