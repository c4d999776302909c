"""The link to the coordinator: the trio shell round `worker.link.link_state`.

One DEALER per connection, two tasks on it: one receives, decodes and performs what the state decides; one speaks.
Everything that is to be sent goes through one bounded queue, so that messages keep the order in which they were
decided; a peer that does not take them in time ends the connection, never the memory. Reports are paced: dirt is
signalled at once by the executor's thread, a report goes at most once per report interval.

The link outlives its connections: a lost one is followed by a fresh DEALER after a pause that doubles up to
RECONNECT_PAUSE_MAX_S, drawn at random so that workers of a restarted coordinator do not return in step. The executor
decodes on meanwhile.

    run ─┬─ _connections ── connect ── _converse ─┬─ _hear
         └─ _see_to_stop                          └─ _speak
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol, assert_never

import trio

from metrics.state import WorkerCounters
from protocol.errors import ConfigError, HiSparseError, NotAllowed, ProtocolError, Unavailable
from protocol.logs import fields, logger
from protocol.messages import (
    TOKENIZER_CHUNK_BYTES,
    WORKER_MESSAGE_BYTES_MAX,
    Command,
    TokenizerChunk,
    WorkerMessage,
    decode_coordinator,
    encode,
)
from protocol.skew import read_frame
from protocol.start_and_end import LEAVING, tell_step
from protocol.transport.dealer import DealerSocket
from protocol.transport.keys import Insecure, PeerKey
from worker.link.link_state import Action, Apply, Drop, GiveUp, LinkState, Send, SendTokenizer, StopAsked
from worker.link.outbox import REPORTS_UNACKED_MAX

RECONNECT_PAUSE_MIN_S: Final = 0.05
RECONNECT_PAUSE_MAX_S: Final = 2.0
#: How often to look whether the executor has released everything.
EMPTY_POLL_S: Final = 0.02
#: Messages decided on and not yet taken by the socket.
OUTGOING_MAX: Final = 4 * REPORTS_UNACKED_MAX
#: Longest wait for a full socket. Heartbeats wait with it, so it lies below what a coordinator bears.
SEND_LIMIT_S: Final = 4.0
#: After its requests were withdrawn, an executor gets this long to release them.
RELEASE_LIMIT_S: Final = 6.0
#: Released requests get this long to reach the coordinator.
FLUSH_LIMIT_S: Final = 2.0

assert OUTGOING_MAX > REPORTS_UNACKED_MAX  # a full replay fits

log = logger("worker.link")


class CommandSink(Protocol):
    """The executor, as the link sees it: a port, since the link lies below the loop and imports no torch."""

    counters: WorkerCounters

    def submit(self, command: Command) -> None:
        """Take a command for the next step boundary; thread-safe, never waits."""


Connect = Callable[[], Awaitable[DealerSocket]]


def connect_to(endpoint: str, read_key: Callable[[], PeerKey | Insecure | None] = lambda: None) -> Connect:
    """Fresh DEALERs to `endpoint`. The key is read for each, so that it can be replaced while the worker runs."""

    async def connect() -> DealerSocket:
        return await DealerSocket.connect(endpoint, message_bytes_max=WORKER_MESSAGE_BYTES_MAX, key=read_key())

    return connect


@dataclass(frozen=True)
class LinkPace:
    """How often things are said, in seconds."""

    report_s: float = 0.02
    heartbeat_s: float = 0.5


class Link:
    """Runs in one trio task tree; `request_stop` and the outbox's signal are the only ways in from elsewhere."""

    def __init__(
        self, state: LinkState, executor: CommandSink, connect: Connect, *, pace: LinkPace, tokenizer: bytes = b""
    ) -> None:
        self.state = state
        self._executor = executor
        self._connect = connect
        self._pace = pace
        self._tokenizer = tokenizer
        self._outgoing: deque[WorkerMessage] = deque()
        self._chunks: deque[TokenizerChunk] = deque()
        self._wake = trio.Event()
        self._is_dirty = False
        self._conversation: trio.CancelScope | None = None
        self._drop: Drop | None = None
        self._failure: HiSparseError | None = None
        self._is_missed = False
        self._stop_asked = trio.Event()
        self._stop_at = float("inf")
        self._was_emptied = False

    async def run(self) -> bool:
        """Serve until told to stop; True when every placement was released in time.

        Raises ConfigError or NotAllowed when the coordinator will never take this worker. Cancelled: the connection is
        closed and nothing is withdrawn.
        """
        outbox = self.state.outbox
        token = trio.lowlevel.current_trio_token()

        def dirty() -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(self._on_dirty, idempotent=True)

        outbox.on_dirty = dirty
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._see_to_stop, nursery.cancel_scope)
            await self._connections()
            nursery.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure
        return self._was_emptied

    @property
    def stopping(self) -> bool:
        return self._stop_asked.is_set()

    def request_stop(self, deadline_s: float) -> None:
        """Leave once nothing is held, and after `deadline_s` withdraw what is. An earlier deadline wins.

        The process says so first: a supervisor that sees the worker disconnected then waits for its exit.
        """
        tell_step(LEAVING)
        self._stop_at = min(self._stop_at, trio.current_time() + deadline_s)
        self._stop_asked.set()

    # ---------------------------------------------------------------- connections

    async def _connections(self) -> None:
        pause_s = RECONNECT_PAUSE_MIN_S
        while self._failure is None:
            await _until(self.state.may_connect)
            was_welcomed = await self._one_connection()
            pause_s = RECONNECT_PAUSE_MIN_S if was_welcomed else min(2 * pause_s, RECONNECT_PAUSE_MAX_S)
            if self._failure is None:
                await trio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _one_connection(self) -> bool:
        """Whether it was welcomed. A key or setting that is refused ends a worker that was not welcomed yet; later
        it may be changed back, and meanwhile the executor decodes on."""
        try:
            dealer = await self._connect()
        except (ConfigError, NotAllowed, Unavailable) as error:
            if not isinstance(error, Unavailable) and not self.state.counters.welcomes:
                self._failure = error
                return False
            if not self._is_missed:
                log.warning("no coordinator; trying again and again", extra=fields(error=error))
            self._is_missed = True
            return False
        self._is_missed = False
        return await self._converse(dealer)

    async def _converse(self, dealer: DealerSocket) -> bool:
        """One connection from hello to its end, whatever ends it; whether it was ever welcomed."""
        self._outgoing.clear()
        self._chunks.clear()
        self._drop = None
        welcomed_before = self.state.counters.welcomes
        try:
            with trio.CancelScope() as self._conversation:
                self._perform(self.state.connected(trio.current_time()))
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._hear, dealer)
                    nursery.start_soon(self._speak, dealer)
        finally:
            self._conversation = None
            dealer.close()
            self.state.disconnected()
        drop = self._drop or Drop("closed")
        self.state.counters.drops[drop.reason] += 1
        log.info("link down", extra=fields(reason=drop.reason, detail=drop.detail))
        return self.state.counters.welcomes > welcomed_before

    async def _hear(self, dealer: DealerSocket) -> None:
        while True:
            try:
                frames = await dealer.recv_batch()
            except (Unavailable, trio.ClosedResourceError) as error:
                return self._end(Drop("lost", str(error)))
            for frame in frames:
                self._receive(frame)

    def _receive(self, frame: bytes) -> None:
        try:
            message = read_frame(decode_coordinator, frame, WORKER_MESSAGE_BYTES_MAX, "coordinator")
        except ProtocolError as error:
            self.state.counters.unreadable += 1
            log.warning("message dropped", extra=fields(error=error))
            return
        counters = self.state.counters
        before = counters.welcomes
        if actions := self.state.received(message, trio.current_time()):
            self._perform(actions)
            self._rouse()
        if counters.welcomes > before:
            log.info("welcomed", extra=fields(incarnation=self.state.incarnation, epoch=self.state.outbox.epoch))

    async def _speak(self, dealer: DealerSocket) -> None:
        next_report = next_beat = trio.current_time()
        self._is_dirty = True
        while True:
            self._wake = trio.Event()
            now = trio.current_time()
            if self._is_dirty and now >= next_report:
                self._is_dirty = False
                next_report = now + self._pace.report_s
                self._perform(self.state.reports(now))
            if now >= next_beat:
                next_beat = now + self._pace.heartbeat_s
                self._perform([*self.state.tick(now), *self.state.heartbeat(self._executor.counters)])
            try:
                if self._outgoing or self._chunks:
                    with trio.fail_after(SEND_LIMIT_S):
                        await self._flush(dealer)
            except (Unavailable, trio.ClosedResourceError) as error:
                return self._end(Drop("lost", str(error)))
            except trio.TooSlowError:
                return self._end(Drop("blocked", f"the socket took nothing for {SEND_LIMIT_S} s"))
            with trio.move_on_at(min(next_beat, next_report) if self._is_dirty else next_beat):
                await self._wake.wait()

    async def _flush(self, dealer: DealerSocket) -> None:
        """Send what is due, and one piece of the tokenizer when nothing else is."""
        while self._outgoing:
            await dealer.send(encode(self._outgoing.popleft()))
        if self._chunks:
            await dealer.send(encode(self._chunks.popleft()))
            self._rouse()

    # ---------------------------------------------------------------- actions

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self._send(action.message)
                case Apply():
                    self._executor.submit(action.command)
                case SendTokenizer():
                    self._chunks.extend(self._cut_tokenizer())
                case StopAsked():
                    self.request_stop(action.deadline_s)
                case Drop():
                    self._end(action)
                case GiveUp():
                    self._failure = action.error
                    self._end(Drop("refused", action.error.message))
                case _:
                    assert_never(action)

    def _send(self, message: WorkerMessage) -> None:
        if len(self._outgoing) >= OUTGOING_MAX:
            self._end(Drop("blocked", f"{OUTGOING_MAX} messages wait for the socket"))
        else:
            self._outgoing.append(message)

    def _cut_tokenizer(self) -> list[TokenizerChunk]:
        data, size = self._tokenizer, TOKENIZER_CHUNK_BYTES
        total = max(1, -(-len(data) // size))
        epoch, digest = self.state.outbox.epoch, self.state.identity.model.tokenizer_hash
        return [TokenizerChunk(epoch, digest, i, total, data[i * size : (i + 1) * size]) for i in range(total)]

    def _end(self, drop: Drop) -> None:
        if self._conversation is not None and self._drop is None:
            self._drop = drop
            self._conversation.cancel()

    def _on_dirty(self) -> None:
        self._is_dirty = True
        self._rouse()

    def _rouse(self) -> None:
        self._wake.set()

    # ---------------------------------------------------------------- stopping

    async def _see_to_stop(self, scope: trio.CancelScope) -> None:
        """Wait for the wish to stop, empty the executor within bounds, let the last reports go, end the link."""
        held = self.state.outbox.held
        await self._stop_asked.wait()
        await _until(lambda: not held() or trio.current_time() >= self._stop_at)
        self._perform(self.state.stop(self._executor.counters))
        self._rouse()
        with trio.move_on_after(RELEASE_LIMIT_S):
            await _until(lambda: not held())
        self._was_emptied = not held()
        with trio.move_on_after(FLUSH_LIMIT_S):
            await _until(lambda: not self.state.counters.welcomed or not self.state.owes())
        scope.cancel()


async def _until(condition: Callable[[], bool]) -> None:
    """Poll: what is waited for happens in the executor's thread, which knows of no trio event."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(EMPTY_POLL_S)
