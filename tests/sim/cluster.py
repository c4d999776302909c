"""One simulated cluster: processes that live and die, on one clock, in one thread.

    clients (the real Client) ─┐
    operator (the real Client) ┼─ tests.sim.links ─► coordinator (all real actors) ◄─ links ─ workers (the real Link and
                               │                                                      Outbox, tests.sim.fake_worker)
    parent ── restarts what died, after a pause                                          └─ FakePool of their node

Everything random is drawn from generators that are seeded by the run's seed, and trio runs its tasks in an order drawn
from it, too; so a run is its seed. What the real code takes from the machine is replaced for the time of a run
(`on_simulated_machine`): sockets, process ids, the number of the coordinator's life.
"""

from __future__ import annotations

import logging
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Final
from unittest.mock import patch

import msgspec
import trio
import trio._core._run

import coordinator.memory.changes
import coordinator.memory.host_pool
import coordinator.policy.candidates
import coordinator.policy.hot_sizing
import coordinator.policy.policy
import coordinator.service
import coordinator.workers.worker_link
import hisparse.client.connection
import protocol.sizing
from basics.processes import Process
from basics.request_states import POISON_STRIKES
from coordinator.actor import open_supervisor
from coordinator.journal.journal import GroupCommit
from coordinator.journal.state import JournalState
from coordinator.memory.changes import Change, Reserve
from coordinator.memory.ledger import Ledger
from coordinator.policy.throughput import FloorRoom, HotFloor, Look
from coordinator.scheduler.scheduler import Scheduler
from coordinator.service import Coordinator
from coordinator.state.placement_table import PlacementTable
from coordinator.state.request_state import RequestState
from coordinator.state.worker_entry import WorkerEntry
from coordinator.tokens.token_log import TokenLog
from coordinator.workers.epoch_link import WorkerLink
from coordinator.workers.worker_epoch import WorkerEpoch
from coordinator.workers.worker_link import WorkerLinks
from metrics.state import LinkCounters
from protocol import messages
from protocol.arrays import Int32Array
from protocol.errors import HiSparseError
from protocol.messages import CLIENT_MESSAGE_BYTES_MAX, WORKER_MESSAGE_BYTES_MAX
from protocol.settings import NO_JOURNAL, ClusterSettings, Config
from protocol.sizing import RESIDENT
from tests.sim.alarms import sleep_until
from tests.sim.checker import Checker, Readers
from tests.sim.fake_journal import FakeDisk, FakeStore
from tests.sim.fake_worker import EPOCHS_PER_PROCESS, FakeExecutor, FakePool
from tests.sim.groups import RankRounds, SimGroup
from tests.sim.links import FakeDealer, Latch, Network
from tests.sim.oracle import MODEL, Truth
from tests.sim.shape import PAGE_TOKENS, SHORT_RESTS, Shape
from tests.sim.standbys import FakeStandby, SimStandbys
from tests.sim.trace import Trace
from tests.sim.transfer import Wire
from worker.device.step_rows import StepRows
from worker.link.link import Link, LinkPace
from worker.link.link_state import Action, LinkState, WorkerIdentity
from worker.link.outbox import Outbox

#: Modules that know how long a page is.
PAGED: Final = ("coordinator.", "protocol.", "tests.sim.fake_worker")
#: Looks at workers are so short that a seed has many.
HASTY_LOOKS: Final = {"LOOK_S": 0.25, "LOOK_STEPS": 2, "TIMED_STEPS": 1, "ALONE_STEPS_MIN": 1}
#: How many looks move a hot floor.
MOVE_ODDS: Final = 0.5
#: Exit of a process shows on its pidfd within this time.
EXIT_SEEN_S: Final = 0.02
#: The parent starts what died after a pause of this length.
RESTART_S: Final = (0.1, 2.0)
#: A rank says hello within this time of its start, or is late.
HELLO_S: Final = (0.0, 0.5)
LATE_ODDS: Final = 0.25
LATE_S: Final = (0.5, 3.0)
#: A rank ends within END_S of its group's first death, or lingers. One that was stopped ends within NOTICE_S of being
#: continued. The parent kills those that have not ended within PARENT_LIMIT_S, but for the one that lingers.
END_S: Final = (0.0, 2.0)
LINGER_ODDS: Final = 0.5
LINGER_S: Final = (1.0, 5.0)
NOTICE_S: Final = (0.0, 1.0)
PARENT_LIMIT_S: Final = 2.5

