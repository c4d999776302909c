"""What goes wrong, and when: one list, drawn from the seed.

Each fault is a small change of the cluster or of a wire at one moment; most end by a second one a little later, which
is not counted. `heal` ends all that has not ended by itself.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Awaitable, Callable, Collection
from typing import Final

import msgspec
import trio

from hisparse.client.client import Client
from protocol import messages
from tests.sim.clients import SimClient, Workload
from tests.sim.cluster import Cluster
from tests.sim.links import Connection
from tests.sim.standbys import FakeStandby
from tests.sim.trace import Violation

#: Faults in one run, and the seconds over which they are spread.
FAULTS: Final = (21, 30)
SPREAD_S: Final = 5.0
#: How much more often a favoured kind is drawn.
FAVOUR: Final = 10


class Faults:
    """Draws and does them, kinds in `favoured` more often. `done` counts those that found something to harm."""

    def __init__(
        self, cluster: Cluster, workload: Workload, nursery: trio.Nursery, favoured: Collection[str] = ()
    ) -> None:
        self.done = 0
        self._cluster = cluster
        self._workload = workload
        self._nursery = nursery
        self._favoured = favoured
        self._rng = random.Random(f"{cluster.seed} faults")
        self._is_healed = False

    async def run(self) -> None:
        """All of them, then `heal`."""
        rng = self._rng
        moments = sorted(rng.uniform(0.2, SPREAD_S) for _ in range(rng.randint(*FAULTS)))
        kinds, weights = zip(*self._kinds(), strict=True)
        names = [kind.__name__.strip("_") for kind in kinds]
        assert {*names}.issuperset(self._favoured), f"no kinds of faults: {self._favoured}"
        weights = tuple(it * FAVOUR if name in self._favoured else it for name, it in zip(names, weights, strict=True))
        for moment in moments:
            await trio.sleep_until(moment)
            kind = rng.choices(kinds, weights)[0]
            what = kind()
            if what is not None:
                self.done += 1
                self._cluster.trace.note("fault", kind.__name__.strip("_"), what)
        self.heal()

    def _kinds(self) -> list[tuple[Callable[[], str | None], float]]:
        journalled = self._cluster.disk is not None
        return [
            (self._kill_worker, 3),
            (self._kill_coordinator, 2 if journalled else 0),
            (self._fill_disk, 1 if journalled else 0),
            (self._slow_disk, 1 if journalled else 0),
            (self._boot_node, 0.5),
            (self._terminate_worker, 1),
            (self._stop_coordinator, 0.5 if journalled else 0),
            (self._poison, 0.3),
            (self._stop_worker, 3),
            (self._hang_executor, 1),
            (self._cut, 3),
            (self._mute, 2),
            (self._lose, 2),
            (self._lag, 2),
            (self._harm_pages, 2),
            (self._refuse_pages, 0.5),
            (self._ghost, 1),
            (self._kill_client, 2),
            (self._slow_client, 2),
            (self._retract, 3),
            (self._resume, 1),
            (self._resize, 1),
            (self._drain, 1),
            (self._undrain, 1),
            (self._abort, 1),
            (self._look, 1),
            (self._kill_standby, 2 if self._cluster.shape.has_standbys else 0),  # last: they change no other seed
            (self._stop_standby, 1 if self._cluster.shape.has_standbys else 0),
            (self._damage_pool, 0.5 if self._cluster.shape.has_standbys else 0),
        ]

    def heal(self) -> None:
        """Nothing new goes wrong from here on, and what is wrong ends."""
        self._is_healed = True
        self._cluster.trace.note("fault", "heal")
        self._cluster.network.cut_off.clear()
        self._cluster.wire.lose = self._cluster.wire.corrupt = self._cluster.wire.refuse = 0
        for process in self._cluster.processes():
            process.latch.open()
        for connection in list(self._cluster.network.connections):
            for pipe in (connection.up, connection.down):
                pipe.lag_s, pipe.lose_frames = 0.0, 0
            if connection.up.is_mute or connection.down.is_mute:
                self._cluster.network.cut(connection, losing=True)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        async def wait() -> None:
            await trio.sleep(seconds)
            action()

        self._nursery.start_soon(wait)

    # ---------------------------------------------------------------- processes

    def _kill_worker(self) -> str | None:
        processes = self._cluster.processes()
        if not processes:
            return None
        process = self._rng.choice(processes)
        process.kill()
        return process.name

    def _standby(self) -> FakeStandby | None:
        waiting = self._cluster.standbys.waiting() if self._cluster.standbys is not None else []
        return self._rng.choice(waiting) if waiting else None

    def _kill_standby(self) -> str | None:
        if (standby := self._standby()) is None:
            return None
        standby.signal(signal.SIGKILL)
        return standby.name

    def _stop_standby(self) -> str | None:
        """It does not hear its order, or late."""
        if (standby := self._standby()) is None:
            return None
        seconds = self._rng.choice((0.5, 2.5, 10.0))
        standby.latch.shut()
        self._later(seconds, standby.latch.open)
        return f"{standby.name} for {seconds} s"

    def _damage_pool(self) -> str | None:
        node = self._rng.choice(sorted(self._cluster.pools))
        self._cluster.damage_pool(node)
        return node

    def _boot_node(self) -> str | None:
        node = self._rng.choice(sorted(self._cluster.pools))
        self._cluster.boot(node)
        return node

    def _kill_coordinator(self) -> str | None:
        """With a journal: without one nothing is promised across its death."""
        life = self._cluster.coordinator
        if life is None:
            return None
        life.kill()
        return f"life {life.incarnation}"

    def _terminate_worker(self) -> str | None:
        processes = self._cluster.processes()
        if not processes:
            return None
        process, deadline_s = self._rng.choice(processes), self._rng.choice((0.0, 0.5, 2.0))
        process.terminate(deadline_s)
        return f"{process.name} within {deadline_s} s"

    def _stop_coordinator(self) -> str | None:
        """Another takes its place and goes on with what was not finished."""
        deadline_s = self._rng.choice((0.0, 1.0))
        self._order(lambda client: client.stop(deadline_s))
        return f"within {deadline_s} s"

    def _poison(self) -> str | None:
        """A request kills whatever decodes it, from now on."""
        request_id = self._request()
        if request_id is None or self._cluster.poison:
            return None
        self._cluster.poison.add(request_id)
        return request_id

    def _fill_disk(self) -> str | None:
        disk = self._cluster.disk
        assert disk is not None
        disk.full_until = trio.current_time() + self._rng.uniform(0.1, 2.0)
        return f"until {disk.full_until:.2f}"

    def _slow_disk(self) -> str | None:
        disk = self._cluster.disk
        assert disk is not None
        disk.slow_until = trio.current_time() + self._rng.uniform(0.1, 2.0)
        return f"until {disk.slow_until:.2f}"

    def _stop_worker(self) -> str | None:
        processes = [process for process in self._cluster.processes() if process.latch.is_open]
        if not processes:
            return None
        process, seconds = self._rng.choice(processes), self._rng.choice((0.2, 1.0, 2.5, 5.0))
        process.latch.shut()
        self._later(seconds, process.latch.open)
        return f"{process.name} for {seconds} s"

    def _hang_executor(self) -> str | None:
        processes = self._cluster.processes()
        if not processes:
            return None
        process, seconds = self._rng.choice(processes), self._rng.uniform(0.2, 3.0)
        process.executor.hang(trio.current_time() + seconds)
        return f"{process.name} for {seconds:.2f} s"

    # ---------------------------------------------------------------- wires

    def _connection(self, *roles: str) -> Connection | None:
        found = [it for it in self._cluster.network.connections if it.role in roles]
        return self._rng.choice(found) if found else None

    def _cut(self) -> str | None:
        connection = self._connection("worker", "worker", "client")
        if connection is None:
            return None
        away_s = self._rng.choice((0.0, 0.0, 0.5, 3.0))
        self._cluster.network.cut_off[connection.owner] = trio.current_time() + away_s
        self._cluster.network.cut(connection, losing=self._rng.random() < 0.5)
        return f"{connection.owner}, away for {away_s} s"

    def _mute(self) -> str | None:
        """Half-open, one way or both, until an end notices or the wire breaks."""
        connection = self._connection("worker", "client")
        if connection is None:
            return None
        way = self._rng.choice(("up", "down", "both"))
        connection.up.is_mute |= way != "down"
        connection.down.is_mute |= way != "up"
        seconds, losing = self._rng.uniform(0.5, 6.0), self._rng.random() < 0.5
        self._later(seconds, lambda: self._cluster.network.cut(connection, losing=losing))
        return f"{connection.owner} {way} for {seconds:.2f} s"

    def _lose(self) -> str | None:
        """Frames vanish between a router and a worker; clients' wires keep what they take."""
        connection = self._connection("worker")
        if connection is None:
            return None
        frames, way = self._rng.randint(1, 5), self._rng.choice(("up", "down"))
        getattr(connection, way).lose_frames += frames
        return f"{frames} {way} of {connection.owner}"

    def _harm_pages(self) -> str | None:
        """The next pages between nodes are lost on the way, or arrive with a bit changed."""
        wire, count = self._cluster.wire, self._rng.randint(1, 6)
        if not wire.frames:
            return None
        how = self._rng.choice(("lose", "corrupt"))
        setattr(wire, how, count)
        return f"{how} {count} pages"

    def _refuse_pages(self) -> str | None:
        """The next transfer is refused by its receiver."""
        if not self._cluster.shape.pairs:
            return None
        self._cluster.wire.refuse = 1
        return "one transfer"

    def _lag(self) -> str | None:
        connection = self._connection("worker", "client", "admin")
        if connection is None:
            return None
        lag_s, way = self._rng.choice((0.03, 0.2, 1.0)), self._rng.choice(("up", "down"))
        pipe = getattr(connection, way)
        pipe.lag_s = lag_s

        def end() -> None:
            pipe.lag_s = 0.0

        self._later(self._rng.uniform(0.5, 3.0), end)
        return f"{connection.owner} {way} {lag_s} s"

    def _ghost(self) -> str | None:
        """Commands of an earlier coordinator come on the connection with the present one, numbered to fit."""
        connection = self._connection("worker")
        process = self._cluster.process(connection.process) if connection is not None else None
        if connection is None or connection.dealer is None or process is None:
            return None
        said = self._cluster.network.said.get(connection.owner, {})
        frame = next((frame for router, frame in said.items() if router is not connection.router), None)
        if frame is None:
            return None
        commands = messages.decode_coordinator(frame)
        connection.dealer.offer(messages.encode(msgspec.structs.replace(commands, first=process.state.command_ack + 1)))
        return connection.owner

    # ---------------------------------------------------------------- clients

    def _client(self) -> SimClient | None:
        clients = [client for client in self._workload.clients if client.unfinished]
        return self._rng.choice(clients) if clients else None

    def _kill_client(self) -> str | None:
        client = self._client()
        if client is None:
            return None
        client.kill()
        return client.name

    def _slow_client(self) -> str | None:
        """It takes nothing for a while: its pipe fills."""
        connection = self._connection("client")
        if connection is None or connection.dealer is None:
            return None
        seconds = self._rng.uniform(0.3, 3.0)
        connection.dealer.hold(trio.current_time() + seconds)
        return f"{connection.owner} for {seconds:.2f} s"

    # ---------------------------------------------------------------- the operator

    def _order(self, command: Callable[[Client], Awaitable[object]]) -> None:
        self._nursery.start_soon(self._workload.operator.order, command)

    def _request(self) -> str | None:
        ids = self._workload.unfinished
        return self._rng.choice(ids) if ids else None

    def _retract(self) -> str | None:
        request_id = self._request()
        if request_id is None:
            return None
        keep, hold = self._rng.random() < 0.6, self._rng.random() < 0.5
        self._order(lambda client: client.retract([request_id], keep=keep, hold=hold))
        return f"{request_id} {'keep' if keep else 'drop'}{' hold' if hold else ''}"

    def _resume(self) -> str | None:
        ids = self._workload.unfinished
        for request_id in ids:
            self._order(lambda client, it=request_id: client.resume([it]))  # type: ignore[misc]
        return "all" if ids else None

    def _resize(self) -> str | None:
        request_id = self._request()
        if request_id is None:
            return None
        hot_slots = self._rng.choice((-1, 0, *self._cluster.shape.capacity.hot_size_classes))
        self._order(lambda client: client.resize([request_id], hot_slots))
        return f"{request_id} to {hot_slots}"

    def _drain(self) -> str | None:
        name = self._rng.choice(sorted(self._cluster.shape.workers) + sorted(self._cluster.shape.groups))
        handover, deadline_s = self._rng.random() < 0.5, self._rng.uniform(0.0, 2.0)
        self._order(lambda client: client.drain([name], handover=handover, deadline_s=deadline_s))
        return f"{name}{' handover' if handover else ''} within {deadline_s:.2f} s"

    def _undrain(self) -> str | None:
        self._order(lambda client: client.undrain())
        return "all"

    def _abort(self) -> str | None:
        request_id = self._request()
        if request_id is None:
            return None
        self._cluster.abortable.add(request_id)
        self._order(lambda client: client.abort([request_id]))
        return request_id

    def _look(self) -> str | None:
        """I7: a query changes nothing."""
        life = self._cluster.coordinator
        if life is None or not life.is_between_turns:
            return None
        before = life.fingerprint()
        life.scheduler.request_rows(100)
        life.scheduler.worker_rows()
        life.scheduler.pool_rows()
        for row in life.scheduler.request_rows(100):
            life.scheduler.describe(row.request_id)
        if life.fingerprint() != before:
            raise Violation("I7", "a query changed the state")
        return "at everything"
