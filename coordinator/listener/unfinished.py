"""Connections that hold an unfinished message, and those of them that are ended. Pure.

libzmq keeps the parts of a multipart message to itself until the last one has arrived. Its limits are per part
(ZMQ_MAXMSGSIZE) and per whole message (ZMQ_RCVHWM), so a peer that never sends the last part grows the process without
bound. Nor does the application see the parts: with CURVE even the flag that announces another part is encrypted.

But the bytes can be counted from both sides. The kernel knows how many bytes libzmq has read from a connection
(connection_events.py), and the router knows which messages it took from it. The difference is what libzmq holds:

    pending = bytes read from the connection - bytes of its messages taken

    bytes    pending above the largest message that libzmq accepts: no single part is so large
    time     pending for UNFINISHED_LIMIT_S
    memory   the process has grown by GROWTH_BYTES_MAX since the message began. Parts of a few bytes occupy up to
             32 times their size, so a bound on bytes does not bound memory; and many connections add up

The first rule that holds ends the connection, and libzmq frees what it held. A message that is complete and waits for
the router is not unfinished. So a connection is judged only when the router has emptied the socket, or has taken more
messages meanwhile than there are connections, because libzmq takes them from its connections in turn.

Rejected: sockets that know no parts (CLIENT, SERVER: in no release of libzmq's stable interface, and they drop the
parts only when the last has arrived); a proxy that reads the frames (blind to CURVE's, and every byte would pass
Python); a smaller ZMQ_MAXMSGSIZE (per part).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

#: From the first byte of a message to its last: 8 MiB at 1.2 Mbit/s.
UNFINISHED_LIMIT_S: Final = 60.0
#: Growth of the process since an unfinished message began. Half of it for connections without an accepted hello.
GROWTH_BYTES_MAX: Final = 256 << 20
#: Pending bytes that are not judged. A handshake stays pending, since no message is taken for it.
SLACK_BYTES: Final = 4_096
#: What CURVE adds to a message: name of the command, nonce, authenticator, flags.
CURVE_BYTES: Final = 8 + 8 + 16 + 1


def wire_bytes(part_bytes: int, *, is_curve: bool) -> int:
    """Bytes of a part on the connection, its frame's header included."""
    body = part_bytes + CURVE_BYTES if is_curve else part_bytes
    return body + (9 if body > 255 else 2)


@dataclass(slots=True)
class _CountedConnection:
    """`since`, `turn`: when its unfinished message began, and how many messages of all the router had taken then.
    `memory_bytes`: least memory of the process since."""

    since: float
    turn: int
    memory_bytes: int
    #: False: libzmq had read bytes before the first look, and no message was taken since.
    is_exact: bool
    pending_bytes: int = 0
    #: Of messages taken since the last look.
    taken_bytes: int = 0
    is_introduced: bool = False

    @property
    def is_unfinished(self) -> bool:
        return not self.is_exact or self.pending_bytes > SLACK_BYTES

    def look(self, arrived_bytes: int, memory_bytes: int, now: float, turn: int) -> None:
        self.pending_bytes += arrived_bytes
        has_taken = self.taken_bytes > 0
        if has_taken:
            self.pending_bytes = max(self.pending_bytes - self.taken_bytes, 0)
            self.taken_bytes = 0
            self.is_exact = True
        if has_taken or not self.is_unfinished:
            self.since, self.turn, self.memory_bytes = now, turn, memory_bytes
        self.memory_bytes = min(self.memory_bytes, memory_bytes)


class UnfinishedMessages:
    """The connections of one listener, by descriptor. `bytes_max`: the largest message that libzmq accepts."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._connections: dict[int, _CountedConnection] = {}
        self._turn = 0
        self._memory_bytes = 0

    def came(self, descriptor: int, memory_bytes: int, now: float, *, is_exact: bool) -> None:
        """A connection was accepted. `is_exact`: its bytes are counted from the first one on."""
        self._connections[descriptor] = _CountedConnection(now, self._turn, memory_bytes, is_exact)

    def introduce(self, descriptor: int) -> None:
        """Its hello was accepted."""
        if connection := self._connections.get(descriptor):
            connection.is_introduced = True

    def left(self, descriptor: int) -> bool:
        """The connection has ended. Returns whether the memory of an unfinished message is free now."""
        connection = self._connections.pop(descriptor, None)
        return connection is not None and connection.is_unfinished

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._connections

    def took(self, descriptor: int, taken_bytes: int) -> None:
        """The router took a message that had so many bytes on the connection."""
        self._turn += 1
        if connection := self._connections.get(descriptor):
            connection.taken_bytes += taken_bytes

    def pending_bytes(self, descriptor: int) -> int:
        """Bytes that libzmq held of the connection at the last look."""
        return self._connections[descriptor].pending_bytes

    def look(self, arrived_bytes: Mapping[int, int], memory_bytes: int, now: float) -> None:
        """Bytes that libzmq read since the last look, by descriptor, and the memory of the process."""
        self._memory_bytes = memory_bytes
        for descriptor, count in arrived_bytes.items():
            if connection := self._connections.get(descriptor):
                connection.look(count, memory_bytes, now, self._turn)

    def overdue(self, now: float, *, is_empty: bool) -> list[tuple[int, str]]:
        """Connections to end, each with the rule. `is_empty`: since the look, no whole message waits for the router."""
        turns = len(self._connections)
        judged = (
            (descriptor, self._broken_rule(it, now))
            for descriptor, it in self._connections.items()
            if it.is_unfinished and (is_empty or self._turn - it.turn > turns)
        )
        return [(descriptor, rule) for descriptor, rule in judged if rule]

    def _broken_rule(self, connection: _CountedConnection, now: float) -> str:
        growth_bytes = self._memory_bytes - connection.memory_bytes
        growth_bytes_max = GROWTH_BYTES_MAX if connection.is_introduced else GROWTH_BYTES_MAX // 2
        if connection.pending_bytes > self._bytes_max + SLACK_BYTES:
            return f"{connection.pending_bytes} bytes of an unfinished message, above {self._bytes_max}"
        if now - connection.since > UNFINISHED_LIMIT_S:
            return f"a message unfinished for {now - connection.since:.0f} s, above {UNFINISHED_LIMIT_S:g}"
        if growth_bytes > growth_bytes_max:
            return f"memory grew by {growth_bytes >> 20} MiB during a message, above {growth_bytes_max >> 20}"
        return ""
