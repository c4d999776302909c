"""The coordinator process: parts wired, started and stopped. No torch is imported here, nor by what this imports.

start    locks and sockets; the number of this life; the journal, and what it recovers; actors; /metrics; one log line
         per thing that was sized
run      until every request has ended after a stop was asked for (client verb, SIGTERM, SIGINT)
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
from pathlib import Path
from typing import Final

import trio

from coordinator import garbage
from coordinator.actor import Level, Supervisor, open_supervisor
from coordinator.config import NO_JOURNAL, Config
from coordinator.errors import ConfigError
from coordinator.gateway.deliveries import Deliveries
from coordinator.gateway.gateway import Gateway
from coordinator.gateway.token_log import TokenLog
from coordinator.incarnation import next_incarnation
from coordinator.journal.book import replay
from coordinator.journal.journal import GroupCommit, Journal, JournalError, NoJournal
from coordinator.journal.recovery import recover
from coordinator.journal.store import SqliteStore, open_store
from coordinator.messages import CLIENT_MESSAGE_BYTES_MAX, WORKER_MESSAGE_BYTES_MAX
from coordinator.scheduling.scheduler import Scheduler
from coordinator.transport.endpoint_lock import make_private_dir
from coordinator.transport.sockets import RouterSocket
from coordinator.version import our_version
from coordinator.workers.tokenizer_store import TokenizerStore
from coordinator.workers.worker_link import WorkerLinks
from metrics import logs
from metrics.coordinator import (
    CoordinatorCollector,
    CoordinatorSources,
    CoordinatorView,
    ask_loop,
    coordinator_health,
    coordinator_readiness,
)
from metrics.exporter import Exporter, serve
from metrics.logs import fields, logger
from metrics.state import CoordinatorCounters

#: How long running requests may finish after the first signal.
SIGNAL_DEADLINE_S: Final = 30.0

#: Longest that a stop takes beyond its deadline.
STOP_MARGIN_S: Final = 10.0

EXIT_CLEAN: Final = 0
EXIT_INTERRUPTED: Final = 130

log = logger("coordinator")


def run_coordinator(config: Config) -> int:
    """Serve until stopped; the exit code. `config` is resolved (coordinator.config).

    Raises ConfigError or Unavailable when it cannot start. An actor's failure comes out as it is: the process ends.
    """
    logs.configure(config.cluster.log_level, config.cluster.log_format)
    with _sockets(config) as sockets:
        return trio.run(Coordinator(config, *sockets).serve)


class Coordinator:
    """The parts of one coordinator, wired. Owns everything but the sockets."""

    def __init__(
        self, config: Config, client_socket: RouterSocket, admin_socket: RouterSocket, worker_socket: RouterSocket
    ) -> None:
        settings = config.coordinator
        self._config = config
        self._client_socket = client_socket
        self._admin_socket = admin_socket
        self._worker_socket = worker_socket
        self.incarnation = next_incarnation(Path(config.cluster.runtime_dir))
        self.counters = CoordinatorCounters()
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
                    nursery.start_soon(garbage.collect)
                    garbage.settle()
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
        recover(journal.book, scheduler, links, self.deliveries)
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

    # ------------------------------------------------------------ stopping

    async def _watch_signals(
        self,
        scheduler: Scheduler,
        nursery: trio.Nursery,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """The first SIGTERM or SIGINT asks for a stop, the second ends the process on the spot."""
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for number in signals:
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


@contextmanager
def _sockets(config: Config) -> Iterator[tuple[RouterSocket, RouterSocket, RouterSocket]]:
    """Client, admin and worker sockets, bound and locked. Raises ConfigError or Unavailable; nothing stays behind."""
    cluster = config.cluster
    make_private_dir(cluster.runtime_dir)
    sockets: list[RouterSocket] = []
    try:
        for endpoint, message_bytes_max, credentials in (
            (cluster.client_endpoint, CLIENT_MESSAGE_BYTES_MAX, False),
            (cluster.admin_endpoint, CLIENT_MESSAGE_BYTES_MAX, False),
            (cluster.worker_endpoint, WORKER_MESSAGE_BYTES_MAX, True),
        ):
            sockets.append(RouterSocket(endpoint, message_bytes_max=message_bytes_max, credentials=credentials))
        client, admin, worker = sockets
        yield client, admin, worker
    finally:
        for socket in sockets:
            socket.close()
