"""The ledger against a model of Python sets, under every order of operations that hypothesis finds (I1, I2, I7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule
from msgspec.structs import replace

from coordinator.memory.ledger import Ledger
from protocol.errors import CapacityError, InternalError, WrongState
from protocol.messages import WorkerCapacity
from protocol.sizing import Memory

POOL_PAGES = 40


def capacity(**changes: int) -> WorkerCapacity:
    counts = {"seats": 4, "hot_chunks": 24, "index_pages": 30, "host_pages": POOL_PAGES} | changes
    return WorkerCapacity(
        **counts,
        prompt_max_tokens=768,
        page_bytes=1024,
        hot_size_classes=(128, 256),
        tail_slots=4,
        overshoot_tokens=2,
        pool_path="pool",
    )


def ledger(pages: int = POOL_PAGES) -> Ledger:
    accounts = Ledger(pages)
    accounts.add_worker("w0", 1, capacity())
    return accounts


def test_refusal_names_each_missing_resource_with_arithmetic() -> None:
    """SGLang #23704: admission looks at all of them."""
    with pytest.raises(CapacityError) as caught:
        ledger().reserve(1, "w0", Memory(host_pages=41, hot_chunks=25, index_pages=31))
    assert caught.value.message == (
        "needs 41 host pages, the pool has 40 free; needs 25 hot chunks, w0 has 24 free; "
        "needs 31 index pages, w0 has 30 free"
    )


def test_a_failed_reservation_holds_nothing() -> None:
    """I7: short of the last resource only, and nothing of the others is taken."""
    accounts = ledger()
    with pytest.raises(CapacityError):
        accounts.reserve(1, "w0", Memory(host_pages=40, hot_chunks=24, index_pages=31))
    assert accounts.pages_free == POOL_PAGES
    assert not accounts.holds(1)
    accounts.check_invariants()
    assert accounts.reserve(1, "w0", Memory(40, 24, 30)).size == 40


def test_arrays_that_come_out_are_copies_never_views() -> None:
    """Scribbling over every array that the ledger returned changes nothing in it. SGLang #21624, #31296."""
    accounts = ledger()
    first = accounts.reserve(1, "w0", Memory(host_pages=8))
    want = sorted(first)
    more = accounts.extend(1, Memory(host_pages=4))
    want += sorted(more)
    for array in (first, more, accounts.pages_of(1)):
        array[:] = 39
    assert sorted(accounts.pages_of(1)) == sorted(want)
    accounts.check_invariants()
    accounts.release(1)
    assert sorted(accounts.reserve(2, "w0", Memory(host_pages=POOL_PAGES))) == list(range(POOL_PAGES))


def test_shared_pages_return_with_their_last_holder() -> None:
    """I1: refcounts above one."""
    accounts = ledger()
    donor = accounts.reserve(1, "w0", Memory(host_pages=6))
    taker = accounts.reserve(2, "w0", Memory(host_pages=3), share=donor[:4])
    assert list(taker[:4]) == list(donor[:4])
    assert accounts.count_pages() == (POOL_PAGES - 9, 9, 0, 0, 4)
    assert accounts.release(1) == 2
    accounts.check_invariants()
    assert accounts.release(2) == 7
    assert accounts.pages_free == POOL_PAGES


@pytest.mark.parametrize("pages", [[7], [0, 0]], ids=["free page", "page twice"])
def test_only_distinct_held_pages_can_be_shared(pages: list[int]) -> None:
    accounts = ledger(8)
    accounts.reserve(1, "w0", Memory(host_pages=1))  # page 0
    with pytest.raises(InternalError):
        accounts.reserve(2, "w0", Memory(), share=np.array(pages, dtype=np.int32))
    assert not accounts.holds(2)
    accounts.check_invariants()


