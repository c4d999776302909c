"""Keeps the processes of a cluster running: restarts those that died, kills those that hang.

    died      a child with an exit status other than 0 is started again after a pause that doubles (`Restarts`). A child
              with status 0 was asked to exit and is not restarted. After RESTARTS_MAX short process lifetimes in a row
              it is given up: a child that dies at every start would die at the next one, too
    hangs     a worker process that was connected, and then missing for HUNG_LIMITS heartbeat limits while the
              coordinator answers, is killed (`ChildWatch`). The coordinator has declared it down one limit earlier, and
              its pages are quarantined until its exit is proved. This includes a stopped process (SIGSTOP). A
              coordinator that does not answer for COORDINATOR_HUNG_LIMITS heartbeat limits is killed likewise, and so
              is a worker that has not connected START_LIMIT_S after its start
    group     restarted whole. When one rank ends, the others end by themselves (hisparse.cluster.group_end), or are
              killed when they do not; then all start together, after one pause. Restarts are counted per group, and
              its life begins when all of its ranks are connected: they warm up for long before that
    forgotten a worker that is not restarted, or that an earlier start had, is listed no longer once its exit is proved
    over      the coordinator has exited or was given up, or all workers have; with workers elsewhere, all that is here

Where a cluster spans nodes, each node has a Keeper for its processes, and a coordinator elsewhere cannot see them end:
`vouch` is given the names of workers whose processes have ended, in that order, before they start again.

A kill loses nothing: rows are in the host pool, which this process holds open for later workers, and acknowledged
requests are in the coordinator's journal.

Rejected: restarting at a fixed interval (a crash at start would use a core for ever); judging a worker by its /healthz
(the answering thread does not show the state of the link, and a stopped process does not answer).
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio

from basics.request_states import POISON_STRIKES
from hisparse.client.client import Client, open_client
from hisparse.cluster.children import Child, exit_text
from hisparse.cluster.group_end import RankEnd, blamed, end_text, follow_limit_s, is_wanted
from protocol.errors import HiSparseError, NotFound, WrongState
from protocol.messages import WorkerRow
from protocol.settings import Config
from protocol.transport.keys import access

#: The first and the longest pause before a restart.
RESTART_PAUSE_MIN_S: Final = 0.5
RESTART_PAUSE_MAX_S: Final = 30.0
#: A child is given up after more process lifetimes in a row than RESTARTS_MAX that are shorter than STABLE_S.
RESTARTS_MAX: Final = 12
STABLE_S: Final = 60.0
#: Heartbeat limits for which a worker may be missing, and a coordinator silent, before it is killed.
HUNG_LIMITS: Final = 2
COORDINATOR_HUNG_LIMITS: Final = 4
#: Longest start of a process: reading weights and touching the host pool take minutes.
START_LIMIT_S: Final = 600.0
#: How often the coordinator is asked for its workers.
WATCH_INTERVAL_S: Final = 0.5
COORDINATOR: Final = "coordinator"
HTTP: Final = "http"
CONNECTED: Final = frozenset({"connected", "draining", "drained"})

assert RESTART_PAUSE_MIN_S * 2**RESTARTS_MAX > RESTART_PAUSE_MAX_S  # the longest pause is reached before giving up
assert RESTARTS_MAX >= 2 * POISON_STRIKES  # two poisonous requests are found before their worker is given up
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
    await sender.send(RankEnd(child.name, status))


@dataclass
class Restarts:
    """Pauses before the restarts of one child. Pure."""

    short_runs: int = 0

    def after(self, ran_s: float) -> float | None:
        """Seconds to wait after the child ran for `ran_s`; None: do not restart it."""
        self.short_runs = 1 if ran_s >= STABLE_S else self.short_runs + 1
        if self.short_runs > RESTARTS_MAX:
            return None
        pause_s: float = RESTART_PAUSE_MIN_S * 2 ** (self.short_runs - 1)
        return min(pause_s, RESTART_PAUSE_MAX_S)


@dataclass
class _WorkerProcess:
    """A worker process: the last epoch before its start, and when it was seen connected under a later one.

    `starts_since`: when it was started, or when the coordinator was back after a silence.
    """

    epoch_before: int
    starts_since: float
    first_connected_at: float | None = None
    connected_at: float | None = None

    def connected(self, epoch: int, now: float) -> None:
        if epoch > self.epoch_before:
            self.connected_at = now
            self.first_connected_at = now if self.first_connected_at is None else self.first_connected_at


@dataclass
class ChildWatch:
    """Finds processes that hang, from the coordinator's rows of workers. Pure; times are seconds of one clock."""

    limit_s: float
    _processes: dict[str, _WorkerProcess] = field(default_factory=dict)
    _epochs: dict[str, int] = field(default_factory=dict)
    _answered_at: float | None = None

    def began(self, name: str, now: float) -> None:
        """A new process of this name was started."""
        if name == COORDINATOR:
            self._answered_at = None
        elif name != HTTP:  # the coordinator lists workers alone
            self._processes[name] = _WorkerProcess(self._epochs.get(name, -1), now)

    def answered(self, rows: Iterable[WorkerRow], now: float) -> None:
        """The coordinator answered with `rows`. Time in which it did not answer does not count against workers."""
        if self._answered_at is None or now - self._answered_at > self.limit_s:
            for process in self._processes.values():
                process.connected_at = None if process.connected_at is None else now
                process.starts_since = now
        self._answered_at = now
        for row in rows:
            self._epochs[row.worker] = max(row.epoch, self._epochs.get(row.worker, -1))
            if row.worker in self._processes and row.state in CONNECTED:
                self._processes[row.worker].connected(row.epoch, now)

    def all_connected_at(self, names: Iterable[str]) -> float | None:
        """When the last of the worker processes of these names was first seen connected; None: one never was."""
        seen = [self._processes[name].first_connected_at for name in names]
        return None if None in seen else max(it for it in seen if it is not None)

    def hung(self, now: float) -> list[str]:
        """Names of processes to kill. One that was never connected is still starting, for START_LIMIT_S."""
        if self._answered_at is None:
            return []
        silent_s = now - self._answered_at
        if silent_s > self.limit_s * COORDINATOR_HUNG_LIMITS / HUNG_LIMITS:
            return [COORDINATOR]
        if silent_s > self.limit_s / 2:
            return []
        return [name for name, process in self._processes.items() if self._hangs(process, now)]

    def _hangs(self, process: _WorkerProcess, now: float) -> bool:
        if process.connected_at is None:
            return now - process.starts_since > START_LIMIT_S
        return now - process.connected_at > self.limit_s


