"""Which prompts may begin with cached pages, and which pages of a request may be cached. Pure.

    off    nothing is reused
    own    a request reuses what requests of its owner have computed: the same user, and the same tenant of that user
    all    any request reuses what any has computed

Within that, only requests of one `cache_salt` reuse each other's pages.

In deterministic mode (ModelInfo.prefix_unit_tokens is the size of prompt chunks) only whole chunks of prompts are
reused, and nothing that decode steps have written, so that outputs are the same bits with and without reuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final

import numpy as np

from coordinator.memory.changes import Cache, Evict
from coordinator.memory.ledger import NO_PAGES, Ledger
from coordinator.memory.prefix_index import Digest, PrefixIndex, Scope, extend_chain, root_of
from coordinator.scheduling.effects import LedgerStep
from coordinator.scheduling.entries import RequestEntry
from coordinator.scheduling.kv_events import KvEvents
from protocol.arrays import Int32Array
from protocol.messages import ModelInfo
from protocol.units import PAGE_TOKENS

#: Digests computed before other tasks get a turn: about half a millisecond.
DIGESTS_AT_ONCE: Final = 384

OFF: Final = "off"
OWN: Final = "own"
ALL: Final = "all"


@dataclass(slots=True)
class PrefixStats:
    """Of one node, since the coordinator's start. `asked_tokens`: of prompts that were admitted to be prefilled."""

    asked_tokens: int = 0
    reused_tokens: int = 0
    evicted_pages: int = 0


