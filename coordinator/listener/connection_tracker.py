"""Connections of one listener, from the moment they are made: libzmq takes any number and never says how many. Pure.

A connection is known by its descriptor, from libzmq's events that it came and left. It has INTRODUCE_LIMIT_S to say a
hello that is accepted; then it is a user's, of which each may have so many. Whoever is overdue or too much is shut out
by shutting down the descriptor, which libzmq takes for the peer's hanging up.

    came ──► newcomer ──introduce──► user's ──► left
                └─ overdue, or one too many: cut

Half-open connections that never finish a handshake are libzmq's to end (sockets.py, HANDSHAKE_LIMIT_MS), and are
newcomers here until it does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Final

from protocol.errors import CapacityError

#: From the connection to the accepted hello, which may wait behind many when a coordinator comes back.
INTRODUCE_LIMIT_S: Final = 30.0
#: Newcomers at once, on top of those who may be introduced.
NEWCOMERS_MAX: Final = 256


class ConnectionTracker:
    """`connections_max` introduced ones, `per_user_max` of them under one name; those without a name ("") are not
    counted together."""

    def __init__(self, connections_max: int, per_user_max: int) -> None:
        self.connections_max = connections_max
        self.per_user_max = per_user_max
        self._newcomers: dict[int, float] = {}
        self._users: dict[int, str] = {}
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._newcomers) + len(self._users)

    def came(self, descriptor: int, now: float) -> None:
        """A connection was made. Whatever had that number before has left, or will not be heard of again."""
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
        """It has said hello; again is nothing new, and of one that has left already nothing is kept.

        Raises CapacityError when there are too many, and then it stays a newcomer.
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
        """Newcomers that have waited too long, and the oldest of those that are too many. They stay until they left."""
        late = [it for it, came in self._newcomers.items() if now - came > INTRODUCE_LIMIT_S]
        surplus = list(self._newcomers)[: max(len(self._newcomers) - NEWCOMERS_MAX, 0)]
        return sorted({*late, *surplus})

    def of(self, users: Collection[str]) -> list[int]:
        return [descriptor for descriptor, user in self._users.items() if user in users]

    def check_invariants(self) -> None:
        """Raise AssertionError unless the counts are what is there."""
        assert self._counts == Counter(self._users.values())
        assert not self._newcomers.keys() & self._users.keys()
