"""Worker links over real ipc sockets: once and in order both ways (I4), and what proves an exit (I2)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from basics.processes import process_of
from coordinator.journal.journal import Journal, NoJournal
from coordinator.listener.router import RouterSocket
from coordinator.state.events import WorkerPort
from coordinator.tokens.token_log import TokenLog
from coordinator.workers import command_log, worker_link
from coordinator.workers.tokenizer_store import TokenizerStore
from coordinator.workers.worker_link import WorkerLinks
from metrics.state import CoordinatorCounters
from protocol import messages
from protocol.arrays import Int32Array, unpack_int32
from protocol.errors import ConfigError, HiSparseError, ProtocolError
from protocol.inventory import InventoryRow, pack_rows
from protocol.messages import (
    PROTOCOL_VERSION,
    WORKER_MESSAGE_BYTES_MAX,
    Commands,
    Refused,
    ReportAck,
    Withdraw,
    WorkerWelcome,
)
from protocol.settings import CoordinatorSettings
from protocol.skew import PROTOCOL_VERSION_MIN
from tests.support.fakes.worker import FakeWorker, hello
from tests.support.limits import HANG_LIMIT_S
from tests.support.progress import RequestEntry, progress
from tests.support.version_before import BEFORE

#: Tests of silence use the short limits; the long ones are out of reach of a busy machine.
SHORT_LIMIT_S = 0.4
SHORT_ACK_LIMIT_S = 0.1
SETTINGS = CoordinatorSettings(heartbeat_interval_s=0.02, heartbeat_limit_s=300.0, command_ack_limit_s=300.0)
REPLAYING = msgspec.structs.replace(SETTINGS, command_ack_limit_s=SHORT_ACK_LIMIT_S)
IMPATIENT = msgspec.structs.replace(REPLAYING, heartbeat_limit_s=SHORT_LIMIT_S)
#: How often links are judged.
TURN_S = SETTINGS.heartbeat_interval_s / 2
INCARNATION = 10


class FakeLinkScheduler:
    """Records what links tell. `refuse_with` makes the next worker_up fail, `hesitate` lets it wait."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []
        self.deaths: list[str] = []
        self.leavers: list[str] = []
        self.ports: dict[str, WorkerPort] = {}
        self.processes: list[tuple[int, int, str]] = []
        self.refuse_with: HiSparseError | None = None
        self.break_on_event = False
        self.hesitate = trio.Event()
        self.hesitate.set()

    async def worker_back(self, hello: messages.WorkerHello) -> None:
        if self.refuse_with is not None:
            error, self.refuse_with = self.refuse_with, None
            raise error
        self.told.append(("back", hello.worker, hello.epoch))

    async def worker_up(self, hello: messages.WorkerHello, port: WorkerPort, process: tuple[int, int, str]) -> None:
        await self.hesitate.wait()
        if self.refuse_with is not None:
            error, self.refuse_with = self.refuse_with, None
            raise error
        self.told.append(("up", hello.worker, hello.epoch))
        self.processes.append(process)
        self.ports[hello.worker] = port

    def worker_down(
        self, worker: str, epoch: int, proved_exit: bool, died: bool = False, is_leaving: bool = False
    ) -> None:
        assert proved_exit or not died
        self.deaths += [worker] if died else []
        self.leavers += [worker] if is_leaving else []
        self.told.append(("down", worker, epoch, proved_exit))

    def worker_exited(self, worker: str, epoch: int, died: bool = True) -> None:
        self.deaths += [worker] if died else []
        self.told.append(("exited", worker, epoch))

    def on_event(self, worker: str, epoch: int, event: messages.Event) -> None:
        if self.break_on_event:
            raise ProtocolError("flooded")
        self.told.append((worker, epoch, event))

    def starving(self, request_indices: Int32Array) -> None:
        self.told.append(("starving", *request_indices.tolist()))

    def prompt_rows(self, request_indices: Int32Array) -> None:
        self.told.append(("prompt rows", *request_indices.tolist()))

    async def drain(
        self, workers: tuple[str, ...], owner: str, *, handover: bool, deadline_s: float
    ) -> tuple[str, ...]:
        self.told.append(("drain", *workers, handover, deadline_s))
        return workers


