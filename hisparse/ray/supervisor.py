"""The supervisor of one node: what `hisparse up` does for one machine, for a node's part of a cluster.

    start     stops an earlier supervisor of this node, or ends what one left; the coordinator, if it is here; once it
              answers, tells it which workers of this node are proved gone; then the front and the workers
    run       hisparse.cluster.supervision restarts what dies and kills what hangs. A coordinator on another node cannot
              see a process end, so its pages would stay in quarantine: this process has seen the exit by a pidfd, and
              vouches
    stop      SIGTERM: with the coordinator here, drain it for as long as the file `stop.json` says; then all processes
              end, and the host pool is removed, unless it says that the cluster is about to start again. When the actor
              that started it dies, the kernel sends the same signal

    python -m hisparse.ray.supervisor RUNTIME_DIR PARENT_PID

Exit codes are those of `hisparse up`.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio

from basics.processes import Process, process_of
from hisparse.client.client import Client
from hisparse.client.connection import WELCOME_LIMIT_S
from hisparse.cluster.children import Child, stop_children, stop_with_parent, wait_all
from hisparse.cluster.leftovers import remove_dead_sockets
from hisparse.cluster.starting import started
from hisparse.cluster.supervision import COORDINATOR, HTTP, START_LIMIT_S, ProcessSupervisor, open_admin
from hisparse.cluster.up import EXIT_CHILD_LOST, STOP_GRACE_S, start_child, until_answering
from hisparse.cluster.weights import WeightKeepers
from hisparse.console.options import EXIT_CODES
from hisparse.ray.plan import NodePlan
from hisparse.ray.remains import ask_to_stop, end_all, note, read, write_atomically
from protocol.config import pool_path
from protocol.errors import HiSparseError, NotFound, Unavailable, WrongState
from protocol.logs import configure, logger
from protocol.settings import Config
from worker.pool.file import PoolHold, pass_on_pool, remove_pool

PLAN_FILE: Final = "plan.json"
STATUS_FILE: Final = "status.json"
REMAINS_FILE: Final = "processes.json"
STOP_FILE: Final = "stop.json"
LOCK_FILE: Final = "supervisor.lock"
#: Lines of what happened that are kept for the operator.
SAID_MAX: Final = 20
#: Longest wait, in heartbeat limits, until the coordinator has missed a worker and takes the word that it is gone.
VOUCH_LIMITS: Final = 4
VOUCH_INTERVAL_S: Final = 0.2
LOCK_INTERVAL_S: Final = 0.2

log = logger("supervisor")


class NodeStatus(msgspec.Struct, frozen=True):
    """What a supervisor writes for its actor. `state`: starting, up, stopped."""

    state: str
    processes: dict[str, int]
    said: tuple[str, ...] = ()


class StopOrder(msgspec.Struct, frozen=True):
    """How to stop. `deadline_s`: for how long requests may run on where the coordinator is. `keeps_pool`: rows of the
    host pool stay for the next start with the same journal."""

    deadline_s: float = 0.0
    keeps_pool: bool = False


@dataclass
class NodeProcesses:
    """The children of this node, as hisparse.cluster.supervision.Supervised."""

    plan: NodePlan
    changed: Callable[[], None]
    report: Callable[[str], None]
    children: dict[str, Child] = field(default_factory=dict)
    identities: dict[str, Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool_hold = PoolHold(pool_path(self.config.worker.pool_dir, self.config.worker.node))
        self.keepers = WeightKeepers(self.report)

    @property
    def config(self) -> Config:
        return self.plan.config

    @property
    def by_name(self) -> Mapping[str, Child]:
        return self.children

    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        return self.plan.groups

    def start(self, name: str) -> Child:
        subcommand, config = name, self.config
        if name not in (COORDINATOR, HTTP):
            own = next(it for it in self.plan.workers if it.name == name)
            subcommand, config = "worker", msgspec.structs.replace(config, worker=own)
            self.keepers.keep(config, None)
        self.children[name] = start_child(subcommand, config, None)
        self.identities[name] = process_of(self.children[name].pid)
        self.changed()
        return self.children[name]

    def restart(self, name: str) -> Child:
        self.children[name].close()
        return self.start(name)


class NodeSupervisor:
    """One per node."""

    def __init__(self, plan: NodePlan) -> None:
        self._plan = plan
        self._runtime_dir = Path(plan.runtime_dir)
        self._processes = NodeProcesses(plan, self._changed, self._report)
        self._state = "starting"
        self._said: list[str] = []

    async def run(self) -> int:
        """Run until a signal, or until all that is here is over; returns the exit code. Raises HiSparseError.

        Cancelled: children are killed at once.
        """
        last: Child | None = None
        async with trio.open_nursery() as nursery:
            await nursery.start(self._until_asked, nursery.cancel_scope)
            try:
                last = await self._serve()
            finally:
                await self._stop()
            nursery.cancel_scope.cancel()
        if last is None or (last.name == COORDINATOR and last.process.returncode == 0):
            return 0
        return EXIT_CHILD_LOST

    async def _until_asked(
        self, everything: trio.CancelScope, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                if COORDINATOR in self._processes.children:
                    await self._drain()
                everything.cancel()
                return

    async def _drain(self) -> None:
        """Returns when the coordinator has exited, after the deadline, or when it does not answer."""
        deadline_s = self._stop_order().deadline_s
        try:
            async with open_admin(self._plan.config, "supervisor") as client:
                await client.stop(deadline_s)
            await wait_all([self._processes.children[COORDINATOR]], deadline_s + STOP_GRACE_S)
        except HiSparseError as error:
            self._report(f"not drained: {error}")

    def _stop_order(self) -> StopOrder:
        try:
            return msgspec.json.decode((self._runtime_dir / STOP_FILE).read_bytes(), type=StopOrder)
        except FileNotFoundError:
            return StopOrder()

    async def _serve(self) -> Child:
        before, pool = read(self._runtime_dir / REMAINS_FILE), self._processes.pool_hold.path
        if before is not None:
            await end_all(before)
            if before.journal != self._plan.config.coordinator.journal:
                remove_pool(pool)  # a journal that does not know of later writes must not find its pool again
            pass_on_pool(pool, self._plan.config.cluster.worker_endpoint)
        remove_dead_sockets(self._plan.config, self._plan.workers)
        wait = partial(until_answering, self._plan.config)
        if self._plan.coordinator:
            self._processes.start(COORDINATOR)
            await started(self._processes, [COORDINATOR], wait, START_LIMIT_S, self._report)
        else:
            await wait()  # it is on another node, and may take any time
        workers = tuple(it.name for it in self._plan.workers)
        if before is not None:
            left = [name for name in before.processes if name not in (COORDINATOR, HTTP)]
            await self._vouch(left, died=False)  # they were ended, by this supervisor or with the one before
        for name in (*([HTTP] if self._plan.http else []), *workers):
            self._processes.start(name)
        self._state = "up"
        self._changed()
        return await ProcessSupervisor(
            self._processes, self._report, self._changed, elsewhere=self._plan.elsewhere, vouch=self._vouch
        ).run()

    async def _vouch(self, names: Sequence[str], *, died: bool = True) -> None:
        """Tell the coordinator that the processes of these workers have ended, in this order: each was seen to. `died`:
        while they ran, which counts against their requests as it does where the coordinator sees it: of a group's life
        the first death that it is told.

        Returns without having told after VOUCH_LIMITS heartbeat limits in which it answers: pages stay in quarantine.
        """
        left, config = list(names), self._plan.config
        limit_s = WELCOME_LIMIT_S + VOUCH_LIMITS * config.coordinator.heartbeat_limit_s
        is_restarted = self._state == "up" or not self._plan.coordinator  # until then, no keeper sees to one of here
        with trio.move_on_after(limit_s) as scope:
            while left:
                try:
                    async with open_admin(config, "supervisor") as client:
                        for name in tuple(left):
                            if await self._is_told(client, name, died=died):
                                left.remove(name)
                            elif died:
                                break  # a later death must not be the first
                except HiSparseError as error:
                    if isinstance(error, Unavailable) and is_restarted:
                        scope.deadline = trio.current_time() + limit_s
                await trio.sleep(VOUCH_INTERVAL_S)
            return
        self._report(f"the coordinator was not told that {', '.join(left)} ended")

    async def _is_told(self, client: Client, name: str, *, died: bool) -> bool:
        """Vouch once the worker's epoch is lost. A coordinator that forgets the worker has no page left of it."""
        with suppress(NotFound):  # no epoch is lost yet, or none had pages
            self._report((await client.release_quarantine([name], died=died))[0])
        try:
            await client.forget([name])
        except NotFound:
            return True
        except WrongState:  # not missed yet
            return False
        return True

    async def _stop(self) -> None:
        children = [*self._processes.children.values(), *self._processes.keepers.children.values()]
        with trio.CancelScope(shield=True):
            await stop_children(children, STOP_GRACE_S)
        for child in children:
            child.close()
        self._processes.pool_hold.let_go()
        remove_dead_sockets(self._plan.config, self._plan.workers)
        if not self._stop_order().keeps_pool:
            remove_pool(self._processes.pool_hold.path, self._plan.config.cluster.worker_endpoint)
        self._state = "stopped"
        self._changed()

    def _report(self, text: str) -> None:
        log.info(text)
        self._said = [*self._said, text][-SAID_MAX:]
        self._changed()

    def _changed(self) -> None:
        pids = {name: child.pid for name, child in self._processes.children.items() if child.running}
        if self._processes.identities:  # until then, what ran before
            journal = self._plan.config.coordinator.journal
            note(self._runtime_dir / REMAINS_FILE, self._processes.identities, journal)
        status = NodeStatus(self._state, pids, tuple(self._said))
        write_atomically(self._runtime_dir / STATUS_FILE, msgspec.json.encode(status))


