"""The worker process: what is refused at start, what runs in which thread, how it ends.

    main thread      trio: the link to the coordinator, signals
    executor thread  the decode loop; when it fails, the process ends with it at once (exit code 70, one log line)
    metrics threads  /metrics, /healthz, /readyz

Start, in an order that refuses before it allocates: model, sizing, host memory, host pool, device memory. Then the
executor turns, then the link says hello: a worker that is welcomed can work. Its steps stand in the process's name
(protocol.start_and_end). A signal during start ends it at once: the pool's threads finish the pieces they are at, what
was registered is let go, and the process exits.

End. SIGTERM, SIGINT and the coordinator's Stop withdraw what is held, wait for every stream to pass its fence, let the
last reports go and leave with 0; each wait is bounded (worker.link). A second signal exits at once: the host pool is a
file, published rows below a durable length are in it, and a successor resumes there. The pool stays; the process
that started the workers removes it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import msgspec
import torch
import trio
from transformers.utils.logging import disable_progress_bar

from basics.rooms import by_label
from metrics.exporter import Exporter, serve
from metrics.state import LinkCounters
from metrics.worker import WorkerCollector, WorkerSources, worker_health, worker_readiness
from protocol import logs
from protocol.config import keeper_path, pool_path
from protocol.errors import EXIT_DEFECT, EXIT_PEER_LOST, ConfigError, HiSparseError
from protocol.logs import fields
from protocol.settings import Config, WorkerSettings
from protocol.start_and_end import leave_reason, tell_step
from protocol.text import make_tokenizer
from protocol.tokenizer_files import TokenizerFile, read_tokenizer
from protocol.transport.keys import access
from protocol.version import our_version
from worker.device.gpu_memory import cuda_device, free_device_bytes, let_segments_grow
from worker.device.sizing import Sizing, size_worker
from worker.group.control import PeersMissingError
from worker.group.exchange import require_alike
from worker.group.group import Group
from worker.keeper.watch import KeeperWatch
from worker.link.link import Link, LinkPace, connect_to
from worker.link.link_state import NAME_LIMITS, LinkState, WorkerIdentity
from worker.link.outbox import Outbox
from worker.loop.executor import Executor
from worker.loop.recording import SelectionRecorder
from worker.pool.start import open_pool, size_pool
from worker.runners.base import Runner
from worker.runners.checkpoint import fingerprint
from worker.runners.load import ModelRunner, load_runner
from worker.runners.transformers_dsa import TransformersRunner
from worker.standby import DismissedError, Prepared, stand_by
from worker.streams import Streams, make_streams
from worker.transfer.transfers import check_transfer, open_transfers

EXIT_CLEAN: Final = 0
EXIT_INTERRUPTED: Final = 130
#: Longest that an executor with nothing left to do may take to end its thread.
JOIN_LIMIT_S: Final = 5.0

log = logs.logger("worker.process")


def run_worker(config: Config, *, as_standby: bool = False) -> int:
    """Run one worker until it is told to leave; the exit code. Raises HiSparseError for what is refused at start or by
    the coordinator. `as_standby`: once it is ordered to take over from another (worker.standby)."""
    settings = config.worker
    logs.configure(config.cluster.log_level, config.cluster.log_format, worker=settings.name)
    faulthandler.enable()  # a signal of a library's fault shows where each thread was
    disable_progress_bar()  # stderr is one event a line
    if settings.threads:
        torch.set_num_threads(settings.threads)
    try:
        with interruptible() as halted:
            prepared = stand_by(config, halted) if as_standby else None
            worker = WorkerProcess(config, halted, prepared)
    except DismissedError:
        return EXIT_CLEAN
    except StartInterruptedError as stop:
        log.info("stopped during start", extra=fields(signal=stop.name))
        return EXIT_INTERRUPTED
    except PeersMissingError as error:
        leave_reason(error)
        log.critical("the group did not meet; the process ends", extra=fields(error=error))
        return EXIT_PEER_LOST
    try:
        return worker.run()
    finally:
        if not worker.close():
            os._exit(EXIT_DEFECT)  # the end of the interpreter, and of CUDA, would wait for what hangs


class WorkerProcess:
    """The parts of one worker, wired. Raises HiSparseError when they cannot be; `halted` ends the start of the pool.

    `prepared`: by a standby, which takes over from a worker whose requests wait.
    """

    def __init__(self, config: Config, halted: threading.Event, prepared: Prepared | None = None) -> None:
        self._takes_over, self._prepared = prepared is not None, prepared or Prepared()
        access(config.cluster, "worker", config.cluster.worker_endpoint)  # refused now, not after minutes of loading
        if config.worker.device != "cpu":
            let_segments_grow()
            cuda_device(config.worker.device)
        check_transfer(config.worker)
        tell_step("group" if config.worker.group else "model")
        self._group = Group.join(config, fingerprint(config.worker.model)) if config.worker.group else None
        try:
            self._start(config, halted)
        except BaseException:
            if self._group is not None:
                self._group.close()
            raise

    def _start(self, config: Config, halted: threading.Event) -> None:
        collectives = self._group.collectives if self._group is not None else None
        keeper = keeper_path(config) if config.worker.keeper else None
        runner = self._prepared.runner or load_runner(config.worker, collectives, keeper)
        self._weights_seconds, self._keeper = (
            runner.weights_seconds,
            KeeperWatch(keeper, is_kept=runner.weights_are_kept),
        )
        config = size_pool(config, runner.geometry, runner.info.fingerprint)
        settings = config.worker
        if self._group is not None:
            require_alike(self._group.collectives, runner.info.arithmetic, settings.device)
        path, free_bytes = pool_path(settings.pool_dir, settings.node), free_device_bytes(settings.device)
        prompts = runner.prompt_bytes(settings.pass_tokens)
        sizing = size_worker(settings, runner.geometry, runner.info, str(path), free_bytes, prompts)
        _announce(settings, sizing)
        host_pages = sizing.capacity.host_pages
        self._recorder = _recorder(settings, runner)
        self._pool = open_pool(
            config, runner.geometry, host_pages, runner.info.fingerprint, halted, attached=self._prepared.pool
        )
        try:
            self._wire(config, runner, sizing)
        except BaseException:
            self._pool.close()
            raise

    def _wire(self, config: Config, runner: Runner, sizing: Sizing) -> None:
        settings = config.worker
        streams = make_streams(settings.stream_backend, settings.stream_seed, device=settings.device)
        try:
            self._wire_with(config, runner, sizing, streams)
        except BaseException:
            streams.drop_graphs()  # for NCCL, which otherwise keeps the process from ending
            raise

    def _wire_with(self, config: Config, runner: Runner, sizing: Sizing, streams: Streams) -> None:
        settings = config.worker
        tell_step("device")
        tokenizer, began = read_tokenizer(settings.model), time.monotonic()
        self._outbox = Outbox(epoch=time.time_ns() // 1_000_000)
        self._executor = Executor(
            runner,
            settings,
            sizing,
            streams,
            self._pool.pages,
            make_tokenizer(tokenizer.kind, tokenizer.data),
            self._outbox,
            group=self._group,
            recorder=self._recorder,
            graphs_later=self._takes_over and self._group is None,
            is_warm=self._prepared.is_warm,
        )
        if settings.device != "cpu":
            taken, left = self._executor.scratch_bytes, free_device_bytes(settings.device)
            seconds = round(time.monotonic() - began, 3)
            log.info("sized", extra=fields(scratch_bytes=taken, device_bytes_left=left, seconds=seconds))
        self._thread = threading.Thread(target=run_or_die, args=(self._executor.run,), name="executor", daemon=True)
        transfers = self._executor.transfers
        open_transfers(transfers, config, runner, self._pool, wake=self._executor.wake)
        receiver = transfers.receiver
        capacity = msgspec.structs.replace(
            sizing.capacity,
            pool_id=self._pool.pool_id,
            sends=transfers.sender is not None,
            receives=receiver is not None,
        )
        described = receiver.describe() if receiver is not None else b""
        model = msgspec.structs.replace(runner.info, name=settings.served_model_name or runner.info.name)
        member = self._group.member if self._group is not None else None
        identity = WorkerIdentity(settings.name, settings.node, os.getpid(), model, capacity, described, member)
        self._link_counters = LinkCounters()
        self._link = _link(config, identity, self._outbox, self._executor, self._link_counters, tokenizer)
        self._exporter = self._serve_metrics(settings)

    def run(self) -> int:
        """Turn until told to stop; the exit code. Raises HiSparseError when the coordinator refuses this worker."""
        self._thread.start()
        tell_step("hisparse worker")
        if self._group is not None:
            self._group.control.is_done = lambda: self._link.stopping and not self._outbox.held()
            self._group.control.progress.turns = True
        was_emptied = trio.run(self._serve)
        if was_emptied and self._end_executor():
            if self._group is not None and not self._group.leave():
                log.warning("the collectives did not end; the process ends without that")
                os._exit(EXIT_CLEAN)
            log.info("stopped")
            return EXIT_CLEAN
        log.error("stopped with work in flight", extra=fields(held=len(self._outbox.held())))
        return EXIT_DEFECT

    def close(self) -> bool:
        """End the threads and unmap the pool, whose file stays; False when the executor's thread does not end."""
        if self._exporter is not None:
            self._exporter.close()
        if not self._end_executor():
            return False
        self._executor.transfers.close()
        self._pool.close()
        if self._recorder is not None:
            self._recorder.close()
        if self._group is not None:
            self._group.close()
        return True

    def _end_executor(self) -> bool:
        """Whether its thread is gone: it may be stuck in an operation, and then nothing it uses may be taken away."""
        self._executor.stop()
        if self._thread.is_alive():
            self._thread.join(JOIN_LIMIT_S)
        return not self._thread.is_alive()

    async def _serve(self) -> bool:
        was_emptied, refusal = False, None
        async with trio.open_nursery() as nursery:
            await nursery.start(watch_signals, self._link.request_stop)
            try:
                was_emptied = await self._link.run()
            except HiSparseError as error:  # raised outside of the nursery, which would wrap it in a group
                refusal = error
            nursery.cancel_scope.cancel()
        if refusal is not None:
            raise refusal
        return was_emptied

    def _serve_metrics(self, settings: WorkerSettings) -> Exporter | None:
        if settings.metrics_port < 0:
            return None
        sources = WorkerSources(
            worker=settings.name,
            version=our_version(),
            seats=settings.seats,
            counters=self._executor.counters,
            link=self._link_counters,
            requests=self._executor.count_by_status,
            hot_buffers=self._executor.count_by_hot_size,
            memory=self._executor.memory,
            unreported_tokens=lambda: self._outbox.pending_tokens,
            reports_in_flight=lambda: self._outbox.in_flight,
            stopping=lambda: self._link.stopping,
            weights=lambda: self._weights_seconds,
            weights_kept=self._keeper.samples,
            transfers=self._executor.transfers.counters,
            rooms=lambda: by_label(self._executor.room_use(), self._outbox.room_use()),
        )
        exporter = serve(
            [WorkerCollector(sources)],
            healthy=lambda: worker_health(sources),
            ready=lambda: worker_readiness(sources),
            addr=settings.metrics_host,
            port=settings.metrics_port,
        )
        log.info("metrics", extra=fields(url=f"{exporter.url}/metrics"))
        return exporter


