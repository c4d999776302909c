"""Mailboxes, asks, crash-only supervision and the order of shutdown."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from coordinator.actor import (
    SHUTDOWN_ACTOR_S,
    Actor,
    MailboxFullError,
    Parking,
    Reply,
    Supervisor,
    open_supervisor,
)
from protocol.errors import CapacityError, InternalError, Unavailable


class FakeActor(Actor[object]):
    """Records what it handles; `Reply` messages are answered, exceptions raised, awaitables awaited."""

    def __init__(
        self,
        name: str = "fake",
        mailbox_max: int = 10,
        log: list[str] | None = None,
        stepped_by: Actor[object] | None = None,
    ) -> None:
        super().__init__(name, mailbox_max=mailbox_max, batch_max=4, stepped_by=stepped_by)
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
        supervisor.start(actor)
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


async def test_cancelled_actor_has_taken_nothing() -> None:
    actor = FakeActor()
    with trio.CancelScope() as scope:
        scope.cancel()
        actor.tell(1)
        await actor.run()
    assert scope.cancelled_caught
    assert actor.batches == []
    with trio.move_on_after(0.01):
        await actor.run()
    assert actor.batches == [[1]]
    actor.tell(2)  # no task waits now
    assert actor.room() == 9


async def test_parking_has_room_for_one_task() -> None:
    parking = Parking("p")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(parking.wait)
        await wait_all_tasks_blocked()
        with pytest.raises(InternalError, match="p is run by a second task"):
            await parking.wait()
        parking.wake()
    assert not parking.is_taken


async def test_an_ask_waits_for_its_reply_or_its_failure() -> None:
    async with open_supervisor() as supervisor:
        actor = FakeActor()
        supervisor.start(actor)
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
        supervisor.start(actor)
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
        supervisor.start(actor)
        await wait_all_tasks_blocked()
        assert actor.batches == [[1]]
        assert actor.log == ["fake"], "it has ended"


async def test_exception_ends_all_actors_and_logs_the_history(caplog: pytest.LogCaptureFixture) -> None:
    """Crash-only. caplog sees the record, whatever handlers the process has."""
    bystander, culprit = FakeActor("bystander"), FakeActor("culprit")
    logging.getLogger("hisparse").propagate = True

    async def run() -> None:
        async with open_supervisor() as supervisor:
            supervisor.start(bystander)
            supervisor.start(culprit)
            culprit.tell(ValueError("broken"))
            await trio.sleep_forever()

    with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="broken"), flatten_subgroups=True):
        await run()
    assert bystander.log == ["bystander"]
    (record,) = [record for record in caplog.records if record.msg == "actor failed"]
    assert record.__dict__["fields"] == {"actor": "culprit", "history": "line one; line two"}


# ---------------------------------------------------------------- stepped actors


@asynccontextmanager
async def open_stepper(*names: str) -> AsyncIterator[tuple[FakeActor, list[FakeActor]]]:
    """An actor with a task, and actors that it steps."""
    async with open_supervisor() as supervisor:
        stepper = FakeActor("stepper")
        supervisor.start(stepper)
        yield stepper, [FakeActor(name, stepped_by=stepper) for name in names]


async def test_stepped_inboxes_are_taken_in_the_order_of_arrival() -> None:
    order: list[tuple[str, list[object]]] = []

    class FakeNoter(FakeActor):
        async def handle(self, batch: list[object]) -> None:
            order.append((self.name, batch))

    async with open_supervisor() as supervisor:
        stepper = FakeNoter("stepper")
        one, other = FakeNoter("one", stepped_by=stepper), FakeNoter("other", stepped_by=stepper)
        supervisor.start(stepper)
        await wait_all_tasks_blocked()
        stepper.tell("own")
        for number in range(6):
            other.tell(number)
        one.tell("a")
        await wait_all_tasks_blocked()
    assert order == [("other", [0, 1, 2, 3]), ("one", ["a"]), ("other", [4, 5]), ("stepper", ["own"])]


async def test_stepped_actor_has_no_task_and_its_messages_wake_the_stepper() -> None:
    async with open_stepper("a", "b") as (stepper, stepped):
        await wait_all_tasks_blocked()
        tasks = trio.lowlevel.current_statistics().tasks_living
        for actor in stepped:
            actor.tell(1)
        assert await stepped[1].ask(lambda reply: reply) == "answer"
        assert [len(actor.batches) for actor in stepped] == [1, 1]
        assert stepper.batches == []
        assert trio.lowlevel.current_statistics().tasks_living == tasks


async def test_full_inbox_of_a_stepped_actor_refuses_and_others_take_messages() -> None:
    """I8."""
    async with open_stepper("full", "free") as (_, (full, free)):
        for number in range(10):
            full.tell(number)
        assert (full.room(), free.room()) == (0, 10)
        with pytest.raises(MailboxFullError, match="mailbox=full: mailbox of full holds 10 messages"):
            full.tell(10)
        free.tell(1)
        await wait_all_tasks_blocked()
        assert (full.room(), free.room()) == (10, 10)
        full.close()
        full.tell(11)
        await wait_all_tasks_blocked()
        assert sum(map(len, full.batches)) == 10


async def test_stepper_that_closes_steps_what_was_told_before() -> None:
    async with open_stepper("a") as (stepper, (actor,)):
        actor.tell(1)
        stepper.close()
        await wait_all_tasks_blocked()
        assert actor.batches == [[1]]
        assert stepper.log == ["stepper"]


async def test_call_is_handled_at_once_and_answered() -> None:
    """Past the mailbox; behind messages that wait it would come too early."""

    class Doubler(Actor[int]):
        async def handle(self, batch: list[int]) -> list[int]:
            return [2 * number for number in batch]

    async with open_stepper() as (stepper, _):
        doubler = Doubler("doubler", mailbox_max=1, batch_max=1, stepped_by=stepper)
        assert doubler.call(4) == [8]
        assert (doubler.room(), stepper.returned) == (1, [])
        doubler.tell(1)
        with pytest.raises(InternalError, match="while messages wait"):
            doubler.call(2)


@pytest.mark.parametrize(
    ("message", "error", "match"),
    [(ValueError("broken"), ValueError, "broken"), ("sleep", InternalError, "a waits, and has no task to wait in")],
)
async def test_stepped_actor_that_fails_or_waits_ends_all_and_its_history_is_logged(
    message: object, error: type[Exception], match: str, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("hisparse").propagate = True

    async def run() -> None:
        async with open_stepper("a") as (_, (actor,)):
            actor.tell(message)
            await trio.sleep_forever()

    with pytest.RaisesGroup(pytest.RaisesExc(error, match=match), flatten_subgroups=True):
        await run()
    failed = [record.__dict__["fields"]["actor"] for record in caplog.records if record.msg == "actor failed"]
    assert failed == ["a", "stepper"]
    assert caplog.records[0].__dict__["fields"]["history"] == "line one; line two"


# ---------------------------------------------------------------- shutdown


async def start_all(supervisor: Supervisor, log: list[str]) -> list[FakeActor]:
    """Each sends messages to those before it."""
    actors = [FakeActor(name, log=log) for name in ("journal", "scheduler", "gateway")]
    for actor in actors:
        supervisor.start(actor)
    await wait_all_tasks_blocked()
    return actors


async def test_asking_actor_stops_before_the_asked_one() -> None:
    log: list[str] = []
    async with open_supervisor() as supervisor:
        await start_all(supervisor, log)
        await supervisor.shutdown()
    assert log == ["gateway", "scheduler", "journal"]


async def test_actor_that_does_not_drain_is_cancelled(autojump_clock: MockClock) -> None:
    """I8."""
    log: list[str] = []
    async with open_supervisor() as supervisor:
        actors = await start_all(supervisor, log)
        actors[1].tell("sleep")
        started = trio.current_time()
        await supervisor.shutdown()
        assert trio.current_time() - started == pytest.approx(SHUTDOWN_ACTOR_S)
    assert log == ["gateway", "scheduler", "journal"]
