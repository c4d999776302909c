"""Keeps the processes of a cluster running: restarts those that died, kills those that hang.

    died      a child with an exit status other than 0 is started again after a pause that doubles (`Restarts`). A child
              with status 0 was asked to exit and is not restarted. After RESTARTS_MAX short lives in a row it is given
              up: a child that dies at every start would die at the next one, too. A life is short unless the child
              served for longer than the pause before it: loading and warming up are no service
    hangs     a worker process that was connected, and then missing for HUNG_LIMITS heartbeat limits while the
              coordinator answers, is killed (`ChildWatch`). The coordinator has declared it down one limit earlier, and
              its pages are quarantined until its exit is proved. This includes a stopped process (SIGSTOP). Where a
              standby is ready, the process is killed as soon as a coordinator that had it connected has declared it
              down, unless it is leaving: a takeover costs less than one more limit. A
              coordinator that does not answer for COORDINATOR_HUNG_LIMITS heartbeat limits is killed likewise, and so
              is a worker that has not connected, and has come no further for START_LIMIT_S; of a group, no rank
    standby   where a worker has one, it takes over in place of a restart (hisparse.cluster.standbys),
              once the exit of the worker is proved: `_keep` has waited for its pidfd. It counts as a restart, for the
              pause and for giving up; only the pause of a first short life is left out
    group     restarted whole. When one rank ends, the others end by themselves (hisparse.cluster.group_end), or are
              killed when they do not; then all start together, after one pause, or the standbys of all ranks take over,
              if each has one. Restarts are counted per group, and the group serves while all of its ranks are connected
    pool      a host pool that was cut, overwritten or removed ends all workers of the node: their rows are gone. The
              first that starts again makes a new pool, by whose id the coordinator knows that requests are to be
              prefilled again
    forgotten a worker that is not restarted, or that an earlier start had, is listed no longer once its exit is proved
    over      the coordinator has exited or was given up, or all workers have; with workers elsewhere, all that is here.
              While a cluster starts, each child is needed, and one that refuses to start would refuse again: it is over
              when one is not restarted (hisparse.cluster.starting)

Where a cluster spans nodes, each node has a ProcessSupervisor for its processes, and a coordinator elsewhere cannot see
them end: `vouch` is given the names of workers whose processes have ended, in that order, before they start again.

A kill loses nothing: rows are in the host pool, which this process holds open for later workers, and acknowledged
requests are in the coordinator's journal.

Rejected: restarting at a fixed interval (a crash at start would use a core for ever); judging a worker by its /healthz
(the answering thread does not show the state of the link, and a stopped process does not answer).
"""

from __future__ import annotations

import math
import signal
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio

from hisparse.client.client import Client, open_client
from hisparse.cluster.children import Child
from hisparse.cluster.group_end import RankEnd, blamed, end_text, follow_limit_s, is_wanted
from hisparse.cluster.restarts import Restarts, unseen_service_s
from hisparse.cluster.standbys import Standbys
from hisparse.cluster.weights import WeightKeepers
from hisparse.console.options import EXIT_CODES
from protocol.errors import (
    BadInput,
    CapacityError,
    ConfigError,
    HiSparseError,
    NotAllowed,
    NotFound,
    ProtocolError,
    WrongState,
)
from protocol.messages import WorkerRow
from protocol.settings import Config
from protocol.start_and_end import LEAVING
from protocol.transport.keys import access
from worker.pool.file import PoolHold

#: Heartbeat limits for which a worker may be missing, and a coordinator silent, before it is killed.
HUNG_LIMITS: Final = 2
COORDINATOR_HUNG_LIMITS: Final = 4
#: For how long processes that start may come no further. Weights and the host pool, which may take an hour, show each
#: thousandth; kernels are compiled and graphs captured without a word, within some minutes.
START_LIMIT_S: Final = 600.0
#: How often the coordinator is asked for its workers.
WATCH_INTERVAL_S: Final = 0.5
COORDINATOR: Final = "coordinator"
HTTP: Final = "http"
CONNECTED: Final = frozenset({"connected", "draining", "drained"})
#: Exit codes with which a process refuses to start: it has said why, and would refuse again.
REFUSALS: Final = {EXIT_CODES[it.code]: it for it in (BadInput, ConfigError, CapacityError, NotAllowed, ProtocolError)}

