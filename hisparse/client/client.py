"""The Python client: every command of the service, and token streams that survive a lost connection.

Inside asyncio.run or trio.run:

    async with open_client(endpoint) as client:
        stream = await client.submit(prompt_ids, Sampling(max_tokens=100))
        async for tokens in stream:          # int32 arrays, each position once and in order (I5)
            ...
        print(stream.ended.outcome)

or, from code without either, one action per connection:

    rows = run_client(endpoint, lambda client: client.requests())

After a loss of the connection the client reconnects, and streams continue: see hisparse.client.connection. Admin
commands need a connection to the admin endpoint with role "admin".
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import trio

from hisparse.client.asyncio_connection import AsyncioConnection, connected_in_thread, in_asyncio
from hisparse.client.connection import Connection, connected
from hisparse.client.replies import M, Reply, expect, ids
from hisparse.client.token_stream import StreamNews, TokenStream, TrioNews
from protocol import messages
from protocol.arrays import pack_tokens
from protocol.config import load
from protocol.errors import Unavailable, WrongState
from protocol.messages import ModelInfo, Sampling
from protocol.trace_context import read_context
from protocol.transport.keys import Insecure, PeerKey, access

#: Default time limit of reconnecting.
RECONNECT_LIMIT_S: Final = 30.0

T = TypeVar("T")


class Client:
    """Made by `open_client`. Any number of tasks of one trio run, or of one asyncio loop, may call it at once.

    Every call may raise, besides the errors it names: ConnectionLost when the connection is lost before the reply,
    Unavailable once reconnecting has failed for `reconnect_limit_s`, BadInput for a value that cannot be sent. When a
    call is cancelled, its command may still be carried out; the client remains usable.
    """

    def __init__(self, connection: Connection | AsyncioConnection) -> None:
        self._connection = connection

    @property
    def endpoint(self) -> str:
        return self._connection.endpoint

    @property
    def reconnects(self) -> int:
        return self._connection.reconnects

    async def lost(self) -> None:
        """Wait until reconnecting has failed for `reconnect_limit_s`: this client cannot be used any more."""
        await self._connection.lost()

    # ------------------------------------------------------------ requests

    async def submit(
        self,
        prompt: Sequence[int] | npt.NDArray[np.integer],
        sampling: Sampling,
        *,
        request_id: str = "",
        priority: int = 0,
        prefill_mode: str = messages.AUTO,
        tenant: str = "",
        cache_salt: str = "",
        traceparent: str = "",
        tracestate: str = "",
        draft_tokens: int = messages.DRAFT_TOKENS_MAX,
    ) -> TokenStream:
        """Submit `prompt` and subscribe; returns once the request is in the journal.

        `prompt`: token ids of the served model, a sequence or an integer array [n]. With a `request_id` the submission
        is repeated after a loss of the connection; without one, ConnectionLost is raised. `priority`: -1000 to 1000,
        higher goes first; a key has a limit. `prefill_mode`: one of messages.PREFILL_MODES. `tenant`: on whose behalf a
        front asks; requests of one priority take turns by tenant. Where the coordinator reuses prefixes, only requests
        of one `cache_salt`, 128 characters at most, reuse each other's; `TokenStream.ended` says how much was reused.
        `traceparent`, `tracestate`: the caller's span as W3C Trace Context writes it, of which the request's spans are
        children where the coordinator makes traces; an invalid one is as good as none. `draft_tokens`: 0 to 4; a worker
        drafts so many tokens for a step at most, and no more than its `worker.draft_tokens`. The output is the same.

        Raises BadInput, WrongState (id of another request), CapacityError (it never fits, or the queue is full),
        Unavailable or ConnectionLost. Cancelled: the request may have been submitted; without a `request_id` its id is
        unknown then.
        """
        packed, trace = pack_tokens(prompt), read_context(traceparent, tracestate)
        return await self._subscribe(
            lambda tag: messages.Submit(
                *(tag, packed, sampling, request_id, priority, True, prefill_mode, tenant, cache_salt, trace),
                draft_tokens,
            ),
            start=0,
            repeatable=bool(request_id),
        )

    async def submit_detached(
        self,
        prompt: Sequence[int] | npt.NDArray[np.integer],
        sampling: Sampling,
        *,
        request_id: str = "",
        priority: int = 0,
        prefill_mode: str = messages.AUTO,
        draft_tokens: int = messages.DRAFT_TOKENS_MAX,
    ) -> str:
        """As `submit`, without subscribing; returns the request's id."""
        packed = pack_tokens(prompt)
        accepted = await self._call(
            lambda tag: messages.Submit(
                *(tag, packed, sampling, request_id, priority, False, prefill_mode), draft_tokens=draft_tokens
            ),
            messages.Accepted,
            repeatable=bool(request_id),
        )
        return accepted.request_id

    async def attach(self, request_id: str, offset: int = 0) -> TokenStream:
        """Subscribe from generated position `offset` on. Raises NotFound, or BadInput for an impossible offset."""
        return await self._subscribe(lambda tag: messages.Attach(tag, request_id, offset), start=offset)

    async def detach(self, stream: TokenStream) -> None:
        """Unsubscribe; the request goes on. The stream's iteration ends after the tokens that have arrived."""

        def forget(reply: Reply) -> None:
            expect(reply, messages.Done)
            self._connection.forget(stream)

        await self._connection.exchange(lambda tag: messages.Detach(tag, stream.request_id), forget)

    async def abort(self, request_ids: Sequence[str]) -> tuple[str, ...]:
        """Abort all or none. Raises NotFound or WrongState."""
        return await self._do(lambda tag: messages.AbortRequests(tag, ids(request_ids)))

    async def acknowledge(self, request_ids: Sequence[str]) -> tuple[str, ...]:
        """The outputs of these ended requests are stored here: the coordinator may drop them before `ended_keep_s`.

        Raises WrongState for a live request.
        """
        return await self._do(lambda tag: messages.AcknowledgeOutputs(tag, ids(request_ids)))

    # ------------------------------------------------------------ queries

    async def welcome(self) -> messages.Welcome:
        """The coordinator's version and incarnation, and the model that it serves now."""
        return await self._connection.greet()

    async def model(self) -> ModelInfo:
        """The served model. Raises Unavailable while no worker has registered."""
        welcome = self._connection.welcome
        model = welcome.model if welcome else None
        model = model or (await self.welcome()).model
        if model is None:
            raise Unavailable("no worker has registered yet", remedy="start one with: hisparse worker --model PATH")
        return model

    async def requests(self, limit: int = 10_000) -> messages.RequestRows:
        """Live and recently ended requests that this key may see, 20,000 at most; `truncated`: there are more."""
        return await self._call(lambda tag: messages.ListRequests(tag, limit), messages.RequestRows)

    async def request(self, request_id: str) -> messages.RequestDetail:
        """One request with its history. Raises NotFound."""
        return await self._call(lambda tag: messages.DescribeRequest(tag, request_id), messages.RequestDetail)

    async def workers(self) -> tuple[messages.WorkerRow, ...]:
        """Workers, including lost ones that still hold memory."""
        return (await self._call(messages.ListWorkers, messages.WorkerRows)).rows

    async def pools(self) -> tuple[messages.PoolRow, ...]:
        """Host pools: one per node."""
        return (await self._call(messages.ListPools, messages.PoolRows)).rows

    async def tokenizer(self) -> messages.TokenizerData:
        """The served model's tokenizer. Raises Unavailable until a worker has sent it."""
        return await self._call(messages.FetchTokenizer, messages.TokenizerData)

    # ------------------------------------------------------------ operators' commands (role "admin")

    # Each takes effect for all requests or workers named, or for none. It returns one line for each once the
    # coordinator has decided; workers carry it out afterwards. Each raises NotFound, WrongState (of the first refused)
    # or NotAllowed.

    async def retract(self, request_ids: Sequence[str], *, keep: bool = True, hold: bool = True) -> tuple[str, ...]:
        """Take running requests off their workers.

        `keep`: their host pages stay, otherwise they are freed. `hold`: they wait for `resume`, otherwise the policy
        resumes them.
        """
        return await self._do(lambda tag: messages.RetractRequests(tag, ids(request_ids), keep, hold))

    async def resume(self, request_ids: Sequence[str]) -> tuple[str, ...]:
        """Let held requests run again."""
        return await self._do(lambda tag: messages.ResumeRequests(tag, ids(request_ids)))

    async def resize(self, request_ids: Sequence[str], hot_slots: int) -> tuple[str, ...]:
        """Force the hot sizes of requests: a size class of the workers; 0: resident; -1: the policy decides again.

        Raises BadInput, or CapacityError for a size that no worker could give.
        """
        return await self._do(lambda tag: messages.ResizeRequests(tag, ids(request_ids), hot_slots))

    async def drain(
        self, workers: Sequence[str] = (), *, handover: bool = False, deadline_s: float = 300.0
    ) -> tuple[str, ...]:
        """Place no more requests on these workers (none named: all).

        Their requests finish there, or move to other workers (`handover`). Those left after `deadline_s`, a day at
        most, are retracted.
        """
        return await self._do(lambda tag: messages.DrainWorkers(tag, ids(workers), handover, deadline_s))

    async def undrain(self, workers: Sequence[str] = ()) -> tuple[str, ...]:
        """Place requests on these workers (none named: all) again."""
        return await self._do(lambda tag: messages.UndrainWorkers(tag, ids(workers)))

    async def release_quarantine(self, workers: Sequence[str], *, died: bool = False) -> tuple[str, ...]:
        """Vouch that the processes of these workers' lost epochs are gone: see messages.ReleaseQuarantine.

        `died`: the caller has seen them end, which is evidence against the requests that they ran.
        """
        return await self._do(lambda tag: messages.ReleaseQuarantine(tag, ids(workers), died))

    async def forget(self, workers: Sequence[str]) -> tuple[str, ...]:
        """List these disconnected workers, or those of these groups, no longer: see messages.ForgetWorkers."""
        return await self._do(lambda tag: messages.ForgetWorkers(tag, ids(workers)))

    async def tell_standbys(self, workers: Sequence[str], ready: Sequence[str]) -> None:
        """Tell which of these workers have a standby that is ready: see messages.TellStandbys."""
        await self._do(lambda tag: messages.TellStandbys(tag, ids(workers), ids(ready)))

    async def prefixes(self, limit: int = 20) -> messages.PrefixRows:
        """The largest cached prefixes, 1,000 at most, and how many there are."""
        return await self._call(lambda tag: messages.ListPrefixes(tag, limit), messages.PrefixRows)

    async def drop_prefixes(self, prefix_ids: Sequence[str] = (), *, owners: Sequence[str] = ()) -> tuple[str, ...]:
        """Forget cached prefixes: these, and all of these owners; neither of both: all. Requests keep what they hold.

        Raises BadInput for what is no id of a prefix. An id that is cached no longer is no error.
        """
        return await self._do(lambda tag: messages.DropPrefixes(tag, ids(prefix_ids), ids(owners)))

    async def audit(self) -> messages.AuditRows:
        """Compare the memory of all workers with the ledgers, now, in two rounds."""
        return await self._call(messages.AuditWorkers, messages.AuditRows)

    async def reload_keys(self) -> tuple[str, ...]:
        """The coordinator reads its list of allowed keys again. Raises ConfigError when the old list holds."""
        return await self._do(messages.ReloadKeys)

    async def stop(self, deadline_s: float = 30.0) -> tuple[str, ...]:
        """Drain the coordinator; it exits when running requests have ended, after `deadline_s` at the latest."""
        return await self._do(lambda tag: messages.StopCoordinator(tag, deadline_s))

    # ------------------------------------------------------------ calls

    async def _do(self, make: Callable[[int], messages.AdminMessage]) -> tuple[str, ...]:
        return (await self._call(make, messages.Done)).detail

    async def _subscribe(
        self, make: Callable[[int], messages.AdminMessage], start: int, *, repeatable: bool = False
    ) -> TokenStream:
        """The stream is made as the Accepted is read, so that it gets the Delivery right behind the Accepted."""
        return await self._connection.exchange(
            make, lambda reply: self._connection.adopt(reply, start), repeatable=repeatable
        )

    async def _call(
        self, make: Callable[[int], messages.AdminMessage], expected: type[M], *, repeatable: bool = False
    ) -> M:
        return await self._connection.exchange(make, lambda reply: expect(reply, expected), repeatable=repeatable)


