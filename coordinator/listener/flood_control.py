"""Flood control of a listener: messages above a sender's rate are dropped, and only the first of them is answered;
a message that cannot be handled is counted and answered.

A message that is refused takes longer than one that is answered. So other tasks, those of the other listeners too, have
their turn after every REFUSED_PER_TURN of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import trio

from basics.token_bucket import cost_of
from coordinator.listener.dropped import Dropped
from coordinator.listener.rate_limiter import RateLimiter, RateVerdict
from coordinator.listener.router import Received, RouterSocket
from protocol.errors import CapacityError, HiSparseError

#: Reasons under which dropped messages and ended connections are counted.
RATE: Final = "rate"
CUT: Final = "cut"
REFUSED_PER_TURN: Final = 2


class FloodControl:
    """One per listener. `answer` answers a message with an error; a full socket may drop that."""

    def __init__(
        self,
        socket: RouterSocket,
        rate_limiter: RateLimiter,
        dropped: Dropped,
        answer: Callable[[Received, HiSparseError], None],
    ) -> None:
        self._socket = socket
        self._rate_limiter = rate_limiter
        self._dropped = dropped
        self._answer = answer
        self._refused = 0

    @property
    def senders(self) -> int:
        """Number of senders whose rates are known."""
        return len(self._rate_limiter)

    def _admits(self, received: Received, now: float) -> bool:
        """Return whether to read `received`. The rate is per user, over all of its connections; without keys, per
        connection.

        A message that is not read is counted. By its RateVerdict it is answered, ignored, or its connection is ended.
        """
        sender = received.user.encode() or received.peer
        match self._rate_limiter.judge(sender, received.peer, cost_of(received.frame_bytes), now):
            case RateVerdict.TAKE:
                return True
            case RateVerdict.REFUSE:
                self._dropped.note(
                    RATE, received.descriptor, f"above {self._rate_limiter.per_s:g} messages a second", now
                )
                self._answer(received, self._error())
            case RateVerdict.IGNORE:
                self._dropped.note(RATE, received.descriptor, "still too many messages", now)
            case RateVerdict.CUT:
                self._dropped.note(CUT, received.descriptor, "went on sending too many messages", now)
                self._socket.connection_events.cut(received.descriptor)
        return False

    async def read(self, batch: Iterable[Received], receive: Callable[[Received], None]) -> None:
        """Have `receive` handle each message of `batch` that is admitted; refuse those for which it raises.

        Not cancelled: the rest of the batch would be lost.
        """
        for received in batch:
            if not self._admits(received, trio.current_time()):
                continue
            try:
                receive(received)
            except HiSparseError as error:
                self.refuse(received, error)
                self._refused += 1
                if self._refused >= REFUSED_PER_TURN:
                    self._refused = 0
                    await trio.lowlevel.cancel_shielded_checkpoint()

    def refuse(self, received: Received, error: HiSparseError) -> None:
        """Count a message that was read and is not accepted, and answer it."""
        self._dropped.note(error.code, received.descriptor, str(error), trio.current_time())
        self._answer(received, error)

    def _error(self) -> CapacityError:
        limiter = self._rate_limiter
        return CapacityError(
            f"above the rate of {limiter.per_s:g} messages a second, {limiter.burst:g} at once: messages are dropped",
            field="messages_per_s",
            value=limiter.per_s,
            remedy="send fewer or smaller messages over one lasting connection, or raise coordinator.messages_per_s",
        )