class Rig:
    def __init__(
        self,
        directory: Path,
        *,
        settings: CoordinatorSettings = SETTINGS,
        queue_messages: int = 1000,
        journal: Callable[[TokenLog], Journal] | None = None,
    ) -> None:
        self.socket = RouterSocket(
            f"ipc://{directory}/run/worker.sock",
            message_bytes_max=WORKER_MESSAGE_BYTES_MAX,
            credentials=True,
            queue_messages=queue_messages,
        )
        self.scheduler = FakeLinkScheduler()
        self.log = TokenLog(request_indices=8, arena_tokens=1 << 16, journalled=journal is not None)
        self.journal = journal(self.log) if journal else NoJournal(self._wake)
        self.tokenizers = TokenizerStore()
        self.counters = CoordinatorCounters()
        self.wakes = 0
        self.links = WorkerLinks(
            self.scheduler,
            self.log,
            self.tokenizers,
            self.counters,
            settings,
            socket=self.socket,
            incarnation=INCARNATION,
            journal=self.journal,
        )

    def _wake(self) -> None:
        self.wakes += 1

    def dropped(self) -> dict[str, int]:
        return {reason: count for (_, reason), count in self.counters.dropped_messages.items()}

    async def worker(self, epoch: int = 1) -> FakeWorker:
        return await FakeWorker.connect(self.socket.endpoint, epoch)

    async def joined(self, name: str = "w0", epoch: int = 1) -> FakeWorker:
        worker = await self.worker(epoch)
        await worker.say(hello(name, epoch))
        assert isinstance(await worker.hear(), WorkerWelcome)
        return worker

    def admitted(self, name: str = "w0", placement: int = 1) -> int:
        """A request of that admission, given to the worker; its slot."""
        request_index = self.log.open(100)
        self.log.begin_placement(request_index, placement, 10, 1 << 20)
        sampling = messages.Sampling(max_tokens=100)
        self.scheduler.ports[name].send(
            messages.Admit(
                placement, request_index, f"r{request_index}", bytes(40), b"", 0, sampling, bytes(4), 1, 0, 1
            )
        )
        return request_index

    async def told(self, *expected: object) -> None:
        with trio.fail_after(HANG_LIMIT_S):
            while expected not in self.scheduler.told:  # noqa: ASYNC110
                await trio.sleep(0.005)


@asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[Rig]:
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.links.run)
            yield rig
            nursery.cancel_scope.cancel()
    finally:
        rig.socket.close()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running(Rig(tmp_path)) as rig:
        yield rig


