"""The prefix index against a model that keeps every cached page with the tokens before it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from coordinator.memory.eviction_order import NO_OWNER
from coordinator.memory.prefix_index import PrefixIndex, Scope, extend_chain, root_of
from protocol.errors import InternalError
from protocol.units import PAGE_TOKENS

KEY = b"k" * 32
ROOT = root_of(KEY, "model", "owner")


def tokens_of(*pages: int) -> bytes:
    """Prompt of full pages; page i has PAGE_TOKENS times its number."""
    return np.repeat(np.array(pages, dtype=np.int32), PAGE_TOKENS).tobytes()


def chain_of(*pages: int, root: bytes = ROOT) -> tuple[bytes, ...]:
    return extend_chain(KEY, root, tokens_of(*pages))


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int32)


def test_digest_of_a_page_depends_on_all_before_it() -> None:
    assert chain_of(1, 2)[1] != chain_of(3, 2)[1]
    assert chain_of(1, 2)[:1] == chain_of(1)
    assert len(set(chain_of(1, 1, 1))) == 3


@pytest.mark.parametrize(
    "other",
    [
        root_of(KEY, "model", "another"),
        root_of(KEY, "another", "owner"),
        root_of(b"K" * 32, "model", "owner"),
        root_of(KEY, "mode", "lowner"),
        root_of(KEY, "model", "owner", ""),
    ],
)
def test_roots_of_other_owners_models_keys_and_salts_differ(other: bytes) -> None:
    assert other != ROOT
    assert not set(chain_of(1, 2)) & set(chain_of(1, 2, root=other))


def test_partial_pages_have_no_digest() -> None:
    assert len(extend_chain(KEY, ROOT, tokens_of(1) + tokens_of(2)[:-4])) == 1


def test_longest_known_beginning_is_matched() -> None:
    index = PrefixIndex()
    assert index.add(ROOT, chain_of(1, 2, 3), ids(10, 11, 12)).tolist() == [10, 11, 12]
    assert index.add(ROOT, chain_of(1, 2, 4), ids(20, 21, 22)).tolist() == [22]
    assert index.match(chain_of(1, 2, 4, 5)).tolist() == [10, 11, 22]
    assert index.match(chain_of(2)).size == 0
    index.check_invariants(ids(10, 11, 12, 22))


def test_a_page_cannot_hold_two_prefixes() -> None:
    index = PrefixIndex()
    index.add(ROOT, chain_of(1), ids(10))
    with pytest.raises(InternalError, match="two digests"):
        index.add(ROOT, chain_of(2), ids(10))


def test_least_recently_used_leaves_go_first() -> None:
    index = PrefixIndex()
    index.add(ROOT, chain_of(1, 2, 3), ids(10, 11, 12))
    index.add(ROOT, chain_of(1, 4), ids(10, 13))
    index.touch(chain_of(1, 2)[-1])
    everything_idle = np.vectorize(lambda _: True)
    assert [index.evict(1, everything_idle).tolist() for _ in range(4)] == [[12], [13], [11], [10]]


def test_held_and_spared_pages_stay_while_others_suffice() -> None:
    index = PrefixIndex()
    index.add(ROOT, chain_of(1, 2), ids(10, 11))
    index.add(ROOT, chain_of(3, 4), ids(12, 13))
    index.add(ROOT, chain_of(5), ids(14))
    is_idle = np.vectorize(lambda page: page not in (12, 13), otypes=[bool])
    assert index.evict(9, is_idle, frozenset({14})).tolist() == [11, 10]
    assert index.evict(9, is_idle).tolist() == [14], "what stayed may go later"
    index.check_invariants(ids(12, 13))


def test_what_an_epoch_wrote_leaves_with_all_that_follows_it() -> None:
    index = PrefixIndex()
    index.add(ROOT, chain_of(1, 2), ids(10, 11), ("w0", 1))
    index.add(chain_of(1, 2)[-1], chain_of(1, 2, 3)[2:], ids(12), ("w1", 1))
    index.add(ROOT, chain_of(4), ids(13), ("w1", 1))
    assert sorted(index.remove(index.written_by(("w0", 1))).tolist()) == [10, 11, 12]
    assert index.match(chain_of(1, 2, 3)).size == 0
    assert index.match(chain_of(4)).tolist() == [13]
    index.check_invariants(ids(13))


def test_a_chain_of_any_length_is_matched_and_used_in_few_steps() -> None:
    """A prompt of a million tokens."""
    index, pages = PrefixIndex(), 16_384
    chain = tuple(place.to_bytes(16, "little") for place in range(pages))
    index.add(ROOT, chain, np.arange(pages, dtype=np.int32))
    leaves = index._order.account(NO_OWNER).leaves
    entries = len(leaves)
    assert index.match(chain).size == pages
    assert index.match((*chain[:100], b"other")).size == 100
    assert index.match(chain, known=index.match(chain[:5])).tolist() == index.match(chain).tolist()
    index.touch(chain[-1])
    assert len(leaves) == entries + 1
    index.check_invariants(np.arange(pages, dtype=np.int32))


def test_an_idle_page_below_which_others_are_held_goes_last_and_with_them() -> None:
    """A request that computed a known page again holds its own copy, and the pages behind it are indexed."""
    index = PrefixIndex()
    index.add(ROOT, chain_of(1, 2), ids(10, 11))
    index.add(ROOT, chain_of(3), ids(12))
    is_idle = np.vectorize(lambda page: page != 11, otypes=[bool])
    assert index.evict(1, is_idle).tolist() == [12]
    assert sorted(index.evict(1, is_idle).tolist()) == [10, 11]
    assert index.match(chain_of(1, 2)).size == 0
    index.check_invariants(ids())


def test_leaves_are_described_with_their_scope_and_own_pages() -> None:
    index, salted = PrefixIndex(), root_of(KEY, "model", "owner", "salt")
    index.add(ROOT, chain_of(1, 2, 3), ids(10, 11, 12), scope=Scope("user", "shop"))
    index.add(ROOT, chain_of(1, 4), ids(10, 13), scope=Scope("user", "shop"))
    index.add(salted, chain_of(1, root=salted), ids(14), scope=Scope(salt="s"))
    described = [index.describe(it) for it in index.leaves()]
    assert [it and (it.scope.owner, it.scope.salt, it.pages, it.own_pages, it.last_page) for it in described] == [
        ("user/shop", "", 3, 2, 12),
        ("user/shop", "", 2, 1, 13),
        ("", "s", 1, 1, 14),
    ]
    assert index.describe(chain_of(1)[0]) is None
    assert [index.depth(it) for it in (*chain_of(1, 2, 3), b"unknown")] == [1, 2, 3, 0]


def test_dropped_prefix_takes_no_page_of_another() -> None:
    forgotten: list[bytes] = []
    index = PrefixIndex(forgotten.append)
    index.add(ROOT, chain_of(1, 2, 3), ids(10, 11, 12))
    index.add(ROOT, chain_of(1, 4), ids(10, 13))
    version = index.version
    assert index.drop(chain_of(1)[0]).size == 0, "others continue it"
    assert index.version == version
    assert index.drop(chain_of(1, 2, 3)[2]).tolist() == [12, 11]
    assert index.drop(chain_of(1, 2, 3)[2]).size == 0
    assert index.version > version
    assert forgotten == [*reversed(chain_of(1, 2, 3)[1:])]
    index.check_invariants(ids(10, 13))


def test_prefixes_of_one_owner_are_dropped() -> None:
    index, theirs, salted = PrefixIndex(), root_of(KEY, "b"), root_of(KEY, "a", "salt")
    index.add(ROOT, chain_of(1, 2), ids(10, 11), scope=Scope("", "a"))
    index.add(salted, chain_of(1, root=salted), ids(12), scope=Scope("", "a", "salt"))
    index.add(theirs, chain_of(1, root=theirs), ids(13), scope=Scope("", "b"))
    assert sorted(index.drop_owner("a").tolist()) == [10, 11, 12]
    assert index.drop_owner("c").size == 0
    index.check_invariants(ids(13))
    assert index.clear().tolist() == [13]
    index.check_invariants(ids())


class IndexMachine(RuleBasedStateMachine):
    """The model: cached prefixes as tuples of pages' contents, with their ids."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten: set[bytes] = set()
        self.index = PrefixIndex(self.forgotten.add)
        self.known: dict[tuple[int, ...], int] = {}
        self.next_page = 0
        self.held: set[int] = set()

    @rule(contents=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def add(self, contents: list[int]) -> None:
        pages = list(range(self.next_page, self.next_page + len(contents)))
        self.next_page += len(contents)
        prefixes = [tuple(contents[: n + 1]) for n in range(len(contents))]
        fresh = [page for prefix, page in zip(prefixes, pages, strict=True) if prefix not in self.known]
        assert self.index.add(ROOT, chain_of(*contents), ids(*pages)).tolist() == fresh
        for prefix, page in zip(prefixes, pages, strict=True):
            self.known.setdefault(prefix, page)

    @rule(contents=st.lists(st.integers(0, 2), max_size=5))
    def match(self, contents: list[int]) -> None:
        expected = []
        for n in range(len(contents)):
            if tuple(contents[: n + 1]) not in self.known:
                break
            expected.append(self.known[tuple(contents[: n + 1])])
        version = self.index.version
        assert self.index.match(chain_of(*contents)).tolist() == expected
        assert self.index.version == version
        if expected:
            self.index.touch(chain_of(*contents)[len(expected) - 1])

    @rule(seed=st.integers(0, 999))
    def hold(self, seed: int) -> None:
        pages = sorted(self.known.values())
        self.held = set(random.Random(seed).sample(pages, len(pages) // 2))

    @rule(count=st.integers(0, 6), seed=st.integers(0, 999))
    def evict(self, count: int, seed: int) -> None:
        idle = {page for page in self.known.values() if page not in self.held}
        spared = frozenset(page for page in idle if random.Random(seed + page).random() < 0.2)
        # what is spared is shared from the first page on
        spared = frozenset(
            page
            for prefix, page in self.known.items()
            if any(other in spared and longer[: len(prefix)] == prefix for longer, other in self.known.items())
        )
        before, removals = self.index.version, self.index.removals
        evicted = self.index.evict(
            count, lambda pages: np.array([it not in self.held for it in pages.tolist()]), spared
        )
        gone = set(evicted.tolist())
        assert not gone & spared
        assert len(gone & idle) >= min(count, len(idle - spared))
        assert (self.index.version != before) == (self.index.removals != removals) == bool(gone)
        self.known = {prefix: page for prefix, page in self.known.items() if page not in gone}
        for prefix in self.known:
            assert len(prefix) == 1 or prefix[:-1] in self.known, "a page that no chain leads to"

    @rule(place=st.integers(0, 9))
    def drop(self, place: int) -> None:
        leaves = [
            it for it in self.known if not any(len(other) > len(it) and other[: len(it)] == it for other in self.known)
        ]
        assert sorted(self.index.leaves()) == sorted(chain_of(*it)[-1] for it in leaves)
        if place < len(leaves):
            leaf = leaves[place]
            kept = {it for it in self.known if it != leaf and leaf[: len(it)] != it}
            kept |= {it for it in self.known if any(longer[: len(it)] == it for longer in kept)}
            found = self.index.describe(chain_of(*leaf)[-1])
            assert found is not None
            dropped = self.index.drop(chain_of(*leaf)[-1]).tolist()
            assert sorted(dropped) == sorted(page for it, page in self.known.items() if it not in kept)
            assert (found.pages, found.own_pages, found.last_page) == (len(leaf), len(dropped), self.known[leaf])
            self.known = {it: page for it, page in self.known.items() if it in kept}

    @invariant()
    def tells_what_it_forgets(self) -> None:
        gone, self.forgotten = self.forgotten, set()
        self.index._on_forget = self.forgotten.add
        before, self.before = getattr(self, "before", set()), {chain_of(*it)[-1] for it in self.known}
        assert gone == before - self.before

    @invariant()
    def is_sound(self) -> None:
        self.index.check_invariants(ids(*self.known.values()))


TestIndexMachine = IndexMachine.TestCase
