"""What a worker sees of a coordinator, over a real RouterSocket, with every decision left to the test."""

from __future__ import annotations

from collections import deque
from types import TracebackType

from coordinator.listener.router import Received, RouterSocket
from protocol.arrays import unpack_int32
from protocol.messages import (
    PROTOCOL_VERSION,
    WORKER_MESSAGE_BYTES_MAX,
    Command,
    Commands,
    CoordinatorMessage,
    Event,
    Report,
    ReportAck,
    WorkerHello,
    WorkerMessage,
    WorkerWelcome,
    decode_worker,
    encode,
)


class FakeListeningCoordinator:
    """One worker at a time. `acknowledges` may be turned off; `tokens` were reported, `events` not yet heard either."""

    def __init__(self, endpoint: str, incarnation: int = 1) -> None:
        self._router = RouterSocket(endpoint, message_bytes_max=WORKER_MESSAGE_BYTES_MAX)
        self.incarnation = incarnation
        self.acknowledges = True
        self.events: list[Event] = []
        self.tokens: list[int] = []
        self._peer = b""
        self._unread: deque[Received] = deque()
        self._commands = 0

    def __enter__(self) -> FakeListeningCoordinator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._router.close()

    def say(self, message: CoordinatorMessage) -> None:
        self._router.send(self._peer, encode(message))

    def command(self, *commands: Command) -> None:
        self.say(Commands(self.incarnation, self._commands + 1, commands))
        self._commands += len(commands)

    def restart(self) -> None:
        """Forget what was heard and sent: the next worker begins an epoch."""
        self.tokens, self.events, self._commands = [], [], 0

    async def greet(self) -> WorkerHello:
        """Wait for a hello and welcome it."""
        while not isinstance(hello := await self._next(), WorkerHello):
            pass
        self.say(WorkerWelcome(PROTOCOL_VERSION, self.incarnation, hello.report_next - 1, want_tokenizer=False))
        return hello

    async def hear(self, kind: type[Event]) -> Event:
        """The next event of `kind`, read on if need be; each event is heard once."""
        while True:
            for event in self.events:
                if isinstance(event, kind):
                    self.events.remove(event)
                    return event
            await self._read()

    async def hear_tokens(self, count: int) -> None:
        """Read on until `count` tokens have arrived in all."""
        while len(self.tokens) < count:
            await self._read()

    async def _read(self) -> None:
        report = await self._next()
        if not isinstance(report, Report):
            return
        if report.progress is not None:
            self.tokens += unpack_int32(report.progress.tokens, "tokens").tolist()
        self.events += report.events
        if self.acknowledges:
            self.say(ReportAck(self.incarnation, report.number))

    async def _next(self) -> WorkerMessage:
        while not self._unread:
            self._unread.extend(await self._router.recv_batch())
        received = self._unread.popleft()
        self._peer = received.peer
        message: WorkerMessage = decode_worker(received.frame)
        return message
