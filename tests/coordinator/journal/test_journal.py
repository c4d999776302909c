"""The journal's actor over a store in memory: group commit, what waits for it, what a failing disk holds up."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from coordinator.actor import Reply
from coordinator.journal import summary
from coordinator.journal.journal import (
    COMMIT_LIMIT_S,
    INTERVAL_S,
    PENDING_MAX,
    RETRY_S,
    Commit,
    GroupCommit,
    NoJournal,
    check_writes,
)
from coordinator.journal.records import (
    RequestEnded,
    RequestOrdered,
    RequestPlaced,
    RequestsForgotten,
    TokensAppended,
    WorkerJoined,
)
from coordinator.journal.state import JournalState, RequestRecord, replay
from coordinator.tokens.token_log import TokenLog
from metrics.state import JournalCounters
from protocol.arrays import pack_int32
from protocol.errors import InternalError, Unavailable
from tests.support.facts import make_accepted
from tests.support.fakes.fake_cluster import MODEL, capacity
from tests.support.fakes.journal import FakeStore
from tests.support.progress import RequestEntry, progress

COMMIT_S = 0.01


def order(number: int) -> RequestOrdered:
    return RequestOrdered(0, held=False, forced_slots=number)


class Desk:
    def __init__(self, store: FakeStore) -> None:
        self.store = store
        self.log = TokenLog(4, 1 << 12, journalled=True)
        self.state = JournalState()
        self.counters = JournalCounters()
        self.wakes = 0
        self.journal = GroupCommit(store, self.state, self.log, on_tokens=self._wake, counters=self.counters)
        self.request_index = self.log.open(100)
        self.log.begin_placement(self.request_index, 1, 10, 1 << 20)
        self.log.bind(self.request_index, 7)

    def _wake(self) -> None:
        self.wakes += 1

    def submit(self) -> Commit:
        return self.journal.append([make_accepted(self.request_index, bytes(40), request_id="r1")])

    def say(self, *tokens: int) -> None:
        start = self.log.length(self.request_index)
        self.log.append(progress(RequestEntry(self.request_index, 1, start, list(tokens), 0)), 7)
        self.journal.tokens_arrived()

    @property
    def delivered(self) -> int:
        """Tokens that may be delivered."""
        return int(self.log.committed[self.request_index])


@asynccontextmanager
async def open_desk(store: FakeStore | None = None) -> AsyncIterator[Desk]:
    desk = Desk(store or FakeStore(commit_s=COMMIT_S))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.journal.run)
        await trio.testing.wait_all_tasks_blocked()
        yield desk
        nursery.cancel_scope.cancel()


async def test_records_that_come_during_a_write_form_the_next_group(autojump_clock: trio.testing.MockClock) -> None:
    async with open_desk() as desk:
        first = desk.journal.append([order(1)])
        await trio.sleep(COMMIT_S / 2)
        commits = [desk.journal.append([order(number), order(number + 1)]) for number in (2, 4, 6)]
        assert not first.done
        await first.wait()
        assert [commit.done for commit in commits] == [False] * 3
        await commits[0].wait()
        assert all(commit.done for commit in commits)
    assert [len(group) for group in desk.store.groups] == [1, 6]
    assert (desk.counters.commits, desk.counters.records) == (2, 7)


async def test_call_is_made_once_its_record_is_durable_and_tokens_before_it_may_be_delivered(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """I5: the end of a request is told by such a call."""
    calls: list[tuple[str, int]] = []

    async with open_desk() as desk:

        def note(what: str) -> Callable[[], None]:
            return lambda: calls.append((what, desk.delivered))

        await desk.submit().wait()
        desk.say(5, 6)
        commit = desk.journal.append([order(1)])
        commit.then(note("pending"))
        assert calls == []
        await commit.wait()
        assert calls == [("pending", 2)]
        commit.then(note("durable"))
        assert calls[1:] == [("durable", 2)]


async def test_durable_records_need_no_collection(autojump_clock: trio.testing.MockClock) -> None:
    """They hold prompts, and a cycle is found after minutes."""
    gc.collect()
    gc.disable()
    try:
        async with open_desk() as desk:
            commit = desk.journal.append([order(1)])
            group_type = type(commit._group)
            await commit.wait()
            del commit
            await desk.journal.append([order(2)]).wait()
            await trio.testing.wait_all_tasks_blocked()
            kept = [it for it in gc.get_objects() if type(it) is group_type and order(1) in it.records]
            assert not kept
    finally:
        gc.enable()


async def test_single_record_is_written_without_delay(autojump_clock: trio.testing.MockClock) -> None:
    async with open_desk() as desk:
        await trio.sleep(1.0)
        before = trio.current_time()
        await desk.journal.append([order(1)]).wait()
        assert trio.current_time() - before == pytest.approx(COMMIT_S)


async def test_groups_keep_their_distance_on_a_fast_disk(autojump_clock: trio.testing.MockClock) -> None:
    async with open_desk(FakeStore()) as desk:
        for number in range(10):
            await desk.journal.append([order(number)]).wait()
        assert trio.current_time() >= 9 * INTERVAL_S
    assert len(desk.store.groups) == 10


async def test_tokens_are_written_before_records_that_depend_on_them(autojump_clock: trio.testing.MockClock) -> None:
    async with open_desk() as desk:
        desk.submit()
        desk.say(1, 2, 3)
        commit = desk.journal.append([order(9)])
        assert desk.delivered == 0, "deliver before commit"
        await commit.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert (desk.delivered, desk.wakes) == (3, 1)
        assert [type(record).__name__ for record in desk.store.records] == [
            "TokensAppended",
            "RequestAccepted",
            "RequestOrdered",
        ]
        await desk.journal.append(()).wait()
        assert len(desk.store.groups) == 1, "nothing is not written"


async def test_an_empty_append_covers_tokens_that_arrived(autojump_clock: trio.testing.MockClock) -> None:
    """What reports are acknowledged by."""
    async with open_desk() as desk:
        await desk.submit().wait()
        desk.say(5)
        await desk.journal.append(()).wait()
        assert any(isinstance(record, TokensAppended) for record in desk.store.records)


async def test_failing_disk_delays_delivery_and_refuses_new_work(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_desk() as desk:
        await desk.submit().wait()
        check_writes(desk.journal)
        desk.store.error = "disk full"
        desk.say(1, 2)
        commit = desk.journal.append([order(1)])
        await trio.sleep(3 * RETRY_S)
        assert not commit.done
        assert desk.delivered == 0, "nothing is delivered that is not durable"
        with pytest.raises(Unavailable, match=r"disk full.*make room"):
            check_writes(desk.journal)
        reply: Reply[str] = Reply()
        commit.answer(reply, "queued", "the request was queued")
        await trio.sleep(COMMIT_LIMIT_S / 2)
        assert reply._result is None
        with pytest.raises(Unavailable, match=r"the request was queued, but .* has not written"):
            await reply.wait()
        assert desk.counters.errors == desk.store.attempts - 1
        desk.say(3)
        desk.store.error = ""
        await commit.wait()
        await desk.journal.append(()).wait()
        await trio.testing.wait_all_tasks_blocked()
        assert desk.delivered == 3
        check_writes(desk.journal)
        assert desk.counters.last_error == "disk full"
    log = TokenLog(4, 1 << 12, journalled=True)
    replay(desk.store.records, log)
    assert log.lengths[desk.request_index] == 3


async def test_answers_after_long_silence_are_not_late(autojump_clock: trio.testing.MockClock) -> None:
    async with open_desk(FakeStore(commit_s=COMMIT_LIMIT_S / 2)) as desk:
        await trio.sleep(10 * COMMIT_LIMIT_S)
        reply: Reply[str] = Reply()
        desk.submit().answer(reply, "queued", "the request was queued")
        assert await reply.wait() == "queued"


async def test_short_disk_refuses_new_work_while_writing(autojump_clock: trio.testing.MockClock) -> None:
    async with open_desk() as desk:
        desk.store.short = "living on the reserve"
        await desk.submit().wait()
        with pytest.raises(Unavailable, match="living on the reserve"):
            check_writes(desk.journal)


async def test_summary_is_written_along_with_groups(autojump_clock: trio.testing.MockClock) -> None:
    """It makes no group, and records that come meanwhile are written as usual."""
    async with open_desk() as desk:
        await desk.submit().wait()
        desk.say(1, 2)
        desk.store.wants_summary = True
        desk.journal.append([order(1)])
        desk.journal.summarize_if_long()
        desk.journal.summarize_if_long()  # one is enough
        desk.say(3)
        desk.journal.append([order(2)])
        await desk.journal.append(()).wait()
        desk.store.wants_summary = False
        names = [type(record).__name__ for record in desk.store.groups[1]]
        assert names == [
            "TokensAppended",
            "RequestOrdered",
            "SummaryBegun",
            "RequestOrdered",
            "RequestOrdered",
            "RequestOutput",
            "SummaryEnded",
        ]
        assert not desk.journal.is_summarizing
        log = TokenLog(4, 1 << 12, journalled=True)
        state = replay(desk.store.records, log)
        assert log.tokens(desk.request_index, 0) == desk.log.tokens(desk.request_index, 0)
        assert state.requests[desk.request_index].ordered == order(2)


async def test_a_summary_adds_a_bounded_part_to_each_group(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "REQUESTS_EACH", 1)
    async with open_desk() as desk:
        for number in range(3):
            desk.log.open(100)
            desk.journal.append([make_accepted(number, bytes(40), rank=(0, 0, number))])
            desk.journal.append([RequestOrdered(number, held=True, forced_slots=-1)])
        desk.store.wants_summary = True
        desk.journal.summarize_if_long()
        desk.store.wants_summary = False
        for _ in range(4):
            await desk.journal.append([order(1)]).wait()
        assert [len(group) for group in desk.store.groups] == [6 + 1 + 2, 2, 3, 1], "a third each, then the end"


async def test_pending_records_are_written_before_the_end(autojump_clock: trio.testing.MockClock) -> None:
    desk = Desk(FakeStore(commit_s=COMMIT_S))
    desk.submit()
    desk.say(1)
    desk.journal.append([order(1)])
    desk.journal.close()
    await desk.journal.run()
    assert [type(record).__name__ for record in desk.store.records] == [
        "TokensAppended",
        "RequestAccepted",
        "RequestOrdered",
    ]


async def test_unawaited_records_are_bounded() -> None:
    desk = Desk(FakeStore())
    desk.journal.append([order(1)] * PENDING_MAX)
    with pytest.raises(InternalError, match="PENDING_MAX"):
        desk.journal.append([order(1)])


async def test_without_a_journal_the_state_is_noted() -> None:
    """A summary has all of requests, and of nodes what does not grow with each epoch."""
    journal, accepted = NoJournal(), make_accepted(0, b"1234")
    live = RequestRecord(accepted.facts, accepted.prompt)
    assert journal.accept(accepted, live).done
    journal.append_changes("n0", (), [RequestPlaced(0, 5, "n0", "w0", 1, 0)])
    journal.append([order(3), WorkerJoined("n0", "w0", 1, capacity(), MODEL)])
    assert journal.state.requests == {0: live}
    assert (live.on_worker, live.placed.placement if live.placed else 0, live.ordered) == (True, 5, order(3))
    assert not journal.state.workers
    journal.append([RequestEnded(0, "FINISHED", "", 0, "", 0.0)])
    assert (live.ended is not None, live.prompt) == (True, b"1234"), "its owner lets go of it"
    journal.append([RequestsForgotten(pack_int32([0]), 1)])
    assert not journal.state.requests


async def test_without_a_journal_everything_counts_as_durable() -> None:
    wakes: list[bool] = []
    journal = NoJournal(lambda: wakes.append(True))
    commit = journal.append([order(1)])
    assert commit.done
    await commit.wait()
    reply: Reply[str] = Reply()
    commit.answer(reply, "done", "nothing")
    assert await reply.wait() == "done"
    journal.tokens_arrived()
    journal.summarize_if_long()
    check_writes(journal)
    assert wakes == [True]
    assert COMMIT_LIMIT_S > RETRY_S
