"""The real Scheduler, HostPool and Request actors and the real token log, over fake workers that obey late.

`FakeLink` is a worker link without a wire: commands wait in `downlink`, reports in `uplink`, and a test says when each
arrives, so that everything can cross everything.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import trio
import trio.testing

from basics.request_states import TERMINAL
from coordinator.actor import Supervisor, open_supervisor
from coordinator.scheduler.scheduler import Scheduler
from coordinator.state.events import Ending, LinkStats
from coordinator.state.request import BeginTrace
from coordinator.tokens.token_log import TokenLog
from metrics.state import CoordinatorCounters
from protocol import messages
from protocol.arrays import pack_int32
from protocol.settings import CoordinatorSettings
from tests.support.fakes.fake_cluster import MODEL, capacity
from tests.support.fakes.fake_worker import FakePool, FakeWorker, output_tokens, token_of
from tests.support.progress import RequestEntry, progress

AHEAD_TOKENS = 96
#: Rows of the fake worker are of requests and not of tokens, so that none can be reused; tests/sim reuses prefixes.
SETTINGS = CoordinatorSettings(
    grant_ahead_tokens=AHEAD_TOKENS, live_requests_max=64, queue_max=48, ended_keep_max=64, prefix_reuse="off"
)


@dataclass
class FakeListener:
    """The gateway's end: it hears of each end once, when all tokens are there."""

    token_log: TokenLog
    endings: dict[str, Ending] = field(default_factory=dict)
    forgotten_slots: list[int] = field(default_factory=list)

    def ended(self, ending: Ending) -> None:
        assert ending.request_id not in self.endings, "I5: a request ends once"
        assert self.token_log.length(ending.request_index) == ending.generated_tokens
        self.endings[ending.request_id] = ending

    def recovered(self, ending: Ending) -> None:
        raise AssertionError(f"{ending.request_id}: there was no journal")

    def forgotten(self, request_index: int) -> None:
        self.forgotten_slots.append(request_index)


class FakeLink:
    """A WorkerPort and the worker behind it."""

    def __init__(self, rig: SchedulerRig, name: str, node: str, epoch: int, number: int, **counts: int) -> None:
        pool = rig.pools.setdefault(node, FakePool(rig.host_pages))
        size = capacity(messages.BOTH, host_pages=rig.host_pages, **counts)
        self.rig = rig
        self.number = number
        self.downlink: deque[messages.Command] = deque()
        self.uplink: deque[object] = deque()
        self.worker = FakeWorker(
            name, node, epoch, size, pool, self.uplink.append, lambda *said: self.uplink.append(said), rig.rng
        )
        self.hello = messages.WorkerHello(1, name, node, epoch, 4711, 0, 0, 1, MODEL, size)
        self.up = True

    def send(self, command: messages.Command) -> None:
        if self.up:
            if isinstance(command, messages.Admit):
                self.rig.token_log.bind(command.request_index, self.number)
            self.downlink.append(command)

    def step_s(self) -> float:
        return 0.0

    def stats(self) -> LinkStats:
        return LinkStats(1, 2.0, 3, 4, 0.5, 6.0)

    def obey(self) -> None:
        if self.downlink:
            self.worker.obey(self.downlink.popleft())

    def hear(self) -> None:
        """One report reaches the coordinator."""
        if not self.uplink or not self.up:
            return
        said = self.uplink.popleft()
        if not isinstance(said, tuple):
            self.rig.scheduler.on_event(self.worker.name, self.worker.epoch, said)  # type: ignore[arg-type]
            return
        request_index, placement, start, tokens, durable = said
        heard = self.rig.token_log.append(
            progress(RequestEntry(request_index, placement, start, tokens, durable)), self.number
        )
        short = self.rig.token_log.report_short(heard, AHEAD_TOKENS)
        if len(short):
            self.rig.scheduler.starving(short)
        if len(heard.staged):
            self.rig.scheduler.prompt_rows(heard.staged)

    def round(self) -> None:
        """All commands arrive, every admission advances once, all reports arrive."""
        while self.downlink:
            self.obey()
        for placement in list(self.worker.runs):
            self.worker.advance(placement)
        while self.uplink:
            self.hear()

    def cut(self) -> None:
        self.up = False
        self.downlink.clear()
        self.uplink.clear()


