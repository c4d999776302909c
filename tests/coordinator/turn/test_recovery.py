"""A coordinator's next life over its journal: the real Scheduler, HostPool and Request actors, twice.

The first life ends without a word, at a moment when everything that was said outside is committed. Workers are of
tests/support/scheduler_rig.py; how they come back with an inventory is tests/sim's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
import trio.testing

from basics.request_states import POISON_STRIKES, State
from coordinator.actor import open_supervisor
from coordinator.journal.journal import GroupCommit
from coordinator.journal.records import LedgerChanged, Record, RequestEnded, WorkerJoined
from coordinator.journal.state import replay
from coordinator.memory.changes import AddWorker
from coordinator.scheduler.scheduler import Scheduler
from coordinator.state.events import Ending, WorkerPort
from coordinator.tokens.token_log import TokenLog
from coordinator.turn.recovery import expect_workers
from protocol import messages
from protocol.arrays import pack_int32
from protocol.errors import ConfigError, Unavailable, WrongState
from protocol.inventory import InventoryRow, pack_rows
from protocol.messages import Admit, GroupMember
from protocol.settings import CoordinatorSettings
from tests.support.fakes.fake_cluster import FakePort
from tests.support.fakes.fake_worker import FakePool, token_of
from tests.support.fakes.journal import FakeStore
from tests.support.progress import RequestEntry as EntryOf
from tests.support.progress import progress
from tests.support.scheduler_rig import SETTINGS, FakeLink, FakeListener, SchedulerRig

HOST_PAGES = 64


class FakeLinks:
    """Takes the expected workers; none of them connects."""

    def __init__(self) -> None:
        self.expected: dict[tuple[str, int], bool] = {}
        self.ports: dict[tuple[str, int], FakePort] = {}

    def expect(self, joined: WorkerJoined, is_live: bool) -> WorkerPort:
        key = joined.worker, joined.epoch
        self.expected[key], self.ports[key] = is_live, FakePort()
        return self.ports[key]


class RecoveredListener(FakeListener):
    def recovered(self, ending: Ending) -> None:
        self.endings[ending.request_id] = ending


class Life(SchedulerRig):
    """One life, over what the lives before have committed."""

    @classmethod
    @asynccontextmanager
    async def over(
        cls, groups: Sequence[Sequence[Record]] = (), settings: CoordinatorSettings = SETTINGS
    ) -> AsyncIterator[Life]:
        store = FakeStore(groups)
        async with open_supervisor() as supervisor:
            life = cls.__new__(cls)
            SchedulerRig.__init__(life, supervisor, 1, HOST_PAGES, settings)
            life.scheduler.close()
            life.store, life.links_of_before = store, FakeLinks()
            life.token_log = TokenLog(SETTINGS.live_requests_max + SETTINGS.ended_keep_max, 1 << 18, journalled=True)
            life.listener = RecoveredListener(life.token_log)
            journal_state = replay(store.records, life.token_log)
            journal = GroupCommit(store, journal_state, life.token_log, on_tokens=lambda: None)
            life.scheduler = Scheduler(
                settings,
                token_log=life.token_log,
                listener=life.listener,
                journal=journal,
                wall_offset_s=1e9,
            )
            life.scheduler.recover(expect_workers(journal_state, life.links_of_before.expect))
            supervisor.start(journal)
            supervisor.start(life.scheduler)
            await life.settle()
            yield life

    store: FakeStore
    links_of_before: FakeLinks

    async def settle(self) -> None:
        """Until every actor has nothing left to do, and all is committed."""
        for _ in range(5):
            await trio.testing.wait_all_tasks_blocked()
            await self.scheduler._journal.append(()).wait()

    def states(self) -> dict[str, str]:
        return {row.request_id: row.state for row in self.scheduler.request_rows(100)}


async def run_until(life: Life, request_id: str, *states: str) -> None:
    await life.run_until(request_id, *states)


async def test_queued_requests_keep_their_order(autojump_clock: trio.testing.MockClock) -> None:
    async with Life.over() as life:
        await life.add_worker("w0", seats=1)
        await life.submit("running!", max_tokens=200)
        await life.submit("low", priority=-1)
        await life.submit("high", priority=1)
        await life.settle()
        groups = life.store.groups
    async with Life.over(groups) as life:
        assert life.states() == {"running!": "PREFILLING", "low": "QUEUED", "high": "QUEUED"}
        assert [row.request_id for row in life.scheduler.request_rows(9)] == ["high", "running!", "low"]
        assert life.links_of_before.expected == {("w0", 1): True}
        history = life.scheduler.describe("low")[1]
        assert [line.event for line in history] == ["submitted", "recovered"]
        assert history[-1].reason == "the coordinator restarted; 0 tokens in the journal"
        line = life.scheduler.describe("running!")[1][-1]
        assert line.reason == "the coordinator restarted; 0 tokens in the journal; on w0, which is awaited"
        life.check()


async def test_process_of_a_worker_is_written_with_its_budgets(autojump_clock: trio.testing.MockClock) -> None:
    """I2: a coordinator that dies between two commits would leave memory whose holder can never be proved gone."""
    async with Life.over() as life:
        link = FakeLink(life, "w0", "n0", 1, 1)
        member = GroupMember("g0", 1, 2, 7)
        await life.scheduler.worker_up(msgspec.structs.replace(link.hello, member=member), link, (4711, 5, "boot"))
        await life.settle()
        (group,) = [group for group in life.store.groups if any(isinstance(it, WorkerJoined) for it in group)]
    assert any(isinstance(it, LedgerChanged) and isinstance(it.changes[0], AddWorker) for it in group)
    joined = [(it.process, it.started, it.boot, it.member) for it in group if isinstance(it, WorkerJoined)]
    assert joined == [(4711, 5, "boot", member)]


async def test_requests_hear_their_workers_while_a_turn_waits_for_the_disk(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """I4, I5: no request is admitted and no end is told meanwhile."""
    async with Life.over() as life:
        await life.add_worker("w0")
        await life.submit("ends!", max_tokens=20)
        await run_until(life, "ends!", "RUNNING")
        link = life.links["w0"]
        life.store.commit_s = 20.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(life.submit, "waits!")
            await trio.sleep(1.0)
            assert not life.scheduler._awaited.done
            while life.scheduler._requests.live["ends!"].state is not State.FINISHED:
                link.round()
                await trio.sleep(0.1)
            assert [row.state for row in life.scheduler.request_rows(9)] == ["FINISHED", "QUEUED"]
            assert (list(link.downlink), life.listener.endings) == ([], {})
            await trio.sleep(20.0)
            life.store.commit_s = 0.0
            await life.settle()
        assert list(life.listener.endings) == ["ends!"]
        assert [command.request_id for command in link.downlink if isinstance(command, Admit)] == ["waits!"]
        life.check()


def held_to(grammar: str, request_id: str = "held") -> messages.Submit:
    return messages.Submit(1, pack_int32(range(40)), messages.Sampling(20, grammar=grammar), request_id)


async def test_lone_request_is_accepted_and_placed_in_one_commit(autojump_clock: trio.testing.MockClock) -> None:
    """Trio draws which of two tasks runs first: some of 20 requests would be accepted in a commit of their own."""
    names: list[set[str]] = []
    for number in range(20):
        async with Life.over() as life:
            await life.add_worker("w0")
            await life.settle()
            await trio.sleep(1.0)  # the journal waits for news, not for its interval
            await life.submit(f"r{number}")
            await life.settle()
            names += ({type(record).__name__ for record in group} for group in life.store.groups)
    placed = [group for group in names if "RequestPlaced" in group]
    assert len(placed) == 20
    assert all("RequestAccepted" in group for group in placed)


async def test_limit_of_drafts_is_that_of_the_submission_after_a_restart(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with Life.over() as life:
        await life.add_worker("w0", seats=1)
        await life.submit("running!", max_tokens=200)
        submit = msgspec.structs.replace(held_to("", "limited"), draft_tokens=1)
        await life.scheduler.submit(submit, "me")
        await life.settle()
        groups = life.store.groups
    async with Life.over(groups) as life:
        link = await life.add_worker("w1", seats=4)
        await life.settle()
        admits = [it for it in link.downlink if isinstance(it, messages.Admit)]
        assert [it.draft_tokens for it in admits if it.request_id == "limited"] == [1]
        assert {it.draft_tokens for it in admits if it.request_id != "limited"} <= {messages.DRAFT_TOKENS_MAX}


async def test_grammar_is_kept_until_its_request_ends(autojump_clock: trio.testing.MockClock) -> None:
    """Through a restart. Of an ended request its name is left, by which a repeated submission is known."""
    grammar = 'start: (%json {"type": "object"})\n'
    async with Life.over() as life:
        await life.add_worker("w0", seats=1)
        await life.submit("running!", max_tokens=200)
        index = (await life.scheduler.submit(held_to(grammar), "me")).request_index
        await life.settle()
        groups = life.store.groups
    async with Life.over(groups) as life:
        record, live = life.scheduler._journal.state.requests[index], life.scheduler._requests.live["held"]
        assert record is live
        assert live.grammar == live.sampling.grammar == grammar
        link = await life.add_worker("w1")
        await life.settle()
        asked = [it.sampling for it in link.downlink if isinstance(it, messages.Admit) and it.request_id == "held"]
        assert asked == [held_to(grammar).sampling]
        await run_until(life, "held", "FINISHED")
        ended = life.scheduler._requests.ended["held"]
        assert life.scheduler._journal.state.requests[index] is ended
        assert ended.grammar == ""
        assert grammar not in str(ended.facts)
        groups = life.store.groups
    async with Life.over(groups) as life:
        ended = life.scheduler._requests.ended["held"]
        assert life.scheduler._journal.state.requests[index] is ended
        assert ended.grammar == ""
        assert life.scheduler.describe("held")[1][0].reason == "by me, output held to a JSON schema (34 characters)"
        assert (await life.scheduler.submit(held_to(grammar), "me")).request_index == index
        for other in ("", grammar.replace("object", "array")):
            with pytest.raises(WrongState):
                await life.scheduler.submit(held_to(other), "me")
        life.check()


async def test_answered_decisions_are_in_force(autojump_clock: trio.testing.MockClock) -> None:
    async with Life.over() as life:
        await life.add_worker("w0", seats=2)
        await life.submit("kept!", max_tokens=200)
        await run_until(life, "kept!", "RUNNING")
        for _ in range(3):
            life.round()
            await life.settle()
        await life.scheduler.retract(("kept!",), "me", keep=True, hold=True)
        await run_until(life, "kept!", "RETRACTED")
        before = life.tokens("kept!")
        await life.submit("aborted!", max_tokens=200)
        await run_until(life, "aborted!", "RUNNING")
        await life.scheduler.abort(("aborted!",), "me")  # its Withdraw never arrives
        await life.settle()
        groups = life.store.groups
    async with Life.over(groups) as life:
        assert life.states() == {"kept!": "RETRACTED", "aborted!": "RELEASING"}
        row = life.scheduler.describe("kept!")[0]
        assert row.held
        assert row.durable_tokens >= 100
        assert life.tokens("kept!") == before
        assert not life.links_of_before.ports["w0", 1].downlink, "it is said again when its worker is there"
        life.check()


async def test_end_of_an_awaited_worker_frees_its_requests(autojump_clock: trio.testing.MockClock) -> None:
    async with Life.over() as life:
        await life.add_worker("w0", seats=2)
        await life.submit("r!", max_tokens=200)
        await run_until(life, "r!", "RUNNING")
        for _ in range(4):
            life.round()
            await life.settle()
        groups, tokens = life.store.groups, life.tokens("r!")
    async with Life.over(groups) as life:
        life.scheduler.worker_down("w0", 1, True)
        await life.settle()
        assert life.states() == {"r!": "RETRACTED"}, "with its durable rows"
        assert life.tokens("r!") == tokens
        life.check()
        groups = life.store.groups
    async with Life.over(groups) as life:
        assert life.states() == {"r!": "RETRACTED"}
        assert life.links_of_before.expected == {}
        life.check()


async def test_pages_of_a_lost_epoch_stay_quarantined(autojump_clock: trio.testing.MockClock) -> None:
    """I2: until its process is proved gone."""
    async with Life.over() as life:
        await life.add_worker("w0", seats=2)
        await life.submit("r!", max_tokens=200)
        await run_until(life, "r!", "RUNNING")
        life.lose_worker("w0", proved=False)
        await life.settle()
        groups = life.store.groups
    async with Life.over(groups) as life:
        assert life.links_of_before.expected == {("w0", 1): False}
        (pool,) = life.scheduler.pool_rows()
        assert pool.quarantined + pool.shared > 0
        life.scheduler.worker_exited("w0", 1)
        await life.settle()
        (pool,) = life.scheduler.pool_rows()
        assert (pool.quarantined, pool.shared) == (0, 0)
        life.check()


async def test_ended_requests_are_served_until_acknowledged(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with Life.over() as life:
        await life.add_worker("w0", seats=2)
        await life.submit("done")
        await run_until(life, "done", "FINISHED")
        await life.settle()
        groups, tokens = life.store.groups, life.tokens("done")
        (ending,) = life.listener.endings.values()
    async with Life.over(groups) as life:
        # counts of drafts are not journalled
        assert life.listener.endings == {"done": msgspec.structs.replace(ending, drafted_tokens=0, accepted_tokens=0)}
        assert life.tokens("done") == tokens
        await life.submit("done")  # the same one
        with pytest.raises(WrongState, match="another request"):
            await life.submit("done", prompt=99)
        await life.submit("next!", max_tokens=50)
        with pytest.raises(WrongState, match="has not ended"):
            await life.scheduler.acknowledge(("done", "next!"), "me")
        assert await life.scheduler.acknowledge(("done", "unheard"), "me") == ("done: forgotten", "unheard: forgotten")
        assert life.states() == {"next!": "QUEUED"}
        groups = life.store.groups
    async with Life.over(groups) as life:
        assert life.states() == {"next!": "QUEUED"}
        life.check()


@pytest.mark.parametrize(
    ("before", "after", "reused"),
    [
        ("own", "own", 64),
        ("all", "all", 64),
        ("off", "own", 0),
        ("own", "off", 0),
        ("all", "own", 0),
        ("own", "all", 0),
    ],
)
async def test_rows_of_requests_that_live_across_a_restart_are_cached_when_they_leave_their_worker(
    autojump_clock: trio.testing.MockClock, before: str, after: str, reused: int
) -> None:
    """Under the scope that they had: another mode would reuse rows for others than were asked."""
    prompt = pack_int32(range(100))

    async def submit(life: Life, request_id: str, user: str = "ann", tenant: str = "shop", salt: str = "salt") -> None:
        submit = messages.Submit(1, prompt, messages.Sampling(50), request_id, tenant=tenant, cache_salt=salt)
        await life.scheduler.submit(submit, "test", user)

    settings = {mode: msgspec.structs.replace(SETTINGS, prefix_reuse=mode) for mode in (before, after)}
    async with Life.over(settings=settings[before]) as life:
        await life.add_worker("w0", seats=6)
        await submit(life, "r!")
        await run_until(life, "r!", "RUNNING")
        for _ in range(2):
            life.round()
            await life.settle()
        groups, pools = life.store.groups, life.pools
    async with Life.over(groups, settings[after]) as life:
        assert life.scheduler.pool_rows()[0].cached == 0
        life.scheduler.worker_down("w0", 1, True)
        await life.settle()
        await life.scheduler.abort(("r!",), "me")
        await life.settle()
        life.epochs, life.pools = 1, pools
        link = await life.add_worker("w0", seats=6)
        others = {"salted": {"salt": "another"}, "other": {"user": "bob"}, "local": {"user": "", "tenant": ""}}
        for name, about in {"same": {}, **others}.items():
            await submit(life, name, **about)
        await life.settle()
        admits = {it.request_id: it.prefix_tokens for it in link.downlink if isinstance(it, messages.Admit)}
        of_all = reused if after == "all" else 0
        assert admits == {"same": reused, "salted": 0, "other": of_all, "local": of_all}
        life.check()


async def test_rows_of_a_recovered_placement_are_cached_once_its_worker_says_that_they_are_durable(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Its prompt may go through decode steps, which begin before its rows are there."""
    settings = msgspec.structs.replace(SETTINGS, prefix_reuse="own")
    async with Life.over(settings=settings) as life:
        link = await life.add_worker("w0")
        await life.submit("r!", prompt=150)
        await life.settle()
        groups = life.store.groups
    async with Life.over(groups, settings) as life:
        entry = life.scheduler._placement_table.entries[0]
        held = life.scheduler._ledgers["n0"].held(entry.placement)
        row = InventoryRow(entry.placement, held.host_pages, held.hot_chunks, is_staged=True)
        await life.scheduler.worker_back(msgspec.structs.replace(link.hello, inventory=pack_rows((row,))))
        life.scheduler.on_event("w0", 1, messages.Started(entry.placement))
        await life.settle()
        index = life.scheduler._prefix_reuse.by_node["n0"]
        assert (life.states(), len(index)) == ({"r!": "RUNNING"}, 0)
        life.token_log.bind(0, 1)
        life.token_log.append(progress(EntryOf(0, entry.placement, 0, [token_of("r!", it) for it in range(2)], 151)), 1)
        life.scheduler.worker_down("w0", 1, True)
        await life.settle()
        assert len(index) == 2
        life.check()


