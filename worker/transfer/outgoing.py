"""What the sending end remembers of transfers, of their units, and of the receivers that they go to. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from protocol.arrays import Int32Array
from worker.transfer.wire import Begin


class SenderPhase(Enum):
    BEGINNING = "beginning"
    SENDING = "sending"
    STOPPING = "stopping"


@dataclass(slots=True)
class Unit:
    """A unit that was sent and is not delivered. `written`: the engine is done, its checksum is on the way."""

    source: int
    attempt: int = 1
    posted: bool = False
    written: bool = False
    checksum: int = 0
    limit_at: float = 0.0
    resend_at: float = 0.0


@dataclass(slots=True)
class SenderTransfer:
    """`targets` are the destination pages, told by Ready; `posted` counts writes whose end was not seen."""

    peer: str
    begin: Begin
    part_ends: tuple[int, ...]
    engine: str
    limit_at: float
    resend_at: float
    phase: SenderPhase = SenderPhase.BEGINNING
    endpoint: int = 0
    targets: Int32Array | None = None
    units: dict[int, Unit] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)
    parts_left: dict[int, int] = field(default_factory=dict)
    in_flight: set[int] = field(default_factory=set)
    pages_left: int = 0
    posted: int = 0
    reason: str = ""

    def extent(self, unit: int) -> tuple[int, int]:
        """Offset and length of a unit in its page."""
        part = unit % len(self.part_ends)
        offset = self.part_ends[part - 1] if part else 0
        return offset, self.part_ends[part] - offset


@dataclass(slots=True)
class Lane:
    """Units that wait and are in flight to one receiver; since when it has had no transfer. `waiting`: units, by
    transfer. Transfers take turns, so that a short prompt does not wait for all of a long one; the next is first."""

    waiting: dict[int, deque[int]] = field(default_factory=dict)
    units: int = 0
    bytes: int = 0
    idle_at: float | None = None

    def add(self, transfer_id: int, units: Iterable[int]) -> None:
        """Put units behind those that wait of the same transfer."""
        self.waiting.setdefault(transfer_id, deque()).extend(units)

    def take(self, transfer_id: int) -> None:
        """Remove the first unit of a transfer, which goes behind the others then."""
        units = self.waiting.pop(transfer_id)
        units.popleft()
        if units:
            self.waiting[transfer_id] = units
