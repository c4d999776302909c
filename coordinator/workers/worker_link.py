"""Worker links: the worker socket, one link per worker epoch, and the proof that a worker process is gone.

    worker socket ─ decode ─ link by connection ─┬─ hello ──────► Scheduler.worker_up or _back, then Welcome or Refused
                                                 ├─ tokens ─────► token log ──► journal ──► deliveries, ReportAck
                                                 │                         └──► Scheduler.starving, prompt_rows
                                                 ├─ events ─────► Scheduler.on_event ──► the request's actor
                                                 └─ heartbeats ─► liveness, acknowledgements
    WorkerPort.send ─ command log ─ sender ──────► worker socket

Identity. libzmq's name of a connection identifies no worker; the hello does. Over ipc the kernel attests the process of
a connection (coordinator/listener/router.py). A second process cannot take a name while the attested process
runs, and a pidfd on that process shows its exit at once, as proof (I2). Without attestation (tcp, another pid
namespace) process ids prove nothing, and an epoch ends when no message arrives.

Epochs. worker_epoch.py decides what a hello leads to. Epochs from the journal are awaited: they count as up, without a
connection, until the same limit of silence as any other.

Acknowledgements. A report is acknowledged once it is in the journal. If the coordinator exits before, the worker sends
it again to the next one.

Misbehaviour. An unreadable message is refused and counted, and changes nothing. A worker whose reports contradict its
earlier ones (a missing position, an acknowledgement of a command that was not sent) has its epoch declared down, which
proves no exit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import numpy as np
import trio

from basics.processes import Process, has_ended, process_of, wait_exit
from coordinator.journal.journal import Journal
from coordinator.journal.records import WorkerJoined
from coordinator.listener.dropped import Dropped
from coordinator.listener.flood_control import FloodControl
from coordinator.listener.rate_limiter import RateLimiter
from coordinator.listener.router import Received, RouterSocket
from coordinator.scheduler.api import SchedulerApi
from coordinator.state.events import WorkerPort
from coordinator.tokens.token_log import EMPTY, TokenLog
from coordinator.workers.epoch_link import CommandSender, ReportAcks, WorkerLink
from coordinator.workers.tokenizer_store import TokenizerStore
from coordinator.workers.worker_epoch import Arrival, Course, KnownWorker, judge
from metrics.state import CoordinatorCounters
from protocol import messages
from protocol.arrays import Int32Array
from protocol.errors import CapacityError, HiSparseError, ProtocolError, Unavailable, WrongState
from protocol.inventory import unpack_rows
from protocol.logs import fields, logger
from protocol.messages import PROTOCOL_VERSION, Command, CoordinatorMessage
from protocol.settings import CoordinatorSettings
from protocol.skew import check_size, check_version, read_frame

#: Worker names known at the same time, up or down.
WORKERS_MAX: Final = 1_024
#: Rate of one worker, or of all under one key: a report each 20 ms, heartbeats, and replays of unacknowledged reports,
#: from many workers at once after a restart of the coordinator.
MESSAGES_PER_S: Final = 20_000.0
MESSAGES_BURST: Final = 200_000.0
#: Interval of `LinkScheduler.starving` while reports arrive.
STARVING_INTERVAL_S: Final = 0.02

log = logger("coordinator.workers.worker_link")


class WorkerLinks:
    """Owner of the worker socket and of all links. Ends when `close` is called."""

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
        limiter, dropped = RateLimiter(MESSAGES_PER_S, MESSAGES_BURST), Dropped("worker", counters.dropped_messages)
        self._flood_control = FloodControl(socket, limiter, dropped, self._answer_refused)
        self._by_name: dict[str, WorkerLink] = {}
        self._by_peer: dict[bytes, WorkerLink] = {}
        self._joining: set[str] = set()
        self._expected: list[WorkerLink] = []
        self._short: list[Int32Array] = []
        self._short_sent_at = float("-inf")
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
        """Serve until `close`; then send the commands queued so far."""
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
        """Run `step` in a new task: one per joining, leaving or watched epoch."""
        assert self._nursery is not None
        self._nursery.start_soon(step, *arguments)

    def expect(self, joined: WorkerJoined, is_live: bool) -> WorkerPort:
        """Await an epoch from the journal; call before `run`. Its commands wait for its hello.

        `is_live` False: the epoch was down; only its exit is awaited.
        """
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
        link = self._link(hello, process)
        link.is_awaited, link.is_down = True, not is_live
        if is_live or joined.worker not in self._by_name:
            self._by_name[joined.worker] = link
        self._expected.append(link)
        return link

    # ------------------------------------------------------------ receiving

    async def _read(self) -> None:
        while True:
            await self._flood_control.read(await self._socket.recv_batch(), self._receive)
            if trio.current_time() >= self._short_sent_at + STARVING_INTERVAL_S:
                self._send_short()

    def _send_short(self) -> None:
        """Send the Scheduler all requests that have run short since the last time, in one message to save turns."""
        short = np.concatenate(self._short) if self._short else EMPTY
        self._short.clear()
        self._short_sent_at = trio.current_time()
        if len(short):
            self._scheduler.starving(short)

    def _acknowledge(self, link: WorkerLink, number: int) -> None:
        self._send(link, messages.ReportAck(self._incarnation, number))

    def _receive(self, received: Received) -> None:
        """Handle one frame. Raises HiSparseError: the refusal for the sender."""
        check_size(received.frame_bytes, self._socket.message_bytes_max, "worker")
        message: messages.WorkerMessage = read_frame(
            messages.decode_worker, received.frame, self._socket.message_bytes_max, "worker", check_version
        )
        if isinstance(message, messages.WorkerHello):
            self._greet(received, message)
            return
        link = self._by_peer.get(received.peer)
        if link is None:
            raise ProtocolError("no hello on this connection", field="message", remedy="send WorkerHello first")
        if link.is_down or message.epoch != link.state.epoch:
            raise WrongState("this epoch is over", field="epoch", value=message.epoch, remedy="begin a new one")
        try:
            self._handle(link, message)
        except ProtocolError as error:
            self._put_down(link, proved_exit=False, reason=str(error))
            raise WrongState(error.message, field=error.field, value=error.value, remedy="begin a new epoch") from error

    def _handle(self, link: WorkerLink, message: messages.WorkerMessage) -> None:
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
                        self._send(link, messages.ReplayReports(self._incarnation, link.state.report_ack + 1))
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
            if len(appended.staged):
                self._scheduler.prompt_rows(appended.staged)
        for event in report.events:
            if isinstance(event, messages.Counters):
                link.state.count_swaps(event)
            self._scheduler.on_event(link.name, link.state.epoch, event)

    def _answer_refused(self, received: Received, error: HiSparseError) -> None:
        self._socket.send(received.peer, messages.encode(messages.Refused(error.code, error.message, error.remedy)))

    # ------------------------------------------------------------ joining

    def _greet(self, received: Received, hello: messages.WorkerHello) -> None:
        """Handle a hello. Joining waits for the Scheduler, one hello per name at a time.

        Its process is the one that made the connection; both may have ended by now.
        """
        self._socket.connection_events.introduce(received.descriptor, received.user)
        if hello.worker in self._joining:
            raise Unavailable("an earlier hello of this name is in progress", field="worker", value=hello.worker)
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
                welcome = messages.WorkerWelcome(hello.protocol, self._incarnation, 0, want_tokenizer=False)
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
        self._welcome(link, peer, hello.protocol)

    def _check_room(self, name: str) -> None:
        """Forget workers whose exit is proved; raise CapacityError when WORKERS_MAX names remain."""
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
        link = self._link(hello, process_of(received.pid))
        try:
            await self._scheduler.worker_up(hello, link, link.attested)
        except HiSparseError as error:
            self._flood_control.refuse(received, error)
            return
        finally:
            self._joining.discard(hello.worker)
        previous = self._by_name.get(hello.worker)
        if previous is not None and previous.peer is not None:
            self._by_peer.pop(previous.peer, None)
        self._by_name[hello.worker] = link
        if link.process:
            self._start(self._watch_process, link)
        about = fields(worker=link.name, epoch=hello.epoch, process=link.process, protocol=hello.protocol)
        log.info("worker joined", extra=about)
        self._welcome(link, received.peer, hello.protocol)

    async def _adopt(self, received: Received, hello: messages.WorkerHello, link: WorkerLink) -> None:
        """Continue an epoch from the journal with the inventory of its hello. If that fails, the epoch is down."""
        try:
            inventory = unpack_rows(hello.inventory)
            link.state.adopt(hello, trio.current_time())
            await self._scheduler.worker_back(hello)
        except HiSparseError as error:
            self._put_down(link, proved_exit=False, reason=str(error))
            self._flood_control.refuse(received, WrongState(error.message, remedy="begin a new epoch"))
            return
        finally:
            self._joining.discard(hello.worker)
        if link.is_down:
            self._flood_control.refuse(received, WrongState("this epoch was declared down", remedy="begin a new one"))
            return
        for row in inventory:
            self._log.rebind(row.request_index, row.placement, link.number)
        link.is_awaited = False
        log.info("worker back", extra=fields(worker=link.name, epoch=hello.epoch, held=len(inventory)))
        self._welcome(link, received.peer, hello.protocol, adopted=True)

    def _welcome(self, link: WorkerLink, peer: bytes, protocol: int, *, adopted: bool = False) -> None:
        if link.peer is not None:
            self._by_peer.pop(link.peer, None)
        link.peer, link.protocol = peer, protocol
        self._by_peer[peer] = link
        wants = self._tokenizers.wants(link.model)
        acknowledged = link.state.report_durable
        self._send(link, messages.WorkerWelcome(protocol, self._incarnation, acknowledged, wants, adopted))
        self._sender.soon(link)

    # ------------------------------------------------------------ ends of epochs

    async def _see_off(self, link: WorkerLink) -> None:
        """The worker withdraws all requests and exits: drain it, so that no request is placed there."""
        try:
            await self._scheduler.drain((link.name,), f"worker {link.name}", handover=False, deadline_s=0.0)
        except HiSparseError as error:
            log.info("leaving worker not drained", extra=fields(worker=link.name, error=error))

    async def _watch_time(self) -> None:
        settings = self._settings
        while True:
            due_at = trio.current_time() + settings.heartbeat_interval_s / 2
            await trio.sleep_until(due_at)
            self._send_short()
            now = trio.current_time()
            for link in tuple(self._by_name.values()):
                if link.is_down:
                    continue
                link.state.excuse(now - due_at, now)  # messages may wait in the socket
                if reason := link.state.failing(now, settings.heartbeat_limit_s):
                    self._put_down(link, proved_exit=False, reason=reason)
                elif link.state.commands.replay_overdue(now, settings.command_ack_limit_s):
                    log.warning("commands overdue, sent again", extra=fields(worker=link.name))
                    self._sender.soon(link)

    async def _watch_process(self, link: WorkerLink) -> None:
        """Wait for the exit of the link's process, or until the exit is proved otherwise."""
        if not link.process:
            return
        with link.watch:
            if not has_ended(link.attested):
                await wait_exit(link.process)
        if not link.watch.cancelled_caught:
            self._prove(link, died=True)

    def _prove(self, link: WorkerLink, *, died: bool) -> None:
        """The epoch can touch no memory any more: its process has exited (`died`), or has begun a new epoch."""
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
        self._scheduler.worker_down(link.name, link.state.epoch, proved_exit, died, link.is_leaving)

    # ------------------------------------------------------------ sending

    def _link(self, hello: messages.WorkerHello, process: Process) -> WorkerLink:
        return WorkerLink(
            hello,
            process,
            self._numbers,
            trio.current_time(),
            queue=self.queue,
            observe_round_trip=self.observe_round_trip,
        )

    def queue(self, link: WorkerLink, command: Command) -> None:
        """Queue a command of WorkerLink.send. Commands to an epoch that is down are dropped; its memory is accounted
        for elsewhere."""
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

    def _send(self, link: WorkerLink, message: CoordinatorMessage) -> None:
        """Send `message` once. It may be lost: the worker asks again for a missing acknowledgement or welcome."""
        if link.peer is not None:
            self._socket.send(link.peer, messages.encode(message))