# ---------------------------------------------------------------- processes


class TappedOutbox(Outbox):
    """Shows the checker each report that it makes."""

    def __init__(self, epoch: int, on_report: Callable[[messages.Report], None]) -> None:
        super().__init__(epoch)
        self._on_report = on_report

    def take(self, command_ack: int, now: float, *, probe: bool = False) -> messages.Report | None:
        report = super().take(command_ack, now, probe=probe)
        if report is not None:
            self._on_report(report)
        return report


class TappedLinkState(LinkState):
    """Shows the checker each command that it applies by its number."""

    on_command: Callable[[int, messages.Command], None]

    def _apply(self, command: messages.Command) -> Iterator[Action]:
        self.on_command(self.outbox.epoch, command)
        return super()._apply(command)


class WorkerProcess:
    """One life of one worker; as a rank, in one life of its `group`."""

    def __init__(
        self, cluster: Cluster, name: str, node: str, pid: int, pool: FakePool, group: SimGroup | None = None
    ) -> None:
        self.name, self.node, self.pid, self.pool, self.group = name, node, pid, pool, group
        rank = group.names.index(name) if group else 0
        self._hello_at = trio.current_time() + _draw_hello(group.rng) if group else None
        self.latch = Latch()
        self.exited = trio.Event()
        checker = cluster.checker
        capacity = msgspec.structs.replace(cluster.shape.capacity_of(name), pool_id=pool.id, sends=True, receives=True)
        self.address = f"{name}/{pid}"
        receiver = cluster.wire.receiver(self.address, pool)
        member = group.member(rank) if group else None
        identity = WorkerIdentity(name, node, pid, MODEL, capacity, receiver=self.address.encode(), member=member)
        self.outbox = TappedOutbox(pid * EPOCHS_PER_PROCESS, lambda report: checker.made(name, report))
        self.state = TappedLinkState(identity, self.outbox, LinkCounters())
        self.state.on_command = lambda epoch, command: checker.obeyed(name, epoch, self.state.incarnation, command)
        self.executor = FakeExecutor(
            pid,
            capacity,
            pool,
            self.outbox,
            self.latch,
            random.Random(f"{cluster.seed} executor {pid}"),
            lambda request_id: self.die_of(request_id) if request_id in cluster.poison else None,
            cluster.wire,
            receiver,
            RankRounds(group, rank) if group else None,
            lambda: self.end("has lost a peer"),
            StepRows(cluster.shape.draft_tokens),
        )
        self._cluster = cluster
        self._scope = trio.CancelScope()
        pace = LinkPace(report_s=0.05, heartbeat_s=cluster.shape.settings.heartbeat_interval_s)
        self._link = Link(self.state, self.executor, self._connect, pace=pace)

    async def _connect(self) -> FakeDealer:
        if self._hello_at is not None:
            await sleep_until(self._hello_at)
        await self.latch.passed()
        return self._cluster.network.connect("worker", self.name, self.pid, self.latch)

    async def run(self) -> None:
        """Until killed, told to stop, or refused for good."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.executor.run)
                try:
                    await self._link.run()
                except HiSparseError as error:
                    self._cluster.trace.note(self.name, "gives up", error.message)
                nursery.cancel_scope.cancel()

    def kill(self) -> None:
        """SIGKILL."""
        self._scope.cancel()

    def terminate(self, deadline_s: float) -> None:
        """SIGTERM, with time for what runs."""
        self._link.request_stop(deadline_s)

    def die_of(self, request_id: str) -> None:
        """The executor fails, and the process ends with it."""
        self.end("dies of", request_id)

    def end(self, *why: str) -> None:
        """The process ends by itself."""
        self._cluster.trace.note(self.name, *why)
        self.kill()


def _draw_hello(rng: random.Random) -> float:
    return rng.uniform(*(LATE_S if rng.random() < LATE_ODDS else HELLO_S))


class CoordinatorLife:
    """One life of the coordinator: its actors, wired as coordinator.service wires them, and what the checker reads."""

    def __init__(self, cluster: Cluster) -> None:
        config = Config(cluster=ClusterSettings(name="sim", runtime_dir="/sim"), coordinator=cluster.shape.settings)
        bounds = {
            "client": CLIENT_MESSAGE_BYTES_MAX,
            "admin": CLIENT_MESSAGE_BYTES_MAX,
            "worker": WORKER_MESSAGE_BYTES_MAX,
        }
        self._routers = [cluster.network.listen(role, bytes_max) for role, bytes_max in bounds.items()]
        self._parts = Coordinator(config, *self._routers)  # type: ignore[arg-type]
        self._cluster = cluster
        self._scope = trio.CancelScope()
        self._scheduler: Scheduler | None = None

    @property
    def incarnation(self) -> int:
        return self._parts.incarnation

    @property
    def scheduler(self) -> Scheduler:
        assert self._scheduler is not None
        return self._scheduler

    async def run(self) -> None:
        """Until killed, or told to stop and done with it."""
        with self._scope:
            journal = await self._parts._recover()
            async with open_supervisor() as supervisor:
                self._scheduler = self._parts._start_actors(supervisor, journal)
                self._cluster.checker.ledger_changes += 1
                await self._scheduler.stopped.wait()
                await supervisor.shutdown()
        for router in self._routers:
            router.close()

    def kill(self) -> None:
        for router in self._routers:
            router.close()
        self._scope.cancel()

    @property
    def held(self) -> list[str]:
        """Requests that wait for the operator."""
        lives = self._scheduler._requests.live.values() if self._scheduler else ()
        return [it.facts.request_id for it in lives if it.held]

    @property
    def is_draining(self) -> bool:
        return any(it.drain for it in self.workers().values())

    # ------------------------------------------------------------ for the checker

    @property
    def ledgers(self) -> dict[str, Ledger]:
        return self._scheduler._ledgers if self._scheduler else {}

    def entries(self) -> list[RequestState]:
        return list(self.scheduler._placement_table.entries.values()) if self._scheduler else []

    @property
    def journal_state(self) -> JournalState:
        return self.scheduler._journal.state

    @property
    def token_log(self) -> TokenLog:
        return self._parts.token_log

    def workers(self) -> dict[str, WorkerEntry]:
        return self._scheduler._placement_table.workers if self._scheduler else {}

    def truth_of(self, request_index: int) -> Truth | None:
        live = self.scheduler._requests.by_index.get(request_index)
        return self._cluster.truths[live.state.facts.request_id] if live is not None else None

    def durable(self, request_index: int, placement: int) -> int:
        log = self._parts.token_log
        return log.durable(request_index) if log._placement[request_index] == placement else 0

    def pool_id(self, node: str) -> int:
        """The pool that the coordinator believes in; another one may have taken its place."""
        return self.scheduler._registry._pools[node].pool_id

    @property
    def audit_differences(self) -> dict[str, int]:
        return dict(self._parts.counters.audit_differences)

    def drains(self) -> list[tuple[str, int, bool]]:
        """Workers that have joined this life, their epochs, and whether they drain."""
        return [(it.name, it.epoch, it.drain is not None) for it in self.workers().values() if not it.awaited]

    @property
    def is_committed(self) -> bool:
        """Whether the journal has written all that it was given."""
        journal = self._scheduler._journal if self._scheduler else None
        return isinstance(journal, GroupCommit) and not journal._pending.records and journal._writing.committed.is_set()

    @property
    def is_between_turns(self) -> bool:
        """Whether the Scheduler waits for messages, and not for a commit."""
        scheduler = self._scheduler
        return scheduler is not None and scheduler._parking.is_taken and scheduler._awaited.done

    def check_invariants(self) -> None:
        if self._scheduler is None:
            return
        self._scheduler._placement_table.check_invariants(lambda node: self.ledgers[node])
        for live in self._scheduler._requests.live.values():
            live.check_invariants()
        self._parts.token_log.check_invariants()
        self._parts.deliveries._subscriptions.check_invariants()

    def fingerprint(self) -> list[object]:
        """Everything that a query must not change."""
        return [
            (ledger._free.tobytes(), ledger._refcounts.tobytes(), ledger.pages_free, repr(ledger._holdings))
            for ledger in self.ledgers.values()
        ] + [repr(self.entries())]

    @property
    def is_empty(self) -> bool:
        return not self.entries() and all(
            ledger.pages_free == ledger.pages_total and not ledger.holdings_count for ledger in self.ledgers.values()
        )


# ---------------------------------------------------------------- the cluster


@dataclass
class Cluster:
    """`run` starts everything; what happens then is up to tests.sim.clients and tests.sim.faults."""

    seed: int
    shape: Shape
    trace: Trace
    truths: dict[str, Truth] = field(default_factory=dict)
    abortable: set[str] = field(default_factory=set)
    poison: set[str] = field(default_factory=set)
    coordinator: CoordinatorLife | None = None
    pools: dict[str, FakePool] = field(default_factory=dict)
    disk: FakeDisk | None = None

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.seed} cluster")
        self.network = Network(random.Random(f"{self.seed} links"), self.trace)
        self.wire = Wire(random.Random(f"{self.seed} wire"), is_calm=self.shape.is_roomy)
        self.checker = Checker(self)
        self.scope = trio.CancelScope()
        self.is_over = False
        self._workers: dict[int, WorkerProcess] = {}
        self._group_lives = Counter[str]()
        self._exits: dict[int, trio.Event] = {}
        self._pids = 1000
        self.standbys: SimStandbys | None = None
        self.deaths = 0
        self._boots = 0
        self._lives = 0
        if self.shape.settings.journal != NO_JOURNAL:
            self.disk = FakeDisk(random.Random(f"{self.seed} disk"), self.trace)

    def start(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        ranks = {name for names in self.shape.groups.values() for name in names}
        for node in sorted(set(self.shape.workers.values())):
            self.boot(node)
        self.start_coordinator()
        for name in self.shape.workers:
            if name not in ranks:
                self.start_worker(name)
        for group in self.shape.groups:
            self.start_group(group)
        if self.shape.has_standbys:
            self.standbys = SimStandbys(self, [name for name in self.shape.workers if name not in ranks], nursery)

    def abandon(self) -> None:
        """The checker has seen enough."""
        self.scope.cancel()

    # ------------------------------------------------------------ workers

    def boot(self, node: str) -> None:
        """A node that is new, or was booted anew: what its host memory held is gone, and every process on it."""
        if self.standbys is not None:
            for standby in self.standbys.waiting():
                if standby.node == node:
                    standby.signal(signal.SIGKILL)
        self.renew_pool(node)

    def damage_pool(self, node: str) -> None:
        """The file of the pool is gone: the parent ends all that use it, but for a standby that takes over now."""
        if self.standbys is not None:
            self.standbys.real.kill()
        self.renew_pool(node)

    def renew_pool(self, node: str) -> None:
        """End the workers of a node. The next one makes another pool."""
        for process in self.processes_of(node):
            process.kill()
        self._boots += 1
        rng = random.Random(f"{self.seed} pool {self._boots}")
        self.pools[node] = FakePool(self._boots, self.shape.capacity.host_pages, rng)

    def start_group(self, name: str) -> None:
        """The ranks of a group that have met, in a new life of it."""
        self._group_lives[name] += 1
        incarnation = self._group_lives[name]
        rng = random.Random(f"{self.seed} group {name} {incarnation}")
        group = SimGroup(name, incarnation, self.shape.groups[name], rng)
        for worker in group.names:
            self.start_worker(worker, group)

    def next_pid(self) -> int:
        self._pids += 1
        return self._pids

    def take_over(self, standby: FakeStandby) -> None:
        """The standby is a worker from here on."""
        self.start_worker(standby.name, standby=standby)

    def start_worker(self, name: str, group: SimGroup | None = None, *, standby: FakeStandby | None = None) -> None:
        node, pid = self.shape.workers[name], self.next_pid() if standby is None else standby.pid
        pool = self.pools[node] if standby is None else standby.pool_of(self.pools[node])
        process = WorkerProcess(self, name, node, pid, pool, group)
        self._workers[process.pid] = process
        self._exits[process.pid] = process.exited
        self.trace.note(name, "starts", process.pid)
        self._nursery.start_soon(self._live, process, name=name)

    async def _live(self, process: WorkerProcess) -> None:
        """The process's life, what is left of it, and the parent's next try."""
        await process.run()
        if self.is_over:
            return
        process.latch.open()
        self.trace.note(process.name, "exits", process.pid)
        process.pool.end_process(process.pid)
        self.wire.end_process(process.address)
        self._workers.pop(process.pid, None)
        if process.group is None:
            self.deaths += 1
        elif not process.group.is_ending:
            self.deaths += 1
            process.group.is_ending = True
            self._nursery.start_soon(self._end_group, process.group)
        await trio.sleep(self.rng.uniform(0.0, EXIT_SEEN_S))
        process.exited.set()
        if process.group is None:
            await self.succeed(process.name)

    async def succeed(self, name: str) -> None:
        """The exit of the process that was worker `name` is proved: its standby takes over, or another one starts."""
        if self.standbys is None or not self.standbys.real.take_over(name):
            await trio.sleep(self.rng.uniform(*RESTART_S))
            self.start_worker(name)

    def end_hung(self, process: WorkerProcess) -> None:
        """The parent misses a worker: it is killed. What follows waits for its exit."""
        process.kill()

    async def _end_group(self, group: SimGroup) -> None:
        """A rank is dead: the others end, each in its time, and a new life begins. One may linger, stopped at times."""
        left, rng = [process for process in self.processes() if process.group is group], group.rng
        lingering = rng.choice(left) if left and rng.random() < LINGER_ODDS else None
        for process in left:
            self._nursery.start_soon(self._end_rank, process, rng.uniform(*(END_S, LINGER_S)[process is lingering]))
        if lingering is not None and rng.random() < 0.5:
            self._nursery.start_soon(self._stop_for, lingering, rng.uniform(*LINGER_S))
        with trio.move_on_after(PARENT_LIMIT_S):
            for process in left:
                if process is not lingering:
                    await process.exited.wait()
        for process in left:
            if process is not lingering:
                process.kill()
                await process.exited.wait()
        await trio.sleep(rng.uniform(*RESTART_S))
        self.start_group(group.group)

    async def _end_rank(self, process: WorkerProcess, after_s: float) -> None:
        await trio.sleep(after_s)
        if not process.latch.is_open:
            await process.latch.passed()
            await trio.sleep(self.rng.uniform(*NOTICE_S))
        process.end("has lost a peer")

    async def _stop_for(self, process: WorkerProcess, seconds: float) -> None:
        process.latch.shut()
        await trio.sleep(seconds)
        process.latch.open()

    def process(self, pid: int) -> WorkerProcess | None:
        return self._workers.get(pid)

    def processes(self) -> list[WorkerProcess]:
        return list(self._workers.values())

    def processes_of(self, node: str) -> list[WorkerProcess]:
        return [process for process in self._workers.values() if process.node == node]

    async def wait_exit(self, process: int) -> None:
        await self._exits[process].wait()

    def has_exited(self, process: int) -> bool:
        return self._exits[process].is_set()

    # ------------------------------------------------------------ the coordinator

    def start_coordinator(self) -> None:
        self.coordinator = life = CoordinatorLife(self)
        self.trace.note("coordinator", "starts", life.incarnation)
        self._nursery.start_soon(self._lead, life, name="coordinator")

    async def _lead(self, life: CoordinatorLife) -> None:
        await life.run()
        if not self.is_over:
            self.coordinator = None
            self.trace.note("coordinator", "exits")
            await trio.sleep(self.rng.uniform(*RESTART_S))
            self.start_coordinator()

    def next_incarnation(self) -> int:
        self._lives += 1
        return self._lives

    @property
    def is_settled(self) -> bool:
        """Whether no request holds memory."""
        processes = self.processes()
        return (
            self.coordinator is not None
            and self.coordinator.is_empty
            and not any(process.executor.runs or process.executor.transfers for process in processes)
        )

    # ------------------------------------------------------------ what clients may be told

    def may_end(self, request_id: str, ended: messages.Ended) -> bool:
        """Other than FINISHED: it was aborted, or it seems to have killed workers, of which many died."""
        if ended.outcome == "ABORTED":
            return request_id in self.abortable
        return "poison limit" in ended.reason and (request_id in self.poison or self.deaths >= POISON_STRIKES)


# ---------------------------------------------------------------- the machine


def _tapped_for_groups(cluster: Cluster) -> Iterator[tuple[type, str, Callable[..., None]]]:
    """What shows the group checker who joins, who beats and who is declared down."""
    groups, put_down, heartbeat = cluster.checker.groups, WorkerLinks._put_down, WorkerEpoch.heartbeat

    def tapped_put_down(links: WorkerLinks, link: WorkerLink, *, reason: str, **how: bool) -> None:
        if not link.is_down:
            groups.put_down(link, reason, cluster.shape.settings.heartbeat_limit_s)
        put_down(links, link, reason=reason, **how)

    def tapped_heartbeat(epoch: WorkerEpoch, beat: messages.Heartbeat, now: float) -> None:
        groups.beat(epoch, beat)
        heartbeat(epoch, beat, now)

    def tapped(join: Callable[[PlacementTable, WorkerEntry], None]) -> Callable[[PlacementTable, WorkerEntry], None]:
        def joins(table: PlacementTable, worker: WorkerEntry) -> None:
            join(table, worker)
            if cluster.coordinator is not None:
                groups.joined(cluster.coordinator, worker)

        return joins

    yield WorkerLinks, "_put_down", tapped_put_down
    yield WorkerEpoch, "heartbeat", tapped_heartbeat
    yield PlacementTable, "add_worker", tapped(PlacementTable.add_worker)
    yield PlacementTable, "worker_back", tapped(PlacementTable.worker_back)


def _drawn_floors(rng: random.Random) -> type[HotFloor]:
    """Floors that move at any look, as the seed says: a seed is too short for a model to settle, and what is to be
    checked is that no request is lost whatever it says."""

    class DrawnFloor(HotFloor):
        def look(self, look: Look, room: FloorRoom) -> None:
            super().look(look, room)
            slots = [it.hot_slots for it in room.sizes]
            if rng.random() < MOVE_ODDS:
                self.floor = rng.choice([None, *slots, RESIDENT])
                self.probe_slots = rng.choice([None, slots[0]]) if self.floor is not None else None

    return DrawnFloor


@contextmanager
def on_simulated_machine(cluster: Cluster) -> Iterator[None]:
    """Replace what the real code takes from the machine; the order of tasks is drawn from the seed."""
    random.seed(f"{cluster.seed} code")  # pauses before reconnecting
    trio._core._run._r.seed(f"{cluster.seed} tasks")
    apply, queue, apply_report = coordinator.memory.changes.apply, WorkerLinks.queue, WorkerLinks._apply
    groups = cluster.checker.groups

    def tapped_queue(
        links: WorkerLinks,
        link: WorkerLink,
        command: messages.Command,
    ) -> None:
        if not link.is_down:
            cluster.checker.given(link, command)
        queue(links, link, command)

    def tapped_report(
        links: WorkerLinks,
        link: WorkerLink,
        report: messages.Report,
    ) -> None:
        cluster.checker.heard(link.name, report)
        apply_report(links, link, report)

    def tapped_apply(ledger: Ledger, change: Change) -> Int32Array:
        if isinstance(change, Reserve) and cluster.coordinator is not None:
            groups.placed(cluster.coordinator, change)
        cluster.trace.note("ledger", "changes", change)
        cluster.checker.ledger_changes += 1
        return apply(ledger, change)

    async def connect(endpoint: str, *, message_bytes_max: int, key: None) -> FakeDealer:
        role, owner = endpoint.split(":")
        dealer = cluster.network.connect(role, owner, 0, Latch())
        readers = Readers()
        dealer.on_send = partial(cluster.checker.asked, readers)
        dealer.on_offer = partial(cluster.checker.told, readers)
        return dealer

    replacements = (
        (trio._timeouts, "sleep_until", sleep_until),  # of trio.sleep
        (trio, "sleep_until", sleep_until),
        (trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
        (hisparse.client.connection, "DealerSocket", SimpleNamespace(connect=connect)),
        (coordinator.service, "next_incarnation", lambda _: cluster.next_incarnation()),
        (coordinator.service, "_open_journal", lambda *_: cluster.disk and FakeStore(cluster.disk)),
        (coordinator.service, "time", SimpleNamespace(time=trio.current_time, perf_counter=trio.current_time)),
        (coordinator.workers.worker_link, "wait_exit", cluster.wait_exit),
        (coordinator.workers.worker_link, "process_of", lambda pid: Process(pid, pid, "sim")),
        (coordinator.workers.worker_link, "has_ended", lambda process: cluster.has_exited(process.id)),
        (WorkerLinks, "queue", tapped_queue),
        (WorkerLinks, "_apply", tapped_report),
        *_tapped_for_groups(cluster),
        (coordinator.memory.host_pool, "apply", tapped_apply),
        (coordinator.policy.candidates.Candidates, "_prefers_steps", lambda _, __, rest: rest in SHORT_RESTS),
        (coordinator.policy.candidates.Candidates, "_takes_steps", lambda _, rest: rest in SHORT_RESTS),
        (coordinator.policy.hot_sizing, "HotFloor", _drawn_floors(random.Random(f"{cluster.seed} floors"))),
        *((coordinator.policy.hot_sizing, name, value) for name, value in HASTY_LOOKS.items()),
    )
    pages = [
        module for name, module in sys.modules.items() if name.startswith(PAGED) and hasattr(module, "PAGE_TOKENS")
    ]
    with ExitStack() as stack:
        for place, name, replacement in replacements:
            stack.enter_context(patch.object(place, name, replacement))
        for module in pages:
            stack.enter_context(patch.object(module, "PAGE_TOKENS", PAGE_TOKENS))
        stack.enter_context(patch.object(coordinator.policy.policy, "URGENT_TOKENS", PAGE_TOKENS))
        stack.callback(protocol.sizing._managed.cache_clear)
        protocol.sizing._managed.cache_clear()
        logger = logging.getLogger("hisparse")
        level = logger.level
        logger.setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            logger.setLevel(level)