class SchedulerRig:
    def __init__(
        self,
        supervisor: Supervisor,
        seed: int,
        host_pages: int,
        settings: CoordinatorSettings,
        begin_trace: BeginTrace | None = None,
        arena_tokens: int = 1 << 18,
    ) -> None:
        self.rng = random.Random(seed)
        self.host_pages = host_pages
        self.token_log = TokenLog(settings.live_requests_max + settings.ended_keep_max, arena_tokens)
        self.listener = FakeListener(self.token_log)
        self.counters = CoordinatorCounters()
        self.scheduler = Scheduler(
            settings,
            token_log=self.token_log,
            listener=self.listener,
            counters=self.counters,
            wall_offset_s=1e9,
            begin_trace=begin_trace,
        )
        self.pools: dict[str, FakePool] = {}
        self.links: dict[str, FakeLink] = {}
        self.zombies: list[FakeLink] = []
        self.epochs = 0
        self.first_epoch = 0  # of a worker's process; 0: unknown
        supervisor.start(self.scheduler)

    # ---------------------------------------------------------------- workers

    async def add_worker(
        self, name: str, node: str = "n0", *, member: messages.GroupMember | None = None, **counts: int
    ) -> FakeLink:
        self.epochs += 1
        link = FakeLink(self, name, node, self.epochs, self.epochs, **counts)
        link.hello = msgspec.structs.replace(link.hello, member=member, first_epoch=self.first_epoch)
        await self.scheduler.worker_up(link.hello, link)
        self.links[name] = link
        return link

    def lose_worker(self, name: str, *, proved: bool) -> None:
        """Its link is cut; unless `proved`, the process works on what it has."""
        link = self.links.pop(name)
        link.cut()
        if not proved:
            self.zombies.append(link)
        self.scheduler.worker_down(name, link.worker.epoch, proved)

    def prove_exit(self, zombie: FakeLink) -> None:
        self.zombies.remove(zombie)
        self.scheduler.worker_exited(zombie.worker.name, zombie.worker.epoch)

    # ---------------------------------------------------------------- requests

    async def submit(
        self, request_id: str, prompt: int = 100, max_tokens: int = 100, priority: int = 0, *, tenant: str = ""
    ) -> None:
        ids = pack_int32([position % 1000 for position in range(prompt)])
        sampling = messages.Sampling(max_tokens=max_tokens)
        await self.scheduler.submit(messages.Submit(1, ids, sampling, request_id, priority, tenant=tenant), "test")

    def state(self, request_id: str) -> str:
        return self.scheduler.describe(request_id)[0].state

    def live(self) -> list[str]:
        return [row.request_id for row in self.scheduler.request_rows(10_000) if row.state not in TERMINAL]

    # ---------------------------------------------------------------- progress

    def round(self) -> None:
        """One of every link."""
        for link in list(self.links.values()):
            link.round()

    async def settle(self) -> None:
        """Until every actor has nothing left to do."""
        await trio.testing.wait_all_tasks_blocked()

    async def run_until(self, request_id: str, *states: str) -> None:
        for _ in range(500):
            if self.state(request_id) in states:
                return
            self.round()
            await trio.sleep(0.3)
            await self.settle()
            self.check()
        raise AssertionError(f"{request_id} is {self.state(request_id)}, not {states}")

    # ---------------------------------------------------------------- invariants

    def check(self) -> None:
        """Ledgers, placement table and life cycles are consistent; outputs are what they must be. Only while all is
        settled."""
        scheduler = self.scheduler
        for ledger in scheduler._ledgers.values():
            ledger.check_invariants()
        scheduler._placement_table.check_invariants(scheduler._ledgers.__getitem__)
        self.token_log.check_invariants()
        for request_id, live in scheduler._requests.live.items():
            live.check_invariants()
            assert request_id not in self.listener.endings
        for request_id in {*scheduler._requests.live, *scheduler._requests.ended}:
            tokens = self.tokens(request_id)
            assert tokens == [token_of(request_id, position) for position in range(len(tokens))], "I5"
        known = [ending for ending in self.listener.endings.values() if scheduler._requests.knows(ending.request_id)]
        for ending in known:
            row = scheduler.describe(ending.request_id)[0]
            assert (row.state, row.generated_tokens) == (ending.outcome, ending.generated_tokens)
            if ending.outcome == "FINISHED":
                assert ending.generated_tokens == output_tokens(ending.request_id, row.max_tokens)

    def tokens(self, request_id: str) -> list[int]:
        request_index = self.scheduler.lookup(request_id)
        data = self.token_log.tokens(request_index, 0)
        return [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]

    def check_nothing_leaked(self) -> None:
        for row in self.scheduler.pool_rows():
            assert (row.free, row.reservations, row.quarantined) == (row.host_pages, 0, 0)
        for worker in self.scheduler.worker_rows():
            if worker.state != "disconnected":
                assert worker.hot_chunks_free == worker.capacity.hot_chunks
                assert worker.seats_free == worker.capacity.seats
                assert worker.running == 0
        assert not self.scheduler._requests.by_placement


@asynccontextmanager
async def open_rig(
    seed: int = 0,
    *,
    host_pages: int = 64,
    settings: CoordinatorSettings = SETTINGS,
    begin_trace: BeginTrace | None = None,
    arena_tokens: int = 1 << 18,
) -> AsyncIterator[SchedulerRig]:
    async with open_supervisor() as supervisor:
        yield SchedulerRig(supervisor, seed, host_pages, settings, begin_trace, arena_tokens)