assert COORDINATOR_HUNG_LIMITS > HUNG_LIMITS  # a slow coordinator is killed later than a worker would be


def open_admin(config: Config, name: str) -> AbstractAsyncContextManager[Client]:
    """An admin client of the coordinator of `config`, which does not reconnect."""
    endpoint = config.cluster.admin_endpoint
    key = access(config.cluster, "admin", endpoint)
    return open_client(endpoint, role="admin", name=name, reconnect_limit_s=0, key=key)


async def _no_word(names: Sequence[str]) -> None:
    """The coordinator sees the exits of this node's processes itself."""


async def _tell_end(child: Child, sender: trio.MemorySendChannel[RankEnd]) -> None:
    status = await child.wait()
    await sender.send(RankEnd(child.name, status, child.reason))


@dataclass
class _WorkerProcess:
    """A worker process: the last epoch before its start, and when it was seen connected under a later one.

    `starts_since`: when it was started, when the coordinator was back after a silence, or when it or a rank of its
    group came further. `was_heard`: the coordinator that answers now has listed it as connected; `is_down`: it does so
    no longer.
    """

    epoch_before: int
    starts_since: float
    first_connected_at: float | None = None
    connected_at: float | None = None
    was_heard: bool = False
    is_down: bool = False

    def connected(self, epoch: int, now: float) -> None:
        if epoch > self.epoch_before:
            self.connected_at = now
            self.first_connected_at = now if self.first_connected_at is None else self.first_connected_at
            self.was_heard, self.is_down = True, False

    def forget_heard(self) -> None:
        self.was_heard = self.is_down = False


@dataclass
class ChildWatch:
    """Finds processes that hang, from the coordinator's rows of workers. Pure; times are seconds of one clock.

    `groups`: the names of the ranks of each group.
    """

    limit_s: float
    start_limit_s: float = START_LIMIT_S
    groups: Collection[Sequence[str]] = ()
    _processes: dict[str, _WorkerProcess] = field(default_factory=dict)
    _epochs: dict[str, int] = field(default_factory=dict)
    _steps: Mapping[str, str] = field(default_factory=dict)
    _answered_at: float | None = None
    _answers_since: float | None = None

    def began(self, name: str, now: float) -> None:
        """A new process of this name was started."""
        if name == COORDINATOR:
            self._answered_at = self._answers_since = None
        elif name != HTTP:  # the coordinator lists workers alone
            self._processes[name] = _WorkerProcess(self._epochs.get(name, -1), now)

    def asks_anew(self) -> None:
        """A new connection to the coordinator was made, which may be another process that has heard no worker yet."""
        for process in self._processes.values():
            process.forget_heard()

    def answered(self, rows: Iterable[WorkerRow], now: float) -> None:
        """The coordinator answered with `rows`. Time in which it did not answer does not count against workers."""
        if self._answered_at is not None and now - self._answered_at > self.limit_s / HUNG_LIMITS / 2:
            self.asks_anew()  # it may not have heard heartbeats of that time yet
        if self._answered_at is None or now - self._answered_at > self.limit_s:
            for process in self._processes.values():
                process.connected_at = None if process.connected_at is None else now
                process.starts_since = now
        self._answered_at = now
        self._answers_since = now if self._answers_since is None else self._answers_since
        for row in rows:
            self._epochs[row.worker] = max(row.epoch, self._epochs.get(row.worker, -1))
            listed = self._processes.get(row.worker)
            if listed is not None and row.state in CONNECTED:
                listed.connected(row.epoch, now)
            elif listed is not None:
                listed.is_down = listed.was_heard

    def came_to(self, steps: Mapping[str, str], now: float) -> None:
        """Worker processes have come to `steps` of their starts. A change is a sign of life of the process, and of the
        ranks of its group, which wait for each other. One that waits for the host pool shows how far that has come as
        its own step."""
        moved = {name for name, step in steps.items() if step != self._steps.get(name)}
        self._steps = dict(steps)
        for name, process in self._processes.items():
            if not moved.isdisjoint(self.waits_for(name)):
                process.starts_since = now

    def serves_since(self, names: Iterable[str]) -> float | None:
        """Since when all processes of these names serve: the coordinator was first seen to answer, workers connected.
        None: one was never seen to serve."""
        seen = [self._answers_since if it == COORDINATOR else self._processes[it].first_connected_at for it in names]
        return None if None in seen else max(it for it in seen if it is not None)

    def is_starting(self, name: str) -> bool:
        return name in self._processes and self._processes[name].connected_at is None

    def hung(self, now: float, replaceable: Collection[str] = ()) -> list[str]:
        """Names of processes to kill. One that was never connected is still starting, within `start_limit_s`.

        `replaceable`: workers that have a ready standby. One whose whole group has is killed once it is down.
        """
        if self._answered_at is None:
            return []
        silent_s = now - self._answered_at
        if silent_s > self.limit_s * COORDINATOR_HUNG_LIMITS / HUNG_LIMITS:
            return [COORDINATOR]
        if silent_s > self.limit_s / 2:
            return []
        return [
            name
            for name, process in self._processes.items()
            if self._hangs(process, now) or (process.is_down and set(self.waits_for(name)) <= set(replaceable))
        ]

    def waits_for(self, name: str) -> Sequence[str]:
        """Return the ranks of the group of `name`; itself where it is in none."""
        return next((ranks for ranks in self.groups if name in ranks), (name,))

    def _hangs(self, process: _WorkerProcess, now: float) -> bool:
        if process.connected_at is None:
            return now - process.starts_since > self.start_limit_s
        return now - process.connected_at > self.limit_s