@pytest.mark.parametrize("died", [False, True])
async def test_what_a_dead_worker_may_have_spoiled_is_not_cached_after_a_restart(
    autojump_clock: trio.testing.MockClock, died: bool
) -> None:
    settings = msgspec.structs.replace(SETTINGS, prefix_reuse="own")
    async with Life.over(settings=settings) as life:
        await life.add_worker("w0")
        await life.submit("r!", prompt=150)
        await run_until(life, "r!", "RUNNING")
        if died:
            life.scheduler.worker_down("w0", 1, True, died=True)
            await life.settle()
        groups = life.store.groups
    async with Life.over(groups, settings) as life:
        await life.settle()
        (entry,) = life.scheduler._placement_table.entries.values()
        assert (entry.chain is None) == died


async def test_numbers_are_never_reused(autojump_clock: trio.testing.MockClock) -> None:
    async with Life.over() as life:
        link = await life.add_worker("w0", seats=2)
        await life.submit("a")
        await run_until(life, "a", "RUNNING")
        first = set(link.worker.runs)
        groups, pools = life.store.groups, life.pools
    async with Life.over(groups) as life:
        life.scheduler.worker_down("w0", 1, True)
        life.epochs, life.pools = 1, pools
        again: FakeLink = await life.add_worker("w0", seats=2)
        await life.submit("b")
        for _ in range(3):
            life.round()
            await life.settle()
        assert again.worker.runs
        assert not first & set(again.worker.runs)


