"""Standbys in the simulated cluster: those of hisparse.cluster.standbys, over processes that are none.

    prepares     for PREPARE_S, or late; then it attaches to the pool of its node, and writes nothing there
    ordered      the parent has seen the exit of the worker. One that was stopped is killed, and so is one that still
                 is when HEARD_LIMIT_S has passed
    takes over   within TAKE_OVER_S, or dies on its way: then its worker is started plainly. It is a worker from there
                 on, with the pool that it has attached to, if that is the one that lies there

The coordinator hears of none of it: a standby has said no hello.
"""

from __future__ import annotations

import random
import signal
from typing import TYPE_CHECKING, Final, cast

import trio

from hisparse.cluster.children import Child
from hisparse.cluster.standbys import Standbys
from protocol.start_and_end import STANDBY
from tests.sim.links import Latch

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.fake_worker import FakePool

PREPARE_S: Final = (0.1, 0.6)
LATE_ODDS: Final = 0.25
LATE_S: Final = (1.0, 4.0)
TAKE_OVER_S: Final = (0.0, 0.3)
DEATH_ODDS: Final = 0.25
#: How often the parent looks at its processes, and when a worker that is stopped hangs.
LOOK_S: Final = 0.25
HUNG_S: Final = 1.5


class FakeStandby:
    """A process that waits to be worker `name`, as a Child."""

    def __init__(self, cluster: Cluster, name: str, pid: int) -> None:
        self.name, self.pid, self.node = name, pid, cluster.shape.workers[name]
        self.step, self.latch = "imports", Latch()
        self.is_ordered = False
        self.pool: FakePool | None = None
        self._cluster = cluster
        self._rng = random.Random(f"{cluster.seed} standby {pid}")
        self._order, self._ended, self._scope = trio.Event(), trio.Event(), trio.CancelScope()

    @property
    def running(self) -> bool:
        return not self._ended.is_set()

    def order(self) -> bool:
        if self.running:
            self.is_ordered = True
            self._order.set()
        return self.running

    async def wait(self) -> int:
        await self._ended.wait()
        return -signal.SIGKILL

    def signal(self, number: signal.Signals) -> None:
        self._scope.cancel()

    def end_text(self, status: int) -> str:
        return f"ended with {status}"

    def close(self) -> None:
        """No descriptor is open."""

    async def run(self) -> bool:
        """Until it takes over, or has ended; return whether it takes over."""
        with self._scope:
            await trio.sleep(self._rng.uniform(*(LATE_S if self._rng.random() < LATE_ODDS else PREPARE_S)))
            await self.latch.passed()
            self.attach(self._cluster.pools[self.node])
            self.step = STANDBY
            await self._order.wait()
            await self.latch.passed()
            self.step = "takes over"
            await trio.sleep(self._rng.uniform(*TAKE_OVER_S))
            if self._rng.random() >= DEATH_ODDS:
                return True
        self._ended.set()
        return False

    def attach(self, pool: FakePool) -> None:
        """Do what worker.pool.start.attach_pool does."""
        self.pool = pool

    def pool_of(self, found: FakePool) -> FakePool:
        """Do what worker.pool.start.open_pool does, where `found` lies there now."""
        return self.pool if self.pool is not None and self.pool.id == found.id else found


class SimStandbys:
    """The parent's part, for the workers of `cluster` that are no ranks."""

    def __init__(self, cluster: Cluster, names: list[str], nursery: trio.Nursery) -> None:
        self._cluster, self._nursery = cluster, nursery
        self.real = Standbys(names, self._start, lambda name, child: None)
        for name in names:
            nursery.start_soon(self.real.keep, name, lambda it=name: self._serves(it), self._note, lambda: None)
        nursery.start_soon(self._look)

    def waiting(self) -> list[FakeStandby]:
        """Those that have not been ordered."""
        return [it for it in cast("list[FakeStandby]", list(self.real.children.values())) if it.running]

    def _start(self, name: str) -> Child:
        child = FakeStandby(self._cluster, name, self._cluster.next_pid())
        self._nursery.start_soon(self._live, child)
        return cast("Child", child)

    async def _live(self, child: FakeStandby) -> None:
        if await child.run():
            self._cluster.take_over(child)
        elif child.is_ordered and not self._cluster.is_over:
            await self._cluster.succeed(child.name)

    def _serves(self, name: str) -> bool:
        return any(process.name == name and process.latch.is_open for process in self._cluster.processes())

    def _note(self, text: str) -> None:
        self._cluster.trace.note("parent", text)

    async def _look(self) -> None:
        """Kill workers that hang, and standbys that do not hear their order."""
        stopped: dict[int, float] = {}
        while True:
            await trio.sleep(LOOK_S)
            now = trio.current_time()
            for child in self.real.unheard(now):
                child.signal(signal.SIGKILL)
            shut = {it.pid: it for it in self._cluster.processes() if not it.latch.is_open and it.group is None}
            stopped = {pid: stopped.get(pid, now) for pid in shut}
            for pid, process in shut.items():
                if now - stopped[pid] > HUNG_S:
                    self._cluster.end_hung(process)
