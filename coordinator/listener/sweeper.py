"""The sweeper: ends connections of all listeners that say nothing, or hold an unfinished message.

Counting the bytes of a connection takes 15 us. So bytes are counted every LOOK_INTERVAL_S, and at once when the process
has grown by GROWTH_BYTES: a peer that fills memory is found by its effect.

glibc keeps what libzmq has freed. So it is asked to return its free memory before a look that follows the end of a
connection with an unfinished message, and once after FREEING_S, since growth is judged then; and whenever the process
has grown by TRIM_BYTES since the last time. It takes up to 15 ms, in a thread, during which the loop waits for memory.
So it is asked every TRIM_INTERVAL_S at most, and at once when the process has grown by GROWTH_BYTES.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import trio

from basics.process_memory import resident_bytes, return_memory
from coordinator.listener.dropped import UNKNOWN, Dropped
from coordinator.listener.router import RouterSocket

#: How often connections without a hello are looked for, and unfinished messages.
SWEEP_INTERVAL_S: Final = 0.25
LOOK_INTERVAL_S: Final = 1.0
#: How often the process's memory is read.
GROWTH_INTERVAL_S: Final = 0.05
GROWTH_BYTES: Final = 16 << 20
#: After the end of a connection with an unfinished message, for which libzmq may still be freeing memory.
FREEING_S: Final = 5.0
TRIM_BYTES: Final = 4 << 20
TRIM_INTERVAL_S: Final = 2.0

NO_HELLO: Final = "no hello"
UNFINISHED: Final = "unfinished"


class Sweeper:
    """`sockets` and where ended connections are noted, by role."""

    def __init__(self, sockets: Mapping[str, RouterSocket], dropped: Mapping[str, Dropped]) -> None:
        self._sockets = sockets
        self._dropped = dropped
        self._trimmed_bytes = 0
        self._trimmed_at = float("-inf")

    async def run(self) -> None:
        """Sweep until cancelled."""
        async with trio.open_nursery() as nursery:
            for socket in self._sockets.values():
                nursery.start_soon(socket.connection_events.watch)
            look_at = trio.current_time()
            while True:
                has_grown = await self._has_grown()
                for role, socket in self._sockets.items():
                    for _ in range(socket.connection_events.cut_overdue()):
                        self._note(role, NO_HELLO, "no accepted hello in time")
                if has_grown or trio.current_time() >= look_at:
                    look_at = trio.current_time() + LOOK_INTERVAL_S
                    await self._return_memory()
                    self._cut_unfinished()

    async def _has_grown(self) -> bool:
        """Wait for SWEEP_INTERVAL_S, or until the process has grown by GROWTH_BYTES."""
        until = trio.current_time() + SWEEP_INTERVAL_S
        grown_bytes = resident_bytes() + GROWTH_BYTES
        while trio.current_time() < until:
            await trio.sleep(GROWTH_INTERVAL_S)
            if resident_bytes() >= grown_bytes:
                return True
        return False

    async def _return_memory(self) -> None:
        given_up_at = max(socket.connection_events.given_up_at for socket in self._sockets.values())
        now, growth_bytes = trio.current_time(), resident_bytes() - self._trimmed_bytes
        is_due = now >= self._trimmed_at + TRIM_INTERVAL_S or growth_bytes >= GROWTH_BYTES
        if is_due and (growth_bytes > TRIM_BYTES or self._trimmed_at < given_up_at + FREEING_S):
            await trio.to_thread.run_sync(return_memory)
            self._trimmed_bytes, self._trimmed_at = resident_bytes(), now

    def _cut_unfinished(self) -> None:
        for role, socket in self._sockets.items():
            for rule in socket.cut_unfinished():
                self._note(role, UNFINISHED, rule)

    def _note(self, role: str, reason: str, detail: str) -> None:
        self._dropped[role].note(reason, UNKNOWN, detail, trio.current_time())
