"""A whole cluster on one machine: a coordinator, N workers and, optionally, an HTTP front as children, with one host
pool and one runtime directory.

Order, and why:

    start   refused if a coordinator answers in the runtime directory: the workers would join it and share its pool.
            What an earlier start left that was killed, its ready file and sockets, is removed. Coordinator first,
            workers once it answers, the HTTP front once all workers have registered; ready when the front says that it
            listens. What dies is restarted (hisparse.cluster.starting). This process has the front's port from the
            beginning
    run     until a signal, `hisparse stop`, or until the cluster is over; children that died are restarted, hung ones
            are killed (hisparse.cluster.supervision). Workers that have standbys get them (hisparse.cluster.standbys)
    stop    drain the coordinator (requests may run on until the deadline), then SIGTERM, then SIGKILL.
            The pool is removed last: it outlives workers by design, and only the parent knows that none will return.
            Until then the parent holds it open, so that no start of another cluster takes it for an abandoned one.
            Sockets of processes that were killed are removed with it

A second signal, or one during start, skips to SIGKILL.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Final

import msgspec
import trio

from hisparse.client.client import Client
from hisparse.cluster.children import Child, Code, child_environ, stop_children, wait_all
from hisparse.cluster.gpus import gpu_bytes
from hisparse.cluster.leftovers import check_leftovers, left_text, remove_dead_sockets
from hisparse.cluster.placement import CUDA, Weights, choose_group_size, place
from hisparse.cluster.replacing import ReplaceServer, control_socket, replace_workers
from hisparse.cluster.standbys import Standbys
from hisparse.cluster.starting import started
from hisparse.cluster.supervision import COORDINATOR, HTTP, START_LIMIT_S, ProcessSupervisor, open_admin
from hisparse.cluster.weights import WeightKeepers
from hisparse.http.server.api_keys import read_keys
from hisparse.http.server.tls import tls_of
from protocol.byte_sizes import AUTO
from protocol.config import HostFacts, listening_at, pool_path, resolve, to_environ
from protocol.config_checks import check
from protocol.errors import ConfigError, HiSparseError, Unavailable, WrongState
from protocol.logs import configure, logger
from protocol.messages import WorkerRow
from protocol.settings import Config, HttpSettings, WorkerSettings
from worker.pool.file import PoolHold, remove_pool
from worker.runners.checkpoint import fingerprint, read_config, read_dimensions, stored_dtype
from worker.weights.quantization import read_quantization

POLL_INTERVAL_S: Final = 0.05
#: Time for a front that listens to reach the coordinator.
FRONT_LIMIT_S: Final = 10.0
#: Time for a process after SIGTERM to withdraw its requests and quiesce.
STOP_GRACE_S: Final = 10.0
EXIT_CHILD_LOST: Final = 70
EXIT_INTERRUPTED: Final = 130
CONNECTED: Final = "connected"

log = logger("up")


@dataclass
class Cluster:
    """The children. A child that has ended stays listed, with its status, until it is restarted.

    `workers` by name; `placed` are the settings of each, in order. A front writes to `ready_fd` once it listens.
    `codes`: of workers that run other code than this process.
    """

    config: Config
    coordinator: Child
    placed: Sequence[WorkerSettings]
    log_dir: Path | None = None
    workers: dict[str, Child] = field(default_factory=dict)
    http: Child | None = None
    ready_fd: int | None = None
    codes: dict[str, Code] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool_hold = PoolHold(self.pool)
        names = [settings.name for settings in self.placed if settings.standbys]
        self.standbys = Standbys(names, self.start_standby, self._take_place)
        self.keepers = WeightKeepers(_report)

    @property
    def children(self) -> tuple[Child, ...]:
        """All of them, standbys and those that keep weights too."""
        return (*self.by_name.values(), *self.standbys.children.values(), *self.keepers.children.values())

    @property
    def by_name(self) -> Mapping[str, Child]:
        front = {HTTP: self.http} if self.http is not None else {}
        return self.workers | front | {COORDINATOR: self.coordinator}

    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the ranks of each group, in order of rank; workers that hold a whole model are in none."""
        names = dict.fromkeys(it.group for it in self.placed if it.group)
        return {group: tuple(it.name for it in self.placed if it.group == group) for group in names}

    def start_worker(self, settings: WorkerSettings) -> None:
        own = msgspec.structs.replace(self.config, worker=settings)
        self.keepers.keep(own, self.log_dir)
        self.workers[settings.name] = start_child("worker", own, self.log_dir, code=self._code(settings.name))

    def start_standby(self, name: str, code: Code | None = None) -> Child:
        """Start a standby of worker `name`, of the same code unless another is given."""
        own = msgspec.structs.replace(self.config, worker=self._settings(name))
        self.keepers.keep(own, self.log_dir)
        return start_child("worker", own, self.log_dir, as_standby=True, code=code or self._code(name))

    def _code(self, name: str) -> Code:
        return self.codes.get(name, Code())

    def _take_place(self, name: str, child: Child) -> None:
        self.workers[name].close()
        self.workers[name] = child

    def _settings(self, name: str) -> WorkerSettings:
        return next(settings for settings in self.placed if settings.name == name)

    def add_http(self) -> None:
        self.http = start_child(HTTP, self.config, self.log_dir, self.ready_fd)

    def restart(self, name: str) -> Child:
        """Start a child that has ended again, under its name and with its settings."""
        self.by_name[name].close()
        if name == COORDINATOR:
            self.coordinator = start_child(COORDINATOR, self.config, self.log_dir)
        elif name == HTTP:
            self.add_http()
        else:
            self.start_worker(self._settings(name))
        return self.by_name[name]

    @property
    def pool(self) -> Path:
        return pool_path(self.config.worker.pool_dir, self.config.worker.node)

    def client(self, name: str) -> AbstractAsyncContextManager[Client]:
        """An admin client of this cluster."""
        return open_admin(self.config, name)

    @property
    def metrics(self) -> dict[str, str]:
        """URL of the metrics of each process with a port of its own choice, by its name."""
        ports = {
            COORDINATOR: (self.config.coordinator.metrics_host, self.config.coordinator.metrics_port),
            **{it.name: (it.metrics_host, it.metrics_port) for it in self.placed},
        }
        if self.http is not None:
            ports[HTTP] = (self.config.http.metrics_host, self.config.http.metrics_port)
        return {name: f"http://{host}:{port}/metrics" for name, (host, port) in ports.items() if port > 0}

    def describe(self) -> dict[str, object]:
        """Endpoints, pids, URLs of metrics and the pool's path: the content of `--ready-file`."""
        settings = self.config.cluster
        front = {"http": {"pid": self.http.pid, "url": self.config.http.url}} if self.http is not None else {}
        return {
            "pid": os.getpid(),
            "client_endpoint": settings.client_endpoint,
            "admin_endpoint": settings.admin_endpoint,
            "worker_endpoint": settings.worker_endpoint,
            "coordinator": {"pid": self.coordinator.pid},
            "workers": [{"name": name, "pid": child.pid} for name, child in self.workers.items()],
            "standbys": [{"name": name, "pid": child.pid} for name, child in self.standbys.children.items()],
            "keepers": [{"worker": name, "pid": child.pid} for name, child in self.keepers.children.items()],
            "groups": [{"name": group, "workers": ranks} for group, ranks in self.groups.items()],
            "pool": str(self.pool),
            "metrics": self.metrics,
            **front,
        }


