"""One seed from its start to its verdict."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

import trio

from tests.sim import workload as workloads
from tests.sim.alarms import ALARMS, Alarms
from tests.sim.checker import LIVE_LIMIT_S
from tests.sim.clients import Workload
from tests.sim.cluster import Cluster, on_simulated_machine
from tests.sim.faults import Faults
from tests.sim.orders import ORDER_S, Order
from tests.sim.shape import Shape
from tests.sim.trace import Trace, Violation

#: Pauses between looks at whether everything is over.
LOOK_S: Final = 0.25
#: After the last request has ended, memory has this long to come back.
SETTLE_S: Final = 40.0


@dataclass
class Result:
    """`violation` is None when all invariants held; what is not a Violation is a defect too, but a nameless one."""

    seed: int
    faults: int
    violation: BaseException | None
    trace: Trace
    seconds: float
    simulated_s: float

    @property
    def name(self) -> str:
        """What is broken: an invariant, or the type of what was raised."""
        it = self.violation
        return "" if it is None else it.invariant if isinstance(it, Violation) else type(it).__name__


def simulate(
    seed: int,
    *,
    faults: bool = True,
    mutant: AbstractContextManager[object] | None = None,
    favoured: Collection[str] = (),
    order: Order | None = None,
) -> Result:
    """Run `seed`, with a planted defect if one is given.

    Faults are drawn, of the kinds in `favoured` more often, or are those of `order`.
    """
    began = time.perf_counter()
    alarms = Alarms()
    clock = alarms.clock
    trace = Trace(clock.current_time)
    cluster = Cluster(seed, Shape.of_seed(seed, roomy=not faults), trace)
    tally: list[Faults] = []

    async def main() -> None:
        ALARMS.set(alarms)
        with cluster.scope:
            async with trio.open_nursery() as nursery:
                await _play(cluster, nursery, tally, faults=faults, favoured=favoured, order=order)
                cluster.is_over = True
                nursery.cancel_scope.cancel()

    violation: BaseException | None = None
    with on_simulated_machine(cluster), mutant or nullcontext():
        try:
            trio.run(main, clock=clock, instruments=[cluster.checker])
        except BaseException as error:
            violation = _first(error)
    return Result(
        seed,
        sum(it.done for it in tally),
        cluster.checker.violation or violation,
        trace,
        time.perf_counter() - began,
        clock.current_time(),
    )


async def _play(
    cluster: Cluster,
    nursery: trio.Nursery,
    tally: list[Faults],
    *,
    faults: bool,
    favoured: Collection[str],
    order: Order | None,
) -> None:
    workload = workloads.draw(cluster)
    cluster.start(nursery)
    nursery.start_soon(workload.operator.run)
    for client in workload.clients:
        nursery.start_soon(client.run)
    if faults:
        cluster.checker.expects_crashes = True
        tally.append(Faults(cluster, workload, nursery, favoured))
        if order is None:
            await tally[0].run()
        else:
            with trio.move_on_at(ORDER_S):
                await order(cluster, workload)
            tally[0].heal()
    await _finish(cluster, workload)


async def _finish(cluster: Cluster, workload: Workload) -> None:
    """Let what is held go on until everything has ended and all memory is back."""
    give_up_at = trio.current_time() + LIVE_LIMIT_S
    while workload.unfinished and trio.current_time() < give_up_at:
        life = cluster.coordinator
        if life is not None and life.is_draining:
            await workload.operator.order(lambda client: client.undrain())
        if life is not None and (held := life.held):
            await workload.operator.order(lambda client: client.resume(held))
        await trio.sleep(LOOK_S)
    with trio.move_on_after(SETTLE_S):
        while not cluster.is_settled and not workload.unfinished:  # noqa: ASYNC110
            await trio.sleep(LOOK_S)
    cluster.checker.check_end(workload.unfinished)


def _first(error: BaseException) -> BaseException:
    """Of several that were raised, a Violation, or the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [_first(it) for it in error.exceptions]
    return next((it for it in leaves if isinstance(it, Violation)), leaves[0])
