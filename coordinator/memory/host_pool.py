"""The HostPool actor: owner of every ledger of one node, its host pages and the GPU budgets of its workers.

The Scheduler calls it in its turns (coordinator.actor). A transaction is applied in one step, so a reservation over
host pages, seats, hot chunks and index pages is all or nothing (I7). It is appended to the journal in that very step,
with the records that must become true together with it; the answer has the commit, before which no command may be sent
that gives memory (I4). A change that does not fit is a defect, since only the Scheduler asks and it plans over these
very accounts: it ends the process.

Idle cached pages count as free. When a change takes more pages than are free, some are evicted just before it, and the
eviction is written down before it like any change. Pages that the same transaction shares are spared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from coordinator.actor import Actor
from coordinator.memory.changes import FREEING, GIVING, Change, Evict, Reserve, Shrink, apply, pages_taken
from coordinator.memory.ledger import Ledger
from coordinator.memory.prefix_index import PrefixIndex
from metrics.state import Buckets
from protocol.arrays import Int32Array

#: It is called and not told, so one is more than there ever is.
MAILBOX_MAX: Final = 1
NO_AGES: Final = np.zeros(0)


#: A record of the journal, and the commit of some: this room lies below the journal's.
RecordT = TypeVar("RecordT")
CommitT = TypeVar("CommitT")


class Applied(NamedTuple, Generic[CommitT]):
    """The page ids that each change gave out, and the commit before which none of them counts."""

    given: list[Int32Array]
    commit: CommitT


class Transact(msgspec.Struct, Generic[RecordT], frozen=True):
    """Apply `changes` in order, and append them to the journal with `notes`."""

    changes: Sequence[Change]
    notes: Sequence[RecordT]


class PageAges:
    """Times for which pages of `ledger` are held, from being taken to being free again, under any number of holders.

    The ledger is asked after each change; pages held at the start count from there.
    """

    def __init__(self, ledger: Ledger, now: float) -> None:
        self._ledger = ledger
        self._since = np.full(ledger.pages_total, now)

    def note(self, free_before: int, now: float) -> npt.NDArray[np.float64]:
        """After one change of a ledger that had `free_before` free pages: the ages of the pages that it freed."""
        taken, freed = self._ledger.moved(free_before)
        if len(taken):
            self._since[taken] = now
        ages: npt.NDArray[np.float64] = now - self._since[freed] if len(freed) else NO_AGES
        return ages


class HostPool(Actor[Transact[RecordT]], Generic[RecordT, CommitT]):
    """`ledger` may be read by any actor between turns; only this one changes it. The Scheduler adds to `prefixes`, and
    this actor evicts from it. `append(node, changes, notes)` writes to the journal and returns the commit. `lifetimes`
    observes how long pages were held, by `clock`; `evicted` is called with each number of pages evicted, and the number
    of these that were above their owner's share."""

    def __init__(
        self,
        node: str,
        ledger: Ledger,
        prefixes: PrefixIndex,
        append: Callable[[str, Sequence[Change], Sequence[RecordT]], CommitT],
        *,
        stepped_by: Actor[Any],
        lifetimes: Buckets,
        clock: Callable[[], float],
        evicted: Callable[[int, int], None] = lambda pages, lent: None,
    ) -> None:
        name = f"host pool of {node}"
        super().__init__(name, mailbox_max=MAILBOX_MAX, batch_max=MAILBOX_MAX, stepped_by=stepped_by)
        self.node = node
        self.ledger = ledger
        self._prefixes = prefixes
        self._evicted = evicted
        self._append = append
        self._lifetimes = lifetimes
        self._clock = clock
        self._ages = PageAges(ledger, clock())

    def transact(self, changes: Sequence[Change], notes: Sequence[RecordT] = ()) -> Applied[CommitT]:
        """Apply `changes` in order, all in one commit. For the task that steps this actor.

        Where a change finds no room, since what may be evicted is lent to a later one, changes behind it that free
        pages go ahead. Their sums fit.
        """
        (applied,) = self.call(Transact(changes, notes))
        assert isinstance(applied, Applied)
        return applied

    async def handle(self, batch: list[Transact[RecordT]]) -> list[Applied[CommitT]]:
        answers: list[Applied[CommitT]] = []
        for transact in batch:
            changes, applied = transact.changes, list[Change]()
            given: dict[int, Int32Array] = {}
            for place, change in enumerate(changes):
                if place in given:
                    continue
                if isinstance(change, GIVING) and (pages := pages_taken(change)) > self.ledger.pages_free:
                    if eviction := self._make_room(pages, changes):
                        self._apply(eviction)
                        applied.append(eviction)
                    for ahead in _freeing_next(changes, place):
                        if self.ledger.pages_free >= pages:
                            break
                        if ahead not in given:
                            given[ahead] = self._apply(changes[ahead])
                            applied.append(changes[ahead])
                given[place] = self._apply(change)
                applied.append(change)
            commit = self._append(self.node, applied, transact.notes)
            answers.append(Applied([given[place] for place in range(len(changes))], commit))
        return answers

    def _make_room(self, pages: int, changes: Sequence[Change]) -> Evict | None:
        """Choose pages to evict so that `pages` are free, among those that no change of `changes` shares."""
        missing = pages - self.ledger.pages_free
        shares = (it.shared.tolist() for it in changes if isinstance(it, Reserve))
        spared = frozenset(chain.from_iterable(shares))
        lent_before = self._prefixes.evicted_lent
        evicted = self._prefixes.evict(missing, self.ledger.is_idle, spared)
        self._evicted(evicted.size, self._prefixes.evicted_lent - lent_before)
        return Evict(evicted.tobytes()) if evicted.size else None

    def _apply(self, change: Change) -> Int32Array:
        free_before = self.ledger.pages_free
        given = apply(self.ledger, change)
        self._prefixes.given_out(lambda: self.ledger.moved(free_before)[0])
        self._lifetimes.observe_all(self._ages.note(free_before, self._clock()))
        return given


def _freeing_next(changes: Sequence[Change], place: int) -> Iterator[int]:
    """Yield places of the changes behind `place` that free pages, up to the first that is no change of a placement:
    pages are cached ahead of the release of what holds them."""
    for ahead in range(place + 1, len(changes)):
        if isinstance(changes[ahead], FREEING):
            yield ahead
        elif not isinstance(changes[ahead], (*GIVING, Shrink)):
            return
