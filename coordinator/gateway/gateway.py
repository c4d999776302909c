"""The Gateway: reads the messages of clients and admins, and answers them.

    client socket ─┐                       ┌─► ask the Scheduler (submit, abort, retract, ...): a task each, bounded
                   ├─ decode ─ connection ─┤
    admin socket ──┘   by role             └─► answer at once (attach, lists, descriptions)

Each socket has a union of messages, so a client cannot send operators' commands. A message that cannot be read or
carried out is counted and answered by Failure, and affects no other connection. coordinator.gateway.deliveries sends
the tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

import trio
from msgspec.structs import replace

from basics.request_checks import check_priority
from basics.rooms import RoomUse
from basics.shares import check_share
from coordinator.gateway.connections import ADMIN, CLIENT, ClientConnection
from coordinator.gateway.deliveries import Deliveries
from coordinator.listener.dropped import Dropped, peer_address
from coordinator.listener.flood_control import FloodControl
from coordinator.listener.rate_limiter import SENDERS_MAX, RateLimiter
from coordinator.listener.router import Received, RouterSocket
from coordinator.scheduler.api import SchedulerApi
from coordinator.tokens.token_log import TokenLog
from metrics.state import CoordinatorCounters
from protocol import messages
from protocol.errors import BadInput, HiSparseError, ProtocolError
from protocol.messages import KEY_PRIORITY_DEFAULT, NAME_CHARS_MAX, AdminMessage, GatewayMessage
from protocol.skew import check_size, check_version, read_frame
from protocol.transport.keys import ALLOWED_FILE, AllowedKey

#: Commands of all connections that wait for the Scheduler; further ones are refused.
ASKS_MAX: Final = 4_096
#: A first message above it is no hello. It is not decoded.
HELLO_BYTES_MAX: Final = 64 * 1024
#: When the coordinator stops: time to answer the commands in progress.
LAST_ANSWERS_S: Final = 1.0
#: Rows in one reply.
ROWS_MAX: Final = 20_000
PREFIX_ROWS_MAX: Final = 1_000

Answer: TypeAlias = Callable[[ClientConnection, Any], GatewayMessage]
CommandHandler: TypeAlias = Callable[[ClientConnection, Any], Awaitable[tuple[str, ...]]]


class TokenizerSource(Protocol):
    """Interface of coordinator.workers.tokenizer_store.TokenizerStore, which this room may not import."""

    def tokenizer(self, model: messages.ModelInfo | None) -> tuple[str, str, bytes]:
        """Kind, hash and data of the model's tokenizer. Raises Unavailable until a worker has sent it."""


