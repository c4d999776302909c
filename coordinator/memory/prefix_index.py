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

from collections import OrderedDict
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


class Chain(NamedTuple):
    """Digests of the full pages of a prompt, behind a root."""

    root: Digest
    digests: tuple[Digest, ...]


@dataclass(slots=True)
class _Node:
    page: int
    parent: Digest
    children: int = 0


class PrefixIndex:
    """Of one node's pool."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[Digest, _Node] = OrderedDict()  # least recently used first
        self._digests: dict[int, Digest] = {}  # by page
        self.version = 0  # grows whenever a match may change

    def __len__(self) -> int:
        return len(self._nodes)

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

    def add(self, root: Digest, chain: Sequence[Digest], pages: Int32Array) -> Int32Array:
        """`pages` hold the rows of `chain`, which follows `root`. Returns those that are new here, to be cached.

        A digest that is known already keeps its page.
        """
        fresh: list[int] = []
        parent = root
        for digest, page in zip(chain, pages.tolist(), strict=True):
            if digest not in self._nodes:
                if page in self._digests:
                    raise InternalError(f"host page {page} is cached under two digests")
                self._nodes[digest] = _Node(page, parent)
                self._digests[page] = digest
                if parent in self._nodes:
                    self._nodes[parent].children += 1
                fresh.append(page)
            parent = digest
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
        self._nodes.clear()
        self._digests.clear()
        self.version += 1
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
        _demand(len(self._digests) == len(self._nodes), "each digest has one page")
        _demand(sorted(self._digests) == sorted(cached.tolist()), "indexed pages are the ledger's cached pages")

    def _may_go(self, node: _Node, is_idle: IsIdle, spared: frozenset[int]) -> bool:
        return node.page not in spared and bool(is_idle(np.array([node.page], dtype=np.int32))[0])

    def _forget(self, digest: Digest) -> _Node | None:
        """Remove a node; returns its parent's, if that is here."""
        node = self._nodes.pop(digest)
        del self._digests[node.page]
        parent = self._nodes.get(node.parent)
        if parent is not None:
            parent.children -= 1
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