@pytest.fixture
async def impatient(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running(Rig(tmp_path, settings=IMPATIENT)) as rig:
        yield rig


def tokens_of(rig: Rig, request_index: int) -> list[int]:
    return list(unpack_int32(rig.log.tokens(request_index, 0), "tokens"))


async def pass_time(clock: MockClock, seconds: float) -> None:
    """So much time passes, in which links are judged as often as they are."""
    for _ in range(round(seconds / TURN_S)):
        clock.jump(TURN_S)
        await trio.testing.wait_all_tasks_blocked()


async def handled(worker: FakeWorker) -> None:
    """What `worker` has said is handled. Nothing was sent to it before the answer to this."""
    await worker.report()
    assert isinstance(await worker.hear(), ReportAck)


async def refusal(worker: FakeWorker) -> Refused:
    message = await worker.hear()
    assert isinstance(message, Refused), message
    return message


# ------------------------------------------------------------ reports


async def test_reports_apply_once_in_order_and_are_acknowledged(rig: Rig) -> None:
    worker = await rig.joined()
    request_index = rig.admitted()
    assert isinstance(await worker.hear(), Commands)
    await worker.report(progress(RequestEntry(request_index, 1, 0, [5, 6])), [messages.Started(1)])
    assert await worker.hear() == ReportAck(INCARNATION, 1)
    await worker.report(progress(RequestEntry(request_index, 1, 0, [5, 6])), [messages.Started(1)], number=1)
    assert await worker.hear() == ReportAck(INCARNATION, 1)
    await worker.report(progress(RequestEntry(request_index, 1, 2, [7])), number=2)
    assert await worker.hear() == ReportAck(INCARNATION, 2)
    assert tokens_of(rig, request_index) == [5, 6, 7]
    assert rig.scheduler.told[1:] == [("w0", 1, messages.Started(1))]
    assert (rig.counters.reports, rig.counters.tokens, rig.wakes) == (2, 3, 2)
    worker.close()


async def test_report_gap_is_requested_and_later_reports_wait(mock_clock: MockClock, rig: Rig) -> None:
    worker = await rig.joined()
    request_index = rig.admitted()
    await worker.hear()
    await worker.report(progress(RequestEntry(request_index, 1, 0, [5])), number=2)
    await worker.report(number=3)
    assert await worker.hear() == messages.ReplayReports(INCARNATION, 1)
    while rig.counters.report_gaps < 2:
        await trio.lowlevel.checkpoint()
    assert tokens_of(rig, request_index) == []
    await worker.report(number=1)
    assert await worker.hear() == ReportAck(INCARNATION, 1), "asked once, not per report"
    await worker.report(progress(RequestEntry(request_index, 1, 0, [5])), number=2)
    assert await worker.hear() == ReportAck(INCARNATION, 2)
    assert tokens_of(rig, request_index) == [5]
    worker.close()


async def test_worker_cannot_report_for_requests_of_another_worker(rig: Rig) -> None:
    owner, other = await rig.joined("w0"), await rig.joined("w1")
    request_index = rig.admitted("w0", placement=77)
    await other.report(progress(RequestEntry(request_index, 77, 0, [6, 6, 6])))
    assert await other.hear() == ReportAck(INCARNATION, 1)
    assert tokens_of(rig, request_index) == []
    await owner.report(progress(RequestEntry(request_index, 77, 0, [1])))
    await owner.hear()
    assert await owner.hear() == ReportAck(INCARNATION, 1)
    assert tokens_of(rig, request_index) == [1]
    owner.close()
    other.close()


async def test_shortages_are_reported_once(rig: Rig) -> None:
    worker = await rig.joined()
    request_index = rig.admitted()
    rig.log.grant(request_index, 10 + SETTINGS.grant_ahead_tokens)
    for i in range(3):
        await worker.report(progress(RequestEntry(request_index, 1, i, [i])))
    await rig.told("starving", request_index)
    await worker.beat()
    assert rig.scheduler.told.count(("starving", request_index)) == 1
    worker.close()


@pytest.mark.parametrize("broken", ["missed position", "unsent command", "unsent replay", "number 0", "flood"])
async def test_impossible_report_costs_a_single_worker_its_epoch(rig: Rig, broken: str) -> None:
    worker, neighbour = await rig.joined("w0"), await rig.joined("w1")
    request_index, other = rig.admitted("w0", placement=1), rig.admitted("w1", placement=2)
    await worker.hear()
    match broken:
        case "missed position":
            await worker.report(progress(RequestEntry(request_index, 1, 3, [9])))
        case "unsent command":
            await worker.beat(command_ack=99)
        case "unsent replay":
            await worker.say(messages.ReplayCommands(1, 5))
        case "number 0":
            await worker.report(number=0)
        case "flood":
            rig.scheduler.break_on_event = True
            await worker.report(events=[messages.Parked(1)])
    assert (await refusal(worker)).code == "wrong_state"
    assert ("down", "w0", 1, False) in rig.scheduler.told, "broken is no proof of an exit (I2)"
    await worker.report(progress(RequestEntry(request_index, 1, 0, [9])))
    assert (await refusal(worker)).message == "this epoch is over"
    assert tokens_of(rig, request_index) == []
    rig.scheduler.break_on_event = False
    await neighbour.report(progress(RequestEntry(other, 2, 0, [4])))
    await neighbour.hear()
    assert await neighbour.hear() == ReportAck(INCARNATION, 1)
    assert tokens_of(rig, other) == [4]
    worker.close()
    neighbour.close()


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1garbage",
        messages.encode(messages.Hello(1, "admin")),
        messages.encode(hello())[:-2],
        bytes(WORKER_MESSAGE_BYTES_MAX + 1),
    ],
    ids=["empty", "garbage", "client's", "cut", "oversized"],
)
async def test_unreadable_message_is_refused_and_counted(rig: Rig, frame: bytes) -> None:
    stranger, worker = await rig.worker(), await rig.joined()
    await stranger.say(frame)
    assert (await refusal(stranger)).code == "protocol"
    assert rig.dropped() == {"protocol": 1}
    await worker.report()
    assert await worker.hear() == ReportAck(INCARNATION, 1)
    stranger.close()
    worker.close()


