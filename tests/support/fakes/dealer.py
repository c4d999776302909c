"""FakeDealer: a DEALER whose other end a test holds, over trio memory channels and without ZMQ."""

from __future__ import annotations

import math

import trio

from metrics.state import WorkerCounters
from protocol.errors import HiSparseError, Unavailable
from protocol.messages import Command, CoordinatorMessage, WorkerMessage, decode_worker, encode


class FakeDealer:
    """One connection. `say` and `hear` are the coordinator's side, `cut` loses the connection."""

    def __init__(self) -> None:
        self._to_worker, self._incoming = trio.open_memory_channel[bytes](math.inf)
        self._outgoing, self._from_worker = trio.open_memory_channel[bytes](math.inf)
        self.blocked = False
        self.closed = False

    async def recv_batch(self) -> list[bytes]:
        try:
            return [await self._incoming.receive()]
        except trio.EndOfChannel:
            raise Unavailable("the connection was lost") from None

    async def send(self, frame: bytes) -> None:
        if self.blocked:
            await trio.sleep_forever()
        await self._outgoing.send(frame)

    def close(self) -> None:
        self.closed = True

    def say(self, message: CoordinatorMessage | bytes) -> None:
        self._to_worker.send_nowait(message if isinstance(message, bytes) else encode(message))

    def cut(self) -> None:
        self._to_worker.close()

    async def hear(self, *kinds: type[WorkerMessage]) -> WorkerMessage:
        """The next message of one of `kinds` (any, when none is named)."""
        while True:
            message: WorkerMessage = decode_worker(await self._from_worker.receive())
            if not kinds or isinstance(message, kinds):
                return message


class FakeListener:
    """Where FakeDealers connect to: `accept` returns the next connection; `down` and `refusal` refuse them."""

    def __init__(self) -> None:
        self._accepted, self._connections = trio.open_memory_channel[FakeDealer](math.inf)
        self.down = False
        self.refusal: HiSparseError | None = None
        self.attempts = 0

    async def connect(self) -> FakeDealer:
        self.attempts += 1
        if self.down:
            raise Unavailable("no coordinator listens there")
        if self.refusal is not None:
            raise self.refusal
        dealer = FakeDealer()
        self._accepted.send_nowait(dealer)
        return dealer

    async def accept(self) -> FakeDealer:
        return await self._connections.receive()


class FakeSink:
    """An executor that only remembers its commands."""

    def __init__(self) -> None:
        self.counters = WorkerCounters()
        self.commands: list[Command] = []

    def submit(self, command: Command) -> None:
        self.commands.append(command)
