"""Places where a waiting request could run, with what it needs there, in the order of policy's preference. Pure.

A *candidate* is a PlacementAsk: one worker, or one that prefills and one that decodes, with what the request asks of
each. Asked is what the smallest hot size takes, and what is to stay free for requests of better rank. Whether a
candidate fits now is another question, since policy makes room for one that does not.

A *plain* request goes to a worker that is chosen without asking each of them. It tells workers of equal sizes apart by
what is free on them and by nothing else: no rows of its prompt are cached or kept, nothing of it is reserved, no worker
has a hot floor. Then the worker that policy prefers is the one that stands first among those that fit, and a heap knows
it: an admission costs a few steps, however many workers there are. Where no rank of a group has room for all rows, it
passes all. `Policy` asks all workers where a request is not plain, or where none of the first fits.

The heap is lazy. Within a plan what is free only shrinks, so an entry that is not true any more is too good, and is put
in its place when it comes to the top. A rank that a request is told to leave stands better from the next plan on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from operator import neg
from typing import Final, NamedTuple, TypeAlias

from msgspec.structs import replace

from coordinator.memory.ledger import NO_PAGES
from coordinator.policy.following import Leaders
from coordinator.policy.free_memory import FreeMemory, PlacementAsk
from coordinator.policy.preemption import size_at_floor
from coordinator.policy.prefix_reuse import REST_TOKENS_MAX, PrefillCosts, PrefixReuse
from coordinator.state.placement_table import PlacementTable
from coordinator.state.request_state import RequestState
from coordinator.state.worker_entry import WorkerEntry
from protocol.messages import BOTH, DECODE, DIRECT, PREFILL, STAGED
from protocol.sizing import (
    NO_HOT_SIZE,
    RESIDENT,
    HotSize,
    Memory,
    first_memory,
    forced_hot_size,
    least_chunks,
    misfit,
    page_limit,
    pages_wanted,
)
from protocol.units import PAGE_TOKENS, pages_for

#: Of a worker, better when it is larger; the last number tells equal workers apart.
Standing: TypeAlias = tuple[int, ...]


class _Place(NamedTuple):
    """Ascending: the best standing first."""

    negated: Standing
    worker: WorkerEntry


class WorkerOrder:
    """Workers of equal sizes. `standing_of` gives a worker's standing as it is now; no two are equal."""

    def __init__(self, workers: Iterable[WorkerEntry], standing_of: Callable[[WorkerEntry], Standing]) -> None:
        self._standing_of = standing_of
        self._heap = [self._place(worker) for worker in workers]
        heapify(self._heap)

    @property
    def any(self) -> WorkerEntry:
        """One of them, for what they have in common."""
        return self._heap[0].worker

    def first(
        self, fits: Callable[[WorkerEntry], bool], is_better: Callable[[WorkerEntry], bool]
    ) -> WorkerEntry | None:
        """The first that fits and is better; else the first that fits; None: none does."""
        heap = self._heap
        passed: list[_Place] = []
        found: WorkerEntry | None = None
        while heap:
            place = heap[0]
            now = self._place(place.worker)
            if now.negated != place.negated:
                heapreplace(heap, now)
                continue
            if fits(place.worker):
                if is_better(place.worker):
                    found = place.worker
                    break
                found = found or place.worker
            passed.append(heappop(heap))
        for place in passed:
            heappush(heap, place)
        return found

    def _place(self, worker: WorkerEntry) -> _Place:
        return _Place(tuple(map(neg, self._standing_of(worker))), worker)


#: A request that was retracted for a hot floor comes back where residents ahead of it could grow by this many pages.
FLOOR_MARGIN_PAGES: Final = 2


class Shape(NamedTuple):
    """Memory that a request asks of any worker of one capacity."""

    pages: int
    hot_sizes: list[HotSize]
    need: Memory