def test_pages_of_a_lost_epoch_stay_quarantined_until_exit() -> None:
    """I2: a heartbeat timeout proves nothing. SGLang #24578."""
    accounts = ledger()
    accounts.reserve(1, "w0", Memory(host_pages=30))
    accounts.lose_worker("w0", 1, proved_exit=False)
    assert accounts.release(1) == 0
    assert accounts.count_pages() == (10, 0, 30, 0, 0)
    accounts.add_worker("w0", 2, capacity())
    with pytest.raises(CapacityError, match="needs 11 host pages, the pool has 10 free"):
        accounts.reserve(2, "w0", Memory(host_pages=11))
    assert accounts.prove_exit("w0", 1) == 30
    assert accounts.reserve(2, "w0", Memory(host_pages=40)).size == 40
    accounts.check_invariants()


def test_early_exit_proof_frees_pages_on_departure() -> None:
    accounts = ledger()
    accounts.reserve(1, "w0", Memory(host_pages=30))
    accounts.lose_worker("w0", 1, proved_exit=False)
    assert accounts.prove_exit("w0", 1) == 0
    assert accounts.release(1) == 30
    assert accounts.quarantines == ()


def test_shared_page_stays_quarantined_after_other_holder_left() -> None:
    """I2: the successor's release must not hand out what the lost process may still touch."""
    accounts = ledger()
    accounts.add_worker("w1", 1, capacity())
    pages = accounts.reserve(1, "w0", Memory(host_pages=5))
    accounts.reserve(2, "w1", Memory(host_pages=1), share=pages[:3])
    accounts.lose_worker("w0", 1, proved_exit=False)
    accounts.release(1)
    assert accounts.count_pages() == (POOL_PAGES - 6, 4, 2, 0, 0)
    assert accounts.release(2) == 1
    assert accounts.count_pages() == (POOL_PAGES - 5, 0, 5, 0, 0)
    accounts.check_invariants()


def test_successor_shares_full_pages_of_an_unproved_process() -> None:
    """I2, I3: full pages never change. Their sharers may leave before or after the proof; no other page is given."""
    for proved_first in (True, False):
        accounts = ledger()
        pages = accounts.reserve(1, "w0", Memory(host_pages=9))
        accounts.lose_worker("w0", 1, proved_exit=False)
        assert accounts.keep(1, 6) == 0
        assert accounts.count_pages() == (POOL_PAGES - 9, 6, 3, 0, 0)
        accounts.add_worker("w0", 2, capacity())
        again = accounts.reserve(2, "w0", Memory(host_pages=3), take_over=1)
        assert list(again[:6]) == list(pages[:6])
        assert not set(again[6:]) & set(pages)
        accounts.check_invariants()
        if proved_first:
            assert accounts.prove_exit("w0", 1) == 3
            assert accounts.release(2) == 9
        else:
            assert accounts.release(2) == 3
            assert accounts.prove_exit("w0", 1) == 9
        assert accounts.pages_free == POOL_PAGES
        accounts.check_invariants()


def test_kept_pages_pass_to_the_next_placement_in_order() -> None:
    accounts = ledger()
    pages = accounts.reserve(1, "w0", Memory(host_pages=9, hot_chunks=5, index_pages=9))
    assert accounts.keep(1, 6) == 3
    assert accounts.budget("w0").free.hot_chunks == 24
    again = accounts.reserve(2, "w0", Memory(host_pages=2, hot_chunks=5, index_pages=8), take_over=1)
    assert list(again[:6]) == list(pages[:6])
    assert again.size == 8
    assert not accounts.holds(1)
    accounts.check_invariants()


