"""Worker links: the worker socket, one link per worker epoch, and the proof that a process is gone.

    worker socket ─ decode ─ link by connection ─┬─ hello ──────► Scheduler.worker_up or _back, then Welcome or Refused
                                                 ├─ tokens ─────► token log ──► journal ──► gateway wakes, ReportAck
                                                 │                         └──► Scheduler.starving
                                                 ├─ events ─────► Scheduler.on_event ──► the request's actor
                                                 └─ heartbeats ─► signs of life, acknowledgements
    WorkerPort.send ─ command log ─ sender ──────► worker socket

Who is who. A connection is named by libzmq and says nothing; a worker is named in its hello. Over ipc the kernel
attests the process behind a connection (transport/sockets.py): a second process cannot take over a name whose process
lives, and a pidfd on the attested process shows its exit at once, as proof (I2). Without attestation (tcp, another pid
namespace) nothing is ever proved by process ids, and an epoch ends by silence.

Epochs. What a hello leads to is decided in worker_hello.py beside this. Epochs that the journal knows are expected:
they count as up, without a connection, for as long as any silent one would.

Acknowledgements. A report is acknowledged once what it said is in the journal: a coordinator that dies before that is
told again by the worker.

Misbehaviour. What cannot be read is refused to its sender, counted, and changes nothing. A worker that reports what
cannot be (a missed position, an acknowledgement of nothing) has its epoch declared down, with no proof of anything.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import numpy as np
import trio

from coordinator.journal.journal import Journal
from coordinator.journal.records import WorkerJoined
from coordinator.listener.dropped import Dropped
from coordinator.listener.flood_control import FloodControl
from coordinator.listener.rate_limiter import RateLimiter
from coordinator.listener.router import Received, RouterSocket
from coordinator.scheduling.api import SchedulerApi
from coordinator.scheduling.events import LinkStats, WorkerPort
from coordinator.tokens.token_log import TokenLog
from coordinator.workers.command_sender import CommandSender
from coordinator.workers.processes import Process, has_ended, process_of, wait_exit
from coordinator.workers.report_acks import ReportAcks
from coordinator.workers.tokenizer_store import TokenizerStore
from coordinator.workers.worker_epoch import Arrival, WorkerEpoch
from coordinator.workers.worker_hello import Course, KnownWorker, judge
from metrics.state import CoordinatorCounters
from protocol import messages
from protocol.arrays import Int32Array
from protocol.errors import CapacityError, HiSparseError, ProtocolError, Unavailable, WrongState
from protocol.inventory import unpack_rows
from protocol.logs import fields, logger
from protocol.messages import PROTOCOL_VERSION, Command, CoordinatorMessage
from protocol.settings import CoordinatorSettings
from protocol.transport.frames import read_frame

#: Worker names known at the same time, living or down.
WORKERS_MAX: Final = 1_024
#: What one worker, or all under one key, may say: a report each 20 ms, heartbeats, and a replay of all that was not
#: acknowledged, from many workers at once when a coordinator comes back.
MESSAGES_PER_S: Final = 20_000.0
MESSAGES_BURST: Final = 200_000.0
#: How often the Scheduler is told which requests run short, while reports come.
STARVING_INTERVAL_S: Final = 0.02

EMPTY: Final[Int32Array] = np.empty(0, np.int32)

log = logger("coordinator.workers.worker_link")


class WorkerLink:
    """One epoch of one worker: its state, where it is reached, and the WorkerPort that the actors see.

    `number` names it in the token log. `process` is the attested process, 0 without attestation.
    """

    def __init__(
        self, hello: messages.WorkerHello, process: Process, number: int, owner: WorkerLinks, now: float
    ) -> None:
        self.state = WorkerEpoch(hello, owner.observe_round_trip, now)
        self.model = hello.model
        self.attested = process
        self.number = number
        self.peer: bytes | None = None
        self.is_down = False
        self.is_awaited = False
        self.is_leaving = False
        self.proved_exit = False
        self.watch = trio.CancelScope()
        self._owner = owner

    @property
    def name(self) -> str:
        return self.state.worker

    @property
    def process(self) -> int:
        return self.attested.id

    def send(self, command: Command) -> None:
        """Number and log `command` and wake the sender. Never blocks or fails: past its bound the worker is down."""
        self._owner.queue(self, command)

    def stats(self) -> LinkStats:
        return self.state.stats(trio.current_time())


class WorkerLinks:
    """Owner of the worker socket. `run` until `close`."""

    name = "worker links"

    def __init__(
        self,
        scheduler: SchedulerApi,
        token_log: TokenLog,
        tokenizers: TokenizerStore,
        counters: CoordinatorCounters,
        settings: CoordinatorSettings,
        *,
        socket: RouterSocket,
        incarnation: int,
        journal: Journal,
    ) -> None:
        self._scheduler = scheduler
        self._log = token_log
        self._tokenizers = tokenizers
        self.observe_round_trip = counters.command_ack_s.observe
        self._counters = counters
        self._settings = settings
        self._socket = socket
        self._incarnation = incarnation
        self._journal = journal
        self._acks = ReportAcks(journal, self._acknowledge)
        self._dropped = Dropped("worker", counters.dropped_messages)
        self._flood_control = FloodControl(
            socket, RateLimiter(MESSAGES_PER_S, MESSAGES_BURST), self._dropped, self._tell_refused
        )
        self._by_name: dict[str, WorkerLink] = {}
        self._by_peer: dict[bytes, WorkerLink] = {}
        self._joining: set[str] = set()
        self._expected: list[WorkerLink] = []
        self._short: list[Int32Array] = []
        self._short_told_at = float("-inf")
        self._numbers = 0
        self._sender = CommandSender(socket, incarnation, counters)
        self._closing = trio.Event()
        self._nursery: trio.Nursery | None = None

    def close(self) -> None:
        self._closing.set()

    def history(self) -> tuple[str, ...]:
        return tuple(
            f"{link.name}: epoch {link.state.epoch}, {'down' if link.is_down else 'up'}, "
            f"report {link.state.report_ack}, command {link.state.commands.acknowledged}"
            for link in self._by_name.values()
        )

    async def run(self) -> None:
        """Serve until `close`; commands given by then are sent once more."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for link in self._expected:
                nursery.start_soon(self._watch_process, link)
            nursery.start_soon(self._read)
            nursery.start_soon(self._acks.run)
            nursery.start_soon(self._sender.run)
            nursery.start_soon(self._watch_time)
            await self._closing.wait()
            nursery.cancel_scope.cancel()
        self._sender.send_all()

    def _start(self, step: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Run what waits in a task of its own: one per joining, leaving or watched epoch."""
        assert self._nursery is not None
        self._nursery.start_soon(step, *arguments)

    def expect(self, joined: WorkerJoined, is_live: bool) -> WorkerPort:
        """An epoch from the journal, before `run`. Commands to it wait for its hello; `is_live` False: for its exit."""
        hello = messages.WorkerHello(
            PROTOCOL_VERSION,
            joined.worker,
            joined.node,
            joined.epoch,
            joined.process,
            0,
            0,
            1,
            joined.model,
            joined.capacity,
        )
        self._numbers += 1
        process = Process(joined.process, joined.started, joined.boot)
        link = WorkerLink(hello, process, self._numbers, self, trio.current_time())
        link.is_awaited, link.is_down = True, not is_live
        if is_live or joined.worker not in self._by_name:
            self._by_name[joined.worker] = link
        self._expected.append(link)
        return link

    # ------------------------------------------------------------ what arrives

    async def _read(self) -> None:
        while True:
            for received in await self._socket.recv_batch():
                if not self._flood_control.admits(received, trio.current_time()):
                    continue
                try:
                    self._receive(received)
                except HiSparseError as error:
                    self._refuse(received.peer, error)
            if trio.current_time() >= self._short_told_at + STARVING_INTERVAL_S:
                self._tell_short()

    def _tell_short(self) -> None:
        """What all workers' requests have run short of since the last time, in one message: a turn costs as much."""
        short = np.concatenate(self._short) if self._short else EMPTY
        self._short.clear()
        self._short_told_at = trio.current_time()
        if len(short):
            self._scheduler.starving(short)

    def _acknowledge(self, link: WorkerLink, number: int) -> None:
        self._say(link, messages.ReportAck(self._incarnation, number))

    def _receive(self, received: Received) -> None:
        """Raises what the sender is refused with."""
        message: messages.WorkerMessage = read_frame(
            messages.decode_worker, received.frame, self._socket.message_bytes_max, "worker"
        )
        if isinstance(message, messages.WorkerHello):
            self._greet(received, message)
            return
        link = self._by_peer.get(received.peer)
        if link is None:
            raise ProtocolError("this connection is not known here", field="message", remedy="say hello first")
        if link.is_down or message.epoch != link.state.epoch:
            raise WrongState("this epoch is over", field="epoch", value=message.epoch, remedy="begin a new one")
        try:
            self._hear(link, message)
        except ProtocolError as error:
            self._put_down(link, proved_exit=False, reason=str(error))
            raise WrongState(error.message, field=error.field, value=error.value, remedy="begin a new epoch") from error

    def _hear(self, link: WorkerLink, message: messages.WorkerMessage) -> None:
        now = trio.current_time()
        match message:
            case messages.Report():
                arrival = link.state.report(message, now)
                if arrival is Arrival.NEXT:
                    self._apply(link, message)
                if arrival is not Arrival.GAP:
                    self._acks.received(link)
                else:
                    self._counters.report_gaps += 1
                    if link.state.should_ask_again(now):
                        self._say(link, messages.ReplayReports(self._incarnation, link.state.report_ack + 1))
            case messages.Heartbeat():
                link.state.heartbeat(message, now)
                if message.leaving and not link.is_leaving:
                    link.is_leaving = True
                    self._start(self._see_off, link)
            case messages.ReplayCommands():
                link.state.commands.replay(message.first)
                self._sender.soon(link)
            case messages.TokenizerChunk():
                self._tokenizers.take(link.name, link.model, message)

    def _apply(self, link: WorkerLink, report: messages.Report) -> None:
        """Tokens before events: a Finished must find its last token in the log."""
        self._counters.reports += 1
        if report.progress is not None:
            appended = self._log.append(report.progress, link.number)
            self._counters.tokens += appended.tokens
            self._counters.repeated_tokens += appended.repeated_tokens
            self._counters.waits.tokens_came(*self._log.times.arrived(*appended[:3], trio.current_time()))
            self._short.append(self._log.report_short(appended, self._settings.grant_ahead_tokens))
            self._journal.tokens_arrived()
        for event in report.events:
            if isinstance(event, messages.Counters):
                link.state.count_swaps(event)
            self._scheduler.on_event(link.name, link.state.epoch, event)

    def _refuse(self, peer: bytes, error: HiSparseError) -> None:
        self._dropped.note(error.code, peer, str(error), trio.current_time())
        self._say_refused(peer, error)

    def _tell_refused(self, received: Received, error: HiSparseError) -> None:
        self._say_refused(received.peer, error)

    def _say_refused(self, peer: bytes, error: HiSparseError) -> None:
        self._socket.send(peer, messages.encode(messages.Refused(error.code, error.message, error.remedy)))

    # ------------------------------------------------------------ joining

    def _greet(self, received: Received, hello: messages.WorkerHello) -> None:
        """Act on a hello; joining takes the Scheduler's turn, one hello per name at a time.

        The process behind it is that which made the connection, however long gone either is by now.
        """
        self._socket.introduce(received)
        if hello.worker in self._joining:
            raise Unavailable("an earlier hello of that name is being answered", field="worker", value=hello.worker)
        link = self._by_name.get(hello.worker)
        known = KnownWorker(link.state.epoch, link.process, link.is_down, link.is_awaited) if link is not None else None
        match judge(hello, received.pid, known, self._incarnation), link:
            case Course.CONTINUE, WorkerLink():
                self._continue(link, received.peer, hello)
            case Course.ADOPT, WorkerLink():
                self._joining.add(hello.worker)
                self._start(self._adopt, received, hello, link)
            case Course.SEND_AWAY, _:
                log.info("worker sent away to empty itself", extra=fields(worker=hello.worker, epoch=hello.epoch))
                welcome = messages.WorkerWelcome(PROTOCOL_VERSION, self._incarnation, 0, want_tokenizer=False)
                self._socket.send(received.peer, messages.encode(welcome))
            case course, _:
                if course is Course.SUCCEED and link is not None:
                    self._prove(link, died=False)
                self._check_room(hello.worker)
                self._joining.add(hello.worker)
                self._start(self._join, received, hello)

    def _continue(self, link: WorkerLink, peer: bytes, hello: messages.WorkerHello) -> None:
        try:
            link.state.reconnect(hello, trio.current_time())
        except WrongState as error:
            self._put_down(link, proved_exit=False, reason=str(error))
            raise
        self._welcome(link, peer)

    def _check_room(self, name: str) -> None:
        """Raise CapacityError when too many names are known that may still have a process."""
        if len(self._by_name) < WORKERS_MAX or name in self._by_name:
            return
        for link in tuple(self._by_name.values()):
            if link.proved_exit:
                del self._by_name[link.name]
                self._by_peer.pop(link.peer or b"", None)
        if len(self._by_name) >= WORKERS_MAX:
            raise CapacityError(f"{WORKERS_MAX} workers are known", field="worker", value=name)

    async def _join(self, received: Received, hello: messages.WorkerHello) -> None:
        self._numbers += 1
        link = WorkerLink(hello, process_of(received.pid), self._numbers, self, trio.current_time())
        try:
            await self._scheduler.worker_up(hello, link)
        except HiSparseError as error:
            self._refuse(received.peer, error)
            return
        finally:
            self._joining.discard(hello.worker)
        previous = self._by_name.get(hello.worker)
        if previous is not None and previous.peer is not None:
            self._by_peer.pop(previous.peer, None)
        self._by_name[hello.worker] = link
        if link.process:
            self._start(self._watch_process, link)
            self._write_process(link, hello)
        log.info("worker joined", extra=fields(worker=link.name, epoch=hello.epoch, process=link.process))
        self._welcome(link, received.peer)

    def _write_process(self, link: WorkerLink, hello: messages.WorkerHello) -> None:
        """So that a later life of the coordinator can tell whether it has exited."""
        self._journal.append(
            [WorkerJoined(hello.node, hello.worker, hello.epoch, hello.capacity, hello.model, *link.attested)]
        )

    async def _adopt(self, received: Received, hello: messages.WorkerHello, link: WorkerLink) -> None:
        """Go on with an epoch that the journal knows, from its inventory; if that cannot be, it is over."""
        try:
            inventory = unpack_rows(hello.inventory)
            link.state.adopt(hello, trio.current_time())
            await self._scheduler.worker_back(hello)
        except HiSparseError as error:
            self._put_down(link, proved_exit=False, reason=str(error))
            self._refuse(received.peer, WrongState(error.message, remedy="begin a new epoch"))
            return
        finally:
            self._joining.discard(hello.worker)
        if link.is_down:
            self._refuse(received.peer, WrongState("this epoch was declared down", remedy="begin a new one"))
            return
        for row in inventory:
            self._log.rebind(row.request_index, row.placement, link.number)
        link.is_awaited = False
        log.info("worker back", extra=fields(worker=link.name, epoch=hello.epoch, held=len(inventory)))
        self._welcome(link, received.peer, adopted=True)

    def _welcome(self, link: WorkerLink, peer: bytes, *, adopted: bool = False) -> None:
        if link.peer is not None:
            self._by_peer.pop(link.peer, None)
        link.peer = peer
        self._by_peer[peer] = link
        wants = self._tokenizers.wants(link.model)
        acknowledged = link.state.report_durable
        self._say(link, messages.WorkerWelcome(PROTOCOL_VERSION, self._incarnation, acknowledged, wants, adopted))
        self._sender.soon(link)

    # ------------------------------------------------------------ ends

    async def _see_off(self, link: WorkerLink) -> None:
        """The worker withdraws everything by itself and exits: nothing more is to be admitted to it."""
        try:
            await self._scheduler.drain((link.name,), f"worker {link.name}", handover=False, deadline_s=0.0)
        except HiSparseError as error:
            log.info("leaving worker not drained", extra=fields(worker=link.name, error=error))

    async def _watch_time(self) -> None:
        settings = self._settings
        while True:
            await trio.sleep(settings.heartbeat_interval_s / 2)
            self._tell_short()
            now = trio.current_time()
            for link in tuple(self._by_name.values()):
                if link.is_down:
                    continue
                if reason := link.state.failing(now, settings.heartbeat_limit_s):
                    self._put_down(link, proved_exit=False, reason=reason)
                elif link.state.commands.replay_overdue(now, settings.command_ack_limit_s):
                    log.warning("commands overdue, sent again", extra=fields(worker=link.name))
                    self._sender.soon(link)

    async def _watch_process(self, link: WorkerLink) -> None:
        """Until the process has exited, or its exit does not matter any more."""
        if not link.process:
            return
        with link.watch:
            if not has_ended(link.attested):
                await wait_exit(link.process)
        if not link.watch.cancelled_caught:
            self._prove(link, died=True)

    def _prove(self, link: WorkerLink, *, died: bool) -> None:
        """Nothing of that epoch can touch memory any more: its process has died, or has emptied itself."""
        if link.proved_exit:
            return
        link.proved_exit = True
        link.watch.cancel()
        if link.is_down:
            self._scheduler.worker_exited(link.name, link.state.epoch, died)
        else:
            self._put_down(
                link,
                proved_exit=True,
                reason="its process has ended" if died else "it has begun a new epoch",
                died=died,
            )

    def _put_down(self, link: WorkerLink, *, proved_exit: bool, reason: str, died: bool = False) -> None:
        if link.is_down:
            return
        link.is_down = True
        self._sender.forget(link)
        self._tokenizers.forget(link.name)
        log.warning("worker down", extra=fields(worker=link.name, epoch=link.state.epoch, reason=reason))
        self._scheduler.worker_down(link.name, link.state.epoch, proved_exit, died)

    # ------------------------------------------------------------ what is sent

    def queue(self, link: WorkerLink, command: Command) -> None:
        """For WorkerLink.send: commands to an epoch that is down are dropped, whatever they gave is accounted for."""
        if link.is_down:
            return
        if isinstance(command, messages.Admit):
            self._log.bind(command.request_index, link.number)
            self._counters.admissions += 1
        try:
            link.state.commands.append(command)
        except CapacityError as error:
            self._put_down(link, proved_exit=False, reason=str(error))
            return
        self._counters.commands += 1
        self._sender.soon(link)

    def _say(self, link: WorkerLink, message: CoordinatorMessage) -> None:
        """Acknowledgements, welcomes and questions may be lost: whoever misses one asks again."""
        if link.peer is not None:
            self._socket.send(link.peer, messages.encode(message))