@asynccontextmanager
async def open_client(
    endpoint: str | None = None,
    *,
    role: str = "client",
    name: str = "",
    reconnect_limit_s: float = RECONNECT_LIMIT_S,
    key: PeerKey | Insecure | None = None,
) -> AsyncIterator[Client]:
    """A connected Client, inside trio or asyncio; closed on leaving. Code without either calls `run_client`.

    `endpoint`: `ipc://PATH` or `tcp://HOST:PORT`. None: endpoint and key of the settings (HISPARSE_CONFIG and other
    HISPARSE_* variables), as the `hisparse` command has them. `role` "admin" needs the admin endpoint. `name` is shown
    to operators. `reconnect_limit_s` 0: a lost connection is final. `key`: None over ipc; over tcp a key of
    `read_peer_key`, or Insecure().

    Raises ConfigError for settings that are wrong, Unavailable when no coordinator answers, NotAllowed when the key is
    not allowed there, WrongState outside both. An exception of the block is raised as it is, not in a group. Cancelled:
    the connection is closed; submitted requests go on.
    """

    chosen, key = (endpoint, key) if endpoint is not None else _of_settings(role, key)

    def connect(make_news: Callable[[], StreamNews]) -> AbstractAsyncContextManager[Connection]:
        return connected(Connection(chosen, role, name, reconnect_limit_s, key, make_news))

    if trio.lowlevel.in_trio_task():
        async with connect(TrioNews) as connection:
            yield Client(connection)
    elif in_asyncio():
        async with connected_in_thread(connect) as threaded:
            yield Client(threaded)
    else:
        remedy = "call hisparse.run_client(ENDPOINT, ACTION), or run the caller with asyncio.run or trio.run"
        raise WrongState("opened outside asyncio and trio", field="client", value=chosen, remedy=remedy)


