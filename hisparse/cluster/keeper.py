"""Keeps the processes of a cluster running: restarts what died, kills what hangs.

    died      a child that ended with anything but 0 is started again after a pause that doubles (`Restarts`). One that
              ended with 0 was told to leave and is let go. Past RESTARTS_MAX short lives in a row it is given up: what
              dies at every start will not be cured by another
    hangs     a worker that was connected in this life and has been missing for HUNG_LIMITS heartbeat limits, while the
              coordinator answers, is killed (`ChildWatch`): the coordinator declared it down one limit earlier and its
              pages are quarantined until its exit is proved. A stopped process (SIGSTOP) is one too. A coordinator that
              does not answer for COORDINATOR_HUNG_LIMITS of them is killed likewise
    over      the coordinator left or was given up, or all workers did or were

Nothing is lost by killing: rows live in the host pool, which this process holds open for workers to come, and what was
acknowledged is in the coordinator's journal.

Rejected: restarting at a fixed interval (a crash at start burns a core for ever); judging a worker by its own
/healthz (a thread that answers says nothing about the link, and a stopped process answers nothing at all).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio

from coordinator.scheduling.poison import POISON_STRIKES
from hisparse.client.client import Client, open_client
from hisparse.cluster.children import Child, exit_text
from protocol.errors import HiSparseError
from protocol.messages import WorkerRow
from protocol.settings import Config
from protocol.transport.keys import access

#: The pause before a restart: the first, and the longest.
RESTART_PAUSE_MIN_S: Final = 0.5
RESTART_PAUSE_MAX_S: Final = 30.0
#: Lives shorter than STABLE_LIFE_S in a row after which a child is given up.
RESTARTS_MAX: Final = 12
STABLE_LIFE_S: Final = 60.0
#: Heartbeat limits for which a worker may be missing, and a coordinator silent, before it is killed.
HUNG_LIMITS: Final = 2
COORDINATOR_HUNG_LIMITS: Final = 4
#: How often the coordinator is asked who is connected.
WATCH_INTERVAL_S: Final = 0.5
COORDINATOR: Final = "coordinator"
HTTP: Final = "http"
CONNECTED: Final = frozenset({"connected", "draining", "drained"})

assert RESTART_PAUSE_MIN_S * 2**RESTARTS_MAX > RESTART_PAUSE_MAX_S  # the longest pause is reached before giving up
assert RESTARTS_MAX >= 2 * POISON_STRIKES  # two poisonous requests are found before their worker is given up
assert COORDINATOR_HUNG_LIMITS > HUNG_LIMITS  # a slow coordinator is not taken for dead before its workers would be


def open_admin(config: Config, name: str) -> AbstractAsyncContextManager[Client]:
    """An admin's connection to the coordinator of `config`; once lost it is over."""
    endpoint = config.cluster.admin_endpoint
    key = access(config.cluster, "admin", endpoint)
    return open_client(endpoint, role="admin", name=name, reconnect_limit_s=0, key=key)


@dataclass
class Restarts:
    """When a child that died is started again. Pure."""

    short_lives: int = 0

    def after(self, lived_s: float) -> float | None:
        """Seconds to wait after a life of `lived_s`; None: not again."""
        self.short_lives = 1 if lived_s >= STABLE_LIFE_S else self.short_lives + 1
        if self.short_lives > RESTARTS_MAX:
            return None
        pause_s: float = RESTART_PAUSE_MIN_S * 2 ** (self.short_lives - 1)
        return min(pause_s, RESTART_PAUSE_MAX_S)


@dataclass
class _Life:
    """A worker process: the last epoch before it, and when it was last seen connected under a later one."""

    epoch_before: int
    connected_at: float | None = None

    def connected(self, epoch: int, now: float) -> None:
        if epoch > self.epoch_before:
            self.connected_at = now