async def test_unknown_peers_and_old_epochs_are_ignored(rig: Rig) -> None:
    stranger, worker = await rig.worker(), await rig.joined()
    await stranger.report(events=[messages.Parked(1)])
    assert (await refusal(stranger)).remedy == "send WorkerHello first"
    worker.epoch = 2
    await worker.report(events=[messages.Parked(1)])
    assert (await refusal(worker)).code == "wrong_state"
    assert rig.scheduler.told == [("up", "w0", 1)]
    stranger.close()
    worker.close()


# ------------------------------------------------------------ commands


async def test_commands_are_numbered_and_batched(mock_clock: MockClock, tmp_path: Path) -> None:
    async with running(Rig(tmp_path, settings=REPLAYING)) as rig:
        worker = await rig.joined()
        for placement in (1, 2, 3):
            rig.scheduler.ports["w0"].send(Withdraw(placement))
        assert await worker.hear() == Commands(INCARNATION, 1, (Withdraw(1), Withdraw(2), Withdraw(3)))
        mock_clock.jump(TURN_S)
        await worker.beat(command_ack=3)
        await worker.say(messages.ReplayCommands(1, 4))
        await handled(worker)
        await pass_time(mock_clock, 3 * SHORT_ACK_LIMIT_S)
        await handled(worker)  # and nothing was sent before: what is acknowledged is done with
        assert rig.scheduler.ports["w0"].stats().command_ack_ms == pytest.approx(1e3 * TURN_S)
        assert sum(rig.counters.command_ack_s.counts) == 1
        worker.close()


async def test_overdue_acknowledgement_causes_replay(tmp_path: Path) -> None:
    async with running(Rig(tmp_path, settings=REPLAYING)) as rig:
        worker = await rig.joined()
        rig.scheduler.ports["w0"].send(Withdraw(1))
        first = await worker.hear()
        assert await worker.hear() == first == Commands(INCARNATION, 1, (Withdraw(1),))
        assert rig.counters.replayed_commands >= 1
        worker.close()


async def test_worker_that_saw_a_gap_gets_a_replay(rig: Rig) -> None:
    worker = await rig.joined()
    for placement in (1, 2):
        rig.scheduler.ports["w0"].send(Withdraw(placement))
        await worker.hear()
    await worker.beat(command_ack=1)
    await worker.say(messages.ReplayCommands(1, 2))
    assert await worker.hear() == Commands(INCARNATION, 2, (Withdraw(2),))
    worker.close()


async def test_reconnect_continues_both_number_sequences(rig: Rig) -> None:
    worker = await rig.joined()
    request_index = rig.admitted()
    await worker.report(progress(RequestEntry(request_index, 1, 0, [5])))
    await worker.hear()
    await worker.hear()
    worker.close()
    rig.scheduler.ports["w0"].send(Withdraw(1))
    again = await rig.worker()
    await again.say(hello(command_ack=1, report_next=4))
    assert await again.hear() == WorkerWelcome(PROTOCOL_VERSION, INCARNATION, 1, want_tokenizer=False)
    assert await again.hear() == Commands(INCARNATION, 2, (Withdraw(1),))
    again.reports = 1
    await again.report(progress(RequestEntry(request_index, 1, 1, [6])), command_ack=2)
    assert await again.hear() == ReportAck(INCARNATION, 2)
    assert tokens_of(rig, request_index) == [5, 6]
    assert rig.scheduler.told == [("up", "w0", 1)], "the same epoch goes on"
    again.close()


async def test_a_full_socket_keeps_commands_in_order(tmp_path: Path) -> None:
    async with running(Rig(tmp_path, queue_messages=2)) as rig:
        worker = await rig.joined()
        count = 400
        for placement in range(count):
            rig.scheduler.ports["w0"].send(messages.Grant(placement, bytes(4 * 40_000), 0, 0))
        await trio.sleep(0.05)
        expected = 1
        while expected <= count:
            message = await worker.hear()
            assert isinstance(message, Commands)
            assert message.first <= expected, "no gap"
            expected = max(expected, message.first + len(message.commands))
            await worker.beat(beats=expected, command_ack=expected - 1)
        worker.close()