async def test_stop_leaves_unfinished_requests_to_the_successor(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="hisparse")
    async with Life.over() as life:
        await life.add_worker("w0", seats=1)
        for name in ("a!", "b!"):
            await life.submit(name, max_tokens=200)
        await run_until(life, "a!", "RUNNING")
        await life.scheduler.retract(("a!",), "me", keep=True, hold=True)
        await run_until(life, "b!", "RUNNING")
        assert await life.scheduler.stop(30.0, "me") == (
            "stopping, at most 30 s for 2 requests (1 held) to finish; what has not then resumes at the next start",
        )
        assert await life.scheduler.stop(0.0, "me") == (
            "stopping at once, 2 unfinished requests (1 held) resume at the next start",
        )
        with trio.fail_after(5):
            await life.scheduler.stopped.wait()
        assert "unfinished requests resume at the next start" in caplog.messages
        assert life.listener.endings == {}
        groups = life.store.groups
    async with Life.over(groups) as life:
        assert sorted(life.states()) == ["a!", "b!"]


async def test_new_work_is_refused_while_the_journal_fails(autojump_clock: trio.testing.MockClock) -> None:
    async with Life.over() as life:
        await life.add_worker("w0", seats=2)
        life.store.error = "disk full"
        with pytest.raises(Unavailable, match="has not written it"):
            await life.submit("unlucky")  # on its way when the disk filled up
        with pytest.raises(Unavailable, match="disk full"):
            await life.submit("refused")
        ids = pack_int32([1, 2, 3])
        life.store.error = ""
        await trio.sleep(1.0)
        same = messages.Submit(1, ids, messages.Sampling(max_tokens=9), "taken")
        first = await life.scheduler.submit(same, "me")
        assert await life.scheduler.submit(same, "me") == first


