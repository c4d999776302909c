"""Commands of one worker epoch: numbered, kept until acknowledged, and sent again after a loss.

A worker applies each command once and in order (I4) and acknowledges cumulatively. Every loss - a full queue, a cut
link, a gap that the worker reports - has one remedy: move the send cursor back. Go-back-N rather than selective repeat:
links are ordered, and a rare loss affects all commands behind it.

    acknowledged          in flight                unsent
    ─────────────┤ first_unacked ......... ├ cursor ....... ├ next
      forgotten          kept                     kept

Pure. No clock (times are arguments), no socket.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from protocol.errors import CapacityError, InternalError, ProtocolError
from protocol.messages import (
    CLIENT_MESSAGE_BYTES_MAX,
    WARM_START_BYTES_MAX,
    WORKER_MESSAGE_BYTES_MAX,
    Admit,
    Command,
    Grant,
)

#: Commands kept for one worker. Beyond it, the worker has not kept up for minutes and counts as down.
COMMANDS_UNACKED_MAX: Final = 65_536
#: One message to the worker carries at most this many commands and about this many bytes, and always one command.
BATCH_COMMANDS_MAX: Final = 256
BATCH_BYTES_MAX: Final = 1024 * 1024
#: Upper bound of a command without its arrays and strings, encoded.
COMMAND_BYTES_FIXED: Final = 256

#: Largest Admit: the arrays of its tokens and its warm start.
ADMIT_BYTES_MAX: Final = CLIENT_MESSAGE_BYTES_MAX + WARM_START_BYTES_MAX

assert BATCH_BYTES_MAX + ADMIT_BYTES_MAX < WORKER_MESSAGE_BYTES_MAX  # one more Admit always fits


@dataclass(slots=True)
class _Entry:
    command: Command
    first_sent_at: float | None = None
    sent_at: float | None = None


class CommandBatch(NamedTuple):
    """Commands numbered `first`, `first` + 1, ...; `repeated` of them were sent before."""

    first: int
    commands: tuple[Command, ...]
    repeated: int


class CommandLog:
    """Numbers start at 1. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque()
        self._first_unacked = 1
        self._cursor = 1
        self._sent_top = 0

    @property
    def acknowledged(self) -> int:
        return self._first_unacked - 1

    @property
    def unacknowledged(self) -> int:
        return len(self._entries)

    def append(self, command: Command) -> int:
        """Number `command`. Raises CapacityError, unchanged, when COMMANDS_UNACKED_MAX wait for the worker."""
        if len(self._entries) >= COMMANDS_UNACKED_MAX:
            raise CapacityError(
                f"{COMMANDS_UNACKED_MAX} commands wait for an acknowledgement",
                field="commands",
                value=self._first_unacked,
            )
        self._entries.append(_Entry(command))
        return self._first_unacked + len(self._entries) - 1

    def take(self, now: float) -> CommandBatch | None:
        """The next commands to send, counted as sent at `now`; None when there are none."""
        skip = self._cursor - self._first_unacked
        picked: list[Command] = []
        size = 0
        for entry in islice(self._entries, skip, skip + BATCH_COMMANDS_MAX):
            size += command_bytes(entry.command)
            if picked and size > BATCH_BYTES_MAX:
                break
            if entry.first_sent_at is None:
                entry.first_sent_at = now
            entry.sent_at = now
            picked.append(entry.command)
        if not picked:
            return None
        repeated = min(max(self._sent_top - self._cursor + 1, 0), len(picked))
        batch = CommandBatch(self._cursor, tuple(picked), repeated)
        self._cursor += len(picked)
        self._sent_top = max(self._sent_top, self._cursor - 1)
        return batch

    def untake(self, batch: CommandBatch) -> None:
        """`batch`, the last one taken, was not sent: it will be taken again."""
        self._cursor = max(batch.first, self._first_unacked)

    def acknowledge(self, number: int, now: float) -> float | None:
        """All commands up to `number` were applied. Returns the seconds since the last of them was first sent.

        None when nothing new was acknowledged. Raises ProtocolError when `number` was never sent.
        """
        if number > self._sent_top:
            raise ProtocolError(
                f"command {number} was never sent, the last was {self._sent_top}", field="command_ack", value=number
            )
        entry = None
        while self._first_unacked <= number:
            entry = self._entries.popleft()
            self._first_unacked += 1
        self._cursor = max(self._cursor, self._first_unacked)
        if entry is None or entry.first_sent_at is None:
            return None
        return now - entry.first_sent_at

    def replay(self, first: int) -> None:
        """The worker saw a gap: send from `first` on again. Raises ProtocolError when `first` is not kept any more."""
        if not self._first_unacked <= first <= self._sent_top + 1:
            raise ProtocolError(
                f"commands {self._first_unacked}..{self._sent_top} can be sent again", field="first", value=first
            )
        self._go_back(first)

    def replay_overdue(self, now: float, limit_s: float) -> bool:
        """Send everything in flight again when the oldest has waited `limit_s` for its acknowledgement."""
        if not self._entries or self._cursor == self._first_unacked:
            return False
        sent_at = self._entries[0].sent_at
        if sent_at is None or now - sent_at < limit_s:
            return False
        self._go_back(self._first_unacked)
        return True

    def reconnect(self, command_ack: int, now: float) -> None:
        """A new connection of the same epoch: send all commands after `command_ack` again, as they may be lost.

        Raises ProtocolError when `command_ack` was never sent, or is lower than an earlier acknowledgement.
        """
        if command_ack < self.acknowledged:
            raise ProtocolError(
                f"command {self.acknowledged} was acknowledged before", field="command_ack", value=command_ack
            )
        self.acknowledge(command_ack, now)
        self._go_back(self._first_unacked)

    def rebase(self, command_ack: int) -> None:
        """The worker has applied `command_ack` commands of an earlier incarnation. Call before the first send."""
        if self._sent_top:
            raise InternalError(f"command log: {self._sent_top} commands were sent", value=command_ack)
        self._first_unacked = self._cursor = command_ack + 1
        self._sent_top = command_ack

    def check_invariants(self) -> None:
        top = self._first_unacked + len(self._entries)
        if not self._first_unacked <= self._cursor <= top or not self.acknowledged <= self._sent_top < top:
            raise InternalError(
                f"command log: {self.acknowledged} acknowledged, {self._cursor} next, {self._sent_top} sent, {top} end"
            )

    def _go_back(self, number: int) -> None:
        self._cursor = min(self._cursor, number)


def command_bytes(command: Command) -> int:
    """Approximate size of the encoded `command`; too low by a few per cent at most."""
    match command:
        case Admit(prompt=prompt, generated=generated, host_pages=pages, sampling=sampling, request_id=request_id):
            chars = sum(map(len, sampling.stop)) + len(request_id) + len(sampling.grammar) + len(command.owner)
            return COMMAND_BYTES_FIXED + sum(map(len, (prompt, generated, pages, command.warm_start))) + 4 * chars
        case Grant(host_pages=pages):
            return COMMAND_BYTES_FIXED + len(pages)
        case _:
            return COMMAND_BYTES_FIXED
