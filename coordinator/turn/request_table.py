"""Live and ended requests, as operators and clients ask for them: rows, histories, lookups. Pure.

A row tells the progress of a prompt, and what it waits for on its worker. A worker tells which rows of a prompt are
durable each time a pass of it has ended; the rest is known from the placement table. Which prompt comes next is the
worker's decision: owners share, and of one owner's the shortest rest comes first. So "behind" counts the prompts that
are under way and those that have fewer tokens left. It is an estimate, no order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from basics.request_states import WAITING, State
from basics.rooms import RoomUse
from basics.shares import check_share, is_near
from coordinator.journal.records import digest_of, with_named_grammar
from coordinator.policy.pending import PendingReason, PendingReasons
from coordinator.state.owner_turns import Owner
from coordinator.state.placement_table import PlacementTable
from coordinator.state.request_state import HISTORY_LINES_MAX, NO_DRAFTS, NO_SWAPS, Drafts, RequestState, Swaps
from coordinator.tokens.token_log import TokenLog
from protocol.arrays import unpack_int64
from protocol.errors import NotFound, ProtocolError, WrongState
from protocol.messages import GRAMMAR_CHARS_MAX, WARM_START_BYTES_MAX, Counters, HistoryLine, Rank, RequestRow, Submit
from protocol.units import PAGE_TOKENS

if TYPE_CHECKING:
    from coordinator.state.placement_table import PlacementTable
    from coordinator.state.request import Request
    from coordinator.turn.dispatch import Dispatch
    from protocol.settings import CoordinatorSettings


#: What orders prompts of a worker: whether no pass of the prompt has ended, its tokens left, its request's rank.
_Place: TypeAlias = tuple[bool, int, Rank]


class PromptWaits:
    """Prompts that are not staged, as of one moment: make another at the next. `durable` gives the durable rows of a
    request index in its present placement."""

    def __init__(self, placement_table: PlacementTable, durable: Callable[[int], int]) -> None:
        self._placement_table = placement_table
        self._durable = durable
        self._places: dict[str, list[_Place]] = {}  # by worker, in order; of those that were asked for

    def explain(self, entry: RequestState) -> str:
        """Return how much of the prompt is computed, or how many prompts come first; "" if it is staged, or goes
        through decode steps, or before its worker is back."""
        if entry.request_index not in self._placement_table.computing:
            return ""
        place = waits, left, _ = self._place(entry)
        places = self._on(entry.worker)
        ahead = places[: bisect_left(places, place)] if waits else []
        if not ahead:
            total = entry.facts.prompt_tokens
            return f"prompt: {total - left} of {total} tokens computed on {entry.worker}"
        prompts = "1 prompt" if len(ahead) == 1 else f"{len(ahead)} prompts"
        tokens = sum(tokens for _, tokens, _ in ahead)
        return f"prompt: {left} tokens wait behind {prompts} of {tokens} tokens on {entry.worker}"

    def _on(self, worker: str) -> list[_Place]:
        if worker not in self._places:
            computing = self._placement_table.computing.values()
            self._places[worker] = sorted(self._place(entry) for entry in computing if entry.worker == worker)
        return self._places[worker]

    def _place(self, entry: RequestState) -> _Place:
        reused = entry.shared_pages * PAGE_TOKENS
        computed = max(reused, self._durable(entry.request_index))
        return computed == reused, entry.facts.prompt_tokens - computed, entry.rank


#: Prompts and grammars of all live requests.
PROMPT_BYTES_MAX: Final = 8 << 30
#: Warm starts of all of them: of a thousand prompts of a model with 61 index groups and top-k 2048. Past it what comes
#: is not kept: the request that waits longest goes first, so what is there is needed sooner.
WARM_STARTS_BYTES_MAX: Final = 128 << 20

assert WARM_START_BYTES_MAX < WARM_STARTS_BYTES_MAX


class RequestTable:
    """Every request that has a name: live ones, and those that ended not long ago."""

    def __init__(
        self, token_log: TokenLog, settings: CoordinatorSettings, wall_offset_s: float, dispatch: Dispatch
    ) -> None:
        self.live: dict[str, RequestState] = {}
        self.by_index: dict[int, Request] = {}
        self.by_placement: dict[int, RequestState] = {}
        self.ended: OrderedDict[str, RequestState] = OrderedDict()  # oldest first; their prompts and grammars are gone
        self._live_of: Counter[Owner] = Counter()
        self._prompt_bytes_of: Counter[Owner] = Counter()
        self.warm_start_bytes = 0
        self._ended_of: dict[Owner, dict[str, None]] = {}  # ids, oldest first
        self.pending = PendingReasons(dispatch.placement_table, dispatch.policy, self._request_id)
        self._prompt_waits = partial(PromptWaits, dispatch.placement_table, token_log.durable)
        self._token_log = token_log
        self._settings = settings
        self._wall_offset_s = wall_offset_s

    # ---------------------------------------------------------------- life cycle

    def add(self, request: Request) -> None:
        live = request.state
        self.live[live.facts.request_id], self.by_index[live.request_index] = live, request
        self._live_of[live.facts.turn_owner] += 1
        self._prompt_bytes_of[live.facts.turn_owner] += live.prompt_bytes

    def check_room(self, owner: Owner, prompt_bytes: int, placement_table: PlacementTable) -> None:
        """Raise CapacityError when one more of `owner` would be too many, or beyond its share. `prompt_bytes`: of its
        prompt and its grammar."""
        live, limit = len(self.live), self._settings.live_requests_max
        held, field = self._live_of[owner], "coordinator.live_requests_max"
        check_share("live requests", 1, held=held, used=live, limit=limit, field=field)
        waiting, limit = len(placement_table.waiting), self._settings.queue_max
        held = placement_table.count_waiting(owner) if is_near(waiting, limit) else 0
        check_share("requests waiting", 1, held=held, used=waiting, limit=limit, field="coordinator.queue_max")
        held, used = self._prompt_bytes_of[owner], self._prompt_bytes_of.total()
        check_share("bytes of prompts", prompt_bytes, held=held, used=used, limit=PROMPT_BYTES_MAX, field="prompt")

    def room_use(self, waiting: int) -> dict[str, RoomUse]:
        """Measure the rooms that bound the number of requests, `waiting` of which wait."""
        settings, requests = self._settings, [*self.live.values(), *self.ended.values()]
        indices = settings.live_requests_max + settings.ended_keep_max
        return {
            "live_requests": RoomUse(len(self.live), settings.live_requests_max),
            "waiting_requests": RoomUse(waiting, settings.queue_max),
            "prompt_bytes": RoomUse(self._prompt_bytes_of.total(), PROMPT_BYTES_MAX),
            "warm_start_bytes": RoomUse(self.warm_start_bytes, WARM_STARTS_BYTES_MAX),
            "ended_requests": RoomUse(len(self.ended), settings.ended_keep_max),
            "history_lines": RoomUse(
                sum(it.lines_count - it.lines_dropped for it in requests), HISTORY_LINES_MAX * indices
            ),
        }

    def end_placement(self, placement: int) -> None:
        live = self.by_placement.pop(placement, None)
        if live is not None:
            live.swaps_before, live.swaps = live.swaps_in_all, NO_SWAPS
            live.drafts_before, live.drafts = live.drafts_in_all, NO_DRAFTS

    def keep_warm_start(self, live: RequestState, packed: bytes) -> None:
        """Replace what `live` keeps to load first; past a bound nothing is kept."""
        self.warm_start_bytes -= len(live.warm_start)
        room = WARM_STARTS_BYTES_MAX - self.warm_start_bytes
        live.warm_start = packed if len(packed) <= min(WARM_START_BYTES_MAX, room) else b""
        self.warm_start_bytes += len(live.warm_start)

    def end(self, live: RequestState) -> None:
        """It is over: only its state, its history and its tokens stay, for a while."""
        self.keep_warm_start(live, b"")
        self._prompt_bytes_of[live.facts.turn_owner] -= live.prompt_bytes
        live.prompt, live.grammar = b"", ""
        del self.live[live.facts.request_id], self.by_index[live.facts.request_index]
        self._live_of[live.facts.turn_owner] -= 1
        if not self._live_of[live.facts.turn_owner]:
            del self._live_of[live.facts.turn_owner], self._prompt_bytes_of[live.facts.turn_owner]
        self.add_ended(live)

    def add_ended(self, live: RequestState) -> None:
        """Its end is written; no other request ended later."""
        self.ended[live.facts.request_id] = live
        self._ended_of.setdefault(live.facts.turn_owner, {})[live.facts.request_id] = None

    def forget_old(self, now: float) -> list[int]:
        """Forget what ended long ago, and what is beyond the bound: the oldest of the owner who has most. Returns their
        request indices."""
        keep_max, keep_s = self._settings.ended_keep_max, self._settings.ended_keep_s
        forgotten: list[RequestState] = []
        while self.ended and self._until(next(iter(self.ended.values())), now) <= now - keep_s:
            forgotten.append(self._take_ended(next(iter(self.ended))))
        while len(self.ended) > keep_max:
            most = max(self._ended_of.values(), key=len)
            forgotten.append(self._take_ended(next(iter(most))))
        return [it.request_index for it in forgotten]

    def _until(self, live: RequestState, now: float) -> float:
        """Time at which it ended; `now` while it has not."""
        return live.ended.at_s - self._wall_offset_s if live.ended is not None else now

    def _take_ended(self, request_id: str) -> RequestState:
        ended = self.ended.pop(request_id)
        owner = ended.facts.turn_owner
        del self._ended_of[owner][request_id]
        if not self._ended_of[owner]:
            del self._ended_of[owner]
        return ended

    def forget(self, request_ids: tuple[str, ...], user: str | None = None) -> list[int]:
        """Forget these ended requests, all or none; returns their request indices. Unknown ids were forgotten before.

        Raises WrongState for a live one, NotFound for another user's.
        """
        for request_id in request_ids:
            if self.knows(request_id):
                self.find(request_id, user)
            if request_id in self.live:
                raise WrongState(
                    "has not ended", field="request_id", value=request_id, remedy="read its output to the end first"
                )
        known = [request_id for request_id in dict.fromkeys(request_ids) if request_id in self.ended]
        return [self._take_ended(request_id).request_index for request_id in known]

    def count_swaps(self, worker: str, epoch: int, counters: Counters) -> None:
        """Take in swap-in counters; of placements not its own: dropped. Raises ProtocolError when arrays disagree."""
        placements = unpack_int64(counters.placements, "placements").tolist()
        hits = unpack_int64(counters.hits, "hits").tolist()
        misses = unpack_int64(counters.misses, "misses").tolist()
        drafted, accepted = unpack_int64(counters.drafted, "drafted"), unpack_int64(counters.accepted, "accepted")
        drafts = [Drafts(*pair) for pair in zip(drafted.tolist(), accepted.tolist(), strict=False)]
        lengths = {len(placements), len(hits), len(misses)}
        if len(lengths) > 1 or len(drafted) != len(accepted) or (drafts and len(drafts) != len(placements)):
            raise ProtocolError("arrays of different lengths", field="counters", remedy="one element each")
        columns = zip(placements, hits, misses, drafts or [NO_DRAFTS] * len(placements), strict=True)
        for placement, hit, missed, drafts_of in columns:
            live = self.admitted(worker, epoch, placement)
            if live is not None:
                live.swaps, live.drafts = Swaps(hit, missed), drafts_of

    def swaps_of(self, request_index: int) -> Swaps:
        """Return the swaps of the present placement of a live request."""
        return self.by_index[request_index].state.swaps

    # ---------------------------------------------------------------- lookups

    def admitted(self, worker: str, epoch: int, placement: int) -> RequestState | None:
        """Return the request whose placement it is; None when it has ended or is another worker's."""
        live = self.by_placement.get(placement)
        placed = live.placed if live is not None else None
        return live if placed is not None and (placed.epoch, placed.worker) == (epoch, worker) else None

    def index_of_same(self, submit: Submit, user: str) -> int:
        """The request index of the request whose id `submit` bears. Raises WrongState when it is another request, or
        another user's."""
        facts = self.find(submit.request_id).facts
        sampling = submit.sampling
        if len(sampling.grammar) <= GRAMMAR_CHARS_MAX:  # a longer one was never taken, and takes long to name
            sampling = with_named_grammar(sampling)
        asked = user, sampling, submit.priority, submit.prefill_mode, digest_of(submit.prompt)
        if asked != (facts.user, facts.sampling, facts.priority, facts.prefill_mode, facts.prompt_digest):
            raise WrongState(
                "is in use by another request",
                field="request_id",
                value=submit.request_id,
                remedy="choose another, or attach to it",
            )
        return facts.request_index

    def knows(self, request_id: str) -> bool:
        return request_id in self.live or request_id in self.ended

    def find(self, request_id: str, user: str | None = None) -> RequestState:
        """Raises NotFound, and for another's than `user`'s in the same words: who asks learns nothing."""
        found = self.live.get(request_id) or self.ended.get(request_id)
        if found is None or user not in (None, found.facts.user):
            raise NotFound(
                "no request of this id, or it ended too long ago",
                field="request_id",
                value=request_id[:128],
                remedy="list requests",
            )
        return found

    # ---------------------------------------------------------------- rows

    def rows(self, limit: int, now: float, user: str | None = None) -> list[RequestRow]:
        """Live requests in rank order, then ended ones, latest first; `user`'s, or (None) all users'."""
        live = (it for it in self.live.values() if user in (None, it.facts.user))
        waits = self._prompt_waits()
        rows = [self._row(it, now, waits) for it in sorted(live, key=lambda it: it.facts.rank)[: max(limit, 0)]]
        for ended in reversed(self.ended.values()):
            if len(rows) >= limit:
                break
            if user in (None, ended.facts.user):
                rows.append(self._row(ended, now, waits))
        return rows

    def describe(
        self, request_id: str, now: float, user: str | None = None
    ) -> tuple[RequestRow, tuple[HistoryLine, ...]]:
        """Raises NotFound. Times of lines are seconds since the epoch."""
        live = self.find(request_id, user)
        lines = tuple(HistoryLine(line.at + self._wall_offset_s, *line[1:]) for line in live.history())
        return self._row(live, now, self._prompt_waits()), lines

    def _row(self, live: RequestState, now: float, waits: PromptWaits) -> RequestRow:
        facts, request_index = live.facts, live.request_index
        swaps, drafts, pending = live.swaps_in_all, live.drafts_in_all, self._pending(live, now)
        return RequestRow(
            request_id=facts.request_id,
            state=live.state,
            priority=facts.priority,
            worker=live.active_worker,
            prompt_tokens=facts.prompt_tokens,
            generated_tokens=self._token_log.length(request_index),
            max_tokens=facts.sampling.max_tokens,
            durable_tokens=(live.kept_tokens or self._token_log.durable(request_index)) if live.pages else 0,
            host_pages=live.pages,
            hot_slots=live.hot.hot_slots,
            hot_chunks=live.chunks,
            hits=swaps.hits,
            misses=swaps.misses,
            retractions=live.retractions,
            age_s=self._until(live, now) + self._wall_offset_s - facts.at_s,
            held=live.held,
            reason=pending.text if pending else self._prompt_wait(live, waits) or live.reason,
            waits_for=pending.kind if pending else "",
            prefix_tokens=live.prefix_tokens,
            drafted_tokens=drafts.drafted,
            accepted_tokens=drafts.accepted,
        )

    def _pending(self, live: RequestState, now: float) -> PendingReason | None:
        """Return what it waits for now; None: nothing, and the last line of its history that has a reason says why
        it is in its state."""
        if live.state in WAITING or (live.state is State.TRANSFERRING and live.transfer_id):
            return self.pending.explain(live, now)
        return None

    def _prompt_wait(self, live: RequestState, waits: PromptWaits) -> str:
        """The progress of its prompt while a worker computes it; "" in other states, and before that worker is back."""
        return waits.explain(live) if live.state is State.PREFILLING else ""

    def _request_id(self, request_index: int) -> str:
        return self.by_index[request_index].state.facts.request_id

    def count_by_state(self) -> Counter[str]:
        return Counter(str(live.state) for live in self.live.values())

    def count_held(self) -> int:
        return sum(live.held for live in self.live.values())