class Gateway:
    """One per coordinator. `run` ends after `close`, with a last flush of deliveries."""

    name = "gateway"

    def __init__(
        self,
        scheduler: SchedulerApi,
        deliveries: Deliveries,
        token_log: TokenLog,
        tokenizers: TokenizerSource,
        counters: CoordinatorCounters,
        *,
        client_socket: RouterSocket,
        admin_socket: RouterSocket,
        incarnation: int,
        version: str,
        rate: tuple[float, float],
        reload_keys: Callable[[], str],
        key_of: Callable[[str], AllowedKey | None] = lambda _: None,
    ) -> None:
        """`rate`: messages of one peer per second, and in a burst. `reload_keys` reads the list of allowed keys again,
        says what it found, and raises ConfigError when the old list holds. `key_of` gives the key whose rights a user
        has."""
        self._key_of = key_of
        self._scheduler = scheduler
        self._deliveries = deliveries
        self._log = token_log
        self._counters = counters
        self._sockets = {CLIENT: client_socket, ADMIN: admin_socket}
        self._decode: dict[str, Callable[[bytes], AdminMessage]] = {
            CLIENT: messages.decode_client,
            ADMIN: messages.decode_admin,
        }
        self._flood_controls = {
            role: FloodControl(
                socket, RateLimiter(*rate), Dropped(role, counters.dropped_messages), partial(self._answer_unread, role)
            )
            for role, socket in self._sockets.items()
        }
        self._answers = _answers(scheduler, tokenizers) | {
            messages.Attach: self._attach,
            messages.Detach: self._detach,
            messages.ReloadKeys: lambda _, m: messages.Done(m.tag, (reload_keys(),)),
        }
        self._command_handlers = _command_handlers(scheduler)
        self._incarnation = incarnation
        self._version = version
        self._asks: Counter[str] = Counter()  # commands in progress, by user
        self._closing = trio.Event()

    def close(self) -> None:
        self._closing.set()

    def history(self) -> tuple[str, ...]:
        counts = self._deliveries.connections.count_by_role()
        return (f"connections: {dict(counts)}", f"asks in flight: {self._asks.total()}")

    def room_use(self) -> dict[str, RoomUse]:
        senders = max(it.senders for it in self._flood_controls.values())
        return {
            "commands": RoomUse(self._asks.total(), ASKS_MAX),
            "rate_buckets": RoomUse(senders, SENDERS_MAX),
        }

    async def run(self) -> None:
        """Serve until `close`; commands in progress may still be answered for LAST_ANSWERS_S."""
        async with trio.open_nursery() as asks:
            async with trio.open_nursery() as nursery:
                for role in self._sockets:
                    nursery.start_soon(self._read, role, asks)
                nursery.start_soon(self._deliveries.run)
                await self._closing.wait()
                nursery.cancel_scope.cancel()
            asks.cancel_scope.deadline = trio.current_time() + LAST_ANSWERS_S
        await self._deliveries.last_flush()

    # ------------------------------------------------------------ receiving

    async def _read(self, role: str, nursery: trio.Nursery) -> None:
        connections = self._deliveries.connections
        while True:
            batch = await self._sockets[role].recv_batch()
            batch.sort(key=lambda it: connections.find(role, it.peer) is None)  # in order for each connection
            await self._flood_controls[role].read(batch, partial(self._receive, role, nursery))

    def _receive(self, role: str, nursery: trio.Nursery, received: Received) -> None:
        """Handle one frame. Raises HiSparseError when it cannot be read or its connection is unknown or refused."""
        bytes_max = self._sockets[role].message_bytes_max
        connection = self._deliveries.connections.find(role, received.peer)
        check_size(received.frame_bytes, bytes_max, role)
        if connection is None and received.frame_bytes > HELLO_BYTES_MAX:
            raise _no_hello()  # before it is decoded
        message = read_frame(self._decode[role], received.frame, bytes_max, role, check_version)
        if isinstance(message, messages.Hello):
            connection = connection or self._greet(role, received, message)
            self._deliveries.send(connection, self._welcome(connection.protocol))
        elif connection is None:
            raise _no_hello()
        else:
            self._serve(connection, message, message.tag, nursery)

    def _greet(self, role: str, received: Received, hello: messages.Hello) -> ClientConnection:
        check_version(hello.protocol)
        if hello.role != role:
            raise ProtocolError(
                f"this is the {role} endpoint",
                field="role",
                value=hello.role[:NAME_CHARS_MAX],
                remedy="use the endpoint of that role",
            )
        if len(hello.name) > NAME_CHARS_MAX:
            text = f"longer than {NAME_CHARS_MAX} characters"
            raise BadInput(text, field="name", value=f"{len(hello.name)} characters", remedy="choose a shorter one")
        connections = self._deliveries.connections
        if len(connections) == connections.limit:
            self._deliveries.probe(idle_since=math.inf)
        socket = self._sockets[role]
        socket.connection_events.introduce(received.descriptor, received.user)
        return connections.open(
            socket,
            received.peer,
            role,
            hello.name,
            trio.current_time(),
            received.user,
            address=peer_address(received.descriptor),
            protocol=hello.protocol,
        )

    def _welcome(self, protocol: int) -> messages.Welcome:
        about = self._scheduler.model(), self._scheduler.refusal(), self._scheduler.unserved()
        return messages.Welcome(protocol, self._incarnation, self._version, *about)

    def _answer_unread(self, role: str, received: Received, error: HiSparseError) -> None:
        """Answer a message that was not read, could not be, or has no connection.

        The answer is about the connection, tag -1: a client that was dropped connects again.
        """
        self._sockets[role].send(received.peer, messages.encode(_failure(-1, error)))

    # ------------------------------------------------------------ handling

    def _serve(self, connection: ClientConnection, message: AdminMessage, tag: int, nursery: trio.Nursery) -> None:
        answer = self._answers.get(type(message))
        try:
            if answer is not None:
                reply = answer(connection, message)
            else:
                self._start(connection, message, tag, nursery)
                return
        except HiSparseError as error:
            reply = self._failed(tag, error)
        self._deliveries.send(connection, reply)

    def _start(self, connection: ClientConnection, message: AdminMessage, tag: int, nursery: trio.Nursery) -> None:
        user = connection.user
        held, used = self._asks[user], self._asks.total()
        check_share("commands in progress", 1, held=held, used=used, limit=ASKS_MAX, field="commands")
        if _subscribes(message):
            self._deliveries.reserve(connection)
        self._asks[user] += 1
        nursery.start_soon(self._carry_out, connection, message, tag)

    def _attach(self, connection: ClientConnection, attach: messages.Attach) -> messages.Accepted:
        request_index = self._scheduler.lookup(attach.request_id, connection.visible_user)
        length = int(self._log.committed[request_index])
        if not 0 <= attach.offset <= length:
            raise BadInput(
                f"{attach.request_id} has {length} tokens so far",
                field="offset",
                value=attach.offset,
                remedy=f"choose 0 to {length}",
            )
        self._deliveries.check_room(connection)
        return messages.Accepted(
            attach.tag, attach.request_id, self._deliveries.subscribe(connection, request_index, attach.offset)
        )

    def _detach(self, connection: ClientConnection, detach: messages.Detach) -> messages.Done:
        self._deliveries.unsubscribe(connection, self._scheduler.lookup(detach.request_id, connection.visible_user))
        return messages.Done(detach.tag)

    async def _carry_out(self, connection: ClientConnection, message: AdminMessage, tag: int) -> None:
        try:
            if isinstance(message, messages.Submit):
                reply: GatewayMessage = await self._submit(connection, message)
            elif isinstance(message, messages.AuditWorkers):
                reply = messages.AuditRows(tag, *await self._scheduler.audit(connection.owner))
            elif isinstance(message, messages.ListPrefixes):
                limit = min(max(message.limit, 1), PREFIX_ROWS_MAX)
                rows, count = await self._scheduler.largest_prefixes(limit)
                reply = messages.PrefixRows(tag, tuple(rows), count)
            else:
                reply = messages.Done(tag, await self._command_handlers[type(message)](connection, message))
        except HiSparseError as error:
            reply = self._failed(tag, error)
        finally:
            if _subscribes(message):
                self._deliveries.release(connection)
            self._asks[connection.user] -= 1
            if not self._asks[connection.user]:
                del self._asks[connection.user]
        self._deliveries.send(connection, reply)

    def _within_rights(self, connection: ClientConnection, submit: messages.Submit) -> messages.Submit:
        """`submit` as its connection may ask for it. Raises BadInput. Admins, and connections without keys, may ask for
        anything."""
        if connection.role == ADMIN or not connection.user:
            return submit
        key = self._key_of(connection.user)
        check_priority(submit.priority, key.priority_max if key else KEY_PRIORITY_DEFAULT, ALLOWED_FILE)
        return submit if key is not None and key.is_front else replace(submit, tenant="")

    async def _submit(self, connection: ClientConnection, submit: messages.Submit) -> messages.Accepted:
        tenant = submit.tenant  # keeps prefixes apart, whoever names it: it only narrows what its user may reuse
        submit = self._within_rights(connection, submit)
        handle = await self._scheduler.submit(submit, connection.owner, connection.user, prefix_tenant=tenant)
        self._counters.submitted += 1
        self._counters.prompt_tokens += len(submit.prompt) // 4
        subscription = -1
        if submit.subscribe and not connection.is_gone:
            subscription = self._deliveries.subscribe(connection, handle.request_index, 0)
        return messages.Accepted(submit.tag, handle.request_id, subscription)

    def _failed(self, tag: int, error: HiSparseError) -> messages.Failure:
        self._counters.refused[error.code] += 1
        return _failure(tag, error)


