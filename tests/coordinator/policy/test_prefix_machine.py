"""Index, ledger and the replay of the journal together, against a model that knows what is in every host page.

Requests of two owners, with and without a salt, begin with cached pages, write theirs, have them cached while they
compute, leave by all ways, send pages between nodes and lose workers. The real PrefixReuse decides, the real HostPool
evicts, applies and writes; a second ledger replays what was written after each transaction, so that every beginning of
the journal is compared. Each of the planted bugs must be caught.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain as joined
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import coordinator.policy.prefix_reuse
from coordinator.journal.ledger_image import ledger_from, parts_of
from coordinator.journal.records import RequestFacts
from coordinator.memory.changes import AddWorker, Change, Keep, LoseWorker, ProveExit, Release, Reserve, apply
from coordinator.memory.host_pool import HostPool, Transact
from coordinator.memory.ledger import Freeing, Ledger
from coordinator.memory.prefix_index import Chain, Digest, PrefixIndex, root_of
from coordinator.policy.prefix_reuse import PrefixReuse
from coordinator.state.events import LedgerStep
from coordinator.state.request_state import RequestState
from metrics.state import Buckets
from protocol.errors import HiSparseError
from protocol.messages import ModelInfo, Sampling, WorkerCapacity
from protocol.sizing import Memory
from protocol.units import PAGE_TOKENS
from tests.support.fakes.stepper import FakeStepper
from worker.transfer.handover import Incoming

NODE = "n0"
POOL_PAGES = 14
MODEL = ModelInfo("f", "m", 4_096, 100, 1, 64, (), "bytes", "")
CAPACITY = WorkerCapacity(8, 64, 64, 4_096, POOL_PAGES, 1024, (64,), 8, 1, "/pool")
#: user, salt
OWNERS = (("ann", ""), ("ann", "salt"), ("bob", ""))
CONTENTS = st.lists(st.integers(0, 1), min_size=1, max_size=4)
CHANGE_CODEC: msgspec.msgpack.Decoder[Change] = msgspec.msgpack.Decoder(Change)

#: Who wrote a page, and what its rows depend on: the contents of all pages up to it.
Rows = tuple[tuple[str, str], tuple[int, ...]]


def tokens_of(contents: Sequence[int], more: int = 0) -> bytes:
    """Full pages, each with one token all over, and `more` tokens behind them."""
    tokens = [token for content in contents for token in [content] * PAGE_TOKENS] + [9] * more
    return np.array(tokens, dtype=np.int32).tobytes()


@dataclass(eq=False)
class Life:
    """One request on a worker, or with kept pages."""

    entry: RequestState
    owner: tuple[str, str]
    contents: tuple[int, ...]  # of its full pages, generated ones too
    prompt_pages: int
    pages: list[int]
    written: int  # full pages that are durable, the shared ones among them
    worker: tuple[str, int] | None
    destinations: set[int] = field(default_factory=set)  # pages that another node may still write to

    def rows(self, place: int) -> Rows:
        return self.owner, self.contents[: place + 1]


class PrefixMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.reuse = PrefixReuse("own", b"k" * 32)
        self.ledger, self.replica = Ledger(POOL_PAGES), Ledger(POOL_PAGES)
        self.replayed = 0
        self.journal: list[bytes] = []
        index = self.reuse.open(NODE)
        self.pool: HostPool[Any, None] = HostPool(
            NODE,
            self.ledger,
            index,
            self._append,
            stepped_by=FakeStepper(),
            lifetimes=Buckets((1.0,)),
            clock=lambda: 0.0,
            evicted=self._count,
        )
        self.evicted = 0
        self.placements = 0
        self.lives: dict[int, Life] = {}
        self.quarantined: dict[tuple[str, int], set[int]] = {}
        self.cached: dict[Rows, int] = {}  # the model of the index
        self.rows: dict[int, Rows] = {}  # of durable pages
        self.wrong: set[int] = set()  # pages whose rows may be wrong, until they are given out
        self.epochs = {"w0": 0, "w1": 0}
        for worker in self.epochs:
            self._join(worker)

    # ---------------------------------------------------------------- the real things

    def _append(self, node: str, changes: Sequence[Change], notes: Sequence[Any]) -> None:
        self.journal += [msgspec.msgpack.encode(change) for change in changes]

    def _count(self, pages: int, lent: int) -> None:
        assert lent <= pages
        self.evicted += pages

    def transact(self, *changes: Change) -> list[np.ndarray]:
        """Have the HostPool apply them, and follow what it did: evictions before, and what was written."""
        applied = self.pool.transact(changes)
        kept = set(self.ledger.cached_pages().tolist())
        self.cached = {rows: page for rows, page in self.cached.items() if page in kept}
        for data in self.journal[self.replayed :]:
            apply(self.replica, CHANGE_CODEC.decode(data))
        self.replayed = len(self.journal)
        return applied.given

    def _held(self) -> set[int]:
        """Host pages of requests and of quarantined workers."""
        return set().union(*(life.pages for life in self.lives.values()), *self.quarantined.values())

    def carry_out(self, steps: Sequence[LedgerStep]) -> None:
        """Of the prefix reuse: the model learns what is cached from the life that it was said of, before."""
        if steps:
            self.transact(*(step.change for step in steps))

    def _join(self, worker: str) -> None:
        self.epochs[worker] += 1
        self.transact(AddWorker(worker, self.epochs[worker], CAPACITY))

    # ---------------------------------------------------------------- requests

    def _digest(self, owner: tuple[str, str], prompt: bytes) -> Chain:
        scope = self.reuse.scope(owner[0], "", owner[1])
        root = self.reuse.root(MODEL, scope)
        return Chain(root, self.reuse.digests(root, prompt), scope)

    def _make(self, owner: tuple[str, str], contents: Sequence[int]) -> RequestState:
        prompt = tokens_of(contents, more=1)
        self.placements += 1
        number = self.placements
        facts = RequestFacts(
            number, f"r{number}", (0, 0, number), "o", owner[0], len(prompt) // 4, b"", Sampling(9), 0.0
        )
        entry = RequestState(facts)
        entry.chain = self._digest(owner, prompt)
        return entry

    def _expected(self, owner: tuple[str, str], contents: Sequence[int]) -> list[int]:
        pages = []
        for place in range(len(contents)):
            page = self.cached.get((owner, tuple(contents[: place + 1])))
            if page is None:
                break
            pages.append(page)
        return pages

    @rule(owner=st.sampled_from(OWNERS), contents=CONTENTS, worker=st.sampled_from(("w0", "w1")))
    def admit(self, owner: tuple[str, str], contents: list[int], worker: str) -> None:
        self._admit(owner, contents, worker)

    @rule(owner=st.sampled_from(OWNERS), contents=CONTENTS, worker=st.sampled_from(("w0", "w1")), leaves=st.booleans())
    def serve(self, owner: tuple[str, str], contents: list[int], worker: str, leaves: bool) -> None:
        """A whole prompt at once: so lives that fill the pool are drawn often."""
        if (life := self._admit(owner, contents, worker)) is not None:
            self._compute(life, life.prompt_pages)
            if leaves:
                self._leave(life, generated=False, keeps=False)

    def _admit(self, owner: tuple[str, str], contents: Sequence[int], worker: str) -> Life | None:
        entry = self._make(owner, contents)
        share = self.reuse.match(entry, NODE)
        assert share.tolist() == self._expected(owner, contents), "the longest cached beginning, of its owner alone"
        for place, page in enumerate(share.tolist()):
            assert self.rows[page] == (owner, tuple(contents[: place + 1])), "rows of these tokens, behind these"
        return self._place(entry, owner, contents, worker, share)

    def _place(
        self, entry: RequestState, owner: tuple[str, str], contents: Sequence[int], worker: str, share: np.ndarray
    ) -> Life | None:
        fresh = len(contents) + 1 - share.size
        idle = int(self.ledger.is_idle(share).sum()) if share.size else 0
        if fresh > self.ledger.pages_available - idle:
            return None
        held = self._held()
        self.placements += 1
        placement = self.placements
        (pages,) = self.transact(Reserve(placement, worker, Memory(fresh), None, share.tobytes()))
        given = set(pages[share.size :].tolist())
        assert not given & held, "a page has two owners"
        assert not given & set(self.cached.values()), "a page is given out while it can be matched"
        assert not given & set(share.tolist())
        self.wrong -= given
        for page in given:
            self.rows.pop(page, None)
        entry.worker, entry.node, entry.placement = worker, NODE, placement
        entry.shared_pages = int(share.size)
        self.reuse.use(entry, NODE, int(share.size))
        key = worker, self.epochs[worker]
        life = Life(entry, owner, tuple(contents), len(contents), pages.tolist(), int(share.size), key)
        self.lives[placement] = life
        return life

    def _draw(self, data: st.DataObject, *, kept: bool | None = None) -> Life | None:
        found = [
            it for it in self.lives.values() if not it.destinations and (kept is None or (it.worker is None) == kept)
        ]
        return data.draw(st.sampled_from(found)) if found else None

    def _write(self, life: Life, pages: int) -> None:
        """So many full pages become durable."""
        for place in range(life.written, pages):
            self.rows[life.pages[place]] = life.rows(place)
        life.written = max(life.written, pages)

    def _note_cached(self, life: Life, pages: int) -> None:
        for place in range(pages):
            if life.pages[place] in self.wrong:
                return
            self.cached.setdefault(life.rows(place), life.pages[place])

    @rule(data=st.data(), pages=st.integers(1, 4))
    def compute(self, data: st.DataObject, pages: int) -> None:
        """More of its prompt is durable, and its worker says so."""
        if (life := self._draw(data, kept=False)) is not None:
            self._compute(life, pages)

    def _compute(self, life: Life, pages: int) -> None:
        self._write(life, min(life.written + pages, life.prompt_pages))
        steps = self.reuse.keep_prompt(life.entry, self.ledger, life.written * PAGE_TOKENS)
        self._note_cached(life, min(life.written, life.prompt_pages))
        self.carry_out(steps)
        if life.entry.chain is not None and not self.wrong & set(life.pages):
            assert all(life.rows(place) in self.cached for place in range(life.written)), "durable pages are cached"

    @rule(data=st.data(), generated=st.integers(0, 1), keeps=st.booleans())
    def leave(self, data: st.DataObject, generated: int, keeps: bool) -> None:
        """Retracted, aborted or finished: what is durable is cached, and kept or released."""
        if (life := self._draw(data, kept=False)) is not None:
            self._leave(life, bool(generated), keeps)

    def _leave(self, life: Life, generated: bool, keeps: bool) -> None:
        if generated and life.written == life.prompt_pages and life.prompt_pages < len(life.pages):
            life.contents = (*life.contents, 9)
            self._write(life, life.prompt_pages + 1)
        count = (len(life.contents) - life.prompt_pages) * PAGE_TOKENS + 1
        text = tokens_of(life.contents, more=1)
        steps = self.reuse.keep_rows(life.entry, self.ledger, life.written * PAGE_TOKENS, count, lambda: text)
        self._note_cached(life, life.written)
        self.carry_out(steps)
        if keeps and life.written:
            self.transact(Keep(life.entry.placement, life.written))
            life.pages, life.worker = life.pages[: life.written], None
        else:
            self._release(life)

    def _release(self, life: Life) -> None:
        self.transact(Release(life.entry.placement))
        del self.lives[life.entry.placement]

    @rule(data=st.data())
    def demote(self, data: st.DataObject) -> None:
        if (life := self._draw(data, kept=True)) is not None:
            self._release(life)

    @rule(data=st.data())
    def fault(self, data: st.DataObject) -> None:
        """What it wrote may be wrong."""
        if (life := self._draw(data, kept=False)) is None:
            return
        self._forgotten(self.reuse.distrust_pages(life.entry, self.ledger), set(life.pages[life.entry.shared_pages :]))
        self._release(life)

    def _forgotten(self, steps: Sequence[LedgerStep], wrong: set[int]) -> None:
        gone = [rows for rows, page in self.cached.items() if page in wrong]
        below = {rows for rows in self.cached for owner, top in gone if rows[0] == owner and rows[1][: len(top)] == top}
        self.wrong |= {self.cached[rows] for rows in below}
        self.cached = {rows: page for rows, page in self.cached.items() if rows not in below}
        self.carry_out(steps)
        assert not wrong & set(self.ledger.cached_pages().tolist())

    # ---------------------------------------------------------------- workers and nodes

    @rule(worker=st.sampled_from(("w0", "w1")), proved=st.booleans(), keeps=st.booleans())
    def lose(self, worker: str, proved: bool, keeps: bool) -> None:
        """Its requests leave with what was durable; without proof all pages are quarantined, and may be matched."""
        key = worker, self.epochs[worker]
        self.transact(LoseWorker(*key, proved))
        for life in [it for it in self.lives.values() if it.worker == key]:
            durable = 0 if life.destinations else life.written
            steps = self.reuse.keep_rows(life.entry, self.ledger, durable * PAGE_TOKENS, 0, bytes)
            self._note_cached(life, min(durable, life.prompt_pages))
            self.carry_out(steps)
            if not proved:
                self.quarantined.setdefault(key, set()).update(life.pages)
            if keeps and durable:
                self.transact(Keep(life.entry.placement, durable))
                life.pages, life.worker = life.pages[:durable], None
            else:
                self._release(life)
        self._join(worker)

    @rule(data=st.data())
    def prove(self, data: st.DataObject) -> None:
        if self.quarantined:
            key = data.draw(st.sampled_from(sorted(self.quarantined)))
            del self.quarantined[key]
            self.transact(ProveExit(*key))

    @rule(worker=st.sampled_from(("w0", "w1")), keeps=st.booleans())
    def distrust(self, worker: str, keeps: bool) -> None:
        """An audit differs twice with this epoch. The model asks the index alone who wrote what."""
        key = worker, self.epochs[worker]
        wrong = set(self.reuse.by_node[NODE].written_by(key))
        self._forgotten(self.reuse.distrust_epoch(key), wrong)
        for life in self.lives.values():
            if life.worker == key:
                self.wrong |= set(life.pages) - set(self.cached.values())
        self.lose(worker, True, keeps)

    @rule(owner=st.sampled_from(OWNERS), contents=CONTENTS)
    def receive(self, owner: tuple[str, str], contents: list[int]) -> None:
        """Rows come from another node, into fresh pages alone."""
        entry = self._make(owner, contents)
        share = self.reuse.match(entry, NODE)
        life = self._place(entry, owner, contents, "w1", share)
        if life is None:
            return
        tokens = len(contents) * PAGE_TOKENS + 1
        life.destinations = set(Incoming(tokens, life.pages, int(share.size)).pages)
        holders = [other.pages for other in self.lives.values() if other is not life]
        shared = set(self.cached.values()) | set(joined.from_iterable(holders))
        assert not life.destinations & shared, "a shared page is open for writing"

    @rule()
    def arrive(self) -> None:
        for life in self.lives.values():
            if life.destinations:
                life.destinations = set()
                self._write(life, life.prompt_pages)

    @rule()
    def restart(self) -> None:
        """A coordinator reads the ledger from its journal, knows no digest any more, and frees what was cached."""
        ledger = self.ledger
        self.reuse.key = bytes([random.Random(len(self.journal)).randrange(256)]) * 32
        index: PrefixIndex = self.reuse.by_node[NODE]
        index.clear()
        steps = self.reuse.begin_empty({NODE: ledger})
        self.cached.clear()
        self.carry_out(steps)
        for life in self.lives.values():
            life.entry.chain = None
            life.entry.indexed = life.entry.shared_pages = life.prompt_pages = 0  # none is cached for the time being
        self.reuse.roots.clear()
        assert ledger.pages_cached == 0

    @rule()
    def digest_again(self) -> None:
        """Prompts of the incarnation before."""
        for life in self.lives.values():
            if life.entry.chain is None:
                life.prompt_pages = life.entry.facts.prompt_tokens // PAGE_TOKENS
                prompt = tokens_of(life.contents[: life.prompt_pages], more=1)
                life.entry.chain = self._digest(life.owner, prompt)

    # ---------------------------------------------------------------- what must hold

    @invariant()
    def accounts_are_sound(self) -> None:
        self.ledger.check_invariants()
        assert self.ledger.find_mismatch() == ""
        assert not self.wrong & set(self.ledger.cached_pages().tolist()), "wrong rows can be matched"
        self.reuse.by_node[NODE].check_invariants(self.ledger.cached_pages())
        assert sorted(self.cached.values()) == self.ledger.cached_pages().tolist()
        held = self._held()
        idle = set(self.cached.values()) - held
        assert self.ledger.pages_available == POOL_PAGES - len(held)
        counts = self.ledger.count_pages()
        owned = set().union(*(life.pages for life in self.lives.values()))
        assert counts[:4] == (POOL_PAGES - len(held | idle), len(owned), len(held - owned), len(idle))

    @invariant()
    def every_beginning_of_the_journal_gives_the_same_ledger(self) -> None:
        images = [list(parts_of(NODE, it)) for it in (self.ledger, self.replica)]
        assert images[0] == images[1]

    @precondition(lambda self: self.journal)
    @rule()
    def image_is_the_ledger(self) -> None:
        parts = list(parts_of(NODE, self.ledger))
        assert list(parts_of(NODE, ledger_from(parts))) == parts

    @rule(data=st.data(), begun=st.booleans(), all_of_them=st.booleans())
    def victims_free_what_their_set_frees(self, data: st.DataObject, begun: bool, all_of_them: bool) -> None:
        victims = sorted(self.lives)
        if victims and not all_of_them:
            victims = data.draw(st.lists(st.sampled_from(victims), unique=True))
        left = [life.pages for placement, life in self.lives.items() if placement not in victims]
        held = set().union(*left, *self.quarantined.values())
        freed = set().union(*(self.lives[it].pages for it in victims)) - held
        freeing = self.ledger.freeing()
        if begun:
            freeing.hold(np.zeros(0, dtype=np.int32))
        assert sum(map(freeing.add, victims)) == len(freed)


PrefixMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestPrefixMachine = PrefixMachine.TestCase


# ---------------------------------------------------------------- planted bugs

_transact_handle = HostPool.handle


async def _unjournalled_eviction(self: HostPool[Any, Any], batch: list[Transact[Any]]) -> Any:
    append = self._append
    self._append = lambda node, changes, notes: append(node, [it for it in changes if not _is_evict(it)], notes)
    try:
        return await _transact_handle(self, batch)
    finally:
        self._append = append


def _is_evict(change: Change) -> bool:
    return type(change).__name__ == "Evict"


def _evict_shared(self: Ledger, pages: np.ndarray) -> int:
    """What is evicted is free, held or not."""
    self._is_cached[pages] = False
    self.pages_cached -= pages.size
    self._refcounts[pages] = 0
    return self._free_unheld(pages)


def _without_parent(key: bytes, parent: Digest, tokens: bytes) -> tuple[Digest, ...]:
    starts = range(0, len(tokens) - 4 * PAGE_TOKENS + 1, 4 * PAGE_TOKENS)
    return tuple(root_of(key, tokens[start : start + 4 * PAGE_TOKENS].hex(), str(start)) for start in starts)


def _per_victim(self: Freeing, placement: int) -> int:
    pages = self._ledger.pages_of(placement)
    return int(np.count_nonzero(self._ledger._holders(pages) == 1))


def _without_looking_at_sharing(self: Freeing, placement: int) -> int:
    return self._ledger.held(placement).host_pages


BUGS: dict[str, Callable[[], Any]] = {
    "a page evicted while shared": lambda: patch.object(
        PrefixIndex, "_may_go", lambda self, node, is_idle, spared: node.page not in spared
    ),
    "a shared page free once evicted": lambda: patch.object(Ledger, "evict", _evict_shared),
    "an unjournalled eviction": lambda: patch.object(HostPool, "handle", _unjournalled_eviction),
    "a digest without its parent": lambda: patch.object(
        coordinator.policy.prefix_reuse, "extend_chain", _without_parent
    ),
    "a salt left out": lambda: patch.object(
        PrefixReuse, "root", lambda self, model, scope: root_of(self.key, scope.user, scope.tenant)
    ),
    "a cached page counted twice": lambda: patch.object(
        Ledger, "pages_available", property(lambda self: self.pages_free + self.pages_cached)
    ),
    "per-victim sums": lambda: patch.object(Freeing, "add", _per_victim),
    "a fast path that ignores sharing": lambda: patch.object(Freeing, "add", _without_looking_at_sharing),
    "a shared page as transfer destination": lambda: patch.object(
        Incoming, "pages", property(lambda self: self.host_pages)
    ),
}


@pytest.mark.mutation
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_caught(bug: str) -> None:
    tried = settings(
        max_examples=20_000,  # the rarest is caught after some 200
        stateful_step_count=40,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    with BUGS[bug](), pytest.raises((AssertionError, HiSparseError, LookupError)):
        run_state_machine_as_test(PrefixMachine, settings=tried)
