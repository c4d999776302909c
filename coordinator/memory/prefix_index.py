"""Index of the cached pages of a node's host pool by their 64 tokens and all tokens before. Pure.

A page is known by a chained digest: a keyed BLAKE2b of its parent's digest and its tokens. The first parent is a
*root*, which stands for all else that rows depend on, and for the owner who may reuse them. The key is drawn at each
start, so that no client can search for two prompts with one digest. Digests are neither written down nor sent.

The nodes are a tree over digests. A node's use is the latest use of any chain through it: uses are noted at the end of
the chain that was used, and pass to the parent when a leaf goes. So an owner's leaves go in the order of last use
(EvictionOrder says whose), a chain of any length is used in one step, and no node is left that cannot be reached. The
pages in the index are exactly those that the ledger counts as cached; a page may be held by requests besides. Each has
a *source*, the worker epoch that wrote it: when an epoch turns out to be not trustworthy, all that it wrote leaves the
index.

After vLLM's hashed blocks and SGLang's radix cache. Rejected: a radix tree over tokens (it keeps every token, and a
lookup compares them); digests without a key (prompts with equal digests would read each other's rows).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from coordinator.memory.eviction_order import NO_OWNER, EvictionOrder, Leaf, Owner, OwnerAccount
from coordinator.memory.ledger import NO_PAGES
from protocol.arrays import Int32Array
from protocol.errors import InternalError
from protocol.units import PAGE_TOKENS

Digest: TypeAlias = bytes
DIGEST_BYTES: Final = 16
KEY_BYTES: Final = 32

#: For int32 pages [n]: bool [n], whether only the cache holds each.
IsIdle: TypeAlias = Callable[[Int32Array], npt.NDArray[np.bool_]]


def root_of(key: bytes, *parts: str) -> Digest:
    """The digest that chains begin with, of all that rows depend on beside tokens. No two lists of parts are alike."""
    hashed = blake2b(digest_size=DIGEST_BYTES, key=key, person=b"root")
    for part in parts:
        data = part.encode()
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.digest()


@lru_cache(maxsize=8)
def _begun(key: bytes) -> blake2b:
    """A hash that has taken `key` in, to be copied: a third less time than to begin anew for each page."""
    return blake2b(digest_size=DIGEST_BYTES, key=key, person=b"page")


def extend_chain(key: bytes, parent: Digest, tokens: bytes) -> tuple[Digest, ...]:
    """Digests of the full pages of `tokens`, int32, that follow the page of `parent`."""
    size, begin = 4 * PAGE_TOKENS, _begun(key).copy
    digests: list[Digest] = []
    for start in range(0, len(tokens) - size + 1, size):
        hashed = begin()
        hashed.update(parent + tokens[start : start + size])
        parent = hashed.digest()
        digests.append(parent)
    return tuple(digests)


class Scope(NamedTuple):
    """Owner and salt of the prefixes that a root stands for."""

    user: str = ""
    tenant: str = ""
    salt: str = ""

    @property
    def owner(self) -> str:
        """Name of the owner for operators: user and tenant, as far as there are any."""
        return "/".join(filter(None, (self.user, self.tenant)))


NO_SCOPE: Final = Scope()


class Chain(NamedTuple):
    """Digests of the full pages of a prompt, behind the root of `scope`."""

    root: Digest
    digests: tuple[Digest, ...]
    scope: Scope = NO_SCOPE


#: The worker epoch that wrote a page: its worker and its epoch.
Source: TypeAlias = tuple[str, int]
NO_SOURCE: Final[Source] = ("", 0)


@dataclass(slots=True)
class _Node:
    page: int
    parent: Digest
    source: Source
    account: OwnerAccount  # of the owner for whom it counts
    used: int
    root: Digest
    depth: int  # pages from the root to this one
    children: int = 0


class Match(NamedTuple):
    """Cached pages of one node with which a prompt can begin, as of the versions of its index."""

    version: int
    removals: int
    pages: Int32Array


class CachedPrefix(NamedTuple):
    """A cached prefix that none continues. `pages` lead to it; the last `own_pages` of them to no other."""

    digest: Digest
    scope: Scope
    pages: int
    own_pages: int
    last_page: int


class PrefixIndex:
    """The prefixes whose pages one node's pool holds. `on_forget` is called with each digest that leaves. `clock`, in
    seconds, tells which owners are away."""

    def __init__(
        self, on_forget: Callable[[Digest], None] | None = None, clock: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._nodes: dict[Digest, _Node] = {}
        self._pages: dict[Digest, int] = {}
        self._digests: dict[int, Digest] = {}  # by page
        self._order = EvictionOrder(self._is_leaf, clock)
        self._ends: dict[Digest, None] = {}  # nodes without children
        self._scopes: dict[Digest, tuple[Scope, int]] = {}  # by root: with the number of nodes behind it
        self._on_forget = on_forget
        self._suspects: set[int] = set()  # pages that are held, and may not come (back) in
        self._uses = 0
        self.version = 0  # grows whenever a match may change
        self.removals = 0  # grows whenever one may become shorter

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._nodes

    def match(self, chain: Sequence[Digest], limit: int | None = None, known: Int32Array = NO_PAGES) -> Int32Array:
        """Pages of the longest known beginning of `chain`, int32, `limit` of them at most. Changes nothing (I7): see
        `touch`.

        `known`, pages of an earlier match, are here for certain: nothing was removed since.
        """
        page_of = self._pages.get
        found: list[int] = []
        for digest in chain[known.size : limit]:
            page = page_of(digest)
            if page is None:
                break
            found.append(page)
        if not found:
            return known
        fresh = np.fromiter(found, dtype=np.int32, count=len(found))
        return np.concatenate((known, fresh)) if known.size else fresh

    def touch(self, digest: Digest) -> None:
        """A chain that ends here, all of it known, is in use now."""
        self._uses += 1
        node = self._nodes[digest]
        node.used = self._uses
        self._order.use(node.account)
        if not node.children:
            self._order.list_leaf(node.account, (node.used, digest))

    def add(
        self,
        parent: Digest,
        chain: Sequence[Digest],
        pages: Int32Array,
        source: Source = NO_SOURCE,
        scope: Scope = NO_SCOPE,
        owner: Owner = NO_OWNER,
    ) -> Int32Array:
        """`pages`, written by `source`, hold the rows of `chain`, which follows `parent`: the root of `scope`, or a
        digest that is here. Returns those that are new here, to be cached: they count for `owner`.

        A digest that is known already keeps its page and its owner.
        """
        fresh: list[int] = []
        before = self._nodes.get(parent)
        root, first = (before.root, before.depth + 1) if before is not None else (parent, 1)
        account = self._order.account(owner)
        for depth, (digest, page) in enumerate(zip(chain, pages.tolist(), strict=True), start=first):
            if digest not in self._nodes:
                if page in self._digests:
                    raise InternalError(f"host page {page} is cached under two digests")
                self._nodes[digest] = _Node(page, parent, source, account, 0, root, depth)
                self._pages[digest], self._digests[page], self._ends[digest] = page, digest, None
                if (above := self._nodes.get(parent)) is not None:
                    above.children += 1
                    self._ends.pop(parent, None)
                fresh.append(page)
            parent = digest
        self._order.add(account, len(fresh))
        if chain:
            self.touch(chain[-1])
        if fresh:
            self._scopes[root] = scope, len(fresh) + self._scopes.get(root, (scope, 0))[1]
        self.version += bool(fresh)
        return np.array(fresh, dtype=np.int32)

    def evict(self, count: int, is_idle: IsIdle, spared: frozenset[int] = frozenset()) -> Int32Array:
        """Forget pages until `count` idle ones are forgotten, or all that are idle and not `spared`; returns them.

        Leaves go first, in the order of EvictionOrder. An idle page below which others are held goes last, and they are
        forgotten with it, since no chain leads to them any more.
        """
        evicted: list[int] = []

        def forget(digest: Digest) -> int:
            node = self._nodes[digest]
            if not self._may_go(node, is_idle, spared):
                return 0
            evicted.append(node.page)
            self._forget(digest)
            return 1

        self._order.go_through(count, forget)
        if len(evicted) < count:
            evicted += self._evict_above_held(count - len(evicted), is_idle, spared)
        self._note_removed(len(evicted))
        return np.array(evicted, dtype=np.int32)

    @property
    def evicted_lent(self) -> int:
        """The number of pages evicted so far that were above their owner's share."""
        return self._order.pages_lent

    def owners(self) -> dict[Owner, int]:
        """The number of pages that count for each owner."""
        return self._order.counts()

    def _evict_above_held(self, count: int, is_idle: IsIdle, spared: frozenset[int]) -> list[int]:
        """Evict pages of the owners with most pages first. O(index): for what is rare."""
        evicted: list[int] = []
        pages = self._order.counts()
        for _, _, digest in sorted((-pages[node.account.owner], node.used, key) for key, node in self._nodes.items()):
            node = self._nodes.get(digest)
            if node is not None and count > 0 and self._may_go(node, is_idle, spared):
                gone = self._forget_below([digest])
                count -= int(is_idle(np.array(gone, dtype=np.int32)).sum())
                evicted += gone
        return evicted

    def remove(self, pages: Iterable[int]) -> Int32Array:
        """Forget these pages, as far as they are here, and all below them; returns what is forgotten, to be evicted."""
        gone = self._forget_below([self._digests[page] for page in pages if page in self._digests])
        self._note_removed(len(gone))
        return np.array(gone, dtype=np.int32)

    def distrust(self, pages: Iterable[int]) -> Int32Array:
        """`remove`, for rows that may be wrong: what is forgotten does not come back in while it is held."""
        gone = self.remove(pages)
        self._suspects.update(gone.tolist())
        return gone

    def keep_out(self, pages: Iterable[int]) -> None:
        """These, as far as they are not here, may hold wrong rows: they do not come in while they are held."""
        self._suspects.update(page for page in pages if page not in self._digests)

    def given_out(self, pages: Callable[[], Int32Array]) -> None:
        """These were free, and what they held is gone."""
        if self._suspects:
            self._suspects.difference_update(pages().tolist())

    def sound(self, pages: Int32Array) -> int:
        """Count those of a list of pages that come before the first that may hold wrong rows."""
        if not self._suspects:
            return int(pages.size)
        return next((place for place, page in enumerate(pages.tolist()) if page in self._suspects), int(pages.size))

    def written_by(self, source: Source) -> list[int]:
        """The pages of one source. O(index): for the rare source that is not to be trusted."""
        return [node.page for node in self._nodes.values() if node.source == source]

    def clear(self) -> Int32Array:
        """Forget all; returns the pages, which are to be evicted."""
        pages = np.array([*self._digests], dtype=np.int32)
        if self._on_forget is not None:
            for digest in self._nodes:
                self._on_forget(digest)
        for kept in (self._nodes, self._pages, self._digests, self._order, self._ends, self._scopes):
            kept.clear()
        self._note_removed(1)
        return pages

    def leaves(self) -> list[Digest]:
        """Return the digests of the prefixes that none continues."""
        return [*self._ends]

    def depth(self, digest: Digest) -> int:
        """Pages that lead to `digest`; 0: it is not known (any more)."""
        node = self._nodes.get(digest)
        return node.depth if node else 0

    def describe(self, leaf: Digest) -> CachedPrefix | None:
        """None: it is not known, or another continues it. Takes time in proportion to its own pages."""
        node = self._nodes.get(leaf)
        if node is None or node.children:
            return None
        own, parent = 1, self._nodes.get(node.parent)
        while parent is not None and parent.children == 1:
            own, parent = own + 1, self._nodes.get(parent.parent)
        return CachedPrefix(leaf, self._scopes[node.root][0], node.depth, own, node.page)

    def drop(self, leaf: Digest) -> Int32Array:
        """Forget the pages that lead to `leaf` alone; returns them, to be evicted. None when it is no leaf."""
        dropped: list[int] = []
        digest, node = leaf, self._nodes.get(leaf)
        while node is not None and not node.children:
            dropped.append(node.page)
            self._forget(digest)
            digest, node = node.parent, self._nodes.get(node.parent)
        self._note_removed(len(dropped))
        return np.array(dropped, dtype=np.int32)

    def drop_owner(self, owner: str) -> Int32Array:
        """Forget all prefixes of `owner`, as Scope.owner says it; returns their pages, to be evicted. O(index)."""
        roots = {root for root, (scope, _) in self._scopes.items() if scope.owner == owner}
        dropped = [self._pop(digest).page for digest in [*self._nodes] if self._nodes[digest].root in roots]
        self._note_removed(len(dropped))
        return np.array(dropped, dtype=np.int32)

    def check_invariants(self, cached: Int32Array) -> None:
        """Raises InternalError unless the tree is sound, and its pages are `cached`, those of the ledger."""
        children: dict[Digest, int] = dict.fromkeys(self._nodes, 0)
        listed = self._order.lists()
        for digest, node in self._nodes.items():
            if node.parent in children:
                children[node.parent] += 1
            _demand(self._digests.get(node.page) == digest, f"page {node.page} has one digest")
            _demand(self._pages.get(digest) == node.page, f"page {node.page} is the one of its digest")
            can_go = bool(node.children) or (node.account.owner, (node.used, digest)) in listed
            _demand(can_go, f"page {node.page} can be evicted")
        counts = {digest: node.children for digest, node in self._nodes.items()}
        _demand(counts == children, "nodes count their children")
        _demand(set(self._ends) == {it for it, count in children.items() if not count}, "leaves have no children")
        behind = {root: count for root, (_, count) in self._scopes.items()}
        _demand(behind == Counter(node.root for node in self._nodes.values()), "roots count their nodes")
        counted = Counter(node.account.owner for node in self._nodes.values())
        _demand(self._order.counts() == counted, "pages count for their owners")
        _demand(self._order.pages == len(self._nodes), "owners' pages are all pages")
        for node in self._nodes.values():
            above = self._nodes.get(node.parent)
            place = (above.root, above.depth + 1) if above else (node.parent, 1)
            _demand((node.root, node.depth) == place, f"page {node.page} lies behind its root")
        _demand(len(self._digests) == len(self._pages) == len(self._nodes), "each digest has one page")
        _demand(sorted(self._digests) == sorted(cached.tolist()), "indexed pages are the ledger's cached pages")

    def _note_removed(self, pages: int) -> None:
        self.version += bool(pages)
        self.removals += bool(pages)

    def _is_leaf(self, leaf: Leaf) -> bool:
        node = self._nodes.get(leaf[1])
        return node is not None and not node.children and node.used == leaf[0]

    def _may_go(self, node: _Node, is_idle: IsIdle, spared: frozenset[int]) -> bool:
        return node.page not in spared and bool(is_idle(np.array([node.page], dtype=np.int32))[0])

    def _forget(self, digest: Digest) -> None:
        """Remove a leaf, or a node below which none is left."""
        node = self._pop(digest)
        self._note_lost_child(node)

    def _pop(self, digest: Digest) -> _Node:
        node = self._nodes.pop(digest)
        del self._pages[digest], self._digests[node.page]
        self._order.add(node.account, -1)
        self._ends.pop(digest, None)
        scope, count = self._scopes.pop(node.root)
        if count > 1:
            self._scopes[node.root] = scope, count - 1
        if self._on_forget is not None:
            self._on_forget(digest)
        return node

    def _note_lost_child(self, child: _Node) -> None:
        """Its use passes to its parent, if that is here, which may be a leaf now."""
        parent = self._nodes.get(child.parent)
        if parent is not None:
            parent.children -= 1
            parent.used = max(parent.used, child.used)
            if not parent.children:
                self._ends[child.parent] = None
                self._order.list_leaf(parent.account, (parent.used, child.parent))

    def _forget_below(self, tops: Sequence[Digest]) -> list[int]:
        """Remove `tops` and all below them; returns the pages. O(index): for what is rare."""
        below: dict[Digest, list[Digest]] = {}
        for digest, node in self._nodes.items():
            below.setdefault(node.parent, []).append(digest)
        gone, todo = dict.fromkeys(tops), [*tops]
        for digest in todo:
            fresh = [it for it in below.get(digest, ()) if it not in gone]
            gone.update(dict.fromkeys(fresh))
            todo += fresh
        nodes = [self._pop(digest) for digest in gone]
        for node in nodes:
            self._note_lost_child(node)
        return [node.page for node in nodes]


def _demand(condition: bool, what: str) -> None:
    if not condition:
        raise InternalError(f"prefix index invariant broken: {what}")