@asynccontextmanager
async def running_cluster(
    config: Config,
    workers: int,
    *,
    roles: Sequence[str] = (),
    group_size: int = 1,
    gpus: int = 0,
    http: bool = False,
    abort_unfinished: bool = False,
    log_dir: Path | None = None,
    start_limit_s: float = START_LIMIT_S,
) -> AsyncIterator[Cluster]:
    """Start a cluster; enter the block once every worker has registered; afterwards stop it and remove its pool.

    `roles`, `group_size` and `gpus` as in `placement.place`. With `http` there is a front at config.http, too, and it
    listens. Port 0 becomes a free one that the cluster keeps: `Cluster.config` has it, and a
    restarted front listens there again. `abort_unfinished`: abort requests of another model that an earlier start left
    in the journal; without it they refuse the start.

    Children write to `log_dir`, by default to this process's stderr; the end of the log of a failed child goes to
    stderr. Raises WrongState when a coordinator already listens there, or another process at the front's port;
    ConfigError when there is no checkpoint, workers cannot be placed, the front's TLS files are not a pair, its API
    keys file is not valid, or a child refuses a setting; Unavailable when a child ends otherwise or `start_limit_s`
    passes. Cancelled: children are killed at once.
    """
    experts = read_config(config.worker.model).get("n_routed_experts") or 0
    placed = [
        _resolved(config, settings)
        for settings in place(config.worker, workers, roles=roles, group_size=group_size, experts=experts, gpus=gpus)
    ]
    if await answers(config):
        raise WrongState(
            "a coordinator is already running there",
            field="cluster.runtime_dir",
            value=config.cluster.runtime_dir,
            remedy="stop it, or choose another --runtime-dir",
        )
    if http:
        _check_front(config)
    with _with_port(config) if http else nullcontext(config) as resolved:
        async with _running(
            resolved, placed, http=http, abort=abort_unfinished, log_dir=log_dir, start_limit_s=start_limit_s
        ) as cluster:
            yield cluster