async def test_a_worker_that_never_acknowledges_counts_as_down(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_log, "COMMANDS_UNACKED_MAX", 10)
    worker = await rig.joined()
    for placement in range(12):
        rig.scheduler.ports["w0"].send(Withdraw(placement))
    assert rig.scheduler.told[-1] == ("down", "w0", 1, False)
    worker.close()


# ------------------------------------------------------------ who joins


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"protocol": PROTOCOL_VERSION + 1}, "protocol"),
        ({"protocol": PROTOCOL_VERSION_MIN - 1}, "protocol"),
        ({"worker": ""}, "bad_input"),
        ({"node": "x" * 200}, "bad_input"),
        ({"incarnation_seen": INCARNATION + 1}, "unavailable"),
        ({"incarnation_seen": INCARNATION, "command_ack": 3}, "wrong_state"),
    ],
)
async def test_refused_worker_is_told_why(rig: Rig, changes: dict[str, object], code: str) -> None:
    worker = await rig.worker()
    await worker.say(hello(**changes))  # type: ignore[arg-type]
    assert (await refusal(worker)).code == code
    assert rig.scheduler.told == []
    worker.close()


async def test_worker_of_the_version_before_is_answered_in_it(rig: Rig, version_before: int) -> None:
    """It gives up at a welcome of another version than its own. It joins, reconnects, and is to empty itself."""
    hellos = hello(), hello(), hello(epoch=2, incarnation_seen=INCARNATION - 1, command_ack=3)
    for older in (msgspec.structs.replace(it, protocol=version_before) for it in hellos):
        worker = await rig.worker()
        await worker.say(older)
        welcome = await worker.hear()
        assert isinstance(welcome, WorkerWelcome)
        assert welcome.protocol == version_before
        worker.close()


@pytest.mark.usefixtures("version_before")
@pytest.mark.parametrize("protocol", [PROTOCOL_VERSION, BEFORE])
async def test_worker_is_sent_commands_of_its_version(rig: Rig, protocol: int) -> None:
    """An older worker refuses a command with a field that it does not know."""
    worker = await rig.worker()
    await worker.say(hello(protocol=protocol))
    assert isinstance(await worker.hear(), WorkerWelcome)
    older = messages.Admit(1, 0, "r", bytes(40), b"", 0, messages.Sampling(8), bytes(4), 1, 0, 1, rank=(-1, 2, 3))
    command = msgspec.structs.replace(older, owner="alice", by_steps=True)
    rig.scheduler.ports["w0"].send(command)
    heard = command if protocol == PROTOCOL_VERSION else older
    assert await worker.hear() == Commands(INCARNATION, 1, (heard,))
    worker.close()


async def test_hello_of_an_exited_process_proves_its_exit(rig: Rig) -> None:
    """I2: the process is the one that made the connection, not a later owner of its descriptor."""
    script = (
        "import sys, zmq\n"
        "context = zmq.Context()\n"
        "dealer = context.socket(zmq.DEALER)\n"
        "dealer.connect(sys.argv[1]); dealer.send(bytes.fromhex(sys.argv[2])); dealer.close(100_000)\n"
        "context.term()"  # waits until it is sent; the end of the process does not
    )
    frame = messages.encode(hello("w0")).hex()
    child = subprocess.Popen([sys.executable, "-c", script, rig.socket.endpoint, frame])  # noqa: ASYNC220
    await trio.to_thread.run_sync(child.wait)
    with trio.fail_after(HANG_LIMIT_S):
        while not any(told[0] == "down" for told in rig.scheduler.told):  # noqa: ASYNC110
            await trio.sleep(0.01)
    assert ("down", "w0", 1, True) in [told[:4] for told in rig.scheduler.told]


async def test_scheduler_refusal_reaches_the_worker(rig: Rig) -> None:
    rig.scheduler.refuse_with = ConfigError("serves model b, the group serves a", remedy="start it with model a")
    worker = await rig.worker()
    await worker.say(hello())
    assert await worker.hear() == Refused("config", "serves model b, the group serves a", "start it with model a")
    await worker.say(hello())
    assert isinstance(await worker.hear(), WorkerWelcome), "nothing stays behind"
    worker.close()


