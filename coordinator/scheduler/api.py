"""The Scheduler's front: what the gateway and the worker links call. No decisions here.

Asks wait for the Scheduler's turn, and for what they did to be in the journal; while that cannot be, they are refused
beforehand. Queries read the pure states of actors between turns, which is safe in one thread
and saves a turn; they change nothing (I7). Worker events go straight to the Request concerned.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import msgspec
import numpy as np
import trio

from basics.rooms import RoomUse
from coordinator.actor import Actor
from coordinator.journal.journal import Journal, check_writes
from coordinator.journal.records import NOT_ATTESTED
from coordinator.memory.ledger import Ledger
from coordinator.memory.prefix_index import DIGEST_BYTES, Chain, Digest, Match, Scope
from coordinator.policy.pending import unserved
from coordinator.policy.prefix_reuse import ROOTS_MAX, PrefixReuse, PrefixStats
from coordinator.scheduler.worker_registry import WorkerRegistry
from coordinator.state import events
from coordinator.state.events import Handle, RequestCommand, WorkerPort
from coordinator.state.placement_table import PlacementTable
from coordinator.tokens.token_log import TokenLog
from coordinator.turn.auditor import Auditor
from coordinator.turn.request_table import RequestTable
from protocol import messages
from protocol.arrays import Int32Array
from protocol.errors import BadInput, ProtocolError, Unavailable
from protocol.messages import NAME_CHARS_MAX, NO_HOT_BUFFER
from protocol.units import PAGE_TOKENS

#: A worker may not leave less room than this in a Request's mailbox.
FLOOD_MARGIN: Final = 64
#: Bytes of a prompt that are digested before other tasks get a turn, in about 0.4 ms: 384 pages.
DIGESTED_AT_ONCE: Final = 384 * 4 * PAGE_TOKENS
#: Cached prefixes compared before other tasks get a turn: about half a millisecond.
LEAVES_AT_ONCE: Final = 1_024

Message: TypeAlias = (
    events.Ask
    | events.WorkerDown
    | events.WorkerExited
    | events.InventoryTaken
    | events.Starving
    | events.PromptRows
    | events.Digested
    | events.TransferClosed
    | events.Recovered
    | events.Tick
)


class SchedulerApi(Actor[Message]):
    """Base of the Scheduler, which fills in who there is."""

    _requests: RequestTable
    _placement_table: PlacementTable
    _registry: WorkerRegistry
    _auditor: Auditor
    _clock: Callable[[], float]
    _journal: Journal
    _prefix_reuse: PrefixReuse
    _token_log: TokenLog
    _digesting: trio.Lock
    _ledgers: Mapping[str, Ledger]

    @property
    @abstractmethod
    def stopping(self) -> bool:
        """Return whether the coordinator takes no more requests because it is about to end."""

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
        return await self.ask(lambda reply: events.SubmitAsk(submit, owner, reply, user, chain, matches))

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
                self.tell(events.Digested(live.facts, chain))

    async def abort(self, request_ids: tuple[str, ...], owner: str, user: str | None = None) -> tuple[str, ...]:
        """Abort all or none; one line per request. Raises NotFound or WrongState naming id, state and remedy."""
        return await self._command(RequestCommand.ABORT, request_ids, owner, user=user)

    async def retract(self, request_ids: tuple[str, ...], owner: str, *, keep: bool, hold: bool) -> tuple[str, ...]:
        """Take all or none off their workers; `keep` their host pages, `hold` them until an operator resumes them."""
        return await self._command(RequestCommand.RETRACT, request_ids, owner, keep=keep, hold=hold)

    async def resume(self, request_ids: tuple[str, ...], owner: str) -> tuple[str, ...]:
        """Let held requests wait for memory again; all or none."""
        return await self._command(RequestCommand.RESUME, request_ids, owner)

    async def resize(self, request_ids: tuple[str, ...], owner: str, *, hot_slots: int) -> tuple[str, ...]:
        """Force hot buffers to `hot_slots` (0 resident, -1 back to policy); all or none. CapacityError: not now."""
        return await self._command(RequestCommand.RESIZE, request_ids, owner, hot_slots=hot_slots)

    async def acknowledge(self, request_ids: tuple[str, ...], owner: str, user: str | None = None) -> tuple[str, ...]:
        """Forget ended requests whose outputs were received; all or none. Raises WrongState for a live one."""
        return await self.ask(lambda reply: events.ForgetAsk(request_ids, reply, user))

    async def drain(
        self, workers: tuple[str, ...], owner: str, *, handover: bool, deadline_s: float
    ) -> tuple[str, ...]:
        """Stop admitting to workers (none named: all); returns at once. See messages.DrainWorkers.

        Raises NotFound, WrongState for a worker that is gone, BadInput for a deadline out of bounds.
        """
        return await self.ask(lambda reply: events.DrainAsk(workers, owner, reply, handover, deadline_s))

    async def undrain(self, workers: tuple[str, ...], owner: str) -> tuple[str, ...]:
        """Admit to workers again (none named: all)."""
        return await self.ask(lambda reply: events.DrainAsk(workers, owner, reply, undrain=True))

    async def audit(self, owner: str) -> tuple[tuple[messages.AuditedRow, ...], tuple[messages.DifferenceRow, ...]]:
        """Compare what all workers hold with the ledgers: who was audited, and what two audits in a row found."""
        return await self.ask(lambda reply: events.AuditAsk(owner, reply))

    async def release_quarantine(self, workers: tuple[str, ...], owner: str, *, died: bool = False) -> tuple[str, ...]:
        """Take the operator's word that the lost epochs of these workers are gone, all or none. See
        messages.ReleaseQuarantine. Raises NotFound for a worker without such an epoch."""
        check_writes(self._journal)
        return await self.ask(lambda reply: events.ReleaseAsk(workers, owner, died, reply))

    async def forget_workers(self, workers: tuple[str, ...]) -> tuple[str, ...]:
        """List these disconnected workers no longer, all or none. Raises NotFound, and WrongState for one that is
        connected or awaited, or whose lost process may still write host pages."""
        return await self.ask(lambda reply: events.ForgetWorkersAsk(workers, reply))

    async def tell_standbys(self, workers: tuple[str, ...], ready: tuple[str, ...]) -> tuple[str, ...]:
        """Note which of these workers have a standby that is ready, for listings and metrics."""
        return await self.ask(lambda reply: events.StandbysAsk(workers, ready, reply))

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
        digests = tuple(_digest_of(it) for it in prefix_ids)
        return await self.ask(lambda reply: events.DropPrefixesAsk(digests, owners, owner, reply))

    async def stop(self, deadline_s: float, owner: str) -> tuple[str, ...]:
        """Refuse new work from now on; set `stopped` when all has ended, after `deadline_s` by failing the rest."""
        return await self.ask(lambda reply: events.StopAsk(deadline_s, owner, reply))

    def lookup(self, request_id: str, user: str | None = None) -> int:
        """The request index of a live or recently ended request. Raises NotFound."""
        return self._requests.request_index(request_id, user)

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
        await self.ask(lambda reply: events.WorkerUp(hello, port, process, reply))

    async def worker_back(self, hello: messages.WorkerHello) -> None:
        """An epoch that was recovered from the journal is there, with its inventory.

        Commands may reach its port before this returns. Raises WrongState when the inventory cannot be, or the epoch
        is over.
        """
        await self.ask(lambda reply: events.WorkerBack(hello, reply))

    def worker_down(
        self, worker: str, epoch: int, proved_exit: bool, died: bool = False, is_leaving: bool = False
    ) -> None:
        """The epoch is over. Without `proved_exit` its pages stay quarantined until `worker_exited`. `died`: with its
        process, for which what was on it may be to blame. `is_leaving`: it had said that it would end."""
        self.tell(events.WorkerDown(worker, epoch, proved_exit, died, is_leaving))

    def worker_exited(self, worker: str, epoch: int, died: bool = True) -> None:
        """An epoch that was declared down is proved gone: its process `died`, or has emptied itself."""
        self.tell(events.WorkerExited(worker, epoch, died))

    def on_event(self, worker: str, epoch: int, event: messages.Event) -> None:
        """Route a worker's event to its Request. A placement that has departed, or is another worker's: dropped.

        Raises ProtocolError when one request is flooded: the worker is broken.
        """
        if isinstance(event, messages.Counters):
            self._requests.count_swaps(worker, epoch, event)
            return
        if isinstance(event, messages.Inventory):
            if self._auditor.expects(worker, epoch, event.number):
                self.tell(events.InventoryTaken(worker, epoch, event))
            return
        live = self._requests.admitted(worker, epoch, event.placement)
        if live is None:
            if isinstance(event, messages.Released) and event.placement in self._placement_table.transfers:
                self.tell(events.TransferClosed(worker, epoch, event.placement, event.durable_tokens))
            return
        request = self._requests.by_index[live.request_index]
        if request.room() < FLOOD_MARGIN:
            raise ProtocolError(f"floods request {live.facts.request_id}", field="worker", value=worker)
        request.tell(event)

    def starving(self, request_indices: Int32Array) -> None:
        """Request indices whose granted headroom is short; repeating one costs next to nothing."""
        self.tell(events.Starving(request_indices))

    def prompt_rows(self, request_indices: Int32Array) -> None:
        """More full pages of the prompts of these are durable, while they are being computed."""
        if self._prefix_reuse.is_on:
            self.tell(events.PromptRows(request_indices))

    async def _command(
        self,
        command: RequestCommand,
        request_ids: tuple[str, ...],
        owner: str,
        *,
        keep: bool = True,
        hold: bool = True,
        hot_slots: int = NO_HOT_BUFFER,
        user: str | None = None,
    ) -> tuple[str, ...]:
        check_writes(self._journal)
        return await self.ask(
            lambda reply: events.CommandAsk(
                command, request_ids, owner, reply, keep=keep, hold=hold, hot_slots=hot_slots, user=user
            )
        )


def _digest_of(prefix_id: str) -> Digest:
    try:
        digest = bytes.fromhex(prefix_id)
    except ValueError:
        digest = b""
    if len(digest) != DIGEST_BYTES:
        remedy = "take an ID from `hisparse prefix`"
        raise BadInput("no id of a cached prefix", field="prefix_ids", value=prefix_id[:NAME_CHARS_MAX], remedy=remedy)
    return digest