@asynccontextmanager
async def _running(
    config: Config,
    placed: Sequence[WorkerSettings],
    *,
    http: bool,
    abort: bool,
    log_dir: Path | None,
    start_limit_s: float,
) -> AsyncIterator[Cluster]:
    remove_dead_sockets(config, placed)
    cluster = Cluster(config, start_child(COORDINATOR, config, log_dir), placed, log_dir)
    try:
        await started(cluster, [COORDINATOR], partial(_until_checked, cluster, abort=abort), start_limit_s, _report)
        for settings in placed:
            cluster.start_worker(settings)
        await started(cluster, list(cluster.workers), partial(_until_registered, cluster), start_limit_s, _report)
        if http:
            await _start_front(cluster, start_limit_s)
        cluster.pool_hold.take()
        yield cluster
    finally:
        try:
            await stop_children(cluster.children, STOP_GRACE_S)
        finally:
            for child in cluster.children:
                child.close()
            cluster.pool_hold.let_go()
            remove_pool(cluster.pool, config.cluster.worker_endpoint)
            remove_dead_sockets(config, placed)


def _resolved(config: Config, settings: WorkerSettings) -> WorkerSettings:
    """`settings` of a worker with its defaults filled in. Raises ConfigError."""
    own = resolve(msgspec.structs.replace(config, worker=settings), HostFacts.read())
    check(own)
    return own.worker


def _check_front(config: Config) -> None:
    """Check the front's settings now, because it only starts when the workers have loaded their checkpoint."""
    tls_of(config.http)
    read_keys(config.http.api_keys_file)


@contextmanager
def _with_port(config: Config) -> Iterator[Config]:
    """`config` with a free port in place of port 0. Raises WrongState when another process has the port, ConfigError.

    This process keeps the port bound, without listening, so that few other processes get it while the front starts or
    restarts: those that share it as the front does, and listen first.
    """
    with _bind(config.http.host, config.http.port) as holder:
        yield listening_at(config, config.http.host, holder.getsockname()[1])


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _unbound(host, error) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the front, so that both may bind the port
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            remedy = "choose another port"
            raise WrongState("another process listens there", field="http.port", value=port, remedy=remedy) from error
        raise _unbound(host, error) from error
    return bound


def _unbound(host: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen there: {error.strerror}",
        field="http.host",
        value=host,
        remedy="name an address of this machine, or another port",
    )


def start_child(
    subcommand: str,
    config: Config,
    log_dir: Path | None,
    ready_fd: int | None = None,
    *,
    as_standby: bool = False,
    code: Code = Code(),  # noqa: B008 - it is frozen
) -> Child:
    """Start `hisparse SUBCOMMAND` with all settings of `config` in its environment. It ends with this thread.
    `as_standby`: a worker that waits for `Child.order`."""
    name = config.worker.name if subcommand == "worker" else subcommand
    command = [code.python, "-m", "hisparse.cli", subcommand, "--die-with", str(os.getpid())]
    command += [] if ready_fd is None else ["--ready-fd", str(ready_fd)]
    command += ["--as-standby"] if as_standby else []
    environ, log_path = child_environ(code) | to_environ(config), log_dir / f"{name}.log" if log_dir else None
    inherited = () if ready_fd is None else (ready_fd,)
    return Child.start(
        name,
        command,
        environ,
        log_path,
        inherited=inherited,
        takes_orders=as_standby,
        gives_reason=subcommand == "worker",
    )


async def answers(config: Config) -> bool:
    """Whether the coordinator of `config` answers an admin."""
    try:
        async with open_admin(config, "hisparse up"):
            return True
    except Unavailable:
        return False


