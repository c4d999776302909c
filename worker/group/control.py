"""The control connection of a group: how ranks meet, wake each other, and see that one is lost.

    rank 0    binds a ROUTER at worker.group_endpoint and answers for the group (hub.py)
    a rank    a DEALER to it, rank 0 too; it joins, and begins when all have joined
    both      one thread, beside the decode loop and the link: it beats for a decode loop that waits for a peer, and
              ends this process when a peer is lost

A rank is lost when its process died (a process handle on this machine; a broken connection, and LOST_S of silence, on
another), when it left while others have work, when it is silent for twice the heartbeat limit, or when the others wait
for it so long. Nothing of a group can go on without it: rows of all requests lie in the host pool, and `hisparse up`
starts the group again. No timeout of a collective or of a fence decides this.

Rejected: torch's TCPStore for meeting (any process that reaches its port may set keys); a connection between each two
ranks (a group ends with any rank, so that rank 0 is no weaker point than others).
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from metrics.state import WorkerCounters
from protocol.errors import (
    EXIT_DEFECT,
    EXIT_PEER_LOST,
    ConfigError,
    HiSparseError,
    InternalError,
    ProtocolError,
    Unavailable,
)
from protocol.logs import fields, logger
from protocol.settings import Config
from protocol.version import our_version
from worker.group.awaiting import behind, silent
from worker.group.hub import Hub, Out
from worker.group.messages import (
    Beat,
    FromHub,
    Gone,
    Join,
    LeaveGroup,
    Member,
    Met,
    Standing,
    Standings,
    StoreGet,
    StoreSet,
    StoreValue,
    ToHub,
    Turned,
    Waiting,
    Wake,
    decode_from_hub,
    decode_to_hub,
    encode,
)
from worker.group.sockets import ControlSockets

#: How often ranks say how far they are.
BEAT_S: Final = 0.25
#: How often a rank joins again until it is answered, and who is missing is logged.
JOIN_S: Final = 1.0
MISSING_S: Final = 5.0
#: How often a line says how many connections of strangers were ended.
STRANGERS_S: Final = 10.0
#: Longest wait for the other ranks: they meet before they load weights, some seconds after their processes started.
MEET_LIMIT_S: Final = 300.0
#: A rank whose connection broke is lost after this silence.
LOST_S: Final = 1.0
#: From the loss of a rank to the end of this process: its last reports leave meanwhile.
GRACE_S: Final = 0.3
#: How long a failed exchange waits for the loss that explains it.
VERDICT_S: Final = 3.0
#: A decode loop that has waited this long names the rank it waits for.
AWAITS_AFTER_S: Final = 1.0
#: Heartbeat limits of silence, or of no progress, after which a rank is lost.
HUNG_LIMITS: Final = 2

assert LOST_S + BEAT_S + GRACE_S < 2.0  # a rank ends within 2 s of a peer's death
assert VERDICT_S > LOST_S + GRACE_S

M = TypeVar("M")

log = logger("worker.group")


class PeersMissingError(Unavailable):
    """Not all ranks of the group came. This one is not to blame: its process ends with EXIT_PEER_LOST."""


@dataclass
class LoopProgress:
    """How far this rank is. Written by the decode loop, read by the control thread."""

    launched: int = -1
    entered: int = 0
    waits_since: float | None = None
    turns: bool = False

    def begin_wait(self) -> None:
        self.waits_since = time.monotonic()

    def end_wait(self) -> None:
        self.waits_since = None

    def standing(self) -> Standing:
        return Standing(self.launched, self.entered, self.waits_since is not None, self.turns)


class Control:
    """`join` from the thread that starts the process, which then owns it; all else from any thread."""

    def __init__(self, config: Config, shared: dict[str, str]) -> None:
        """`shared`: values that must be equal on all ranks, by the name of their setting.

        Raises ConfigError and NotAllowed for a secret that is unfit.
        """
        settings = config.worker
        self.progress = LoopProgress()
        self.members: tuple[Member, ...] = ()
        self.incarnation = 0
        self.on_wake: Callable[[], None] = lambda: None
        self.is_done: Callable[[], bool] = lambda: False  # this process stops, and holds no request: it needs no peer
        self.counters: WorkerCounters | None = None
        self.woken_at = -1  # the last round at which a rank woke the group
        self._rank, self._name, self._endpoint = settings.group_rank, settings.group, settings.group_endpoint
        self._hung_s = HUNG_LIMITS * config.coordinator.heartbeat_limit_s
        self._join = Join(
            our_version(),
            settings.group,
            settings.group_rank,
            settings.group_size,
            settings.name,
            os.getpid(),
            _machine(),
            shared,
        )
        self._news = threading.Condition()
        self._missing: tuple[int, ...] = ()
        self._turned: Turned | None = None
        self._error: HiSparseError | None = None
        self._values: dict[str, bytes] = {}
        self._outgoing: deque[ToHub] = deque()
        self._standings: tuple[tuple[Standing, float], ...] = ()
        self._standings_at = time.monotonic()
        self._changed: dict[int, tuple[Standing, float]] = {}
        self._left: set[int] = set()
        self._lost: tuple[int, str] | None = None
        self._lost_at = 0.0
        self._leaves = self._closed = False
        self._rouse = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._pidfds: dict[int, int] = {}
        self._sockets = ControlSockets(config, self._rank == 0)
        self._hub = Hub(self._join, time.time_ns() // 1_000_000) if self._rank == 0 else None
        self._broke_at = float("inf")
        self._strangers = 0  # ended since the last line about them
        self._strangers_said_at = 0.0
        self._thread = threading.Thread(target=self._run_or_die, name="group", daemon=True)

    # ---------------------------------------------------------------- any thread

    def join(self) -> None:
        """Meet the other ranks. Returns when all are there. Raises ConfigError when rank 0 turns this one away, and
        PeersMissingError after MEET_LIMIT_S. A signal's exception ends the wait.
        """
        self._thread.start()
        said_at, began = time.monotonic(), time.monotonic()
        with self._news:
            while not self.members:
                self._news.wait(JOIN_S)
                if self._error is not None:
                    raise self._error
                if self._turned is not None and not self._turned.passes:
                    turned = self._turned
                    raise ConfigError(turned.message, field=turned.field, value=turned.value, remedy=turned.remedy)
                now = time.monotonic()
                if self.members:
                    break
                if now - began > MEET_LIMIT_S:
                    raise self._missing_error()
                if now - said_at >= MISSING_S:
                    said_at = now
                    log.info("waiting for the group", extra=self._waiting_fields(now - began))
        log.info("group met", extra=fields(group=self._name, rank=self._rank, incarnation=self.incarnation))

    def send(self, message: ToHub) -> None:
        """Queue `message` for rank 0. Never waits."""
        self._outgoing.append(message)
        os.eventfd_write(self._rouse, 1)

    def wake(self, number: int) -> None:
        """This rank has work before round `number`, at which the group sleeps."""
        self.send(Wake(number))

    def get(self, key: str) -> bytes:
        """The value of `key`, once a rank has set it. Waits for that; a lost rank ends the process meanwhile."""
        self.send(StoreGet(key))
        with self._news:
            while key not in self._values:
                self._news.wait(JOIN_S)
            return self._values.pop(key)

    def set(self, key: str, value: bytes, *, appends: bool = False) -> None:
        self.send(StoreSet(key, value, appends))

    def name_of(self, rank: int) -> str:
        return self.members[rank].worker

    def explain(self) -> bool:
        """Whether a rank is lost, which explains a failed exchange; waits VERDICT_S for the news."""
        with self._news:
            self._news.wait_for(lambda: self._lost is not None, VERDICT_S)
        return self._lost is not None

    def leave(self) -> None:
        """This rank holds nothing and ends: tell the others, and end the thread. A rank lost from now on is none of its
        concerns."""
        self._leaves = True
        if self.members:
            self.send(LeaveGroup())
        self.close()

    def close(self) -> None:
        """End the thread. Messages queued before are sent."""
        self._closed = True
        os.eventfd_write(self._rouse, 1)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)

    # ---------------------------------------------------------------- the thread

    def _run_or_die(self) -> None:
        try:
            self._run()
        except Exception as error:
            if self.members:  # nothing would beat, wake or see a loss from here on
                log.critical("the group's thread failed; the process ends", exc_info=True)
                os._exit(EXIT_DEFECT)
            self._fail(error if isinstance(error, HiSparseError) else InternalError(repr(error)))
        finally:
            self._sockets.close()
            for descriptor in self._pidfds.values():
                os.close(descriptor)

    def _fail(self, error: HiSparseError) -> None:
        with self._news:
            self._error = error
            self._news.notify_all()

    def _run(self) -> None:
        self._sockets.open()
        poller = select.poll()
        for descriptor in (self._rouse, *self._sockets.descriptors):
            poller.register(descriptor, select.POLLIN)
        next_beat = next_join = 0.0
        while True:
            self._take_all()  # before ranks are judged: this process may have stood still, and they have not
            now = time.monotonic()
            if not self.members and now >= next_join:
                next_join = now + JOIN_S
                self._outgoing.append(self._join)
            if now >= next_beat:
                next_beat = now + BEAT_S
                self._tick(now, poller)
            self._flush()
            if self._closed and not self._outgoing:
                return
            if not self._sockets.has_news():
                ready = poller.poll(max(0.0, next_beat - time.monotonic()) * 1e3)
                self._note(ready)

    def _flush(self) -> None:
        while self._outgoing:
            self._sockets.send(encode(self._outgoing.popleft()))

    def _note(self, ready: list[tuple[int, int]]) -> None:
        descriptors = {descriptor for descriptor, _ in ready}
        if self._rouse in descriptors:
            with suppress(BlockingIOError):
                os.eventfd_read(self._rouse)
        for rank, descriptor in self._pidfds.items():
            if descriptor in descriptors:
                self._lose(rank, "died")

    def _take_all(self) -> None:
        if self._sockets.broke():
            self._broke_at = min(self._broke_at, time.monotonic())
        self._strangers += self._sockets.end_strangers()
        for peer, frame in self._sockets.from_ranks():
            self._answer(peer, frame)
        for frame in self._sockets.from_hub():
            self._take(_decoded(decode_from_hub, frame))

    def _answer(self, peer: bytes, frame: bytes) -> None:
        assert self._hub is not None
        try:
            out = self._hub.received(peer, _decoded(decode_to_hub, frame), time.monotonic())
        except ProtocolError as error:
            log.warning("message of a rank dropped", extra=fields(error=error))
            return
        self._send_out(out)

    def _send_out(self, out: list[Out]) -> None:
        for peer, message in out:
            self._sockets.send_to(peer, encode(message))

    def _take(self, message: FromHub) -> None:
        with self._news:
            self._standings_at = time.monotonic()
            if self._hub is None:
                self._broke_at = float("inf")  # it is connected again
            match message:
                case Waiting(missing):
                    self._missing = missing
                case Turned():
                    self._turned = message
                case Met(incarnation, members):
                    if not self.members:
                        self.incarnation, self.members = incarnation, members
                case Standings(rows):
                    self._standings = rows
                case Gone(rank, left):
                    if left:
                        self._left.add(rank)
                    if rank != self._rank:
                        self._lose(rank, "left" if left else "was disconnected")
                case Wake(number):
                    self.woken_at = max(self.woken_at, number)
                    self.on_wake()
                case StoreValue(key, value):
                    self._values[key] = value
            self._news.notify_all()

    # ---------------------------------------------------------------- time

    def _tick(self, now: float, poller: select.poll) -> None:
        if self.members:
            self._outgoing.append(Beat(self.progress.standing()))
            self._watch_processes(poller)
            self._judge(now)
        if self._strangers and now - self._strangers_said_at >= STRANGERS_S:
            log.warning("connections that said nothing were ended", extra=fields(ended=self._strangers))
            self._strangers, self._strangers_said_at = 0, now
        if self._hub is not None:
            self._send_out(self._hub.tick(now))
            if now - self._broke_at > LOST_S:
                for rank in self._hub.silent(now, LOST_S):
                    if not self._is_beside(rank):  # of a rank beside this one its process tells
                        self._send_out(self._hub.gone(rank, left=False))
                self._broke_at = float("inf")
        if self._lost is not None and now - self._lost_at >= GRACE_S and not (self._leaves or self.is_done()):
            rank, why = self._lost
            member = self.members[rank]
            about = fields(group=self._name, lost=rank, worker=member.worker, pid=member.pid, why=why)
            log.critical("the group lost a rank; the process ends", extra=about)
            os._exit(EXIT_PEER_LOST)

    def _is_beside(self, rank: int) -> bool:
        """Whether `rank` is on this machine, where a handle of its process is watched."""
        return rank == self._rank or rank in self._pidfds

    def _watch_processes(self, poller: select.poll) -> None:
        """Open handles of the processes on this machine, once."""
        if self._pidfds or len(self.members) == 1:
            return
        for rank, member in enumerate(self.members):
            if rank == self._rank or member.boot != self._join.boot:
                continue
            try:
                self._pidfds[rank] = os.pidfd_open(member.pid)
            except ProcessLookupError:
                self._lose(rank, "died")
            except OSError:  # in another namespace of processes: its connection tells
                continue
            else:
                poller.register(self._pidfds[rank], select.POLLIN)

    def _judge(self, now: float) -> None:
        """Blame a rank that is silent or makes no progress, and beat for a decode loop that waits for it."""
        ages = [age_s + now - self._standings_at for _, age_s in self._standings]
        standings = [standing for standing, _ in self._standings]
        if not ages:
            return
        if self._rank != 0 and now - self._broke_at > LOST_S and now - self._standings_at > LOST_S:
            self._lose(0, "was disconnected")
        quiet = silent(ages, now - self._standings_at)
        if quiet is not None and quiet != self._rank:
            age_s = now - self._standings_at if quiet == 0 and self._rank else ages[quiet]
            if age_s > self._hung_s:
                self._lose(quiet, f"was silent for {age_s:.0f} s")
        waits_since = self.progress.waits_since
        if waits_since is None or now - waits_since < AWAITS_AFTER_S:
            self._say_awaited(None)
            return
        standings[self._rank] = self.progress.standing()
        awaited = quiet if quiet is not None else behind(self._rank, standings)
        self._say_awaited(awaited)
        if awaited is None or not standings[awaited].turns:
            return
        seen, since = self._changed.get(awaited, (None, now))
        if seen != standings[awaited]:
            self._changed[awaited] = (standings[awaited], now)
        elif now - max(since, waits_since) > self._hung_s:
            self._lose(awaited, f"made no progress for {self._hung_s:g} s")

    def _say_awaited(self, rank: int | None) -> None:
        if self.counters is not None:
            self.counters.awaits = "" if rank is None or rank == self._rank else self.name_of(rank)
            if self.counters.awaits:
                self.counters.beat()

    def _lose(self, rank: int, why: str) -> None:
        if self._lost is None:
            self._lost, self._lost_at = (rank, "left" if rank in self._left else why), time.monotonic()
            with self._news:
                self._news.notify_all()

    def _missing_error(self) -> PeersMissingError:
        missing = ", ".join(map(str, self._missing)) or "0"
        held = f"; {self._turned.message}" if self._turned is not None else ""
        return PeersMissingError(
            f"of group {self._name} rank {missing} did not come within {MEET_LIMIT_S:g} s{held}",
            field="worker.group_endpoint",
            value=self._endpoint,
            remedy="start all ranks with one worker.group_endpoint and worker.group_secret_file, and see their logs",
        )

    def _waiting_fields(self, waited_s: float) -> dict[str, Any]:
        missing = " ".join(map(str, self._missing)) or "0"
        about = {"held": self._turned.message} if self._turned is not None else {}
        if self._broke_at < float("inf"):
            about["hint"] = "rank 0 closes the connection: do all ranks have one worker.group_secret_file?"
        return fields(group=self._name, rank=self._rank, missing=missing, seconds=round(waited_s), **about)


def _decoded(decode: Callable[[bytes], M], frame: bytes) -> M:
    try:
        return decode(frame)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(
            f"not a message of a rank: {error}",
            field="message",
            value=f"{len(frame)} bytes",
            remedy="give the endpoint to ranks of one group alone",
        ) from error


def _machine() -> str:
    """Equal for processes that can watch each other: one boot of a machine, and one namespace of process numbers."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()