class Kept(Protocol):
    """The part of hisparse.cluster.up.Cluster that Keeper uses."""

    @property
    def config(self) -> Config: ...
    @property
    def by_name(self) -> Mapping[str, Child]: ...
    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]: ...
    def restart(self, name: str) -> Child: ...


class Keeper:
    """One per cluster, or node of one. `report` is called with lines for the user, `changed` after each restart.

    `elsewhere`: workers that other nodes keep; `vouch` as in the head of this module.
    """

    def __init__(
        self,
        cluster: Kept,
        report: Callable[[str], None],
        changed: Callable[[], None],
        *,
        elsewhere: Collection[str] = (),
        vouch: Callable[[Sequence[str]], Awaitable[None]] = _no_word,
    ) -> None:
        self._cluster = cluster
        self._report = report
        self._changed = changed
        self._elsewhere = frozenset(elsewhere)
        self._vouch = vouch
        self._watch = ChildWatch(HUNG_LIMITS * cluster.config.coordinator.heartbeat_limit_s)
        self._left = set(cluster.by_name)
        self._not_forgotten: set[str] = set()
        self._last = list(cluster.by_name.values())[-1]
        self._scope = trio.CancelScope()

    async def run(self) -> Child:
        """Keep the children until the cluster is over; returns the child whose end ended it.

        Cancelled: children run on, without restarts.
        """
        groups = self._cluster.groups
        in_groups = {name for ranks in groups.values() for name in ranks}
        with self._scope:
            async with trio.open_nursery() as nursery:
                for name in self._cluster.by_name:
                    self._watch.began(name, trio.current_time())
                    if name not in in_groups:
                        nursery.start_soon(self._keep, name)
                for group, ranks in groups.items():
                    nursery.start_soon(self._keep_group, group, ranks)
                nursery.start_soon(self._watch_all)
        return self._last

    async def _keep(self, name: str) -> None:
        restarts = Restarts()
        while True:
            child, began = self._cluster.by_name[name], trio.current_time()
            status = await child.wait()
            pause_s = restarts.after(trio.current_time() - began) if status else None
            if pause_s is None:
                what = "given up after too many restarts" if status else "not restarted"
                self._report(f"{name} {exit_text(status)}; {what}")
                await self._tell_gone([name])
                self._let_go(name, child)
                return
            self._report(f"{name} {exit_text(status)}; restarted in {pause_s:g} s")
            await self._tell_gone([name])
            await trio.sleep(pause_s)
            self._cluster.restart(name)
            self._watch.began(name, trio.current_time())
            self._changed()

    async def _keep_group(self, group: str, ranks: Sequence[str]) -> None:
        restarts = Restarts()
        while True:
            ends, ran_s = await self._ended(group, ranks)
            last = (blamed(ends) or ends[-1]).name
            pause_s = None if is_wanted(ends) else restarts.after(ran_s)
            if pause_s is None:
                what = "not restarted" if is_wanted(ends) else "given up after too many restarts"
                self._report(f"{end_text(group, ends)}; {what}")
                child = self._cluster.by_name[last]
                await self._tell_gone([end.name for end in ends])
                for name in ranks:
                    self._let_go(name, child)
                return
            self._report(f"{end_text(group, ends)}; all of its ranks are restarted in {pause_s:g} s")
            await self._tell_gone([end.name for end in ends])
            await trio.sleep(pause_s)
            for name in ranks:
                self._cluster.restart(name)
                self._watch.began(name, trio.current_time())
            self._changed()

    async def _ended(self, group: str, ranks: Sequence[str]) -> tuple[list[RankEnd], float]:
        """Wait until all ranks have ended; returns their ends in order, and how long all of them were connected.

        Those that do not follow the first in time are killed.
        """
        children = {name: self._cluster.by_name[name] for name in ranks}
        sender, receiver = trio.open_memory_channel[RankEnd](len(ranks))
        ends: list[RankEnd] = []
        async with trio.open_nursery() as nursery:
            for child in children.values():
                nursery.start_soon(_tell_end, child, sender)
            ends.append(await receiver.receive())
            since, now = self._watch.all_connected_at(ranks), trio.current_time()
            ran_s = 0.0 if since is None else now - since
            kill_at = now + follow_limit_s(ends[0], self._watch.limit_s)
            while len(ends) < len(ranks):
                with trio.move_on_at(kill_at) as scope:
                    ends.append(await receiver.receive())
                    limit_s = follow_limit_s(ends[-1], self._watch.limit_s)
                    kill_at = min(kill_at, trio.current_time() + limit_s)
                if scope.cancelled_caught:
                    self._kill_stragglers(group, children)
                    ends += [await receiver.receive() for _ in range(len(ranks) - len(ends))]
        return ends, ran_s

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
        if name == COORDINATOR or self._left <= without:
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
            self._kill_hung()
            await trio.sleep(WATCH_INTERVAL_S)

    async def _ask_on(self, client: Client, scope: trio.CancelScope) -> None:
        """Ask for the workers in intervals; `scope` cancels it when an answer is overdue."""
        while True:
            rows = await client.workers()
            self._watch.answered(rows, trio.current_time())
            self._kill_hung()
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

    def _kill_hung(self) -> None:
        for name in self._watch.hung(trio.current_time()):
            child = self._cluster.by_name.get(name)  # none: a coordinator elsewhere
            if child is not None and child.running:
                self._report(f"{name} hangs; killed")
                child.signal(signal.SIGKILL)