def _link(
    config: Config,
    identity: WorkerIdentity,
    outbox: Outbox,
    executor: Executor,
    counters: LinkCounters,
    tokenizer: TokenizerFile,
) -> Link:
    endpoint = config.cluster.worker_endpoint
    return Link(
        LinkState(identity, outbox, counters, NAME_LIMITS * config.coordinator.heartbeat_limit_s),
        executor,
        connect_to(endpoint, lambda: access(config.cluster, "worker", endpoint)),
        pace=LinkPace(config.worker.report_interval_ms / 1e3, config.coordinator.heartbeat_interval_s),
        tokenizer=tokenizer.data,
    )


def _recorder(settings: WorkerSettings, runner: ModelRunner) -> SelectionRecorder | None:
    """What records selections of `runner` from now on, if asked for. Raises ConfigError."""
    if not settings.record_selections:
        return None
    if not isinstance(runner, TransformersRunner):
        raise ConfigError(
            "selections of pages are not recorded",
            field="worker.record_selections",
            value=settings.record_selections,
            remedy="leave it empty",
        )
    path = Path(f"{settings.record_selections}.{settings.name}.{os.getpid()}")
    in_flight = settings.lookahead_steps + 1
    recorder = SelectionRecorder(path, runner.geometry, settings.seats, settings.device, in_flight)
    runner.after_index_topk = recorder.keep
    return recorder


