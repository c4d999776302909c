"""FakeWorker: the worker's end of the worker socket, said line by line by a test."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec
import trio

from protocol import messages
from protocol.messages import PROTOCOL_VERSION, CoordinatorMessage
from protocol.transport.dealer import DealerSocket
from protocol.transport.keys import PeerKey
from tests.support.fakes.scheduler import MODEL
from tests.support.limits import HANG_LIMIT_S

CAPACITY = messages.WorkerCapacity(
    seats=8,
    hot_chunks=64,
    index_pages=64,
    prompt_max_tokens=4_096,
    host_pages=256,
    page_bytes=1024,
    hot_size_classes=(128, 256),
    tail_slots=8,
    overshoot_tokens=2,
    pool_path="/nowhere",
)


def hello(name: str = "w0", epoch: int = 1, **changes: object) -> messages.WorkerHello:
    first = messages.WorkerHello(
        protocol=PROTOCOL_VERSION,
        worker=name,
        node="n",
        epoch=epoch,
        pid=os.getpid(),
        incarnation_seen=0,
        command_ack=0,
        report_next=1,
        model=MODEL,
        capacity=CAPACITY,
    )
    return msgspec.structs.replace(first, **changes)


class FakeWorker:
    """One connection. `report` numbers by itself unless told otherwise."""

    def __init__(self, dealer: DealerSocket, epoch: int = 1) -> None:
        self.dealer = dealer
        self.epoch = epoch
        self.reports = 0
        self._effects: list[CoordinatorMessage] = []

    @classmethod
    async def connect(cls, endpoint: str, epoch: int = 1, key: PeerKey | None = None) -> FakeWorker:
        return cls(await DealerSocket.connect(endpoint, message_bytes_max=1 << 30, key=key), epoch)

    async def say(self, message: messages.WorkerMessage | bytes) -> None:
        await self.dealer.send(message if isinstance(message, bytes) else messages.encode(message))

    async def report(
        self,
        progress: messages.Progress | None = None,
        events: Sequence[messages.Event] = (),
        *,
        command_ack: int = 0,
        number: int | None = None,
    ) -> None:
        self.reports = self.reports + 1 if number is None else number
        await self.say(messages.Report(self.reports, self.epoch, command_ack, progress, tuple(events)))

    async def beat(self, beats: int = 1, command_ack: int = 0) -> None:
        await self.say(messages.Heartbeat(self.epoch, command_ack, beats, 10, 250.0))

    async def hear(self) -> CoordinatorMessage:
        """The next message."""
        with trio.fail_after(HANG_LIMIT_S):
            while not self._effects:
                self._effects += [messages.decode_coordinator(frame) for frame in await self.dealer.recv_batch()]
        return self._effects.pop(0)

    async def silence(self, seconds: float = 0.1) -> bool:
        """Whether nothing is heard for `seconds`."""
        with trio.move_on_after(seconds):
            self._effects.append(await self.hear())
        return not self._effects

    def close(self) -> None:
        self.dealer.close()
