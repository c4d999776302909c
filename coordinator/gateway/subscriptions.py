"""Subscriptions of connections to requests: one cursor per (connection, request), in arrays over all connections.

A flush compares all cursors with the token log at once and makes one Delivery per connection that has news; connections
without news add no cost. Only committed tokens count, so delivered tokens are in the journal. The cursor of a client
that does not read stays: nothing is queued for the client, and it catches up in bounded pieces when it reads again.

    handle      row of the subscription in these arrays, and its name on the wire
    connection  index of the connection, a small integer given by the gateway
    final       the request is terminal: behind its last token its subscribers get Ended

Pure. Rejected: arrays per connection (a thousand connections with one request each would be a thousand small numpy
calls per flush); a queue per connection (unbounded, or lossy).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from coordinator.tokens.token_log import TokenLog
from protocol.arrays import Int32Array, pack_int32
from protocol.errors import InternalError, WrongState
from protocol.messages import Delivery

#: Most tokens in one Delivery, and words of their rows of log-probabilities: 256 KiB, the pieces
#: of a long output for a client that attaches to it.
DELIVERY_TOKENS_MAX: Final = 65_536
ROWS_INITIAL: Final = 1_024
#: Connection and cursor of a row that is not in use; such a row is never behind the token log.
NO_CONNECTION: Final = -1
CURSOR_NEVER: Final = np.iinfo(np.int32).max


class Parcel(NamedTuple):
    """News for one connection. Once it was sent, the cursors of `rows` advance by `counts`.

    `is_partial`: the connection has more news than one Delivery holds.
    """

    connection: int
    rows: npt.NDArray[np.intp]
    counts: Int32Array
    delivery: Delivery
    is_partial: bool


class Complete(NamedTuple):
    """A subscription that has delivered the last token of a terminal request."""

    connection: int
    handle: int
    request_index: int


class Subscriptions:
    """All subscriptions, owned by the gateway. Reads the token log, never changes it."""

    def __init__(self, log: TokenLog) -> None:
        self._log = log
        self._request_indices: Int32Array = np.zeros(ROWS_INITIAL, np.int32)
        self._connections: Int32Array = np.full(ROWS_INITIAL, NO_CONNECTION, np.int32)
        self._cursors: Int32Array = np.full(ROWS_INITIAL, CURSOR_NEVER, np.int32)
        self._is_final: npt.NDArray[np.bool_] = np.zeros(log.request_indices, np.bool_)
        self._rows: dict[tuple[int, int], int] = {}
        self._free: list[int] = []
        self._top = 0

    def __len__(self) -> int:
        return len(self._rows)

    # ------------------------------------------------------------ subscriptions

    def count_of(self, connections: list[int]) -> int:
        """Subscriptions of these connections."""
        return int(np.count_nonzero(np.isin(self._connections[: self._top], connections)))

    def add(self, connection: int, request_index: int, cursor: int) -> int:
        """Subscribe from position `cursor` on; returns the handle. Raises WrongState when it is subscribed already."""
        if (connection, request_index) in self._rows:
            raise WrongState("this connection is attached already", remedy="detach first, or use another connection")
        row = self._take_row()
        self._rows[connection, request_index] = row
        self._request_indices[row] = request_index
        self._connections[row] = connection
        self._cursors[row] = cursor
        return row

    def remove(self, connection: int, request_index: int) -> None:
        """Unsubscribe; nothing happens when it was not subscribed."""
        row = self._rows.pop((connection, request_index), None)
        if row is not None:
            self._connections[row] = NO_CONNECTION
            self._cursors[row] = CURSOR_NEVER
            self._free.append(row)

    def remove_connection(self, connection: int) -> None:
        for row in np.flatnonzero(self._connections[: self._top] == connection):
            self.remove(connection, int(self._request_indices[row]))

    def finish(self, request_index: int) -> None:
        """The request is terminal and its tokens are all in the log."""
        self._is_final[request_index] = True

    def forget(self, request_index: int) -> list[int]:
        """The request index is about to be reused: drop its subscriptions. Returns their connections."""
        self._is_final[request_index] = False
        rows = np.flatnonzero(
            (self._request_indices[: self._top] == request_index) & (self._connections[: self._top] != NO_CONNECTION)
        )
        readers = [int(connection) for connection in self._connections[rows]]
        for connection in readers:
            self.remove(connection, request_index)
        return readers

    def _take_row(self) -> int:
        if self._free:
            return self._free.pop()
        if self._top == len(self._request_indices):
            self._request_indices = np.concatenate([self._request_indices, np.zeros_like(self._request_indices)])
            self._connections = np.concatenate([self._connections, np.full_like(self._connections, NO_CONNECTION)])
            self._cursors = np.concatenate([self._cursors, np.full_like(self._cursors, CURSOR_NEVER)])
        self._top += 1
        return self._top - 1

    # ------------------------------------------------------------ news

    def parcels(self, is_blocked: npt.NDArray[np.bool_]) -> Iterator[Parcel]:
        """One parcel for each connection that is behind and not blocked (indexed by connection).

        Cursors move by `advance` only. The consumer may remove subscriptions of connections it has been given.
        """
        behind = np.flatnonzero(self._log.committed[self._request_indices[: self._top]] > self._cursors[: self._top])
        behind = behind[~is_blocked[self._connections[behind]]]
        if not len(behind):
            return
        behind = behind[np.argsort(self._connections[behind], kind="stable")]
        connections = self._connections[behind]
        borders = np.flatnonzero(np.diff(connections)) + 1
        for rows in np.split(behind, borders):
            yield self._parcel(int(self._connections[rows[0]]), rows)

    def _parcel(self, connection: int, rows: npt.NDArray[np.intp]) -> Parcel:
        request_indices, starts = self._request_indices[rows], self._cursors[rows]
        counts = self._log.committed[request_indices] - starts
        places = 1 + self._log.words(request_indices) if self._log.has_logprobs else 1
        total = np.cumsum(counts * places, dtype=np.int64)
        is_partial = bool(total[-1] > DELIVERY_TOKENS_MAX)
        if is_partial:
            beyond = -((DELIVERY_TOKENS_MAX - total) // places)
            counts = np.clip(counts - beyond, 0, counts).astype(np.int32)
            some = counts > 0
            rows, request_indices, starts, counts = rows[some], request_indices[some], starts[some], counts[some]
        logprobs = self._log.gather_logprobs(request_indices, starts, counts)
        delivery = Delivery(
            handles=pack_int32(rows),
            starts=pack_int32(starts),
            counts=pack_int32(counts),
            tokens=pack_int32(self._log.gather(request_indices, starts, counts)),
            logprobs=None if logprobs is None else logprobs.packed(),
        )
        return Parcel(connection, rows, counts, delivery, is_partial)

    def advance(self, parcel: Parcel) -> None:
        """`parcel` was sent. Its subscriptions must still exist."""
        self._cursors[parcel.rows] += parcel.counts

    def complete(self, is_blocked: npt.NDArray[np.bool_]) -> list[Complete]:
        """Fully delivered subscriptions to terminal requests; `remove` each once Ended was sent."""
        request_indices, connections = self._request_indices[: self._top], self._connections[: self._top]
        rows = np.flatnonzero(
            self._is_final[request_indices] & (self._cursors[: self._top] == self._log.committed[request_indices])
        )
        rows = rows[~is_blocked[connections[rows]]]
        return [Complete(int(connections[row]), int(row), int(request_indices[row])) for row in rows]

    def check_invariants(self) -> None:
        """Raise InternalError unless arrays and index agree and no cursor is ahead of its request."""
        used = np.flatnonzero(self._connections[: self._top] != NO_CONNECTION)
        index = {(int(self._connections[row]), int(self._request_indices[row])): int(row) for row in used}
        behind = self._cursors[used] <= self._log.committed[self._request_indices[used]]
        if index != self._rows or len(used) + len(self._free) != self._top or not behind.all():
            raise InternalError(f"subscriptions: {len(self._rows)} indexed, {len(used)} in use, {len(self._free)} free")
