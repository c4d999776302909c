"""Each actor's state is written by its owner alone, while a history drives all of them through their mailboxes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from unittest.mock import patch

import pytest
import trio
import trio.testing

from coordinator.actor import Actor
from coordinator.journal.journal import GroupCommit
from tests.coordinator.turn.test_recovery import Life
from tests.support.ownership import Ownership

Write = Callable[[Life], None]


@asynccontextmanager
async def watched_life() -> AsyncIterator[tuple[Life, Ownership]]:
    async with Life.over() as life:
        journal = life.scheduler._journal
        assert isinstance(journal, GroupCommit)
        ownership = Ownership(life.scheduler, journal)
        trio.lowlevel.add_instrument(ownership)
        try:
            with patch.object(Actor, "_step", ownership.within_step(Actor._step)):
                yield life, ownership
        finally:
            trio.lowlevel.remove_instrument(ownership)


async def go_on(life: Life, rounds: int = 4) -> None:
    for _ in range(rounds):
        life.round()
        await trio.sleep(0.3)
        await life.settle()


async def test_only_owners_write(autojump_clock: trio.testing.MockClock) -> None:
    """Admission, growth, retraction by operators and policy, resize, drain, loss with and without proof, the end."""
    async with watched_life() as (life, ownership):
        first = await life.add_worker("w0", seats=3)
        await life.submit("long!", 200, 300)
        for number in range(5):
            await life.submit(f"r{number}", 150, 600 if number == 1 else 200, priority=number % 2)
        await life.run_until("long!", "RUNNING")
        await go_on(life)
        await life.scheduler.retract(("long!",), "me", keep=True, hold=True)
        await go_on(life)
        await life.scheduler.resume(("long!",), "me")
        await life.scheduler.resize(("r1",), "me", hot_slots=0)
        await life.scheduler.abort(("r4",), "me")
        await life.add_worker("w1")
        await go_on(life)
        await life.scheduler.drain(("w0",), "me", handover=True, deadline_s=1.0)
        await go_on(life, 8)
        assert first.worker.name == "w0"
        life.lose_worker("w0", proved=False)
        await life.settle()
        life.prove_exit(life.zombies[0])
        await life.add_worker("w2")
        life.lose_worker("w1", proved=True)
        while life.live():
            await go_on(life)
        await life.scheduler.acknowledge(("r0", "long!"), "me")
        await life.settle()
        assert ownership.violations == []
        changes = ownership.changes()
        assert changes.keys() == {"placement table", "request table", "request state", "ledger", "journal state"}
        assert min(changes.values()) > 10, changes


def write_state(life: Life) -> None:
    life.scheduler._requests.live["r"].retractions += 1


def write_history(life: Life) -> None:
    life.scheduler._requests.live["r"].lines.pop()


def write_entry(life: Life) -> None:
    life.scheduler._requests.live["r"].displaced = True


def write_list(life: Life) -> None:
    life.scheduler._placement_table.workers["w0"].ranks.append((9, 0, 9))


def write_table(life: Life) -> None:
    life.scheduler._requests.by_placement.clear()


def write_count(life: Life) -> None:
    life.scheduler._ledgers["n0"].pages_free -= 1


def write_array(life: Life) -> None:
    life.scheduler._ledgers["n0"]._refcounts[0] += 1


def write_journal_state(life: Life) -> None:
    life.scheduler._journal.state.requests[life.scheduler.lookup("r")].killed = "w0"


@pytest.mark.parametrize(
    ("write", "what"),
    [
        (write_state, "request state"),
        (write_history, "request state"),
        (write_entry, "placement table"),
        (write_list, "placement table"),
        (write_table, "request table"),
        (write_count, "ledger"),
        (write_array, "ledger"),
        (write_journal_state, "journal state"),
    ],
)
async def test_foreign_write_is_seen(autojump_clock: trio.testing.MockClock, write: Write, what: str) -> None:
    async with watched_life() as (life, ownership):
        await life.add_worker("w0")
        await life.submit("r!", 100, 200)
        await life.submit("r", 100, 200)
        await life.run_until("r", "RUNNING")
        assert ownership.violations == []
        write(life)
        await trio.lowlevel.checkpoint()
        assert [it for it, _ in ownership.violations] == [what]


@pytest.mark.parametrize("write", [write_state, write_array, write_journal_state])
async def test_scheduler_write_to_foreign_state_is_seen(autojump_clock: trio.testing.MockClock, write: Write) -> None:
    """In the middle of a turn of its task."""
    async with watched_life() as (life, ownership):
        await life.add_worker("w0")
        await life.submit("r", 100, 200)
        await life.run_until("r", "RUNNING")
        life.scheduler.tell(lambda _: write(life))
        await life.settle()
        assert ownership.violations, "seen"
        assert {writer for _, writer in ownership.violations} <= {"scheduler", "before append"}
