"""Mailboxes, asks, crash-only supervision and the order of shutdown."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from coordinator.actor import (
    SHUTDOWN_LEVEL_S,
    Actor,
    Level,
    Mailbox,
    MailboxFullError,
    Reply,
    Supervisor,
    open_supervisor,
)
from protocol.errors import CapacityError, InternalError, Unavailable


class FakeActor(Actor[object]):
    """Records what it handles; `Reply` messages are answered, exceptions raised, awaitables awaited."""

    def __init__(self, name: str = "fake", mailbox_max: int = 10, log: list[str] | None = None) -> None:
        super().__init__(name, mailbox_max=mailbox_max, batch_max=4)
        self.batches: list[list[object]] = []
        self.log = [] if log is None else log

    def history(self) -> tuple[str, ...]:
        return ("line one", "line two")

    async def handle(self, batch: list[object]) -> None:
        self.batches.append(batch)
        for message in batch:
            if isinstance(message, Exception):
                raise message
            if isinstance(message, Reply):
                message.set("answer")
            if message == "sleep":
                await trio.sleep_forever()

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            self.log.append(self.name)


async def test_messages_come_in_order_and_in_batches() -> None:
    async with open_supervisor() as supervisor:
        actor = FakeActor()
        for number in range(6):
            actor.tell(number)
        supervisor.start(actor, Level.REQUEST)
        await wait_all_tasks_blocked()
        actor.tell(6)
        await wait_all_tasks_blocked()
        assert actor.batches == [[0, 1, 2, 3], [4, 5], [6]]


async def test_a_full_mailbox_refuses() -> None:
    """I8."""
    actor = FakeActor(mailbox_max=2)
    actor.tell(1)
    assert actor.room() == 1
    actor.tell(2)
    with pytest.raises(MailboxFullError, match="mailbox=fake: mailbox of fake holds 2 messages"):
        actor.tell(3)
    with pytest.raises(CapacityError, match="fake has 2 messages waiting"):
        await actor.ask(lambda reply: reply)


async def test_a_cancelled_take_has_taken_nothing() -> None:
    mailbox: Mailbox[int] = Mailbox("m", 10)
    with trio.CancelScope() as scope:
        scope.cancel()
        mailbox.put(1)
        await mailbox.take(5)
    assert scope.cancelled_caught
    assert await mailbox.take(5) == [1]
    with trio.move_on_after(0.01) as scope:
        await mailbox.take(5)
    assert scope.cancelled_caught
    mailbox.put(2)  # no reader is parked now
    assert await mailbox.take(5) == [2]


async def test_mailbox_has_a_single_reader() -> None:
    mailbox: Mailbox[int] = Mailbox("m", 10)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mailbox.take, 1)
        await wait_all_tasks_blocked()
        with pytest.raises(InternalError, match="second reader"):
            await mailbox.take(1)
        mailbox.close()


async def test_an_ask_waits_for_its_reply_or_its_failure() -> None:
    async with open_supervisor() as supervisor:
        actor = FakeActor()
        supervisor.start(actor, Level.REQUEST)
        assert await actor.ask(lambda reply: reply) == "answer"
        actor.close()
        with pytest.raises(Unavailable, match="fake has stopped"):
            await actor.ask(lambda reply: reply)
    reply: Reply[int] = Reply()
    reply.fail(CapacityError("no"))
    with pytest.raises(CapacityError):
        await reply.wait()
    with pytest.raises(InternalError, match="given twice"):
        reply.set(1)


async def test_a_refused_ask_needs_no_collection() -> None:
    """Its message may have megabytes, and a cycle is found after minutes."""

    class Ask:
        def __init__(self, reply: Reply[str]) -> None:
            self.reply = reply

        def check(self) -> None:
            raise CapacityError("no")

    class RefusingActor(FakeActor):
        async def handle(self, batch: list[object]) -> None:
            for ask in batch:
                assert isinstance(ask, Ask)
                try:
                    ask.check()
                except CapacityError as error:
                    ask.reply.fail(error)

    asks: weakref.WeakSet[Ask] = weakref.WeakSet()

    def make(reply: Reply[str]) -> Ask:
        asks.add(ask := Ask(reply))
        return ask

    async with open_supervisor() as supervisor:
        actor = RefusingActor()
        supervisor.start(actor, Level.REQUEST)
        gc.disable()
        try:
            for _ in range(3):
                with pytest.raises(CapacityError):
                    await actor.ask(make)
            assert len(asks) == 1, "the actor holds its last batch"
        finally:
            gc.enable()
        actor.close()


async def test_closed_actor_finishes_its_messages_and_drops_the_rest() -> None:
    async with open_supervisor() as supervisor:
        actor = FakeActor()
        actor.tell(1)
        actor.close()
        actor.tell(2)
        assert actor.room() == 0
        supervisor.start(actor, Level.REQUEST)
        await wait_all_tasks_blocked()
        assert actor.batches == [[1]]
        assert supervisor.count(Level.REQUEST) == 0


async def test_exception_ends_all_actors_and_logs_the_history(caplog: pytest.LogCaptureFixture) -> None:
    """Crash-only. caplog sees the record, whatever handlers the process has."""
    bystander, culprit = FakeActor("bystander"), FakeActor("culprit")
    logging.getLogger("hisparse").propagate = True

    async def run() -> None:
        async with open_supervisor() as supervisor:
            supervisor.start(bystander, Level.REQUEST)
            supervisor.start(culprit, Level.SCHEDULER)
            culprit.tell(ValueError("broken"))
            await trio.sleep_forever()

    with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="broken"), flatten_subgroups=True):
        await run()
    assert bystander.log == ["bystander"]
    (record,) = [record for record in caplog.records if record.msg == "actor failed"]
    assert record.__dict__["fields"] == {"actor": "culprit", "history": "line one; line two"}


async def test_late_actor_may_still_start_others() -> None:
    """Found by seed 366 of tests.sim: killed while the Scheduler had a submission in hand."""
    started = FakeActor("started")

    class FakeLatecomer(FakeActor):
        async def run(self) -> None:
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await wait_all_tasks_blocked()
                supervisor.start(started, Level.REQUEST)

    async with open_supervisor() as supervisor:
        supervisor.start(FakeLatecomer("latecomer"), Level.SCHEDULER)
        await wait_all_tasks_blocked()
    assert supervisor.count(Level.REQUEST) == 0


async def start_all(supervisor: Supervisor, log: list[str]) -> dict[Level, FakeActor]:
    actors = {level: FakeActor(level.name, log=log) for level in reversed(Level)}
    for level, actor in actors.items():
        supervisor.start(actor, level)
    await wait_all_tasks_blocked()
    return actors


async def test_asking_actor_stops_before_the_asked_one() -> None:
    log: list[str] = []
    async with open_supervisor() as supervisor:
        await start_all(supervisor, log)
        await supervisor.shutdown()
    assert log == [level.name for level in Level]


async def test_actor_that_does_not_drain_is_cancelled(autojump_clock: MockClock) -> None:
    """I8."""
    log: list[str] = []
    async with open_supervisor() as supervisor:
        actors = await start_all(supervisor, log)
        actors[Level.SCHEDULER].tell("sleep")
        started = trio.current_time()
        await supervisor.shutdown()
        assert trio.current_time() - started == pytest.approx(SHUTDOWN_LEVEL_S)
    assert log == [level.name for level in Level]
