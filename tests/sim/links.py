"""Sockets without sockets: routers, dealers and the wires between them, in memory and on the simulated clock.

    FakeDealer ── up ──► FakeRouter        one connection: two pipes, each a FIFO in which every frame has its moment
               ◄─ down ──

They promise only what the sockets of protocol/transport promise. Order holds within a direction of a connection and
nowhere else: what was sent on a connection that is gone may still arrive, after what was sent on the next one. A full
pipe refuses, a lost connection raises at the dealer's end and is GONE at the router's.

What can happen to a wire (tests.sim.faults decides when):

    cut         both ends learn of it; what was under way toward the coordinator arrives, or does not
    mute        half-open: frames of one or both directions vanish, and neither end is told
    lose        single frames vanish: a gap, as a router past its high-water mark makes
    lag         frames take longer from now on; later ones do not overtake within their direction
    hold        a peer has no time to take what has arrived: the pipe fills
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from coordinator.listener.router import Received, Sent
from protocol.errors import Unavailable
from protocol.messages import Commands
from tests.sim.alarms import Alarm, sleep_until
from tests.sim.trace import Trace

#: Seconds that a frame takes on a healthy wire.
LATENCY_S: Final = (0.0001, 0.002)
#: Frames that a pipe holds; past it a router's send is refused.
PIPE_FRAMES_MAX: Final = {"client": 12, "admin": 1_000, "worker": 64}
#: First bytes of an encoded Commands.
COMMANDS_TAG: Final = str(Commands.__struct_config__.tag).encode()
#: Messages taken in one receive.
BATCH_MAX: Final = 256


class Latch:
    """Whether a process runs. While it is shut nothing of it goes in or out; what it would have closed waits."""

    def __init__(self) -> None:
        self._opened = trio.Event()
        self._opened.set()
        self._deferred: list[Callable[[], None]] = []

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def shut(self) -> None:
        if self.is_open:
            self._opened = trio.Event()

    def open(self) -> None:
        self._opened.set()
        deferred, self._deferred = self._deferred, []
        for action in deferred:
            action()

    async def passed(self) -> None:
        """Return once it is open; no checkpoint when it is, since each caller has just had one."""
        if not self.is_open:
            await self._opened.wait()

    def once_open(self, action: Callable[[], None]) -> None:
        """Now, or as soon as it opens."""
        if self.is_open:
            action()
        else:
            self._deferred.append(action)


@dataclass(eq=False)
class Pipe:
    """One direction of a connection."""

    lag_s: float = 0.0
    is_mute: bool = False
    lose_frames: int = 0
    last_at: float = 0.0


@dataclass(eq=False)
class Connection:
    """`process` owns the dealer; 0 where it is not asked for. `is_open` until either end or a fault closes it."""

    peer: bytes
    role: str
    owner: str
    process: int
    router: FakeRouter
    up: Pipe = field(default_factory=Pipe)
    down: Pipe = field(default_factory=Pipe)
    is_open: bool = True
    dealer: FakeDealer | None = None


class Network:
    """All routers that listen and all connections that are open. Owners that are `cut_off` cannot connect."""

    def __init__(self, rng: random.Random, trace: Trace) -> None:
        self.rng = rng
        self.trace = trace
        self.routers: dict[str, FakeRouter] = {}
        self.connections: list[Connection] = []
        self.cut_off: dict[str, float] = {}
        self.said: dict[str, dict[FakeRouter, bytes]] = {}  # to each worker, by router: the latest commands
        self._peers = 0

    def listen(self, role: str, message_bytes_max: int) -> FakeRouter:
        """A router takes the place of whatever listened before."""
        self.routers[role] = FakeRouter(self, role, message_bytes_max)
        return self.routers[role]

    def connect(self, role: str, owner: str, process: int, latch: Latch) -> FakeDealer:
        """A connection of `process`, which is `owner`.

        Raises Unavailable when no coordinator listens or `owner` is cut off.
        """
        router = self.routers.get(role)
        if router is None or router.closed or self.cut_off.get(owner, 0.0) > trio.current_time():
            raise Unavailable("no coordinator listens there", field="endpoint", value=role)
        self._peers += 1
        connection = Connection(self._peers.to_bytes(4, "big"), role, owner, process, router)
        connection.dealer = dealer = FakeDealer(self, connection, latch)
        self.connections.append(connection)
        router.peers[connection.peer] = connection
        self.trace.note(owner, "connects", role)
        return dealer

    def cut(self, connection: Connection, *, losing: bool) -> None:
        """End a connection from outside. `losing` what is under way toward the router."""
        if not connection.is_open:
            return
        connection.is_open = False
        self.connections.remove(connection)
        router = connection.router
        router.peers.pop(connection.peer, None)
        if losing:
            router.forget(connection)
        if connection.dealer is not None:
            connection.dealer.lose()
        self.trace.note(connection.owner, "cut", f"{connection.role}, {'losing' if losing else 'keeping'} the rest")

    def arrival(self, pipe: Pipe) -> float | None:
        """When a frame that is sent now arrives; None: never."""
        if pipe.is_mute:
            return None
        if pipe.lose_frames:
            pipe.lose_frames -= 1
            return None
        at = trio.current_time() + self.rng.uniform(*LATENCY_S) + pipe.lag_s
        pipe.last_at = max(pipe.last_at, at)
        return pipe.last_at


class FakeRouter:
    """The coordinator's end, as coordinator.listener.router.RouterSocket."""

    def __init__(self, network: Network, role: str, message_bytes_max: int) -> None:
        self.endpoint = role
        self.message_bytes_max = message_bytes_max
        self.closed = False
        self.peers: dict[bytes, Connection] = {}
        self._network = network
        self._inbox: list[tuple[float, int, Connection, bytes]] = []
        self._sequence = 0
        self._alarm = Alarm()

    async def recv_batch(self) -> list[Received]:
        while True:
            await self._alarm.sleep_until(self._inbox[0][0] if self._inbox else float("inf"))
            if batch := self._take(trio.current_time()):
                return batch

    def _take(self, now: float) -> list[Received]:
        batch: list[Received] = []
        while self._inbox and self._inbox[0][0] <= now and len(batch) < BATCH_MAX:
            _, _, connection, frame = heapq.heappop(self._inbox)
            self._network.trace.note(connection.owner, f"> {self.endpoint}", frame)
            batch.append(Received(connection.peer, frame, connection.process))
        return batch

    def put(self, at: float, connection: Connection, frame: bytes) -> None:
        self._sequence += 1
        heapq.heappush(self._inbox, (at, self._sequence, connection, frame))
        self._alarm.set(at)

    def forget(self, connection: Connection) -> None:
        self._inbox = [entry for entry in self._inbox if entry[2] is not connection]
        heapq.heapify(self._inbox)

    def send(self, peer: bytes, frame: bytes) -> Sent:
        connection = self.peers.get(peer)
        if connection is None or self.closed or connection.dealer is None:
            return Sent.GONE
        if COMMANDS_TAG in frame[:16]:
            self._network.said.setdefault(connection.owner, {})[self] = frame
        return connection.dealer.offer(frame)

    @property
    def connection_events(self) -> FakeRouter:
        return self

    def introduce(self, descriptor: int, user: str) -> None:
        """Every connection here says hello, and no peer is cut off for its rate."""

    def close(self) -> None:
        """The process is gone: so is what it had not read, and every connection."""
        self.closed = True
        for connection in list(self.peers.values()):
            self._network.cut(connection, losing=True)
        self._inbox.clear()