class Supervised(Protocol):
    """The part of hisparse.cluster.up.Cluster that ProcessSupervisor uses."""

    @property
    def config(self) -> Config: ...
    @property
    def by_name(self) -> Mapping[str, Child]: ...
    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]: ...
    @property
    def pool_hold(self) -> PoolHold: ...
    @property
    def keepers(self) -> WeightKeepers: ...
    def restart(self, name: str) -> Child: ...


class ProcessSupervisor:
    """One per cluster, or node of one. `report` is called with lines for the user, `changed` after each restart.

    `elsewhere`: workers that other nodes keep; `vouch` as in the head of this module. `starting`: the cluster is not
    ready yet. Then `over` has a wider sense (above), hisparse.cluster.starting limits the start, and no pool is held.
    """

    def __init__(
        self,
        cluster: Supervised,
        report: Callable[[str], None],
        changed: Callable[[], None],
        *,
        elsewhere: Collection[str] = (),
        vouch: Callable[[Sequence[str]], Awaitable[None]] = _no_word,
        starting: bool = False,
        standbys: Standbys | None = None,
    ) -> None:
        self._starting = starting
        self._standbys = standbys
        self.leaving: set[str] = set()  # workers that are told to exit, for their standbys to take over
        self._restarts = {name: Restarts() for name in cluster.by_name}
        self._cluster = cluster
        self._report = report
        self._changed = changed
        self._elsewhere = frozenset(elsewhere)
        self._vouch = vouch
        limit_s = HUNG_LIMITS * cluster.config.coordinator.heartbeat_limit_s
        start_limit_s = math.inf if starting else START_LIMIT_S
        self._watch = ChildWatch(limit_s, start_limit_s, [*cluster.groups.values()])
        self._left = set(cluster.by_name)
        self._not_forgotten: set[str] = set()
        self._last = list(cluster.by_name.values())[-1]
        self._scope = trio.CancelScope()

    async def run(self) -> Child:
        """Keep the children until the cluster is over; returns the child whose end ended it.

        Cancelled: children run on, without restarts.
        """
        started = self._cluster.by_name.keys()  # ranks are started after the coordinator
        groups = {group: ranks for group, ranks in self._cluster.groups.items() if started >= set(ranks)}
        in_groups = {name for ranks in groups.values() for name in ranks}
        with self._scope:
            async with trio.open_nursery() as nursery:
                for name in self._cluster.by_name:
                    self._watch.began(name, trio.current_time())
                    if name not in in_groups:
                        nursery.start_soon(self._keep, name)
                if self._standbys is not None:
                    for name in self._standbys.names:
                        nursery.start_soon(self._keep_standby, self._standbys, name)
                for group, ranks in groups.items():
                    nursery.start_soon(self._keep_group, group, ranks)
                nursery.start_soon(self._watch_all)
        return self._last

    async def _keep(self, name: str) -> None:
        restarts = self._restarts[name]
        while True:
            child, began = self._cluster.by_name[name], trio.current_time()
            status = await child.wait()
            is_final, is_leaving = self._is_final(status) and name not in self.leaving, name in self.leaving
            self.leaving.discard(name)
            served_s = self._served_s([name], trio.current_time() - began)
            pause_s = None if is_final else 0.0 if is_leaving else restarts.after(served_s)
            if pause_s is None:
                what = "not restarted" if is_final else "given up after too many restarts"
                self._report(f"{name} {child.end_text(status)}; {what}")
                await self._tell_gone([name])
                self._let_go(name, child)
                return
            standby = self._standbys if self._standbys is not None and self._standbys.has(name) else None
            if standby is not None and restarts.short_lives == 1:
                pause_s = 0.0
            what = "its standby takes over" if standby is not None else "restarted"
            self._report(f"{name} {child.end_text(status)}; {what} in {pause_s:g} s")
            await self._tell_gone([name])
            await trio.sleep(pause_s)
            if standby is None or not standby.take_over(name):
                self._cluster.restart(name)
            self._watch.began(name, trio.current_time())
            self._changed()

    @property
    def standbys(self) -> Standbys:
        assert self._standbys is not None
        return self._standbys

    def serves(self, name: str) -> bool:
        """Return whether the process that is worker `name` now has been connected, and is kept."""
        return name in self._left and self._watch.serves_since([name]) is not None

    async def _keep_standby(self, standbys: Standbys, name: str) -> None:
        def serves() -> bool:
            since = self._watch.serves_since(self._watch.waits_for(name))
            return since is not None and trio.current_time() - since > self._restarts[name].pause_s

        await standbys.keep(name, serves, self._report, self._changed)

    async def _keep_group(self, group: str, ranks: Sequence[str]) -> None:
        restarts = Restarts()
        self._restarts |= dict.fromkeys(ranks, restarts)
        while True:
            ends, served_s = await self._ended(group, ranks)
            last = blamed(ends) or ends[-1]
            is_final = is_wanted(ends) or (last.status != 0 and self._is_final(last.status))
            pause_s = None if is_final else restarts.after(served_s)
            if pause_s is None:
                what = "not restarted" if is_final else "given up after too many restarts"
                self._report(f"{end_text(group, ends)}; {what}")
                child = self._cluster.by_name[last.name]
                await self._tell_gone([end.name for end in ends])
                for name in ranks:
                    self._let_go(name, child)
                return
            standbys = self._standbys if self._standbys is not None and all(map(self._standbys.has, ranks)) else None
            if standbys is not None and restarts.short_lives == 1:
                pause_s = 0.0
            what = "the standbys of its ranks take over" if standbys is not None else "all of its ranks are restarted"
            self._report(f"{end_text(group, ends)}; {what} in {pause_s:g} s")
            await self._tell_gone([end.name for end in ends])
            await trio.sleep(pause_s)
            for name in ranks:
                if standbys is None or not standbys.take_over(name):
                    self._cluster.restart(name)
                self._watch.began(name, trio.current_time())
            self._changed()

    async def _ended(self, group: str, ranks: Sequence[str]) -> tuple[list[RankEnd], float]:
        """Wait until all ranks have ended; returns their ends in order, and how long all of them have served.

        Those that do not follow the first in time are killed.
        """
        children = {name: self._cluster.by_name[name] for name in ranks}
        sender, receiver = trio.open_memory_channel[RankEnd](len(ranks))
        ends: list[RankEnd] = []
        async with trio.open_nursery() as nursery:
            for child in children.values():
                nursery.start_soon(_tell_end, child, sender)
            ends.append(await receiver.receive())
            served_s, now = self._served_s(ranks), trio.current_time()
            kill_at = now + follow_limit_s(ends[0], self._watch.limit_s)
            while len(ends) < len(ranks):
                with trio.move_on_at(kill_at) as scope:
                    ends.append(await receiver.receive())
                    limit_s = follow_limit_s(ends[-1], self._watch.limit_s)
                    kill_at = min(kill_at, trio.current_time() + limit_s)
                if scope.cancelled_caught:
                    self._kill_stragglers(group, children)
                    ends += [await receiver.receive() for _ in range(len(ranks) - len(ends))]
        return ends, served_s

    def _is_final(self, status: int) -> bool:
        """Return whether a child with this exit status is never to be started again."""
        return status == 0 or (self._starting and status in REFUSALS)

    def _served_s(self, names: Sequence[str], ran_s: float = 0.0) -> float:
        """Return how long the children of these names, which ran for `ran_s`, have served."""
        if HTTP in names:
            return unseen_service_s(ran_s)
        since = self._watch.serves_since(names)
        return 0.0 if since is None else trio.current_time() - since

    def _kill_stragglers(self, group: str, children: Mapping[str, Child]) -> None:
        for name, child in children.items():
            if child.running:
                self._report(f"{name} did not end with group {group}; killed")
                child.signal(signal.SIGKILL)

    async def _tell_gone(self, names: Sequence[str]) -> None:
        if workers := [name for name in names if name not in (COORDINATOR, HTTP)]:
            await self._vouch(workers)

    def _let_go(self, name: str, child: Child) -> None:
        self._left.discard(name)
        without = frozenset() if self._elsewhere else {COORDINATOR, HTTP}  # of no use without workers
        if self._starting or name == COORDINATOR or self._left <= without:
            self._last = child
            self._scope.cancel()

    async def _watch_all(self) -> None:
        """Ask for the workers, on one connection while answers come in time, then on a new one."""
        while True:
            try:
                with trio.move_on_after(self._watch.limit_s) as scope:
                    async with open_admin(self._cluster.config, "hisparse up") as client:
                        await self._ask_on(client, scope)
            except HiSparseError:
                pass
            self._look()
            await trio.sleep(WATCH_INTERVAL_S)

    async def _ask_on(self, client: Client, scope: trio.CancelScope) -> None:
        """Ask for the workers in intervals, and tell which have standbys; `scope` cancels it when an answer is
        overdue."""
        told: list[str] | None = None
        self._watch.asks_anew()
        while True:
            if self._standbys is not None and self._standbys.names and told != self._standbys.ready:
                told = self._standbys.ready
                await client.tell_standbys(self._standbys.names, told)
            rows = await client.workers()
            self._watch.answered(rows, trio.current_time())
            self._look()
            if not self._starting:
                await self._forget_gone(client, rows)
            await trio.sleep(WATCH_INTERVAL_S)
            scope.deadline = trio.current_time() + self._watch.limit_s

    async def _forget_gone(self, client: Client, rows: Iterable[WorkerRow]) -> None:
        """Have the workers forgotten whose processes are proved gone, and which this cluster does not start again."""
        for row in rows:
            if row.exit_proved and row.worker not in self._left | self._not_forgotten | self._elsewhere:
                try:
                    await client.forget([row.worker])
                except (NotFound, WrongState):  # back already, or pages of an earlier epoch are quarantined
                    self._not_forgotten.add(row.worker)

    def _look(self) -> None:
        """Look at the processes and the host pool of this node."""
        if not self._starting:
            self._watch.came_to({name: child.step for name, child in self._workers.items()}, trio.current_time())
            self._look_at_pool()
        self._cluster.keepers.look()
        for name in self._watch.hung(trio.current_time(), self._replaceable()):
            child = self._cluster.by_name.get(name)  # none: a coordinator elsewhere
            if child is not None and child.running:
                is_starting = self._watch.is_starting(name)
                stuck = f"has come no further than {child.step!r} for {START_LIMIT_S:g} s"
                self._report(f"{name} {stuck if is_starting else 'hangs'}; killed")
                child.signal(signal.SIGKILL)
        for child in self._standbys.unheard(trio.current_time()) if self._standbys is not None else ():
            self._report(f"{child.name} does not take over; killed")
            child.signal(signal.SIGKILL)

    def _replaceable(self) -> list[str]:
        """Return the workers that have a ready standby and were not asked to exit."""
        ready = [] if self._standbys is None else self._standbys.ready
        return [name for name in ready if name not in self.leaving and self._cluster.by_name[name].step != LEAVING]

    @property
    def _workers(self) -> Mapping[str, Child]:
        return {name: child for name, child in self._cluster.by_name.items() if name not in (COORDINATOR, HTTP)}

    def _look_at_pool(self) -> None:
        """Hold the pool that the workers have made. Once it is damaged, end them, and let it go for a new one."""
        hold = self._cluster.pool_hold
        if damage := hold.damage():
            self._report(f"the host pool {hold.path} is damaged, {damage}: all workers start again with a new one")
            for child in self._workers.values():
                child.signal(signal.SIGKILL)
            if self._standbys is not None:
                self._standbys.kill()
            hold.let_go()
        hold.take()
