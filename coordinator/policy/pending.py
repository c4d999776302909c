"""Why a waiting request is not admitted yet, with the arithmetic. Pure.

`PendingReasons.explain` is the one owner of that text: rows of listings and lines of histories come from it. It decides
nothing: it reads what the last plan left behind (`free_memory.PlanOutcome`), the placement table and the ledgers, when
it is asked. `unserved` says the same of a request that may be submitted now: it is the rule by which the coordinator
and the HTTP front are ready.

History. `due` gives the requests whose history gains a line: asked once a tick, at most NOTES_MAX of them, each kind
once per wait. A wait that is over within a tick gains none, and thousands of waiting requests cost nothing per turn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from basics.request_states import PendingKind
from coordinator.policy.free_memory import NO_PLAN_OUTCOME, PlacementAsk, PlanOutcome, Refusal
from coordinator.state.placement_table import PlacementTable
from coordinator.state.request_state import RequestState
from coordinator.state.worker_entry import WorkerEntry, ranks_text
from protocol.messages import BOTH, DECODE, DIRECT, PREFILL, STAGED
from protocol.sizing import memory_of, misfit

if TYPE_CHECKING:
    from coordinator.policy.policy import Policy

#: Histories that gain a line in one tick.
NOTES_MAX: Final = 256
#: Workers named in one reason.
NAMES_MAX: Final = 4


#: Kinds of memory, in the order in which the first that is short is named: fields of sizing.Memory.
_MEMORY: Final = tuple(
    (kind, kind.value)
    for kind in (
        PendingKind.SEATS,
        PendingKind.HOST_PAGES,
        PendingKind.HOT_CHUNKS,
        PendingKind.INDEX_PAGES,
    )
)


class PendingReason(NamedTuple):
    kind: PendingKind
    text: str


class _Need(NamedTuple):
    """One kind of memory: what is needed of it, what is free at `place` of how much, and how much of that is `left`
    by better-ranked requests."""

    place: str
    kind: PendingKind
    noun: str
    needed: int
    free: int
    total: int
    left: int

    @property
    def text(self) -> str:
        noun = self.noun if self.needed != 1 else self.noun.removesuffix("s")
        text = f"needs {self.needed} {noun}, {self.place} has {self.free} of {self.total} free"
        return text if self.needed > self.free else f"{text}, {self.left} after requests ahead of it"


class PendingReasons:
    """`request_id` gives the id that belongs to a request index."""

    def __init__(self, placement_table: PlacementTable, policy: Policy, request_id: Callable[[int], str]) -> None:
        self._placement_table = placement_table
        self._policy = policy
        self._request_id = request_id
        self._last: tuple[PlanOutcome, float, int, str] = (NO_PLAN_OUTCOME, 0.0, -1, "")  # the reason of who is ahead

    # ---------------------------------------------------------------- histories

    def due(self, now: float) -> list[tuple[RequestState, PendingReason]]:
        """Requests that wait for something of a kind that their history does not name; from now on it is named."""
        found: list[tuple[RequestState, PendingReason]] = []
        for entry in self._candidates():
            if len(found) == NOTES_MAX:
                break
            reason = self.explain(entry, now)
            self._placement_table.unexplained.pop(entry.request_index, None)
            if reason.kind not in entry.reasons_told:
                entry.reasons_told |= {reason.kind}
                found.append((entry, reason))
        return found

    def _candidates(self) -> Iterator[RequestState]:
        """Those whose wait has no reason yet, the first of all, and those that the last plan refused; each once, since
        its kind is noted the first time."""
        placement_table = self._placement_table
        yield from list(islice(placement_table.unexplained.values(), NOTES_MAX))
        refused = self._policy.outcome.refused
        first = placement_table.by_rank[placement_table.waiting[0]] if placement_table.waiting else None
        if first is not None and first.request_index not in refused:
            yield first
        for request_index in islice(refused, NOTES_MAX):
            entry = placement_table.entries.get(request_index)
            if entry is not None and entry.waits and not entry.ordered.held:
                yield entry

    # ---------------------------------------------------------------- one request

    def explain(self, entry: RequestState, now: float) -> PendingReason:
        """Return the reason of a request that waits, or whose rows are on their way to where it will."""
        refusal = self._policy.outcome.refused.get(entry.request_index)
        if entry.ordered.held:
            kept = f", its {entry.kept_tokens} rows kept" if entry.kept_tokens else ""
            return PendingReason(PendingKind.HELD, f"held by an operator{kept}: hisparse resume lets it go on")
        if inbound := self._placement_table.transfer_of(entry):
            where = f"{inbound.worker} on node {inbound.node}"
            text = f"its {entry.facts.prompt_tokens} rows are on their way to {inbound.pages} host pages of {where}"
            return PendingReason(PendingKind.TRANSFER, text)
        if now < entry.paused_until:
            text = f"transfer {entry.transfers_failed} failed, the next in {entry.paused_until - now:.1f} s"
            return PendingReason(PendingKind.PAUSED, text)
        if refusal is not None and refusal.is_barred:
            return PendingReason(PendingKind.SUSPECT, self._suspect_reason(entry))
        if refusal is None or not refusal.asks:
            return self._unasked(entry, now)
        return self._shortage(entry, refusal)

    def _suspect_reason(self, entry: RequestState) -> str:
        if entry in self._placement_table.poison_detector:
            return f"{entry.strikes} workers died with it: joins one once all requests there have come further"
        return "every worker that could take it has a request with which workers died, and which has not come further"

    # ---------------------------------------------------------------- short of memory

    def _shortage(self, entry: RequestState, refusal: Refusal) -> PendingReason:
        """Return what is short on the worker, or the pair, that lacks least."""
        short = min((self._short(ask) for ask in refusal.asks), key=_lack)
        if not short:
            return PendingReason(PendingKind.TURN, "room is there: admitted in the next turn")
        text = "; ".join(it.text + self._quarantined(it) for it in short)
        if len(refusal.asks) > 1:
            text += f" (the nearest of {len(refusal.asks)} choices)"
        if entry.displaced:
            text += "; counts what requests ahead of it may still need, since they displaced it before"
        if short[0].kind is PendingKind.HOT_CHUNKS and any(it.worker.hot_floor is not None for it in refusal.asks):
            text += "; smaller hot buffers would cost throughput"
        return PendingReason(short[0].kind, f"{text}; room is being made" if refusal.is_coming else text)

    def _quarantined(self, need: _Need) -> str:
        if need.kind is not PendingKind.HOST_PAGES:
            return ""
        pages = self._policy.ledgers[need.place].count_pages().quarantined
        return f", {pages} in quarantine" if pages else ""

    def _short(self, ask: PlacementAsk) -> list[_Need]:
        """Return what the ledgers lack; if nothing, what better-ranked requests leave too little of."""
        needs = [need for part in ask.parts for need in self._needs(part)]
        lacking = [need for need in needs if need.needed > need.free]
        return lacking or [need for need in needs if need.needed > need.left]

    def _needs(self, ask: PlacementAsk) -> Iterator[_Need]:
        worker, plan = ask.worker, self._policy.outcome.free
        ledger = self._policy.ledgers[worker.node]
        if not plan.knows(worker) or not ledger.has_live(worker.name):
            return  # it left after the plan
        total = replace(memory_of(worker.capacity), host_pages=ledger.pages_total)
        amounts = ask.need, ledger.free(worker.name), total, plan.on(worker)
        for kind, field in _MEMORY:
            place = worker.node if kind is PendingKind.HOST_PAGES else worker.name
            yield _Need(place, kind, field.replace("_", " "), *(getattr(it, field) for it in amounts))

    # ---------------------------------------------------------------- no worker to ask

    def _unasked(self, entry: RequestState, now: float) -> PendingReason:
        """No worker was asked for memory: none is there, none can take it, others come first, another request computes
        the beginning of its prompt, or the token log has no room."""
        refusal = self._policy.outcome.refused.get(entry.request_index)
        if refusal is not None and refusal.lacks_output_room:
            return PendingReason(
                PendingKind.OUTPUT_ROOM,
                "outputs take all room, or its owner's share: waits until requests that ended are forgotten",
            )
        if refusal is not None and (following := refusal.following) is not None:
            leader = self._request_id(following.leader.request_index)
            return PendingReason(PendingKind.PREFIX, f"{leader} {following.text}")
        where = f" of node {entry.node}, where its {entry.kept_tokens} rows are kept," if entry.pages else ""
        workers = [it for it in self._placement_table.workers.values() if not entry.pages or it.node == entry.node]
        takers = [it for it in workers if it.takes]
        if not takers:
            return _no_takers(workers, where)
        was_considered = entry.request_index in self._policy.outcome.refused  # else others ahead blocked its nodes
        unable = _unable(entry, takers) if was_considered else None
        if unable is not None:
            others = [it for it in workers if not it.takes]
            return unable._replace(text=unable.text + (f"; {_absent(others)}" if others else ""))
        return self._behind(entry, takers, now)

    def _behind(self, entry: RequestState, takers: Sequence[WorkerEntry], now: float) -> PendingReason:
        blocked, nodes = self._policy.outcome.blocked, {it.node for it in takers}
        blockers = [
            it for node, it in blocked.items() if node in nodes and it.request_index in self._placement_table.entries
        ]
        ahead = min(blockers, key=lambda it: it.rank, default=None)
        if ahead is None and entry.request_index in self._policy.outcome.refused:
            return PendingReason(PendingKind.ROLE, _NO_HANDING)
        if ahead is None or ahead is entry:
            return PendingReason(PendingKind.TURN, "the Scheduler's next turn considers it")
        count = bisect_left(self._placement_table.waiting, entry.rank)
        return PendingReason(PendingKind.BEHIND, f"{count} waiting ahead of it, first {self._of_ahead(ahead, now)}")

    def _of_ahead(self, ahead: RequestState, now: float) -> str:
        """The name and the reason of one request, for many that wait behind it."""
        outcome = self._policy.outcome
        if self._last[0] is not outcome or self._last[1:3] != (now, ahead.request_index):
            text = f"{self._request_id(ahead.request_index)}: {self.explain(ahead, now).text}"
            self._last = outcome, now, ahead.request_index, text
        return self._last[3]


def unserved(workers: Sequence[WorkerEntry]) -> PendingReason | None:
    """Why none of all `workers` would take a request that is submitted now; None: one would."""
    takers = [it for it in workers if it.takes]
    if not takers:
        return _no_takers(workers)
    if any(it.capacity.role == BOTH for it in takers):
        return None
    for part in (PREFILL, DECODE):
        if not any(it.capacity.role == part for it in takers):
            others = [it for it in workers if not it.takes]
            return PendingReason(PendingKind.ROLE, _no_part(part) + (f"; {_absent(others)}" if others else ""))
    if any(one.hands_to(other) for one in takers if not one.decodes for other in takers if other.decodes):
        return None
    return PendingReason(PendingKind.ROLE, _NO_HANDING)


def _no_takers(workers: Sequence[WorkerEntry], where: str = "") -> PendingReason:
    if not workers:
        return PendingReason(PendingKind.NO_WORKER, f"no worker{where} is connected")
    return PendingReason(_kind_of_absence(workers), f"no worker{where} takes requests: {_absent(workers)}")


def _lack(short: list[_Need]) -> tuple[int, float]:
    """Return how far a worker is from having room, to compare by."""
    return len(short), sum((it.needed - min(it.free, it.left)) / max(it.total, 1) for it in short)


def _absent(workers: Sequence[WorkerEntry]) -> str:
    """Say how many of them drain, how many are awaited, and which ranks their groups wait for."""
    draining = [it.name for it in workers if it.drain is not None]
    awaited = [it.name for it in workers if it.drain is None and it.awaited]
    counted = [
        f"{len(names)} {what} ({', '.join(names[:NAMES_MAX])}{', …' if len(names) > NAMES_MAX else ''})"
        for names, what in ((draining, "draining"), (awaited, "awaited after a restart"))
        if names
    ]
    missing = {it.member.group: it for it in reversed(workers) if it.member and it.ranks_missing and not it.drain}
    waits = [f"group {name} waits for {ranks_text(it.ranks_missing)}" for name, it in sorted(missing.items())]
    more = [f"{len(waits) - NAMES_MAX} more groups wait"] if len(waits) > NAMES_MAX else []
    return ", ".join(counted + waits[:NAMES_MAX] + more)


def _kind_of_absence(workers: Sequence[WorkerEntry]) -> PendingKind:
    if any(it.drain for it in workers):
        return PendingKind.DRAINING
    return PendingKind.GROUP if any(it.ranks_missing for it in workers) else PendingKind.RECONNECT


def _unable(entry: RequestState, takers: Sequence[WorkerEntry]) -> PendingReason | None:
    """Why these workers could not take it on if they were empty; None: they could."""
    alone, pair = (BOTH,), (PREFILL, DECODE)
    by_mode = {STAGED: (alone,), DIRECT: (pair,)}
    pairings = ((DECODE,),) if entry.pages else by_mode.get(entry.facts.prefill_mode, (alone, pair))
    reasons = [next(filter(None, (_lacking(entry, takers, part) for part in pairing)), None) for pairing in pairings]
    if None in reasons:
        return None
    return reasons[-1 if any(it.capacity.role == PREFILL for it in takers) else 0]


_PARTS: Final = {BOTH: "prefills and decodes", PREFILL: "prefills", DECODE: "decodes"}
_NO_HANDING: Final = "no worker that takes requests can hand its prompt to another"


def _no_part(part: str) -> str:
    return f"no worker that takes requests {_PARTS[part]}"


def _lacking(entry: RequestState, takers: Sequence[WorkerEntry], part: str) -> PendingReason | None:
    """Why none of them could do `part`, by the one that lacks least; None: one could."""
    able = [it for it in takers if it.capacity.role in (part, BOTH)]
    if not able:
        return PendingReason(PendingKind.ROLE, _no_part(part))
    unlike = {id(it.capacity): it for it in reversed(able)}.values()  # most workers of a group share one capacity
    misfits = min((misfit(entry.length, it.capacity, it.name, part) for it in unlike), key=len)
    return PendingReason(PendingKind.TOO_LARGE, "; ".join(it.text for it in misfits)) if misfits else None