async def test_unknown_epoch_is_sent_away_to_empty_itself(rig: Rig) -> None:
    worker = await rig.worker()
    await worker.say(hello(incarnation_seen=INCARNATION - 1, report_next=7, inventory=pack_rows([InventoryRow(3)])))
    assert await worker.hear() == WorkerWelcome(PROTOCOL_VERSION, INCARNATION, 0, want_tokenizer=False)
    assert rig.scheduler.told == [], "it is not taken in"
    await worker.say(hello(epoch=2))
    assert isinstance(await worker.hear(), WorkerWelcome)
    assert rig.scheduler.told == [("up", "w0", 2)]
    worker.close()


async def test_hellos_during_an_answer_are_deferred(rig: Rig) -> None:
    rig.scheduler.hesitate = trio.Event()
    worker = await rig.worker()
    await worker.say(hello())
    await worker.say(hello())
    assert (await refusal(worker)).code == "unavailable"
    rig.scheduler.hesitate.set()
    assert isinstance(await worker.hear(), WorkerWelcome)
    assert rig.scheduler.told == [("up", "w0", 1)]
    worker.close()


async def test_new_epoch_of_a_process_proves_the_old_quiesced(rig: Rig) -> None:
    worker = await rig.joined(epoch=1)
    await worker.say(hello(epoch=2))
    assert isinstance(await worker.hear(), WorkerWelcome)
    assert rig.scheduler.told == [("up", "w0", 1), ("down", "w0", 1, True), ("up", "w0", 2)]
    assert rig.scheduler.deaths == [], "it has emptied itself"
    worker.close()


SLEEPER = """
import sys, zmq
from protocol.messages import encode
from tests.support.fakes.worker import hello
dealer = zmq.Context().socket(zmq.DEALER)
dealer.connect(sys.argv[1])
dealer.send(encode(hello("w0", epoch=int(sys.argv[2]))))
dealer.recv()
sys.stdin.read()
"""


def other_process(rig: Rig, epoch: int) -> subprocess.Popen[bytes]:
    """A process that joined as w0; it says nothing more, and ends with this one."""
    command = [sys.executable, "-c", SLEEPER, rig.socket.endpoint, str(epoch)]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


@pytest.mark.process
async def test_second_process_cannot_take_a_living_workers_name(tmp_path: Path) -> None:
    async with running(Rig(tmp_path)) as rig:
        process = await trio.to_thread.run_sync(other_process, rig, 1)
        await rig.told("up", "w0", 1)
        impostor = await rig.worker(epoch=5)
        for epoch in (1, 5):
            await impostor.say(hello(epoch=epoch))
            assert (await refusal(impostor)).code == "name_taken"
        process.kill()
        process.wait()
        await rig.told("down", "w0", 1, True)
        assert rig.scheduler.deaths == ["w0"]
        await impostor.say(hello(epoch=5))
        assert isinstance(await impostor.hear(), WorkerWelcome)
        impostor.close()


@pytest.mark.process
async def test_silence_proves_nothing_and_exit_is_reported(tmp_path: Path) -> None:
    """I2: what a silent process may still touch stays quarantined until its exit is seen."""
    async with running(Rig(tmp_path, settings=IMPATIENT)) as rig:
        process = await trio.to_thread.run_sync(other_process, rig, 1)
        await rig.told("down", "w0", 1, False)
        successor = await rig.worker(epoch=5)
        await successor.say(hello(epoch=5))
        assert isinstance(await successor.hear(), WorkerWelcome)
        assert ("exited", "w0", 1) not in rig.scheduler.told
        process.kill()
        process.wait()
        await rig.told("exited", "w0", 1)
        successor.close()


# ------------------------------------------------------------ signs of life


async def test_hung_executor_counts_as_down(mock_clock: MockClock, impatient: Rig) -> None:
    worker = await impatient.joined()
    for _ in range(round(SHORT_LIMIT_S / TURN_S) - 1):
        await worker.beat(beats=7)
        await handled(worker)
        await pass_time(mock_clock, TURN_S)
    assert impatient.scheduler.told == [("up", "w0", 1)]
    await pass_time(mock_clock, 3 * TURN_S)
    assert ("down", "w0", 1, False) in impatient.scheduler.told
    worker.close()


