"""Every change of a ledger as data, so that it can be carried to its owner, and written down before it counts. Pure."""

from __future__ import annotations

from typing import TypeAlias, assert_never

import msgspec

from coordinator.memory.ledger import NO_PAGES, Ledger
from protocol.arrays import Int32Array, unpack_int32
from protocol.messages import WorkerCapacity
from protocol.sizing import Memory


class LedgerChange(msgspec.Struct, frozen=True, array_like=True):
    """Base: tagged, so that a change can be written down and read again. Tags are part of the journal's form."""


class AddWorker(LedgerChange, frozen=True, tag="add_worker"):
    worker: str
    epoch: int
    capacity: WorkerCapacity


class LoseWorker(LedgerChange, frozen=True, tag="lose_worker"):
    worker: str
    epoch: int
    proved_exit: bool


class ProveExit(LedgerChange, frozen=True, tag="prove_exit"):
    worker: str
    epoch: int


class Reserve(LedgerChange, frozen=True, tag="reserve"):
    placement: int
    worker: str
    want: Memory
    take_over: int | None = None
    share: bytes = b""  # cached pages, int32, with which the list begins

    @property
    def shared(self) -> Int32Array:
        return unpack_int32(self.share, "share")


class Extend(LedgerChange, frozen=True, tag="extend"):
    placement: int
    more: Memory


class Shrink(LedgerChange, frozen=True, tag="shrink"):
    placement: int
    less: Memory


class Keep(LedgerChange, frozen=True, tag="keep"):
    placement: int
    pages: int


class Release(LedgerChange, frozen=True, tag="release"):
    placement: int


class Cache(LedgerChange, frozen=True, tag="cache"):
    """`pages` is int32. Of what is in them, the prefix index knows, which is not written down."""

    pages: bytes


class Evict(LedgerChange, frozen=True, tag="evict"):
    pages: bytes


Change: TypeAlias = AddWorker | LoseWorker | ProveExit | Reserve | Extend | Shrink | Keep | Release | Cache | Evict

#: Changes that give memory away: no command follows from one before it is committed (I4).
GIVING = (Reserve, Extend)
#: Changes that may give host pages back.
FREEING = (Release, Keep)


def pages_taken(change: Reserve | Extend) -> int:
    """Free host pages that it takes."""
    return (change.want if isinstance(change, Reserve) else change.more).host_pages


def apply(ledger: Ledger, change: Change) -> Int32Array:
    """Carry one change out; returns the page ids that it gave out, if any. Raises as the ledger's methods do."""
    match change:
        case Reserve(placement, worker, want, take_over):
            return ledger.reserve(placement, worker, want, take_over=take_over, share=change.shared)
        case Extend(placement, more):
            return ledger.extend(placement, more)
        case Shrink(placement, less):
            ledger.shrink(placement, less)
        case Keep(placement, pages):
            ledger.keep(placement, pages)
        case Release(placement):
            ledger.release(placement)
        case AddWorker(worker, epoch, capacity):
            ledger.add_worker(worker, epoch, capacity)
        case LoseWorker(worker, epoch, proved_exit):
            ledger.lose_worker(worker, epoch, proved_exit=proved_exit)
        case ProveExit(worker, epoch):
            ledger.prove_exit(worker, epoch)
        case Cache(pages):
            ledger.cache(unpack_int32(pages, "pages"))
        case Evict(pages):
            ledger.evict(unpack_int32(pages, "pages"))
        case _:
            assert_never(change)
    return NO_PAGES