def drained(life: Life) -> dict[str, float]:
    """Until when, in seconds since the epoch, and whether with handover (negative)."""
    workers = life.scheduler._placement_table.workers.values()
    return {it.name: (it.drain.deadline + 1e9) * (-1 if it.drain.handover else 1) for it in workers if it.drain}


async def test_drain_survives_restarts_until_undone(autojump_clock: trio.testing.MockClock) -> None:
    async with Life.over() as life:
        for name in ("w0", "w1", "w2"):
            await life.add_worker(name)
        await life.scheduler.drain(("w0",), "me", handover=True, deadline_s=50.0)
        await life.scheduler.drain(("w1", "w2"), "me", handover=False, deadline_s=70.0)
        await life.scheduler.undrain(("w2",), "me")
        before, groups = drained(life), life.store.groups
        assert before.keys() == {"w0", "w1"}
    async with Life.over(groups) as life:
        assert drained(life) == pytest.approx(before)
        assert all(row.state == "disconnected" for row in life.scheduler.worker_rows()), "no worker has connected yet"
        life.store.wants_summary = True
        life.scheduler._journal.summarize_if_long()
        life.store.wants_summary = False
        await life.scheduler.undrain(("w1",), "me")
        groups = life.store.groups
    async with Life.over(groups) as life:
        assert drained(life) == pytest.approx({"w0": before["w0"]})