def _announce(settings: WorkerSettings, sizing: Sizing) -> None:
    log.info(
        "starting",
        extra=fields(
            version=our_version(), model=settings.model, device=settings.device, streams=settings.stream_backend
        ),
    )
    for line in sizing.report():
        log.info("sized", extra=fields(**line))


# ---------------------------------------------------------------- threads and signals


def run_or_die(loop: Callable[[], None]) -> None:
    """Run `loop`; whatever it raises ends the process now, with one line that says what.

    Nothing is cleaned up: which memory the failed loop left half changed is not known, and what was published is in the
    host pool already.
    """
    try:
        loop()
    except BaseException as error:
        leave_reason(error)
        log.critical("the executor failed; the process ends", exc_info=True)
        os._exit(EXIT_DEFECT)


class StartInterruptedError(BaseException):
    """A signal came before the worker was up. Not an Exception: no handler on the way may take it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.name = signal.Signals(number).name


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Within it, the first SIGTERM or SIGINT sets the event given and raises StartInterruptedError in the main thread;
    the second ends the process on the spot."""
    halted = threading.Event()

    def interrupt(number: int, _: FrameType | None) -> None:
        if halted.is_set():
            os._exit(EXIT_INTERRUPTED)
        halted.set()
        raise StartInterruptedError(number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield halted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def watch_signals(
    request_stop: Callable[[float], None], task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """The first SIGTERM or SIGINT asks for a stop, the second ends the process on the spot."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        is_asked = False
        async for number in signals:
            if is_asked:
                log.warning("second signal, exiting at once", extra=fields(signal=signal.Signals(number).name))
                os._exit(EXIT_INTERRUPTED)
            is_asked = True
            log.info("stopping", extra=fields(signal=signal.Signals(number).name))
            request_stop(0.0)
