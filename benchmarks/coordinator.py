"""What one core of coordinator carries: live requests, token events, admissions, command round trips.

    process 1, core A   a coordinator as `hisparse coordinator` runs it, its threads included
    process 2, core B   fake workers, one client subscribed to every request, one admin; over real ipc sockets

Fake workers keep the worker's side of the protocol (numbered reports and commands, acknowledgements, granted pages:
a request out of granted pages waits) and compute nothing. They report what commands led to as often as a worker does,
at most each REPORT_INTERVAL_S; Released goes at once, so that a round trip is the coordinator's. The client checks
every position of every request for gaps, repeats and wrong tokens; one error fails the run.

    admissions_per_s      submissions accepted by the gateway and admitted at a worker, all requests at once
    token_events_per_s    tokens that reached the client, at the offered rate (--rate; 0: as fast as it goes)
    command_rtt_*_ms      under that load, the longest way round that a command has: an abort leaves the client, its
                          Withdraw reaches the worker, Released comes back, the client reads Ended
    submit_ack_*_ms       under that load, from a submission to its acknowledgement, which is after its commit
    recovery_s            afterwards: from the start of a coordinator over the killed one's journal until it answers

    python benchmarks/coordinator.py [--json] [--requests N] [--rate N] [--seconds S] [--journal DIR|none]
                                     [--workers N] [--groups N] [--rounds N]

With another number of workers than WORKERS the same load is put on WORKERS workers, too, alternately and --rounds times
each; what one has of the other is printed beside (medians). With --groups workers are ranks of so many groups, each on
a node of its own, and the runs on WORKERS workers have groups of the same size.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import trio
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from protocol import messages
from protocol.arrays import pack_int32, pack_int64, unpack_int32
from protocol.errors import HiSparseError, Unavailable
from protocol.messages import CLIENT_MESSAGE_BYTES_MAX, PROTOCOL_VERSION
from protocol.transport.dealer import DealerSocket

WORKERS: Final = 16
PROMPT_TOKENS: Final = 64
MAX_TOKENS: Final = 8_192
PAGE_TOKENS: Final = 64
#: Submissions not yet accepted.
SUBMIT_WINDOW: Final = 512
#: Reports of one worker not yet acknowledged; a step that finds the window full is put off.
REPORT_WINDOW: Final = 8
#: Messages to and from one worker that libzmq holds, each way.
QUEUE_MESSAGES: Final = 10_000
#: As worker.report_interval_ms: time between two reports of what commands led to.
REPORT_INTERVAL_S: Final = 0.02
PROBE_INTERVAL_S: Final = 0.02
#: Probes at the same time, and those that have ended and are listed.
PROBES_MAX: Final = 8_192
ABORT_LIMIT_S: Final = 30.0
HEARTBEAT_INTERVAL_S: Final = 0.5
VOCABULARY: Final = 32_000
START_LIMIT_S: Final = 100.0
RETRY_S: Final = 0.5
PHASE_LIMIT_S: Final = 300.0

MODEL: Final = messages.ModelInfo("bench", "bench", 1 << 20, VOCABULARY, 4, 128, (), "bytes", "")


def token_at(request: npt.NDArray[np.integer], position: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
    """What request number `request` says at `position`: any other token is a mix-up."""
    return ((request * 7919 + position * 104_729) % VOCABULARY).astype(np.int32)


class BenchmarkError(Exception):
    """The run is void: something was lost, repeated, mixed up or late."""


@dataclass
class Load:
    """What the generator is to do now; shared by its tasks. `groups` 0: workers of one node that are no ranks."""

    requests: int
    workers: int = WORKERS
    groups: int = 0
    rate: float = 0.0  # token events per second; 0: as fast as it goes
    running: trio.Event = field(default_factory=trio.Event)
    admitted: int = 0
    all_admitted: trio.Event = field(default_factory=trio.Event)
    token_events: int = 0
    stalled_steps: int = 0


# ---------------------------------------------------------------- fake workers


class FakeWorker:
    """One worker: its requests in parallel arrays, one token each per step."""

    def __init__(self, index: int, load: Load) -> None:
        self.name = f"bench-{index:02}"
        self._index = index
        self._load = load
        rows = load.requests  # any worker may get any share
        self._request_indices = np.zeros(rows, np.int32)
        self._placements = np.zeros(rows, np.int64)
        self._numbers = np.zeros(rows, np.int32)
        self._positions = np.zeros(rows, np.int32)
        self._granted = np.zeros(rows, np.int32)
        self._row_of: dict[int, int] = {}
        self._events: list[messages.Event] = []
        self._reports = 0
        self._reports_acked = 0
        self._command_ack = 0
        self._command_ack_sent = 0
        self._applied = trio.Event()
        self._is_receiving = False
        self.welcome = trio.Event()
        self._beats = 0

    def connect(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> int:
        """Connect and say hello; returns the descriptor that is readable when there may be messages. The context's end
        closes the socket."""
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
        self._socket.connect(endpoint)
        self._say(self._hello())
        return int(self._socket.getsockopt(zmq.FD))

    async def run(self) -> None:
        """Once it is welcome. Messages that come are `receive`d by the task of FakeWorkers."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._step)
            nursery.start_soon(self._answer)
            nursery.start_soon(self._beat)

    def _hello(self) -> messages.WorkerHello:
        rows, workers, groups = self._load.requests, self._load.workers, self._load.groups
        nodes = groups or 1
        member, node = None, self._index * nodes // workers
        if groups:
            size = workers // groups
            member = messages.GroupMember(f"bench-group-{node:02}", self._index % size, size, 1)
        capacity = messages.WorkerCapacity(
            seats=rows // workers + 64,
            hot_chunks=64 * rows,
            index_pages=64 * rows,
            prompt_max_tokens=1 << 20,
            host_pages=64 * (rows // nodes + 64),
            page_bytes=1 << 20,
            hot_size_classes=(4096, 8192),
            tail_slots=8,
            overshoot_tokens=2,
            pool_path=f"/bench-{node}.pool",
        )
        about = f"bench-node-{node:02}", 1, os.getpid(), 0, 0, 1, MODEL, capacity
        return messages.WorkerHello(PROTOCOL_VERSION, self.name, *about, member=member)

    def receive(self) -> None:
        """Take all messages that have arrived, also those that come while some are answered."""
        with suppress(zmq.Again):
            while not self._is_receiving:
                frame = self._socket.recv(zmq.NOBLOCK)
                self._is_receiving = True
                try:
                    self._hear(messages.decode_coordinator(frame))
                finally:
                    self._is_receiving = False

    def _hear(self, message: messages.CoordinatorMessage) -> None:
        match message:
            case messages.WorkerWelcome():
                self.welcome.set()
            case messages.Commands(first=first, commands=commands):
                if first > self._command_ack + 1:
                    raise BenchmarkError(f"command {first} came after {self._command_ack}")
                fresh = commands[self._command_ack + 1 - first :]  # a busy generator is sent some again
                self._command_ack += len(fresh)
                for command in fresh:
                    self._apply(command)
                self._applied.set()
                if any(isinstance(command, messages.Withdraw) for command in fresh):
                    self._report(None)
            case messages.ReportAck(number=number):
                self._reports_acked = max(self._reports_acked, number)
            case _:
                raise BenchmarkError(f"{self.name} was told {message}")

    def _apply(self, command: messages.Command) -> None:
        match command:
            case messages.Admit(placement=placement):
                row = len(self._row_of)
                self._row_of[placement] = row
                self._request_indices[row] = command.request_index
                self._placements[row] = placement
                self._numbers[row] = unpack_int32(command.prompt, "prompt")[0]
                self._positions[row] = 0
                self._granted[row] = len(command.host_pages) // 4 * PAGE_TOKENS
                self._events += [messages.Staged(placement, 1.0, 1.0), messages.Started(placement)]
                self._load.admitted += 1
                if self._load.admitted == self._load.requests:
                    self._load.all_admitted.set()
            case messages.Grant(placement=placement) if placement in self._row_of:
                self._granted[self._row_of[placement]] += len(command.host_pages) // 4 * PAGE_TOKENS
            case messages.Withdraw(placement=placement) if placement in self._row_of:
                durable = self._remove(placement)
                self._events.append(messages.Released(placement, durable))
            case messages.Resize(placement=placement):
                self._events.append(messages.Resized(placement, command.hot_slots, command.hot_chunks))

    def _remove(self, placement: int) -> int:
        """Forget a request; the last one takes its row. Returns its rows in host memory."""
        row = self._row_of.pop(placement)
        durable = PROMPT_TOKENS + max(int(self._positions[row]) - 1, 0)
        last = len(self._row_of)
        for array in (self._request_indices, self._placements, self._numbers, self._positions, self._granted):
            array[row] = array[last]
        if row != last:
            self._row_of[int(self._placements[row])] = row
        return durable

    async def _step(self) -> None:
        """A decode step for all requests, at the offered rate; workers keep their distance from one another."""
        load = self._load
        await load.running.wait()
        step_at = trio.current_time()
        while True:
            interval_s = load.requests / load.rate if load.rate else 0.001
            phase_s = self._index / load.workers * interval_s
            step_at = max(step_at + interval_s, trio.current_time() - interval_s)
            await trio.sleep_until(step_at + phase_s)
            while self._reports - self._reports_acked >= REPORT_WINDOW:
                load.stalled_steps += 1
                await trio.sleep(0.001)
            self._report(self._decode())

    def _decode(self) -> messages.Progress:
        count = len(self._row_of)
        rows = np.flatnonzero(PROMPT_TOKENS + self._positions[:count] + 1 < self._granted[:count])
        starts = self._positions[rows]
        self._positions[rows] += 1
        return messages.Progress(
            request_indices=pack_int32(self._request_indices[rows]),
            placements=pack_int64(self._placements[rows]),
            starts=pack_int32(starts),
            counts=pack_int32(np.ones(len(rows), np.int32)),
            tokens=pack_int32(token_at(self._numbers[rows], starts)),
            durables=pack_int32(PROMPT_TOKENS + starts),
        )

    async def _answer(self) -> None:
        """Report what commands led to, as often as a worker does (worker/link/link.py)."""
        while True:
            await self._applied.wait()
            self._applied = trio.Event()
            if self._command_ack > self._command_ack_sent:  # no other report took it
                self._report(None)
                await trio.sleep(REPORT_INTERVAL_S)

    def _report(self, progress: messages.Progress | None) -> None:
        """With what commands led to since the last report."""
        events, self._events = tuple(self._events), []
        self._reports += 1
        self._command_ack_sent = self._command_ack
        self._say(messages.Report(self._reports, 1, self._command_ack, progress, events))

    async def _beat(self) -> None:
        while True:
            self._beats += 1
            self._say(messages.Heartbeat(1, self._command_ack, self._beats, self._beats, 1e4))
            await trio.sleep(HEARTBEAT_INTERVAL_S)

    def _say(self, message: messages.WorkerMessage) -> None:
        """Raises BenchmarkError when QUEUE_MESSAGES wait: the coordinator is far behind."""
        try:
            self._socket.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.Again as error:
            raise BenchmarkError(f"{QUEUE_MESSAGES} messages of {self.name} wait to be sent") from error
        self.receive()  # what came meanwhile: the send may have taken the note of it off the descriptor


class FakeWorkers:
    """All workers, their sockets behind one descriptor: a task and a DealerSocket for each would cost more than what a
    coordinator does for a message, and the generator would be what is measured."""

    def __init__(self, load: Load) -> None:
        self._workers = [FakeWorker(index, load) for index in range(load.workers)]

    async def run(self, endpoint: str, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start once all workers are welcome."""
        with zmq.Context() as context, select.epoll() as ready:
            by_descriptor = {worker.connect(context, endpoint): worker for worker in self._workers}
            for descriptor in by_descriptor:
                ready.register(descriptor, select.EPOLLIN)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen, ready, by_descriptor)
                with trio.fail_after(START_LIMIT_S):
                    for worker in self._workers:
                        await worker.welcome.wait()
                        nursery.start_soon(worker.run)
                task_status.started()

    @staticmethod
    async def _listen(ready: select.epoll, by_descriptor: dict[int, FakeWorker]) -> None:
        while True:
            await trio.lowlevel.wait_readable(ready.fileno())
            for descriptor, _ in ready.poll(0):
                by_descriptor[descriptor].receive()


# ---------------------------------------------------------------- the client


async def connected(endpoint: str) -> DealerSocket:
    """Tries again for START_LIMIT_S: a machine that stands still for seconds is no fault of the coordinator."""
    with trio.fail_after(START_LIMIT_S):
        while True:
            try:
                return await DealerSocket.connect(endpoint, message_bytes_max=CLIENT_MESSAGE_BYTES_MAX)
            except Unavailable:
                await trio.sleep(RETRY_S)


class CheckingClient:
    """Subscribed to everything; `_expected[handle]` is the position that must come next."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._numbers = np.full(4 * load.requests, -1, np.int32)
        self._expected = np.zeros(4 * load.requests, np.int32)
        self._tag = 0
        self._submitted: dict[int, int] = {}  # tag -> request number
        self._room = trio.Semaphore(SUBMIT_WINDOW)
        self._ids: dict[int, str] = {}  # request number -> id
        self._accepted: dict[int, trio.Event] = {}
        self._ended: dict[str, trio.Event] = {}
        self.round_trips_s: list[float] = []
        self.acknowledged_s: list[float] = []

    async def run(self, endpoint: str, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self._dealer = await connected(endpoint)
        await self._say(messages.Hello(PROTOCOL_VERSION, "client", "bench"))
        while True:
            for frame in await self._dealer.recv_batch():
                match messages.decode_gateway(frame):
                    case messages.Delivery() as delivery:
                        self._check(delivery)
                    case messages.Accepted() as accepted:
                        self._accept(accepted)
                    case messages.Ended() as ended:
                        self._end(ended)
                    case messages.Done():
                        pass
                    case messages.Welcome():
                        task_status.started()
                    case message:
                        raise BenchmarkError(f"the client was told {message}")

    def _check(self, delivery: messages.Delivery) -> None:
        """Gaps, repeats and mix-ups, for all entries at once."""
        handles = unpack_int32(delivery.handles, "handles")
        starts = unpack_int32(delivery.starts, "starts")
        counts = unpack_int32(delivery.counts, "counts")
        tokens = unpack_int32(delivery.tokens, "tokens")
        if not (self._expected[handles] == starts).all():
            raise BenchmarkError("a gap or a repeat")
        before = np.cumsum(counts) - counts
        positions = np.repeat(starts - before, counts) + np.arange(len(tokens))
        if not (token_at(np.repeat(self._numbers[handles], counts), positions) == tokens).all():
            raise BenchmarkError("a token of another request or position")
        self._expected[handles] += counts
        self._load.token_events += len(tokens)

    def _accept(self, accepted: messages.Accepted) -> None:
        number = self._submitted.pop(accepted.tag)
        self._ids[number] = accepted.request_id
        self._numbers[accepted.handle] = number
        self._expected[accepted.handle] = 0
        self._room.release()
        if number in self._accepted:
            self._accepted.pop(number).set()

    def _end(self, ended: messages.Ended) -> None:
        if ended.request_id not in self._ended:
            raise BenchmarkError(f"ended by itself: {ended}")
        if int(self._expected[ended.handle]) != ended.generated_tokens:
            raise BenchmarkError(f"tokens are missing before {ended}")
        self._ended.pop(ended.request_id).set()

    async def submit(self, number: int) -> None:
        await self._room.acquire()
        self._tag += 1
        self._submitted[self._tag] = number
        prompt = np.full(PROMPT_TOKENS, number, np.int32)
        sampling = messages.Sampling(max_tokens=MAX_TOKENS, ignore_eos=True)
        await self._say(messages.Submit(self._tag, pack_int32(prompt), sampling))

    async def probe(self, number: int) -> None:
        """One request of its own that is aborted once it runs: the round trip of its Withdraw."""
        accepted = self._accepted[number] = trio.Event()
        start = time.perf_counter()
        await self.submit(number)
        await accepted.wait()
        self.acknowledged_s.append(time.perf_counter() - start)
        await trio.sleep(0.2)
        request_id = self._ids[number]
        ended = self._ended[request_id] = trio.Event()
        start = time.perf_counter()
        self._tag += 1
        await self._say(messages.AbortRequests(self._tag, (request_id,)))
        await ended.wait()
        self.round_trips_s.append(time.perf_counter() - start)

    async def _say(self, message: messages.ClientMessage) -> None:
        await self._dealer.send(messages.encode(message))


# ---------------------------------------------------------------- phases


@dataclass(frozen=True)
class Admissions:
    per_s: float
    cpu_us: float
    generator_cpu_us: float


@dataclass(frozen=True)
class Result:
    """What was measured. Processor times (`_cpu_us`, user and system, all threads) say what a rate costs, also on a
    machine that has other work to do."""

    workers: int
    live_requests: int
    token_events_per_s: float
    token_events_per_s_offered: float
    command_rtt_p50_ms: float
    command_rtt_p99_ms: float
    command_rtts: int
    submit_ack_p50_ms: float
    submit_ack_p99_ms: float
    admissions_per_s: float
    admission_cpu_us: float
    admission_generator_cpu_us: float
    token_event_cpu_us: float
    coordinator_core_share: float
    generator_core_share: float
    coordinator_rss_mib: float
    journal_mib: float = 0.0
    recovery_s: float = 0.0


async def run_phases(
    endpoints: dict[str, str], coordinator_pid: int, options: argparse.Namespace, workers: int
) -> Result:
    load = Load(options.requests, workers, options.groups * workers // options.workers)
    client = CheckingClient(load)
    async with trio.open_nursery() as nursery:
        await nursery.start(FakeWorkers(load).run, endpoints["worker"])
        await nursery.start(client.run, endpoints["client"])
        begin = trio.current_time()
        start, cpu_s, own_cpu_s = time.perf_counter(), _cpu_s(coordinator_pid), time.process_time()
        with trio.fail_after(PHASE_LIMIT_S):
            for number in range(options.requests):
                if options.admit_rate:
                    await trio.sleep_until(begin + number / options.admit_rate)
                await client.submit(number)
            await load.all_admitted.wait()
        placements = Admissions(
            per_s=options.requests / (time.perf_counter() - start),
            cpu_us=1e6 * (_cpu_s(coordinator_pid) - cpu_s) / options.requests,
            generator_cpu_us=1e6 * (time.process_time() - own_cpu_s) / options.requests,
        )
        load.rate = options.rate
        load.running.set()
        await trio.sleep(1.0)
        result = await _measure(load, client, coordinator_pid, options, placements)
        nursery.cancel_scope.cancel()
    return result


async def _measure(
    load: Load, client: CheckingClient, coordinator_pid: int, options: argparse.Namespace, placements: Admissions
) -> Result:
    start, events = time.perf_counter(), load.token_events
    cpu = _cpu_s(coordinator_pid), time.process_time()
    async with trio.open_nursery() as probes:
        number = options.requests
        while time.perf_counter() < start + options.seconds:
            number += 1
            probes.start_soon(client.probe, number)
            await trio.sleep(PROBE_INTERVAL_S)
        elapsed_s = time.perf_counter() - start
        events = load.token_events - events
        coordinator_cpu_s = _cpu_s(coordinator_pid) - cpu[0]
        probes.cancel_scope.deadline = trio.current_time() + ABORT_LIMIT_S
    if probes.cancel_scope.cancelled_caught:
        raise BenchmarkError(f"aborts were not answered within {ABORT_LIMIT_S:g} s")
    generator_cpu_s = time.process_time() - cpu[1]
    rtts_ms, acks_ms = 1e3 * np.array(client.round_trips_s), 1e3 * np.array(client.acknowledged_s)
    return Result(
        workers=load.workers,
        live_requests=options.requests,
        token_events_per_s=events / elapsed_s,
        token_events_per_s_offered=options.rate,
        command_rtt_p50_ms=float(np.percentile(rtts_ms, 50)),
        command_rtt_p99_ms=float(np.percentile(rtts_ms, 99)),
        command_rtts=len(rtts_ms),
        submit_ack_p50_ms=float(np.percentile(acks_ms, 50)),
        submit_ack_p99_ms=float(np.percentile(acks_ms, 99)),
        admissions_per_s=placements.per_s,
        admission_cpu_us=placements.cpu_us,
        admission_generator_cpu_us=placements.generator_cpu_us,
        token_event_cpu_us=1e6 * coordinator_cpu_s / events,
        coordinator_core_share=coordinator_cpu_s / elapsed_s,
        generator_core_share=generator_cpu_s / elapsed_s,
        coordinator_rss_mib=_rss_mib(coordinator_pid),
    )


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


# ---------------------------------------------------------------- processes


@contextmanager
def running_coordinator(
    directory: Path, core: int | None, journal: str, requests: int
) -> Iterator[tuple[int, dict[str, str]]]:
    """A coordinator process confined to `core`, for `requests` and PROBES_MAX more; gives its pid and its endpoints.
    Killed at the end."""
    environ = os.environ | {
        "HISPARSE_CLUSTER_RUNTIME_DIR": str(directory),
        "HISPARSE_CLUSTER_LOG_LEVEL": "warning",
        "HISPARSE_COORDINATOR_LIVE_REQUESTS_MAX": str(requests + PROBES_MAX),
        "HISPARSE_COORDINATOR_QUEUE_MAX": str(requests + PROBES_MAX),
        "HISPARSE_COORDINATOR_JOURNAL": journal,
        # a machine with other work to do may keep the generator waiting: that says nothing of the coordinator
        "HISPARSE_COORDINATOR_HEARTBEAT_LIMIT_S": "60",
        "HISPARSE_COORDINATOR_COMMAND_ACK_LIMIT_S": "30",
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
    }
    with confined_to(core):
        process = subprocess.Popen([sys.executable, "-m", "hisparse.cli", "coordinator"], env=environ)
    endpoints = {role: f"ipc://{directory}/{role}.sock" for role in ("client", "admin", "worker")}
    try:
        give_up_at = time.monotonic() + START_LIMIT_S
        while not all(Path(endpoint.removeprefix("ipc://")).exists() for endpoint in endpoints.values()):
            if process.poll() is not None or time.monotonic() > give_up_at:
                raise BenchmarkError("the coordinator did not start")
            time.sleep(0.02)
        yield process.pid, endpoints
    finally:
        process.kill()
        process.wait()


@contextmanager
def confined_to(core: int | None) -> Iterator[None]:
    """Processes started in here inherit the confinement, and with them their threads."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def measure(options: argparse.Namespace, workers: int) -> Result:
    """One run on `workers` workers. Raises BenchmarkError when anything was lost, repeated or late."""
    cores = sorted(os.sched_getaffinity(0))
    apart = len(cores) > 1
    core = cores[0] if apart else None
    with tempfile.TemporaryDirectory(dir=None if options.journal == "none" else options.journal) as name:
        directory = Path(name)
        journal = "none" if options.journal == "none" else str(directory / "journal")
        coordinator = running_coordinator(directory / "run", core, journal, options.requests)
        with coordinator as (pid, endpoints), confined_to(cores[1] if apart else None):
            result = trio.run(run_phases, endpoints, pid, options, workers)
        if journal == "none":
            return result
        journal_mib = sum(Path(journal + part).stat().st_size for part in ("", "-wal")) / 2**20
        shutil.rmtree(directory / "run")
        start = time.perf_counter()
        with running_coordinator(directory / "run", core, journal, options.requests) as (_, endpoints):
            trio.run(_greet, endpoints["client"])
            return replace(result, journal_mib=journal_mib, recovery_s=time.perf_counter() - start)


async def _greet(endpoint: str) -> None:
    """Until the coordinator, which is listening, answers."""
    dealer = await connected(endpoint)
    with trio.fail_after(PHASE_LIMIT_S):
        await dealer.send(messages.encode(messages.Hello(PROTOCOL_VERSION, "client", "bench")))
        await dealer.recv_batch()
    dealer.close()


def compare(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians of runs on WORKERS workers and on `options.workers`, alternately, and the second divided by the first."""
    numbers = dict.fromkeys((WORKERS, options.workers))
    runs = [(workers, measure(options, workers)) for _ in range(options.rounds) for workers in numbers]
    found: dict[str, dict[str, float]] = {}
    for workers in numbers:
        results = [vars(result) for number, result in runs if number == workers]
        found[str(workers)] = {name: statistics.median(it[name] for it in results) for name in results[0]}
    if len(numbers) > 1:
        few, many = found.values()
        found["ratio"] = {name: many[name] / few[name] if few[name] else 0.0 for name in few}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--admit-rate", type=float, default=0.0, help="requests submitted per second; 0: all at once")
    parser.add_argument("--rate", type=float, default=220_000.0, help="token events offered per second; 0: no limit")
    parser.add_argument(
        "--journal",
        default=tempfile.gettempdir(),
        metavar="DIR|none",
        help="on which disk, or without (default: %(default)s)",
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="of measuring under load")
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--groups", type=int, default=0, help="whose ranks the workers are; 0: workers of one node")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each number of workers")
    options = parser.parse_args()
    if options.groups and (options.workers % options.groups or options.groups * WORKERS % options.workers):
        parser.error(f"{options.workers} workers, and {WORKERS}, must be whole groups of one size")
    try:
        found = compare(options)
    except* (BenchmarkError, HiSparseError, trio.TooSlowError) as group:
        print(f"void: {group.exceptions}", file=sys.stderr)
        sys.exit(1)
    if options.json:
        print(json.dumps(found if len(found) > 1 else next(iter(found.values()))))
    else:
        for name in next(iter(found.values())):
            print(f"{name:28}", *(f"{column[name]:>12,.2f}" for column in found.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