async def test_running_executor_keeps_its_worker_up(mock_clock: MockClock, impatient: Rig) -> None:
    worker = await impatient.joined()
    for beats in range(40):
        await worker.beat(beats)
        await handled(worker)
        await pass_time(mock_clock, SHORT_LIMIT_S / 20)
    counters = messages.Counters(3, 4, 5, b"", b"", b"")
    await worker.report(events=[counters])
    await worker.hear()
    stats = impatient.scheduler.ports["w0"].stats()
    assert (stats.steps, stats.step_us) == (10, 250.0)
    assert (stats.hits, stats.misses, stats.swapped_bytes) == (3, 4, 5)
    assert stats.link_age_s < SHORT_LIMIT_S
    assert impatient.scheduler.told == [("up", "w0", 1), ("w0", 1, counters)]
    worker.close()


async def test_worker_stays_up_when_the_coordinator_stood_still(mock_clock: MockClock, impatient: Rig) -> None:
    """Heartbeats of that time wait in the socket, and may be read after links are judged."""
    worker = await impatient.joined()
    mock_clock.jump(20 * SHORT_LIMIT_S)
    await trio.testing.wait_all_tasks_blocked()
    await worker.beat()
    await handled(worker)
    assert impatient.scheduler.told == [("up", "w0", 1)]
    await pass_time(mock_clock, 2 * SHORT_LIMIT_S)
    assert impatient.scheduler.told[-1] == ("down", "w0", 1, False), "silence counts again"
    worker.close()


async def test_down_worker_stays_down_until_a_new_epoch(mock_clock: MockClock, impatient: Rig) -> None:
    worker = await impatient.joined()
    await pass_time(mock_clock, 2 * SHORT_LIMIT_S)
    assert impatient.scheduler.told[-1] == ("down", "w0", 1, False)
    await worker.say(hello(epoch=1))
    assert (await refusal(worker)).message == "this epoch was declared down"
    impatient.scheduler.ports["w0"].send(Withdraw(1))
    await worker.say(hello(epoch=2))
    assert isinstance(await worker.hear(), WorkerWelcome)
    assert impatient.scheduler.told[-2:] == [("exited", "w0", 1), ("up", "w0", 2)]
    worker.close()


async def test_leaving_worker_is_given_nothing(rig: Rig) -> None:
    worker = await rig.joined()
    beat = messages.Heartbeat(1, 0, 1, 10, 250.0, leaving=True)
    await worker.say(beat)
    await worker.say(beat)
    await rig.told("drain", "w0", False, 0.0)
    await worker.report()
    await worker.hear()
    assert rig.scheduler.told == [("up", "w0", 1), ("drain", "w0", False, 0.0)], "once"
    worker.close()


async def test_end_of_a_leaving_worker_is_told_as_such(rig: Rig) -> None:
    workers = [await rig.joined("w0"), await rig.joined("w1")]
    await workers[0].say(messages.Heartbeat(1, 0, 1, 10, 250.0, leaving=True))
    await rig.told("drain", "w0", False, 0.0)
    for name in ("w0", "w1"):
        rig.links._prove(rig.links._by_name[name], died=True)
    assert rig.scheduler.deaths == ["w0", "w1"]
    assert rig.scheduler.leavers == ["w0"]
    for worker in workers:
        worker.close()


async def test_attested_process_is_named_as_its_epoch_joins(rig: Rig) -> None:
    worker = await rig.joined("w0")
    assert rig.scheduler.processes == [process_of(os.getpid())]
    worker.close()


async def test_names_are_bounded_and_dead_ones_are_evicted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "WORKERS_MAX", 2)
    workers = [await rig.joined("w0"), await rig.joined("w1")]
    third = await rig.worker()
    await third.say(hello("w2"))
    assert (await refusal(third)).code == "capacity"
    rig.links._prove(rig.links._by_name["w0"], died=True)
    await third.say(hello("w2"))
    assert isinstance(await third.hear(), WorkerWelcome)
    for worker in (*workers, third):
        worker.close()
