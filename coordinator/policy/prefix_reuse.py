"""Cached pages with which prompts may begin, and pages of a request that may be cached. Pure.

    off    nothing is reused
    own    a request reuses what requests of its owner have computed: the same user, and the same tenant of that user
    all    any request reuses what any has computed

Within that, only requests of one `cache_salt` reuse each other's pages. Whatever the mode, a page counts for the owner
whose request cached it: the one who took that request's turn. Where room is made, owners give it who have most.

In deterministic mode (ModelInfo.prefix_unit_tokens is the size of prompt blocks) only whole blocks of prompts are
reused, and nothing that decode steps have written, so that outputs are the same bits with and without reuse.

Pages are cached as they become durable: those of a prompt while it is being computed, those of generated tokens when
their request leaves its worker. What may be wrong leaves the index: the pages that a worker epoch wrote with which an
audit differs twice, or whose death was one too many for a request; those of a placement that faulted, or whose pages
another node refused.

The rest of a prompt, behind cached pages, goes through decode steps or through prefill, whichever costs less by what
was measured on the worker: the time from admission to staged of its prompts, in units of SHORT_TOKENS that they
computed, and the time of a decode step. A step takes one token of the rest, whatever else the batch decodes; a prefill
takes one unit of time at least, and its cached rows are loaded layer by layer. As long as one of the two was not
measured, prompts are prefilled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from coordinator.journal.records import RequestFacts
from coordinator.memory.changes import Cache, Evict
from coordinator.memory.kv_events import KvEvents
from coordinator.memory.ledger import NO_PAGES, Ledger
from coordinator.memory.prefix_index import (
    NO_SOURCE,
    Chain,
    Digest,
    Match,
    PrefixIndex,
    Scope,
    Source,
    extend_chain,
    root_of,
)
from coordinator.state.events import LedgerStep
from coordinator.state.request_state import RequestState
from protocol.arrays import Int32Array
from protocol.messages import ModelInfo, WorkerCapacity
from protocol.units import PAGE_TOKENS

#: Prompts up to so many tokens cost one unit of time, whatever their length: reading the weights of all layers takes
#: most of it.
SHORT_TOKENS: Final = 512
#: A longer rest is prefilled in any case: each of its tokens is a step of the whole batch.
REST_TOKENS_MAX: Final = PAGE_TOKENS
#: Weight of the latest prompt.
WEIGHT: Final = 1 / 4


class PrefillCosts:
    """Seconds of a short prompt, by worker."""

    def __init__(self) -> None:
        self._unit_s: dict[str, float] = {}

    def note(self, worker: str, tokens: int, seconds: float) -> None:
        """A prompt was computed and staged, but for its cached pages: `tokens` of it in `seconds`."""
        unit_s = seconds / max(1, -(-tokens // SHORT_TOKENS))
        before = self._unit_s.get(worker, unit_s)
        self._unit_s[worker] = before + (unit_s - before) * WEIGHT

    def forget(self, worker: str) -> None:
        """It is gone, and another of its name may be another machine."""
        self._unit_s.pop(worker, None)

    def prefers_steps(self, worker: str, rest_tokens: int, step_s: float) -> bool:
        """Return whether `rest_tokens` go through decode steps of `step_s` seconds (0: not measured)."""
        unit_s = self._unit_s.get(worker, 0.0)
        return step_s > 0 and 0 < rest_tokens <= REST_TOKENS_MAX and rest_tokens * step_s < unit_s


#: Roots that are remembered, so that they are not computed for each request.
ROOTS_MAX: Final = 1_024
#: Worker epochs that are remembered as not trustworthy.
DISTRUSTED_MAX: Final = 1_024

OFF: Final = "off"
OWN: Final = "own"
ALL: Final = "all"


def own_unit(model: ModelInfo, capacity: WorkerCapacity) -> int:
    """Return the unit, in tokens, of what a request that was staged on such a worker keeps of its prompt when that is
    lost. 0: nothing, since a worker of its node that only decodes could not compute the rest in the same bits."""
    return model.prefix_unit_tokens if model.reuses_generated or capacity.prefills else 0


@dataclass(slots=True)
class PrefixStats:
    """Counts of one node, since the coordinator's start. `asked_tokens`: of prompts that were admitted to be
    prefilled."""

    asked_tokens: int = 0
    reused_tokens: int = 0
    evicted_pages: int = 0


@dataclass(slots=True)
class PrefixReuse:
    """The indexes of all nodes, and the rule. `key` is drawn at each start. `unit_tokens` and
    `with_generated` are those of the served model. `events`, if any, hears what is cached and forgotten. `clock`, in
    seconds, tells which owners are away."""

    mode: str
    key: bytes = b""
    events: KvEvents | None = None
    clock: Callable[[], float] = lambda: 0.0
    roots: dict[tuple[str, str, Scope], Digest] = field(default_factory=dict)  # of owners and salts seen lately
    stats: dict[str, PrefixStats] = field(default_factory=dict)
    by_node: dict[str, PrefixIndex] = field(default_factory=dict)
    unit_tokens: int = PAGE_TOKENS
    with_generated: bool = True
    distrusted: OrderedDict[Source, None] = field(default_factory=OrderedDict)

    @property
    def is_on(self) -> bool:
        return self.mode != OFF

    def open(self, node: str) -> PrefixIndex:
        """The index of a pool with nothing cached in it."""
        before = self.by_node.get(node)
        after = PrefixIndex(partial(self._forgotten, node) if self.events is not None else None, self.clock)
        if before is not None:  # what was matched there is not there any more
            before.clear()
            after.version, after.removals = before.version + 1, before.removals + 1
        self.by_node[node] = after
        self.stats.setdefault(node, PrefixStats())
        return after

    def _forgotten(self, node: str, digest: Digest) -> None:
        if self.events is not None and not self._is_elsewhere(node, digest):
            self.events.removed(digest)

    def _is_elsewhere(self, node: str, digest: Digest) -> bool:
        return any(digest in index for name, index in self.by_node.items() if name != node)

    def serve(self, model: ModelInfo) -> None:
        self.unit_tokens, self.with_generated = model.prefix_unit_tokens, model.reuses_generated

    def scope(self, user: str, tenant: str, salt: str) -> Scope:
        return Scope(salt=salt) if self.mode == ALL else Scope(user, tenant, salt)

    def scope_of(self, facts: RequestFacts) -> Scope | None:
        """Return the scope of a request of an earlier incarnation, unless that is of another mode than this one's."""
        scope = facts.scope
        if scope is None or not self.is_on:
            return None
        return scope if scope == self.scope(facts.user, scope.tenant or facts.tenant, scope.salt) else None

    def root(self, model: ModelInfo, scope: Scope) -> Digest:
        """Return the digest of all that rows depend on beside tokens, and of who may reuse them. Their format is that
        of the node's pool: a pool of another format begins with an empty index."""
        about = model.fingerprint, model.arithmetic, scope
        root = self.roots.get(about)
        if root is None:
            if len(self.roots) >= ROOTS_MAX:
                self.roots.clear()
            root = self.roots[about] = root_of(self.key, model.fingerprint, model.arithmetic, *scope)
        return root

    def digests(self, parent: Digest, tokens: bytes) -> tuple[Digest, ...]:
        """Digests of the full pages of `tokens`, behind `parent`."""
        return extend_chain(self.key, parent, tokens)

    def match(self, entry: RequestState, node: str) -> Int32Array:
        """Cached pages with which its prompt can begin on `node`; none of a prompt without digests. Its last token is
        computed in any case."""
        index, chain = self.by_node.get(node), entry.chain
        if index is None or chain is None:
            return NO_PAGES
        known, limit = entry.matches.get(node), (entry.facts.prompt_tokens - 1) // PAGE_TOKENS
        if known is None or known.version != index.version:
            known = entry.matches[node] = self._matched(index, chain.digests, limit, known)
        pages = known.pages
        whole = self.whole(min(pages.size, limit)) if pages.size else 0
        return pages if whole == pages.size else pages[:whole]

    def is_begun(self, entry: RequestState) -> bool:
        """Return whether any node has the first page of its prompt, where `match` may find one: one look at each
        node."""
        if not self.is_on or entry.chain is None or not entry.chain.digests:
            return False
        first = entry.chain.digests[0]
        return entry.facts.prompt_tokens > PAGE_TOKENS and any(first in index for index in self.by_node.values())

    def look_ahead(self, digests: Sequence[Digest], matches: dict[str, Match]) -> None:
        """Match the digests that there are so far of a long prompt, so that little is left for the plan that admits
        it."""
        for node, index in self.by_node.items():
            matches[node] = self._matched(index, digests, len(digests), matches.get(node))

    @staticmethod
    def _matched(index: PrefixIndex, digests: Sequence[Digest], limit: int, known: Match | None) -> Match:
        is_longer = known is not None and known.removals == index.removals
        before = known.pages if known is not None and is_longer else NO_PAGES
        return Match(index.version, index.removals, index.match(digests, limit, before))

    def common_pages(self, one: Chain, other: Chain) -> int:
        """Count the pages with which both begin. All ancestors of equal digests are equal."""
        low, high = 0, min(len(one.digests), len(other.digests))
        while low < high:
            middle = (low + high) // 2
            is_same = one.digests[middle] == other.digests[middle]
            low, high = (middle + 1, high) if is_same else (low, middle)
        return low

    def use(self, entry: RequestState, node: str, pages: int) -> None:
        """It was admitted to be prefilled, with so many cached pages."""
        entry.indexed = pages
        if self.is_on:
            self.stats[node].asked_tokens += entry.facts.prompt_tokens
        if pages and entry.chain is not None:
            self.stats[node].reused_tokens += pages * PAGE_TOKENS
            self.by_node[node].touch(entry.chain.digests[pages - 1])

    def keep_prompt(
        self, entry: RequestState, ledger: Ledger, durable_tokens: int | None = None
    ) -> tuple[LedgerStep, ...]:
        """So many rows of its prompt are durable, or all: cache their full pages, as far as they are not known."""
        prompt = entry.facts.prompt_tokens
        rows = prompt if durable_tokens is None else min(durable_tokens, prompt)
        return self._keep(entry, ledger, rows // PAGE_TOKENS, lambda: b"")

    def keep_rows(
        self, entry: RequestState, ledger: Ledger, durable_tokens: int, generated: int, tokens: Callable[[], bytes]
    ) -> tuple[LedgerStep, ...]:
        """It is about to leave: cache the full pages of its `durable_tokens` rows. `tokens`: prompt and output.

        The newest generated token has no row; rows behind it are those of tokens that were discarded.
        """
        prompt = entry.facts.prompt_tokens
        rows = min(durable_tokens, prompt + max(0, generated - 1) if self.with_generated else prompt)
        return self._keep(entry, ledger, rows // PAGE_TOKENS, tokens)

    def _keep(
        self, entry: RequestState, ledger: Ledger, pages: int, tokens: Callable[[], bytes]
    ) -> tuple[LedgerStep, ...]:
        index, chain = self.by_node.get(entry.node), entry.chain
        if index is None or not ledger.holds(entry.placement):
            return ()
        source = ledger.holder_of(entry.placement) or NO_SOURCE
        if source in self.distrusted:
            index.keep_out(ledger.pages_of(entry.placement).tolist())
            return ()
        if chain is None:
            return ()
        pages = self.whole(pages)
        first = entry.indexed if entry.indexed and chain.digests[entry.indexed - 1] in index else 0
        if pages <= first:
            return ()
        digests = chain.digests[:pages]
        if pages > len(digests):
            rest = tokens()[len(digests) * PAGE_TOKENS * 4 : pages * PAGE_TOKENS * 4]
            digests += self.digests(digests[-1] if digests else chain.root, rest)
        held = ledger.pages_of(entry.placement)[: len(digests)]
        if (sound := index.sound(held)) < len(digests):
            digests, held = digests[:sound], held[:sound]
            if sound <= first:
                return ()
        parent = digests[first - 1] if first else chain.root
        fresh = index.add(parent, digests[first:], held[first:], source, chain.scope, entry.facts.turn_owner)
        entry.indexed = min(len(digests), len(chain.digests))
        if self.events is not None and fresh.size:
            is_news = np.isin(held, fresh)
            for place in np.flatnonzero(is_news).tolist():
                is_news[place] = not self._is_elsewhere(entry.node, digests[place])
            self.events.stored(chain, digests, is_news, entry.request_index)
        return (LedgerStep(entry.node, Cache(fresh.tobytes())),) if fresh.size else ()

    def whole(self, pages: int) -> int:
        """Those that may be reused: of whole units."""
        unit = self.unit_tokens // PAGE_TOKENS
        return pages // unit * unit

    # ---------------------------------------------------------------- operators

    def drop(self, prefixes: Collection[Digest] = (), owners: Collection[str] = ()) -> dict[str, Int32Array]:
        """Forget the pages that lead to these prefixes alone, and all prefixes of these owners (Scope.owner); none of
        either: all prefixes. Returns the pages of each node, to be evicted."""
        if prefixes or owners:
            return {
                node: np.concatenate([NO_PAGES, *map(index.drop, prefixes), *map(index.drop_owner, owners)])
                for node, index in self.by_node.items()
            }
        events, self.events = self.events, None  # one event for all of them
        dropped = {node: index.clear() for node, index in self.by_node.items()}
        self.events = events
        if events is not None:
            events.cleared()
        return dropped

    # ---------------------------------------------------------------- what is not to be trusted

    def distrust_epoch(self, source: Source) -> tuple[LedgerStep, ...]:
        """Drop what this epoch wrote, which may be wrong: it leaves the index, with all that follows it, and what it
        still writes does not enter. Nor do these pages later, under the name of another epoch, for as long as requests
        keep or share them."""
        self.distrusted[source] = None
        if len(self.distrusted) > DISTRUSTED_MAX:
            self.distrusted.popitem(last=False)
        return tuple(
            step for node, index in self.by_node.items() for step in self._forget(node, index.written_by(source))
        )

    def distrust_pages(self, entry: RequestState, ledger: Ledger) -> tuple[LedgerStep, ...]:
        """Drop what its placement wrote to host pages, which may be wrong: those leave the index. Pages that it shared
        stay."""
        if entry.node not in self.by_node or not ledger.holds(entry.placement):
            return ()
        return self._forget(entry.node, ledger.pages_of(entry.placement)[entry.shared_pages :].tolist())

    def _forget(self, node: str, pages: Iterable[int]) -> tuple[LedgerStep, ...]:
        gone = self.by_node[node].distrust(pages)
        return (LedgerStep(node, Evict(gone.tobytes())),) if gone.size else ()

    def begin_empty(self, ledgers: Mapping[str, Ledger]) -> tuple[LedgerStep, ...]:
        """Digests are not written down, so a coordinator that restarts frees what was cached."""
        cached = {node: ledger.cached_pages() for node, ledger in ledgers.items()}
        return tuple(LedgerStep(node, Evict(pages.tobytes())) for node, pages in cached.items() if pages.size)
