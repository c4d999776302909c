"""A restored ledger equals the original in what later changes do."""

from __future__ import annotations

from coordinator.journal.ledger_image import ledger_from, parts_of
from protocol.sizing import Memory
from tests.coordinator.memory.test_ledger import POOL_PAGES, ledger


def test_page_that_two_lost_placements_hold_counts_twice_when_restored() -> None:
    """One prefix, two requests, a worker whose exit is not proved: its pages come free once, in the same order."""
    accounts = ledger()
    pages = accounts.reserve(1, "w0", Memory(host_pages=5))
    accounts.reserve(2, "w0", Memory(host_pages=2), share=pages[:3])
    accounts.lose_worker("w0", 1, proved_exit=False)
    accounts.release(1)
    accounts.release(2)
    restored = ledger_from(list(parts_of("node", accounts)))
    for it in (accounts, restored):
        it.check_invariants()
        assert it.prove_exit("w0", 1) == 7
        assert it.pages_free == POOL_PAGES
    assert list(restored._free) == list(accounts._free)
