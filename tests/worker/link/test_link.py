"""The link's shell: connections, pacing, reconnects, stopping. On trio's MockClock over FakeDealers, once over ZMQ."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from coordinator.listener.router import RouterSocket
from metrics.state import LinkCounters
from protocol.arrays import unpack_int32
from protocol.errors import ConfigError, HiSparseError, NotAllowed
from protocol.messages import (
    PROTOCOL_VERSION,
    TOKENIZER_CHUNK_BYTES,
    WORKER_MESSAGE_BYTES_MAX,
    Admit,
    Commands,
    Heartbeat,
    ModelInfo,
    Refused,
    Released,
    ReplayReports,
    Report,
    ReportAck,
    Sampling,
    Started,
    Stop,
    TokenizerChunk,
    Withdraw,
    WorkerCapacity,
    WorkerHello,
    WorkerWelcome,
    decode_worker,
    encode,
)
from tests.support.fakes.dealer import FakeDealer, FakeListener, FakeSink
from tests.support.limits import HANG_LIMIT_S
from worker.link import link
from worker.link.link import Link, LinkPace, connect_to
from worker.link.link_state import LinkState, WorkerIdentity
from worker.link.outbox import Outbox

#: Of what takes real time; a longer wait is a hang.
MODEL = ModelInfo("f", "tiny", 8192, 260, 4, 128, (257,), "json", "digest")
CAPACITY = WorkerCapacity(8, 64, 64, 4_096, 64, 1024, (4096,), 8, 1, "/tmp/pool")
ADMIT = Admit(1, 0, "r1", b"", b"", 0, Sampling(8), b"", 1, 0, 1)


class Bench:
    """A Link with both ends in the test's hands; `result` is what `run` returned or raised."""

    def __init__(self, tokenizer: bytes = b"") -> None:
        self.outbox = Outbox(epoch=1)
        self.counters = LinkCounters()
        self.sink = FakeSink()
        self.listener = FakeListener()
        self.state = LinkState(WorkerIdentity("w", "n", 1, MODEL, CAPACITY), self.outbox, self.counters)
        self.link = Link(self.state, self.sink, self.listener.connect, pace=LinkPace(), tokenizer=tokenizer)
        self.done = trio.Event()
        self.result: bool | BaseException | None = None

    async def run(self) -> None:
        try:
            self.result = await self.link.run()
        except (ConfigError, NotAllowed) as error:
            self.result = error
        self.done.set()

    async def welcome(self, *, want_tokenizer: bool = False, report_ack: int = 0) -> FakeDealer:
        dealer = await self.listener.accept()
        assert isinstance(await dealer.hear(), WorkerHello)
        dealer.say(WorkerWelcome(PROTOCOL_VERSION, 1, report_ack, want_tokenizer))
        return dealer


@asynccontextmanager
async def bench(tokenizer: bytes = b"") -> AsyncIterator[Bench]:
    made = Bench(tokenizer)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        yield made
        nursery.cancel_scope.cancel()


async def report_of(dealer: FakeDealer) -> Report:
    message = await dealer.hear(Report)
    assert isinstance(message, Report)
    return message


async def test_commands_reach_the_executor_and_are_acknowledged(autojump_clock: MockClock) -> None:
    async with bench() as it:
        dealer = await it.welcome()
        dealer.say(Commands(1, 1, (ADMIT,)))
        beat = await dealer.hear(Heartbeat)
        assert isinstance(beat, Heartbeat)
        assert beat.command_ack in (0, 1)
        await trio.sleep(0.6)
        assert it.sink.commands == [ADMIT]
        assert (await dealer.hear(Heartbeat)).command_ack == 1  # type: ignore[union-attr]


async def test_reports_are_paced_and_coalesce(autojump_clock: MockClock) -> None:
    async with bench() as it:
        dealer = await it.welcome()
        await trio.sleep(0.1)
        it.outbox.add_tokens(0, 1, 0, [0], 0)
        first = await report_of(dealer)
        began = trio.current_time()
        for position in range(1, 6):
            it.outbox.add_tokens(0, 1, position, [position], 0)
            await trio.sleep(0.002)
        second = await report_of(dealer)
        assert trio.current_time() - began >= LinkPace().report_s * 0.99
        assert first.progress is not None
        assert second.progress is not None
        assert unpack_int32(second.progress.tokens, "tokens").tolist() == [1, 2, 3, 4, 5]