def test_mismatch_is_described_in_words() -> None:
    """I1, and budgets."""

    def broken(damage: Callable[[Ledger], object]) -> str:
        accounts = ledger()
        accounts.reserve(1, "w0", Memory(host_pages=5, hot_chunks=3, index_pages=5))
        assert accounts.find_mismatch() == ""
        damage(accounts)
        return accounts.find_mismatch()

    def hold_a_free_page(accounts: Ledger) -> None:
        page = accounts._free[0]
        accounts._refcounts[page] += 1
        accounts._holdings[1].pages.append(np.array([page], dtype=np.int32))

    def lose_a_free_page(accounts: Ledger) -> None:
        accounts.pages_free -= 1

    def lose_a_chunk(accounts: Ledger) -> None:
        accounts.budget("w0").free = accounts.budget("w0").free.minus(Memory(hot_chunks=1))

    first = POOL_PAGES - 1
    leak = broken(lambda accounts: accounts._refcounts.__setitem__(first, 1))
    assert leak == f"refcounts of 1 pages are not their holders' number, the first is page {first}"
    assert broken(hold_a_free_page) == "a free page has a holder"
    assert broken(lose_a_free_page) == f"{POOL_PAGES - 6} free pages and those held are not {POOL_PAGES}"
    assert broken(lose_a_chunk).startswith("hot chunks of w0, held and free, are ")


def test_lost_epoch_cannot_return() -> None:
    accounts = ledger()
    accounts.reserve(1, "w0", Memory(host_pages=1))
    with pytest.raises(WrongState, match="still live"):
        accounts.add_worker("w0", 2, capacity())
    accounts.lose_worker("w0", 1, proved_exit=False)
    with pytest.raises(WrongState, match="lost before"):
        accounts.add_worker("w0", 1, capacity())
    accounts.release(1)
    with pytest.raises(WrongState, match="lost before"):
        accounts.add_worker("w0", 1, capacity())


def test_cached_pages_outlive_their_request_and_count_as_free() -> None:
    accounts = ledger()
    pages = accounts.reserve(1, "w0", Memory(host_pages=6))
    accounts.cache(pages[:4])
    assert accounts.release(1) == 2
    assert accounts.count_pages() == (POOL_PAGES - 4, 0, 0, 4, 0)
    assert accounts.free("w0").host_pages == POOL_PAGES
    shared = accounts.reserve(2, "w0", Memory(host_pages=1), share=pages[:3])
    assert shared[:3].tolist() == pages[:3].tolist()
    assert accounts.count_pages() == (POOL_PAGES - 5, 4, 0, 1, 0)
    assert accounts.evict(pages[:4]) == 1  # three are held by the request
    assert accounts.release(2) == 4
    accounts.check_invariants()


def test_idle_pages_are_given_out_only_once_they_are_evicted() -> None:
    """I2: what is cached may be matched until then."""
    accounts = ledger()
    pages = accounts.reserve(1, "w0", Memory(host_pages=POOL_PAGES))
    accounts.cache(pages)
    accounts.release(1)
    with pytest.raises(CapacityError):
        accounts.reserve(2, "w0", Memory(host_pages=1))
    accounts.evict(pages[:1])
    assert accounts.reserve(2, "w0", Memory(host_pages=1)).tolist() == pages[:1].tolist()


def test_only_held_pages_are_cached_and_only_cached_ones_evicted() -> None:
    accounts = ledger()
    pages = accounts.reserve(1, "w0", Memory(host_pages=2))
    for unfit in (accounts._free[:1], pages[[0, 0]]):
        with pytest.raises(InternalError):
            accounts.cache(unfit)
    accounts.cache(pages[:1])
    for change, unfit in ((accounts.cache, pages[:1]), (accounts.evict, pages[1:])):
        with pytest.raises(InternalError):
            change(unfit)
    accounts.check_invariants()


