"""Dropped messages: each is counted; one a second at most is logged, so that no peer can flood the log."""

from __future__ import annotations

from collections import Counter
from typing import Final

from coordinator.listener.peer_address import peer_address
from protocol.logs import fields, logger

LOG_INTERVAL_S: Final = 1.0

log = logger("coordinator.listener.dropped")


class Dropped:
    """`counter` is keyed by (socket, reason). Reasons are few, because they label a metric."""

    def __init__(self, socket: str, counter: Counter[tuple[str, str]]) -> None:
        self._socket = socket
        self._counter = counter
        self._quiet_until = float("-inf")
        self._unlogged = 0

    def note(self, reason: str, peer: int | str, detail: str, now: float) -> None:
        """Count a dropped message; log it unless another was logged less than LOG_INTERVAL_S ago.

        `peer`: the descriptor of its connection, or the address that is known.
        """
        self._counter[self._socket, reason] += 1
        if now < self._quiet_until:
            self._unlogged += 1
            return
        address = peer if isinstance(peer, str) else peer_address(peer)
        log.warning(
            "message dropped",
            extra=fields(socket=self._socket, reason=reason, peer=address, detail=detail, unlogged=self._unlogged),
        )
        self._quiet_until = now + LOG_INTERVAL_S
        self._unlogged = 0