async def test_drain_is_answered_once_durable(autojump_clock: trio.testing.MockClock) -> None:
    async with Life.over() as life:
        await life.add_worker("w0")
        life.store.error = "disk full"
        with pytest.raises(Unavailable, match="the drain was begun, but the journal has not written it"):
            await life.scheduler.drain(("w0",), "me", handover=False, deadline_s=1e3)
        assert drained(life), "in force meanwhile"
        life.store.error = ""
        await trio.sleep(1.0)
        groups = life.store.groups
    async with Life.over(groups) as life:
        assert drained(life)


async def test_drain_applies_to_a_process_not_an_epoch(autojump_clock: trio.testing.MockClock) -> None:
    """Declared down and begun anew, a worker is drained, also where an epoch between was not written; started anew,
    it is not. A worker that does not say its first epoch is the same in the next one alone."""
    groups: list[list[Record]] = []
    for epoch, first, is_drained in ((2, 0, True), (3, 0, False), (3, 1, True), (500, 500, False)):
        async with Life.over() as life:
            await life.add_worker("w0")
            await life.scheduler.drain(("w0",), "me", handover=False, deadline_s=50.0)
            life.scheduler.worker_down("w0", 1, False)
            await life.settle()
            groups = life.store.groups
        async with Life.over(groups) as life:
            life.epochs, life.first_epoch = epoch - 1, first
            await life.add_worker("w0")
            await life.settle()
            assert bool(drained(life)) == is_drained
            groups = life.store.groups
        async with Life.over(groups) as life:
            assert bool(drained(life)) == is_drained, "and so for every later life"