@dataclass(slots=True)
class PrefixReuse:
    """The indexes of all nodes, and the rule. `key` is drawn at each start. `unit_tokens` and
    `with_generated` are those of the served model. `events`, if any, hears what is cached and forgotten."""

    mode: str
    key: bytes = b""
    events: KvEvents | None = None
    stats: dict[str, PrefixStats] = field(default_factory=dict)
    by_node: dict[str, PrefixIndex] = field(default_factory=dict)
    unit_tokens: int = PAGE_TOKENS
    with_generated: bool = True

    @property
    def is_on(self) -> bool:
        return self.mode != OFF

    def open(self, node: str) -> PrefixIndex:
        """The index of a pool with nothing cached in it."""
        if self.events is not None and node in self.by_node:
            self.by_node[node].clear()
        self.by_node[node] = PrefixIndex(partial(self._forgotten, node) if self.events is not None else None)
        self.stats.setdefault(node, PrefixStats())
        return self.by_node[node]

    def _forgotten(self, node: str, digest: Digest) -> None:
        if self.events is not None and not self._is_elsewhere(node, digest):
            self.events.removed(digest)

    def _is_elsewhere(self, node: str, digest: Digest) -> bool:
        return any(digest in index for name, index in self.by_node.items() if name != node)

    def serve(self, model: ModelInfo) -> None:
        self.unit_tokens, self.with_generated = model.prefix_unit_tokens, model.reuses_generated

    def scope(self, user: str, tenant: str, salt: str) -> Scope:
        return Scope(salt=salt) if self.mode == ALL else Scope(user, tenant, salt)

    def root(self, model: ModelInfo, scope: Scope) -> Digest:
        return root_of(self.key, model.fingerprint, *scope)

    def digests(self, root: Digest, tokens: bytes) -> Iterator[tuple[Digest, ...]]:
        """Digests of the full pages of `tokens`, a few at a time."""
        chain = extend_chain(self.key, root, tokens)
        while part := tuple(islice(chain, DIGESTS_AT_ONCE)):
            yield part

    def match(self, entry: RequestEntry, node: str) -> Int32Array:
        """Cached pages with which its prompt can begin on `node`; its last token is computed in any case."""
        index = self.by_node.get(node)
        if index is None or entry.chain is None:
            return NO_PAGES
        unit = self.unit_tokens // PAGE_TOKENS
        last = (entry.facts.prompt_tokens - 1) // PAGE_TOKENS
        pages = index.match(entry.chain.digests[:last])
        return pages[: pages.size // unit * unit]

    def version(self, node: str) -> int:
        return self.by_node[node].version if node in self.by_node else 0

    def use(self, entry: RequestEntry, node: str, pages: int) -> None:
        """It was admitted to be prefilled, with so many cached pages."""
        if not self.is_on:
            return
        self.stats[node].asked_tokens += entry.facts.prompt_tokens
        if pages and entry.chain is not None:
            self.stats[node].reused_tokens += pages * PAGE_TOKENS
            self.by_node[node].touch(entry.chain.digests[:pages])

    def keep_prompt(self, entry: RequestEntry, ledger: Ledger) -> tuple[LedgerStep, ...]:
        """All rows of its prompt are durable: cache its full pages, as far as they are not known."""
        return self._keep(entry, ledger, entry.facts.prompt_tokens // PAGE_TOKENS, lambda: b"")

    def keep_rows(
        self, entry: RequestEntry, ledger: Ledger, durable_tokens: int, generated: int, tokens: Callable[[], bytes]
    ) -> tuple[LedgerStep, ...]:
        """It is about to leave: cache the full pages of its `durable_tokens` rows. `tokens`: prompt and output.

        The newest generated token has no row; rows behind it are those of tokens that were discarded.
        """
        prompt = entry.facts.prompt_tokens
        rows = min(durable_tokens, prompt + max(0, generated - 1) if self.with_generated else prompt)
        return self._keep(entry, ledger, rows // PAGE_TOKENS, tokens)

    def _keep(
        self, entry: RequestEntry, ledger: Ledger, pages: int, tokens: Callable[[], bytes]
    ) -> tuple[LedgerStep, ...]:
        index, chain = self.by_node.get(entry.node), entry.chain
        if index is None or chain is None:
            return ()
        unit = self.unit_tokens // PAGE_TOKENS
        pages = pages // unit * unit
        digests = chain.digests[:pages]
        if pages > len(digests):
            rest = tokens()[len(digests) * PAGE_TOKENS * 4 : pages * PAGE_TOKENS * 4]
            digests += tuple(extend_chain(self.key, digests[-1] if digests else chain.root, rest))
        held = ledger.pages_of(entry.placement)[: len(digests)]
        fresh = index.add(chain.root, digests, held, chain.scope)
        if self.events is not None and fresh.size:
            is_news = np.isin(held, fresh)
            for place in np.flatnonzero(is_news).tolist():
                is_news[place] = not self._is_elsewhere(entry.node, digests[place])
            self.events.stored(chain, digests, is_news, entry.request_index)
        return (LedgerStep(entry.node, Cache(fresh.tobytes())),) if fresh.size else ()

    def drop(self, prefixes: Iterable[Digest]) -> dict[str, Int32Array]:
        """Forget the pages that lead to these prefixes alone; returns them by node, to be evicted."""
        wanted = tuple(prefixes)
        dropped = {
            node: np.concatenate([NO_PAGES, *(index.drop(it) for it in wanted)]) for node, index in self.by_node.items()
        }
        return {node: pages for node, pages in dropped.items() if pages.size}

    def drop_owner(self, owner: str) -> dict[str, Int32Array]:
        """Forget all prefixes of `owner`, as Scope.owner says it."""
        dropped = {node: index.drop_owner(owner) for node, index in self.by_node.items()}
        return {node: pages for node, pages in dropped.items() if pages.size}

    def clear(self) -> dict[str, Int32Array]:
        """Forget all prefixes; returns the pages by node, to be evicted."""
        events, self.events = self.events, None  # one event for all of them
        dropped = {node: index.clear() for node, index in self.by_node.items()}
        self.events = events
        if events is not None:
            events.cleared()
        return {node: pages for node, pages in dropped.items() if pages.size}

    def begin_empty(self, ledgers: Mapping[str, Ledger]) -> tuple[LedgerStep, ...]:
        """Digests are not written down, so a coordinator that restarts frees what was cached."""
        cached = {node: ledger.cached_pages() for node, ledger in ledgers.items()}
        return tuple(LedgerStep(node, Evict(pages.tobytes())) for node, pages in cached.items() if pages.size)
