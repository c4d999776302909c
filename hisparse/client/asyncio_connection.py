"""The connection of a client under asyncio: the same Connection, in a trio run in a thread of its own.

    asyncio loop                          thread
    AsyncioConnection.exchange  ------->  Connection.exchange, in a task of the trio run
    future                      <-------  its result, or its error
    TokenStream.__anext__       <-------  tokens: the Connection appends them, AsyncioNews wakes the reader
    a cancelled task            ------->  cancels the task of the trio run

Rejected: trio's guest mode. A thread has one trio run at most, so two clients of a loop would share one, and
asyncio.run may close its loop before a guest run has ended.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import trio

from hisparse.client.connection import Connection, client_closed
from hisparse.client.replies import Reply
from hisparse.client.token_stream import StreamNews, TokenStream
from protocol import messages
from protocol.errors import Unavailable

T = TypeVar("T")
#: Opens a Connection inside trio whose streams wake their readers with the StreamNews made by the function given.
Connect = Callable[[Callable[[], StreamNews]], AbstractAsyncContextManager[Connection]]


class AsyncioNews:
    """As TrioNews, for a reader in `loop`; `set` may be called in any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._event = asyncio.Event()

    def set(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: it has no reader
            self._loop.call_soon_threadsafe(self._event.set)

    async def pause(self) -> None:
        await asyncio.sleep(0)

    async def wait(self) -> None:
        await self._event.wait()
        self._event.clear()


class AsyncioConnection:
    """What a Client calls of a Connection, for any number of tasks of the loop in which it was opened."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._pending: set[asyncio.Future[Any]] = set()
        self._scope = trio.CancelScope()
        self._token: trio.lowlevel.TrioToken
        self._connection: Connection
        self._nursery: trio.Nursery | None = None

    # ------------------------------------------------------------ as Connection

    @property
    def endpoint(self) -> str:
        return self._connection.endpoint

    @property
    def reconnects(self) -> int:
        return self._connection.reconnects

    @property
    def welcome(self) -> messages.Welcome | None:
        return self._connection.welcome

    async def lost(self) -> None:
        await self._call(self._connection.lost)

    async def greet(self) -> messages.Welcome:
        return await self._call(self._connection.greet)

    async def exchange(
        self, make: Callable[[int], messages.AdminMessage], read: Callable[[Reply], T], *, repeatable: bool = False
    ) -> T:
        """As Connection.exchange; `make` and `read` are called in the thread."""
        return await self._call(lambda: self._connection.exchange(make, read, repeatable=repeatable))

    def adopt(self, reply: Reply, start: int) -> TokenStream:
        return self._connection.adopt(reply, start)

    def forget(self, stream: TokenStream) -> None:
        self._connection.forget(stream)

    # ------------------------------------------------------------ in the loop

    async def _call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Await `function()` in the thread. Cancelled: it is cancelled, too, and not waited for."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._pending.add(future)
        scope = trio.CancelScope()
        try:
            self._soon(lambda: self._spawn(function, scope, future))
            return await future
        except asyncio.CancelledError:
            with suppress(Unavailable):
                self._soon(scope.cancel)
            raise
        finally:
            self._pending.discard(future)

    def _soon(self, action: Callable[[], object]) -> None:
        try:
            self._token.run_sync_soon(action)
        except trio.RunFinishedError as error:
            raise client_closed(self.endpoint) from error

    def _fail_pending(self) -> None:
        for future in self._pending:
            _settle(future, client_closed(self.endpoint))

    # ------------------------------------------------------------ in the thread

    def run(self, connect: Connect, started: threading.Event) -> None:
        """Connect, then serve calls until the scope is cancelled. `started`: the scope may be cancelled from now on."""
        try:
            trio.run(self._session, connect, started)
        except BaseException as error:  # told to the task that opens the connection
            failure = error
            self._tell(lambda: _settle(self._opened, failure))
        self._tell(self._fail_pending)

    async def _session(self, connect: Connect, started: threading.Event) -> None:
        self._token = trio.lowlevel.current_trio_token()
        started.set()
        with self._scope:
            news = partial(AsyncioNews, self._loop)
            async with connect(news) as self._connection, trio.open_nursery() as nursery:
                self._nursery = nursery
                try:
                    self._tell(lambda: _settle(self._opened, None))
                    await trio.sleep_forever()
                finally:
                    self._nursery = None

    def _spawn(self, function: Callable[[], Awaitable[T]], scope: trio.CancelScope, future: asyncio.Future[T]) -> None:
        async def answer() -> None:
            try:
                with scope:
                    result = await function()
                    self._tell(lambda: _settle(future, result))
            except Exception as error:
                failure = error
                self._tell(lambda: _settle(future, failure))

        if self._nursery is not None:
            self._nursery.start_soon(answer)

    def _tell(self, action: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed: it waits for nothing
            self._loop.call_soon_threadsafe(action)

    def close(self, thread: threading.Thread) -> None:
        """End the thread; the loop waits for it, some milliseconds. Calls that wait raise Unavailable."""
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._scope.cancel)
        thread.join()
        self._fail_pending()


def _settle(future: asyncio.Future[T], result: T | BaseException) -> None:
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


@asynccontextmanager
async def connected_in_thread(connect: Connect) -> AsyncIterator[AsyncioConnection]:
    """A connection inside the block, closed afterwards. Raises as Connection.connect."""
    connection, started = AsyncioConnection(), threading.Event()
    thread = threading.Thread(target=connection.run, args=(connect, started), name="hisparse client", daemon=True)
    thread.start()
    started.wait()  # a millisecond, in which trio starts
    try:
        await connection._opened
        yield connection
    finally:
        connection.close(thread)


def in_asyncio() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
