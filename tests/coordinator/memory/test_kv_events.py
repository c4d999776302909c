"""KV events of a turn: what is told of pages that were cached, forgotten, or held by several nodes."""

from __future__ import annotations

import numpy as np

from coordinator.memory.kv_events import EVENT_PAGES_MAX, AllRemoved, KvEvents, PagesRemoved, PagesStored
from coordinator.memory.prefix_index import Chain, Scope, extend_chain, root_of
from coordinator.policy.prefix_reuse import PrefixReuse
from protocol.units import PAGE_TOKENS

KEY = b"k" * 32
SCOPE = Scope("", "shop", "salt")


def tokens(pages: int) -> bytes:
    return np.arange(pages * PAGE_TOKENS, dtype=np.int32).tobytes()


def chain(pages: int) -> Chain:
    root = root_of(KEY, *SCOPE)
    return Chain(root, tuple(extend_chain(KEY, root, tokens(pages))), SCOPE)


def new_events(pages: int) -> KvEvents:
    events = KvEvents(lambda _, first, last: tokens(pages)[4 * first : 4 * last])
    assert events.take() == [AllRemoved()], "a restart tells that nothing is cached"
    return events


def test_runs_of_stored_pages_follow_their_parents() -> None:
    it, events = chain(6), new_events(6)
    events.stored(it, it.digests, np.array([True, True, False, True, False, True]), 7)
    at = [4 * PAGE_TOKENS * page for page in range(7)]
    assert events.take() == [
        PagesStored(it.digests[:2], None, tokens(6)[: at[2]], ("shop", "salt")),
        PagesStored(it.digests[3:4], it.digests[2], tokens(6)[at[3] : at[4]], ()),
        PagesStored(it.digests[5:], it.digests[4], tokens(6)[at[5] :], ()),
    ]
    assert events.take() == []


def test_long_prompt_is_several_events() -> None:
    pages = 2 * EVENT_PAGES_MAX + 1
    it, events = chain(pages), new_events(pages)
    events.stored(it, it.digests, np.ones(pages, dtype=bool), 7)
    told = [event for event in events.take() if isinstance(event, PagesStored)]
    assert [len(event.digests) for event in told] == [EVENT_PAGES_MAX, EVENT_PAGES_MAX, 1]
    assert [event.parent for event in told] == [None, *(it.digests[n * EVENT_PAGES_MAX - 1] for n in (1, 2))]
    assert b"".join(event.tokens for event in told) == tokens(pages)


def test_events_keep_their_order() -> None:
    it, events = chain(1), new_events(1)
    events.removed(b"a")
    events.removed(b"b")
    events.stored(it, it.digests, np.array([True]), 7)
    events.removed(it.digests[0])
    told = events.take()
    assert [type(event) for event in told] == [PagesRemoved, PagesStored, PagesRemoved]
    assert told[0] == PagesRemoved((b"a", b"b"))
    events.removed(b"c")
    events.cleared()
    assert events.take() == [AllRemoved()]


def test_page_of_two_nodes_is_removed_with_the_last() -> None:
    it, events = chain(2), new_events(2)
    reuse = PrefixReuse("own", KEY, events)
    for node in ("a", "b"):
        reuse.open(node).add(it.root, it.digests, np.array([1, 2], dtype=np.int32), scope=it.scope)
    assert reuse.by_node["a"].evict(1, np.vectorize(lambda _: True)).tolist() == [2]
    assert events.take() == []
    assert reuse.by_node["b"].evict(1, np.vectorize(lambda _: True)).tolist() == [2]
    assert events.take() == [PagesRemoved((it.digests[1],))]
    assert {node: pages.tolist() for node, pages in reuse.drop().items()} == {"a": [1], "b": [1]}
    assert events.take() == [AllRemoved()]


def test_new_pool_of_a_node_has_nothing_cached() -> None:
    it, events = chain(2), new_events(2)
    reuse = PrefixReuse("own", KEY, events)
    reuse.open("a").add(it.root, it.digests, np.array([1, 2], dtype=np.int32), scope=it.scope)
    reuse.open("a")
    (told,) = events.take()
    assert isinstance(told, PagesRemoved)
    assert sorted(told.digests) == sorted(it.digests)