class Candidates:
    """Candidates for the requests that one plan considers. The plan changes `free` as it goes on, and `blocked`, the
    nodes without candidates. `ahead_tokens` are granted ahead of need."""

    def __init__(
        self,
        table: PlacementTable,
        free: FreeMemory,
        blocked: Container[str],
        leaders: Leaders,
        ahead_tokens: int,
        prefix_reuse: PrefixReuse,
        prefill_costs: PrefillCosts,
    ) -> None:
        self._table, self._free, self._blocked, self._leaders = table, free, blocked, leaders
        self._ahead_tokens, self._prefix_reuse, self._prefill_costs = ahead_tokens, prefix_reuse, prefill_costs
        self._takers = [worker for worker in table.workers.values() if worker.takes]
        self._index_of = {worker.name: index for index, worker in enumerate(self._takers)}
        self._has_groups = any(worker.member is not None for worker in self._takers)
        self._has_prefillers = any(not worker.decodes for worker in self._takers)
        self._has_floors = any(worker.hot_floor is not None for worker in self._takers)
        self._promised = Counter(it.decoder for it in table.promised.values())  # requests, by worker
        self._orders: list[WorkerOrder] | None = None

    def add_promised(self, decoder: str) -> None:
        """One request more was promised to that worker."""
        self._promised[decoder] += 1

    def of(self, entry: RequestState) -> list[PlacementAsk]:
        """Each worker, or pair of workers, that could take `entry` on if it were empty."""
        if entry.pages and not entry.transfer_id and entry.own_pages:
            return self._behind_own(entry)
        if entry.pages:
            return [] if entry.transfer_id else self.of_part(entry, DECODE)
        asks = self.of_part(entry, BOTH) if entry.facts.prefill_mode != DIRECT else []
        if entry.facts.prefill_mode == STAGED or not (self._has_prefillers or entry.facts.prefill_mode == DIRECT):
            return asks
        return asks + self._pairs(entry)

    def of_part(self, entry: RequestState, part: str) -> list[PlacementAsk]:
        """Each worker that takes requests and does `part` of what is to be done: PREFILL, DECODE, or BOTH."""
        # by identity of the sizes, and by hot floor: most workers share them
        shapes: dict[tuple[int, int | None], Shape | None] = {}
        asks: list[PlacementAsk] = []
        for worker in self._takers:
            if worker.node in self._blocked or (entry.pages and worker.node != entry.node):
                continue
            if worker.capacity.role not in (part, BOTH):
                continue
            key = id(worker.sizes), worker.hot_floor
            if key not in shapes:
                shapes[key] = self.shape(entry, worker, part)
            if shape := shapes[key]:
                ask = PlacementAsk(worker, *shape)
                if part == BOTH and not entry.pages:
                    ask = self._sharing(entry, ask, by_steps=True)
                if part != PREFILL:
                    ask = self._above_floor(entry, self._with_margin(entry, ask) if entry.displaced else ask)
                asks.append(ask)
        return asks

    def _behind_own(self, entry: RequestState) -> list[PlacementAsk]:
        """Return what `of` does, for a request that kept the first pages of its prompt: the rest is computed behind
        them."""
        if self._takes_steps(entry.facts.prompt_tokens - entry.kept_tokens):
            return [ask._replace(by_steps=True) for ask in self.of_part(entry, DECODE)]
        if self._prefix_reuse.whole(entry.own_pages) != entry.own_pages:  # of workers with other prompt blocks
            return []
        return self.of_part(entry, BOTH)

    def _pairs(self, entry: RequestState) -> list[PlacementAsk]:
        """Two workers, one to prefill and one to decode: for each of the first the best of the second, of its node if
        there is one, or else of another that can take its rows in."""
        is_direct = entry.facts.prefill_mode == DIRECT
        first = [ask for ask in self.of_part(entry, PREFILL) if is_direct or not ask.worker.decodes]
        if not first:
            return []
        second = self.of_part(entry, DECODE)
        second.sort(key=lambda ask: (self.fits(ask), self._preference(ask)), reverse=True)
        pairs: list[PlacementAsk] = []
        for ask in first:
            worker = ask.worker
            able = [it for it in second if worker.hands_to(it.worker)]
            other = next((it for it in able if it.worker.node == worker.node), next(iter(able), None))
            if other is not None:
                is_near = other.worker.node == worker.node
                pages = other.pages if is_near else pages_for(entry.facts.prompt_tokens)
                share = NO_PAGES if is_near else self._prefix_reuse.match(entry, worker.node)
                need = Memory(0 if is_near else pages - share.size, 0, pages, 1)
                decoder = self._sharing(entry, other, by_steps=False)
                pairs.append(PlacementAsk(worker, pages, [NO_HOT_SIZE], need, 0, decoder, share))
        return pairs

    def plain(self, entry: RequestState) -> PlacementAsk | None:
        """The preferred one that fits a plain request (coordinator.policy.candidates), without a look at all workers;
        None: look at them."""
        mode = entry.facts.prefill_mode
        if entry.pages or entry.displaced or self._has_floors or self._table.poison_detector:
            return None
        if mode == DIRECT or (self._has_prefillers and mode != STAGED) or not self._begins_new(entry):
            return None
        asks = [ask for order in self._worker_orders() if (ask := self._first_of(order, entry)) is not None]
        return max(asks, key=lambda ask: (self._preference(ask), self._index_of[ask.worker.name]), default=None)

    def could_begin_anew(self, entry: RequestState) -> bool:
        """Return whether there are workers that could take it on from its prompt, were they empty."""

        def able(part: str) -> list[WorkerEntry]:
            takers = (it for it in self._table.workers.values() if it.takes and it.capacity.role in (part, BOTH))
            return [it for it in takers if self.shape(entry, it, part)]

        if entry.facts.prefill_mode != DIRECT and able(BOTH):
            return True
        pairs = ((one, other) for one in able(PREFILL) for other in able(DECODE) if one is not other)
        return entry.facts.prefill_mode != STAGED and any(
            one.hands_to(other) and (entry.facts.prefill_mode == DIRECT or not one.decodes) for one, other in pairs
        )

    # ---------------------------------------------------------------- what one worker would be asked

    def shape(self, entry: RequestState, worker: WorkerEntry, part: str) -> Shape | None:
        """Return the memory that the request needs on `worker`; None if it exceeds the worker's capacity."""
        length = entry.length
        if misfit(length, worker.capacity, worker.name, part):
            return None
        pages = max(pages_wanted(length, self._ahead_tokens, worker.capacity), entry.pages)
        hot_sizes = self._hot_sizes(entry, pages, worker)
        return Shape(pages, hot_sizes, first_memory(pages, entry.pages, hot_sizes[0]))

    def _hot_sizes(self, entry: RequestState, pages: int, worker: WorkerEntry) -> list[HotSize]:
        if worker.pins(entry):
            return [forced_hot_size(entry.ordered.forced_slots, pages)]
        return worker.given_sizes(pages)

    def _sharing(self, entry: RequestState, ask: PlacementAsk, *, by_steps: bool) -> PlacementAsk:
        """Return `ask`, beginning with what is cached on its node; `by_steps`: a short rest may go through steps."""
        share = self._prefix_reuse.match(entry, ask.worker.node)
        if not share.size:
            return ask
        rest = entry.facts.prompt_tokens - share.size * PAGE_TOKENS
        by_steps = by_steps and self._prefers_steps(ask.worker, rest)
        need = replace(ask.need, host_pages=ask.need.host_pages - share.size)
        return PlacementAsk(ask.worker, ask.pages, ask.hot_sizes, need, ask.spare_chunks, ask.decoder, share, by_steps)

    def _with_margin(self, entry: RequestState, ask: PlacementAsk) -> PlacementAsk:
        """Add what better-ranked requests may still come to need, so that they will not displace it again."""
        target = ask.worker
        chunks = index_pages = host_pages = 0
        for worker in self._table.of_node(target.node):
            for rank in worker.ranks[: bisect_left(worker.ranks, entry.rank)]:
                ahead = self._table.by_rank[rank]
                growth = max(0, page_limit(ahead.length, worker.capacity) - ahead.pages)
                host_pages += growth
                if worker is target:
                    index_pages += growth
                    chunks += max(0, least_chunks(ahead.length, worker.capacity) - ahead.chunks)
        return ask._replace(need=ask.need.plus(Memory(host_pages, chunks, index_pages)), spare_chunks=chunks)

    def _above_floor(self, entry: RequestState, ask: PlacementAsk) -> PlacementAsk:
        """Add what requests ahead of it there lack of their hot floor and, for one that left for their sake, what
        residents among them need soon, so that it does not leave again at once."""
        worker = ask.worker
        if worker.hot_floor is None:
            return ask
        chunks = 0
        for rank in worker.ranks[: bisect_left(worker.ranks, entry.rank)]:
            ahead = self._table.by_rank[rank]
            if ahead.runs and (size := size_at_floor(ahead, worker)) is not None:
                chunks += size.hot_chunks - ahead.chunks
            elif entry.thinned and ahead.hot.hot_slots == RESIDENT:
                growth = page_limit(ahead.length, worker.capacity) - ahead.pages
                chunks += max(0, min(FLOOR_MARGIN_PAGES, growth))
        need = ask.need.plus(Memory(hot_chunks=chunks))
        return ask._replace(need=need, spare_chunks=ask.spare_chunks + chunks)

    def _takes_steps(self, rest_tokens: int) -> bool:
        """Return whether the rest of a prompt behind its own pages goes through decode steps: less than a page does,
        where its rows need not be the bits of prefill."""
        return self._prefix_reuse.with_generated and rest_tokens <= PAGE_TOKENS

    def _prefers_steps(self, worker: WorkerEntry, rest_tokens: int) -> bool:
        if not self._prefix_reuse.with_generated or rest_tokens > REST_TOKENS_MAX:
            return False
        return self._prefill_costs.prefers_steps(worker.name, rest_tokens, worker.port.step_s())

    # ---------------------------------------------------------------- which of them

    def fits(self, ask: PlacementAsk) -> bool:
        free, need = self._free.on(ask.worker), ask.need
        if free.host_pages - need.host_pages < ask.share.size:  # whether it fits hangs on who holds the shared pages
            need = self.need_of(ask)
        return free.covers(need) and (ask.decoder is None or self.fits(ask.decoder))

    def need_of(self, ask: PlacementAsk) -> Memory:
        """Return the free memory that the ask takes; of the cached pages that it shares, those that nothing else
        holds."""
        if not ask.share.size:
            return ask.need
        return ask.need.plus(Memory(self._free.held_after(ask.worker.node).count_unheld(ask.share)))

    def best_fitting(self, asks: Sequence[PlacementAsk]) -> PlacementAsk | None:
        """The preferred of those that fit now; the later one, where two are alike."""
        fitting = [ask for ask in reversed(asks) if self.fits(ask)]
        if len(fitting) < 2:
            return fitting[0] if fitting else None
        weighs_prefixes = any(ask.prefix.size for ask in asks)  # whether rows of its prompt are cached anywhere
        return max(fitting, key=lambda ask: self._preference(ask, weighs_prefixes=weighs_prefixes))

    def _preference(
        self, ask: PlacementAsk, *, weighs_prefixes: bool = False
    ) -> tuple[bool, bool, int, bool, int, int, int, int]:
        """Rather directly, and within a node; where fewest tokens are to be computed before its first, those of prompts
        that came before among them, with `weighs_prefixes`; rather where it can be resident; then on the rank with
        the fewest requests, since the slowest rank of a group sets its step; then where chunks are plenty, then where
        seats are, first those of the worker that decodes."""
        last = ask.decoder or ask
        free, seats = self._free.on(last.worker), self._free.on(ask.worker).seats
        is_near, is_resident = last.worker.node == ask.worker.node, last.hot_sizes[-1].hot_chunks <= free.hot_chunks
        return (
            ask.decoder is not None,
            is_near,
            -self._pages_ahead(ask) if weighs_prefixes else 0,
            is_resident,
            self._crowding(last.worker),
            free.hot_chunks,
            free.seats,
            seats,
        )

    def _crowding(self, worker: WorkerEntry) -> int:
        """Return the requests on a rank: the fewer, the better."""
        return -len(worker.ranks) - self._promised[worker.name] if self._has_groups else 0

    def _pages_ahead(self, ask: PlacementAsk) -> int:
        """Count the pages of prompts, its own among them, that are computed on its worker before its first token."""
        before = (it for it in self._table.computing.values() if it.worker == ask.worker.name)
        return sum(pages_for(it.facts.prompt_tokens) - it.shared_pages for it in before) - int(ask.prefix.size)

    # ---------------------------------------------------------------- plain requests

    def _begins_new(self, entry: RequestState) -> bool:
        """Return whether nothing of its prompt is cached anywhere, nor may be about to be."""
        return not self._prefix_reuse.is_begun(entry) and not self._leaders.may_lead(entry)

    def _first_of(self, order: WorkerOrder, entry: RequestState) -> PlacementAsk | None:
        """Return what it asks of the first worker in `order`, which has workers of equal sizes."""
        shape = self.shape(entry, order.any, BOTH)
        if shape is None:
            return None
        need, chunks = shape.need, shape.hot_sizes[-1].hot_chunks
        worker = order.first(
            lambda it: it.node not in self._blocked and self._free.on(it).covers(need),
            lambda it: not self._has_groups or chunks <= self._free.on(it).hot_chunks,
        )
        return None if worker is None else PlacementAsk(worker, *shape)

    def _worker_orders(self) -> list[WorkerOrder]:
        """Return an order for each size of workers that prefill and decode."""
        if self._orders is None:
            by_sizes: dict[int, list[WorkerEntry]] = {}
            for worker in self._takers:
                if worker.capacity.role == BOTH:
                    by_sizes.setdefault(id(worker.sizes), []).append(worker)
            self._orders = [WorkerOrder(it, self._standing) for it in by_sizes.values()]
        return self._orders

    def _standing(self, worker: WorkerEntry) -> Standing:
        """Return the place that `_preference` gives a worker where all else is equal."""
        free = self._free.on(worker)
        return self._crowding(worker), free.hot_chunks, free.seats, self._index_of[worker.name]
