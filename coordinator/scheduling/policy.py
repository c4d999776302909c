"""Who is admitted, who gets more, who is retracted and how, how large hot buffers are. Pure.

`Policy.plan` looks at the placement table and the ledgers and returns decisions, in the order in which they are to be
carried out; the placement table already reflects them. It is called after every batch of events, and its common path
costs a few microseconds per admission.

Order. Demands are served strictly by rank, which is priority, then the turn of its owner, then arrival
(coordinator.scheduling.turns): running requests that need pages and waiting ones that need everything. A
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
receiving worker (coordinator.scheduling.entries). The pair is admitted at once or not at all: host pages and the first
worker's memory are reserved, the second worker's are *promised* until the prompt is there, that is, subtracted at the
request's place in the order of rank. So only a better-ranked request can come between, and a coordinator that restarts
has no promise to look after. Asked for neither, a request goes directly while there is a worker that does nothing but
prefill, else staged.

Hot buffers. Resident while chunks suffice, else the largest class that fits. Grown lazily, smallest first, while
no request waits, a reserve stays free and nothing was shrunk for GROW_QUIET_S. A size forced by an operator takes
effect once its chunks are free, and policy leaves it alone.

Hot floors. Below its hot floor (coordinator.scheduling.throughput) a worker gives no hot size. So fewer requests run
there; those below it rise to it first, and where they cannot, the last in rank are retracted (keep). A running request
that is nearly out of pages may still shrink others below it. What no worker could hold at the floor is exempt.

No livelock. Rank is a total order that never changes, and victims are ranked below whom they make room for. So the
highest-ranked request that is not held gets all it needs as soon as its inferiors have left, runs to its end, and
then the next one does. Thrashing is bounded too: a request that policy has displaced comes back only where there is
room for the remaining growth of those ahead of it (`_with_margin`), so they will not displace it again.

Rejected: reserving the second worker's memory in the ledger (a second placement of one request at the same time,
known to every room, for the second that a prompt takes); fair sharing of decode time between requests that do not fit
together (each switch costs an index reload; owners share by turns at submission, and each arrival displaces at most
once what it needs); letting small requests overtake a large waiting one (it starves);
retracting for a request's possible length at admission (most end long before max_tokens).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from msgspec.structs import replace

from coordinator.memory.ledger import NO_PAGES, Freeing, Ledger
from coordinator.scheduling.decisions import (
    DISPLACING,
    AdmitDecision,
    Cause,
    Decision,
    DemoteDecision,
    GrowDecision,
    ResizeDecision,
    RetractDecision,
    Transfer,
)
from coordinator.scheduling.entries import RANK_OF, EntryPhase, RequestEntry, WorkerEntry
from coordinator.scheduling.following import Leaders
from coordinator.scheduling.free_memory import NO_PLAN_OUTCOME, FreeMemory, PlacementAsk, PlanOutcome, Refusal
from coordinator.scheduling.placement_table import PlacementTable
from coordinator.scheduling.preemption import Frees, Preemption, find_preemption, given_sizes, is_pinned, next_lower
from coordinator.scheduling.prefill_costs import REST_TOKENS_MAX, PrefillCosts
from coordinator.scheduling.prefix_reuse import PrefixReuse
from coordinator.scheduling.shortcut import Standing, WorkerOrder
from protocol.arrays import Int32Array
from protocol.messages import BOTH, DECODE, DIRECT, PREFILL, STAGED, Rank
from protocol.sizing import (
    NO_HOT_SIZE,
    RESIDENT,
    HotSize,
    Memory,
    first_memory,
    forced_hot_size,
    hot_sizes_for,
    largest_hot_size,
    least_chunks,
    misfit,
    page_limit,
    pages_wanted,
)
from protocol.units import PAGE_TOKENS, pages_for

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
#: A request that was retracted for that comes back where each resident ahead of it could grow by this many pages.
FLOOR_MARGIN_PAGES: Final = 2
#: Requests that one plan retracts for the others to rise to the floor.
THIN_BATCH_MAX: Final = 8
#: Requests that one plan takes off a draining worker.
HANDOVER_BATCH_MAX: Final = 16
#: Kept pages whose node has no worker that can take their request on for this long are given up, if it can begin anew.
STRANDED_LIMIT_S: Final = 60.0

assert GROW_QUIET_S < STRANDED_LIMIT_S


class _Shape(NamedTuple):
    """What a request asks of any worker of one capacity."""

    pages: int
    hot_sizes: list[HotSize]
    need: Memory


class Policy:
    """Plans over one placement table. `ledgers`, by node, are read, never changed; `ahead_tokens` are granted ahead of
    need."""

    def __init__(
        self,
        placement_table: PlacementTable,
        ledgers: Mapping[str, Ledger],
        ahead_tokens: int,
        prefix_reuse: PrefixReuse,
    ) -> None:
        self.placement_table = placement_table
        self.ledgers = ledgers
        self.ahead_tokens = ahead_tokens
        self.prefix_reuse = prefix_reuse
        self.prefill_costs = PrefillCosts()
        self.outcome = NO_PLAN_OUTCOME  # of the last plan

    def plan(self, now: float, *, tick: bool = False) -> list[Decision]:
        """What to do now; applied to the placement table, yet to be applied to the ledgers. `tick`: do what can wait,
        too."""
        self.placement_table.poison_detector.clear()
        plan = _Plan(self, now)
        plan.meet_deadlines()
        if tick:
            plan.give_up_stranded()
            plan.keep_floors()
        plan.meet_demands()
        plan.hand_over()
        plan.apply_forced()
        if tick and not self.placement_table.waiting and not self.placement_table.starving:
            plan.enlarge()
        self.outcome = PlanOutcome(plan.free, plan.refused, plan.blocked)
        return plan.decisions


class _Plan:
    """One call of `Policy.plan`. Free counts are as they will be once the decisions so far are carried out."""

    def __init__(self, policy: Policy, now: float) -> None:
        self.placement_table = policy.placement_table
        self.ahead_tokens = policy.ahead_tokens
        self.ledgers = policy.ledgers
        self.now = now
        self.decisions: list[Decision] = []
        self.blocked: dict[str, RequestEntry] = {}  # nodes, and who blocks them
        self.refused: dict[int, Refusal] = {}
        self.takers = [worker for worker in policy.placement_table.workers.values() if worker.takes]
        self.has_groups = any(worker.member is not None for worker in self.takers)
        self.promised = Counter(it.decoder for it in self.placement_table.promised.values())  # requests, by worker
        self.has_prefillers = any(not worker.decodes for worker in self.takers)
        self.free = FreeMemory(policy.ledgers, policy.placement_table.workers.values())
        self.prefix_reuse, self.prefill_costs = policy.prefix_reuse, policy.prefill_costs
        self.leaders = Leaders(policy.placement_table, policy.prefix_reuse)
        self.weighs_prefixes = False  # whether some prompt rows of the request that is considered are cached
        self._held_after: dict[str, Freeing] = {}
        self._nodes = {worker.node for worker in self.placement_table.workers.values()}
        self._orders: list[WorkerOrder] | None = None
        self._index_of = {worker.name: index for index, worker in enumerate(self.takers)}
        self._has_floors = any(worker.hot_floor is not None for worker in self.takers)

    def freeing(self, node: str, share: Int32Array = NO_PAGES) -> Callable[[], Frees]:
        """Sets of requests on `node` that end after the decisions so far, while `share` is held."""

        def begin() -> Frees:
            freeing = self.held_after(node).copy()
            freeing.hold(share)
            return lambda entry: freeing.add(entry.placement)

        return begin

    def held_after(self, node: str) -> Freeing:
        """Who holds the pages of `node` once the decisions so far are carried out."""
        if node not in self._held_after:
            self._held_after[node] = self.ledgers[node].freeing()
        return self._held_after[node]

    # ---------------------------------------------------------------- demands, by rank

    def meet_demands(self) -> None:
        """Serve starving and waiting requests, and those to whom memory is promised, best rank first."""
        at, demands = 0, self.placement_table.starving | self.placement_table.promised
        for entry in sorted(demands.values(), key=RANK_OF):
            at = self._admit_until(at, entry.rank)
            if entry.decoder:
                self._promise(entry)
            elif entry.phase is EntryPhase.RUNNING and entry.resizing is None:
                self._feed(entry, self.placement_table.workers[entry.worker])
        self._admit_until(at, None)

    def _admit_until(self, at: int, rank: Rank | None) -> int:
        """Consider waiting requests from list index `at` on that outrank `rank`; returns where to go on."""
        waiting = self.placement_table.waiting
        nodes = self._nodes
        while at < len(waiting) and (rank is None or waiting[at] < rank) and not nodes <= self.blocked.keys():
            at += not self._consider(self.placement_table.by_rank[waiting[at]])
        return at

    def _consider(self, entry: RequestEntry) -> bool:
        """Admit a waiting request, or block the nodes it waits for. One that no worker can take on, or that is not to
        be tried again yet, blocks none."""
        if self.now < entry.paused_until:
            self.refused[entry.request_index] = Refusal([])
            return False
        self.weighs_prefixes = False
        if (plain := self._plain_ask(entry)) is not None:
            self._admit(entry, plain)
            return True
        all_asks = self._asks(entry)
        poison_detector = self.placement_table.poison_detector
        asks = [ask for ask in all_asks if self._may_join(entry, ask.worker)] if poison_detector else all_asks
        if following := self.leaders.followed_by(entry, {ask.worker.node for ask in asks}, self.now):
            self.refused[entry.request_index] = Refusal([], following=following)
            return False
        self.weighs_prefixes = any(ask.prefix.size for ask in asks)
        if fitting := [ask for ask in reversed(asks) if self._fits(ask)]:
            self._admit(entry, max(fitting, key=self._preference) if len(fitting) > 1 else fitting[0])
            return True
        made = self._make_room(entry, asks)
        if made is not None and self._fits(made):
            self._admit(entry, made)
            return True
        told = [ask._replace(need=self.need_of(ask)) for ask in asks]
        self.refused[entry.request_index] = Refusal(told, bool(all_asks) and not asks, made is not None)
        for ask in all_asks:
            self.blocked.setdefault(ask.worker.node, entry)
        return False

    def _plain_ask(self, entry: RequestEntry) -> PlacementAsk | None:
        """What `_consider` would find for a plain request (coordinator.scheduling.shortcut) that fits; None: it has to
        look at all workers."""
        mode = entry.facts.prefill_mode
        if entry.pages or entry.displaced or self._has_floors or self.placement_table.poison_detector:
            return None
        if mode == DIRECT or (self.has_prefillers and mode != STAGED) or not self._begins_new(entry):
            return None
        asks = [ask for order in self._worker_orders() if (ask := self._first_of(order, entry)) is not None]
        return max(asks, key=lambda ask: (self._preference(ask), self._index_of[ask.worker.name]), default=None)

    def _begins_new(self, entry: RequestEntry) -> bool:
        """Whether nothing of its prompt is cached anywhere, nor may be about to be."""
        return not self.prefix_reuse.is_begun(entry) and not self.leaders.may_lead(entry)

    def _first_of(self, order: WorkerOrder, entry: RequestEntry) -> PlacementAsk | None:
        """Of workers of equal sizes."""
        shape = self._shape(entry, order.any, BOTH)
        if shape is None:
            return None
        need, chunks = shape.need, shape.hot_sizes[-1].hot_chunks
        worker = order.first(
            lambda it: it.node not in self.blocked and self.free.on(it).covers(need),
            lambda it: not self.has_groups or chunks <= self.free.on(it).hot_chunks,
        )
        return None if worker is None else PlacementAsk(worker, *shape)

    def _worker_orders(self) -> list[WorkerOrder]:
        """Of the workers that prefill and decode, by their sizes."""
        if self._orders is None:
            by_sizes: dict[int, list[WorkerEntry]] = {}
            for worker in self.takers:
                if worker.capacity.role == BOTH:
                    by_sizes.setdefault(id(worker.sizes), []).append(worker)
            self._orders = [WorkerOrder(it, self._standing) for it in by_sizes.values()]
        return self._orders

    def _standing(self, worker: WorkerEntry) -> Standing:
        """As `_preference` orders workers where all else is equal."""
        free = self.free.on(worker)
        return self._crowding(worker), free.hot_chunks, free.seats, self._index_of[worker.name]

    def _crowding(self, worker: WorkerEntry) -> int:
        """Of a rank, the fewer requests, the better."""
        return -len(worker.ranks) - self.promised.get(worker.name, 0) if self.has_groups else 0

    def _may_join(self, entry: RequestEntry, worker: WorkerEntry) -> bool:
        """Whether poison detection lets it: a suspect waits its turn, and blocks like a request that waits for room."""
        present = (it for peer in self.placement_table.beside(worker) for it in self.placement_table.on(peer.name))
        return self.placement_table.poison_detector.may_join(entry, present)

    def _asks(self, entry: RequestEntry) -> list[PlacementAsk]:
        """How workers could take `entry` on if they were empty, and what it would need at its smallest size."""
        if entry.pages and not entry.transfer_id and entry.own_pages:
            return self._asks_behind_own(entry)
        if entry.pages:
            return [] if entry.transfer_id else self._asks_of(entry, DECODE)
        asks = self._asks_of(entry, BOTH) if entry.facts.prefill_mode != DIRECT else []
        if entry.facts.prefill_mode == STAGED or not (self.has_prefillers or entry.facts.prefill_mode == DIRECT):
            return asks
        return asks + self._pairs(entry)

    def _asks_of(self, entry: RequestEntry, part: str) -> list[PlacementAsk]:
        """Of each worker that takes requests and does `part` of what is to be done: BOTH, or one of the two."""
        # by identity of the sizes, and by hot floor: most workers share them
        shapes: dict[tuple[int, int | None], _Shape | None] = {}
        asks: list[PlacementAsk] = []
        for worker in self.takers:
            if worker.node in self.blocked or (entry.pages and worker.node != entry.node):
                continue
            if worker.capacity.role not in (part, BOTH):
                continue
            key = id(worker.sizes), worker.hot_floor
            if key not in shapes:
                shapes[key] = self._shape(entry, worker, part)
            if shape := shapes[key]:
                ask = PlacementAsk(worker, *shape)
                if part == BOTH and not entry.pages:
                    ask = self._sharing(entry, ask)
                if part != PREFILL:
                    ask = self._above_floor(entry, self._with_margin(entry, ask) if entry.displaced else ask)
                asks.append(ask)
        return asks

    def _asks_behind_own(self, entry: RequestEntry) -> list[PlacementAsk]:
        """As `_asks`, of a request that kept the first pages of its prompt: the rest is computed behind them."""
        if self._takes_steps(entry.facts.prompt_tokens - entry.kept_tokens):
            return [ask._replace(by_steps=True) for ask in self._asks_of(entry, DECODE)]
        if self.prefix_reuse.whole(entry.own_pages) != entry.own_pages:  # of workers with other prompt chunks
            return []
        slab_pages = pages_for(entry.facts.prompt_tokens)
        asks = self._asks_of(entry, BOTH)
        return [ask._replace(need=replace(ask.need, slab_pages=slab_pages)) for ask in asks]

    def _takes_steps(self, rest_tokens: int) -> bool:
        """Whether the rest of a prompt behind its own pages goes through decode steps: less than a page does, where its
        rows need not be the bits of prefill."""
        return self.prefix_reuse.with_generated and rest_tokens <= PAGE_TOKENS

    def _sharing(self, entry: RequestEntry, ask: PlacementAsk) -> PlacementAsk:
        """`ask`, beginning with what is cached on its node; a short rest needs no slab."""
        share = self.prefix_reuse.match(entry, ask.worker.node)
        if not share.size:
            return ask
        need, rest = ask.need, entry.facts.prompt_tokens - share.size * PAGE_TOKENS
        by_steps = need.slab_pages > 0 and self._prefers_steps(ask.worker, rest)
        slab_pages = 0 if by_steps else need.slab_pages
        need = Memory(need.host_pages - share.size, need.hot_chunks, need.index_pages, slab_pages, need.seats)
        return PlacementAsk(ask.worker, ask.pages, ask.hot_sizes, need, ask.spare_chunks, ask.decoder, share, by_steps)

    def _prefers_steps(self, worker: WorkerEntry, rest_tokens: int) -> bool:
        if not self.prefix_reuse.with_generated or rest_tokens > REST_TOKENS_MAX:
            return False
        return self.prefill_costs.prefers_steps(worker.name, rest_tokens, worker.port.step_s())

    def need_of(self, ask: PlacementAsk) -> Memory:
        """What it takes from what is free now: of the cached pages that it shares, those that nothing else holds."""
        if not ask.share.size:
            return ask.need
        return ask.need.plus(Memory(self.held_after(ask.worker.node).count_unheld(ask.share)))

    def _pairs(self, entry: RequestEntry) -> list[PlacementAsk]:
        """Two workers, one to prefill and one to decode: for each of the first the best of the second, of its node if
        there is one, or else of another that can take its rows in."""
        is_direct = entry.facts.prefill_mode == DIRECT
        first = [ask for ask in self._asks_of(entry, PREFILL) if is_direct or not ask.worker.decodes]
        if not first:
            return []
        second = self._asks_of(entry, DECODE)
        second.sort(key=lambda ask: (self._fits(ask), self._preference(ask)), reverse=True)
        pairs: list[PlacementAsk] = []
        for ask in first:
            worker = ask.worker
            able = [it for it in second if worker.hands_to(it.worker)]
            other = next((it for it in able if it.worker.node == worker.node), next(iter(able), None))
            if other is not None:
                is_near = other.worker.node == worker.node
                pages = other.pages if is_near else pages_for(entry.facts.prompt_tokens)
                share = NO_PAGES if is_near else self.prefix_reuse.match(entry, worker.node)
                need = Memory(0 if is_near else pages - share.size, 0, pages, ask.need.slab_pages, 1)
                decoder = self._sharing(entry, other)
                pairs.append(PlacementAsk(worker, pages, [NO_HOT_SIZE], need, 0, decoder, share))
        return pairs

    def _shape(self, entry: RequestEntry, worker: WorkerEntry, part: str) -> _Shape | None:
        length = entry.length
        if misfit(length, worker.capacity, worker.name, part):
            return None
        pages = max(pages_wanted(length, self.ahead_tokens, worker.capacity), entry.pages)
        hot_sizes = self._hot_sizes(entry, pages, worker)
        memory = first_memory(length, pages, entry.pages, hot_sizes[0])
        return _Shape(pages, hot_sizes, memory if part != DECODE else replace(memory, slab_pages=0))

    def _fits(self, ask: PlacementAsk) -> bool:
        free, need = self.free.on(ask.worker), ask.need
        if free.host_pages - need.host_pages < ask.share.size:  # whether it fits hangs on who holds the shared pages
            need = self.need_of(ask)
        return free.covers(need) and (ask.decoder is None or self._fits(ask.decoder))

    def _promise(self, entry: RequestEntry) -> None:
        """What a prompt under way was promised counts as taken for all requests after it."""
        worker = self.placement_table.workers.get(entry.decoder)
        shape = self._shape(entry, worker, DECODE) if worker is not None and worker.takes else None
        if worker is not None and shape is not None:
            has_transfer = entry.transfer_id in self.placement_table.transfers  # with a seat and host pages
            need = replace(
                shape.need, seats=int(not has_transfer), host_pages=0 if has_transfer else shape.need.host_pages
            )
            self.free.promise(worker, need)

    def _hot_sizes(self, entry: RequestEntry, pages: int, worker: WorkerEntry) -> list[HotSize]:
        if is_pinned(entry, worker):
            return [forced_hot_size(entry.ordered.forced_slots, pages)]
        return given_sizes(pages, worker)

    def _with_margin(self, entry: RequestEntry, ask: PlacementAsk) -> PlacementAsk:
        """Add what better-ranked requests may still come to need, so that they will not displace it again."""
        target = ask.worker
        chunks = index_pages = host_pages = 0
        for worker in self.placement_table.of_node(target.node):
            for rank in worker.ranks[: bisect_left(worker.ranks, entry.rank)]:
                ahead = self.placement_table.by_rank[rank]
                growth = max(0, page_limit(ahead.length, worker.capacity) - ahead.pages)
                host_pages += growth
                if worker is target:
                    index_pages += growth
                    chunks += max(0, least_chunks(ahead.length, worker.capacity) - ahead.chunks)
        return ask._replace(need=ask.need.plus(Memory(host_pages, chunks, index_pages)), spare_chunks=chunks)

    def _above_floor(self, entry: RequestEntry, ask: PlacementAsk) -> PlacementAsk:
        """Add what requests ahead of it there lack of their hot floor and, for one that left for their sake, what
        residents among them need soon, so that it does not leave again at once."""
        worker = ask.worker
        if worker.hot_floor is None:
            return ask
        chunks = 0
        for rank in worker.ranks[: bisect_left(worker.ranks, entry.rank)]:
            ahead = self.placement_table.by_rank[rank]
            if ahead.phase is EntryPhase.RUNNING and (size := self._lacked(ahead, worker)) is not None:
                chunks += size.hot_chunks - ahead.chunks
            elif entry.thinned and ahead.hot.hot_slots == RESIDENT:
                growth = page_limit(ahead.length, worker.capacity) - ahead.pages
                chunks += max(0, min(FLOOR_MARGIN_PAGES, growth))
        need = ask.need.plus(Memory(hot_chunks=chunks))
        return ask._replace(need=need, spare_chunks=ask.spare_chunks + chunks)

    def _preference(self, ask: PlacementAsk) -> tuple[bool, bool, int, bool, int, int, int, int]:
        """Rather directly, and within a node; where fewest tokens are to be computed before its first, those of prompts
        that came before among them, if some of its own are cached anywhere; rather where it can be resident; then on
        the rank with the fewest requests, since the slowest rank of a group sets its step; then where chunks are
        plenty, then where seats are, first those of the worker that decodes."""
        last = ask.decoder or ask
        free, seats = self.free.on(last.worker), self.free.on(ask.worker).seats
        is_near, is_resident = last.worker.node == ask.worker.node, last.hot_sizes[-1].hot_chunks <= free.hot_chunks
        return (
            ask.decoder is not None,
            is_near,
            -self._pages_ahead(ask),
            is_resident,
            self._crowding(last.worker),
            free.hot_chunks,
            free.seats,
            seats,
        )

    def _pages_ahead(self, ask: PlacementAsk) -> int:
        """Of prompts, its own among them, that are computed on its worker before its first token."""
        if not self.weighs_prefixes:
            return 0
        before = (it for it in self.placement_table.computing.values() if it.worker == ask.worker.name)
        return sum(it.slab_pages - it.shared_pages for it in before) - int(ask.prefix.size)

    def _admit(self, entry: RequestEntry, ask: PlacementAsk) -> None:
        worker = ask.worker
        chunks = self.free.on(worker).hot_chunks - ask.spare_chunks
        hot_size = next(hot_size for hot_size in reversed(ask.hot_sizes) if hot_size.hot_chunks <= chunks)
        memory = first_memory(entry.length, ask.pages, entry.pages, hot_size)
        memory = replace(memory, host_pages=memory.host_pages - ask.prefix.size, slab_pages=ask.need.slab_pages)
        taken = memory.plus(Memory(self._hold(worker.node, ask.prefix)))
        take_over, durable_tokens = (entry.placement, entry.kept_tokens) if entry.pages else (None, 0)
        first_token, decoder = entry.first_token, ask.decoder.worker.name if ask.decoder else ""
        transfer = self._open_transfer(entry, ask)
        shared_pages = int(ask.prefix.size) or entry.own_pages
        placement = self.placement_table.admit(entry, worker, memory, hot_size, decoder)
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
            self.promised[decoder] += 1
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
        unheld = self.held_after(node).count_unheld(share)
        self.held_after(node).hold(share)
        return unheld

    def _open_transfer(self, entry: RequestEntry, ask: PlacementAsk) -> Transfer | None:
        """To a worker of another node."""
        if ask.decoder is None or not ask.is_far:
            return None
        worker, pages = ask.decoder.worker, ask.decoder.pages
        return Transfer(self.placement_table.open_transfer(entry, worker, pages), worker, pages, ask.decoder.share)

    # ---------------------------------------------------------------- growth

    def _feed(self, entry: RequestEntry, worker: WorkerEntry) -> None:
        """Grant pages to a running request that is short of them; when it is urgent, make room for it."""
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
                return self._grow(entry, worker, pages)
        if least:
            self._feed_urgently(entry, worker, least)
        return None

    def _feed_urgently(self, entry: RequestEntry, worker: WorkerEntry, pages: int) -> None:
        ask = PlacementAsk(worker, pages, [], _growth(entry, pages))
        if ask.need.hot_chunks > self.free.on(worker).hot_chunks and self._become_managed(entry, worker, pages):
            return
        if self._make_room(entry, [ask]) and self._fits(ask):
            self._grow(entry, worker, pages)

    def _grow(self, entry: RequestEntry, worker: WorkerEntry, pages: int) -> None:
        more = _growth(entry, pages)
        self.placement_table.grow(entry, more)
        self.free.take(worker, more)
        self.decisions.append(GrowDecision(entry, more))

    def _become_managed(self, entry: RequestEntry, worker: WorkerEntry, pages: int) -> bool:
        """A resident that runs out of chunks shrinks itself, unless a larger one can."""
        larger = (e for e in self._resizable(worker) if e.chunks > entry.chunks and next_lower(e, e.chunks, worker))
        chunks = entry.chunks + self.free.on(worker).hot_chunks
        hot_size = largest_hot_size(entry.pages + pages, chunks, worker.capacity)
        if is_pinned(entry, worker) or hot_size is None or hot_size.hot_slots == RESIDENT or any(larger):
            return False
        self._resize(entry, worker, hot_size)
        return True

    def _resizable(self, worker: WorkerEntry) -> Iterator[RequestEntry]:
        entries = (self.placement_table.by_rank[rank] for rank in worker.ranks)
        return (entry for entry in entries if entry.phase is EntryPhase.RUNNING and entry.resizing is None)

    # ---------------------------------------------------------------- making room

    def _make_room(self, entry: RequestEntry, asks: list[PlacementAsk]) -> PlacementAsk | None:
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

    def _remedies(self, entry: RequestEntry, ask: PlacementAsk) -> list[Preemption]:
        """One for each worker concerned; none when one of them has none."""
        remedies: list[Preemption] = []
        for part in ask.parts:
            free = self.free.on(part.worker)
            remedy = find_preemption(
                self.placement_table,
                part.worker,
                free,
                self.need_of(part),
                entry,
                self.freeing(part.worker.node, part.share),
            )
            if remedy is None:
                return []
            remedies.append(remedy)
        return remedies

    def _carry_out(self, entry: RequestEntry, ask: PlacementAsk, remedy: Preemption) -> None:
        worker, whom = ask.worker, f"a request of priority {entry.facts.priority}"
        for kept in remedy.demote:
            self._demote(kept, f"host pages go to {whom}")
        for victim in remedy.drop:
            self._retract(victim, False, Cause.HOST_PAGES, f"host pages go to {whom}")
        for victim in remedy.retract:
            self._retract(victim, True, Cause.GPU_MEMORY, f"GPU memory goes to {whom}")
        for shrunk, hot_size in remedy.shrink:
            self._resize(shrunk, worker, hot_size)
        need = self.need_of(ask)
        if not self.free.on(worker).covers(need):
            self.free.claim(worker, remedy.will_be_free.minus(need))

    def _demote(self, entry: RequestEntry, reason: str) -> None:
        self.free.add_host_pages(entry.node, self.held_after(entry.node).add(entry.placement))
        self.decisions.append(DemoteDecision(entry, entry.node, entry.placement, reason))
        self.placement_table.demote(entry)

    def _retract(self, entry: RequestEntry, keep: bool, cause: Cause, reason: str) -> None:
        entry.displaced = entry.displaced or cause in DISPLACING
        self.placement_table.leave(entry, frees_pages=not keep)
        self.decisions.append(RetractDecision(entry, keep, cause, reason))

    def _resize(self, entry: RequestEntry, worker: WorkerEntry, hot_size: HotSize) -> None:
        more = max(0, hot_size.hot_chunks - entry.chunks)
        self.placement_table.resize(entry, hot_size, self.now)
        self.free.take(worker, Memory(hot_chunks=more))
        self.decisions.append(ResizeDecision(entry, hot_size, more))

    # ---------------------------------------------------------------- what no request demands

    def meet_deadlines(self) -> None:
        """Past its deadline a draining worker keeps no request."""
        for worker in self.placement_table.workers.values():
            if worker.drain is not None and self.now >= worker.drain.deadline:
                for rank in list(worker.ranks):
                    self._retract(
                        self.placement_table.by_rank[rank], True, Cause.DRAIN, f"{worker.name} drains: deadline passed"
                    )

    def hand_over(self) -> None:
        """Take running requests off a draining worker while another of its node has, or can make, room for them."""
        for worker in self.placement_table.workers.values():
            if worker.drain is None or not worker.drain.handover or worker.node in self.blocked:
                continue
            running = [self.placement_table.by_rank[rank] for rank in worker.ranks]
            for entry in [entry for entry in running if entry.phase is EntryPhase.RUNNING][:HANDOVER_BATCH_MAX]:
                if not self._hand_over(entry, worker):
                    break

    def _hand_over(self, entry: RequestEntry, worker: WorkerEntry) -> bool:
        """No request is retracted for it; shrinking is left to its admission, which follows."""
        for ask in self._asks_of(entry, DECODE):
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
            if worker is None or entry.phase is not EntryPhase.RUNNING or entry.resizing is not None:
                continue
            hot_size = forced_hot_size(entry.ordered.forced_slots, entry.pages)
            if hot_size == entry.hot or not is_pinned(entry, worker):
                del self.placement_table.forcing[entry.request_index]
            elif hot_size.hot_chunks - entry.chunks <= self.free.on(worker).hot_chunks:
                del self.placement_table.forcing[entry.request_index]
                self._resize(entry, worker, hot_size)

    # ---------------------------------------------------------------- hot floors

    def keep_floors(self) -> None:
        """Requests below their worker's hot floor rise to it, unless residents there wait for chunks to grow."""
        for worker in self.placement_table.workers.values():
            if worker.hot_floor is None or not worker.takes:
                continue
            self._probe(worker)
            below = [(it, size) for it in self._resizable(worker) if (size := self._lacked(it, worker)) is not None]
            below = [(it, size) for it, size in below if it.request_index != worker.probed]
            starving = (it for it in self.placement_table.starving.values() if it.worker == worker.name)
            if not any(it.hot.hot_slots == RESIDENT for it in starving):
                below = self._raise_to_floor(worker, below)
            is_settled = not worker.leaving and not worker.resizing
            if is_settled and len(below) > BELOW_FLOOR_SHARE * len(worker.ranks):
                self._thin_out(worker, below)

    def _lacked(self, entry: RequestEntry, worker: WorkerEntry) -> HotSize | None:
        """The size at the floor of a request below it; None: it is not below, or pinned."""
        size = given_sizes(entry.pages, worker)[0]
        return size if entry.chunks < size.hot_chunks and not is_pinned(entry, worker) else None

    def _probe(self, worker: WorkerEntry) -> None:
        """The last in rank that can gets the hot size that is to be observed."""
        probed = self.placement_table.entries.get(worker.probed)
        if worker.probe_slots is None:
            worker.probed = -1
        elif probed is None or probed.worker != worker.name or probed.phase is not EntryPhase.RUNNING:
            for entry in reversed(list(self._resizable(worker))):
                smaller = [it for it in hot_sizes_for(entry.pages, worker.capacity) if it.hot_chunks < entry.chunks]
                size = next((it for it in smaller if it.hot_slots == worker.probe_slots), None)
                if size is not None and not is_pinned(entry, worker):
                    worker.probed = entry.request_index
                    self._resize(entry, worker, size)
                    return

    def _raise_to_floor(
        self, worker: WorkerEntry, below: list[tuple[RequestEntry, HotSize]]
    ) -> list[tuple[RequestEntry, HotSize]]:
        """Resize, best rank first, as far as chunks are free; returns those that stay below."""
        left: list[tuple[RequestEntry, HotSize]] = []
        for entry, size in below:
            fits = size.hot_chunks - entry.chunks <= self.free.on(worker).hot_chunks
            if fits and len(worker.resizing) < RAISE_BATCH_MAX:
                self._resize(entry, worker, size)
            else:
                left.append((entry, size))
        return left

    def _thin_out(self, worker: WorkerEntry, below: list[tuple[RequestEntry, HotSize]]) -> None:
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
                managed = [
                    e for e in worker.managed.values() if e.phase is EntryPhase.RUNNING and not is_pinned(e, worker)
                ]
                managed.sort(key=lambda entry: entry.chunks)
                for entry in managed[:GROW_BATCH_MAX]:
                    self._enlarge(entry, worker)

    def _enlarge(self, entry: RequestEntry, worker: WorkerEntry) -> None:
        above = [
            hot_size for hot_size in hot_sizes_for(entry.pages, worker.capacity) if hot_size.hot_chunks > entry.chunks
        ]
        reserve = worker.capacity.hot_chunks * GROW_RESERVE_SHARE
        if above and self.free.on(worker).hot_chunks - (above[0].hot_chunks - entry.chunks) >= reserve:
            self._resize(entry, worker, above[0])

    def give_up_stranded(self) -> None:
        """Kept pages tie a request to their node. Without a worker there to decode it for long, let it be prefilled
        again, where that can be. Its own node may do that too: pages of a prompt that was to be decoded on another
        lie there."""
        for entry in list(self.placement_table.kept.values()):
            if entry.ordered.held or entry.transfer_id or self._asks(entry) or not self._could_begin_anew(entry):
                entry.stranded_at = None
            elif entry.stranded_at is None:
                entry.stranded_at = self.now
            elif self.now - entry.stranded_at >= STRANDED_LIMIT_S:
                self._demote(entry, f"no worker on {entry.node} could decode it for {STRANDED_LIMIT_S:g} s")

    def _could_begin_anew(self, entry: RequestEntry) -> bool:
        """Whether there are workers who could take it on from its prompt."""

        def able(part: str) -> list[WorkerEntry]:
            takers = (
                it for it in self.placement_table.workers.values() if it.takes and it.capacity.role in (part, BOTH)
            )
            return [it for it in takers if self._shape(entry, it, part)]

        if entry.facts.prefill_mode != DIRECT and able(BOTH):
            return True
        pairs = ((one, other) for one in able(PREFILL) for other in able(DECODE) if one is not other)
        return entry.facts.prefill_mode != STAGED and any(
            one.hands_to(other) and (entry.facts.prefill_mode == DIRECT or not one.decodes) for one, other in pairs
        )


def _cost(remedies: list[Preemption]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*(remedy.cost for remedy in remedies), strict=True)))


def _growth(entry: RequestEntry, pages: int) -> Memory:
    """What `pages` more pages take: index pages one for one, and chunks too when all rows are resident."""
    return Memory(pages, pages if entry.hot.hot_slots == RESIDENT else 0, pages)