def main(arguments: Sequence[str]) -> int:
    """Run the supervisor of the plan in `arguments[0]`, a runtime directory, for the parent `arguments[1]`."""
    runtime_dir = Path(arguments[0])
    stop_with_parent(int(arguments[1]))
    plan = msgspec.json.decode((runtime_dir / PLAN_FILE).read_bytes(), type=NodePlan)
    configure(plan.config.cluster.log_level, plan.config.cluster.log_format, node=plan.config.worker.node)
    with _only_one(runtime_dir / LOCK_FILE):
        try:
            return trio.run(NodeSupervisor(plan).run)
        except BaseExceptionGroup as group:
            found = _refusal(group)
            if found is None:
                raise
            log.error("%s", found)  # noqa: TRY400 - a refusal needs no traceback
            return EXIT_CODES.get(found.code, EXIT_CODES["internal"])


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Hold the lock of this node, after an earlier supervisor, which is asked to stop, has let it go.

    An actor may outlive its raylet, and is made again when the raylet is back.
    """
    with open(path, "a+b") as lock:
        told = b""
        while not _is_locked(lock.fileno()):
            lock.seek(0)
            holder = lock.read()  # empty until the one that has just got the lock has written it
            if holder and holder != told:
                ask_to_stop(msgspec.json.decode(holder, type=Process))
                told = holder
            time.sleep(LOCK_INTERVAL_S)
        lock.truncate(0)
        lock.write(msgspec.json.encode(process_of(os.getpid())))
        lock.flush()
        yield


def _is_locked(file: int) -> bool:
    """Whether this process has got the lock of `file`."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _refusal(error: BaseException) -> HiSparseError | None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, HiSparseError) else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