def _subscribes(message: AdminMessage) -> bool:
    return isinstance(message, messages.Submit) and message.subscribe


def _answers(scheduler: SchedulerApi, tokenizers: TokenizerSource) -> dict[type, Answer]:
    """Handlers of messages that are answered at once, from state that this task may read."""

    def requests(peer: ClientConnection, ask: messages.ListRequests) -> messages.RequestRows:
        limit = min(max(ask.limit, 1), ROWS_MAX)
        rows = scheduler.request_rows(limit + 1, peer.visible_user)
        return messages.RequestRows(ask.tag, tuple(rows[:limit]), truncated=len(rows) > limit)

    return {
        messages.ListRequests: requests,
        messages.DescribeRequest: lambda peer, m: messages.RequestDetail(
            m.tag, *scheduler.describe(m.request_id, peer.visible_user)
        ),
        messages.ListWorkers: lambda _, m: messages.WorkerRows(m.tag, tuple(scheduler.worker_rows())),
        messages.ListPools: lambda _, m: messages.PoolRows(m.tag, tuple(scheduler.pool_rows())),
        messages.FetchTokenizer: lambda _, m: messages.TokenizerData(m.tag, *tokenizers.tokenizer(scheduler.model())),
    }


def _command_handlers(scheduler: SchedulerApi) -> dict[type, CommandHandler]:
    """Handlers of commands that the Scheduler carries out."""
    return {
        messages.AbortRequests: lambda peer, m: scheduler.abort(m.request_ids, peer.owner, peer.visible_user),
        messages.AcknowledgeOutputs: lambda peer, m: scheduler.acknowledge(
            m.request_ids, peer.owner, peer.visible_user
        ),
        messages.RetractRequests: lambda peer, m: scheduler.retract(
            m.request_ids, peer.owner, keep=m.keep, hold=m.hold
        ),
        messages.ResumeRequests: lambda peer, m: scheduler.resume(m.request_ids, peer.owner),
        messages.ResizeRequests: lambda peer, m: scheduler.resize(m.request_ids, peer.owner, hot_slots=m.hot_slots),
        messages.DrainWorkers: lambda peer, m: scheduler.drain(
            m.workers, peer.owner, handover=m.handover, deadline_s=m.deadline_s
        ),
        messages.UndrainWorkers: lambda peer, m: scheduler.undrain(m.workers, peer.owner),
        messages.ReleaseQuarantine: lambda peer, m: scheduler.release_quarantine(m.workers, peer.owner, died=m.died),
        messages.ForgetWorkers: lambda _, m: scheduler.forget_workers(m.workers),
        messages.TellStandbys: lambda _, m: scheduler.tell_standbys(m.workers, m.ready),
        messages.DropPrefixes: lambda peer, m: scheduler.drop_prefixes(m.prefix_ids, m.owners, peer.owner),
        messages.StopCoordinator: lambda peer, m: scheduler.stop(m.deadline_s, peer.owner),
    }


def _no_hello() -> ProtocolError:
    return ProtocolError("no hello on this connection", field="message", remedy="send Hello first")


def _failure(tag: int, error: HiSparseError) -> messages.Failure:
    return messages.Failure(tag, error.code, error.message, error.field, error.value, error.remedy)
