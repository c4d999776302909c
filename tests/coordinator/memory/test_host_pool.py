"""The order in which a HostPool carries out the changes of one plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from coordinator.memory.changes import AddWorker, Cache, Change, Extend, Release, Reserve
from coordinator.memory.host_pool import HostPool
from coordinator.memory.ledger import Ledger
from coordinator.memory.prefix_index import PrefixIndex
from metrics.state import Buckets
from protocol.errors import CapacityError
from protocol.sizing import Memory
from tests.coordinator.memory.test_ledger import capacity
from tests.support.fakes.stepper import FakeStepper


@pytest.fixture
def applied() -> list[Change]:
    return []


@pytest.fixture
def pool(applied: list[Change]) -> HostPool[Any, None]:
    """Four pages: placement 1 has two of them, 2 and 3 one each."""

    def append(node: str, changes: Sequence[Change], notes: Sequence[Any]) -> None:
        applied.extend(changes)

    parts = {"stepped_by": FakeStepper(), "lifetimes": Buckets((1.0,)), "clock": lambda: 0.0}
    made: HostPool[Any, None] = HostPool("n0", Ledger(4), PrefixIndex(), append, **parts)
    made.transact([AddWorker("w0", 1, capacity())])
    made.transact([Reserve(number, "w0", Memory(host_pages=pages)) for number, pages in ((1, 2), (2, 1), (3, 1))])
    applied.clear()
    return made


def test_changes_behind_that_free_pages_go_ahead_of_one_without_room(
    pool: HostPool[Any, None], applied: list[Change]
) -> None:
    one = Memory(host_pages=1)
    changes = [Extend(1, one), Extend(1, one), Release(2), Release(3)]
    given = pool.transact(changes).given
    assert [it.size for it in given] == [1, 1, 0, 0]
    assert applied == [changes[2], changes[0], changes[3], changes[1]]
    pool.ledger.check_invariants()


def test_nothing_is_released_ahead_of_the_caching_of_its_pages(pool: HostPool[Any, None]) -> None:
    with pytest.raises(CapacityError):
        pool.transact([Extend(1, Memory(host_pages=1)), Cache(b""), Release(2)])


def test_changes_with_room_keep_their_order(pool: HostPool[Any, None], applied: list[Change]) -> None:
    pool.transact([Release(3)])
    changes = [Extend(1, Memory(host_pages=1)), Release(2)]
    pool.transact(changes)
    assert applied == [Release(3), *changes]