def _of_settings(role: str, key: PeerKey | Insecure | None) -> tuple[str, PeerKey | Insecure | None]:
    cluster = load(None).cluster
    endpoint = cluster.admin_endpoint if role == "admin" else cluster.client_endpoint
    return endpoint, key or access(cluster, role, endpoint)


def run_client(
    endpoint: str | None,
    action: Callable[[Client], Awaitable[T]],
    *,
    role: str = "client",
    name: str = "",
    key: PeerKey | Insecure | None = None,
) -> T:
    """Connect, await `action(client)`, disconnect: the client for code without trio. Returns the action's result.

    Arguments are those of `open_client`. `action` runs under trio. Raises the errors of `open_client` and of the
    action; WrongState inside asyncio or trio. Ctrl-C raises KeyboardInterrupt, after the action's cleanup.
    """
    if trio.lowlevel.in_trio_run() or in_asyncio():
        remedy = "async with hisparse.open_client(ENDPOINT) as client"
        raise WrongState(
            "run_client called inside asyncio or trio", field="client", value=endpoint or "", remedy=remedy
        )

    async def session() -> T:
        async with open_client(endpoint, role=role, name=name, key=key) as client:
            return await action(client)

    try:
        return trio.run(session)
    except BaseExceptionGroup as group:
        if group.subgroup(KeyboardInterrupt) is not None:
            raise KeyboardInterrupt from group
        raise
