"""Orders of events that few seeds meet by themselves, each at the moment at which a planted bug would show.

An order is played in place of the faults that a seed draws: it waits for a state, and does one thing there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Final, TypeAlias

import trio

from coordinator.state.request_state import RequestState
from hisparse.client.client import Client
from protocol import units
from protocol.messages import Rank
from tests.sim.clients import Pending, Workload
from tests.sim.cluster import Cluster, WorkerProcess

Order: TypeAlias = Callable[[Cluster, Workload], Awaitable[None]]

#: Pauses between looks at the state.
LOOK_S: Final = 0.005
#: A submission that is due within this time finds a coordinator that was killed now in its next life.
SOON_S: Final = 1.0
#: Commands reach a worker so late that it can be stopped before.
LAG_S: Final = 0.1
#: An order is over after this time, and what it has done ends.
ORDER_S: Final = 10.0
#: A worker that is stopped for so long is declared down, and goes on later.
STOP_S: Final = 5.0
#: What takes over from a worker whose pool is gone has this time to begin its requests anew.
POOL_S: Final = 2.0


async def restart_before_a_turn(cluster: Cluster, workload: Workload) -> None:
    """Kill the coordinator while a request is due that would come too early if its owner had no turn yet."""
    while True:
        life = cluster.coordinator
        if life is not None and life.is_between_turns and any(_would_overtake(cluster, workload)):
            life.kill()
        await trio.sleep(LOOK_S)


def _would_overtake(cluster: Cluster, workload: Workload) -> Iterator[Pending]:
    """Yield requests that are due, and whose rank by turn 0 would be ahead of requests that it must not overtake."""
    assert cluster.coordinator is not None
    live: dict[int, dict[str, list[Rank]]] = defaultdict(lambda: defaultdict(list))  # ranks by priority and client
    for entry in cluster.coordinator.entries():
        if not entry.ordered.held:
            live[entry.facts.priority][entry.facts.turn_owner[1]].append(entry.rank)
    for client in workload.clients:
        for pending in client.unfinished:
            if pending.is_acknowledged or not 0 < pending.at - trio.current_time() < SOON_S:
                continue
            others = dict(live[pending.truth.priority])
            depth = len(others.pop(client.name, ()))
            for ranks in others.values():
                if sum(turn == 0 for _, turn, _ in ranks) <= min(depth, len(ranks) - 1):
                    yield pending


async def stop_a_worker_with_a_prompt_to_hand_over(cluster: Cluster, workload: Workload) -> None:
    """Send requests that decode back to their prompts, and stop the worker that has computed one, and nothing else,
    before it hears that the coordinator takes it."""
    sent: set[str] = set()
    while True:
        for connection in cluster.network.connections:
            if connection.role == "worker" and cluster.shape.capacity_of(connection.owner).prefills:
                connection.down.lag_s = LAG_S
        for entry, process in _on_workers(cluster):
            prompt, name = entry.facts.prompt_tokens, entry.facts.request_id
            if not entry.generated:
                continue
            if not entry.prefills_only and name not in sent:
                sent.add(name)
                await workload.operator.order(partial(_drop_rows, name))
            elif entry.prefills_only and _durable(cluster, entry) >= prompt and prompt % units.PAGE_TOKENS:
                await _stop(process)
        await trio.sleep(LOOK_S)


async def stop_a_worker_with_a_staged_prompt(cluster: Cluster, workload: Workload) -> None:
    """Stop a worker that has staged a prompt whose last page is not full."""
    while True:
        for entry, process in _on_workers(cluster):
            assert cluster.coordinator is not None
            state = cluster.coordinator.scheduler._requests.by_index[entry.request_index].state
            prompt, durable = entry.facts.prompt_tokens, _durable(cluster, entry)
            full = durable // units.PAGE_TOKENS * units.PAGE_TOKENS
            if state.is_staged and not entry.prefills_only and prompt > units.PAGE_TOKENS and full < prompt:
                await _stop(process)
                break
        await trio.sleep(LOOK_S)


async def stop_a_worker_whose_standby_is_ready(cluster: Cluster, workload: Workload) -> None:
    """Stop a worker that decodes for so long that its parent kills it."""
    while True:
        if (process := _with_standby(cluster)) is not None:
            await _stop(process)
        await trio.sleep(LOOK_S)


async def lose_a_pool_that_a_standby_has_attached_to(cluster: Cluster, workload: Workload) -> None:
    """Damage the pool of a worker that decodes, and later kill what has taken over."""
    while True:
        if (process := _with_standby(cluster)) is not None:
            cluster.damage_pool(process.node)
            await trio.sleep(POOL_S)
            for successor in cluster.processes_of(process.node):
                successor.kill()
        await trio.sleep(LOOK_S)


def _with_standby(cluster: Cluster) -> WorkerProcess | None:
    """Return a worker that decodes and has a standby that is ready."""
    ready = cluster.standbys.real.ready if cluster.standbys is not None else []
    return next((it for entry, it in _on_workers(cluster) if entry.generated and it.name in ready), None)


def _drop_rows(request_id: str, client: Client) -> Awaitable[object]:
    return client.retract([request_id], keep=False, hold=False)


def _on_workers(cluster: Cluster) -> Iterator[tuple[RequestState, WorkerProcess]]:
    life, processes = cluster.coordinator, {it.name: it for it in cluster.processes() if it.latch.is_open}
    for entry in life.entries() if life is not None else ():
        if entry.worker in processes:
            yield entry, processes[entry.worker]


def _durable(cluster: Cluster, entry: RequestState) -> int:
    assert cluster.coordinator is not None
    return cluster.coordinator.durable(entry.request_index, entry.placement)


async def _stop(process: WorkerProcess) -> None:
    process.latch.shut()
    await trio.sleep(STOP_S)
    process.latch.open()
