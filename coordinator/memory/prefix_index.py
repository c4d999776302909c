"""Which cached page of a node's host pool holds the rows of which 64 tokens behind which others. Pure.

A page is known by a chained digest: a keyed BLAKE2b of its parent's digest and its tokens. The first parent is a
*root*, which stands for all else that rows depend on, and for the owner who may reuse them. The key is drawn at each
start, so that no client can search for two prompts with one digest. Digests are neither written down nor sent.

The nodes are a tree over digests. They lie in the order of last use, and an ancestor is always used with its
descendants. So the eldest node is a leaf, and evicting eldest first never leaves a node that cannot be reached.
The pages in the index are exactly those that the ledger counts as cached; a page may be held by requests besides.

After vLLM's hashed blocks and SGLang's radix cache. Rejected: a radix tree over tokens (it keeps every token, and a
lookup compares them); digests without a key (prompts with equal digests would read each other's rows).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from protocol.arrays import Int32Array
from protocol.errors import InternalError
from protocol.units import PAGE_TOKENS

Digest: TypeAlias = bytes
DIGEST_BYTES: Final = 16
KEY_BYTES: Final = 32

NO_PAGES: Final[Int32Array] = np.zeros(0, dtype=np.int32)

#: For int32 pages [n]: bool [n], whether only the cache holds each.
IsIdle: TypeAlias = Callable[[Int32Array], npt.NDArray[np.bool_]]


def root_of(key: bytes, *parts: str) -> Digest:
    """The digest that chains begin with, of all that rows depend on beside tokens. No two lists of parts are alike."""
    hashed = blake2b(digest_size=DIGEST_BYTES, key=key, person=b"root")
    for part in parts:
        data = part.encode()
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.digest()


def extend_chain(key: bytes, parent: Digest, tokens: bytes) -> Iterator[Digest]:
    """Digests of the full pages of `tokens`, int32, that follow the page of `parent`."""
    size = 4 * PAGE_TOKENS
    for start in range(0, len(tokens) - size + 1, size):
        data = parent + tokens[start : start + size]
        parent = blake2b(data, digest_size=DIGEST_BYTES, key=key, person=b"page").digest()
        yield parent


class Scope(NamedTuple):
    """Whose prefixes a root stands for, and with which salt."""

    user: str = ""
    tenant: str = ""
    salt: str = ""

    @property
    def owner(self) -> str:
        """For operators: user and tenant, as far as there are any."""
        return "/".join(filter(None, (self.user, self.tenant)))


NO_SCOPE: Final = Scope()


class Chain(NamedTuple):
    """Digests of the full pages of a prompt, behind the root of `scope`."""

    root: Digest
    digests: tuple[Digest, ...]
    scope: Scope = NO_SCOPE


@dataclass(slots=True)
class _Node:
    page: int
    parent: Digest
    root: Digest
    depth: int  # pages from the root to this one
    children: int = 0


class CachedPrefix(NamedTuple):
    """A cached prefix that none continues. `pages` lead to it; the last `own_pages` of them to no other."""

    digest: Digest
    scope: Scope
    pages: int
    own_pages: int
    last_page: int


class PrefixIndex:
    """Of one node's pool. `on_forget` is called with each digest that leaves."""

    def __init__(self, on_forget: Callable[[Digest], None] | None = None) -> None:
        self._nodes: OrderedDict[Digest, _Node] = OrderedDict()  # least recently used first
        self._digests: dict[int, Digest] = {}  # by page
        self._leaves: dict[Digest, None] = {}
        self._scopes: dict[Digest, tuple[Scope, int]] = {}  # by root: with the number of nodes behind it
        self._on_forget = on_forget
        self.version = 0  # grows whenever a match may change

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._nodes

    def match(self, chain: Sequence[Digest]) -> Int32Array:
        """Pages of the longest known beginning of `chain`, int32. Changes nothing (I7): see `touch`."""
        pages: list[int] = []
        for digest in chain:
            node = self._nodes.get(digest)
            if node is None:
                break
            pages.append(node.page)
        return np.array(pages, dtype=np.int32)

    def touch(self, chain: Sequence[Digest]) -> None:
        """These are in use now: a beginning of a chain, all known."""
        for digest in reversed(chain):
            self._nodes.move_to_end(digest)

    def add(self, root: Digest, chain: Sequence[Digest], pages: Int32Array, scope: Scope = NO_SCOPE) -> Int32Array:
        """`pages` hold the rows of `chain`, which follows the root of `scope`. Returns those that are new here, to be
        cached.

        A digest that is known already keeps its page.
        """
        fresh: list[int] = []
        parent = root
        for depth, (digest, page) in enumerate(zip(chain, pages.tolist(), strict=True), start=1):
            if digest not in self._nodes:
                if page in self._digests:
                    raise InternalError(f"host page {page} is cached under two digests")
                self._nodes[digest] = _Node(page, parent, root, depth)
                self._digests[page] = digest
                self._leaves[digest] = None
                if parent in self._nodes:
                    self._nodes[parent].children += 1
                    self._leaves.pop(parent, None)
                fresh.append(page)
            parent = digest
        if fresh:
            self._scopes[root] = scope, len(fresh) + self._scopes.get(root, (scope, 0))[1]
        self.touch(chain)
        self.version += bool(fresh)
        return np.array(fresh, dtype=np.int32)

    def evict(self, count: int, is_idle: IsIdle, spared: frozenset[int] = frozenset()) -> Int32Array:
        """Forget pages until `count` idle ones are forgotten, or all that are idle and not `spared`; returns them.

        Leaves go first, the least recently used first. An idle page below which others are held goes last, and they
        are forgotten with it, since no chain leads to them any more.
        """
        evicted: list[int] = []
        window = 4 * count
        while len(evicted) < count:
            for eldest in [*islice(self._nodes, window)]:
                digest, node = eldest, self._nodes.get(eldest)
                while (
                    len(evicted) < count
                    and node is not None
                    and not node.children
                    and self._may_go(node, is_idle, spared)
                ):
                    evicted.append(node.page)
                    digest, node = node.parent, self._forget(digest)
            if window >= len(self._nodes):
                break
            window *= 4
        if len(evicted) < count:
            evicted += self._evict_above_held(count - len(evicted), is_idle, spared)
        self.version += bool(evicted)
        return np.array(evicted, dtype=np.int32)

    def _evict_above_held(self, count: int, is_idle: IsIdle, spared: frozenset[int]) -> list[int]:
        evicted: list[int] = []
        for digest in [*self._nodes]:
            node = self._nodes.get(digest)
            if node is not None and count > 0 and self._may_go(node, is_idle, spared):
                below = self._subtree(digest)
                pages = np.array([self._nodes[it].page for it in below], dtype=np.int32)
                count -= int(is_idle(pages).sum())
                for it in reversed(below):
                    self._forget(it)
                evicted += pages.tolist()
        return evicted

    def clear(self) -> Int32Array:
        """Forget all; returns the pages, which are to be evicted."""
        pages = np.array([*self._digests], dtype=np.int32)
        if self._on_forget is not None:
            for digest in self._nodes:
                self._on_forget(digest)
        for each in (self._nodes, self._digests, self._leaves, self._scopes):
            each.clear()
        self.version += 1
        return pages

    def leaves(self) -> list[Digest]:
        """Of the prefixes that none continues."""
        return [*self._leaves]

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
        node: _Node | None = self._nodes.get(leaf)
        dropped: list[int] = []
        digest = leaf
        while node is not None and not node.children:
            dropped.append(node.page)
            digest, node = node.parent, self._forget(digest)
        self.version += bool(dropped)
        return np.array(dropped, dtype=np.int32)

    def drop_owner(self, owner: str) -> Int32Array:
        """Forget all prefixes of `owner`; returns their pages, to be evicted. O(index)."""
        roots = {root for root, (scope, _) in self._scopes.items() if scope.owner == owner}
        dropped = [digest for digest, node in self._nodes.items() if node.root in roots]
        pages = np.array([self._nodes[digest].page for digest in dropped], dtype=np.int32)
        for digest in dropped:
            self._forget(digest)
        self.version += bool(dropped)
        return pages

    def check_invariants(self, cached: Int32Array) -> None:
        """Raises InternalError unless the tree is sound, and its pages are `cached`, those of the ledger."""
        children: dict[Digest, int] = dict.fromkeys(self._nodes, 0)
        seen: set[Digest] = set()
        for digest, node in self._nodes.items():
            if node.parent in children:
                children[node.parent] += 1
                _demand(node.parent not in seen, f"page {node.page} was used after its ancestor")
            seen.add(digest)
            _demand(self._digests.get(node.page) == digest, f"page {node.page} has one digest")
        counts = {digest: node.children for digest, node in self._nodes.items()}
        _demand(counts == children, "nodes count their children")
        _demand(
            set(self._leaves) == {digest for digest, count in children.items() if not count}, "leaves have no children"
        )
        _demand(
            {root: count for root, (_, count) in self._scopes.items()}
            == Counter(node.root for node in self._nodes.values()),
            "roots count their nodes",
        )
        for node in self._nodes.values():
            above = self._nodes.get(node.parent)
            depth, root = (above.depth, above.root) if above else (0, node.parent)
            _demand((node.depth, node.root) == (depth + 1, root), f"page {node.page} lies behind its root")
        _demand(len(self._digests) == len(self._nodes), "each digest has one page")
        _demand(sorted(self._digests) == sorted(cached.tolist()), "indexed pages are the ledger's cached pages")

    def _may_go(self, node: _Node, is_idle: IsIdle, spared: frozenset[int]) -> bool:
        return node.page not in spared and bool(is_idle(np.array([node.page], dtype=np.int32))[0])

    def _forget(self, digest: Digest) -> _Node | None:
        """Remove a node; returns its parent's, if that is here."""
        node = self._nodes.pop(digest)
        del self._digests[node.page]
        self._leaves.pop(digest, None)
        scope, count = self._scopes.pop(node.root)
        if count > 1:
            self._scopes[node.root] = scope, count - 1
        if self._on_forget is not None:
            self._on_forget(digest)
        parent = self._nodes.get(node.parent)
        if parent is not None:
            parent.children -= 1
            if not parent.children:
                self._leaves[node.parent] = None
        return parent

    def _subtree(self, top: Digest) -> list[Digest]:
        """`top` and all below it, each behind its parent. O(index): for the rare page below which others are held."""
        below: dict[Digest, list[Digest]] = {}
        for digest, node in self._nodes.items():
            below.setdefault(node.parent, []).append(digest)
        order = [top]
        for digest in order:
            order.extend(below.get(digest, ()))
        return order


def _demand(condition: bool, what: str) -> None:
    if not condition:
        raise InternalError(f"prefix index invariant broken: {what}")
