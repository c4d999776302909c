"""The Scheduler actor: the shell round coordinator.turn.dispatch. What others call is in api.py beside it.

One turn: have Requests hear their workers, which it steps (coordinator.actor); hear what their steps returned, then a
batch of messages; have the HostPools apply what follows from both; plan; have the plan applied and committed; tell the
Requests. No memory is given before that is committed (I4); what gives memory back need not be waited for, since commits
keep their order. The accounts do not change while a plan is made, because only this actor asks for changes. Commands
and submissions are answered when they are in the journal (SchedulerApi).

Operators' commands pass through here and not straight to a Request, so that "admit" and "abort" of one request can
never cross. A command on several requests is checked for all of them before anything is told."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import trio

from coordinator.journal.journal import DONE, Commit, Journal, NoJournal
from coordinator.journal.records import PoolOpened, Record, RequestPlacementEnded
from coordinator.memory.changes import GIVING
from coordinator.memory.host_pool import HostPool
from coordinator.memory.kv_events import KvEvent, KvEvents
from coordinator.memory.ledger import NO_PAGES, EpochKey, Ledger
from coordinator.memory.prefix_index import KEY_BYTES
from coordinator.policy import decisions
from coordinator.policy.hot_sizing import HotSizing
from coordinator.policy.policy import GRANT_STEP_PAGES
from coordinator.policy.prefix_reuse import PrefixReuse
from coordinator.scheduler.api import Call, SchedulerApi, SchedulerTurn, StopDeadline
from coordinator.scheduler.submission import Submissions
from coordinator.scheduler.worker_registry import WorkerRegistry
from coordinator.state import events
from coordinator.state.events import AddressedOrder, LedgerStep, Listener, WorkerPort
from coordinator.state.request import BeginTrace, RequestParts
from coordinator.state.request_state import RequestState, describe_size
from coordinator.tokens.token_log import TokenLog
from coordinator.turn.auditor import Auditor
from coordinator.turn.commands import is_set_aside
from coordinator.turn.dispatch import Dispatch, Effects, in_transactions, order_to
from coordinator.turn.recovery import Place, endings_of, restore
from coordinator.turn.request_table import RequestTable
from metrics.state import CoordinatorCounters
from protocol import messages
from protocol.arrays import Int32Array
from protocol.logs import fields, logger
from protocol.settings import AUTO_FLOOR, CoordinatorSettings
from protocol.sizing import page_limit
from protocol.units import PAGE_TOKENS

#: Messages handled in one turn.
BATCH_MAX: Final = 1_024
#: Messages about one request that may wait: the digests of its prompt, the ends of its transfers, which take turns; and
#: a request index is reported starving once until the next grant.
MESSAGES_PER_REQUEST: Final = 4
#: Commands, workers and ticks on top.
MESSAGES_BESIDES: Final = 4_096
#: How often deadlines are looked at, hot buffers grown, and ended requests forgotten.
TICK_S: Final = 0.25
#: At a stop's deadline, workers have this long to release what was failed; then their word is not waited for.
RELEASE_LIMIT_S: Final = 5.0
#: Tokens that a grant may come to beyond `grant_ahead_tokens`: the step of a grant, the overshoot of a step, and what
#: rounding to pages adds.
GRANT_TOKENS_BESIDES: Final = (GRANT_STEP_PAGES + 2) * PAGE_TOKENS
#: Granted tokens of a request that has all it can ever use: it is never short.
GRANTED_ALL: Final = 2**31 - 1

log = logger("coordinator.scheduler.scheduler")


class Scheduler(SchedulerApi):
    """Run it with `supervisor.start(scheduler)`. It makes Request and HostPool actors, and steps them.

    `clock` gives seconds on the scheduler's time line, `wall_offset_s` what to add for seconds since the epoch.
    `stopped` is set when a requested stop is complete: every request is terminal.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        *,
        token_log: TokenLog,
        listener: Listener,
        counters: CoordinatorCounters | None = None,
        journal: Journal | None = None,
        clock: Callable[[], float] = trio.current_time,
        wall_offset_s: float = 0.0,
        publish: Callable[[Sequence[KvEvent]], None] | None = None,
        begin_trace: BeginTrace | None = None,
    ) -> None:
        """`publish` is called at the end of each turn that changed which prefixes are cached, `begin_trace` for each
        request that is submitted or recovered."""
        mailbox_max = settings.live_requests_max * MESSAGES_PER_REQUEST + MESSAGES_BESIDES
        super().__init__("scheduler", mailbox_max=mailbox_max, batch_max=BATCH_MAX)
        self.stopped = trio.Event()
        self._token_log = token_log
        self._listener = listener
        self._counters = counters or CoordinatorCounters()
        self._journal = journal or NoJournal()
        self._clock = clock
        self._wall_offset_s = wall_offset_s
        self._pools: dict[str, HostPool[Record, Commit]] = {}
        self._ledgers: Mapping[str, Ledger] = self._journal.state.ledgers
        self._digesting = trio.Lock()
        self._publish = publish
        self._kv_events = KvEvents(self._some_tokens) if publish is not None else None
        key = secrets.token_bytes(KEY_BYTES)
        self._prefix_reuse = PrefixReuse(settings.prefix_reuse, key, self._kv_events, clock)
        self._lead_tokens = settings.grant_ahead_tokens + GRANT_TOKENS_BESIDES
        self._dispatch = Dispatch(
            self._ledgers, settings.grant_ahead_tokens, self._prefix_reuse, self._makes_output_room, token_log.hold
        )
        self._placement_table = self._dispatch.placement_table
        self._registry = WorkerRegistry(self._placement_table, self._ledgers, self._open_pool)
        self._requests = RequestTable(token_log, settings, wall_offset_s, self._dispatch)
        self._hot_sizing: HotSizing | None = None
        if settings.hot_floor == AUTO_FLOOR:
            self._hot_sizing = HotSizing(self._placement_table, self._requests.swaps_of)
        self._auditor = Auditor(
            self._placement_table,
            self._ledgers,
            self._requests,
            token_log,
            self._counters,
            settings.audit_interval_s,
            self._prefix_reuse,
        )
        parts = RequestParts(
            token_log, listener, self, clock, self._journal, wall_offset_s, self._counters, begin_trace
        )
        self._submissions = Submissions(self._requests, self._dispatch, self._registry, parts, self._lead_tokens)
        self._stop = None
        self._awaited = DONE  # the commit that the turn waits for

    def history(self) -> tuple[str, ...]:
        return () if self._awaited.done else ("a turn waits for the journal",)

    # ---------------------------------------------------------------- from the journal

    def recover(self, ports: Mapping[EpochKey, WorkerPort]) -> None:
        """Take over the journal state; `ports` are those of the epochs that are awaited. Before `run`."""
        journal_state = self._journal.state
        for node, opened in journal_state.pools.items():
            self._registry.recover(opened, journal_state.joined(node))
            self._start_pool(node)
        place = Place(
            journal_state,
            self._dispatch,
            self._requests,
            self._token_log,
            self._submissions.start,
            self._clock(),
            self._wall_offset_s,
        )
        first = restore(place, ports)
        self._submissions.ids_made = journal_state.arrivals
        if self._registry.model is not None:
            self._prefix_reuse.serve(self._registry.model)
        freed = self._prefix_reuse.begin_empty(self._ledgers)
        for live in self._requests.live.values():
            if live.is_placed and live.worker in self._placement_table.workers:
                self._begin_admission(live, self._token_log.durable(live.request_index))
        self.tell(lambda turn: turn.take(Effects(freed), first))
        for ending in endings_of(journal_state):
            self._listener.recovered(ending)

    # ---------------------------------------------------------------- one turn

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tick)
            nursery.start_soon(self._digest_recovered)
            await super().run()
            nursery.cancel_scope.cancel()

    async def _tick(self) -> None:
        while True:
            await trio.sleep(TICK_S)
            self.tell(_tick)

    async def handle(self, batch: list[Call]) -> None:
        now = self._clock()
        turn, returned, self.returned = SchedulerTurn(now), self.returned, []
        for word in returned:
            self._hear_request(word, turn)
        for call in batch:
            call(turn)
        await self._transact(turn.steps)
        self._announce_turn(turn)
        if turn.is_tick:
            self._auditor.tick(now)
            self._submissions.forget(self._requests.forget_old(now))
            self._journal.summarize_if_long()
            if self._hot_sizing is not None:
                self._hot_sizing.look(now)
        await self._decide(now, turn.is_tick)
        if self._stop is not None:
            await self._wind_up(self._stop, now)
        if self._publish is not None and self._kv_events is not None and (news := self._kv_events.take()):
            self._publish(news)

    def _announce_turn(self, turn: SchedulerTurn) -> None:
        for tell in turn.tells:
            self._tell(tell)
        for send in turn.sends:
            if worker := self._placement_table.workers.get(send.worker):
                worker.port.send(send.command)
        self.step_ready()
        commit = self._journal.append(()) if turn.replies else DONE
        for reply, value, what in turn.replies:
            (commit if what else DONE).answer(reply, value, what)

    def _hear_request(self, word: events.Word, turn: SchedulerTurn) -> None:
        match word:
            case events.PlacementProgressed():
                turn.take(self._dispatch.progressed(word))
            case events.PlacementEnded():
                self._requests.end_placement(word.placement)
                turn.take(self._placement_ended(word))
                self._requests.keep_warm_start(self._requests.by_index[word.request_index].state, word.warm_start)
            case events.Ending(request_index):
                self._dispatch.closed(request_index)
                self._requests.end(self._requests.by_index[request_index].state)
                self._token_log.cut(request_index)

    def _placement_ended(self, event: events.PlacementEnded) -> Effects:
        request_index = event.request_index
        tokens = partial(self._tokens_of, request_index)
        return self._dispatch.placement_ended(event, self._token_log.length(request_index), tokens)

    def _tokens_of(self, request_index: int) -> bytes:
        """Its prompt and its output, int32."""
        return self._requests.by_index[request_index].state.prompt + self._token_log.tokens(request_index, 0)

    def _some_tokens(self, request_index: int, first: int, last: int) -> bytes:
        """Tokens `first` to `last` of its prompt and its output, int32. A prompt may be megabytes: no more is
        copied."""
        prompt = self._requests.by_index[request_index].state.prompt
        whole = prompt if 4 * last <= len(prompt) else self._tokens_of(request_index)
        return whole[4 * first : 4 * last]

    # ---------------------------------------------------------------- requests

    def _tell(self, tell: AddressedOrder) -> None:
        """A request that ended in this very turn is told nothing any more."""
        if request := self._requests.by_index.get(tell.request_index):
            request.tell(tell.event)

    # ---------------------------------------------------------------- workers

    def _open_pool(self, hello: messages.WorkerHello) -> None:
        """A pool with nothing in it. Requests that kept rows in the one before are prefilled again."""
        if hello.node in self._pools:
            self._pools[hello.node].close()
        for entry in [entry for entry in self._placement_table.kept.values() if entry.node == hello.node]:
            self._placement_table.demote(entry)
            self._journal.append([RequestPlacementEnded(entry.request_index, 0)])
            self._tell(order_to(entry, events.DemoteOrder(f"the host pool of {hello.node} is gone")))
        for inbound in [inbound for inbound in self._placement_table.transfers.values() if inbound.node == hello.node]:
            for tell in self._dispatch.close_transfer(inbound, f"the pool of {hello.node} is gone", is_lost=True).tells:
                self._tell(tell)  # and its pages are gone with their ledger
        self._journal.open_pool(PoolOpened(hello.node, hello.capacity, hello.model))
        self._start_pool(hello.node)

    def _start_pool(self, node: str) -> None:
        self._pools[node] = HostPool(
            node,
            self._ledgers[node],
            self._prefix_reuse.open(node),
            self._journal.append_changes,
            stepped_by=self,
            lifetimes=self._counters.host_page_s,
            clock=self._clock,
            evicted=partial(self._count_evicted, node),
        )

    def _count_evicted(self, node: str, pages: int, lent: int) -> None:
        self._prefix_reuse.stats[node].evicted_pages += pages
        self._counters.prefix_pages_evicted += pages
        self._counters.prefix_pages_evicted_lent += lent

    # ---------------------------------------------------------------- decisions

    async def _decide(self, now: float, tick: bool) -> None:
        self._refresh(self._placement_table.in_view())
        plan = self._dispatch.plan(now, tick=tick)
        pairs = [(self._dispatch.transfer_step(decision), self._dispatch.step(decision)) for decision in plan]
        given = iter(await self._transact([step for pair in pairs for step in pair if step is not None]))
        for decision, pair in zip(plan, pairs, strict=True):
            taken, pages = (NO_PAGES if step is None else next(given) for step in pair)
            if isinstance(decision, decisions.AdmitDecision) and decision.transfer is not None:
                self._receive(decision.entry, decision.transfer, taken)
            self._announce(decision, pages)
        if tick:
            for entry, reason in self._requests.pending.due(now):
                self._tell(order_to(entry, events.StillWaits(reason.text)))
        self.step_ready()

    def _makes_output_room(self, entry: RequestState) -> bool:
        """Make room in the token log for the next grant; return whether there is enough."""
        return self._token_log.make_room(entry.request_index, entry.generated + self._lead_tokens)

    async def _transact(self, steps: Sequence[LedgerStep]) -> list[Int32Array]:
        """Have each node's HostPool apply its changes, in order; returns what each gave out, in order. When something
        was given out, it is committed, and all before it."""
        given, commit = [NO_PAGES] * len(steps), DONE
        for node, places in in_transactions(steps):
            asked = [steps[place] for place in places]
            notes = [step.note for step in asked if step.note is not None]
            applied = self._pools[node].transact([step.change for step in asked], notes)
            for place, result in zip(places, applied.given, strict=True):
                given[place] = result
            commit = applied.commit
        if any(isinstance(step.change, GIVING) for step in steps):
            await self._wait_for(commit)
        return given

    async def _wait_for(self, commit: Commit) -> None:
        """Return once `commit` is done. Requests hear their workers meanwhile, however long the disk takes."""
        self._awaited = commit
        commit.then(self._parking.wake)
        while not commit.done:
            await self._parking.wait()
            self.step_ready()
        self._awaited = DONE

    def _announce(self, decision: decisions.Decision, pages: Int32Array) -> None:
        """Its change is committed: let the token log and the Request know."""
        match decision:
            case decisions.AdmitDecision():
                self._tell(self._admit(decision, pages))
                return
            case decisions.GrantDecision(entry):
                self._token_log.grant(entry.request_index, self._granted_tokens(entry))
            case decisions.RetractDecision(_, keep, cause):
                self._counters.retractions["keep" if keep else "drop", cause.value] += 1
        self._tell(self._dispatch.told(decision, pages))

    def _receive(self, entry: RequestState, transfer: decisions.Transfer, pages: Int32Array) -> None:
        facts = entry.facts
        about = facts.request_index, facts.request_id, facts.prompt_tokens
        shared = transfer.share.size * PAGE_TOKENS
        transfer.worker.port.send(messages.Receive(transfer.transfer_id, *about, pages.tobytes(), shared))

    def _admit(self, decision: decisions.AdmitDecision, pages: Int32Array) -> AddressedOrder:
        entry, worker, hot_size = decision.entry, decision.worker, decision.hot_size
        prefix_tokens = decision.prefix_tokens
        self._requests.by_placement[decision.placement] = entry
        self._begin_admission(entry, decision.durable_tokens)
        if not decision.durable_tokens:
            self._prefix_reuse.use(entry, worker.node, decision.share.size)
            self._counters.prefix_tokens += prefix_tokens
            self._counters.prefix_asked_tokens += entry.facts.prompt_tokens if self._prefix_reuse.is_on else 0
        transfer = decision.transfer
        if transfer is not None and entry.chain is not None and transfer.share.size:
            self._prefix_reuse.by_node[transfer.worker.node].touch(entry.chain.digests[transfer.share.size - 1])
        command = messages.Admit(
            placement=decision.placement,
            request_index=entry.request_index,
            request_id=entry.facts.request_id,
            prompt=entry.prompt,
            generated=self._token_log.tokens(entry.request_index, 0),
            durable_tokens=decision.resumed_tokens,
            sampling=entry.sampling,
            host_pages=pages.tobytes(),
            index_pages=decision.memory.index_pages,
            hot_slots=hot_size.hot_slots,
            hot_chunks=hot_size.hot_chunks,
            first_token=decision.first_token,
            prefix_tokens=prefix_tokens,
            unsent_tokens=transfer.share.size * PAGE_TOKENS if transfer else 0,
            transfer_id=transfer.transfer_id if transfer else 0,
            destination=transfer.worker.receiver if transfer else b"",
            warm_start=entry.warm_start if decision.resumed_tokens else b"",
            rank=entry.rank,
            draft_tokens=entry.facts.draft_tokens,
            owner=entry.facts.owner_name,
            by_steps=entry.by_steps,
        )
        self._requests.keep_warm_start(entry, b"")
        reason = f"on {worker.name}, {pages.size} host pages, {describe_size(hot_size.hot_slots)}"
        reason += f"; {prefix_tokens} tokens of the prompt reused" if prefix_tokens else ""
        reason += ", the rest by decode steps" if entry.by_steps else ""
        reason += f"; {decision.decoder} is to decode it" if decision.decoder else ""
        return order_to(entry, events.Admitted(command, worker.name, worker.port, reason))

    def _begin_admission(self, entry: RequestState, durable_tokens: int) -> None:
        self._token_log.begin_placement(
            entry.request_index, entry.placement, entry.facts.prompt_tokens, self._granted_tokens(entry), durable_tokens
        )

    def _granted_tokens(self, entry: RequestState) -> int:
        capacity = self._placement_table.workers[entry.worker].capacity
        return GRANTED_ALL if entry.pages >= page_limit(entry.length, capacity) else entry.pages * PAGE_TOKENS

    # ---------------------------------------------------------------- the end

    async def _wind_up(self, stop: StopDeadline, now: float) -> None:
        """Held requests are not waited for. Past the deadline what is in the journal is left to the next
        incarnation; without a journal all fail, and past RELEASE_LIMIT_S workers are not heard."""
        lives, turn = list(self._requests.live.values()), SchedulerTurn(now)
        if not lives or (self._journal.is_kept and self._is_over(stop, lives, now)):
            if lives and not self.stopped.is_set():
                log.info("unfinished requests resume at the next start", extra=fields(requests=len(lives)))
            self.stopped.set()
        elif stop.failed_at is None:
            if self._is_over(stop, lives, now):
                stop.failed_at = now
                for live in lives:
                    turn.take(self._dispatch.end(live, "FAILED", "the coordinator stopped", "stopped"))
        elif now >= stop.failed_at + RELEASE_LIMIT_S:
            for worker in [worker for worker in self._placement_table.workers.values() if worker.requests]:
                turn.take(self._dispatch.worker_down(worker, proved_exit=False))
        await self._transact(turn.steps)
        self._announce_turn(turn)

    @staticmethod
    def _is_over(stop: StopDeadline, lives: Sequence[RequestState], now: float) -> bool:
        """Return whether nothing is left to wait for."""
        return now >= stop.deadline or all(map(is_set_aside, lives))


def _tick(turn: SchedulerTurn) -> None:
    turn.is_tick = True
