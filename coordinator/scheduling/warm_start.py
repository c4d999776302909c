"""Tokens that requests off their workers will ask for first: kept with them, until they are admitted again. Pure.

A hint, as long as half a megabyte, which nothing depends on: in memory alone, so that a coordinator that restarts has
none, and bounded over all requests. Past the bound what comes is not kept: the request that waits longest goes first,
so what is there is needed sooner.
"""

from __future__ import annotations

from typing import Final

from protocol.errors import InternalError
from protocol.messages import WARM_START_BYTES_MAX

#: Of all requests together; a thousand prompts of a model with 61 index groups and top-k 2048.
KEPT_BYTES_MAX: Final = 128 * 1024 * 1024

assert WARM_START_BYTES_MAX < KEPT_BYTES_MAX


class WarmStarts:
    """Warm starts by request index; unread. `kept_bytes` is their sum."""

    def __init__(self) -> None:
        self.kept_bytes = 0
        self._kept: dict[int, bytes] = {}

    def keep(self, request_index: int, packed: bytes) -> None:
        """Replace what was kept of `request_index`; nothing is kept past a bound."""
        self.take(request_index)
        if packed and len(packed) <= min(WARM_START_BYTES_MAX, KEPT_BYTES_MAX - self.kept_bytes):
            self._kept[request_index] = packed
            self.kept_bytes += len(packed)

    def take(self, request_index: int) -> bytes:
        """Return what is kept of `request_index`, and forget it; empty if there is none."""
        packed = self._kept.pop(request_index, b"")
        self.kept_bytes -= len(packed)
        return packed

    def check_invariants(self) -> None:
        """InternalError unless the sum is right and within its bound."""
        if self.kept_bytes != sum(map(len, self._kept.values())) or self.kept_bytes > KEPT_BYTES_MAX:
            raise InternalError("a wrong sum", field="kept_bytes", value=self.kept_bytes)
