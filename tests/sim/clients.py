"""Clients that die and come back, and the operator.

A client process has a list of requests, chosen by id beforehand, and remembers of each whether it was acknowledged and
how many tokens came; it writes that down, so to speak, and goes on from there in its next life. Whether a submit whose
connection was lost was carried out it learns by submitting again.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import trio

from hisparse.client.client import Client, open_client
from hisparse.client.token_stream import TokenStream
from protocol.errors import BadInput, CapacityError, HiSparseError, NotFound, Unavailable, WrongState
from tests.sim.cluster import Cluster
from tests.sim.oracle import Truth
from tests.sim.trace import Violation

#: A client tries again after this.
RETRY_S: Final = 0.2
#: A client that was killed returns within this time.
RETURN_S: Final = (0.05, 1.0)
#: A command of the operator is given up after this.
COMMAND_LIMIT_S: Final = 4.0


@dataclass(eq=False)
class Pending:
    """What a client remembers of one request."""

    truth: Truth
    at: float
    is_acknowledged: bool = False
    tokens: int = 0
    outcome: str = ""


class SimClient:
    """One client across its lives."""

    def __init__(self, cluster: Cluster, name: str, pending: list[Pending], rng: random.Random) -> None:
        self.name = name
        self.pending = pending
        self._cluster = cluster
        self._rng = rng
        self._scope = trio.CancelScope()

    @property
    def unfinished(self) -> list[Pending]:
        return [it for it in self.pending if not it.outcome]

    async def run(self) -> None:
        """Until every request has ended."""
        while self.unfinished:
            with trio.CancelScope() as self._scope:
                await self._live()
            if self._scope.cancelled_caught:
                await trio.sleep(self._rng.uniform(*RETURN_S))

    def kill(self) -> None:
        self._cluster.trace.note(self.name, "killed")
        self._scope.cancel()

    async def _live(self) -> None:
        try:
            async with open_client(f"client:{self.name}", name=self.name) as client, trio.open_nursery() as nursery:
                for pending in self.unfinished:
                    nursery.start_soon(self._follow, client, pending)
        except Unavailable:
            await trio.sleep(RETRY_S)

    async def _follow(self, client: Client, pending: Pending) -> None:
        await trio.sleep_until(pending.at)
        while not pending.outcome:
            try:
                await self._read(await self._open(client, pending), pending)
            except (Unavailable, CapacityError):
                await trio.sleep(RETRY_S)

    async def _open(self, client: Client, pending: Pending) -> TokenStream:
        truth = pending.truth
        if not pending.is_acknowledged:
            try:
                stream = await client.submit(
                    truth.prompt,
                    truth.sampling,
                    request_id=truth.request_id,
                    priority=truth.priority,
                    prefill_mode=truth.prefill_mode,
                    tenant="" if self._cluster.shape.pairs else self.name,  # turns make hand-overs rarer
                )
            except WrongState:  # an earlier submit was carried out, and its answer lost
                pending.is_acknowledged = True
            else:
                pending.is_acknowledged = True
                return stream
        try:
            return await client.attach(truth.request_id, pending.tokens)
        except NotFound as error:
            raise Violation("I5", f"{truth.request_id} was acknowledged and is not known") from error
        except BadInput as error:
            raise Violation("I5", f"{truth.request_id}: what was delivered is not known: {error}") from error
        except WrongState:  # this connection is attached: its first Accepted was lost
            raise Unavailable("attached already") from None

    async def _read(self, stream: TokenStream, pending: Pending) -> None:
        async for tokens in stream:
            start = stream.offset - len(tokens)
            if start > pending.tokens:
                raise Violation("I5", f"{stream.request_id} skips from {pending.tokens} to {start}")
            self._cluster.checker.check_output(pending.truth, start, tokens.tolist())
            pending.tokens = max(pending.tokens, stream.offset)
        if stream.ended is not None:
            pending.outcome = stream.ended.outcome
            self._cluster.trace.note(self.name, "ended", f"{stream.request_id} {pending.outcome} {pending.tokens}")


class Operator:
    """Gives orders over an admin connection; refusals are as good as answers."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._client: Client | None = None

    async def run(self) -> None:
        while True:
            try:
                async with open_client("admin:operator", role="admin") as self._client:
                    await trio.sleep_forever()
            except Unavailable:
                await trio.sleep(RETRY_S)

    async def order(self, command: Callable[[Client], Awaitable[object]]) -> bool:
        """Whether it was carried out for certain."""
        if self._client is None:
            return False
        try:
            with trio.fail_after(COMMAND_LIMIT_S):
                await command(self._client)
        except (HiSparseError, trio.TooSlowError):
            return False
        return True


@dataclass
class Workload:
    """Who asks for what: drawn from the seed, the same with faults and without."""

    clients: list[SimClient]
    operator: Operator

    @property
    def unfinished(self) -> list[str]:
        return [it.truth.request_id for client in self.clients for it in client.unfinished]
