"""Bugs of standbys, planted as those of mutants.py: a standby, or its parent, uses memory that is not its own yet."""

from __future__ import annotations

from copy import copy
from typing import Any, Final

import numpy as np

from hisparse.cluster.standbys import Standbys
from tests.sim.cluster import Cluster, WorkerProcess
from tests.sim.fake_worker import FakePool
from tests.sim.mutants import MUTANTS, Plan, plant
from tests.sim.standbys import FakeStandby

_OTHERS: Final = frozenset(MUTANTS)


@plant
def touch_the_pool_of_a_worker_that_lives() -> Plan:
    """A standby attaches as the process does that makes a pool."""

    def attach(self: FakeStandby, pool: FakePool) -> None:
        self.pool = pool
        for page in range(len(pool.rows)):
            pool.overwrite(page, np.zeros_like(pool.rows[page]))

    yield FakeStandby, "attach", attach


@plant
def take_over_before_the_exit_is_proved() -> Plan:
    """A worker that is stopped writes nothing: so the parent says that it has gone, and gives the order."""

    def end_hung(self: Cluster, process: WorkerProcess) -> None:
        if not process.exited.is_set():
            process.exited.set()
            self._nursery.start_soon(self.succeed, process.name)

    yield Cluster, "end_hung", end_hung


@plant
def take_over_twice() -> Plan:
    """The order is heard twice, and one process begins two workers of one epoch."""
    original = Cluster.take_over

    def take_over(self: Cluster, standby: FakeStandby) -> None:
        original(self, standby)
        original(self, standby)

    yield Cluster, "take_over", take_over


@plant
def take_over_with_a_pool_that_is_gone() -> Plan:
    """It has looked at the file that lies there, and not at what it has mapped."""

    def pool_of(self: FakeStandby, found: FakePool) -> FakePool:
        stale = copy(self.pool or found)
        stale.id = found.id
        return stale

    yield FakeStandby, "pool_of", pool_of
    yield Standbys, "kill", lambda self: None


#: It shows without a fault.
SHOWN_CALM: Final = frozenset({"touch_the_pool_of_a_worker_that_lives"})
STANDBY_MUTANTS: Final[dict[str, Any]] = {name: plan for name, plan in MUTANTS.items() if name not in _OTHERS}