@dataclass
class ChildWatch:
    """Which processes hang, from what the coordinator says of them. Pure; times are seconds of one clock."""

    limit_s: float
    _lives: dict[str, _Life] = field(default_factory=dict)
    _epochs: dict[str, int] = field(default_factory=dict)
    _answered_at: float | None = None

    def began(self, name: str) -> None:
        """A new process under that name."""
        if name == COORDINATOR:
            self._answered_at = None
        else:
            self._lives[name] = _Life(self._epochs.get(name, -1))

    def answered(self, rows: Iterable[WorkerRow], now: float) -> None:
        """The coordinator said who is connected. After a silence nobody is blamed for what it could not see."""
        if self._answered_at is None or now - self._answered_at > self.limit_s:
            for life in self._lives.values():
                life.connected_at = None if life.connected_at is None else now
        self._answered_at = now
        for row in rows:
            self._epochs[row.worker] = max(row.epoch, self._epochs.get(row.worker, -1))
            if row.worker in self._lives and row.state in CONNECTED:
                self._lives[row.worker].connected(row.epoch, now)

    def hung(self, now: float) -> list[str]:
        """Names of processes to kill. One that has not been there yet in its life is still starting."""
        if self._answered_at is None:
            return []
        silent_s = now - self._answered_at
        if silent_s > self.limit_s * COORDINATOR_HUNG_LIMITS / HUNG_LIMITS:
            return [COORDINATOR]
        if silent_s > self.limit_s / 2:
            return []
        return [
            name
            for name, life in self._lives.items()
            if life.connected_at is not None and now - life.connected_at > self.limit_s
        ]


class Kept(Protocol):
    """The cluster, as its keeper sees it (hisparse.cluster.up.Cluster)."""

    config: Config

    @property
    def by_name(self) -> Mapping[str, Child]: ...
    def restart(self, name: str) -> Child: ...


class Keeper:
    """One per cluster. `say` gets lines for the user; `changed` is called after each restart."""

    def __init__(self, cluster: Kept, say: Callable[[str], None], changed: Callable[[], None]) -> None:
        self._cluster = cluster
        self._say = say
        self._changed = changed
        self._watch = ChildWatch(HUNG_LIMITS * cluster.config.coordinator.heartbeat_limit_s)
        self._left = set(cluster.by_name)
        self._last = cluster.by_name[COORDINATOR]
        self._scope = trio.CancelScope()

    async def run(self) -> Child:
        """Until the cluster is over; the child whose end ended it. Cancelled: children run on, unkept."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                for name in self._cluster.by_name:
                    self._watch.began(name)
                    nursery.start_soon(self._keep, name)
                nursery.start_soon(self._watch_all)
        return self._last

    async def _keep(self, name: str) -> None:
        restarts = Restarts()
        while True:
            child, began = self._cluster.by_name[name], trio.current_time()
            status = await child.wait()
            pause_s = restarts.after(trio.current_time() - began) if status else None
            if pause_s is None:
                what = "given up after too many short lives" if status else "let go"
                self._say(f"{name} {exit_text(status)}; {what}")
                self._let_go(name, child)
                return
            self._say(f"{name} {exit_text(status)}; restarted in {pause_s:g} s")
            await trio.sleep(pause_s)
            self._cluster.restart(name)
            self._watch.began(name)
            self._changed()

    def _let_go(self, name: str, child: Child) -> None:
        self._left.discard(name)
        if name == COORDINATOR or self._left <= {COORDINATOR, HTTP}:
            self._last = child
            self._scope.cancel()

    async def _watch_all(self) -> None:
        """Ask who is connected, on one connection for as long as it answers, then on a fresh one."""
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
        """Ask again and again; `scope` ends it when an answer is overdue."""
        while True:
            self._watch.answered(await client.workers(), trio.current_time())
            self._kill_hung()
            await trio.sleep(WATCH_INTERVAL_S)
            scope.deadline = trio.current_time() + self._watch.limit_s

    def _kill_hung(self) -> None:
        for name in self._watch.hung(trio.current_time()):
            child = self._cluster.by_name[name]
            if child.running:
                self._say(f"{name} hangs; killed")
                child.signal(signal.SIGKILL)
