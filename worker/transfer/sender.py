"""The sending end: control sockets, engines, round the core of sending.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from metrics.state import TransferCounters
from protocol.errors import HiSparseError, Unavailable
from protocol.logs import fields
from worker.transfer.control import SenderControl
from worker.transfer.engines.base import Source, SourceMaker
from worker.transfer.interface import Delivered, Failed, Layout, PoolMemory, SenderEvent
from worker.transfer.pump import Pump, log
from worker.transfer.sender_actions import (
    Action,
    Connect,
    Disconnect,
    EmitSenderEvent,
    Leave,
    Post,
    Reach,
    SendToReceiver,
)
from worker.transfer.sending import WINDOW_BYTES, WINDOW_UNITS, Sending

#: How long `close` waits for what is in flight.
CLOSE_WAIT_S: Final = 5.0


class PageSender(Pump[Action, SenderEvent]):
    """The end that owns the source pages. Use `worker.transfer.open_sender`. An engine is loaded when a receiver asks
    for it."""

    def __init__(
        self,
        pool: PoolMemory,
        layout: Layout,
        name: str,
        engines: Mapping[str, SourceMaker],
        places: Mapping[str, bytes],
        wake: Callable[[], None],
        *,
        window_bytes: int = WINDOW_BYTES,
        window_units: int = WINDOW_UNITS,
    ) -> None:
        self._control = SenderControl(name)
        super().__init__(f"sender {name}", self._control.poller, wake)
        self.counters = TransferCounters()
        self._pool = pool
        self._engines = engines
        self._sources: dict[str, Source] = {}
        self._by_endpoint: dict[tuple[str, int], Source] = {}
        self._reasons: dict[tuple[str, int], str] = {}
        self._core = Sending(layout, len(pool.pages), places, window_bytes=window_bytes, window_units=window_units)
        self.start()

    def open(self, transfer_id: int, description: bytes, pages: int, part_ends: Sequence[int] = ()) -> None:
        """Begin to send `pages` pages to the receiver of `description`.

        The receiver may open the transfer later than this, by up to BEGIN_LIMIT_S. `part_ends` cuts pages into parts
        that are sent one by one: ends of parts in bytes from the start of the page, ascending, the last one
        page_bytes; empty: whole pages. Raises ConfigError when layout, version or engine differ, naming both values;
        WrongState when the transfer is open; CapacityError beyond TRANSFERS_MAX.
        """
        self._ask(lambda: self._core.open(transfer_id, description, pages, part_ends, time.monotonic()))

    def send(self, transfer_id: int, index: int, page: int, part: int = 0) -> None:
        """Send part `part` of host page `page` as the `index`-th page of the transfer; once for each part.

        The bytes must be final and stay so until `Delivered` or `Failed`. Queued beyond the window in flight. Does
        nothing for a transfer that has ended. Raises BadInput for indices beyond what was opened, WrongState for a part
        that was sent.
        """
        self._ask(lambda: self._core.send(transfer_id, index, page, part, time.monotonic()))

    def cancel(self, transfer_id: int, reason: str) -> None:
        """Send no more. `Failed` follows when nothing is in flight, and the receiver's `Revoked`."""
        self._ask(lambda: self._core.cancel(transfer_id, reason, time.monotonic()))

    def close(self) -> None:
        """Cancel all transfers, wait for what is in flight, within seconds, and let peers go."""
        self._ask(lambda: self._core.cancel_all("its sender closes", time.monotonic()))
        give_up_at = time.monotonic() + CLOSE_WAIT_S
        while self._core.open_transfers and self._thread.is_alive() and time.monotonic() < give_up_at:
            time.sleep(0.01)
        self._halt()

    # ---------------------------------------------------------------- Pump

    @property
    def _needs_progress(self) -> bool:
        return any(source.needs_progress for source in self._sources.values()) and self._core.in_flight[0] > 0

    def _hear(self) -> bool:
        heard = self._control.receive()
        for peer, message in heard:
            self._ask(partial(self._core.heard, peer, message, time.monotonic()))
        ended = [written for source in self._sources.values() for written in source.poll()]
        for post, found, error in ended:
            self._ask(partial(self._core.written, post, found, error, time.monotonic()))
        return bool(heard or ended)

    def _tick(self, now: float) -> Sequence[Action]:
        self.counters.open_transfers = self._core.open_transfers
        self.counters.in_flight_bytes = self._core.in_flight[1]
        self.counters.unreadable_messages = self._control.unreadable
        return self._core.tick(now)

    def _perform(self, action: Action) -> None:
        match action:
            case SendToReceiver(peer, message):
                self._control.send(peer, message)
            case Reach(peer, key):
                self._control.reach(peer, key)
            case Leave(peer):
                self._control.leave(peer)
            case Post():
                self._post(action)
            case Connect():
                self._connect(action)
            case Disconnect(peer, endpoint):
                source = self._by_endpoint.pop((peer, endpoint), None)
                if source is not None:
                    source.disconnect(peer, endpoint)
            case EmitSenderEvent(event):
                self._count(event)
                self._tell(event)

    def _connect(self, connect: Connect) -> None:
        """A failure shows at the first Post."""
        key = (connect.peer, connect.endpoint)
        try:
            if connect.engine not in self._sources:
                self._sources[connect.engine] = self._engines[connect.engine](self._pool, self.jobs)
            self._by_endpoint[key] = source = self._sources[connect.engine]
            source.connect(*key, connect.blob)
        except HiSparseError as error:
            log.warning("cannot write to the pages of a receiver", extra=fields(peer=connect.peer, reason=str(error)))
            self._by_endpoint.pop(key, None)
            self._reasons = {key: str(error)}

    def _post(self, post: Post) -> None:
        key = (post.peer, post.endpoint)
        try:
            if key not in self._by_endpoint:
                raise Unavailable(
                    self._reasons.get(key, "its endpoint is gone"), field="transfer.peer", value=post.peer
                )
            self._by_endpoint[key].post(post)
        except HiSparseError as error:
            self._ask(partial(self._core.not_posted, post, str(error), time.monotonic()))

    def _count(self, event: SenderEvent) -> None:
        match event:
            case Delivered():
                self.counters.pages += 1
                self.counters.bytes += self._pool.pages.shape[1]
            case Failed(transfer_id, reason):
                self.counters.failed_transfers += 1
                log.info("page transfer failed", extra=fields(transfer_id=transfer_id, reason=reason))

    def _tear_down(self) -> None:
        self.jobs.close()
        for source in self._sources.values():
            source.close()
        self._control.close()
