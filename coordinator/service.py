"""The coordinator process: parts wired, started and stopped. No torch is imported here, nor by what this imports.

start    locks and sockets; the number of this life; the journal, and what it recovers; actors; /metrics; one log line
         per thing that was sized
run      until every request has ended after a stop was asked for (client command, SIGTERM, SIGINT)
stop     refuse new work, let running work finish until the deadline; what is not finished then stays in the journal
         for the next life, without one it fails; flush what clients have not read, end the actors level by level
         (coordinator.actor); each of these is bounded
second signal   exits at once
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import trio

from coordinator import gc_policy
from coordinator.actor import Level, Supervisor, open_supervisor
from coordinator.gateway.deliveries import Deliveries
from coordinator.gateway.gateway import Gateway
from coordinator.incarnation import next_incarnation
from coordinator.journal.journal import GroupCommit, Journal, JournalError, NoJournal
from coordinator.journal.state import replay
from coordinator.journal.store import SqliteStore, open_store
from coordinator.listener.authentication import CurveGuard
from coordinator.listener.connection_tracker import NEWCOMERS_MAX
from coordinator.listener.descriptors import make_room
from coordinator.listener.router import ROUTER_QUEUE_MESSAGES, RouterSocket
from coordinator.listener.zap import AllowList, ZapHandler
from coordinator.scheduling.recovery import expect_workers
from coordinator.scheduling.scheduler import Scheduler
from coordinator.tokens.token_log import TokenLog
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
from protocol.errors import ConfigError
from protocol.logs import fields, logger
from protocol.messages import CLIENT_MESSAGE_BYTES_MAX, WORKER_MESSAGE_BYTES_MAX
from protocol.settings import NO_JOURNAL, ClusterSettings, Config
from protocol.transport.keys import Insecure, read_allowed, read_server_key
from protocol.transport.private_dir import make_private_dir
from protocol.version import our_version

#: How long running requests may finish after the first signal.
SIGNAL_DEADLINE_S: Final = 30.0

#: Longest that a stop takes beyond its deadline.
STOP_MARGIN_S: Final = 10.0

#: Messages of one client that libzmq holds unread: with the largest message, what it can make the coordinator hold.
CLIENT_UNREAD_MESSAGES: Final = 64

EXIT_CLEAN: Final = 0
EXIT_INTERRUPTED: Final = 130

log = logger("coordinator")


def run_coordinator(config: Config) -> int:
    """Serve until stopped; the exit code. `config` is resolved (protocol.config).

    Raises ConfigError or Unavailable when it cannot start. An actor's failure comes out as it is: the process ends.
    """
    logs.configure(config.cluster.log_level, config.cluster.log_format)
    counters = CoordinatorCounters()
    with open_zap(config, counters) as zap, open_sockets(config) as sockets:
        return trio.run(Coordinator(config, *sockets, zap=zap, counters=counters).serve)


class Coordinator:
    """The parts of one coordinator, wired. Owns everything but the sockets."""

    def __init__(
        self,
        config: Config,
        client_socket: RouterSocket,
        admin_socket: RouterSocket,
        worker_socket: RouterSocket,
        *,
        zap: ZapHandler | None = None,
        counters: CoordinatorCounters | None = None,
    ) -> None:
        settings = config.coordinator
        self._config = config
        self._client_socket = client_socket
        self._admin_socket = admin_socket
        self._worker_socket = worker_socket
        self.incarnation = next_incarnation(Path(config.cluster.runtime_dir))
        self._zap = zap
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
        self._stopping = False
        self._version = our_version()

    async def serve(self) -> int:
        """Run until stopped; the exit code. `started` is set once messages are being read."""
        try:
            await self._serve()
        finally:
            if self._store is not None:
                self._store.close()  # after its actor has ended: a thread of it may be writing until then
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
                    for role, socket in self._router_sockets.items():
                        nursery.start_soon(socket.sweep, partial(self._note_cut, role))
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
        """The journal, with what it knows in its book and in the token log. Raises ConfigError when it is damaged."""
        if self._store is None:
            return NoJournal(self.deliveries.wake)
        began = time.perf_counter()
        try:
            book = replay(await self._store.load(), self.token_log)
        except JournalError as error:
            raise ConfigError(
                f"the journal cannot be read: {error}",
                field="coordinator.journal",
                value=self._store.path,
                remedy="restore it, or move it away: its requests are lost then",
            ) from error
        known = fields(
            path=str(self._store.path), requests=len(book.requests), seconds=round(time.perf_counter() - began, 3)
        )
        log.info("journal", extra=known)
        return GroupCommit(
            self._store, book, self.token_log, on_tokens=self.deliveries.wake, counters=self.counters.journal
        )

    def _start_actors(self, supervisor: Supervisor, journal: Journal) -> Scheduler:
        settings = self._config.coordinator
        scheduler = Scheduler(
            settings,
            token_log=self.token_log,
            listener=self.deliveries,
            supervisor=supervisor,
            counters=self.counters,
            journal=journal,
            wall_offset_s=time.time() - trio.current_time(),
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
        scheduler.recover(expect_workers(journal.book, links.expect))
        if isinstance(journal, GroupCommit):
            supervisor.start(journal, Level.JOURNAL)
        supervisor.start(scheduler, Level.SCHEDULER)
        supervisor.start(links, Level.WORKER_LINK)
        supervisor.start(gateway, Level.GATEWAY)
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
        if exporter is not None:
            log.info("metrics", extra=fields(url=f"{exporter.url}/metrics"))

    # ------------------------------------------------------------ listeners

    @property
    def _router_sockets(self) -> dict[str, RouterSocket]:
        return {"client": self._client_socket, "admin": self._admin_socket, "worker": self._worker_socket}

    def _note_cut(self, role: str, reason: str) -> None:
        self.counters.dropped_messages[role, reason] += 1

    def _reload_keys(self) -> None:
        """Whoever lost a key is cut off, and comes back if another key of that name is allowed. A list that cannot be
        read changes nothing."""
        if self._zap is None:
            log.info("no keys to read again")
            return
        try:
            allowed = read_allowed(Path(self._config.cluster.keys_dir))
        except ConfigError as error:
            log.warning("allowed keys not read, the old list holds", extra=fields(error=error))
            return
        lost = self._zap.allowed.replace(allowed)
        ended = sum(socket.cut_users(lost) for socket in self._router_sockets.values())
        log.info("allowed keys read", extra=fields(keys=len(allowed), lost=sorted(lost), connections_ended=ended))

    # ------------------------------------------------------------ stopping

    async def _watch_signals(
        self,
        scheduler: Scheduler,
        nursery: trio.Nursery,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """The first SIGTERM or SIGINT asks for a stop, the second ends the process on the spot. SIGHUP: keys anew."""
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            task_status.started()
            async for number in signals:
                if number == signal.SIGHUP:
                    self._reload_keys()
                    continue
                if self._stopping:
                    log.warning("second signal, exiting at once", extra=fields(signal=signal.Signals(number).name))
                    logging.shutdown()
                    os._exit(EXIT_INTERRUPTED)
                self._stopping = True
                log.info("stopping", extra=fields(signal=signal.Signals(number).name, deadline_s=SIGNAL_DEADLINE_S))
                nursery.start_soon(self._stop, scheduler)

    async def _stop(self, scheduler: Scheduler) -> None:
        """Within a deadline that always exists: a Scheduler that waits for a failing journal does not hear of it."""
        with trio.move_on_after(SIGNAL_DEADLINE_S + STOP_MARGIN_S):
            await scheduler.stop(SIGNAL_DEADLINE_S, "signal")
            await scheduler.stopped.wait()
            return
        log.error("not stopped in time, exiting as a crash would; what was acknowledged is in the journal")
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
        return CoordinatorView(
            requests=scheduler.count_by_state(),
            held=scheduler.count_held(),
            pools=scheduler.pool_rows(),
            workers=scheduler.worker_rows(),
            connections=self.deliveries.connections.count_by_role(),
            stopping=scheduler.stopping,
            journal_failing=scheduler.journal_failing,
        )


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
    """Who is let in over tcp; None when every endpoint is ipc, or the operator wants no keys. Raises ConfigError."""
    cluster = config.cluster
    endpoints = (cluster.client_endpoint, cluster.admin_endpoint, cluster.worker_endpoint)
    if cluster.insecure or not any(map(_is_tcp, endpoints)):
        if cluster.insecure:
            log.warning("tcp without keys: whoever reaches these ports may use them, and can read what others send")
        yield None
        return
    handler = ZapHandler(AllowList(read_allowed(Path(cluster.keys_dir))), counters.dropped_messages)
    try:
        yield handler
    finally:
        handler.close()


@contextmanager
def open_sockets(config: Config) -> Iterator[tuple[RouterSocket, RouterSocket, RouterSocket]]:
    """Client, admin and worker sockets, bound and locked. Raises ConfigError or Unavailable; nothing stays behind."""
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