def test_two_sharers_free_nothing_alone_and_everything_together() -> None:
    accounts = ledger()
    pages = accounts.reserve(1, "w0", Memory(host_pages=5))
    accounts.cache(pages[:4])
    accounts.reserve(2, "w0", Memory(host_pages=2), share=pages[:4])
    assert (accounts.freeing().add(1), accounts.freeing().add(2)) == (1, 2)
    both = accounts.freeing()
    assert [both.add(1), both.add(2)] == [1, 6]
    accounts.reserve(3, "w0", Memory(host_pages=3))
    alone = accounts.freeing()
    assert [alone.add(3), alone.copy().add(2), alone.count_unheld(pages[:4])] == [3, 2, 0]
    held = accounts.freeing()
    held.hold(pages[:2])
    assert [held.add(1), held.add(2)] == [1, 4]
    assert held.count_unheld(pages[:4]) == 2


def test_page_that_is_to_be_held_is_counted_once() -> None:
    """However many placements are to hold it."""
    accounts = ledger()
    pages = accounts.reserve(1, "w0", Memory(host_pages=4))
    accounts.cache(pages)
    accounts.release(1)
    freeing = accounts.freeing()
    for times in range(4):
        assert freeing.count_unheld(pages) == (4 if not times else 2), times
        assert freeing.copy().count_unheld(pages[1:]) == (3 if not times else 2), times
        freeing.hold(pages[:2])


WORKERS = st.sampled_from(["w0", "w1"])
SMALL = st.integers(0, 9)
MEMORY = st.builds(Memory, st.integers(0, 16), SMALL, SMALL, st.just(0))