async def test_dirty_flag_from_another_thread_wakes_the_link() -> None:
    async with bench() as it:
        dealer = await it.welcome()
        writer = threading.Thread(target=lambda: it.outbox.add_event(Started(1)))
        writer.start()
        with trio.fail_after(HANG_LIMIT_S):
            assert (await report_of(dealer)).events == (Started(1),)
        writer.join()


async def test_lost_connection_is_replaced_and_reports_are_resent(autojump_clock: MockClock) -> None:
    async with bench() as it:
        dealer = await it.welcome()
        it.outbox.add_event(Started(1))
        lost = await report_of(dealer)
        it.listener.down = True
        dealer.cut()
        await trio.sleep(30)
        assert dealer.closed
        assert 15 < it.listener.attempts < 60  # the pause doubles up to its bound
        it.listener.down = False
        again = await it.welcome(report_ack=0)
        assert await report_of(again) == lost
        assert it.counters.drops["lost"] == 1


@pytest.mark.parametrize(
    "refusal", [NotAllowed("the key may not use this endpoint"), ConfigError("the key is open to others")]
)
async def test_refused_key_ends_a_worker_never_welcomed(autojump_clock: MockClock, refusal: HiSparseError) -> None:
    async with bench() as it:
        it.listener.refusal = refusal
        await it.done.wait()
        assert it.result is refusal
        assert it.listener.attempts == 1


async def test_key_refused_later_is_retried_while_decoding(autojump_clock: MockClock) -> None:
    async with bench() as it:
        dealer = await it.welcome()
        it.outbox.add_event(Started(1))
        lost = await report_of(dealer)
        it.listener.refusal = NotAllowed("the key was revoked")
        dealer.cut()
        await trio.sleep(30)
        assert not it.done.is_set()
        it.listener.refusal = None  # another key was put in place
        again = await it.welcome(report_ack=0)
        assert await report_of(again) == lost


async def test_blocked_socket_ends_the_connection(autojump_clock: MockClock) -> None:
    """I8: the wait for a full socket is bounded, and the next connection goes on where this one was."""
    async with bench() as it:
        dealer = await it.welcome()
        dealer.blocked = True
        it.outbox.add_event(Started(1))
        again = await it.welcome()
        assert (await report_of(again)).events == (Started(1),)
        assert it.counters.drops["blocked"] == 1


