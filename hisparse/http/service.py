"""The process of the HTTP front: a listener, a link to the coordinator, metrics, signals. No torch.

start          keys, TLS, socket, /metrics; it answers 503 until a coordinator and a worker are there
run            until SIGTERM or SIGINT; SIGHUP and `hisparse reload http`: API keys and TLS files are read again
stop           no new connections; what is being answered may finish until the deadline, then it is cut off, and aborted
               unless its client can come back to it by its own id
second signal  exits at once

Limits of a connection are hisparse.http.server.connection's, those of all connections hisparse.http.server.listener's.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Final

import msgspec
import trio

from basics import gc_policy
from basics.rooms import RoomUse, by_label
from basics.tracing.sender import QUEUE_SPANS_MAX, SpanSender, open_sender
from hisparse.client.client import Client, open_client
from hisparse.http.front import Front
from hisparse.http.link import RECONNECT_LIMIT_S, CoordinatorLink
from hisparse.http.outputs import FollowedOutputs
from hisparse.http.server.api_keys import ApiKeys, read_keys
from hisparse.http.server.connection import READ_LIMIT_S
from hisparse.http.server.control import Reloaded, control_socket, serve_control
from hisparse.http.server.listener import BACKLOG, STOP_DEADLINE_S, HttpListener, connections_max
from hisparse.http.server.threads import return_free_memory, share_fairly
from hisparse.http.server.tls import Tls, tls_of
from hisparse.http.server.tracing import ServerTracing
from metrics.exporter import Exporter, serve
from metrics.http import HttpCollector, HttpSources, http_health, http_readiness, scrape
from metrics.state import HttpCounters
from protocol import logs
from protocol.config_checks import LOOPBACK
from protocol.errors import ConfigError
from protocol.logs import fields, logger
from protocol.rereading import ReloadableFiles
from protocol.settings import Config, HttpSettings
from protocol.transport.keys import access
from protocol.version import our_version

#: How often objects of connections that outlived a collection are looked at.
FULL_COLLECTION_INTERVAL_S: Final = 5.0
#: Of the time: a front under attack makes more garbage than a coordinator.
FULL_COLLECTION_SHARE: Final = 0.01
#: How long the last aborts may take.
LAST_ABORTS_S: Final = 2.0
EXIT_CLEAN: Final = 0
EXIT_INTERRUPTED: Final = 130

log = logger("http")


def run_http(config: Config, ready_fd: int | None = None) -> int:
    """Serve until stopped; the exit code. Raises ConfigError when it cannot start.

    Once the front listens, one byte is written to `ready_fd`, which is closed then.
    """
    logs.configure(config.cluster.log_level, config.cluster.log_format)
    keys, tls = read_keys(config.http.api_keys_file), tls_of(config.http)
    _raise_descriptor_limit()
    share_fairly()
    counters = HttpCounters()
    with (
        _listening(config.http) as listener,
        control_socket(config.cluster.runtime_dir) as control,
        open_sender(config.cluster, "http", counters.spans) as sender,
    ):
        if ready_fd is not None:
            with open(ready_fd, "wb") as ready:
                ready.write(b"\n")
        trio.run(_serve, config, keys, tls, listener, control, counters, sender)
    log.info("stopped")
    return EXIT_CLEAN


async def _serve(
    config: Config,
    keys: ApiKeys,
    tls: Tls | None,
    listener: socket.socket,
    control: socket.socket | None,
    counters: HttpCounters,
    sender: SpanSender | None,
) -> None:
    files, stopping = _reloadable(config.http, keys, tls), trio.Event()
    tracing = ServerTracing(sender.put, config.cluster.trace_ratio) if sender is not None else None
    link = CoordinatorLink(lambda: _connect(config))
    parts: list[Callable[[], dict[str, RoomUse]]] = []  # once they are made
    if sender is not None:
        parts.append(lambda: {"http_trace_spans": RoomUse(counters.spans.waiting, QUEUE_SPANS_MAX)})
    sources = HttpSources(
        name=config.cluster.name,
        version=our_version(),
        counters=counters,
        connected=lambda: link.connected,
        stopping=stopping.is_set,
        rooms=lambda: by_label(*(part() for part in parts)),
    )
    exporter = _serve_metrics(config, sources)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(_watch_signals, stopping, lambda: _reload(files))
            if control is not None:
                nursery.start_soon(serve_control, control, lambda: _reload(files))
            nursery.start_soon(link.run)
            rate = config.coordinator.messages_per_s, config.coordinator.messages_burst
            outputs = FollowedOutputs(nursery, link, counters, rate)
            front = Front(config.http, keys, link, outputs, counters, lambda: scrape(sources), tracing)
            _announce(config, listener, exporter, keys)
            nursery.start_soon(gc_policy.collect, FULL_COLLECTION_INTERVAL_S, FULL_COLLECTION_SHARE)
            nursery.start_soon(return_free_memory)
            gc_policy.settle()
            most = connections_max(config.http.requests_max)
            server = HttpListener(listener, front.serve, counters, tls, most, config.http.idle_s)
            parts += [front.room_use, server.room_use]
            await server.run(stopping)
            with trio.move_on_after(LAST_ABORTS_S):
                await outputs.settled()
            nursery.cancel_scope.cancel()
        front.close()
    finally:
        if exporter is not None:
            exporter.close()


def _connect(config: Config) -> AbstractAsyncContextManager[Client]:
    """The key is read anew each time: it may have been replaced."""
    endpoint = config.cluster.client_endpoint
    key = access(config.cluster, "client", endpoint)
    return open_client(endpoint, name="hisparse http", reconnect_limit_s=RECONNECT_LIMIT_S, key=key)


@contextmanager
def _listening(settings: HttpSettings) -> Iterator[socket.socket]:
    """A listening socket. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _unbound(settings, error) from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, READ_LIMIT_S * 1000
        )  # what the kernel still holds
        listener.setblocking(False)
        try:
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            raise _unbound(settings, error) from error
        yield listener