class LedgerMachine(RuleBasedStateMachine):
    """The model: who holds which page as plain sets; every answer of the ledger is compared with it.

    SGLang #31296: no page has two owners. vLLM #51323: queries change nothing."""

    active: Bundle[int] = Bundle("active")
    kept: Bundle[int] = Bundle("kept")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(POOL_PAGES)
        self.next_admission = 1
        self.epochs = {"w0": 0, "w1": 0}
        self.live: set[str] = set()
        self.epoch_of: dict[int, tuple[str, int]] = {}
        self.pages: dict[int, list[int]] = {}
        self.gpu: dict[int, Memory] = {}
        self.lost: dict[tuple[str, int], bool] = {}  # key -> proved
        self.quarantine: dict[tuple[str, int], list[set[int]]] = {}
        self.cached: set[int] = set()

    def held(self) -> set[int]:
        return set().union(*self.pages.values(), *(s for sets in self.quarantine.values() for s in sets))

    def free(self) -> set[int]:
        return set(range(POOL_PAGES)) - self.held() - self.cached

    def fits(self, worker: str, want: Memory, seat: bool) -> bool:
        key = (worker, self.epochs[worker])
        mine = [self.gpu[a] for a, k in self.epoch_of.items() if k == key]
        total = capacity()
        return (
            want.host_pages <= len(self.free())
            and len(mine) + seat <= total.seats
            and sum(m.hot_chunks for m in mine) + want.hot_chunks <= total.hot_chunks
            and sum(m.index_pages for m in mine) + want.index_pages <= total.index_pages
        )

    @rule(worker=WORKERS)
    def worker_joins(self, worker: str) -> None:
        if worker in self.live:
            with pytest.raises(WrongState):
                self.ledger.add_worker(worker, self.epochs[worker] + 1, capacity())
            return
        self.epochs[worker] += 1
        self.ledger.add_worker(worker, self.epochs[worker], capacity())
        self.live.add(worker)

    @precondition(lambda self: self.live)
    @rule(worker=WORKERS, proved=st.booleans())
    def worker_is_lost(self, worker: str, proved: bool) -> None:
        if worker in self.live:
            self.ledger.lose_worker(worker, self.epochs[worker], proved_exit=proved)
            self.live.discard(worker)
            self.lost[worker, self.epochs[worker]] = proved

    @rule(data=st.data())
    def exit_is_proved(self, data: st.DataObject) -> None:
        if self.lost:
            key = data.draw(st.sampled_from(sorted(self.lost)))
            before = self.free()
            self.lost[key] = True
            self.quarantine.pop(key, None)
            assert self.ledger.prove_exit(*key) == len(self.free() - before)

    @rule(target=active, worker=WORKERS, want=MEMORY)
    def reserve(self, worker: str, want: Memory) -> object:
        return self._reserve(worker, want, None, [])

    @rule(target=active, worker=WORKERS, want=MEMORY, old=consumes(kept))
    def take_over(self, worker: str, want: Memory, old: int) -> object:
        taken = self._reserve(worker, want, old, [])
        if taken == multiple():
            self.ledger.release(old)
            self.pages.pop(old)
        return taken

    @rule(target=active, worker=WORKERS, want=MEMORY, donor=active, count=st.integers(1, 8))
    def share(self, worker: str, want: Memory, donor: int, count: int) -> object:
        return self._reserve(worker, want, None, self.pages.get(donor, [])[:count])

    @rule(worker=WORKERS, want=MEMORY, data=st.data())
    def share_cached(self, worker: str, want: Memory, data: st.DataObject) -> None:
        if self.cached:
            share = data.draw(st.lists(st.sampled_from(sorted(self.cached)), unique=True, max_size=6))
            self._reserve(worker, want, None, share)

    @rule(donor=active, count=st.integers(1, 8))
    def cache(self, donor: int, count: int) -> None:
        pages = [page for page in self.pages.get(donor, [])[:count] if page not in self.cached]
        self.ledger.cache(np.array(pages, dtype=np.int32))
        self.cached |= set(pages)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        if self.cached:
            pages = data.draw(st.sets(st.sampled_from(sorted(self.cached))))
            before = self.free()
            self.cached -= pages
            assert self.ledger.evict(np.array(sorted(pages), dtype=np.int32)) == len(self.free() - before)

    @rule(data=st.data())
    def freeing(self, data: st.DataObject) -> None:
        """What a set of placements frees is what none outside it holds."""
        if self.pages:
            ending = data.draw(st.lists(st.sampled_from(sorted(self.pages)), unique=True))
            quarantined = set().union(*(s for sets in self.quarantine.values() for s in sets))
            kept = set().union(*(self.pages[it] for it in self.pages if it not in ending)) | quarantined
            freeing = self.ledger.freeing()
            assert sum(map(freeing.add, ending)) == len(set().union(*(self.pages[it] for it in ending)) - kept)

    @rule(data=st.data())
    def unheld(self, data: st.DataObject) -> None:
        """Of cached pages, those that no request holds, after some more are to be held and some placements ended."""
        if self.cached:
            holders = Counter(page for pages in self.pages.values() for page in pages)
            holders.update(page for sets in self.quarantine.values() for pages in sets for page in pages)
            some = st.lists(st.sampled_from(sorted(self.cached)), unique=True)
            freeing, ending = self.ledger.freeing(), sorted(self.pages)
            for _ in range(data.draw(st.integers(0, 6))):
                if ending and data.draw(st.integers(0, 4)) == 0:
                    freeing.add(ended := ending.pop())
                    holders.subtract(self.pages[ended])
                pages = data.draw(some)
                freeing.hold(np.array(pages, dtype=np.int32))
                holders.update(pages)
                asked = data.draw(some)
                assert freeing.count_unheld(np.array(asked, dtype=np.int32)) == sum(not holders[it] for it in asked)

    def _reserve(self, worker: str, want: Memory, old: int | None, share: list[int]) -> object:
        placement, self.next_admission = self.next_admission, self.next_admission + 1
        free = self.free()
        shared = np.array(share, dtype=np.int32)
        if worker not in self.live or not self.fits(worker, want, seat=True):
            kind = CapacityError if worker in self.live else WrongState
            with pytest.raises(kind):
                self.ledger.reserve(placement, worker, want, take_over=old, share=shared)
            assert not self.ledger.holds(placement)
            return multiple()
        first = self.pages.pop(old) if old is not None else share
        pages = self.ledger.reserve(placement, worker, want, take_over=old, share=shared).tolist()
        assert pages[: len(first)] == first
        fresh = set(pages[len(first) :])
        assert len(fresh) == want.host_pages
        assert fresh <= free, "I2: only free pages are handed out"
        self.pages[placement], self.gpu[placement] = pages, replace(want, host_pages=0)
        self.epoch_of[placement] = (worker, self.epochs[worker])
        return placement

    @rule(placement=active, more=MEMORY)
    def extend(self, placement: int, more: Memory) -> None:
        key = self.epoch_of.get(placement)
        if key is None or key in self.lost:
            return
        free = self.free()
        if not self.fits(key[0], more, seat=False):
            with pytest.raises(CapacityError):
                self.ledger.extend(placement, more)
            return
        fresh = self.ledger.extend(placement, more).tolist()
        assert set(fresh) <= free
        assert len(fresh) == more.host_pages
        self.pages[placement] += fresh
        self.gpu[placement] = self.gpu[placement].plus(replace(more, host_pages=0))

    @rule(placement=active, less=MEMORY)
    def shrink(self, placement: int, less: Memory) -> None:
        if placement not in self.epoch_of:
            return
        less = replace(less, host_pages=0)
        if not self.gpu[placement].covers(less):
            with pytest.raises(InternalError):
                self.ledger.shrink(placement, less)
            return
        self.ledger.shrink(placement, less)
        self.gpu[placement] = self.gpu[placement].minus(less)

    @rule(target=kept, placement=consumes(active), count=st.integers(0, 20))
    def keep(self, placement: int, count: int) -> object:
        key = self.epoch_of.get(placement)
        if key is None:
            return multiple()
        count = min(count, len(self.pages[placement]))
        before = self.free()
        freed = self.ledger.keep(placement, count)
        self._leave(placement)
        if not self.lost.get(key, True):
            self.quarantine.setdefault(key, []).append(set(self.pages[placement]))
        self.pages[placement] = self.pages[placement][:count]
        assert freed == len(self.free() - before)
        return placement

    @rule(placement=consumes(active))
    def release(self, placement: int) -> None:
        if placement in self.epoch_of:
            self._release(placement)

    @rule(placement=consumes(kept))
    def drop(self, placement: int) -> None:
        before = self.free()
        freed = self.ledger.release(placement)
        self.pages.pop(placement)
        assert freed == len(self.free() - before)

    def _release(self, placement: int) -> None:
        key, before = self.epoch_of[placement], self.free()
        freed = self.ledger.release(placement)
        self._leave(placement)
        pages = self.pages.pop(placement)
        if not self.lost.get(key, True):
            self.quarantine.setdefault(key, []).append(set(pages))
        assert freed == len(self.free() - before), "I2"

    def _leave(self, placement: int) -> None:
        del self.epoch_of[placement]
        self.gpu[placement] = Memory()

    @invariant()
    def adds_up(self) -> None:
        self.ledger.check_invariants()
        assert self.ledger.find_mismatch() == ""
        assert self.ledger.pages_free == len(self.free())
        assert self.ledger.holdings_count == len(self.pages)
        owned = set().union(*self.pages.values())
        quarantined = set().union(*(s for sets in self.quarantine.values() for s in sets)) - owned
        idle = self.cached - owned - quarantined
        assert self.ledger.count_pages()[:4] == (len(self.free()), len(owned), len(quarantined), len(idle))
        assert self.ledger.cached_pages().tolist() == sorted(self.cached)
        for placement, pages in self.pages.items():
            assert self.ledger.pages_of(placement).tolist() == pages

    @invariant()
    def queries_change_nothing(self) -> None:
        """I7."""
        for worker in self.live:
            budget = self.ledger.budget(worker)
            before = (self.ledger.pages_free, repr(budget))
            self.ledger.shortfall(worker, Memory(1, 1, 1, 1))
            assert (self.ledger.pages_free, repr(budget)) == before


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40)