async def test_strikes_are_counted_across_restarts(autojump_clock: trio.testing.MockClock) -> None:
    """I5: the worker dies of the request, over and over, and the coordinator dies in between each time."""
    groups: list[list[Record]] = []
    pools: dict[str, FakePool] = {}
    for strikes in range(1, POISON_STRIKES + 1):
        async with Life.over(groups) as life:
            life.epochs, life.pools = strikes, pools
            link = await life.add_worker("w0")
            if strikes == 1:
                await life.submit("poison!", max_tokens=200)
            else:
                said = "1 strike" if strikes == 2 else f"{strikes - 1} strikes"
                history = life.scheduler.describe("poison!")[1]
                assert any(f", {said}, the last when w0 died" in line.reason for line in history)
            await life.settle()
            life.round()
            await life.settle()
            assert link.worker.runs, "it is tried again"
            life.scheduler.worker_down("w0", link.worker.epoch, True, died=True)
            await life.settle()
            groups = life.store.groups
            if strikes == 3:
                life.store.wants_summary = True
                life.scheduler._journal.summarize_if_long()
                life.store.wants_summary = False
                await life.settle()
    async with Life.over(groups) as life:
        row = life.scheduler.describe("poison!")[0]
        assert row.state == "FAILED"
        assert f"its worker died {POISON_STRIKES} times" in row.reason
        assert life.listener.endings["poison!"].reason == row.reason