class FakeDealer:
    """The peer's end, as coordinator.listener.router.DealerSocket. `hold` stands for a peer that has no time."""

    def __init__(self, network: Network, connection: Connection, latch: Latch) -> None:
        self.connection = connection
        self._latch = latch
        self._network = network
        self._inbox: deque[tuple[float, bytes]] = deque()
        self._alarm = Alarm()
        self._limit = PIPE_FRAMES_MAX[connection.role]
        self._held_until = 0.0
        self._is_closed = False
        self.on_send: Callable[[bytes], None] | None = None
        self.on_offer: Callable[[bytes], None] | None = None

    def offer(self, frame: bytes) -> Sent:
        """The router's send."""
        if len(self._inbox) >= self._limit:
            return Sent.FULL
        if self.on_offer is not None:
            self.on_offer(frame)
        at = self._network.arrival(self.connection.down)
        if at is not None:
            self._inbox.append((at, frame))
            self._alarm.set(max(self._inbox[0][0], self._held_until))
        return Sent.OK

    def lose(self) -> None:
        """The connection has ended: what has arrived can still be read, the rest never comes."""
        now = trio.current_time()
        self._inbox = deque(entry for entry in self._inbox if entry[0] <= now)
        self._alarm.set(now)

    def hold(self, until: float) -> None:
        """Take and send nothing before `until`."""
        self._held_until = max(self._held_until, until)

    async def recv_batch(self) -> list[bytes]:
        while True:
            await self._alarm.sleep_until(self._next_at())
            await self._latch.passed()
            if batch := self._take(trio.current_time()):
                return batch
            if not self.connection.is_open and not self._inbox:
                raise Unavailable("the connection was lost", field="endpoint", value=self.connection.role)

    def _next_at(self) -> float:
        if self._inbox:
            return max(self._inbox[0][0], self._held_until)
        return float("inf") if self.connection.is_open else trio.current_time()

    def _take(self, now: float) -> list[bytes]:
        batch: list[bytes] = []
        while self._inbox and self._inbox[0][0] <= now >= self._held_until and len(batch) < BATCH_MAX:
            frame = self._inbox.popleft()[1]
            self._network.trace.note(self.connection.owner, f"< {self.connection.role}", frame)
            batch.append(frame)
        return batch

    async def send(self, frame: bytes) -> None:
        await sleep_until(self._held_until)
        await self._latch.passed()
        if self._is_closed or not self.connection.is_open:
            raise Unavailable("the connection was lost", field="endpoint", value=self.connection.role)
        if self.on_send is not None:
            self.on_send(frame)
        at = self._network.arrival(self.connection.up)
        if at is not None:
            self.connection.router.put(at, self.connection, frame)

    def close(self) -> None:
        """The owner closes, or its process is gone; what it sent before is on its way."""
        self._is_closed = True
        self._latch.once_open(lambda: self._network.cut(self.connection, losing=False))
