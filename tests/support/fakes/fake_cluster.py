"""The decisions of the coordinator without any actor: dispatch, life cycles, ledgers, and workers that obey late.

Commands and events wait in a queue per direction and worker, so a test chooses every crossing. What an actor would do
is done here in the plainest way; what is checked is what must hold whatever the order.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from basics.request_states import TERMINAL, PendingKind
from coordinator.memory import changes
from coordinator.memory.changes import apply
from coordinator.memory.ledger import NO_PAGES, Ledger
from coordinator.policy import decisions
from coordinator.policy.decisions import Cause
from coordinator.policy.pending import PendingReasons
from coordinator.policy.prefix_reuse import PrefixReuse
from coordinator.state.events import (
    Admitted,
    Ending,
    LedgerStep,
    LinkStats,
    PlacementEnded,
    PlacementProgressed,
    RequestOrder,
    StillWaits,
)
from coordinator.state.request_state import Action, RequestState, Rows, WorkerEvent
from coordinator.state.worker_entry import WorkerDrain, WorkerEntry
from coordinator.turn.dispatch import Dispatch, Effects
from protocol import messages
from protocol.arrays import Int32Array
from protocol.sizing import misfit
from tests.support.facts import make_facts
from tests.support.fakes.fake_worker import FakePool, FakeWorker, output_tokens, token_of

AHEAD_TOKENS = 96


def capacity(role: str = messages.BOTH, **counts: int) -> messages.WorkerCapacity:
    """A small worker: 3 or 5 chunks make a managed hot buffer."""
    defaults: dict[str, Any] = {
        "seats": 3,
        "hot_chunks": 14,
        "index_pages": 26,
        "prompt_max_tokens": 512,
        "host_pages": 32,
    }
    return messages.WorkerCapacity(
        **(defaults | counts),
        page_bytes=1024,
        hot_size_classes=(128, 256),
        tail_slots=4,
        overshoot_tokens=2,
        pool_path="pool",
        role=role,
    )


MODEL = messages.ModelInfo("fingerprint", "tiny", 8192, 1000, 4, 128, (0,), "bytes", "")


@dataclass
class FakePort:
    """What a worker is sent, until it looks."""

    downlink: deque[messages.Command] = field(default_factory=deque)

    def send(self, command: messages.Command) -> None:
        self.downlink.append(command)

    def step_s(self) -> float:
        return 0.0

    def stats(self) -> LinkStats:
        return LinkStats(0, 0.0, 0, 0, 0.0, 0.0)


@dataclass
class FakeLive:
    """A request: its real life cycle, and what the token log would know."""

    state: RequestState
    sampling: messages.Sampling
    prompt: bytes
    tokens: list[int] = field(default_factory=list)
    placement: int = 0
    durable: int = 0
    endings: list[Ending] = field(default_factory=list)


class FakeCluster:
    def __init__(
        self,
        seed: int,
        nodes: tuple[str, ...] = ("n0",),
        host_pages: int = 32,
        prefix_reuse: PrefixReuse | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.ledgers = {node: Ledger(host_pages) for node in nodes}
        self.pools = {node: FakePool(host_pages) for node in nodes}
        self.dispatch = Dispatch(self.ledgers, AHEAD_TOKENS, prefix_reuse)
        self.live: dict[int, FakeLive] = {}
        placement_table, policy = self.dispatch.placement_table, self.dispatch.policy
        self.pending = PendingReasons(
            placement_table, policy, lambda request_index: self.live[request_index].state.facts.request_id
        )
        self.workers: dict[str, FakeWorker] = {}
        self.ports: dict[str, FakePort] = {}
        self.uplinks: dict[str, deque[object]] = {}
        self.zombies: list[FakeWorker] = []
        self.epochs: dict[str, int] = {}
        self.retracted: list[tuple[RequestState, Cause]] = []

    # ---------------------------------------------------------------- workers

    def add_worker(
        self,
        name: str,
        node: str,
        role: str = messages.BOTH,
        *,
        member: messages.GroupMember | None = None,
        **counts: int,
    ) -> None:
        self.epochs[name] = self.epochs.get(name, 0) + 1
        epoch, size = self.epochs[name], capacity(role, host_pages=self.ledgers[node].pages_total, **counts)
        uplink: deque[object] = deque()
        fake = FakeWorker(
            name, node, epoch, size, self.pools[node], uplink.append, lambda *said: uplink.append(said), self.rng
        )
        self.workers[name], self.ports[name], self.uplinks[name] = fake, FakePort(), uplink
        worker = WorkerEntry(name, node, epoch, size, MODEL, self.ports[name], member=member)
        self.take(self.dispatch.worker_up(worker))

    def lose_worker(self, name: str, *, proved: bool, is_leaving: bool = False) -> None:
        """Its link is cut; unless `proved`, the process works on what it has. `is_leaving`: it had said that it
        ends."""
        fake = self.workers.pop(name)
        self.ports.pop(name)
        self.uplinks.pop(name)
        fake.emit, fake.report = _cut_link, _cut_link
        if not proved:
            self.zombies.append(fake)
        table = self.dispatch.placement_table
        worker = table.workers[name]
        for entry in [entry for it in table.beside(worker) for entry in table.on(it.name)]:
            entry.generated = len(self.live[entry.request_index].tokens)
        self.take(self.dispatch.worker_down(worker, proved_exit=proved, died=proved, is_leaving=is_leaving))

    def prove_exit(self, zombie: FakeWorker) -> None:
        self.zombies.remove(zombie)
        self.take(self.dispatch.worker_exited(zombie.name, zombie.epoch))

    def obey_next(self, name: str) -> None:
        if self.ports[name].downlink:
            self.workers[name].obey(self.ports[name].downlink.popleft())

    def hear_next(self, name: str) -> None:
        if self.uplinks[name]:
            said = self.uplinks[name].popleft()
            if isinstance(said, tuple):
                self._append(*said)
            elif not isinstance(said, messages.Counters):
                self._route(said)

    def _append(self, request_index: int, placement: int, start: int, tokens: list[int], durable: int) -> None:
        live = self.live.get(request_index)
        if live is None or live.placement != placement:
            return
        assert start <= len(live.tokens), "I5: a gap"
        live.tokens += tokens[len(live.tokens) - start :]
        live.durable = max(live.durable, durable)
        entry = self.dispatch.placement_table.entries[request_index]
        if entry.pages * 64 - entry.facts.prompt_tokens - len(live.tokens) < AHEAD_TOKENS:
            self.dispatch.starve(entry)

    def _route(self, event: object) -> None:
        for request_index, live in self.live.items():
            if live.state.placement == event.placement:  # type: ignore[attr-defined]
                return self.tell(request_index, event)  # type: ignore[arg-type]
        return None

    # ---------------------------------------------------------------- requests

    def submit(
        self,
        request_index: int,
        prompt_tokens: int,
        max_tokens: int,
        priority: int = 0,
        *,
        full: bool = False,
        prefill_mode: str = messages.AUTO,
        tenant: str = "",
    ) -> None:
        """`full`: it will use all of its `max_tokens`."""
        request_id = f"r{request_index}" + "!" * full
        table = self.dispatch.placement_table
        facts = make_facts(
            request_index,
            prompt_tokens,
            max_tokens,
            request_id=request_id,
            rank=table.next_rank(priority, ("", tenant)),
            prefill_mode=prefill_mode,
            tenant=tenant,
        )
        self.live[request_index] = FakeLive(
            table.add(facts, self.now),
            messages.Sampling(max_tokens=max_tokens),
            np.arange(prompt_tokens, dtype=np.int32).tobytes(),
        )
        self.dispatch.dirty = True

    def entry(self, request_index: int) -> RequestState:
        return self.dispatch.placement_table.entries[request_index]

    def tell(self, request_index: int, event: RequestOrder | WorkerEvent) -> None:
        live = self.live[request_index]
        for action in live.state.handle(event, Rows(len(live.tokens), live.durable), self.now):
            self._perform(live, action)

    def _perform(self, live: FakeLive, action: Action) -> None:
        match action:
            case Ending():
                live.endings.append(action)
                self.dispatch.closed(action.request_index)
            case PlacementProgressed():
                self.take(self.dispatch.progressed(action))
            case PlacementEnded():
                live.placement = 0
                self.take(self.dispatch.placement_ended(action, len(live.tokens)))
            case messages.Admit() | messages.Grant() | messages.Resize() | messages.Withdraw():
                if live.state.worker in self.ports:
                    self.ports[live.state.worker].send(action)

    def take(self, heard: Effects) -> None:
        for step in heard.steps:
            self._apply(step)
        for tell in heard.tells:
            self.tell(tell.request_index, tell.event)

    # ---------------------------------------------------------------- decisions

    def settle(self, *, tick: bool = False) -> list[decisions.Decision]:
        """Plan, apply, tell; returns the decisions, each checked against the rules of rank."""
        for entry in self.dispatch.placement_table.in_view():
            entry.generated = len(self.live[entry.request_index].tokens)
        best = min(
            (entry.rank for entry in self.dispatch.placement_table.entries.values() if not entry.ordered.held),
            default=None,
        )
        plan = self.dispatch.plan(self.now, tick=tick)
        for decision in plan:
            self._carry_out(decision)
            if isinstance(decision, decisions.RetractDecision):
                self.retracted.append((decision.entry, decision.cause))
                memory = decision.cause in (*decisions.DISPLACING, Cause.THROUGHPUT)
                assert not memory or decision.entry.rank != best, "the oldest of the top priority is never a victim"
        self._check_order(plan)
        if tick:
            self._check_reasons()
        return plan

    def _check_reasons(self) -> None:
        """After a plan, every request that waits does so for something that has a name."""
        for rank in self.dispatch.placement_table.waiting:
            entry = self.dispatch.placement_table.by_rank[rank]
            reason = self.pending.explain(entry, self.now)
            assert reason.kind is not PendingKind.TURN, (entry, reason)
        for entry, reason in self.pending.due(self.now):
            self.tell(entry.request_index, StillWaits(reason.text))

    def _carry_out(self, decision: decisions.Decision) -> None:
        step = self.dispatch.step(decision)
        pages = self._apply(step) if step else NO_PAGES
        if not isinstance(decision, decisions.AdmitDecision):
            tell = self.dispatch.told(decision, pages)
            return self.tell(tell.request_index, tell.event)
        entry, live = decision.entry, self.live[decision.entry.request_index]
        self.dispatch.prefix_reuse.use(entry, decision.worker.node, decision.share.size)
        assert isinstance(step, tuple)
        assert isinstance(step.change, changes.Reserve)
        live.placement, live.durable = decision.placement, decision.durable_tokens
        generated = np.array(live.tokens, dtype=np.int32).tobytes()
        command = messages.Admit(
            decision.placement,
            entry.request_index,
            live.state.facts.request_id,
            live.prompt,
            generated,
            decision.resumed_tokens,
            live.sampling,
            pages.tobytes(),
            decision.memory.index_pages,
            decision.hot_size.hot_slots,
            decision.hot_size.hot_chunks,
            decision.first_token,
            prefix_tokens=decision.prefix_tokens,
            by_steps=entry.by_steps,
        )
        return self.tell(entry.request_index, Admitted(command, decision.worker.name, decision.worker.port, "fits"))

    def _apply(self, step: LedgerStep) -> Int32Array:
        """As the HostPool does: what takes more pages than are free has idle cached ones evicted before it."""
        ledger, index = self.ledgers[step.node], self.dispatch.prefix_reuse.by_node.get(step.node)
        if index is None:
            return apply(ledger, step.change)
        if isinstance(step.change, changes.GIVING):
            spared = step.change.shared.tolist() if isinstance(step.change, changes.Reserve) else []
            missing = changes.pages_taken(step.change) - ledger.pages_free
            if missing > 0:
                ledger.evict(index.evict(missing, ledger.is_idle, frozenset(spared)))
        free_before = ledger.pages_free
        pages = apply(ledger, step.change)
        index.given_out(lambda: ledger.moved(free_before)[0])
        return pages

    def _check_order(self, plan: list[decisions.Decision]) -> None:
        """Strict order: no request was placed on a worker for which a better-ranked request still waits. A follower
        waits for no worker, and one that needs two may have none while others drain."""
        table = self.dispatch.placement_table
        waiting = [table.by_rank[rank] for rank in table.waiting]
        drains = any(worker.drain is not None for worker in table.workers.values())
        for decision in plan:
            if isinstance(decision, decisions.AdmitDecision):
                worker = decision.worker
                for entry in waiting:
                    could = not entry.pages or entry.node == worker.node
                    could = could and entry.follows is None
                    could = could and not (drains and entry.facts.prefill_mode == messages.DIRECT)
                    could = could and not misfit(entry.length, worker.capacity, worker.name)
                    assert not (could and entry.rank < decision.entry.rank), "overtaken"

    # ---------------------------------------------------------------- to the end

    def drain_worker(self, name: str, drain: WorkerDrain | None) -> None:
        self.dispatch.drain(self.dispatch.placement_table.workers[name], drain)

    def round(self) -> None:
        """Every link delivers, every admission advances once, the Scheduler decides."""
        self.now += 1.0
        for name, worker in list(self.workers.items()):
            while self.ports[name].downlink:
                self.obey_next(name)
            for placement in list(worker.runs):
                worker.advance(placement)
            while self.uplinks[name]:
                self.hear_next(name)
        self.settle(tick=True)
        self.check_invariants()

    def unfinished(self) -> list[int]:
        return [
            request_index
            for request_index, live in self.live.items()
            if live.state.state not in TERMINAL and not live.state.held
        ]

    def check_invariants(self) -> None:
        for ledger in self.ledgers.values():
            ledger.check_invariants()
        self.dispatch.placement_table.check_invariants(self.ledgers.__getitem__)
        for request_index, live in self.live.items():
            live.state.check_invariants()
            assert len(live.endings) == (live.state.state in TERMINAL), "I5: ends exactly once"
            assert live.tokens == [token_of(live.state.facts.request_id, i) for i in range(len(live.tokens))], "I5"
            if live.state.state == "FINISHED":
                assert len(live.tokens) == output_tokens(live.state.facts.request_id, live.sampling.max_tokens)
            assert (request_index in self.dispatch.placement_table.entries) == (live.state.state not in TERMINAL)

    def check_nothing_leaked(self) -> None:
        """All is over and every worker's exit proved: every page and chunk is free."""
        for ledger in self.ledgers.values():
            assert ledger.holdings_count == 0
            assert ledger.pages_free == ledger.pages_total
        for name, worker in self.workers.items():
            budget = self.ledgers[worker.node].budget(name)
            assert budget.free.hot_chunks == worker.capacity.hot_chunks
            assert budget.free.seats == worker.capacity.seats


def _cut_link(*_: object) -> None:
    """What is sent over it is lost."""
