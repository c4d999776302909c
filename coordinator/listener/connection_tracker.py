"""Connections of one listener, from accept to close: libzmq accepts any number and does not count them. Pure.

A connection is identified by its descriptor, from libzmq's events. It has INTRODUCE_LIMIT_S to send a hello that is
accepted. Then it belongs to a user, and connections per user are bounded. A connection that is overdue or above a bound
is ended by shutting its descriptor down (connection_events.py).

    came ──► newcomer ──introduce──► of a user ──► left
                └─ overdue, or above NEWCOMERS_MAX: cut

libzmq ends connections that do not finish the handshake (router.py, HANDSHAKE_LIMIT_MS). Until then they count as
newcomers here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Final

from protocol.errors import CapacityError

#: From accept to the accepted hello, which may wait behind many others after a restart of the coordinator.
INTRODUCE_LIMIT_S: Final = 30.0
#: Newcomers at once, in addition to `connections_max`.
NEWCOMERS_MAX: Final = 256


class ConnectionTracker:
    """Admits `connections_max` introduced connections, at most `per_user_max` of one user.

    `per_user_max` does not apply to connections without a user ("").
    """

    def __init__(self, connections_max: int, per_user_max: int) -> None:
        self.connections_max = connections_max
        self.per_user_max = per_user_max
        self._newcomers: dict[int, float] = {}
        self._users: dict[int, str] = {}
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._newcomers) + len(self._users)

    def came(self, descriptor: int, now: float) -> None:
        """A connection was accepted. An earlier connection with this descriptor has closed."""
        self.left(descriptor)
        self._newcomers[descriptor] = now

    def left(self, descriptor: int) -> None:
        self._newcomers.pop(descriptor, None)
        user = self._users.pop(descriptor, None)
        if user is not None:
            self._counts[user] -= 1
            if not self._counts[user]:
                del self._counts[user]

    def introduce(self, descriptor: int, user: str) -> None:
        """A hello was accepted. A second one, and one of a connection that has closed, change nothing.

        Raises CapacityError above a bound; the connection stays a newcomer then.
        """
        if descriptor not in self._newcomers:
            return
        for count, bound, whose in (
            (len(self._users), self.connections_max, "all peers"),
            (self._counts[user] if user else 0, self.per_user_max, user),
        ):
            if count >= bound:
                raise CapacityError(
                    f"{count} connections of {whose} are open", field="connections", value=bound, remedy="close some"
                )
        del self._newcomers[descriptor]
        self._users[descriptor] = user
        self._counts[user] += 1

    def overdue(self, now: float) -> list[int]:
        """Newcomers past INTRODUCE_LIMIT_S, and the oldest above NEWCOMERS_MAX. They are tracked until `left`."""
        late = [it for it, came in self._newcomers.items() if now - came > INTRODUCE_LIMIT_S]
        surplus = list(self._newcomers)[: max(len(self._newcomers) - NEWCOMERS_MAX, 0)]
        return sorted({*late, *surplus})

    def of(self, users: Collection[str]) -> list[int]:
        return [descriptor for descriptor, user in self._users.items() if user in users]

    def check_invariants(self) -> None:
        """Raise AssertionError unless the counts agree with the connections."""
        assert self._counts == Counter(self._users.values())
        assert not self._newcomers.keys() & self._users.keys()