async def test_replies_to_a_blocked_socket_are_bounded(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I8."""
    monkeypatch.setattr(link, "OUTGOING_MAX", 4)
    async with bench() as it:
        dealer = await it.welcome()
        it.outbox.add_event(Started(1))
        await report_of(dealer)
        dealer.blocked = True
        for _ in range(10):
            dealer.say(ReplayReports(1, 1))
        await trio.sleep(link.SEND_LIMIT_S / 2)
        assert it.counters.drops["blocked"] == 1


async def test_unreadable_messages_are_counted_without_harm(autojump_clock: MockClock) -> None:
    async with bench() as it:
        dealer = await it.welcome()
        for frame in (b"", b"\xc1", encode(ADMIT), encode(Stop(1.0))):
            dealer.say(frame)
        dealer.say(Commands(1, 1, (ADMIT,)))
        await trio.sleep(0.1)
        assert it.counters.unreadable == 4
        assert it.sink.commands == [ADMIT]


async def test_the_tokenizer_travels_in_pieces_between_reports(autojump_clock: MockClock) -> None:
    data = bytes(range(256)) * (TOKENIZER_CHUNK_BYTES // 256 * 2) + b"end"
    async with bench(tokenizer=data) as it:
        dealer = await it.welcome(want_tokenizer=True)
        began = trio.current_time()
        chunks = [await dealer.hear(TokenizerChunk) for _ in range(3)]
        assert all(isinstance(chunk, TokenizerChunk) and chunk.hash == "digest" for chunk in chunks)
        assert [(chunk.index, chunk.total) for chunk in chunks] == [(0, 3), (1, 3), (2, 3)]  # type: ignore[union-attr]
        assert trio.current_time() - began < LinkPace().heartbeat_s
        assert b"".join(chunk.data for chunk in chunks) == data  # type: ignore[union-attr]


async def test_a_final_refusal_ends_the_link_with_its_remedy(autojump_clock: MockClock) -> None:
    async with bench() as it:
        dealer = await it.listener.accept()
        dealer.say(Refused("config", "another model than the group's", "start with the same --model"))
        await it.done.wait()
        assert isinstance(it.result, ConfigError)
        assert "same --model" in str(it.result)


async def test_a_new_coordinator_waits_until_the_executor_is_empty(autojump_clock: MockClock) -> None:
    """I2, I4: the next hello comes after Released, in a new epoch, and owes nothing."""
    async with bench() as it:
        dealer = await it.welcome()
        dealer.say(Commands(1, 1, (ADMIT,)))
        await trio.sleep(0.1)
        dealer.cut()
        successor = await it.listener.accept()
        successor.say(WorkerWelcome(PROTOCOL_VERSION, 2, 0, want_tokenizer=False))
        await trio.sleep(10)
        assert it.sink.commands == [ADMIT, Withdraw(1)]
        assert it.listener.attempts == 2
        it.outbox.add_event(Released(1, 0))
        hello = await (await it.listener.accept()).hear()
        assert isinstance(hello, WorkerHello)
        assert (hello.epoch, hello.incarnation_seen, hello.report_next, hello.inventory) == (2, 2, 1, b"")


async def test_stopping_withdraws_waits_and_flushes(autojump_clock: MockClock) -> None:
    """I2: the process leaves only after Released; and the coordinator has heard of it. SGLang #30674."""
    async with bench() as it:
        dealer = await it.welcome()
        dealer.say(Commands(1, 1, (ADMIT,)))
        await trio.sleep(0.1)
        it.link.request_stop(0.0)
        await trio.sleep(0.1)
        assert it.sink.commands == [ADMIT, Withdraw(1)]
        assert not it.done.is_set()
        it.outbox.add_event(Released(1, 64))
        while Released(1, 64) not in (report := await report_of(dealer)).events:
            pass
        await trio.sleep(0.5)
        assert not it.done.is_set()
        dealer.say(ReportAck(1, report.number))
        await it.done.wait()
        assert it.result is True


async def test_stop_command_finishes_running_work(autojump_clock: MockClock) -> None:
    async with bench() as it:
        dealer = await it.welcome()
        dealer.say(Commands(1, 1, (ADMIT, Stop(60.0))))
        await trio.sleep(30)
        assert it.sink.commands == [ADMIT]
        began = trio.current_time()
        it.outbox.add_event(Released(1, 64))
        await it.done.wait()
        assert trio.current_time() - began < 5
        assert it.result is True


async def test_stop_deadline_withdraws_and_leaves_a_hung_executor(autojump_clock: MockClock) -> None:
    """I8: stopping is bounded even when nothing is released."""
    async with bench() as it:
        dealer = await it.welcome()
        dealer.say(Commands(1, 1, (ADMIT, Stop(5.0))))
        began = trio.current_time()
        await it.done.wait()
        assert it.sink.commands == [ADMIT, Withdraw(1)]
        assert it.result is False
        assert trio.current_time() - began < 5.0 + link.RELEASE_LIMIT_S + link.FLUSH_LIMIT_S + 1.0


async def test_stopping_does_not_need_a_coordinator(autojump_clock: MockClock) -> None:
    async with bench() as it:
        it.listener.down = True
        await trio.sleep(1)
        it.link.request_stop(0.0)
        await it.done.wait()
        assert it.result is True


async def test_link_over_real_sockets(tmp_path: Path) -> None:
    """Hello, command, report and reconnect after the router is gone and back, over ipc."""
    endpoint = f"ipc://{tmp_path}/run/worker.sock"
    it = Bench()
    it.link = Link(it.state, it.sink, connect_to(endpoint), pace=LinkPace())
    with trio.fail_after(HANG_LIMIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(it.run)
            for round_number in (1, 2):
                router = RouterSocket(endpoint, message_bytes_max=WORKER_MESSAGE_BYTES_MAX)
                report = await first_report(it, router, round_number)
                assert (report.number, report.events) == (round_number, (Started(round_number),))
                router.close()
            nursery.cancel_scope.cancel()


async def first_report(it: Bench, router: RouterSocket, number: int) -> Report:
    """Of a connection that is welcomed, on which the event of `number` is reported. A link that waited too long for its
    welcome, on a busy machine, connects again."""
    welcomed: set[bytes] = set()
    while True:
        for received in await router.recv_batch():
            message = decode_worker(received.frame)
            if isinstance(message, WorkerHello):
                if not welcomed:
                    it.outbox.add_event(Started(number))
                welcomed.add(received.peer)
                router.send(received.peer, encode(WorkerWelcome(PROTOCOL_VERSION, 1, number - 1, False)))
            assert received.peer in welcomed, "a connection begins with its hello"
            if isinstance(message, Report):
                return message
