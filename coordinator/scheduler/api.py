"""The Scheduler's front: calls of the gateway and the worker links, and what each does in a turn.

Asks wait for the Scheduler's turn, and for what they did to be in the journal; while that cannot be, they are refused
beforehand. Queries read the pure states of actors between turns, which is safe in one thread
and saves a turn; they change nothing (I7). Worker events go straight to the Request concerned.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
import numpy as np
import trio

from basics.request_checks import check_range
from basics.rooms import RoomUse
from coordinator.actor import Actor, Reply
from coordinator.journal.journal import Journal, check_writes
from coordinator.journal.records import NOT_ATTESTED, RequestFacts, WorkerDrained, WorkerUndrained
from coordinator.memory.changes import Evict
from coordinator.memory.ledger import Ledger
from coordinator.memory.prefix_index import DIGEST_BYTES, Chain, Digest, Match, Scope
from coordinator.policy.pending import unserved
from coordinator.policy.prefix_reuse import ROOTS_MAX, PrefixReuse, PrefixStats
from coordinator.scheduler.submission import Submissions
from coordinator.scheduler.worker_registry import WorkerRegistry
from coordinator.state import events
from coordinator.state.events import (
    AddressedOrder,
    CommandAsk,
    Handle,
    LedgerStep,
    RequestCommand,
    WorkerPort,
    WorkerSend,
)
from coordinator.state.placement_table import PlacementTable
from coordinator.state.request_state import RequestState
from coordinator.state.worker_entry import WorkerDrain
from coordinator.tokens.token_log import TokenLog
from coordinator.turn.auditor import Auditor, AuditRows
from coordinator.turn.commands import carry_out, drain_promise, release_quarantine, stop_promise
from coordinator.turn.dispatch import Dispatch, Effects
from coordinator.turn.recovery import adopt
from coordinator.turn.request_table import RequestTable
from metrics.state import CoordinatorCounters
from protocol import messages
from protocol.arrays import Int32Array
from protocol.errors import BadInput, HiSparseError, ProtocolError, Unavailable, WrongState
from protocol.inventory import unpack_rows
from protocol.logs import fields, logger
from protocol.messages import NAME_CHARS_MAX
from protocol.units import PAGE_TOKENS

#: A worker may not leave less room than this in a Request's mailbox.
FLOOD_MARGIN: Final = 64
#: Bytes of a prompt that are digested before other tasks get a turn, in about 0.4 ms: 384 pages.
DIGESTED_AT_ONCE: Final = 384 * 4 * PAGE_TOKENS
#: Cached prefixes compared before other tasks get a turn: about half a millisecond.
LEAVES_AT_ONCE: Final = 1_024

#: Longest deadline of a drain or a stop (I8).
DEADLINE_MAX_S: Final = 86_400.0

T = TypeVar("T")

log = logger("coordinator.scheduler.api")


@dataclass(slots=True)
class SchedulerTurn:
    """Consequences of one batch of messages at `now`: ledger changes, then orders and commands, then replies.

    A reply has its value and, in one phrase, what was done, which is to be in the journal before it; "": it need not.
    """

    now: float
    steps: list[LedgerStep] = field(default_factory=list)
    tells: list[AddressedOrder] = field(default_factory=list)
    sends: list[WorkerSend] = field(default_factory=list)
    replies: list[tuple[Reply[Any], Any, str]] = field(default_factory=list)
    is_tick: bool = False  # time passed: deadlines, lazy growth, forgetting

    def take(self, *many: Effects) -> None:
        for effects in many:
            self.steps += effects.steps
            self.tells += effects.tells
            self.sends += effects.sends


#: Messages of the Scheduler: calls that its next turn carries out.
Call: TypeAlias = Callable[[SchedulerTurn], None]


@dataclass(slots=True)
class StopDeadline:
    deadline: float
    failed_at: float | None = None


class SchedulerApi(Actor[Call]):
    """Base of the Scheduler, which fills in who there is."""

    _requests: RequestTable
    _placement_table: PlacementTable
    _registry: WorkerRegistry
    _auditor: Auditor
    _submissions: Submissions
    _dispatch: Dispatch
    _clock: Callable[[], float]
    _wall_offset_s: float
    _journal: Journal
    _counters: CoordinatorCounters
    _prefix_reuse: PrefixReuse
    _token_log: TokenLog
    _digesting: trio.Lock
    _ledgers: Mapping[str, Ledger]
    _stop: StopDeadline | None

    async def _in_turn(self, carry_out: Callable[[SchedulerTurn], tuple[T, str]]) -> T:
        """Have the next turn carry a call out; return its value once what it did, which it names, is in the journal.

        What it raises fails the call, with nothing done. An empty name needs no commit.
        """

        def call(reply: Reply[T], turn: SchedulerTurn) -> None:
            try:
                turn.replies.append((reply, *carry_out(turn)))
            except HiSparseError as error:
                reply.fail(error)

        return await self.ask(lambda reply: partial(call, reply))

    def _live(self, request_indices: Int32Array) -> Iterator[RequestState]:
        """Yield those of the requests that live."""
        return filter(None, map(self._placement_table.entries.get, request_indices.tolist()))

    def _refresh(self, entries: Iterable[RequestState]) -> None:
        """Read their progress from the token log."""
        for entry in entries:
            entry.generated = self._token_log.length(entry.request_index)

    @property
    def stopping(self) -> bool:
        """Return whether the coordinator takes no more requests because it is about to end."""
        return self._stop is not None

    # ---------------------------------------------------------------- for the gateway

    # `user` is whose key was shown; requests of others are not found. None: an operator, to whom all belong.

    def refusal(self) -> str:
        """Why any new request would be refused now; "" when it would not be."""
        try:
            check_writes(self._journal)
        except Unavailable as error:
            return error.message
        return "the coordinator is stopping" if self.stopping else ""

    def unserved(self) -> str:
        """Why any new request would wait now, since no worker takes it; "" when one does."""
        reason = unserved(tuple(self._placement_table.workers.values()))
        return reason.text if reason else ""

    async def submit(
        self, submit: messages.Submit, owner: str, user: str = "", *, prefix_tenant: str | None = None
    ) -> Handle:
        """Validate, queue and acknowledge a request. Refused in full or accepted in full.

        `prefix_tenant` keeps prefixes of `user` apart where the tenant of `submit` must not count in turns.

        The same submission under the same id is the same request: a client that lost the answer may ask again. Raises
        BadInput (field, value, remedy), WrongState for the id of another request, CapacityError when it could never
        fit or the queue is full, Unavailable while stopping, before the first worker has registered, or while the
        journal cannot be written. Cancelled: it may have been accepted; submit it again under its id.
        """
        check_writes(self._journal)
        tenant, matches = submit.tenant if prefix_tenant is None else prefix_tenant, dict[str, Match]()
        scope = self._prefix_reuse.scope(user, tenant, submit.cache_salt)
        chain = await self._chain_of(submit.prompt, scope, matches)
        ask = events.SubmitAsk(submit, owner, user, chain, matches)

        def queue(turn: SchedulerTurn) -> tuple[Handle, str]:
            return self._submissions.submit(ask, turn.now, stopping=self.stopping), "the request was queued"

        return await self._in_turn(queue)

    async def _chain_of(self, prompt: bytes, scope: Scope, matches: dict[str, Match]) -> Chain | None:
        """Digests of a prompt, a few at a time, so that a long prompt delays no other task, with what is cached of a
        long one. Of several long ones one goes on at a time: together they would delay each turn of the loop by as many
        parts."""
        model, reuse = self._registry.model, self._prefix_reuse
        if model is None or not reuse.is_on or len(prompt) < 4 * PAGE_TOKENS:
            return None
        root = reuse.root(model, scope)
        digests = reuse.digests(root, prompt[:DIGESTED_AT_ONCE])
        if len(prompt) < DIGESTED_AT_ONCE + 4 * PAGE_TOKENS:
            return Chain(root, digests, scope)
        found = [*digests]
        for start in range(DIGESTED_AT_ONCE, len(prompt), DIGESTED_AT_ONCE):
            async with self._digesting:  # waits for a turn of the loop at least
                found += reuse.digests(found[-1], prompt[start : start + DIGESTED_AT_ONCE])
                reuse.look_ahead(found, matches)
        return Chain(root, tuple(found), scope)

    async def _digest_recovered(self) -> None:
        """Prompts of requests that an earlier incarnation accepted: the keys of their digests went with it, and so did
        which pages are not to be trusted. What a request keeps that was on a worker when it died is never cached."""
        for live in [*self._requests.live.values()]:
            await trio.lowlevel.checkpoint()
            if live.strikes:
                continue
            scope = self._prefix_reuse.scope_of(live.facts)
            chain = await self._chain_of(live.prompt, scope, {}) if scope is not None else None
            if chain is not None:
                self.tell(partial(self._digested, live.facts, chain))

    def _digested(self, facts: RequestFacts, chain: Chain, _: SchedulerTurn) -> None:
        self._dispatch.digested(facts, chain)

    async def abort(self, request_ids: tuple[str, ...], owner: str, user: str | None = None) -> tuple[str, ...]:
        """Abort all or none; one line per request. Raises NotFound or WrongState naming id, state and remedy."""
        return await self._command(CommandAsk(RequestCommand.ABORT, request_ids, owner, user=user))

    async def retract(self, request_ids: tuple[str, ...], owner: str, *, keep: bool, hold: bool) -> tuple[str, ...]:
        """Take all or none off their workers; `keep` their host pages, `hold` them until an operator resumes them."""
        return await self._command(CommandAsk(RequestCommand.RETRACT, request_ids, owner, keep, hold))

    async def resume(self, request_ids: tuple[str, ...], owner: str) -> tuple[str, ...]:
        """Let held requests wait for memory again; all or none."""
        return await self._command(CommandAsk(RequestCommand.RESUME, request_ids, owner))

    async def resize(self, request_ids: tuple[str, ...], owner: str, *, hot_slots: int) -> tuple[str, ...]:
        """Force hot buffers to `hot_slots` (0 resident, -1 back to policy); all or none. CapacityError: not now."""
        return await self._command(CommandAsk(RequestCommand.RESIZE, request_ids, owner, hot_slots=hot_slots))

    async def _command(self, ask: CommandAsk) -> tuple[str, ...]:
        check_writes(self._journal)
        return await self._in_turn(lambda turn: self._carry_out(turn, ask))

    def _carry_out(self, turn: SchedulerTurn, ask: CommandAsk) -> tuple[tuple[str, ...], str]:
        effects, lines = carry_out(ask, self._requests, self._dispatch, self._registry.capacities)
        if ask.command is RequestCommand.RETRACT:
            self._counters.retractions["keep" if ask.keep else "drop", "operator"] += len(lines)
        turn.take(*effects)
        self._journal.append([self._requests.live[it].ordered for it in dict.fromkeys(ask.request_ids)])
        return lines, f"{ask.command.value} was begun"

    async def acknowledge(self, request_ids: tuple[str, ...], owner: str, user: str | None = None) -> tuple[str, ...]:
        """Forget ended requests whose outputs were received; all or none. Raises WrongState for a live one."""

        def forget(_: SchedulerTurn) -> tuple[tuple[str, ...], str]:
            self._submissions.forget(self._requests.forget(request_ids, user))
            return tuple(f"{it}: forgotten" for it in request_ids), "the outputs were forgotten"

        return await self._in_turn(forget)

    async def drain(
        self, workers: tuple[str, ...], owner: str, *, handover: bool, deadline_s: float
    ) -> tuple[str, ...]:
        """Stop admitting to workers (none named: all); returns at once. See messages.DrainWorkers.

        Raises NotFound, WrongState for a worker that is gone, BadInput for a deadline out of bounds.
        """
        return await self._in_turn(lambda turn: self._drain(turn, workers, owner, deadline_s, handover=handover))

    async def undrain(self, workers: tuple[str, ...], owner: str) -> tuple[str, ...]:
        """Admit to workers again (none named: all)."""
        return await self._in_turn(lambda turn: self._drain(turn, workers, owner, None))

    def _drain(
        self,
        turn: SchedulerTurn,
        names: tuple[str, ...],
        owner: str,
        deadline_s: float | None,
        *,
        handover: bool = False,
    ) -> tuple[tuple[str, ...], str]:
        """Drain workers for `deadline_s`, or (None) end their drains."""
        workers, drain, what = self._registry.find(names), None, "undrain"
        if deadline_s is not None:
            check_range("deadline_s", deadline_s, 0.0, DEADLINE_MAX_S)
            drain, what = WorkerDrain(turn.now + deadline_s, handover), "drain"
        for worker in workers:
            self._dispatch.drain(worker, drain)
            about = worker.name, worker.epoch
            record = WorkerDrained(*about, drain.deadline + self._wall_offset_s, handover) if drain else None
            self._journal.append([record or WorkerUndrained(worker.name)])
        log.info(what, extra=fields(workers=[it.name for it in workers], by=owner))
        promises = [(it.name, drain_promise(it.requests, deadline_s, handover=handover)) for it in workers]
        return tuple(f"{name}: {promise}" for name, promise in promises), f"the {what} was begun"

    async def audit(self, owner: str) -> AuditRows:
        """Compare what all workers hold with the ledgers: who was audited, and what two audits in a row found."""
        reply: Reply[AuditRows] = Reply()

        def begin(turn: SchedulerTurn) -> tuple[None, str]:
            self._auditor.begin(reply, turn.now)
            return None, ""

        await self._in_turn(begin)
        return await reply.wait()

    async def release_quarantine(self, workers: tuple[str, ...], owner: str, *, died: bool = False) -> tuple[str, ...]:
        """Take the operator's word that the lost epochs of these workers are gone, all or none; `died`: a supervisor's,
        which has seen the last ones end. See messages.ReleaseQuarantine. Raises NotFound for a worker without such an
        epoch."""
        check_writes(self._journal)

        def release(turn: SchedulerTurn) -> tuple[tuple[str, ...], str]:
            if died:
                self._refresh(self._placement_table.entries.values())
            effects, lines = release_quarantine(workers, self._ledgers, self._dispatch, died=died)
            turn.take(*effects)
            log.warning("quarantine released", extra=fields(workers=workers, by=owner, died=died))
            return lines, "the quarantine was released"

        return await self._in_turn(release)

    async def forget_workers(self, workers: tuple[str, ...]) -> tuple[str, ...]:
        """List these disconnected workers no longer, all or none. Raises NotFound, and WrongState for one that is
        connected or awaited, or whose lost process may still write host pages."""
        return await self._in_turn(lambda _: (self._registry.forget(workers), ""))

    async def tell_standbys(self, workers: tuple[str, ...], ready: tuple[str, ...]) -> tuple[str, ...]:
        """Note which of these workers have a standby that is ready, for listings and metrics."""

        def note(_: SchedulerTurn) -> tuple[tuple[str, ...], str]:
            self._registry.note_standbys(workers, ready)
            return (), ""

        return await self._in_turn(note)

    async def largest_prefixes(self, limit: int) -> tuple[list[messages.PrefixRow], int]:
        """The largest cached prefixes of all nodes, and how many there are. Other tasks run meanwhile: what they evict
        is left out."""
        found: list[tuple[int, str, Digest]] = []
        count = 0
        for node, index in list(self._prefix_reuse.by_node.items()):
            leaves = index.leaves()
            count += len(leaves)
            for start in range(0, len(leaves), LEAVES_AT_ONCE):
                part = [(index.depth(it), node, it) for it in leaves[start : start + LEAVES_AT_ONCE]]
                found = heapq.nlargest(limit, [*found, *part])
                await trio.lowlevel.checkpoint()
        rows = []
        for _, node, digest in found:
            rows += self._prefix_row(node, digest)
            await trio.lowlevel.checkpoint()
        return rows, count

    def _prefix_row(self, node: str, digest: Digest) -> list[messages.PrefixRow]:
        found = self._prefix_reuse.by_node[node].describe(digest)
        if found is None:
            return []
        is_idle = bool(self._ledgers[node].is_idle(np.array([found.last_page], dtype=np.int32))[0])
        about = found.scope.owner, bool(found.scope.salt), found.pages, found.own_pages, found.pages * PAGE_TOKENS
        return [messages.PrefixRow(node, digest.hex(), *about, in_use=not is_idle)]

    async def drop_prefixes(self, prefix_ids: tuple[str, ...], owners: tuple[str, ...], owner: str) -> tuple[str, ...]:
        """Forget cached prefixes, as messages.DropPrefixes says; one line for each node. Raises BadInput for what is no
        id of a prefix."""
        check_writes(self._journal)
        digests, reuse = tuple(_digest_of(it) for it in prefix_ids), self._prefix_reuse

        def drop(turn: SchedulerTurn) -> tuple[tuple[str, ...], str]:
            """The changes go to the end of the turn's: what is dropped may have been cached in this turn."""
            lines = []
            for node, pages in reuse.drop(digests, owners).items():
                if pages.size:
                    turn.steps.append(LedgerStep(node, Evict(pages.tobytes())))
                lines.append(f"{node}: {pages.size} pages dropped")
            log.info("prefixes dropped", extra=fields(lines=lines, by=owner))
            return tuple(lines), "the prefixes were dropped"

        return await self._in_turn(drop)

    async def stop(self, deadline_s: float, owner: str) -> tuple[str, ...]:
        """Refuse new work from now on; set `stopped` when all has ended, after `deadline_s` by failing the rest."""

        def begin(turn: SchedulerTurn) -> tuple[tuple[str, ...], str]:
            check_range("deadline_s", deadline_s, 0.0, DEADLINE_MAX_S)
            deadline, lives = turn.now + deadline_s, self._requests.live.values()
            self._stop = StopDeadline(deadline if self._stop is None else min(self._stop.deadline, deadline))
            log.info("stop", extra=fields(by=owner, deadline_s=deadline_s, live=len(lives)))
            return (stop_promise(lives, self._stop.deadline - turn.now, is_kept=self._journal.is_kept),), ""

        return await self._in_turn(begin)

    def lookup(self, request_id: str, user: str | None = None) -> int:
        """The request index of a live or recently ended request. Raises NotFound."""
        return self._requests.find(request_id, user).request_index

    def model(self) -> messages.ModelInfo | None:
        """The model served, None until the first worker has registered."""
        return self._registry.model

    def request_rows(self, limit: int, user: str | None = None) -> list[messages.RequestRow]:
        """Live requests in rank order, then ended ones, latest first; at most `limit`."""
        return self._requests.rows(limit, self._clock(), user)

    def room_use(self) -> dict[str, RoomUse]:
        """Measure the rooms that the Scheduler, and the parts it owns, keep for requests."""
        pools, reuse = self.pool_rows(), self._prefix_reuse
        places = self._token_log.arena_tokens
        return self._requests.room_use(len(self._placement_table.waiting)) | {
            "output_places": RoomUse(places - self._token_log.free_places(), places),
            "prefix_pages": RoomUse(cached := sum(it.cached for it in pools), cached + sum(it.free for it in pools)),
            "prefix_roots": RoomUse(len(reuse.roots), ROOTS_MAX),
        }

    def describe(
        self, request_id: str, user: str | None = None
    ) -> tuple[messages.RequestRow, tuple[messages.HistoryLine, ...]]:
        """One request and its history. Raises NotFound."""
        return self._requests.describe(request_id, self._clock(), user)

    def worker_rows(self) -> list[messages.WorkerRow]:
        """Workers that are connected, then those that are gone, as they were last."""
        return self._registry.worker_rows(self._clock())

    def pool_rows(self) -> list[messages.PoolRow]:
        """Return the pool of each node, in pages, with what its cache was asked for and gave."""
        rows = []
        for row in self._registry.pool_rows():
            stats = self._prefix_reuse.stats.get(row.node, PrefixStats())
            rows.append(
                msgspec.structs.replace(
                    row,
                    prefix_asked_tokens=stats.asked_tokens,
                    prefix_reused_tokens=stats.reused_tokens,
                    prefix_pages_evicted=stats.evicted_pages,
                )
            )
        return rows

    def count_by_state(self) -> Counter[str]:
        """Live requests by state."""
        return self._requests.count_by_state()

    @property
    def journal_failing(self) -> str:
        """Why no new work is taken; empty: it is, as far as the journal is concerned."""
        return self._journal.failing

    def count_held(self) -> int:
        return self._requests.count_held()

    # ---------------------------------------------------------------- for the worker links

    async def worker_up(
        self, hello: messages.WorkerHello, port: WorkerPort, process: tuple[int, int, str] = NOT_ATTESTED
    ) -> None:
        """A new epoch of a worker joins; commands may reach `port` before this returns. `process`, where it is
        attested, is journalled: its id, start and boot (basics.processes).

        Call it once per epoch, and `worker_down` for the epoch before it first. Raises ConfigError when its model or
        pool differs from its group's, WrongState when the epoch was declared down before, Unavailable while another
        epoch of that name is up, BadInput or ProtocolError for a name or capacity that cannot be.
        """

        def join(turn: SchedulerTurn) -> tuple[None, str]:
            is_changing = any(step.node == hello.node for step in turn.steps)
            worker = self._registry.join(hello, port, is_changing=is_changing)
            self._prefix_reuse.serve(worker.model)
            turn.take(self._dispatch.worker_up(worker, process))
            return None, ""

        await self._in_turn(join)

    async def worker_back(self, hello: messages.WorkerHello) -> None:
        """An epoch that was recovered from the journal is there, with its inventory.

        Commands may reach its port before this returns. Raises WrongState when the inventory cannot be, or the epoch
        is over.
        """

        def back(turn: SchedulerTurn) -> tuple[None, str]:
            worker, ours = self._placement_table.workers.get(hello.worker), (hello.epoch, hello.capacity, hello.member)
            if worker is None or (worker.epoch, worker.capacity, worker.member) != ours:
                raise WrongState("this epoch is over", field="epoch", value=hello.epoch, remedy="begin a new one")
            self._registry.check_member(hello)
            turn.take(adopt(self._dispatch, worker, unpack_rows(hello.inventory), self._ledgers[worker.node]))
            worker.receiver, worker.pid = hello.receiver, hello.pid
            return None, ""

        await self._in_turn(back)

    def worker_down(
        self, worker: str, epoch: int, proved_exit: bool, died: bool = False, is_leaving: bool = False
    ) -> None:
        """The epoch is over. Without `proved_exit` its pages stay quarantined until `worker_exited`. `died`: with its
        process, for which what was on it may be to blame. `is_leaving`: it had said that it would end."""

        def end(turn: SchedulerTurn) -> None:
            entry = self._placement_table.workers.get(worker)
            if entry is not None and entry.epoch == epoch:
                self._registry.leave(entry, turn.now, exit_proved=proved_exit)
                for rank in self._placement_table.beside(entry):
                    self._refresh(self._placement_table.on(rank.name))
                how = self._dispatch.worker_down(entry, proved_exit=proved_exit, died=died, is_leaving=is_leaving)
                turn.take(how)

        self.tell(end)

    def worker_exited(self, worker: str, epoch: int, died: bool = True) -> None:
        """An epoch that was declared down is proved gone: its process `died`, or has emptied itself."""

        def end(turn: SchedulerTurn) -> None:
            self._registry.note_exit(worker, epoch)
            self._refresh(self._dispatch.beside_lost((worker, epoch)))
            turn.take(self._dispatch.worker_exited(worker, epoch, died=died))

        self.tell(end)

    def on_event(self, worker: str, epoch: int, event: messages.Event) -> None:
        """Route a worker's event to its Request. A placement that has ended, or is another worker's: dropped.

        Raises ProtocolError when one request is flooded: the worker is broken.
        """
        if isinstance(event, messages.Counters):
            self._requests.count_swaps(worker, epoch, event)
            return
        if isinstance(event, messages.Inventory):
            if self._auditor.expects(worker, epoch, event.number):
                self.tell(lambda turn: turn.take(self._auditor.hear((worker, epoch), event, turn.now)))
            return
        live = self._requests.admitted(worker, epoch, event.placement)
        if live is None:
            if isinstance(event, messages.Released) and event.placement in self._placement_table.transfers:
                closed = worker, epoch, event.placement, event.durable_tokens
                self.tell(lambda turn: turn.take(self._dispatch.transfer_closed(*closed)))
            return
        request = self._requests.by_index[live.request_index]
        if request.room() < FLOOD_MARGIN:
            raise ProtocolError(f"floods request {live.facts.request_id}", field="worker", value=worker)
        request.tell(event)

    def starving(self, request_indices: Int32Array) -> None:
        """Request indices whose granted headroom is short; repeating one costs next to nothing."""

        def starve(_: SchedulerTurn) -> None:
            for entry in self._live(request_indices):
                self._dispatch.starve(entry)

        self.tell(starve)

    def prompt_rows(self, request_indices: Int32Array) -> None:
        """More full pages of the prompts of these are durable, while they are being computed."""

        def cache(turn: SchedulerTurn) -> None:
            for entry in self._live(request_indices):
                turn.take(self._dispatch.prompt_rows(entry, self._token_log.durable(entry.request_index)))

        if self._prefix_reuse.is_on:
            self.tell(cache)


def _digest_of(prefix_id: str) -> Digest:
    try:
        digest = bytes.fromhex(prefix_id)
    except ValueError:
        digest = b""
    if len(digest) != DIGEST_BYTES:
        remedy = "take an ID from `hisparse prefix`"
        raise BadInput("no id of a cached prefix", field="prefix_ids", value=prefix_id[:NAME_CHARS_MAX], remedy=remedy)
    return digest