async def until_answering(config: Config) -> None:
    while not await answers(config):  # noqa: ASYNC110 - nothing tells that a process listens
        await trio.sleep(POLL_INTERVAL_S)


async def _start_front(cluster: Cluster, limit_s: float) -> None:
    """Returns once the front itself says that it listens: what answers at its port may be another process. Raises as
    `started` does."""
    reader, cluster.ready_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        cluster.add_http()
        await started(cluster, [HTTP], partial(trio.lowlevel.wait_readable, reader), limit_s, _report)
    finally:
        os.close(reader)
        os.close(cluster.ready_fd)
        cluster.ready_fd = None
    await _front_ready(cluster.config.http)


async def _front_ready(http: HttpSettings) -> None:
    """Wait until the front serves requests, FRONT_LIMIT_S at most: from then on its answers say why it serves none."""
    with trio.move_on_after(FRONT_LIMIT_S):
        while not await trio.to_thread.run_sync(_is_healthy, http, abandon_on_cancel=True):  # noqa: ASYNC110
            await trio.sleep(POLL_INTERVAL_S)


def _is_healthy(http: HttpSettings) -> bool:
    """Whether the front answers that it serves requests: it listens before it has reached the coordinator."""
    if http.tls_cert_file:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the certificate may name another host
        connection: HTTPConnection = HTTPSConnection(http.host, http.port, timeout=FRONT_LIMIT_S, context=context)
    else:
        connection = HTTPConnection(http.host, http.port, timeout=FRONT_LIMIT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == HTTPStatus.OK
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


async def _until_checked(cluster: Cluster, *, abort: bool) -> None:
    """Wait until the coordinator, which may be restarted meanwhile, answers, and has nothing that keeps workers out."""
    while True:
        await until_answering(cluster.config)
        asked = cluster.coordinator
        try:
            async with cluster.client("hisparse up") as client:
                model = fingerprint(cluster.config.worker.model)
                if aborted := await check_leftovers(client, cluster.config, model, abort=abort):
                    _report(aborted)
                return
        except Unavailable:
            await trio.sleep(POLL_INTERVAL_S)  # its end may be seen after that of the connection
            if asked is cluster.coordinator and asked.running:
                raise


async def _until_registered(cluster: Cluster) -> None:
    """Wait until the coordinator, which may be restarted meanwhile, has all workers and groups."""
    rows: Sequence[WorkerRow] = ()
    while not _all_registered(rows, cluster.workers):
        with suppress(Unavailable):
            async with cluster.client("hisparse up") as client:
                while not _all_registered(rows, cluster.workers):
                    await trio.sleep(POLL_INTERVAL_S)
                    rows = await client.workers()
        await trio.sleep(POLL_INTERVAL_S)


def _all_registered(rows: Sequence[WorkerRow], names: Collection[str]) -> bool:
    known = {row.worker: row for row in rows}
    return all(name in known and known[name].state == CONNECTED and not known[name].ranks_missing for name in names)


# ---------------------------------------------------------------- hisparse up


@dataclass(frozen=True)
class UpOptions:
    """What `hisparse up` is asked for beside settings. `group_size` None: the smallest whose ranks fit the GPUs."""

    workers: int = 1
    roles: Sequence[str] = ()
    group_size: int | None = None
    http: bool = False
    abort_unfinished: bool = False
    deadline_s: float = 30.0
    ready_file: Path | None = None


def run_up(config: Config, options: UpOptions) -> int:
    """Run until a signal; returns the exit code. Raises HiSparseError when the cluster does not start.

    Reports are lines of the log, in the form of the other processes' lines, at any log level.
    """
    configure(config.cluster.log_level, config.cluster.log_format)
    log.setLevel(logging.INFO)
    return trio.run(_up, config, options)


def _group_size(config: Config, workers: int, gpus: Sequence[int]) -> int:
    path, settings = config.worker.model, config.worker
    quantization = read_quantization(read_config(path), Path(path) / "config.json")
    dimensions = read_dimensions(path)
    dtype = stored_dtype(dimensions) if settings.dtype == AUTO else settings.dtype
    weights = Weights(dimensions, dtype, quantization.block if quantization else None)
    size = choose_group_size(settings, workers, gpus[:workers], weights)
    if size > 1:
        _report(f"the model fits {size} GPUs together: groups of {size}")
    return size


async def _up(config: Config, options: UpOptions) -> int:
    interrupts = _Interrupts()
    async with trio.open_nursery() as nursery:
        await nursery.start(interrupts.watch, nursery.cancel_scope)
        code = await _serve(config, options, interrupts)
        nursery.cancel_scope.cancel()
    if interrupts.forced and interrupts.is_up:
        _report(f"stopped at once; {left_text(config)}")
    return EXIT_INTERRUPTED if interrupts.forced else code


class _Interrupts:
    """The first signal after the start sets `asked`, for a drain; any other signal cancels everything."""

    def __init__(self) -> None:
        self.is_up = False
        self.forced = False
        self.asked = trio.Event()

    async def watch(
        self, everything: trio.CancelScope, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                if self.is_up and not self.asked.is_set():
                    self.asked.set()
                    continue
                self.forced = True
                everything.cancel()


async def _serve(config: Config, options: UpOptions, interrupts: _Interrupts) -> int:
    if options.ready_file is not None and not await answers(config):
        options.ready_file.unlink(missing_ok=True)  # of a cluster that was killed
    is_asked = config.worker.device == CUDA and options.workers > 1
    found = gpu_bytes() if is_asked else []
    async with running_cluster(
        config,
        options.workers,
        roles=options.roles,
        group_size=options.group_size or (_group_size(config, options.workers, found) if found else 1),
        gpus=len(found),
        http=options.http,
        abort_unfinished=options.abort_unfinished,
    ) as cluster:
        interrupts.is_up = True
        _report(f"coordinator and {_names(cluster)} are up; clients at {config.cluster.client_endpoint}")
        if options.http:
            url, page = cluster.config.http.url, ", and a chat page," if cluster.config.http.page else ""
            _report(f"OpenAI's API at {url}/v1; Anthropic's{page} at {url}")
        for name, url in cluster.metrics.items():
            _report(f"metrics of {name} at {url}")
        _report("Ctrl-C drains and stops; a second one exits at once")
        with _published(cluster, options.ready_file) as publish, control_socket(config.cluster.runtime_dir) as listener:
            supervisor = ProcessSupervisor(cluster, _report, publish, standbys=cluster.standbys)
            server = ReplaceServer(partial(replace_workers, cluster, supervisor), _report)
            ended = await _until_asked_or_lost(supervisor, interrupts.asked, partial(server.serve, listener))
            if ended is None:
                await _drain(cluster, options.deadline_s)
                return 0
            _report("stopping")
            return 0 if ended is cluster.coordinator and await ended.wait() == 0 else EXIT_CHILD_LOST


def _names(cluster: Cluster) -> str:
    grouped = [f"group {group} ({', '.join(ranks)})" for group, ranks in cluster.groups.items()]
    return ", ".join(grouped or cluster.workers)


@contextmanager
def _published(cluster: Cluster, ready_file: Path | None) -> Iterator[Callable[[], None]]:
    """The ready file exists while the cluster takes requests; written atomically. Gives a function that rewrites it."""

    def publish() -> None:
        if ready_file is not None:
            partial = ready_file.with_name(ready_file.name + ".partial")
            partial.write_text(json.dumps(cluster.describe()))
            partial.replace(ready_file)

    publish()
    try:
        yield publish
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)


async def _until_asked_or_lost(
    supervisor: ProcessSupervisor, asked: trio.Event, serve: Callable[[], Awaitable[None]]
) -> Child | None:
    """Keep the cluster, and `serve`, until a drain is asked for (returns None), or until it is over (the child that
    ended it)."""
    last: Child | None = None

    async def asked_for() -> None:
        await asked.wait()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(asked_for)
        nursery.start_soon(serve)
        last = await supervisor.run()
        nursery.cancel_scope.cancel()
    return last


async def _drain(cluster: Cluster, deadline_s: float) -> None:
    """Drain the coordinator; returns when it has exited, after the deadline, or when it does not answer."""
    _report(f"draining for up to {deadline_s:g} s; then {left_text(cluster.config)}")
    try:
        async with cluster.client("hisparse up") as client:
            for line in await client.stop(deadline_s):
                _report(line)
    except HiSparseError as error:
        _report(f"not drained: {error}")
        return
    if not await wait_all([cluster.coordinator], deadline_s + STOP_GRACE_S):
        _report("the coordinator is still running past its deadline")


def _report(text: str) -> None:
    log.info(text)
