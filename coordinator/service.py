"""The coordinator process: wires its parts, starts and stops them. Neither this module nor its imports import torch.

start    take locks and bind sockets; take the incarnation; open the journal and recover from it; start actors and
         /metrics; log the sizes and endpoints
run      until a stop is requested (admin command, SIGTERM, SIGINT) and every request has ended
stop     refuse new requests; let running ones finish until the deadline. Unfinished requests then stay in the journal
         for the next process; without a journal they fail. Flush outputs to clients, end the actors level by level
         (coordinator.actor). Each of these steps has a time limit
second signal   exit at once
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import trio

from basics import gc_policy
from basics.process_memory import map_large_buffers
from basics.rooms import RoomUse, by_label
from basics.tracing.sender import QUEUE_SPANS_MAX, SpanSender, open_sender
from coordinator.actor import Supervisor, open_supervisor
from coordinator.gateway.deliveries import Deliveries
from coordinator.gateway.gateway import Gateway
from coordinator.gateway.kv_publisher import KvPublisher, Published
from coordinator.incarnation import next_incarnation
from coordinator.journal.journal import GroupCommit, Journal, JournalError, NoJournal
from coordinator.journal.state import replay
from coordinator.journal.store import SqliteStore, open_store
from coordinator.listener.connection_tracker import NEWCOMERS_MAX
from coordinator.listener.dropped import Dropped
from coordinator.listener.router import ROUTER_QUEUE_MESSAGES, CurveGuard, RouterSocket, make_room
from coordinator.listener.sweeper import Sweeper
from coordinator.listener.zap import AllowList, ZapHandler
from coordinator.policy.prefix_reuse import ALL, OFF, OWN
from coordinator.scheduler.scheduler import Scheduler
from coordinator.tokens.token_log import TokenLog
from coordinator.tracing import RequestTracing
from coordinator.turn.recovery import expect_workers
from coordinator.workers.tokenizer_store import TokenizerStore
from coordinator.workers.worker_link import WORKERS_MAX, WorkerLinks
from metrics.coordinator import (
    CoordinatorCollector,
    CoordinatorSources,
    CoordinatorView,
    ask_loop,
    coordinator_health,
    coordinator_readiness,
)
from metrics.exporter import Exporter, serve
from metrics.state import CoordinatorCounters
from protocol import logs
from protocol.config_checks import KV_EVENT_ARRAYS
from protocol.errors import ConfigError
from protocol.logs import fields, logger
from protocol.messages import CLIENT_MESSAGE_BYTES_MAX, WORKER_MESSAGE_BYTES_MAX
from protocol.rereading import ReloadableFiles
from protocol.settings import NO_JOURNAL, ClusterSettings, Config
from protocol.transport.keys import ALLOWED_FILE, Insecure, read_allowed, read_server_key
from protocol.transport.private_dir import make_private_dir
from protocol.version import our_version

#: Longest time of a stop beyond its deadline.
STOP_MARGIN_S: Final = 10.0

#: Messages of one client that libzmq holds unread. Times the largest message, this bounds the memory a client can take.
CLIENT_UNREAD_MESSAGES: Final = 64

EXIT_CLEAN: Final = 0
EXIT_INTERRUPTED: Final = 130

log = logger("coordinator")


def run_coordinator(config: Config) -> int:
    """Serve until stopped; returns the exit code. `config` is resolved (protocol.config).

    Raises ConfigError or Unavailable when it cannot start. The exception of a failed actor leaves this function: the
    process must end.
    """
    logs.configure(config.cluster.log_level, config.cluster.log_format)
    map_large_buffers()
    counters = CoordinatorCounters()
    with (
        open_zap(config, counters) as zap,
        open_sockets(config) as sockets,
        open_publisher(config, counters) as publisher,
        open_sender(config.cluster, "coordinator", counters.spans) as sender,
    ):
        coordinator = Coordinator(config, *sockets, zap=zap, publisher=publisher, span_sender=sender, counters=counters)
        return trio.run(coordinator.serve)


class Coordinator:
    """The parts of one coordinator. Owns all of them but the sockets, the ZAP handler, the publisher and the sender of
    spans."""

    def __init__(
        self,
        config: Config,
        client_socket: RouterSocket,
        admin_socket: RouterSocket,
        worker_socket: RouterSocket,
        *,
        zap: ZapHandler | None = None,
        publisher: KvPublisher | None = None,
        span_sender: SpanSender | None = None,
        counters: CoordinatorCounters | None = None,
    ) -> None:
        settings = config.coordinator
        self._publisher = publisher
        self._span_sender = span_sender
        self._config = config
        self._client_socket = client_socket
        self._admin_socket = admin_socket
        self._worker_socket = worker_socket
        self.incarnation = next_incarnation(Path(config.cluster.runtime_dir))
        self._zap = zap
        self._allowed_file: ReloadableFiles | None = None
        if zap is not None:
            path = Path(config.cluster.keys_dir) / ALLOWED_FILE
            self._allowed_file = ReloadableFiles("allowed keys", [path], self._read_allowed)
        self.counters = counters or CoordinatorCounters()
        self._store = _open_journal(settings.journal, self.counters)
        self.token_log = TokenLog(
            settings.live_requests_max + settings.ended_keep_max, journalled=self._store is not None
        )
        self.tokenizers = TokenizerStore()
        self.deliveries = Deliveries(
            self.token_log,
            self.counters,
            connections_max=settings.connections_max,
            flush_interval_s=settings.flush_interval_ms / 1e3,
        )
        self.started = trio.Event()
        self._gateway: Gateway
        self._journal: Journal
        self._stopping = False
        self._version = our_version()

    async def serve(self) -> int:
        """Run until stopped; returns the exit code. `started` is set once messages are being read."""
        try:
            await self._serve()
        finally:
            if self._store is not None:
                self._store.close()  # after the Journal actor has ended: its thread may write until then
        log.info("stopped")
        return EXIT_CLEAN

    async def _serve(self) -> None:
        journal = await self._recover()
        async with open_supervisor() as supervisor:
            scheduler = self._start_actors(supervisor, journal)
            exporter = self._serve_metrics(scheduler)
            try:
                async with trio.open_nursery() as nursery:
                    await nursery.start(self._watch_signals, scheduler, nursery)
                    nursery.start_soon(gc_policy.collect)
                    if self._zap is not None:
                        nursery.start_soon(self._zap.run)
                    dropped = {role: Dropped(role, self.counters.dropped_messages) for role in self._router_sockets}
                    nursery.start_soon(Sweeper(self._router_sockets, dropped).run)
                    gc_policy.settle()
                    self._announce(exporter)
                    self.started.set()
                    await scheduler.stopped.wait()
                    await supervisor.shutdown()
                    nursery.cancel_scope.cancel()
            finally:
                if exporter is not None:
                    exporter.close()

    async def _recover(self) -> Journal:
        """The journal, with its state and the token log restored. Raises ConfigError when it is damaged."""
        if self._store is None:
            return NoJournal(self.deliveries.wake)
        began = time.perf_counter()
        try:
            state = replay(await self._store.load(), self.token_log)
        except JournalError as error:
            raise ConfigError(
                f"the journal cannot be read: {error}",
                field="coordinator.journal",
                value=self._store.path,
                remedy="restore it, or move it away: its requests are lost then",
            ) from error
        known = fields(
            path=str(self._store.path), requests=len(state.requests), seconds=round(time.perf_counter() - began, 3)
        )
        log.info("journal", extra=known)
        return GroupCommit(
            self._store, state, self.token_log, on_tokens=self.deliveries.wake, counters=self.counters.journal
        )

    def _start_actors(self, supervisor: Supervisor, journal: Journal) -> Scheduler:
        settings = self._config.coordinator
        wall_offset_s = time.time() - trio.current_time()
        tracing = None
        if self._span_sender is not None:
            tracing = RequestTracing(self._span_sender.put, self._config.cluster.trace_ratio, wall_offset_s)
        scheduler = Scheduler(
            settings,
            token_log=self.token_log,
            listener=self.deliveries,
            counters=self.counters,
            journal=journal,
            wall_offset_s=wall_offset_s,
            publish=self._publisher.publish if self._publisher is not None else None,
            begin_trace=tracing.begin if tracing is not None else None,
        )
        gateway = Gateway(
            scheduler,
            self.deliveries,
            self.token_log,
            self.tokenizers,
            self.counters,
            client_socket=self._client_socket,
            admin_socket=self._admin_socket,
            incarnation=self.incarnation,
            version=self._version,
            rate=(settings.messages_per_s, settings.messages_burst),
            reload_keys=self._reload_keys,
            **({"key_of": self._zap.allowed.newest} if self._zap is not None else {}),
        )
        links = WorkerLinks(
            scheduler,
            self.token_log,
            self.tokenizers,
            self.counters,
            settings,
            socket=self._worker_socket,
            incarnation=self.incarnation,
            journal=journal,
        )
        self._gateway, self._journal = gateway, journal
        scheduler.recover(expect_workers(journal.state, links.expect))
        if isinstance(journal, GroupCommit):
            supervisor.start(journal)
        supervisor.start(links)
        supervisor.start(scheduler)
        supervisor.start(gateway)
        return scheduler

    def _announce(self, exporter: Exporter | None) -> None:
        settings = self._config.coordinator
        log.info("starting", extra=fields(version=self._version, incarnation=self.incarnation, pid=os.getpid()))
        log.info(
            "sized",
            extra=fields(
                live_requests_max=settings.live_requests_max,
                queue_max=settings.queue_max,
                ended_keep_max=settings.ended_keep_max,
                connections_max=settings.connections_max,
                output_tokens_max=self.token_log.arena_tokens,
            ),
        )
        for role, socket in (
            ("clients", self._client_socket),
            ("admins", self._admin_socket),
            ("workers", self._worker_socket),
        ):
            log.info("listening", extra=fields(to=role, endpoint=socket.endpoint))
        self._announce_reuse()
        if exporter is not None:
            log.info("metrics", extra=fields(url=f"{exporter.url}/metrics"))

    def _announce_reuse(self) -> None:
        mode = self._config.coordinator.prefix_reuse
        owners = "all requests" if mode == ALL else "each user of a key, and each tenant of a front"
        if mode == OWN and self._zap is None:
            owners = "all clients, since there are no keys; each tenant of a front is one of its own"
        log.info("prefix reuse", extra=fields(mode=mode, **({"one_owner": owners} if mode != OFF else {})))
        if self._publisher is not None:
            log.info("publishing", extra=fields(what="events of the prefix cache", endpoint=self._publisher.endpoint))

    # ------------------------------------------------------------ listeners

    @property
    def _router_sockets(self) -> dict[str, RouterSocket]:
        return {"client": self._client_socket, "admin": self._admin_socket, "worker": self._worker_socket}

    def _reload_keys(self) -> str:
        """Read the allowed keys again, and say what was found. Raises ConfigError, and the old list holds."""
        if self._allowed_file is None:
            return "no keys: no listener of this coordinator is tcp with keys"
        try:
            found = self._allowed_file.reload()
        except ConfigError as error:
            log.warning("allowed keys not read, the old list holds", extra=fields(error=error))
            raise
        log.info("allowed keys read", extra=fields(result=found))
        return found

    def _read_allowed(self) -> str:
        """Connections of users who lost a key are ended; those with another allowed key of that name reconnect."""
        assert self._zap is not None
        allowed = read_allowed(Path(self._config.cluster.keys_dir))
        lost = self._zap.allowed.replace(allowed)
        ended = sum(socket.connection_events.cut_users(lost) for socket in self._router_sockets.values())
        whose = f" of {', '.join(sorted(lost))}" if lost else ""
        return f"{len(allowed)} keys allowed, keys lost{whose or ': none'}, {ended} connections ended"

    # ------------------------------------------------------------ stopping

    async def _watch_signals(
        self,
        scheduler: Scheduler,
        nursery: trio.Nursery,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """The first SIGTERM or SIGINT starts a stop, the second ends the process at once. SIGHUP reloads the keys."""
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            task_status.started()
            async for number in signals:
                if number == signal.SIGHUP:
                    with suppress(ConfigError):  # logged
                        self._reload_keys()
                    continue
                if self._stopping:
                    log.warning("second signal, exiting at once", extra=fields(signal=signal.Signals(number).name))
                    logging.shutdown()
                    os._exit(EXIT_INTERRUPTED)
                self._stopping = True
                deadline_s = self._config.coordinator.stop_deadline_s
                log.info("stopping", extra=fields(signal=signal.Signals(number).name, deadline_s=deadline_s))
                nursery.start_soon(self._stop, scheduler)

    async def _stop(self, scheduler: Scheduler) -> None:
        """Stop within a time limit even if the Scheduler does not react because it waits for a failing journal."""
        deadline_s = self._config.coordinator.stop_deadline_s
        with trio.move_on_after(deadline_s + STOP_MARGIN_S):
            await scheduler.stop(deadline_s, "signal")
            await scheduler.stopped.wait()
            return
        log.error("not stopped in time, exiting without cleaning up; acknowledged requests are in the journal")
        logging.shutdown()
        os._exit(EXIT_INTERRUPTED)

    # ------------------------------------------------------------ metrics

    def _serve_metrics(self, scheduler: Scheduler) -> Exporter | None:
        settings = self._config.coordinator
        if settings.metrics_port < 0:
            return None
        token = trio.lowlevel.current_trio_token()
        sources = CoordinatorSources(
            name=self._config.cluster.name,
            version=self._version,
            counters=self.counters,
            view=lambda: ask_loop(token, lambda: self._view(scheduler)),
        )
        return serve(
            [CoordinatorCollector(sources)],
            healthy=lambda: coordinator_health(sources),
            ready=lambda: coordinator_readiness(sources),
            addr=settings.metrics_host,
            port=settings.metrics_port,
        )

    def _view(self, scheduler: Scheduler) -> CoordinatorView:
        model = scheduler.model()
        return CoordinatorView(
            requests=scheduler.count_by_state(),
            held=scheduler.count_held(),
            pools=scheduler.pool_rows(),
            workers=scheduler.worker_rows(),
            connections=self.deliveries.connections.count_by_role(),
            stopping=scheduler.stopping,
            journal_failing=scheduler.journal_failing,
            unready=scheduler.refusal() or scheduler.unserved(),
            model=model.name if model is not None else "",
            rooms=self._room_use(scheduler),
        )

    def _room_use(self, scheduler: Scheduler) -> dict[tuple[str, str], RoomUse]:
        """Measure every room of basics.rooms, by its name and by what happens when it is full. Rooms of events and
        traces are left out where none are sent."""
        parts = [scheduler.room_use(), self.deliveries.room_use(), self._gateway.room_use(), self._journal.room_use()]
        if self._publisher is not None:
            parts.append(self._publisher.room_use())
        if self._span_sender is not None:
            parts.append({"trace_spans": RoomUse(self._span_sender.waiting, QUEUE_SPANS_MAX)})
        return by_label(*parts)


def _open_journal(path: str, counters: CoordinatorCounters) -> SqliteStore | None:
    return None if path == NO_JOURNAL else open_store(Path(path), counters.journal)


def _is_tcp(endpoint: str) -> bool:
    return endpoint.startswith("tcp://")


def _guard(cluster: ClusterSettings, role: str, endpoint: str) -> CurveGuard | Insecure | None:
    if not _is_tcp(endpoint) or not (cluster.keys_dir or cluster.insecure):
        return None
    return Insecure() if cluster.insecure else CurveGuard(read_server_key(Path(cluster.keys_dir)), role)


@contextmanager
def open_zap(config: Config, counters: CoordinatorCounters) -> Iterator[ZapHandler | None]:
    """The handler of handshakes over tcp; None when every endpoint is ipc, or with `insecure`. Raises ConfigError."""
    cluster = config.cluster
    published = config.coordinator.kv_events_endpoint, config.coordinator.kv_events_replay_endpoint
    endpoints = (cluster.client_endpoint, cluster.admin_endpoint, cluster.worker_endpoint, *published)
    if cluster.insecure or not any(map(_is_tcp, endpoints)):
        if cluster.insecure:
            log.warning("tcp without keys: any peer that reaches these ports may use them and read the traffic")
        yield None
        return
    handler = ZapHandler(AllowList(read_allowed(Path(cluster.keys_dir))), counters.dropped_messages)
    try:
        yield handler
    finally:
        handler.close()


@contextmanager
def open_publisher(config: Config, counters: CoordinatorCounters) -> Iterator[KvPublisher | None]:
    """None: no events are published. Raises ConfigError or Unavailable, with nothing left open."""
    settings, cluster = config.coordinator, config.cluster
    if not settings.kv_events_endpoint:
        yield None
        return
    guards = [
        _guard(cluster, "admin", endpoint)
        for endpoint in (settings.kv_events_endpoint, settings.kv_events_replay_endpoint)
    ]
    publisher = KvPublisher(
        Published("coordinator.kv_events_endpoint", settings.kv_events_endpoint, guards[0]),
        Published("coordinator.kv_events_replay_endpoint", settings.kv_events_replay_endpoint, guards[1])
        if settings.kv_events_replay_endpoint
        else None,
        topic=settings.kv_events_topic,
        as_arrays=settings.kv_events_format == KV_EVENT_ARRAYS,
        counters=counters,
    )
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def open_sockets(config: Config) -> Iterator[tuple[RouterSocket, RouterSocket, RouterSocket]]:
    """Client, admin and worker sockets, bound and locked. Raises ConfigError or Unavailable, with none left open."""
    cluster = config.cluster
    connections_max = max(config.coordinator.connections_max, WORKERS_MAX)
    make_room(3 * (connections_max + NEWCOMERS_MAX))
    make_private_dir(cluster.runtime_dir)
    sockets: list[RouterSocket] = []
    try:
        for role, endpoint, message_bytes_max in (
            ("client", cluster.client_endpoint, CLIENT_MESSAGE_BYTES_MAX),
            ("admin", cluster.admin_endpoint, CLIENT_MESSAGE_BYTES_MAX),
            ("worker", cluster.worker_endpoint, WORKER_MESSAGE_BYTES_MAX),
        ):
            sockets.append(
                RouterSocket(
                    endpoint,
                    message_bytes_max=message_bytes_max,
                    credentials=role == "worker",
                    unread_messages=ROUTER_QUEUE_MESSAGES if role == "worker" else CLIENT_UNREAD_MESSAGES,
                    guard=_guard(cluster, role, endpoint),
                    connections_max=connections_max,
                    per_user_max=WORKERS_MAX if role == "worker" else config.coordinator.connections_per_key_max,
                )
            )
        client, admin, worker = sockets
        yield client, admin, worker
    finally:
        for socket in sockets:
            socket.close()
