"""Delivery of tokens from the token log to client connections, and of Ended after the last token.

    append ──► news ──► flush ──► one Delivery per connection with news ──► Ended behind each last token
                          ▲                                                  ▲
                          │                                                  └── at once if all tokens were delivered
                          └── at once when there is news, and then at most every `flush_interval_s`

A client whose socket is full costs one attempt every UNBLOCK_INTERVAL_S and nothing else: its cursors stay. When a
request is forgotten before a subscriber has read it to the end, that connection is dropped: its stream cannot be
completed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

import trio
from msgspec.structs import astuple

from basics.rooms import RoomUse
from basics.shares import check_share, is_near
from coordinator.gateway.connections import ClientConnection, ClientConnections
from coordinator.gateway.subscriptions import Subscriptions
from coordinator.state.events import Ending
from coordinator.tokens.token_log import TokenLog
from metrics.state import CoordinatorCounters
from protocol import messages
from protocol.logs import fields, logger
from protocol.skew import encode_for

#: How soon a connection whose socket was full is tried again.
UNBLOCK_INTERVAL_S: Final = 0.05
#: A connection that was sent nothing for this long gets an empty Delivery, which shows whether it is gone.
KEEPALIVE_S: Final = 5.0
#: Subscriptions of all connections: some 200 bytes each.
SUBSCRIPTIONS_MAX: Final = 262_144
#: When the coordinator stops: time for clients to read the rest of their deliveries.
LAST_FLUSH_S: Final = 1.0

KEEPALIVE: Final = messages.encode(messages.Delivery(b"", b"", b"", b""))

log = logger("coordinator.gateway.deliveries")


class Deliveries:
    """The Listener of the Scheduler. `run` is the only task that sends deliveries; other methods are synchronous."""

    def __init__(
        self,
        token_log: TokenLog,
        counters: CoordinatorCounters,
        *,
        connections_max: int,
        flush_interval_s: float,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        self.connections = ClientConnections(connections_max, self._dropped)
        self._log = token_log
        self._counters = counters
        self._flush_interval_s = flush_interval_s
        self._clock = clock
        self._subscriptions = Subscriptions(token_log)
        self._reserved: Counter[str] = Counter()  # subscriptions of submissions in progress, by user
        self._endings: dict[int, Ending] = {}
        self._news = trio.Event()
        self._ends = trio.Event()

    # ------------------------------------------------------------ calls of the coordinator

    def wake(self) -> None:
        """Deliver new tokens soon."""
        self._news.set()

    def ended(self, ending: Ending) -> None:
        """The request is terminal; its tokens are all in the log."""
        self._counters.ended[ending.outcome] += 1
        self.recovered(ending)

    def recovered(self, ending: Ending) -> None:
        """Do as `ended`, for a request that an earlier process has counted."""
        self._endings[ending.request_index] = ending
        self._subscriptions.finish(ending.request_index)
        self._news.set()
        self._ends.set()

    def forgotten(self, request_index: int) -> None:
        """The request index is about to be reused: drop subscriptions, and connections that had not read it all."""
        self._endings.pop(request_index, None)
        for index in self._subscriptions.forget(request_index):
            self.connections.drop(self.connections[index], "did not read an output before it was forgotten")

    # ------------------------------------------------------------ calls of the gateway

    def check_room(self, connection: ClientConnection) -> None:
        """Raise CapacityError when one subscription more is too many, or beyond the share of the connection's user.
        Reserved ones count."""
        user, used = connection.user, self._used()
        held = 0
        if is_near(used, SUBSCRIPTIONS_MAX):
            held = self._subscriptions.count_of(self.connections.indices_of(user)) + self._reserved[user]
        check_share("subscriptions", 1, held=held, used=used, limit=SUBSCRIPTIONS_MAX, field="subscribe")

    def reserve(self, connection: ClientConnection) -> None:
        """Keep room for one subscription until `release`, since a submission takes a while. Raises as `check_room`."""
        self.check_room(connection)
        self._reserved[connection.user] += 1

    def release(self, connection: ClientConnection) -> None:
        """Give back what `reserve` keeps: the subscription is there, or does not come."""
        self._reserved[connection.user] -= 1
        if not self._reserved[connection.user]:
            del self._reserved[connection.user]

    def _used(self) -> int:
        return len(self._subscriptions) + self._reserved.total()

    def room_use(self) -> dict[str, RoomUse]:
        return {"subscriptions": RoomUse(self._used(), SUBSCRIPTIONS_MAX)} | self.connections.room_use()

    def subscribe(self, connection: ClientConnection, request_index: int, cursor: int) -> int:
        """The handle of the new subscription; `check_room` or `reserve` comes before. Raises WrongState when this
        connection has one already."""
        handle = self._subscriptions.add(connection.index, request_index, cursor)
        self._news.set()
        return handle

    def unsubscribe(self, connection: ClientConnection, request_index: int) -> None:
        self._subscriptions.remove(connection.index, request_index)

    def send(self, connection: ClientConnection, message: messages.GatewayMessage) -> None:
        self.connections.send(connection, encode_for(message, connection.protocol), self._clock())

    def probe(self, idle_since: float) -> None:
        """Drop connections that are gone, of those that were sent nothing after `idle_since`."""
        self.connections.probe(KEEPALIVE, idle_since, self._clock())

    def _dropped(self, connection: ClientConnection, reason: str) -> None:
        self._subscriptions.remove_connection(connection.index)
        log.info("connection closed", extra=fields(owner=connection.owner, peer=connection.address, reason=reason))

    # ------------------------------------------------------------ flushing

    async def run(self) -> None:
        """Send deliveries and keepalives, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._flush_on_news)
            nursery.start_soon(self._keep_alive)

    async def last_flush(self) -> None:
        """Deliver all tokens of the log, for at most LAST_FLUSH_S. `run` must have ended."""
        with trio.move_on_after(LAST_FLUSH_S):
            while self.flush() or self.connections.is_blocked.any():  # noqa: ASYNC110 - libzmq has no event for it
                await trio.sleep(UNBLOCK_INTERVAL_S)

    async def _flush_on_news(self) -> None:
        while True:
            with trio.move_on_after(UNBLOCK_INTERVAL_S if self.connections.is_blocked.any() else float("inf")):
                await self._news.wait()
            self._news = trio.Event()
            if self.flush():
                self._news.set()
            with trio.move_on_after(self._flush_interval_s):
                await self._send_early_ends()

    async def _send_early_ends(self) -> None:
        """Send Ended of requests whose tokens were all delivered, without waiting for a flush. Until cancelled."""
        while True:
            await self._ends.wait()
            self._ends = trio.Event()
            self._send_ends(self._clock())

    async def _keep_alive(self) -> None:
        while True:
            await trio.sleep(KEEPALIVE_S)
            self.probe(self._clock() - KEEPALIVE_S)

    def flush(self) -> bool:
        """Send one Delivery to each connection with news; True when an unblocked connection has more."""
        now = self._clock()
        connections = self.connections
        connections.unblock(now)
        is_partial = False
        for parcel in self._subscriptions.parcels(connections.is_blocked):
            if connections.offer(connections[parcel.connection], messages.encode(parcel.delivery), now):
                self._subscriptions.advance(parcel)
                self._counters.deliveries += 1
                is_partial |= parcel.is_partial
            else:
                self._counters.stalled_deliveries += 1
        self._send_ends(now)
        return is_partial

    def _send_ends(self, now: float) -> None:
        connections = self.connections
        for index, handle, request_index in self._subscriptions.complete(connections.is_blocked):
            connection = connections.get(index)
            if connection is None or connections.is_blocked[index]:
                continue
            ended = messages.Ended(handle, *astuple(self._endings[request_index])[1:])  # the fields of an Ending
            if connections.offer(connection, encode_for(ended, connection.protocol), now):
                self._subscriptions.remove(index, request_index)
