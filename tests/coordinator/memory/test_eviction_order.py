"""Whose cached pages go first: shares of owners, against a model that looks at every page for each eviction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from coordinator.memory.eviction_order import LENDS_AFTER_S, Owner
from coordinator.memory.prefix_index import Digest, PrefixIndex, extend_chain, root_of
from protocol.units import PAGE_TOKENS

KEY = b"k" * 32
ANN, BOB, EVE = ("ann", ""), ("bob", ""), ("front", "eve")
everything_idle = np.vectorize(lambda _: True, otypes=[bool])


def chain_of(root: Digest, contents: tuple[int, ...]) -> tuple[Digest, ...]:
    return extend_chain(KEY, root, np.repeat(np.array(contents, dtype=np.int32), PAGE_TOKENS).tobytes())


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Pool:
    """Prompts of owners, each cached in pages of its own."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.index = PrefixIndex(clock=self.clock)
        self.pages = 0

    def cache(self, owner: Owner, *contents: int, root: str = "") -> None:
        start, self.pages = self.pages, self.pages + len(contents)
        chain = self.chain(owner, *contents, root=root)
        pages = np.arange(start, self.pages, dtype=np.int32)
        self.index.add(self.root(owner, root), chain, pages, owner=owner)

    def root(self, owner: Owner, root: str) -> Digest:
        return root_of(KEY, *((root,) if root else owner))

    def chain(self, owner: Owner, *contents: int, root: str = "") -> tuple[Digest, ...]:
        return chain_of(self.root(owner, root), contents)

    def found(self, owner: Owner, *contents: int, root: str = "") -> int:
        return int(self.index.match(self.chain(owner, *contents, root=root)).size)

    def evict(self, count: int) -> None:
        assert self.index.evict(count, everything_idle).size == count


def test_flood_of_one_owner_takes_nothing_from_another() -> None:
    pool = Pool()
    pool.cache(ANN, 1, 2, 3, 4)
    for number in range(10, 1_000):
        pool.cache(EVE, number, number + 1, number + 2)
        if len(pool.index) > 30:
            pool.evict(3)
    assert pool.found(ANN, 1, 2, 3, 4) == 4
    assert pool.index.owners() == {ANN: 4, EVE: 24}
    assert pool.index.evicted_lent == 3 * 990 - 24, "all that were evicted were above their owner's share"


def test_what_one_owner_does_not_use_of_its_share_is_lent() -> None:
    pool = Pool()
    for number in range(8):
        pool.cache(EVE, number)
    pool.cache(ANN, 1)
    pool.evict(2)
    assert pool.index.owners() == {EVE: 6, ANN: 1}, "most of the pool, while no other owner asks for it"
    for number in range(2, 8):
        pool.cache(ANN, number)
    pool.evict(3)
    assert pool.index.owners() == {EVE: 5, ANN: 5}
    assert pool.found(ANN, 1) == 0, "the one that ann used longest ago"
    assert pool.found(ANN, 7) == 1


def test_evictions_of_an_only_owner_are_its_own() -> None:
    pool = Pool()
    pool.cache(ANN, *range(9))
    pool.evict(4)
    assert pool.index.evicted_lent == 0
    assert pool.found(ANN, *range(9)) == 5


def test_owner_who_is_away_lends_all_and_has_its_share_again_once_back() -> None:
    pool = Pool()
    pool.cache(ANN, 1, 2)
    pool.clock.now = LENDS_AFTER_S + 1
    pool.cache(EVE, 1, 2, 3, 4)
    pool.evict(1)
    assert pool.index.owners() == {ANN: 1, EVE: 4}
    pool.index.touch(pool.chain(ANN, 1)[-1])
    pool.evict(2)
    assert pool.index.owners() == {ANN: 1, EVE: 2}


def test_shared_page_counts_for_its_first_owner_and_goes_after_what_follows_it() -> None:
    pool = Pool()
    pool.cache(EVE, 1, 2, 3, root="all")
    pool.cache(ANN, 1, 2, 3, 4, root="all")
    assert pool.index.owners() == {EVE: 3, ANN: 1}
    pool.cache(EVE, 7, root="all")
    pool.evict(1)
    assert pool.index.owners() == {EVE: 3, ANN: 1}, "of the owner with most pages the one that may go"
    pool.evict(2)
    assert pool.index.owners() == {EVE: 2}, "then the page behind those, and the last of those"


def test_held_pages_are_passed_over_at_the_cost_of_the_next_owner() -> None:
    pool = Pool()
    pool.cache(EVE, 1, 2, 3)
    pool.cache(ANN, 1)
    is_idle = np.vectorize(lambda page: page == 3, otypes=[bool])
    assert pool.index.evict(2, is_idle).tolist() == [3]
    pool.index.check_invariants(np.arange(3, dtype=np.int32))
    assert pool.index.evict(1, everything_idle).tolist() == [2], "the last of those that were held can go"