def _unbound(settings: HttpSettings, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen there: {error.strerror}",
        field="http.host",
        value=f"{settings.host}:{settings.port}",
        remedy="choose another http.host or http.port, 0 for any free port",
    )


def _raise_descriptor_limit() -> None:
    """As far as allowed: each client takes one, and libzmq ends the process when it gets none."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _announce(config: Config, listener: socket.socket, exporter: Exporter | None, keys: ApiKeys) -> None:
    coordinator = config.cluster.client_endpoint
    log.info("starting", extra=fields(version=our_version(), pid=os.getpid(), coordinator=coordinator))
    host, port = listener.getsockname()[:2]
    log.info("listening", extra=fields(url=msgspec.structs.replace(config.http, host=host, port=port).url))
    if not config.http.tls_cert_file and config.http.host not in LOOPBACK:
        log.warning("plain HTTP: prompts, outputs and API keys are readable on the network; see http.tls_cert_file")
    if keys.is_open:
        log.info("no API keys: all clients are one owner, and may reuse each other's prefixes; see http.api_keys_file")
    else:
        log.info("API keys", extra=fields(read=keys.describe()))
    if exporter is not None:
        log.info("metrics", extra=fields(url=f"{exporter.url}/metrics"))


def _serve_metrics(config: Config, sources: HttpSources) -> Exporter | None:
    if config.http.metrics_port < 0:
        return None
    return serve(
        [HttpCollector(sources)],
        healthy=lambda: http_health(sources),
        ready=lambda: http_readiness(sources),
        addr=config.http.metrics_host,
        port=config.http.metrics_port,
    )


def _reloadable(settings: HttpSettings, keys: ApiKeys, tls: Tls | None) -> tuple[ReloadableFiles, ...]:
    """Raises ConfigError when a file cannot be read."""
    found = []
    if settings.api_keys_file:
        found.append(
            ReloadableFiles(
                "API keys", [settings.api_keys_file], lambda: keys.replace(read_keys(settings.api_keys_file))
            )
        )
    if tls is not None:
        found.append(ReloadableFiles("TLS files", [settings.tls_cert_file, settings.tls_key_file], tls.reload))
    return tuple(found)


def _reload(files: Sequence[ReloadableFiles]) -> Reloaded:
    """Each by itself: what cannot be read changes nothing."""
    lines, errors = [], []
    for it in files:
        try:
            lines.append(it.reload())
        except ConfigError as error:
            errors.append(f"{it.what}: {error}")
            log.warning("not read again, what was read before holds", extra=fields(what=it.what, error=error))
        else:
            log.info("read again", extra=fields(what=it.what, result=lines[-1]))
    if not files:
        lines.append("neither API keys nor TLS files are set: nothing to read again")
    return Reloaded(tuple(lines), tuple(errors))


async def _watch_signals(
    stopping: trio.Event, reload: Callable[[], Reloaded], task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """The first SIGTERM or SIGINT asks for a stop, the second ends the process on the spot. SIGHUP: `reload`."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        task_status.started()
        async for number in signals:
            name = signal.Signals(number).name
            if number == signal.SIGHUP:
                reload()
                continue
            if stopping.is_set():
                log.warning("second signal, exiting at once", extra=fields(signal=name))
                logging.shutdown()
                os._exit(EXIT_INTERRUPTED)
            log.info("stopping", extra=fields(signal=name, deadline_s=STOP_DEADLINE_S))
            stopping.set()
