"""Page transfer between simulated nodes: an engine of their own, whose network loses, corrupts and delays.

A frame is one page on its way: the bytes that the sender had, where they go, and a checksum that it took. It lands at
a moment of its own, whether or not its sender still runs, as what is in socket buffers does; it lands *unless* the
endpoint that it goes through is gone: the receiver's process has ended, or its transfer was revoked. Nobody guards the
pages: a frame that lands too late overwrites whatever is there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import trio

from tests.sim.oracle import Rows
from worker.transfer.handover import Incoming, Outgoing

#: Seconds that a frame travels; after which an unanswered one is sent again; that a revocation takes; that a sender
#: waits for its receiver to know the transfer.
TRAVEL_S: Final = (0.0, 0.3)
RESEND_S: Final = 0.5
REVOKE_S: Final = (0.0, 0.4)
BEGIN_LIMIT_S: Final = 4.0
#: A page that arrives wrong this often fails its transfer.
ATTEMPTS_MAX: Final = 4


def checksum(rows: Rows) -> int:
    return int(np.bitwise_xor.reduce(rows * np.arange(1, 2 * len(rows), 2, dtype=np.uint64)))


@dataclass(eq=False)
class Frame:
    outgoing: Sending
    index: int
    rows: Rows
    checksum: int
    lands_at: float
    is_lost: bool


@dataclass(eq=False)
class Sending:
    """One transfer at its sender."""

    wire: Wire
    out: Outgoing
    receiver: str
    began_at: float
    pages: dict[int, Rows] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    sent_at: dict[int, float] = field(default_factory=dict)

    def send(self, index: int, rows: Rows) -> None:
        self.pages[index] = rows

    def cancel(self, reason: str) -> None:
        """Nothing more goes; what is in flight lands."""
        if self.out.is_over:
            return
        self.out.failure = reason
        if transfer := self.transfer:
            transfer.gives_up = True

    @property
    def transfer(self) -> Taking | None:
        receiver = self.wire.receivers.get(self.receiver)
        return receiver.transfers.get(self.out.transfer_id) if receiver else None

    @property
    def is_quiet(self) -> bool:
        return self.out.is_over and not any(frame.outgoing is self for frame in self.wire.frames)

    def turn(self) -> None:
        """What the sender's thread does, while its process runs."""
        now, transfer = trio.current_time(), self.transfer
        if self.out.is_over:
            return
        if transfer is None or transfer.closes_at is not None:
            if transfer is not None or self.attempts or now > self.began_at + BEGIN_LIMIT_S:
                self.out.failure = "its receiver knows no such transfer"
            return
        for index, rows in self.pages.items():
            if index not in self.out.delivered and now >= self.sent_at.get(index, -RESEND_S) + RESEND_S:
                self.sent_at[index] = now
                self.attempts[index] = self.attempts.get(index, 0) + 1
                if self.attempts[index] > ATTEMPTS_MAX * 4:
                    self.cancel("a page was never verified")
                    return
                self.wire.launch(self, index, rows)


@dataclass(eq=False)
class Taking:
    """One transfer at its receiver. `closes_at`: it is being revoked."""

    incoming: Incoming
    closes_at: float | None = None
    gives_up: bool = False


@dataclass(eq=False)
class FakeReceiver:
    """Where the pages of one process's pool are written. `verify` is what it does with each page."""

    wire: Wire
    name: str
    pool: object
    transfers: dict[int, Taking] = field(default_factory=dict)

    def open(self, transfer_id: int, incoming: Incoming) -> None:
        self.transfers[transfer_id] = Taking(incoming)

    def revoke(self, transfer_id: int) -> None:
        taking = self.transfers.get(transfer_id)
        if taking is not None and taking.closes_at is None:
            taking.closes_at = trio.current_time() + self.wire.rng.uniform(*REVOKE_S)

    def poll(self) -> list[int]:
        """Transfers that are over; nothing is written for them any more."""
        self.wire.settle()
        over: list[int] = []
        for transfer_id, taking in self.transfers.items():
            if taking.gives_up and taking.closes_at is None:
                self.revoke(transfer_id)
            if taking.closes_at is not None and taking.closes_at <= trio.current_time():
                taking.incoming.is_revoked = True
            if taking.incoming.is_over:
                over.append(transfer_id)
        for transfer_id in over:
            self.wire.shut(self, transfer_id)
            del self.transfers[transfer_id]
        return over

    def verify(self, rows: Rows, expected: int) -> bool:
        return checksum(rows) == expected


class Wire:
    """All transfers of a cluster. `corrupt` and `lose` say how many of the next frames are to be harmed, `refuse` how
    many transfers. A calm one delivers at once and in order."""

    def __init__(self, rng: random.Random, *, is_calm: bool) -> None:
        self.rng = rng
        self._travel_s = (0.0, 0.0) if is_calm else TRAVEL_S
        self.frames: list[Frame] = []
        self.receivers: dict[str, FakeReceiver] = {}
        self.corrupt = self.lose = self.refuse = 0
        self.landed = 0

    def receiver(self, name: str, pool: object) -> FakeReceiver:
        self.receivers[name] = receiver = FakeReceiver(self, name, pool)
        return receiver

    def end_process(self, name: str) -> None:
        """Its endpoint is gone: nothing lands there any more. What it has sent does."""
        receiver = self.receivers.pop(name, None)
        self.frames = [it for it in self.frames if receiver is None or it.outgoing.receiver != name]

    def begin(self, out: Outgoing, destination: bytes) -> Sending:
        return Sending(self, out, destination.decode(), trio.current_time())

    def launch(self, sending: Sending, index: int, rows: Rows) -> None:
        is_lost, self.lose = self.lose > 0, max(0, self.lose - 1)
        lands_at = trio.current_time() + self.rng.uniform(*self._travel_s)
        self.frames.append(Frame(sending, index, rows.copy(), checksum(rows), lands_at, is_lost))

    def shut(self, receiver: FakeReceiver, transfer_id: int) -> None:
        """Nothing lands for that transfer any more."""
        self.frames = [
            it
            for it in self.frames
            if it.outgoing.receiver != receiver.name or it.outgoing.out.transfer_id != transfer_id
        ]

    def settle(self) -> None:
        """Let land what is due."""
        now = trio.current_time()
        due = sorted((it for it in self.frames if it.lands_at <= now), key=lambda it: it.lands_at)
        for frame in due:
            self.frames.remove(frame)
            if not frame.is_lost:
                self._land(frame)

    def _land(self, frame: Frame) -> None:
        sending = frame.outgoing
        receiver, taking = self.receivers[sending.receiver], sending.transfer
        if taking is None or frame.index in taking.incoming.arrived:
            return
        rows = frame.rows
        if self.corrupt:
            self.corrupt -= 1
            rows = rows.copy()
            rows[self.rng.randrange(len(rows))] ^= np.uint64(1 << self.rng.randrange(64))
        page = taking.incoming.pages[frame.index]
        receiver.pool.overwrite(page, rows)  # type: ignore[attr-defined]
        self.landed += 1
        if receiver.verify(rows, frame.checksum):
            taking.incoming.arrived.add(frame.index)
            sending.out.delivered.add(frame.index)
        elif sending.attempts.get(frame.index, 0) >= ATTEMPTS_MAX:
            sending.cancel("a page arrived wrong again and again")
        else:
            sending.sent_at.pop(frame.index, None)