def test_heaps_stay_as_small_as_the_cache() -> None:
    pool = Pool()
    for number in range(3_000):
        pool.cache((f"user{number % 50}", ""), number)
        pool.index.touch(pool.chain((f"user{number % 50}", ""), number)[-1])
        if number >= 100:
            pool.evict(1)
    order = pool.index._order
    assert len(order._ranking) <= 4 * 50 + 65
    assert sum(len(account.leaves) for account in order._accounts.values()) <= 50 * (4 * 2 + 65)


@dataclass
class Cached:
    """One page as the model knows it."""

    page: int
    owner: Owner
    used: int = 0


class OrderMachine(RuleBasedStateMachine):
    """The model: pages by root and contents. `used` is the latest use of any chain through a page that is there or was.
    It looks at all pages to find the next."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.index = PrefixIndex(clock=self.clock)
        self.known: dict[tuple[object, ...], Cached] = {}
        self.present: dict[Owner, float] = {}
        self.uses = 0
        self.next_page = 0
        self.held: set[int] = set()
        self.lent = 0

    def use(self, path: tuple[object, ...]) -> None:
        self.uses += 1
        self.known[path].used = self.uses
        self.present[self.known[path].owner] = self.clock.now

    @rule(
        owner=st.sampled_from((ANN, BOB, EVE)),
        contents=st.lists(st.integers(0, 2), min_size=1, max_size=4),
        is_shared=st.booleans(),
    )
    def add(self, owner: Owner, contents: list[int], is_shared: bool) -> None:
        root = ("all",) if is_shared else owner
        pages = range(self.next_page, self.next_page + len(contents))
        self.next_page += len(contents)
        chain = chain_of(root_of(KEY, *root), tuple(contents))
        self.index.add(root_of(KEY, *root), chain, np.array(pages, dtype=np.int32), owner=owner)
        for count, page in enumerate(pages, start=1):
            self.known.setdefault((root, *contents[:count]), Cached(page, owner))
        self.use((root, *contents))

    @rule(place=st.integers(0, 20))
    def touch(self, place: int) -> None:
        if place < len(self.known):
            path = sorted(self.known, key=str)[place]
            root, *contents = path
            assert isinstance(root, tuple)
            self.index.touch(chain_of(root_of(KEY, *root), tuple(contents))[-1])  # type: ignore[arg-type]
            self.use(path)

    @rule(pages=st.sets(st.integers(0, 40)))
    def hold(self, pages: set[int]) -> None:
        self.held = pages

    @rule(seconds=st.sampled_from((1.0, LENDS_AFTER_S / 2, LENDS_AFTER_S + 1)))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        gone = self.index.evict(count, lambda pages: np.array([page not in self.held for page in pages.tolist()]))
        for number, page in enumerate(gone.tolist()):
            best = self.best() if number < count else []
            if not best:
                assert not self.candidates(), "no more than were asked for, but for pages with others behind them"
                self.known = {
                    path: cached for path, cached in self.known.items() if cached.page not in set(gone.tolist())
                }
                break
            assert page in best
            self.forget(next(path for path, cached in self.known.items() if cached.page == page))
        assert len(gone) >= count or not any(cached.page not in self.held for cached in self.known.values())

    def candidates(self) -> list[tuple[object, ...]]:
        inner = {path[:-1] for path in self.known}
        return [path for path, cached in self.known.items() if path not in inner and cached.page not in self.held]

    def best(self) -> list[int]:
        """Pages of which one goes next: of each owner that may come next its least recently used one."""
        found: dict[Owner, Cached] = {}
        for cached in sorted((self.known[path] for path in self.candidates()), key=lambda cached: -cached.used):
            found[cached.owner] = cached
        first = max(map(self.claim, found), default=None)
        return [cached.page for owner, cached in found.items() if self.claim(owner) == first]

    def claim(self, owner: Owner) -> tuple[bool, int]:
        is_away = self.present[owner] < self.clock.now - LENDS_AFTER_S
        return is_away, sum(cached.owner == owner for cached in self.known.values())

    def forget(self, path: tuple[object, ...]) -> None:
        gone = self.known[path]
        is_away, pages = self.claim(gone.owner)
        self.lent += is_away or pages * len({cached.owner for cached in self.known.values()}) > len(self.known)
        del self.known[path]
        if (above := self.known.get(path[:-1])) is not None:
            above.used = max(above.used, gone.used)

    @invariant()
    def counts_what_each_owner_has(self) -> None:
        self.index.check_invariants(np.array([cached.page for cached in self.known.values()], dtype=np.int32))
        assert self.index.owners() == {
            owner: sum(cached.owner == owner for cached in self.known.values())
            for owner in {cached.owner for cached in self.known.values()}
        }
        assert self.index.evicted_lent == self.lent


TestOrderMachine = OrderMachine.TestCase


@pytest.mark.parametrize("owners", [1, 1_000])
def test_an_eviction_looks_at_few_pages(owners: int) -> None:
    """However many owners and pages there are."""
    pool = Pool()
    for number in range(4_000):
        pool.cache((f"user{number % owners}", ""), number)
    looked = [0]

    def is_idle(pages: np.ndarray) -> np.ndarray:
        looked[0] += len(pages)
        return np.ones(len(pages), dtype=bool)

    assert pool.index.evict(100, is_idle).size == 100
    assert looked == [100]
