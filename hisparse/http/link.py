"""The front's connection to the coordinator, and what it knows of the served model through it.

One connection carries everything. A coordinator that restarts is waited for inside the Client, which goes on at the
offsets it holds, so that HTTP clients see a pause; one that stays away for RECONNECT_LIMIT_S is given up, what waited
for it fails, and the front looks for it anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final

import trio

from basics.request_states import UNSERVED
from hisparse.client.client import Client
from hisparse.client.tokenizer_cache import fetch_tokenizer
from hisparse.http.apis.asks import Served
from protocol.errors import HiSparseError, Unavailable
from protocol.logs import fields, logger

#: How long streams wait for a coordinator that restarts: longer than the longest pause of `hisparse up` and a start.
RECONNECT_LIMIT_S: Final = 120.0
#: Between two attempts to find one.
SEARCH_INTERVAL_S: Final = 0.5
#: How long the coordinator may take to say that it takes work, and for how long that counts.
HEALTH_LIMIT_S: Final = 2.0
HEALTH_INTERVAL_S: Final = 1.0

log = logger("http.link")

#: A connected client, closed at the end.
Connect = Callable[[], AbstractAsyncContextManager[Client]]


class CoordinatorLink:
    """`run` keeps it connected; whatever asks meanwhile gets Unavailable."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._client: Client | None = None
        self._served: Served | None = None
        self._fetching = trio.Lock()
        self._asking = trio.Lock()
        self._asked_at = -math.inf
        self._unready = ""
        self._unserved = ""

    @property
    def client(self) -> Client:
        """Raises Unavailable while there is no coordinator."""
        if self._client is None:
            raise Unavailable("the coordinator is not there", remedy="retry in a moment")
        return self._client

    @property
    def connected(self) -> bool:
        return self._client is not None

    async def run(self) -> None:
        """Until cancelled. What keeps the coordinator away is logged when it changes."""
        why = ""
        while True:
            try:
                async with self._connect() as client:
                    self._client = client
                    log.info("connected", extra=fields(endpoint=client.endpoint))
                    why = ""
                    await client.lost()
                log.error("the coordinator stays away", extra=fields(seconds=RECONNECT_LIMIT_S))
            except HiSparseError as error:
                if error.message != why:
                    why = error.message
                    log.warning("no coordinator", extra=fields(reason=str(error)))
            finally:
                self._client = None
            await trio.sleep(SEARCH_INTERVAL_S)

    async def served(self) -> Served:
        """Model and tokenizer; the tokenizer is fetched once for each model. Raises Unavailable or ConfigError."""
        model = await self.client.model()
        async with self._fetching:
            if self._served is None or self._served.model.tokenizer_hash != model.tokenizer_hash:
                self._served = Served(model, await fetch_tokenizer(self.client))
            elif self._served.model != model:
                self._served = Served(model, self._served.tokenizer)
            return self._served

    async def unready(self) -> str:
        """Why a request would not be served now, "" when it would be: the rule of the coordinator's /readyz."""
        await self._look()
        return self._unready

    async def unserved(self) -> str:
        """Why no worker would take a request now, "" when one would, or when the coordinator does not say."""
        await self._look()
        return self._unserved

    async def _look(self) -> None:
        """Asks at most once per HEALTH_INTERVAL_S, however many want to know: they need no key, and what the front asks
        too often the coordinator does not hear."""
        async with self._asking:
            if not self.connected or trio.current_time() >= self._asked_at + HEALTH_INTERVAL_S:
                self._unready, self._unserved = await self._ask()
                self._asked_at = trio.current_time()

    async def _ask(self) -> tuple[str, str]:
        with trio.move_on_after(HEALTH_LIMIT_S):
            try:
                welcome = await self.client.welcome()
            except HiSparseError as error:
                return error.message, ""
            return welcome.unready, welcome.unserved
        return f"the coordinator does not answer within {HEALTH_LIMIT_S:g} s", ""

    async def waits_unserved(self, request_id: str) -> str:
        """What a request waits for, if no connected worker can end that wait; else "", or when the coordinator does not
        say."""
        with trio.move_on_after(HEALTH_LIMIT_S):
            try:
                row = (await self.client.request(request_id)).row
            except HiSparseError:
                return ""
            return row.reason if row.waits_for in UNSERVED else ""
        return ""
