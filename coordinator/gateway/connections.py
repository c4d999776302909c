"""Connections of clients and admins: their users, their outboxes, and whether their sockets accept messages.

A ROUTER reports neither new nor lost peers: a connection opens with its Hello, and is gone when a message to it has no
route. A reply that a full socket refuses waits in the connection's outbox. Outboxes are bounded in messages and bytes,
and so are those of all connections together, with a share for each user; beyond a bound the connection is dropped.
Deliveries never wait: `offer` returns whether one was sent; if not, the caller's cursor stays.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from basics.rooms import RoomUse
from basics.shares import may_take
from coordinator.listener.router import RouterSocket, Sent
from protocol.errors import CapacityError
from protocol.messages import PROTOCOL_VERSION

#: Replies that wait for a client whose socket is full.
OUTBOX_MESSAGES_MAX: Final = 4_096
OUTBOX_BYTES_MAX: Final = 64 * 1024 * 1024
#: Replies that wait for all clients together.
OUTBOXES_BYTES_MAX: Final = 1024 * 1024 * 1024
#: Roles, which decide what a connection may do.
CLIENT: Final = "client"
ADMIN: Final = "admin"


@dataclass(eq=False)
class ClientConnection:
    """One peer of one socket. `index` is small and reused, for arrays over connections.

    `user` is the user of the connection's key, who owns its requests. `name` is the unverified name in its Hello, and
    `address` where it came from, for logs. `protocol` is the version that it speaks.
    `sent_at` is the time of the last message that its socket accepted.
    """

    index: int
    router: RouterSocket
    peer: bytes
    role: str
    name: str
    sent_at: float
    user: str = ""
    address: str = ""
    protocol: int = PROTOCOL_VERSION
    outbox: deque[bytes] = field(default_factory=deque)
    outbox_bytes: int = 0
    is_gone: bool = False

    @property
    def visible_user(self) -> str | None:
        """User whose requests this connection may see and change; None: all (admin)."""
        return None if self.role == ADMIN else self.user

    @property
    def owner(self) -> str:
        return f"{self.user or self.role} {self.name}".rstrip()


class ClientConnections:
    """Connections of clients and admins, at most `limit`. `on_drop(connection, reason)` is called for each that is
    dropped."""

    def __init__(self, limit: int, on_drop: Callable[[ClientConnection, str], None]) -> None:
        self.limit = limit
        self.is_blocked: npt.NDArray[np.bool_] = np.zeros(limit, np.bool_)
        self._on_drop = on_drop
        self._free = list(range(limit))[::-1]
        self._outbox_bytes: Counter[str] = Counter()  # by user
        self._by_peer: dict[tuple[str, bytes], ClientConnection] = {}
        self._by_index: dict[int, ClientConnection] = {}

    def __len__(self) -> int:
        return len(self._by_index)

    def find(self, role: str, peer: bytes) -> ClientConnection | None:
        return self._by_peer.get((role, peer))

    def __getitem__(self, index: int) -> ClientConnection:
        return self._by_index[index]

    def get(self, index: int) -> ClientConnection | None:
        return self._by_index.get(index)

    def open(
        self,
        router: RouterSocket,
        peer: bytes,
        role: str,
        name: str,
        now: float,
        user: str = "",
        *,
        address: str = "",
        protocol: int = PROTOCOL_VERSION,
    ) -> ClientConnection:
        """A new connection. Raises CapacityError when `limit` are open."""
        if not self._free:
            raise CapacityError(
                f"{self.limit} connections are open",
                field="connections_max",
                value=self.limit,
                remedy="close some, or raise coordinator.connections_max",
            )
        connection = ClientConnection(self._free.pop(), router, peer, role, name, now, user, address, protocol)
        self._by_peer[role, peer] = connection
        self._by_index[connection.index] = connection
        return connection

    def drop(self, connection: ClientConnection, reason: str) -> None:
        """Forget it. Idempotent."""
        if connection.is_gone:
            return
        connection.is_gone = True
        del self._by_index[connection.index]
        del self._by_peer[connection.role, connection.peer]
        self.is_blocked[connection.index] = False
        self._count(connection, -connection.outbox_bytes)
        connection.outbox.clear()
        self._free.append(connection.index)
        self._on_drop(connection, reason)

    def send(self, connection: ClientConnection, frame: bytes, now: float) -> None:
        """Send `frame`, or append it to the outbox; drop a connection that is gone or whose outbox is full."""
        if self.offer(connection, frame, now) or connection.is_gone:
            return
        connection.outbox.append(frame)
        self._count(connection, len(frame))
        held, used = self._outbox_bytes[connection.user], self._outbox_bytes.total()
        has_room = may_take(0, held=held, used=used, limit=OUTBOXES_BYTES_MAX)
        if not has_room or len(connection.outbox) > OUTBOX_MESSAGES_MAX or connection.outbox_bytes > OUTBOX_BYTES_MAX:
            self.drop(connection, "does not read")

    def _count(self, connection: ClientConnection, more_bytes: int) -> None:
        connection.outbox_bytes += more_bytes
        self._outbox_bytes[connection.user] += more_bytes
        if not self._outbox_bytes[connection.user]:
            del self._outbox_bytes[connection.user]

    def offer(self, connection: ClientConnection, frame: bytes, now: float) -> bool:
        """Send `frame` now. False: it was not sent; the connection is gone, or blocked until `unblock`."""
        if connection.is_gone or self.is_blocked[connection.index]:
            return False
        match connection.router.send(connection.peer, frame):
            case Sent.OK:
                connection.sent_at = now
                return True
            case Sent.FULL:
                self.is_blocked[connection.index] = True
            case Sent.GONE:
                self.drop(connection, "gone")
        return False

    def unblock(self, now: float) -> None:
        """Send the outboxes of blocked connections; one whose outbox empties is not blocked any more."""
        for index in np.flatnonzero(self.is_blocked):
            connection = self._by_index[int(index)]
            self.is_blocked[index] = False
            while connection.outbox and self.offer(connection, connection.outbox[0], now):
                self._count(connection, -len(connection.outbox.popleft()))

    def probe(self, frame: bytes, idle_since: float, now: float) -> None:
        """Send `frame` to connections sent nothing after `idle_since`: only a failed send shows that a peer is gone."""
        for connection in tuple(self._by_index.values()):
            if connection.sent_at <= idle_since:
                self.offer(connection, frame, now)

    def indices_of(self, user: str) -> list[int]:
        """List the indices of the connections of `user`."""
        return [index for index, connection in self._by_index.items() if connection.user == user]

    def room_use(self) -> dict[str, RoomUse]:
        return {
            "connections": RoomUse(len(self), self.limit),
            "outbox_bytes": RoomUse(self._outbox_bytes.total(), OUTBOXES_BYTES_MAX),
        }

    def count_by_role(self) -> Counter[str]:
        return Counter(connection.role for connection in self._by_index.values())