async def test_unwritten_poison_verdict_is_given_again(autojump_clock: trio.testing.MockClock) -> None:
    """The strike is in the journal and the end is not."""
    async with Life.over() as life:
        link = await life.add_worker("w0")
        await life.submit("poison!", max_tokens=200)
        await life.settle()
        entry = life.scheduler._placement_table.entries[0]
        entry.strikes, entry.mark = POISON_STRIKES - 1, 200
        life.scheduler._placement_table.poison_detector.recover(entry)
        life.scheduler.worker_down("w0", link.worker.epoch, True, died=True)
        await life.settle()
        records = [record for group in life.store.groups for record in group]
    ended = next(at for at, record in enumerate(records) if isinstance(record, RequestEnded))
    async with Life.over([records[:ended]]) as life:
        assert life.states() == {"poison!": "FAILED"}
        assert "the last was w0" in life.scheduler.describe("poison!")[0].reason


# ---------------------------------------------------------------- groups


def rank(number: int) -> GroupMember:
    return GroupMember("g0", number, 2, 7)


async def back(life: Life, link: FakeLink, member: GroupMember | None) -> None:
    """The idle worker of an earlier life says hello."""
    inventory = pack_rows(())
    await life.scheduler.worker_back(msgspec.structs.replace(link.hello, member=member, inventory=inventory))


async def test_group_is_complete_again_once_all_ranks_are_back(autojump_clock: trio.testing.MockClock) -> None:
    async with Life.over() as life:
        links = [await life.add_worker(f"w{number}", member=rank(number)) for number in range(2)]
        await life.settle()
        groups = life.store.groups
    async with Life.over(groups) as life:
        rows = {row.worker: row for row in life.scheduler.worker_rows()}
        assert {(row.group, row.rank, row.ranks_missing) for row in rows.values()} == {
            ("g0", 0, (0, 1)),
            ("g0", 1, (0, 1)),
        }
        await life.submit("r!", max_tokens=20)
        await back(life, links[0], rank(0))
        await life.settle()
        row = life.scheduler.describe("r!")[0]
        assert row.state == "QUEUED"
        assert row.reason == "no worker takes requests: 1 awaited after a restart (w1), group g0 waits for rank 1"
        await back(life, links[1], rank(1))
        await life.settle()
        assert life.states() == {"r!": "PREFILLING"}


@pytest.mark.refuses("WrongState epoch={}: this epoch is over")
async def test_rank_is_not_adopted_as_another(autojump_clock: trio.testing.MockClock) -> None:
    async with Life.over() as life:
        link = await life.add_worker("w0", member=rank(0))
        await life.settle()
        groups = life.store.groups
    async with Life.over(groups) as life:
        with pytest.raises(WrongState, match="this epoch is over"):
            await back(life, link, rank(1))
        with pytest.raises(WrongState, match="this epoch is over"):
            await back(life, link, None)


async def test_stale_rank_is_known_after_a_restart(autojump_clock: trio.testing.MockClock) -> None:
    async with Life.over() as life:
        await life.add_worker("w0", member=rank(0))
        await life.settle()
        groups = life.store.groups
    async with Life.over(groups) as life:
        with pytest.raises(ConfigError, match="incarnation 7 of group g0 has replaced it"):
            await life.add_worker("w1", member=msgspec.structs.replace(rank(1), incarnation=6))


async def test_deaths_of_one_group_on_both_sides_of_a_restart_are_one_strike(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with Life.over() as life:
        for number in range(2):
            await life.add_worker(f"w{number}", member=rank(number))
        for request_id in ("a!", "b!"):
            await life.submit(request_id, max_tokens=200)
        await life.settle()
        life.scheduler.worker_down("w0", 1, True, died=True)
        await life.settle()
        assert [entry.strikes for entry in life.scheduler._placement_table.entries.values()] == [1, 1]
        groups = life.store.groups
    async with Life.over(groups) as life:
        life.scheduler.worker_down("w1", 2, True, died=True)
        await life.settle()
        assert [entry.strikes for entry in life.scheduler._placement_table.entries.values()] == [1, 1]
